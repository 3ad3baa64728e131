"""The loop over a table's steps: what predicts, then the scheduler's step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpa.schedulers.inpainting import Inpainting
from dpa.schedulers.tables import Generators, Steps, StepTable


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


def loop_of(
    steps: tuple[Tensor, Tensor, float, Tensor | None],
    sample: Tensor,
    predict: Callable[[Tensor, int], Tensor],
    condition_data: Tensor | None,
    condition_mask: Tensor | None,
) -> Tensor:
    """Run steps by their timesteps, coefficients, clip and noise; all of them add some, or none."""
    timesteps, coefficients, clip, noise = steps
    table = StepTable(timesteps, coefficients, clip, (noise is not None,) * len(timesteps))
    held = None
    if condition_data is not None:
        held = Inpainting(condition_data, condition_mask, "sample", table)
    return loop(sample, table, predict, lambda step: noise[step], held)
