"""The captured loop of DiffusionSampler: the same numbers as without a graph, call after call."""

import copy
import pickle
import time
import warnings

import pytest
import torch
from samplers import diffusers, make_sampler, without_graph

import dpa
from dpa.library.capture import can_capture, capturing
from dpa.sampling.fused_loop import LoopGraphs
from dpa.training import graph_calls

GENERATORS = {
    "global": lambda device: None,
    "device": lambda device: torch.Generator(device).manual_seed(3),
    "cpu": lambda device: torch.Generator().manual_seed(3),
    "one_a_sample": lambda device: [torch.Generator(device).manual_seed(i) for i in range(2)],
}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_replays_draw_what_the_plain_loop_draws(cuda, name, kind):
    sampler = make_sampler(cuda, kind)
    results = []
    for current in (without_graph(sampler), sampler):
        torch.manual_seed(7)
        generator = GENERATORS[name](cuda)
        conds = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(1)).to(cuda)
        calls = []
        for cond in conds:
            calls.append(current(cond, generator=generator))
            calls.append(torch.randn(3, device=cuda))  # a neighbour on the global stream
        results.append(calls)
    assert len(sampler._graphs) == 1 and not sampler._graphs.refused
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_results_stay_as_they_were_returned(cuda):
    sampler, cond = make_sampler(cuda), torch.randn(1, 5, device=cuda)
    first = [sampler(cond * i) for i in range(3)]
    kept = [result.clone() for result in first]
    for _ in range(3):
        sampler(cond)
    for result, expected in zip(first, kept, strict=True):
        assert torch.equal(result, expected)


def test_changed_weights_and_steps_are_followed(cuda):
    sampler = make_sampler(cuda, "DDIM", 5)
    cond, noise = torch.randn(1, 5, device=cuda), torch.randn(1, 16, 2, device=cuda)
    before = [sampler(cond, noise=noise) for _ in range(2)][1]
    with torch.no_grad():
        for parameter in sampler.unet.parameters():
            parameter.mul_(1.1)
    after = sampler(cond, noise=noise)
    assert len(sampler._graphs) == 1 and not torch.allclose(before, after)
    assert torch.equal(after, without_graph(sampler)(cond, noise=noise))
    sampler.num_inference_steps = 10
    for _ in range(2):
        got = sampler(cond, noise=noise)
        assert torch.equal(got, without_graph(sampler)(cond, noise=noise))
    assert len(sampler._graphs) == 2


@pytest.mark.parametrize("moved", [False, True], ids=["in place", "of another place"])
def test_values_that_are_written_late_are_followed(cuda, moved):
    """Behind the version counter, by kernels that are still to run when the loop is called."""
    sampler = make_sampler(cuda, "DDIM", 5)
    cond, noise = torch.randn(1, 5, device=cuda), torch.randn(1, 16, 2, device=cuda)
    before, _ = (sampler(cond, noise=noise) for _ in range(2))
    if moved:
        for parameter in sampler.unet.parameters():
            parameter.data = parameter.data.clone()
        assert torch.equal(sampler(cond, noise=noise), before)
    for _ in range(3):
        torch.cuda._sleep(50_000_000)
        torch._foreach_mul_([p.data for p in sampler.unet.parameters()], 1.1)
        after = sampler(cond, noise=noise)
        assert not torch.allclose(before, after)
        assert torch.equal(after, without_graph(sampler)(cond, noise=noise))
        before = sampler(cond, noise=noise)
        assert torch.equal(before, after)
    assert len(sampler._graphs) == 1


def test_attributes_and_arguments_that_change_are_followed(cuda):
    """A call of the last one's kind goes straight to its graph; any other is looked up."""
    sampler, cond = make_sampler(cuda), torch.randn(2, 5, device=cuda)
    draw = lambda: torch.Generator(cuda).manual_seed(1)  # noqa: E731
    first = sampler(cond, generator=draw())
    assert sampler.prepared is not None
    assert torch.equal(sampler(cond, generator=draw()), first)
    assert copy.copy(sampler).prepared is None and copy.deepcopy(sampler).prepared is None
    sampler.horizon = 8
    assert sampler.prepared is None and sampler(cond, generator=draw()).shape == (2, 8, 2)
    sampler.horizon = 16
    assert torch.equal(sampler(cond, generator=draw()), first)
    assert sampler(cond[:1], batch_size=3).shape == (3, 16, 2)
    drawn = [torch.Generator().manual_seed(1), [draw(), draw()]]
    found = [sampler(cond, generator=g) for g in drawn]  # on the CPU, and one a sample
    twin = without_graph(sampler)
    again = [torch.Generator().manual_seed(1), [draw(), draw()]]
    for got, generator in zip(found, again, strict=True):
        assert torch.equal(got, twin(cond, generator=generator))
    sampler.unet.half()  # the same parameters, elsewhere and in another dtype
    assert sampler(cond, generator=draw()).dtype == torch.float32
    assert sampler.packed.dtype == torch.float16
    with pytest.raises(ValueError, match="condition_mask must be given"):
        sampler(cond, condition_data=torch.zeros(2, 16, 2, device=cuda))


