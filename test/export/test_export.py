"""Exported policies against the Python sampler: the same actions from the same noise."""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from exported import DA, DO, UNET, B, T, diffusers, make_policy
from lerobot_names import lerobot_name
from typer.testing import CliRunner

import dpa
from dpa.checkpoints.loading import CheckpointError
from dpa.cli.app import app
from dpa.demo import train, world
from dpa.demo.rollout import make_scheduler
from dpa.export import (
    FORMATS,
    STAGES,
    LayeredLoop,
    PackedLoop,
    PackedStep,
    export_policy,
    load_policy,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def wanted(sampler, around, observation, generator, device):
    scale, offset = (part.to(device) for part in around.observation)
    sample = sampler(around.encoder(observation * scale + offset), generator=generator)
    return sample * around.action[0].to(device) + around.action[1].to(device)


def drawn(count, device, seed=7):
    stream = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(B, T, DA, generator=stream) for _ in range(count)]).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["ddim", "ddpm"])
@pytest.mark.parametrize("kind", [PackedLoop, LayeredLoop])
@pytest.mark.parametrize("to", [to for to in FORMATS if to != "onnx"])
def test_an_exported_loop_gives_the_samplers_actions(to, kind, name, dtype, device, tmp_path):
    if to == "aoti" and (kind, name, dtype) not in [
        (PackedLoop, "ddpm", "float32"),
        (PackedLoop, "ddpm", "bfloat16"),
        (LayeredLoop, "ddim", "float32"),
    ]:
        pytest.skip("a package takes long to compile: three of the eight combinations are")
    # Each layer of each step is compiled by itself: 20 s of CPU time a step.
    options = {"down_dims": (8,), "steps": 2} if to == "aoti" else {}
    policy, sampler, around = make_policy(name, device, DTYPES[dtype], kind, **options)
    example = torch.randn(B, DO, device=device)
    noisy = sum(sampler.table.draws_noise)
    inputs = {"observation": example, "noise": torch.randn(1 + noisy, B, T, DA, device=device)}
    path = tmp_path / f"policy{FORMATS[to]}"
    manifest = export_policy(policy, path, to, inputs)
    loaded = load_policy(path)

    # New inputs; the sampler's generator gives the noise that the exported policy receives.
    observation, noise = torch.randn_like(example), drawn(1 + noisy, device)
    with torch.no_grad():
        want = wanted(sampler, around, observation, torch.Generator().manual_seed(7), device)
        got = loaded(observation, noise)
    if kind is LayeredLoop and dtype == "bfloat16" and device.type == "cuda":
        # There the sampler's network is one op, which rounds elsewhere than layers do: see below.
        assert got.isfinite().all()
    else:
        # The same kernels on the same numbers; a compiler may contract multiply-adds around them,
        # and keeps float32 in layers where eager PyTorch rounds between two operations.
        limit = 1e-4 if kind is LayeredLoop else 1e-5
        torch.testing.assert_close(got, want, rtol=limit, atol=limit)

    assert manifest == json.loads((tmp_path / f"{path.name}.json").read_text())
    assert [entry["shape"] for entry in manifest["inputs"]] == [[B, DO], [1 + noisy, B, T, DA]]
    assert manifest["outputs"][0] == {"name": "actions", "shape": [B, T, DA], "dtype": "float32"}
    assert manifest["network_dtype"] == dtype and manifest["part"] == "loop"
    torch.testing.assert_close(
        torch.tensor(manifest["normalisation"]["action"]["scale"]), around.action[0]
    )


