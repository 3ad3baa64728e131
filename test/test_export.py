"""Exported policies against the Python sampler: the same actions from the same noise."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dpa
from dpa.cli import app
from dpa.demo import train, world
from dpa.demo.rollout import make_scheduler
from dpa.export import FORMATS, ExportedPolicy, export_policy

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
B, T, DA, DO = 2, 8, 2, 5


def make(name, device, dtype):
    torch.manual_seed(3)
    kind = {"ddim": diffusers.DDIMScheduler, "ddpm": diffusers.DDPMScheduler}[name]
    scheduler = kind(20, beta_schedule="squaredcos_cap_v2")
    unet = dpa.nn.ConditionalUnet1D(
        DA, global_cond_dim=4, diffusion_step_embed_dim=16, down_dims=(8, 16)
    ).to(device, dtype)
    encoder = nn.Linear(DO, 4).to(device)
    sampler = dpa.DiffusionSampler(unet, scheduler, 3, horizon=T)
    affines = [(torch.rand(DO) + 0.5, torch.randn(DO)), (torch.rand(DA) + 0.5, torch.randn(DA))]
    policy = ExportedPolicy(unet, sampler.table, encoder, *affines).to(device)
    policy.unet.to(dtype)
    return policy, sampler, encoder, affines


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["ddim", "ddpm"])
@pytest.mark.parametrize("to", FORMATS)
def test_an_exported_policy_gives_the_samplers_actions(to, name, dtype, device, tmp_path):
    if to == "aoti" and device.type == "cuda":
        pytest.skip("AOTInductor packages for the GPU are not tested")
    if to == "aoti" and (name, dtype) not in [("ddim", torch.float32), ("ddpm", torch.bfloat16)]:
        pytest.skip("a package takes long to compile: two of the four combinations are")
    policy, sampler, encoder, (normalise, unnormalise) = make(name, device, dtype)
    example = torch.randn(B, DO, device=device)
    draws = sum(sampler.table.draws_noise)
    noise = torch.randn(1 + draws, B, T, DA, device=device)
    path = tmp_path / f"policy{FORMATS[to]}"
    manifest = export_policy(policy, path, to, example, noise)
    load = {
        "torchscript": torch.jit.load,
        "exported-program": lambda p: torch.export.load(p).module(),
        "aoti": torch._inductor.aoti_load_package,
    }[to]
    loaded = load(str(path))

    # New inputs; the sampler draws from a generator what the exported policy is given.
    observation, stream = torch.randn_like(example), torch.Generator().manual_seed(7)
    noise = torch.stack([torch.randn(B, T, DA, generator=stream) for _ in noise]).to(device)
    with torch.no_grad():
        cond = encoder(observation * normalise[0].to(device) + normalise[1].to(device))
        sample = sampler(cond, generator=stream.manual_seed(7))
        want = sample * unnormalise[0].to(device) + unnormalise[1].to(device)
        got = loaded(observation, noise)
    # A compiler keeps float32 where eager PyTorch rounds to bfloat16 between two operations.
    limit = 1e-4 if dtype == torch.float32 else 5e-2 if to == "aoti" else 1e-6
    torch.testing.assert_close(got, want, rtol=limit, atol=limit)

    assert manifest == json.loads((tmp_path / f"{path.name}.json").read_text())
    assert [entry["shape"] for entry in manifest["inputs"]] == [[B, DO], [1 + draws, B, T, DA]]
    assert manifest["outputs"][0] == {"name": "actions", "shape": [B, T, DA], "dtype": "float32"}
    torch.testing.assert_close(
        torch.tensor(manifest["normalisation"]["action"]["scale"]), unnormalise[0]
    )


def test_what_is_refused(tmp_path):
    policy, _, _, _ = make("ddim", "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"format must be one of torchscript, .*, got onnx"):
        export_policy(policy, tmp_path / "x", "onnx", torch.zeros(1, DO), torch.zeros(1, 1, T, DA))
    scheduler = diffusers.DPMSolverMultistepScheduler(20, beta_schedule="squaredcos_cap_v2")
    table = dpa.schedulers.from_diffusers(scheduler, 4)
    with pytest.raises(ValueError, match=r"table must be a StepTable, got .*MultistepTable"):
        ExportedPolicy(policy.unet, table)


def test_the_command_exports_a_checkpoint(tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    policy = train.Policy(train.Network(train.UNET).eval())
    train.save(policy, checkpoint)
    options = ["export", str(checkpoint), "--to", "torchscript", "--steps", "3", "--json"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    manifest = json.loads(result.stdout)
    assert manifest["steps"] == 3 and manifest["format"] == "torchscript"

    loaded = torch.jit.load(str(tmp_path / "policy.pt"))
    observation = torch.randn(1, world.OBSERVATION_DIM)
    noise = torch.randn(1, 1, world.HORIZON, world.ACTION_DIM)
    sampler = dpa.DiffusionSampler(policy.network.unet, make_scheduler("DDIM", policy), 3)
    with torch.no_grad():
        want = sampler(policy.network.encoder(observation), noise=noise[0])
        torch.testing.assert_close(loaded(observation, noise), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "onnx"], "to must be one of torchscript, exported-program, aoti, got onnx"),
        (["--to", "aoti", "--dtype", "int8"], "dtype must be one of float32, bfloat16, got int8"),
        (["--to", "aoti", "--device", "tpu"], "device must be auto, cpu, cuda or cuda:N, got tpu"),
        (["--to", "torchscript"], "checkpoint must be a file, got "),
    ],
)
def test_the_command_refuses_in_one_line(options, message, tmp_path):
    result = CliRunner().invoke(app, ["export", str(tmp_path / "none.pt"), *options])
    # dpa.cli.main prints an expected failure as its message alone.
    assert result.exit_code == 1 and str(result.exception).startswith(message)
    assert not list(tmp_path.iterdir())
