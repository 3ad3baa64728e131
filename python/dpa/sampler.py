"""The denoising loop: from noise and an observation to an action sequence."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .graphs import Body, Inputs, LoopGraphs, can_capture
from .noise import draw_normal, draw_steps, generator_on
from .packed import PackedUnet, runs_packed
from .parallel import Parallel, ParallelReport, picard
from .schedulers import LiveSteps, MultistepTable, StepTable, from_diffusers
from .step_table import Generators

Steps = StepTable | LiveSteps


def _fail(argument: str, rule: str, got: Any) -> NoReturn:
    raise ValueError(f"DiffusionSampler: {argument} must {rule}, got {got}")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


class DiffusionSampler:
    """Sample action sequences with a U-Net and a scheduler of diffusers.

    Each step runs the network and then ``dpa::scheduler_step``; the sample and the scheduler's
    arithmetic are float32 (float64 for a float64 network). Random numbers are drawn as diffusers
    draws them, so that a generator's stream gives the same noise: the initial noise first, then one
    draw of the sample's shape in each step that draws (DDPM at t > 0, DDIM with eta > 0), in the
    sample's dtype, on the generator's device.

    The scheduler is copied here, and changing the object later changes nothing. The network is not:
    every call samples with the weights that it has then, in the mode (train or eval) that it is in.

    Args:
        unet: called as ``unet(sample, timestep, global_cond=...)``, with ``local_cond=...`` where
            there is one, ``sample`` being (B, T, Da) and ``timestep`` (B,). The original's U-Net,
            LeRobot's and :class:`dpa.nn.ConditionalUnet1D` all are.
        scheduler: a live object that :func:`dpa.schedulers.from_diffusers` takes (DDPM, DDIM,
            DPM-Solver++ or flow-matching Euler of diffusers), or a :class:`StepTable`.
        num_inference_steps: steps of a call; an attribute that may be changed later. None takes the
            timesteps that the scheduler holds.
        dtype: what the network runs in. Where it is not the dtype of the weights, each call casts
            them into a copy that the sampler keeps. With ``fused``, the dtype of the packed ones;
            float8_e4m3fn then too.
        horizon: T. Not needed where each call has a ``noise``, ``condition_data`` or
            ``local_cond``.
        action_dim: Da. Not needed where the network ends in a ``final_conv`` as the originals do.
        eta: DDIM's noise weight.
        use_clipped_model_output: DDIM's option of that name.
        fused: run the whole loop as one op on packed weights (:class:`dpa.packed.PackedUnet`, whose
            docstring says which networks, and which changes of the weights it notices).
        fallback: what to do where the scheduler is none that a table expresses, or ``fused`` cannot
            be had. False raises; True warns with the reason, then runs the scheduler's own step
            (:class:`dpa.schedulers.LiveSteps`), or the loop step by step.
        cuda_graph: on a GPU, capture the fused loop into a CUDA graph at the first call of each
            shape, and replay it from then on. Eight are kept. Inside a capture of the caller's the
            kernels go into that one.
        parallel: evaluate a window of timesteps at once, in sweeps, until they no longer move
            (:class:`dpa.Parallel`): the same actions from the same random stream, within its
            tolerance. ``last_parallel`` then says what the last call did.

    Raises:
        TypeError, ValueError: as :func:`dpa.schedulers.from_diffusers`.

    """

    def __init__(
        self,
        unet: Callable[..., Tensor],
        scheduler: Any,
        num_inference_steps: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        horizon: int | None = None,
        action_dim: int | None = None,
        eta: float = 0.0,
        use_clipped_model_output: bool = False,
        fused: bool = False,
        fallback: bool = False,
        cuda_graph: bool = True,
        parallel: Parallel | None = None,
    ):
        if dtype is not None and not dtype.is_floating_point:
            _fail("dtype", "be a floating dtype", dtype)
        if (
            dtype is not None
            and dtype.itemsize == 1
            and not (fused and dtype == torch.float8_e4m3fn)
        ):
            _fail("dtype", "have 16 bits or more (float8_e4m3fn where fused is asked for)", dtype)
        if isinstance(scheduler, StepTable) and (eta != 0 or use_clipped_model_output):
            got = f"{eta} and {use_clipped_model_output}"
            _fail("eta and use_clipped_model_output", "be left out with a StepTable", got)
        if fused and not isinstance(unet, nn.Module):
            _fail("unet", "be a module where fused is asked for", type(unet))
        self.unet = unet
        self.dtype = dtype
        self.fused = fused
        self.fallback = fallback
        self.cuda_graph = cuda_graph
        if fused and parallel is not None:
            _fail("parallel", "be left out where fused is asked for", parallel)
        self.parallel = parallel
        self.last_parallel: ParallelReport | None = None
        self._packed: PackedUnet | None = None
        self._graphs = LoopGraphs()
        self._width: tuple[Any, int | None] = (None, None)
        self.horizon = horizon
        self.action_dim = action_dim
        self._options = {"eta": eta, "use_clipped_model_output": use_clipped_model_output}
        self._scheduler = copy.deepcopy(scheduler)
        self._tables: dict[Any, Steps] = {}
        self._cast: tuple[nn.Module, nn.Module] | None = None
        self.num_inference_steps = num_inference_steps

    @property
    def num_inference_steps(self) -> int:
        """The number of steps of a call."""
        return len(self.table)

    @num_inference_steps.setter
    def num_inference_steps(self, steps: int | None) -> None:
        # Builds the table now: a count that the scheduler cannot do is refused where it is set.
        self._table(torch.device("cpu"), torch.float64, steps)
        self._steps = steps

    @property
    def table(self) -> Steps:
        """The steps of a call, on the CPU in float64."""
        return self._table(torch.device("cpu"), torch.float64, self._steps)

    def _table(self, device: torch.device, dtype: torch.dtype, steps: int | None) -> Steps:
        key = (steps, device, dtype)
        if key not in self._tables:
            base = (steps, torch.device("cpu"), torch.float64)
            if base not in self._tables:
                self._tables[base] = self._build_table(steps).to("cpu", torch.float64)
            self._tables[key] = self._tables[base].to(device, dtype)
        return self._tables[key]

    def _build_table(self, steps: int | None) -> Steps:
        if not isinstance(self._scheduler, StepTable):
            try:
                return from_diffusers(self._scheduler, steps, **self._options)
            except (TypeError, ValueError) as reason:
                if not self.fallback:
                    raise
                live = LiveSteps(self._scheduler, steps, **self._options)
                _warn(f"{reason}: the scheduler's own step runs instead")
                return live
        if steps not in (None, len(self._scheduler)):
            _fail("num_inference_steps", f"be the StepTable's {len(self._scheduler)}", steps)
        return self._scheduler

    @torch.no_grad()
    def __call__(
        self,
        global_cond: Tensor | None = None,
        *,
        local_cond: Tensor | None = None,
        condition_data: Tensor | None = None,
        condition_mask: Tensor | None = None,
        noise: Tensor | None = None,
        generator: Generators = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Sample action sequences.

        A conditioning of batch 1 serves every sample of a larger ``batch_size``, which gives
        several samples for one observation.

        Args:
            global_cond: (B, Dg), in any floating dtype.
            local_cond: (B, T, Dl), in any floating dtype.
            condition_data: (B, T, Da); its values where the mask is true are imposed before every
                call of the network and once after the loop (inpainting).
            condition_mask: bool, (B, T, Da); given with ``condition_data`` or not at all.
            noise: (B, T, Da) to start from, instead of a draw.
            generator: of the random stream; None is the global one of the device. One on the CPU
                draws there, whatever the device. A sequence has one generator a sample.
            batch_size: B; by default the batch of the arguments, or 1.

        Returns:
            (B, T, Da) float32 (float64 for a float64 network), without gradient.

        Raises:
            ValueError: naming the argument, the rule and what was received.

        """
        given = {
            "global_cond": global_cond,
            "local_cond": local_cond,
            "condition_data": condition_data,
            "condition_mask": condition_mask,
            "noise": noise,
        }
        tensors = {name: value for name, value in given.items() if value is not None}
        device, weights_dtype = self._placement(tensors)
        shape = self._shape(tensors, batch_size)
        wide = torch.promote_types(weights_dtype, torch.float32)
        if (condition_data is None) != (condition_mask is None):
            missing = "condition_data" if condition_data is None else "condition_mask"
            _fail(missing, "be given where its counterpart is", None)
        if condition_mask is not None and condition_mask.dtype != torch.bool:
            _fail("condition_mask", "be a bool tensor", condition_mask.dtype)
        if condition_data is not None:
            condition_data = condition_data.to(wide)

        table = self._table(device, wide, self._steps)
        if self.fused and not self._refuse_fused(table, device, given):
            assert isinstance(table, StepTable)
            return self._run_fused(table, shape, given, generator, device, weights_dtype)

        def draw() -> Tensor:
            return draw_normal(shape, generator, device, wide)

        sample = draw() if noise is None else noise.to(wide)
        unet, unet_dtype = self._network(device, weights_dtype)
        conditions: dict[str, Tensor | None] = {"global_cond": None}
        for name in ("global_cond", "local_cond"):
            if name in tensors:
                value = tensors[name].to(unet_dtype)
                conditions[name] = value.expand(shape[0], *value.shape[1:])

        def predict(sample: Tensor, timestep: Tensor) -> Tensor:
            return unet(sample.to(unet_dtype), timestep, **conditions).to(wide)

        def impose(sample: Tensor) -> Tensor:
            if condition_data is None or condition_mask is None:
                return sample
            return torch.where(condition_mask, condition_data, sample)

        if self.parallel is not None:
            if isinstance(table, LiveSteps | MultistepTable):
                got = type(table).__name__
                _fail("parallel", "be left out of a scheduler that no StepTable expresses", got)
            noise = self._step_noise(table, sample.expand(shape), draw)

            def predict_window(sample: Tensor, timestep: Tensor) -> Tensor:
                repeats = sample.shape[0] // shape[0]
                given = {
                    name: None if value is None else value.repeat(repeats, *[1] * (value.dim() - 1))
                    for name, value in conditions.items()
                }
                return unet(sample.to(unet_dtype), timestep, **given).to(wide)

            found, self.last_parallel = picard(
                sample.expand(shape), table, noise, predict_window, impose, self.parallel
            )
            return found
        return _loop(sample, table, predict, draw, impose, generator)

    def _refuse_fused(
        self, table: Steps, device: torch.device, given: dict[str, Tensor | None]
    ) -> bool:
        """Whether the loop cannot be one op; raises the reason, or warns with it, as chosen."""
        if not runs_packed(device):
            rule, got = "be left out where no kernel runs packed weights", str(device)
        elif given["local_cond"] is not None:
            rule, got = "be left out where there is local_cond", "both"
        elif isinstance(table, LiveSteps | MultistepTable):
            rule, got = (
                "be left out of a scheduler that no StepTable expresses",
                type(table).__name__,
            )
        else:
            return False
        if not self.fallback:
            _fail("fused", rule, got)
        _warn(f"DiffusionSampler: fused must {rule}, got {got}: the loop runs step by step instead")
        return True

    def _run_fused(
        self,
        table: StepTable,
        shape: tuple[int, int, int],
        given: dict[str, Tensor | None],
        generator: Generators,
        device: torch.device,
        weights_dtype: torch.dtype,
    ) -> Tensor:
        """Run the loop as one op, in a graph where one can be captured."""
        inputs = {
            name: value.expand(shape[0], *value.shape[1:])
            for name, value in given.items()
            if value is not None
        }
        wide = table.coefficients.dtype
        source: torch.Generator | None = None
        if "noise" not in inputs or any(table.draws_noise):
            source = generator_on(device, generator)
            if source is None:  # drawn elsewhere, and brought here
                if "noise" not in inputs:
                    inputs["noise"] = draw_normal(shape, generator, device, wide)
                if any(table.draws_noise):
                    inputs["step_noise"] = draw_steps(table.draws_noise, shape, generator, wide).to(
                        device
                    )
        packed = self._pack(weights_dtype)
        make_body = functools.partial(_fused_loop, packed, table, shape, device)
        if not (self.cuda_graph and can_capture(device)):
            return make_body()(inputs, source)
        memory = packed.memory(device).data_ptr()
        key = (shape, table, packed.dtype, memory, frozenset(inputs), source is None)
        offset = 0 if source is None else source.get_offset()
        result = self._graphs.run(key, device, inputs, source, make_body)
        # Looked at while the GPU works already: weights that changed cost a second run.
        if packed.stale():
            packed.repack()
            if source is not None:
                source.set_offset(offset)
            result = self._graphs.run(key, device, inputs, source, make_body)
        return result

    @staticmethod
    def _step_noise(table: StepTable, sample: Tensor, draw: Callable[[], Tensor]) -> Tensor | None:
        """Draw every step's noise in the loop's order: (S, B, T, Da), or None where none draws."""
        if not any(table.draws_noise):
            return None
        return torch.stack(
            [draw() if needed else torch.zeros_like(sample) for needed in table.draws_noise]
        )

    def _pack(self, weights_dtype: torch.dtype) -> PackedUnet:
        """Return the packed network, which follows ``self.unet`` and ``self.dtype``."""
        dtype = self.dtype or weights_dtype
        if (
            self._packed is None
            or self._packed.unet is not self.unet
            or self._packed.dtype != dtype
        ):
            self._packed = PackedUnet(self.unet, dtype)
        return self._packed

    def _placement(self, tensors: dict[str, Tensor]) -> tuple[torch.device, torch.dtype]:
        """Return the device and dtype of the network; every argument must be on that device."""
        parameters = self.unet.parameters() if isinstance(self.unet, nn.Module) else iter(())
        first = next((p for p in parameters if p.is_floating_point()), None)
        if first is not None:
            device, dtype, whose = first.device, first.dtype, "the network's"
        else:
            placed = next(iter(tensors.values()), torch.empty(0))
            device, dtype, whose = placed.device, torch.float32, "the first argument's"
        for name, value in tensors.items():
            if value.device != device:
                _fail(name, f"be on {whose} device {device}", value.device)
        return device, dtype

    def _network(
        self, device: torch.device, weights_dtype: torch.dtype
    ) -> tuple[Callable[..., Tensor], torch.dtype]:
        """Return the network to call, and the dtype to call it in."""
        if self.dtype is None or self.dtype == weights_dtype:
            return self.unet, weights_dtype
        if not isinstance(self.unet, nn.Module):
            return self.unet, self.dtype
        if self._cast is None or self._cast[0] is not self.unet:
            self._cast = (self.unet, copy.deepcopy(self.unet))
        # Casting anew costs a fraction of one step, and a copy that lags behind training is a trap.
        cast = self._cast[1].to(device, self.dtype).train(self.unet.training)
        live = [*self.unet.parameters(), *self.unet.buffers()]
        for old, new in zip([*cast.parameters(), *cast.buffers()], live, strict=True):
            old.copy_(new)
        return cast, self.dtype

    def _shape(self, tensors: dict[str, Tensor], batch_size: int | None) -> tuple[int, int, int]:
        """Return (B, T, Da), on which all arguments must agree."""
        for name, value in tensors.items():
            rank = 2 if name == "global_cond" else 3
            if value.dim() != rank:
                _fail(name, f"have {rank} dimensions", tuple(value.shape))
        sequences = {name: value for name, value in tensors.items() if name != "global_cond"}
        actions = {name: value for name, value in sequences.items() if name != "local_cond"}
        batch = batch_size
        if batch is None:
            batch = max((value.shape[0] for value in tensors.values()), default=1)
        horizon, action_dim = self.horizon, self.action_dim
        if horizon is None and sequences:
            horizon = next(iter(sequences.values())).shape[1]
        if action_dim is None:
            if self._width[0] is not self.unet:
                self._width = (self.unet, _action_dim(self.unet))
            action_dim = self._width[1]
        if action_dim is None and actions:
            action_dim = next(iter(actions.values())).shape[2]
        for name, size in (("horizon", horizon), ("action_dim", action_dim)):
            if size is None:
                _fail(name, "be given to the constructor, or follow from an argument", None)
        shape = (batch, horizon, action_dim)
        for name, value in tensors.items():
            got = tuple(value.shape)
            if name == "noise" and got != shape:
                _fail(name, f"be (B, T, Da) = {shape}", got)
            if got[0] not in (1, batch):
                _fail(name, f"have a batch of 1 or {batch}", got)
            if name in actions and got[1:] != shape[1:]:
                _fail(name, f"be (B, T, Da) = {shape}", got)
            if name in sequences and got[1] != horizon:
                _fail(name, f"have the horizon {horizon}", got)
        return shape


