"""Run under torchrun by test_distributed.py: ShardedOptimizer against one process's AdamW."""

import contextlib
import copy
import functools
import gc
import itertools
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.nn import functional as F
from torch.testing import assert_close

import dpa
from dpa.training import EMA, AdamW, GraphedStep
from dpa.training.distributed import Ranks, ranks
from dpa.training.sharded import ShardedOptimizer, exchange, optimizer

_BATCH = 12  # for one to four processes
_CLOSE = {"rtol": 1e-8, "atol": 1e-9}  # of float64: means over the batch, taken in another order


def _unet(device):
    """A network, and besides a scalar, whose gradient is the first to come, and nothing."""
    torch.manual_seed(3)
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(24,)
    )
    unet.scale = torch.nn.Parameter(torch.zeros(()))
    unet.nothing = torch.nn.Parameter(torch.zeros(0, 3))
    return unet.to(device, torch.float64)


def _groups(unet):
    """Weights decay, biases and normalisations do not."""
    matrices = [p for p in unet.parameters() if p.dim() > 1 and p is not unet.nothing]
    others = [p for p in unet.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
        {"params": [unet.nothing], "weight_decay": 0.0},
    ]


class _Run:
    """Training steps of one process, or of all of them with this optimizer."""

    def __init__(self, team, kind=torch.optim.AdamW, steps=0, **options):
        self.team, self.part, self.unet = team, team.shard(_BATCH), _unet(team.device)
        options = {"lr": 1e-2, **options}
        groups = _groups(self.unet)
        if team.count > 1:
            with torch.no_grad():  # the first process's weights count
                for p in self.unet.parameters():
                    p.add_(team.rank)
            self.optimizer = ShardedOptimizer(groups, kind, **options)
        else:
            self.optimizer = kind(groups, **options)
        self.random = torch.Generator().manual_seed(1)
        for _ in range(steps):
            self.step()

    def batch(self):
        draw = lambda *size: torch.randn(*size, generator=self.random).double()  # noqa: E731
        times = torch.randint(50, (_BATCH,), generator=self.random)
        batch = draw(_BATCH, 8, 2), draw(_BATCH, 8, 2), times, draw(_BATCH, 3)
        return [x[self.part].to(self.team.device) for x in batch]

    def backward(self, sample, target, timestep, cond, scaler=None):
        out = self.unet(sample, timestep, None, cond)
        loss = F.mse_loss(out * self.unet.scale.exp() + self.unet.nothing.sum(), target)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    def step(self, backwards=1, wait=True, clip=None):
        self.optimizer.zero_grad(set_to_none=True)
        sharded = self.team.count > 1
        for i in range(backwards):
            last = i + 1 == backwards
            held = sharded and wait and not last
            with self.optimizer.no_sync() if held else contextlib.nullcontext():
                self.backward(*self.batch())
        norm = None
        if clip and sharded:
            norm = self.optimizer.clip_grad_norm_(clip)
        elif clip:
            norm = torch.nn.utils.clip_grad_norm_(self.unet.parameters(), clip)
        self.optimizer.step()
        return norm

    def weights(self):
        return {name: p.detach().clone() for name, p in self.unet.named_parameters()}


def _same(a, b):
    assert_close(a.weights(), b.weights(), **_CLOSE)


def check_steps(team, alone):
    for kind, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),  # its state begins with it
    ):
        started = _Run(alone)
        ours, theirs = _Run(team, kind, 4, **options), _Run(alone, kind, 4, **options)
        _same(ours, theirs)
        with pytest.raises(AssertionError):
            _same(ours, started)
        everyone = ours.optimizer._exchange.all_gather(ours.optimizer._exchange.weights)
        first, *others = everyone.view(team.count, -1)
        assert all(torch.equal(other, first) for other in others)


