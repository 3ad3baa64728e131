"""The denoising loop: from noise and an observation to an action sequence."""

from __future__ import annotations

import copy
import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpa.library.capture import can_capture
from dpa.library.compiling import uncompiled
from dpa.library.first_use import saying_what_takes_long
from dpa.nn.family import is_of_family
from dpa.packed.unet import PackedUnet
from dpa.sampling import arguments, fused_loop, stepwise_loop
from dpa.sampling.arguments import Call, Given, Inputs, check
from dpa.sampling.fused_loop import Body
from dpa.sampling.module_loops import Loop, ModuleLoops
from dpa.sampling.packing import Packing
from dpa.sampling.parallel import (
    PackedSweeps,
    Parallel,
    ParallelReport,
    Sweeps,
    report_of,
)
from dpa.sampling.rng import draw_normal
from dpa.sampling.step_tables import Tables
from dpa.sampling.stepwise_loop import Copy, Layers
from dpa.sampling.traced import TracedNetwork
from dpa.schedulers.tables import Generators, MultistepTable, Steps, StepTable
from dpa.tracking import is_dispatched, is_observed
from dpa.tracking.replacing import replaced
from dpa.tracking.weights import MODES


class DiffusionSampler:
    """Sample action sequences with a U-Net, or another denoiser, and a scheduler of diffusers.

    Each step runs the network and then ``dpa::scheduler_step``; the sample and the scheduler's
    arithmetic are float32 (float64 for a float64 network). Random numbers are taken as diffusers
    takes them, so that a generator gives the same noise: the initial noise first, then noise of the
    sample's shape in each step that adds some (DDPM at t > 0, DDIM with eta > 0), in the sample's
    dtype, on the generator's device.

    In a function that ``torch.compile`` compiles a call runs as it does elsewhere: it is a break in
    the graph. :class:`dpa.PackedUnet` is not, nor are the ops.

    The scheduler is copied here, and changing the object later changes nothing. The network is not:
    every call samples with the weights that it has then, in the mode (train or eval) that it is in.

    Args:
        unet: called as ``unet(sample, timestep, global_cond=...)``, with ``local_cond=...`` where
            there is one, ``sample`` being (B, T, Da) and ``timestep`` (B,). The original's U-Net,
            LeRobot's and :class:`dpa.nn.ConditionalUnet1D` all are. A network of any other kind
            may take further ``conditions``, and no ``global_cond``.
        scheduler: a live object that :func:`dpa.schedulers.from_diffusers` takes (DDPM, DDIM,
            DPM-Solver++, UniPC, Heun or Euler of diffusers), or a :class:`StepTable`.
        num_inference_steps: steps of a call; an attribute that may be changed later. None takes the
            timesteps that the scheduler holds.
        dtype: what the network runs in, the dtype of packed weights. Where it is not the dtype of
            the weights, each call step by step casts them into a copy that the sampler keeps, and a
            traced loop casts those that its steps read. float8_e4m3fn needs the fused loop: it
            means ``fused=True``.
        horizon: T. Not needed where each call has a ``noise``, ``condition_data`` or
            ``local_cond``.
        action_dim: Da. Not needed where the network ends in a ``final_conv`` as the originals do.
        eta: DDIM's noise weight, and that of other schedulers whose step has one. None is the
            scheduler's own default: 0 for DDIM.
        use_clipped_model_output: DDIM's option of that name.
        fused: run the whole loop as one op on packed weights (:class:`dpa.packed.PackedUnet`, whose
            docstring says which networks). None does so where the network, the device and the
            scheduler allow it, its result agrees with the network's own forward on one random
            input, and nothing but the layers takes part in a call: no hook, replaced forward,
            autocast or capture of the caller's; else the loop runs as ``cuda_graph`` says, or step
            by step. True raises where it cannot be had; False runs step by step.
        fallback: what to do where the scheduler is none that a table expresses, or ``fused`` cannot
            be had. False raises; True warns with the reason, then runs the scheduler's own step
            (:class:`dpa.schedulers.LiveSteps`), or the loop step by step.
        cuda_graph: on a GPU, capture the loop into a CUDA graph at the first call of each shape,
            and replay it from then on: the fused loop, or all steps of a module that is not packed,
            is in evaluation mode and has no hooks. Such a module is traced: what no sample
            reaches is computed once a call, for all steps, and steps take fewer kernels; where no
            trace stands for it, it is captured as it is. The first replay is compared with the
            loop, and runs only where they agree; what the module is made of, its settings and its
            parameters' places are checked in every call. Eight are kept. Inside a capture of the
            caller's the kernels go into that one.
        weights: how packed weights notice changes. "tracked": at every call, by where
            parameters lie, their versions and samples of their values, on a GPU while the loop
            runs; :class:`dpa.tracking.WeightTracker` says which writes that shows. "checked"
            compares a checksum of every element besides. "frozen" promises that nothing is written.
        noise_dtype: what random numbers are sampled in; None is the sample's dtype, as in diffusers
            where the network is float32. A 16-bit network's own loop takes 16-bit noise.
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
        eta: float | None = None,
        use_clipped_model_output: bool = False,
        fused: bool | None = None,
        fallback: bool = False,
        cuda_graph: bool = True,
        weights: str = "tracked",
        noise_dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
    ):
        check(callable(unet), "unet", "be a network, or a function like one", type(unet))
        check(weights in MODES, "weights", f"be one of {', '.join(MODES)}", repr(weights))
        arguments.check_dtype("dtype", dtype)
        arguments.check_dtype("noise_dtype", noise_dtype)
        right = isinstance(parallel, Parallel | None)
        check(right, "parallel", "be a dpa.Parallel", type(parallel))
        if fused is None and dtype == torch.float8_e4m3fn:
            fused = True
        wide = dtype is None or dtype.itemsize > 1 or (fused and dtype == torch.float8_e4m3fn)
        check(wide, "dtype", "have 16 bits or more (float8_e4m3fn fused)", dtype)
        plain = not isinstance(scheduler, StepTable) or not (eta or use_clipped_model_output)
        options, got = "eta and use_clipped_model_output", f"{eta} and {use_clipped_model_output}"
        check(plain, options, "be left out with a StepTable", got)
        right = not fused or isinstance(unet, nn.Module)
        check(right, "unet", "be a module with fused", type(unet))
        self.unet, self.dtype, self.noise_dtype = unet, dtype, noise_dtype
        self.fused, self.fallback, self.cuda_graph = fused, fallback, cuda_graph
        self.weights, self.parallel = weights, parallel
        self.horizon, self.action_dim = horizon, action_dim
        self.packed: PackedUnet | None = None
        # What the last call came to, for others of its kind: they need not find all of it again.
        self.prepared: fused_loop.Prepared | None = None
        self._graphs = fused_loop.LoopGraphs()
        self._did: dict[torch.device, Tensor] = {}  # what the last parallel call on each left
        self._last_did: Tensor | None = None
        self._loops, self._packing = ModuleLoops(), Packing()
        self._foreign: tuple[Any, bool] = (None, False)
        self._width: tuple[Any, int | None] = (None, None)
        options = {"use_clipped_model_output": use_clipped_model_output}
        if eta is not None:
            options["eta"] = eta
        self._scheduler = copy.deepcopy(scheduler)
        self._tables = Tables(self._scheduler, options)
        self._copy: Copy | None = None
        self.num_inference_steps = num_inference_steps

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the next call checks everything."""
        super().__setattr__(name, value)
        if not name.startswith("_") and name not in ("packed", "prepared"):
            self.prepared = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy holds: all but what is found or made again."""
        return self.__dict__ | {"prepared": None, "_copy": None, "_foreign": (None, False)}

    @property
    def num_inference_steps(self) -> int:
        """The number of steps of a call."""
        return len(self.table)

    @num_inference_steps.setter
    def num_inference_steps(self, steps: int | None) -> None:
        whole, rule = isinstance(steps, numbers.Integral | None), "be an integer, or None"
        check(whole, "num_inference_steps", rule, repr(steps))
        # Builds the table now: a count that the scheduler cannot do is refused where it is set.
        self._tables.find(steps, self.fallback)
        self._steps = steps

    @property
    def table(self) -> Steps:
        """The steps of a call, on the CPU in float64."""
        return self._tables.find(self._steps, self.fallback)

    @property
    def untraced(self) -> tuple[str, str] | None:
        """How loops around a module run of which no trace stands, and why; None where one does."""
        return self._loops.exception

    @property
    def last_parallel(self) -> ParallelReport | None:
        """What the last call that sampled in parallel did, once the device has; None before one."""
        return None if self._last_did is None else report_of(self._last_did)

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
        conditions: Mapping[str, Tensor] | None = None,
        inpainting: str = "sample",
        last_chunk: Tensor | None = None,
        first_step: int = 0,
    ) -> Tensor:
        """Sample action sequences.

        A conditioning of batch 1 serves every sample of a larger ``batch_size``, which gives
        several samples for one observation.

        Args:
            global_cond: (B, Dg), in any floating dtype.
            local_cond: (B, T, Dl), in any floating dtype.
            condition_data: (B, T, Da); its values where the mask is true are inpainted before every
                call of the network and once after the loop (inpainting).
            condition_mask: bool, (B, T, Da), or floating weights from 0 to 1, by which the sample
                is moved towards the data; given with ``condition_data`` or not at all.
            noise: (B, T, Da) to start from, instead of random numbers.
            generator: of the random stream; None is the global one of the device. One on the CPU
                gives its own, whatever the device. A sequence has one generator a sample.
            batch_size: B; by default the batch of the arguments, or 1.
            conditions: what else the network is called with, by name: tensors with a batch.
            inpainting: where ``condition_data`` holds. "sample" is for policies that are trained
                with inpainting. "x0" holds it in each step's prediction of x0 instead, and at the
                end where the weight is 1: for policies that are not, as real-time chunking
                continues the last chunk (:func:`dpa.prefix_weights` makes the weights).
            last_chunk: (B, T, Da), from which the loop starts instead of from noise alone: with
                the noise of ``first_step`` added (warm start).
            first_step: the step to begin at; the steps before it do not run.

        Returns:
            (B, T, Da) float32 (float64 for a float64 network, which ``fused`` samples in float32),
            without gradient.

        Raises:
            ValueError: naming the argument, the rule and what was received.
            RuntimeError: likewise, where the fused op finds that the network takes no such
                ``global_cond``.

        """
        given = {
            "global_cond": global_cond,
            "local_cond": local_cond,
            "condition_data": condition_data,
            "condition_mask": condition_mask,
            "noise": noise,
            "last_chunk": last_chunk,
        }
        way = inpainting, first_step
        last = self.prepared  # read once: another thread's call may replace it
        none = conditions is None or (isinstance(conditions, Mapping) and not conditions)
        known = last is not None and none and not torch.compiler.is_compiling()
        if known and last.serves(given, batch_size, generator, way) and last.stands(self.fused):
            return last.run(given, generator)
        others = arguments.check_conditions({} if conditions is None else conditions)
        return self._sample(given, others, batch_size, generator, way)

    @uncompiled(reason="the sampler captures its own graphs")
    @torch.no_grad()
    def _sample(
        self,
        given: Given,
        others: Inputs,
        batch_size: int | None,
        generator: Generators,
        way: tuple[str, int],
    ) -> Tensor:
        """Sample, with everything found and checked anew."""
        tensors = {name: value for name, value in given.items() if value is not None} | others
        device, weights_dtype = arguments.placement(self.unet, tensors)
        if self.action_dim is None and self._width[0] is not self.unet:
            self._width = (self.unet, arguments.last_width(self.unet))
        action_dim = self._width[1] if self.action_dim is None else self.action_dim
        shape = arguments.shape_of(tensors, batch_size, self.horizon, action_dim)
        arguments.check_generator(generator, shape[0])
        dtype, (inpainting, first_step) = torch.promote_types(weights_dtype, torch.float32), way
        held = arguments.condition_of(given, dtype)
        place = self.fallback, device, dtype
        table = self._tables.find(self._steps, *place)
        arguments.check_way(given, inpainting, first_step, table, self.parallel)
        if first_step:
            table = self._tables.find(self._steps, *place, first_step)
        dtypes = {"weights_dtype": weights_dtype, "noise_dtype": self.noise_dtype or dtype}
        loop = {"table": table, "shape": shape, "generator": generator, "inpainting": inpainting}
        call = Call(given, others, held, device, dtype, **dtypes, **loop)
        packed = self._packing.find(self, call)
        sweeps = None if self.parallel is None else self._sweeps(self.parallel, call)
        if packed is not None:
            with saying_what_takes_long(device):
                result, again = fused_loop.run(packed, self._graphs, call, self.cuda_graph, sweeps)
            kind = fused_loop.kind_of(given, batch_size, generator, way)
            repeats = again is not None and kind is not None and result.dtype == call.dtype
            placed = packed.weights.placement
            self.prepared = fused_loop.Prepared(kind, placed, packed, again) if repeats else None
            return result.to(call.dtype)
        if sweeps is not None:
            return self._sample_in_sweeps(call, sweeps)
        return self._sample_captured(call) if self._is_captured(call) else self._step_by_step(call)

    def _sweeps(self, parallel: Parallel, call: Call) -> PackedSweeps:
        """Return how a call is sampled in parallel; refuse loops that have no sweeps."""
        table, rule = call.table, "be left out of a scheduler that no StepTable expresses"
        single = isinstance(table, StepTable) and not isinstance(table, MultistepTable)
        check(single, "parallel", rule, type(table).__name__)
        captured = call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        rule = "be left out inside a capture, since how many sweeps it takes depends on values"
        check(not captured, "parallel", rule, parallel)
        with torch.inference_mode(False):
            new = torch.zeros(4, dtype=torch.float64, device=call.device)
        self._last_did = self._did.setdefault(call.device, new)
        return PackedSweeps(parallel, self._last_did)

    def _sample_in_sweeps(self, call: Call, sweeps: PackedSweeps) -> Tensor:
        """Sample in parallel with a network that is not packed."""
        layers = self._layers(call)
        inputs = layers.inputs_of(call)
        inputs["random"] = call.numbers()(call.generator).to(call.dtype)
        found = Sweeps(call.shape, call.table, layers, sweeps.options, sweeps.numbers)
        return found.of_a_call(inputs, call.table)

    def _sample_captured(self, call: Call) -> Tensor:
        """Run the loop around a module that dpa does not pack, as one graph."""
        table, shape, dtype = call.table, call.shape, self.dtype or call.weights_dtype
        numbers = call.numbers()

        def around(layers: Layers) -> Loop:
            kind = layers.network, dtype, table, call.noise_dtype, shape, call.inpainting
            return Loop(layers.network, kind, layers.inputs_of(call), _loop(call, layers))

        def trace(inputs: Inputs) -> Body:
            return _loop(call, layers.traced(table, inputs, shape, dtype))

        layers = Layers(self.unet, call.weights_dtype, call.others)
        plain = around(layers)
        found = self._loops.replay(plain, numbers, call.generator)
        if found is not None:
            self._copy = None  # what a trace was compared with
            return found
        loop = around(self._layers(call))
        return self._loops.run(loop, plain, trace, dtype, numbers, call.generator)

    def _step_by_step(self, call: Call) -> Tensor:
        """Run the network and the scheduler's step, one after the other."""

        def draw(step: int | None) -> Tensor:
            turned = step is not None and any(call.table.transposed[step : step + 1])
            kind = call.device, call.noise_dtype, turned
            return draw_normal(call.shape, call.generator, *kind).to(call.dtype)

        layers = self._layers(call)
        inputs = layers.inputs_of(call)
        if "noise" not in inputs:
            inputs["noise"] = draw(None)
        return _loop(call, layers)(inputs, draw=draw, generator=call.generator)

    def _layers(self, call: Call) -> Layers:
        """Return the network as a loop of steps calls it, in the dtype that it is called in."""
        network, dtype = self.unet, self.dtype or call.weights_dtype
        if dtype != call.weights_dtype and isinstance(network, nn.Module):
            if self._copy is None or self._copy.unet is not network:
                self._copy = Copy(network)
            network = self._copy.to(call.device, dtype)
        return Layers(network, dtype, call.others)

    def _is_captured(self, call: Call) -> bool:
        """Whether the steps of a module that dpa does not pack run as one graph."""
        unet, table = self.unet, call.table
        plain = isinstance(unet, nn.Module) and not isinstance(unet, torch.jit.ScriptModule)
        if not (plain and self.cuda_graph and call.shape[0] and can_capture(call.device)):
            return False
        if unet.training or not isinstance(table, StepTable) or is_observed() or is_dispatched():
            return False
        if table.coefficients.dtype != torch.float32 or "_orig_mod" in unet._modules:
            return False
        if self._foreign[0] is not unet:
            self._foreign = (unet, not is_of_family(unet))
        # One of dpa's family is not packed for its size, say; or a layer of it drops values.
        family = not self._foreign[1]
        if family and (self.fused is not None or any(each.training for each in unet.modules())):
            return False
        return replaced(unet, "forward") is None


def _loop(call: Call, layers: Layers | TracedNetwork) -> Callable[..., Tensor]:
    """Return the loop around a network, of its inputs."""
    return functools.partial(stepwise_loop.run, layers, call.table, inpainting=call.inpainting)
