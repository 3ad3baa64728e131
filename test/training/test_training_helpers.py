"""EMA, the graphed step, and what PyTorch brings: checkpointing, GradScaler, autocast."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import dpa
from dpa.training import EMA, AdamW, GraphedStep, release_graphs


def _unet(device, seed=0):
    torch.manual_seed(seed)
    return dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(16, 32)
    ).to(device)


def _batch(device, generator=None):
    draw = lambda *size: torch.randn(size, generator=generator).to(device)  # noqa: E731
    return draw(4, 8, 2), torch.randint(50, (4,), generator=generator).to(device), draw(4, 3)


def _decays(count, power, inv_gamma, least, most):
    """diffusion_policy's: two updates of 0, whatever the least decay, then the growth."""
    grown = [1 - (1 + n / inv_gamma) ** -power for n in range(1, count - 1)]
    return [0.0, 0.0, *(min(max(value, least), most) for value in grown)]


def _parts(device):
    """Layers that train, a BatchNorm, one that is frozen, and a weight that two layers share."""
    norm, frozen = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4).requires_grad_(False)
    first, last = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    last.weight = first.weight
    return torch.nn.ModuleDict({"first": first, "norm": norm, "frozen": frozen, "last": last}).to(
        device
    )


@pytest.mark.parametrize(
    "schedule", [(0.75, 1.0, 0.0, 0.9999), (0.5, 1.0, 0.1, 0.6), (2 / 3, 4.0, 0.3, 0.9)]
)
def test_ema_follows_the_original_schedule(schedule, device):
    """A written-out reference: what is averaged, what is copied, and by which decay when."""
    power, inv_gamma, least, most = schedule
    model = _parts(device)
    ema = EMA(model, power, most, least, inv_gamma)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    for decay in _decays(12, *schedule):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        assert ema.decay == pytest.approx(decay)
        ema.update()
        for name, parameter in model.named_parameters():
            old = parameter.detach().double()
            if name.startswith(("first", "last")):
                old = decay * expected[name] + (1 - decay) * old
            expected[name] = old
    assert ema.updates == 12
    assert_close(ema.averages, [value.float() for value in expected.values()])


def test_ema_copies_what_stops_training_and_averages_what_starts_again(device):
    model = torch.nn.Linear(2, 2).to(device)
    ema = EMA(model, max_decay=0.5, min_decay=0.5)
    for trains, expected in ((True, 0.0), (True, 0.0), (True, 0.5), (False, 0.0), (True, 0.5)):
        model.requires_grad_(trains)
        before = [value.clone() for value in ema.averages]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        ema.update()
        now = [p.detach() for p in model.parameters()]
        mixed = [expected * a + (1 - expected) * p for a, p in zip(before, now, strict=True)]
        assert_close(ema.averages, mixed)


def test_ema_keeps_integers_as_they_are():
    """float32 would round this one."""
    model = torch.nn.Linear(2, 2)
    model.count = torch.nn.Parameter(torch.tensor([2**24 + 1]), requires_grad=False)
    ema = EMA(model)
    ema.update()
    with ema.applied():
        assert model.count.item() == 2**24 + 1


def test_ema_writes_averages_and_buffers(device):
    model = _parts(device)
    ema = EMA(model)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ema.update()
    own = copy.deepcopy(model.state_dict())
    with ema.applied() as averaged:
        assert_close(list(averaged.parameters()), ema.averages, rtol=0, atol=0)
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    other = copy.deepcopy(model)
    model["norm"].running_mean.fill_(7.0)
    ema.copy_to(other)
    assert_close(list(other.parameters()), ema.averages, rtol=0, atol=0)
    assert (other["norm"].running_mean == 7.0).all()
    again = EMA(other)
    again.load_state_dict(ema.state_dict())
    assert again.updates == 3
    assert_close(again.averages, ema.averages, rtol=0, atol=0)


