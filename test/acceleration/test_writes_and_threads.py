"""Accelerated policies beside what else a program does: writes, threads, arguments, settings.

Every result is compared with a twin that is not accelerated.
"""

import copy
import threading

import pytest
import torch
from policies import OriginalPolicy, call_of, diffusers, original_policy, sampled

import dpa


@torch.no_grad()
def test_a_write_while_weights_are_packed_is_not_lost(device, monkeypatch):
    """What a learner writes after the packing has read it is followed at the next call."""
    plain = original_policy(device)
    fast, call = dpa.accelerate(copy.deepcopy(plain)), call_of(device)
    sampled(fast, call), sampled(fast, call)
    pack = dpa.PackedUnet._pack

    def pack_and_write(packed):
        result = pack(packed)
        for parameter in fast.model.parameters():
            parameter.mul_(1.5)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(dpa.PackedUnet, "_pack", pack_and_write)
        next(fast.model.parameters()).add_(0)  # a change, so that the call packs
        sampled(fast, call)
    plain.load_state_dict(fast.state_dict())
    got, want = sampled(fast, call), sampled(plain, call)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_learner_and_an_actor(device):
    """Once the learner has stopped, the actor acts on its last weights."""
    plain = original_policy(device)
    fast, call = dpa.accelerate(copy.deepcopy(plain)), call_of(device)
    for _ in range(20):
        stop = threading.Event()

        def act(stop=stop):
            while not stop.is_set():
                sampled(fast, call)

        actor = threading.Thread(target=act)
        actor.start()
        with torch.no_grad():
            for _ in range(10):
                for parameter in fast.model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
        stop.set()
        actor.join()
        plain.load_state_dict(fast.state_dict())
        got, want = sampled(fast, call), sampled(plain, call)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def _row(weight):
    weight[3] += 0.5


def _channel(weight):
    weight[:, 5] += 0.5


def _tap(weight):
    weight[:, :, 0] += 0.5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["loop", "step"])
@pytest.mark.parametrize(
    ("layer", "name", "write"),
    [
        ("mid_modules.0.blocks.0.block.0", "weight", _row),
        ("mid_modules.0.blocks.0.block.0", "weight", _channel),
        ("mid_modules.0.blocks.0.block.0", "weight", _tap),
        ("up_modules.0.2.conv", "weight", _row),
        ("down_modules.1.0.cond_encoder.1", "weight", _channel),
        ("mid_modules.0.blocks.0.block.0", "bias", lambda bias: bias[:1].add_(5)),
        ("mid_modules.0.blocks.0.block.1", "bias", lambda bias: bias[-1:].add_(5)),
    ],
)
def test_writes_through_data(kind, layer, name, write, device):
    """They leave no version: values of each row, column and tap are compared, and whole vectors."""
    plain = original_policy(device)
    fast, call = dpa.accelerate(copy.deepcopy(plain)), call_of(device)
    step = torch.randn(2, 8, 2, device=device), torch.tensor([3], device=device), None, call[3]

    def run(policy):
        return sampled(policy, call) if kind == "loop" else policy.model(*step)

    before = run(fast), run(fast)
    for policy in (plain, fast):
        write(getattr(policy.model.get_submodule(layer), name).data)
    torch.testing.assert_close(run(fast), run(plain), rtol=1e-4, atol=1e-4)
    assert (run(plain) - before[1]).abs().max() > 1e-4


@torch.no_grad()
def test_checked_weights_show_a_write_of_one_element(device):
    for weights, noticed in (("checked", True), ("frozen", False)):
        plain = original_policy(device)
        fast, call = dpa.accelerate(copy.deepcopy(plain), weights=weights), call_of(device)
        before = sampled(fast, call), sampled(fast, call)
        for policy in (plain, fast):
            policy.model.mid_modules[0].blocks[0].block[0].weight.data[3, 9, 2] += 5
        want, got = sampled(plain, call), sampled(fast, call)
        assert (want - before[1]).abs().max() > 1e-3
        if noticed:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(got, before[1])
    with pytest.raises(ValueError, match="weights must be one of tracked, checked, frozen, got"):
        dpa.accelerate(plain, weights="sometimes")


