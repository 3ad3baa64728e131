"""The scheduler that a checkpoint names, made live."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpa.library.checks import first_line

# The usual configuration, for checkpoints that hold none.
USUAL_SCHEDULER = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 100,
    "beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "epsilon",
    "clip_sample": True,
}


def make_scheduler(config: Mapping[str, Any], kind: str | None) -> Any:
    """Make a live scheduler of diffusers; ``kind`` (DDIM, DDPM) replaces the configuration's class.

    Raises:
        ValueError: diffusers knows no such class, or the class not these options.
        RuntimeError: diffusers is not installed.

    """
    try:
        import diffusers
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "the scheduler's table needs diffusers: pip install diffusers"
        ) from error
    name = f"{kind}Scheduler" if kind else str(config.get("_class_name"))
    made = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if made is None:
        raise ValueError(f"scheduler must be a class of diffusers, got {name}")
    # One class's options that the other does not have, such as DDPM's variance_type, are dropped.
    known = inspect.signature(made.__init__).parameters
    try:
        return made(**{option: value for option, value in config.items() if option in known})
    except Exception as error:  # whatever diffusers' code makes of these values
        reason = f"scheduler must have options that {name} takes, got: {first_line(error)}"
        raise ValueError(reason) from None


def left_out(config: Mapping[str, Any], scheduler: Any) -> list[str]:
    """Name the options of a configuration that its class does not have, or else the scheduler's.

    Those that the configuration's class has and another, chosen one lacks are no news.
    """
    import diffusers

    named = getattr(diffusers, str(config.get("_class_name")), None)
    kind = named if isinstance(named, type) else type(scheduler)
    known, name = inspect.signature(kind.__init__).parameters, kind.__name__
    return [
        f"scheduler: {name} has no {option}; left out, got {value!r}"
        for option, value in config.items()
        if option not in known and not option.startswith("_")
    ]


def read_scheduler_config(path: Path) -> dict[str, Any]:
    """Read a ``scheduler_config.json`` as diffusers writes it.

    Raises:
        ValueError: it is no JSON object with a ``_class_name``.

    """
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON: {error}") from None
    if not isinstance(config, dict) or "_class_name" not in config:
        raise ValueError(f"{path}: must be a JSON object with _class_name, as diffusers writes it")
    return config
