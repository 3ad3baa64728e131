"""Near-copies of the family in a checkpoint: whose network it is, by names and shapes alone.

Their weights are not those of :class:`dpa.nn.ConditionalUnet1D`: the network's own class loads
them, and ``dpa.accelerate`` takes that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dpa.nn.family import arguments_from_shapes, differences, template
from dpa.nn.network import NotInFamily
from dpa.nn.parts import ATTENTION, ENCODER, FILM, reduce_to
from dpa.nn.variants import LEROBOT, ORIGINAL, VARIANTS, Variant

CONSISTENCY = next(v for v in VARIANTS if v.policies == "Consistency Policy")
_FILM_LAYER = re.compile(r"\.cond_encoder\.(\w+)\.weight$")
# What DP3 puts in front of FiLM, by the layers of its encoders, and as which the widths are read.
_DP3 = {
    frozenset({"1", "3"}): "mlp_film",
    frozenset({"query_proj", "key_proj", "value_proj"}): "cross_attention",
}
_KEYS = (r"\.cond_encoder\.key_proj\b", ".cond_encoder.1")


@dataclass(frozen=True)
class NearCopy:
    """A network that differs from the original.

    Attributes:
        policies: who has it.
        arguments: those of :class:`dpa.nn.ConditionalUnet1D` for a network of its sizes.
        parameters: how many values its weights have.
        dtype: of its weights, the first of several.
        by_pytorch: the parts that PyTorch runs when it is accelerated.
        in_family: whether dpa runs the rest of it, rather than the loop alone.
        source: where in the file the weights lay.
        others: the further U-Nets in the file.

    """

    policies: str
    arguments: dict[str, Any]
    parameters: int
    dtype: str
    by_pytorch: tuple[str, ...] = ()
    in_family: bool = True
    source: str = ""
    others: tuple[str, ...] = ()


def near_copy(weights: Mapping[str, Tensor], n_groups: int = 8) -> NearCopy | None:
    """Return what a state dict tells of a near-copy; None where it is that of none.

    Args:
        weights: the network's alone, by its own names.
        n_groups: of the GroupNorms, which no shape shows.

    """
    variant = next(v for v in VARIANTS if v is ORIGINAL or v.fits(list(weights)))
    layers = frozenset(match[1] for name in weights if (match := _FILM_LAYER.search(name)))
    condition = _DP3.get(layers, "")
    if condition == "cross_attention":
        variant = replace(variant, names=(*variant.names, _KEYS))
    elif variant is LEROBOT or (variant is ORIGINAL and not condition):
        return None
    found = _sizes(weights, variant, n_groups)
    if found is None:
        return None
    arguments, parts = found
    whose = "DP3" if variant.policies == ORIGINAL.policies else variant.policies
    return NearCopy(
        f"{whose}, with {condition}" if condition else whose,
        arguments,
        *_amount(weights),
        parts,
        condition != "cross_attention",
    )


def _sizes(
    weights: Mapping[str, Tensor], variant: Variant, n_groups: int
) -> tuple[dict[str, Any], tuple[str, ...]] | None:
    """Return arguments and PyTorch's parts, as ``dpa.nn.family.recognise`` finds them."""
    live = {variant.original_name(name): value for name, value in weights.items()}
    others = (*variant.unused, *variant.extra)
    live = {name: value for name, value in live.items() if not name.startswith(others)}
    try:
        arguments = arguments_from_shapes(live, n_groups, other_parts=True)
        twin = template(arguments)
    except NotInFamily:
        return None
    reduce_to(twin, variant.blocks, 1e-5)
    expected = dict(twin.named_parameters())
    kinds = {
        "the timestep's embedding": rf"{ENCODER}\.",
        "the layers that make FiLM's parameters": rf".*{re.escape(FILM)}\.",
        "attention": rf".*{re.escape(ATTENTION)}\.",
    }
    parts = ["the conditioning"] * (variant.condition is not None)
    for words, pattern in kinds.items():
        theirs, ours = (
            {n: tuple(v.shape) for n, v in named.items() if re.match(pattern, n)}
            for named in (live, expected)
        )
        if theirs != ours or (words.endswith("embedding") and variant.embedding != (ENCODER,)):
            parts.append(words)
            live = {name: value for name, value in live.items() if name not in theirs}
            expected = {name: value for name, value in expected.items() if name not in ours}
    return None if differences(live, expected) else (arguments, tuple(parts))


def of_consistency_policy(weights: Mapping[str, Tensor], plain: dict[str, Any]) -> NearCopy:
    """Return the student of Consistency Policy that has these weights, ``plain`` otherwise.

    The timestep to stop at has the timestep's embedding, in front of the condition.
    """
    rest = (plain["global_cond_dim"] or 0) - plain["diffusion_step_embed_dim"]
    arguments = plain | {"global_cond_dim": rest or None}
    return NearCopy(CONSISTENCY.policies, arguments, *_amount(weights), ("the conditioning",))


def is_of_consistency_policy(
    prefix: str,
    weights: Mapping[str, Tensor],
    plain: dict[str, Any],
    settings: Iterable[tuple[str, Any]],
) -> bool | None:
    """Whether a U-Net is Consistency Policy's student, whose names are the original's.

    Certain are a width that leaves no place for a second timestep, the teacher in the same state
    dict, and the classes that a configuration names. None where nothing of it tells.

    Args:
        prefix: what the names of its parameters begin with.
        weights: the state dict that it lies in.
        plain: its arguments, were it the original's.
        settings: names and values in the file's configuration, at any depth.

    """
    step, given = plain["diffusion_step_embed_dim"], plain["global_cond_dim"] or 0
    if prefix.endswith("teacher.") or given < step:
        return False
    film = weights.get("teacher.down_modules.0.0.cond_encoder.1.weight")
    steps = weights.get("teacher.diffusion_step_encoder.3.weight")
    if film is not None and steps is not None and film.dim() == 2:
        return bool(given - step == film.shape[1] - steps.shape[0])
    settings = list(settings)
    classes = [str(value) for name, value in settings if name == "_target_"]
    if any(name.startswith("consistency_policy.student.") for name in classes):
        return True
    lerobots = any(LEROBOT.fits([name]) for name in weights if name.startswith(prefix))
    sized = ("global_cond_dim", given) in settings
    named = any(name in ("algo_name", "type") for name, _ in settings)
    return False if classes or lerobots or sized or named else None


def _amount(weights: Mapping[str, Tensor]) -> tuple[int, str]:
    first = next(iter(weights.values()))
    return sum(v.numel() for v in weights.values()), str(first.dtype).removeprefix("torch.")
