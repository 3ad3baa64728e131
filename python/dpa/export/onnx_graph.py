"""A policy in plain ONNX operators, for runtimes without PyTorch and dpa: TensorRT, ONNX Runtime.

The loop is unrolled, or there is one step with the table beside it. Sizes are fixed, weights are
float32: the runtime chooses its own precision.
"""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpa.export.policy import NO_CLIP, Around, LayeredLoop
from dpa.library.checks import first_line, require
from dpa.packed.agreement import relative_error
from dpa.reference import plain
from dpa.schedulers.tables import StepTable

# Every TensorRT of JetPack 5 and later reads it, and it has all that these graphs need.
OPSET = 14
# Relative error in the norm of ONNX Runtime's float32 results that passes.
LIMIT = 1e-4
_ALONE = Around()
_MOST_BYTES = 2**31 - 2**20  # of one file of protocol buffers


class PlainLoop(LayeredLoop):
    """The whole loop, unrolled: ``(observation, noise) -> actions``, as ``LayeredLoop`` has it.

    Args:
        unet: a :class:`dpa.nn.ConditionalUnet1D`; it is copied, in float32.
        table: the steps.
        around: encoder and normalisation.

    Raises:
        ValueError: the network is of another class.

    """

    def __init__(self, unet: nn.Module, table: StepTable, around: Around = _ALONE):
        super().__init__(unet, table, around)
        self.dtype = torch.float32
        self.unet = _plain(unet, self.timesteps)

    def forward(self, observation: Tensor, noise: Tensor) -> Tensor:
        """Map (B, Do) and (1 + noisy steps, B, T, Da) to actions (B, T, Da)."""
        cond, sample = self.condition(observation), self.initial(noise)
        for step, row in enumerate(self.coefficients.tolist()):
            output = self.unet(sample, self.index[step : step + 1], None, cond)
            entry = self.noise_index[step]
            sample = _stepped(output, sample, row, noise[entry] if entry else None, self.clip)
        return self.unnormalised(sample)


class PlainStep(PlainLoop):
    """One step: ``(observation, sample, index, noise) -> (sample, actions)``, as ``PackedStep``."""

    def forward(
        self, observation: Tensor, sample: Tensor, index: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Map (B, Do), (B, T, Da), one int64 and (B, T, Da) to the next sample and its actions."""
        index = torch.where(index < 0, self.steps, index)  # ONNX would count it from the end
        output = self.unet(sample, index, None, self.condition(observation))
        row = self.coefficients.index_select(0, index).unbind(1)
        sample = _stepped(output, sample, row, noise, self.clip)
        return sample, self.unnormalised(sample)


class _Groups(nn.GroupNorm):
    """Normalises groups by sizes that are constants of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, length = (int(size) for size in x.shape)
        groups = F.instance_norm(x.reshape(batch, self.num_groups, -1), eps=self.eps)
        groups = groups.reshape(batch, channels, length)
        return groups * self.weight[:, None] + self.bias[:, None]


class _Embedding(nn.Embedding):
    """The embeddings of the table's timesteps, by the step."""

    def forward(self, index: Tensor) -> Tensor:
        return self.weight.index_select(0, index)


def _plain(unet: nn.Module, timesteps: Tensor) -> nn.Module:
    """Copy a network of ``dpa.nn`` as PyTorch's layers; it takes a step in place of a timestep."""
    network = plain(unet).float()
    for module in network.modules():
        if type(module) is nn.GroupNorm:
            module.__class__ = _Groups
    with torch.no_grad():
        embeddings = network.diffusion_step_encoder(timesteps)
    network.diffusion_step_encoder = _Embedding.from_pretrained(embeddings)
    return network


def _stepped(
    output: Tensor,
    sample: Tensor,
    row: Sequence[float | Tensor],
    noise: Tensor | None,
    clip: float,
) -> Tensor:
    """Compute :func:`dpa.ops.scheduler_step`."""
    x0 = row[0] * sample + row[1] * output
    if clip < NO_CLIP:
        x0 = x0.clamp(-clip, clip)
    sample = row[2] * x0 + row[3] * sample + row[4] * output
    return sample if noise is None else sample + row[5] * noise


def graph_of(policy: nn.Module, inputs: dict[str, Tensor], outputs: Sequence[str]) -> bytes:
    """Return the ONNX file of a policy that is made of PyTorch's layers.

    Raises:
        ValueError: PyTorch's exporter cannot write it, or it is too large for one file.

    """
    weights = {p.data_ptr(): p for p in (*policy.parameters(), *policy.buffers())}
    size = sum(p.numel() * p.element_size() for p in weights.values())
    if size > _MOST_BYTES:
        raise ValueError(f"an ONNX file holds at most 2 GB of weights, got {size / 2**30:.1f} GB")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Of sizes that become constants, as they shall, and of the exporter's own deprecation. The
        # newer exporter needs further packages, and writes no opset below 18.
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                policy,
                tuple(inputs.values()),
                buffer,
                dynamo=False,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=list(outputs),
            )
        except Exception as error:  # whatever the exporter makes of a layer that it does not know
            reason = f"it cannot be written in ONNX operators: {first_line(error)}"
            raise ValueError(reason) from error
    return buffer.getvalue()


def check(
    content: bytes, policy: Callable[..., Any], inputs: dict[str, Tensor]
) -> dict[str, Any] | None:
    """Compare ONNX Runtime with PyTorch on random inputs; None where it is not installed.

    Returns:
        Who computed, the largest relative error in the norm of a result, and the limit.

    Raises:
        ValueError: the error is larger than :data:`LIMIT`.

    """
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    generator = torch.Generator().manual_seed(0)
    random = {name: _random(value, generator) for name, value in inputs.items()}
    wanted = policy(*random.values())
    got = _run(_session(content), random)
    pairs = zip(got, [wanted] if isinstance(wanted, Tensor) else wanted, strict=True)
    error = max(relative_error(ours, theirs) for ours, theirs in pairs)
    rule, got = f"be within {LIMIT:g} of PyTorch's", f"{error:.1e}"
    require(error < LIMIT, "ONNX Runtime's result", rule, got)
    return {"by": f"ONNX Runtime {onnxruntime.__version__}", "error": error, "limit": LIMIT}


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return torch.zeros_like(like)


def open_graph(path: Path, names: Sequence[str]) -> Callable[..., Any]:
    """Open an ONNX file with ONNX Runtime, to be called as the policy was, with inputs so named.

    Raises:
        RuntimeError: it is not installed.

    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise RuntimeError(f"{path}: opening it needs ONNX Runtime: pip install onnxruntime")
    session = _session(str(path))

    def call(*inputs: Tensor) -> Any:
        results = _run(session, dict(zip(names, inputs, strict=True)))
        return results[0] if len(results) == 1 else tuple(results)

    return call


def _session(content: bytes | str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # it warns of constants that it cannot fold
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _run(session: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    # A graph lacks an input that it never reads, as the observation of an unconditioned network.
    wanted = [entry.name for entry in session.get_inputs()]
    given = {name: inputs[name].detach().cpu().numpy() for name in wanted}
    return [torch.from_numpy(array) for array in session.run(None, given)]
