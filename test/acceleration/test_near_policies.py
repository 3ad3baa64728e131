"""What the loops of Consistency Policy, DPPO and Streaming Diffusion Policy leave to the originals.

That they act as the originals do is in ``test_other_loops``.
"""

import copy

import near_policies as near
import pytest
import torch
from policy_cases import CASES, obs, start_over, state, states

import dpa
from dpa.schedulers.each_action import from_each_action
from dpa.tracking.replacing import replaced

NEW = [name for name in CASES if name.startswith(("consistency", "dppo", "streaming"))]


def both(make):
    torch.manual_seed(0)
    plain = make().eval()
    return plain, dpa.accelerate(copy.deepcopy(plain))


def same_results(plain, fast, call, calls=2):
    for seed in range(calls):
        results = []
        for policy in (plain, fast):
            torch.manual_seed(seed)
            with torch.no_grad():
                results.append(call(policy))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def inpainted(policy):
    data = torch.ones(2, 8, 2)
    mask = torch.zeros(2, 8, 2, dtype=torch.bool)
    mask[:, :2] = True
    return policy.conditional_sample(data, mask, global_cond=torch.ones(2, 6))


def with_generator(policy):
    data = torch.zeros(2, 8, 2)
    generator = torch.Generator().manual_seed(1)
    given = {"global_cond": torch.ones(2, 6), "generator": generator}
    return policy.conditional_sample(data, data.bool(), **given)


REFUSED = {
    "its condition_mask inpaints": (near.ConsistencyPolicy, inpainted),
    "its scheduler's solver is 'third'": (
        lambda: near.KarrasPolicy(solver="third"),
        lambda policy: policy.predict_action(OBSERVED),
    ),
    "its last 3 steps are those of another network": (
        lambda: near.DiffusionModel(20, 5, tuned=3),
        lambda policy: policy.act(OBSERVED["state"]),
    ),
    "its eps_clip_value clamps epsilon": (
        lambda: near.DiffusionModel(20, 5, eps_clip_value=1.0),
        lambda policy: policy.act(OBSERVED["state"]),
    ),
    "its randn_clip_value of 3 clamps noise": (
        lambda: near.DiffusionModel(randn_clip_value=3),
        lambda policy: policy.act(OBSERVED["state"]),
    ),
}
OBSERVED = states("cpu")


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_loop_does_not_do_the_original_does(why):
    make, call = REFUSED[why]
    plain, fast = both(make)
    with pytest.warns(RuntimeWarning, match=why):
        same_results(plain, fast, call)


def test_noise_of_pfgm_is_refused():
    plain, fast = both(near.ConsistencyPolicy)
    for policy in (plain, fast):
        policy.noise_scheduler.D = 128
    with pytest.warns(RuntimeWarning, match="PFGM"):
        same_results(plain, fast, lambda policy: policy.predict_action(OBSERVED))


def test_a_generator_gives_the_random_numbers_that_it_gives_the_original():
    for chain in (None, ["D", 27]):  # whose later noise is none of the generator's
        plain, fast = both(lambda chain=chain: near.ConsistencyPolicy(chain))
        same_results(plain, fast, with_generator, calls=3)


def test_rollouts_keep_their_original():
    plain, fast = both(near.DiffusionModel)
    same_results(plain, fast, lambda policy: policy({"state": OBSERVED["state"]}, False)[0])
    assert not replaced(fast, "forward").shadow.errors


def test_the_result_is_of_the_project_s_own_kind():
    _, fast = both(near.DiffusionModel)
    for _ in range(2):
        result = fast({"state": OBSERVED["state"]})
        assert type(result) is near.Sample and result.chains is None


