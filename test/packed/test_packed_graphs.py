"""Packed weights in CUDA graphs, on several streams, and in compiled functions."""

import os

import pytest
import torch
from packed_nets import RESIDENT, cond_of, net

import dpa
from dpa.packed.unet import PackedUnet

diffusers = pytest.importorskip("diffusers")


@pytest.mark.parametrize(("name", "batch"), RESIDENT)
def test_cuda_graph(cuda, name, batch):
    unet = net(name, cuda)
    packed = PackedUnet(unet, torch.bfloat16)
    sample, t, cond = (
        torch.randn(batch, 16, unet.input_dim, device=cuda),
        torch.ones(batch, device=cuda),
        cond_of(unet, batch, cuda),
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        packed(sample, t, cond)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed(sample, t, cond)
    for _ in range(3):
        sample.copy_(torch.randn_like(sample))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, packed(sample, t, cond))


@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    [("small", 1, torch.float32), ("several", 8, torch.bfloat16), ("several", 20, torch.float16)],
)
def test_two_samplers_on_two_streams(cuda, name, batch, dtype):
    """Each gives what it gives alone, whichever way the two resident kernels share the GPU."""
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=50, beta_schedule="squaredcos_cap_v2")
    nets = [net(name, cuda) for _ in range(2)]
    conds = [cond_of(unet, batch, cuda) for unet in nets]
    noise = torch.randn(batch, 16, nets[0].input_dim, device=cuda)
    samplers = [dpa.DiffusionSampler(n, scheduler, 10, dtype, horizon=16, fused=True) for n in nets]
    alone = [s(c, noise=noise) for s, c in zip(samplers, conds, strict=True)]
    streams = [torch.cuda.Stream() for _ in nets]
    torch.cuda.synchronize()
    together = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                together[i].append(samplers[i](conds[i], noise=noise))
    torch.cuda.synchronize()
    for expected, got in zip(alone, together, strict=True):
        assert all(torch.equal(expected, g) for g in got)


@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    [
        ("small", 1, torch.float32),
        ("small", 1, torch.bfloat16),
        ("small", 1, torch.float8_e4m3fn),
        ("several", 8, torch.bfloat16),
    ],
)
def test_replays_do_not_drift(cuda, name, batch, dtype):
    """A captured loop gives the same bits at every replay, and takes no more memory.

    DPA_TEST_REPLAYS sets how many; 100000 take about a minute and a half.
    """
    replays = int(os.environ.get("DPA_TEST_REPLAYS", "300"))
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=50, beta_schedule="squaredcos_cap_v2")
    unet = net(name, cuda)
    sampler = dpa.DiffusionSampler(
        unet, scheduler, 5, dtype, horizon=16, fused=True, cuda_graph=False
    )
    noise = torch.randn(batch, 16, unet.input_dim, device=cuda)
    cond = cond_of(unet, batch, cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = sampler(cond, noise=noise)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sampler(cond, noise=noise)
    wrong = torch.zeros((), dtype=torch.int64, device=cuda)
    graph.replay()
    wrong += (out != expected).any()  # once beforehand: the comparison itself takes memory
    torch.cuda.synchronize()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    for replay in range(replays):
        graph.replay()
        if replay % max(1, replays // 300) == 0:
            wrong += (out != expected).any()
            out.fill_(torch.nan)
    assert wrong.item() == 0
    assert torch.cuda.memory_reserved() == reserved
    if "PYTEST_XDIST_WORKER" not in os.environ:  # there the others' memory comes and goes
        assert torch.cuda.mem_get_info()[0] == free


def test_compile(device):
    """No graph break in a user's function that calls the packed network."""
    unet = net("small", device)
    packed = PackedUnet(unet)
    weights, config = packed.packed, packed.config

    def step(sample, t, cond):
        return torch.ops.dpa.unet1d(sample, t, cond, weights, config, torch.float32) * 2

    args = (
        torch.randn(2, 16, 2, device=device),
        torch.ones(2, device=device),
        cond_of(unet, 2, device),
    )
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), step(*args), rtol=0, atol=0)


def test_compiled_functions_that_use_packed_weights(device):
    """The packed network and its loop without a break in the graph; a sampler's call with one."""
    unet = net("small", device)
    packed, cond = PackedUnet(unet), cond_of(unet, 2, device)
    sample, t = torch.randn(2, 16, 2, device=device), torch.ones(2, device=device)
    times, table = torch.arange(4.0, device=device), torch.rand(4, 6, device=device)
    assert packed.packed is not None  # packed before it is compiled

    def network(sample, t, cond):
        return packed(sample, t, cond) * 2

    def loop(sample, times, table, cond):
        return packed.sample(sample, times, table, 1.0, global_cond=cond) * 2

    for function, args in ((network, (sample, t, cond)), (loop, (sample, times, table, cond))):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*args), function(*args), rtol=0, atol=0)

    scheduler = diffusers.DDIMScheduler(num_train_timesteps=50)
    sampler = dpa.DiffusionSampler(unet, scheduler, 5, horizon=16, fused=True)

    def policy(observation, noise):
        return sampler(observation.tanh(), noise=noise) * 2

    compiled = torch.compile(policy, backend="aot_eager")
    torch.testing.assert_close(compiled(cond, sample), policy(cond, sample), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "batch"), RESIDENT)
def test_sampler_inside_a_capture_of_the_users(cuda, name, batch):
    unet = net(name, cuda)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=8)
    sampler = dpa.DiffusionSampler(unet, scheduler, 8, torch.bfloat16, horizon=16, fused=True)
    cond = cond_of(unet, batch, cuda)
    noise = torch.randn(batch, 16, unet.input_dim, device=cuda)
    sampler(cond, noise=noise)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sampler(cond * 2, noise=noise) + 1
    kept = len(sampler._graphs)
    for seed in (1, 2):
        cond.copy_(torch.randn_like(cond))
        torch.cuda.manual_seed(seed)
        graph.replay()
        torch.cuda.manual_seed(seed)
        assert torch.equal(out, sampler(cond * 2, noise=noise) + 1)
    assert kept == len(sampler._graphs) == 1
