"""Calls by replay give the gradients of calls as they are, whatever a training loop does."""

import copy
import threading
import types

import pytest
import torch
from graphed import count_replays, graphs, same_gradients  # noqa: F401  (a fixture)
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from dpa.training import graph_calls, ungraph_calls
from dpa.training.parts import Parts


class _Small(nn.Module):
    """Two layers, one of them used twice, and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x, scale=None):
        y = self.two(self.two(self.one(x).tanh()).tanh())
        return y if scale is None else y * scale


def _pair(device, warmup=1, make=_Small):
    """A module, and an equal one whose calls of the usual kind replay by now."""
    torch.manual_seed(0)
    plain = make().to(device)
    graphed = graph_calls(copy.deepcopy(plain), warmup=warmup)
    for _ in range(warmup + 1):
        graphed(_x(device)).sum().backward()
    graphed.zero_grad(set_to_none=True)
    assert graphed.forward.captured == 1
    return plain, graphed


def _x(device):
    return torch.randn(5, 3, device=device)


def _trained(module, batches, optimizer):
    for x in batches:
        optimizer.zero_grad(set_to_none=True)
        module(x).square().sum().backward()
        optimizer.step()
    return list(module.parameters())


def test_a_loop_trains_to_the_same_weights(device):
    plain, graphed = _pair(device)
    batches = [_x(device) for _ in range(6)]
    one, other = (
        _trained(m, batches, torch.optim.AdamW(m.parameters(), lr=0.1)) for m in (plain, graphed)
    )
    assert_close(other, one)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up(device, set_to_none):
    plain, graphed = _pair(device)
    for _ in range(2):
        for x in [_x(device) for _ in range(3)]:
            plain(x).square().sum().backward()
            graphed(x).square().sum().backward()
        same_gradients(plain, graphed)
        plain.zero_grad(set_to_none=set_to_none)
        graphed.zero_grad(set_to_none=set_to_none)


def test_gradients_in_other_hands_stay(device):
    plain, graphed = _pair(device)
    first, second = _x(device), _x(device)
    parameters = [p for p in graphed.parameters() if p is not graphed.unused]
    kept = torch.autograd.grad(graphed(first).sum(), parameters)
    before = [g.clone() for g in kept]
    for module in (plain, graphed):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
    graphed(second).square().sum().backward()
    assert_close(list(kept), before, rtol=0, atol=0)
    plain(second).square().sum().backward()
    same_gradients(plain, graphed)


def test_the_backward_of_a_module_in_front_waits_for_no_parameters(device, monkeypatch):
    """Both modules' graphs are launched before any parameter gets its gradient."""
    front, behind = (graph_calls(nn.Linear(3, 3).to(device), warmup=1) for _ in range(2))
    step = lambda: behind(front(_x(device))).sum().backward()  # noqa: E731
    for _ in range(3):
        step()
    events = []
    for module in (front, behind):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
        (capture,) = module.forward._captures.values()

        def launched(*args, backward=capture.backward):
            events.append("launch")
            return backward(*args)

        monkeypatch.setattr(capture, "backward", launched)
    step()
    assert events == ["launch"] * 2 + ["gradient"] * 4


def test_a_module_whose_parameters_are_frozen(device):
    module = nn.Linear(3, 3).to(device).requires_grad_(False)
    graphed = graph_calls(copy.deepcopy(module), warmup=1)
    for _ in range(3):
        x = _x(device).requires_grad_()
        found = torch.autograd.grad(graphed(x).sum(), x)
        assert_close(found, torch.autograd.grad(module(x).sum(), x))
    assert graphed.forward.captured == 1


def test_two_calls_in_one_backward(device):
    """The gradients of a replay and of a call whose graph was kept add up."""
    plain, graphed = _pair(device)
    inputs = [_x(device), _x(device)]
    for module in (plain, graphed):
        first = module(inputs[0])
        first.sum().backward(retain_graph=True)
        module.zero_grad()
        second = module(inputs[1])
        with torch.autograd.detect_anomaly(check_nan=True):
            (first.sum() + 2 * second.sum()).backward()
    same_gradients(plain, graphed)


