"""The networks of the family: how their parameters are named, and how to tell one from its shapes.

diffusion_policy's ``ConditionalUnet1D`` names the parameters; robomimic, DP3 and NoMaD kept its
names. LeRobot's ``DiffusionConditionalUnet1d`` has the same mathematics under other names::

    original                       LeRobot
    ....blocks.{0,1}.block.*       ....conv{1,2}.block.*
    {down,up}_modules.i.2.conv.*   {down,up}_modules.i.2.*

Everything in dpa uses the original's names.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpa.nn.blocks1d import Conv1d, ConvTranspose1d
from dpa.nn.unet1d import ConditionalUnet1D
from dpa.tracking import Tracker

_FIRST_CONV = re.compile(r"down_modules\.0\.0\.(?:blocks\.0|conv1)\.block\.0\.weight$")
_PARTS = ("diffusion_step_encoder", "down_modules", "mid_modules", "up_modules", "final_conv")
# What a network of somebody else's has where ours has its own convolutions.
_PLAIN = {Conv1d: nn.Conv1d, ConvTranspose1d: nn.ConvTranspose1d}
# DP3's switches, and which residual blocks each of them conditions.
_SWITCHES = {
    "use_down_condition": "down_modules.",
    "use_mid_condition": "mid_modules.",
    "use_up_condition": "up_modules.",
}


class NotInFamily(ValueError):
    """The network is not a conditional U-Net of the family; the message says what differs."""


def original_name(name: str) -> str:
    """Return the original's name of a parameter that the original or LeRobot names ``name``."""
    name = name.replace("_orig_mod.", "")
    name = re.sub(r"\bconv([12])\.block\.", lambda m: f"blocks.{int(m[1]) - 1}.block.", name)
    return re.sub(r"((?:down|up)_modules\.\d+\.2)\.(weight|bias)$", r"\1.conv.\2", name)


def lerobot_name(name: str) -> str:
    """Return LeRobot's name of what the original names ``name``."""
    name = re.sub(r"\bblocks\.([01])\.block\b", lambda m: f"conv{int(m[1]) + 1}.block", name)
    return re.sub(r"((?:down|up)_modules\.\d+\.2)\.conv\b", r"\1", name)


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
    lines = [
        f"missing: {name} {tuple(expected[name].shape)}" for name in expected if name not in got
    ]
    lines += [
        f"unexpected: {name} {tuple(got[name].shape)}" for name in got if name not in expected
    ]
    for name in expected:
        if name in got and got[name].shape != expected[name].shape:
            want, have = tuple(expected[name].shape), tuple(got[name].shape)
            lines.append(f"shape: {name} must be {want}, got {have}")
    return lines


def arguments_from_shapes(weights: Mapping[str, Any], n_groups: int = 8) -> dict[str, Any]:
    """Return the arguments of :class:`dpa.nn.ConditionalUnet1D` that fit these weights.

    Args:
        weights: tensors by the original's names. A few may be missing: each argument is read off
            whichever weight shows it.
        n_groups: of the GroupNorms, which no shape shows.

    Raises:
        NotInFamily: the weights show no such network, naming one that would.

    """

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
    step_dim = size(0, r"diffusion_step_encoder\.3\.weight", r"diffusion_step_encoder\.3\.bias")
    film = r"(down|mid|up)_modules\..*cond_encoder\.1\.weight"
    cond_dim = size(1, film) - step_dim
    first_film = r"down_modules\.0\.[01]\.cond_encoder\.1\.(weight|bias)"
    arguments: dict[str, Any] = {
        "input_dim": size(0, r"final_conv\.1\.weight", r"final_conv\.1\.bias"),
        "global_cond_dim": cond_dim or None,
        "diffusion_step_embed_dim": step_dim,
        "down_dims": tuple(down_dims),
        "kernel_size": size(2, r"(down|mid|up)_modules\..*\.blocks\.[01]\.block\.0\.weight"),
        "n_groups": n_groups,
        "cond_predict_scale": size(0, first_film) == 2 * down_dims[0],
    }
    local = r"local_cond_encoder\.0\.blocks\.0\.block\.0\.weight"
    if any(name.startswith("local_cond_encoder.") for name in weights):
        arguments["local_cond_dim"] = size(1, local)
    return arguments


def template(arguments: Mapping[str, Any]) -> ConditionalUnet1D:
    """Return the network of these arguments on the meta device: all shapes, no memory.

    Raises:
        NotInFamily: the constructor refuses the arguments.

    """
    try:
        with torch.device("meta"):
            return ConditionalUnet1D(**arguments)
    except (ValueError, RuntimeError) as error:
        raise NotInFamily(str(error)) from None


