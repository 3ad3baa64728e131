"""Check what the robot example wrote: check_robot.py PRINTED STEPS CYCLES HZ [short]

``short``: there must be cycles without an action. Policies that act in turn have none.
"""

import csv
import math
import re
import sys
from pathlib import Path


def check(printed: str, steps: list[dict[str, int]], cycles: int, hz: int, short: bool) -> None:
    """Compare the summary with the notes of each cycle, and these with one another."""
    pattern = rf"{cycles} cycles at {hz} Hz, (\d+) without an action, (\d+) late\n"
    without, late = map(int, re.search(pattern, printed).groups())
    assert without + len(steps) == cycles
    continuing = "continuing" in printed
    assert without > 0 if short else continuing or without == 0, without
    numbers = [step["cycle"] for step in steps]
    assert numbers == sorted(set(numbers)) and 0 <= numbers[0] <= numbers[-1] < cycles
    period = 1_000_000_000 // hz
    late_of_sent = sum(step["sent"] - step["due"] > period for step in steps)
    assert late_of_sent <= late <= late_of_sent + without, (late_of_sent, late, without)
    for step, then in zip(steps[1:], steps[:-1], strict=True):
        waited = (step["cycle"] - then["cycle"]) * period
        assert step["due"] >= then["due"] + waited, (then, step)
        if continuing and waited == period:  # the chunk follows from an earlier cycle's observation
            assert step["age"] >= step["sent"] - then["sent"], (then, step)
    for step in steps:
        assert step["sent"] >= step["due"] >= 0 < step["age"], step
        if not continuing:  # the observation is read when the cycle is due
            assert step["age"] <= step["sent"] - step["due"], step
    ages = sorted(step["age"] / 1e6 for step in steps)
    found = re.search(r"age of the observation ms: median (.*), worst (.*)\n", printed)
    for said, age in zip(found.groups(), (ages[(len(ages) - 1) // 2], ages[-1]), strict=True):
        assert math.isclose(float(said), age, abs_tol=0.006), (said, age)


if __name__ == "__main__":
    printed, steps, cycles, hz, *short = sys.argv[1:]
    with Path(steps).open() as file:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]
    check(Path(printed).read_text(), rows, int(cycles), int(hz), bool(short))
