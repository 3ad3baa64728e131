"""Random numbers, drawn in the order and the pieces in which diffusers draws them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .step_table import Generators


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


def draw_steps(
    draws_noise: Sequence[bool],
    shape: tuple[int, int, int],
    generator: Generators,
    dtype: torch.dtype,
) -> Tensor:
    """Draw the noise of all steps, (S, B, T, Da), on the generator's device.

    One draw a step, since one large draw would not give a stream's numbers in the same places.
    """
    first = generator[0] if isinstance(generator, Sequence) else generator
    assert first is not None
    noise = torch.empty((len(draws_noise), *shape), dtype=dtype, device=first.device)
    for step, needed in zip(noise, draws_noise, strict=True):
        if not needed:
            step.zero_()
        elif isinstance(generator, Sequence):
            step.copy_(draw_normal(shape, generator, noise.device, dtype))
        else:
            step.normal_(generator=generator)
    return noise


def draw_loop(
    first: bool,
    draws_noise: Sequence[bool],
    shape: tuple[int, int, int],
    generator: Generators,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Draw all that a loop draws, in its order: the sample (where ``first``), then every step's.

    Returns:
        (1 + S, B, T, Da), (1, ...), (S, ...) or, where nothing is drawn, (0, ...), on ``device``.

    """
    parts = [torch.empty(0, *shape, dtype=dtype, device=device)]
    if first:
        parts.append(draw_normal(shape, generator, device, dtype)[None])
    if any(draws_noise):
        parts.append(draw_steps(draws_noise, shape, generator, dtype).to(device))
    return torch.cat(parts)
