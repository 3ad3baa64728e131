"""What the code of users' subclasses reads counts, wherever it is held, and changes later."""

import contextvars
import copy
import functools
import warnings
from types import MappingProxyType, ModuleType, SimpleNamespace

import pytest
import torch
from policies import (
    OriginalPolicy,
    call_of,
    diffusers,
    lerobot_policy,
    observations,
    original_policy,
    sampled,
)
from torch import nn

import dpa
from dpa.acceleration import unet_forward
from dpa.training.graphed_calls import replaced_forward

variable = another = 0.0
imported = ModuleType("imported")
imported.variable = 0.0


def from_another():
    return another


class Guide:
    strength = 0.0

    def __init__(self):
        self.weight = 0.0

    def offset(self):
        return self.weight + self.strength

    def __call__(self):
        return self.weight

    __enter__ = __call__

    def __exit__(self, *_):
        pass


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("value", torch.zeros(()))
        self.factor = 1.0

    def forward(self, x):
        return x * self.factor + self.value


class ReadsMuch:
    """What a subclass's code may read, beside plain attributes."""

    of_class = 0.0

    def hold(self):
        self.held = SimpleNamespace(weight=0.0)
        self.nested = {"guides": [Guide()], "functions": {"one": from_another}}
        self.guide, self.entered, self.method = Guide(), Guide(), Guide().offset
        if isinstance(self, nn.Module):
            self.register_buffer("shift", torch.zeros(()))
        return self

    def offset(self):
        here = self.held.weight + self.nested["guides"][0].offset() + self.of_class + variable
        here += self.guide() + self.method() + self.nested["functions"]["one"]() + imported.variable
        with self.entered as entered:
            return here + entered + getattr(self, "shift", 0.0)


class Policy(ReadsMuch, OriginalPolicy):
    def conditional_sample(
        self, condition_data, condition_mask, local_cond=None, global_cond=None, generator=None,
        **kwargs,
    ):  # fmt: skip
        x = super().conditional_sample(
            condition_data, condition_mask, local_cond, global_cond, generator, **kwargs
        )
        return self.layer(x) + self.offset()


class Network(ReadsMuch, type(original_policy("cpu").model)):
    factor = 1.0

    def forward(self, sample, timestep, local_cond=None, global_cond=None):
        result = super().forward(sample, timestep, local_cond, global_cond)
        return result * self.factor + self.offset()


class Scheduler(ReadsMuch, diffusers.DDIMScheduler):
    def step(self, model_output, timestep, sample, *args, **kwargs):
        return super().step(
            model_output * (1 - self.offset() / 2), timestep, sample, *args, **kwargs
        )


CHANGES = {
    "an object": lambda one: setattr(one.held, "weight", 1.0),
    "an object in containers": lambda one: setattr(one.nested["guides"][0], "weight", 1.0),
    "an object that is called": lambda one: setattr(one.guide, "weight", 1.0),
    "an object that is entered": lambda one: setattr(one.entered, "weight", 1.0),
    "an object of a method": lambda one: setattr(one.method.__self__, "weight", 1.0),
    "a buffer": lambda one: one.shift.fill_(1.0),
    "the class": lambda one: setattr(ReadsMuch, "of_class", 1.0),
    "the class of an object": lambda one: setattr(Guide, "strength", 1.0),
    "a variable": lambda one: globals().update(variable=1.0),
    "a variable of a function": lambda one: globals().update(another=1.0),
    "a variable of a module": lambda one: setattr(imported, "variable", 1.0),
    "a layer's buffer": lambda one: one.layer.value.fill_(1.0),
    "a layer's setting": lambda one: setattr(one.layer, "factor", 2.0),
}


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    Guide.strength = ReadsMuch.of_class = imported.variable = 0.0
    globals().update(variable=0.0, another=0.0)


def _policy(device, kind):
    """A policy that reads much, or whose network or scheduler does."""
    made = original_policy(device)
    if kind == "policy":
        made.__class__ = Policy
        made.hold().layer = Offset()
    if kind == "network":
        made.model.__class__ = Network
        made.model.hold()
    if kind == "scheduler":
        made.noise_scheduler = Scheduler(20).hold()
    return made.to(device)