def test_inpainting_and_inference_mode(cuda):
    sampler = make_sampler(cuda, "DDIM", 5)
    data = torch.randn(2, 16, 2, device=cuda)
    call = {"condition_data": data, "condition_mask": data > 0, "noise": torch.randn_like(data)}
    with torch.inference_mode():
        cond = torch.randn(1, 5, device=cuda)
        inside = [sampler(cond, **call) for _ in range(2)]
    outside = sampler(cond.clone(), **call)
    assert torch.equal(inside[0], outside) and torch.equal(inside[1], outside)
    assert torch.equal(outside[data > 0], data[data > 0])


def test_the_callers_own_capture_gets_the_kernels(cuda):
    sampler = make_sampler(cuda, "DDIM", 5)
    cond, noise = torch.randn(1, 5, device=cuda), torch.randn(1, 16, 2, device=cuda)
    expected = sampler(cond, noise=noise)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not can_capture(cuda)
        out = sampler(cond, noise=noise)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)


def test_a_replay_does_not_get_the_captures_seed(cuda, monkeypatch):
    """However late the capture's stream comes to write it, as on a GPU with much else to do."""
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    generator, expected = torch.Generator(cuda), torch.Generator(cuda)
    graph.register_generator_state(generator)
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        torch.cuda._sleep(50_000_000)
    with monkeypatch.context() as patch:
        for waits in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, waits, lambda: None)
        with capturing(graph, stream=beside):
            torch.cuda._sleep(100_000_000)
            drawn = torch.randn(4, device=cuda, generator=generator)
    generator.manual_seed(3)
    expected.manual_seed(3)
    for _ in range(2):
        graph.replay()
        assert torch.equal(drawn, torch.randn(4, device=cuda, generator=expected))


def test_two_streams_share_one_sampler(cuda):
    sampler = make_sampler(cuda, "DDIM", 5)
    noise = torch.randn(1, 16, 2, device=cuda)
    conds = [torch.randn(1, 5, device=cuda) for _ in range(2)]
    expected = [sampler(cond, noise=noise) for cond in conds]
    streams = [torch.cuda.Stream() for _ in conds]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(sampler(conds[i], noise=noise))
    torch.cuda.synchronize()
    assert all(torch.equal(g, expected[i]) for i in range(2) for g in got[i])


