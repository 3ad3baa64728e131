"""The denoising loop against the loops that diffusers and LeRobot run."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from tolerances import gradient_tolerance
from torch import nn

import dpa
from dpa.nn import ConditionalUnet1D
from dpa.schedulers.conversion import from_diffusers

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
DDPM, DDIM = diffusers.DDPMScheduler, diffusers.DDIMScheduler
SHAPE = (3, 8, 2)

SCHEDULERS = {
    "ddpm": (DDPM, {}, 20, {}),
    "ddpm_subset": (DDPM, {"clip_sample_range": 2.0}, 5, {}),
    "ddpm_sample": (DDPM, {"prediction_type": "sample", "timestep_spacing": "trailing"}, 6, {}),
    "ddim": (DDIM, {}, 5, {}),
    "ddim_v": (DDIM, {"prediction_type": "v_prediction", "clip_sample": False}, 5, {}),
    "ddim_eta": (DDIM, {"set_alpha_to_one": False}, 7, {"eta": 0.8}),
}


def make_scheduler(name):
    kind, options, steps, step_options = SCHEDULERS[name]
    return kind(20, beta_schedule="squaredcos_cap_v2", **options), steps, step_options


def make_unet(device, **options):
    options = {
        "global_cond_dim": 4,
        "diffusion_step_embed_dim": 16,
        "down_dims": (8, 16),
        **options,
    }
    return ConditionalUnet1D(SHAPE[2], **options).to(device)


@torch.no_grad()
def diffusers_loop(unet, scheduler, steps, cond, noise, generator=None, condition=None, **options):
    """Sample as diffusion_policy does, on diffusers' own step, scaled as its pipelines do."""
    scheduler.set_timesteps(steps)
    sample = noise * float(scheduler.init_noise_sigma)
    if "generator" in inspect.signature(scheduler.step).parameters:
        options = {**options, "generator": generator}
    for timestep in scheduler.timesteps:
        if condition is not None:
            sample = torch.where(condition[1], condition[0], sample)
        seen = scheduler.scale_model_input(sample, timestep)
        output = unet(seen, timestep, global_cond=cond)
        sample = scheduler.step(output, timestep, sample, **options).prev_sample
    if condition is not None:
        sample = torch.where(condition[1], condition[0], sample)
    return sample


@pytest.mark.parametrize("inpainting", [False, True], ids=["free", "inpainting"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_follows_the_loop_of_diffusers(name, inpainting, device):
    # In float64, since an untrained network amplifies rounding from step to step.
    options = {"device": device, "dtype": torch.float64}
    unet, cond = make_unet(device).double(), torch.randn(3, 4, **options)
    data, mask = torch.randn(SHAPE, **options), torch.rand(SHAPE, device=device) < 0.3
    scheduler, steps, options = make_scheduler(name)
    condition, arguments = None, {}
    if inpainting:
        condition = (data, mask)
        arguments = {"condition_data": data, "condition_mask": mask}
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, horizon=8, **options)
    # A generator on the CPU: the initial noise and each step's noise come from one generator.
    got = sampler(cond, generator=torch.Generator().manual_seed(1), **arguments)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(device)
    plain = dpa.reference.plain(unet)
    want = diffusers_loop(plain, scheduler, steps, cond, noise, generator, condition, **options)
    assert got.shape == SHAPE and got.dtype == torch.float64 and not got.requires_grad
    torch.testing.assert_close(got, want, **gradient_tolerance(torch.float64))
    if inpainting:
        torch.testing.assert_close(got[mask], data[mask], rtol=0, atol=0)


def test_global_random_stream(device):
    scheduler, steps, _ = make_scheduler("ddpm")
    unet, cond = make_unet(device), torch.randn(3, 4, device=device)
    torch.manual_seed(5)
    got = dpa.DiffusionSampler(unet, scheduler, steps, horizon=8)(cond)
    torch.manual_seed(5)
    want = diffusers_loop(unet, scheduler, steps, cond, torch.randn(SHAPE, device=device))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_one_generator_a_sample(device):
    scheduler, steps, _ = make_scheduler("ddpm")
    # In float64: a loop in float32 shows which algorithm a batch of 1 and one of 3 happen to take.
    unet = make_unet(device).double()
    cond = torch.randn(3, 4, device=device, dtype=torch.float64)
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, horizon=8)
    got = sampler(cond, generator=[torch.Generator().manual_seed(i) for i in range(3)])
    for i in range(3):
        alone = sampler(cond[i : i + 1], generator=torch.Generator().manual_seed(i))
        torch.testing.assert_close(got[i : i + 1], alone, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"generator must be one, or a sequence of 3, got 2"):
        sampler(cond, generator=[torch.Generator()] * 2)


