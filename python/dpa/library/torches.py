"""Which torch to install: one that the library has ops for and that LeRobot, where it is, allows.

Knows of torch by its version alone: what is asked here may be why it cannot be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata


def lerobot_bound() -> str | None:
    """What the installed LeRobot requires of torch, such as ``<2.11.0,>=2.2.1``."""
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(line) for line in metadata.requires("lerobot") or ()]
        bounds = [
            str(one.specifier)
            for one in wanted
            if one.name == "torch" and (one.marker is None or one.marker.evaluate({"extra": ""}))
        ]
    except Exception:  # no LeRobot, no packaging, or metadata that is damaged
        return None
    return ",".join(bounds) or None


def install(has: Sequence[str], here: str | None, bound: str | None) -> str:
    """The command that installs the nearest torch of which a library has ops, within a bound.

    Args:
        has: minor versions, such as ``2.11``.
        here: the version that is installed; without one the newest is taken.
        bound: LeRobot's.

    """
    allowed = [minor for minor in has if _allows(bound, minor)]
    if not allowed:
        return f"take a dpa wheel with ops for a torch that LeRobot allows ({bound})"
    wanted = _number(here or allowed[-1])
    nearest = min(allowed, key=lambda minor: (abs(_number(minor) - wanted), -_number(minor)))
    return f'pip install "torch=={nearest}.*"'


def _allows(bound: str | None, minor: str) -> bool:
    """Whether a bound has a release of a minor version."""
    if bound is None:
        return True
    from packaging.specifiers import SpecifierSet

    releases = (f"{minor}.{patch}" for patch in range(10))
    return any(SpecifierSet(bound).contains(release) for release in releases)


def _number(version: str) -> int:
    major, minor = version.split(".")[:2]
    return 1000 * int(major) + int(minor)