class _Fails(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in front")


def test_an_error_in_front_leaves_a_loop_as_it_was(device, monkeypatch):
    plain, graphed = _pair(device)
    for _ in range(2):
        graphed(_x(device).requires_grad_()).sum().backward()
    count = count_replays(monkeypatch)
    loss = graphed(_Fails.apply(_x(device).requires_grad_())).sum()
    with pytest.raises(ValueError, match="in front"):
        loss.backward()

    def step():
        x = _x(device).requires_grad_()
        for module in (plain, graphed):
            module.zero_grad()
            module(x).sum().backward()
        same_gradients(plain, graphed)

    step()
    assert len(count) == 1, "as it is, while the failed pass may be differentiated again"
    del loss
    step()
    assert len(count) == 2


def test_gradients_of_inputs_alone_in_between(device, monkeypatch):
    plain, graphed = _pair(device)
    for _ in range(2):
        graphed(_x(device).requires_grad_()).sum().backward()
    count, x = count_replays(monkeypatch), _x(device).requires_grad_()
    for module in (plain, graphed):
        module.zero_grad()
        out = module(x).square().sum()
        kept = torch.autograd.grad(out, x)[0]
        module(x).sum().backward()
        assert_close(kept, torch.autograd.grad(plain(x).square().sum(), x)[0])
    same_gradients(plain, graphed)
    assert len(count) >= 1


def test_two_calls_before_a_backward(device, monkeypatch):
    plain, graphed = _pair(device)
    replays = count_replays(monkeypatch)
    first, second = _x(device), _x(device)
    for module in (plain, graphed):
        a, b = module(first), module(second)
        (a.square().sum() + b.sum()).backward()
    assert len(replays) == 1
    same_gradients(plain, graphed)


def test_a_graph_that_is_kept_for_a_second_backward(device, monkeypatch):
    plain, graphed = _pair(device)
    replays = count_replays(monkeypatch)
    first, second = _x(device), _x(device)
    for module in (plain, graphed):
        loss = module(first).square().sum()
        loss.backward(retain_graph=True)
        module(second).sum().backward()  # between the two
        loss.backward()
    assert len(replays) == 2
    same_gradients(plain, graphed)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_loss_that_nobody_differentiates(device, monkeypatch):
    plain, graphed = _pair(device)
    replays = count_replays(monkeypatch)
    graphed(_x(device))
    x = _x(device)
    plain(x).sum().backward()
    graphed(x).sum().backward()
    assert len(replays) == 2
    same_gradients(plain, graphed)


def test_results_stay(device):
    _, graphed = _pair(device)
    first = graphed(_x(device)).detach()
    before = first.clone()
    graphed(_x(device)).sum().backward()
    assert torch.equal(first, before)


def test_inputs_get_gradients(device):
    plain, graphed = _pair(device)
    for _ in range(4):
        x = _x(device)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        plain(one).square().sum().backward()
        graphed(other).square().sum().backward()
        assert_close(other.grad, one.grad)
    assert graphed.forward.captured == 2


def test_parameters_that_stop_training(device):
    plain, graphed = _pair(device)
    for module in (plain, graphed):
        module.two.requires_grad_(False)
    for _ in range(4):
        x = _x(device)
        for module in (plain, graphed):
            module.zero_grad(set_to_none=True)
            module(x).square().sum().backward()
        same_gradients(plain, graphed)
    assert graphed.two.weight.grad is None and graphed.forward.captured == 2


def test_hooks_of_parameters_run_once_a_backward(device):
    plain, graphed = _pair(device)
    for module in (plain, graphed):
        module.one.weight.register_hook(lambda grad: 3 * grad)
    graphed = graph_calls(graphed, warmup=1)  # captured with the hook in place
    seen = []
    graphed.two.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    for _ in range(4):
        x = _x(device)
        for module in (plain, graphed):
            module.zero_grad(set_to_none=True)
            module(x).square().sum().backward()
        same_gradients(plain, graphed)
    assert len(seen) == 4 and graphed.forward.captured == 1


def test_hooks_of_layers_are_called(device, monkeypatch):
    _, graphed = _pair(device)
    replays = count_replays(monkeypatch)
    seen = []
    handle = graphed.one.register_forward_hook(lambda *_: seen.append(1))
    graphed(_x(device))
    assert len(seen) == 1 and not replays
    handle.remove()
    graphed(_x(device))
    assert len(seen) == 1 and len(replays) == 1
    graphed.register_forward_hook(lambda *_: seen.append(1))  # around the replay
    graphed(_x(device))
    assert len(seen) == 2


def _replace_module(module, device):
    module.one = nn.Linear(3, 8).to(device)


def _replace_parameter(module, device):
    module.two.weight = nn.Parameter(torch.randn(8, 8, device=device))


def _replace_values(module, device):
    module.two.weight.data = torch.randn(8, 8, device=device)


def _turn_values(module, device):
    """At the same place in memory."""
    module.two.weight.data = module.two.weight.data.t()


def _stop_a_layer(module, device):
    """The forward might read its mode."""
    module.two.eval()


@pytest.mark.parametrize(
    "change", [_replace_module, _replace_parameter, _replace_values, _turn_values, _stop_a_layer]
)
def test_changes_are_noticed(device, monkeypatch, change):
    plain, graphed = _pair(device)
    for module in (plain, graphed):
        torch.manual_seed(1)
        change(module, device)
    replays = count_replays(monkeypatch)
    graphed(_x(device))
    assert not replays
    for _ in range(4):
        x = _x(device)
        for module in (plain, graphed):
            module.zero_grad(set_to_none=True)
            module(x).square().sum().backward()
        same_gradients(plain, graphed)


def test_other_calls_run_as_they_are(device, monkeypatch):
    plain, graphed = _pair(device)
    replays = count_replays(monkeypatch)
    x, scale = _x(device), torch.full((8,), 2.0, device=device)
    assert_close(graphed(x, scale), plain(x, scale))
    assert_close(graphed(x, scale=scale), plain(x, scale))
    assert_close(graphed(x[:2]), plain(x[:2]))
    assert_close(graphed(x, 2.0), plain(x, 2.0))
    with torch.no_grad():
        assert_close(graphed(x), plain(x))
    with torch.autocast(device.type, torch.bfloat16):
        assert graphed(x).dtype == torch.bfloat16
    graphed.eval()
    assert_close(graphed(x), plain(x))
    graphed.train()
    x.requires_grad_()
    got = torch.autograd.grad(checkpoint(graphed, x, use_reentrant=False).square().sum(), x)
    assert_close(got, torch.autograd.grad(plain(x).square().sum(), x))
    assert_close(torch.func.vmap(graphed)(x), plain(x))
    assert not replays
    graphed(_x(device))
    assert replays


def test_keyword_arguments_and_capacity(device):
    plain, graphed = _pair(device)
    scale = torch.randn(8, device=device)
    for rows in (5, 4, 3):
        for _ in range(3):
            x = torch.randn(rows, 3, device=device)
            for module in (plain, graphed):
                module.zero_grad(set_to_none=True)
                module(x, scale=scale).square().sum().backward()
            same_gradients(plain, graphed)
    assert graphed.forward.captured == 2


def test_copies_and_state_dicts(device):
    plain, graphed = _pair(device)
    assert list(graphed.state_dict()) == list(plain.state_dict())
    other = copy.deepcopy(graphed)
    assert other.forward.module is other and other.forward.captured == 0
    with torch.no_grad():
        other.one.weight.mul_(2)
    for _ in range(4):
        x = _x(device)
        assert_close(graphed(x), plain(x))
        assert (other(x) - plain(x)).abs().max() > 1e-3
    assert other.forward.captured == 1
    graphed.load_state_dict(other.state_dict())  # in place: a replay reads the new values
    assert_close(graphed(x), other(x))
    assert ungraph_calls(graphed) is graphed and "forward" not in vars(graphed)
    assert_close(graphed(x), other(x))


def test_second_derivatives(device):
    """Of the network called again, for a replay has none."""
    plain, graphed = _pair(device)
    x = _x(device)
    for module in (plain, graphed):
        weight = module.one.weight
        (grad,) = torch.autograd.grad(module(x).square().sum(), weight, create_graph=True)
        grad.square().sum().backward()
    same_gradients(plain, graphed)


def test_hooks_run_once_in_a_backward_that_calls_again(device):
    plain, graphed = _pair(device)
    for module in (plain, graphed):
        module.one.weight.register_hook(lambda grad: 3 * grad)
    x = _x(device)
    for module in (plain, graphed):
        loss = module(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(create_graph=True)
    same_gradients(plain, graphed)


def test_weights_that_change_before_the_backward(device):
    for module in _pair(device):
        loss = module(_x(device)).sum()
        with torch.no_grad():
            module.two.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_cannot_be_captured_says_so_and_runs(device):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return (self.layer(x),)

    if device.type == "cpu":
        pytest.skip("the fake captures nothing")
    module = graph_calls(Pair().to(device), warmup=1)
    module(_x(device))
    with pytest.warns(RuntimeWarning, match=r"Pair runs kernel by kernel.*must return one tensor"):
        module(_x(device))
    module(_x(device))[0].sum().backward()
    assert module.layer.weight.grad is not None


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"graph_calls: module must be a torch.nn.Module, got"):
        graph_calls(None)
    with pytest.raises(ValueError, match=r"graph_calls: warmup and capacity .* got 0, 2"):
        graph_calls(_Small(), warmup=0)


@pytest.mark.parametrize("when", ["_forward", "_backward"])
def test_another_thread_calls_during_a_replay(device, when):
    """It runs as it is, and neither sees the other's values."""
    plain, graphed = _pair(device)
    capture = next(iter(graphed.forward._captures.values()))
    graph, x, y, others = getattr(capture, when), _x(device), _x(device), []

    def meanwhile():
        setattr(capture, when, graph)
        thread = threading.Thread(target=lambda: others.append(graphed(y).detach()))
        thread.start(), thread.join()
        graph.replay()

    setattr(capture, when, types.SimpleNamespace(replay=meanwhile))
    got, expected = graphed(x), plain(x)
    for output in (got, expected):
        output.square().sum().backward()
    assert_close(got, expected)
    assert_close(others, [plain(y).detach()])
    same_gradients(plain, graphed)


def test_a_call_that_fails_leaves_the_capture_free(device, monkeypatch):
    plain, graphed = _pair(device)
    capture = next(iter(graphed.forward._captures.values()))
    graph, x = capture._forward, _x(device)

    def fail():
        raise MemoryError

    capture._forward = types.SimpleNamespace(replay=fail)
    with pytest.raises(MemoryError):
        graphed(x)
    capture._forward = graph
    replays = count_replays(monkeypatch)
    assert_close(graphed(x), plain(x))
    assert len(replays) == 1


def test_parts_elsewhere_or_without_an_address():
    parts = Parts(nn.Linear(3, 3))
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert parts.state(cpu) == parts.state(cpu) is not None
    assert parts.state(other) is None
    sparse = nn.Linear(3, 3)
    sparse.register_buffer("mask", torch.eye(3).to_sparse())
    assert Parts(sparse).state(cpu) is None
