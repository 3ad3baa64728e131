"""Where a call of a policy goes, plain and accelerated: preprocessing, encoder, loop, host.

The parts are differences of calls that hold one another: the whole call, from a prepared
observation to a chunk, the loop. So they add up to the whole, also where one graph runs several.
"""

from __future__ import annotations

from typing import Any

from dpa.bench.checkpoint import Options, compared, subjects

PARTS = ("preprocessing", "encoder", "loop", "host")
_WARM_UP = 3  # compare, capture, replay


def profile(options: Options) -> dict[str, Any]:
    """Return milliseconds of the call and its parts, plain and accelerated, ready for JSON.

    ``host`` is what the other parts leave of the call: the queues of observations and actions,
    postprocessing, and the way between the parts.

    Raises:
        ValueError: the checkpoint, or the device, is refused; the message says why.

    """
    kinds = ("whole", "prepare", "chunk", "loop")
    return compared(options, *subjects(options), kinds, parts, _WARM_UP)


def parts(times: dict[str, float], _steps: int) -> dict[str, float]:
    """Milliseconds of the whole call and of :data:`PARTS`; none is below zero, as noise makes it.

    Where only a loop was measured, it is the whole.
    """
    whole = times["whole"]
    loop = min(times.get("loop", whole), whole)
    chunk = min(max(times.get("chunk", loop), loop), whole)
    prepare = min(times.get("prepare", 0.0), whole - chunk)
    host = whole - chunk - prepare
    found = (prepare, chunk - loop, loop, host)
    return {"whole call": whole} | dict(zip(PARTS, found, strict=True))
