"""A policy as one module whose chunks continue the last one: real-time control without Python."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpa.export.policy import Around, OnPackedWeights
from dpa.library.checks import require
from dpa.schedulers.tables import StepTable


class ContinuingLoop(OnPackedWeights):
    """The loop on packed weights: ``(observation, noise, last_chunk, weights) -> actions``.

    It is what :class:`dpa.DiffusionSampler` does with ``inpainting="x0"``, and with ``last_chunk``
    where the table begins later. Weights of zero continue nothing. Each step is the packed network
    and small ops; they take somewhat longer than the one op of :class:`PackedLoop`.

    Args:
        unet: as in :class:`dpa.PackedUnet`.
        table: the steps, from the one that the loop begins at.
        dtype: of the packed weights.
        around: encoder and normalisation.
        warm: whether the loop begins with the last chunk, with the noise of the table's first step,
            and not with noise alone. Such a policy needs a last chunk in every call.
        size: as in :class:`PackedLoop`.

    Raises:
        ValueError: a network that cannot be packed, a table that does not know its x0 or, where
            ``warm``, its noise levels, or a normalisation that makes all actions one.

    """

    def __init__(
        self,
        unet: nn.Module,
        table: StepTable,
        dtype: torch.dtype = torch.float32,
        around: Around | None = None,
        warm: bool = False,
        size: tuple[int, int] | None = None,
    ):
        super().__init__(unet, table, dtype, around or Around(), size)
        known = table.x0 is not None and not (warm and table.levels is None)
        require(known, "table", "know its x0 and noise levels", type(table).__name__)
        invertible = bool((self.action_scale != 0).all())
        require(invertible, "around.action", "have a scale without zeros", "one")
        self.warm = warm
        to_x0, to_output = table.to_x0_and_back()
        level = table.x0.new_tensor([0.0, 1.0]) if table.levels is None else table.levels[0]
        self.register_buffer("to_x0", to_x0.float())
        self.register_buffer("to_output", to_output.float())
        self.register_buffer("without_output", (table.x0[:, 1] == 0)[:, None, None, None])
        self.register_buffer("level", level.float())

    def forward(
        self, observation: Tensor, noise: Tensor, last_chunk: Tensor, weights: Tensor
    ) -> Tensor:
        """Map float32 tensors to actions (B, T, Da), float32.

        Args:
            observation: (B, Do).
            noise: (1 + noisy steps, B, T, Da), standard normal.
            last_chunk: (B, T, Da), what is left of the last chunk at its places in this one, in the
                units of actions.
            weights: (B, T, Da), from 0 to 1: how much of it holds (:func:`dpa.prefix_weights`).

        """
        cond = self.condition(observation)
        sample = self.initial(noise)
        for value in (last_chunk, weights):
            if value.shape != sample.shape:
                raise ValueError(
                    f"last_chunk and weights must be (B, T, Da), {list(sample.shape)}, "
                    f"got {list(value.shape)}"
                )
        chunk = (last_chunk - self.action_offset) / self.action_scale + self.action_center
        if self.warm:
            sample = self.level[0] * chunk + self.level[1] * sample
        free = weights == 0
        for step in range(self.steps):
            timestep = self.timesteps[step].expand(sample.shape[0])
            output = self.predict(sample, timestep, cond)
            index = self.index[step]
            x0 = torch.ops.dpa.scheduler_step(output, sample, self.to_x0, index, None, self.clip)
            blended = torch.lerp(x0, chunk, weights)
            held = torch.ops.dpa.scheduler_step(
                blended, sample, self.to_output, index, None, self.clip
            )
            output = torch.where(free | self.without_output[step], output, held)
            sample = self.advance(step, output, sample, noise)
        return torch.where(weights >= 1, last_chunk, self.unnormalised(sample))
