"""Exported loops that continue the last chunk, against the Python sampler."""

import json
import math
from dataclasses import replace

import pytest
import torch
from exported import DA, DO, UNET, B, T, diffusers, make_policy
from typer.testing import CliRunner

import dpa
from dpa.cli.app import app
from dpa.export import FORMATS, Around, ContinuingLoop, PackedLoop, export_policy, load_policy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS = dpa.prefix_weights(2, 6, T)[None, :, None].expand(B, T, DA).contiguous()


def made(name, first_step, device, dtype=torch.float32, clips=True, **options):
    """Return a policy, the sampler that it must agree with, and what is around both."""
    _, sampler, around = make_policy(name, device, dtype, PackedLoop, **options)
    if not clips:
        table = replace(sampler.table, clip=math.inf)
        sampler = dpa.DiffusionSampler(sampler.unet, table, dtype=dtype, horizon=T, fused=True)
    table = sampler.table.after(first_step)
    policy = ContinuingLoop(sampler.unet, table, dtype, around, warm=first_step > 0)
    return policy.to(device), sampler, around


def inputs_of(policy, device, seed=7):
    generator = torch.Generator().manual_seed(seed)
    noisy = sum(index > 0 for index in policy.noise_index)
    found = {
        "observation": torch.randn(B, DO, generator=generator),
        "noise": torch.randn(1 + noisy, B, T, DA, generator=generator),
        "last_chunk": torch.randn(B, T, DA, generator=generator),
        "weights": WEIGHTS,
    }
    return {name: value.to(device) for name, value in found.items()}


def wanted(sampler, around, given, first_step):
    """Return the sampler's actions of an exported policy's inputs; the noise is a generator's."""
    device = given["observation"].device
    (scale, offset), (action_scale, action_offset) = (
        tuple(part.to(device) for part in pair) for pair in (around.observation, around.action)
    )
    chunk = (given["last_chunk"] - action_offset) / action_scale
    way = {"last_chunk": chunk, "first_step": first_step} if first_step else {}
    sample = sampler(
        around.encoder(given["observation"] * scale + offset),
        generator=torch.Generator().manual_seed(9),
        condition_data=chunk,
        condition_mask=given["weights"],
        inpainting="x0",
        **way,
    )
    return sample * action_scale + action_offset


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_step", [0, 1], ids=["from noise", "from the last chunk"])
@pytest.mark.parametrize("name", ["ddim", "ddpm"])
@pytest.mark.parametrize("to", ["torchscript", "exported-program", "aoti"])
def test_it_gives_the_samplers_actions(to, name, first_step, dtype, device, tmp_path):
    if to == "aoti" and (name, first_step, dtype) != ("ddpm", 1, "float32"):
        pytest.skip("a package takes long to compile: one of the eight combinations is")
    options = {"down_dims": (8,), "clips": False} if to == "aoti" else {}
    policy, sampler, around = made(name, first_step, device, DTYPES[dtype], **options)
    path = tmp_path / f"policy{FORMATS[to]}"
    manifest = export_policy(policy, path, to, inputs_of(policy, device))
    given = inputs_of(policy, device, seed=8)
    stream = torch.Generator().manual_seed(9)
    given["noise"] = torch.stack(
        [torch.randn(B, T, DA, generator=stream) for _ in given["noise"]]
    ).to(device)
    with torch.no_grad():
        got = load_policy(path)(*given.values())
        want = wanted(sampler, around, given, first_step)
    limit = 1e-4 if dtype == "float32" else 5e-2
    torch.testing.assert_close(got, want, rtol=limit, atol=limit)
    held = given["weights"] >= 1
    assert held.any() and torch.equal(got[held], given["last_chunk"][held])
    assert manifest["clip"] == (None if to == "aoti" else 1)
    assert manifest["part"] == "continuing" and manifest["steps"] == 3 - first_step
    names = ["observation", "noise", "last_chunk", "weights"]
    assert [entry["name"] for entry in manifest["inputs"]] == names


