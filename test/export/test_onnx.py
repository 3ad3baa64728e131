"""ONNX files against the Python sampler, on ONNX Runtime."""

import json

import pytest
import torch
from exported import DA, DO, UNET, B, T, diffusers, make_policy
from typer.testing import CliRunner

import dpa
from dpa.cli.app import app
from dpa.export import Around, PlainLoop, PlainStep, export_policy, load_policy, onnx_graph

onnx = pytest.importorskip("onnx", reason="onnx is not installed (requirements/dev.txt)")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (requirements/dev.txt)")


def exported(kind, name, path):
    """A file's manifest, the table, fresh inputs of the loop, and the packed loop's actions."""
    packed, sampler, around = make_policy(name, "cpu", torch.float32, dpa.export.PackedLoop)
    policy, table = kind(sampler.unet, sampler.table, around), sampler.table
    observation, noise = torch.randn(B, DO), torch.randn(1 + sum(table.draws_noise), B, T, DA)
    inputs = {"observation": observation, "noise": noise}
    if kind is PlainStep:
        index = torch.zeros(1, dtype=torch.int64)
        inputs = {"observation": observation, "sample": noise[0], "index": index, "noise": noise[0]}
    manifest = export_policy(policy, path, "onnx", inputs)
    fresh = torch.randn_like(observation), torch.randn_like(noise)
    with torch.no_grad():
        return manifest, table, *fresh, packed(*fresh)


@pytest.mark.parametrize("name", ["ddim", "ddpm"])
def test_a_loop_is_the_packed_loop(name, tmp_path):
    path = tmp_path / "policy.onnx"
    manifest, _, observation, noise, want = exported(PlainLoop, name, path)
    got = load_policy(path)(observation, noise)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert manifest == json.loads((tmp_path / "policy.onnx.json").read_text())
    assert manifest["part"] == "loop" and manifest["opset"] == onnx_graph.OPSET
    checked = manifest["checked"]
    assert checked["by"].startswith("ONNX Runtime 1.") and 0 < checked["error"] < checked["limit"]


@pytest.mark.parametrize("name", ["ddim", "ddpm"])
def test_steps_make_up_the_loop(name, tmp_path):
    path = tmp_path / "step.onnx"
    manifest, table, observation, noise, want = exported(PlainStep, name, path)
    step, sample, index = load_policy(path), noise[0], torch.zeros(1, dtype=torch.int64)
    for number, noisy in enumerate(table.draws_noise):
        entry = noise[sum(table.draws_noise[: number + 1])] if noisy else noise[0]
        sample, actions = step(observation, sample, index + number, entry)
    assert number + 1 == manifest["steps"] and manifest["part"] == "step"
    torch.testing.assert_close(actions, want, rtol=1e-4, atol=1e-4)
    for other in (-1, manifest["steps"]):
        with pytest.raises(Exception, match="out of data bounds"):
            step(observation, sample, index + other, entry)


@pytest.mark.parametrize("kind", [PlainLoop, PlainStep])
def test_the_graph_is_of_plain_operators_and_fixed_sizes(kind, tmp_path):
    path = tmp_path / "policy.onnx"
    exported(kind, "ddpm", path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 14)]
    assert not model.functions and all(node.domain == "" for node in model.graph.node)
    kinds = {node.op_type for node in model.graph.node}
    assert {"Conv", "InstanceNormalization"} <= kinds  # of fixed sizes, none computed as it runs:
    assert not kinds & {"Shape", "Sin", "Cos", "Loop", "If"}
    for entry in (*model.graph.input, *model.graph.output):
        assert all(size.dim_value > 0 for size in entry.type.tensor_type.shape.dim)
    weights = make_policy("ddpm", "cpu", torch.float32, dpa.export.LayeredLoop)[0].unet.parameters()
    held = sum(len(entry.raw_data) for entry in model.graph.initializer)
    assert held < 1.2 * 4 * sum(p.numel() for p in weights)  # unrolled steps share them


