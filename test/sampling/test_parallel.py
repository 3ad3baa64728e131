"""Parallel sampling against the sequential loop, with the same random stream."""

import threading

import pytest
import torch

import dpa
from dpa.sampling.parallel import Sweeps

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
_STEPS, _BATCH = 24, 3


def _samplers(kind, parallel, dtype=torch.float64):
    cls = diffusers.DDIMScheduler if kind == "ddim" else diffusers.DDPMScheduler
    scheduler = cls(_STEPS, beta_schedule="squaredcos_cap_v2")
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=4, diffusion_step_embed_dim=16, down_dims=(8, 16)
    )
    unet = unet.to(dtype)
    return [
        dpa.DiffusionSampler(unet, scheduler, _STEPS, horizon=8, parallel=p)
        for p in (None, parallel)
    ]


def _call(kind, dtype=torch.float64):
    call = {"global_cond": torch.randn(1, 4, dtype=dtype), "batch_size": _BATCH}
    if kind == "inpainting":
        call["condition_data"] = torch.randn(_BATCH, 8, 2, dtype=dtype)
        call["condition_mask"] = torch.rand(_BATCH, 8, 2) < 0.3
    return call


def _both(kind, parallel):
    sequential, fast = _samplers(kind, parallel)
    call, results = _call(kind), []
    for sampler in (sequential, fast):
        generator = torch.Generator().manual_seed(3)
        results += [sampler(generator=generator, **call), torch.randn(3, generator=generator)]
    assert torch.equal(results[1], results[3])  # the stream went on equally far
    return results[0], results[2], fast.last_parallel


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "inpainting"])
@pytest.mark.parametrize("window", [1, 5, _STEPS, 100])
def test_without_tolerance_it_is_the_sequential_loop(kind, window):
    expected, got, report = _both(kind, dpa.Parallel(window, 0.0))
    # float64, but for the timestep's sinusoid, which is float32 and rounds as its strides fall.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert report.steps == _STEPS and report.residual == 0
    assert report.sweeps <= _STEPS
    if window == 1:
        assert report.sweeps == report.evaluations == _STEPS


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "inpainting"])
def test_tolerance_bounds_the_error_and_saves_sweeps(kind):
    """A looser tolerance takes fewer sweeps; the error stays near it.

    The network is the exact one for Gaussian data: what training tends to. An untrained one turns
    the first steps into a chaos of clipped values, where nothing converges early.
    """
    mean = torch.randn(8, 2, dtype=torch.float64) / 2
    cls = diffusers.DDIMScheduler if kind == "ddim" else diffusers.DDPMScheduler
    scheduler = cls(_STEPS, beta_schedule="squaredcos_cap_v2")
    alphas = scheduler.alphas_cumprod.double()

    def unet(sample, timestep, global_cond=None):
        alpha = alphas[timestep.long()][:, None, None]
        spread = 0.01 * alpha + 1 - alpha  # data of variance 0.01 around the mean
        return (1 - alpha).sqrt() * (sample - alpha.sqrt() * mean) / spread

    call = {"batch_size": _BATCH, "noise": torch.randn(_BATCH, 8, 2, dtype=torch.float64)}
    if kind == "inpainting":
        call |= {k: v for k, v in _call(kind).items() if k.startswith("condition_")}
    sweeps = []
    for tolerance in (1e-2, 1e-3, 1e-5):
        results = []
        for parallel in (None, dpa.Parallel(_STEPS, tolerance)):
            sampler = dpa.DiffusionSampler(
                unet, scheduler, _STEPS, horizon=8, action_dim=2, parallel=parallel
            )
            results.append(sampler(generator=torch.Generator().manual_seed(1), **call).double())
        (expected, got), report = results, sampler.last_parallel
        error = (got - expected).square().mean((1, 2)).amax().sqrt()
        assert error < 10 * tolerance
        assert report.residual <= tolerance
        sweeps.append(report.sweeps)
    assert sweeps == sorted(sweeps)
    assert sweeps[0] <= 3 * _STEPS // 4


