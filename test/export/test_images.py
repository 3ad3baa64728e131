"""``dpa export --images``: from camera images to actions, as LeRobot's policy computes them."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dpa
from dpa.cli.app import app
from dpa.export import load_policy

lerobot = pytest.importorskip(
    "lerobot.policies.diffusion.modeling_diffusion",
    reason="LeRobot is not installed (requirements/lerobot.txt)",
    exc_type=ImportError,
)
STATISTICS = {
    "observation.images.top": {"mean": torch.rand(3, 1, 1), "std": torch.rand(3, 1, 1) + 0.5},
    "observation.images.side": {"mean": torch.rand(3, 1, 1), "std": torch.rand(3, 1, 1) + 0.5},
    "observation.state": {"min": torch.tensor([0.0, -1]), "max": torch.tensor([512.0, 2])},
    "action": {"min": torch.zeros(2), "max": torch.full((2,), 512.0)},
}


@pytest.fixture(scope="module", params=["one encoder", "an encoder a camera, resized"])
def folder(request, tmp_path_factory):
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors

    apart = request.param != "one encoder"
    image = PolicyFeature(FeatureType.VISUAL, (3, 40, 48))
    resized = (
        {"resize_shape": (36, 36)} if apart and hasattr(DiffusionConfig, "resize_shape") else {}
    )
    config = DiffusionConfig(
        input_features={
            "observation.images.top": image,
            "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
            "observation.images.side": image,
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        device="cpu",
        pretrained_backbone_weights=None,
        use_group_norm=not apart,
        use_separate_rgb_encoder_per_camera=apart,
        crop_shape=(32, 32),
        horizon=8,
        n_action_steps=4,
        down_dims=(16, 32),
        diffusion_step_embed_dim=16,
        noise_scheduler_type="DDIM",
        num_inference_steps=3,
        **resized,
    )
    torch.manual_seed(0)
    policy = lerobot.DiffusionPolicy(config).train()
    for _ in range(2):  # the statistics of BatchNorm
        batch = {"observation.state": torch.randn(2, 2, 2)}
        batch["observation.images"] = torch.randn(2, 2, 2, 3, 40, 48)
        policy.diffusion._prepare_global_conditioning(batch)
    made = tmp_path_factory.mktemp("lerobot")
    for part in (policy.eval(), *make_diffusion_pre_post_processors(config, STATISTICS)):
        part.save_pretrained(made)
    return made


def run(folder, path, *options):
    command = ["export", str(folder), "--images", "--out", str(path), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads((path.parent / f"{path.name}.json").read_text())


def of_lerobot(folder, observations, noise):
    """The actions that LeRobot's policy and processors give for frames in the robot's units."""
    from dpa.eval.policies import LeRobotPolicy

    whole = LeRobotPolicy(folder, torch.device("cpu"))
    count = next(iter(observations.values())).shape[1]
    frames = []
    for frame in range(count):
        one = {name: value[0, frame] for name, value in observations.items()}
        for name, value in one.items():
            if value.dtype == torch.uint8:
                one[name] = value.permute(2, 0, 1).float() / 255
        frames.append(whole.prepared(one))
    config = whole.policy.config
    batch = {"observation.state": torch.stack([f["observation.state"] for f in frames], 1)}
    images = [torch.stack([f[n] for n in config.image_features], 1) for f in frames]
    batch["observation.images"] = torch.stack(images, 1)
    model = whole.policy.diffusion
    with torch.no_grad():
        cond = model._prepare_global_conditioning(batch)
        actions = model.conditional_sample(1, global_cond=cond, noise=noise)
    return torch.stack([whole._after(a) for a in actions.transpose(0, 1)], 1)


@pytest.mark.parametrize(
    ("to", "name"), [("torchscript", "policy.pt"), ("exported-program", "p.pt2")]
)
def test_it_acts_as_lerobots_policy(folder, to, name, tmp_path):
    manifest = run(folder, tmp_path / name, "--to", to)
    inputs = {entry["name"]: entry for entry in manifest["inputs"]}
    assert list(inputs) == [
        "observation.images.top",
        "observation.images.side",
        "observation.state",
        "noise",
    ]
    assert inputs["observation.images.top"]["shape"] == [1, 2, 40, 48, 3]
    assert inputs["observation.images.top"]["dtype"] == "uint8" and manifest["frames"] == 2
    assert manifest["first_action"] == 1  # LeRobot's `start` in generate_actions
    assert inputs["observation.state"]["shape"] == [1, 2, 2] and manifest["part"] == "loop"
    assert set(manifest["normalisation"]) == {*inputs, "action"} - {"noise"}
    policy = load_policy(tmp_path / name)
    rng = np.random.default_rng(0)
    for _ in range(2):
        observations = {
            name: torch.from_numpy(rng.integers(0, 256, entry["shape"], dtype=np.uint8))
            if entry["dtype"] == "uint8"
            else torch.randn(entry["shape"]) * 100
            for name, entry in inputs.items()
            if name != "noise"
        }
        noise = torch.randn(inputs["noise"]["shape"])
        with torch.no_grad():
            got = policy(*observations.values(), noise)
        expected = of_lerobot(folder, observations, noise[0])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=512e-4)


def test_what_has_no_images_is_refused(tmp_path):
    unet = dpa.nn.ConditionalUnet1D(2, None, 5, diffusion_step_embed_dim=16, down_dims=(16, 32))
    torch.save(unet.state_dict(), tmp_path / "unet.pt")
    options = ["--images", "--to", "torchscript", "--out", str(tmp_path / "out.pt")]
    result = CliRunner().invoke(app, ["export", str(tmp_path / "unet.pt"), *options])
    assert "must be a folder of LeRobot, or diffusion_policy's, with --images" in str(
        result.exception
    )
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("options", [("--to", "onnx"), ("--to", "torchscript", "--part", "step")])
def test_what_images_do_not_go_with(folder, options, tmp_path):
    path = tmp_path / "policy"
    result = CliRunner().invoke(
        app, ["export", str(folder), "--images", "--out", str(path), *options]
    )
    assert isinstance(result.exception, ValueError) and not path.exists()
