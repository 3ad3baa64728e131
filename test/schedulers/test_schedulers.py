"""Step tables against the schedulers of diffusers, which nobody here wrote."""

import itertools
import math

import pytest
import torch
from tolerances import tolerance

import dpa
from dpa.schedulers import LiveSteps, MultistepTable, StepTable, from_diffusers
from dpa.schedulers.inpainting import Inpainting

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
DDPM, DDIM = diffusers.DDPMScheduler, diffusers.DDIMScheduler
DPM, EULER = diffusers.DPMSolverMultistepScheduler, diffusers.FlowMatchEulerDiscreteScheduler
UNIPC, HEUN = diffusers.UniPCMultistepScheduler, diffusers.HeunDiscreteScheduler
EDM, EDM_DPM = diffusers.EDMEulerScheduler, diffusers.EDMDPMSolverMultistepScheduler

PREDICTIONS = ("epsilon", "sample", "v_prediction")
CLIPS = (
    {"clip_sample": True},
    {"clip_sample": True, "clip_sample_range": 2.5},
    {"clip_sample": False},
)


def assert_steps_match(scheduler, steps, device="cpu", **options):
    """Hold every step of the table against ``scheduler.step``, value and random stream."""
    table = from_diffusers(scheduler, steps, **options)
    if steps is not None:
        scheduler.set_timesteps(steps)
    assert table.timesteps.tolist() == scheduler.timesteps.tolist()
    on_device = table.to(device, torch.float32)
    for step, timestep in enumerate(scheduler.timesteps):
        # Steps alternate between samples inside the clip range and far outside.
        size = 0.3 if step % 2 else 3.0
        sample, output = torch.randn(2, 3, 4, 2) * size
        generators = [torch.Generator().manual_seed(step) for _ in range(2)]
        want = scheduler.step(output, timestep, sample, generator=generators[0], **options)
        noise = torch.randn(3, 4, 2, generator=generators[1]) if table.draws_noise[step] else None
        assert torch.equal(generators[0].get_state(), generators[1].get_state())
        got = torch.ops.dpa.scheduler_step(
            output.to(device),
            sample.to(device),
            on_device.coefficients,
            torch.tensor(step, device=device),
            None if noise is None else noise.to(device),
            table.clip,
        )
        # Coefficients reach 1e4, so rounding scales with the largest term, not with the result.
        scale = float(want.prev_sample.abs().max().clamp(min=1.0))
        torch.testing.assert_close(
            got.cpu() / scale, want.prev_sample / scale, **tolerance(torch.float32)
        )
    return table


@pytest.mark.parametrize("clip", CLIPS, ids=["clip_1", "clip_2.5", "no_clip"])
@pytest.mark.parametrize("prediction_type", PREDICTIONS)
@pytest.mark.parametrize(
    "beta_schedule", ["squaredcos_cap_v2", "linear", "scaled_linear", "sigmoid"]
)
def test_ddpm_predictions_and_clipping(beta_schedule, prediction_type, clip, device):
    scheduler = DDPM(50, beta_schedule=beta_schedule, prediction_type=prediction_type, **clip)
    table = assert_steps_match(scheduler, 50, device)
    assert table.draws_noise == (True,) * 49 + (False,)
    assert table.clip == (clip.get("clip_sample_range", 1.0) if clip["clip_sample"] else math.inf)


@pytest.mark.parametrize("variance_type", ["fixed_small", "fixed_small_log", "fixed_large"])
@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
def test_ddpm_variances_spacings_and_subsets(spacing, variance_type):
    options = {"variance_type": variance_type, "timestep_spacing": spacing}
    scheduler = DDPM(100, beta_schedule="squaredcos_cap_v2", **options)
    for steps in (1, 7, 10, 100):
        assert_steps_match(scheduler, steps)


@pytest.mark.parametrize("clip", CLIPS, ids=["clip_1", "clip_2.5", "no_clip"])
@pytest.mark.parametrize("prediction_type", PREDICTIONS)
@pytest.mark.parametrize("set_alpha_to_one", [True, False])
def test_ddim_predictions_and_clipping(set_alpha_to_one, prediction_type, clip, device):
    scheduler = DDIM(
        100,
        beta_schedule="squaredcos_cap_v2",
        prediction_type=prediction_type,
        set_alpha_to_one=set_alpha_to_one,
        **clip,
    )
    for eta, reclip in itertools.product((0.0, 0.7), (False, True)):
        options = {"eta": eta, "use_clipped_model_output": reclip}
        table = assert_steps_match(scheduler, 8, device, **options)
        assert table.draws_noise == (eta > 0,) * 8


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("steps", [1, 7, 10, 100])
def test_ddim_spacings_and_subsets(steps, spacing):
    options = {"timestep_spacing": spacing, "beta_schedule": "squaredcos_cap_v2"}
    assert_steps_match(DDIM(100, **options), steps)


