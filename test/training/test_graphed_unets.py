"""U-Nets whose calls replay train as they do without: accelerated, under autocast, under DDP."""

import copy

import pytest
import torch
from graphed import count_replays, graphs  # noqa: F401  (a fixture)
from torch import nn
from torch.nn import functional as F

import dpa
from dpa.training import graph_calls, ungraph_calls


def _unet(device):
    torch.manual_seed(0)
    return dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(16, 32)
    ).to(device)


def test_nothing_is_captured_before_it_was_compared(device):
    """A head of zeros proves nothing: a capture would keep the original."""
    unet = _unet(device)
    draw = lambda *size: torch.randn(4, *size, device=device)  # noqa: E731
    inputs = draw(8, 2), torch.arange(4, device=device), None, draw(3)
    for parameter in unet.final_conv[1].parameters():
        nn.init.zeros_(parameter)
    dpa.accelerate(unet)
    for _ in range(5):
        unet(*inputs)
    assert not unet.forward._is_decided() and not unet.forward._captures
    nn.init.ones_(unet.final_conv[1].bias)
    unet(*inputs)
    assert unet.forward._is_decided()


def test_accelerated_networks(device):
    """Both replacements of a forward, undone in any order."""
    unet = _unet(device)
    dpa.accelerate(unet, graphs=False)
    inner = vars(unet)["forward"]
    graph_calls(unet)
    assert dpa.explain(unet).findings[0].active
    ungraph_calls(unet)
    assert vars(unet)["forward"] is inner
    graph_calls(unet)
    dpa.restore(unet)
    assert "forward" not in vars(unet)


class _Loop:
    """A plain training loop of a U-Net, and of an accelerated one beside it."""

    def __init__(self, device):
        self.plain = _unet(device)
        self.fast = dpa.accelerate(copy.deepcopy(self.plain), graphs=True)
        self.device = device

    def step(self, batch=4, autocast=False, backwards=1):
        draw = lambda *size: torch.randn(batch, *size, device=self.device)  # noqa: E731
        for module in (self.plain, self.fast):
            module.zero_grad(set_to_none=True)
        for _ in range(backwards):
            x, t, cond = draw(8, 2), torch.randint(50, (batch,), device=self.device), draw(3)
            for module in (self.plain, self.fast):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                    out = module(x, t, None, cond)
                out.float().square().mean().backward()
        for one, other in zip(self.plain.parameters(), self.fast.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                limit = (0.1 if autocast else 1e-3) * one.grad.norm()
                assert (one.grad - other.grad).norm() <= limit + 1e-6

    def change(self, what):
        for module in (self.plain, self.fast):
            what(module)


def _evaluate(module):
    device = next(module.parameters()).device
    with torch.no_grad():
        module.eval()(torch.zeros(2, 8, 2, device=device), 3, None, torch.ones(2, 3, device=device))
    module.train()


def _double(module):
    """Give the last layer a forward of its own."""
    last = module.final_conv[1]
    last.forward = lambda x: 2 * type(last).forward(last, x)


def _other_eps(module):
    for norm in module.modules():
        if isinstance(norm, nn.GroupNorm):
            norm.eps = 0.5


@pytest.mark.filterwarnings("ignore:dpa. ConditionalUnet1D has changed")
@pytest.mark.parametrize(
    "then",
    [
        lambda loop: loop.step(backwards=3),
        lambda loop: loop.step(batch=2),
        lambda loop: loop.step(autocast=True),
        lambda loop: loop.change(_evaluate),
        lambda loop: loop.change(lambda m: m.mid_modules.requires_grad_(False)),
        lambda loop: loop.change(lambda m: m.up_modules[0].register_forward_hook(lambda *_: None)),
        lambda loop: loop.change(lambda m: m.final_conv[1].weight.data.mul_(2)),
        lambda loop: loop.change(lambda m: m.load_state_dict(_unet(loop.device).state_dict())),
    ],
    ids=["accumulation", "batch", "autocast", "evaluation", "frozen", "hook", "data", "state_dict"],
)
def test_accelerated_training_by_replays(device, monkeypatch, then):
    """With the gradients of a plain loop, whatever happens."""
    loop = _Loop(device)
    for _ in range(4):
        loop.step()
    replays = count_replays(monkeypatch)
    loop.step()
    assert len(replays) == 1
    then(loop)
    for _ in range(5):
        loop.step()


@pytest.mark.parametrize("views", [False, True])
def test_accelerated_training_under_ddp(device, monkeypatch, tmp_path, views):
    """Its hooks see every gradient, and its buckets may be the gradients' memory."""
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        loop = _Loop(device)
        wrap = nn.parallel.DistributedDataParallel
        loop.fast = wrap(loop.fast, gradient_as_bucket_view=views)
        for _ in range(5):
            loop.step()
        replays = count_replays(monkeypatch)
        for _ in range(3):
            loop.step()
        assert len(replays) == 3
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("lower", [None, torch.bfloat16, torch.float16], ids=str)
def test_a_unet_trains_to_the_same_weights(device, lower):
    torch.manual_seed(0)
    plain = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(64, 128)
    ).to(device)
    modules = plain, graph_calls(copy.deepcopy(plain), warmup=2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-3) for m in modules]
    scalers = [torch.amp.GradScaler(device.type, enabled=lower == torch.float16) for _ in modules]
    start = nn.utils.parameters_to_vector(plain.parameters()).detach().clone()
    for _ in range(6):
        draw = lambda *size: torch.randn(4, *size, device=device)  # noqa: E731
        batch, noise = (
            (draw(8, 2), torch.randint(50, (4,), device=device), None, draw(3)),
            draw(8, 2),
        )
        for module, optimizer, scaler in zip(modules, optimizers, scalers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, lower or torch.bfloat16, enabled=lower is not None):
                loss = F.mse_loss(module(*batch).float(), noise)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    one, other = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in modules)
    assert modules[1].forward.captured == 1
    assert (other - one).norm() < 2e-2 * (one - start).norm()
