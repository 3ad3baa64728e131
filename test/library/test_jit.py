"""dpa.jit.load: the library built at run time, each time in a process of its own."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_registration import HOST

import dpa
from dpa.library import building

_ROOT = Path(__file__).parents[2]


def _run(code: str, **environment: str) -> str:
    """What ``code`` prints in a fresh process without the installed library."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DPA_LIBRARY": "jit", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_refuses_a_second_library():
    with pytest.raises(RuntimeError, match=r"dpa\.jit\.load: the ops are registered already.*jit"):
        dpa.jit.load()


def test_before_a_library_is_built(tmp_path):
    """One process: the installed library is left alone, and two builds say why they fail."""
    (tmp_path / "file").touch()
    code = f"""
import dpa, torch
assert not hasattr(torch.ops.dpa, "denoise")
try:
    dpa.library_path()
except FileNotFoundError as error:
    print(error)
tries = [("off", {str(tmp_path / "file" / "build")!r}), ("sometimes", {str(tmp_path)!r})]
for cuda, folder in tries:
    try:
        dpa.jit.load(cuda=cuda, folder=folder)
    except RuntimeError as error:
        print(error)
"""
    printed = _run(code)
    assert "call dpa.jit.load()" in printed
    assert "cannot be written (Not a directory): give another folder=" in printed
    assert "XDG_CACHE_HOME" in printed
    assert "DPA_CUDA must be auto, on or off, got sometimes" in printed


def test_an_installation_without_sources(monkeypatch):
    monkeypatch.setattr(building, "sources", lambda: None)
    with pytest.raises(FileNotFoundError, match="does not hold dpa's sources"):
        building.source()


NINJA = ["sh", "-c", "echo '[1/2] a.cpp'; echo warning: b; echo '[2/2] b.cpp'; exit {status}"]


@pytest.mark.parametrize("status", [0, 3])
def test_counts_the_compiled_files_on_a_terminal(status, capsys, monkeypatch):
    command = [part.format(status=status) for part in NINJA]
    lines = "[1/2] a.cpp\nwarning: b\n[2/2] b.cpp\n"
    assert building._run(command, dict(os.environ), verbose=False, say=True) == (status, lines)
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert building._run(command, dict(os.environ), verbose=False, say=True) == (status, lines)
    err = capsys.readouterr().err
    assert "\rdpa.jit.load: [1/2]\rdpa.jit.load: [2/2]" in err and err.endswith("\r\033[K")


def test_says_now_and_then_where_it_is_without_a_terminal(capsys, monkeypatch):
    """As in a container's log, where minutes without a word are taken for a hang."""
    clock = itertools.count(step=building._SECONDS / 2)
    monkeypatch.setattr(building.time, "monotonic", lambda: next(clock))
    command = ["sh", "-c", 'for n in 1 2 3 4; do echo "[$n/4] a.cpp"; done']
    building._run(command, dict(os.environ), verbose=False, say=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["dpa.jit.load: [2/4]", "dpa.jit.load: [4/4]"]
    building._run(command, dict(os.environ), verbose=False, say=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "cuda",
    [
        "off",
        pytest.param(
            "on",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        ),
    ],
)
def test_builds_and_registers_the_same_ops(cuda):
    """The folders stay, so that only the first run of the tests compiles.

    One for each compiler: CMake would go on with the one that it began with.
    """
    names = [n for n in dpa.info()["ops"] if "unet1d_pack" not in n and n not in HOST]
    ccache = shutil.which("ccache")
    folder = _ROOT / "build" / f"jit-{cuda}{'-ccache' if ccache else ''}"
    code = f"""
import dpa, torch
path = dpa.jit.load(cuda={cuda!r}, folder={str(folder)!r})
assert path == dpa.library_path() == dpa.jit.load() and path.is_file()
for name in {names}:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"), name
for device in ["cpu"] + ["cuda"] * ({cuda!r} == "on"):
    x = torch.randn(2, 8, 5, device=device)
    expected = dpa.reference.group_norm_mish(x, 4)
    torch.testing.assert_close(torch.ops.dpa.group_norm_mish(x, 4), expected)
    mapped = torch.vmap(lambda x: torch.ops.dpa.fused_relu_add(x, x))(x)
    torch.testing.assert_close(mapped, x.relu() + x)
print("works")
"""
    environment = {}
    if not ccache:  # which would have what `make build` has compiled
        # Not optimised, the sources compile in half the time.
        compiler = folder.parent / "jit-compiler" / "c++"
        compiler.parent.mkdir(parents=True, exist_ok=True)
        compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
        compiler.chmod(0o755)
        environment["CXX"] = str(compiler)
    assert _run(code, **environment).strip().endswith("works")
