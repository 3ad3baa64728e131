"""The example that samples the next chunk while the robot executes the last one."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch

import dpa

FILE = Path(__file__).parents[2] / "docs" / "robot-python" / "control_loop.py"
HORIZON = 8


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("control_loop", FILE)
    module = sys.modules["control_loop"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("control_loop")


class Robot:
    """It observes the number of observations before, which is the step but for the first."""

    def __init__(self):
        self.observed, self.sent = -1, []

    def read(self):
        self.observed += 1
        return torch.tensor([max(0.0, self.observed - 1.0)])


class Policy:
    """The action of each step is the step, and the number of the chunk that it comes of."""

    def __init__(self, *seconds, horizon=HORIZON):
        self.seconds, self.horizon, self.given = seconds, horizon, []

    def __call__(self, observation, chunk, weights):
        number = len(self.given)
        self.given.append((int(observation[0]), chunk, weights))
        time.sleep(self.seconds[min(number, len(self.seconds) - 1)])
        steps = observation + torch.arange(self.horizon)
        return torch.stack([steps, torch.full_like(steps, number)], dim=1)


def run(example, policy, steps, hz):
    robot = Robot()
    loop = example.ControlLoop(policy, robot.read, robot.sent.append, hz)
    return loop.run(steps), torch.stack(robot.sent)


def test_every_step_gets_its_own_action(example):
    policy = Policy(0.0, 0.0, 0.012)
    report, sent = run(example, policy, steps=300, hz=100)  # a busy machine makes fewer chunks
    assert sent[:, 0].tolist() == [step for step, *_ in report.sent]
    assert len(sent) + report.missed == 300
    assert sent[:, 1].unique().numel() > 3  # chunks
    for (step, due, at, age), after in zip(report.sent, report.sent[1:], strict=False):
        assert at >= due and age > 0 and after[1] - due == pytest.approx((after[0] - step) / 100)
    # The second call only warms up. From then on what is left of the last chunk is continued.
    for number in range(2, len(policy.given)):
        begin, chunk, weights = policy.given[number]
        if chunk is None:
            continue
        assert chunk.shape == weights.shape == (1, HORIZON, 2)
        last = policy.given[number - 1 if number > 2 else 0][0]
        left = HORIZON - (begin - last)
        assert chunk[0, :left, 0].tolist() == list(range(begin, begin + left))
        assert weights[0, 0, 0] == 1 and not weights[0, left:].any()


def test_steps_without_an_action_are_counted(example):
    # The third chunk takes far longer than a chunk has actions, and than a thread is kept waiting.
    report, sent = run(example, Policy(0.0, 0.0, 2.0, 0.0), steps=110, hz=50)
    assert report.missed >= 3
    assert report.overrun and max(report.sampling) >= 2.0
    assert sent[:, 0].tolist() == [step for step, *_ in report.sent]
    held = report.missed + len(sent)
    assert held == 110 and f"110 steps, {report.missed} without an action" in str(report)


def test_late_steps_are_counted(example):
    robot = Robot()

    def slow(action):
        time.sleep(0.05 if len(robot.sent) == 4 else 0)
        robot.sent.append(action)

    report = example.ControlLoop(Policy(0.0), robot.read, slow, hz=50).run(10)
    assert report.late >= 2 and len(robot.sent) + report.missed == 10


def test_what_sampling_raises_ends_the_loop(example):
    class Fails(Policy):
        def __call__(self, *given):
            if len(self.given) == 3:
                raise RuntimeError("no observation")
            return super().__call__(*given)

    robot = Robot()
    loop = example.ControlLoop(Fails(0.0), robot.read, robot.sent.append, hz=100)
    with pytest.raises(RuntimeError, match="no observation"):
        loop.run(10000)
    assert robot.observed < 9000


def test_a_held_chunk_has_no_jump(example):
    """With dpa's sampler: of what is executed meanwhile, nothing changes."""
    torch.manual_seed(0)
    sample = example.make_sample(2, 16, "cpu", continuing=True)
    observation = torch.zeros(2)
    last = example.Chunk(0, 0.0, sample(observation, None, None))
    chunk, weights = last.left(4, delay=3)
    torch.testing.assert_close(sample(observation, chunk, weights)[:3], last.actions[4:7])
    assert last.left(16, delay=1) is None and last.action(16) is None and last.action(-1) is None
    abrupt = example.make_sample(2, 16, "cpu", continuing=False)
    assert not torch.equal(abrupt(observation, chunk, weights)[:3], last.actions[4:7])
    assert dpa.prefix_weights(3, 12, 16).tolist() == weights[0, :, 0].tolist()


def test_it_runs_as_a_program(example, monkeypatch, capsys):
    options = ["--hz", "20", "--seconds", "0.5", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["control_loop.py", *options])
    example.main()
    assert capsys.readouterr().out.startswith("10 steps, ")
