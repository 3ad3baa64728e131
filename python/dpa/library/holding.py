"""Attributes that have a value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def holding(owner: object, **values: Any) -> Iterator[None]:
    """Give attributes of an object these values inside, and back what they had; None if nothing."""
    before = {name: getattr(owner, name, None) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
