"""What :func:`dpa.accelerate` puts in the place of an image encoder's forward."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dpa.acceleration.shadow_run import Options, ShadowRun, say_fallback
from dpa.library.checks import require
from dpa.nn.image_encoder import Encoder, NotAnEncoder, name_of, recognise
from dpa.packed.agreement import STEP_LIMITS, limit
from dpa.packed.encoder import PackedEncoder, why_not
from dpa.packed.encoder_kernels import EncoderKernels, EncoderOnCpu, dtype_of
from dpa.tracking import is_dispatched, is_observed, stamp_of
from dpa.tracking.replacing import Replacement, class_of


class FastEncoder(Replacement):
    """Replaces the forward of one image encoder: equal features, by dpa's ops on packed weights.

    In evaluation, without gradients, on the CPU or a GPU from compute capability 8.0 on; everywhere
    else the encoder's own forward runs. The first call of each kind runs both and returns the
    original's result.

    Attributes:
        network: what the encoder was recognised as; None where dpa knows none like it any more.
        shadow: what comparisons with the original found.
        refused: why it is none, or None.

    """

    OWNER, KEPT = "encoder", ("encoder", "options")
    encoder: nn.Module
    options: Options

    def forget(self) -> None:
        """Read the encoder again, at the first call: it may be half restored now."""
        self._class = class_of(self.encoder)
        name = f"the accelerated {type(self.encoder).__name__}"
        self.shadow = ShadowRun(name, self.options.fallback, self.basis)
        self._reset()

    def basis(self) -> Any:
        """Return what a write of weights changes."""
        slots = [] if self.network is None else self.network.slots()
        return stamp_of([getattr(module, name) for module, name in slots])

    def _reset(self) -> None:
        self.network: Encoder | None = None
        self.refused: str | None = None
        self.repack()

    def repack(self) -> None:
        """Drop what was packed and compared: weights were written in a way that is not tracked."""
        self.shadow.forget()
        self._packed: PackedEncoder | EncoderOnCpu | EncoderKernels | None = None

    def prepare(self) -> Encoder | None:
        """Return the encoder as it is now; None where dpa knows none like it any more."""
        if self.network is not None and self.network.changed():
            self._reset()
        if self.network is None and self.refused is None:
            try:
                self.network = recognise(self.encoder)
            except NotAnEncoder as error:
                self.refused = f"has changed: {error}"
                say_fallback(type(self.encoder).__name__, self.refused, self.options.fallback)
        return self.network

    def fallback_reason(self) -> str | None:
        """Return why the original runs now, whatever it is called with; None where dpa's may."""
        if is_observed():
            return "torch.func transforms it, or torch.jit.trace records it"
        network = self.prepare()
        if network is None:
            return self.refused
        if (why := network.tracker.no_one_op()) is not None:
            return why
        if any(network.tracker.modes()):
            return "it, or a layer of it, is in training mode"
        weight = network.first.weight
        return why_not(weight.dtype, weight.device, self._compute(weight))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode images, with the arguments of the forward that this one replaces."""
        if torch.compiler.is_compiling():
            return self._class.forward(self.encoder, *args, **kwargs)
        if kwargs or len(args) != 1 or type(args[0]) is not Tensor or not self._may_run():
            return self.original(*args, **kwargs)
        (images,) = args
        weight = self.network.first.weight
        if images.dtype != weight.dtype or images.dim() != 4 or images.shape[1] != weight.shape[1]:
            try:
                return self.original(images)
            except (RuntimeError, ValueError, AssertionError):
                self._refuse(images, weight)
        made_for = getattr(self.encoder, "input_shape", images.shape[1:])
        if images.device != weight.device or tuple(images.shape[1:]) != tuple(made_for):
            return self.original(images)  # which says what is wrong
        compute = self._compute(weight)
        kind = weight.device.type, weight.dtype, compute, tuple(images.shape[1:])
        passed = self.shadow.passed(kind)
        if passed:
            return self._run(images)
        if passed is False:
            self.shadow.leave()
        if passed is False or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.original(images)
        self._check_range(images)
        table = STEP_LIMITS, (weight.dtype, compute), weight.device
        runs = lambda _: self.original(images), lambda _: self._run(images)
        return self.shadow.run_both(kind, self.options.tolerance or limit(*table), *runs)

    def _may_run(self) -> bool:
        if torch.is_grad_enabled() or is_dispatched():
            return False
        why = self.fallback_reason()
        if why is not None and why is self.refused and not self.options.fallback:
            say_fallback(type(self.encoder).__name__, why, False)
        return why is None and not torch.is_autocast_enabled(self.network.first.weight.device.type)

    def _compute(self, weight: Tensor) -> torch.dtype:
        wanted = dtype_of(weight.dtype, self.options.dtype)
        serves = weight.is_cuda or EncoderOnCpu.serves(weight.dtype, wanted)
        return wanted if serves else weight.dtype

    def _run(self, images: Tensor) -> Tensor:
        if self._packed is None or images.is_cuda != isinstance(self._packed, EncoderKernels):
            self._packed = self._pack(images)
        return self._packed.run(images)

    def _pack(self, images: Tensor) -> PackedEncoder | EncoderOnCpu | EncoderKernels:
        compute, weights = self._compute(images), self.options.weights
        if images.is_cuda:
            return EncoderKernels(self.network, compute, weights)
        if EncoderOnCpu.serves(images.dtype, compute):
            with contextlib.suppress(NotAnEncoder):  # it has a layer that only PackedEncoder runs
                return EncoderOnCpu(self.network, compute, weights)
        return PackedEncoder(self.network, weights)

    @property
    def kernels(self) -> EncoderKernels | None:
        """What a captured call reads: the packed weights on a GPU, where there are any."""
        return self._packed if isinstance(self._packed, EncoderKernels) else None

    def _refuse(self, images: Tensor, weight: Tensor) -> NoReturn:
        """Raise for what the encoder's own layers refuse, in words about images."""
        shape, channels = tuple(images.shape), weight.shape[1]
        refuse = functools.partial(require, False, f"dpa: images for {name_of(self.encoder)}")
        if images.dtype != weight.dtype:
            bytes_, rule = images.dtype == torch.uint8, f"be {weight.dtype}, as its weights"
            rule += ", in the range that it was trained on" if bytes_ else ""
            got = "uint8: convert them and divide by 255" if bytes_ else images.dtype
            refuse(rule, got, RuntimeError)
        if len(shape) != 4:
            refuse(f"have 4 dimensions (B, {channels}, H, W)", shape, RuntimeError)
        last = shape[3] == channels
        hint = ": channels come last in it, so permute(0, 3, 1, 2) first" if last else ""
        refuse(f"have shape (B, {channels}, H, W)", f"{shape}{hint}", RuntimeError)

    def _check_range(self, images: Tensor) -> None:
        """Raise for bytes that were not divided, in what a network for colours is given.

        Colours from 0 to 1 lie on both sides of 0 where a normalisation makes them large. Those of
        a dark camera lie little below it, and are at most the inverse of their deviation, some
        hundreds; colours from 0 to 255 are neither. Reading them takes the host's time, so the
        first call of a kind does it.
        """
        if images.shape[1] != 3 or not images.numel():
            return
        low, high = (float(end) for end in torch.aminmax(images))
        rule = "be in the range that it was trained on, such as 0 to 1"
        got = f"{low:g} to {high:g}: divide them by 255 (or accelerate with encoders=False)"
        holds = not (32 < high < math.inf and low > -high / 64 and (low >= 0 or high > 256))
        require(holds, f"dpa: images for {name_of(self.encoder)}", rule, got)
