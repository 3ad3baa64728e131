"""The conditional 1D U-Net of Diffusion Policy.

Constructors, forward signatures and state-dict keys are those of the original, so published
checkpoints load as they are. Three traits of the original are kept because checkpoints depend on
them: every up level ends in an upsampling, the last Conv1dBlock has 8 groups whatever ``n_groups``
is, and the second block of ``local_cond_encoder`` has weights that never reach the output.

Source: Chi et al., Diffusion Policy: Visuomotor Policy Learning via Action Diffusion (2023).

Everything here compiles with ``torch.jit.script``, ``torch.export`` and
``torch.compile(fullgraph=True)``. Annotations stay real objects, which TorchScript needs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpa.library.checks import require
from dpa.nn import inference, pack_ahead
from dpa.nn.blocks1d import (
    HALVES,
    ConditionalResidualBlock1D,
    Conv1d,
    Conv1dBlock,
    Downsample1d,
    InputsAsWeights,
    SinusoidalPosEmb,
    Upsample1d,
    channels_last,
    join,
)
from dpa.nn.plain import PlainLayers, is_changed, scriptable, sequential

_MAX_LEVELS = 5  # of the network as one op
_FILM_LAYERS = PlainLayers(sequential("cond_encoder", nn.Mish, nn.Linear), ["cond_encoder.1"])
_TIME_LAYERS = PlainLayers(
    sequential("diffusion_step_encoder", SinusoidalPosEmb, nn.Linear, nn.Mish, nn.Linear),
    ["diffusion_step_encoder.1", "diffusion_step_encoder.3"],
)


class ConditionalUnet1D(nn.Module):
    """The noise-prediction network of Diffusion Policy: a U-Net over the action sequence.

    A down level is two residual blocks and a halving of the length (none after the last level), the
    middle is two residual blocks, an up level is a skip connection, two residual blocks and a
    doubling. All residual blocks are conditioned on the timestep's embedding and ``global_cond``.

    Args:
        input_dim: width of an action.
        local_cond_dim: width of ``local_cond``, or None for a network without it.
        global_cond_dim: width of ``global_cond``, or None for a network without it.
        diffusion_step_embed_dim: width of the timestep's embedding; even, at least 4.
        down_dims: channels of the levels; multiples of ``n_groups``, the first also of 8.
        kernel_size: odd kernel size of the blocks.
        n_groups: groups of the GroupNorms, but for the last, which has 8.
        cond_predict_scale: whether FiLM has a scale besides the shift.

    """

    def __init__(
        self,
        input_dim: int,
        local_cond_dim: int | None = None,
        global_cond_dim: int | None = None,
        diffusion_step_embed_dim: int = 256,
        down_dims: Sequence[int] = (256, 512, 1024),
        kernel_size: int = 3,
        n_groups: int = 8,
        cond_predict_scale: bool = False,
    ):
        super().__init__()
        embed_dim, dims = diffusion_step_embed_dim, list(down_dims)
        _check_sizes(input_dim, (local_cond_dim, global_cond_dim), embed_dim, dims)
        self.input_dim = input_dim
        # Zero stands for "none": TorchScript then sees plain integers.
        self.local_cond_dim = local_cond_dim or 0
        self.global_cond_dim = global_cond_dim or 0
        self.film_parts = 2 if cond_predict_scale else 1
        self.horizon_multiple = 2 ** (len(dims) - 1)
        # As the ops on packed weights take it.
        self._config = [
            *(input_dim, kernel_size, n_groups, embed_dim, self.global_cond_dim),
            *(int(cond_predict_scale), *dims),
        ]
        cond_dim = embed_dim + self.global_cond_dim

        def residual(dim_in: int, dim_out: int) -> ConditionalResidualBlock1D:
            return ConditionalResidualBlock1D(
                dim_in, dim_out, cond_dim, kernel_size, n_groups, cond_predict_scale
            )

        def level(dim_in: int, dim_out: int, sampling: nn.Module) -> nn.ModuleList:
            return nn.ModuleList([residual(dim_in, dim_out), residual(dim_out, dim_out), sampling])

        diffusion_step_encoder = nn.Sequential(
            SinusoidalPosEmb(embed_dim),
            nn.Linear(embed_dim, embed_dim * 4),
            nn.Mish(),
            nn.Linear(embed_dim * 4, embed_dim),
        )
        local: nn.ModuleList | None = None
        if local_cond_dim is not None:
            local = nn.ModuleList([residual(local_cond_dim, dims[0]) for _ in range(2)])
        pairs = list(zip([input_dim] + dims[:-1], dims, strict=True))
        down = [level(*pair, Downsample1d(pair[1])) for pair in pairs[:-1]]
        down.append(level(*pairs[-1], nn.Identity()))
        mid = [residual(dims[-1], dims[-1]) for _ in range(2)]
        up = [level(2 * wide, dim, Upsample1d(dim)) for dim, wide in reversed(pairs[1:])]
        # In the original's order, by which optimizer states and averages find their parameters.
        self.mid_modules = nn.ModuleList(mid)
        self.diffusion_step_encoder = diffusion_step_encoder
        self.local_cond_encoder: nn.ModuleList | None = local
        self.up_modules = nn.ModuleList(up)
        self.down_modules = nn.ModuleList(down)
        self.final_conv = nn.Sequential(
            Conv1dBlock(dims[0], dims[0], kernel_size), Conv1d(dims[0], input_dim, 1)
        )

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        local_cond: Tensor | None = None,
        global_cond: Tensor | None = None,
    ) -> Tensor:
        """Predict what the scheduler's ``prediction_type`` says: (B, T, input_dim) as ``sample``.

        Args:
            sample: (B, T, input_dim); T a positive multiple of ``2 ** (levels - 1)``.
            timestep: a number, or a tensor of shape (), (1,) or (B,) on any device.
            local_cond: (B, T, local_cond_dim); without it the first level gets none.
            global_cond: (B, global_cond_dim).

        Raises:
            ValueError: naming the argument, the rule and the shape received.

        """
        self._check(sample, local_cond, global_cond)
        fast, ahead = False, False
        if not torch.jit.is_scripting():
            fast = channels_last(sample, self._weight(self.final_conv))
            out = None
            if fast:
                out = self._on_packed_weights(sample, timestep, local_cond, global_cond)
            if out is not None:
                return out
            if fast and sample.is_cuda:
                ahead = self._pack_ahead(sample)
        cond = self.embed(sample, timestep, fast)
        if global_cond is not None:
            global_cond = global_cond.to(cond.dtype)
        x = sample.transpose(1, 2)
        if not fast:
            x = x.contiguous()
        film: list[tuple[Tensor | None, Tensor]] = []
        if not torch.jit.is_scripting() and fast:
            film = self._film(cond, global_cond)
        # Without it blocks are called as the original's, for they may be the user's own.
        alone = len(film) == 0
        if global_cond is not None and (alone or self.local_cond_encoder is not None):
            cond = torch.cat([cond, global_cond], dim=-1)
        local: Tensor | None = None
        if self.local_cond_encoder is not None and local_cond is not None:
            # The second block of this encoder never reaches the output, so it is not computed.
            local = self.local_cond_encoder[0](local_cond.transpose(1, 2), cond)
        skips: list[Tensor] = []
        for level in self.down_modules:
            x = level[0](x, cond) if alone else level[0](x, cond, *film.pop())
            if local is not None:
                x = x + local
                local = None
            x = level[1](x, cond) if alone else level[1](x, cond, *film.pop())
            skips.append(x)
            x = level[2](x)
        for block in self.mid_modules:
            x = block(x, cond) if alone else block(x, cond, *film.pop())
        for level in self.up_modules:
            if alone:
                x = level[0](join(x, skips.pop()), cond)
            else:
                x = level[0](x, cond, *film.pop(), skips.pop())
            x = level[1](x, cond) if alone else level[1](x, cond, *film.pop())
            x = level[2](x)
        x = self.final_conv(x)
        if ahead:
            pack_ahead.join(sample)
        return x.transpose(1, 2)

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable(self, "diffusion_step_encoder", self._has_another_encoder())

    @torch.jit.unused
    def _has_another_encoder(self) -> bool:
        encoder = self.diffusion_step_encoder
        return type(encoder) is not nn.Sequential or len(encoder) != 4 or is_changed(encoder)

    def _weight(self, layers: nn.Module) -> Tensor:
        """Return the weight of the second of some layers, or another where that one is wrapped."""
        weight = getattr(getattr(layers, "1", None), "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            return weight
        return next(p for p in self.parameters() if p.is_floating_point())

    @torch.jit.unused
    def _film(
        self, embedding: Tensor, global_cond: Tensor | None
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Return scale and shift of every block, the last block's first, from one GEMM for all.

        The condition comes in its two parts, of which often the embedding alone wants a gradient.

        Nothing, so that each block computes its own, where a block or its layer is not an ordinary
        one: replaced, hooked, or sharded.
        """
        found = self._film_layers()
        if found is None:
            return []
        weights, biases, widths = found
        film = torch.ops.dpa.joint_linear(embedding, weights, biases, global_cond, mish=True)
        parts = film.split(widths, dim=1)[::-1]  # each block's shift before its scale
        scales = parts[1::2] if self.film_parts == 2 else [None] * len(parts)
        return list(zip(scales, parts[:: self.film_parts], strict=True))

    def _film_layers(self) -> tuple[list[Tensor], list[Tensor], list[int]] | None:
        """Return weights and biases of the blocks' FiLM, and the widths of its parts, or None."""
        blocks = [block for level in self.down_modules for block in level[:2]]
        blocks += [*self.mid_modules, *(block for level in self.up_modules for block in level[:2])]
        if any(type(b) is not ConditionalResidualBlock1D or is_changed(b) for b in blocks):
            return None
        layers = [_FILM_LAYERS.of(block) for block in blocks]
        if any(layer is None for layer in layers):
            return None
        weights, biases = map(list, zip(*layers, strict=True))
        return weights, biases, [b.out_channels for b in blocks for _ in range(self.film_parts)]

    def _pack_ahead(self, sample: Tensor) -> bool:
        """Pack the weights ahead of their layers in a capture, and say whether that was begun."""
        if torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
            return False
        if (film := self._film_layers()) is None:
            return False
        time = _TIME_LAYERS.of(self) or []
        linear = [*([weight] for weight in time[::2]), film[0]]
        parts = (*self.down_modules, self.mid_modules, *self.up_modules, self.final_conv)
        lowest = len(self.down_modules) - 1
        halvings = [*range(lowest + 1), lowest, *range(lowest, 0, -1), 0]
        pairs = zip(parts, halvings, strict=True)
        layers = [(layer, sample.size(1) >> level) for part, level in pairs for layer in part]
        pack_ahead.begin(linear, layers, sample)
        return True

    def _on_packed_weights(
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        local_cond: Tensor | None,
        global_cond: Tensor | None,
    ) -> Tensor | None:
        """Run the network as one op where no gradient is wanted and it serves, else None."""
        if torch.compiler.is_compiling():
            return None
        if sample.dtype == torch.float32 and not torch.is_autocast_enabled("cuda"):
            return None
        if local_cond is not None or type(sample) is not Tensor or torch.jit.is_tracing():
            return None
        dims = self._config[6:]
        if self.local_cond_dim or len(dims) > _MAX_LEVELS or any(dim % 8 != 0 for dim in dims):
            return None
        half = sample.dtype if sample.dtype in HALVES else torch.get_autocast_dtype("cuda")
        steps = self._steps(sample, timestep)
        return inference.forward(
            self, self._as_made, self._config, sample, steps, global_cond, half
        )

    def _as_made(self) -> nn.Module:
        """Return what the constructor made, on the meta device: shapes and settings, no memory."""
        input_dim, kernel_size, n_groups, embed_dim, cond_dim, scale, *dims = self._config
        with torch.device("meta"):
            shape = kernel_size, n_groups, bool(scale)
            return ConditionalUnet1D(input_dim, None, cond_dim or None, embed_dim, dims, *shape)

    def embed(self, sample: Tensor, timestep: Tensor | float | int, fast: bool = False) -> Tensor:
        """Return the timestep's embedding, (B, diffusion_step_embed_dim)."""
        steps = self._steps(sample, timestep)
        encoder = self.diffusion_step_encoder
        embedding: Tensor | None = None
        if not torch.jit.is_scripting():
            if self._has_another_encoder():
                with InputsAsWeights():  # the sinusoid is float32, whatever the weights are
                    embedding = encoder(steps)
            elif fast:
                embedding = self._embed_by_joint_linear(steps)
        if embedding is None:
            if torch.jit.is_scripting():
                dtype = encoder[1].weight.dtype
            else:
                dtype = self._weight(encoder).dtype
            sinusoid = encoder[0](steps).to(dtype)
            embedding = encoder[3](encoder[2](encoder[1](sinusoid)))
        return embedding.expand(sample.shape[0], -1)

    def _embed_by_joint_linear(self, steps: Tensor) -> Tensor | None:
        """Run the encoder's layers as FiLM's op, or nothing where one is changed.

        They read float32 weights where they lie, and want no workspace of a library.
        """
        parameters = _TIME_LAYERS.of(self)
        if parameters is None:
            return None
        first, first_bias, second, second_bias = parameters
        lower = first.dtype == torch.float32 and torch.is_autocast_enabled(steps.device.type)
        dtype = torch.get_autocast_dtype(steps.device.type) if lower else first.dtype
        dim = self.diffusion_step_encoder[0].dim
        if steps.dtype != torch.int64:  # float32 always, as its forward
            steps = steps.to(torch.float32)
        sinusoid = torch.ops.dpa.sinusoidal_embedding(steps, dim, dtype)
        hidden = torch.ops.dpa.joint_linear(sinusoid, [first], [first_bias])
        return torch.ops.dpa.joint_linear(hidden, [second], [second_bias], mish=True)

    def _steps(self, sample: Tensor, timestep: Tensor | float | int) -> Tensor:
        """Return the timestep as a tensor on the sample's device, (1,) or (B,)."""
        batch = sample.shape[0]
        if isinstance(timestep, Tensor):
            steps = timestep.to(sample.device)
        else:
            steps = torch.full([1], float(timestep), dtype=torch.float32, device=sample.device)
        if steps.dim() == 0:
            steps = steps.reshape(1)
        if not torch.jit.is_scripting() and steps.dim() == 2 and self._has_another_encoder():
            return steps  # one for each action, if it takes them
        if steps.dim() != 1 or (steps.shape[0] != 1 and steps.shape[0] != batch):
            rule = f"a number or a tensor of shape (), (1,) or ({batch},)"
            _refuse("timestep", rule, f"shape {list(steps.shape)}")
        return steps

    def _check(self, sample: Tensor, local_cond: Tensor | None, global_cond: Tensor | None) -> None:
        if sample.dim() != 3 or sample.shape[2] != self.input_dim:
            rule = f"(B, T, {self.input_dim}), the last being input_dim"
            _refuse("sample", rule, str(list(sample.shape)))
        batch, horizon = sample.shape[0], sample.shape[1]
        if horizon < 1 or horizon % self.horizon_multiple != 0:
            rule = f"a positive multiple of {self.horizon_multiple} (2 ** (levels - 1))"
            _refuse("horizon", rule, str(horizon))
        if global_cond is not None:
            _check_cond("global_cond", global_cond, [batch, self.global_cond_dim])
        elif self.global_cond_dim != 0:
            _refuse("global_cond", f"given, of shape ({batch}, {self.global_cond_dim})", "None")
        if local_cond is not None:
            _check_cond("local_cond", local_cond, [batch, horizon, self.local_cond_dim])


def _check_sizes(
    input_dim: int, conds: tuple[int | None, int | None], embed_dim: int, dims: list[int]
) -> None:
    me, even = "ConditionalUnet1D:", embed_dim >= 4 and embed_dim % 2 == 0
    require(even, f"{me} diffusion_step_embed_dim", "be even and at least 4", embed_dim)
    require(dims, f"{me} down_dims", "name at least one level", "none")
    got = f"{input_dim} and {dims}"
    require(min(input_dim, *dims) > 0, f"{me} input_dim and down_dims", "be positive", got)
    widths, got = f"{me} local_cond_dim and global_cond_dim", f"{conds[0]} and {conds[1]}"
    require(all((width or 0) >= 0 for width in conds), widths, "be widths or None", got)


def _check_cond(name: str, cond: Tensor, shape: list[int]) -> None:
    if shape[-1] == 0:
        _refuse(name, f"None where {name}_dim is None", str(list(cond.shape)))
    elif list(cond.shape) != shape:
        _refuse(name, f"({', '.join([str(size) for size in shape])})", str(list(cond.shape)))


def _refuse(argument: str, rule: str, got: str) -> None:
    raise ValueError(f"ConditionalUnet1D: {argument} must be {rule}, got {got}")
