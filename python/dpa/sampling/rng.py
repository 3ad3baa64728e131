"""Random numbers, drawn in the order and the pieces in which diffusers draws them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpa.schedulers.tables import Generators


def draw_normal(
    shape: tuple[int, ...], generator: Generators, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Draw normal numbers on the generator's device, and bring them to ``device``."""
    if isinstance(generator, Sequence):
        if len(generator) != shape[0]:
            raise ValueError(
                f"DiffusionSampler: generator must be one, or a sequence of {shape[0]}, "
                f"got {len(generator)}"
            )
        if len(generator) == 0:
            return torch.empty(shape, device=device, dtype=dtype)
        one = (1, *shape[1:])
        return torch.cat([draw_normal(one, single, device, dtype) for single in generator])
    source = device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=source, dtype=dtype).to(device)


def generator_on(device: torch.device, generator: Generators) -> torch.Generator | None:
    """Return the one generator to draw from on ``device``, or None where there is no such one."""
    if generator is None:
        if device.type == "cuda":
            return torch.cuda.default_generators[device.index]
        return torch.default_generator
    if isinstance(generator, torch.Generator) and generator.device == device:
        return generator
    return None


# Where normal_draws was compared with PyTorch's own draws: (device, shape of a draw, dtype).
_AGREES: dict[tuple[torch.device, Sequence[int], torch.dtype], bool] = {}


def _draws_as_pytorch(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether ``normal_draws`` gives the bits of PyTorch's own draws, which promises no algorithm.

    Compared once for each kind of draw, outside of captures.
    """
    if device.type != "cuda":
        return True
    key = (device, shape, dtype)
    if key not in _AGREES:
        if torch.cuda.is_current_stream_capturing():
            return False
        like = torch.empty(shape, dtype=dtype, device=device)
        made, drawn = (torch.Generator(device).manual_seed(1) for _ in range(2))
        found = torch.ops.dpa.normal_draws(like, 2, 2, made)
        expected = [torch.empty_like(like).normal_(generator=drawn) for _ in range(2)]
        same = torch.equal(found, torch.stack(expected))
        _AGREES[key] = same and made.get_offset() == drawn.get_offset()
    return _AGREES[key]


class Draws:
    """All that a loop draws, in its order: the sample (where ``first``), then every step's noise.

    One draw each, since one large draw would not give a stream's numbers in the same places; zero
    where a step draws none.

    Args:
        first: whether the sample is drawn.
        draws_noise: whether each step draws; where none does, steps have no rows.
        shape: of a draw, (B, T, Da).
        dtype: that is drawn in.
        device: that the numbers are wanted on.

    """

    def __init__(
        self,
        first: bool,
        draws_noise: Sequence[bool],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        steps = tuple(draws_noise) if any(draws_noise) else ()
        self._flags = (True, *steps) if first else steps
        self._draws = sum(self._flags)
        # Such as DDPM's, whose last step alone draws none.
        self._in_a_row = all(self._flags[: self._draws])
        self.shape, self.dtype, self.device = shape, dtype, device
        self.rows = (len(self), *shape) if self._flags else None

    def __len__(self) -> int:
        """Return the number of rows: none where nothing is drawn."""
        return len(self._flags)

    def __call__(self, generator: Generators) -> Tensor:
        """Draw (rows, B, T, Da), on the device."""
        source = generator_on(self.device, generator)
        device = self.device
        several = generator if isinstance(generator, Sequence) else [generator]
        if source is None and several and several[0] is not None:  # drawn elsewhere, brought here
            device = several[0].device
        out = torch.empty((len(self), *self.shape), dtype=self.dtype, device=device)
        return self._fill(out, generator if source is None else source).to(self.device)

    def into(self, out: Tensor, generator: Generators) -> None:
        """Draw into (rows, B, T, Da), a contiguous tensor on the device."""
        source = generator_on(self.device, generator)
        if source is not None and out.dtype == self.dtype:
            self._fill(out, source)
        else:
            out.copy_(self(generator))

    def launch(
        self, out: Tensor, generator: Generators, kept: list[Tensor], given: list[Tensor]
    ) -> bool:
        """As :meth:`into`, with ``given`` copied into ``kept``, in one launch on a GPU.

        Returns:
            Whether one launch can do it; otherwise nothing has been done.

        """
        source = generator_on(self.device, generator)
        if source is None or out.dtype != self.dtype or not self._one_launch(self.device):
            return False
        torch.ops.dpa.loop_inputs_(kept, given, out, self._draws, source)
        return True

    def _one_launch(self, device: torch.device) -> bool:
        return self._in_a_row and _draws_as_pytorch(device, self.shape, self.dtype)

    def _fill(self, out: Tensor, generator: Generators) -> Tensor:
        if not self._draws:
            return out.zero_()
        if isinstance(generator, torch.Generator) and self._one_launch(out.device):
            torch.ops.dpa.normal_draws.out(self._draws, generator, out=out)
            return out
        for row, drawn in zip(out, self._flags, strict=True):
            if drawn:
                row.copy_(draw_normal(self.shape, generator, out.device, self.dtype))
            else:
                row.zero_()
        return out


class Drawing:
    """What one call draws, of a generator.

    Attributes:
        shape: of the numbers, (rows, B, T, Da).

    """

    def __init__(self, draws: Draws, generator: Generators):
        assert draws.rows is not None
        self.shape = draws.rows
        self._draws, self._generator = draws, generator

    def begin(self, out: Tensor, kept: list[Tensor], given: list[Tensor]) -> None:
        """Draw into ``out``, and copy ``given`` into ``kept``."""
        draws, generator = self._draws, self._generator
        if draws.device.type == "cuda" and draws.launch(out, generator, kept, given):
            return
        if kept:
            torch.ops.dpa.loop_inputs_(kept, given)
        draws.into(out, generator)
