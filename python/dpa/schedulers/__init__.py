"""A scheduler's whole sampling process as a table of six numbers a step."""

from .conversion import check_kind, from_diffusers
from .tables import LiveSteps, MultistepTable, StepTable

__all__ = ["LiveSteps", "MultistepTable", "StepTable", "check_kind", "from_diffusers"]
