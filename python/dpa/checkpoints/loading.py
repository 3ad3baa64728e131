"""Read the U-Net from a checkpoint: the original's, LeRobot's, robomimic's, NoMaD's.

What is in a file decides: the names of its tensors, of where they lie, and its configuration.
"""

from __future__ import annotations

import functools
import json
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpa.checkpoints.files import CheckpointError, read_config, read_file
from dpa.checkpoints.near_copies import (
    CONSISTENCY,
    NearCopy,
    is_of_consistency_policy,
    near_copy,
    of_consistency_policy,
)
from dpa.library.checks import require
from dpa.nn.family import (
    NotInFamily,
    arguments_from_shapes,
    differences,
    original_name,
    prefixes,
    switched_off,
    template,
)
from dpa.nn.network import without_film
from dpa.nn.unet1d import ConditionalUnet1D
from dpa.nn.variants import LEROBOT, ORIGINAL, VARIANTS

_DEPTH = 16  # of nested dicts
# In where weights lie, by words: averages, what are none, and what has a network's names besides.
_AVERAGED = re.compile(r"(?<![a-z])(ema|averaged?|avg|swa)(?![a-z])")
_NOT_AVERAGED = re.compile(r"(?<![a-z])(non?|not|without)[^a-z]*(ema|averaged?|avg|swa)(?![a-z])")
_NO_WEIGHTS = re.compile(r"(?<![a-z])(optimizers?|optim|exp_avg|exp_avg_sq|grads?)(?![a-z])")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


class NoUnetError(CheckpointError):
    """The file is whole, and holds no U-Net of the family."""


class NearCopyError(CheckpointError):
    """The network is a near-copy of the family's, which its own class loads."""

    def __init__(self, path: Path, found: NearCopy):
        super().__init__(f"{path}: holds a network of another class{_advice(found.policies)}")
        self.found = found


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A U-Net read from a file.

    Attributes:
        unet: in evaluation mode, on the CPU, in the file's dtype, the widest of several.
        arguments: the constructor's, read off the shapes.
        source: where in the file the weights lay, such as ``state_dicts.ema_model: model.``.
        config: the policy's configuration: LeRobot's ``config.json``, or the entries beside the
            weights, such as the ``cfg`` of diffusion_policy. May be empty.
        rest: the other tensors of the state dict that the U-Net lay in, by their names.
        others: the further U-Nets in the file, as in ``source``.
        perhaps: whose near-copy it may be as well, by names and shapes: "" or "Consistency Policy".

    """

    unet: ConditionalUnet1D
    arguments: dict[str, Any]
    source: str
    config: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Tensor] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    perhaps: str = ""


class _Found(NamedTuple):
    """A U-Net in a file: where its names lie and begin, the state dict, and the module it was."""

    where: str
    start: str
    tensors: dict[str, Tensor]
    module: nn.Module | None

    @property
    def source(self) -> str:
        return f"{self.where}: {self.start}".removeprefix(": ")


def load_checkpoint(
    path: str | Path,
    *,
    ema: bool = True,
    prefix: str | None = None,
    n_groups: int | None = None,
    trust_pickle: bool = False,
) -> Checkpoint:
    """Read a U-Net of the family from a checkpoint; its configuration follows from the shapes.

    Args:
        path: a ``.safetensors`` file with LeRobot's ``config.json`` beside it or without, a folder
            with these two, or a file of ``torch.save``.
        ema: prefer averaged weights where the file has both; False prefers the others. Which they
            are follows from the names of where they lie.
        prefix: beginning of the parameter names of the U-Net to take, where there are several.
        n_groups: of the GroupNorms, which no shape shows; None takes what a configuration in the
            file or beside it says, or 8. DP3's ``use_*_condition`` are taken from there too: FiLM
            is then constant in the blocks that are switched off.
        trust_pickle: unpickle in full, which runs whatever code the file holds.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, needs ``trust_pickle``, holds no such U-Net, two
            tensors of one name, or averages without names;
            ``NearCopyError`` where it holds a near-copy, whose own class loads it.

    """
    path = Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    config: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        config = read_config(path.with_name("config.json"))
    content = read_file(path, trust_pickle)
    found = [entry for entry in _unets(content) if prefix in (None, entry.start)]
    if not found:
        wanted = "" if prefix is None else f" under the prefix {prefix!r}"
        raise NoUnetError(f"{path}: holds no conditional U-Net of the family{wanted}")
    chosen = _choose(found, ema, content, path)
    named = config
    if not config and isinstance(content, Mapping):
        config = {n: v for n, v in content.items() if isinstance(n, str) and not _holds_weights(v)}
        named = content  # what says n_groups may have tensors beside it
    given = {} if n_groups is None else {"n_groups": n_groups}
    if chosen.module is not None:
        given = _settings_of_module(chosen.module, path) | given
    settings = _settings(named, path, given)
    groups = settings.get("n_groups", 8)
    source, start = chosen.source, chosen.start
    others = tuple(entry.source for entry in found if entry.source != source)
    weights = {n: v for n, v in chosen.tensors.items() if n.startswith(start)}
    own = {n[len(start) :]: v for n, v in weights.items()}
    if (copy := near_copy(own, groups)) is not None:
        raise NearCopyError(path, replace(copy, source=source, others=others))
    try:
        unet = unet_from_state_dict(weights, groups)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    arguments = arguments_from_shapes(unet.state_dict(), groups)
    students = is_of_consistency_policy(start, chosen.tensors, arguments, _entries(config))
    if students:
        copy = of_consistency_policy(own, arguments)
        raise NearCopyError(path, replace(copy, source=source, others=others))
    bare, scale = switched_off(settings), arguments["cond_predict_scale"]
    unet.load_state_dict(without_film(unet.state_dict(), bare, scale))
    rest = {n: v for n, v in chosen.tensors.items() if n not in weights}
    perhaps = CONSISTENCY.policies if students is None else ""
    return Checkpoint(unet, arguments, source, config, rest, others, perhaps)


def _choose(found: list[_Found], ema: bool, content: Any, path: Path) -> _Found:
    """Return the averages, or with ``ema=False`` what they are of, where there are both."""
    averaged = _averaged(found)
    if ema and True not in averaged and isinstance(content, Mapping):
        lists = any(name == "shadow_params" for name, _ in _entries(content))
        got = "averages in a list (shadow_params), which ema=False leaves out"
        require(not lists, f"{path}: averages", "have names", got, CheckpointError)
    return found[averaged.index(ema) if ema in averaged else 0]


def _averaged(found: list[_Found]) -> list[bool]:
    """Whether each U-Net's weights are averages, by the words that their places do not share."""
    places = [_CAMEL.sub("_", f"{where}.{start}".lstrip(".")).lower() for where, start, *_ in found]
    words = [place.split(".") for place in places]
    while words and all(part and part[0] == words[0][0] for part in words):
        words = [part[1:] for part in words]
    # Lightning's WeightAveraging keeps averages where weights were.
    swapped = any(place.startswith("current_model_state") for place in places)
    return [
        bool(_AVERAGED.search(_NOT_AVERAGED.sub("", ".".join(part))))
        or (swapped and place.startswith("state_dict"))
        for part, place in zip(words, places, strict=True)
    ]


