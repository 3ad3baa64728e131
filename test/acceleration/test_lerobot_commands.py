"""LeRobot's own commands with ``lerobot_policy_dpa`` installed, switched off and absent."""

import json
import sys

import pytest
import torch
from lerobot_commands import (
    NAME,
    command,
    install_plugin,
    is_fast,
    largest_error,
    unload_plugin,
)
from policies import lerobot_policy

for needed in ("lerobot.scripts.lerobot_eval", "yamlinclude"):
    pytest.importorskip(needed, reason="requirements/lerobot.txt", exc_type=ImportError)


pytestmark = pytest.mark.usefixtures("unloaded")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """LeRobot finds the plugin."""
    install_plugin(tmp_path, monkeypatch)


@pytest.fixture
def checkpoint(tmp_path):
    """A small policy for PushT's keypoints, with LeRobot's processors."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import make_pre_post_processors

    policy = lerobot_policy(num_inference_steps=3)
    features = policy.config.input_features
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (2,))
    features["observation.environment_state"] = PolicyFeature(FeatureType.ENV, (16,))
    policy = type(policy)(policy.config)
    config = policy.config
    sizes = {"observation.state": 2, "observation.environment_state": 16, "action": 2}
    stats = {
        name: {
            "mean": torch.full((size,), 200.0),
            "std": torch.full((size,), 100.0),
            "min": torch.zeros(size),
            "max": torch.full((size,), 512.0),
        }
        for name, size in sizes.items()
    }
    folder = tmp_path / "policy"
    policy.save_pretrained(folder)
    for processor in make_pre_post_processors(config, dataset_stats=stats):
        processor.save_pretrained(folder)
    return folder


def evaluate(checkpoint, folder, monkeypatch):
    """Run ``lerobot-eval`` on PushT; return the sum of rewards."""
    pytest.importorskip("gym_pusht", reason="gym-pusht is not installed")
    monkeypatch.setattr("lerobot.scripts.lerobot_eval.write_video", lambda *_: None)
    command(
        "eval",
        monkeypatch,
        policy__path=checkpoint,
        policy__device="cpu",
        env__type="pusht",
        env__obs_type="environment_state_agent_pos",
        env__episode_length=12,
        eval__n_episodes=1,
        eval__batch_size=1,
        output_dir=folder,
    )
    overall = json.loads((folder / "eval_info.json").read_text())["overall"]
    return overall["avg_sum_reward"]


def test_eval_with_the_plugin_absent_present_and_off(
    checkpoint, made, tmp_path, monkeypatch, request, capfd
):
    plain = evaluate(checkpoint, tmp_path / "absent", monkeypatch)
    assert not is_fast(made[-1])
    request.getfixturevalue("installed")
    capfd.readouterr()
    fast = evaluate(checkpoint, tmp_path / "present", monkeypatch)
    printed = "".join(capfd.readouterr())
    assert printed.count("DiffusionPolicy runs accelerated: loop, U-Net") == 1
    assert is_fast(made[-1])
    assert largest_error(made[-1]) < 1e-4
    assert fast == pytest.approx(plain, rel=1e-2, abs=1e-3)  # through contacts
    unload_plugin()
    monkeypatch.setenv("DPA_ACCELERATE", "0")
    off = evaluate(checkpoint, tmp_path / "off", monkeypatch)
    assert off == pytest.approx(plain, rel=1e-6)  # PyTorch's own sums turn with the addresses
    assert NAME in sys.modules and not is_fast(made[-1])


def test_a_wrong_option_leaves_lerobot_running(
    checkpoint, made, installed, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("DPA_DTYPE", "int8")
    evaluate(checkpoint, tmp_path / "wrong", monkeypatch)
    printed = "".join(capfd.readouterr())
    assert "DPA_DTYPE must be one of float32" in printed
    assert not is_fast(made[-1])


@pytest.fixture
def dataset(tmp_path):
    """Two short episodes without images."""
    datasets = pytest.importorskip("lerobot.datasets.lerobot_dataset", exc_type=ImportError)
    import numpy as np

    shapes = {"observation.state": 3, "observation.environment_state": 4, "action": 2}
    features = {
        name: {"dtype": "float32", "shape": (size,), "names": None} for name, size in shapes.items()
    }
    root = tmp_path / "data"
    made = datasets.LeRobotDataset.create("me/data", 10, features, root=root, use_videos=False)
    random = np.random.default_rng(0)
    for _ in range(2):
        for _ in range(12):
            frame = {k: random.standard_normal(v, np.float32) for k, v in shapes.items()}
            made.add_frame({**frame, "task": "move"})
        made.save_episode()
    if hasattr(made, "finalize"):
        made.finalize()
    return root


def train(dataset, folder, monkeypatch, **options):
    """Run ``lerobot-train``; return the weights of the checkpoint that it writes."""
    from safetensors.torch import load_file

    command(
        "train",
        monkeypatch,
        policy__type="diffusion",
        policy__device="cpu",
        policy__push_to_hub="false",
        policy__down_dims="[16,32]",
        policy__diffusion_step_embed_dim=16,
        policy__horizon=8,
        policy__n_action_steps=4,
        dataset__repo_id="me/data",
        dataset__root=dataset,
        batch_size=4,
        steps=2,
        num_workers=0,
        output_dir=folder,
        **options,
    )
    return load_file(folder / "checkpoints" / "000002" / "pretrained_model" / "model.safetensors")


def test_train_with_the_plugin_absent_and_present(
    dataset, made, tmp_path, monkeypatch, request, capfd
):
    plain = train(dataset, tmp_path / "absent", monkeypatch)
    request.getfixturevalue("installed")
    capfd.readouterr()
    fast = train(dataset, tmp_path / "present", monkeypatch)
    assert "".join(capfd.readouterr()).count("DiffusionPolicy runs accelerated") == 1
    assert is_fast(made[-1])
    assert fast.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-4, atol=1e-5)
