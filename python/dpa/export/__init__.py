"""A whole policy in one file for Python and C++: weights, scheduler table and denoising loop."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpa.checkpoints.files import CheckpointError
from dpa.export import onnx_graph
from dpa.export.continuing import ContinuingLoop
from dpa.export.images import ImagePolicy
from dpa.export.onnx_graph import PlainLoop, PlainStep
from dpa.export.packages import Input, checking, compile_package, open_package
from dpa.export.places import check_places, manifest_of
from dpa.export.policy import NO_CLIP, Around, LayeredLoop, PackedLoop, PackedStep
from dpa.library.checks import require
from dpa.library.files import replacing

__all__ = [
    "FORMATS",
    "Around",
    "ContinuingLoop",
    "ImagePolicy",
    "LayeredLoop",
    "PackedLoop",
    "PackedStep",
    "PlainLoop",
    "PlainStep",
    "export_policy",
    "load_policy",
]

STAGES = ("reading", "packing", "compiling", "running it", "writing")
FORMATS = {"torchscript": ".pt", "exported-program": ".pt2", "aoti": ".pt2", "onnx": ".onnx"}


def export_policy(
    policy: LayeredLoop | PackedLoop | PackedStep | ContinuingLoop | PlainLoop | ImagePolicy,
    path: str | Path,
    to: str,
    inputs: dict[str, Tensor],
    facts: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Write ``policy`` to ``path`` and its manifest beside it, as ``path`` with ``.json`` appended.

    Args:
        policy: on the device that it shall run on; it stays as it is.
        path: the file.
        to: ``torchscript`` (Python and C++), ``aoti`` (an AOTInductor package: Python and C++, for
            machines like this one), ``exported-program`` (Python, and tools that read it) or
            ``onnx`` (other runtimes; of a :class:`PlainLoop` or :class:`PlainStep`).
        inputs: an example of each argument of ``policy.forward`` by its name, in order, of the
            shape and on the device that the file is made for.
        facts: further entries of the manifest.
        report: called with the name of each stage that begins, of :data:`STAGES`.

    Returns:
        The manifest.

    Raises:
        ValueError: for another format, or what cannot be written in it; before anything is
            computed where ``path`` or its manifest exists and is no regular file.

    """
    path = Path(path)
    check_places(path, "path")
    require(to in FORMATS, "format", f"be one of {', '.join(FORMATS)}", to)
    right, got = (to == "onnx") == isinstance(policy, PlainLoop), f"{to}, {type(policy).__name__}"
    require(right, "format", "be onnx for PlainLoop and PlainStep alone", got)
    if not isinstance(policy, ImagePolicy):  # which has those of its images
        named = list(inspect.signature(policy.forward).parameters)
        require(list(inputs) == named, "inputs", f"be {', '.join(named)}", ", ".join(inputs))
    checked: dict[str, Any] = {}
    with _as_it_will_run(policy), torch.no_grad():
        report("compiling")
        content = _content(policy, to, inputs)
        report("running it")
        results = policy(*inputs.values())
        if to == "onnx":
            checked = {"opset": onnx_graph.OPSET}
            checked["checked"] = onnx_graph.check(content, policy, inputs)
    report("writing")
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    outputs = {"actions": results}
    if isinstance(results, tuple):
        outputs = dict(zip(("sample", "actions"), results, strict=True))
    manifest = _manifest(policy, path, to, inputs, outputs) | (facts or {}) | checked
    manifest["crc32"] = zlib.crc32(content)
    with replacing(manifest_of(path)) as temporary:
        temporary.write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