@pytest.mark.parametrize("change", [lambda m: m.double(), lambda m: m.half().float()])
def test_the_own_weights_come_back_where_tensors_are_replaced(change):
    model = torch.nn.Linear(3, 2)
    ema = EMA(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    own = [p.detach().clone() for p in model.parameters()]
    with ema.applied():
        change(model)
    for parameter, before in zip(model.parameters(), own, strict=True):
        assert torch.equal(parameter, before.to(parameter.dtype))


def test_ema_of_16_bit_weights_is_float32(device):
    model = torch.nn.Linear(3, 4).to(device, torch.bfloat16)
    ema = EMA(model, max_decay=0.5, min_decay=0.5)
    ema.update(), ema.update()  # whose decay is 0
    start = [a.clone() for a in ema.averages]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ema.update()
    expected = [(a + p.float()) / 2 for a, p in zip(start, model.parameters(), strict=True)]
    assert_close(ema.averages, expected)
    with ema.applied():
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_bad_arguments_are_named():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="EMA: min_decay and max_decay must be ordered"):
        EMA(model, min_decay=0.9, max_decay=0.5)
    for power in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="EMA: power must be at least 0"):
            EMA(model, power=power)
    with pytest.raises(ValueError, match="EMA: state must hold 2 averages, got 1"):
        EMA(model).load_state_dict({"updates": 0, "averages": [torch.zeros(1)]})
    with pytest.raises(ValueError, match="EMA: state must hold averages and updates, got none of"):
        EMA(model).load_state_dict({"averages": []})
    with pytest.raises(ValueError, match="EMA: state must hold a number of updates, got -1"):
        EMA(model).load_state_dict({"updates": -1, "averages": [torch.zeros(1)] * 2})
    with pytest.raises(ValueError, match="EMA: state must hold averages, got something else"):
        EMA(model).load_state_dict({"updates": 0, "averages": [None, None]})
    with pytest.raises(ValueError, match="EMA: model must be a module, got"):
        EMA(torch.ones(3))
    ema, model.gain = EMA(model), torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="EMA: model must have 2 parameters, as before, got 3"):
        ema.update()
    with pytest.raises(ValueError, match="EMA: model must have 2 parameters"), ema.applied():
        pass


def test_averages_of_other_shapes_change_nothing():
    """Shapes that broadcast too, which a copy would take."""
    ema, wide = EMA(torch.nn.Linear(1, 1)), torch.nn.Linear(3, 2)
    before = copy.deepcopy((ema.averages, list(wide.parameters())))
    with pytest.raises(ValueError, match=r"model must have .* got \(2, 3\) for \(1, 1\)"):
        ema.copy_to(wide)
    state = {"updates": 1, "averages": [torch.ones(1, 1), torch.ones(())]}
    with pytest.raises(ValueError, match=r"state must have .* got \(\) for \(1,\)"):
        ema.load_state_dict(state)
    assert_close((ema.averages, list(wide.parameters())), before, rtol=0, atol=0)


