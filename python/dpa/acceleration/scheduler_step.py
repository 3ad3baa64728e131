"""What :func:`dpa.accelerate` puts in the place of a diffusers scheduler's ``step``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpa.acceleration.shadow_run import Options, ShadowRun, say_fallback
from dpa.packed.agreement import STEP_LIMITS, proves
from dpa.sampling.rng import draw_normal, generator_on
from dpa.schedulers.conversion import from_diffusers
from dpa.schedulers.probes import OF_STEPS
from dpa.schedulers.tables import StepTable
from dpa.tracking import Snapshot
from dpa.tracking.replacing import Replacement, class_of
from dpa.tracking.weights import version_of

_KINDS = ("DDPMScheduler", "DDIMScheduler")
_OPTIONS = ("eta", "use_clipped_model_output")
_NEEDS = {"model_output", "timestep", "sample"}
_KNOWS = _NEEDS | {*_OPTIONS, "generator", "variance_noise", "return_dict"}
_KEPT = 64  # tables: one for each kind of loop
# What ``set_timesteps`` and ``step`` of diffusers change themselves.
OF_A_LOOP = frozenset({"timesteps", "num_inference_steps", "custom_timesteps", "sigmas"})
OF_A_LOOP |= {"_begin_index", *OF_STEPS}

METHODS = ("step", "set_timesteps")


def _changes_results(timestep: Tensor, sample: Tensor, alphas: Tensor) -> bool:
    """Whether the shape of a timestep of one element changes the results.

    Coefficients that a tensor of dimensions selects have them too, so they take part in
    broadcasting and in type promotion. With more than one DDPM finds another timestep before it.
    """
    if timestep.dim() == 1 and sample.dim():
        return torch.promote_types(sample.dtype, alphas.dtype) != sample.dtype
    return timestep.dim() > 0


def check_methods(scheduler: Any) -> None:
    """Raise ValueError for a method replaced on the object: a copy's may run on the original."""
    for name, value in vars(scheduler).items():
        own = callable(value) and not isinstance(value, FastStep)
        if own and callable(getattr(type(scheduler), name, None)):
            raise ValueError(f"the scheduler's {name} was replaced on the object")


def why_no_table(scheduler: Any) -> str | None:
    """Return what in a scheduler no table of steps expresses, or None."""
    try:
        check_methods(scheduler)
        from_diffusers(scheduler, 1)
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    return None


def why_no_step(scheduler: Any) -> str | None:
    """Return why a scheduler's ``step`` cannot be one op, or None where it can."""
    if not {cls.__name__ for cls in type(scheduler).__mro__} & set(_KINDS):
        return (
            f"its steps depend on earlier ones, or it is unknown here: {type(scheduler).__name__}"
        )
    return why_no_table(scheduler)