def _fused_loop(
    packed: PackedUnet, table: StepTable, shape: tuple[int, int, int], device: torch.device
) -> Body:
    """Return the loop of one op, to be run as it is or captured."""
    wide = table.coefficients.dtype
    timesteps, coefficients = table.timesteps.float(), table.coefficients.float()

    def body(inputs: Inputs, generator: torch.Generator | None) -> Tensor:
        floats = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
        noise, step_noise = floats.get("noise"), floats.get("step_noise")
        if noise is None:
            noise = draw_normal(shape, generator, device, wide).float()
        if step_noise is None and any(table.draws_noise):
            step_noise = draw_steps(table.draws_noise, shape, generator, wide).float()
        return packed.sample(
            noise,
            timesteps,
            coefficients,
            table.clip,
            global_cond=floats.get("global_cond"),
            noise=step_noise,
            known=floats.get("condition_data"),
            known_mask=floats.get("condition_mask"),
        )

    return body


def _loop(
    sample: Tensor,
    table: Steps,
    predict: Callable[[Tensor, Tensor], Tensor],
    draw: Callable[[], Tensor],
    impose: Callable[[Tensor], Tensor],
    generator: Generators,
) -> Tensor:
    """Run the steps of ``table`` on ``sample``, (B, T, Da)."""
    timesteps = table.timesteps[:, None].expand(-1, sample.shape[0])
    advance = table.stepper(generator)
    for step in range(len(table)):
        sample = impose(sample)
        output = predict(sample, timesteps[step])
        noise = draw() if table.draws_noise[step] else None
        sample = advance(step, output, sample, noise)
    return impose(sample)


def _action_dim(unet: Any) -> int | None:
    """Return the width of the network's last layer, where it has the original's name."""
    if not isinstance(unet, nn.Module):
        return None
    # Wrappers, such as a compiled module, put a prefix before the name.
    widths = (p.shape[0] for n, p in unet.named_parameters() if n.endswith("final_conv.1.weight"))
    return next(widths, None)