def _settings_of_module(network: nn.Module, path: Path) -> dict[str, int]:
    """Return what the norms of a pickled network say; the last block's are 8 groups."""
    norms = [
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.GroupNorm) and "final_conv" not in name.split(".")
    ]
    wrong = {module.eps for module in norms} - {1e-5}
    got = ", ".join(map(str, wrong))
    require(not wrong, f"{path}: the network's norms", "have an eps of 1e-5", got, CheckpointError)
    groups = {module.num_groups for module in norms}
    return {"n_groups": groups.pop()} if len(groups) == 1 else {}


def unet_from_state_dict(state_dict: Mapping[str, Tensor], n_groups: int = 8) -> ConditionalUnet1D:
    """Build the U-Net that a state dict describes, with its weights, in evaluation mode.

    Args:
        state_dict: the U-Net's, or one of a whole policy with one U-Net under any prefix, in the
            original's names or LeRobot's.
        n_groups: of the GroupNorms, which no shape shows.

    Raises:
        CheckpointError: listing what is missing, unexpected or of the wrong shape.

    """
    weights = _renamed(state_dict)
    try:
        arguments = arguments_from_shapes(weights, n_groups)
        unet = template(arguments)
    except NotInFamily as error:
        why = f"the state dict describes no U-Net of the family{_whose(weights)}: {error}"
        raise CheckpointError(why) from None
    why = f"the state dict does not fit{_whose(weights)}"
    _refuse(why, differences(weights, unet.state_dict()))
    dtype = functools.reduce(torch.promote_types, {value.dtype for value in weights.values()})
    unet = unet.to_empty(device="cpu").to(dtype)
    unet.load_state_dict(weights)
    return unet.eval()


def _whose(names: Iterable[str]) -> str:
    """Say whose network has these names, where it is a near-copy of the original."""
    fitting = [v for v in VARIANTS if v not in (LEROBOT, ORIGINAL) and v.fits(list(names))]
    return _advice(fitting[0].policies) if fitting else ""


def _advice(policies: str) -> str:
    advice = "its own class loads it, and dpa.accelerate takes that"
    return f" (it is that of {policies}: {advice})"