def test_a_network_that_gives_nan_ends_in_nan():
    """And in no more than a sweep a step."""
    sampler = dpa.DiffusionSampler(
        lambda sample, timestep, global_cond=None: sample * torch.nan,
        diffusers.DDIMScheduler(_STEPS, clip_sample=False),
        _STEPS,
        horizon=8,
        action_dim=2,
        parallel=dpa.Parallel(4),
    )
    assert sampler(batch_size=2).isnan().all()
    assert sampler.last_parallel.sweeps <= _STEPS


def test_rejected():
    for window in (0, 2.5, "4"):
        with pytest.raises(ValueError, match=f"window must be an integer .* 1, got {window!r}"):
            dpa.Parallel(window)
    for tolerance in (-1, "1", float("nan")):
        with pytest.raises(ValueError, match=f"tolerance must be .* least 0, got {tolerance!r}"):
            dpa.Parallel(tolerance=tolerance)


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "inpainting"])
def test_on_packed_weights(device, kind):
    """A window of timesteps is one batch of the packed network: the sequential loop's actions."""
    cls = diffusers.DDIMScheduler if kind == "ddim" else diffusers.DDPMScheduler
    scheduler = cls(_STEPS, beta_schedule="squaredcos_cap_v2")
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=4, diffusion_step_embed_dim=16, down_dims=(32, 64)
    )
    unet = unet.to(device).eval()
    call = {
        n: v if n == "batch_size" else v.to(device) for n, v in _call(kind, torch.float32).items()
    }
    results = []
    for parallel in (None, dpa.Parallel(5, 0.0)):
        sampler = dpa.DiffusionSampler(
            unet, scheduler, _STEPS, horizon=8, fused=True, parallel=parallel
        )
        for seed in (3, 4):  # on a GPU the second call replays what the first captured
            generator = torch.Generator(device).manual_seed(seed)
            results.append(sampler(generator=generator, **call))
            results.append(torch.randn(3, device=device, generator=generator))
    for expected, got in zip(results[:4], results[4:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-4)
    assert sampler.last_parallel.steps == _STEPS
    assert len(sampler._graphs) == (device.type == "cuda")
    with torch.no_grad():  # weights that changed are packed again
        unet.final_conv[1].bias.add_(1.0)
    generator = torch.Generator(device).manual_seed(3)
    changed = sampler(generator=generator, **call)
    sampler.parallel = None
    expected = sampler(generator=generator.manual_seed(3), **call)
    torch.testing.assert_close(changed, expected, rtol=1e-3, atol=2e-4)
    assert not torch.allclose(changed, results[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("conditioned", [True, False], ids=["conditioned", "not"])
def test_a_window_that_runs_in_layers(hopper, dtype, conditioned):
    """One sample's loop is one kernel, its window of 16 states an op a layer."""
    inputs = {"global_cond": torch.randn(1, 4, device=hopper)} if conditioned else {}
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=4 if conditioned else None, down_dims=(256, 512), kernel_size=5
    )
    unet, noise = unet.to(hopper).eval(), torch.randn(1, 64, 2, device=hopper)
    scheduler = diffusers.DDIMScheduler(_STEPS, beta_schedule="squaredcos_cap_v2")

    def make():
        options = {"fused": True, "parallel": dpa.Parallel(16, 0.0)}
        return dpa.DiffusionSampler(unet, scheduler, _STEPS, dtype, **options)

    sampler = make()
    first = sampler(noise=noise, **inputs)
    assert torch.equal(sampler(noise=noise, **inputs), first)  # the replay
    in_layers = sampler.packed.in_layers
    assert in_layers(noise.expand(16, -1, -1)) is not None and in_layers(noise) is None
    with torch.no_grad():  # weights that changed are packed again
        torch._foreach_mul_(list(unet.parameters()), 1.05)
    changed = sampler(noise=noise, **inputs)
    assert torch.equal(changed, make()(noise=noise, **inputs))
    assert not torch.allclose(changed, first)
    for _ in range(3):  # elsewhere where they lie elsewhere, perhaps where weights were before
        for parameter in unet.parameters():
            parameter.data = parameter.data * 1.05
        assert torch.equal(sampler(noise=noise, **inputs), make()(noise=noise, **inputs))


class _Gaussian:
    """The exact network for narrow Gaussian data, conditioned on its timestep alone."""

    def __init__(self, alphas, mean):
        self.alphas, self.mean = alphas, mean

    def begin(self, inputs, timesteps):
        return timesteps.float()[:, None]

    def __call__(self, inputs, sample, conditioning):
        alpha = self.alphas[
            conditioning.expand(-1, len(sample) // len(conditioning)).flatten().long()
        ]
        alpha = alpha[:, None, None]
        spread = 0.01 * alpha + 1 - alpha
        return (1 - alpha).sqrt() * (sample - alpha.sqrt() * self.mean) / spread


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("batch, times, actions", [(1, 16, 2), (3, 8, 7), (2, 48, 16)])
@pytest.mark.parametrize("kind", ["ddpm", "ddim", "inpainting", "sample"])
def test_on_a_gpu_three_launches_are_the_sweep(monkeypatch, kind, batch, times, actions):
    """State by state, against the same in PyTorch's ops."""
    cls = diffusers.DDIMScheduler if kind == "ddim" else diffusers.DDPMScheduler
    options = {"prediction_type": "sample"} if kind == "sample" else {}
    scheduler = cls(_STEPS, beta_schedule="squaredcos_cap_v2", **options)
    table = dpa.schedulers.from_diffusers(scheduler, _STEPS).to("cuda", torch.float32)
    new = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    inputs = {"sample": new(batch, times, actions)}
    if kind != "ddim":
        inputs["step_noise"] = new(_STEPS, batch, times, actions)
    if kind == "inpainting":
        inputs["condition_data"] = new(1, times, actions)
        inputs["condition_mask"] = new(batch, times, actions) > 0.5
    predict = _Gaussian(scheduler.alphas_cumprod.cuda(), new(times, actions) / 2)
    given = (batch, times, actions), table, predict, dpa.Parallel(7, 1e-3)
    pair = [Sweeps(*given, torch.zeros(4, device="cuda")) for _ in range(2)]
    for sweeps in pair:
        sweeps.begin(inputs)
    for _ in range(_STEPS):
        pair[0].sweep()
        with monkeypatch.context() as plain:
            plain.setattr("dpa.sampling.parallel._LARGEST_WINDOW", 0)
            pair[1].sweep()
        got, expected = (sweeps._states for sweeps in pair)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert pair[0]._position == pair[1]._position
        torch.testing.assert_close(pair[0]._residual, pair[1]._residual, rtol=1e-2, atol=1e-5)
    assert pair[0]._position == _STEPS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_a_move_is_checked_and_stays_in_bounds():
    states, conditioning = (
        torch.randn(15, 1, 4, 2, device="cuda"),
        torch.randn(14, 3, device="cuda"),
    )
    output, table = states[:3].clone(), torch.randn(14, 6, device="cuda")
    position, residual = torch.tensor(1, device="cuda"), torch.zeros((), device="cuda")
    window, move = torch.ops.dpa.parallel_window, torch.ops.dpa.parallel_move_
    samples, rows = window(states, conditioning, position, 3)
    assert torch.equal(samples, states[1:4]) and torch.equal(rows, conditioning[1:4])
    for beyond, last in ((10**6, 11), (-(10**6), 0)):  # is kept to the rows there are
        samples, rows = window(states, conditioning, torch.tensor(beyond, device="cuda"), 3)
        assert torch.equal(samples, states[last : last + 3])
        assert torch.equal(rows, conditioning[last : last + 3])
    with pytest.raises(RuntimeError, match="dpa::parallel_window: the window must be 1 to 128"):
        window(states, conditioning, position, 129)
    with pytest.raises(RuntimeError, match="dpa::parallel_window: position must be one int64"):
        window(states, conditioning, position.float(), 3)
    rest = (None, None, None, 8, 1.0, 0.0)
    far = torch.tensor(10**6, device="cuda")
    move(states, far, residual, output, table, *rest)
    assert far == 8
    with pytest.raises(RuntimeError, match="dpa::parallel_move_: states must have shape"):
        move(states[:-1], position, residual, output, table, *rest)
    with pytest.raises(RuntimeError, match="dpa::parallel_move_: known must be given"):
        move(states, position, residual, output, table, None, output[0], *rest[2:])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(window.default, (states, conditioning, position, 3), test_utils=checks)
    arguments = (states, position, residual, output, table, *rest)
    torch.library.opcheck(move.default, arguments, test_utils=checks)


def test_trained_predictions_take_half_of_picards_sweeps():
    """A network whose prediction of x0 stays put: nothing moves after the first two sweeps."""
    scheduler = diffusers.DDPMScheduler(100, beta_schedule="squaredcos_cap_v2")
    alphas, mean = scheduler.alphas_cumprod.double(), torch.rand(8, 2, dtype=torch.float64) - 0.5

    def unet(sample, timestep, global_cond=None):
        alpha = alphas[timestep.long()][:, None, None]
        return (sample - alpha.sqrt() * mean) / (1 - alpha).sqrt()

    results = []
    for parallel in (None, dpa.Parallel(16, 1e-3)):
        sampler = dpa.DiffusionSampler(
            unet, scheduler, 100, horizon=8, action_dim=2, parallel=parallel
        )
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(1, 8, 2, dtype=torch.float64, generator=generator)
        results.append(sampler(noise=noise, generator=generator))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-3)
    assert sampler.last_parallel.sweeps <= 2 + 100 // 16 + 1


def _fused(device):
    unet = dpa.nn.ConditionalUnet1D(2, diffusion_step_embed_dim=16, down_dims=(32, 64)).to(device)
    scheduler = diffusers.DDIMScheduler(_STEPS)
    return dpa.DiffusionSampler(
        unet.eval(), scheduler, _STEPS, horizon=8, fused=True, parallel=dpa.Parallel(4)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_capture_of_the_users_is_refused():
    sampler = _fused("cuda")
    noise = torch.randn(1, 8, 2, device="cuda")
    expected = sampler(noise=noise)
    with (
        pytest.raises(ValueError, match="parallel must be left out inside a capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        sampler(noise=noise)
    torch.testing.assert_close(sampler(noise=noise), expected, rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_graphs_are_bounded_and_results_do_not_alias():
    sampler = _fused("cuda")
    noise = [torch.randn(1 + i % 10, 8, 2, device="cuda") for i in range(20)]
    found = [sampler(noise=n) for n in noise]
    kept = [f.clone() for f in found]
    assert len(sampler._graphs) == sampler._graphs.capacity == 8
    for n, before, copy in zip(noise, found, kept, strict=True):
        torch.testing.assert_close(sampler(noise=n), copy, rtol=0, atol=0)
        assert torch.equal(before, copy)


@pytest.mark.parametrize("window", [1, 4, 7, 100])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_device_sweeps_on_as_the_host_does(cuda, window, batch):
    """Captured, a loop of the graph's own; else the host asks: the same bits and sweeps."""
    torch.manual_seed(3)
    noise = torch.randn(2, batch, 8, 2, device=cuda)
    for tolerance in (0.0, 1e-2, 10.0):
        results = []
        for captured in (False, True):
            torch.manual_seed(4)
            sampler = _fused(cuda)
            sampler.cuda_graph, sampler.parallel = captured, dpa.Parallel(window, tolerance)
            for one in (noise[0], noise[0], noise[1], noise[0]):
                results.append((sampler(noise=one), sampler.last_parallel))
            assert len(sampler._graphs) == captured
        for (found, report), (expected, asked) in zip(results[4:], results[:4], strict=True):
            assert torch.equal(found, expected)
            steps = min(window, _STEPS)
            assert report.residual == asked.residual and report.steps == asked.steps == _STEPS
            assert -(-_STEPS // steps) <= report.sweeps <= asked.sweeps
            assert report.evaluations == report.sweeps * steps


def test_in_inference_mode_and_out_of_it(device):
    """Memory that one call leaves serves the next, whichever mode either is in."""
    torch.manual_seed(3)
    sampler, noise = _fused(device), torch.randn(1, 8, 2, device=device)
    with torch.inference_mode():
        expected = sampler(noise=noise).clone()
    for inside in (False, True, False):
        with torch.inference_mode(inside):
            assert torch.equal(sampler(noise=noise), expected)
            assert sampler.last_parallel.steps == _STEPS
    assert sampler(batch_size=0).shape == (0, 8, 2) and sampler.last_parallel.sweeps == 0


def test_of_a_float64_network(device):
    """On packed weights in float32, as the sequential loop."""
    unet = dpa.nn.ConditionalUnet1D(2, diffusion_step_embed_dim=16, down_dims=(32, 64))
    unet, noise = (
        unet.to(device, torch.float64).eval(),
        torch.randn(2, 8, 2, device=device).double(),
    )
    scheduler = diffusers.DDIMScheduler(_STEPS)
    results = []
    for parallel in (None, dpa.Parallel(4, 0.0)):
        options = {"horizon": 8, "fused": True, "parallel": parallel}
        sampler = dpa.DiffusionSampler(unet, scheduler, _STEPS, torch.float32, **options)
        results += [sampler(noise=noise) for _ in range(2)]
        assert results[-1].dtype == torch.float64
    torch.testing.assert_close(results[3], results[1], rtol=1e-3, atol=2e-4)


def test_the_streams_of_two_captures_are_not_one(cuda, monkeypatch):
    from dpa.library import graphs

    noise = torch.randn(1, 8, 2, device=cuda)
    torch.manual_seed(3)
    sampler = _fused(cuda)
    expected = sampler(noise=noise)
    outer = graphs._streams[cuda.index, False]
    monkeypatch.setitem(graphs._streams, (cuda.index, True), (outer[0], threading.Lock()))
    torch.manual_seed(3)
    sampler = _fused(cuda)
    for _ in range(2):  # without a warning
        assert torch.equal(sampler(noise=noise), expected)
    assert len(sampler._graphs) == 1


def test_sweeps_that_found_no_memory_are_captured_later(cuda, monkeypatch):
    from dpa.sampling import fused_loop

    sampler, made = _fused("cuda"), fused_loop.LoopGraph
    noise = torch.randn(1, 8, 2, device="cuda")

    def full(*args):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(fused_loop, "LoopGraph", full)
    with pytest.warns(UserWarning, match="no memory for a CUDA graph"):
        expected = sampler(noise=noise)
    monkeypatch.setattr(fused_loop, "LoopGraph", made)
    torch.testing.assert_close(sampler(noise=noise), expected, rtol=0, atol=0)
    assert len(sampler._graphs) == 1 and not sampler._graphs.refused


def test_sweeps_that_cannot_be_captured_leave_nothing_behind(cuda, monkeypatch):
    """A sweep that reads a value on the host: the others run kernel by kernel, and are right."""
    from dpa.library import capture
    from dpa.sampling import parallel

    noise, failed = torch.randn(1, 8, 2, device="cuda"), len(capture.FAILED)
    torch.manual_seed(3)
    expected = _fused("cuda")(noise=noise)
    sweep = parallel.Sweeps.sweep

    def reads(self):
        self._position.item()
        sweep(self)

    monkeypatch.setattr(parallel.Sweeps, "sweep", reads)
    torch.manual_seed(3)
    sampler = _fused("cuda")
    with pytest.warns(RuntimeWarning, match="could not be captured and runs kernel by kernel"):
        torch.testing.assert_close(sampler(noise=noise), expected, rtol=0, atol=0)
    for _ in range(2):  # without another warning
        torch.testing.assert_close(sampler(noise=noise), expected, rtol=0, atol=0)
    assert len(sampler._graphs.refused) == 1 and len(sampler._graphs) == 0
    assert len(capture.FAILED) == failed + 1
    assert torch.randn(8, device=cuda).unique().numel() == 8
