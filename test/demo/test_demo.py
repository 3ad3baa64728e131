"""The demo: the rules of its world, its checkpoint, and a tiny run from end to end."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

pytest.importorskip("diffusers")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL")

import dpa
from dpa.cli import demo as command
from dpa.demo import Options, pipeline, report, run, train
from dpa.demo import world as W
from dpa.demo.compare import compare
from dpa.demo.rollout import judge, rollout
from dpa.library.files import replacing

CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def one_world():
    """Start (-1, 0), goal (1, 0), a disc of radius 0.25 at the origin."""
    points = ([[-1.0, 0.0]], [[1.0, 0.0]], [[0.0, 0.0]])
    return W.World(*(torch.tensor(point) for point in points), torch.tensor([0.25]))


def move(*points):
    return [torch.tensor([point]) for point in points]


def test_a_move_through_the_disc_collides_even_where_both_ends_are_free():
    world = one_world()
    assert W.collides(world, *move((-0.5, 0.0), (0.5, 0.0))).item()
    assert W.collides(world, *move((-0.1, 0.26), (0.1, 0.24))).item()
    assert not W.collides(world, *move((-0.5, 0.26), (0.5, 0.26))).item()
    assert not W.collides(world, *move((-0.5, 0.0), (-0.3, 0.0))).item()


def test_the_side_is_that_of_one_who_looks_at_the_goal():
    world = one_world()
    assert W.crossing_side(world, *move((-0.1, 0.5), (0.1, 0.5))).item() == W.LEFT
    assert W.crossing_side(world, *move((-0.1, -0.5), (0.1, -0.5))).item() == W.RIGHT
    assert W.crossing_side(world, *move((-0.3, 0.5), (-0.1, 0.5))).item() == W.NEITHER


def test_an_agent_cannot_outrun_its_limit():
    before, target = move((0.0, 0.0), (5.0, 0.0))
    after = W.step(before.expand(100, 2), target, generator())
    assert (after.norm(dim=-1) <= W.MAX_STEP + 6 * W.DISTURBANCE).all()


def test_demonstrations_succeed_on_both_sides():
    worlds = W.sample_worlds(400, generator())
    result = judge(worlds, W.demonstrate(worlds, generator(1)))
    assert result.success.all()
    assert 0.4 < (result.side == W.LEFT).float().mean() < 0.6
    assert (result.side != W.NEITHER).all()


def test_demonstrations_recover_from_anywhere():
    worlds = W.sample_worlds(400, generator())
    assert judge(*W.demonstrate_recovery(worlds, generator(1))).success.all()


def test_windows_pair_what_is_seen_with_what_follows():
    world = one_world().repeat(2)
    paths = W.demonstrate(world, generator())
    observation, action = W.windows(world, paths)
    assert observation.shape[1] == W.OBSERVATION_DIM
    assert action.shape[1:] == (W.HORIZON, W.ACTION_DIM)
    torch.testing.assert_close(observation[:1], W.observe(world[:1], paths[:1, 0], paths[:1, 0]))
    torch.testing.assert_close(paths[0, 0] + W.decode(action[0]), paths[0, 1 : W.HORIZON + 1])


def test_rollout_stops_at_the_goal_and_at_the_disc():
    world = one_world().repeat(2)
    straight = torch.stack([torch.arange(1, W.HORIZON + 1) * 0.06, torch.zeros(W.HORIZON)], -1)

    def plan(observation):
        return W.encode(straight).expand(len(observation), -1, -1)

    world.centre[0] = torch.tensor([0.0, 0.6])  # out of the way
    result = rollout(world, plan, generator())
    assert result.success.tolist() == [True, False]
    assert result.side.tolist() == [W.RIGHT, W.NEITHER]
    assert result.length[1] < result.length[0] < W.STEP_LIMIT
    end = result.path[1, result.length[1] :]
    assert (end == end[0]).all()
    assert [len(index) for index, _ in result.plans[:3]] == [2, 2, 1]


def test_judge_of_the_bar_names_every_miss():
    good = {"success": 0.95, "left": 0.2, "right": 0.8}
    assert report.judge({"DDPM": good}) == []
    bad = {"success": 0.94, "left": 0.95, "right": 0.05}
    assert len(report.judge({"DDPM": good, "DDIM": bad})) == 2


def test_an_interrupted_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("whole")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("ha")
        raise KeyboardInterrupt
    assert [file.name for file in tmp_path.iterdir()] == ["file.txt"]
    assert path.read_text() == "whole"


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, run(Options(out=out, train_steps=3, episodes=2, device="cpu", quick=True))


def test_a_tiny_run_writes_every_file(tiny_run):
    out, results = tiny_run
    assert {file.name for file in out.iterdir()} == set(results["files"])
    assert "episode.gif" in results["files"] and "checkpoint.pt" in results["files"]
    assert all((out / name).stat().st_size > 0 for name in results["files"])


def test_results_hold_the_figures_of_both_schedulers(tiny_run):
    out, results = tiny_run
    written = json.loads((out / "results.json").read_text())
    assert written == results
    assert written["passed"] is None and written["misses"] == []
    for name in ("DDPM", "DDIM"):
        row, speed = written["rollout"][name], written["compare"][name]
        assert 0 <= row["success"] <= 1 and row["left"] + row["right"] <= 1
        assert speed["ratio"] == pytest.approx(speed["plain_ms"] / speed["dpa_ms"])
        assert speed["max_difference"] < 1e-3
    assert written["training"]["history"][-1]["step"] == 3


def test_cpu_threads_are_as_before_afterwards(tiny_run):
    assert tiny_run[1]["threads"] == 1
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt), pipeline.cpu_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before


def test_the_checkpoint_gives_the_same_policy(tiny_run):
    out, _ = tiny_run
    path = out / "checkpoint.pt"
    torch.load(path, weights_only=True)
    policy, again = train.load(path, CPU), train.load(path, CPU)
    assert isinstance(policy.network.unet, dpa.nn.ConditionalUnet1D)
    sample, condition = torch.randn(2, W.HORIZON, 2), torch.randn(2, W.OBSERVATION_DIM)
    torch.testing.assert_close(
        policy.network(sample, 5, condition), again.network(sample, 5, condition)
    )
    train.save(policy, out / "copy" / "checkpoint.pt")
    copy = train.load(out / "copy" / "checkpoint.pt", CPU)
    for name, value in policy.network.state_dict().items():
        assert torch.equal(value, copy.network.state_dict()[name])
    assert (copy.history, copy.losses) == (policy.history, policy.losses)
    (out / "copy" / "checkpoint.pt").unlink()
    (out / "copy").rmdir()


def test_training_repeats_with_the_seed():
    first, second = (train.train(2, 7, CPU).network.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": 0}, "episodes must be at least 1, got 0"),
        ({"train_steps": -1}, "train_steps must be at least 1, got -1"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"dtype": "int8"}, "dtype must be one of .*, got int8"),
        ({"checkpoint": "x", "train_only": True}, "train_only must not be set with a checkpoint"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
def test_a_bad_device_is_named(device, tmp_path):
    with pytest.raises(ValueError, match=f"device must be .*, got {device}"):
        run(Options(device=device, out=tmp_path))


def test_a_folder_that_cannot_be_fails_before_the_training(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(train, "train", lambda *args, **kwargs: pytest.fail("trained"))
    with pytest.raises(OSError, match="file"):
        run(Options(out=tmp_path / "file" / "out", device="cpu"))


def test_a_bad_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match="checkpoint must be a file, got"):
        train.load(tmp_path / "missing.pt", CPU)
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(ValueError, match=r"text.pt: is damaged or no checkpoint"):
        train.load(tmp_path / "text.pt", CPU)
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="checkpoint must be one that the demo wrote"):
        train.load(tmp_path / "other.pt", CPU)
    whole = {"format": train.CHECKPOINT_FORMAT, "unet": train.UNET, "state_dict": {}}
    for part in whole:
        given = whole | {part: 3}
        torch.save(given, tmp_path / "odd.pt")
        with pytest.raises(ValueError, match=r"checkpoint must .*, got .*odd.pt"):
            train.load(tmp_path / "odd.pt", CPU)


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (None, 0), (False, 1)])
def test_the_command_fails_where_the_bar_is_missed(passed, status, monkeypatch):
    given = []

    def record(options, console):
        given.append(options)
        return {"passed": passed}

    monkeypatch.setattr(command, "run", record)
    app = typer.Typer()
    app.command()(command.demo)
    result = CliRunner().invoke(app, ["--seed", "3", "--quick", "--json"])
    assert result.exit_code == status
    assert json.loads(result.stdout) == {"passed": passed}
    assert (given[0].seed, given[0].quick, given[0].device) == (3, True, "auto")


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-3), (torch.bfloat16, 0.3)]
)
def test_both_ways_sample_the_same_actions_in_every_dtype(dtype, limit):
    torch.manual_seed(2)
    policy = train.Policy(train.Network(train.UNET).eval())
    observations = torch.randn(2, W.OBSERVATION_DIM)
    with torch.no_grad():
        assert compare("DDIM", policy, observations, dtype, 1, 5)["max_difference"] < limit