def test_an_unconditioned_network(tmp_path):
    unet = dpa.nn.ConditionalUnet1D(DA, **UNET).eval()
    table = dpa.schedulers.from_diffusers(diffusers.DDIMScheduler(20), 3)
    noise = torch.randn(1, B, T, DA)
    inputs = {"observation": torch.zeros(B, 0), "noise": noise}
    export_policy(PlainLoop(unet, table), tmp_path / "x.onnx", "onnx", inputs)
    want = dpa.DiffusionSampler(unet, table)(noise=noise[0])
    got = load_policy(tmp_path / "x.onnx")(*inputs.values())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Wrong(torch.nn.Module):
    """What the exporter writes otherwise than PyTorch computes."""

    def forward(self, x):
        return x * (2.0 if torch.onnx.is_in_onnx_export() else 1.0)


class Unknown(torch.nn.Module):
    """What ONNX has no operator for."""

    def forward(self, x):
        return torch.ops.dpa.elementwise_mult(x, x)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (Wrong(), r"ONNX Runtime's result must be within 0.0001 of PyTorch's, got \d"),
        (Unknown(), "it cannot be written in ONNX operators: .*dpa::elementwise_mult"),
    ],
)
def test_what_differs_is_not_written(encoder, message, tmp_path):
    unet = dpa.nn.ConditionalUnet1D(DA, global_cond_dim=DO, **UNET).eval()
    table = dpa.schedulers.from_diffusers(diffusers.DDIMScheduler(20), 2)
    inputs = {"observation": torch.randn(1, DO), "noise": torch.randn(1, 1, T, DA)}
    policy = PlainLoop(unet, table, Around(encoder))
    with pytest.raises(ValueError, match=message):
        export_policy(policy, tmp_path / "x.onnx", "onnx", inputs)
    assert not list(tmp_path.iterdir())


def test_a_file_of_too_many_weights(monkeypatch, tmp_path):
    monkeypatch.setattr(onnx_graph, "_MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"an ONNX file holds at most 2 GB of weights, got 0\.0"):
        exported(PlainLoop, "ddim", tmp_path / "x.onnx")


def test_without_onnx_runtime(monkeypatch, tmp_path):
    find = onnx_graph.importlib.util.find_spec
    hidden = lambda name: None if name == "onnxruntime" else find(name)  # noqa: E731
    monkeypatch.setattr(onnx_graph.importlib.util, "find_spec", hidden)
    manifest, *_ = exported(PlainLoop, "ddim", tmp_path / "x.onnx")
    assert manifest["checked"] is None
    with pytest.raises(RuntimeError, match="opening it needs ONNX Runtime: pip install onnxr"):
        load_policy(tmp_path / "x.onnx")


def command(tmp_path, *options):
    torch.manual_seed(1)
    unet = dpa.nn.ConditionalUnet1D(DA, global_cond_dim=DO, **UNET)
    torch.save(unet.state_dict(), tmp_path / "unet.pt")
    arguments = ["export", str(tmp_path / "unet.pt"), "--to", "onnx", "--steps", "3", *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_the_command(tmp_path):
    result = command(tmp_path)
    assert result.exit_code == 0, result.exception
    assert "compared with ONNX Runtime 1." in result.output and "at most 0.0001" in result.output
    assert load_policy(tmp_path / "policy.onnx") is not None
    step = command(tmp_path, "--part", "step", "--json", "--out", str(tmp_path / "step.onnx"))
    names = [entry["name"] for entry in json.loads(step.stdout)["inputs"]]
    assert names == ["observation", "sample", "index", "noise"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "bfloat16"], "dtype must be left out with --to onnx, .*, got bfloat16"),
        (["--device", "cuda"], "device must be left out with --to onnx"),
        (["--layers"], "layers must be left out with --to onnx"),
    ],
)
def test_what_the_runtime_chooses_is_refused(options, message, tmp_path):
    result = command(tmp_path, *options)
    assert result.exit_code == 1
    with pytest.raises(ValueError, match=message):
        raise result.exception