def test_the_cache_is_bounded_and_replays_do_not_grow_memory(cuda):
    sampler = make_sampler(cuda, "DDIM", 2)
    for batch in range(1, 12):
        sampler(torch.randn(batch, 5, device=cuda))
    assert len(sampler._graphs) == sampler._graphs.capacity == 8
    cond = torch.randn(11, 5, device=cuda)
    sampler(cond)
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        sampler(cond)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_capture_takes_at_most_a_second(cuda, dtype):
    """The published size and 100 steps; the weights are packed in the same call."""
    with cuda:
        unet = dpa.nn.ConditionalUnet1D(
            2, global_cond_dim=132, down_dims=(256, 512, 1024), kernel_size=5
        )
    scheduler = diffusers.DDPMScheduler(100, beta_schedule="squaredcos_cap_v2")
    cond = torch.randn(1, 132, device=cuda)
    for _ in range(2):  # the first loads the kernels
        sampler = dpa.DiffusionSampler(unet, scheduler, 100, dtype, horizon=16, fused=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        sampler(cond)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        assert len(sampler._graphs) == 1
    assert seconds <= 1.0, f"the call took {seconds:.2f} s"


def test_a_loop_that_cannot_be_captured_still_runs(cuda):
    graphs = LoopGraphs()
    make_body = lambda: lambda inputs: inputs["x"] * float(inputs["x"].sum())  # noqa: E731
    x = torch.ones(2, device=cuda)
    run = lambda: graphs.run("key", cuda, {"x": x}, make_body).tolist()  # noqa: E731
    with pytest.warns(RuntimeWarning, match="could not be captured and runs kernel by kernel"):
        assert run() == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run() == [2, 2]
    assert list(graphs.refused) == ["key"] and len(graphs) == 0
    assert torch.randn(2, device=cuda).shape == (2,)  # the global generator still works


def test_copies_start_without_graphs():
    graphs = LoopGraphs()
    graphs.refused["key"] = "reason"
    for other in (copy.deepcopy(graphs), pickle.loads(pickle.dumps(graphs))):
        assert len(other) == 0 and not other.refused


def test_nothing_is_captured_on_the_cpu():
    assert not can_capture(torch.device("cpu"))


def _slow_stream(cuda):
    """A stream that has much to do before what comes next."""
    stream = torch.cuda.Stream(cuda)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
    return stream


def _two_kinds(cuda):
    sampler = make_sampler(cuda, "DDIM", 3)
    calls = [(torch.randn(b, 5, device=cuda), torch.randn(b, 16, 2, device=cuda)) for b in (1, 3)]
    for cond, noise in [*calls, *calls]:
        sampler(cond, noise=noise)
    return sampler, calls


@pytest.mark.parametrize("captured", [True, False])
def test_a_stream_waits_for_the_weights_that_another_packs(cuda, captured):
    sampler, calls = _two_kinds(cuda)
    sampler.cuda_graph = captured
    for _ in range(5):
        with torch.no_grad():
            for p in sampler.unet.parameters():
                p.mul_(1.05)
        slow, other = _slow_stream(cuda), torch.cuda.Stream(cuda)
        other.wait_stream(torch.cuda.current_stream())
        results = []
        for stream, (cond, noise) in zip((slow, other), calls, strict=True):
            with torch.cuda.stream(stream):
                results.append(sampler(cond, noise=noise))
        torch.cuda.synchronize()
        for result, (cond, noise) in zip(results, calls, strict=True):
            assert torch.equal(result, copy.deepcopy(sampler)(cond, noise=noise))


@pytest.mark.parametrize("captured", [True, False])
def test_weights_are_packed_anew_after_a_slow_stream_has_read_the_last(cuda, captured):
    sampler, calls = _two_kinds(cuda)
    sampler.cuda_graph = captured
    for _ in range(5):
        expected = [copy.deepcopy(sampler)(cond, noise=noise) for cond, noise in calls]
        with torch.cuda.stream(_slow_stream(cuda)):
            before = sampler(calls[0][0], noise=calls[0][1])
        for module in sampler.unet.modules():
            for name, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[name] = torch.nn.Parameter(p.detach() * 1.05)
        after = sampler(calls[1][0], noise=calls[1][1])
        torch.cuda.synchronize()
        assert torch.equal(before, expected[0])
        assert torch.equal(after, copy.deepcopy(sampler)(calls[1][0], noise=calls[1][1]))
        assert not torch.equal(after, expected[1])


def test_what_a_slow_replay_reads_is_not_given_away(cuda):
    """A sampler that goes while a side stream still replays its graph."""
    for _ in range(5):
        sampler, calls = _two_kinds(cuda)
        cond, noise = calls[1]
        expected = sampler(cond, noise=noise)
        with torch.cuda.stream(_slow_stream(cuda)):
            result = sampler(cond, noise=noise)
        del sampler
        for size in [noise.numel(), cond.numel()] * 50:
            torch.full((size,), torch.nan, device=cuda)
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def test_what_slow_sweeps_read_is_not_given_away(cuda):
    """The same of parallel sampling, whose states stay from call to call."""
    noise = torch.randn(1, 16, 2, device=cuda)
    for _ in range(5):
        sampler = make_sampler(cuda, "DDIM", 6)
        sampler.parallel = dpa.Parallel(3, 0.0)
        cond = torch.randn(1, 5, device=cuda)
        expected = sampler(cond, noise=noise)
        assert torch.equal(sampler(cond, noise=noise), expected)
        with torch.cuda.stream(_slow_stream(cuda)):
            result = sampler(cond, noise=noise)
        del sampler
        states = (6 + 2 * 3 + 1) * noise.numel()
        for size in [states, 3 * noise.numel(), 4, 1] * 50:
            torch.full((size,), torch.nan, device=cuda)
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("changed", [False, True])
def test_a_first_call_inside_a_capture_of_the_users(cuda, changed):
    """The graph packs the weights; calls outside do not take its memory for packed weights."""
    sampler, cond = make_sampler(cuda, "DDIM", 3), torch.randn(2, 5, device=cuda)
    noise = torch.randn(2, 16, 2, device=cuda)
    twin = copy.deepcopy(sampler)
    twin(cond, noise=noise)  # loads the kernels
    if changed:
        sampler(cond, noise=noise)
        with torch.no_grad():
            for net in (sampler.unet, twin.unet):
                net.final_conv[1].weight.mul_(2)
    table = sampler._tables.find(3, False, cuda, torch.float32)
    assert len(table) == 3  # on the device before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sampler(cond, noise=noise)
    expected = twin(cond, noise=noise)
    assert torch.equal(sampler(cond, noise=noise), expected)
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(sampler(cond, noise=noise), expected)


@pytest.mark.parametrize("how", ["loop", "sweeps", "calls"])
def test_graphs_on_another_device_than_the_current_one(how):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    conds = [torch.randn(2, 5, device=other) for _ in range(4)]
    noise = torch.randn(2, 16, 2, device=other)
    if how == "calls":
        unet = make_sampler(other).unet.train()
        plain = copy.deepcopy(unet)
        graph_calls(unet, warmup=1)
        for cond in conds:
            results = [net(noise, 7, global_cond=cond) for net in (unet, plain)]
            torch.testing.assert_close(*results)
        return
    sampler = make_sampler(other, parallel=dpa.Parallel(4, 1e-3) if how == "sweeps" else None)
    for cond in conds:
        got, expected = (
            s(cond, noise=noise, generator=torch.Generator(other).manual_seed(1))
            for s in (sampler, without_graph(sampler))
        )
        torch.testing.assert_close(got, expected)
