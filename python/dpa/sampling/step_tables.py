"""The steps of a sampler's scheduler, by how many there are and where they run."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from dpa.sampling.arguments import check
from dpa.schedulers.conversion import from_diffusers
from dpa.schedulers.tables import LiveSteps, Steps, StepTable

_CPU = torch.device("cpu")


class Tables:
    """Tables of a scheduler of diffusers, or of a :class:`StepTable`, each made once."""

    def __init__(self, scheduler: Any, options: dict[str, Any]):
        self._scheduler, self._options = scheduler, options
        self._made: dict[Any, Steps] = {}

    def find(
        self,
        steps: int | None,
        fallback: bool,
        device: torch.device = _CPU,
        dtype: torch.dtype = torch.float64,
        first_step: int = 0,
    ) -> Steps:
        """Return the steps from ``first_step`` on, with coefficients of that dtype.

        ``fallback``: whether the scheduler's own step runs where no table expresses it.
        """
        whole = (steps, first_step)
        key, base = (whole, device, dtype), (whole, _CPU, torch.float64)
        if base not in self._made:
            self._made[base] = self._build(steps, fallback, first_step).to(*base[1:])
        if key not in self._made:
            self._made[key] = self._made[base].to(device, dtype)
        return self._made[key]

    def _build(self, steps: int | None, fallback: bool, first_step: int) -> Steps:
        if not isinstance(self._scheduler, StepTable):
            try:
                return from_diffusers(
                    self._scheduler, steps, **self._options, first_step=first_step
                )
            except (TypeError, ValueError) as reason:
                if not fallback or first_step:
                    raise
                live = LiveSteps(self._scheduler, steps, **self._options)
                warnings.warn(f"{reason}: the scheduler's own step runs instead", stacklevel=2)
                return live
        right, rule = steps in (None, len(self._scheduler)), "be the StepTable's"
        check(right, "num_inference_steps", f"{rule} {len(self._scheduler)}", steps)
        return self._scheduler.after(first_step) if first_step else self._scheduler
