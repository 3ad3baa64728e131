"""Single forward passes of a packed network, in CUDA graphs.

In a loop that dpa does not know, the ten launches of a pass cost the host more than the pass costs
the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

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
        self,
        packed: PackedUnet,
        sample: Tensor,
        timesteps: Tensor,
        conditions: Mapping[str, Tensor],
        channels_first: bool,
    ) -> Tensor:
        """Return the network's output, float32; the caller has checked the modules.

        ``conditions``: ``global_cond`` and ``local_cond``, where the network has them.
        ``channels_first``: whether it is (B, Da, T) in memory.
        """
        inputs = {"sample": sample, "timesteps": timesteps, **conditions}
        if not can_capture(sample.device) or is_dispatched():
            return _ordered(packed.run(*_floats(packed, inputs)), channels_first)
        shapes = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        kind = shapes, kernel_settings(), channels_first
        if kind != getattr(self._last, "kind", None):  # a batch of its own is not worth a capture
            self._last.kind = kind
            return _ordered(packed.run(*_floats(packed, inputs)), channels_first)
        none = RandomNumbers(False, (), tuple(sample.shape), torch.float32, sample.device)

        def body(given: Inputs) -> Tensor:
            return _ordered(packed(*_floats(packed, given)), channels_first)

        return run_captured(packed, self._graphs, kind, none, lambda: body, inputs, None)


def _ordered(out: Tensor, channels_first: bool) -> Tensor:
    return out.transpose(1, 2).contiguous().transpose(1, 2) if channels_first else out


def _floats(packed: PackedUnet, inputs: Inputs) -> list[Tensor | None]:
    """Return the arguments; a network's own layers may tell integers of timesteps from floats."""
    sample, timesteps = inputs["sample"].float(), inputs["timesteps"]
    timesteps = timesteps if packed.network.film_apart else timesteps.float()
    conds = [inputs.get(name) for name in ("global_cond", "local_cond")]
    return [sample, timesteps, *(None if cond is None else cond.float() for cond in conds)]
