"""Parallel sampling: many timesteps of the denoising loop in one batch, by Picard iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpa.library.checks import require
from dpa.library.graphs import repeat
from dpa.packed.unet import PackedUnet
from dpa.sampling.arguments import Inputs
from dpa.sampling.fused_loop import Body, Window, in_float32, split
from dpa.sampling.stepwise_loop import Layers
from dpa.schedulers.tables import StepTable

Shape = tuple[int, int, int]
_LARGEST_WINDOW = 128  # of the kernel that moves it; others take PyTorch's


@dataclass(frozen=True)
class Parallel:
    """How a :class:`dpa.DiffusionSampler` samples in parallel.

    Attributes:
        window: timesteps that a sweep evaluates at once, in one batch of ``window * B``.
        tolerance: a state counts as found when a sweep moves it by at most this much, the root mean
            square over (T, Da) of the sample that moves most, in the units of the sample. 0 sweeps
            on until a state repeats exactly, or all before it are exact.

    Raises:
        ValueError: a window below 1, or a negative tolerance.

    """

    window: int = 16
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        """Check the values."""
        window, tolerance = self.window, self.tolerance
        right = isinstance(window, int) and window >= 1
        require(right, "Parallel: window", "be an integer of at least 1", repr(window))
        right = isinstance(tolerance, int | float) and tolerance >= 0
        require(right, "Parallel: tolerance", "be a number of at least 0", repr(tolerance))


@dataclass(frozen=True)
class ParallelReport:
    """What a parallel call did.

    Attributes:
        steps: of the loop, the sequential sampler's evaluations one after the other.
        sweeps: batches evaluated one after the other.
        evaluations: timesteps evaluated in all, those past the end by the last windows too.
        residual: the largest move of a state in the sweep that accepted it (see ``tolerance``).

    """

    steps: int
    sweeps: int
    evaluations: int
    residual: float


class Sweeps:
    r"""All states of the loop ``x[i + 1] = f_i(x[i])``, and sweeps over a window of them.

    A sweep evaluates every ``f_i`` of the window at the latest states. What that moves a
    state by is carried on to the states after it with ``A_i``, the slope of ``f_i`` where its
    prediction of x0 stays as it is::

        x[j + 1] <- f_j(x[j]) + A_j * (what x[j] moves by)

    ``A_i = 1`` would be Picard iteration. A trained network's prediction of x0 changes little from
    step to step, so that this takes half as many sweeps. The states that the window grows by begin
    as what its last prediction of x0 leads to.

    The first state of a window is exact after one sweep, so each sweep advances by one step or
    more, and takes as many steps as moved by no more than the tolerance. Where the window stands is
    a number on the device, so a sweep is the same kernels every time and can be captured.

    Args:
        shape: (B, T, Da).
        table: the steps.
        predict: the network.
        options: window and tolerance.
        numbers: (4,), float64, where each call leaves what it did (:func:`report_of`).

    Source: Shih et al., Parallel Sampling of Diffusion Models (arXiv 2305.16317), but for the
    slope, that of exponential integrators.

    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        table: StepTable,
        predict: Window | Layers,
        options: Parallel,
        numbers: Tensor,
    ):
        self.predict, self.clip = predict, table.clip
        self.steps, self.batch = len(table), shape[0]
        self.window, self.tolerance = min(options.window, self.steps), options.tolerance
        # Steps past the end keep a state as it is, so that a window may reach there.
        past = 2 * self.window
        new = table.coefficients.new_zeros
        idle = table.coefficients.new_tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
        self._coefficients = torch.cat([table.coefficients, idle.expand(past, 6)])
        self._timesteps = torch.cat([table.timesteps, table.timesteps[-1:].expand(past)])
        r0, r1, _, r3, r4, _ = self._coefficients.unbind(1)
        # Where the output says nothing of x0, it is the output that stays as it is.
        self._silent = r1 == 0
        inverse = torch.where(self._silent, 0.0, 1 / r1)
        slope = r3 - r4 * r0 * inverse
        self._columns = torch.stack([r0, r1, inverse, slope], 1)[..., None, None, None]
        self._carried = _cumulative(slope)
        self._ahead = torch.arange(past, device=idle.device)
        self._states = new(self.steps + past + 1, *shape)
        self._still = torch.zeros_like(self._states[: self.window])
        self._noise = new(self.steps + past, *shape) if any(table.draws_noise) else None
        self._mean = max(1, shape[1] * shape[2]) ** -0.5
        self._position = torch.zeros((), dtype=torch.int64, device=idle.device)
        self._numbers, self._did = numbers, new(4)
        self._did[:2] = idle.new_tensor([self.steps, self.window])
        self._sweeps, self._residual = self._did[2:].unbind()
        self._conditioning, self._inputs = new(0), Inputs()

    def __call__(self, inputs: Inputs) -> Tensor:
        """Return the last state of the loop, a copy, (B, T, Da).

        Args:
            inputs: ``sample`` (B, T, Da), the noise to begin with; ``step_noise`` (S, B, T, Da),
                what each step adds; ``condition_data`` and ``condition_mask`` (B, T, Da),
                inpainting; and what ``predict`` reads. All but the first may be missing.

        """
        self.begin(inputs)
        captured = self._states.is_cuda and torch.cuda.is_current_stream_capturing()
        if captured and self.batch:
            repeat(self.sweep, self._position, self.steps, self._sweeps)
        elif self.batch:
            self._sweep_on()
        self._numbers.copy_(self._did)
        return self._states[self.steps].clone()

    def of_a_call(self, inputs: Inputs, table: StepTable) -> Tensor:
        """Return the same of the inputs of a call, with its random numbers."""
        rest, sample, random = split(inputs, table)
        return self(rest | {"sample": sample, "step_noise": random})

    def begin(self, inputs: Inputs) -> None:
        """Go back to the noise; the states after it begin as where a prediction of 0 leads to."""
        self._inputs = inputs
        self._position.zero_()
        self._did[2:].zero_()
        self._conditioning = self.predict.begin(inputs, self._timesteps)
        if self._noise is not None:
            self._noise[: self.steps].copy_(inputs["step_noise"])
        sample = self._apply_condition(inputs["sample"])
        self._states.copy_(sample.expand_as(self._states))
        rows = self._ahead[: self.window]
        gained = self._step(rows, self._still, self._still)
        gained[0] += self._columns[0, 3] * sample
        self._states[rows + 1] = self._follow(rows, gained)

    def _sweep_on(self) -> None:
        """Sweep until all states are found; the host asks now and then whether they are."""
        position = 0
        while position < self.steps:
            # No sweep takes more than a window of steps: so many are needed at the least.
            needed = -(-(self.steps - position) // self.window)
            for _ in range(needed):
                self.sweep()
            self._sweeps.add_(needed)
            position = int(self._position.item())

    def sweep(self) -> None:
        """Evaluate the window once, and move it on."""
        conditioning = self._conditioning
        plain = {self._states.dtype, conditioning.dtype} == {torch.float32}
        if conditioning.is_cuda and plain and self.window <= _LARGEST_WINDOW:
            self._sweep_on_gpu()
            return
        rows, size = self._position + self._ahead, self.window
        window, following = rows[:size], rows + 1
        before = self._states[window]
        output = self.predict(self._inputs, before.flatten(0, 1), conditioning[window])
        output = output.view_as(before)
        r0, r1, inverse, slope = self._columns[rows].unbind(1)
        # The output that a state of 0 has in the steps ahead if the last x0 stays.
        x0 = torch.addcmul(r1[size - 1] * output[-1], r0[size - 1], before[-1])
        silent = self._silent[rows[size:], None, None, None]
        kept = torch.where(silent, output[-1], x0 * inverse[size:])
        samples = torch.cat([before, self._still])
        after = self._step(rows, samples, torch.cat([output, kept]))
        gained = torch.addcmul(after, slope, samples, value=-1)
        gained[:1].copy_(after[:1])  # the first state does not move
        found = self._follow(rows, gained)
        moved = found[:size] - self._states[following[:size]]
        moved = torch.linalg.vector_norm(moved, dim=(2, 3)).amax(1) * self._mean
        moved[:1].zero_()  # exact, however far it moved
        # The states before the first one that moved; a NaN always has.
        within = (moved <= self.tolerance).cumprod(0)
        accepted = torch.where(within > 0, moved, 0.0).amax()
        torch.maximum(self._residual, accepted, out=self._residual)
        self._states.index_copy_(0, following, found)
        self._position.add_(within.sum()).clamp_(max=self.steps)

    def _sweep_on_gpu(self) -> None:
        """The same in three launches: small kernels would take as long as the network."""
        samples, conditioning = torch.ops.dpa.parallel_window(
            self._states, self._conditioning, self._position, self.window
        )
        output = self.predict(self._inputs, samples.flatten(0, 1), conditioning).view_as(samples)
        data, mask = (self._inputs.get(f"condition_{name}") for name in ("data", "mask"))
        held = [None if x is None else x.expand_as(samples[0]) for x in (data, mask)]
        moved, options = (self._states, self._position, self._residual), (self.clip, self.tolerance)
        given = output, self._coefficients, self._noise, *held, self.steps
        torch.ops.dpa.parallel_move_(*moved, *given, *options)

    def _step(self, rows: Tensor, samples: Tensor, outputs: Tensor) -> Tensor:
        noise = None if self._noise is None else self._noise[rows].flatten(0, 1)
        index = rows if self.batch == 1 else rows.repeat_interleave(self.batch)
        given = outputs.flatten(0, 1), samples.flatten(0, 1), self._coefficients, index, noise
        return torch.ops.dpa.scheduler_step(*given, self.clip).view_as(samples)

    def _follow(self, rows: Tensor, gained: Tensor) -> Tensor:
        """States ``x[j + 1] = A_j x[j] + gained[j]``, from an x of 0 on."""
        carried = self._carried[rows[:, None], rows, None]
        # Not a GEMM: that may round to TF32.
        return self._apply_condition((carried * gained.flatten(1)).sum(1).view_as(gained))

    def _apply_condition(self, states: Tensor) -> Tensor:
        mask = self._inputs.get("condition_mask")
        return states if mask is None else torch.where(mask, self._inputs["condition_data"], states)


def _cumulative(slope: Tensor) -> Tensor:
    """A matrix whose element (j, i) multiplies ``slope[i + 1 : j + 1]``, 0 for i > j."""
    count = len(slope)
    after = torch.ones(count, count, dtype=torch.bool, device=slope.device).tril(-1)
    return torch.where(after, slope[:, None], 1.0).cumprod(0).tril()


@dataclass(frozen=True)
class PackedSweeps:
    """Makes the sweeps of a packed network, as the loop's other bodies are made.

    Attributes:
        options: window and tolerance.
        numbers: as of :class:`Sweeps`.

    """

    options: Parallel
    numbers: Tensor = field(compare=False)

    def __call__(self, network: PackedUnet, table: StepTable, shape: Shape, inputs: Inputs) -> Body:
        """Return what samples from inputs of such a kind."""
        table = table.to(dtype=torch.float32)
        one, layers = self.numbers.is_cuda and shape[0] == 1, None
        if one and "global_cond" in inputs:
            together = min(self.options.window, len(table)), *shape[1:]
            layers = network.in_layers(table.coefficients.new_empty(together))
        predict = Window(network, one, layers)
        with torch.inference_mode(False):  # its memory serves calls inside and outside of that mode
            sweeps = Sweeps(shape, table, predict, self.options, self.numbers)

        def body(inputs: Inputs) -> Tensor:
            return sweeps.of_a_call(in_float32(inputs), table)

        body.reads = [v for v in vars(sweeps).values() if isinstance(v, Tensor)]
        return body


def report_of(numbers: Tensor) -> ParallelReport:
    """Return what a call did, of the numbers that it left."""
    steps, window, sweeps, residual = numbers.tolist()
    return ParallelReport(int(steps), int(sweeps), int(sweeps * window), residual)
