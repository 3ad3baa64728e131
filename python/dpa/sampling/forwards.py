"""Single forward passes of a packed network, where PyTorch makes FiLM's parameters: in CUDA graphs.

One pass of such a network launches a dozen kernels of PyTorch's before the packed network's. In a
loop that dpa does not know these cost the host more than the pass costs the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch import Tensor

from dpa.library.capture import can_capture, kernel_settings
from dpa.packed.unet import PackedUnet
from dpa.sampling.arguments import Inputs
from dpa.sampling.fused_loop import LoopGraphs, run_captured
from dpa.sampling.rng import RandomNumbers
from dpa.tracking.tracker import is_dispatched


class Forwards:
    """Forward passes of one network; those of a kind replay from the third in a row on."""

    def __init__(self) -> None:
        self._graphs = LoopGraphs()
        self._last = threading.local()  # a thread's last kind of pass

    def run(
        self, packed: PackedUnet, sample: Tensor, timesteps: Tensor, global_cond: Tensor | None
    ) -> Tensor:
        """Return the network's output, float32; the caller has checked the modules."""
        inputs = {"sample": sample, "timesteps": timesteps}
        if global_cond is not None:
            inputs["global_cond"] = global_cond
        if not packed.network.film_apart or not can_capture(sample.device) or is_dispatched():
            return packed.run(*_floats(inputs))
        kind = _kind(inputs)
        if kind != getattr(self._last, "kind", None):  # a batch of its own is not worth a capture
            self._last.kind = kind
            return packed.run(*_floats(inputs))
        none = RandomNumbers(False, (), tuple(sample.shape), torch.float32, sample.device)

        def body(given: Inputs) -> Tensor:
            return packed(*_floats(given))

        return run_captured(packed, self._graphs, kind, none, lambda: body, inputs, None)


def _kind(inputs: Inputs) -> Hashable:
    shapes = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
    return shapes, kernel_settings()


def _floats(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a network's arguments; its own layers may tell integers of timesteps from floats."""
    cond = inputs.get("global_cond")
    sample = inputs["sample"].float()
    return sample, inputs["timesteps"], None if cond is None else cond.float()
