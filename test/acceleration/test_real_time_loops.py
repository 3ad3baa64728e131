"""Chunks that continue the last one, in every loop that ``dpa.accelerate`` knows.

The reference is the loop of the policy itself, around a network whose outputs or samples a hook
changes as the chunk asks, by formulas that are written out here.
"""

import copy
import math
import re

import near_policies as near
import other_policies as others
import planners
import pytest
import torch
from policy_cases import CASES, start_over
from test_other_loops import acts, first

import dpa
from dpa.tracking.replacing import replaced

REFUSED = {
    "its loop starts otherwise": r"consistency|streaming",
    "it has inpainting of its own": r"diffuser|clean_ddpm_x0|clean_ode_2M|clean_edm_heun",
}
# The steps to begin at, where it is not the third; None is in no step, for the reason that follows.
BEGINS = {"flow_policy": 1, "multi_task_dit_rk4": 4, "clean_sde_2M": None, "clean_edm": None}


def why_refused(name):
    return next((why for why, names in REFUSED.items() if re.match(names, name)), None)


TAKEN = [name for name in CASES if why_refused(name) is None]


def made(name, device):
    torch.manual_seed(0)
    make, method, observe, loops = CASES[name]
    plain = copy.deepcopy(make().to(device).eval())  # a case may share its network
    fast = dpa.accelerate(copy.deepcopy(plain), graphs=False)
    observations = [observe(device) for _ in range(3)]
    acts(fast, method, observations)
    start_over(fast)
    return plain, fast, method, loops, observations


def chunk_and_weights(device):
    """No weight is 1: what holds after the last step would hide what the steps do."""
    chunk = torch.randn(2, 8, 2, generator=torch.Generator().manual_seed(5)).clamp(-1, 1)
    weights = 0.9 * dpa.prefix_weights(2, 6, 8)[None, :, None].expand(2, 8, 2)
    return chunk.to(device), weights.to(device)


def levels_at(policy, time):
    """How much of x0 and of noise is in the sample at a timestep, as the policy defines it."""
    if isinstance(policy, others.FlowPolicy):
        time = (time / 99 - policy.eps) / (1 - policy.eps)
        return time, 1 - time
    if isinstance(getattr(policy, "objective", None), others.FlowObjective):
        return time, 1 - time
    if isinstance(policy, planners.EDM):
        return 1.0, math.exp(4 * time)
    place = round(time)
    if isinstance(policy, planners.DiscreteDiffusionSDE):
        return policy.alpha[place].item(), policy.sigma[place].item()
    if isinstance(policy, planners.DDPM):
        bar = policy.bar_alpha[place].item()
    elif isinstance(policy, (near.DiffusionModel, planners.GaussianDiffusion)):
        bar = torch.cumprod(1 - policy.betas, 0)[place].item()
    else:
        objective = getattr(policy, "objective", policy)
        bar = objective.noise_scheduler.alphas_cumprod[place].item()
    return math.sqrt(bar), math.sqrt(1 - bar)


def of_x0(policy, time):
    """The weights of what the network takes and gives in x0, and what x0 is clipped to."""
    signal, noise = levels_at(policy, time)
    flow = isinstance(getattr(policy, "objective", policy), others.FlowObjective)
    if flow or isinstance(policy, others.FlowPolicy):
        return 1.0, noise, math.inf
    if isinstance(policy, planners.EDM):
        norm = policy.sigma_data**2 + noise**2
        scaled = policy.sigma_data**2 / math.sqrt(norm)
        return scaled, noise * policy.sigma_data / math.sqrt(norm), math.inf
    bound = 1.0  # of diffusers' schedulers
    if isinstance(policy, near.DiffusionModel):
        bound = policy.denoised_clip_value
    if isinstance(policy, planners.Agent):
        bound = None if policy.x_max is None else float(torch.as_tensor(policy.x_max).max())
    bound = math.inf if bound is None else bound
    names = ("predict_epsilon", "predict_noise")
    if not all(getattr(policy, name, True) for name in names):
        return 0.0, 1.0, bound
    return 1 / signal, -noise / signal, bound


def seen(args, kwargs):
    """The sample and the timestep that a network is called with."""
    sample, time = (*args, *(kwargs[n] for n in ("sample", "timestep") if n in kwargs))[:2]
    return sample, torch.as_tensor(time).flatten()[0].item()


