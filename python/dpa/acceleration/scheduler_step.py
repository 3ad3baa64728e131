"""What :func:`dpa.accelerate` puts in the place of a diffusers scheduler's ``step``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpa.acceleration.unet_forward import (
    STEP_LIMITS,
    Options,
    can_tell,
    difference,
    relative_error,
    say_fallback,
)
from dpa.sampling.rng import draw_normal, generator_on
from dpa.schedulers.conversion import StepTable, from_diffusers

_KINDS = ("DDPMScheduler", "DDIMScheduler")
_OPTIONS = ("eta", "use_clipped_model_output")
_KEPT = 64  # tables: one for each kind of loop
# What ``set_timesteps`` and ``step`` of diffusers change themselves.
_OF_A_LOOP = {
    "timesteps",
    "num_inference_steps",
    "custom_timesteps",
    "sigmas",
    "model_outputs",
    "lower_order_nums",
    "_step_index",
    "_begin_index",
}


def attributes_of(scheduler: Any) -> dict[str, Any]:
    """Return what is set on the object, but for what its loops set."""
    attributes = getattr(scheduler, "__dict__", {})
    return {name: value for name, value in attributes.items() if name not in _OF_A_LOOP}


def state_of(scheduler: Any) -> tuple[Any, ...]:
    """Return what tells whether a table of steps still holds, as long as its values are kept."""
    state = [
        (name, id(value), _version(value) if isinstance(value, Tensor) else None)
        for name, value in attributes_of(scheduler).items()
    ]
    return (type(scheduler), *state)


def _version(tensor: Tensor) -> Any:
    """Return what writing in place changes.

    Tensors made in inference mode count no versions; on a GPU nobody can look without waiting.
    """
    if not tensor.is_inference():
        return tensor._version
    return tuple(tensor.flatten().tolist()) if tensor.device.type == "cpu" else None


def _changes_results(timestep: Tensor, sample: Tensor, alphas: Tensor) -> bool:
    """Whether the shape of a timestep of one element changes the results' shape or dtype.

    Coefficients that a tensor of dimensions selects have them too, so they take part in
    broadcasting and in type promotion.
    """
    promoted = torch.promote_types(sample.dtype, alphas.dtype)
    return timestep.dim() > 0 and (promoted != sample.dtype or timestep.dim() > sample.dim())


def why_replaced(scheduler: Any) -> str | None:
    """Return which method was replaced on the object: on a copy it may still run on the original.

    None where there is none.
    """
    for name, value in attributes_of(scheduler).items():
        own = callable(value) and not isinstance(value, FastStep)
        if own and callable(getattr(type(scheduler), name, None)):
            return f"the scheduler's {name} was replaced on the object"
    return None


def why_no_step(scheduler: Any) -> str | None:
    """Return why a scheduler's ``step`` cannot be one op, or None where it can."""
    if not {cls.__name__ for cls in type(scheduler).__mro__} & set(_KINDS):
        return (
            f"its steps depend on earlier ones, or it is unknown here: {type(scheduler).__name__}"
        )
    if (why := why_replaced(scheduler)) is not None:
        return why
    try:
        from_diffusers(scheduler, 1)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


