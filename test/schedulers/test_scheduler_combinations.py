"""Randomly drawn schedulers of diffusers against whole loops on their own ``step``, in float64.

Runs under any version of diffusers: options that its constructors lack are left out.
"""

import inspect
import os

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import dpa
from dpa.schedulers.conversion import from_diffusers

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
SHAPE = (2, 4, 3)

BETAS = st.one_of(
    st.fixed_dictionaries({"beta_schedule": st.sampled_from(["squaredcos_cap_v2"])}),
    st.fixed_dictionaries(
        {
            "beta_schedule": st.sampled_from(["linear", "scaled_linear", "sigmoid"]),
            "beta_start": st.sampled_from([1e-4, 1e-3]),
            "beta_end": st.sampled_from([0.02, 0.2]),
        }
    ),
    st.fixed_dictionaries({"beta_schedule": st.just("laplace")}),
    st.fixed_dictionaries({"trained_betas": st.just("drawn")}),
)
COMMON = {
    "prediction_type": st.sampled_from(["epsilon", "sample", "v_prediction"]),
    "timestep_spacing": st.sampled_from(["leading", "linspace", "trailing"]),
    "steps_offset": st.sampled_from([0, 1]),
    "rescale_betas_zero_snr": st.sampled_from([False, False, True]),
}
CLIP = {
    "clip_sample": st.booleans(),
    "clip_sample_range": st.sampled_from([1.0, 0.5, 2.5, 5.0]),
}
EDM = {
    "sigma_min": st.sampled_from([0.002, 0.02]),
    "sigma_max": st.sampled_from([80.0, 10.0]),
    "sigma_data": st.sampled_from([0.5, 1.0]),
    "sigma_schedule": st.sampled_from(["karras", "exponential"]),
    "rho": st.sampled_from([7.0, 3.0]),
    "prediction_type": st.sampled_from(["epsilon", "v_prediction"]),
    "final_sigmas_type": st.sampled_from(["zero", "sigma_min"]),
}
OPTIONS = {
    "DDPMScheduler": {
        **COMMON,
        **CLIP,
        "variance_type": st.sampled_from(
            ["fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"]
        ),
    },
    "DDIMScheduler": {**COMMON, **CLIP, "set_alpha_to_one": st.booleans()},
    "DPMSolverMultistepScheduler": {
        **COMMON,
        "solver_order": st.sampled_from([1, 2, 2, 3]),
        "solver_type": st.sampled_from(["midpoint", "heun"]),
        "lower_order_final": st.booleans(),
        "euler_at_final": st.booleans(),
        "use_karras_sigmas": st.booleans(),
        "final_sigmas_type": st.sampled_from(["zero", "sigma_min"]),
    },
    "UniPCMultistepScheduler": {
        **COMMON,
        "solver_order": st.sampled_from([1, 2, 2, 3]),
        "solver_type": st.sampled_from(["bh1", "bh2"]),
        "predict_x0": st.booleans(),
        "lower_order_final": st.booleans(),
        "disable_corrector": st.sampled_from([[], [0], [1, 3]]),
        "use_karras_sigmas": st.booleans(),
        "final_sigmas_type": st.sampled_from(["zero", "sigma_min"]),
    },
    "HeunDiscreteScheduler": {**COMMON, **CLIP, "use_karras_sigmas": st.booleans()},
    "EulerDiscreteScheduler": {
        **COMMON,
        "interpolation_type": st.sampled_from(["linear", "linear", "log_linear"]),
        "timestep_type": st.sampled_from(["discrete", "continuous"]),
        "use_karras_sigmas": st.booleans(),
        "final_sigmas_type": st.sampled_from(["zero", "sigma_min"]),
    },
    "EDMEulerScheduler": EDM,
    "EDMDPMSolverMultistepScheduler": {
        **EDM,
        "solver_order": st.sampled_from([1, 2, 2, 3]),
        "solver_type": st.sampled_from(["midpoint", "heun"]),
        "lower_order_final": st.booleans(),
        "euler_at_final": st.booleans(),
    },
    "FlowMatchEulerDiscreteScheduler": {
        "shift": st.sampled_from([1.0, 3.0, 0.5]),
        "invert_sigmas": st.sampled_from([False, False, True]),
        "use_karras_sigmas": st.booleans(),
        "shift_terminal": st.sampled_from([None, 0.02]),
    },
}
# The solvers round the sample to float32 in every step, whatever its dtype.
TOLERANCE = {"DDPMScheduler": 1e-10, "DDIMScheduler": 1e-10}


