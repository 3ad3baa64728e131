"""Exported policies against the Python sampler: the same actions from the same noise."""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from exported import DA, DO, UNET, B, T, diffusers, make_policy

import dpa
from dpa.checkpoints.loading import CheckpointError
from dpa.export import (
    FORMATS,
    STAGES,
    LayeredLoop,
    PackedLoop,
    PackedStep,
    PlainLoop,
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


@pytest.mark.parametrize("to", ["torchscript", "aoti"])
def test_a_loop_is_packed_for_its_size(to, hopper, tmp_path):
    """Other widths than powers of two, filled up on a GPU; other sizes run from the same file."""
    torch.manual_seed(6)
    unet = dpa.nn.ConditionalUnet1D(2, global_cond_dim=4, down_dims=(96, 192)).to(hopper).eval()
    scheduler = diffusers.DDIMScheduler(20)
    table = dpa.schedulers.from_diffusers(scheduler, 3)
    policy = PackedLoop(unet, table, size=(1, 16)).to(hopper)
    assert policy.config[6:] == [128, 256, 0, 96, 192]
    noise, observation = torch.randn(1, 1, 16, 2, device=hopper), torch.randn(1, 4, device=hopper)
    path = tmp_path / f"policy{FORMATS[to]}"
    export_policy(policy, path, to, {"observation": observation, "noise": noise})
    with torch.no_grad():
        got = load_policy(path)(observation, noise)
        plain = dpa.DiffusionSampler(unet, scheduler, 3, horizon=16, fused=False)
        torch.testing.assert_close(got, plain(observation, noise=noise[0]), rtol=1e-4, atol=1e-4)
        many, conds = torch.randn(1, 5, 32, 2, device=hopper), torch.randn(5, 4, device=hopper)
        other = dpa.DiffusionSampler(unet, scheduler, 3, horizon=32, fused=False)
        want = other(conds, noise=many[0])
        torch.testing.assert_close(policy(conds, many), want, rtol=1e-4, atol=1e-4)


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
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: is a folder"):
        load_policy(tmp_path)


def test_what_is_refused(tmp_path):
    policy, _, _ = make_policy("ddim", "cpu", torch.float32, LayeredLoop)
    inputs = {"observation": torch.zeros(1, DO), "noise": torch.zeros(1, 1, T, DA)}
    with pytest.raises(ValueError, match=r"format must be one of torchscript, .*, got gguf"):
        export_policy(policy, tmp_path / "x", "gguf", inputs)
    with pytest.raises(ValueError, match=r"onnx for PlainLoop .*, got onnx, LayeredLoop"):
        export_policy(policy, str(tmp_path / "x"), "onnx", inputs)
    for names in (("noise", "observation"), ("observation", "sample")):
        wrong = dict(zip(names, inputs.values(), strict=True))
        with pytest.raises(ValueError, match="inputs must be observation, noise, got"):
            export_policy(policy, tmp_path / "x", "torchscript", wrong)
    scheduler = diffusers.DPMSolverMultistepScheduler(20, beta_schedule="squaredcos_cap_v2")
    table = dpa.schedulers.from_diffusers(scheduler, 4)
    with pytest.raises(ValueError, match=r"table must be a StepTable .*, got .*MultistepTable"):
        LayeredLoop(policy.unet, table)
    table = dpa.schedulers.from_diffusers(diffusers.DDIMScheduler(20), 4)
    for kind in (LayeredLoop, PlainLoop):
        with pytest.raises(ValueError, match=r"unet must be a dpa.nn.ConditionalUnet1D, .*Linear"):
            kind(torch.nn.Linear(2, 2), table)


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
