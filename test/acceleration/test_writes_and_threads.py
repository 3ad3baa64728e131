"""Accelerated policies beside what else a program does: writes, threads, arguments, settings.

Every result is compared with a twin that is not accelerated.
"""

import copy
import threading
import time

import pytest
import torch
from patience import HANGS
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


class _Versions:
    """A network whose last bias takes one value after another, and the twin's answers to each."""

    count = 12

    def __init__(self, device):
        self.plain = original_policy(device)
        options = {"clip_sample": False, "prediction_type": "sample"}
        self.plain.noise_scheduler = diffusers.DDIMScheduler(20, **options)
        self.plain.num_inference_steps = 1  # so that no loop reads two versions
        self.fast = dpa.accelerate(copy.deepcopy(self.plain))
        self.call, self.device = call_of(device), device
        self.begun = self.done = 0
        self.writing = threading.Lock()
        self.answers = []
        for version in range(self.count):
            self.bias(self.plain).data.fill_(version)
            self.answers.append({name: ask(self.plain) for name, ask in self.questions().items()})
        self.bias(self.fast).data.zero_()

    def bias(self, policy):
        return policy.model.final_conv[1].bias

    def questions(self):
        return {"sample": self.sampled, "train": self.trained}

    @torch.no_grad()
    def sampled(self, policy):
        generator = torch.Generator(self.device).manual_seed(5)
        return (policy.conditional_sample(*self.call, generator),)

    @torch.enable_grad()
    def trained(self, policy):
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(2, 8, 2, generator=generator).to(self.device)
        result = policy.model(x, torch.tensor(3, device=self.device), None, self.call[3])
        weight = policy.model.final_conv[1].weight
        return result.detach(), torch.autograd.grad(result.square().mean(), weight)[0]

    def write(self, how):
        with self.writing:
            version = min(self.done + 1, self.count - 1)
            self.begun = version
            how(version)
            self.done = version

    @torch.no_grad()
    def learn(self, version):
        self.bias(self.fast).fill_(version)

    def load(self, version):
        state = {name: value.clone() for name, value in self.fast.state_dict().items()}
        state["model.final_conv.1.bias"].fill_(version)
        self.fast.load_state_dict(state)

    def ask(self, name):
        """Ask the accelerated policy: its answer is the twin's, of a version of that time."""
        first = self.done
        try:
            got = self.questions()[name](self.fast)
        except RuntimeError as error:  # PyTorch's: written between a forward and its backward
            assert "modified by an inplace operation" in str(error)
            return
        wanted = [answer[name] for answer in self.answers[first : self.begun + 1]]
        near = {"rtol": 1e-3, "atol": 1e-3}
        assert any(
            all(torch.allclose(a, b, **near) for a, b in zip(got, want, strict=True))
            for want in wanted
        ), f"{name}: none of the answers of versions {first} to {self.begun}"


