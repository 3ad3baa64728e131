"""The guide "Your own op": it quotes what is built here, and the op passes the six proofs."""

import fcntl
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from proofs import OpProofs, Sample

_ROOT = Path(__file__).parents[2]
_GUIDE = _ROOT / "docs" / "own-op.md"


@pytest.fixture(scope="module", autouse=True)
def _library():
    """Builds the op; the folder stays, so that only the first run of the tests compiles."""
    tools = Path(sys.executable).parent
    cmake, ninja = (shutil.which(t, path=str(tools)) or shutil.which(t) for t in ("cmake", "ninja"))
    if not cmake or not ninja:
        pytest.skip("needs CMake and Ninja")
    build = _ROOT / "build" / "own_op"
    configure = [cmake, "-S", _ROOT / "test" / "ops" / "own_op", "-B", build, "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may run this file's tests at once
        for command in (configure, [cmake, "--build", build]):
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    torch.ops.load_library(build / "libown_op.so")
    TestSwiglu.op = torch.ops.own.swiglu


def _sample(device, dtype, *shape):
    return Sample(tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)))


class TestSwiglu(OpProofs):
    @staticmethod
    def reference(gate, value):
        return torch.nn.functional.silu(gate) * value

    @staticmethod
    def samples(device, dtype):
        for shape in [(), (7,), (3, 5), (0, 2), (2, 3, 4)]:
            yield _sample(device, dtype, *shape)

    @staticmethod
    def rejected(device):
        x = torch.randn(3, 4, device=device)
        head = "^own::swiglu: "
        yield head + "gate must be float64, .* got Int", Sample((x.int(), x))
        yield head + r"value must have the dtype of gate \(Float\)", Sample((x, x.double()))
        yield head + r"value must have the shape of gate \[3, 4\], got \[4\]", Sample((x, x[0]))

    @staticmethod
    def batches(device):
        for batch, length in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, batch, length)


def test_autocast(device):
    gate, value = _sample(device, torch.float32, 3, 5).args
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = torch.ops.own.swiglu(gate, value)
    assert out.dtype == torch.bfloat16
    expected = torch.ops.own.swiglu(gate.bfloat16(), value.bfloat16())
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_guide_quotes_the_files():
    """A block follows the name of its file, and stands in it word for word."""
    blocks = re.findall(r"`(test/\S+)`:\n\n```\w+\n(.*?)^```", _GUIDE.read_text(), re.M | re.S)
    assert len(blocks) == _GUIDE.read_text().count("\n```") // 2 >= 6
    for path, code in blocks:
        assert code in (_ROOT / path).read_text(), f"{path} does not hold:\n{code}"
