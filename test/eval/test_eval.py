"""dpa eval: real simulators, a policy trained on a script's demonstrations, clear errors."""

import hashlib
import inspect
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import fit_lerobot
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from dpa.cli.app import app
from dpa.eval import environments, episodes

LEROBOT = "lerobot.policies.diffusion.modeling_diffusion"
lerobot = pytest.importorskip(LEROBOT, reason="LeRobot is not installed", exc_type=ImportError)
pytest.importorskip("gymnasium", reason="gymnasium is not installed")


def run(*arguments):
    """Run ``dpa eval``; return what it printed as JSON."""
    result = CliRunner().invoke(app, ["eval", *map(str, arguments), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def error(*arguments):
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code != 0 and result.exception is not None
    return str(result.exception) if result.exit_code == 1 else result.output


def kept(train, **options):
    """A folder with what ``train`` trains, in the build folder: the first run of the tests trains.

    Another one for other options, scripts, or versions of what trains.
    """
    scripts = (Path(inspect.getfile(code)).read_text() for code in (train, fit_lerobot))
    made_of = (*scripts, repr(options), torch.__version__, version("lerobot"), version("numpy"))
    digest = hashlib.sha256("".join(made_of).encode()).hexdigest()[:16]
    folder = Path(__file__).parents[2] / "build" / "trained" / f"{train.__module__}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            train(Path(made, "policy"), **options)
            os.replace(Path(made, "policy"), folder)
    return folder


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("gymnasium_robotics", reason="gymnasium-robotics is not installed")
    from train_fetch_reach import train

    return kept(train, steps=400, episodes=40, batch_size=32)  # 9 of the 12 episodes below succeed


def test_the_same_episodes_succeed_when_accelerated(trained):
    results = run(trained, "--env", "FetchReach", "--episodes", 12, "--compare")
    plain, fast = results["runs"]["plain"], results["runs"]["accelerated"]
    assert plain["success"] >= 0.6
    assert fast["successes"] == plain["successes"] and results["same_outcomes"]
    # Rounding in the seventh digit, through a contact-free arm and 50 steps of feedback.
    assert results["largest_action_difference"] < 0.02
    loop = next(part for part in results["acceleration"] if part["part"] == "loop")
    assert loop["active"] and max(loop["errors"]) < 1e-4
    assert plain["plans"] == fast["plans"] == 12 * 7  # chunks of 8 actions in 50 steps
    assert 0 < fast["plan_ms"]["p50"] <= fast["plan_ms"]["p90"] <= fast["plan_ms"]["p99"]


@pytest.fixture(scope="module")
def trained_on_images():
    pytest.importorskip("gym_pusht", reason="gym-pusht is not installed")
    from train_push_t import train

    return kept(train)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_episodes_succeed_from_images(trained_on_images, dtype):
    """The T lies on either side of its goal, and only the image says on which."""
    env = ("--env", "train_push_t:PushTBack-v0", "--dtype", dtype)
    results = run(trained_on_images, *env, "--episodes", 10, "--compare")
    plain, fast = results["runs"]["plain"], results["runs"]["accelerated"]
    assert plain["success"] >= 0.6
    assert fast["successes"] == plain["successes"] and results["same_outcomes"]
    active = {part["part"] for part in results["acceleration"] if part["active"]}
    assert active >= {"encoder", "loop"}


def test_an_untrained_policy_fails(trained, tmp_path):
    """What succeeds above is the training, not the environment."""
    from lerobot.configs.policies import PreTrainedConfig

    config = PreTrainedConfig.from_pretrained(trained)
    torch.manual_seed(1)
    lerobot.DiffusionPolicy(config).save_pretrained(tmp_path)
    for file in trained.glob("policy_*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    results = run(tmp_path, "--env", "FetchReach", "--episodes", 10, "--steps", 5)
    assert results["runs"]["accelerated"]["success"] <= 0.3


@pytest.fixture(scope="module")
def pusht_policy(tmp_path_factory):
    """LeRobot's policy of images, with small random weights."""
    pytest.importorskip("gym_pusht", reason="gym-pusht is not installed")
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors

    config = DiffusionConfig(
        input_features={
            "observation.image": PolicyFeature(FeatureType.VISUAL, (3, 96, 96)),
            "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        device="cpu",
        pretrained_backbone_weights=None,
        use_group_norm=True,
        crop_shape=(84, 84),
        horizon=16,
        n_action_steps=8,
        down_dims=(32, 64),
        num_inference_steps=10,
    )
    stats = {
        "observation.image": {"mean": torch.zeros(3, 1, 1), "std": torch.ones(3, 1, 1)},
        "observation.state": {"min": torch.zeros(2), "max": torch.full((2,), 512.0)},
        "action": {"min": torch.zeros(2), "max": torch.full((2,), 512.0)},
    }
    folder = tmp_path_factory.mktemp("pusht")
    for part in (
        lerobot.DiffusionPolicy(config),
        *make_diffusion_pre_post_processors(config, stats),
    ):
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_images_in_pusht_with_a_video(pusht_policy, suffix, tmp_path):
    video = tmp_path / f"episodes.{suffix}"
    where = ("--env", "PushT", "--episodes", 1, "--max-steps", 20, "--video", video)
    results = run(pusht_policy, *where, "--compare")
    assert results["runs"]["plain"]["plans"] == results["runs"]["accelerated"]["plans"] == 3
    assert results["largest_action_difference"] < 0.05  # of 512 pixels, through contacts
    if suffix == "gif":
        from PIL import Image

        frames, size = Image.open(video).n_frames, Image.open(video).size
    else:
        import av

        with av.open(str(video)) as container:
            pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        frames, size = len(pictures), pictures[0].shape[1::-1]
    assert frames == 21 and size == (680, 680)


@pytest.mark.parametrize(
    ("options", "states"),
    [
        (["--plain"], dict.fromkeys(("loop", "encoder", "U-Net"), "can be accelerated")),
        (
            ["--mode", "step"],
            {"loop": "can be accelerated", "encoder": "accelerated", "U-Net": "accelerated"},
        ),
    ],
)
def test_the_text_claims_no_acceleration_that_there_was_not(options, states, pusht_policy):
    command = ["eval", str(pusht_policy), "--env", "PushT", "--episodes", "1", "--max-steps", "20"]
    result = CliRunner().invoke(app, [*command, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, (result.output, result.exception)
    for part, state in states.items():
        assert f" ({part}): {state}: " in result.output, result.output


def test_what_is_refused(pusht_policy, tmp_path):
    env = ("--env", "PushT")
    assert "there is no such file" in error(tmp_path, *env)
    (tmp_path / "a.ckpt").touch()
    assert "must be a folder that LeRobot's save_pretrained wrote" in error(
        tmp_path / "a.ckpt", *env
    )
    assert "policy takes observation.image" in error(pusht_policy, "--env", "FetchReach")
    assert "env: Environment `Nowhere` doesn't exist" in error(pusht_policy, "--env", "Nowhere-v0")
    assert "must be a dict" in error(pusht_policy, "--env", "CartPole-v1")
    assert "video: must end in .gif or .mp4" in error(pusht_policy, *env, "--video", "a.avi")
    assert "'fast' is not one of 'loop', 'step'" in error(pusht_policy, *env, "--mode", "fast")
    assert "exclude each other" in error(pusht_policy, *env, "--plain", "--compare")
    assert "--mode must be left out" in error(pusht_policy, *env, "--plain", "--mode", "loop")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((pusht_policy / name).read_bytes())
    assert "no policy_preprocessor.json: save the processors beside it" in error(tmp_path, *env)
    weights, config = (tmp_path / name for name in ("model.safetensors", "config.json"))
    save_file({"normalize_inputs.buffer_observation_state.mean": torch.zeros(2)}, weights)
    assert "before LeRobot 0.4; python -m lerobot.processor.migrate" in error(tmp_path, *env)
    for name in ("preprocessor", "postprocessor"):
        (tmp_path / f"policy_{name}.json").write_text(
            '{"steps": [{"state_file": "mean.safetensors"}]}'
        )
    assert "mean.safetensors: there is no such file, which policy_pre" in error(tmp_path, *env)
    (tmp_path / "mean.safetensors").touch()
    assert "LeRobot cannot load it: Error(s) in loading state_dict for DiffusionPolicy: " in error(
        tmp_path, *env
    )
    weights.write_bytes(b"\x00" * 100)
    assert "LeRobot cannot load it: Error while deserializing" in error(tmp_path, *env)
    read = config.read_text()
    config.write_text(read.replace('"type": "diffusion"', '"type": "act"'))
    assert "its policy must be of type diffusion, got act" in error(tmp_path, *env)
    config.write_text(read.replace('"DDIM"', '"Euler"').replace('"DDPM"', '"Euler"'))
    assert "Euler" in error(tmp_path, *env)


def test_observations_under_lerobots_names():
    image = np.full((4, 6, 3), 255, np.uint8)
    observation = {"pixels": {"top": image, "wrist": image}, "agent_pos": np.zeros(3)}
    found = environments.lerobot_observation(observation)
    assert set(found) == {
        "observation.images.top",
        "observation.images.wrist",
        "observation.state",
    }
    top = found["observation.images.top"]
    assert top.shape == (3, 4, 6) and top.dtype == torch.float32 and (top == 1).all()


def test_summary_keeps_the_first_plan_apart():
    make = episodes.Episode
    done = [
        make(3, True, 1.0, np.zeros((5, 2)), [0.5, 0.001]),
        make(4, False, 0.0, np.zeros((5, 2)), [0.003]),
    ]
    found = episodes.summary(done)
    assert found["success"] == 0.5 and found["successes"] == [3] and found["plans"] == 3
    assert found["first_plan_ms"] == 500 and found["plan_ms"]["p50"] == pytest.approx(2.0)
    shorter = [make(3, actions=np.zeros((4, 2))), done[1]]
    assert episodes.largest_difference(done, shorter) == float("inf")
    moved = [make(3, actions=np.full((5, 2), 0.25)), done[1]]
    assert episodes.largest_difference(done, moved) == 0.25
