"""LeRobot's own commands with ``lerobot_policy_dpa`` installed, switched off and absent."""

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from policies import lerobot_policy

from dpa.acceleration import construction
from dpa.acceleration.policy_loop import FastLoop
from dpa.tracking.replacing import replaced

for needed in ("lerobot.scripts.lerobot_eval", "yamlinclude"):
    pytest.importorskip(needed, reason="requirements/lerobot.txt", exc_type=ImportError)
PLUGIN = Path(__file__).parents[2] / "plugins" / "lerobot"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    yield
    construction.leave_new()
    sys.modules.pop("lerobot_policy_dpa", None)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The plugin as pip leaves it: a module, and a folder that names the distribution."""
    monkeypatch.syspath_prepend(PLUGIN)
    facts = tmp_path / "site" / "lerobot_policy_dpa-0.1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: lerobot_policy_dpa\nVersion: 0\n")
    monkeypatch.syspath_prepend(facts.parent)


@pytest.fixture
def made(monkeypatch):
    """Every policy that is made from now on."""
    modeling = sys.modules["lerobot.policies.diffusion.modeling_diffusion"]
    found, construct = [], modeling.DiffusionPolicy.__init__

    def init(self, *args, **kwargs):
        found.append(self)
        construct(self, *args, **kwargs)

    monkeypatch.setattr(modeling.DiffusionPolicy, "__init__", init)
    return found


def command(name, monkeypatch, **options):
    """Run a command of LeRobot's in this process."""
    main = pytest.importorskip(f"lerobot.scripts.lerobot_{name}", exc_type=ImportError).main
    given = [f"--{option.replace('__', '.')}={value}" for option, value in options.items()]
    monkeypatch.setattr(sys, "argv", [f"lerobot-{name}", *given])
    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    try:
        main()
    finally:
        root.handlers[:] = handlers


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
        env__episode_length=24,
        eval__n_episodes=1,
        eval__batch_size=1,
        output_dir=folder,
    )
    overall = json.loads((folder / "eval_info.json").read_text())["overall"]
    return overall["avg_sum_reward"]


def is_fast(policy):
    return isinstance(replaced(policy.diffusion, "conditional_sample"), FastLoop)


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
    errors = replaced(made[-1].diffusion, "conditional_sample").shadow.errors
    assert errors and max(errors.values()) < 1e-4
    assert fast == pytest.approx(plain, rel=1e-2, abs=1e-3)  # through contacts
    construction.leave_new()
    sys.modules.pop("lerobot_policy_dpa")
    monkeypatch.setenv("DPA_ACCELERATE", "0")
    off = evaluate(checkpoint, tmp_path / "off", monkeypatch)
    assert off == pytest.approx(plain, rel=1e-6)  # PyTorch's own sums turn with the addresses
    assert "lerobot_policy_dpa" in sys.modules and not is_fast(made[-1])


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
