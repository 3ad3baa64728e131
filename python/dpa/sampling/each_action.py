"""The denoising loop of actions that each have a timestep of their own."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dpa.library.capture import can_capture
from dpa.packed.unet import PackedUnet
from dpa.sampling.arguments import Inputs
from dpa.sampling.fused_loop import Body, LoopGraphs, expanded, run_captured
from dpa.sampling.rng import RandomNumbers
from dpa.sampling.stepwise_loop import Layers
from dpa.schedulers.each_action import EachActionTable
from dpa.schedulers.inpainting import Inpainting
from dpa.schedulers.tables import Generators


class EachActionSampler:
    """Samples as :class:`dpa.DiffusionSampler`, from timesteps (B, T) that each step counts down.

    Args:
        unet: called as ``unet(sample, timesteps, global_cond=...)``.
        table: of the process.
        packed: the network on packed weights, which runs where there is one; on a GPU with the
            whole loop in one CUDA graph.
        noise_dtype: what random numbers are sampled in.

    """

    def __init__(
        self,
        unet: nn.Module,
        table: EachActionTable,
        *,
        packed: PackedUnet | None,
        noise_dtype: torch.dtype,
    ):
        self.unet, self.table, self.packed, self.noise_dtype = unet, table, packed, noise_dtype
        self._graphs = LoopGraphs()

    @torch.no_grad()
    def __call__(
        self,
        global_cond: Tensor | None = None,
        *,
        noise: Tensor,
        conditions: Mapping[str, Tensor],
        local_cond: Tensor | None = None,
        condition_data: Tensor | None = None,
        condition_mask: Tensor | None = None,
        generator: Generators = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Sample from ``noise``, (B, T, Da); ``conditions`` hold each action's ``timestep``."""
        given = {
            "global_cond": global_cond,
            "local_cond": local_cond,
            "condition_data": condition_data,
            "condition_mask": condition_mask,
            "noise": noise,
            **conditions,
        }
        shape, device = (noise.shape[0], noise.shape[1], noise.shape[2]), noise.device
        numbers = RandomNumbers(False, self.table.draws_noise, shape, self.noise_dtype, device)
        inputs = expanded(given, shape)
        if self.packed is not None and can_capture(device) and self.table.count:
            kind = (shape, self.table, self.noise_dtype, tuple(inputs))
            make = functools.partial(self._body, device)
            return run_captured(self.packed, self._graphs, kind, numbers, make, inputs, generator)
        if numbers.rows:
            inputs["random"] = numbers(generator)
        return self._body(device)(inputs)

    def _body(self, device: torch.device) -> Body:
        wide = torch.float64 if self.noise_dtype == torch.float64 else torch.float32
        rows = self.table.rows.to(device, wide)

        def body(inputs: Inputs) -> Tensor:
            inputs = {n: v.to(wide) if v.is_floating_point() else v for n, v in inputs.items()}
            sample, timesteps = inputs["noise"], inputs["timestep"]
            held = Inpainting.of(inputs, "sample", rows)
            conditions = {n: inputs[n] for n in ("global_cond", "local_cond") if n in inputs}
            if self.packed is None:
                layers = Layers(self.unet, next(self.unet.parameters()).dtype, {})
                predict = functools.partial(layers.predict, conditions=layers.cast(conditions))
            else:
                predict = functools.partial(self.packed, global_cond=inputs.get("global_cond"))
            for step in range(self.table.count):
                sample = sample if held is None else held.sample(step, sample)
                output = predict(sample, timesteps).flatten(0, 1)
                noise = inputs["random"][step].flatten(0, 1) if "random" in inputs else None
                given = output, sample.flatten(0, 1), rows.coefficients, (timesteps + 1).flatten()
                out = torch.ops.dpa.scheduler_step(*given, noise, rows.clip)
                sample = out.view_as(sample)
                timesteps = (timesteps - 1).clamp(min=-1)
            return sample if held is None else held.last(sample)

        return body
