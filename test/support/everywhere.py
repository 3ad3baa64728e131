"""A module that calls ops of every kind, for tests of exports and other runtimes."""

import torch
from torch import Tensor, nn

import dpa


class EveryOp(nn.Module):
    """Ops in a row; parameters and buffers hold what does not depend on the batch."""

    def __init__(self):
        super().__init__()
        self.block = dpa.nn.Conv1dBlock(3, 8, 3, n_groups=4)
        self.cell = dpa.nn.LLTM(8, 6)
        self.register_buffer("table", torch.rand(4, 6))
        self.register_buffer("constants", torch.rand(4, 5) + 0.5)
        self.register_buffer("index", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        """From (B, 3, T) to (B, 6)."""
        y = self.block(x)
        y = torch.ops.dpa.group_norm_mish(y, 2)
        y = torch.ops.dpa.elementwise_mult(y, y + 1)
        y = torch.ops.dpa.fused_relu_add(y, y, 0.25)
        y = torch.ops.dpa.denoise(y, y + 0.5, self.constants, self.index, y)
        y = torch.ops.dpa.scheduler_step(y, y, self.table, self.index, None, 2.0)
        state = torch.zeros(x.shape[0], 6, dtype=x.dtype, device=x.device)
        h, c = self.cell(y.mean(2), (state, state))
        return h + c