def check_accumulation(team, alone):
    for wait in (True, False):
        ours, theirs = _Run(team), _Run(alone)
        for backwards in (2, 1, 3):
            for run in (ours, theirs):
                run.step(backwards, wait=wait)
        _same(ours, theirs)
    # A loss that turned out useless: its gradients had been sent, and are dropped.
    ours, theirs = _Run(team, steps=1), _Run(alone, steps=1)
    for run in (ours, theirs):
        run.backward(*run.batch())
        run.step()
    _same(ours, theirs)


def check_clipping(team, alone):
    ours, theirs = _Run(team), _Run(alone)
    for clip in (0.05, 1e3, 0.1):
        assert_close(ours.step(clip=clip), theirs.step(clip=clip), **_CLOSE)
    for wait in (True, False):
        norms = [run.step(backwards=2, wait=wait, clip=0.05) for run in (ours, theirs)]
        assert_close(*norms, **_CLOSE)
    for run in (ours, theirs):  # a norm that is too large to go on with
        run.optimizer.zero_grad(set_to_none=True)
        run.backward(*run.batch())
        if run is ours:
            run.optimizer.clip_grad_norm_(1e-3)
        run.step()
    _same(ours, theirs)


def check_schedule(team, alone):
    runs = _Run(team), _Run(alone)
    for run in runs:
        schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        for _ in range(3):
            run.step()
            schedule.step()
    _same(*runs)


def check_states(team, alone):
    ours, theirs = _Run(team, steps=3), _Run(alone, steps=3)
    kept, expected = ours.optimizer.state_dict(), theirs.optimizer.state_dict()
    assert_close(kept, expected, **_CLOSE)
    ours.step()  # what was kept is not what is written to
    assert_close(kept, expected, **_CLOSE)
    fresh = _Run(alone).optimizer.state_dict()
    for state, steps in ((expected, 0), (kept, 0), (expected, 2), (fresh, 2)):
        resumed, plain = _Run(team, steps=steps), copy.deepcopy(theirs)
        resumed.unet.load_state_dict(theirs.unet.state_dict())
        for run in (resumed, plain):
            run.optimizer.load_state_dict(copy.deepcopy(state))
            assert_close(run.optimizer.state_dict(), state, **_CLOSE)
            run.random = torch.Generator().manual_seed(5)
            run.step()
            run.step()
        _same(resumed, plain)
        assert_close(resumed.optimizer.state_dict(), plain.optimizer.state_dict(), **_CLOSE)


