"""A scheduler's whole sampling process as a table of six numbers a step."""

from .conversion import check_kind, from_diffusers
from .flow import flow_matching
from .tables import LiveSteps, MultistepTable, StepTable

__all__ = [
    "LiveSteps",
    "MultistepTable",
    "StepTable",
    "check_kind",
    "flow_matching",
    "from_diffusers",
]