def switched_off(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the beginnings of the names of the residual blocks that DP3's switches leave bare."""
    return tuple(begin for name, begin in _SWITCHES.items() if not settings.get(name, True))


def without_film(
    weights: Mapping[str, Tensor], begins: tuple[str, ...], scale: bool
) -> dict[str, Tensor]:
    """Return the weights with a constant FiLM, scale 1 and shift 0, where names begin so."""
    changed = dict(weights)
    for key, value in weights.items():
        if key.startswith(begins) and ".cond_encoder." in key:
            changed[key] = torch.zeros_like(value)
            if key.endswith(".bias") and scale:
                changed[key][: value.shape[0] // 2] = 1
    return changed


@dataclass(frozen=True, eq=False)
class Network:
    """A live module that was recognised as a U-Net of the family.

    Attributes:
        arguments: those of :class:`dpa.nn.ConditionalUnet1D`.
        inputs: the names of the arguments of its forward, in order.
        slots: where each parameter lives: (module, name in it), by the original's names.
        tracker: of its modules, as they were when it was recognised.
        twin: dpa's network of these arguments, on the meta device.
        unconditioned: beginnings of the names of residual blocks that run without FiLM (DP3).

    """

    arguments: dict[str, Any]
    inputs: tuple[str, ...]
    slots: dict[str, tuple[nn.Module, str]] = field(repr=False)
    tracker: Tracker = field(repr=False)
    twin: ConditionalUnet1D = field(repr=False)
    unconditioned: tuple[str, ...] = ()

    @property
    def local_cond_dim(self) -> int | None:
        """Width of the local conditioning; None of a network without it."""
        return self.arguments.get("local_cond_dim")

    def changed(self) -> bool:
        """Whether a module was added, removed, replaced or set up anew, or a parameter is gone."""
        return not self.tracker.unchanged() or any(
            module._parameters.get(name) is None for module, name in self.slots.values()
        )

    def changed_in_trace(self, module: nn.Module) -> bool:
        """The same of ``module`` in what compilers trace; what they read here they watch."""
        layers = list(module.modules())[1:]
        pairs = zip(layers, list(self.tracker.modules.values())[1:], strict=True)
        return any(layer is not then or _is_odd(layer) for layer, then in pairs)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters that the module has now, by the original's names."""
        return {key: module._parameters[name] for key, (module, name) in self.slots.items()}

    def layers(self) -> nn.Module | None:
        """Return dpa's layers on the same parameters, whatever replaces one later.

        None where blocks are unconditioned, which dpa's are not.
        """
        if self.unconditioned:
            return None
        layers = copy.deepcopy(self.twin).eval()
        for key, (module, _) in self.slots.items():
            vars(layers.get_submodule(key.rpartition(".")[0]))["_parameters"] = module._parameters
        return layers

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that give the original's network the mathematics of this one."""
        weights = {key: value.detach() for key, value in self.parameters().items()}
        return without_film(weights, self.unconditioned, self.arguments["cond_predict_scale"])


def recognise(module: nn.Module) -> Network:
    """Recognise a conditional U-Net by its parts, shapes and layers.

    What the forward does with them cannot be seen here: compare results before relying on it.

    Raises:
        NotInFamily: with the first thing that differs.

    """
    missing = [part for part in _PARTS if not isinstance(getattr(module, part, None), nn.Module)]
    if missing:
        raise NotInFamily(f"{type(module).__name__} has no {', '.join(missing)}")
    slots: dict[str, tuple[nn.Module, str]] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                slots[original_name(f"{path}.{name}".lstrip("."))] = (owner, name)
    live = {key: owner._parameters[name] for key, (owner, name) in slots.items()}
    norms = [m for m in module.down_modules.modules() if isinstance(m, nn.GroupNorm)]
    if not norms:
        raise NotInFamily(f"{type(module).__name__} has no GroupNorm in down_modules")
    twin = template(arguments := arguments_from_shapes(live, norms[0].num_groups))
    if lines := differences(live, dict(twin.named_parameters())):
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        raise NotInFamily(f"{type(module).__name__}'s parameters differ: {lines[0]}{more}")
    _check_layers(module, twin)
    off = switched_off({name: getattr(module, name, True) for name in _SWITCHES})
    return Network(arguments, _forward_inputs(module), slots, Tracker(module), twin, off)


def _is_odd(layer: nn.Module) -> bool:
    """Whether something is set that no layer of the family has; reads all that may be set."""
    if layer.forward is None:
        return True
    if isinstance(layer, nn.GroupNorm):
        return layer.eps != 1e-5 or layer.num_groups < 1
    if isinstance(layer, (nn.Conv1d, nn.ConvTranspose1d)):
        usual = layer.padding_mode == "zeros" and layer.dilation == (1,) and layer.groups == 1
        lengths = (layer.padding, layer.output_padding, layer.stride)
        return not usual or any(length < (0,) for length in lengths)
    return False


def _check_layers(module: nn.Module, twin: nn.Module) -> None:
    """Raise unless the layers have the types and settings that the family's have."""
    layers = dict(module.named_modules())
    lerobot = "down_modules.0.0.conv1" in layers
    for path, expected in twin.named_modules():
        if not isinstance(
            expected, (nn.Conv1d, nn.ConvTranspose1d, nn.Linear, nn.GroupNorm, nn.Mish)
        ):
            continue
        path = lerobot_name(path) if lerobot else path
        got = layers.get(path)
        known = (type(expected), _PLAIN.get(type(expected)))
        if type(got) in known and "forward" in vars(got):
            raise NotInFamily(f"{type(module).__name__}.{path} has a forward of its own")
        if type(got) not in known or got.extra_repr() != expected.extra_repr():
            raise NotInFamily(f"{type(module).__name__}.{path} must be {expected}, got {got}")


def _forward_inputs(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of the class's forward."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    known = {"local_cond", "global_cond"}
    if len(names) < 2 or names[1] != "timestep" or not known.issuperset(names[2:]):
        raise NotInFamily(
            f"{type(module).__name__}.forward must take (sample, timestep, local_cond, "
            f"global_cond) or a part of it, got ({', '.join(names)})"
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
