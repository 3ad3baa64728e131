"""``dpa bench --train``: tables, the bars and the picture; a small network, no compiler."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from patience import HANGS
from torch.testing import assert_close

from dpa.bench import train, train_bars, train_ranks

CliRunner = pytest.importorskip("typer.testing").CliRunner


def test_a_small_network_is_measured(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device.type == "cuda")
    case = train.SMALL[0]
    small = train.build(case.network, train.EAGER, torch.device("cpu"))
    cases = (case, replace(case, tf32=True))
    runs = [(each, way) for each in cases for way in (train.EAGER, train.DPA)]
    rows = [train.measure(*run, repeats=1) for run in runs]
    assert [(row["what"], row["how"]) for row in rows] == [(c.what, way) for c, way in runs]
    for row in rows:
        assert row["called"] > 0
        missing = {row[name] is None for name in ("graph", "step", "peak MiB")}
        assert missing == {device.type == "cpu"}
        if row["peak MiB"] is not None:  # weights, gradients and moments at least, and no rounding
            least = 4 * 4 * sum(p.numel() for p in small.parameters()) / 2**20
            assert least <= row["peak MiB"] <= row["allocated MiB"]
            assert least <= row["replayed MiB"]
    assert not torch.backends.cuda.matmul.allow_tf32


def _rows(dpa_ms):
    """Times of every case: 1 s for the rivals, ``dpa_ms`` for dpa."""
    return [
        {"network": case.network.name, "batch": case.batch, "how": how}
        | {"what": case.what}
        | dict.fromkeys(
            ("called", "graph", "step"), dpa_ms if how.startswith(train.DPA) else 1000.0
        )
        | {"peak MiB": (80.0 if how.startswith(train.DPA) else 100.0) if case.backward else None}
        | {"replayed MiB": (99.0 if how.startswith(train.DPA) else 90.0) if case.backward else None}
        for case in train.CASES
        for how in train.WAYS
    ]


def test_the_bars_compare_ratios():
    norm = [{"B, C, T": "1, 2, 3", "torch.compile a": 9.0, "torch.compile b": 8.0, "dpa": 2.0}]
    norm[0]["floor"] = 2.0
    speeds = {"80 M, 256": ((1, 10), (2, 16), (2, 14)), "80 M, 1024": ((1, 10), (2, 3), (2, 19))}
    speeds |= {"80 M, 4096": ((1, 10), (4, 36.5))}
    speeds |= {"with images": ((1, 10), (4, 37)), "4096 samples": ((1, 10), (4, 37))}
    gpus = [
        {"case": case, "how": "", "GPUs": n, "samples a second": s}
        for case, measured in speeds.items()
        for n, s in measured
    ]
    optimizers = [{"what": "AdamW", "dpa": us, "floor": 100.0} for us in (104.0, 110.0, 120.0)]
    found = train_bars.bars(_rows(220.0), norm, optimizers, gpus)
    speed, memory, others = found[:16], found[16:34], found[34:]
    assert_close([row["ratio"] for row in speed], [1000 / 220] * 16)
    assert [row["holds"] for row in speed] == [
        *("aim", "aim", "yes", "yes", "aim", "yes", "NO", "yes", "yes", "yes", "aim"),
        *("aim", "aim", "yes", "yes", "aim"),
    ]
    assert_close([row["ratio"] for row in memory], [0.8, 1.1] * 9)
    assert [row["holds"] for row in memory] == ["aim", "NO"] * 9
    ratios = [4.0, 1.04, 1.1, 1.2, 1.6, 1.9, 3.65, 3.7, 3.7]
    assert_close([row["ratio"] for row in others], ratios)
    assert [row["holds"] for row in others] == [
        *("aim", "aim", "yes", "NO", "NO", "yes", "yes", "yes", "NO")
    ]
    assert_close(others[0]["aim"], 8.0 / 2.6)
    # Weights of 16 bits may be the faster rival, forward alone.
    rows = [r | {"graph": 660.0} if r["how"] == train.HALVES else r for r in _rows(220.0)]
    forward = [r["ratio"] for r in train_bars.bars(rows, [], [], []) if ", forward, " in r["what"]]
    assert_close(forward, [3.0] * 3)
    slow = train_bars.bars(_rows(500.0), [], [], [])
    assert {row["holds"] for row in slow[:16]} == {"NO"}
    assert train_bars.bars([], [], [], []) == []


def test_several_processes_are_measured(tmp_path):
    pytest.importorskip("diffusers")
    worker = Path(__file__).parents[1] / "support/scaling_worker.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    file = tmp_path / "rows.json"
    command = [*launcher, "--nproc-per-node=2", str(worker), str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert "network" in found
    for rows in found.values():
        alone, *others = rows
        assert (alone["how"], alone["GPUs"]) == (train_ranks.ALONE, 1)
        assert {row["GPUs"] for row in others} == {2}
        assert all(row["step us"] > 0 for row in rows)
    trained = [row["how"] for row in found["network"][1:]]
    assert trained == [train_ranks.DDP, train_ranks.SHARDED]
    # The same random numbers, and weights, as in one process.
    assert found["sampled"][1]["largest difference"] < 1e-5


def test_a_whole_step_trains(device):
    """The pass, AdamW and the averages: the same weights and counts by either way."""
    weights = []
    for way in (train.EAGER, train.DPA):
        case = replace(train.SMALL[0], tf32=True)
        model = train.build(case.network, train.EAGER, device)
        torch.manual_seed(1)
        step = train.whole_step(train._work(case, way, model), model, way)
        for _ in range(3):
            step()
        weights.append([p.detach() for p in model.parameters()])
    assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from dpa.bench import plots

    path = plots.draw_training(_rows(200.0), "a GPU", tmp_path / "train.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_loss_curves_are_compared_and_drawn(tmp_path):
    pytest.importorskip("diffusers")
    pytest.importorskip("matplotlib")
    from dpa.bench import loss_curves, plots

    assert loss_curves.smoothed([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [2.0, 6.0]
    rows = [
        {"network": "demo", "dtype": "float32", "seed": seed}
        | {"eager": [9.0, level], "dpa": [9.0, 1.1 * level]}
        for seed, level in ((0, 1.0), (1, 1.5))
    ]
    (found,) = loss_curves.summary(rows)
    assert_close(found["same seed"], 0.1 * (1.0 + 1.5**2) ** 0.5 / 2**0.5 / 1.25)
    assert_close(found["between seeds"], 0.5 / 1.25)
    path = plots.draw_curves(rows, "a GPU", tmp_path / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_what_it_prints(monkeypatch, tmp_path):
    from dpa.cli.app import app

    row = _rows(200.0)[0]
    monkeypatch.setattr(train, "measure", lambda case, way: row | {"how": way})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "--train", "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "train.json").read_text())
    assert json.loads(result.stdout) == written
    assert [row["how"] for row in written["training"]] == [train.EAGER, train.DPA]
    result = CliRunner().invoke(app, ["bench", "--train", "--only", "sampler"])
    assert result.exit_code != 0
    assert "networks" in result.output
