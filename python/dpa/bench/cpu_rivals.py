"""The U-Net in the installed CPU engines: one call each, on prepared inputs."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpa
from dpa.packed.unet import PackedUnet

Call = Callable[[], Any]
Inputs = tuple[Tensor, Tensor, Tensor]  # sample, timestep, global_cond
_NAMES = ("sample", "timestep", "global_cond")


class _Positional(nn.Module):
    """The plain network with the inputs that an exported one has."""

    def __init__(self, unet: nn.Module):
        super().__init__()
        self.unet = dpa.reference.plain(unet)

    def forward(self, sample: Tensor, timestep: Tensor, global_cond: Tensor) -> Tensor:
        return self.unet(sample, timestep, None, global_cond)


def installed() -> dict[str, bool]:
    """Which of the optional engines are here (requirements/bench.txt)."""
    found = {name: importlib.util.find_spec(name) is not None for name in ("onnx", "openvino")}
    runtime = importlib.util.find_spec("onnxruntime") is not None
    return {"ONNX Runtime": runtime and found["onnx"], "OpenVINO": all(found.values())}


def engines(
    unet: nn.Module, inputs: Inputs, compiled: bool = True
) -> Iterator[tuple[str, str, Call]]:
    """Yield (engine, precision, call) of every engine that is here; a call returns (B, T, Da).

    All use PyTorch's number of threads. torch.compile, which takes a minute, is one of them where
    ``compiled``. The caller turns gradients off.
    """
    plain = _Positional(unet).eval()
    yield "eager", "float32", lambda: plain(*inputs)

    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*inputs)

    yield "eager", "bfloat16", autocast
    if compiled:
        fused = torch.compile(plain, dynamic=False)
        yield "torch.compile", "float32", lambda: fused(*inputs)
    here = installed()
    if any(here.values()):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "unet.onnx"
            torch.onnx.export(plain, inputs, path, dynamo=False, input_names=list(_NAMES))
            arrays = dict(zip(_NAMES, (x.numpy() for x in inputs), strict=True))
            if here["ONNX Runtime"]:
                yield "ONNX Runtime", "float32", _onnx_runtime(path, arrays)
            if here["OpenVINO"]:
                for precision, hint in (("float32", "f32"), ("bfloat16", "bf16")):
                    yield "OpenVINO", precision, _openvino(path, arrays, hint)
    for dtype in (torch.float32, torch.bfloat16):
        packed = PackedUnet(unet, dtype)
        yield "dpa", str(dtype).removeprefix("torch."), lambda packed=packed: packed(*inputs)


def _onnx_runtime(path: Path, arrays: dict[str, Any]) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: torch.from_numpy(session.run(None, arrays)[0])


def _openvino(path: Path, arrays: dict[str, Any], hint: str) -> Call:
    import openvino

    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": hint,
    }
    try:
        compiled = openvino.compile_model(path, "CPU", options)
    except RuntimeError:  # its snippets have no Mish for some processors
        compiled = openvino.compile_model(path, "CPU", options | {"SNIPPETS_MODE": "DISABLE"})
    request = compiled.create_infer_request()
    given = list(arrays.values())
    # Without a copy the result is a view into the request, which the next call overwrites.
    return lambda: torch.from_numpy(request.infer(given, share_inputs=True)[0].copy())
