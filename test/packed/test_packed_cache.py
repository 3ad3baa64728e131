"""Weights kept packed where no gradient is wanted: values, and that every change is seen."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
from architectures import CONFIGS

import dpa
from dpa.nn import ConditionalUnet1D, inference


def make(name, device, dtype=torch.float32):
    options, batch, horizon = CONFIGS[name]
    net = ConditionalUnet1D(**options).to(device, dtype)
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    inputs = {"sample": new(batch, horizon, options["input_dim"])}
    inputs["timestep"] = torch.randint(0, 100, (batch,), device=device)
    if "global_cond_dim" in options:
        inputs["global_cond"] = new(batch, options["global_cond_dim"])
    return net, inputs


@torch.no_grad()
def call(net, inputs, dtype=torch.bfloat16):
    with torch.autocast("cuda", dtype):
        return net(**inputs)


def fresh(net, inputs, dtype=torch.bfloat16):
    """What a module that has never been called gives."""
    return call(copy.deepcopy(net), inputs, dtype)


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def values(name, dtype, own, device):
    """What a network gives packed and then kept, what plain PyTorch gives, and float64."""
    net, inputs = make(name, device, own)
    exact = dpa.reference.plain(net).double()
    double = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad(), torch.autocast("cuda", dtype):
        plain = dpa.reference.plain(net)(**inputs)
    packed, kept, again = (call(net, inputs, dtype) for _ in range(3))
    expected = exact(**double).detach()
    for got in (packed, kept):
        assert got.dtype == dtype and got.shape == expected.shape and got.is_contiguous()
    assert torch.equal(kept, again)
    return [x.double().flatten() for x in (packed, kept, plain, expected)]


@pytest.mark.parametrize("own", [torch.float32, None], ids=["float32_weights", "16_bit_weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_values(name, dtype, own, hopper):
    """Against float64, beside what plain PyTorch's rounding costs.

    Both errors are estimates: over few outputs they differ by chance, so networks are drawn until
    there are enough.
    """
    trials = [values(name, dtype, own or dtype, hopper)]
    while sum(len(expected) for *_, expected in trials) < 1000 or len(trials) < 3:
        trials.append(values(name, dtype, own or dtype, hopper))
    packed, kept, plain, expected = (torch.cat(each) for each in zip(*trials, strict=True))
    bound = 1.3 * error(plain, expected) + 1e-4
    assert error(packed, expected) < bound
    assert error(kept, expected) < bound


@pytest.mark.parametrize("kind", [int, float, "scalar", "one", "float32", "int32"], ids=str)
def test_timesteps(kind, hopper):
    net, inputs = make("film_scale", hopper)
    inputs["timestep"] = torch.full((9,), 7, device=hopper)
    expected = call(net, inputs)
    steps = {
        int: 7,
        float: 7.0,
        "scalar": torch.tensor(7),
        "one": torch.tensor([7], device=hopper),
        "float32": inputs["timestep"].float(),
        "int32": inputs["timestep"].int(),
    }
    assert torch.equal(call(net, inputs | {"timestep": steps[kind]}), expected)


def test_empty_batches_and_other_dtypes(hopper):
    net, inputs = make("film_scale", hopper)
    assert call(net, {k: v[:0] for k, v in inputs.items()}).shape == (0, 16, 2)
    inputs["global_cond"] = inputs["global_cond"].bfloat16()
    wide = inputs | {"global_cond": inputs["global_cond"].double()}
    assert torch.equal(call(net, inputs), call(net, wide))


def _step(net):
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True).step()


def _through_data(net):
    """As EMA helpers put averages into a model."""
    for p in net.parameters():
        p.data.copy_(p.data * 1.5)


def _one_weight(net):
    with torch.no_grad():
        net.mid_modules[0].blocks[0].block[0].weight[3, 1, 2] += 5


def _a_row_through_data(net):
    net.mid_modules[0].blocks[0].block[0].weight.data[13] += 5


def _a_column_through_data(net):
    net.mid_modules[0].blocks[1].block[0].weight.data[:, 11] += 5


def _a_tap_through_data(net):
    """Turned round: the norm behind it would take out a factor, once the tap outgrew the rest."""
    net.mid_modules[1].blocks[0].block[0].weight.data[:, :, 0].neg_()


def _load(net):
    net.load_state_dict({k: v * 0.7 for k, v in net.state_dict().items()})


def _replace_parameter(net):
    layer = net.up_modules[0][2].conv
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))


def _replace_storage(net):
    layer = net.down_modules[0][1].cond_encoder[1]
    layer.bias.data = torch.randn_like(layer.bias)


def _replace_layer(net):
    old = net.mid_modules[1].blocks[1].block[0]
    net.mid_modules[1].blocks[1].block[0] = torch.nn.Conv1d(
        old.in_channels, old.out_channels, 5, padding=2, device="cuda"
    )


def _norm(net):
    net.final_conv[0].block[1].weight.data.mul_(2)  # read where it is


def _dilated_halving(net):
    conv = net.down_modules[0][2].conv
    rate = 3 - conv.dilation[0]  # there and back
    conv.dilation, conv.padding = (rate,), (rate,)


def _paddings(net):
    first, second = (net.mid_modules[0].blocks[i].block[0] for i in range(2))
    other = (1,) if first.padding == (2,) else (2,)
    first.padding, second.padding = other, (4 - other[0],)


CHANGES = [_step, _through_data, _one_weight, _load, _replace_parameter, _replace_storage]
CHANGES += [_a_row_through_data, _a_column_through_data, _a_tap_through_data]
CHANGES += [_replace_layer, _norm, _dilated_halving, _paddings]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_is_seen_at_once(change, hopper):
    """Without a wait between the change and the call; many times, to catch a race."""
    net, inputs = make("film_scale", hopper)
    before = call(net, inputs)
    for round_ in range(20):
        if round_ % 2:
            torch.cuda._sleep(200_000)  # the change is still to be made when the call is
        change(net)
        after = call(net, inputs)
        assert torch.equal(after, fresh(net, inputs))
        assert not torch.equal(after, before)
        before = after


def test_what_a_replayed_graph_changes_is_seen(hopper):
    """As ``GraphedStep`` updates weights: no version counts it."""
    net, inputs = make("film_scale", hopper)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.graph(graph):
        torch._foreach_mul_([p.data for p in net.parameters()], 1.25)
    for _ in range(3):
        before = call(net, inputs)
        graph.replay()
        after = call(net, inputs)
        assert torch.equal(after, fresh(net, inputs)) and not torch.equal(after, before)


def test_two_streams(hopper):
    net, inputs = make("film_scale", hopper)
    call(net, inputs)
    side = torch.cuda.Stream()
    for _ in range(10):
        _through_data(net)
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda._sleep(500_000)
        first = call(net, inputs)  # packs on this stream, late
        with torch.cuda.stream(side):
            second = call(net, inputs)
        torch.cuda.synchronize()
        assert torch.equal(first, second)


def test_calls_never_wait(hopper):
    net, inputs = make("film_scale", hopper)
    call(net, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _through_data(net)
        call(net, inputs)
        _one_weight(net)
        call(net, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_of_it_shows_in_the_module_and_it_goes_with_it(hopper):
    net, inputs = make("film_scale", hopper)
    keys, size = list(net.state_dict()), len(pickle.dumps(net))
    gc.collect()
    before = torch.cuda.memory_allocated()
    call(net, inputs)
    kept = torch.cuda.memory_allocated() - before
    matrices = [p for p in net.parameters() if p.dim() > 1]
    weights, compared = 2 * sum(map(torch.numel, matrices)), 4 * 8192 * len(matrices)
    assert weights < kept < 1.2 * weights + compared
    for _ in range(5):
        _load(net)
        call(net, inputs)
    assert torch.cuda.memory_allocated() - before == kept
    assert list(net.state_dict()) == keys and len(pickle.dumps(net)) == size
    twin = copy.deepcopy(net)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    assert torch.cuda.memory_allocated() - before < kept + 1.1 * sum(
        4 * p.numel() for p in net.parameters()
    ) + 512 * len(list(net.parameters()))
    del net, twin
    gc.collect()
    assert torch.cuda.memory_allocated() < before


def test_gradients_hooks_and_sharded_layers_are_not_passed_by(hopper):
    net, inputs = make("film_scale", hopper)
    call(net, inputs)
    with torch.autocast("cuda", torch.bfloat16):
        assert net(**inputs).requires_grad
        net.requires_grad_(False)
        assert not net(**inputs).requires_grad
        inputs["sample"].requires_grad_()
        assert net(**inputs).requires_grad
    seen = []
    net.mid_modules[0].register_forward_hook(lambda *_: seen.append(1))
    call(net, inputs)
    assert seen == [1]


def _capture(net, inputs):
    call(net, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(net, inputs)
    return graph, out


@pytest.mark.parametrize("change", [_step, _through_data, _one_weight], ids=lambda f: f.__name__)
def test_a_captured_call_follows_changes(change, hopper):
    net, inputs = make("film_scale", hopper)
    graph, out = _capture(net, inputs)
    for _ in range(3):
        change(net)
        graph.replay()
        assert torch.equal(out, fresh(net, inputs))


def test_a_capture_with_fixed_weights_reads_the_kept_ones(hopper):
    net, inputs = make("film_scale", hopper)
    with dpa.fixed_weights():
        graph, out = _capture(net, inputs)
    expected = fresh(net, inputs)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)
    before = expected
    for _ in range(3):
        _one_weight(net)
        graph.replay()
        assert torch.equal(out, before)  # as promised: they were not to change
        call(net, inputs)
        graph.replay()
        before = fresh(net, inputs)
        assert torch.equal(out, before)


def test_a_capture_with_fixed_weights_that_changed_before_it_packs_them(hopper):
    net, inputs = make("film_scale", hopper)
    call(net, inputs)
    _one_weight(net)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with dpa.fixed_weights(), torch.cuda.graph(graph):
        out = call(net, inputs)
    graph.replay()
    assert torch.equal(out, fresh(net, inputs))


def _other_block(net):
    class Skipped(dpa.nn.ConditionalResidualBlock1D):
        def forward(self, x, *_):
            return x

    net.mid_modules[0].__class__ = Skipped


def _other_embedding(net):
    net.diffusion_step_encoder[0] = torch.nn.Identity()


def _appended(net):
    net.mid_modules[0].blocks[1].block.append(torch.nn.Dropout(0.5))


@pytest.mark.parametrize("change", [_other_block, _other_embedding, _appended])
def test_networks_with_other_layers_are_left_alone(change):
    """Before the first check or after it."""
    for groups in (4, 8):
        net = ConditionalUnet1D(2, down_dims=(16, 32), diffusion_step_embed_dim=16, n_groups=groups)
        layers = inference._Network(net, net._as_made(), net._config).layers
        assert layers.parameters() is not None
        change(net)
        assert not layers.tracker.unchanged() or layers.parameters() is None
        assert inference._Network(net, net._as_made(), net._config).layers.parameters() is None


def test_threads_with_streams_of_their_own(hopper):
    """The first calls at once: one packs, the others wait for what it packs."""
    net, inputs = make("film_scale", hopper)
    expected = call(net, inputs)
    for _ in range(10):
        twin, got, start = copy.deepcopy(net), [], threading.Barrier(4)

        def work(twin=twin, got=got, start=start):
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                got.append(call(twin, inputs))
                torch.cuda.current_stream().synchronize()

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(g, expected) for g in got) and len(got) == 4
