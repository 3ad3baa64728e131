"""Training and sampling on several GPUs against one; run by ``dpa bench --train`` by torchrun.

Each step is measured on one GPU and on all, with the exchange of gradients and weights beside the
backward, after it, and left out.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import dpa
from dpa.bench.image_policies import Case
from dpa.bench.networks import HORIZON, NET_80M, Network
from dpa.bench.timing import device_us
from dpa.bench.train import DPA, build
from dpa.library.files import replacing
from dpa.training import GraphedStep
from dpa.training.distributed import Ranks, ShardedOptimizer, ranks, sample_sharded

Row = dict[str, Any]
ALONE, DDP, SHARDED = "alone", "DDP", "ShardedOptimizer"
BESIDE, AFTER, NONE = "beside the backward", "after the backward", "none"
_SEEN = ("observation.images.0", "observation.state", "action", "action_is_pad")
_ONE_BUCKET = 1 << 20  # MiB: DDP sends nothing before the last gradient is there


class _Loss(nn.Module):
    """A model's loss, under autocast."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Tensor) -> Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            return self.loss(self.model, *batch)


def _unet_loss(
    unet: nn.Module, actions: Tensor, timestep: Tensor, cond: Tensor, noise: Tensor
) -> Tensor:
    return F.mse_loss(unet(actions, timestep, None, cond).float(), noise)


def _policy_loss(policy: nn.Module, *seen: Tensor) -> Tensor:
    return policy(dict(zip(_SEEN, seen, strict=True)))[0]


@dataclass(frozen=True)
class Unet:
    """A network, and the samples a GPU that it is trained on."""

    network: Network
    batch: int
    captured: bool = True

    def make(self, team: Ranks) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Its loss, the same weights in every process, and this process's batch."""
        model = _Loss(build(self.network, DPA, team.device), _unet_loss)
        torch.manual_seed(team.rank)
        return model, self.network.batch(self.batch, team.device)


@dataclass(frozen=True)
class Policy:
    """LeRobot's Diffusion Policy with one camera, 96 x 96, after ``dpa.accelerate``."""

    batch: int
    captured: bool = True
    down_dims: tuple[int, ...] = (512, 1024, 2048)

    def make(self, team: Ranks) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Its loss, the same weights in every process, and this process's batch."""
        case = Case("", 1, (96, 96), self.down_dims, HORIZON, self.batch)
        policy = dpa.accelerate(case.build(team.device).train())
        torch.manual_seed(team.rank)
        seen = case.batch(self.batch, team.device, 2) | case.actions(self.batch, team.device)
        return _Loss(policy, _policy_loss), tuple(seen[name] for name in _SEEN)


Subject = Unet | Policy


def _part(parameters: list[nn.Parameter], count: int) -> list[nn.Parameter]:
    """As many parameters as a process of ``count`` updates, a whole number of tensors."""
    left, chosen = sum(p.numel() for p in parameters) // count, []
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        if parameter.numel() <= left:
            chosen.append(parameter)
            left -= parameter.numel()
    return chosen


def _step_us(team: Ranks, subject: Subject, how: str, exchange: str = BESIDE) -> float:
    """Microseconds of a training step with fused AdamW; the slowest process counts."""
    loss_of, batch = subject.make(team)
    parameters = list(loss_of.parameters())
    exchanged = how != ALONE and exchange != NONE
    model, held = loss_of, contextlib.nullcontext
    if exchanged and how == DDP:
        bucket = {"bucket_cap_mb": _ONE_BUCKET} if exchange == AFTER else {}
        model = replace(team, captured=subject.captured).wrap(loss_of, **bucket)
    updated = _part(parameters, team.count) if how == SHARDED and not exchanged else parameters
    optimizers = team if exchanged and how == SHARDED else Ranks(0, 1, team.device)
    capturable = team.device.type == "cuda"
    optimizer = optimizers.optimizer(
        updated, torch.optim.AdamW, lr=1e-4, fused=True, capturable=capturable
    )
    if exchange == AFTER and isinstance(optimizer, ShardedOptimizer):
        held = optimizer.no_sync

    def step(*batch: Tensor) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(*batch)
        with held():
            loss.backward()
        optimizer.step()
        return loss.detach()

    run = GraphedStep(step, warmup=11) if subject.captured else step
    us = device_us(lambda: run(*batch), 10, inner=10)
    loss = run(*batch)
    if not loss.isfinite():
        raise RuntimeError(f"the loss of {subject} is {loss.item()}")
    if exchanged:
        _check_equal(parameters)
    return us if how == ALONE else _slowest(us, team)