def _part(policy, kind):
    parts = {"network": lambda: policy.model, "scheduler": lambda: policy.noise_scheduler}
    return parts.get(kind, lambda: policy)()


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (kind, change)
        for kind in ("policy", "network", "scheduler")
        for change in CHANGES
        if (kind == "policy" or "layer" not in change)
        and (kind != "scheduler" or "buffer" not in change)
    ],
)
def test_a_change_counts_at_the_next_call(kind, change, device):
    plain = _policy(device, kind)
    fast, call = dpa.accelerate(copy.deepcopy(plain)), call_of(device)
    before = sampled(fast, call), sampled(fast, call)
    loop = vars(fast)["conditional_sample"]
    assert loop.shadow.passed(loop._routes[0])  # it runs accelerated
    step = torch.randn(2, 8, 2, device=device), torch.tensor(3, device=device), None, call[3]
    fast.model(*step), fast.model(*step)
    parts = [_part(policy, kind) for policy in (plain, fast)]
    for part in parts if "class" not in change and "variable" not in change else parts[:1]:
        CHANGES[change](part)
    for _ in range(3):
        want = sampled(plain, call)
        torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fast.model(*step), plain.model(*step), rtol=1e-4, atol=1e-4)
    assert (want - before[1]).abs().max() > 1e-2
    assert len(loop._routes) == 2 or kind == "network"  # what is the same again is not compared


