"""The networks of the family: how their parameters are named, and how to tell one from its shapes.

diffusion_policy's ``ConditionalUnet1D`` names the parameters; robomimic, DP3 and NoMaD kept its
names. LeRobot's ``DiffusionConditionalUnet1d`` has the same mathematics under other names::

    original                       LeRobot
    ....blocks.{0,1}.block.*       ....conv{1,2}.block.*
    {down,up}_modules.i.2.conv.*   {down,up}_modules.i.2.*

Everything in dpa uses the original's names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpa.nn.blocks1d import Conv1d, ConvTranspose1d
from dpa.nn.network import Network, NotInFamily, shapes, template
from dpa.nn.parts import ATTENTION, ENCODER, FILM, reduce_to
from dpa.nn.unet1d import ConditionalUnet1D
from dpa.nn.variants import LEROBOT, ORIGINAL, VARIANTS, Variant
from dpa.tracking import Tracker
from dpa.tracking.replacing import class_of, has_own_forward
from dpa.tracking.wrappers import acts_on_some_values

# The original's, LeRobot's, and those of the near-copies that name it otherwise.
_FIRST_CONV = re.compile(
    r"(?:down_modules|downs)\.0\.0\.(?:(?:blocks\.0|conv1)\.block|conv1)\.0\.weight$"
)
_PARTS = (ENCODER, "down_modules", "mid_modules", "up_modules", "final_conv")
_LAYERS = (nn.Conv1d, nn.ConvTranspose1d, nn.Linear, nn.GroupNorm, nn.Mish, nn.ReLU)
# What a sequence may have besides: in evaluation these change no values.
_INERT = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_RESHAPING = ("Rearrange",)  # of einops
# What a network of somebody else's has where ours has its own convolutions.
_PLAIN = {Conv1d: nn.Conv1d, ConvTranspose1d: nn.ConvTranspose1d}
# DP3's switches, and which residual blocks each of them conditions.
_SWITCHES = {
    "use_down_condition": "down_modules.",
    "use_mid_condition": "mid_modules.",
    "use_up_condition": "up_modules.",
}


def original_name(name: str) -> str:
    """Return the original's name of a parameter that the original or LeRobot names ``name``."""
    return LEROBOT.original_name(name.replace("_orig_mod.", ""))


def lerobot_parameters(unet: nn.Module) -> list[nn.Parameter]:
    """Return a network's parameters in the order of LeRobot's, for optimizer states of LeRobot.

    Those find their parameters by position, and :class:`dpa.nn.ConditionalUnet1D` has the order of
    diffusion_policy.
    """
    parts = {name: rank for rank, name in enumerate(_PARTS)}
    inside = {"blocks.0": 0, "cond_encoder": 1, "blocks.1": 2, "residual_conv": 3}

    def place(name: str) -> tuple[Any, ...]:
        part, _, rest = name.partition(".")
        within = re.search("|".join(map(re.escape, inside)), rest)
        block = rest[: within.start()] if within else rest
        numbers = tuple(map(int, re.findall(r"\d+", block)))
        return (parts.get(part, len(parts)), numbers, inside[within[0]] if within else 0)

    found = {original_name(name): value for name, value in unet.named_parameters()}
    return [found[name] for name in sorted(found, key=place)]


def prefixes(names: Iterable[str]) -> list[str]:
    """Return what stands before the names of each U-Net among these, in order, without repeats."""
    found = (name[: m.start()] for name in names if (m := _FIRST_CONV.search(name)))
    return list(dict.fromkeys(found))


