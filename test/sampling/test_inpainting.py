"""Given actions by weights, in the sample and in x0, and loops that start from the last chunk."""

import math

import pytest
import torch
from samplers import make_sampler
from torch import nn

import dpa
from dpa.reference import sample_chunk
from dpa.schedulers import MultistepTable, StepTable, flow_matching, from_diffusers

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
SHAPE = (3, 8, 2)
WEIGHTS = dpa.prefix_weights(2, 6, SHAPE[1])[None, :, None].expand(SHAPE).double()


class Network(nn.Module):
    """A bounded and uneven function of the sample and the timestep, in float64."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, sample, timestep):
        phase = torch.as_tensor(timestep, dtype=sample.dtype).reshape(-1, 1, 1) / 7
        return torch.tanh(self.weight * sample.roll(1, -1)) + 0.5 * torch.sin(phase)


def scheduler_of(kind, steps, **options):
    scheduler = getattr(diffusers, f"{kind}Scheduler")(
        40, beta_schedule="squaredcos_cap_v2", **options
    )
    scheduler.set_timesteps(steps)
    return scheduler


def tensors(dtype=torch.float64, seed=1):
    random = torch.randn(3, *SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return random[0], random[1].clamp(-1, 1), random[2].clamp(-1, 1)


@pytest.mark.parametrize("warm", [False, True], ids=["from noise", "from the last chunk"])
@pytest.mark.parametrize("mask", ["weights", "bool", "none"])
@pytest.mark.parametrize("inpainting", ["sample", "x0"])
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_the_loop_is_the_written_one(kind, prediction_type, inpainting, mask, warm):
    noise, data, chunk = tensors()
    scheduler = scheduler_of(kind, 6, prediction_type=prediction_type)
    sampler = dpa.DiffusionSampler(Network(), scheduler, 6)
    weights = {"weights": WEIGHTS, "bool": WEIGHTS > 0.5, "none": None}[mask]
    given = {"inpainting": inpainting, "condition_data": None if weights is None else data}
    if warm:
        given |= {"last_chunk": chunk, "first_step": 2}
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    network = Network()
    want = sample_chunk(
        lambda x, t: network(x, t),
        scheduler,
        noise,
        weights=weights,
        generator=generators[0],
        **given,
    )
    got = sampler(noise=noise, condition_mask=weights, generator=generators[1], **given)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
    if weights is not None:
        held = weights >= 1
        torch.testing.assert_close(got[held], data[held], rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("inpainting", ["sample", "x0"])
@pytest.mark.parametrize("kind", ["DDPM", "DDIM", "DPMSolverMultistep", "EulerDiscrete"])
def test_packed_weights_give_the_loop_step_by_step(kind, inpainting, batch, device):
    fused = make_sampler(device, kind, steps=6)
    steps = dpa.DiffusionSampler(fused.unet, fused._scheduler, 6, horizon=16, fused=False)
    generator = torch.Generator().manual_seed(3)
    data, chunk = torch.randn(2, batch, 16, 2, generator=generator).clamp(-1, 1).to(device)
    cond = torch.randn(batch, 5, generator=generator).to(device)
    weights = dpa.prefix_weights(4, 12, 16)[None, :, None].expand(batch, 16, 2).to(device)
    for first_step, last_chunk in ((0, None), (2, chunk)):
        for mask in (weights, weights > 0.5):
            given = {"inpainting": inpainting, "last_chunk": last_chunk, "first_step": first_step}
            given |= {"condition_data": data, "condition_mask": mask}
            results = []
            for sampler in (steps, fused, fused, fused):  # the graph's first and later calls
                own = torch.Generator().manual_seed(4)
                results.append(sampler(cond, generator=own, **given))
            assert fused.packed is not None
            want = results[0]
            for got in results[1:]:  # a random network's actions may be in the hundreds
                assert (got - want).norm() < 1e-5 * want.norm()


def test_weights_and_masks_of_one_shape_are_different_calls(device):
    sampler = make_sampler(device, "DDIM", steps=4)
    noise, data = torch.randn(2, 1, 16, 2, device=device)
    cond = torch.randn(1, 5, device=device)
    ones = torch.ones(1, 16, 2, device=device)
    given = {"noise": noise, "condition_data": data}
    for _ in range(2):
        assert torch.equal(sampler(cond, condition_mask=ones.bool(), **given), data)
        assert torch.equal(sampler(cond, condition_mask=ones, **given), data)
        half = sampler(cond, condition_mask=ones / 2, **given)
        x0 = sampler(cond, condition_mask=ones / 2, inpainting="x0", **given)
        plain = sampler(cond, condition_mask=ones * 0, **given)
        assert not torch.allclose(half, x0) and not torch.allclose(half, plain)
        torch.testing.assert_close(plain, sampler(cond, noise=noise), rtol=1e-4, atol=1e-4)


class TwoWays(nn.Module):
    """The best prediction of noise where every chunk is all 1 or all -1, or one with an error."""

    def __init__(self, alphas_cumprod, error):
        super().__init__()
        self.register_buffer("alphas_cumprod", alphas_cumprod.double())
        self.error = error

    def forward(self, sample, timestep):
        a = self.alphas_cumprod[timestep][:, None, None]
        evidence = (a.sqrt() / (1 - a) * sample).sum((1, 2), keepdim=True)
        noise = (sample - a.sqrt() * torch.tanh(evidence)) / (1 - a).sqrt()
        return noise + self.error * torch.sin(40 * sample)


@pytest.mark.parametrize("error", [0.0, 0.05])
@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_a_chunk_goes_the_way_of_the_last_one(kind, error):
    scheduler = scheduler_of(kind, 20)
    network = TwoWays(scheduler.alphas_cumprod, error)
    sampler = dpa.DiffusionSampler(network, scheduler, 20, horizon=16, action_dim=1)
    alone = sampler(batch_size=64, generator=torch.Generator().manual_seed(1))
    assert 16 < (alone.mean((1, 2)) > 0).sum() < 48  # both ways, each about as often
    weights = dpa.prefix_weights(4, 12, 16).double()[None, :, None].expand(64, 16, 1)
    chunk = torch.ones(64, 16, 1)
    given = {"condition_data": chunk, "condition_mask": weights, "inpainting": "x0"}
    held = sampler(**given, generator=torch.Generator().manual_seed(1))
    assert (held[:, 12:].mean((1, 2)) > 0).sum() > 48  # by what was held before them
    assert torch.equal(held[:, :4], chunk[:, :4])
    # The last chunk's way is in the sample from the start.
    given |= {"last_chunk": chunk, "first_step": 8}
    warm = sampler(**given, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(warm, chunk, rtol=0, atol=0.05 + error, check_dtype=False)


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun", "rk4"])
def test_flow_matching_is_held_and_warm_started(method):
    noise, data, chunk = tensors()
    table = flow_matching(4, method)
    stages = len(table) // 4
    start = table.after(stages).noised(chunk, noise)
    torch.testing.assert_close(start, 0.25 * chunk + 0.75 * noise)
    # Of a velocity that leads straight to a point, every sample's x0 is the point.
    point = torch.tensor(0.3, dtype=torch.float64)

    def network(sample, timestep):
        return (point - sample) / (1 - timestep[:, None, None]).clamp(min=1e-9)

    sampler = dpa.DiffusionSampler(network, flow_matching((0.0, 0.25, 0.5, 0.75, 0.999), "euler"))
    weights = WEIGHTS.clamp(max=0.5)
    got = sampler(noise=noise, condition_data=data, condition_mask=weights, inpainting="x0")
    want = (point + weights * (data - point)).float()
    assert (got - want).abs().max() < 2e-2
    with pytest.raises(ValueError, match="levels"):
        flow_matching((0.0, 0.5, 2.0), method).noised(chunk, noise)


SOLVERS = [
    ("DPMSolverMultistep", {"prediction_type": "epsilon"}),
    ("DPMSolverMultistep", {"prediction_type": "sample"}),
    ("DPMSolverMultistep", {"prediction_type": "v_prediction"}),
    ("DPMSolverMultistep", {"prediction_type": "flow_prediction", "use_flow_sigmas": True}),
    ("FlowMatchEulerDiscrete", {}),
    ("UniPCMultistep", {"prediction_type": "v_prediction"}),
    ("UniPCMultistep", {"predict_x0": False, "final_sigmas_type": "sigma_min"}),
]


@pytest.mark.parametrize(("kind", "options"), SOLVERS)
def test_the_x0_of_solvers_is_their_own(kind, options):
    scheduler = getattr(diffusers, f"{kind}Scheduler")(40, **options)
    table = from_diffusers(scheduler, 6)
    scheduler.set_timesteps(6)
    sample, output, _ = tensors()
    for step, timestep in enumerate(scheduler.timesteps):
        if kind.endswith("Multistep"):
            scheduler._step_index, scheduler.predict_x0 = step, True
            want = scheduler.convert_model_output(output, sample=sample)
        else:  # the whole way at once
            want = sample - timestep / 40 * output
        of_sample, of_output = table.x0[step]
        got = of_sample * sample + of_output * output
        torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["HeunDiscrete", "UniPCMultistep"])
def test_weights_in_a_sample_that_tells_earlier_ones(kind):
    sampler = dpa.DiffusionSampler(Network(), scheduler_of(kind, 6), 6)
    noise, data, _ = tensors()
    given = {"noise": noise, "condition_data": data}
    with pytest.raises(ValueError, match="inpainting must be 'x0' with weights"):
        sampler(condition_mask=WEIGHTS, **given)
    held = WEIGHTS > 0.5
    torch.testing.assert_close(sampler(condition_mask=held, **given)[held], data[held])
    by_weights = sampler(condition_mask=WEIGHTS, inpainting="x0", **given)
    by_mask = sampler(condition_mask=WEIGHTS >= 1, inpainting="x0", **given)
    assert not torch.allclose(by_weights, by_mask)


def test_a_solver_that_starts_later_remembers_nothing():
    scheduler = diffusers.DPMSolverMultistepScheduler(40, beta_schedule="squaredcos_cap_v2")
    noise, _, chunk = tensors()
    sampler = dpa.DiffusionSampler(Network(), scheduler, 8)
    got = sampler(noise=noise, last_chunk=chunk, first_step=3)
    scheduler.set_timesteps(8)
    later, network = scheduler.timesteps[3:], Network()
    sample = scheduler.add_noise(chunk, noise, later[:1])
    with torch.no_grad():
        for timestep in later:
            sample = scheduler.step(network(sample, timestep), timestep, sample).prev_sample
    torch.testing.assert_close(got, sample, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="must be one that needs no x0 of an earlier step, got 3"):
        from_diffusers(scheduler, 8).after(3)
    table = flow_matching(3, "rk4")
    assert isinstance(table.after(4), MultistepTable) and len(table.after(4)) == 8
    with pytest.raises(ValueError, match="first_step must be one that"):
        table.after(5)


def test_parallel_sampling_starts_from_the_last_chunk():
    noise, _, chunk = tensors(torch.float32)
    loop = make_sampler("cpu", "DDIM", steps=6, fused=False, horizon=8)
    windows = dpa.DiffusionSampler(
        loop.unet, loop._scheduler, 6, horizon=8, parallel=dpa.Parallel(4, 0.0)
    )
    cond = torch.randn(3, 5)
    given = {"noise": noise, "last_chunk": chunk, "first_step": 2}
    torch.testing.assert_close(windows(cond, **given), loop(cond, **given), rtol=1e-4, atol=1e-4)
    assert windows.last_parallel.steps == 4
    given = {"condition_data": chunk, "condition_mask": torch.ones_like(chunk)}
    with pytest.raises(ValueError, match="condition_mask must be a bool tensor with parallel"):
        windows(cond, **given)
    with pytest.raises(ValueError, match="inpainting must be 'sample' with parallel"):
        windows(cond, inpainting="x0", **given)


def test_weights_of_a_prefix():
    weights = dpa.prefix_weights
    assert weights(2, 5, 7).tolist() == [1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert weights(2, 5, 7, "zeros").tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert weights(2, 5, 7, "ones").tolist() == [1, 1, 1, 1, 1, 0, 0]
    c = 0.5
    assert weights(0, 1, 3, "exp")[0] == pytest.approx(c * math.expm1(c) / (math.e - 1))
    with pytest.raises(ValueError, match="schedule must be one of linear, exp, ones, zeros, got"):
        weights(1, 2, 3, "cosine")
    with pytest.raises(ValueError, match="delay must be at least 0, got -1"):
        weights(-1, 2, 3)


@pytest.mark.parametrize("schedule", ["linear", "exp", "ones", "zeros"])
def test_weights_of_a_prefix_are_lerobots(schedule):
    rtc = pytest.importorskip("lerobot.policies.rtc.modeling_rtc", exc_type=ImportError)
    from lerobot.policies.rtc.configuration_rtc import RTCAttentionSchedule, RTCConfig

    config = RTCConfig(prefix_attention_schedule=RTCAttentionSchedule(schedule.upper()))
    processor = rtc.RTCProcessor(config)
    for delay in (0, 1, 4, 9):
        for horizon in (0, 1, 5, 8, 12):
            want = processor.get_prefix_weights(delay, horizon, 8)
            got = dpa.prefix_weights(delay, horizon, 8, schedule)
            torch.testing.assert_close(got, want[:8])


REFUSED = [
    ({"inpainting": "both"}, "inpainting must be one of sample, x0, got 'both'"),
    ({"first_step": 2}, "last_chunk must be given where first_step is, got None"),
    ({"first_step": 2.5}, "first_step must be an integer of at least 0, got 2.5"),
    ({"first_step": 6, "last_chunk": torch.zeros(SHAPE)}, r"first_step must lie in 0..5, got 6"),
    ({"last_chunk": torch.zeros(3, 8, 1)}, r"last_chunk must be \(B, T, Da\)"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_arguments_that_are_refused(given, message):
    sampler = dpa.DiffusionSampler(Network(), scheduler_of("DDIM", 6), 6)
    with pytest.raises(ValueError, match=message):
        sampler(noise=torch.zeros(SHAPE), **given)


def test_tables_that_say_too_little_are_refused():
    own = StepTable(torch.arange(2), torch.ones(2, 6))
    sampler = dpa.DiffusionSampler(Network(), own)
    chunk = torch.zeros(SHAPE)
    with pytest.raises(ValueError, match="last_chunk must be left out where the steps' noise lev"):
        sampler(noise=chunk, last_chunk=chunk)
    with pytest.raises(
        ValueError, match="inpainting must be 'sample' where the steps' x0 is unknown"
    ):
        sampler(noise=chunk, inpainting="x0")
    with pytest.raises(ValueError, match=r"levels must be a floating \(2, 2\) tensor, .*\(2, 3\)"):
        StepTable(torch.arange(2), torch.ones(2, 6), levels=torch.ones(2, 3))