class Network(nn.Module):
    """A bounded and uneven function of the sample and the timestep."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, sample, timestep, global_cond=None):
        phase = torch.as_tensor(timestep, dtype=sample.dtype).reshape(-1, 1, 1) / 7
        return torch.tanh(self.weight * sample.roll(1, -1)) + 0.5 * torch.sin(phase)


@st.composite
def processes(draw, name):
    """A live scheduler, a number of steps and the options of ``step``."""
    kind = getattr(diffusers, name)
    train_steps = draw(st.integers(2, 40))
    options = draw(st.fixed_dictionaries(OPTIONS[name]))
    if not name.startswith(("Flow", "EDM")):
        options |= draw(BETAS)
        assume(options.get("beta_schedule") != "laplace" or name == "DDPMScheduler")
    if options.get("trained_betas"):
        betas = st.lists(st.floats(1e-3, 0.4), min_size=train_steps, max_size=train_steps)
        options["trained_betas"] = draw(betas)
    accepted = inspect.signature(kind.__init__).parameters
    options = {key: value for key, value in options.items() if key in accepted}
    try:
        scheduler = kind(num_train_timesteps=train_steps, **options)
    except (AttributeError, NotImplementedError, ValueError):
        assume(False)  # a schedule that this version lacks, or a pair of options that it refuses
    # Where Heun's steps do not show their x0, as in older versions, a clipped one is refused.
    shows = hasattr(diffusers.schedulers, "scheduling_heun_discrete") and hasattr(
        diffusers.schedulers.scheduling_heun_discrete, "HeunDiscreteSchedulerOutput"
    )
    assume(name != "HeunDiscreteScheduler" or shows or not scheduler.config.get("clip_sample"))
    steps = draw(st.integers(1, train_steps))
    step_options = {}
    if name == "DDIMScheduler":
        step_options["eta"] = draw(st.sampled_from([0.0, 0.4, 1.0]))
        step_options["use_clipped_model_output"] = draw(st.booleans())
    return scheduler, steps, step_options


def live_loop(scheduler, steps, sample, generator, options):
    """Sample as policies do, on diffusers' own ``set_timesteps`` and ``step``."""
    network = Network()
    scheduler.set_timesteps(steps)
    if "generator" in inspect.signature(scheduler.step).parameters:
        options = {**options, "generator": generator}
    sample = sample * float(getattr(scheduler, "init_noise_sigma", 1.0))
    scale = getattr(scheduler, "scale_model_input", lambda sample, timestep: sample)
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            output = network(scale(sample, timestep), timestep)
            sample = scheduler.step(output, timestep, sample, **options).prev_sample
    return sample


def divides_by_zero(scheduler):
    """Whether x0 is a quotient by sqrt(alpha_bar) = 0, of which clipping keeps the sign."""
    kind = type(scheduler).__name__
    if scheduler.config.get("prediction_type") != "epsilon" or kind not in TOLERANCE:
        return False  # the solvers keep alpha_bar above zero
    return bool((scheduler.alphas_cumprod[scheduler.timesteps.long()] == 0).any())


def hold_against_the_live_loop(process):
    scheduler, steps, options = process
    noise = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    try:
        want = live_loop(scheduler, steps, noise, generators[0], options)
    except (AssertionError, IndexError, RuntimeError, ValueError):
        assume(False)  # diffusers itself cannot run this combination
    if not torch.isfinite(want).all() or divides_by_zero(scheduler):
        with pytest.raises(ValueError, match=r"step must be finite, got (nan|-?inf) at timestep"):
            from_diffusers(scheduler, steps, **options)
        return
    sampler = dpa.DiffusionSampler(Network(), scheduler, steps, **options)
    got = sampler(noise=noise, generator=generators[1])
    limit = TOLERANCE.get(type(scheduler).__name__, 1e-5)
    scale = float(want.abs().max().clamp(min=1.0))
    torch.testing.assert_close(got / scale, want / scale, rtol=limit, atol=limit)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


CASES = int(os.environ.get("DPA_FUZZ_CASES", "60"))
SETTINGS = settings(max_examples=CASES, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("name", OPTIONS)
def test_any_combination_gives_the_live_loop(name):
    if not hasattr(diffusers, name):
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    SETTINGS(given(processes(name))(hold_against_the_live_loop))()


@given(st.data())
@SETTINGS
def test_any_custom_timesteps_give_the_live_loop(data):
    # DDPM alone takes a list of timesteps, and since a later version than the oldest.
    kind = diffusers.DDPMScheduler
    if "timesteps" not in inspect.signature(kind.set_timesteps).parameters:
        pytest.skip(f"diffusers {diffusers.__version__} takes no list of timesteps")
    chosen = data.draw(st.sets(st.integers(0, 29), min_size=1))
    scheduler = kind(30, beta_schedule="squaredcos_cap_v2")
    scheduler.set_timesteps(timesteps=sorted(chosen, reverse=True))
    sample, output = torch.randn(2, *SHAPE, dtype=torch.float64)
    table = from_diffusers(scheduler)
    advance = table.stepper()
    for step, timestep in enumerate(scheduler.timesteps):
        noise = torch.zeros_like(sample) if table.draws_noise[step] else None
        want = scheduler.step(output, timestep, sample, generator=torch.Generator().manual_seed(3))
        if noise is not None:
            generator = torch.Generator().manual_seed(3)
            noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        got = advance(step, output, sample, noise)
        torch.testing.assert_close(got, want.prev_sample, rtol=1e-9, atol=1e-9)