CONTEXT, SHOWN = contextvars.ContextVar("context", default=0.0), {"offset": 0.0}
VIEW = MappingProxyType(SHOWN)
INDIRECT = {  # how a loop reads a number, and how a user sets it
    "a context": (lambda _: CONTEXT.get(), CONTEXT.set),
    "a view": (lambda _: VIEW["offset"], lambda x: SHOWN.update(offset=x)),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", INDIRECT)
def test_contexts_and_views(kind, device):
    read, write = INDIRECT[kind]
    plain, call = original_policy(device), call_of(device)
    plain.__class__ = type("Indirect", (Policy,), {"offset": read})
    plain.hold().layer = Offset()
    plain.to(device)
    fast = dpa.accelerate(copy.deepcopy(plain))
    sampled(fast, call), sampled(fast, call)
    loop = vars(fast)["conditional_sample"]
    assert loop.shadow.passed(loop._routes[0])  # it runs accelerated
    for value in (1.0, 0.0):
        write(value)
        for _ in range(2):
            torch.testing.assert_close(
                sampled(fast, call), sampled(plain, call), rtol=1e-4, atol=1e-4
            )
    assert len(loop._routes) == 2  # what is the same again is not compared


@torch.no_grad()
@pytest.mark.parametrize("change", ["an object", "a variable", "a number"])
def test_compiled_calls_follow(change):
    torch._dynamo.reset()
    plain = _policy("cpu", "network").model
    if change == "a number":  # and nothing else
        plain = original_policy("cpu").model
        plain.__class__ = Numbered
    fast = dpa.accelerate(copy.deepcopy(plain))
    step = torch.randn(2, 8, 2), torch.tensor(3), None, torch.randn(2, 4)
    fast(*step)
    compiled = torch.compile(fast, backend="eager")
    before = compiled(*step)
    changes = CHANGES | {"a number": lambda one: setattr(one, "factor", 2.0)}
    for one in (plain, fast):
        changes[change](one)
    torch.testing.assert_close(compiled(*step), plain(*step), rtol=1e-4, atol=1e-4)
    assert (plain(*step) - before).abs().max() > 1e-2


class Numbered(type(original_policy("cpu").model)):
    factor = 1.0

    def forward(self, sample, timestep, local_cond=None, global_cond=None):
        return super().forward(sample, timestep, local_cond, global_cond) * self.factor


@torch.no_grad()
@pytest.mark.parametrize("change", ["an object", "the class", "a variable"])
def test_steps_of_a_scheduler_follow(change):
    plain = Scheduler(20).hold()
    fast = dpa.accelerate(copy.deepcopy(plain))
    output, sample = torch.randn(2, 8, 2), torch.randn(2, 8, 2)

    def step(scheduler):
        scheduler.set_timesteps(5)
        return scheduler.step(output, scheduler.timesteps[1], sample).prev_sample

    before = step(fast), step(fast)
    for one in (plain, fast):
        CHANGES[change](one)
    for _ in range(2):
        torch.testing.assert_close(step(fast), step(plain))
    assert (step(plain) - before[1]).abs().max() > 1e-2


@torch.no_grad()
def test_a_step_that_names_its_arguments_otherwise_is_the_schedulers():
    class Otherwise(diffusers.DDIMScheduler):
        def step(self, model_output, *rest, **options):
            return super().step(model_output, *rest, **options)

    plain = Otherwise(20)
    fast = dpa.accelerate(copy.deepcopy(plain))
    output, sample = torch.randn(2, 8, 2), torch.randn(2, 8, 2)
    for one in (plain, fast):
        one.set_timesteps(5)
    for t in plain.timesteps:
        got, want = (one.step(output, t, sample).prev_sample for one in (fast, plain))
        torch.testing.assert_close(got, want)


def test_what_is_known_needs_no_comparison():
    """Of the original's code, and LeRobot's, nothing is read but what is compared already."""
    policy, call = dpa.accelerate(original_policy("cpu")), call_of()
    sampled(policy, call)
    route = vars(policy)["conditional_sample"]._routes[0]
    assert not any(one.read_beside for one in (*route.snapshots, route.network.tracker))


class UsesTheGlobalStream(OriginalPolicy):
    """Its code takes random numbers of the global stream, whatever generator it is given."""

    def predict(self, *given, **conditions):
        torch.rand((), device=given[0].device)
        return super().predict(*given, **conditions)


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_a_loop_that_uses_another_stream_than_its_generator_runs_as_it_is(kind, device):
    """A comparison on a private generator agrees, and would leave the shared one behind."""
    policy = original_policy(device, kind)
    policy.__class__ = UsesTheGlobalStream
    plain, call = copy.deepcopy(policy), call_of(device)
    dpa.accelerate(policy)
    for number in range(3):
        found = []
        for each in (policy, plain):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                actions = sampled(each, call)
            found.append((actions, torch.rand(4, device=device)))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
        if number > 0:  # the first call does not know who else has used it
            assert torch.equal(found[0][1], found[1][1])
    assert "unchanged: takes other random numbers" in str(dpa.explain(policy))


def test_an_input_of_another_dtype_is_refused_as_before(device):
    """The first call of a dtype is the original's, whose layers say what they do not take."""
    policy = lerobot_policy(device, n_obs_steps=1)
    dpa.accelerate(policy)
    for observation in observations(2, device):
        policy.reset()
        policy.select_action(observation)
    policy.reset()
    with pytest.raises(RuntimeError, match="dtype"):
        policy.select_action({name: x.double() for name, x in observation.items()})


class Clamps(OriginalPolicy):
    @functools.wraps(OriginalPolicy.conditional_sample)
    def conditional_sample(self, *given, **named):
        return super().conditional_sample(*given, **named).clamp(-2, 2)


class ClampsByName(OriginalPolicy):
    @functools.wraps(OriginalPolicy.conditional_sample)
    def conditional_sample(self, *given, **named):
        again = lambda: OriginalPolicy.conditional_sample(self, *given, **named)  # noqa: E731
        return again().clip(-2, 2)


class ClampsInside(OriginalPolicy):
    def predict(self, *given, **named):
        return super().predict(*given, **named).clamp(-2, 2)


class Raises(OriginalPolicy):
    @functools.wraps(OriginalPolicy.conditional_sample)
    def conditional_sample(self, *given, **named):
        if given[3].abs().max() > 100:
            raise ValueError("a wild observation")
        return super().conditional_sample(*given, **named)


class ClampsOutputs(type(original_policy("cpu").model)):
    def forward(self, sample, timestep, local_cond=None, global_cond=None):
        return super().forward(sample, timestep, local_cond, global_cond).clamp(-2, 2)


@pytest.mark.parametrize("kind", [Clamps, ClampsByName, ClampsInside, Raises, ClampsOutputs])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_guard_around_a_known_method_runs(kind, device):
    """It does nothing in the call that is compared, and acts when the weights have grown."""
    policy = original_policy(device)
    of_network = kind is ClampsOutputs
    (policy.model if of_network else policy).__class__ = kind
    plain, call = copy.deepcopy(policy), call_of(device)
    dpa.accelerate(policy)
    for _ in range(2):
        sampled(policy, call)
    for each in (policy, plain):
        with torch.no_grad():
            each.model.final_conv[1].weight.mul_(300)
    if kind is Raises:
        call = (*call[:3], 1000 * call[3])
        for each in (policy, plain):
            with pytest.raises(ValueError, match="a wild observation"):
                sampled(each, call)
    else:
        got, want = sampled(policy, call), sampled(plain, call)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert "wraps another" in str(dpa.explain(policy))


class Counting(type(original_policy("cpu").model)):
    """A network that counts its calls in a variable."""

    def forward(self, sample, timestep, local_cond=None, global_cond=None):
        count_call()
        return super().forward(sample, timestep, local_cond, global_cond)


calls = 0


def count_call():
    global calls
    calls += 1


@torch.no_grad()
def test_a_network_that_changes_at_every_call_runs_as_it_is(monkeypatch):
    """After as many calls as a loop has; packing it takes longer than a call."""
    made = original_policy("cpu").model
    made.__class__ = Counting
    fast = dpa.accelerate(copy.deepcopy(made))
    step = torch.randn(2, 8, 2), torch.tensor(3), None, torch.randn(2, 4)
    with pytest.warns(RuntimeWarning, match="its attributes change from call to call"):
        for _ in range(34):
            torch.testing.assert_close(fast(*step), made(*step), rtol=1e-4, atol=1e-4)
    assert "its attributes change from call to call" in str(dpa.explain(fast))
    monkeypatch.setattr(unet_forward, "recognise", None)  # nor is it read again
    torch.testing.assert_close(fast(*step), made(*step))
    monkeypatch.undo()
    dpa.accelerate(fast)
    fast(*step)
    assert replaced_forward(fast).fallback_reason() is None
