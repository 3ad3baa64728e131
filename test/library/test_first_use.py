"""What is said where NVIDIA's driver compiles the library's PTX."""

import time

import pytest
import torch

from dpa.library import first_use

_GPU = torch.device("cuda", 0)


@pytest.fixture
def orin(monkeypatch, tmp_path):
    """A GPU for which the library has PTX alone, and which need not be there."""
    first_use._has_code.cache_clear()
    (tmp_path / "built-for.txt").write_text(
        "the CPU and CUDA 13.0.88 for architectures 80 86 with PTX 80"
    )
    monkeypatch.setattr(first_use, "library_path", lambda: tmp_path / "libdpa.so")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 7))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Orin")
    monkeypatch.setattr(first_use, "_SOON", 0.05)
    first_use._said.clear()
    yield tmp_path
    first_use._said.clear()
    first_use._has_code.cache_clear()


def test_a_call_that_takes_long_says_why_once(orin, capfd):
    for _ in range(2):
        with first_use.saying_what_takes_long(_GPU):
            time.sleep(0.3)
    said = capfd.readouterr().err
    assert said.count("no machine code for Orin") == said.count("ComputeCache") == 1


def test_a_short_call_says_nothing(orin, capfd):
    """What the driver compiled in an earlier process comes from its cache."""
    with first_use.saying_what_takes_long(_GPU):
        pass
    with pytest.raises(ValueError, match="inside"), first_use.saying_what_takes_long(_GPU):
        raise ValueError("inside")
    time.sleep(0.2)
    assert not capfd.readouterr().err and not first_use._said.is_set()


@pytest.mark.parametrize(
    "built_for",
    [
        "the CPU and CUDA 13.0.88 for architectures 80 87 with PTX 80",
        "the CPU alone: without CUDA",
        None,
    ],
)
def test_machine_code_says_nothing(orin, capfd, built_for):
    if built_for is None:
        (orin / "built-for.txt").unlink()
    else:
        (orin / "built-for.txt").write_text(built_for)
    with first_use.saying_what_takes_long(_GPU):
        time.sleep(0.2)
    with first_use.saying_what_takes_long(torch.device("cpu")):
        time.sleep(0.2)
    assert not capfd.readouterr().err