class Guided(OriginalPolicy):
    """A loop with an argument and an attribute of its own."""

    strength = 0.0

    def __init__(self, *args):
        super().__init__(*args)
        self.offset = 0.0

    def conditional_sample(
        self, condition_data, condition_mask, local_cond=None, global_cond=None, generator=None,
        guidance=0.0, **kwargs,
    ):  # fmt: skip
        x = super().conditional_sample(
            condition_data, condition_mask, local_cond, global_cond, generator, **kwargs
        )
        return x + guidance + self.offset


@torch.no_grad()
def test_what_dpa_does_not_know_belongs_to_the_original(device):
    made = original_policy(device)
    plain = Guided(made.model, made.noise_scheduler, made.num_inference_steps).to(device).eval()
    fast, call = dpa.accelerate(copy.deepcopy(plain)), call_of(device)

    def both(**options):
        results = []
        for policy in (plain, fast):
            torch.manual_seed(3)
            results.append(policy.conditional_sample(*call, **options))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)

    both(), both()
    with pytest.warns(RuntimeWarning, match="does not know what it does with guidance"):
        both(guidance=1.0)
    both()
    plain.offset = fast.offset = 2.0
    with pytest.warns(RuntimeWarning, match="differs from the original"):
        both()
    both()
    plain.offset = fast.offset = 0.0
    both(), both()
    assert vars(fast)["conditional_sample"].shadow.passed(
        vars(fast)["conditional_sample"]._routes[0]
    )


class Interrupted(OriginalPolicy):
    """Another thread uses the global generator in the middle of every loop."""

    drawn = None

    def predict(self, x, t, **conditions):
        if self.drawn is not None:
            thread = threading.Thread(target=lambda: self.drawn.append(torch.randn(2).tolist()))
            thread.start()
            thread.join()
        return super().predict(x, t, **conditions)


@torch.no_grad()
def test_a_comparison_neither_disturbs_nor_is_disturbed():
    made, call, drawn = original_policy("cpu"), call_of(), []
    policy = Interrupted(made.model, made.noise_scheduler, made.num_inference_steps).eval()
    Interrupted.drawn = drawn
    try:
        fast = dpa.accelerate(policy)
        sampled(fast, call)
    finally:
        Interrupted.drawn = None
    assert len(drawn) >= policy.num_inference_steps
    assert len({tuple(numbers) for numbers in drawn}) == len(drawn)  # none was drawn twice
    loop = vars(fast)["conditional_sample"]
    assert loop.shadow.failed is None and max(loop.shadow.errors.values()) < 1e-4
    want = sampled(copy.deepcopy(made), call)
    torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)


def test_policies_in_two_threads_are_both_accelerated():
    policies = [dpa.accelerate(original_policy("cpu")) for _ in range(2)]
    call, start = call_of(), threading.Barrier(2)

    def work(policy):
        start.wait()
        with torch.no_grad():
            for _ in range(4):
                policy.conditional_sample(*call)

    threads = [threading.Thread(target=work, args=(policy,)) for policy in policies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for policy in policies:
        assert vars(policy)["conditional_sample"].shadow.failed is None
        assert all(finding.active for finding in dpa.explain(policy).findings)


@torch.no_grad()
def test_arguments_that_have_defaults_may_be_left_out():
    class Lenient(OriginalPolicy):
        def conditional_sample(
            self, condition_data, condition_mask=None, local_cond=None, global_cond=None,
            generator=None, **kwargs,
        ):  # fmt: skip
            if condition_mask is None:
                condition_mask = torch.zeros_like(condition_data, dtype=torch.bool)
            return super().conditional_sample(
                condition_data, condition_mask, local_cond, global_cond, generator, **kwargs
            )

    made = original_policy("cpu")
    plain = Lenient(made.model, made.noise_scheduler, made.num_inference_steps).eval()
    fast, (data, _, _, cond) = dpa.accelerate(copy.deepcopy(plain)), call_of()
    for _ in range(2):
        results = []
        for policy in (plain, fast):
            torch.manual_seed(2)
            results.append(policy.conditional_sample(data, global_cond=cond))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_explain_says_what_runs():
    policy = original_policy("cpu")
    policy.noise_scheduler = diffusers.DPMSolverMultistepScheduler(20)
    assert "step by step: its solver has several steps" in str(dpa.explain(dpa.accelerate(policy)))
    policy = dpa.accelerate(original_policy("cpu"))
    policy.model.final_conv[1] = torch.nn.Sequential(policy.model.final_conv[1])
    with pytest.warns(RuntimeWarning, match="has changed"):
        findings = dpa.explain(policy).findings
    assert [finding.active for finding in findings] == [False, False]
