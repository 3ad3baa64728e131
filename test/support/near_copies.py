"""Fakes of published networks of the family that are on no package index.

Each has the modules, names and mathematics of its original, checked against the original's own code
on 2026-11-23 (ManiSkill's on 2026-11-27), with equal outputs and gradients with one state dict,
strictly loaded, at these commits:

    DP3, Simple DP3              YanjieZe/3D-Diffusion-Policy 47385d9
    FlowPolicy                   zql-kk/FlowPolicy ff3b3fe
    Consistency Policy           Aaditya-Prasad/consistency-policy eed0c46
    Streaming Diffusion Policy   Streaming-Diffusion-Policy/streaming_diffusion_policy 922271e
    DPPO                         irom-princeton/dppo cc7234a
    CleanDiffuser                CleanDiffuserTeam/CleanDiffuser 05f17fc
    Diffuser                     jannerm/diffuser 7ea4228
    ManiSkill                    haosulab/ManiSkill f565bc1, b75e188
"""

import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F


class Sines(nn.Module):
    """Sines and cosines at frequencies from 1 to 1e-4."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        half = self.dim // 2
        rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10000) / (half - 1)))
        angles = x[:, None] * rates[None, :]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class CosinesFirst(nn.Module):
    """CleanDiffuser's: the cosines come first, and no frequency is 1e-4."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        half = self.dim // 2
        rates = 1e-4 ** (torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angles = torch.outer(x, rates.to(x.dtype))
        return torch.cat([angles.cos(), angles.sin()], dim=1)


class Groups(nn.Module):
    """CleanDiffuser's norm: as nn.GroupNorm, of at most 8 groups of at least 4 channels."""

    def __init__(self, dim):
        super().__init__()
        self.num_groups, self.eps = min(8, dim // 4), 1e-5
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


Groups.__name__ = "GroupNorm1d"  # as the original names it


class Wrapped(nn.Module):
    """Holds a layer under some name, as the originals hold their convolutions."""

    def __init__(self, name, layer):
        super().__init__()
        self.name = name
        self.add_module(name, layer)

    def forward(self, x):
        return getattr(self, self.name)(x)


def conv_block(dim_in, dim_out, kernel, groups=8, act=nn.Mish, eps=1e-5, reshaped=False):
    conv = nn.Conv1d(dim_in, dim_out, kernel, padding=kernel // 2)
    norm = nn.GroupNorm(groups, dim_out, eps=eps)
    layers = [conv, norm, act()]
    if reshaped:  # as einops' layers around the norm
        layers = [conv, nn.Unflatten(1, (dim_out, 1)), norm, nn.Flatten(1, 2), act()]
    return Wrapped("block", nn.Sequential(*layers))


def halving(dim):
    return Wrapped("conv", nn.Conv1d(dim, dim, 3, 2, 1))


def doubling(dim):
    return Wrapped("conv", nn.ConvTranspose1d(dim, dim, 4, 2, 1))


def mlp(*layers):
    return nn.Sequential(*[nn.Linear(*x) if isinstance(x, tuple) else x() for x in layers])


def time_mlp(dim):
    return nn.Sequential(Sines(dim), *mlp((dim, 4 * dim), nn.Mish, (4 * dim, dim)))


class CrossAttention(nn.Module):
    """DP3's: each action asks the observations."""

    def __init__(self, dim_in, cond, dim_out):
        super().__init__()
        self.query_proj = nn.Linear(dim_in, dim_out)
        self.key_proj = nn.Linear(cond, dim_out)
        self.value_proj = nn.Linear(cond, dim_out)

    def forward(self, x, cond):
        scores = self.query_proj(x) @ self.key_proj(cond).transpose(-2, -1)
        return scores.softmax(dim=-1) @ self.value_proj(cond)


class Block(nn.Module):
    """A residual block; ``film`` says what its FiLM is made of."""

    def __init__(self, dim_in, dim_out, cond, kernel, film="film", act=nn.Mish, drop=0.0, **conv):
        super().__init__()
        first = conv_block(dim_in, dim_out, kernel, act=act, **conv)
        second = conv_block(dim_out, dim_out, kernel, act=act, **conv)
        self.blocks = nn.ModuleList([first, second])
        self.film, self.dim_out = film, dim_out
        rows = dim_out if film in ("add", "cross_attention_add") else 2 * dim_out
        if film in ("film", "add"):
            self.cond_encoder = mlp(act, (cond, rows))
        elif film == "mlp_film":
            self.cond_encoder = mlp(nn.Mish, (cond, cond), nn.Mish, (cond, rows))
        elif film == "large":
            self.cond_encoder = mlp((cond, rows), act, (rows, rows), act, (rows, rows))
        else:
            self.cond_encoder = CrossAttention(dim_in, cond, rows)
        self.residual_conv = nn.Identity() if dim_in == dim_out else nn.Conv1d(dim_in, dim_out, 1)
        if drop is not None:
            self.scale_dropout, self.bias_dropout = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x, cond=None):
        out = self.blocks[0](x)
        if hasattr(self, "scale_dropout"):
            out = self.scale_dropout(out)
        if cond is not None:
            if self.film.startswith("cross"):
                rows = self.cond_encoder(x.transpose(1, 2), cond).transpose(1, 2)
            else:
                rows = self.cond_encoder(cond)[..., None]
            if rows.shape[1] == self.dim_out:
                out = out + rows
            else:
                scale, shift = rows.chunk(2, dim=1)
                out = scale * out + shift
        out = self.blocks[1](out)
        if hasattr(self, "bias_dropout"):
            out = self.bias_dropout(out)
        return out + self.residual_conv(x)


class Unet(nn.Module):
    """The body that most of them share, under the original's names."""

    def __init__(self, input_dim, cond, dims, kernel, per_level=2, local_cond_dim=None, **block):
        super().__init__()

        def residual(dim_in, dim_out):
            first = Block(dim_in, dim_out, cond, kernel, **block)
            more = [Block(dim_out, dim_out, cond, kernel, **block) for _ in range(1, per_level)]
            return [first, *more]

        pairs = list(itertools.pairwise([input_dim, *dims]))
        if local_cond_dim is not None:
            self.local_cond_encoder = nn.ModuleList(
                [Block(local_cond_dim, dims[0], cond, kernel, **block) for _ in range(2)]
            )
        self.mid_modules = nn.ModuleList(residual(dims[-1], dims[-1]))
        self.down_modules, self.up_modules = nn.ModuleList(), nn.ModuleList()
        for i, (dim_in, dim_out) in enumerate(pairs):
            last = nn.Identity() if i == len(pairs) - 1 else halving(dim_out)
            self.down_modules.append(nn.ModuleList([*residual(dim_in, dim_out), last]))
        for dim_in, dim_out in reversed(pairs[1:]):
            blocks = residual(2 * dim_out, dim_in)
            self.up_modules.append(nn.ModuleList([*blocks, doubling(dim_in)]))
        del block["film"], block["drop"]
        self.final_conv = nn.Sequential(
            conv_block(dims[0], dims[0], kernel, **block), nn.Conv1d(dims[0], input_dim, 1)
        )

    def body(self, sample, cond, local_cond=None):
        x, skips = sample.transpose(1, 2), []
        for i, (first, *more, down) in enumerate(self.down_modules):
            x = first(x, cond)
            if i == 0 and local_cond is not None:
                x = x + self.local_cond_encoder[0](local_cond.transpose(1, 2), cond)
            for block in more:
                x = block(x, cond)
            skips.append(x)
            x = down(x)
        for block in self.mid_modules:
            x = block(x, cond)
        for *blocks, up in self.up_modules:
            x = torch.cat([x, skips.pop()], dim=1)
            for block in blocks:
                x = block(x, cond)
            x = up(x)
        return self.final_conv(x).transpose(1, 2)


def steps_of(timestep, sample):
    timestep = torch.as_tensor(timestep, device=sample.device)
    return timestep.reshape(-1).expand(len(sample))


class DP3(Unet):
    """DP3's network, and Simple DP3's with ``per_level=1``; FlowPolicy's has ``var_est``."""

    def __init__(
        self,
        input_dim,
        global_cond_dim,
        step=16,
        dims=(16, 32),
        kernel=5,
        film="film",
        per_level=2,
        var_est=False,
        local_cond_dim=None,
    ):
        cond = step + global_cond_dim
        options = {"local_cond_dim": local_cond_dim, "film": film, "drop": None}
        super().__init__(input_dim, cond, dims, kernel, per_level, **options)
        self.diffusion_step_encoder = time_mlp(step)
        if var_est:
            hidden = [nn.SiLU, (512, 512)] * 2
            self.var_est = mlp((input_dim, 512), *hidden, nn.SiLU, (512, 1))

    def forward(self, sample, timestep, local_cond=None, global_cond=None, **kwargs):
        embedding = self.diffusion_step_encoder(steps_of(timestep, sample))
        if global_cond.dim() == 3:  # which the original meant to do for cross-attention
            embedding = embedding[:, None].expand(-1, global_cond.shape[1], -1)
        cond = torch.cat([embedding, global_cond], dim=-1)
        return self.body(sample, cond, local_cond)


class ManiSkill(DP3):
    """ManiSkill's network, which has no local conditioning."""

    def forward(self, sample, timestep, global_cond=None):
        return super().forward(sample, timestep, None, global_cond)


class ConsistencyPolicy(Unet):
    """The student of Consistency Policy, which takes the timestep to stop at."""

    def __init__(self, input_dim, global_cond_dim, step=16, dims=(16, 32), kernel=5, drop=0.0):
        cond = 2 * step + global_cond_dim
        super().__init__(input_dim, cond, dims, kernel, film="film", drop=drop)
        self.diffusion_step_encoder = time_mlp(step)

    def forward(self, sample, timestep, stoptime, local_cond=None, global_cond=None, **kwargs):
        times = [self.diffusion_step_encoder(time) for time in (timestep, stoptime)]
        return self.body(sample, torch.cat([*times, global_cond], dim=-1))


class StreamingPolicy(Unet):
    """The network of Streaming Diffusion Policy, with a timestep for each action."""

    def __init__(self, input_dim, global_cond_dim, step=16, dims=(16, 32), kernel=5, horizon=8):
        cond = step + global_cond_dim
        super().__init__(input_dim, cond, dims, kernel, film="film", drop=None)
        self.diffusion_step_encoder = nn.Sequential(
            nn.Flatten(0, 1),
            Sines(step),
            Split(horizon),
            *mlp((horizon * step, 4 * step), nn.Mish, (4 * step, step)),
        )

    def forward(self, sample, timestep, local_cond=None, global_cond=None, **kwargs):
        cond = self.diffusion_step_encoder(timestep)
        if global_cond is not None:
            cond = torch.cat([cond, global_cond], -1)
        return self.body(sample, cond)


class Split(nn.Module):
    """(B T, D) to (B, T D)."""

    def __init__(self, horizon):
        super().__init__()
        self.horizon = horizon

    def forward(self, x):
        return x.reshape(-1, self.horizon * x.shape[1])


class DPPO(Unet):
    """DPPO's network: larger FiLM encoders, conditions in a dictionary."""

    def __init__(
        self,
        action_dim,
        cond_dim,
        step=16,
        dims=(16, 32),
        kernel=5,
        film="large",
        cond_mlp_dims=None,
        act=nn.Mish,
        eps=1e-5,
    ):
        given = cond_mlp_dims[-1] if cond_mlp_dims else cond_dim
        options = {"film": film, "drop": None, "act": act, "eps": eps, "reshaped": True}
        super().__init__(action_dim, step + given, dims, kernel, **options)
        self.time_mlp = time_mlp(step)
        if cond_mlp_dims:
            layers = mlp((cond_dim, cond_mlp_dims[0]), (cond_mlp_dims[0], given))
            self.cond_mlp = Wrapped("layers", layers)

    def forward(self, x, time, cond, **kwargs):
        state = cond["state"].flatten(1)
        if hasattr(self, "cond_mlp"):
            state = self.cond_mlp(state)
        return self.body(x, torch.cat([self.time_mlp(steps_of(time, x)), state], dim=-1))


class ChiBlock(nn.Module):
    """CleanDiffuser's residual block."""

    def __init__(self, dim_in, dim_out, cond, kernel, scale):
        super().__init__()

        def convolve(dim):
            conv = nn.Conv1d(dim, dim_out, kernel, padding=kernel // 2)
            return nn.Sequential(conv, Groups(dim_out), nn.Mish())

        self.conv1, self.conv2 = convolve(dim_in), convolve(dim_out)
        self.cond_encoder = mlp(nn.Mish, (cond, 2 * dim_out if scale else dim_out))
        self.residual_conv = nn.Identity() if dim_in == dim_out else nn.Conv1d(dim_in, dim_out, 1)
        self.scale = scale

    def forward(self, x, cond):
        out, rows = self.conv1(x), self.cond_encoder(cond)[..., None]
        if self.scale:
            scale, shift = rows.chunk(2, dim=1)
            out = scale * out + shift
        else:
            out = out + rows
        return self.conv2(out) + self.residual_conv(x)


class ChiUnet(nn.Module):
    """CleanDiffuser's ChiUNet1d with observations as a global condition."""

    def __init__(self, act_dim, obs_dim, obs_steps, dims=(32, 64), emb=16, kernel=5, scale=True):
        super().__init__()
        self.map_noise = CosinesFirst(emb)
        self.map_emb = mlp((emb, 4 * emb), nn.Mish, (4 * emb, emb))
        self.global_cond_encoder = nn.Linear(obs_steps * obs_dim, emb)

        def blocks(dim_in, dim_out):
            sizes = ((dim_in, dim_out), (dim_out, dim_out))
            return [ChiBlock(a, b, 2 * emb, kernel, scale) for a, b in sizes]

        pairs = list(itertools.pairwise([act_dim, *dims]))
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for i, (dim_in, dim_out) in enumerate(pairs):
            last = nn.Identity() if i == len(pairs) - 1 else halving(dim_out)
            self.downs.append(nn.ModuleList([*blocks(dim_in, dim_out), last]))
        self.mids = nn.ModuleList(blocks(dims[-1], dims[-1]))
        for dim_in, dim_out in reversed(pairs[1:]):
            self.ups.append(nn.ModuleList([*blocks(2 * dim_out, dim_in), doubling(dim_in)]))
        conv = nn.Conv1d(dims[0], dims[0], kernel, padding=kernel // 2)
        self.final_conv = nn.Sequential(
            conv, Groups(dims[0]), nn.Mish(), nn.Conv1d(dims[0], act_dim, 1)
        )

    def forward(self, x, noise, condition=None):
        assert x.shape[1] & (x.shape[1] - 1) == 0, "horizons are powers of two"
        given = self.global_cond_encoder(condition.flatten(1))
        cond = torch.cat([self.map_emb(self.map_noise(noise)), given], dim=-1)
        x, skips = x.transpose(1, 2), []
        for first, second, down in self.downs:
            x = second(first(x, cond), cond)
            skips.append(x)
            x = down(x)
        for block in self.mids:
            x = block(x, cond)
        for first, second, up in self.ups:
            x = up(second(first(torch.cat([x, skips.pop()], dim=1), cond), cond))
        return self.final_conv(x).transpose(1, 2)


class ChannelNorm(nn.Module):
    """Normalises the channels of each place."""

    def __init__(self, dim):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(1, dim, 1)), nn.Parameter(torch.zeros(1, dim, 1))

    def forward(self, x):
        variance, mean = torch.var_mean(x, dim=1, unbiased=False, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * self.g + self.b


class LinearAttention(nn.Module):
    """Attention of 4 heads of 32 channels, whose softmax is over the keys."""

    def __init__(self, dim):
        super().__init__()
        self.to_qkv = nn.Conv1d(dim, 3 * 128, 1, bias=False)
        self.to_out = nn.Conv1d(128, dim, 1)

    def forward(self, x):
        query, key, value = (y.unflatten(1, (4, 32)) for y in self.to_qkv(x).chunk(3, dim=1))
        context = key.softmax(dim=-1) @ value.transpose(-1, -2)
        out = context.transpose(-1, -2) @ (query * 32**-0.5)
        return self.to_out(out.flatten(1, 2))


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x) + x


class Normalised(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn, self.norm = fn, ChannelNorm(dim)

    def forward(self, x):
        return self.fn(self.norm(x))


class TemporalBlock(nn.Module):
    """Diffuser's residual block."""

    def __init__(self, dim_in, dim_out, time):
        super().__init__()
        sizes = ((dim_in, dim_out), (dim_out, dim_out))
        self.blocks = nn.ModuleList([conv_block(a, b, 5, reshaped=True) for a, b in sizes])
        self.time_mlp = nn.Sequential(*mlp(nn.Mish, (time, dim_out)), nn.Unflatten(1, (dim_out, 1)))
        self.residual_conv = nn.Identity() if dim_in == dim_out else nn.Conv1d(dim_in, dim_out, 1)

    def forward(self, x, t):
        return self.blocks[1](self.blocks[0](x) + self.time_mlp(t)) + self.residual_conv(x)


class TemporalUnet(nn.Module):
    """Diffuser's network over states and actions, with or without linear attention."""

    def __init__(self, transition_dim, dim=16, mults=(1, 2), attention=False):
        super().__init__()
        dims = [transition_dim, *(dim * m for m in mults)]
        pairs = list(itertools.pairwise(dims))
        self.time_mlp = time_mlp(dim)

        def attend(width):
            inner = Normalised(width, LinearAttention(width)) if attention else None
            return Residual(inner) if attention else nn.Identity()

        def blocks(dim_in, dim_out):
            both = TemporalBlock(dim_in, dim_out, dim), TemporalBlock(dim_out, dim_out, dim)
            return [*both, attend(dim_out)]

        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for i, (dim_in, dim_out) in enumerate(pairs):
            last = nn.Identity() if i == len(pairs) - 1 else halving(dim_out)
            self.downs.append(nn.ModuleList([*blocks(dim_in, dim_out), last]))
        self.mid_block1, self.mid_block2, self.mid_attn = blocks(dims[-1], dims[-1])
        for dim_in, dim_out in reversed(pairs[1:]):
            self.ups.append(nn.ModuleList([*blocks(2 * dim_out, dim_in), doubling(dim_in)]))
        self.final_conv = nn.Sequential(
            conv_block(dim, dim, 5, reshaped=True), nn.Conv1d(dim, transition_dim, 1)
        )

    def forward(self, x, cond, time):
        t, x, skips = self.time_mlp(time), x.transpose(1, 2), []
        for first, second, attend, down in self.downs:
            x = attend(second(first(x, t), t))
            skips.append(x)
            x = down(x)
        x = self.mid_block2(self.mid_attn(self.mid_block1(x, t)), t)
        for first, second, attend, up in self.ups:
            x = torch.cat([x, skips.pop()], dim=1)
            x = up(attend(second(first(x, t), t)))
        return self.final_conv(x).transpose(1, 2)
