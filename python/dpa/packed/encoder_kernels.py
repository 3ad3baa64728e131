"""An image encoder on packed weights by one op: on a GPU a launch a layer."""

from __future__ import annotations

import itertools
import threading

import torch
from torch import Tensor

from dpa.nn.image_encoder import Encoder, NotAnEncoder
from dpa.packed.encoder import crop_of, padded
from dpa.packed.encoder_program import EncoderProgram
from dpa.packed.joint_encoders import EncoderCall, JointEncoders
from dpa.tracking import WeightTracker

_memories = itertools.count(1)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dtype_of(weights: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which an encoder's layers run; 8-bit weights come with float16."""
    dtype = wanted or weights
    return dtype if dtype in _DTYPES else torch.float16


class _OneOp:
    """Runs an encoder by the op ``image_encoder``, on weights that are kept packed.

    Args:
        encoder: what :func:`dpa.nn.image_encoder.recognise` returned.
        dtype: of packed weights. On a GPU also of feature maps, and float32 multiplies in TF32; on
            the CPU these are float32.
        weights: how changes are noticed, as :func:`dpa.accelerate` says.

    Raises:
        NotAnEncoder: the op has no such layer, with the reason.

    """

    def __init__(self, encoder: Encoder, dtype: torch.dtype, weights: str = "tracked"):
        self.encoder, self.dtype = encoder, dtype
        self.program = EncoderProgram.of(encoder)
        slots = [*encoder.slots(), *encoder.grids(), *self.program.slots()]
        self.weights = WeightTracker(slots, weights)
        self.lock = threading.RLock()
        self._packed: tuple[Tensor, list[float]] | None = None  # and the op's constants

    def stale(self) -> bool:
        """Whether weights lie elsewhere or were written, by their versions."""
        return self._packed is None or self.weights.changed()

    def current(self) -> bool:
        """Whether what is packed is of the weights as they are now, by what was started."""
        return not self.stale() and not self.weights.values_changed()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _pack(self) -> tuple[Tensor, list[float]]:
        parameters, config = self.program.parameters(), self.program.config
        packed = torch.ops.dpa.image_encoder_pack(parameters, config, self.dtype)
        return packed, self.program.constants()

    def _call(self, images: Tensor, packed: Tensor, constants: list[float]) -> EncoderCall:
        prepares, size, crop = self.program.preparation, None, None
        if prepares is not None:
            sizes = crop_of(prepares, tuple(images.shape[2:]))
            if sizes is None:
                images = padded(prepares, images)
            else:
                size, crop = sizes
        self.program.check_extent(*(crop[2:] if crop else size or images.shape[2:]))
        return EncoderCall(self.program, images, packed, constants, self.dtype, size, crop)


class EncoderOnCpu(_OneOp):
    """Runs an encoder on the CPU.

    The weights are packed at the first call, and again when a parameter or a statistic was replaced
    or written.
    """

    def __init__(self, encoder: Encoder, dtype: torch.dtype, weights: str = "tracked"):
        super().__init__(encoder, dtype, weights)
        if not self.program.convolves_images():
            raise NotAnEncoder("a step other than a convolution reads its images")

    @staticmethod
    def serves(weights: torch.dtype, compute: torch.dtype) -> bool:
        """Whether the op runs encoders of such weights in this dtype."""
        return weights == torch.float32 and compute in _DTYPES

    def run(self, images: Tensor) -> Tensor:
        """Return the encoder's output."""
        with self.lock:
            if not self.current():
                with self.weights.remembered():
                    self._packed = self._pack()
            held = self._packed  # which a call keeps
        return self._call(images, *held).run()


class EncoderKernels(_OneOp):
    """Runs an encoder on a GPU.

    Weights are packed at the first call, and again, in the same memory, when a parameter or a
    statistic was replaced or written. A captured graph that reads them follows where its owner
    calls :meth:`repack`; ``generation`` is another number where there was no such memory.
    """

    generation = 0

    def __init__(self, encoder: Encoder, dtype: torch.dtype, weights: str = "tracked"):
        super().__init__(encoder, dtype, weights)
        # Features that were made of images of a shape: shape, stride, dtype.
        self._made: dict[torch.Size, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def repack(self) -> None:
        """Pack the weights as they are now, in the same memory as before where there is one.

        The host waits for the device: other streams may read what is written over.
        """
        with self.lock:
            with self.weights.remembered():
                packed, constants = made = self._pack()
            torch.cuda.synchronize(packed.device)
            kept, then = self._packed or (None, None)
            same = constants == then and not self.encoder.changed()
            if same and kept.device == packed.device:
                kept.copy_(packed)
                torch.cuda.synchronize(packed.device)
            else:
                self._packed = made
                self.generation = next(_memories)

    def run(self, images: Tensor) -> Tensor:
        """Return the encoder's output.

        Weights are compared while the GPU works. In a capture they are not; where versions say that
        they changed, the capture packs them, for itself alone.
        """
        with self.lock:
            if torch.cuda.is_current_stream_capturing():
                held = self._pack() if self.stale() else self._packed
                return self._in_capture(self._call(images, *held), images.shape)
            if self._packed is None or self._packed[0].device != images.device:
                self.repack()
            self.weights.start()
            result = self._launch(images)
            if not self.current():
                self.repack()
                result = self._launch(images)
            self._made[images.shape] = result.shape, result.stride(), result.dtype
            return result

    def _launch(self, images: Tensor) -> Tensor:
        return self._call(images, *self._packed).run()

    def _in_capture(self, call: EncoderCall, shape: torch.Size) -> Tensor:
        """Run a call, or leave it to encoders that share its launches."""
        joint, made = JointEncoders.entered(), self._made.get(shape)
        if joint is None or made is None:
            return call.run()
        shape, stride, dtype = made
        return joint.put_off(
            call, torch.empty_strided(shape, stride, dtype=dtype, device=call.images.device)
        )
