"""The benchmark's arithmetic, tables and pictures; what it measures is no test's business."""

import json
import os
import re
import sys

import pytest
import torch
from torch.testing import assert_close

import dpa
from dpa.bench import command, compiled, image_policies, profiling
from dpa.bench.networks import Network
from dpa.packed.config import unet_config

_MARKS = 7


def test_the_profile_names_the_products_in_the_plan_order():
    unet = dpa.nn.ConditionalUnet1D(2, global_cond_dim=3, down_dims=(64, 128, 256, 512))
    names = torch.ops.dpa.unet1d_weight_names(unet_config(unet))
    seen = [
        n for n in names if n.endswith(".weight") and "residual" not in n and "encoder" not in n
    ]
    convolutions = [
        n.removesuffix(".weight").removesuffix(".block.0").removesuffix(".conv")
        for n in seen
        if not n.endswith(("block.1.weight", "final_conv.1.weight"))
    ]
    found = profiling._convolutions(list(unet_config(unet)[6:]), 16)
    assert [name for name, _, _ in found] == convolutions
    state = unet.state_dict()
    for (name, channels, times), key in zip(
        found, [s for s in seen if "block.1" not in s], strict=False
    ):
        transposed = name.startswith("up_modules") and name.endswith(".2")
        assert state[key].shape[1 if transposed else 0] == channels, name
        assert times in (16, 8, 4, 2)


def test_shares_add_up_and_survive_the_clock_wrapping():
    # Two blocks, three layers: clocks that pass 2^32 on the way, as int32 holds them.
    marks = torch.tensor(
        [
            [0, 1, 10, 14, 20, 50, 60],
            [60, 61, 90, 95, 100, 150, 170],
            [170, 171, 200, 0, 210, 0, 250],
        ]
    )
    clocks = torch.stack([marks + 2**32 - 100, marks + 17])
    runs = torch.stack([clocks, clocks + 5]).to(torch.int32)
    runs[..., 2, 3] = 0  # a layer without a norm
    phases, actions, total = profiling._shares(runs)
    assert_close(
        phases.int(), torch.tensor([[10, 0, 0, 10], [30, 10, 30, 10], [50, 20, 30, 10]]).int()
    )
    assert actions == 40
    assert total == 250


def test_what_cannot_be_profiled_is_refused():
    diffusers = pytest.importorskip("diffusers")
    unet = dpa.nn.ConditionalUnet1D(2, down_dims=(32, 64)).eval()
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=10)
    with pytest.raises(ValueError, match="profile: sampler must be fused"):
        dpa.profile(dpa.DiffusionSampler(unet, scheduler, 5, horizon=8))
    with pytest.raises(ValueError, match="profile: sampler must run on a GPU, got cpu"):
        dpa.profile(dpa.DiffusionSampler(unet, scheduler, 5, horizon=8, fused=True))
    with pytest.raises(ValueError, match="profile: sampler must be a DiffusionSampler, got"):
        dpa.profile(unet)


def _profile():
    layers = tuple(
        profiling.LayerTime(name, channels, times, 0.5, 0.1, 0.4, 0.3)
        for name, channels, times in profiling._convolutions([256, 512, 1024], 16)
    )
    return profiling.StepProfile("a GPU", torch.bfloat16, 40.0, layers, 2.3)


