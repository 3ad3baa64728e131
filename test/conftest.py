"""Fixtures that every test file shares, the marks of tests, and the order of files."""

import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
from slow import LONGEST, is_slow

import dpa  # noqa: F401  (registers the ops)

# PyTorch's compiler tries vector instructions by programs that import PyTorch, and starts processes
# that compile beside this one. The CPU's flags say enough, and the cores are taken by tests. The
# code that a package runs its kernels from need not be fast.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
import compiler_checks  # noqa: F401

# PyTorch's captures no longer collect garbage first. A graph of the test before that is part of a
# cycle would be destroyed in the middle of a capture, which ends it, and the generator would stay
# in it: every later test that takes random numbers fails.
torch.compiler.config.force_cudagraph_gc = True

_TESTS = Path(__file__).parent

# Folders whose tests run on all of PyTorch's threads: kernels, or threads, are what they test.
# The others call networks so small that a second thread costs more than it computes, and the test
# processes are as many as the cores: 19 CPU seconds became 14, and waiting for the other thread
# tripled the time of a convolution.
_ON_ALL_THREADS = ("faults", "ops", "packed", "sampling")
_THREADS = torch.get_num_threads()


def pytest_collection_modifyitems(items):
    """Mark what ``make check`` leaves out, and what a GPU alone runs; the longest files come first.

    Test processes take file after file: one that came late would leave the others idle.
    """
    for item in items:
        if is_slow(_file(item), getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.slow)
        if _is_for_a_gpu(item):
            item.add_marker(pytest.mark.gpu)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(_file(item).as_posix(), len(order)))


def _is_for_a_gpu(item):
    """Whether a fixture, a parameter or a condition says so."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    reasons = [str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif")]
    return (
        not {"cuda", "hopper"}.isdisjoint(item.fixturenames)
        or any(str(each).startswith("cuda") for each in parameters)
        or any("GPU" in reason or "CUDA" in reason for reason in reasons)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Set the number of PyTorch's threads, before any fixture."""
    torch.set_num_threads(_THREADS if _file(item).parts[0] in _ON_ALL_THREADS else 1)


def _file(item):
    return item.path.relative_to(_TESTS)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        ),
    ]
)
def device(request):
    """Each device of this machine."""
    return torch.device(request.param)


@pytest.fixture
def cuda():
    """The GPU, for what only a GPU does."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none here")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def sm80():
    """A GPU of compute capability 8.0 or later."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0 or later")
    return torch.device("cuda")


@pytest.fixture
def hopper():
    """A Hopper GPU, for what only its own instructions do."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return torch.device("cuda")


@pytest.fixture
def counted_calls(monkeypatch):
    """For ``dpa bench`` and ``dpa profile`` the time is the number of function calls so far.

    A call takes more of it than its parts, and the original loop more than one op, however busy
    the machine is.
    """
    count = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(count)))
    before = sys.getprofile()
    sys.setprofile(lambda *_: next(count))
    yield
    sys.setprofile(before)


@pytest.fixture(autouse=True)
def _seed():
    """The same random inputs on every run, so that a failure can be repeated."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _float32_is_float32(monkeypatch):
    """cuDNN's convolutions round float32 to TF32 by default, which no float32 tolerance covers."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Compiled code of one test does not count against the recompile limit of the next."""
    yield
    torch._dynamo.reset()
