"""A U-Net's weights packed for the ops that run the whole network, or the whole loop, at once."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dpa.library.checks import require
from dpa.library.first_use import saying_what_takes_long
from dpa.nn.family import Network, recognise
from dpa.nn.parts import film_rows
from dpa.packed import batch
from dpa.packed.config import config_of, packing_for, path_of
from dpa.packed.local_cond import LocalEncoder
from dpa.schedulers.inpainting import Inpainting
from dpa.schedulers.stepping import loop
from dpa.schedulers.tables import StepTable
from dpa.tracking import WeightTracker

_memories = itertools.count(1)
_GROUPS, _FIRST_WIDTH = 2, 6  # their places in a config
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


class PackedUnet:
    """A U-Net on packed weights: one op a forward pass, one op a whole denoising loop.

    The weights are packed at the first call, and again when a parameter was replaced or changed in
    place, by its version. :meth:`follow` also compares values, for writes that no version counts
    (:class:`dpa.tracking.WeightTracker`). No gradient flows through any of it.

    Args:
        unet: the original's ``ConditionalUnet1D``, dpa's, or one like it (:mod:`dpa.nn.variants`),
            on a device for which :func:`runs_packed` holds. Where its FiLM is made otherwise
            PyTorch makes it, and the rest is packed, on a GPU. A block that encodes local
            conditions runs as one op of its own, in a loop for all timesteps at once.
        dtype: of the packed weights: float32, float16, bfloat16 or float8_e4m3fn. Arithmetic
            accumulates in float32, and inputs and outputs are float32. With 16-bit weights the
            activations between layers are rounded to their type, and on the GPU partial sums too.
            float8_e4m3fn: a convolution's weights are kept as ``scale * q``, ``q`` in e4m3 and a
            float32 scale an output channel, the largest magnitude of its weights over 448;
            activations are float16, and so are the weights outside the convolutions. The first and
            the last convolution stay float32. It is fast for one sample. Of networks with less than
            32 M weights in convolutions ``scale * q`` is kept in float16, which is faster there.
        size: (B, T) of the calls to come, as for :meth:`sized`; None packs the network's own
            widths.

    Raises:
        ValueError: the network cannot be packed, with the reason.

    """

    def __init__(
        self,
        unet: nn.Module,
        dtype: torch.dtype = torch.float32,
        *,
        weights: str = "tracked",
        network: Network | None = None,
        size: tuple[int, int, bool] | None = None,
    ):
        require(dtype in _DTYPES, "dtype", "be float32, float16, bfloat16 or float8_e4m3fn", dtype)
        self.unet, self.dtype, self._mode, self._size = unet, dtype, weights, size
        # Of the same network, for calls of other sizes too: by their layout and type.
        self._others: dict[tuple[tuple[int, ...], torch.dtype], PackedUnet] = {}
        self._packed: Tensor | None = None
        # What an op takes of it, as it was packed last.
        self.operands: tuple[Tensor, list[int], torch.dtype] | None = None
        self.generation = 0
        self._batch: batch.BatchWeights | None = None
        self._batch_wanted = False
        self._films = WeakTensorKeyDictionary()  # the timesteps of each that step_film made
        # On a GPU: the stream that packed, what is recorded there, and the others that read since.
        self._stream: torch.cuda.Stream | None = None
        self._ready: torch.cuda.Event | None = None
        self._readers: set[torch.cuda.Stream] = set()
        self.lock = threading.RLock()
        self._read(network)

    def __reduce__(self) -> tuple[Callable[..., PackedUnet], tuple[nn.Module, torch.dtype]]:
        """Leave out what is made again from the network: a copy has its own."""
        return functools.partial(type(self), weights=self._mode), (self.unet, self.dtype)

    def _read(self, network: Network | None = None) -> None:
        self.network = network or recognise(self.unet)
        self.config = config_of(self.network)
        self._film_layers = self.network.layers() if self.network.film_apart else None
        self._places: list[int] = []
        self._names = torch.ops.dpa.unet1d_weight_names(self.config)
        self._kept_in = batch.kept_in(self._given(), self.dtype)
        self.weights = WeightTracker(list(self.network.slots.values()), self._mode)
        # The config and the type that the weights are packed by.
        self._layout, self._kind = self._packing(self._size)
        self._local: LocalEncoder | None = None
        if self.network.local_cond_dim is not None:
            dtype = torch.float16 if self.dtype.itemsize == 1 else self.dtype
            self._local = LocalEncoder(self.network.layers(), dtype)

    def sized(self, batch: int, horizon: int, layers: bool = True) -> PackedUnet:
        """Return the network packed for calls of such a size: this object, or another.

        On a GPU widths may be widened to such as kernels like (:func:`packing_for`), which does not
        pay at every size. All serve every call. ``layers``: whether calls may run layer by layer.
        """
        layout, kind = self._packing((batch, horizon, layers))
        if (layout, kind) == (self._layout, self._kind):
            return self
        found = self._others.get((tuple(layout), kind))
        if found is None or (found._layout, found._kind) != (layout, kind):
            same = {"weights": self._mode, "network": self.network}
            found = PackedUnet(self.unet, self.dtype, **same, size=(batch, horizon, layers))
            found._others = self._others
            self._others[tuple(self._layout), self._kind] = self
            self._others[tuple(layout), kind] = found
        return found

    def repack(self) -> Tensor:
        """Pack the weights as they are now, in the same memory as before where there is one.

        A captured graph that reads the packed weights therefore follows. ``generation`` is another
        number, of no other network, where there was no such memory. Other streams read what is
        there before it is written over, and wait for what is written; other threads hold ``lock``
        from checking the weights until what reads them is launched (on a CPU: done).

        Raises:
            ValueError: modules were replaced, and the network can no longer be packed.

        """
        with self.lock, saying_what_takes_long(self.weights.placement[0]):
            if not self.network.tracker.unchanged():
                self._read()
                self._packed = None  # of another size, perhaps
            places = [value.data_ptr() for value in self.network.parameters().values()]
            apart = (self._film_layers, self._local, self._batch)
            if any(part is not None for part in apart) and places != self._places:
                self._packed = None  # a captured graph reads layers where they lay
            self._places = places
            with self.weights.remembered():
                packed = self._pack()
                if type(packed) is not Tensor:  # export traces this: there are no values to keep
                    return packed
                self._wait_for_readers()
                with torch.inference_mode(False), torch.no_grad():
                    if self._packed is not None and self._packed.device == packed.device:
                        self._packed.copy_(packed)
                    else:
                        self._packed, self.generation = packed, next(_memories)
                        self._films.clear()
                        self._batch = None
                    for film, timesteps in self._films.items():
                        film.copy_(self._step_film(timesteps))
                    if self._batch is not None:
                        self._batch.update(self._given())
                    elif self._batch_wanted:
                        self._batch = batch.BatchWeights(self._given(), self.config, self.dtype)
                self.operands = self._packed, self._layout, self._kind
                self._stream = None
                if packed.is_cuda:
                    self._stream = torch.cuda.current_stream(packed.device)
                    self.packed_on = self._stream.cuda_stream
                    self._read_by(self._stream)
                    self._ready = self._stream.record_event()
            return self._packed

    def _pack(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            given = self._given()
            if self._kind != self.dtype:
                given = {n: batch.rounded_to_e4m3(n, w.float()) for n, w in given.items()}
            return torch.ops.dpa.unet1d_pack(list(given.values()), self._layout, self._kind)

    def _packing(self, size: tuple[int, int, bool] | None) -> tuple[list[int], torch.dtype]:
        if size is None or self._film_layers is not None:
            return self.config, self._kept_in
        batch, horizon, layers = size
        device = self.weights.placement[0]
        found = packing_for(tuple(self.config), self._kept_in, batch, horizon, device, layers)
        return list(found[0]), found[1]

    def _given(self) -> dict[str, Tensor]:
        weights = self.network.weights()
        return {name: weights[name] for name in self._names}

    def _read_by(self, stream: torch.cuda.Stream) -> None:
        self._packed.record_stream(stream)
        if self._batch is not None:
            self._batch.packed.record_stream(stream)

    def _wait_for_readers(self) -> None:
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._stream.device)
            for other in self._readers | {self._stream}:
                stream.wait_stream(other)
        self._readers.clear()

    def readable(self) -> Tensor:
        """Return the packed weights, once the current stream waits for the one that packed them."""
        home, current = self._stream, torch._C._cuda_getCurrentRawStream
        elsewhere = home is not None and current(home.device_index) != self.packed_on
        if elsewhere and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(home.device)
            stream.wait_event(self._ready)
            self._read_by(stream)
            self._readers.add(stream)
        return self._packed

    def stale(self) -> bool:
        """Whether modules changed, or weights lie elsewhere or were written, by their versions."""
        tracker = self.network.tracker
        return self._packed is None or not tracker.unchanged() or self.weights.changed()

    def follow(self, modules: bool = True) -> Tensor:
        """Return the packed weights, made anew if the network's have changed, by their values too.

        That waits for the device; inside a capture of a CUDA graph no values are compared.

        Args:
            modules: whether modules are checked; otherwise the caller has done so.

        """
        if self._captured():
            return self.packed
        with self.lock:
            self.weights.start()
            stale = self.stale() if modules else self._packed is None or self.weights.changed()
            return self.repack() if stale or self.weights.values_changed() else self.readable()

    def memory(self, device: torch.device) -> Tensor:
        """Return the packed weights as they are, packing only where there are none there yet."""
        if self._packed is None or self._packed.device != device:
            return self.repack()
        return self.readable()

    def _captured(self) -> bool:
        return self.weights.placement[0].type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def packed(self) -> Tensor:
        """The packed weights, made anew if the network's have changed.

        A compiled function takes them as they were packed before: its graph holds no such check.
        A capture that finds them changed packs them in every replay, and for itself alone.
        """
        if torch.compiler.is_compiling() and self._packed is not None:
            return self._packed
        if not self.stale():
            return self.readable()
        return self._pack() if self._captured() else self.repack()

    def __call__(
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        global_cond: Tensor | None = None,
        local_cond: Tensor | None = None,
    ) -> Tensor:
        """One forward pass: (B, T, Da) to (B, T, Da), float32.

        The timestep is the network's: a number, or a tensor of shape (), (1,) or (B,).
        """
        # Layers that make FiLM may tell integers apart.
        dtype = torch.float32 if self._film_layers is None else None
        steps = torch.as_tensor(timestep, dtype=dtype, device=sample.device)
        if steps.numel() == 1:
            steps = steps.reshape(1).expand(sample.shape[0])
        return self._forward(sample, steps, global_cond, local_cond, self.packed)

    def _forward(
        self,
        sample: Tensor,
        timesteps: Tensor,
        global_cond: Tensor | None,
        local_cond: Tensor | None,
        packed: Tensor,
    ) -> Tensor:
        layers = self.in_layers(sample) if packed is self._packed else None
        local = None
        if local_cond is not None:
            local = self._local_encoder().at(timesteps, global_cond, local_cond)
        if layers is not None:
            return layers.forward(sample, timesteps, global_cond, local)
        weights = packed, self._layout, self._kind
        if self._film_layers is None:
            local = self._filled_up(local)
            return torch.ops.dpa.unet1d(sample, timesteps, global_cond, *weights, local)
        return torch.ops.dpa.unet1d_on_film(sample, self._rows(timesteps, global_cond), *weights)

    def _local_encoder(self) -> LocalEncoder:
        found = self._local
        require(found is not None, "unet", "have local conditioning to be given local_cond", "none")
        return found

    def _filled_up(self, local: Tensor | None) -> Tensor | None:
        """Rows of local conditions as one op on the packed weights takes them."""
        if local is None:
            return None
        return LocalEncoder.filled_up(local, self._layout[_FIRST_WIDTH], self._layout[_GROUPS])

    def in_layers(self, sample: Tensor) -> batch.BatchWeights | None:
        """Return what runs so many samples layer by layer; None where that is not faster."""
        if torch.compiler.is_compiling() or self._film_layers is not None or not sample.is_cuda:
            return None
        calls = *sample.shape[:2], sample.device
        if path_of(tuple(self._layout), self._kind, *calls) != "layers":
            return None
        if self._batch is None and not self._captured():
            self._batch_wanted = True
            self.repack()
        return self._batch

    def _rows(self, timesteps: Tensor, global_cond: Tensor | None) -> Tensor:
        """FiLM's parameters as PyTorch makes them, (S, R)."""
        dtype = self.weights.placement[1]
        if global_cond is not None:
            global_cond = global_cond.to(dtype).expand(len(timesteps), -1)
        with torch.no_grad():
            return film_rows(self._film_layers, timesteps, global_cond).float()

    def run(
        self,
        sample: Tensor,
        timesteps: Tensor,
        global_cond: Tensor | None,
        local_cond: Tensor | None = None,
    ) -> Tensor:
        """One forward pass of float32 tensors, of the weights that there are now, by value too.

        The caller has checked the modules. On a GPU the values are compared while the pass runs.
        """
        given = sample, timesteps, global_cond, local_cond
        with self.lock:
            known = sample.is_cuda and self._packed is not None and not self._captured()
            if not known or self.weights.changed():
                return self._forward(*given, self.follow(modules=False))
            self.weights.start()
            result = self._forward(*given, self.readable())
            if not self.weights.values_changed():
                return result
            return self._forward(*given, self.repack())

    def film(self, timesteps: Tensor, global_cond: Tensor | None = None) -> Tensor:
        """FiLM's parameters of one observation at many timesteps, on a GPU: what no step changes.

        Args:
            timesteps: (S,), float32.
            global_cond: (1, Dg).

        Returns:
            (S, R), float32, rows for ``on_film``.

        """
        if self._film_layers is not None:
            return self._rows(timesteps, global_cond)
        weights = self.packed, self._layout, self._kind
        return torch.ops.dpa.unet1d_film(timesteps, global_cond, *weights)

    def step_film(self, timesteps: Tensor) -> Tensor | None:
        """FiLM's parameters at many timesteps, but for the observation's part, on a GPU.

        They are made anew, in the same memory, when the weights are packed again into theirs.

        Args:
            timesteps: (S,), float32.

        Returns:
            (S, R), float32, for ``sample``; None where the observation's part is not apart.

        """
        if self._film_layers is not None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            if self.stale():
                self.repack()
            timesteps = timesteps.clone()
            film = self._step_film(timesteps)
        self._films[film] = timesteps
        return film

    def _step_film(self, timesteps: Tensor) -> Tensor:
        return torch.ops.dpa.unet1d_step_film(timesteps, self._packed, self._layout, self._kind)

    def on_film(self, sample: Tensor, film: Tensor) -> Tensor:
        """One forward pass of (B, T, Da) on rows of :meth:`film`, (B, R), on a GPU."""
        return torch.ops.dpa.unet1d_on_film(sample, film, self.packed, self._layout, self._kind)

    def sample(
        self,
        initial: Tensor,
        timesteps: Tensor,
        coefficients: Tensor,
        clip: float,
        *,
        global_cond: Tensor | None = None,
        noise: Tensor | None = None,
        condition_data: Tensor | None = None,
        condition_mask: Tensor | None = None,
        step_film: Tensor | None = None,
        local_cond: Tensor | None = None,
    ) -> Tensor:
        """Run the whole loop: S steps of the network and of :func:`dpa.ops.scheduler_step`.

        Args:
            initial: (B, T, Da), the noise to begin with.
            timesteps: (S,), float32.
            coefficients: (S, 6), the table of :func:`dpa.ops.scheduler_step`, float32.
            clip: the limit of x0.
            global_cond: (B, Dg); of a network that is conditioned otherwise, what its variant's
                ``condition`` makes of that.
            noise: (S, B, T, Da), or None where no step adds any.
            condition_data: (B, T, Da); holds where ``condition_mask`` does, before every step and
                after the last (inpainting).
            condition_mask: bool, (B, T, Da).
            step_film: :meth:`step_film` of the timesteps, on a GPU; None computes it.
            local_cond: (B, T, Dl), of a network with local conditioning.

        Returns:
            (B, T, Da), float32.

        """
        packed = self.packed
        local = None
        if local_cond is not None:
            local = self._local_encoder().at_each(timesteps, global_cond, local_cond)
        # Each sample has FiLM's rows of its own.
        several = self._film_layers is not None and len(initial) != 1
        free = not several and packed is self._packed
        layers = self.in_layers(initial) if free else None
        if several or layers is not None:
            film, conds = (None, None) if layers is None else layers.film(timesteps, global_cond)

            def predict(sample: Tensor, step: int) -> Tensor:
                if layers is not None:
                    rows = None if local is None else local[step]
                    return layers.on_film(sample, film[step], conds, rows)
                steps = timesteps[step].expand(len(sample))
                return self._forward(sample, steps, global_cond, None, packed)

            noisy = (noise is not None,) * len(timesteps)
            table, held = StepTable(timesteps, coefficients, clip, noisy), None
            if condition_data is not None:
                held = Inpainting(condition_data, condition_mask, "sample", table)
            return loop(initial, table, predict, lambda step: noise[step], held)
        weights = packed, self._layout, self._kind
        rest = coefficients, clip, noise, condition_data, condition_mask
        if self._film_layers is not None:
            step_film, global_cond = self._rows(timesteps, global_cond), None
        if step_film is not None:
            op = torch.ops.dpa.diffusion_sample_on_film
            return op(initial, step_film, global_cond, *weights, *rest)
        given = *weights, *rest, self._filled_up(local)
        return torch.ops.dpa.diffusion_sample(initial, timesteps, global_cond, *given)
