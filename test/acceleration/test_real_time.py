"""Accelerated policies that continue their last chunk, as LeRobot's real-time chunking asks."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from policies import OriginalPolicy, lerobot_policy, original_policy

import dpa
from dpa.acceleration.policy_loop import FastLoop
from dpa.tracking.replacing import replaced

HORIZON, STEPS = 8, 3


def chunk_and_weights(batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    chunk = torch.randn(batch, HORIZON, 2, generator=generator).clamp(-1, 1).to(dtype)
    weights = dpa.prefix_weights(2, 6, HORIZON)[None, :, None]
    return chunk, weights.to(dtype)


def fast(policy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return dpa.accelerate(policy)


def own(policy, seed=7):
    """A call of diffusion_policy's loop, without inpainting of its own."""
    device = next(policy.parameters()).device
    data = torch.zeros(2, HORIZON, 2, device=device)
    cond = torch.randn(2, 4, generator=torch.Generator().manual_seed(6)).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        return policy.conditional_sample(data, data.bool(), None, cond, generator=generator)


def sampled(policy, seed=7, **given):
    """The same by a sampler of its own."""
    device = next(policy.parameters()).device
    cond = torch.randn(2, 4, generator=torch.Generator().manual_seed(6)).to(device)
    sampler = dpa.DiffusionSampler(
        policy.model, policy.noise_scheduler, policy.num_inference_steps, horizon=HORIZON
    )
    return sampler(cond, generator=torch.Generator(device).manual_seed(seed), **given)


@pytest.mark.parametrize("compared", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("inpainting", ["x0", "sample"])
@pytest.mark.parametrize("kind", ["DDIM", "DDPM"])
def test_a_loop_continues_the_chunk(kind, inpainting, compared, device):
    policy = original_policy(device, kind)
    plain = copy.deepcopy(policy)
    chunk, weights = (one.to(device) for one in chunk_and_weights())
    fast(policy)
    if compared:
        own(policy)
    with dpa.continuing(policy, chunk, weights, inpainting=inpainting, first_step=2):
        got = own(policy)
    held = {"condition_data": chunk, "condition_mask": weights.expand(chunk.shape)}
    want = sampled(plain, **held, inpainting=inpainting, last_chunk=chunk, first_step=2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own(policy), own(plain), rtol=1e-4, atol=1e-4)


def test_what_cannot_continue_a_chunk_says_so():
    chunk, weights = chunk_and_weights()
    policy = original_policy("cpu")
    with pytest.raises(TypeError, match="policy must have an accelerated loop, got OriginalPolicy"):
        dpa.continuing(policy, chunk, weights).__enter__()
    plain = own(copy.deepcopy(policy))
    fast(policy)
    own(policy)
    policy.model.final_conv.register_forward_hook(lambda *_: None)
    says = pytest.warns(RuntimeWarning, match="cannot continue the last chunk: its network")
    with dpa.continuing(policy, chunk, weights), says:
        torch.testing.assert_close(own(policy), plain, rtol=1e-4, atol=1e-4)
    strict = original_policy("cpu")
    dpa.accelerate(strict, fallback=False)
    own(strict)
    data = torch.zeros(2, HORIZON, 2)
    says = pytest.raises(RuntimeError, match="the last chunk: it has inpainting of its own")
    with torch.no_grad(), dpa.continuing(strict, chunk, weights), says:
        strict.conditional_sample(data, torch.ones_like(data).bool(), None, torch.zeros(2, 4))
    assert isinstance(replaced(strict, "conditional_sample"), FastLoop)
    assert replaced(strict, "conditional_sample").thread.held is None


def observation(policy, steps=None):
    device = next(policy.parameters()).device
    sizes = {k: v.shape for k, v in policy.config.input_features.items()}
    generator = torch.Generator().manual_seed(3)
    found = {k: torch.randn(1, *v, generator=generator).to(device) for k, v in sizes.items()}
    if steps is None:
        return found
    return {k: v[:, None].expand(-1, steps, *v.shape[1:]) for k, v in found.items()}


def test_lerobots_policy_continues_what_is_left_over(device):
    policy = lerobot_policy(device, num_inference_steps=5, noise_scheduler_type="DDIM")
    plain = copy.deepcopy(policy)
    fast(policy)
    if hasattr(type(plain), "supports_rtc"):
        assert policy.supports_rtc() and not plain.supports_rtc()
    inspect.signature(policy.predict_action_chunk).bind(
        object(), inference_delay=0, prev_chunk_left_over=None
    )
    seen, noise = observation(policy), torch.randn(1, HORIZON, 2, device=device)
    first = policy.predict_action_chunk(
        seen, noise=noise, inference_delay=0, prev_chunk_left_over=None
    )
    with torch.no_grad():
        want = plain.diffusion.generate_actions(observation(policy, 2), noise=noise)
    torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-4)
    left = first[0, 1:]  # one action is executed
    for given in (left, torch.cat([left, left.new_zeros(7, 2)]), left):  # LeRobot pads
        chunk = policy.predict_action_chunk(
            seen, noise=-noise, inference_delay=2, prev_chunk_left_over=given
        )
        torch.testing.assert_close(chunk[0, :2], left[:2], rtol=0, atol=0)
        free = policy.predict_action_chunk(
            seen, noise=-noise, inference_delay=0, prev_chunk_left_over=None
        )
        assert (chunk[0, 2] - left[2]).norm() < (free[0, 2] - left[2]).norm()
    for wrong in (left[:, 0], left[:, :1], left.expand(3, -1, -1)):
        with pytest.raises(
            ValueError, match=r"prev_chunk_left_over must be \(T', 2\) or \(1, T', 2"
        ):
            policy.predict_action_chunk(seen, prev_chunk_left_over=wrong)
    dpa.restore(policy)
    assert vars(policy).keys() == vars(plain).keys() and type(policy) is type(plain)