class FastStep:
    """Stands in for ``step`` of one DDPM or DDIM scheduler of diffusers: ``dpa::scheduler_step``.

    It has the scheduler's signature, draws what the scheduler draws and returns what it returns.
    The table is measured at the first step after ``set_timesteps`` gave timesteps that are new, or
    after anything else of the scheduler changed. A timestep that is not among them, and options
    beyond the table, are left to the original.
    The first step of each kind runs both and returns the original's result.
    """

    def __init__(self, scheduler: Any, options: Options):
        self.scheduler = scheduler
        self.options = options
        self._forget()

    def _forget(self) -> None:
        self.errors: dict[Any, float] = {}
        self.failed: str | None = None
        self._tables: dict[Any, tuple[tuple[dict[int, int], StepTable] | None, Any]] = {}
        self._placed: dict[Any, tuple[Any, ...]] = {}
        self._output: Any = None
        self._last: tuple[Any, Any, Any] = (None, None, None)
        self._signature = inspect.signature(type(self.scheduler).step)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made again: a copy has its own."""
        return {"scheduler": self.scheduler, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step that this one replaces."""
        return type(self.scheduler).step(self.scheduler, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step, with the arguments of the method that this one replaces."""
        call = None if torch.compiler.is_compiling() else self._arguments(args, kwargs)
        if call is None:
            return self.original(*args, **kwargs)
        output, sample, timestep = call["model_output"], call["sample"], call["timestep"]
        options = {name: call[name] for name in _OPTIONS if call.get(name)}
        # Without steps the original says what is missing, where it wants them.
        found = None if self.scheduler.num_inference_steps is None else self._find(options)
        if found is None or timestep not in found[0]:
            return self.original(*args, **kwargs)
        rows, table = found
        kind = (table, sample.device, sample.dtype, output.dtype)

        def run() -> tuple[Tensor, Tensor]:
            return self._run(kind, table, rows[timestep], call)

        error = self.errors.get(kind)
        if error is None:
            return self._compare(kind, run, call, args, kwargs)
        if error > self._limit(output):
            return self.original(*args, **kwargs)
        result, x0 = run()
        return self._output(prev_sample=result, pred_original_sample=x0)

    def _compare(
        self,
        kind: Any,
        run: Callable[[], tuple[Tensor, Tensor]],
        call: dict[str, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take the step both ways, on the same random numbers; return the original's result."""
        generator = call.get("generator") or generator_on(call["sample"].device, None)
        before = generator.get_state()
        expected = self.original(*args, **kwargs)
        if not can_tell(call["model_output"]) or not can_tell(expected.prev_sample):
            return expected  # and the next step is the first
        self._output = type(expected)
        after = generator.get_state()
        generator.set_state(before)
        result, x0 = run()
        error = max(
            relative_error(result, expected.prev_sample),
            relative_error(x0, expected.pred_original_sample),
        )
        if not torch.equal(generator.get_state(), after):
            error = float("inf")
        generator.set_state(after)
        if error > (limit := self._limit(call["model_output"])):
            why = difference(error, limit)
            what = f"the accelerated {type(self.scheduler).__name__}.step"
            say_fallback(what, why, self.options.fallback)
            self.failed = why
        self.errors[kind] = error
        return expected

    def _limit(self, output: Tensor) -> float:
        chosen = self.options.tolerance
        return STEP_LIMITS[output.dtype] if chosen is None else chosen

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name, or None where the original must run."""
        try:
            bound = self._signature.bind(self.scheduler, *args, **kwargs).arguments
        except TypeError:
            return None
        output, sample = bound["model_output"], bound["sample"]
        generator, noise = bound.get("generator"), bound.get("variance_noise")
        tensors = [x for x in (output, sample, noise) if x is not None]
        if not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
            return None
        alike = all(x.shape == sample.shape and x.device == sample.device for x in tensors)
        mixed = torch.promote_types(output.dtype, sample.dtype) != sample.dtype
        if not alike or mixed or isinstance(generator, Sequence):
            return None
        timestep = bound["timestep"]
        if isinstance(timestep, Tensor) and timestep.numel() == 1:
            if _changes_results(timestep, sample, self.scheduler.alphas_cumprod):
                return None
            bound["timestep"] = timestep.item()
        elif not isinstance(timestep, int | float):
            return None
        if (noise is not None and generator is not None) or not bound.get("return_dict", True):
            return None
        return dict(bound)

    def _find(self, options: dict[str, Any]) -> tuple[dict[int, int], StepTable] | None:
        """Return the row of each timestep, and the table."""
        scheduler, timesteps = self.scheduler, self.scheduler.timesteps
        last, version = self._last, _version(timesteps)
        if last[0] is not timesteps or last[1] != version:
            last = self._last = (timesteps, version, tuple(timesteps.tolist()))
        counts = (last[2], scheduler.num_inference_steps)
        key = (*counts, state_of(scheduler), *sorted(options.items()))
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) == _KEPT:
                for known in (self._tables, self._placed, self.errors):
                    known.clear()
            # What the key names by id is kept, so that the id stays its own.
            found = (self._measure(options), list(attributes_of(scheduler).values()))
            self._tables[key] = found
        return found[0]

    def _measure(self, options: dict[str, Any]) -> tuple[dict[int, int], StepTable] | None:
        why = why_replaced(self.scheduler)
        try:
            table = from_diffusers(self.scheduler, **options) if why is None else None
        except (TypeError, ValueError) as error:
            why = str(error)
        if why is not None:
            name = f"{type(self.scheduler).__name__}.step"
            say_fallback(name, f"cannot be fused: {why}", self.options.fallback)
            return None
        return {int(t): row for row, t in enumerate(table.timesteps.tolist())}, table

    def _run(
        self, kind: Any, table: StepTable, row: int, call: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the next sample, and the predicted x0."""
        output, sample, noise = call["model_output"], call["sample"], call.get("variance_noise")
        if not table.draws_noise[row]:
            noise = None
        elif noise is None:
            shape, generator = tuple(output.shape), call.get("generator")
            noise = draw_normal(shape, generator, sample.device, output.dtype)
        placed = self._placed.get(kind)
        if placed is None:
            wide = torch.promote_types(sample.dtype, torch.float32)
            coefficients = table.coefficients.to(sample.device, wide)
            x0 = coefficients.clone()  # the op again, with rows that give x0 alone
            x0[:, 2:] = x0.new_tensor([1.0, 0.0, 0.0, 0.0])
            rows = torch.arange(len(table), device=sample.device).unbind()
            placed = self._placed[kind] = (coefficients, x0, rows)
        coefficients, x0, rows = placed
        step, index = torch.ops.dpa.scheduler_step, rows[row]
        output = output.to(sample.dtype)
        noise = None if noise is None else noise.to(sample.dtype)
        result = step(output, sample, coefficients, index, noise, table.clip)
        return result, step(output, sample, x0, index, None, table.clip)
