"""accelerate(policy, example=observation): comparison and capture before the first action."""

import inspect

import other_policies as others
import pytest
import torch
from policies import lerobot_policy, observations
from policy_cases import images

import dpa
from dpa.tracking.replacing import replaced


@pytest.fixture
def policy():
    return lerobot_policy()


@pytest.fixture
def loops(policy, monkeypatch):
    """How often the policy's own loop has run."""
    counted, kind = [], type(policy.diffusion)
    original = kind.conditional_sample

    def conditional_sample(self, *args, **kwargs):
        counted.append(self)
        return original(self, *args, **kwargs)

    conditional_sample.__signature__ = inspect.signature(original)
    monkeypatch.setattr(kind, "conditional_sample", conditional_sample)
    return counted


def act(policy, observation, seed=3):
    policy.reset()
    torch.manual_seed(seed)
    return policy.select_action(dict(observation))


def test_the_first_action_after_an_example_is_compared_with_nothing(policy, loops):
    (observation,) = observations(1, "cpu")
    expected = act(policy, observation)
    loops.clear()
    dpa.accelerate(policy, example=observation)
    assert len(loops) == 1  # the comparison
    torch.testing.assert_close(act(policy, observation), expected, rtol=1e-4, atol=1e-4)
    assert len(loops) == 1


def test_an_example_of_a_policy_that_acts_by_get_action():
    """As robomimic's and ManiSkill's, which is here the one that changes its observation."""
    policy, observation = others.ManiSkillAgent(images=("rgb",)).eval(), images("cpu")
    shape = observation["rgb"].shape
    torch.manual_seed(3)
    expected = policy.get_action(dict(observation))
    dpa.accelerate(policy, example=observation)
    compared = replaced(policy, "get_action").shadow.errors
    assert len(compared) == 1 and observation["rgb"].shape == shape
    torch.manual_seed(3)
    torch.testing.assert_close(policy.get_action(observation), expected, rtol=1e-4, atol=1e-4)
    assert len(compared) == 1


def test_an_example_leaves_random_numbers_and_empty_queues(policy):
    (observation,) = observations(1, "cpu")
    state = torch.get_rng_state()
    dpa.accelerate(policy, example=observation)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(policy._queues.values())


def test_an_example_that_the_policy_refuses_leaves_it_as_it_was(policy):
    with pytest.raises(KeyError):
        dpa.accelerate(policy, example={"observation.nothing": torch.zeros(1)})
    assert not any(finding.active for finding in dpa.explain(policy).findings)


def test_who_takes_no_example(policy):
    with pytest.raises(TypeError, match=r"example needs a model with .* or get_action, got"):
        dpa.accelerate(policy.diffusion.unet, example={})
    with pytest.raises(TypeError, match=r"policy in evaluation mode: call policy\.eval\(\)"):
        dpa.accelerate(policy.train(), example={})