def networks(fast, policy, loops):
    return {id(n): n for n in (replaced(fast, x).loop.network_of(policy) for x in loops)}.values()


@pytest.mark.parametrize("name", TAKEN)
def test_x0_is_held(name, device, recwarn):
    plain, fast, method, loops, observations = made(name, device)
    chunk, weights = chunk_and_weights(device)
    free = acts(copy.deepcopy(plain), method, observations)

    def holds(module, args, kwargs, output):
        sample, time = seen(args, kwargs)
        of_sample, of_output, bound = of_x0(plain, time)
        if of_output == 0:  # Runge and Kutta's last stage is at the end
            return output
        x0 = (of_sample * sample + of_output * output).clamp(-bound, bound)
        held = (torch.lerp(x0, chunk, weights) - of_sample * sample) / of_output
        # In the output's order in memory: FlowPolicy makes noise like it.
        return torch.empty_like(output).copy_(torch.where(weights == 0, output, held))

    for network in networks(fast, plain, loops):
        network.register_forward_hook(holds, with_kwargs=True)
    expected = acts(plain, method, observations)
    with dpa.continuing(fast, chunk, weights):
        got = acts(fast, method, observations)
    assert not [str(one.message) for one in recwarn.list]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert (first(free[0]) - first(expected[0])).abs().max() > 0.05  # the chunk has a say


@pytest.mark.parametrize("name", [name for name in TAKEN if BEGINS.get(name, 2) is not None])
def test_a_loop_begins_at_a_step(name, device, recwarn):
    plain, fast, method, loops, observations = made(name, device)
    begin, (chunk, _), calls = BEGINS.get(name, 2), chunk_and_weights(device), []

    def starts(module, args, kwargs):
        sample, time = seen(args, kwargs)
        if len(calls) == begin:  # with the random numbers that a loop starts with
            torch.manual_seed(5)
            signal, noise = levels_at(plain, time)
            sample.copy_(signal * chunk + noise * torch.randn(sample.shape, device=device))
        calls.append(time)

    [network] = networks(fast, plain, loops[:1])
    network = getattr(plain, "actor", network)  # which DPPO calls first, and on the sample itself
    network.register_forward_pre_hook(starts, with_kwargs=True)
    expected = acts(plain, method, observations[:1])
    with dpa.continuing(fast, chunk, first_step=begin):
        got = acts(fast, method, observations[:1])
    assert not [str(one.message) for one in recwarn.list] and len(calls) > begin
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("predict_epsilon", [True, False])
def test_diffuser_that_is_given_no_states(predict_epsilon, device, recwarn):
    """Nothing holds in its loop but the chunk: in x0, and from the step to begin at."""
    torch.manual_seed(0)
    plain = planners.GaussianDiffusion(predict_epsilon=predict_epsilon).to(device).eval()
    fast = dpa.accelerate(copy.deepcopy(plain), graphs=False, fallback=False)
    chunk = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(5)).clamp(-1, 1).to(device)
    weights, calls = torch.full_like(chunk, 0.4), []

    def plan(planner):
        torch.manual_seed(5)
        result = planner.p_sample_loop(chunk.shape, {}, verbose=False).trajectories
        return result, torch.randn(3, device=device)

    def starts(module, args, kwargs):
        if len(calls) == 2:
            torch.manual_seed(5)
            signal, noise = levels_at(plain, args[2][0].item())
            args[0].copy_(signal * chunk + noise * torch.randn(chunk.shape, device=device))
        calls.append(args)

    def holds(module, args, kwargs, output):
        of_sample, of_output, bound = of_x0(plain, args[2][0].item())
        x0 = (of_sample * args[0] + of_output * output).clamp(-bound, bound)
        held = (torch.lerp(x0, chunk, weights) - of_sample * args[0]) / of_output
        return torch.empty_like(output).copy_(held)

    plan(fast)
    plain.model.register_forward_pre_hook(starts, with_kwargs=True)
    plain.model.register_forward_hook(holds, with_kwargs=True)
    expected = plan(plain)
    with dpa.continuing(fast, chunk, weights, first_step=2):
        torch.testing.assert_close(plan(fast), expected, rtol=1e-3, atol=1e-3)