def check_reading_a_state(team, alone):
    """torch.distributed.checkpoint makes a step where an optimizer has no state yet."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    run = _Run(team, steps=2)
    run.optimizer.zero_grad()
    before, weights = copy.deepcopy(run.optimizer.state_dict()), copy.deepcopy(run.weights())
    get_optimizer_state_dict(run.unet, run.optimizer)
    assert_close(run.optimizer.state_dict(), before, rtol=0, atol=0)
    assert_close(run.weights(), weights, rtol=0, atol=0)


def check_states_that_differ_within_a_group(team, alone):
    state = _Run(alone, steps=2).optimizer.state_dict()
    first = state["param_groups"][0]["params"][0]
    run = _Run(team, steps=1)
    for steps in (1.0, None):
        other = copy.deepcopy(state)
        other["state"][first] = {} if steps is None else {"step": torch.tensor(steps)}
        with pytest.raises(ValueError, match="the state must have one number of steps a group"):
            run.optimizer.load_state_dict(other)
    for group in state["param_groups"]:  # as older classes wrote it
        del group["decoupled_weight_decay"]
    for of_parameter in state["state"].values():
        of_parameter["step"] = int(of_parameter["step"])
    run.optimizer.load_state_dict(state)
    run.step()
    steps = {float(one["step"]) for one in run.optimizer.state_dict()["state"].values()}
    assert steps == {3.0}


def check_errors(team, alone):
    unet = _unet(team.device)
    with pytest.raises(ValueError, match="params must have one dtype and device, got"):
        mixed = [unet.final_conv[1].weight, torch.nn.Parameter(torch.zeros(3))]
        ShardedOptimizer(mixed, torch.optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match="params must differ, got one twice"):
        ShardedOptimizer([unet.scale, unet.scale], torch.optim.SGD, lr=1.0)
    unet.scale.requires_grad_(False)
    with pytest.raises(ValueError, match="params must require gradients"):
        ShardedOptimizer(unet.parameters(), torch.optim.SGD, lr=1.0)
    ours = _Run(team, steps=2)
    before = ours.weights()
    ours.optimizer.zero_grad(set_to_none=True)
    ours.backward(*ours.batch())
    torch.nn.utils.clip_grad_norm_(ours.unet.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="gradients must not change after the backward"):
        ours.optimizer.step()
    ours.optimizer.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="every parameter must have a gradient"):
        ours.optimizer.step()
    with pytest.raises(RuntimeError, match="must be given to the constructor"):
        ours.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    weight = ours.unet.final_conv[1].weight
    place, weight.data = weight.data, weight.data.clone()
    with pytest.raises(RuntimeError, match="parameters must keep the storage"):
        ours.step()
    weight.data = place
    assert_close(ours.weights(), before, rtol=0, atol=0)
    ours.step()
    assert not torch.equal(ours.weights()["final_conv.1.weight"], before["final_conv.1.weight"])


def check_changed_gradients(team, alone):
    """In the first step, where nothing has been sent, and after it."""
    ways = (
        lambda grads: torch.nn.utils.clip_grads_with_norm_(grads, 1e-3, torch.ones(())),
        lambda grads: [p.grad.nan_to_num_() for p in grads],
        lambda grads: [setattr(p, "grad", p.grad * 0.5) for p in grads],
    )
    for way, steps in itertools.product(ways, (0, 1)):
        ours = _Run(team, steps=steps)
        before = ours.weights()
        ours.optimizer.zero_grad(set_to_none=True)
        ours.backward(*ours.batch())
        way([p for p in ours.unet.parameters() if p.numel()])
        with pytest.raises(RuntimeError, match="gradients must not change after the backward"):
            ours.optimizer.step()
        assert_close(ours.weights(), before, rtol=0, atol=0)


def check_grad_scaler(team, alone):
    """A scaler's step raises, also after unscale_; one that is off changes nothing."""
    for kind, steps, unscales in itertools.product(
        (torch.optim.AdamW, torch.optim.SGD), (0, 1), (False, True)
    ):
        ours, theirs = _Run(team, kind, steps), _Run(alone, kind, steps)
        before = ours.weights()
        scaler = torch.amp.GradScaler(team.device.type, init_scale=256.0)
        ours.optimizer.zero_grad(set_to_none=True)
        ours.backward(*ours.batch(), scaler)
        if unscales:
            scaler.unscale_(ours.optimizer)
        with pytest.raises(RuntimeError, match="step must be called by no GradScaler"):
            scaler.step(ours.optimizer)
        assert_close(ours.weights(), before, rtol=0, atol=0)
        theirs.batch()
        for run in (ours, theirs):
            off = torch.amp.GradScaler(team.device.type, enabled=False)
            run.optimizer.zero_grad(set_to_none=True)
            run.backward(*run.batch())
            off.step(run.optimizer)
        _same(ours, theirs)


def check_options(team, alone):
    for name in ("max_norm", "ema", "clear_grads"):
        for inside in (False, True):
            options = {name: EMA(torch.nn.Linear(1, 1)) if name == "ema" else True}
            kind = functools.partial(AdamW, **options) if inside else AdamW
            with pytest.raises(ValueError, match=f"ShardedOptimizer: {name} must be left to"):
                team.optimizer(_unet(team.device).parameters(), kind, **({} if inside else options))
    _same(*(_Run(t, AdamW, 3, max_norm=None, ema=None) for t in (team, alone)))
    with pytest.raises(TypeError, match="ShardedOptimizer: copies must be made by state_dict"):
        copy.deepcopy(_Run(team).optimizer)


