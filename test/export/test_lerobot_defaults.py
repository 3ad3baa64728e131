"""Settings that a config.json of LeRobot leaves out: LeRobot's defaults, listed."""

import json
from dataclasses import fields

import pytest
import torch
from exported import DA, DO, UNET, diffusers
from lerobot_names import lerobot_name
from typer.testing import CliRunner

import dpa
from dpa.checkpoints.loading import CheckpointError
from dpa.cli.app import app
from dpa.export.checkpoint import read
from dpa.export.places import files_of
from dpa.export.settings import LEROBOT_DEFAULTS, LEROBOT_SCHEDULER

save_file = pytest.importorskip("safetensors.torch").save_file
FRAMES, T = 2, 16  # of observations, LeRobot's; of actions


@pytest.fixture
def network():
    torch.manual_seed(5)
    return dpa.nn.ConditionalUnet1D(DA, global_cond_dim=FRAMES * DO, **UNET).eval()


@pytest.fixture
def folder(network, tmp_path):
    """A folder with statistics, whose config.json says nothing that has a default."""
    path = tmp_path / "pretrained_model"
    path.mkdir()
    state = {f"diffusion.unet.{lerobot_name(n)}": v for n, v in network.state_dict().items()}
    save_file(state, path / "model.safetensors")
    statistics = {}
    for name, size in {"observation.state": DO, "action": DA}.items():
        low = torch.randn(size)
        statistics |= {f"{name}.min": low, f"{name}.max": low + torch.rand(size) + 0.5}
    save_file(statistics, path / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    state = {"type": "STATE", "shape": [DO]}
    config = {"type": "diffusion", "input_features": {"observation.state": state}}
    (path / "config.json").write_text(json.dumps(config))
    return path, statistics


def configured(path, **settings):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return path


def test_the_defaults_are_lerobot_s():
    kind = pytest.importorskip("lerobot.policies.diffusion.configuration_diffusion").DiffusionConfig
    made = kind(device="cpu")
    assert {*LEROBOT_DEFAULTS} <= {one.name for one in fields(kind)}
    for name, value in LEROBOT_DEFAULTS.items():
        found = getattr(made, name)
        if name == "normalization_mapping":
            found = {kind: mode.value for kind, mode in found.items()}
        assert found == value, name


def test_a_policy_with_no_settings_is_lerobot_s(folder, network, tmp_path):
    path, statistics = folder
    command = ["export", str(path), "--to", "torchscript", "--json", "--scheduler", "DDIM"]
    result = CliRunner().invoke(app, [*command, "--steps", "3"])
    assert result.exit_code == 0, result.exception
    manifest = json.loads(result.stdout)
    named = [line.partition(":")[0] for line in manifest["assumed"]]
    given = ("noise_scheduler_type", "num_inference_steps")  # by options
    assert named == [*(name for name in LEROBOT_DEFAULTS if name not in given), "horizon"]
    line = f"horizon: the file does not name it; assumed {T} (--horizon)"
    assert line in manifest["assumed"]  # LeRobot's own default is another since 0.6
    line = "beta_schedule: config.json does not name it; assumed LeRobot's default, "
    assert f"{line}'squaredcos_cap_v2' (--scheduler-config)" in manifest["assumed"]
    assert manifest["first_action"] == FRAMES - 1

    observation, noise = torch.randn(1, FRAMES * DO), torch.randn(1, 1, T, DA)
    lows = [statistics[f"{name}.min"] for name in ("observation.state", "action")]
    highs = [statistics[f"{name}.max"] for name in ("observation.state", "action")]
    (low, least), (high, most) = lows, highs
    cond = ((observation.reshape(FRAMES, DO) - low) / (high - low) * 2 - 1).reshape(1, -1)
    scheduler = diffusers.DDIMScheduler(100, beta_schedule="squaredcos_cap_v2")
    sampler = dpa.DiffusionSampler(network, scheduler, 3, fused=False)
    with torch.no_grad():
        want = sampler(cond, noise=noise[0])
        want = (want + 1) / 2 * (most - least) + least
        got = torch.jit.load(str(tmp_path / "policy.pt"))(observation, noise)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_scheduler_and_its_steps(folder):
    source = read(folder[0])
    assert source.scheduler == {"_class_name": "DDPMScheduler"} | {
        name: LEROBOT_DEFAULTS[name] for name in LEROBOT_SCHEDULER
    }
    assert (source.horizon, source.steps, source.first_action) == (None, None, FRAMES - 1)


def test_a_setting_that_is_there_is_not_assumed(folder):
    path = configured(folder[0], **LEROBOT_DEFAULTS)
    assert read(path).assumed == []
    # LeRobot leaves the kinds that the mapping does not name as they are.
    around = read(configured(path, normalization_mapping={})).around
    assert (around.observation.scale == 1).all() and (around.action.scale == 1).all()


@pytest.mark.parametrize("frames", [0, -1, True, 2.0, "2", None])
def test_frames_are_a_positive_integer(frames, folder):
    message = f"n_obs_steps must be a positive integer, got {frames!r}"
    with pytest.raises(CheckpointError, match=message):
        read(configured(folder[0], n_obs_steps=frames))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_statistics_are_finite(value, folder):
    path, statistics = folder
    statistics["action.max"][1] = value
    save_file(statistics, path / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    with pytest.raises(CheckpointError, match="the normalisation of actions must be finite"):
        read(path)


def test_its_file_of_weights_stands_for_the_folder(folder):
    path, _ = folder
    (path / "policy_preprocessor.json").write_text('{"steps": [{"registry_name": "other"}]}')
    whole, alone = read(path), read(path / "model.safetensors")
    assert whole.assumed == alone.assumed and any("other" in line for line in whole.assumed)
    for name in ("observation", "action"):
        pairs = zip(getattr(whole.around, name), getattr(alone.around, name), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    assert set(files_of(path)) == set(files_of(path / "model.safetensors")) != set()


def test_observations_are_as_wide_as_the_network_takes_them(folder):
    message = f"must give the {FRAMES * DO} values that the network takes, got {DO} of 1 frames"
    with pytest.raises(CheckpointError, match=message):
        read(configured(folder[0], n_obs_steps=1))
