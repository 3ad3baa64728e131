"""A wheel with ops for several torches: which library an import takes, and what it says of none."""

import sys
from pathlib import Path

import pytest
import torch

import dpa
from dpa.library import building, by_torch, loader

HERE = by_torch.minor(torch.__version__)


@pytest.fixture
def lib(tmp_path, monkeypatch):
    """The folder of a wheel's libraries, of kernels built with CUDA 13, where nothing is loaded."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / by_torch.KERNELS).touch()
    (folder / "built-for.txt").write_text("the CPU and CUDA 13.0.88 for architectures 90a\n")
    monkeypatch.delenv("DPA_LIBRARY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "lerobot_bound", lambda: None)
    monkeypatch.setattr(loader, "_loaded", None)
    monkeypatch.setattr(loader, "is_loaded", lambda: False)
    monkeypatch.setattr(loader, "folders", lambda: [folder])
    with_cuda(monkeypatch, "13.0", 13)
    return folder


def with_cuda(monkeypatch, version, driver):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(by_torch, "driver_cuda", lambda: driver)


def add(lib, *names):
    for name in names:
        (lib / name).mkdir()
        (lib / name / by_torch.NAME).touch()


@pytest.mark.parametrize(
    ("cuda", "driver", "kind"),
    [
        ("13.0", 13, "cuda"),
        ("13.0", 0, "cuda"),  # no driver: a machine without a GPU
        ("12.8", 13, "cuda"),  # the kernels hold CUDA's runtime
        ("12.8", 12, "cpu"),
        (None, 13, "cpu"),
    ],
)
def test_the_library_for_this_torch(lib, monkeypatch, cuda, driver, kind):
    add(lib, f"torch{HERE}-cpu", f"torch{HERE}-cuda", "torch1.99-cpu", "torch1.99-cuda")
    with_cuda(monkeypatch, cuda, driver)
    assert dpa.library_path() == lib / f"torch{HERE}-{kind}" / by_torch.NAME


def test_the_driver_s_answer(monkeypatch):
    class Driver:
        @staticmethod
        def cuDriverGetVersion(version):
            version._obj.value = 12080

    monkeypatch.setattr(by_torch.ctypes, "CDLL", lambda name: Driver)
    assert by_torch.driver_cuda() == 12


def test_no_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(by_torch.ctypes, "CDLL", missing)
    assert by_torch.driver_cuda() == 0


def test_a_wheel_for_the_cpu_serves_every_torch(lib, monkeypatch):
    add(lib, f"torch{HERE}-cpu")
    (lib / "built-for.txt").write_text("the CPU alone: DPA_CUDA is off\n")
    assert dpa.library_path() == lib / f"torch{HERE}-cpu" / by_torch.NAME


def test_a_library_for_one_torch_lies_beside_none(lib):
    (lib / by_torch.NAME).touch()
    assert dpa.library_path() == lib / by_torch.NAME


def test_no_ops_for_this_torch(lib):
    add(lib, "torch1.9-cpu", "torch1.10-cpu", "torch1.10-cuda")
    with pytest.raises(FileNotFoundError, match=r"torch 1\.9, 1\.10, and this is torch"):
        dpa.library_path()


def test_without_a_compiler_the_import_says_what_to_install(lib, monkeypatch, tmp_path):
    add(lib, "torch1.10-cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ImportError) as caught:
        loader.load()
    (line,) = str(caught.value).splitlines()
    assert "has ops for torch 1.10, and this is torch" in line
    assert "pip install cmake ninja, sudo apt install g++" in line
    assert line.endswith('or pip install "torch==1.10.*"')


def test_without_a_compiler_the_import_names_a_torch_that_lerobot_allows(lib, monkeypatch):
    add(lib, "torch1.9-cpu", "torch1.10-cpu", "torch1.11-cpu")
    monkeypatch.setattr(building, "lerobot_bound", lambda: "<1.11,>=1.2")
    monkeypatch.setattr(building, "_tool", lambda name: None)
    with pytest.raises(ImportError, match=r'or pip install "torch==1\.10\.\*"$'):
        loader.load()


def test_builds_the_ops_beside_the_kernels_once(lib, monkeypatch, capsys):
    add(lib, "torch1.10-cpu")
    commands, loaded = [], []

    def run(command, environment, verbose, say):
        commands.append(command)
        if "--build" in command:
            Path(command[-1], by_torch.NAME).touch()
        return 0, ""

    monkeypatch.setattr(building, "_run", run)
    monkeypatch.setattr(loader, "_refuse_cut_short", lambda path: None)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(loader, "is_loaded", lambda: bool(loaded))
    loader.load()
    assert f"-DDPA_KERNELS={lib / by_torch.KERNELS}" in commands[0] and len(commands) == 2
    assert "building them, once, in minutes" in capsys.readouterr().err
    monkeypatch.setattr(loader, "_loaded", None)
    assert [str(dpa.library_path())] == loaded and len(commands) == 2


def test_a_failed_build_is_an_import_error_with_its_output(lib, monkeypatch):
    add(lib, "torch1.10-cpu")
    monkeypatch.setattr(building, "_run", lambda *_: (1, "ops/library.cpp: no such header"))
    with pytest.raises(ImportError, match=r"cannot be built(.|\n)*no such header\nOr pip install"):
        loader.load()


@pytest.mark.parametrize(
    ("folder", "reason"),
    # The second cannot even be looked into, as another user's home: for root too.
    [("file", "Not a directory"), ("x" * 300, "File name too long")],
)
def test_a_cache_that_cannot_be_written_is_named(lib, monkeypatch, tmp_path, folder, reason):
    add(lib, "torch1.10-cpu")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
    with pytest.raises(ImportError, match=rf"cannot be written \({reason}\)(.|\n)*XDG_CACHE"):
        loader.load()
