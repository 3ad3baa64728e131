"""A U-Net's weights packed for the ops that run the whole network, or the whole loop, at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def unet_config(unet: nn.Module) -> list[int]:
    """Read the architecture off a U-Net with the original's state-dict keys.

    Returns:
        ``[action_dim, kernel_size, n_groups, step_dim, cond_dim, film_scale, *down_dims]``.

    Raises:
        ValueError: the module is not such a network, or has local conditioning.

    """
    weights = dict(unet.named_parameters())
    norm = dict(unet.named_modules()).get("down_modules.0.0.blocks.0.block.1")
    if not isinstance(norm, nn.GroupNorm) or "final_conv.1.weight" not in weights:
        raise ValueError(f"unet must have the original ConditionalUnet1D's keys, got {type(unet)}")
    if any(name.startswith("local_cond_encoder.") for name in weights):
        raise ValueError("unet must have no local conditioning to be packed, got one that has")
    down_dims: list[int] = []
    while (key := f"down_modules.{len(down_dims)}.0.blocks.0.block.0.weight") in weights:
        down_dims.append(weights[key].shape[0])
    step_dim = weights["diffusion_step_encoder.3.weight"].shape[0]
    film = weights["down_modules.0.0.cond_encoder.1.weight"].shape
    return [
        weights["final_conv.1.weight"].shape[0],
        weights["down_modules.0.0.blocks.0.block.0.weight"].shape[2],
        norm.num_groups,
        step_dim,
        film[1] - step_dim,
        int(film[0] == 2 * down_dims[0]),
        *down_dims,
    ]


class PackedUnet:
    """A U-Net on packed weights: one op a forward pass, one op a whole denoising loop. CUDA alone.

    The weights are packed at the first call, and again when a parameter was replaced or changed in
    place. A change through ``parameter.data`` leaves no trace to notice: call :meth:`repack` then.
    No gradient flows through any of it.

    Args:
        unet: a network with the keys of the original ``ConditionalUnet1D``, without local
            conditioning, on a CUDA device.
        dtype: of the packed weights: float32, float16 or bfloat16. Arithmetic accumulates in
            float32, and inputs and outputs are float32.

    Raises:
        ValueError: the network cannot be packed, with the reason.

    """

    def __init__(self, unet: nn.Module, dtype: torch.dtype = torch.float32):
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
        self.unet = unet
        self.dtype = dtype
        self.config = unet_config(unet)
        self._names = torch.ops.dpa.unet1d_weight_names(self.config)
        self._packed: Tensor | None = None
        self._seen: list[tuple[int, int]] = []

    def repack(self) -> Tensor:
        """Pack the weights as they are now."""
        weights = dict(self.unet.named_parameters())
        given = [weights[name].detach() for name in self._names]
        self._packed = torch.ops.dpa.unet1d_pack(given, self.config, self.dtype)
        return self._packed

    @property
    def packed(self) -> Tensor:
        """The packed weights, made anew if the network's have changed."""
        seen = [(p.data_ptr(), p._version) for p in self.unet.parameters()]
        if self._packed is None or seen != self._seen:
            self.repack()
            self._seen = seen
        assert self._packed is not None
        return self._packed

    def __call__(
        self, sample: Tensor, timestep: Tensor, global_cond: Tensor | None = None
    ) -> Tensor:
        """One forward pass: (B, T, Da) and a timestep a sample, (B,), to (B, T, Da), float32."""
        return torch.ops.dpa.unet1d(
            sample, timestep.float(), global_cond, self.packed, self.config, self.dtype
        )

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
