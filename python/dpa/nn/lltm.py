"""The long-term memory cell of PyTorch's extension tutorial, as a module."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dpa.library.checks import require


class LLTM(nn.Module):
    """An LSTM cell without a forget gate and with an ELU candidate: :func:`dpa.ops.lltm`.

    Args:
        input_features: I, the size of an input.
        state_size: S, the size of the state.

    Parameters ``weights`` (3 S, S + I) and ``bias`` (3 S) start uniformly in +-1 / sqrt(S).

    Source: the PyTorch tutorial "Custom C++ and CUDA Extensions".

    """

    def __init__(self, input_features: int, state_size: int):
        super().__init__()
        right, got = min(input_features, state_size) >= 0, f"{input_features} and {state_size}"
        require(right, "LLTM: input_features and state_size", "be at least 0", got)
        self.input_features = input_features
        self.state_size = state_size
        self.weights = nn.Parameter(torch.empty(3 * state_size, state_size + input_features))
        self.bias = nn.Parameter(torch.empty(3 * state_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        limit = 1.0 / math.sqrt(self.state_size) if self.state_size > 0 else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -limit, limit)

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """From input (B, I) and state ``(h, c)``, each (B, S), the new ``(h, c)``."""
        old_h, old_cell = state
        return torch.ops.dpa.lltm(input, self.weights, self.bias, old_h, old_cell)

    def extra_repr(self) -> str:
        """The sizes, for printing."""
        return f"input_features={self.input_features}, state_size={self.state_size}"