def _slowest(us: float, team: Ranks) -> float:
    most = torch.tensor(us, device=team.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def _check_equal(parameters: list[nn.Parameter]) -> None:
    """Raise unless the weights are equal in all processes, whose batches differ."""
    total = torch.stack([p.detach().double().sum() for p in parameters])
    least, most = total.clone(), total.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if not torch.equal(least, most):
        raise RuntimeError(f"weights differ between processes by {(most - least).max().item()}")


def train(subject: Subject, team: Ranks) -> list[Row]:
    """Steps on one GPU, and on all of them by each way to exchange gradients."""

    def row(how: str, count: int, us: float, **others: float) -> Row:
        rate = count * subject.batch / us * 1e6 if us else 0.0
        about = {"how": how, "GPUs": count, "batch a GPU": subject.batch, "step us": us}
        return about | {"samples a second": rate} | others

    alone = _step_us(Ranks(0, 1, team.device), subject, ALONE) if team.first else 0.0
    dist.barrier()
    rows = [row(ALONE, 1, alone)]
    for how in (DDP, SHARDED):
        times = {kind: _step_us(team, subject, how, kind) for kind in (BESIDE, AFTER, NONE)}
        others = {f"exchange {kind}, us": times[kind] for kind in (AFTER, NONE)}
        rows.append(row(how, team.count, times[BESIDE], **others))
    return rows


def sample(network: Network, batch: int, team: Ranks) -> list[Row]:
    """Actions of ``batch`` observations, on one GPU and sharded over all of them."""
    from diffusers import DDIMScheduler

    unet = build(network, DPA, team.device)
    live = DDIMScheduler(beta_schedule="squaredcos_cap_v2")
    half = torch.bfloat16 if team.device.type == "cuda" else None
    sampler = dpa.DiffusionSampler(unet, live, 10, half, horizon=HORIZON)
    cond = torch.randn(batch, network.cond_dim, device=team.device)
    dist.broadcast(cond, 0)
    one = Ranks(0, 1, team.device)
    seeded = lambda: [torch.Generator().manual_seed(i) for i in range(batch)]  # noqa: E731
    generators = seeded()
    run = partial(sample_sharded, sampler, cond, generators)
    alone = device_us(lambda: run(one), 10, inner=2) if team.first else 0.0
    dist.barrier()
    sharded = _slowest(device_us(lambda: run(team), 10, inner=2), team)
    expected = sample_sharded(sampler, cond, seeded(), one)
    difference = (sample_sharded(sampler, cond, seeded(), team) - expected).abs().max().item()
    rows = []
    for how, count, us in ((ALONE, 1, alone), ("sample_sharded", team.count, sharded)):
        about = {"how": how, "GPUs": count, "batch a GPU": batch // count, "step us": us}
        rows.append(about | {"samples a second": batch / us * 1e6 if us else 0.0})
    rows[1]["largest difference"] = difference
    return rows


CASES: dict[str, Callable[[Ranks], list[Row]]] = {
    **{f"80 M, {n} a GPU": partial(train, Unet(NET_80M, n)) for n in (256, 1024, 4096)},
    "252 M with images, 32 a GPU": partial(train, Policy(32)),
    "252 M with images, 32 a GPU, called": partial(train, Policy(32, captured=False)),
    "80 M, 4096 samples": partial(sample, NET_80M, 4096),
}


def run(count: int | None = None) -> list[Row]:
    """Rows of every case, of one process and of ``count``, by default one a GPU."""
    count = count or torch.cuda.device_count()
    names = [name for name in CASES if "images" not in name or find_spec("lerobot")]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={count}", "-m", __name__, str(file), *names]
        subprocess.run(launcher, check=True)
        found = json.loads(file.read_text())
    return [{"case": name} | row for name, rows in found.items() for row in rows]


def main(file: Path, names: list[str]) -> None:
    """Measure in every process; the first writes the file after each case.

    What the file has is not measured again.
    """
    found = json.loads(file.read_text()) if file.exists() else {}
    with ranks(captured=True) as team:
        for name in names:
            if name in found:
                continue
            found[name] = CASES[name](team)
            if team.first:
                with replacing(file) as temporary:
                    temporary.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
