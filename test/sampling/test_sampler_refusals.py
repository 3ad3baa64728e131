"""What a sampler refuses, and what it runs step by step instead."""

import diffusers
import pytest
import torch
from test_sampler import DDPM, SHAPE, diffusers_loop, make_scheduler, make_unet

import dpa
from dpa.schedulers.tables import StepTable

MASK = torch.zeros(SHAPE, dtype=torch.bool)


REFUSED = [
    ({"noise": torch.zeros(3, 8, 3)}, r"noise must be \(B, T, Da\) = \(3, 8, 2\), got \(3, 8, 3\)"),
    ({"noise": torch.zeros(3, 4, 2)}, r"noise must be .* got \(3, 4, 2\)"),
    ({"noise": torch.zeros(8, 2)}, r"noise must have 3 dimensions, got \(8, 2\)"),
    ({"noise": torch.zeros(SHAPE, device="meta")}, "noise must be on the network's device cpu"),
    ({"batch_size": 4}, r"global_cond must have a batch of 1 or 4, got \(3, 4\)"),
    ({"condition_data": torch.zeros(SHAPE)}, "condition_mask must be given"),
    ({"condition_mask": MASK}, "condition_data must be given"),
    ({"condition_data": torch.zeros(SHAPE), "condition_mask": MASK.int()}, "bool tensor"),
    ({"condition_data": torch.zeros(3, 8, 1), "condition_mask": MASK}, r"condition_data must be"),
    ({"local_cond": torch.zeros(3, 6, 1)}, r"local_cond must have the horizon 8, got \(3, 6, 1\)"),
    ({"global_cond": torch.zeros(3, 2, 2)}, "global_cond must have 2 dimensions"),
    ({"global_cond": None}, "global_cond must be given"),
    ({"global_cond": torch.zeros(3, 4).numpy()}, "global_cond must be a tensor, got ndarray"),
    ({"global_cond": [[0.0] * 4] * 3}, "global_cond must be a tensor, got list"),
    ({"batch_size": -1}, "batch_size must be an integer of at least 0, got -1"),
    ({"batch_size": "3"}, "batch_size must be an integer of at least 0, got '3'"),
    ({"generator": 7}, "generator must be a torch.Generator, or a sequence of them, got int"),
    ({"generator": []}, "generator must be one, or a sequence of 3, got 0"),
    ({"conditions": torch.zeros(3, 4)}, "conditions must map names to tensors, got Tensor"),
    ({"conditions": []}, "conditions must map names to tensors, got list"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_arguments_that_are_refused(change, message):
    scheduler, steps, _ = make_scheduler("ddim")
    sampler = dpa.DiffusionSampler(make_unet("cpu"), scheduler, steps, horizon=8)
    by_the_op = message == "global_cond must be given"
    with pytest.raises(RuntimeError if by_the_op else ValueError, match=message):
        sampler(**{"global_cond": torch.zeros(3, 4), **change})


@pytest.mark.parametrize(
    "change", [{"global_cond": [[0.0] * 4]}, {"generator": []}, {"conditions": torch.zeros(1, 4)}]
)
def test_a_call_after_a_good_one_is_checked_too(change):
    scheduler, steps, _ = make_scheduler("ddim")
    sampler = dpa.DiffusionSampler(make_unet("cpu"), scheduler, steps, horizon=8, fused=True)
    sampler(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=f"DiffusionSampler: {next(iter(change))} must"):
        sampler(**{"global_cond": torch.zeros(1, 4), **change})


@pytest.mark.parametrize("conditions", [None, {}])
def test_a_call_like_the_last_one_is_not_prepared_again(conditions, monkeypatch):
    """Accelerated policies give an empty dictionary where there are no other conditions."""
    scheduler, steps, _ = make_scheduler("ddim")
    sampler = dpa.DiffusionSampler(make_unet("cpu"), scheduler, steps, horizon=8, fused=True)
    sampler(torch.zeros(1, 4), conditions=conditions)
    monkeypatch.setattr(sampler, "_sample", None)
    assert sampler(torch.zeros(1, 4), conditions=conditions).shape == (1, 8, 2)


def test_constructors_that_are_refused():
    scheduler, _, _ = make_scheduler("ddim")
    for dtype in (torch.int32, "float32"):
        for name in ("dtype", "noise_dtype"):
            with pytest.raises(ValueError, match=rf" {name} must be a floating dtype, got {dtype}"):
                dpa.DiffusionSampler(make_unet("cpu"), scheduler, 4, **{name: dtype})
    for steps in ([8, 4], 2.5):
        with pytest.raises(ValueError, match=r"num_inference_steps must be an integer, or None"):
            dpa.DiffusionSampler(make_unet("cpu"), scheduler, steps)
    with pytest.raises(ValueError, match="unet must be a network, or a function like one"):
        dpa.DiffusionSampler(None, scheduler, 4)
    with pytest.raises(ValueError, match=r"parallel must be a dpa.Parallel, got <class 'int'>"):
        dpa.DiffusionSampler(make_unet("cpu"), scheduler, 4, parallel=3)
    for size in (0, -8, 2.5, "8"):
        for name in ("horizon", "action_dim"):
            sampler = dpa.DiffusionSampler(
                make_unet("cpu"), scheduler, 4, **{"horizon": 8, name: size}
            )
            with pytest.raises(ValueError, match=rf"{name} must be an integer of at least 1, got"):
                sampler(torch.zeros(3, 4))
    with pytest.raises(TypeError, match="scheduler must be a DDPMScheduler, a DDIM"):
        dpa.DiffusionSampler(make_unet("cpu"), object(), 4)
    table = StepTable(torch.zeros(1), torch.zeros(1, 6))
    with pytest.raises(ValueError, match=r"be left out with a StepTable, got 0.5 and False"):
        dpa.DiffusionSampler(make_unet("cpu"), table, eta=0.5)


def test_fallback_says_why_and_runs_the_schedulers_own_step(device):
    scheduler = DDPM(20, beta_schedule="squaredcos_cap_v2", thresholding=True)
    unet, cond = make_unet(device), torch.randn(3, 4, device=device)
    with pytest.raises(ValueError, match="thresholding must be False"):
        dpa.DiffusionSampler(unet, scheduler, 5, horizon=8)
    with pytest.warns(UserWarning, match=r"thresholding must be False.*own step runs instead"):
        sampler = dpa.DiffusionSampler(unet, scheduler, 5, horizon=8, fallback=True)
    noise = torch.randn(SHAPE, device=device)
    got = sampler(cond, noise=noise, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(2)
    want = diffusers_loop(dpa.reference.plain(unet), scheduler, 5, cond, noise, generator)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eta", [None, 0.0, 0.7])
def test_eta_is_the_schedulers_own_where_none_is_given(eta):
    """TCD's is 0.3, DDIM's 0."""
    scheduler = diffusers.TCDScheduler(50)
    unet, cond, noise = make_unet("cpu"), torch.randn(3, 4), torch.randn(SHAPE)
    with pytest.warns(UserWarning, match="own step runs instead"):
        sampler = dpa.DiffusionSampler(unet, scheduler, 4, eta=eta, fallback=True)
    got = sampler(cond, noise=noise, generator=torch.Generator().manual_seed(2))
    scheduler.set_timesteps(4)
    plain, want = dpa.reference.plain(unet), noise
    options = {"generator": torch.Generator().manual_seed(2)} | (
        {} if eta is None else {"eta": eta}
    )
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            steps = timestep.expand(len(noise))
            output = plain(want, steps, None, cond)
            want = scheduler.step(output, timestep, want, **options).prev_sample
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["another network", "float64"])
def test_a_network_that_cannot_be_packed_runs_step_by_step_where_that_is_asked(kind):
    scheduler, steps, _ = make_scheduler("ddim")
    unet, cond, noise = make_unet("cpu"), torch.randn(3, 4), torch.randn(SHAPE)
    if kind == "float64":
        unet.double()
    else:
        unet.mid_modules[0].blocks[0].block[2] = torch.nn.SiLU()
    want = dpa.DiffusionSampler(unet, scheduler, steps)(cond, noise=noise)
    with pytest.raises(ValueError, match="must be"):
        dpa.DiffusionSampler(unet, scheduler, steps, fused=True)(cond, noise=noise)
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, fused=True, fallback=True)
    with pytest.warns(UserWarning, match="must be .*: the loop runs step by step instead"):
        got = sampler(cond, noise=noise)
    torch.testing.assert_close(got, want)


def test_conditions_of_other_widths_beside_local_ones(device):
    scheduler, steps, _ = make_scheduler("ddim")
    sampler = dpa.DiffusionSampler(make_unet(device, local_cond_dim=3), scheduler, steps)
    cond, noise = torch.randn(3, 4, device=device), torch.randn(SHAPE, device=device)
    local = torch.randn(3, SHAPE[1], 3, device=device)
    wider = torch.randn(3, SHAPE[1], 5, device=device)
    with pytest.raises(ValueError, match=r"local_cond must be \(B, T, 3\), got \(3, 8, 5\)"):
        sampler(cond, local_cond=wider, noise=noise)
    with pytest.raises(ValueError, match=r"global_cond must be \(B, 4\), got \(3, 5\)"):
        sampler(torch.randn(3, 5, device=device), local_cond=local, noise=noise)
    with pytest.raises(ValueError, match=r"global_cond must be \(B, 4\), got None"):
        sampler(local_cond=local, noise=noise)


def test_a_loop_that_cannot_be_one_op_raises_or_runs_step_by_step(device):
    scheduler, steps, _ = make_scheduler("ddim")
    unet = make_unet(device, local_cond_dim=3)
    call = {
        "global_cond": torch.randn(3, 4, device=device),
        "local_cond": torch.randn(3, SHAPE[1], 3, device=device),
        "noise": torch.randn(SHAPE, device=device),
    }
    parallel = dpa.Parallel(2, 0.0)
    want = dpa.DiffusionSampler(unet, scheduler, steps, parallel=parallel)(**call)
    kinds = {"fused": True, "parallel": parallel}
    with pytest.raises(ValueError, match="fused must be left out where there is local_cond and"):
        dpa.DiffusionSampler(unet, scheduler, steps, **kinds)(**call)
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, fallback=True, **kinds)
    with pytest.warns(UserWarning, match=r"fused must be left out .* runs step by step"):
        got = sampler(**call)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
