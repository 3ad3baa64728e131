"""Random numbers, in the order and the pieces in which diffusers takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpa.schedulers.tables import Generators


def draw_normal(
    shape: tuple[int, ...],
    generator: Generators,
    device: torch.device,
    dtype: torch.dtype,
    transposed: bool = False,
) -> Tensor:
    """Return normal random numbers, made on the generator's device and brought to ``device``.

    Of several generators, all on one device, each makes a row of the first dimension.
    ``transposed`` ones are made in the order of a (B, T, Da) that lies in memory as (B, Da, T).
    """
    one = not isinstance(generator, Sequence)
    generators = [generator] if one else generator
    source = next((g.device for g in generators if g is not None), device)
    order = (shape[0], shape[2], shape[1]) if transposed else shape
    out = torch.empty(order, device=source, dtype=dtype)
    out = out.mT if transposed else out
    for rows, own in zip([out] if one else out.unbind(), generators, strict=True):
        rows.normal_(generator=own)
    return out.to(device)


def generator_on(device: torch.device, generator: Generators) -> torch.Generator | None:
    """Return the one generator on ``device``; None where there are several or it is elsewhere."""
    if generator is None:
        if device.type == "cuda":
            return torch.cuda.default_generators[device.index]
        return torch.default_generator
    if isinstance(generator, torch.Generator) and generator.device == device:
        return generator
    return None


# What dpa::loop_inputs_ takes of random numbers: where they go, how many rows, their generator.
Launch = tuple[Tensor, int, torch.Generator]

# Where normal_draws was compared with PyTorch: (device, shape of the noise of a step, dtype).
_AGREES: dict[tuple[torch.device, Sequence[int], torch.dtype], bool] = {}


def _agrees_with_pytorch(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether ``normal_draws`` gives the bits of ``Tensor.normal_``, which promises no algorithm.

    Compared once for each shape and dtype, outside of captures.
    """
    if device.type != "cuda":
        return True
    key = (device, shape, dtype)
    if key not in _AGREES:
        if torch.cuda.is_current_stream_capturing():
            return False
        like = torch.empty(shape, dtype=dtype, device=device)
        ours, theirs = (torch.Generator(device).manual_seed(1) for _ in range(2))
        found = torch.ops.dpa.normal_draws(like, 2, 2, ours)
        expected = [torch.empty_like(like).normal_(generator=theirs) for _ in range(2)]
        same = torch.equal(found, torch.stack(expected))
        _AGREES[key] = same and ours.get_offset() == theirs.get_offset()
    return _AGREES[key]


class RandomNumbers:
    """All random numbers of a loop, in its order: the sample (where ``first``), each step's noise.

    Each row, (B, T, Da) in ``dtype``, is made by itself, since one large call would not give a
    generator's numbers in the same places. A row is zero where a step adds no noise; where none
    does, steps have no rows.

    Attributes:
        rows: how many there are.

    """

    def __init__(
        self,
        first: bool,
        draws_noise: Sequence[bool],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        transposed: Sequence[bool] = (),
    ):
        steps = tuple(draws_noise) if any(draws_noise) else ()
        self._flags = (True, *steps) if first else steps
        order = tuple(transposed[: len(steps)]) or (False,) * len(steps)
        self._transposed = (False, *order) if first else order
        self.rows, self._count = len(self._flags), sum(self._flags)
        # As DDPM's are, whose last step alone adds none.
        self._in_a_row = all(self._flags[: self._count])
        self.shape, self.dtype, self.device = shape, dtype, device

    def __call__(self, generator: Generators) -> Tensor:
        """Return (rows, B, T, Da), on the device."""
        source = generator_on(self.device, generator)
        device = self.device
        several = generator if isinstance(generator, Sequence) else [generator]
        if source is None and several and several[0] is not None:  # made elsewhere, brought here
            device = several[0].device
        out = torch.empty((self.rows, *self.shape), dtype=self.dtype, device=device)
        return self._fill(out, generator if source is None else source).to(self.device)

    def into(
        self,
        out: Tensor,
        generator: Generators,
        targets: Sequence[Tensor] = (),
        sources: Sequence[Tensor] = (),
    ) -> None:
        """Fill (rows, B, T, Da), a contiguous tensor on the device, and copy sources to targets.

        On a GPU that is one launch where the generator is there too.
        """
        if (launch := self.one_launch(out, generator)) is not None:
            torch.ops.dpa.loop_inputs_(targets, sources, *launch)
            return
        if targets:
            torch.ops.dpa.loop_inputs_(targets, sources)
        source = generator_on(self.device, generator)
        if source is not None and out.dtype == self.dtype:
            self._fill(out, source)
        else:
            out.copy_(self(generator))

    def one_launch(self, out: Tensor, generator: Generators) -> Launch | None:
        """Return how a launch that copies inputs fills ``out`` as well, or None."""
        source = generator_on(self.device, generator)
        if source is None or out.dtype != self.dtype or self.device.type != "cuda":
            return None
        return (out, self._count, source) if self._is_one_launch(self.device) else None

    def _is_one_launch(self, device: torch.device) -> bool:
        plain = self._in_a_row and not any(self._transposed)
        return plain and _agrees_with_pytorch(device, self.shape, self.dtype)

    def _fill(self, out: Tensor, generator: Generators) -> Tensor:
        if not self._count:
            return out.zero_()
        if isinstance(generator, torch.Generator) and self._is_one_launch(out.device):
            torch.ops.dpa.normal_draws.out(self._count, generator, out=out)
            return out
        for row, random, turned in zip(out, self._flags, self._transposed, strict=True):
            if random:
                row.copy_(draw_normal(self.shape, generator, out.device, self.dtype, turned))
            else:
                row.zero_()
        return out
