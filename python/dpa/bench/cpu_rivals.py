"""The U-Net in the installed CPU engines: one call each, on prepared inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
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


ENGINES = ("eager", "torch.compile", "ONNX Runtime", "OpenVINO", "dpa")
# What the optional ones need beside onnx (requirements/bench.txt).
_PACKAGES = {"ONNX Runtime": "onnxruntime", "OpenVINO": "openvino"}


def engines(
    unet: nn.Module, inputs: Inputs, wanted: Collection[str] = ENGINES
) -> Iterator[tuple[str, str, Call]]:
    """Yield (engine, precision, call) of every wanted engine that is here.

    A call returns (B, T, Da). All use PyTorch's number of threads. torch.compile takes a minute.
    The caller turns gradients off.
    """
    plain = _Positional(unet).eval()

    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*inputs)

    if "eager" in wanted:
        yield "eager", "float32", lambda: plain(*inputs)
        yield "eager", "bfloat16", autocast
    if "torch.compile" in wanted:
        fused = torch.compile(plain, dynamic=False)
        yield "torch.compile", "float32", lambda: fused(*inputs)
    here = {name for name, package in _PACKAGES.items() if name in wanted and find_spec(package)}
    if here and find_spec("onnx"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "unet.onnx"
            torch.onnx.export(plain, inputs, path, dynamo=False, input_names=list(_NAMES))
            arrays = dict(zip(_NAMES, (x.numpy() for x in inputs), strict=True))
            if "ONNX Runtime" in here:
                yield "ONNX Runtime", "float32", _onnx_runtime(path, arrays)
            if "OpenVINO" in here:
                for precision, hint in (("float32", "f32"), ("bfloat16", "bf16")):
                    yield "OpenVINO", precision, _openvino(path, arrays, hint)
    if "dpa" in wanted:
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