def test_steps_offset():
    assert assert_steps_match(DDIM(100, steps_offset=1), 10).timesteps[-1] == 1
    assert assert_steps_match(DDPM(100, steps_offset=1), 10).draws_noise[-1]


def test_trained_betas_and_zero_snr():
    betas = torch.linspace(1e-3, 0.3, 20).tolist()
    assert_steps_match(DDPM(20, trained_betas=betas), 20)
    assert_steps_match(DDIM(20, trained_betas=betas), 5)
    options = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    assert_steps_match(DDIM(20, timestep_spacing="trailing", **options), 5)


def test_timesteps_that_the_object_holds():
    scheduler = DDPM(100, beta_schedule="squaredcos_cap_v2")
    assert from_diffusers(scheduler).timesteps.tolist() == list(range(99, -1, -1))
    scheduler.set_timesteps(timesteps=[90, 40, 10, 3])
    assert_steps_match(scheduler, None)
    scheduler = DDIM(40)
    assert from_diffusers(scheduler).timesteps.tolist() == list(range(39, -1, -1))
    scheduler.set_timesteps(4)
    assert_steps_match(scheduler, None)


def test_the_live_object_stays_as_it_is():
    scheduler = DDIM(100, beta_schedule="squaredcos_cap_v2")
    scheduler.set_timesteps(20)
    before = dict(vars(scheduler))
    state = torch.get_rng_state()
    from_diffusers(scheduler, 5, eta=1.0)
    assert vars(scheduler).keys() == before.keys()
    assert all(vars(scheduler)[name] is value for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_subclass_is_measured_and_an_uneven_one_refused():
    class Shrunk(DDPM):
        def step(self, model_output, *args, **kwargs):
            return super().step(0.5 * model_output, *args, **kwargs)

    class Bent(DDPM):
        def step(self, model_output, *args, **kwargs):
            return super().step(model_output + 0.1 * model_output**2, *args, **kwargs)

    table, plain = from_diffusers(Shrunk(20)), from_diffusers(DDPM(20))
    torch.testing.assert_close(table.coefficients[:, 1], plain.coefficients[:, 1] / 2)
    with pytest.raises(ValueError, match=r"Bent.step must be linear .* at timestep 19"):
        from_diffusers(Bent(20))


REFUSED = [
    (DDPM, {"thresholding": True}, "thresholding must be False .*, got True"),
    (DDIM, {"thresholding": True}, "thresholding must be False .*, got True"),
    (DDPM, {"variance_type": "learned"}, "variance_type must be one of .*, got 'learned'"),
    (DDPM, {"variance_type": "learned_range"}, "variance_type must .*, got 'learned_range'"),
    # diffusers takes the square root of a logarithm here, which is NaN.
    (DDPM, {"variance_type": "fixed_large_log"}, "finite, got nan .*'fixed_large_log'"),
    (DDPM, {"prediction_type": "flow"}, "prediction_type must be one of .*, got 'flow'"),
    (DPM, {"thresholding": True}, "thresholding must be False .*, got True"),
    (DPM, {"algorithm_type": "sde-dpmsolver++"}, "algorithm_type must .*'sde-dpmsolver"),
    (DPM, {"variance_type": "learned"}, "variance_type must be None .*, got 'learned'"),
    (EULER, {"stochastic_sampling": True}, "stochastic_sampling must be False .*, got True"),
    (UNIPC, {"thresholding": True}, "thresholding must be False .*, got True"),
    (UNIPC, {"solver_p": DDIM(20)}, "solver_p must be None for UniPCMultistepScheduler"),
    (EDM_DPM, {"algorithm_type": "sde-dpmsolver++"}, "algorithm_type must be dpmsolver.. .*'sde"),
    (HEUN, {"prediction_type": "flow"}, "cannot be measured, it raised ValueError: prediction"),
    (diffusers.EulerDiscreteScheduler, {"prediction_type": "flow"}, "ValueError: prediction_type"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_options_that_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        from_diffusers(kind(num_train_timesteps=20, **options), 10)


FOREIGN = [IndexError("no such step"), AssertionError(), KeyError("t"), RecursionError("deep")]
FOREIGN += [NotImplementedError("later"), TypeError("a tensor is wanted"), ValueError("odd")]
FOREIGN += [ZeroDivisionError("by zero"), StopIteration(), OSError(2, "gone")]


@pytest.mark.parametrize("error", FOREIGN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["step", "set_timesteps", "__deepcopy__", "config"])
def test_whatever_a_scheduler_raises_refuses_its_table_alone(error, where):
    """The probes are points that no loop has; accelerate, explain and samplers go on without."""

    def refuse(self, *args, **kwargs):
        raise error

    replacement = property(refuse) if where == "config" else refuse
    own = type("Own", (DDIM,), {where: replacement})
    scheduler = DDIM(20)
    scheduler.__class__ = own
    reason = f"Own cannot be measured, it raised {type(error).__name__}:"
    with pytest.raises(ValueError, match=reason) as caught:
        from_diffusers(scheduler, 5)
    assert caught.value.__cause__ is error


class Picky(DDIM):
    """Refuses what the probes are: float64, and one row."""

    def step(self, model_output, timestep, sample, **options):
        assert model_output.dtype == torch.float32, "float32 alone"
        if sample.shape[0] == 1:
            raise IndexError("row 1 is out of range")
        return super().step(model_output, timestep, sample, **options)


def test_a_scheduler_that_refuses_the_probes_runs_as_it_is():
    unet = dpa.nn.ConditionalUnet1D(2, diffusion_step_embed_dim=8, down_dims=(8,)).eval()
    noise = torch.randn(2, 4, 2)
    assert "AssertionError: float32 alone" in str(dpa.explain(Picky(20)))
    with pytest.raises(TypeError, match="AssertionError: float32 alone"):
        dpa.accelerate(Picky(20))
    with pytest.raises(ValueError, match="AssertionError: float32 alone"):
        dpa.DiffusionSampler(unet, Picky(20), 5)
    with pytest.warns(UserWarning, match="the scheduler's own step runs instead"):
        sampler = dpa.DiffusionSampler(unet, Picky(20), 5, fallback=True)
    with torch.no_grad():
        expected = dpa.DiffusionSampler(unet, DDIM(20), 5)(noise=noise)
        torch.testing.assert_close(sampler(noise=noise), expected, rtol=1e-4, atol=1e-4)


def test_a_policy_whose_scheduler_refuses_the_probes_runs_as_it_is():
    policies = pytest.importorskip("policies")
    policy = policies.lerobot_policy()
    diffusion = policy.diffusion
    diffusion.noise_scheduler = Picky(20)
    diffusion.num_inference_steps = 5

    def sample():
        cond = torch.ones(2, diffusion.unet.down_modules[0][0].cond_encoder[1].in_features - 16)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            return diffusion.conditional_sample(2, global_cond=cond, generator=generator)

    expected = sample()
    assert "AssertionError: float32 alone" in str(dpa.explain(policy))
    with pytest.warns(RuntimeWarning, match="AssertionError: float32 alone"):
        dpa.accelerate(policy)
    torch.testing.assert_close(sample(), expected, rtol=1e-4, atol=1e-4)
    diffusion.noise_scheduler.__class__ = DDIM
    torch.testing.assert_close(sample(), expected, rtol=1e-4, atol=1e-4)
    diffusion.noise_scheduler.__class__ = Picky  # while it runs
    with pytest.warns(RuntimeWarning, match="AssertionError: float32 alone"):
        torch.testing.assert_close(sample(), expected, rtol=1e-4, atol=1e-4)


def test_arguments_that_are_refused():
    with pytest.raises(TypeError, match=r"must be a DDPMScheduler, a DDIMSch.*, got Euler"):
        from_diffusers(diffusers.EulerAncestralDiscreteScheduler())
    with pytest.raises(TypeError, match="got int"):
        from_diffusers(3)
    with pytest.raises(ValueError, match=r"eta must be 0 \(the option is DDIM's\).*, got 0.5"):
        from_diffusers(DDPM(20), eta=0.5)
    with pytest.raises(ValueError, match=r"use_clipped_model_output must be False .*, got True"):
        from_diffusers(DDPM(20), use_clipped_model_output=True)
    for eta in (-1, "1"):
        with pytest.raises(ValueError, match=rf"eta must be finite and at least 0 .*, got {eta!r}"):
            from_diffusers(DDIM(20), eta=eta)
    for steps in (0, 21, 2.5, "5"):
        with pytest.raises(ValueError, match=rf"num_inference_steps must lie in 1..20.*{steps}"):
            from_diffusers(DDIM(20), steps)
    for kind in (DPM, EULER, UNIPC):
        with pytest.raises(
            ValueError, match=f"num_inference_steps must be given for a {kind.__name__}"
        ):
            from_diffusers(kind(20))
        with pytest.raises(ValueError, match=r"eta must be 0 \(the option is DDIM's\).*, got 0.5"):
            from_diffusers(kind(20), 5, eta=0.5)
    scheduler = DDPM(20)
    scheduler.register_to_config(novelty=0.5)
    with pytest.raises(ValueError, match=r"novelty must be left at its default, .*, got 0.5"):
        from_diffusers(scheduler)


def test_step_table_checks_its_parts_and_moves():
    timesteps, rows = torch.arange(3), torch.ones(3, 6)
    table = StepTable(timesteps, rows)
    assert len(table) == 3 and table.clip == math.inf and table.draws_noise == (True,) * 3
    moved = table.to("meta", torch.float16)
    assert moved.coefficients.dtype == torch.float16 and moved.timesteps.device.type == "meta"
    assert moved.timesteps.dtype == torch.int64 and table.coefficients.dtype == torch.float32
    with pytest.raises(ValueError, match=r"coefficients must be a floating \(S, 6\).*\(3, 5\)"):
        StepTable(timesteps, rows[:, :5])
    with pytest.raises(ValueError, match=r"timesteps must be \(3,\), .*, got \(2,\)"):
        StepTable(timesteps[:2], rows)
    with pytest.raises(ValueError, match="clip must be at least 0, got -1"):
        StepTable(timesteps, rows, clip=-1.0)
    with pytest.raises(ValueError, match="draws_noise must have 3 entries, got 1"):
        StepTable(timesteps, rows, draws_noise=(True,))


def test_denoise_constants_follow_from_the_table():
    scheduler = DDPM(30, beta_schedule="squaredcos_cap_v2")
    table = from_diffusers(scheduler).coefficients.float().flip(0)
    alphas_cumprod = scheduler.alphas_cumprod
    constants = torch.stack(
        [(1 - alphas_cumprod).sqrt(), alphas_cumprod.sqrt(), table[:, 3], table[:, 2], table[:, 5]],
        dim=1,
    )
    sample, output, noise = torch.randn(3, 30, 4, 2)
    timestep = torch.arange(30)
    got = torch.ops.dpa.denoise(output, sample, constants.flatten(), timestep, noise)
    want = dpa.reference.scheduler_step(output, sample, table, timestep, noise, 1.0)
    torch.testing.assert_close(got, want, **tolerance(torch.float32))


def test_a_solver_that_ran_already_is_measured_from_its_first_step():
    scheduler = DPM(100, beta_schedule="squaredcos_cap_v2")
    scheduler.set_timesteps(8)
    fresh = from_diffusers(scheduler)
    for timestep in scheduler.timesteps:
        scheduler.step(torch.randn(1, 4), timestep, torch.randn(1, 4))
    again = from_diffusers(scheduler)
    assert isinstance(again, MultistepTable) and len(again.history[0]) == 1
    assert again.history[0][0] == 0 != again.history[1][0]
    for got, want in ((again.history, fresh.history), (again.coefficients, fresh.coefficients)):
        want = torch.as_tensor(want, dtype=torch.float64)
        torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float64), want)


def test_euler_steps_are_differences_of_the_noise_levels():
    scheduler = EULER(1000, shift=3.0)
    table = from_diffusers(scheduler, 6)
    scheduler.set_timesteps(6)
    assert type(table) is StepTable and table.timesteps.dtype == torch.float32
    want = torch.zeros(6, 6)
    want[:, 3], want[:, 4] = 1.0, scheduler.sigmas.diff()
    torch.testing.assert_close(table.coefficients.float(), want)


def test_multistep_table_checks_its_history():
    timesteps, rows = torch.arange(2), torch.ones(2, 6)
    for history in (((0.5,),), ((0.5,), (0.5, 0.1))):
        with pytest.raises(ValueError, match="history must have 2 entries of one length"):
            MultistepTable(timesteps, rows, history=history)
    with pytest.raises(ValueError, match=r"scales must be a floating \(2, \) tensor, .*\(3,\)"):
        StepTable(timesteps, rows, scales=torch.ones(3))


OF_EVERY_KIND = [DDIM(20), DPM(20, solver_order=3), EULER(20), UNIPC(20, solver_order=3), HEUN(20)]
OF_EVERY_KIND += [diffusers.EulerDiscreteScheduler(20), EDM(), EDM_DPM()]


@pytest.mark.parametrize("scheduler", OF_EVERY_KIND, ids=lambda one: type(one).__name__)
def test_a_step_reads_nothing_off_its_table(scheduler):
    """A capture cannot wait for what is on the GPU, nor can anyone read a meta tensor."""
    table = from_diffusers(scheduler, 4).to("meta", torch.float32)
    advance, sample = table.stepper(), table.begin(torch.empty(1, 8, 2, device="meta"))
    held = torch.zeros_like(sample), torch.zeros_like(sample, dtype=torch.bool)
    inpainting = Inpainting(*held, "sample", table)
    for step in range(len(table)):
        sample = inpainting.sample(step, sample)
        sample = advance(step, torch.empty_like(sample), sample, None)
    assert inpainting.last(sample).is_meta


def test_a_loop_that_scales_nothing():
    """Policies give the network the sample as it is, whatever the scheduler would make of it."""
    scheduler = diffusers.EulerDiscreteScheduler(20, prediction_type="epsilon")
    table, scaled = from_diffusers(scheduler, 5, scaled=False), from_diffusers(scheduler, 5)
    assert type(table) is type(scaled) is StepTable
    assert table.scales is None and table.init_noise_sigma == 1.0
    scheduler.set_timesteps(5)
    sample, output = torch.randn(2, 1, 4, dtype=torch.float64)
    want = scheduler.step(output, scheduler.timesteps[0], sample).prev_sample
    got = table.stepper()(0, output, sample, None)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    sigmas = scheduler.sigmas.double()
    torch.testing.assert_close(scaled.scales, 1 / (sigmas[:-1] ** 2 + 1).sqrt())
    begun = scaled.begin(sample)
    torch.testing.assert_close(begun, sample * sigmas[0] * scaled.scales[0])
    # What the sample holds of x0 and of noise, by the second step.
    later = scheduler.add_noise(sample, output, scheduler.timesteps[1:2]).double()
    later = scheduler.scale_model_input(later, scheduler.timesteps[1])
    torch.testing.assert_close(scaled.after(1).begin(output, sample), later, rtol=1e-6, atol=1e-6)


def test_heuns_process_begins_at_the_first_evaluation_of_a_step():
    noise, chunk = torch.randn(2, 2, 4, 2, dtype=torch.float64)
    table = from_diffusers(HEUN(20), 5, first_step=4)
    assert len(table) == 5 and isinstance(table, MultistepTable)
    with pytest.raises(ValueError, match="first_step must be the first evaluation of a step of H"):
        from_diffusers(HEUN(20), 5, first_step=3)
    scheduler, advance = HEUN(20), table.stepper()
    scheduler.set_timesteps(5)
    got = table.begin(noise, chunk)
    want = scheduler.add_noise(chunk, noise, scheduler.timesteps[4:5])
    for step, timestep in enumerate(scheduler.timesteps[4:]):
        seen = scheduler.scale_model_input(want, timestep)
        torch.testing.assert_close(got, seen, rtol=1e-6, atol=1e-6)
        got, want = advance(step, seen.sin(), got, None), scheduler.step(seen.sin(), timestep, want)
        want = want.prev_sample
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_live_steps_take_what_no_table_expresses():
    scheduler = DDIM(20, thresholding=True)
    steps = LiveSteps(scheduler, 5, eta=0.5)
    assert len(steps) == 5 and steps.timesteps.tolist() == [16, 12, 8, 4, 0]
    sample, output = torch.randn(2, 3, 4, 2)
    got = steps.stepper(torch.Generator().manual_seed(1))(1, output, sample, None)
    scheduler.set_timesteps(5)
    generator = torch.Generator().manual_seed(1)
    want = scheduler.step(output, 12, sample, eta=0.5, generator=generator).prev_sample
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with pytest.raises(TypeError, match="scheduler must have step, got int"):
        LiveSteps(3)
    with pytest.raises(ValueError, match="inputs unscaled, got EulerDiscreteScheduler"):
        LiveSteps(diffusers.EulerDiscreteScheduler(20), 5)
