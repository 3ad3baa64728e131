"""Training on two GPUs against one; run by ``dpa bench --train`` through torchrun.

Whole steps are captured, on one GPU and on two.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from dpa.bench.networks import NET_80M
from dpa.bench.timing import device_us
from dpa.bench.train import DPA, build
from dpa.training import GraphedStep
from dpa.training.distributed import Ranks, ranks

_BATCHES = (256, 1024, 4096)  # of each GPU
ALONE, DDP, SHARDED = "alone", "DDP", "ShardedOptimizer"


def run(count: int = 2) -> list[dict[str, Any]]:
    """Samples a second on one GPU and on ``count``, for each of the batches a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={count}", "-m", __name__, str(file)]
        subprocess.run(launcher, check=True)
        return json.loads(file.read_text())


def _step_us(team: Ranks, how: str, batch_size: int) -> float:
    """Microseconds of a training step with fused AdamW; the slowest process counts."""
    unet = build(NET_80M, DPA, team.device)
    model = team.wrap(unet) if how == DDP else unet
    optimizers = team if how == SHARDED else Ranks(0, 1, team.device)  # a whole one in each process
    optimizer = optimizers.optimizer(
        unet.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, capturable=True
    )
    batch = NET_80M.batch(batch_size, team.device)

    def step(actions: Tensor, timestep: Tensor, cond: Tensor, noise: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(team.device.type, torch.bfloat16):
            predicted = model(actions, timestep, None, cond)
        loss = F.mse_loss(predicted.float(), noise)
        loss.backward()
        optimizer.step()
        return loss

    run = GraphedStep(step, warmup=11)
    slowest = torch.tensor(device_us(lambda: run(*batch), 10, inner=10), device=team.device)
    if team.count > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def main() -> None:
    """Measure in every process; the first writes the rows to the file named by the argument."""
    with ranks(captured=True) as team:
        rows = []
        one = Ranks(0, 1, team.device)
        for batch in _BATCHES:
            alone = _step_us(one, ALONE, batch) if team.first else 0.0
            dist.barrier()
            found = {ALONE: (1, alone)} | {
                how: (team.count, _step_us(team, how, batch)) for how in (DDP, SHARDED)
            }
            for how, (count, us) in found.items():
                row = {"network": NET_80M.name, "how": how, "GPUs": count, "batch a GPU": batch}
                row |= {"step us": us, "samples a second": count * batch / us * 1e6 if us else 0.0}
                rows.append(row)
        if team.first:
            Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
