"""Processes that compile at once, before anything is measured, and measure one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

_READY, _ANSWER = "ready", "answer: "


class Process:
    """A module that runs in a process of its own until it calls :func:`on_request`.

    Args:
        module: what to run, as ``python -m`` does.
        arguments: of its command line.

    """

    def __init__(self, module: str, *arguments: str):
        command = [sys.executable, "-m", module, *arguments]
        self._name = " ".join(command[2:])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._ready = False

    def wait(self) -> None:
        """Wait until it is ready to measure."""
        if not self._ready:
            self._line(_READY)
            self._ready = True

    def answer(self) -> Any:
        """Have it measure, after :meth:`wait`, and return what it found."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = json.loads(self._line(_ANSWER))
        # A process that has compiled takes seconds to end by itself.
        self._process.kill()
        self._process.wait()
        return found

    def _line(self, begin: str) -> str:
        for line in self._process.stdout:
            if line.startswith(begin):
                return line.removeprefix(begin)
        status = self._process.wait()
        raise RuntimeError(
            f"{self._name} ended with status {status}: python -m {self._name} says why"
        )


def answers(processes: Sequence[Process]) -> list[Any]:
    """What they find, one after the other, once nothing compiles any more."""
    for process in processes:
        process.wait()
    return [process.answer() for process in processes]


def on_request(measure: Callable[[], Any]) -> None:
    """In the process: report ready, wait for the request, send what ``measure`` returns as JSON."""
    print(_READY, flush=True)
    if sys.stdin.readline():  # empty where the parent has ended
        print(_ANSWER + json.dumps(measure()), flush=True)
