"""``dpa profile``: a call's parts, the table and the picture."""

import json

import pytest
import torch
from matplotlib import image
from typer.testing import CliRunner

import dpa
from dpa.bench import call_profile, plots
from dpa.cli.app import app

PARTS = ("whole call", *call_profile.PARTS)
FOUND = {
    "what": "a policy",
    "device": "a device",
    "plain": dict(zip(PARTS, (80.0, 5.0, 15.0, 50.0, 10.0), strict=True)),
    "dpa": dict(zip(PARTS, (10.0, 5.0, 2.0, 1.0, 2.0), strict=True)),
    "times faster": 8.0,
}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"whole": 9.0, "prepare": 2.0, "chunk": 6.0, "loop": 5.0}, (2, 1, 5, 1)),
        ({"whole": 9.0}, (0, 0, 9, 0)),
        ({"whole": 9.0, "prepare": 4.0, "chunk": 6.0, "loop": 7.0}, (2, 0, 7, 0)),
        ({"whole": 5.0, "prepare": 1.0, "chunk": 6.0, "loop": 4.0}, (0, 1, 4, 0)),
    ],
)
def test_the_parts_are_the_whole(times, expected):
    found = call_profile.parts(times, 10)
    assert tuple(found[part] for part in call_profile.PARTS) == expected
    assert sum(expected) == found["whole call"]


def colors(path):
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return set(map(tuple, pixels.tolist()))


def test_the_picture_shows_every_part(tmp_path):
    drawn = plots.draw_call(FOUND, tmp_path / "call.png")
    shown = colors(drawn)
    for part, color in plots._PARTS.items():
        assert tuple(bytes.fromhex(color[1:])) in shown, part


def run(*arguments):
    result = CliRunner().invoke(app, ["profile", *map(str, arguments), "--seconds", "0"])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.fixture
def unet(tmp_path):
    net = dpa.nn.ConditionalUnet1D(2, None, 5, diffusion_step_embed_dim=16, down_dims=(16, 32))
    torch.save(net.state_dict(), tmp_path / "unet.pt")
    return tmp_path / "unet.pt"


def test_of_a_bare_network(unet, tmp_path):
    shown = run(unet, "--steps", "3", "--out", tmp_path / "deep" / "call.svg").output
    assert all(part in shown for part in ("whole call", *call_profile.PARTS, "100%"))
    assert "<svg" in (tmp_path / "deep" / "call.svg").read_text()


def test_of_a_policy_of_lerobot(tmp_path, counted_calls):
    name = "lerobot.policies.diffusion.modeling_diffusion"
    pytest.importorskip(name, reason="LeRobot is not installed", exc_type=ImportError)
    from train_fetch_reach import make_policy

    ones = {"observation.state": 10, "observation.environment_state": 3, "action": 4}
    stats = {n: {"min": -torch.ones(width), "max": torch.ones(width)} for n, width in ones.items()}
    for part in make_policy(stats):
        part.save_pretrained(tmp_path)
    found = json.loads(run(tmp_path, "--json", "--out", tmp_path / "call.png").stdout)
    for kind in ("plain", "dpa"):
        parts = [found[kind][part] for part in call_profile.PARTS]
        assert min(parts) > 0 and sum(parts) == pytest.approx(found[kind]["whole call"])
    assert found["plain"]["loop"] > found["dpa"]["loop"] and (tmp_path / "call.png").is_file()


def test_other_kinds_of_pictures_are_refused(unet):
    result = CliRunner().invoke(app, ["profile", str(unet), "--out", "call.gif"])
    assert result.exit_code == 2 and "must end in .png" in result.output


@pytest.mark.parametrize("command", ["profile", "bench"])
def test_a_prefix_is_refused_where_lerobot_loads_the_whole(command, tmp_path):
    pytest.importorskip("lerobot", reason="LeRobot is not installed")
    (tmp_path / "policy_preprocessor.json").touch()
    result = CliRunner().invoke(app, [command, str(tmp_path), "--prefix", "diffusion.unet."])
    assert isinstance(result.exception, ValueError), result.output
    assert "--prefix must be left out" in str(result.exception)
