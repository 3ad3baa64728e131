"""Tables of the integrators with which policies follow a learnt velocity from noise to actions.

A Runge-Kutta step evaluates the network at several points, and each is a step of the table: the
earlier velocities are its history (:class:`MultistepTable`).

Sources: Lipman et al., Flow Matching for Generative Modeling (2022); the tableaux are Euler's, the
explicit midpoint rule, Heun's and the classical one of Runge and Kutta.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from dpa.library.checks import require
from dpa.schedulers.tables import StepTable, table_of

# Of each method: when its stages are, in parts of a step; and for each point after the first, as
# for the step's end, the weights of the velocities before it.
_TABLEAUX: dict[str, tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]] = {
    "euler": ((0.0,), ((1.0,),)),
    "midpoint": ((0.0, 0.5), ((0.5,), (0.0, 1.0))),
    "heun": ((0.0, 1.0), ((1.0,), (0.5, 0.5))),
    "rk4": (
        (0.0, 0.5, 0.5, 1.0),
        ((0.5,), (0.0, 0.5), (0.0, 0.0, 1.0), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
    ),
}


def flow_matching(
    times: int | Sequence[float],
    method: str = "euler",
    *,
    timestep_scale: float = 1.0,
    draws_noise: bool = False,
) -> StepTable:
    """Return the steps that integrate ``dx/dt = network(x, t)`` over the times.

    Args:
        times: in the order in which they are passed, from noise at 0 to actions at 1; or how many
            equal steps lead there.
        method: "euler", "midpoint", "heun" or "rk4": 1, 2, 2 and 4 evaluations a step.
        timestep_scale: what the network takes for the time t is ``timestep_scale * t``.
        draws_noise: whether each evaluation takes noise from the random stream and does not use it.

    Raises:
        ValueError: an unknown method, or fewer than two times.

    """
    rule = f"be one of {', '.join(_TABLEAUX)}"
    require(method in _TABLEAUX, "flow_matching: method", rule, repr(method))
    if isinstance(times, int):
        times = [step / times for step in range(times + 1)] if times > 0 else []
    enough = len(times) > 1 and all(math.isfinite(time) for time in times)
    require(enough, "flow_matching: times", "be two or more, finite", list(times))
    stages, weights = _TABLEAUX[method]
    passed, rows, history = [], [], []
    for start, end in itertools.pairwise(times):
        length, before = end - start, (0.0,) * len(stages)
        for stage, moment in enumerate(stages):
            after = (*weights[stage], *[0.0] * (len(stages) - stage - 1))
            moves = [length * (a - b) for a, b in zip(after, before, strict=True)]
            passed.append(start + moment * length)
            rows.append([0.0, 1.0, moves[stage], 1.0, 0.0, 0.0])  # x0 is the velocity
            earlier = moves[:stage][::-1]
            history.append((*earlier, *[0.0] * (len(stages) - 1 - stage)))
            before = after
    now = torch.tensor(passed, dtype=torch.float64, device="cpu")
    steps = (timestep_scale * now).float(), rows, math.inf, (draws_noise,) * len(rows)
    whole = times[-1] == 1 and all(0 <= time <= 1 for time in times)
    known = {
        "levels": torch.stack([now, 1 - now], 1) if whole else None,
        "x0": torch.stack([torch.ones_like(now), times[-1] - now], 1),
    }
    return table_of(*steps, history, **known)