def test_weights_of_zero_continue_nothing(device):
    policy, sampler, around = made("ddpm", 0, device)
    given = inputs_of(policy, device)
    given["weights"] = torch.zeros_like(given["weights"])
    free = PackedLoop(sampler.unet, sampler.table, torch.float32, around).to(device)
    with torch.no_grad():
        want = free(given["observation"], given["noise"])
        torch.testing.assert_close(policy(*given.values()), want, rtol=1e-4, atol=1e-4)


def test_what_is_refused():
    policy, sampler, around = made("ddim", 0, "cpu")
    table = dpa.schedulers.StepTable(torch.arange(2), torch.ones(2, 6))
    with pytest.raises(ValueError, match="table must know its x0 and noise levels, got StepTable"):
        ContinuingLoop(sampler.unet, table, around=around)
    still = Around(around.encoder, around.observation, (torch.tensor([1.0, 0.0]), torch.ones(2)))
    with pytest.raises(ValueError, match=r"around\.action must have a scale without zeros"):
        ContinuingLoop(sampler.unet, sampler.table, around=still)
    assert policy.warm is False
    scripted, given = torch.jit.script(policy), inputs_of(policy, "cpu")
    for name, rule in (
        ("observation", "observation must have a width of 5"),
        ("noise", r"noise must be \(1, B, T, Da\)"),
        ("last_chunk", r"last_chunk and weights must be \(B, T, Da\)"),
        ("weights", r"last_chunk and weights must be \(B, T, Da\)"),
    ):
        cut = (
            given[name].expand(2, *given[name].shape[1:])
            if name == "noise"
            else given[name][..., :1]
        )
        with pytest.raises(torch.jit.Error, match=rule):
            scripted(*(given | {name: cut}).values())


def command(folder, *options):
    torch.manual_seed(5)
    unet = dpa.nn.ConditionalUnet1D(DA, global_cond_dim=DO, **UNET).eval()
    torch.save(unet.state_dict(), folder / "unet.pt")
    options = ["--horizon", str(T), "--scheduler", "DDIM", "--steps", "4", *options]
    result = CliRunner().invoke(app, ["export", str(folder / "unet.pt"), "--json", *options])
    return unet, result


def test_the_command(tmp_path):
    options = ("--to", "torchscript", "--part", "continuing", "--first-step", "2")
    unet, result = command(tmp_path, *options)
    assert result.exit_code == 0, result.output
    manifest = json.loads(result.stdout)
    assert manifest["first_step"] == 2 and manifest["steps"] == 2
    scheduler = diffusers.DDIMScheduler(100, beta_schedule="squaredcos_cap_v2")
    sampler = dpa.DiffusionSampler(unet, scheduler, 4, fused=False)
    cond, noise, chunk = torch.randn(1, DO), torch.randn(1, 1, T, DA), torch.randn(1, T, DA)
    held = {"condition_data": chunk, "condition_mask": WEIGHTS[:1], "inpainting": "x0"}
    with torch.no_grad():
        want = sampler(cond, noise=noise[0], last_chunk=chunk, first_step=2, **held)
        got = load_policy(tmp_path / manifest["file"])(cond, noise, chunk, WEIGHTS[:1])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "torchscript", "--first-step", "1"], "left out without --part continuing"),
        (["--to", "torchscript", "--part", "continuing", "--layers"], "--layers must be left out"),
        (["--to", "onnx", "--part", "continuing"], "part must be loop or step with --to onnx"),
        (
            ["--to", "torchscript", "--part", "continuing", "--first-step", "4"],
            "first_step must lie in 0..3, got 4",
        ),
    ],
)
def test_the_command_refuses(options, message, tmp_path):
    _, result = command(tmp_path, *options)
    assert result.exit_code != 0
    assert message in " ".join((result.output + str(result.exception)).replace("│", "").split())
