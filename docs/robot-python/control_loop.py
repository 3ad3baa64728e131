"""A control loop that samples the next chunk while the robot executes the last one.

    python control_loop.py --hz 20 --seconds 5

One thread acts: at every step of the clock it reads the robot, sends the action of that step, and
notes when. The other thread samples: it takes the newest observation, continues what will be
executed meanwhile, and hands over the chunk. Replace ``make_sample`` by the policy's, and what
reads and moves the robot in ``main``; the rest stays.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import dpa

# From an observation, and from what is left of the last chunk with its weights, (1, T, Da) each or
# None, to the next chunk, (T, Da), on the CPU. Its first action is for the time of the observation:
# a policy of n_obs_steps observations predicts n_obs_steps - 1 before that, which are left out.
Sample = Callable[[Tensor, "Tensor | None", "Tensor | None"], Tensor]


@dataclass(frozen=True)
class Chunk:
    """Actions (T, Da) for the steps from ``first`` on, and the time of their observation."""

    first: int
    observed: float
    actions: Tensor

    def action(self, step: int) -> Tensor | None:
        """Return the action of a step, or None where the chunk has none."""
        place = step - self.first
        return self.actions[place] if 0 <= place < len(self.actions) else None

    def left(self, step: int, delay: int) -> tuple[Tensor, Tensor] | None:
        """Return what is left from a step on, and how much of it holds, (1, T, Da) each."""
        rest = self.actions[step - self.first :]
        if not len(rest):
            return None
        length = len(self.actions)
        chunk = torch.cat([rest, rest[-1:].expand(length - len(rest), -1)])[None]
        weights = dpa.prefix_weights(delay, len(rest), length)[None, :, None]
        return chunk, weights.expand_as(chunk)


@dataclass
class Report:
    """What happened, times in seconds.

    Attributes:
        sent: for each action its step, when it was due, when it was sent, and the age of the
            observation that it follows from.
        missed: steps for which no chunk had an action: the robot held its place.
        late: steps that ended after the next one was due.
        sampling: how long each chunk took.
        overrun: chunks that took more steps than were held for them.
        jumps: how far each chunk's first action to be sent is from the last chunk's for that step.

    """

    sent: list[tuple[int, float, float, float]] = field(default_factory=list)
    missed: int = 0
    late: int = 0
    sampling: list[float] = field(default_factory=list)
    overrun: int = 0
    jumps: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        """Sum it up in four lines."""
        steps = len(self.sent) + self.missed
        took = [1e3 * seconds for seconds in self.sampling] or [float("nan")]
        ages = [1e3 * age for *_, age in self.sent] or [float("nan")]
        jumps = self.jumps or [float("nan")]
        return (
            f"{steps} steps, {self.missed} without an action, {self.late} late\n"
            f"{len(self.sampling)} chunks, {self.overrun} took longer than was held for them; "
            f"sampling ms: median {statistics.median(took):.2f}, worst {max(took):.2f}\n"
            f"age of the observation ms: median {statistics.median(ages):.2f}, "
            f"worst {max(ages):.2f}\n"
            f"jump where chunks meet: median {statistics.median(jumps):.3f}, worst {max(jumps):.3f}"
        )


class ControlLoop:
    """Acts at a fixed rate in the caller's thread, and samples in another.

    Args:
        sample: makes chunks.
        read_observation: of the robot, (Do,).
        send_action: to the robot, (Da,).
        hz: steps a second.
        execute: the least number of steps from one chunk's observation to the next one's.

    """

    def __init__(
        self,
        sample: Sample,
        read_observation: Callable[[], Tensor],
        send_action: Callable[[Tensor], None],
        hz: float,
        execute: int = 1,
    ):
        self.sample, self.read, self.send = sample, read_observation, send_action
        self.period, self.execute = 1 / hz, execute
        self.report = Report()
        self._seen: tuple[int, float, Tensor] | None = None  # step, time, observation
        self._chunk: Chunk | None = None
        self._delays: deque[int] = deque([1], maxlen=8)  # steps from observation to chunk
        self._changed, self._stopped = threading.Condition(), False
        self._error: BaseException | None = None

    def run(self, steps: int) -> Report:
        """Run for a number of steps; raises what sampling raised."""
        observation, now = self.read(), time.monotonic()
        # The robot stands still for the first chunk. The second call compares and captures what
        # continues a chunk, before an action waits for it.
        first = Chunk(0, now, self.sample(observation, None, None))
        self.sample(observation, *first.left(0, 1))
        self._chunk = first
        sampling = threading.Thread(target=self._sample_chunks, daemon=True)
        sampling.start()
        try:
            self._act(steps)
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify()
            sampling.join()
        if self._error is not None:
            raise self._error
        return self.report

    def _act(self, steps: int) -> None:
        start = time.monotonic()
        for step in range(steps):
            due = start + step * self.period
            time.sleep(max(0.0, due - time.monotonic()))
            if self._error is not None:
                return
            observation, now = self.read(), time.monotonic()
            with self._changed:
                self._seen, chunk = (step, now, observation), self._chunk
                self._changed.notify()
            action = chunk.action(step)
            if action is None:
                self.report.missed += 1
            else:
                self.send(action)
                sent = time.monotonic()
                self.report.sent.append((step, due, sent, sent - chunk.observed))
            self.report.late += time.monotonic() > due + self.period

    def _sample_chunks(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._is_due())
                    if self._stopped:
                        return
                    (step, observed, observation), last = self._seen, self._chunk
                self._sample_chunk(step, observed, observation, last)
        except BaseException as error:  # the acting thread raises it
            self._error = error

    def _is_due(self) -> bool:
        return self._seen is not None and self._seen[0] >= self._chunk.first + self.execute

    def _sample_chunk(self, step: int, observed: float, observation: Tensor, last: Chunk) -> None:
        held, start = max(self._delays), time.monotonic()
        actions = self.sample(observation, *(last.left(step, held) or (None, None)))
        self.report.sampling.append(time.monotonic() - start)
        with self._changed:
            chunk = self._chunk = Chunk(step, observed, actions)
            after = self._seen[0] + 1  # the first step to take of it
        self._delays.append(delay := after - step)
        if (was := last.action(after)) is not None and (now := chunk.action(after)) is not None:
            self.report.jumps.append(float((now - was).norm()))
        self.report.overrun += delay > held


def make_sample(steps: int, horizon: int, device: str, continuing: bool) -> Sample:
    """Return a policy: here an untrained network, small where there is no GPU."""
    from diffusers import DDIMScheduler

    widths = (64, 128) if device == "cpu" else (256, 512, 1024)
    unet = dpa.nn.ConditionalUnet1D(2, global_cond_dim=2, down_dims=widths).to(device).eval()
    scheduler = DDIMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
    dtype = None if device == "cpu" else torch.bfloat16
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, dtype, horizon=horizon)

    def sample(observation: Tensor, chunk: Tensor | None, weights: Tensor | None) -> Tensor:
        held = {}
        if continuing and chunk is not None:
            held = {"condition_data": chunk.to(device), "condition_mask": weights.to(device)}
        return sampler(observation[None].to(device), inpainting="x0", **held)[0].cpu()

    return sample


def main() -> None:
    """Drive a robot that is a number: it goes where it is sent, at once."""
    parser = argparse.ArgumentParser(description="Sample the next chunk while the last one runs.")
    parser.add_argument("--hz", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of DDIM")
    parser.add_argument("--horizon", type=int, default=16)
    parser.add_argument("--execute", type=int, default=4, help="least steps between two chunks")
    parser.add_argument("--abrupt", action="store_true", help="continue no chunk")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places = [torch.zeros(2)]
    sample = make_sample(given.steps, given.horizon, device, not given.abrupt)
    loop = ControlLoop(sample, lambda: places[-1], places.append, given.hz, given.execute)
    print(loop.run(round(given.hz * given.seconds)))


if __name__ == "__main__":
    main()
