"""Shallow copies of what is accelerated: each does as it is set up itself.

``copy.copy`` and ``nn.DataParallel`` copy attributes, and replaced methods with them.
"""

import copy
import pickle

import pytest
import torch
from policies import call_of, diffusers, original_policy, sampled, unet_and_inputs
from torch import nn

import dpa
from dpa.acceleration.unet_forward import FastForward
from dpa.training import graph_calls
from dpa.training.graphed_calls import GraphedForward, replaced_forward, ungraph_calls


def _steps(policy):
    policy.num_inference_steps = 3


def _scheduler(policy):
    policy.noise_scheduler = diffusers.DDPMScheduler(20)


def _prediction(policy):
    policy.noise_scheduler = copy.copy(policy.noise_scheduler)
    policy.noise_scheduler.register_to_config(prediction_type="sample")


@torch.no_grad()
@pytest.mark.parametrize("change", [_steps, _scheduler, _prediction])
def test_a_copied_policy(change, device):
    plain = original_policy(device)
    fast, call = dpa.accelerate(copy.deepcopy(plain)), call_of(device)
    before = sampled(fast, call), sampled(fast, call)
    copies = copy.copy(plain), copy.copy(fast)
    for one in copies:
        change(one)
    for _ in range(3):
        want, got = (sampled(one, call) for one in copies)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert (want - before[0]).abs().max() > 1e-3
        torch.testing.assert_close(sampled(fast, call), before[1])
    loops = [vars(one)["conditional_sample"] for one in (copies[1], fast)]
    assert [loop.policy for loop in loops] == [copies[1], fast]
    assert all(finding.active for finding in dpa.explain(copies[1]).findings)
    dpa.restore(fast)
    assert type(fast) is type(plain) and "conditional_sample" not in vars(fast)
    torch.testing.assert_close(sampled(copies[1], call), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_copied_scheduler():
    plain = diffusers.DDIMScheduler(20)
    fast = dpa.accelerate(copy.deepcopy(plain))
    output, sample = torch.randn(2, 8, 2), torch.randn(2, 8, 2)

    def step(scheduler):
        scheduler.set_timesteps(5)
        return scheduler.step(output, scheduler.timesteps[1], sample).prev_sample

    step(fast), step(fast)
    copies = copy.copy(plain), copy.copy(fast)
    for one in copies:
        one.register_to_config(prediction_type="sample")
    for _ in range(2):
        torch.testing.assert_close(step(copies[1]), step(copies[0]))
        torch.testing.assert_close(step(fast), step(plain))
    assert (step(plain) - step(copies[0])).abs().max() > 0.1


def replica_of(module):
    """What ``nn.DataParallel`` makes, with other values in the place of each parameter."""
    copies = {old: old._replicate_for_data_parallel() for old in module.modules()}
    for old, new in copies.items():
        for name, child in old._modules.items():
            new._modules[name] = copies.get(child)
        for name, parameter in old._parameters.items():
            setattr(new, name, None if parameter is None else parameter * 1.5)
    return copies[module]


@torch.no_grad()
def test_a_replica_runs_on_its_own_parameters(device):
    plain, inputs = unet_and_inputs(device)
    fast = dpa.accelerate(copy.deepcopy(plain))
    before = fast(*inputs), fast(*inputs)
    want, got = (replica_of(one)(*inputs) for one in (plain, fast))
    torch.testing.assert_close(got, want)
    assert (want - before[0]).abs().max() > 1e-2
    torch.testing.assert_close(fast(*inputs), before[1])


def test_data_parallel(cuda):
    unet, inputs = unet_and_inputs(cuda)
    plain = copy.deepcopy(unet)
    inputs = [inputs[0], inputs[1], inputs[3]]

    def call(network):
        replicas = nn.parallel.replicate(network, [cuda] * 2)
        results = [one(inputs[0], inputs[1], global_cond=inputs[2]) for one in replicas]
        network.zero_grad()
        sum(result.square().sum() for result in results).backward()
        return [*results, *(p.grad.clone() for p in network.parameters())]

    fast = dpa.accelerate(unet)
    fast(*inputs[:2], global_cond=inputs[2])
    for got, want in zip(call(fast), call(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), 1.0

    def forward(self, x):
        return self.layer(x) * self.scale


def test_a_copy_of_a_module_with_graphed_calls(device):
    plain, x = Scaled().to(device), torch.randn(2, 3, device=device)
    fast = graph_calls(copy.deepcopy(plain))
    for _ in range(5):
        fast(x).sum().backward()
        fast.zero_grad()
    copied = copy.copy(fast)
    copied.scale = 2.0
    for _ in range(5):
        torch.testing.assert_close(copied(x), plain(x) * 2)
        torch.testing.assert_close(fast(x), plain(x))
    assert vars(copied)["forward"].module is copied and vars(fast)["forward"].module is fast
    assert type(ungraph_calls(copied)) is Scaled and isinstance(
        vars(fast)["forward"], GraphedForward
    )


@torch.no_grad()
def test_a_copied_network(device):
    unet, inputs = unet_and_inputs(device)
    plain = copy.deepcopy(unet)
    fast = dpa.accelerate(unet)
    fast(*inputs)
    copied = copy.copy(fast)
    for _ in range(2):
        torch.testing.assert_close(copied(*inputs), plain(*inputs), rtol=1e-4, atol=1e-4)
    forward = replaced_forward(copied)
    assert isinstance(forward, FastForward) and forward.unet is copied
    assert replaced_forward(fast).unet is fast
    compiled = torch.compile(lambda *args: copy.copy(fast)(*args), backend="eager")
    torch.testing.assert_close(compiled(*inputs), plain(*inputs), rtol=1e-4, atol=1e-4)


def test_the_class_of_what_is_accelerated():
    """It keeps its name, is an instance of the class, and gives it to copies and pickles."""
    policy = original_policy("cpu")
    kind = type(policy)
    fast = dpa.accelerate(policy)
    assert isinstance(fast, kind) and type(fast).__name__ == kind.__name__
    assert type(fast).conditional_sample is kind.conditional_sample
    others = copy.copy(fast), copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))
    for one in (fast, *others):
        assert isinstance(one, kind) and all(found.active for found in dpa.explain(one).findings)
        one.conditional_sample = lambda: "the user's own"
        assert one.conditional_sample() == "the user's own"
        del one.conditional_sample
        assert one.conditional_sample.__func__ is kind.conditional_sample
        assert type(dpa.restore(dpa.accelerate(one))) is kind
        dpa.accelerate(fast)


def test_a_class_that_keeps_a_registry_of_its_subclasses_sees_none():
    made = []

    class Registered(Scaled):
        def __init_subclass__(cls, *, tag):
            made.append(cls)

    module = graph_calls(Registered())
    assert not made and module(torch.ones(1, 3)).shape == (1, 3)
