"""dpa export: what it refuses, in one line."""

import json

import pytest
import torch
from exported import DA, UNET, T
from typer.testing import CliRunner

import dpa
from dpa.checkpoints.loading import CheckpointError
from dpa.cli.app import app


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "aoti", "--device", "tpu"], "device must be cpu, cuda or cuda:N, got tpu"),
        (["--to", "aoti", "--device", "cpu:"], "device must be cpu, cuda or cuda:N, got cpu:"),
        (["--to", "aoti", "--horizon", "9"], "horizon must be a multiple of 2 here, got 9"),
        (["--to", "aoti", "--steps", "200"], "num_inference_steps must lie in 1..100"),
    ],
)
def test_the_command_refuses_in_one_line(options, message, unet, tmp_path):
    torch.save(unet.state_dict(), tmp_path / "unet.pt")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "unet.pt"), *options])
    # dpa.cli.main prints an expected failure as its message alone.
    assert result.exit_code == 1 and message in str(result.exception).splitlines()[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["unet.pt"]


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--to", "gguf", "'aoti', 'torchscript', 'exported-program', 'onnx'"),
        ("--dtype", "int8", "'float32', 'bfloat16'"),
        ("--part", "half", "'loop', 'step'"),
    ],
)
def test_the_command_lists_the_choices(option, value, allowed, tmp_path):
    command = ["export", str(tmp_path), "--to", "aoti", option, value]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"'{value}' is not one of {allowed}" in result.output


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_class_name": "DDIMScheduler", "num_train_timesteps": []}, "scheduler must"),
        ({"_class_name": "DDIMScheduler", "trained_betas": [[]]}, "it raised IndexError: "),
        ({"_class_name": "PNDMScheduler"}, "scheduler must take single steps"),
        ({"_class_name": "utils"}, "scheduler must be a class of diffusers, got utils"),
        (
            {"_class_name": "DDIMScheduler", "num_train_timesteps": "x"},
            "scheduler must have options that DDIMScheduler takes",
        ),
        (
            {"_class_name": "DDIMScheduler", "clip_sample_range": "x"},
            "DDIMScheduler cannot be measured, it raised TypeError: ",
        ),
    ],
)
def test_the_command_refuses_a_scheduler_in_one_line(config, message, unet, tmp_path):
    torch.save(unet.state_dict(), tmp_path / "unet.pt")
    (tmp_path / "scheduler.json").write_text(json.dumps(config))
    options = ["--to", "torchscript", "--scheduler-config", str(tmp_path / "scheduler.json")]
    result = CliRunner().invoke(app, ["export", str(tmp_path / "unet.pt"), *options])
    assert isinstance(result.exception, ValueError) and message in str(result.exception)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"horizon": "16"}, "horizon must be a positive integer, got '16'"),
        ({"num_inference_steps": -1}, "steps must be a positive integer, got -1"),
        ([1], "its configuration cannot be read: AttributeError"),
        ({"horizon": True}, "horizon must be a positive integer, got True"),
        ({"pred_action_steps_only": "no"}, "pred_action_steps_only must be true or false, got 'n"),
        ({"pred_action_steps_only": True}, "must have n_action_steps beside it, got none"),
        ({"noise_scheduler": {"_target_": 3}, "model": [1]}, "its configuration cannot be read"),
        ({"n_obs_steps": 0}, "n_obs_steps must be a positive integer, got 0"),
        ({"n_obs_steps": 2.0}, "n_obs_steps must be a positive integer, got 2.0"),
    ],
)
def test_the_command_refuses_a_configuration_in_one_line(policy, message, unet, tmp_path):
    state = {f"model.{name}": value for name, value in unet.state_dict().items()}
    torch.save({"cfg": {"policy": policy}, "state_dict": state}, tmp_path / "latest.ckpt")
    command = ["export", str(tmp_path / "latest.ckpt"), "--to", "torchscript"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, CheckpointError) and message in str(result.exception)


@pytest.mark.parametrize("layers", [[], ["--layers"]])
@pytest.mark.parametrize("conditions", [{}, {"local_cond_dim": 3}])
def test_the_command_refuses_policies_that_impose_or_localise(conditions, layers, tmp_path):
    unet = dpa.nn.ConditionalUnet1D(DA, **conditions, **UNET)
    state = {f"model.{name}": value for name, value in unet.state_dict().items()}
    torch.save({"cfg": {"policy": {"horizon": T}}, "state_dict": state}, tmp_path / "latest.ckpt")
    command = ["export", str(tmp_path / "latest.ckpt"), "--to", "torchscript", *layers]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, CheckpointError)
    assert "the network has no global_cond" in str(result.exception)


def test_the_file_is_beside_the_folder_that_is_worked_in(tmp_path, monkeypatch):
    folder = tmp_path / "pretrained_model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["export", ".", "--to", "torchscript"])
    assert "model.safetensors: there is no such file" in str(result.exception)
    options = ["--to", "torchscript", "--out", str(folder)]
    result = CliRunner().invoke(app, ["export", ".", *options])
    assert result.exit_code != 0 and "is a directory" in result.output


def test_the_command_names_a_missing_file(tmp_path):
    result = CliRunner().invoke(app, ["export", str(tmp_path / "none.pt"), "--to", "torchscript"])
    assert result.exit_code == 1 and str(result.exception).endswith("there is no such file")


@pytest.mark.parametrize(("frames", "right"), [(T, True), (T + 1, False)])
def test_the_command_refuses_a_horizon_without_an_action_to_execute(frames, right, unet, tmp_path):
    state = {f"model.{name}": value for name, value in unet.state_dict().items()}
    policy = {"horizon": T, "n_obs_steps": frames, "num_inference_steps": 2}
    torch.save({"cfg": {"policy": policy}, "state_dict": state}, tmp_path / "latest.ckpt")
    command = ["export", str(tmp_path / "latest.ckpt"), "--to", "torchscript"]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code == 0) is right
    message = f"more than the first action that is executed, {T} (n_obs_steps), got {T}"
    assert right or message in str(result.exception)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_the_command_refuses_weights_that_are_not_finite(value, unet, tmp_path):
    unet.final_conv[-1].weight.data[0, 0] = value
    torch.save(unet.state_dict(), tmp_path / "unet.pt")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "unet.pt"), "--to", "torchscript"])
    message = "final_conv.1.weight must be finite, got NaN or infinity"
    assert isinstance(result.exception, CheckpointError) and message in str(result.exception)
