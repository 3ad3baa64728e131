"""Libraries that are none of dpa's, or no longer whole: an error, not the end of the process."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import run_python

import dpa
from dpa.library import loader


def load(path):
    """What `import dpa` says in a process of its own; the last line, and the exit status."""
    code = "import dpa; print(dpa.library_path())"
    done = run_python("-c", code, env={**os.environ, "DPA_LIBRARY": str(path)})
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.fixture
def whole(monkeypatch):
    """The library's bytes; and nothing is loaded, as far as the loader can see."""
    monkeypatch.setattr(loader, "is_loaded", lambda: False)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    return Path(dpa.library_path()).read_bytes()


def test_a_library_that_is_cut_short_is_refused(whole, tmp_path):
    path = tmp_path / "libdpa.so"
    lengths = [6, 40, 63, 64, 100, 4096, len(whole) // 2, len(whole) - 4096, len(whole) - 1]
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(ImportError, match=f"damaged or cut short, it has {length} bytes of"):
            loader.load(path)


def test_segments_past_the_end_are_seen_without_a_table_of_sections(whole, tmp_path):
    path = tmp_path / "libdpa.so"
    stripped = bytearray(whole[: len(whole) // 2])
    stripped[40:48], stripped[60:62] = bytes(8), bytes(2)
    path.write_bytes(stripped)
    with pytest.raises(ImportError, match="damaged or cut short"):
        loader.load(path)


@pytest.mark.parametrize("folder", [".", "torch2.11-cpu"])
def test_kernels_that_are_cut_short_are_refused(whole, tmp_path, folder):
    path, kernels = tmp_path / folder / "libdpa.so", tmp_path / "libdpa_kernels.so"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(whole)
    kernels.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImportError, match=r"libdpa_kernels.so is damaged or cut short"):
        loader.load(path)


def test_absurd_headers_are_refused(whole, tmp_path):
    path = tmp_path / "libdpa.so"
    for at in (32, 40):
        altered = bytearray(whole)
        struct.pack_into("<Q", altered, at, 2**64 - 1)
        path.write_bytes(altered)
        with pytest.raises(ImportError, match="damaged or cut short"):
            loader.load(path)


def test_a_process_survives_what_is_no_whole_library(tmp_path):
    library = Path(dpa.library_path())
    short = tmp_path / "short.so"
    shutil.copy(library, short)
    os.truncate(short, library.stat().st_size // 2)
    status, line = load(short)
    assert status == 1 and "is damaged or cut short" in line
    assert line.endswith(": correct or unset DPA_LIBRARY")
    short.write_text("no library\n")
    status, line = load(short)
    assert status == 1 and "does not load with torch" in line
    assert ": correct or unset DPA_LIBRARY (" in line
    status, line = load(Path(torch.__file__).parent / "lib" / "libtorch.so")
    assert status == 1 and "is another library: it registers no torch.ops.dpa.*" in line
    assert line.endswith(": correct or unset DPA_LIBRARY")


PATHS = """
import importlib, sys, warnings
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import dpa, dpa.jit, dpa.cli, dpa.export, dpa.reference, dpa.schedulers
    from dpa.nn import ConditionalResidualBlock1D, ConditionalUnet1D, Conv1dBlock, LLTM
    from dpa.packed import PackedUnet
    from dpa.training import EMA, GraphedStep, graph_calls, ungraph_calls
    from dpa.training.distributed import ranks
    assert dpa.jit.load is importlib.import_module("dpa.library.jit").load
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from dpa.distributed import Ranks, ShardedOptimizer, ranks as old, sample_sharded
assert old is ranks and [w.category for w in caught] == [DeprecationWarning], caught
"""


def test_documented_paths_import_without_a_warning_and_the_moved_one_with_one():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PATHS], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