def test_levels_of_scaled_samples(device):
    """What EDM's network takes is scaled, so that no hook can change the loop's sample."""
    plain, fast, _, [loop], _ = made("clean_edm", device)
    table = replaced(fast, loop)._routes[0].sampler.table
    for time, scale, levels in zip(table.timesteps, table.scales, table.levels, strict=True):
        want = torch.tensor(levels_at(plain, time.item()), dtype=torch.float64) * scale
        torch.testing.assert_close(levels, want, rtol=1e-5, atol=0)
    assert math.isclose(table.levels[0, 1], 80 / math.hypot(80, 0.5), rel_tol=1e-5)


def test_steps_taken_again_begin_where_the_last_one_ended(device):
    plain, fast, _, [loop], _ = made("clean_sde_1", device)
    levels = replaced(fast, loop)._routes[0].sampler.table.levels
    for row in levels[-2:]:
        want = torch.stack([plain.alpha[0], plain.sigma[0]]).double().cpu()
        torch.testing.assert_close(row, want)


REASONS = [(name, {}, why_refused(name)) for name in CASES if why_refused(name)]
REASONS += [
    ("clean_sde_2M", {"first_step": 2}, "first_step must be one that needs no x0"),
    ("multi_task_dit_rk4", {"first_step": 1}, "first_step must be one that needs no x0"),
]


@pytest.mark.parametrize(("name", "way", "why"), REASONS)
def test_what_cannot_continue_says_so(name, way, why, device):
    plain, fast, method, _, observations = made(name, device)
    chunk = torch.zeros(2, 8, 5 if "diffuser" in name else 2, device=device)
    weights = torch.full_like(chunk, 0.5)
    expected = acts(plain, method, observations[:1])
    says = f"cannot continue the last chunk: .*{why}"
    with dpa.continuing(fast, chunk, weights, **way), pytest.warns(RuntimeWarning, match=says):
        got = acts(fast, method, observations[:1])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    start_over(fast)
    dpa.accelerate(fast, graphs=False, fallback=False)
    with dpa.continuing(fast, chunk, weights, **way), pytest.raises(RuntimeError, match=says):
        acts(fast, method, observations[:1])


def test_rti_starts_from_its_own_chunk(device):
    """Its loop takes no noise, so nothing says what a step starts from."""
    _, fast, method, _, observations = made("rti", device)
    acts(fast, method, observations[:1])
    chunk, _ = chunk_and_weights(device)
    says = pytest.warns(RuntimeWarning, match=r"rti_sample .*noise levels are unknown")
    with dpa.continuing(fast, chunk, first_step=1), says:
        acts(fast, method, observations[:1])


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"inpainting": "noise"}, "inpainting must be one of sample, x0, got 'noise'"),
        ({"first_step": -1}, "first_step must be at least 0, got -1"),
    ],
)
def test_there_is_no_such_way(way, message):
    _, fast, *_ = made("dppo", "cpu")
    chunk, weights = chunk_and_weights("cpu")
    with pytest.raises(ValueError, match=message), dpa.continuing(fast, chunk, weights, **way):
        pass


@pytest.mark.parametrize("way", [{"first_step": 99}, {"inpainting": "x0"}])
def test_a_chunk_that_does_not_fit_is_an_error(way):
    _, fast, method, _, observations = made("dppo", "cpu")
    chunk, weights = chunk_and_weights("cpu")
    given = (chunk, weights) if "first_step" in way else (chunk[:, :7], weights[:, :7])
    says = pytest.raises(ValueError, match=r"first_step must lie in|\(B, T, Da\)")
    with dpa.continuing(fast, *given, **way), says:
        acts(fast, method, observations[:1])


@pytest.mark.parametrize("inpainting", ["x0", "sample"])
def test_a_bool_mask_stays_one(inpainting):
    """With Heun's steps weights in the sample are refused, and a mask is not."""
    _, fast, method, [loop], observations = made("clean_edm", "cpu")
    fast.options["solver"] = "heun"
    acts(fast, method, observations)
    chunk, _ = chunk_and_weights("cpu")
    mask = torch.zeros_like(chunk, dtype=torch.bool)
    mask[:, :2] = True
    with dpa.continuing(fast, chunk, mask, inpainting=inpainting):
        got = acts(fast, method, observations[:1])[0]
    assert replaced(fast, loop).shadow.errors
    torch.testing.assert_close(got[:, :2], chunk[:, :2], rtol=0, atol=0)
