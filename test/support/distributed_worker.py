"""Run under torchrun by test_distributed.py: what several processes compute, against one.

Then a script, as torchrun would run it.
"""

import runpy
import sys
from pathlib import Path

import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing import assert_close

import dpa
from dpa.training import EMA
from dpa.training.distributed import Ranks, ranks, sample_sharded

_BATCH, _STEPS = 12, 3
# Means over the batch, taken in another order: training in float64, and averages and sampling,
# which are float32.
_CLOSE, _ROUNDED = {"rtol": 1e-8, "atol": 1e-9}, {"rtol": 1e-4, "atol": 1e-5}


def _unet(team, dtype=torch.float64) -> dpa.nn.ConditionalUnet1D:
    torch.manual_seed(3)
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(16, 32)
    )
    return unet.to(team.device, dtype)


def _train(unet, model, team):
    """Gradients of the last of a few steps on this process's part, the weights, the averages.

    Each step evaluates the weights, then the averages, without a backward.
    """
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    ema, random = EMA(unet), torch.Generator().manual_seed(1)
    part = team.shard(_BATCH)
    for _ in range(_STEPS):
        sample, target = torch.randn(2, _BATCH, 8, 2, generator=random).to(team.device).double()
        timestep = torch.randint(50, (_BATCH,), generator=random).to(team.device)
        cond = torch.randn(_BATCH, 3, generator=random).to(team.device).double()
        optimizer.zero_grad(set_to_none=True)
        out = model(sample[part], timestep[part], None, cond[part])
        F.mse_loss(out, target[part]).backward()
        optimizer.step()
        ema.update()
        with torch.no_grad():
            unet(sample, timestep, None, cond)
            with ema.applied():
                evaluated = unet(sample, timestep, None, cond)
    whole = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x  # noqa: E731
    named = dict(unet.named_parameters())
    grads = {name: whole(p.grad).detach().clone() for name, p in named.items()}
    with ema.applied():
        averages = {name: whole(p).detach().clone() for name, p in unet.named_parameters()}
    averages["evaluated"] = evaluated
    kept = ema.state_dict()  # of FSDP2 the shards, as such
    averages |= {f"kept {i}": whole(average).clone() for i, average in enumerate(kept["averages"])}
    ema.load_state_dict(kept)
    weights = {name: whole(p).detach().clone() for name, p in unet.named_parameters()}
    return grads, weights, averages


def _check_training(team):
    alone = Ranks(0, 1, team.device)
    unet = _unet(team)
    expected = _train(unet, unet, alone)
    unet = _unet(team)
    _check_same(_train(unet, team.wrap(unet), team), expected)
    unet = _unet(team)
    blocks = [m for m in unet.modules() if isinstance(m, dpa.nn.ConditionalResidualBlock1D)]
    for module in (*blocks, unet):
        fully_shard(module)
    _check_same(_train(unet, unet, team), expected)


def _check_same(found, expected):
    for got, wanted in zip(found[:2], expected[:2], strict=True):  # gradients, weights
        assert {value.dtype for value in got.values()} == {torch.float64}
        assert_close(got, wanted, **_CLOSE)
    assert_close(found[2], expected[2], **_ROUNDED)


def _check_sampling(team):
    unet = _unet(team, torch.float32)
    alone = Ranks(0, 1, team.device)
    cond = torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).to(team.device)
    for scheduler, steps in ((DDPMScheduler, 4), (DDIMScheduler, 3)):
        live = scheduler(num_train_timesteps=20, beta_schedule="squaredcos_cap_v2")
        sampler = dpa.DiffusionSampler(unet, live, steps, horizon=8)
        seeds = lambda n=5: [torch.Generator().manual_seed(i) for i in range(n)]  # noqa: E731
        for n in (4, 5):  # parts of one size, and of two
            got = sample_sharded(sampler, cond[:n], seeds(n), team)
            expected = sample_sharded(sampler, cond[:n], seeds(n), alone)
            assert_close(got, expected, **_ROUNDED)
        noise = torch.randn(5, 8, 2, generator=torch.Generator().manual_seed(4)).to(team.device)
        got = sample_sharded(sampler, cond, seeds(), team, noise=noise)
        assert_close(got, sampler(cond, noise=noise, generator=seeds()), **_ROUNDED)


with ranks() as team:
    assert team.count > 1
    _check_training(team)
    _check_sampling(team)
    Path(sys.argv[1], f"rank{team.rank}").write_text("right")
    # A second group of Gloo's in a process finds the addresses of the first, and may hang.
    once = team.device.type == "cpu"
    if once:
        runpy.run_path(sys.argv[2], run_name="__main__")
if not once:
    runpy.run_path(sys.argv[2], run_name="__main__")
