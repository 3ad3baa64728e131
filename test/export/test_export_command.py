"""dpa export: checkpoints of every layout, settings that are followed, errors in one line."""

import json

import pytest
import torch
from exported import DA, DO, T, diffusers
from lerobot_names import lerobot_name
from typer.testing import CliRunner

import dpa
from dpa.cli.app import app
from dpa.demo import train, world
from dpa.demo.rollout import make_scheduler
from dpa.export.settings import LEROBOT_DEFAULTS


def run(checkpoint, *options):
    """Export to TorchScript by the command; return the manifest and the loaded policy."""
    arguments = ["export", str(checkpoint), "--to", "torchscript", "--json", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    manifest = json.loads(result.stdout)
    folder = checkpoint.parent
    return manifest, torch.jit.load(str(folder / manifest["file"]))


def sampled(unet, scheduler, steps, cond, noise):
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, fused=False)
    with torch.no_grad():
        return sampler(cond, noise=noise)


def test_the_command_on_a_checkpoint_of_the_demo(tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    policy = train.Policy(train.Network(train.UNET).eval())
    train.save(policy, checkpoint)
    manifest, loaded = run(checkpoint, "--steps", "3")
    assert manifest["steps"] == 3 and manifest["format"] == "torchscript"
    assert manifest["checkpoint"] == "dpa demo" and manifest["scheduler"] == "DDIMScheduler"
    observation = torch.randn(1, world.OBSERVATION_DIM)
    noise = torch.randn(1, 1, world.HORIZON, world.ACTION_DIM)
    scheduler = make_scheduler("DDIM", policy)
    with torch.no_grad():
        cond = policy.network.encoder(observation)
        want = sampled(policy.network.unet, scheduler, 3, cond, noise[0])
        torch.testing.assert_close(loaded(observation, noise), want, rtol=1e-4, atol=1e-4)


def test_the_command_on_a_bare_unet(unet, tmp_path):
    torch.save(unet.state_dict(), tmp_path / "unet.pt")
    trained = {"beta_schedule": "linear", "prediction_type": "sample"}
    scheduler = diffusers.DDPMScheduler(20, **trained)
    scheduler.save_pretrained(tmp_path)
    cond, noise = torch.randn(1, DO), torch.randn(5, 1, T, DA)
    options = ["--scheduler", "DDIM", "--steps", "5", "--horizon", str(T)]
    config = ["--scheduler-config", str(tmp_path / "scheduler_config.json")]
    manifest, loaded = run(tmp_path / "unet.pt", *options, *config)
    assert len(manifest["assumed"]) == 1 and "normalisation" in manifest["assumed"][0]
    want = sampled(unet, diffusers.DDIMScheduler(20, **trained), 5, cond, noise[0])
    torch.testing.assert_close(loaded(cond, noise[:1]), want, rtol=1e-4, atol=1e-4)

    # Without a configuration the usual one is assumed, and said.
    manifest, loaded = run(tmp_path / "unet.pt", *options)
    assert [line.split(":")[0] for line in manifest["assumed"]] == ["scheduler", "normalisation"]
    usual = diffusers.DDIMScheduler(100, beta_schedule="squaredcos_cap_v2")
    want = sampled(unet, usual, 5, cond, noise[0])
    torch.testing.assert_close(loaded(cond, noise[:1]), want, rtol=1e-4, atol=1e-4)


def test_the_command_on_a_checkpoint_of_diffusion_policy(unet, tmp_path):
    state = {f"model.{name}": value for name, value in unet.state_dict().items()}
    affines = {"obs": (torch.rand(DO) + 0.5, torch.randn(DO))}
    affines["action"] = (torch.rand(DA) + 0.5, torch.randn(DA))
    for name, (scale, offset) in affines.items():
        state[f"normalizer.params_dict.{name}.scale"] = scale
        state[f"normalizer.params_dict.{name}.offset"] = offset
    noise_scheduler = {
        "_target_": "diffusers.schedulers.scheduling_ddpm.DDPMScheduler",
        "num_train_timesteps": 30,
        "beta_schedule": "squaredcos_cap_v2",
        "variance_type": "fixed_small",
    }
    cfg = {
        "policy": {"horizon": T, "num_inference_steps": 4, "noise_scheduler": noise_scheduler},
    }
    torch.save({"cfg": cfg, "state_dicts": {"ema_model": state}}, tmp_path / "latest.ckpt")
    manifest, loaded = run(tmp_path / "latest.ckpt")
    assert manifest["checkpoint"] == "diffusion_policy" and not manifest["assumed"]
    assert manifest["steps"] == 4 and manifest["scheduler"] == "DDPMScheduler"
    observation, stream = torch.randn(1, DO), torch.Generator().manual_seed(2)
    noise = torch.stack([torch.randn(1, T, DA, generator=stream) for _ in range(4)])
    scheduler = diffusers.DDPMScheduler(30, beta_schedule="squaredcos_cap_v2")
    sampler = dpa.DiffusionSampler(unet, scheduler, 4, horizon=T, fused=False)
    with torch.no_grad():
        cond = observation * affines["obs"][0] + affines["obs"][1]
        want = sampler(cond, generator=stream.manual_seed(2))
        want = (want - affines["action"][1]) / affines["action"][0]
        torch.testing.assert_close(loaded(observation, noise), want, rtol=1e-4, atol=1e-4)


def _checkpoint(unet, policy, path):
    """A checkpoint of diffusion_policy without a normalizer."""
    state = {f"model.{name}": value for name, value in unet.state_dict().items()}
    torch.save({"cfg": {"policy": policy}, "state_dicts": {"ema_model": state}}, path)
    return path


DDIM_20 = {
    "_target_": "diffusers.DDIMScheduler",
    "num_train_timesteps": 20,
    "beta_schedule": "squaredcos_cap_v2",
}


@pytest.mark.parametrize("only", [True, False])
def test_settings_of_the_loop_are_followed(only, unet, tmp_path):
    """The length of the sampled chunk, and what the policy passes on to the scheduler's step."""
    policy = {
        "noise_scheduler": DDIM_20,
        "horizon": 4 * T,
        "n_action_steps": T,
        "num_inference_steps": 4,
        "pred_action_steps_only": only,
        "eta": 0.6,
        "use_clipped_model_output": True,
    }
    manifest, loaded = run(_checkpoint(unet, policy, tmp_path / "a.ckpt"))
    length = T if only else 4 * T
    assert manifest["outputs"][0]["shape"] == [1, length, DA]
    assert {line.split(":")[0] for line in manifest["assumed"]} == {"actions", "observation"}
    scheduler = diffusers.DDIMScheduler(20, beta_schedule="squaredcos_cap_v2")
    options = {"eta": 0.6, "use_clipped_model_output": True, "horizon": length, "fused": False}
    sampler = dpa.DiffusionSampler(unet, scheduler, 4, **options)
    stream, cond = torch.Generator().manual_seed(2), torch.randn(1, DO)
    count = 1 + sum(sampler.table.draws_noise)
    noise = torch.stack([torch.randn(1, length, DA, generator=stream) for _ in range(count)])
    with torch.no_grad():
        want = sampler(cond, generator=stream.manual_seed(2))
        torch.testing.assert_close(loaded(cond, noise), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"n_obs_steps": 3}, 2),
        ({}, 0),
        ({"n_obs_steps": 3, "obs_dim": 20, "oa_step_convention": True}, 2),
        ({"n_obs_steps": 3, "obs_dim": 20}, 3),
        ({"n_obs_steps": 3, "pred_action_steps_only": True, "n_action_steps": T}, 0),
    ],
)
def test_the_manifest_says_where_a_chunk_is_executed_from(settings, first, unet, tmp_path):
    """As diffusion_policy's predict_action slices what it has sampled."""
    policy = {"_target_": "x.Policy", "noise_scheduler": DDIM_20, "horizon": T} | settings
    manifest, _ = run(_checkpoint(unet, policy, tmp_path / "a.ckpt"), "--steps", "3")
    assert manifest["first_action"] == first