def check_means(team, alone):
    where = {"device": team.device}
    middle = (team.count - 1) / 2
    assert team.mean(torch.tensor(team.rank, **where)) == middle
    assert_close(team.mean(torch.tensor([team.first], **where)).cpu(), torch.ones(1) / team.count)
    assert alone.mean(torch.tensor(3, **where)) == 3.0
    assert team.mean(torch.tensor(float(team.rank), **where)) == middle


def check_weights_outlive_the_optimizer(team, alone):
    ours = _Run(team, steps=2)
    before = ours.weights()
    del ours.optimizer
    gc.collect()
    filler = [torch.ones(1 << 12, device=team.device) for _ in range(200)]
    assert_close(ours.weights(), before, rtol=0, atol=0)
    ours.optimizer = ShardedOptimizer(_groups(ours.unet), torch.optim.SGD, lr=0.0)
    ours.step()
    assert_close(ours.weights(), before, rtol=0, atol=0)
    del filler


def check_captured(team, alone):
    options = {"fused": True, "capturable": True} if team.device.type == "cuda" else {}
    ours, theirs = _Run(team, **options), _Run(alone, **options)
    for run in (ours, theirs):

        def step(*batch, run=run):
            run.optimizer.zero_grad(set_to_none=True)
            loss = run.backward(*batch)
            if run is ours:
                run.optimizer.clip_grad_norm_(0.5)
            else:
                torch.nn.utils.clip_grad_norm_(run.unet.parameters(), 0.5)
            run.optimizer.step()
            return loss

        graphed = GraphedStep(step)
        for _ in range(7):
            graphed(*run.batch())
        assert graphed.captured == (team.device.type == "cuda")
        graphed.release()
    _same(ours, theirs)


@contextlib.contextmanager
def peers_of_the_cpu(folder):
    """Symmetric memory and DMA copy engines, simulated by processes on a CPU."""
    stream = mock.MagicMock()
    memories = itertools.count()

    def empty(size, dtype, device):
        return _shared(folder, next(memories), dist.get_rank(), size, dtype)

    def rendezvous(memory, group):
        number = next(memories) - 1
        next(memories)
        dist.barrier(group)
        handle = mock.Mock(barrier=lambda channel: dist.barrier(group))
        handle.get_buffer = lambda rank, size, dtype: _shared(folder, number, rank, size[0], dtype)
        return handle

    with (
        mock.patch.multiple(symmetric, empty=empty, rendezvous=rendezvous),
        mock.patch.multiple(
            torch.cuda,
            Stream=stream,
            Event=stream,
            current_stream=stream,
            stream=lambda _: contextlib.nullcontext(),
        ),
        mock.patch.object(exchange, "_reach_one_another", lambda *_: True),
        mock.patch.object(optimizer, "_pipelined", lambda _: True),
    ):
        yield


def _shared(folder, number, rank, size, dtype):
    return torch.from_file(f"{folder}/memory{number}-{rank}", shared=True, size=size, dtype=dtype)


def check(team, kind, folder):
    alone = Ranks(0, 1, team.device)
    for name, each in list(globals().items()):
        if name.startswith("check_"):
            each(team, alone)
    made = _Run(team, steps=1).optimizer._exchange
    Path(folder, f"{kind}{team.rank}").write_text(type(made).__name__)


def run(team, kind, folder):
    if kind == "collectives":
        how = mock.patch.object(exchange, "_reach_one_another", lambda *_: False)
    elif team.device.type == "cpu":
        how = peers_of_the_cpu(folder)
    else:
        how = contextlib.nullcontext()
    with how:
        check(team, kind, folder)


with ranks(captured=True) as team:
    folder, *kinds = sys.argv[1:]
    try:
        for kind in kinds:
            run(team, kind, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the other process may be waiting for this one on the GPU
