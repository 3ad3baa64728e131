"""The loop over a table's steps: what predicts, then the scheduler's step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpa.schedulers.inpainting import Inpainting
from dpa.schedulers.tables import Generators, Steps


def loop(
    sample: Tensor,
    table: Steps,
    predict: Callable[[Tensor, int], Tensor],
    draw: Callable[[int], Tensor],
    inpainting: Inpainting | None,
    generator: Generators = None,
) -> Tensor:
    """Run the steps of ``table`` on ``sample``, (B, T, Da).

    ``predict`` and ``draw`` take the number of the step.
    """
    advance = table.stepper(generator)
    for step in range(len(table)):
        if inpainting is not None:
            sample = inpainting.sample(step, sample)
        noise = draw(step) if table.draws_noise[step] else None
        output = predict(sample, step)
        if inpainting is not None:
            output = inpainting.output(step, output, sample)
        sample = advance(step, output, sample, noise)
    return sample if inpainting is None else inpainting.last(sample)