def test_exported_layers_in_bfloat16_are_as_exact_as_pytorchs(device):
    """Against the loop in float64, over several networks, whose errors differ by half."""
    errors = []
    for seed in range(8):
        policy, sampler, around = make_policy("ddpm", device, torch.bfloat16, LayeredLoop, seed)
        scripted, table = torch.jit.script(policy), sampler.table
        plain = dpa.reference.plain(sampler.unet)
        rounded = dpa.DiffusionSampler(plain, table, horizon=T, fused=False)
        double = copy.deepcopy(plain).double()
        double = dpa.DiffusionSampler(double, table, noise_dtype=torch.float32, horizon=T)
        observation = torch.randn(B, DO, device=device)
        streams = [torch.Generator().manual_seed(seed) for _ in range(2)]
        with torch.no_grad():
            got = scripted(observation, drawn(1 + sum(table.draws_noise), device, seed))
            theirs = wanted(rounded, around, observation, streams[0], device)
            exact = wanted(double, around, observation, streams[1], device)
        errors.append(torch.stack([got - exact, theirs - exact]).abs().mean((1, 2, 3)))
    ours, pytorchs = torch.stack(errors).mean(0).tolist()
    assert 0 < ours < 1.3 * pytorchs, (ours, pytorchs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", ["torchscript", "exported-program"])
def test_exported_steps_make_up_the_loop(to, dtype, device, tmp_path):
    policy, sampler, around = make_policy("ddpm", device, DTYPES[dtype], PackedStep)
    observation, noise = torch.randn(B, DO, device=device), drawn(4, device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    inputs = {"observation": observation, "sample": noise[0], "index": index, "noise": noise[0]}
    path = tmp_path / "step"
    manifest = export_policy(policy, path, to, inputs)
    loaded, sample = load_policy(path), noise[0]
    with torch.no_grad():
        for step in range(manifest["steps"]):
            entry = sum(sampler.table.draws_noise[: step + 1]) * sampler.table.draws_noise[step]
            sample, actions = loaded(observation, sample, index + step, noise[entry])
        want = wanted(sampler, around, observation, torch.Generator().manual_seed(7), device)
    # One forward pass runs other GEMMs than one in a loop on packed weights: sums in another
    # order, which 16-bit activations round.
    limit = 1e-4 if dtype == "float32" else 5e-2
    torch.testing.assert_close(actions, want, rtol=limit, atol=limit)
    assert manifest["part"] == "step"
    assert [entry["name"] for entry in manifest["outputs"]] == ["sample", "actions"]


def test_packed_weights_stay_on_their_kind_of_device(unet):
    """A GPU's op takes bytes of a CPU's layout for its own: their length is the same."""
    table = dpa.schedulers.from_diffusers(diffusers.DDIMScheduler(20), 3)
    loop = PackedLoop(unet, table)
    assert loop.to("cpu") is loop and loop.weights.device.type == "cpu"
    with pytest.raises(ValueError, match=r"PackedLoop: weights must stay .* cpu, got meta"):
        loop.to("meta")
    assert loop.weights.device.type == "cpu" and loop.coefficients.device.type == "cpu"


def test_a_policy_in_training_stays_so(device, tmp_path):
    policy, sampler, _ = make_policy("ddim", device, torch.float32, LayeredLoop)
    unet = sampler.unet.train()
    unet.final_conv.eval()
    frozen = next(unet.parameters()).requires_grad_(False)
    noise = torch.randn(1, B, T, DA, device=device)
    inputs = {"observation": torch.randn(B, DO, device=device), "noise": noise}
    export_policy(policy, tmp_path / "policy.pt", "torchscript", inputs)
    assert {m for m in unet.modules() if not m.training} == set(unet.final_conv.modules())
    assert [p for p in unet.parameters() if not p.requires_grad] == [frozen]


def test_a_policy_made_in_inference_mode(device, tmp_path):
    with torch.inference_mode():
        policy, _, _ = make_policy("ddim", device, torch.float32, LayeredLoop)
    noise = torch.randn(1, B, T, DA, device=device)
    inputs = {"observation": torch.randn(B, DO, device=device), "noise": noise}
    export_policy(policy, tmp_path / "policy.pt", "torchscript", inputs)
    assert load_policy(tmp_path / "policy.pt")(*inputs.values()).isfinite().all()


def test_an_unconditioned_network(tmp_path):
    device = torch.device("cpu")
    unet = dpa.nn.ConditionalUnet1D(DA, **UNET).to(device).eval()
    table = dpa.schedulers.from_diffusers(diffusers.DDIMScheduler(20), 3)
    noise = torch.randn(1, B, T, DA, device=device)
    inputs = {"observation": torch.zeros(B, 0, device=device), "noise": noise}
    sampler = dpa.DiffusionSampler(unet, table, fused=True)
    for kind in (PackedLoop, LayeredLoop):
        policy, begun = kind(unet, table).to(device), []
        export_policy(policy, tmp_path / "x.pt", "torchscript", inputs, report=begun.append)
        assert tuple(begun) == STAGES[2:]  # the command begins the first two
        with torch.no_grad():
            got = load_policy(tmp_path / "x.pt")(*inputs.values())
            torch.testing.assert_close(got, sampler(noise=noise[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("to", ["torchscript", "exported-program"])
def test_a_damaged_file_or_manifest_is_refused(to, tmp_path):
    policy, _, _ = make_policy("ddim", torch.device("cpu"), torch.float32, PackedLoop)
    inputs = {"observation": torch.zeros(B, DO), "noise": drawn(1, torch.device("cpu"))}
    path, beside = tmp_path / "policy", tmp_path / "policy.json"
    export_policy(policy, path, to, inputs)
    whole, manifest = path.read_bytes(), beside.read_text()
    place = whole.index(policy.weights.numpy().tobytes()[:64])  # weights: PyTorch would not notice
    flipped = bytearray(whole)
    flipped[place + 40] ^= 1
    for content in (bytes(flipped), whole[: len(whole) // 2], b"", whole + b"x"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="policy: is damaged, or not the file"):
            load_policy(path)
    path.write_bytes(whole)
    damaged = [manifest.replace(f'"{to}"', other) for other in ('"gguf"', "[]", "{}", "null", "1")]
    deep = "[" * 100_000
    for text in (manifest[:50], "[]", "{}", *damaged, "\xff\xfe", deep, f'{{"format": {deep}'):
        beside.write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"policy.json: "):
            load_policy(path)
    beside.write_text(manifest)
    load_policy(path)
    beside.unlink()
    with pytest.raises(FileNotFoundError, match=r"policy.json: there is no such file"):
        load_policy(path)


def test_what_is_refused(tmp_path):
    policy, _, _ = make_policy("ddim", "cpu", torch.float32, LayeredLoop)
    inputs = {"observation": torch.zeros(1, DO), "noise": torch.zeros(1, 1, T, DA)}
    with pytest.raises(ValueError, match=r"format must be one of torchscript, .*, got gguf"):
        export_policy(policy, tmp_path / "x", "gguf", inputs)
    with pytest.raises(ValueError, match=r"onnx for PlainLoop .*, got onnx, LayeredLoop"):
        export_policy(policy, tmp_path / "x", "onnx", inputs)
    scheduler = diffusers.DPMSolverMultistepScheduler(20, beta_schedule="squaredcos_cap_v2")
    table = dpa.schedulers.from_diffusers(scheduler, 4)
    with pytest.raises(ValueError, match=r"table must be a StepTable .*, got .*MultistepTable"):
        LayeredLoop(policy.unet, table)


def run(checkpoint, *options):
    """Export to TorchScript by the command; return the manifest and the loaded policy."""
    arguments = ["export", str(checkpoint), "--to", "torchscript", "--json", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    manifest = json.loads(result.stdout)
    folder = checkpoint.parent
    return manifest, torch.jit.load(str(folder / manifest["file"]))


@pytest.fixture
def unet():
    torch.manual_seed(5)
    return dpa.nn.ConditionalUnet1D(DA, global_cond_dim=DO, **UNET).eval()


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
    assert manifest["assumed"][:5] == [
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
    least, most = {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}.get(
        environment, ("min", "max")
    )
    action = environment if least != "min" else "MIN_MAX"
    modes = {"STATE": "MIN_MAX", "ENV": environment, "ACTION": action}
    if environment is None:  # as in LeRobot's own default, which leaves such a kind as it is
        del modes["ENV"]
    config = {
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
        save_file(flat, folder / file)
    save_file(state, folder / "model.safetensors")
    manifest, loaded = run(folder)
    assert manifest["checkpoint"] == "LeRobot" and manifest["assumed"] == []

    observation, noise = torch.randn(1, DO), torch.randn(1, 1, T, DA)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "aoti", "--device", "tpu"], "device must be cpu, cuda or cuda:N, got tpu"),
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
        ({"_class_name": "PNDMScheduler"}, "scheduler must be DDPM or DDIM to be exported"),
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


def test_a_package_of_a_compiler_with_a_static_library_opens(tmp_path):
    """As of a gcc built without shared libraries; PyTorch's own package fails there."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or not Path("/proc/self/maps").exists():
        pytest.skip("needs g++ on Linux")
    script = tmp_path / "g++"
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -static-libstdc++\n')
    script.chmod(0o755)
    policy, _, _ = make_policy("ddim", "cpu", torch.float32, PackedLoop)
    inputs = {"observation": torch.randn(B, DO), "noise": torch.randn(1, B, T, DA)}
    with torch._inductor.config.patch({"cpp.cxx": (None, str(script))}):
        export_policy(policy, tmp_path / "policy.pt2", "aoti", inputs)
    with torch.no_grad():
        torch.testing.assert_close(
            load_policy(tmp_path / "policy.pt2")(*inputs.values()),
            policy(*inputs.values()),
            rtol=1e-5,
            atol=1e-5,
        )