class FastStep(Replacement):
    """Replaces ``step`` of one DDPM or DDIM scheduler of diffusers: ``dpa::scheduler_step``.

    It has the scheduler's signature, takes the same random numbers and returns the same result.
    The table is measured at the first step after ``set_timesteps`` gave timesteps that are new, or
    after anything else of the scheduler changed. A timestep that is not among them, and options
    beyond the table, are left to the original.
    The first step of each kind runs both and returns the original's result.
    """

    METHOD, OWNER, KEPT = "step", "scheduler", ("scheduler", "options")
    scheduler: Any
    options: Options

    def forget(self) -> None:
        """Measure and compare again."""
        name = f"the accelerated {type(self.scheduler).__name__}.step"
        self.shadow = ShadowRun(name, self.options.fallback)
        self._tables: list[_Table] = []
        self._output: Any = None
        self._last: tuple[Any, Any, tuple[int, ...]] = (None, None, ())
        given = list(inspect.signature(class_of(self.scheduler).step).parameters.values())[1:]
        self._positional = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        # Whoever calls it must name these, and what a subclass adds is the original's.
        named = {p.name for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._needs = _NEEDS | {p.name for p in given if p.name in named and p.default is p.empty}
        self._knows = named & _KNOWS

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step, with the arguments of the method that this one replaces."""
        call = None if torch.compiler.is_compiling() else self._arguments(args, kwargs)
        if call is None:
            return self.original(*args, **kwargs)
        output, sample, timestep = call["model_output"], call["sample"], call["timestep"]
        options = {name: call[name] for name in _OPTIONS if call.get(name)}
        # Without steps the original says what is missing, where it wants them.
        found = None if self.scheduler.num_inference_steps is None else self._find(options)
        if found is None or timestep not in found.rows:
            return self.original(*args, **kwargs)
        kind = (found, sample.device, sample.dtype, output.dtype)
        passed = self.shadow.passed(kind)
        if passed is False:
            self.shadow.leave()
            return self.original(*args, **kwargs)
        if passed:
            result, x0 = found.run(timestep, call)
            return self._output(prev_sample=result, pred_original_sample=x0)
        return self._run_both(kind, found, call, args, kwargs)

    def _run_both(
        self,
        kind: Any,
        found: _Table,
        call: dict[str, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take the step both ways, on the same random numbers; return the original's result."""
        given = call.get("generator")
        stream = given or generator_on(call["sample"].device, None)

        def original(own: torch.Generator | None) -> Any:
            if own is None:
                return self.original(*args, **kwargs)
            return self.original(**call | {"generator": own})

        def replacement(own: torch.Generator | None) -> tuple[Tensor, Tensor]:
            return found.run(call["timestep"], call | {"generator": own})

        def parts(result: Any) -> Sequence[Tensor]:
            if isinstance(result, tuple):
                return result
            self._output = type(result)
            return result.prev_sample, result.pred_original_sample

        def tells(result: Any) -> bool:
            return proves(call["model_output"]) and proves(result.prev_sample)

        return self.shadow.run_both(
            kind,
            self.options.tolerance or STEP_LIMITS[call["model_output"].dtype],
            original,
            replacement,
            stream=stream,
            parts=parts,
            tells=tells,
            private=call.get("variance_noise") is None,
        )

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name, or None where the original must run."""
        call = dict(zip(self._positional, args, strict=False), **kwargs)
        if len(call) != len(args) + len(kwargs) or not self._needs <= call.keys() <= self._knows:
            return None
        output, sample = call["model_output"], call["sample"]
        generator, noise = call.get("generator"), call.get("variance_noise")
        tensors = [output, sample] if noise is None else [output, sample, noise]
        if not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
            return None
        alike = all(x.shape == sample.shape and x.device == sample.device for x in tensors)
        dtypes = output.dtype, sample.dtype
        mixed = dtypes[0] != dtypes[1] and torch.promote_types(*dtypes) != sample.dtype
        if not alike or mixed or isinstance(generator, Sequence):
            return None
        timestep = call["timestep"]
        if isinstance(timestep, Tensor) and timestep.numel() == 1:
            # The original selects coefficients by it: one of another dtype masks, or is no index.
            if timestep.dtype not in (torch.int64, torch.int32):
                return None
            if _changes_results(timestep, sample, self.scheduler.alphas_cumprod):
                return None
            call["timestep"] = timestep.item()
        elif type(timestep) is not int:
            return None
        if (noise is not None and generator is not None) or not call.get("return_dict", True):
            return None
        return call

    def _find(self, options: dict[str, Any]) -> _Table | None:
        """Return the table of the scheduler as it is now; None where there is none."""
        scheduler, timesteps = self.scheduler, self.scheduler.timesteps
        last, version = self._last, version_of(timesteps)
        if last[0] is not timesteps or last[1] != version:
            last = self._last = (timesteps, version, tuple(timesteps.tolist()))
        counts = (last[2], scheduler.num_inference_steps, options)
        for place, table in enumerate(self._tables):
            if table.counts == counts and table.snapshot.holds():
                if place:
                    self._tables.insert(0, self._tables.pop(place))
                return table if table.rows else None
        if len(self._tables) == _KEPT:
            self._tables.clear()
            for kind in list(self.shadow.errors):
                self.shadow.drop(kind)
        snapshot = Snapshot(scheduler, but=OF_A_LOOP, methods=METHODS)
        measured = None
        try:
            check_methods(scheduler)
            measured = from_diffusers(scheduler, **options)
        except (TypeError, ValueError) as error:
            name = f"{type(scheduler).__name__}.step"
            say_fallback(name, f"cannot be fused: {error}", self.options.fallback)
        self._tables.insert(0, _Table(snapshot, counts, measured))
        return self._tables[0] if measured is not None else None


class _Table:
    """The steps of one state of a scheduler, placed on each device at its first step."""

    def __init__(self, snapshot: Snapshot, counts: Any, table: StepTable | None):
        self.snapshot, self.counts, self.table = snapshot, counts, table
        timesteps = [] if table is None else table.timesteps.tolist()
        self.rows = {int(t): row for row, t in enumerate(timesteps)}
        self._placed: dict[Any, tuple[Any, ...]] = {}

    def run(self, timestep: int, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the next sample, and the predicted x0."""
        row, table, kind = self.rows[timestep], self.table, call["sample"].device.type
        if torch.is_autocast_enabled(kind):  # which leaves the original's arithmetic alone
            with torch.autocast(kind, enabled=False):
                return self.run(timestep, call)
        output, sample, noise = call["model_output"], call["sample"], call.get("variance_noise")
        if not table.draws_noise[row]:
            noise = None
        elif noise is None:
            shape, generator = tuple(output.shape), call.get("generator")
            noise = draw_normal(shape, generator, sample.device, output.dtype)
        coefficients, x0, rows = self._on(sample.device, sample.dtype)
        step, index = torch.ops.dpa.scheduler_step, rows[row]
        output = output.to(sample.dtype)
        noise = None if noise is None else noise.to(sample.dtype)
        result = step(output, sample, coefficients, index, noise, table.clip)
        return result, step(output, sample, x0, index, None, table.clip)

    def _on(self, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the coefficients, those that give x0 alone, and the index of each row."""
        if (device, dtype) not in self._placed:
            with torch.inference_mode(False), torch.no_grad():  # later steps may have gradients
                table = self.table.to(device, torch.promote_types(dtype, torch.float32))
                rows = torch.arange(len(table), device=device).unbind()
                self._placed[device, dtype] = (table.coefficients, table.x0_coefficients(), rows)
        return self._placed[device, dtype]