def test_settings_that_are_unknown_are_listed(unet, tmp_path):
    """Whatever it is, it may change the actions."""
    network = {"_target_": "x.ConditionalUnet1D", "input_dim": DA, "attention": "flash"}
    policy = {
        "_target_": "x.Policy",
        "noise_scheduler": DDIM_20 | {"novelty": 1, "steps_offset": 0},
        "model": network,
        "horizon": T,
        "n_obs_steps": 2,
        "guidance": 3.0,
        "temperature": None,
    }
    manifest, _ = run(_checkpoint(unet, policy, tmp_path / "a.ckpt"))
    listed = [line.split(";")[0] for line in manifest["assumed"] if "left out" in line]
    assert listed == [
        "policy.guidance: unknown here, and left out",
        "policy.model.attention: unknown here, and left out",
        "scheduler: DDIMScheduler has no novelty",
    ]


def test_settings_of_lerobot_that_are_unknown_are_listed(unet, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder = tmp_path / "pretrained_model"
    folder.mkdir()
    names = {n: lerobot_name(n) for n in unet.state_dict()}
    state = {f"diffusion.unet.{names[n]}": v for n, v in unet.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    known = {"type": "diffusion", "use_peft": False, "n_action_steps": 8, "tags": None}
    config = {"noise_scheduler_type": "DDIM", "horizon": T, "num_inference_steps": 3}
    config |= {"normalization_mapping": {"ACTION": "QUANTILES"}, "classifier_free": 2}
    (folder / "config.json").write_text(json.dumps(known | config))
    steps = [
        {"registry_name": "device_processor", "config": {"device": "cpu"}},
        {"registry_name": "delta_actions", "config": {}},
        {
            "registry_name": "unnormalizer_processor",
            "config": {"eps": 0.1, "norm_map": {"ACTION": "MEAN_STD"}},
        },
    ]
    (folder / "policy_postprocessor.json").write_text(json.dumps({"steps": steps}))
    manifest, _ = run(folder)
    file = "policy_postprocessor.json"
    assert [line for line in manifest["assumed"] if "LeRobot's default" not in line][:5] == [
        "config.json.classifier_free: unknown here, and left out; got 2",
        f"{file}: delta_actions is unknown here, and left out",
        f"{file}: unnormalizer_processor has an eps of 0.1; assumed 1e-08",
        f"{file}: unnormalizer_processor has another norm_map, {{'ACTION': 'MEAN_STD'}}; assumed "
        "config.json's",
        "actions: the folder holds no statistics (q01, q99); they are the network's own",
    ]


@pytest.mark.parametrize("layout", ["processors", "buffers"])
@pytest.mark.parametrize("environment", ["MEAN_STD", "IDENTITY", None, "QUANTILES", "QUANTILE10"])
def test_the_command_on_a_folder_of_lerobot(environment, layout, unet, tmp_path):
    """State policies, with LeRobot's own normalizers as the reference where it is installed."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder, width = tmp_path / "pretrained_model", {"observation.state": 3}
    folder.mkdir()
    width["observation.environment_state"] = DO - 3
    statistics = {}
    for name, size in (width | {"action": DA}).items():
        low = torch.randn(size)
        statistics[name] = {"min": low, "max": low + torch.rand(size) + 0.5}
        statistics[name] |= {"mean": low + 1, "std": torch.rand(size) + 0.5}
        for least, most in (("q01", "q99"), ("q10", "q90")):
            at = low + torch.rand(size)
            statistics[name] |= {least: at, most: at + torch.rand(size) + 0.5}
    still = statistics["observation.state"]  # a joint that never moved
    still["max"][0] = still["min"][0] = 1.57
    least, most = {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}.get(
        environment, ("min", "max")
    )
    action = environment if least != "min" else "MIN_MAX"
    modes = {"STATE": "MIN_MAX", "ENV": environment, "ACTION": action}
    if environment is None:  # as in LeRobot's own default, which leaves such a kind as it is
        del modes["ENV"]
    config = LEROBOT_DEFAULTS | {
        "type": "diffusion",
        "n_obs_steps": 1,
        "horizon": T,
        "noise_scheduler_type": "DDIM",
        "num_train_timesteps": 20,
        "beta_schedule": "squaredcos_cap_v2",
        "num_inference_steps": 3,
        "normalization_mapping": modes,
        "input_features": {n: {"type": "STATE", "shape": [size]} for n, size in width.items()},
    }
    (folder / "config.json").write_text(json.dumps(config))
    state = {
        "diffusion.unet." + lerobot_name(n): v.contiguous() for n, v in unet.state_dict().items()
    }
    flat = {f"{n}.{s}": v for n, values in statistics.items() for s, v in values.items()}
    if layout == "buffers":
        for name, value in flat.items():
            feature, _, statistic = name.rpartition(".")
            part = "unnormalize_outputs" if feature == "action" else "normalize_inputs"
            state[f"{part}.buffer_{feature.replace('.', '_')}.{statistic}"] = value
    else:
        file = "policy_preprocessor_step_3_normalizer_processor.safetensors"
        save_file(
            {n: v + 1 if n.startswith("action") else v for n, v in flat.items()}, folder / file
        )
        file = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
        save_file(
            {n: v if n.startswith("action") else v + 1 for n, v in flat.items()}, folder / file
        )
    save_file(state, folder / "model.safetensors")
    manifest, loaded = run(folder)
    assert manifest["checkpoint"] == "LeRobot" and manifest["assumed"] == []

    observation, noise = torch.randn(1, DO), torch.randn(1, 1, T, DA)
    observation[0, 0] = 1.57
    normal = _normalized(statistics, modes, observation.split(list(width.values()), -1), width)
    usual = diffusers.DDIMScheduler(20, beta_schedule="squaredcos_cap_v2")
    want = sampled(unet, usual, 3, torch.cat(normal, -1), noise[0])
    span = statistics["action"][most] - statistics["action"][least]
    want = (want + 1) / 2 * span + statistics["action"][least]
    with torch.no_grad():
        torch.testing.assert_close(loaded(observation, noise), want, rtol=1e-4, atol=1e-4)


def _normalized(statistics, modes, parts, names):
    normalize = pytest.importorskip("lerobot.processor.normalize_processor")
    types = pytest.importorskip("lerobot.configs.types")
    kinds = dict(zip(names, ("STATE", "ENV"), strict=True))
    features = {
        n: types.PolicyFeature(types.FeatureType[kind], (size,))
        for (n, kind), size in zip(kinds.items(), names.values(), strict=True)
    }
    step = normalize.NormalizerProcessorStep(
        features=features,
        norm_map={types.FeatureType[k]: types.NormalizationMode[mode] for k, mode in modes.items()},
        stats=statistics,
    )
    given = dict(zip(names, parts, strict=True))
    normal = step._normalize_observation(given, inverse=False)
    return [normal[name] for name in names]