@pytest.mark.parametrize("inputs", [1, 3])
def test_a_layer_of_another_shape_is_not_averaged(inputs):
    """A shape that broadcasts to the average's, and one that does not; nothing is written."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    ema, owned = EMA(model), EMA(model)
    optimizer = AdamW(model.parameters(), ema=owned)
    model[1] = torch.nn.Linear(inputs, 4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy((list(model.parameters()), ema.averages, owned.averages))
    for call in (ema.update, optimizer.step, lambda: ema.applied().__enter__()):
        with pytest.raises(
            ValueError, match=rf"model must have .* got \(4, {inputs}\) for \(4, 4\)"
        ):
            call()
    now = list(model.parameters()), ema.averages, owned.averages
    assert_close(now, before, rtol=0, atol=0)
    assert ema.updates == owned.updates == 0 and not optimizer.state


def test_averages_are_not_written_beside_other_buffers():
    model = torch.nn.BatchNorm1d(3)
    ema, other = EMA(model), torch.nn.BatchNorm1d(3, track_running_stats=False)
    wide = torch.nn.BatchNorm1d(3)
    wide.running_mean = torch.zeros(2, 3)
    for each in (other, wide):
        with torch.no_grad():
            each.weight.fill_(7.0)
        with pytest.raises(ValueError, match="EMA: model must have buffers of the shapes"):
            ema.copy_to(each)
        assert (each.weight == 7.0).all()


def test_a_graphed_step_without_warm_up_is_refused():
    with pytest.raises(ValueError, match="GraphedStep: step must be callable, got <class 'NoneT"):
        GraphedStep(None)
    with pytest.raises(ValueError, match="GraphedStep: warmup must be at least 1, got 0"):
        GraphedStep(print, warmup=0)
    for batch in ([{"x": torch.ones(1)}], [[torch.ones(1)]], [None], [3], [torch.ones(1), 3]):
        with pytest.raises(TypeError, match="GraphedStep: batch must be tensors, got "):
            GraphedStep(lambda *batch: batch)(*batch)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16 with a GradScaler"])
def test_a_graphed_step_trains_as_the_step_does(device, precision):
    """The same weights and losses from graphed and plain steps; no call is lost in warming up."""
    if device.type == "cpu" and precision.startswith("float16"):
        pytest.skip("GradScaler is for CUDA")
    lower = {"bfloat16": torch.bfloat16, "float32": None}.get(precision, torch.float16)

    def train(graphed):
        unet = _unet(device)
        cuda = device.type == "cuda"
        optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, fused=True, capturable=cuda)
        scaler = torch.amp.GradScaler(device.type, enabled=precision.startswith("float16"))

        def step(sample, timestep, cond):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, lower, enabled=lower is not None):
                out = unet(sample, timestep, None, cond)
            loss = F.mse_loss(out.float(), sample)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        run = GraphedStep(step) if graphed else step
        generator = torch.Generator().manual_seed(5)
        losses = [run(*_batch(device, generator)) for _ in range(7)]
        weights = copy.deepcopy(unet.state_dict())
        if graphed:
            assert run.captured == cuda
            if cuda:
                with pytest.raises(ValueError, match="GraphedStep: batch must be as captured"):
                    run(*(x[:2] for x in _batch(device, generator)))
            release_graphs()
            assert not run.captured
            run(*_batch(device))
            assert run.captured == cuda
        return torch.stack(losses), weights

    (losses, weights), (expected_losses, expected) = train(True), train(False)
    # Kernels chosen under capture may round differently, which AdamW's division magnifies.
    close = {"rtol": 1e-2, "atol": 1e-3} if lower else {"rtol": 1e-4, "atol": 1e-5}
    assert_close(losses, expected_losses, **close)
    for name, value in weights.items():
        assert_close(value, expected[name], rtol=close["rtol"], atol=2e-3 if lower else 1e-4)


def test_a_graphed_step_that_cannot_be_captured_leaves_nothing_behind(cuda):
    """Gradients as before the call, a generator that serves, and a later capture that works."""
    unet = _unet(cuda)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, fused=True, capturable=True)
    reads = True

    def step(sample, timestep, cond):
        optimizer.zero_grad(set_to_none=True)
        noisy = sample + torch.randn_like(sample)
        loss = F.mse_loss(unet(noisy, timestep, None, cond), sample)
        loss.backward()
        if reads:
            loss.item()
        optimizer.step()
        return loss.detach()

    run, batch = GraphedStep(step, warmup=1), _batch(cuda)
    run(*batch)
    before = [(p.grad, p.grad.clone()) for p in unet.parameters()]
    weights = copy.deepcopy(unet.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run(*batch)
        assert not run.captured and not run._batch
        for parameter, (grad, value) in zip(unet.parameters(), before, strict=True):
            assert parameter.grad is grad and torch.equal(grad, value)
        assert torch.randn(8, device=cuda).unique().numel() == 8
    for name, value in unet.state_dict().items():
        assert torch.equal(value, weights[name])
    reads = False
    losses = [run(*batch) for _ in range(4)]
    assert run.captured and torch.stack(losses).isfinite().all()


def test_checkpointed_blocks_have_the_same_gradients(device):
    torch.manual_seed(1)
    block = dpa.nn.ConditionalResidualBlock1D(16, 32, 6, n_groups=4, cond_predict_scale=True)
    block.to(device)
    x, cond = torch.randn(3, 16, 8, device=device), torch.randn(3, 6, device=device)

    def gradients(run):
        inputs = [t.clone().requires_grad_() for t in (x, cond)]
        leaves = [*inputs, *block.parameters()]
        return torch.autograd.grad(run(*inputs).square().sum(), leaves)

    got = gradients(lambda *inputs: checkpoint(block, *inputs, use_reentrant=False))
    assert_close(got, gradients(block))


def test_a_small_loss_survives_float16(device):
    """A GradScaler's scale passes through the ops' backward and is divided out again."""
    if device.type == "cpu":
        pytest.skip("GradScaler is for CUDA")
    unet = _unet(device)
    sample, timestep, cond = _batch(device)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    with torch.autocast("cuda", torch.float16):
        loss = unet(sample, timestep, None, cond).float().mean() * 1e-4
    scaler.scale(loss).backward()
    scaled = [p.grad / 2.0**14 for p in unet.parameters()]
    unet.zero_grad()
    (unet(sample, timestep, None, cond).mean() * 1e-4).backward()
    for got, parameter in zip(scaled, unet.parameters(), strict=True):
        error = (got - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-9)
        assert error < 0.03
