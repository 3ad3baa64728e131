"""dpa export replaces no file that it reads, and nothing but regular files."""

import json
import os

import pytest
import torch
from exported import DA, DO, B, T, make_policy
from lerobot_names import lerobot_name
from typer.testing import CliRunner

from dpa.cli.app import app
from dpa.export import PackedLoop, export_policy

READ = "must be another file than those that are read, got"
REGULAR = "must be a regular file or a new one, got"


@pytest.fixture
def computing_fails(monkeypatch):
    """Refuse to read: places are checked before."""

    def read(*args, **kwargs):
        raise AssertionError("the checkpoint was read")

    monkeypatch.setattr("dpa.export.checkpoint.read", read)


def contents(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def refused(message, folder, checkpoint, *options):
    before = contents(folder)
    command = ["export", str(checkpoint), "--to", "torchscript", *map(str, options)]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ValueError), result.output
    assert message in str(result.exception)
    assert contents(folder) == before


@pytest.mark.usefixtures("computing_fails")
def test_a_checkpoint_in_a_file_stays(tmp_path):
    checkpoint = tmp_path / "policy.pt"  # the default name of the artefact
    checkpoint.write_bytes(b"weights")
    refused(f"out {READ} {checkpoint}", tmp_path, checkpoint)
    refused(f"out {READ} {checkpoint}", tmp_path, checkpoint, "--out", checkpoint)
    (tmp_path / "folder").mkdir()
    other = tmp_path / "folder" / ".." / "policy.pt"
    refused(f"out {READ} {other}", tmp_path, checkpoint, "--out", other)
    (tmp_path / "link").symlink_to(tmp_path)
    other = tmp_path / "link" / "policy.pt"
    refused(f"out {READ} {other}", tmp_path, checkpoint, "--out", other)
    (tmp_path / "link.pt").symlink_to(checkpoint)
    refused(f"out {READ} ", tmp_path, checkpoint, "--out", tmp_path / "link.pt")
    refused(f"out {READ} ", tmp_path, tmp_path / "link.pt", "--out", checkpoint)


@pytest.mark.usefixtures("computing_fails")
@pytest.mark.parametrize("as_folder", [True, False])
def test_the_files_of_a_folder_stay(as_folder, tmp_path):
    names = ["model.safetensors", "config.json"]
    step = "policy_preprocessor_step_3_normalizer_processor.safetensors"
    names += ["policy_preprocessor.json", step] if as_folder else []
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    checkpoint = tmp_path if as_folder else tmp_path / "model.safetensors"
    for name in names:
        place = tmp_path / name
        refused(f"out {READ} {place}", tmp_path, checkpoint, "--out", place)
        if place.suffix == ".json":
            options = ["--out", place.with_suffix("")]
            refused(f"the manifest of out {READ} {place}", tmp_path, checkpoint, *options)


@pytest.mark.usefixtures("computing_fails")
def test_a_configuration_of_the_scheduler_stays(tmp_path):
    for name in ("unet.pt", "scheduler.json"):
        (tmp_path / name).write_bytes(b"{}")
    options = ["--scheduler-config", tmp_path / "scheduler.json", "--out", tmp_path / "scheduler"]
    refused(f"the manifest of out {READ}", tmp_path, tmp_path / "unet.pt", *options)


@pytest.mark.usefixtures("computing_fails")
@pytest.mark.parametrize("manifest", [True, False])
def test_what_is_no_regular_file_stays(manifest, tmp_path):
    (tmp_path / "unet.pt").write_bytes(b"weights")
    (tmp_path / "other").write_bytes(b"other")
    out = tmp_path / "out.pt"
    place = tmp_path / "out.pt.json" if manifest else out
    name = "the manifest of out" if manifest else "out"
    for target in ("other", "nothing"):
        place.symlink_to(tmp_path / target)
        message = f"{name} {REGULAR} a symbolic link, {place}"
        refused(message, tmp_path, tmp_path / "unet.pt", "--out", out)
        assert place.is_symlink()
        place.unlink()
    os.mkfifo(place)
    refused(f"{name} {REGULAR} {place}", tmp_path, tmp_path / "unet.pt", "--out", out)
    assert place.is_fifo()


def test_the_function_replaces_regular_files_alone(tmp_path):
    policy, _, _ = make_policy("ddim", "cpu", torch.float32, PackedLoop)
    path = tmp_path / "policy.pt"
    path.symlink_to(tmp_path / "other.pt")
    inputs = {"observation": torch.randn(B, DO), "noise": torch.randn(1, B, T, DA)}
    with pytest.raises(ValueError, match=f"path {REGULAR} a symbolic link"):
        export_policy(policy, path, "torchscript", inputs)
    assert path.is_symlink() and not path.exists()


def test_an_earlier_export_is_replaced(unet, tmp_path):
    torch.save(unet.state_dict(), tmp_path / "unet.pt")
    options = ["--to", "torchscript", "--horizon", str(T), "--steps"]
    for steps in ("2", "3"):
        command = ["export", str(tmp_path / "unet.pt"), *options, steps]
        assert CliRunner().invoke(app, command).exit_code == 0
        manifest = json.loads((tmp_path / "policy.pt.json").read_text())
        assert manifest["steps"] == int(steps)


@pytest.mark.parametrize("folder", ["x[/red]", "[bold]x", "a:car:b"])
def test_names_with_brackets_are_printed(folder, unet, tmp_path, monkeypatch):
    """A terminal's markup is none of theirs."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    state = {f"diffusion.unet.{lerobot_name(n)}": v for n, v in unet.state_dict().items()}
    save_file(state, f"{folder}/model.safetensors")
    config = {"type": "diffusion", "noise_scheduler_type": "DDIM", "horizon": T, "[/x]": "[bold]"}
    (tmp_path / folder / "config.json").write_text(json.dumps(config))
    command = ["export", folder, "--to", "torchscript", "--steps", "2"]
    result = CliRunner().invoke(app, [*command, "--out", f"{folder}/p.pt"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.exception
    assert f"wrote {folder}/p.pt and {folder}/p.pt.json" in result.output
    assert "note config.json.[/x]: unknown here, and left out; got '[bold]'" in result.output
    assert f"noise (1, 1, {T}, {DA})" in result.output