def test_other_calls_of_lerobots_policy_are_its_own():
    policy = lerobot_policy(num_inference_steps=3)
    plain = copy.deepcopy(policy)
    fast(policy)
    copied, stored = copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))
    for one in (policy, copied, stored):
        assert one.predict_action_chunk.policy is one
        for each in (one, plain):
            each.reset()
        seen = observation(policy)
        for seed in range(6):  # more than one chunk
            actions = []
            for each in (one, plain):
                torch.manual_seed(seed)
                actions.append(each.select_action(dict(seen)))
            torch.testing.assert_close(*actions, rtol=1e-4, atol=1e-4)


def test_own_loops_say_what_continues():
    """A loop of a user's may start from the last chunk by itself."""
    policy = original_policy("cpu")
    chunk, weights = chunk_and_weights()

    class Continues(OriginalPolicy):
        def conditional_sample(self, global_cond, generator=None):
            sampler = dpa.DiffusionSampler(self.model, self.noise_scheduler, 5, fused=False)
            return sampler(global_cond, generator=generator, **self.given())

        def given(self):
            mask = weights.expand(chunk.shape)
            held = {"condition_data": chunk, "condition_mask": mask}
            return {**held, "inpainting": "x0", "last_chunk": chunk, "first_step": 1}

    def begin(policy, global_cond, generator=None):
        return dpa.LoopCall(
            (2, HORIZON, 2), {"global_cond": global_cond}, None, generator, **policy.given()
        )

    policy.__class__ = Continues
    plain = copy.deepcopy(policy)
    dpa.accelerate(policy, loop=dpa.Loop("conditional_sample", "model", begin), fallback=False)
    cond = torch.randn(2, 4)
    for seed in (1, 2):
        results = []
        for one in (policy, plain):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                results.append(one.conditional_sample(cond, generator=generator))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert replaced(policy, "conditional_sample").shadow.errors