def differences(got: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Say what is missing, unexpected or of another shape, a line each; both hold tensors."""
    lines = [f"missing: {n} {tuple(expected[n].shape)}" for n in expected if n not in got]
    lines += [f"unexpected: {n} {tuple(got[n].shape)}" for n in got if n not in expected]
    for name in expected:
        if name in got and got[name].shape != expected[name].shape:
            want, have = tuple(expected[name].shape), tuple(got[name].shape)
            lines.append(f"shape: {name} must be {want}, got {have}")
    return lines


def arguments_from_shapes(
    weights: Mapping[str, Any], n_groups: int = 8, *, other_parts: bool = False
) -> dict[str, Any]:
    """Return the arguments of :class:`dpa.nn.ConditionalUnet1D` that fit these weights.

    Args:
        weights: tensors by the original's names. A few may be missing: each argument is read off
            whichever weight shows it.
        n_groups: of the GroupNorms, which no shape shows.
        other_parts: whether embedding and FiLM may have more or fewer layers than the original's.

    Raises:
        NotInFamily: the weights show no such network, naming one that would.

    """

    def layer(part: str, pick: Callable[[Iterable[int]], int], usual: int) -> str:
        found = (re.match(rf"{part}\.(?P<layer>\d+)\.weight$", name) for name in weights)
        numbers = [int(match["layer"]) for match in found if match]
        return rf"{part}\.{pick(numbers) if other_parts and numbers else usual}"

    def size(dim: int, *patterns: str) -> int:
        for pattern in patterns:
            for name, value in weights.items():
                if re.fullmatch(pattern, name) and value.dim() > dim:
                    return int(value.shape[dim])
        raise NotInFamily(f"the weights must have a {patterns[0]}".replace("\\", ""))

    levels = [int(m[1]) for name in weights if (m := re.match(r"down_modules\.(\d+)\.", name))]
    if not levels:
        raise NotInFamily("the weights must have the original's down_modules.*")
    down_dims = [
        size(
            0,
            rf"down_modules\.{level}\.0\.blocks\.0\.block\.0\.weight",
            rf"down_modules\.{level}\.[01]\.blocks\.[01]\.block\.[01]\.(weight|bias)",
        )
        for level in range(max(levels) + 1)
    ]
    step = layer("diffusion_step_encoder", max, 3)
    step_dim = size(0, rf"{step}\.weight", rf"{step}\.bias")
    encoder = layer(r"(down|mid|up)_modules\..*cond_encoder", min, 1)
    cond_dim = size(1, rf"{encoder}\.weight") - step_dim
    film = layer(r"down_modules\.0\.[01]\.cond_encoder", max, 1) + r"\.(weight|bias)"
    arguments: dict[str, Any] = {
        "input_dim": size(0, r"final_conv\.1\.weight", r"final_conv\.1\.bias"),
        "global_cond_dim": cond_dim or None,
        "diffusion_step_embed_dim": step_dim,
        "down_dims": tuple(down_dims),
        "kernel_size": size(2, r"(down|mid|up)_modules\..*\.blocks\.[01]\.block\.0\.weight"),
        "n_groups": n_groups,
        "cond_predict_scale": size(0, film) == 2 * down_dims[0],
    }
    local = r"local_cond_encoder\.0\.blocks\.0\.block\.0\.weight"
    if any(name.startswith("local_cond_encoder.") for name in weights):
        arguments["local_cond_dim"] = size(1, local)
    return arguments


def switched_off(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the beginnings of the names of the residual blocks that DP3's switches leave bare."""
    return tuple(begin for name, begin in _SWITCHES.items() if not settings.get(name, True))


def resembles(module: nn.Module) -> bool:
    """Whether a module means to be a U-Net of the family, so that it matters why it is none."""
    if all(hasattr(module, part) for part in ("down_modules", "up_modules")):
        return True
    levels = all(hasattr(module, part) for part in ("downs", "ups"))
    return levels and _variant_of(module) is not ORIGINAL


def recognise(module: nn.Module) -> Network:
    """Recognise a conditional U-Net by its parts, shapes and layers.

    What the forward does with them cannot be seen here: compare results before relying on it.

    Raises:
        NotInFamily: with the first thing that differs.

    """
    kind, variant = type(module).__name__, _variant_of(module)
    for layer in module.modules():
        if (why := acts_on_some_values(class_of(layer), "forward")) is not None:
            raise NotInFamily(why)
    paths = {path: variant.original_name(path) for path, _ in module.named_modules()}
    layers = {paths[path]: layer for path, layer in module.named_modules()}
    tops = {path.partition(".")[0] for path in layers}
    if missing := [part for part in _PARTS if part not in tops]:
        raise NotInFamily(f"{kind} has no {', '.join(missing)}")
    slots = {}
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                key = f"{path}.{name}".lstrip(".").replace("_orig_mod.", "")
                slots[variant.original_name(key)] = (owner, name)
    others = (*variant.unused, *variant.extra)
    live = {k: owner._parameters[n] for k, (owner, n) in slots.items() if not k.startswith(others)}
    down = [layer for path, layer in layers.items() if path.startswith("down_modules.")]
    norms = [m for m in down if isinstance(m, nn.GroupNorm) or type(m).__name__ in variant.norms]
    if not norms:
        raise NotInFamily(f"{kind} has no GroupNorm in down_modules")
    arguments = arguments_from_shapes(live, norms[0].num_groups, other_parts=True)
    twin = template(arguments)
    first = layers.get("down_modules.0.0.blocks.0.block.2")
    activation = nn.ReLU if type(first) is nn.ReLU else nn.Mish
    reduce_to(twin, variant.blocks, norms[0].eps, activation)
    parts = _parts(module, variant, layers, live, twin)
    within = tuple(f"{path}." for path in parts)
    live = {key: value for key, value in live.items() if not key.startswith(within)}
    ours = {k: v for k, v in twin.named_parameters() if not k.startswith(within)}
    if lines := differences(live, ours):
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        raise NotInFamily(f"{kind}'s parameters differ: {lines[0]}{more}")
    theirs = {original: path for path, original in paths.items()}
    for path, expected in twin.named_modules():
        if not path.startswith(within):
            _check_layer(kind, theirs.get(path, path), layers.get(path), expected, variant)
    known = {path for path, _ in twin.named_modules(remove_duplicate=False)}
    for path, layer in module.named_modules():
        if path and not f"{paths[path]}.".startswith((*within, *others)):
            inner = layer.named_children()
            more = [m for n, m in inner if variant.original_name(f"{path}.{n}") not in known]
            _check_calls(f"{kind}.{path}", layer, more)
    off = switched_off({name: getattr(module, name, True) for name in _SWITCHES})
    inputs = _forward_inputs(module, variant)
    tracker = Tracker(module, slots=slots.values(), buffers=True)
    return Network(variant, arguments, inputs, slots, tracker, twin, parts, off)


def is_of_family(unet: nn.Module) -> bool:
    """Whether a module is a U-Net that dpa packs or runs on its own layers, called as it calls."""
    try:
        return resembles(unet) and recognise(unet).called_alike
    except NotInFamily:
        return False


def _variant_of(module: nn.Module) -> Variant:
    names = [name for name, _ in module.named_parameters()]
    forward = inspect.getattr_static(class_of(module), "forward")
    if inspect.isfunction(forward):  # a scripted module has none
        inputs = inspect.signature(forward).parameters.values()
        names += [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in inputs]
    return next(variant for variant in VARIANTS if variant.fits(names))


def _parts(
    module: nn.Module,
    variant: Variant,
    layers: dict[str, nn.Module],
    live: dict[str, Tensor],
    twin: ConditionalUnet1D,
) -> dict[str, nn.Module]:
    """Return what PyTorch runs: the parts that are there, but made of other layers."""
    expected = shapes(twin)

    def differs(path: str) -> bool:
        if path.endswith(FILM) and type(getattr(layers[path], "0", None)) is nn.ReLU:
            return True
        of_twin = {k: v for k, v in expected.items() if k.startswith(f"{path}.")}
        return {k: v.shape for k, v in live.items() if k.startswith(f"{path}.")} != of_twin

    parts = {}
    if variant.embedding != (ENCODER,) or differs(ENCODER):
        parts[ENCODER] = nn.Sequential(*map(module.get_submodule, variant.embedding))
    films = [path for path in layers if path.endswith(FILM)]
    # Where a few of them differ somebody has changed those few.
    if all(differs(path) and isinstance(layers[path], nn.Sequential) for path in films):
        parts |= {path: layers[path] for path in films}
    for path, layer in layers.items():
        if path.endswith(ATTENTION) and not isinstance(layer, nn.Identity):
            parts[path] = layer
    return parts


def _check_layer(
    kind: str, path: str, got: nn.Module | None, expected: nn.Module, variant: Variant
) -> None:
    """Raise unless a layer has the type and settings that the family's have."""
    if not isinstance(expected, _LAYERS):
        return
    if isinstance(expected, nn.GroupNorm) and type(got).__name__ in variant.norms:
        known: tuple[Any, ...] = (type(got),)
        same = (got.num_groups, got.eps) == (expected.num_groups, expected.eps)
    else:
        known = (type(expected), _PLAIN.get(type(expected)))
        same = type(got) in known and got.extra_repr() == expected.extra_repr()
    if not same:
        raise NotInFamily(f"{kind}.{path} must be {expected}, got {got}")


def _check_calls(path: str, layer: nn.Module, more: Iterable[nn.Module]) -> None:
    """Raise unless a call runs what the family's runs; ``more``: modules in it that no twin has."""
    if has_own_forward(layer):
        raise NotInFamily(f"{path} has a forward of its own")
    for other in more if isinstance(layer, nn.Sequential) else ():
        name = class_of(other).__name__
        inert = isinstance(other, _INERT) or name in _RESHAPING
        if not inert and not [*other.parameters()]:  # parameters have been compared
            raise NotInFamily(f"{path} has a {name} that the family's lacks")


def _forward_inputs(module: nn.Module, variant: Variant) -> tuple[str, ...]:
    """Return the names of the arguments of the class's forward."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    roles = [variant.inputs.get(name) for name in names[1:]]
    if None in roles or "timestep" not in roles:
        raise NotInFamily(
            f"{type(module).__name__}.forward must take (sample, {', '.join(variant.inputs)}) or a "
            f"part of it, got ({', '.join(names)})"
        )
    return names


def run_network(run: Callable[[], Tensor], weight: Tensor) -> Tensor:
    """Run a network, under autocast where 16-bit weights meet its float32 position embedding.

    The originals compute that embedding in float32 whatever the weights are, so in ``.half()`` and
    ``.bfloat16()`` they stop with an error of dtypes unless the caller is in autocast.
    """
    try:
        return run()
    except RuntimeError as error:
        if weight.dtype not in (torch.float16, torch.bfloat16) or "dtype" not in str(error):
            raise
    with torch.autocast(weight.device.type, weight.dtype):
        return run()