def test_the_profile_reads_as_a_table():
    found = _profile()
    lines = str(found).splitlines()
    assert len(lines) == len(found.layers) + 4
    assert lines[2].split() == [
        "down_modules.0.0.blocks.0",
        "256",
        "x",
        "16",
        "0.50",
        "0.10",
        "0.40",
        "0.30",
        "1.30",
    ]
    assert json.dumps(found.rows())


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from dpa.bench import plots

    rows = [
        {"network": n, "batch": b, "weights": w, "how": h, "us": us * b, "floor us": 20.0}
        for n in ("67 M", "252 M")
        for b in (1, 16)
        for w in ("bfloat16", "float32")
        for h, us in (
            ("eager, graph", 1500.0),
            ("torch.compile, graph", 1100.0),
            ("dpa", 80.0),
        )
    ]
    loops = [
        {"network": "67 M", "batch": 1, "weights": "bfloat16", "loop": f"DDPM, {n} steps"}
        | {"how": how, "us": n * 80.0}
        for n in (10, 100)
        for how in ("eager, step by step", "dpa")
    ]
    engines = [
        {"batch": b, "engine": e, "precision": "float32", "median ms": ms * b}
        for b in (1, 16)
        for e, ms in (("eager", 20.0), ("dpa", 6.0), ("reading", 5.0))
    ]
    for path in (
        plots.draw_steps(rows, "a GPU", tmp_path / "steps.png"),
        plots.draw_loops(loops, "a GPU", tmp_path / "loops.png"),
        plots.draw_engines(engines, "a CPU", tmp_path / "cpu.png"),
        _profile().draw(tmp_path / "profile.png"),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert _profile()._repr_png_().startswith(b"\x89PNG")  # what a notebook shows


def test_the_cpu_measures_a_network_in_turns():
    from dpa.bench import cpu_unet

    network = Network("tiny", (16, 32), 16, cond_dim=4)
    rows = cpu_unet.forward_rows(network, 2, rounds=1, wanted=("eager", "dpa"))
    found = {(row["engine"], row["precision"]): row for row in rows}
    assert {"eager", "dpa", "reading"} <= {engine for engine, _ in found}
    assert all(0 < row["p10 ms"] <= row["median ms"] <= row["p90 ms"] for row in rows)
    for (engine, precision), row in found.items():
        if engine != "reading":
            assert row["error"] < {"float32": 1e-5, "bfloat16": 5e-2}[precision]
    steps = cpu_unet.loop_rows(network, 2, rounds=1)
    assert [row["precision"] for row in steps] == ["float32", "bfloat16"]
    assert all(row["network"] == "tiny" and row["a step, ms"] > 0 for row in steps)


def test_every_op_is_measured_beside_the_same_arithmetic():
    from dpa.bench import cpu_ops

    for case in cpu_ops.cases(torch.float64):
        if case.size[0] == "1":
            assert_close(case.ours(*case.tensors), case.plain(*case.tensors))


def test_rows_of_several_stages_make_one_table():
    from dpa.bench import cpu
    from dpa.bench.command import _cell, _measured

    stages = {"one": lambda: {"ops": [1]}, "two": lambda: {"ops": [2], "loops": [3]}}
    kept = []
    done = _measured(stages, {"device": "x"}, lambda so_far: so_far | {"bars": []}, kept.append)
    assert done.pop("seconds").keys() == stages.keys()
    assert done == {"device": "x", "ops": [1, 2], "loops": [3], "bars": []}
    assert [(found["ops"], found.get("to come")) for found in kept] == [
        ([1], ["two"]),
        ([1, 2], None),
    ]
    assert [_cell(value) for value in (1.7e-6, 0.01, None, "x")] == ["1.7e-06", "0.01", "", "x"]
    quick, whole = cpu.stages(quick=True), cpu.stages()
    assert set(quick) < set(whole) and "U-Net, batch 16" not in quick


def test_a_process_waits_until_it_is_asked(tmp_path, monkeypatch):
    from dpa.bench.ahead import Process

    (tmp_path / "measuring.py").write_text(
        "import sys\n"
        "from dpa.bench.ahead import on_request\n"
        "print('compiling', sys.argv[1])\n"
        "on_request(lambda: open(sys.argv[1]).read())\n"
    )
    (tmp_path / "failing.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    process = Process("measuring", str(tmp_path / "written later"))
    process.wait()
    process.wait()  # each part of a run asks
    (tmp_path / "written later").write_text("42")
    assert process.answer() == "42"
    with pytest.raises(RuntimeError, match="failing ended with status 3"):
        Process("failing").wait()


def test_a_busy_machine_is_named(monkeypatch):
    from dpa.bench import command

    cores = len(os.sched_getaffinity(0))
    for load, words in ((0.4 * cores, "^$"), (0.6 * cores, rf"busy \(load .* on {cores} cores\)")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert re.search(words, command._busy())


def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch):
    testing = pytest.importorskip("typer.testing")
    from dpa.bench import cpu
    from dpa.cli.app import app

    def interrupted():
        raise KeyboardInterrupt

    stages = {"ops": lambda: {"ops": [{"op": "a", "us": 1.0}]}, "loop": interrupted, "end": dict}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "stages", lambda quick: stages)
    result = testing.CliRunner().invoke(app, ["bench", "--out", str(tmp_path)])
    assert result.exit_code != 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["ops"] == [{"op": "a", "us": 1.0}] and found["to come"] == ["loop", "end"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_run_goes_on_where_another_ended():
    from dpa.bench.command import _measured

    before = {"ops": [1], "seconds": {"one": 2.0}, "to come": ["two"]}
    stages = {"one": lambda: pytest.fail("measured again"), "two": lambda: {"ops": [2]}}
    done = _measured(stages, before, dict, lambda so_far: None)
    assert done["ops"] == [1, 2] and done["seconds"].keys() == stages.keys()
    assert done["seconds"]["one"] == 2.0 and "to come" not in done


def test_the_samplers_parts_are_tables_of_one_run(monkeypatch):
    """In their order, whoever measured them, with floors and bars."""
    from dpa.bench import networks, sampler
    from dpa.bench.command import _measured

    unet = dpa.nn.ConditionalUnet1D(2, down_dims=(8, 16), n_groups=4)
    monkeypatch.setattr(networks.Network, "build", lambda self: unet)
    monkeypatch.setattr(sampler, "read_rate", lambda: 4e12)
    row = {"weights": "bfloat16", "batch": 1, "us": 50.0}

    class Compiled:
        def wait(self):
            pass

        def answer(self):
            return row | {"how": "torch.compile, graph", "us": 1000.0}

    def loops(size, unet, dtype):
        return [row | {"how": "dpa", "loop": "DDIM, 10 steps", "first call s": 0.1}]

    eager = row | {"how": "eager, graph", "us": 2000.0}
    monkeypatch.setattr(sampler.compiled, "compiling", lambda size: [Compiled()])
    monkeypatch.setattr(sampler.compiled, "eager", lambda size, unet, dtype: (eager, []))
    monkeypatch.setattr(sampler, "step_us", lambda size, unet, dtype, batch: 50.0 * batch)
    monkeypatch.setattr(sampler, "loops", loops)
    stages = sampler.stages(["DP3", "80 M"])
    kept = []
    done = _measured(stages, {}, sampler.finished, kept.append)
    ways = [
        (row["network"], row["batch"], row["how"])
        for row in done["steps"]
        if row["weights"] == "bfloat16"
    ]
    assert ways == [
        ("80 M", 1, "eager, graph"),
        ("80 M", 1, "eager, graph"),  # beside float32
        ("80 M", 1, "torch.compile, graph"),
        ("80 M", 1, "dpa"),
        ("80 M", 16, "dpa"),
        ("DP3", 1, "torch.compile, graph"),
        ("DP3", 1, "dpa"),
        ("DP3", 16, "dpa"),
    ]
    floor = sampler.conv_bytes(unet, torch.bfloat16) / 4e12 * 1e6
    assert done["steps"][0]["floor us"] == floor and done["steps"][0]["x floor"] == 2000 / floor
    found = {row["bar"]: row["value"] for row in done["bars"]}
    assert found["80 M, bfloat16: faster than torch.compile"] == 20
    assert found["DP3, batch 16: time of batch 1's"] == 16
    assert len(kept) == len(stages) == 3
    assert all(json.dumps(tables) for tables in kept)


def test_the_command_refuses_what_it_does_not_know():
    testing = pytest.importorskip("typer.testing")
    from dpa.cli.app import app

    result = testing.CliRunner().invoke(app, ["bench", "--only", "nothing"])
    assert result.exit_code != 0
    assert "sampler" in result.output
    for option, given in [("--networks", "7 M"), ("--batches", "1,x"), ("--batches", "0")]:
        result = testing.CliRunner().invoke(app, ["bench", option, given])
        assert result.exit_code != 0 and f"{option} must be" in result.output


def test_the_networks_are_named_by_their_parameters():
    from dpa.bench import networks

    for size in (networks.NET_80M, networks.NET_252M):
        count = sum(parameter.numel() for parameter in size.build("meta").parameters())
        assert size.name == f"{count / 1e6:.0f} M"


def test_a_folder_that_cannot_be_fails_before_the_measurements(tmp_path, monkeypatch):
    from dpa.bench import command

    (tmp_path / "file").touch()
    monkeypatch.setattr(command, "_measured", lambda *args: pytest.fail("measured"))
    with pytest.raises(OSError, match="file"):
        command.bench(command.Options(out=tmp_path / "file" / "out"))


def test_the_bars_follow_from_the_tables():
    from dpa.bench.bars import bars

    step = {"network": "80 M", "batch": 1, "weights": "bfloat16", "how": "dpa"}
    steps = [
        step | {"us": 60.0},
        step | {"us": 63.0, "weights": "float8_e4m3fn"},
        step | {"us": 1200.0, "how": "torch.compile, graph"},
        step | {"us": 180.0, "batch": 16},
    ]
    loops = [step | {"loop": "DDPM, 100 steps", "us": 8000.0, "first call s": 1.5}]
    fast = [{"weights": "bfloat16", "tolerance": t, "faster": f} for t, f in ((1e-3, 1.6),)]
    found = {row["bar"]: row for row in bars({"steps": steps, "loops": loops, "parallel": fast})}
    assert {bar: (row["value"], row["holds"], row["reached"]) for bar, row in found.items()} == {
        "80 M, bfloat16, us": (60.0, True, False),
        "80 M, bfloat16: faster than torch.compile": (20.0, True, True),
        "80 M, float8_e4m3fn, us": (63.0, False, False),
        "80 M, bfloat16, batch 16, us": (180.0, False, False),
        "80 M, batch 1: e4m3's time of bfloat16's": (1.05, False, False),
        "80 M, batch 16: time of batch 1's": (3.0, False, False),
        "a first call, packing and capture included, s": (1.5, False, False),
        "bfloat16, parallel, tolerance 0.001: faster than the loop": (1.6, True, False),
    }
    assert bars({}) == []


def test_an_image_policy_is_measured(monkeypatch):
    pytest.importorskip("lerobot")
    if not torch.cuda.is_available():  # no call is captured: the second is as the seventh
        monkeypatch.setattr(image_policies, "_WARM_UP", 1)
    case = image_policies.Case("small", 2, (64, 64), (16, 32), 8, 2, group_norm=False)
    calls = image_policies.call_rows(case, seconds=0.0)
    kinds = [("plain", "float32"), ("dpa", "float32"), ("dpa", "bfloat16")]
    assert [(row["how"], row["weights"]) for row in calls] == kinds
    assert all(row["ms"] > 0 for row in calls)
    assert all(row["error"] < bound for row, bound in zip(calls, (1e-6, 1e-4, 5e-2), strict=True))
    steps = image_policies.step_rows(case, seconds=0.0)
    kinds = [(how, name) for how in ("plain", "dpa") for name in ("float32", "bfloat16")]
    assert [(row["how"], row["computes in"]) for row in steps] == kinds
    assert {row["samples"] for row in steps} == {2}


def test_an_image_policys_bars():
    name = image_policies.CASES[0].name
    row = lambda how, weights, **found: {"policy": name, "how": how, "weights": weights, **found}  # noqa: E731
    step = lambda how, ms: {"policy": name, "how": how, "computes in": "bfloat16", "ms": ms}  # noqa: E731
    found = image_policies.bars(
        {
            image_policies.CALLS: [
                row("plain", "float32", ms=60.0),
                row("dpa", "bfloat16", ms=2.1),
            ],
            image_policies.STEPS: [step("plain", 60.0), step("dpa", 8.0)],
            image_policies.ENCODERS: [row("dpa", "float32", us=200.0)],
        }
    )
    assert_close([each["value"] for each in found], [200.0, 2.1, 7.5])
    assert [each["required"] for each in found] == [260.0, 2.0, 6.0]
    assert [each["holds"] for each in found] == [True, False, True]
    assert not any(each["reached"] for each in found)
    assert image_policies.bars({}) == []


def test_a_run_that_goes_on_has_each_bar_once():
    name = image_policies.CASES[0].name
    row = {"policy": name, "how": "dpa", "weights": "float32", "us": 200.0}
    once = command._finished({image_policies.ENCODERS: [row]})
    assert [bar["value"] for bar in once["bars"]] == [200.0]
    assert command._finished(once) == once


def test_loops_of_plain_networks(cuda):
    size = Network("small", (32, 64), 32, 8)
    step, found = compiled.eager(size, size.build().eval(), torch.bfloat16)
    assert step["us"] > 0 and {row["loop"] for row in found} == {
        "DDIM, 10 steps",
        "DDPM, 100 steps",
    }
