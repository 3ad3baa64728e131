"""A U-Net's weights packed for the ops that run the whole network, or the whole loop, at once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .family import Network, recognise

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def runs_packed(device: torch.device) -> bool:
    """Whether this build can run networks on packed weights on such a device."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if key == "CUDA" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return key is not None and has_kernel("dpa::diffusion_sample", key)


def unet_config(unet: nn.Module) -> list[int]:
    """Read the architecture off a U-Net of the family.

    Returns:
        ``[action_dim, kernel_size, n_groups, step_dim, cond_dim, film_scale, *down_dims]``.

    Raises:
        ValueError: the module is not such a network, or has local conditioning.

    """
    return _config(recognise(unet))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _bits(values: Tensor) -> Tensor:
    """The values as integers, among which a NaN equals itself."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def _config(network: Network) -> list[int]:
    arguments = network.arguments
    if arguments.get("local_cond_dim") is not None:
        raise ValueError("unet must have no local conditioning to be packed, got one that has")
    return [
        arguments["input_dim"],
        arguments["kernel_size"],
        arguments["n_groups"],
        arguments["diffusion_step_embed_dim"],
        arguments["global_cond_dim"] or 0,
        int(arguments["cond_predict_scale"]),
        *arguments["down_dims"],
    ]


class PackedUnet:
    """A U-Net on packed weights: one op a forward pass, one op a whole denoising loop.

    The weights are packed at the first call, and again when a parameter was replaced or changed in
    place. One through ``parameter.data`` leaves no trace: call :meth:`follow` or :meth:`repack`.
    No gradient flows through any of it.

    Args:
        unet: the original's ``ConditionalUnet1D``, LeRobot's or dpa's, without local conditioning,
            on a device for which :func:`runs_packed` holds.
        dtype: of the packed weights: float32, float16, bfloat16 or float8_e4m3fn. Arithmetic
            accumulates in float32, and inputs and outputs are float32. With 16-bit weights the
            activations between layers are rounded to their type, and on the GPU partial sums too.
            float8_e4m3fn: a convolution's weights are kept as ``scale * q``, ``q`` in e4m3 and a
            float32 scale an output channel, the largest magnitude of its weights over 448;
            activations are float16, and so are the weights outside the convolutions. The first and
            the last convolution stay float32. It is fast for one sample.

    Raises:
        ValueError: the network cannot be packed, with the reason.

    """

    def __init__(self, unet: nn.Module, dtype: torch.dtype = torch.float32):
        if dtype not in _DTYPES:
            raise ValueError(
                f"dtype must be float32, float16, bfloat16 or float8_e4m3fn, got {dtype}"
            )
        self.unet = unet
        self.dtype = dtype
        self._read()
        self._packed: Tensor | None = None
        self._seen: list[tuple[int, int]] = []
        self._elements: list[Tensor] = []
        self._values: Tensor | None = None
        self._looked = 0.0

    def _read(self) -> None:
        self.network = recognise(self.unet)
        self.config = _config(self.network)
        self._names = torch.ops.dpa.unet1d_weight_names(self.config)

    def repack(self) -> Tensor:
        """Pack the weights as they are now, in the same memory as before where there is one.

        A captured graph that reads the packed weights therefore follows.

        Raises:
            ValueError: modules were replaced, and the network can no longer be packed.

        """
        if self.network.altered():
            self._read()
            self._packed = None  # of another size, perhaps
        with torch.inference_mode(False), torch.no_grad():
            weights = self.network.weights()
            given = [weights[name] for name in self._names]
            packed = torch.ops.dpa.unet1d_pack(given, self.config, self.dtype)
            if self._packed is not None and self._packed.device == packed.device:
                self._packed.copy_(packed)
            else:
                self._packed = packed
            # Views: they show what is written through parameter.data as well.
            found = [p.detach() for p in self.network.parameters().values()]
            middle = [p[tuple(size // 2 for size in p.shape)].view(1) for p in found]
            self._elements, self._values = middle, _bits(torch.cat(middle))
        self._seen = self._versions()
        return self._packed

    def follow(self, every: float = 0.0) -> None:
        """Repack if the network's weights changed, even through ``parameter.data``.

        That leaves no trace but the values, of which one a parameter is compared: it waits for the
        device, and nothing is looked at inside a capture of a CUDA graph, nor ``every`` so many
        seconds more than once.
        """
        now = time.monotonic()
        if self._packed is None or now - self._looked < every:
            return
        self._looked = now
        if self._packed.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if self.stale() or self.look()():
            self.repack()

    def look(self) -> Callable[[], bool]:
        """Return a question: do the values that :meth:`follow` compares differ as of this call?

        On a GPU it is answered on a stream of its own, beside what was launched in the meantime.
        """
        values, elements = self._values, self._elements
        if values is None:
            return lambda: True
        if not values.is_cuda:
            return lambda: not torch.equal(_bits(torch.cat(elements)), values)
        now = torch.cuda.current_stream(values.device).record_event()

        def differ() -> bool:
            with torch.cuda.stream(_side_stream(values.device)):
                torch.cuda.current_stream().wait_event(now)
                return not torch.equal(_bits(torch.cat(elements)), values)

        return differ

    def _versions(self) -> list[tuple[int, int]]:
        found = [module._parameters[name] for module, name in self.network.slots.values()]
        try:
            return [(p.data_ptr(), p._version) for p in found]
        except RuntimeError:  # tensors made in inference mode count no versions
            return [(p.data_ptr(), 0) for p in found]

    def stale(self) -> bool:
        """Whether the network's weights have changed since they were packed."""
        return self._packed is None or self.network.altered() or self._versions() != self._seen

    def memory(self, device: torch.device) -> Tensor:
        """Return the packed weights as they are, packing only where there are none there yet."""
        if self._packed is None or self._packed.device != device:
            return self.repack()
        return self._packed

    @property
    def packed(self) -> Tensor:
        """The packed weights, made anew if the network's have changed.

        A compiled function takes them as they were packed before: its graph holds no such question.
        """
        if torch.compiler.is_compiling() and self._packed is not None:
            return self._packed
        return self.repack() if self._packed is None or self.stale() else self._packed

    def __call__(
        self, sample: Tensor, timestep: Tensor, global_cond: Tensor | None = None
    ) -> Tensor:
        """One forward pass: (B, T, Da) and a timestep a sample, (B,), to (B, T, Da), float32."""
        return torch.ops.dpa.unet1d(
            sample, timestep.float(), global_cond, self.packed, self.config, self.dtype
        )

    def film(self, timesteps: Tensor, global_cond: Tensor | None = None) -> Tensor:
        """FiLM's parameters of one observation at many timesteps, on a GPU: what no step changes.

        Args:
            timesteps: (S,), float32.
            global_cond: (1, Dg).

        Returns:
            (S, R), float32, rows for :meth:`on_film`.

        """
        return torch.ops.dpa.unet1d_film(
            timesteps, global_cond, self.packed, self.config, self.dtype
        )

    def on_film(self, sample: Tensor, film: Tensor) -> Tensor:
        """One forward pass of (B, T, Da) on rows of :meth:`film`, (B, R), on a GPU."""
        return torch.ops.dpa.unet1d_on_film(sample, film, self.packed, self.config, self.dtype)

    def sample(
        self,
        initial: Tensor,
        timesteps: Tensor,
        coefficients: Tensor,
        clip: float,
        *,
        global_cond: Tensor | None = None,
        noise: Tensor | None = None,
        known: Tensor | None = None,
        known_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the whole loop: S steps of the network and of :func:`dpa.ops.scheduler_step`.

        Args:
            initial: (B, T, Da), the noise to begin with.
            timesteps: (S,), float32.
            coefficients: (S, 6), the table of :func:`dpa.ops.scheduler_step`, float32.
            clip: the limit of x0.
            global_cond: (B, Dg).
            noise: (S, B, T, Da), or None where no step adds any.
            known: (B, T, Da), imposed where ``known_mask`` before every step and after the last.
            known_mask: bool, (B, T, Da).

        Returns:
            (B, T, Da), float32.

        """
        return torch.ops.dpa.diffusion_sample(
            initial,
            timesteps,
            global_cond,
            self.packed,
            self.config,
            self.dtype,
            coefficients,
            clip,
            noise,
            known,
            known_mask,
        )
