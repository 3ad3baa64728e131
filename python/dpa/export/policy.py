"""A policy as one module for TorchScript and torch.export: (observation, noise) -> actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpa.library.checks import require
from dpa.nn import ConditionalUnet1D
from dpa.packed.unet import PackedUnet
from dpa.schedulers.tables import StepTable

_NORMALISED = ("observation", "action")
NO_CLIP = torch.finfo(torch.float32).max


class Affine(NamedTuple):
    """``(x - center) * scale + offset``.

    A value that never changed in training has a span of zero and a scale of 1e8: an offset that had
    the center in it, too, would be its rounding.
    """

    scale: Tensor
    offset: Tensor
    center: Tensor = torch.zeros(1)

    @staticmethod
    def none(width: int = 1) -> Affine:
        """Return the one that changes nothing."""
        return Affine(torch.ones(width), torch.zeros(width), torch.zeros(width))

    def inverse(self) -> Affine:
        """Return the way back."""
        return Affine(1 / self.scale, self.center, self.offset)

    def numbers(self) -> dict[str, list[float]]:
        """Return its parts as a manifest has them."""
        return {name: part.flatten().tolist() for name, part in self._asdict().items()}


@dataclass(frozen=True)
class Around:
    """What an exported policy does before and after the denoising.

    Attributes:
        encoder: maps normalised observations (B, Do) to ``global_cond``; None passes them through.
        observation: what observations are normalised with, an :class:`Affine` or (scale, offset);
            None leaves them as they are.
        action: what actions are unnormalised with, likewise.

    """

    encoder: nn.Module | None = None
    observation: Affine | tuple[Tensor, Tensor] | None = None
    action: Affine | tuple[Tensor, Tensor] | None = None


class Exported(nn.Module):
    """The steps of a table, with the encoder and the normalisation around them."""

    def __init__(self, table: StepTable, around: Around):
        super().__init__()
        single, sigma = type(table) is StepTable, table.init_noise_sigma
        require(single, "table", "be a StepTable to be exported", type(table))
        rule = "start from unscaled noise to be exported"
        require(sigma == 1, "table", rule, f"{sigma} times it")
        self.conditioned = True
        self.encoder = nn.Identity() if around.encoder is None else around.encoder
        self.steps = len(table)
        # An AOTInductor package writes infinity as a string, which its reader refuses.
        self.clip = min(float(table.clip), NO_CLIP)
        numbers = iter(range(1, self.steps + 1))
        # The index into ``noise`` of each step; 0 is the initial sample and stands for none.
        self.noise_index = [next(numbers) if noisy else 0 for noisy in table.draws_noise]
        self.entries_of_noise = 1 + sum(table.draws_noise)
        for name in _NORMALISED:
            affine = Affine(*(getattr(around, name) or Affine.none()))
            for part, value in affine._asdict().items():
                self.register_buffer(f"{name}_{part}", value.detach().float().clone())
        self.register_buffer("timesteps", table.timesteps.float().clone())
        self.register_buffer("coefficients", table.coefficients.float().clone())
        self.register_buffer("entries", torch.tensor(self.noise_index))
        self.register_buffer("index", torch.arange(self.steps))

    def condition(self, observation: Tensor) -> Tensor | None:
        """Return what the network is conditioned on, if it is."""
        cond: Tensor | None = None
        if self.conditioned:
            width = self.observation_scale.shape[0]
            if width > 1 and observation.shape[-1] != width:
                raise ValueError(f"observation must have a width of {width}")
            centered = observation - self.observation_center
            cond = self.encoder(centered * self.observation_scale + self.observation_offset)
        return cond

    def initial(self, noise: Tensor) -> Tensor:
        """Return the sample that the loop begins with, of the noise of the whole loop."""
        if noise.dim() != 4 or noise.shape[0] != self.entries_of_noise:
            raise ValueError(
                f"noise must be ({self.entries_of_noise}, B, T, Da), got {list(noise.shape)}"
            )
        return noise[0]

    def advance(self, step: int, output: Tensor, sample: Tensor, noise: Tensor) -> Tensor:
        """Return the sample after a step; ``noise`` is that of the whole loop."""
        step_noise: Tensor | None = None
        if self.noise_index[step] > 0:
            step_noise = noise[self.noise_index[step]]
        return torch.ops.dpa.scheduler_step(
            output, sample, self.coefficients, self.index[step], step_noise, self.clip
        )

    @torch.jit.unused
    def normalisation(self) -> dict[str, dict[str, list[float]]]:
        """Return what observations are normalised and actions unnormalised with."""
        parts = {n: [getattr(self, f"{n}_{p}") for p in Affine._fields] for n in _NORMALISED}
        return {name: Affine(*values).numbers() for name, values in parts.items()}

    def unnormalised(self, sample: Tensor) -> Tensor:
        """Return the actions that a sample stands for."""
        return (sample - self.action_center) * self.action_scale + self.action_offset


class LayeredLoop(Exported):
    """The whole loop, layer by layer: ``(observation, noise) -> actions``.

    Noise is an input, so that the caller owns the random stream: ``noise[0]`` is the initial
    sample, and each step that adds noise takes the next entry.

    Args:
        unet: a :class:`dpa.nn.ConditionalUnet1D`, in the dtype that it shall run in.
        table: the steps, as :func:`dpa.schedulers.from_diffusers` gives them.
        around: encoder and normalisation.

    Raises:
        ValueError: the table is a multistep one: the exported loop keeps no earlier x0; or the
            network is of another class.

    """

    def __init__(self, unet: nn.Module, table: StepTable, around: Around = Around()):
        super().__init__(table, around)
        rule = "be a dpa.nn.ConditionalUnet1D, as dpa.load_checkpoint gives it"
        require(isinstance(unet, ConditionalUnet1D), "unet", rule, type(unet).__name__)
        self.unet = unet
        self.dtype = next(unet.parameters()).dtype
        self.conditioned = unet.global_cond_dim != 0

    def forward(self, observation: Tensor, noise: Tensor) -> Tensor:
        """Map (B, Do) and (1 + noisy steps, B, T, Da), float32, to actions (B, T, Da), float32."""
        cond = self.condition(observation)
        if cond is not None:
            cond = cond.to(self.dtype)
        sample = self.initial(noise)
        for step in range(self.steps):
            timestep = self.timesteps[step].expand(sample.shape[0])
            output = self.unet(sample.to(self.dtype), timestep, None, cond).to(torch.float32)
            sample = self.advance(step, output, sample, noise)
        return self.unnormalised(sample)


class OnPackedWeights(Exported):
    """A network on packed weights."""

    def __init__(
        self,
        unet: nn.Module,
        table: StepTable,
        dtype: torch.dtype = torch.float32,
        around: Around = Around(),
        size: tuple[int, int] | None = None,
    ):
        super().__init__(table, around)
        network = PackedUnet(unet, dtype)
        network = network if size is None else network.sized(*size, layers=False)
        alike, rule = network.network.called_alike, "take what the original takes to be exported"
        require(alike, "unet", rule, type(unet).__name__)
        self.dtype = dtype
        self.conditioned = network.network.arguments.get("global_cond_dim") is not None
        self.register_buffer("weights", network.repack())
        _, self.config, kind = network.operands
        self.dtype_name = str(kind).removeprefix("torch.")  # as they are packed

    def predict(self, sample: Tensor, timesteps: Tensor, cond: Tensor | None) -> Tensor:
        """Run the network once, on (B, T, Da) at timesteps (B,)."""
        return torch.ops.dpa.unet1d_by_name(
            sample, timesteps, cond, self.weights, self.config, self.dtype_name
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # A GPU could not tell bytes that a CPU packed: reading their mark would stop the stream.
        here, there = self.weights.device.type, fn(self.weights[:0]).device.type
        rule = f"stay on the kind of device that packed them, {here}"
        got = f"{there}: make another of the network there"
        require(here == there, f"{type(self).__name__}: weights", rule, got)
        return super()._apply(fn, recurse)


class PackedLoop(OnPackedWeights):
    """The whole loop as one op on packed weights: ``(observation, noise) -> actions``.

    ``noise`` is as in :class:`LayeredLoop`; a network without ``global_cond`` takes an observation
    of width 0.

    Args:
        unet: as in :class:`dpa.PackedUnet`.
        table: the steps.
        dtype: of the packed weights.
        around: encoder and normalisation.
        size: B and T of most calls, for which weights are packed; others run too.

    Raises:
        ValueError: a multistep table, or a network that cannot be packed.

    """

    def forward(self, observation: Tensor, noise: Tensor) -> Tensor:
        """Map (B, Do) and (1 + noisy steps, B, T, Da), float32, to actions (B, T, Da), float32."""
        sample = self.initial(noise)
        step_noise: Tensor | None = None
        if self.entries_of_noise > 1:
            # The coefficient of a step without noise is 0, so any entry will do.
            step_noise = noise.index_select(0, self.entries)
        sample = torch.ops.dpa.diffusion_sample_by_name(
            sample,
            self.timesteps,
            self.condition(observation),
            self.weights,
            self.config,
            self.dtype_name,
            self.coefficients,
            self.clip,
            step_noise,
        )
        return self.unnormalised(sample)


class PackedStep(OnPackedWeights):
    """One step: ``(observation, sample, index, noise) -> (sample, actions)``.

    The caller runs ``index`` from 0 to ``steps - 1``. Args and errors as in :class:`PackedLoop`.
    """

    def forward(
        self, observation: Tensor, sample: Tensor, index: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Map (B, Do), (B, T, Da), an int64 tensor of one element and (B, T, Da) to two (B, T, Da).

        ``noise`` is that of this step; DDIM with eta 0 and the last step of DDPM ignore it. The
        second result is the first in the units of actions.
        """
        index = index.reshape(1)
        timesteps = self.timesteps.index_select(0, index).expand(sample.shape[0])
        output = self.predict(sample, timesteps, self.condition(observation))
        sample = torch.ops.dpa.scheduler_step(
            output, sample, self.coefficients, index, noise, self.clip
        )
        return sample, self.unnormalised(sample)