@torch.no_grad()
def test_a_comparison_that_a_write_comes_between_is_repeated(device, monkeypatch):
    """What the two sides read at different times is no difference between them."""
    fast, call = dpa.accelerate(original_policy(device), fallback=False), call_of(device)
    predict, bias = OriginalPolicy.predict, fast.model.final_conv[1].bias

    def then_written(policy, x, t, **conditions):
        result = predict(policy, x, t, **conditions)
        if t == policy.noise_scheduler.timesteps[-1]:
            bias.add_(1.0)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(OriginalPolicy, "predict", then_written)
        sampled(fast, call)
    want = sampled(dpa.restore(copy.deepcopy(fast)), call)
    for _ in range(2):
        torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)
    assert all(finding.active for finding in dpa.explain(fast).findings)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_sampling_training_loading_drawing_and_packing_at_once(device):
    """Five threads on one policy, each answer compared with a twin that one thread touched."""
    versions, errors, stop = _Versions(device), [], threading.Event()
    drawn, turns = [], dict.fromkeys(("sample", "train", "learn", "load", "draw", "pack"), 0)
    roles = {
        "sample": lambda: versions.ask("sample"),
        "train": lambda: versions.ask("train"),
        "learn": lambda: versions.write(versions.learn),
        "load": lambda: versions.write(versions.load),
        "draw": lambda: drawn.append(torch.randn(2, device=device)),
        "pack": lambda: dpa.repack(versions.fast),
    }

    def work(name):
        try:
            while not stop.is_set():
                roles[name]()
                turns[name] += 1
                stop.wait(0.02 if name in ("learn", "load", "draw", "pack") else 0)
        except BaseException as error:
            errors.append(error)
            stop.set()

    torch.manual_seed(8)
    threads = [threading.Thread(target=work, args=(name,)) for name in roles]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + HANGS
    while not stop.is_set() and time.monotonic() < deadline and min(turns.values()) < 20:
        stop.wait(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(finding.active for finding in dpa.explain(versions.fast).findings)
    assert min(turns.values()) >= 5 and versions.done == versions.count - 1
    torch.manual_seed(8)
    for numbers in drawn:  # nothing else took a number from the global generator, or gave one back
        assert torch.equal(numbers, torch.randn(2, device=device))
    for name in versions.questions():
        versions.ask(name)


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


@pytest.mark.parametrize(
    ("kind", "weights"), [(torch.optim.Adam, "checked"), (dpa.training.Adam, "tracked")]
)
def test_checked_weights_show_a_fused_step_of_one_element(kind, weights, device):
    """PyTorch's fused optimizers count in no version, dpa's do."""
    torch.manual_seed(0)
    shape = {"global_cond_dim": 3, "diffusion_step_embed_dim": 16, "down_dims": (64, 128)}
    net = dpa.reference.plain(dpa.nn.ConditionalUnet1D(2, **shape)).to(device).eval()
    fast = dpa.accelerate(copy.deepcopy(net), weights=weights)
    inputs = torch.randn(1, 8, 2, device=device), 3, None, torch.randn(1, 3, device=device)
    with torch.no_grad():
        before = [fast(*inputs) for _ in range(3)][-1]
        for each in (net, fast):
            weight = each.mid_modules[0].blocks[0].block[0].weight
            weight.grad = torch.zeros_like(weight)
            weight.grad[5, 7, 1] = 1.0
            kind([weight], lr=3.0, fused=True).step()
        want, got = net(*inputs), fast(*inputs)
    assert (want - before).norm() > 0.05 * before.norm()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


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
    """Another thread takes from the loop's generator in the middle of every loop."""

    drawn = generator = None

    def predict(self, x, t, **conditions):
        if self.drawn is not None:
            take = lambda: torch.randn(2, generator=self.generator).tolist()  # noqa: E731
            thread = threading.Thread(target=lambda: self.drawn.append(take()))
            thread.start()
            thread.join()
        return super().predict(x, t, **conditions)


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True], ids=["global", "by position"])
def test_a_comparison_neither_disturbs_nor_is_disturbed(given):
    made, call, drawn = original_policy("cpu"), call_of(), []
    own = torch.Generator().manual_seed(1) if given else None
    policy = Interrupted(made.model, made.noise_scheduler, made.num_inference_steps).eval()
    Interrupted.drawn, Interrupted.generator = drawn, own
    try:
        fast = dpa.accelerate(policy)
        sampled(fast, (*call, own))
    finally:
        Interrupted.drawn = Interrupted.generator = None
    assert len(drawn) >= policy.num_inference_steps
    assert len({tuple(numbers) for numbers in drawn}) == len(drawn)  # none was drawn twice
    loop = vars(fast)["conditional_sample"]
    assert loop.shadow.failed is None and max(loop.shadow.errors.values()) < 1e-4
    want = sampled(copy.deepcopy(made), call)
    torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)


class GlobalNoise(Interrupted):
    """A loop that is given a generator, and does not use it."""

    def conditional_sample(
        self, condition_data, condition_mask, local_cond=None, global_cond=None, generator=None,
        **kwargs,
    ):  # fmt: skip
        return super().conditional_sample(
            condition_data, condition_mask, local_cond, global_cond, **kwargs
        )


@torch.no_grad()
def test_a_disturbed_comparison_is_repeated_where_a_loop_keeps_to_the_global_generator():
    made, call = original_policy("cpu"), call_of()
    fast = dpa.accelerate(GlobalNoise(made.model, made.noise_scheduler, 5).eval())
    GlobalNoise.drawn = []
    try:
        for _ in range(3):
            sampled(fast, call)
    finally:
        GlobalNoise.drawn = None
    loop = vars(fast)["conditional_sample"]
    assert loop.shadow.failed is None and not loop.shadow.agreed  # no verdict yet
    want = sampled(copy.deepcopy(made), call)
    for _ in range(2):
        torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)
    assert loop.shadow.passed(loop._routes[0])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_verdict_on_a_loop_goes_with_the_weights_that_it_was_found_with():
    plain, call = original_policy("cpu"), call_of()
    fast = dpa.accelerate(copy.deepcopy(plain))
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    loop = vars(fast)["conditional_sample"]
    run = loop._run

    def off(*args):
        return run(*args) * 1.1

    loop._run = off
    sampled(fast, call)
    assert loop.shadow.passed(loop._routes[0]) is False
    loop._run = run
    sampled(fast, call)
    assert loop.shadow.passed(loop._routes[0]) is False  # with these weights
    fast.load_state_dict(state)
    sampled(fast, call)
    assert loop.shadow.passed(loop._routes[0]) and loop.shadow.failed is None
    loop.forget()
    loop._run = off
    for _ in range(40):  # a loop that differs whatever the weights are is compared a few times
        fast.load_state_dict(state)
        sampled(fast, call)
    before = dict(loop.shadow.errors)
    fast.load_state_dict(state)
    assert loop.shadow.passed(loop._routes[0]) is False and loop.shadow.errors == before


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
    assert "accelerated: the whole loop" in str(dpa.explain(dpa.accelerate(policy)))
    policy = dpa.accelerate(original_policy("cpu"))
    policy.model.train()
    assert "as it is while its network is in training mode" in str(dpa.explain(policy))
    policy.model.eval()
    assert "training" not in str(dpa.explain(policy))
    policy.model.final_conv[1] = torch.nn.Sequential(policy.model.final_conv[1])
    with pytest.warns(RuntimeWarning, match="has changed"):
        findings = dpa.explain(policy).findings
    assert [finding.active for finding in findings] == [False, False]