@pytest.mark.parametrize("name", ["ddpm", "ddim"])
def test_follows_the_loop_of_lerobot(name):
    modeling = pytest.importorskip(
        "lerobot.policies.diffusion.modeling_diffusion",
        reason="LeRobot is not installed (requirements/lerobot.txt)",
        exc_type=ImportError,
    )
    scheduler, steps, _ = make_scheduler(name)
    config = SimpleNamespace(
        action_feature=SimpleNamespace(shape=(2,)),
        diffusion_step_embed_dim=16,
        down_dims=(8, 16),
        kernel_size=3,
        n_groups=8,
        use_film_scale_modulation=True,
        gradient_checkpointing=False,
        horizon=8,
    )
    unet = modeling.DiffusionConditionalUnet1d(config, 4)
    # The part of LeRobot's DiffusionModel that its sampling loop reads.
    model = nn.Module()
    model.config, model.unet, model.noise_scheduler = config, unet, scheduler
    model.num_inference_steps = steps
    cond = torch.randn(3, 4)
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, horizon=8)
    got = sampler(cond, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        want = modeling.DiffusionModel.conditional_sample(model, 3, cond, generator)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_batch_defaults_and_several_samples_for_one_observation(device):
    scheduler, steps, _ = make_scheduler("ddim")
    sampler = dpa.DiffusionSampler(make_unet(device), scheduler, steps, horizon=8)
    cond, noise = torch.randn(1, 4, device=device), torch.randn(SHAPE, device=device)
    assert sampler(cond).shape == (1, 8, 2)
    assert sampler(cond, batch_size=5).shape == (5, 8, 2)
    assert sampler(cond.expand(0, 4)).shape == (0, 8, 2)
    got = sampler(cond, noise=noise)
    want = sampler(cond.expand(3, 4), noise=noise)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    unconditional = make_unet(device, global_cond_dim=None)
    assert dpa.DiffusionSampler(unconditional, scheduler, horizon=4)().shape == (1, 4, 2)


def test_horizon_follows_from_the_arguments(device):
    scheduler, steps, _ = make_scheduler("ddim")
    unet = make_unet(device, local_cond_dim=3)
    sampler = dpa.DiffusionSampler(unet, scheduler, steps)
    cond = torch.randn(2, 4, device=device)
    assert sampler(cond, local_cond=torch.randn(2, 6, 3, device=device)).shape == (2, 6, 2)
    assert sampler(cond, noise=torch.randn(2, 10, 2, device=device)).shape == (2, 10, 2)
    with pytest.raises(ValueError, match="horizon must be given to the constructor"):
        sampler(cond)


def test_step_table_and_any_callable(device):
    scheduler, steps, _ = make_scheduler("ddpm")
    seen = []

    def network(sample, timestep, global_cond=None):
        seen.append((sample.shape, timestep.shape, timestep[0].item()))
        return 0.1 * sample

    noise = torch.randn(SHAPE, device=device)
    table = from_diffusers(scheduler, steps)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    got = dpa.DiffusionSampler(network, table)(noise=noise, generator=generators[0])
    assert seen == [(SHAPE, (3,), t) for t in table.timesteps.tolist()]
    want = dpa.DiffusionSampler(network, scheduler, steps)(noise=noise, generator=generators[1])
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_number_of_steps_may_change_later():
    scheduler, _, _ = make_scheduler("ddim")
    sampler = dpa.DiffusionSampler(make_unet("cpu"), scheduler, 10, horizon=8)
    assert sampler.num_inference_steps == 10
    sampler.num_inference_steps = 4
    assert sampler.table.timesteps.tolist() == [15, 10, 5, 0]
    with pytest.raises(ValueError, match=r"num_inference_steps must lie in 1\.\.20"):
        sampler.num_inference_steps = 21
    assert sampler.num_inference_steps == 4
    sampler.num_inference_steps = None
    assert sampler.num_inference_steps == 20
    sampler = dpa.DiffusionSampler(make_unet("cpu"), from_diffusers(scheduler, 4), horizon=8)
    with pytest.raises(ValueError, match="num_inference_steps must be the StepTable's 4, got 5"):
        sampler.num_inference_steps = 5


@pytest.mark.parametrize("parallel", [None, dpa.Parallel(3, 0)])
def test_packed_weights_follow_changes_in_inference_mode(parallel):
    """Parameters that are made in inference mode count no versions."""
    scheduler, steps, _ = make_scheduler("ddim")
    cond, noise = torch.randn(3, 4), torch.randn(SHAPE)
    with torch.inference_mode():
        unet = make_unet("cpu")
        sampler = dpa.DiffusionSampler(unet, scheduler, steps, fused=True, parallel=parallel)
        results = [sampler(cond, noise=noise)]
        for change in (
            lambda: unet.load_state_dict(make_unet("cpu").state_dict()),
            lambda: unet.final_conv[1].bias.add_(0.5),
        ):
            change()
            results.append(sampler(cond, noise=noise))
            want = diffusers_loop(unet, scheduler, steps, cond, noise.clone())
            torch.testing.assert_close(results[-1], want, rtol=1e-3, atol=1e-3)
            assert not torch.allclose(*results[-2:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("parallel", [None, dpa.Parallel(3, 0)])
def test_empty_batch(parallel, fused, device):
    scheduler, steps, _ = make_scheduler("ddpm")
    unet = make_unet(device)
    sampler = dpa.DiffusionSampler(
        unet, scheduler, steps, horizon=8, fused=fused, parallel=parallel
    )
    for generator in (None, []):
        assert sampler(torch.randn(0, 4, device=device), generator=generator).shape == (0, 8, 2)


def test_scripted_and_compiled_networks():
    scheduler, steps, _ = make_scheduler("ddim")
    unet, cond, noise = make_unet("cpu"), torch.randn(3, 4), torch.randn(SHAPE)
    want = dpa.DiffusionSampler(unet, scheduler, steps)(cond, noise=noise)
    for network in (torch.jit.script(unet), torch.compile(unet, backend="eager")):
        sampler = dpa.DiffusionSampler(network, scheduler, steps, horizon=8)
        assert sampler(cond).shape == SHAPE
        torch.testing.assert_close(sampler(cond, noise=noise), want, rtol=1e-4, atol=1e-4)


def test_a_compiled_network_is_packed():
    scheduler, steps, _ = make_scheduler("ddim")
    unet, cond, noise = make_unet("cpu"), torch.randn(3, 4), torch.randn(SHAPE)
    want = dpa.DiffusionSampler(unet, scheduler, steps, fused=True)(cond, noise=noise)
    compiled = torch.compile(unet, backend="eager")
    sampler = dpa.DiffusionSampler(compiled, scheduler, steps, fused=True)
    for _ in range(2):
        assert torch.equal(sampler(cond, noise=noise), want)


def test_live_scheduler_may_change_afterwards():
    scheduler, steps, _ = make_scheduler("ddim")
    sampler = dpa.DiffusionSampler(make_unet("cpu"), scheduler, steps)
    scheduler.set_timesteps(3)
    scheduler.alphas_cumprod.zero_()
    sampler.num_inference_steps = 10
    assert torch.isfinite(sampler.table.coefficients).all()


def test_a_loop_never_waits_for_the_gpu(device):
    if device.type == "cpu":
        pytest.skip("there is nothing to wait for on the CPU")
    scheduler, steps, _ = make_scheduler("ddpm")
    sampler = dpa.DiffusionSampler(make_unet(device), scheduler, steps, horizon=8)
    cond, data = torch.randn(3, 4, device=device), torch.randn(SHAPE, device=device)
    arguments = {"condition_data": data, "condition_mask": data > 0}
    sampler(cond, **arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler(cond, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


SOLVERS = [
    ("DPMSolverMultistep", {"solver_order": 2}),
    ("DPMSolverMultistep", {"solver_order": 3}),
    ("UniPCMultistep", {"solver_order": 2}),
    ("UniPCMultistep", {"solver_order": 3}),
    ("HeunDiscrete", {"clip_sample": True}),
    ("EulerDiscrete", {"use_karras_sigmas": True}),
    ("EDMEuler", {"prediction_type": "epsilon", "sigma_max": 10.0}),
    ("EDMDPMSolverMultistep", {"prediction_type": "epsilon", "sigma_max": 10.0}),
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("kind", "given"), SOLVERS)
@torch.no_grad()
def test_solvers_on_packed_weights(kind, given, batch, device):
    options = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "sample", **given}
    options = {n: v for n, v in options.items() if "EDM" not in kind or n != "beta_schedule"}
    scheduler = getattr(diffusers, f"{kind}Scheduler")(num_train_timesteps=20, **options)
    unet = make_unet(device, n_groups=2).eval()
    mask = torch.zeros(batch, *SHAPE[1:], dtype=torch.bool, device=device)
    mask[:, :2] = True
    sampler = dpa.DiffusionSampler(unet, scheduler, 8, fused=True)
    for call in range(4):
        data = torch.randn(batch, *SHAPE[1:], device=device)
        cond, noise = torch.randn(batch, 4, device=device), torch.randn_like(data)
        # In float64: from noise levels of 400 diffusers' Heun loses four digits in float32.
        wide, given = copy.deepcopy(unet).double(), (cond.double(), noise.double())
        want = diffusers_loop(wide, scheduler, 8, *given, condition=(data.double(), mask)).float()
        got = sampler(cond, noise=noise, condition_data=data, condition_mask=mask)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        if call == 2:
            unet.final_conv[1].weight.data.mul_(1.5)
    assert len(sampler._graphs) == (device.type == "cuda")
    # In the finer of the 16-bit dtypes: UniPC's third order magnifies roundings tenfold.
    sixteen = dpa.DiffusionSampler(unet, scheduler, 8, torch.float16, fused=True)
    got = sixteen(cond, noise=noise, condition_data=data, condition_mask=mask)
    want = sampler(cond, noise=noise, condition_data=data, condition_mask=mask)
    assert 0 < (got - want).norm() / want.norm() < 0.1


@torch.no_grad()
@pytest.mark.parametrize("where", ["layer", "all", "wrapped"])
def test_a_fused_sampler_leaves_hooked_and_altered_networks_to_the_loop(device, where):
    """One op calls no layer: hooks that change results, and layers around layers, would be lost."""
    # Norms over 8 values, as of 8 groups, magnify float32's roundings a thousandfold in a loop.
    unet, (scheduler, steps, _) = make_unet(device, n_groups=2).eval(), make_scheduler("ddim")
    cond, noise = torch.randn(SHAPE[0], 4, device=device), torch.randn(SHAPE, device=device)
    options = {"fused": True, "horizon": SHAPE[1]}
    lenient = dpa.DiffusionSampler(unet, scheduler, steps, fallback=True, **options)
    strict = dpa.DiffusionSampler(unet, scheduler, steps, **options)
    call = {"global_cond": cond, "noise": noise}
    for _ in range(3):
        before = lenient(**call), strict(**call)
    louder, last = lambda module, args, result: result * 1.1, unet.final_conv[1]
    handle = None
    if where == "layer":
        handle = unet.mid_modules[0].register_forward_hook(louder)
    elif where == "all":
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, result: result * 1.1 if isinstance(module, nn.Conv1d) else None
        )
    else:
        unet.final_conv[1] = nn.Sequential(last, nn.Tanh())
    try:
        for _ in range(2):
            want = diffusers_loop(unet, scheduler, steps, cond, noise)
            with pytest.warns(UserWarning, match="the loop runs step by step instead"):
                torch.testing.assert_close(lenient(**call), want, rtol=1e-4, atol=1e-4)
            assert (want - before[0]).abs().max() > 1e-3
            with pytest.raises(ValueError, match="hooks" if handle else "final_conv.1"):
                strict(**call)
    finally:
        unet.final_conv[1] = last
        if handle is not None:
            handle.remove()
    for _ in range(2):
        for sampler, then in zip((lenient, strict), before, strict=True):
            torch.testing.assert_close(sampler(**call), then, rtol=1e-4, atol=1e-4)
