"""A policy from images and a state in one file, with an encoder of the test's."""

import json

import own_image_policy
import pytest
import torch
from exported import DA, UNET, T, make_image_policy
from typer.testing import CliRunner

import dpa
from dpa.cli.app import app
from dpa.export import FORMATS, export_policy, load_policy


@pytest.mark.parametrize("to", ["torchscript", "exported-program"])
def test_a_file_gives_the_policys_actions(to, tmp_path):
    policy, inputs = make_image_policy()
    path = tmp_path / f"policy{FORMATS[to]}"
    manifest = export_policy(policy, path, to, inputs)
    assert [entry["name"] for entry in manifest["inputs"]] == ["top", "side", "state", "noise"]
    assert [entry["dtype"] for entry in manifest["inputs"]] == ["uint8"] * 2 + ["float32"] * 2
    assert manifest["normalisation"].keys() == {"top", "side", "state", "action"}
    loaded, others = load_policy(path), make_image_policy(seed=5)[1]
    with torch.no_grad():
        expected = policy(*others.values())
        torch.testing.assert_close(loaded(*others.values()), expected, rtol=1e-5, atol=1e-5)
        assert (policy(*inputs.values()) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("top", lambda x: x.float() / 255, r"top must be torch\.uint8, .*got another dtype"),
        (
            "side",
            lambda x: x.movedim(-1, 2),
            r"side must be .*12, 16, 3\], got \[1, 2, 3, 12, 16\]",
        ),
        ("state", lambda x: x[..., :1], r"state must be .*, 3\], got \[1, 2, 1\]"),
        ("noise", lambda x: x.repeat(2, 1, 1, 1), "noise must be"),
    ],
)
def test_a_traced_file_refuses_other_inputs(name, change, rule, tmp_path):
    policy, inputs = make_image_policy()
    export_policy(policy, tmp_path / "policy.pt", "torchscript", inputs)
    with pytest.raises(torch.jit.Error, match=rule):
        load_policy(tmp_path / "policy.pt")(*(inputs | {name: change(inputs[name])}).values())


def test_images_are_normalised_by_channels():
    """From uint8 with channels last to numbers in [0, 1], then scale and offset."""
    policy, inputs = make_image_policy()
    encoder, seen = policy.encoder, {}
    encoder._encode = lambda given: seen.update(given)
    encoder(*list(inputs.values())[:-1])
    scale, offset = encoder.observed[0].affine
    expected = inputs["top"].double() / 255 * scale + offset
    torch.testing.assert_close(seen["top"].double(), expected.movedim(-1, 2), rtol=1e-6, atol=1e-6)


def test_an_encoder_that_a_trace_does_not_show(tmp_path):
    """What a trace computes is compared with the policy on other images."""
    policy, inputs = make_image_policy()
    encode, first = policy.encoder._encode, []

    def remembered(given):  # the features of the images that it was traced on
        first.append(encode(given).detach())
        return first[0] if torch.compiler.is_exporting() else first[-1]

    policy.encoder._encode = remembered
    policy(*inputs.values())
    with pytest.raises(ValueError, match="encoder must be traceable, got a relative error"):
        export_policy(policy, tmp_path / "policy.pt", "torchscript", inputs)
    assert not list(tmp_path.iterdir())


def test_it_is_not_for_onnx(tmp_path):
    policy, inputs = make_image_policy()
    with pytest.raises(ValueError, match="onnx"):
        export_policy(policy, tmp_path / "policy.onnx", "onnx", inputs)


@pytest.fixture
def checkpoint(tmp_path):
    """A file as diffusion_policy saves it, and its encoder, normalizer and network."""
    torch.manual_seed(0)
    encoder = own_image_policy.ObsEncoder(4)
    unet = dpa.nn.ConditionalUnet1D(DA, None, 2 * (4 + 3), **UNET).eval()
    affines = {n: (torch.rand(w) + 0.5, torch.randn(w)) for n, w in WIDTHS.items()}
    state = {f"model.{name}": value for name, value in unet.state_dict().items()}
    state |= {f"obs_encoder.{name}": value for name, value in encoder.state_dict().items()}
    for name, affine in affines.items():
        parts = zip(("scale", "offset"), affine, strict=True)
        state |= {f"normalizer.params_dict.{name}.{part}": value for part, value in parts}
    scheduler = {"_target_": "diffusers.DDIMScheduler", "num_train_timesteps": 20}
    policy = {
        "_target_": "own_image_policy.ImagePolicy",
        "shape_meta": {"obs": {"camera": CAMERA, "state": {"shape": [3]}}, "action": {}},
        "n_obs_steps": 2,
        "horizon": T,
        "obs_encoder": {"_target_": "own_image_policy.ObsEncoder", "width": 4},
        "noise_scheduler": scheduler,
    }
    path = tmp_path / "latest.ckpt"
    torch.save({"cfg": {"policy": policy}, "state_dicts": {"ema_model": state}}, path)
    return path, encoder, unet, affines


WIDTHS, CAMERA = {"camera": 1, "state": 3, "action": DA}, {"shape": [3, 12, 16], "type": "rgb"}


def export(path, out, *options):
    command = ["export", str(path), "--to", "torchscript", "--images", "--out", str(out), *options]
    return CliRunner().invoke(app, [*command, "--steps", "3"])


def test_an_encoder_that_the_configuration_names(checkpoint, tmp_path):
    path, encoder, unet, affines = checkpoint
    result = export(path, tmp_path / "policy.pt", "--trust-pickle")
    assert result.exit_code == 0, (result.output, result.exception)
    manifest = json.loads((tmp_path / "policy.pt.json").read_text())
    assert [e["shape"] for e in manifest["inputs"][:2]] == [[1, 2, 12, 16, 3], [1, 2, 3]]
    images, state = (
        torch.randint(0, 256, (1, 2, 12, 16, 3), dtype=torch.uint8),
        torch.randn(1, 2, 3),
    )
    noise = torch.randn(1, 1, T, DA)
    with torch.no_grad():
        got = load_policy(tmp_path / "policy.pt")(images, state, noise)
        given = {"camera": images.movedim(-1, 2) / 255, "state": state}
        given = {n: v * affines[n][0] + affines[n][1] for n, v in given.items()}
        cond = encoder({n: v.flatten(0, 1) for n, v in given.items()}).reshape(1, -1)
        scheduler = pytest.importorskip("diffusers").DDIMScheduler(20)
        sample = dpa.DiffusionSampler(unet, scheduler, 3, horizon=T)(cond, noise=noise[0])
    scale, offset = affines["action"]
    torch.testing.assert_close(got, (sample - offset) / scale, rtol=1e-4, atol=1e-4)


def test_code_that_a_checkpoint_names_runs_only_if_trusted(checkpoint, tmp_path):
    result = export(checkpoint[0], tmp_path / "policy.pt")
    assert "must be trusted to run the code that it names" in str(result.exception)
    assert not (tmp_path / "policy.pt").exists()
