"""Run under torchrun by test_distributed.py: training that goes on from its last checkpoint.

Arguments: how the last process dies in its sixth step (killed, raises, or not: lives), folders.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import dpa
from dpa.library.files import replacing
from dpa.training import GraphedStep
from dpa.training.distributed import ranks

_BATCH, _STEPS, _DIES = 12, 8, 5


def _batch(number, team):
    """The batch of a step, and of it this process's part."""
    random = torch.Generator().manual_seed(number)
    draw = lambda *size: torch.randn(_BATCH, *size, generator=random).double()  # noqa: E731
    batch = draw(8, 2), draw(8, 2), torch.randint(50, (_BATCH,), generator=random), draw(3)
    return [x[team.shard(_BATCH)].to(team.device) for x in batch]


def _die(how, folder):
    while torch.load(folder / "last.pt", map_location="cpu")["steps"] < _DIES:
        time.sleep(0.01)  # the first process has not kept the last step yet
    (folder / "died").write_text(str(time.time()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"the disk of rank {os.environ['RANK']} is full")


def main(team, folder, how):
    torch.manual_seed(3)
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(16, 24)
    ).to(team.device, torch.float64)
    options = {"fused": True, "capturable": True} if team.device.type == "cuda" else {}
    optimizer = team.optimizer(unet.parameters(), torch.optim.AdamW, lr=1e-2, **options)
    begin, last = 0, folder / "last.pt"
    if last.exists():
        kept = torch.load(last, map_location=team.device)
        unet.load_state_dict(kept["network"])
        optimizer.load_state_dict(kept["optimizer"])
        begin = kept["steps"]

    def step(sample, target, timestep, cond):
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(unet(sample, timestep, None, cond), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = GraphedStep(step, warmup=2)
    for number in range(begin, _STEPS):
        if how != "lives" and number == _DIES and team.rank == team.count - 1:
            _die(how, folder)
        run(*_batch(number, team))
        state = {"network": unet.state_dict(), "optimizer": optimizer.state_dict()}
        if team.first:
            with replacing(last) as temporary:
                torch.save(state | {"steps": number + 1}, temporary)
    if team.first:
        (folder / "ran").write_text(f"{begin} to {_STEPS} on {team.count}")


with ranks(captured=True) as team:
    for name in sys.argv[2:]:
        main(team, Path(name), sys.argv[1])
