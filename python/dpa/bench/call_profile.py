"""Where a call of a policy goes, plain and accelerated: preprocessing, encoder, loop, host.

The parts are differences of calls that hold one another: the whole call, from a prepared
observation to a chunk, the loop. So they add up to the whole, also where one graph runs several.
"""

from __future__ import annotations

from typing import Any

import torch

from dpa.bench.checkpoint import Options, calls_of, found_of, subjects
from dpa.bench.timing import medians
from dpa.library.devices import choose_device

PARTS = ("preprocessing", "encoder", "loop", "host")
_WARM_UP = 3  # compare, capture, replay


def profile(options: Options) -> dict[str, Any]:
    """Return milliseconds of the call and its parts, plain and accelerated, ready for JSON.

    ``host`` is what the other parts leave of the call: the queues of observations and actions,
    postprocessing, and the way between the parts.

    Raises:
        ValueError: the checkpoint, or the device, is refused; the message says why.

    """
    device = choose_device(options.device)
    with torch.no_grad():
        plain, fast = subjects(options, device)
        calls = calls_of(plain, fast, ("whole", "prepare", "chunk", "loop"))
        for call in list(calls.values()) * _WARM_UP:
            call()
        times = medians(calls, options.seconds)
    return found_of(options, device, fast, lambda name: parts(times, name))


def parts(times: dict[tuple[str, str], float], name: str) -> dict[str, float]:
    """Milliseconds of the whole call and of :data:`PARTS`; none is below zero, as noise makes it.

    Where only a loop was measured, it is the whole.
    """
    whole = times[name, "whole"]
    loop = min(times.get((name, "loop"), whole), whole)
    chunk = min(max(times.get((name, "chunk"), loop), loop), whole)
    prepare = min(times.get((name, "prepare"), 0.0), whole - chunk)
    host = whole - chunk - prepare
    found = (prepare, chunk - loop, loop, host)
    return {"whole call": whole} | dict(zip(PARTS, found, strict=True))