@contextlib.contextmanager
def _as_it_will_run(policy: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores both, as the caller may be in training."""
    modes = [(module, module.training) for module in policy.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    try:
        policy.eval().requires_grad_(False)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires_grad in wanted:
            with torch.inference_mode(parameter.is_inference()):
                parameter.requires_grad_(requires_grad)


def load_policy(path: str | Path) -> Callable[..., Any]:
    """Open an exported policy of any format, to be called with its inputs in order.

    An AOTInductor package opens without PyTorch's probe of the CPU's vector instructions. It would
    read any tensor as one of the shape, dtype and strides that it was compiled for: what is
    returned raises a ValueError for other inputs than the manifest's, and makes them contiguous.

    Args:
        path: the file; its manifest lies beside it.

    Raises:
        FileNotFoundError: no such file, or no manifest; or a folder.
        CheckpointError: the file's bytes are not those that the manifest was written for, or the
            manifest cannot be read.

    """
    path = Path(path)
    beside = manifest_of(path)
    for file in (path, beside):
        if file.is_dir():
            raise FileNotFoundError(f"{file}: is a folder, where an exported policy is a file")
        if not file.is_file():
            raise FileNotFoundError(f"{file}: there is no such file")
    try:
        manifest = json.loads(beside.read_bytes())
        to, expected = manifest["format"], manifest["crc32"]
        names = [entry["name"] for entry in manifest["inputs"]]
        of_package = to == "aoti"
        device = manifest["device"] if of_package else None
        inputs = [Input.of(entry) for entry in manifest["inputs"]] if of_package else []
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(f"{beside}: is no manifest of an exported policy") from None
    known, rule = isinstance(to, str) and to in FORMATS, f"be one of {', '.join(FORMATS)}"
    require(known, f"{beside}: format", rule, repr(to), CheckpointError)
    # PyTorch opens a file whose weights are damaged, and computes with them.
    if (found := _checksum(path)) != expected:
        reason = f"its CRC-32 is {found}, that in {beside.name} {expected}"
        raise CheckpointError(f"{path}: is damaged, or not the file of its manifest: {reason}")
    if to == "onnx":
        return onnx_graph.open_graph(path, names)
    if to == "aoti":
        return checking(open_package(path), inputs, device)
    return torch.jit.load(path) if to == "torchscript" else torch.export.load(path).module()


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            found = zlib.crc32(piece, found)
    return found


def _content(policy: nn.Module, to: str, inputs: dict[str, Tensor]) -> bytes:
    """Make the bytes of the file. PyTorch's writers of files abort the process on a full disk."""
    arguments = tuple(inputs.values())
    if to == "onnx":
        outputs = ("next_sample", "actions") if isinstance(policy, PlainStep) else ("actions",)
        return onnx_graph.graph_of(policy, inputs, outputs)
    if to == "torchscript":
        is_traced = isinstance(policy, ImagePolicy)
        made = policy.traced(inputs) if is_traced else torch.jit.script(policy)
        return made.save_to_buffer()
    if to == "aoti":
        return compile_package(policy, arguments)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(policy, arguments), buffer)
    return buffer.getvalue()


def _part_of(policy: nn.Module) -> str:
    if isinstance(policy, ContinuingLoop):
        return "continuing"
    return "step" if isinstance(policy, PackedStep | PlainStep) else "loop"


def _manifest(
    policy: nn.Module, path: Path, to: str, inputs: dict[str, Tensor], outputs: dict[str, Tensor]
) -> dict[str, Any]:
    def described(name: str, value: Tensor) -> dict[str, Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"name": name, "shape": list(value.shape), "dtype": dtype}

    return {
        "file": path.name,
        "format": to,
        "part": _part_of(policy),
        "torch": torch.__version__,
        "device": outputs["actions"].device.type,
        "network_dtype": str(policy.dtype).removeprefix("torch."),
        "inputs": [described(name, value) for name, value in inputs.items()],
        "outputs": [described(name, value) for name, value in outputs.items()],
        "normalisation": policy.normalisation(),
        "steps": policy.steps,
        "timesteps": policy.timesteps.tolist(),
        "clip": policy.clip if policy.clip < NO_CLIP else None,
    }
