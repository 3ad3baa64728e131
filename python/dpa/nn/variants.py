"""The published networks of the family, each by what it differs in from the original.

The original is diffusion_policy's ``ConditionalUnet1D``, whose names everything in dpa uses. Where
a network computes its conditioning in another way, the entry says how; that part runs with PyTorch,
on the network's own modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Call = dict[str, Any]
Names = tuple[tuple[str, str], ...]

_CONDITIONS = {name: name for name in ("timestep", "local_cond", "global_cond")}
_RESHAPED: Names = (  # a rearrangement before the norm, and one behind it
    (r"\.block\.[13]$", ".block.rearranged"),
    (r"\.block\.2\b", ".block.1"),
    (r"\.block\.4\b", ".block.2"),
)
_LEVELS: Names = (
    (r"^(down|up)s\.(\d+)\.2\b", r"\1_modules.\2.attention"),
    (r"^(down|up)s\.(\d+)\.3\b", r"\1_modules.\2.2"),
    (r"^(down|up)s\b", r"\1_modules"),
    (r"^mid_block1\b", "mid_modules.0"),
    (r"^mid_attn\b", "mid_modules.attention"),
    (r"^mid_block2\b", "mid_modules.1"),
)


@dataclass(frozen=True)
class Variant:
    """How a network differs from the original.

    Attributes:
        policies: who has it, for the documentation.
        mark: a pattern that only its parameters' names, or its forward's arguments, match; one with
            a default is written "name=default".
        names: patterns and what replaces them, one after the other: from its names to the
            original's.
        blocks: residual blocks of a level, and in the middle.
        inputs: what the arguments of its forward are, after the first, which is the sample.
        norms: further classes that normalise groups as ``nn.GroupNorm`` does.
        condition: computes ``global_cond`` from a network and what it is called with; None where
            it is an argument of its own.
        embedding: names of the modules that make the timestep's embedding, one after the other.
        each_action: whether each action has a timestep of its own.
        one_for_all: whether its forward takes one timestep for all samples, too.
        extra: beginnings of the original names of what ``condition`` reads.
        unused: beginnings of names that the forward never reads.
        powers_of_two: whether its forward raises for horizons that are none.

    """

    policies: str
    mark: str = ""
    names: Names = ()
    blocks: int = 2
    inputs: Mapping[str, str] = field(default_factory=lambda: _CONDITIONS)
    norms: tuple[str, ...] = ()
    condition: Callable[[nn.Module, Call], Tensor | None] | None = None
    embedding: tuple[str, ...] = ("diffusion_step_encoder",)
    each_action: bool = False
    one_for_all: bool = True
    extra: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    powers_of_two: bool = False

    def fits(self, names: list[str]) -> bool:
        """Whether a network is this one, by the names of its parameters and inputs."""
        return any(re.search(self.mark, name) for name in names)

    def original_name(self, name: str) -> str:
        """Return the original's name of a module or parameter that this network names ``name``."""
        for pattern, replacement in self.names:
            name = re.sub(pattern, replacement, name)
        return name


def _stop_and_global(network: nn.Module, call: Call) -> Tensor:
    stop = network.diffusion_step_encoder(call["stoptime"])
    given = call.get("global_cond")
    return stop if given is None else torch.cat([stop, given], dim=-1)


def _state(network: nn.Module, call: Call) -> Tensor:
    state = call["cond"]["state"].flatten(1)
    return network.cond_mlp(state) if hasattr(network, "cond_mlp") else state


def _observations(network: nn.Module, call: Call) -> Tensor:
    return network.global_cond_encoder(call["condition"].flatten(1))


ORIGINAL = Variant("diffusion_policy, UMI, DP3, iDP3, NoMaD, robomimic, ManiSkill")
LEROBOT = Variant(
    "LeRobot",
    mark=r"\.conv1\.block\.",
    names=(
        (r"\bconv1\.block\.", "blocks.0.block."),
        (r"\bconv2\.block\.", "blocks.1.block."),
        (r"((?:down|up)_modules\.\d+\.2)(?=\.weight$|\.bias$|$)", r"\1.conv"),
    ),
    one_for_all=False,
)
VARIANTS = (
    LEROBOT,
    Variant("FlowPolicy", mark=r"^var_est\.", unused=("var_est.",)),
    Variant(
        "Simple DP3, FlowPolicy's simple network",
        mark=r"^down_modules\.\d+\.1\.conv\.",
        names=((r"^((?:down|up)_modules\.\d+)\.1\b", r"\1.2"),),
        blocks=1,
    ),
    Variant(
        "Consistency Policy",
        mark="^stoptime$",
        inputs=_CONDITIONS | {"stoptime": "stoptime"},
        condition=_stop_and_global,
    ),
    Variant(
        "Consistency Policy's teacher",
        mark="^stoptime=None$",
        inputs=_CONDITIONS | {"stoptime": "unread"},
    ),
    Variant("Streaming Diffusion Policy", mark=r"^diffusion_step_encoder\.5\.", each_action=True),
    Variant(
        "DPPO",
        mark=r"^down_modules\.0\.0\.blocks\.0\.block\.2\.",
        names=((r"^time_mlp\b", "diffusion_step_encoder"), *_RESHAPED),
        inputs={"time": "timestep", "cond": "cond"},
        condition=_state,
        extra=("cond_mlp.",),
    ),
    Variant(
        "CleanDiffuser's ChiUNet1d",
        mark=r"^downs\.0\.0\.conv1\.0\.",
        names=(
            (r"\bconv1\.(\d)\b", r"blocks.0.block.\1"),
            (r"\bconv2\.(\d)\b", r"blocks.1.block.\1"),
            (r"^final_conv\.([0-2])\b", r"final_conv.0.block.\1"),
            (r"^final_conv\.3\b", "final_conv.1"),
            (r"^(down|mid|up)s\b", r"\1_modules"),
            (r"^map_emb\b", "diffusion_step_encoder"),
        ),
        inputs={"noise": "timestep", "condition": "condition"},
        norms=("GroupNorm1d",),
        condition=_observations,
        embedding=("map_noise", "map_emb"),
        one_for_all=False,
        powers_of_two=True,
        extra=("map_noise.", "global_cond_encoder."),
    ),
    Variant(
        "Diffuser's TemporalUnet",
        mark=r"^downs\.0\.0\.time_mlp\.",
        names=(
            (r"^time_mlp\b", "diffusion_step_encoder"),
            (r"\.time_mlp\b", ".cond_encoder"),
            *_LEVELS,
            *_RESHAPED,
        ),
        inputs={"cond": "unread", "time": "timestep"},
        one_for_all=False,
    ),
    ORIGINAL,
)