def _renamed(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the U-Net's part of a state dict in the original's names."""
    names = {name.replace("_orig_mod.", ""): name for name in state_dict}
    starts = prefixes(names)
    one = len(starts) < 2
    require(one, "state_dict", "hold one U-Net", ", ".join(starts), CheckpointError)
    start = starts[0] if starts else ""
    of_unet = [
        (original_name(name[len(start) :]), state_dict[full])
        for name, full in names.items()
        if name.startswith(start) and isinstance(state_dict[full], Tensor)
    ]
    weights = _once(of_unet)
    _refuse_kinds(weights)
    return weights


def _once(named: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Refuse two tensors of one name: one of them would be lost."""
    found = dict(named)
    if len(found) < len(named):
        names = [name for name, _ in named]
        _refuse("two tensors have one name", sorted({n for n in names if names.count(n) > 1})[:5])
    return found


def _refuse_kinds(weights: Mapping[str, Tensor]) -> None:
    """Refuse tensors that a load would silently convert, and those without enough values."""
    lines = []
    for name, value in weights.items():
        floating = value.is_floating_point() and value.itemsize > 1  # not float8, which only stores
        if value.layout != torch.strided or value.is_quantized or not floating:
            lines.append(f"{name} is {value.layout}, {value.dtype}")
        elif value.is_meta or value.numel() * value.itemsize > value.untyped_storage().nbytes():
            lines.append(f"{name} of shape {tuple(value.shape)} has not that many values")
    _refuse("weights must be dense floating tensors of 16 bits or more", lines)


def _refuse(rule: str, lines: list[str]) -> None:
    if lines:
        raise CheckpointError("\n  ".join([f"{rule}:", *lines]))


def _unets(
    content: Any, where: str = "", seen: dict[int, Any] | None = None, depth: int = 0
) -> Iterator[_Found]:
    """Yield each U-Net in nested dicts, each read once."""
    seen = {} if seen is None else seen
    if id(content) in seen or depth > _DEPTH or _NO_WEIGHTS.search(where.lower()):
        return
    seen[id(content)] = content
    module = content if isinstance(content, nn.Module) else None
    if module is not None:
        content = module.state_dict()
    if not isinstance(content, Mapping):
        return
    tensors = _once(
        [
            (name.replace("_orig_mod.", ""), value)
            for name, value in _items(content)
            if isinstance(name, str) and isinstance(value, Tensor)
        ]
    )
    for start in prefixes(tensors):
        yield _Found(where, start, tensors, module and _submodule(module, start))
    for name, value in _items(content):
        if isinstance(value, (Mapping, nn.Module)):
            yield from _unets(value, f"{where}.{name}".lstrip("."), seen, depth + 1)


def _submodule(module: nn.Module, start: str) -> nn.Module:
    """Return the part of a network whose parameters have names that begin so."""
    inner = {name.replace("_orig_mod.", ""): part for name, part in module.named_modules()}
    return inner[start.removesuffix(".")]


def _holds_weights(content: Any, depth: int = 0) -> bool:
    return isinstance(content, Tensor | nn.Module) or (
        isinstance(content, dict)
        and depth < _DEPTH
        and any(_holds_weights(value, depth + 1) for value in content.values())
    )


_WANTED = ("n_groups", "use_down_condition", "use_mid_condition", "use_up_condition")


def _settings(config: Mapping[str, Any], path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return a value that no shape shows: as given, else from a configuration, at any depth."""
    found: dict[str, list[Any]] = {}
    for name, value in _entries(config):
        wanted = name in _WANTED and name not in given
        if wanted and value not in found.setdefault(name, []):
            found[name].append(value)
    groups = found.get("n_groups", [8])[0]
    check = functools.partial(require, error=CheckpointError)
    right = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    check(right, f"{path}: n_groups", "be a positive integer", repr(groups))
    for name, values in found.items():
        wrong = [repr(value) for value in values if not isinstance(value, bool)]
        right = name == "n_groups" or not wrong
        check(right, f"{path}: {name}", "be true or false", "".join(wrong[:1]))
        listed = ", ".join(map(repr, values))
        check(len(values) == 1, f"{path}: the configuration", f"have one {name}", listed)
    return {name: values[0] for name, values in found.items()} | given


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of a configuration, at any depth, each mapping's once."""
    levels: list[Any] = [config]
    seen = {id(config)}
    for level in levels:
        for name, value in _items(level):
            yield name, value
            value = _parsed(value)
            kinds = Mapping, list, tuple, Namespace, SimpleNamespace
            if not isinstance(value, kinds) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Namespace | SimpleNamespace):
                value = vars(value)
            levels.append(value if isinstance(value, Mapping) else dict(enumerate(value)))


def _items(content: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dict, or of one of omegaconf's as they are written.

    Its expressions refer to the training code, and to resolvers that only hydra registers.
    """
    return content.items_ex(resolve=False) if hasattr(content, "items_ex") else content.items()


def _parsed(value: Any) -> Any:
    """robomimic keeps its configuration as text."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
