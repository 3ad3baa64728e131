"""Where a sampling step's time goes on the GPU, layer by layer."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from dpa.bench.timing import device_us, graphed
from dpa.packed.unet import PackedUnet
from dpa.sampling.sampler import DiffusionSampler
from dpa.schedulers.tables import StepTable

PHASES = ("multiply", "publish", "wait", "normalise")
# The events at which a block records its clock in each layer: kernels/plans/unet1d/plan.h.
_BEGIN, _WEIGHTS, _MESSAGES, _NORMALISED, _WRITTEN, _MULTIPLIED, _PUBLISHED = range(7)


@dataclass(frozen=True)
class LayerTime:
    """One convolution: microseconds of a step, the mean over the GPU's blocks.

    Attributes:
        name: of the convolution's block in the state dict.
        channels: that it puts out.
        times: at which it does.
        multiply: the GEMM with the weights.
        publish: summing the warps' partial sums, and storing the messages.
        wait: until all other blocks' partial sums have arrived; work done meanwhile is hidden.
        normalise: the epilogue: GroupNorm, Mish, FiLM and residual, into the next GEMM's input.

    """

    name: str
    channels: int
    times: int
    multiply: float
    publish: float
    wait: float
    normalise: float

    @property
    def total(self) -> float:
        """The sum of the phases."""
        return self.multiply + self.publish + self.wait + self.normalise


@dataclass(frozen=True)
class StepProfile:
    """What :func:`dpa.profile` found.

    Attributes:
        device: the GPU's name.
        dtype: of the packed weights.
        step: microseconds of a step inside the loop, timed without recording.
        layers: the convolutions, in their order.
        actions: the last 1x1 convolution and the scheduler's step.

    """

    device: str
    dtype: torch.dtype
    step: float
    layers: tuple[LayerTime, ...]
    actions: float

    def rows(self) -> list[dict[str, str | int | float]]:
        """The layers as dictionaries, for a table or JSON."""
        return [asdict(layer) | {"total": layer.total} for layer in self.layers]

    def __str__(self) -> str:
        """The table, a line a layer."""
        width = max(len(layer.name) for layer in self.layers)
        head = "".join(f"{name:>11}" for name in (*PHASES, "total"))
        lines = [f"{self.device}, {self.dtype}: {self.step:.1f} us a step"]
        lines.append(f"{'convolution':{width}}  channels x times{head}")
        for layer in self.layers:
            size = f"{layer.channels} x {layer.times}"
            cells = "".join(f"{getattr(layer, name):11.2f}" for name in (*PHASES, "total"))
            lines.append(f"{layer.name:{width}}  {size:>16}{cells}")
        sums = [sum(getattr(layer, name) for layer in self.layers) for name in (*PHASES, "total")]
        lines.append(f"{'all':{width}}  {'':16}" + "".join(f"{value:11.2f}" for value in sums))
        lines.append(f"{'actions, scheduler':{width}}  {'':16}{self.actions:55.2f}")
        return "\n".join(lines)

    def draw(self, path: str | Path) -> Path:
        """Draw the layers as stacked bars, into a file whose suffix matplotlib knows."""
        from dpa.bench.plots import draw_profile

        return draw_profile(self, Path(path))

    def _repr_png_(self) -> bytes | None:
        """In a notebook, the plot; None without matplotlib, so that the table is shown."""
        if find_spec("matplotlib") is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            return self.draw(Path(folder) / "profile.png").read_bytes()


def profile(
    sampler: DiffusionSampler, global_cond: Tensor | None = None, runs: int = 20
) -> StepProfile:
    """Measure where the time of one step of a fused sampler goes.

    The blocks of the resident kernel record their clocks in the last step. ``runs`` such loops give
    the shares (the median of the blocks' means); a loop without recording gives the step's time,
    which the shares divide. One sample, on a Hopper GPU, of sizes that the
    one-sample kernel serves: widths times horizon up to 8192.

    Args:
        sampler: with ``fused=True`` and a ``horizon``, its network on the GPU.
        global_cond: (1, Dg); random by default.
        runs: how many recorded loops.

    Raises:
        ValueError: the sampler does not fit that description.
        RuntimeError: the kernel does not run these sizes on this device, with the sizes.

    """
    if not isinstance(sampler, DiffusionSampler):
        raise ValueError(f"profile: sampler must be a DiffusionSampler, got {type(sampler)}")
    table = sampler.table
    if not sampler.fused or sampler.horizon is None or not isinstance(table, StepTable):
        raise ValueError(
            "profile: sampler must be fused, with a StepTable and a horizon, got "
            f"fused={sampler.fused}, {type(table).__name__}, horizon={sampler.horizon}"
        )
    parameter = next(sampler.unet.parameters())
    if not parameter.is_cuda:
        raise ValueError(f"profile: sampler must run on a GPU, got {parameter.device}")
    packed = PackedUnet(sampler.unet, sampler.dtype or parameter.dtype)
    action_dim, cond_dim = packed.config[0], packed.config[4]
    device = parameter.device
    noise = torch.randn(1, sampler.horizon, action_dim, device=device)
    if global_cond is None and cond_dim:
        global_cond = torch.randn(1, cond_dim, device=device)
    cond = None if global_cond is None else global_cond.to(device).float()
    rows = torch.arange(12, device=device) % len(table)
    timesteps = table.timesteps.to(device).float()[rows]
    coefficients = table.coefficients.to(device).float()[rows]
    steps = torch.randn(12, *noise.shape, device=device) if any(table.draws_noise) else None
    config = (packed.packed, *packed.operands[1:])
    records = [
        torch.ops.dpa.diffusion_sample_clocks(
            noise, timesteps, cond, *config, coefficients, table.clip, steps
        )
        for _ in range(runs)
    ]
    phases, actions, total = _shares(torch.stack(records).cpu())
    step = _step_us(packed, noise, cond)
    layers = tuple(
        LayerTime(name, channels, times, *(step * share / total for share in shares))
        for (name, channels, times), shares in zip(
            _convolutions(packed.config[6:], sampler.horizon), phases.tolist(), strict=True
        )
    )
    name = torch.cuda.get_device_name(device)
    return StepProfile(name, packed.dtype, step, layers, step * actions / total)


def _shares(records: Tensor) -> tuple[Tensor, float, float]:
    """Clocks (runs, blocks, layers, 7) to the phases of each layer, the end, and the step.

    All are means over the blocks and medians over the runs. A layer's record begins with the wait
    for its output and ends with the GEMM after it, which is the next layer's.
    """
    clocks = records.long()
    wait = clocks[..., _MESSAGES] - clocks[..., _BEGIN]
    normalise = clocks[..., _WRITTEN] - clocks[..., _MESSAGES]
    multiply = clocks[..., :-1, _MULTIPLIED] - clocks[..., :-1, _WRITTEN]
    publish = clocks[..., :-1, _PUBLISHED] - clocks[..., :-1, _MULTIPLIED]
    # The first convolution is computed where the others wait for one.
    zero = torch.zeros_like(wait[..., :1])
    multiply = torch.cat([wait[..., :1], multiply], -1)
    publish = torch.cat([zero, publish], -1)
    wait = torch.cat([zero, wait[..., 1:]], -1)
    phases = torch.stack([multiply, publish, wait, normalise], -1) & 0xFFFFFFFF  # 32-bit clocks
    actions = (clocks[..., -1, _PUBLISHED] - clocks[..., -1, _WRITTEN]) & 0xFFFFFFFF
    phases = phases.double().mean(1).median(0).values
    rest = actions.double().mean(1).median().item()
    return phases, rest, phases.sum().item() + rest


def _convolutions(down_dims: list[int], horizon: int) -> list[tuple[str, int, int]]:
    """Name, output channels and output times of each convolution, in the network's order."""
    found = []

    def block(name: str, level: int, dim: int) -> None:
        found.extend((f"{name}.blocks.{i}", dim, horizon >> level) for i in (0, 1))

    last = len(down_dims) - 1
    for i, dim in enumerate(down_dims):
        block(f"down_modules.{i}.0", i, dim)
        block(f"down_modules.{i}.1", i, dim)
        if i < last:
            found.append((f"down_modules.{i}.2", dim, horizon >> (i + 1)))
    for i in (0, 1):
        block(f"mid_modules.{i}", last, down_dims[last])
    for i in range(last, 0, -1):
        name, dim = f"up_modules.{last - i}", down_dims[i - 1]
        block(f"{name}.0", i, dim)
        block(f"{name}.1", i, dim)
        found.append((f"{name}.2", dim, horizon >> (i - 1)))
    found.append(("final_conv.0", down_dims[0], horizon))
    return found


def _step_us(packed: PackedUnet, noise: Tensor, global_cond: Tensor | None) -> float:
    """Microseconds of a step inside the loop: (40 steps - 20 steps) / 20, of medians."""
    row = torch.tensor([1.1, -0.4, 0.5, 0.4, 0.05, 0.0], device=noise.device)

    def loop_us(steps: int) -> float:
        timesteps = torch.arange(steps, 0, -1, device=noise.device).float()
        table = row.repeat(steps, 1)
        loop = lambda: packed.sample(noise, timesteps, table, 1.0, global_cond=global_cond)  # noqa: E731
        return device_us(graphed(loop, 1), 61)

    return (loop_us(40) - loop_us(20)) / 20