@torch.no_grad()
def test_the_buffer_goes_on_where_the_original_left_it():
    """Switching between the two in an episode changes nothing."""
    plain, fast = both(lambda: near.StreamingPolicy(13))
    torch.manual_seed(1)
    observations = [obs("cpu") for _ in range(6)]
    torch.manual_seed(2)
    expected = [plain.predict_action(o)["action"] for o in observations]
    torch.manual_seed(2)
    for step, observed in enumerate(observations):
        got = fast.predict_action(observed)["action"]
        torch.testing.assert_close(got, expected[step], rtol=1e-4, atol=1e-4)
        fast = dpa.restore(fast) if step % 2 else dpa.accelerate(fast)
    torch.testing.assert_close(fast.buffer_diff_steps, plain.buffer_diff_steps)
    torch.testing.assert_close(fast.action_buffer, plain.action_buffer, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("ddim", [False, True])
def test_constants_that_the_first_step_moves_are_no_other_settings(ddim):
    """On a GPU the scheduler's first step brings them there; here to the sample's dtype."""
    plain, fast = both(lambda: near.StreamingPolicy(ddim=ddim))
    for policy in (plain, fast):
        scheduler = policy.noise_scheduler
        scheduler.alphas_cumprod = scheduler.alphas_cumprod.bfloat16()
        scheduler.betas = scheduler.betas.bfloat16()
    same_results(plain, fast, lambda policy: policy.predict_action({"obs": OBSERVED["state"]}), 3)
    assert len(replaced(fast, "conditional_sample")._routes) == 1


@torch.no_grad()
def test_the_first_comparison_leaves_the_original_s_buffer():
    plain, fast = both(near.StreamingPolicy)
    for policy in (plain, fast):
        torch.manual_seed(3)
        policy.predict_action({"obs": OBSERVED["state"]})
    torch.testing.assert_close(fast.action_buffer, plain.action_buffer, rtol=0, atol=0)
    assert torch.equal(fast.buffer_diff_steps, plain.buffer_diff_steps)


@pytest.mark.parametrize("case", NEW)
def test_checkpoints_load(case):
    make, method, observe, _ = CASES[case]
    plain, fast = both(make)
    torch.manual_seed(7)
    trained = make().eval()
    for policy in (plain, fast):
        assert not any(policy.load_state_dict(trained.state_dict()))
    observed = observe("cpu")
    for policy in (plain, fast):
        start_over(policy)
    same_results(plain, fast, lambda policy: getattr(policy, method)(copy.copy(observed)))


@pytest.mark.parametrize("case", ["consistency", "dppo", "streaming"])
def test_networks_train_as_before(case):
    make, *_ = CASES[case]
    plain, fast = both(make)
    sample, steps, grads = torch.randn(2, 8, 2), torch.tensor([1, 5]), []
    calls = {
        "consistency": lambda net: net(sample, steps.float(), steps * 0.5, global_cond=COND),
        "dppo": lambda net: net(sample, steps, cond={"state": OBSERVED["state"]}),
        "streaming": lambda net: net(sample, steps[:, None].expand(2, 8), global_cond=COND),
    }
    for policy in (plain, fast):
        network = policy.train().network if case == "dppo" else policy.train().model
        for _ in range(2):
            network.zero_grad()
            calls[case](network).square().mean().backward()
        grads.append([p.grad for p in network.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)


COND = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"ddim": True}, {"prediction_type": "sample"}])
def test_a_table_has_a_row_for_each_timestep(options):
    """Each action's step is the scheduler's, that at -1 too."""
    scheduler = near.TediScheduler(**options)
    scheduler.set_timesteps(6)
    table = from_each_action(scheduler, 6, 4)
    assert table.count == len(table.draws_noise) == 4
    torch.manual_seed(0)
    output, sample = torch.randn(2, 1, 13, 3, dtype=torch.float64)
    steps = torch.arange(-1, 12)[None]
    expected = scheduler.step(output, steps, sample, torch.Generator().manual_seed(4)).prev_sample
    shape, dtype = sample.shape, sample.dtype
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=dtype)
    got = torch.ops.dpa.scheduler_step(
        output[0], sample[0], table.rows.coefficients, steps[0] + 1, noise[0], table.rows.clip
    )
    torch.testing.assert_close(got[None], expected, rtol=1e-6, atol=1e-6)


class _Sometimes(near.TediScheduler):
    def step(self, model_output, timestep, sample, generator=None):
        if int(timestep.flatten()[0]) > 3:
            torch.randn(sample.shape, generator=generator)
        result = super().step(model_output, timestep, sample, torch.Generator())
        return result


def test_noise_of_some_steps_alone_is_refused():
    with pytest.raises(ValueError, match="take noise always or never"):
        from_each_action(_Sometimes(ddim=True), 6, 4)


def test_states_of_other_batches():
    plain, fast = both(near.DiffusionModel)
    for batch in (1, 3):
        observed = state("cpu", batch)
        same_results(plain, fast, lambda policy, x=observed: policy.act(x))


def test_a_streaming_policy_refuses_another_batch_than_its_buffers(device):
    """The sampler alone would stretch one observation over the two chunks."""
    make, method, observe, _ = CASES["streaming_inpainting"]
    policy, observation = make().to(device).eval(), observe(device)
    dpa.accelerate(policy)
    with torch.no_grad():
        for _ in range(2):
            getattr(policy, method)(observation)
        with pytest.raises(IndexError, match="does not match the shape of the indexed tensor"):
            getattr(policy, method)({name: value[:1] for name, value in observation.items()})
