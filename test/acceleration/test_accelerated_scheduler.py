"""dpa.accelerate on a bare diffusers scheduler: the same steps, and nothing else changes."""

import copy
import inspect
import pickle

import pytest
import torch
from scheduler_changes import (
    CHANGES,
    KINDS_AND_CHANGES,
    OPTIONS,
    diffusers,
    make_scheduler,
    scheduler_for,
)

import dpa
from dpa.acceleration.scheduler_step import FastStep
from dpa.packed.agreement import STEP_LIMITS, relative_error
from dpa.schedulers.conversion import from_diffusers

CASES = [(kind, options) for kind, every in OPTIONS.items() for options in every]


def loop(scheduler, steps, device, dtype=torch.float32, **options):
    """Every result of a whole loop, and the random stream behind it."""
    generator = torch.Generator(device).manual_seed(steps)
    x = torch.randn(2, 8, 3, generator=generator, device=device, dtype=dtype)
    scheduler.set_timesteps(steps)
    found = []
    for t in scheduler.timesteps:
        result = scheduler.step((2 * x).sin(), t, x, generator=generator, **options)
        x = result.prev_sample
        found += [x, result.pred_original_sample]
    return [*found, torch.randn(3, generator=generator, device=device)]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_whole_loops(kind, options, device):
    plain = make_scheduler(kind, **options)
    fast = dpa.accelerate(copy.deepcopy(plain))
    choices = [{}, {"eta": 0.7}, {"eta": 0.3, "use_clipped_model_output": True}]
    for steps in (5, 20, 7, 5):
        for extra in choices if kind == "DDIM" else choices[:1]:
            pairs = zip(
                loop(fast, steps, device, **extra), loop(plain, steps, device, **extra), strict=True
            )
            for got, expected in pairs:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert max(vars(fast)["step"].shadow.errors.values()) < 1e-5


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_step_has_its_signature(kind):
    """diffusers' pipelines pass a generator, and DDIM's eta, where a step takes one."""
    scheduler = make_scheduler(kind)
    before = inspect.signature(scheduler.step)
    dpa.accelerate(scheduler)
    assert isinstance(vars(scheduler)["step"], FastStep)
    assert inspect.signature(scheduler.step) == before and "generator" in before.parameters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype, device):
    """One step from the same sample: 16-bit results are rounded once here, several times there."""
    plain = make_scheduler("DDPM")
    fast = dpa.accelerate(copy.deepcopy(plain))
    exact = make_scheduler("DDPM")
    for scheduler in (plain, fast, exact):
        scheduler.set_timesteps(10)
    for number, t in enumerate(plain.timesteps):
        x = torch.randn(2, 8, 3, device=device, dtype=dtype)
        output, results = torch.randn_like(x), []
        for scheduler in (plain, fast, fast):
            generator = torch.Generator(device).manual_seed(number)
            results.append(scheduler.step(output, t, x, generator=generator).prev_sample)
        assert results[1].dtype == results[2].dtype == dtype
        generator = torch.Generator(device).manual_seed(number)
        noise = torch.randn(x.shape, generator=generator, device=device, dtype=dtype).double()
        table = dpa.schedulers.from_diffusers(plain).to(device)
        clean = dpa.reference.scheduler_step(
            output.double(),
            x.double(),
            table.coefficients,
            torch.tensor([number], device=device),
            noise if table.draws_noise[number] else None,
            table.clip,
        )
        theirs, ours = ((r.double() - clean).abs().max() for r in (results[0], results[2]))
        units = 8 if dtype == torch.float64 else 1  # to which the reference is rounded itself
        assert ours <= theirs + units * torch.finfo(dtype).eps * clean.abs().max()


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_step_under_autocast(kind, device):
    """Which leaves the original's arithmetic alone."""
    plain = make_scheduler(kind)
    fast = dpa.accelerate(copy.deepcopy(plain), fallback=False)
    sample, output = torch.randn(2, 1, 8, 2, device=device).bfloat16()
    for scheduler in (plain, fast):
        scheduler.set_timesteps(5)

    def step(scheduler, autocast):
        torch.manual_seed(7)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return scheduler.step(output, scheduler.timesteps[1], sample).prev_sample

    for autocast in (False, False, True, True):
        got, wanted = (step(scheduler, autocast) for scheduler in (fast, plain))
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-2)


def test_what_it_leaves_to_the_original(device):
    fast, plain = dpa.accelerate(make_scheduler("DDIM")), make_scheduler("DDIM")
    x = torch.randn(1, 4, 2, device=device)
    with pytest.raises(ValueError, match="Number of inference steps is 'None'"):
        fast.step(x, 3, x)
    for scheduler in (fast, plain):
        scheduler.set_timesteps(10)
    for _ in range(2):  # 3 is none of the ten timesteps, and a tuple has its own layout
        got, want = (s.step(x, 3, x, return_dict=False) for s in (fast, plain))
        assert len(got) == len(want) and all(map(torch.equal, got, want))
        assert torch.equal(fast.step(x, 3, x).prev_sample, plain.step(x, 3, x).prev_sample)
    for odd in (torch.tensor([0, 5]), 2.5):
        answers = []
        for scheduler in (fast, plain):
            try:
                answers.append(scheduler.step(x, odd, x).prev_sample)
            except (IndexError, RuntimeError, TypeError) as error:
                answers.append(str(error))
        got, want = answers
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    noise = torch.randn_like(x)
    for t in fast.timesteps[:3]:
        got, want = (
            s.step(x, t, x, eta=0.5, variance_noise=noise).prev_sample for s in (fast, plain)
        )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gradients_flow(device):
    plain = make_scheduler("DDPM")
    fast = dpa.accelerate(copy.deepcopy(plain))
    gradients = []
    for scheduler in (plain, fast):
        scheduler.set_timesteps(5)
        for _ in range(2):
            x = torch.linspace(-1, 1, 24, device=device).view(1, 8, 3).requires_grad_()
            generator = torch.Generator(device).manual_seed(1)
            out = scheduler.step(x.sin(), scheduler.timesteps[2], x, generator=generator)
            (gradient,) = torch.autograd.grad(out.prev_sample.square().sum(), x)
        gradients.append(gradient)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_copies_pickles_and_restore():
    scheduler = make_scheduler("DDPM")
    before = list(vars(scheduler))
    dpa.accelerate(scheduler)
    expected = loop(make_scheduler("DDPM"), 5, "cpu")
    for other in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler)), scheduler):
        step = vars(other)["step"]
        assert isinstance(step, FastStep) and step.scheduler is other
        for _ in range(2):
            got = loop(other, 5, "cpu")
            assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, expected, strict=True))
    [finding] = dpa.explain(scheduler).findings
    assert finding.active and finding.part == "scheduler" and max(finding.errors) < 1e-5
    # A table is still measured on the scheduler's own step.
    assert len(dpa.schedulers.from_diffusers(scheduler, 5)) == 5
    dpa.restore(scheduler)
    assert "step" not in vars(scheduler) and set(vars(scheduler)) >= set(before)
    assert dpa.explain(scheduler).findings[0].can


def test_an_altered_step_is_noticed():
    class Doubled(diffusers.DDPMScheduler):
        pass

    scheduler = dpa.accelerate(Doubled(50))
    # from_diffusers measures a copy, which follows; what it cannot see is a change afterwards.
    scheduler.set_timesteps(5)
    x = torch.randn(1, 4, 2)
    vars(scheduler)["step"]._find({})
    Doubled.step = lambda self, *args, **kwargs: type(out := diffusers.DDPMScheduler.step(
        self, *args, **kwargs))(2 * out.prev_sample, out.pred_original_sample)  # fmt: skip
    with pytest.warns(RuntimeWarning, match=r"accelerated Doubled.step differs"):
        scheduler.step(x, 20, x)


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "change"), KINDS_AND_CHANGES)
def test_a_scheduler_that_changes(kind, change):
    plain = scheduler_for(kind, change)
    fast = dpa.accelerate(copy.deepcopy(plain))
    extra = {"eta": 0.5} if kind == "DDIM" else {}
    for _ in range(2):
        before = loop(fast, 5, "cpu", **extra)
    for scheduler in (plain, fast):
        CHANGES[change](scheduler)
    after = loop(plain, 5, "cpu", **extra)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(before, after, strict=True))
    for _ in range(2):
        assert_same(loop(fast, 5, "cpu", **extra), after)


def test_timesteps_that_change(monkeypatch):
    """They are a loop's own: what another one has measured holds for them."""
    measured = []
    monkeypatch.setattr(
        "dpa.acceleration.scheduler_step.from_diffusers",
        lambda *a, **k: measured.append(1) or from_diffusers(*a, **k),
    )
    plain = make_scheduler("DDIM")
    fast = dpa.accelerate(copy.deepcopy(plain))
    del measured[:]
    for steps in (5, 7, 5, 5, 7):
        assert_same(loop(fast, steps, "cpu"), loop(plain, steps, "cpu"))
    assert len(measured) == 2
    x = torch.ones(1, 4, 2)
    for change in (
        lambda s: setattr(s, "num_inference_steps", 10),
        lambda s: s.timesteps.sub_(1),
        lambda s: setattr(s, "timesteps", s.timesteps + 3),
    ):
        for scheduler in (plain, fast):
            change(scheduler)
        for t in plain.timesteps:
            got, want = (s.step(x.sin(), t, x) for s in (fast, plain))
            assert_same(got.values(), want.values())
    monkeypatch.setattr("dpa.acceleration.scheduler_step._KEPT", 8)
    for steps in range(1, 12):
        for extra in ({}, {"eta": 0.5}):
            loop(fast, steps, "cpu", **extra)
            assert len(vars(fast)["step"]._tables) <= 8


def test_a_method_that_is_replaced_later():
    plain, fast = make_scheduler("DDPM"), dpa.accelerate(make_scheduler("DDPM"))
    loop(fast, 5, "cpu")
    for scheduler in (plain, fast):
        scheduler._get_variance = lambda *args, **kwargs: torch.tensor(0.25)
    want = loop(plain, 5, "cpu")
    with pytest.warns(RuntimeWarning, match="the scheduler's _get_variance was replaced on the"):
        assert_same(loop(fast, 5, "cpu"), want)
    with pytest.raises(TypeError, match="_get_variance was replaced on the object"):
        dpa.accelerate(fast)
    del fast._get_variance
    assert_same(loop(fast, 5, "cpu"), loop(make_scheduler("DDPM"), 5, "cpu"))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("value", ["none", "zero", "not finite"])
def test_a_first_step_that_proves_nothing(value):
    class Doubled(diffusers.DDIMScheduler):
        pass

    scheduler = dpa.accelerate(Doubled(50))
    scheduler.set_timesteps(5)
    vars(scheduler)["step"]._find({})
    Doubled.step = lambda self, *args, **kwargs: type(out := diffusers.DDIMScheduler.step(
        self, *args, **kwargs))(2 * out.prev_sample, out.pred_original_sample)  # fmt: skip
    x = {"none": torch.ones(0, 4, 2), "zero": torch.zeros(1, 4, 2)}
    x = x.get(value, torch.full((1, 4, 2), torch.nan))
    for _ in range(2):
        scheduler.step(x, 20, x)
    assert not vars(scheduler)["step"].shadow.errors
    with pytest.warns(RuntimeWarning, match=r"accelerated Doubled.step differs"):
        scheduler.step(x.new_ones(1, 4, 2), 20, x.new_ones(1, 4, 2))


def test_a_change_that_no_table_expresses():
    x = torch.randn(1, 4, 2)
    for fallback in (True, False):
        fast = dpa.accelerate(make_scheduler("DDIM"), fallback=fallback)
        fast.register_to_config(thresholding=True)
        fast.set_timesteps(5)
        if fallback:
            with pytest.warns(
                RuntimeWarning, match=r"DDIMScheduler.step cannot be fused: .*thresh"
            ):
                fast.step(x, fast.timesteps[0], x)
            fast.step(x, fast.timesteps[1], x)
        else:
            for t in fast.timesteps[:2]:
                with pytest.raises(RuntimeError, match="and fallback is False"):
                    fast.step(x, t, x)


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"step can be fused: .*PNDMScheduler"):
        dpa.accelerate(diffusers.PNDMScheduler(50))
    if "thresholding" in make_scheduler("DDPM").config:
        with pytest.raises(TypeError, match="thresholding"):
            dpa.accelerate(make_scheduler("DDPM", thresholding=True))
    assert not dpa.explain(diffusers.PNDMScheduler(50)).findings[0].can


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)])
def test_a_timestep_with_dimensions_gives_the_original_dtype_and_shape(kind, dtype, shape):
    """Coefficients that ``tensor([t])`` selects are no scalars: 16 bits become float32.

    On the CPU, where the scheduler has its tables: elsewhere such a timestep selects nothing.
    """
    plain = make_scheduler(kind)
    fast = dpa.accelerate(copy.deepcopy(plain))
    plain.set_timesteps(5), fast.set_timesteps(5)
    x, output = torch.randn(2, 2, 8, 3).to(dtype)
    for _ in range(2):  # after steps as loops take them were compared
        fast.step(output, plain.timesteps[2], x)
    t = plain.timesteps[2].reshape(shape)
    for _ in range(3):
        results = [
            s.step(output, t, x, generator=torch.Generator().manual_seed(1)) for s in (plain, fast)
        ]
        for name in ("prev_sample", "pred_original_sample"):
            expected, got = (getattr(result, name) for result in results)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert relative_error(got, expected) <= STEP_LIMITS[output.dtype]


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
@pytest.mark.parametrize(
    "make",
    [
        float,
        bool,
        lambda t: torch.tensor(float(t)),
        lambda t: torch.tensor(t, dtype=torch.uint8),
        lambda t: torch.tensor(t, dtype=torch.int16),
        lambda t: torch.tensor(t, dtype=torch.int32),
        lambda t: torch.tensor(t).numpy()[()],
    ],
)
def test_timesteps_of_other_types_mean_what_they_mean_to_the_original(kind, make):
    plain = make_scheduler(kind)
    fast = dpa.accelerate(copy.deepcopy(plain))
    x = torch.linspace(-1, 1, 8).view(1, 4, 2)
    for scheduler in (plain, fast):
        scheduler.set_timesteps(50)
    fast.step(x.sin(), 1, x), fast.step(x.sin(), 1, x)

    def outcome(scheduler):
        torch.manual_seed(0)
        try:
            return scheduler.step(x.sin(), make(1), x).prev_sample
        except (IndexError, RuntimeError, TypeError) as error:
            return type(error)

    got, want = outcome(fast), outcome(plain)
    if isinstance(want, type):
        assert got is want
    else:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_a_step_has_gradients_after_one_in_inference_mode(kind, dtype, device):
    """What is kept from step to step is of no mode."""
    plain = make_scheduler(kind)
    fast = dpa.accelerate(copy.deepcopy(plain))
    x = torch.linspace(-1, 1, 8, dtype=dtype, device=device).view(1, 4, 2)

    def step(scheduler, output):
        generator = torch.Generator(device).manual_seed(0)
        return scheduler.step(output, scheduler.timesteps[2], x, generator=generator).prev_sample

    for scheduler in (plain, fast):
        scheduler.set_timesteps(5)
    with torch.inference_mode():
        step(fast, x.sin()), step(fast, x.sin())
    outputs = [x.sin().requires_grad_() for _ in range(2)]
    for scheduler, output in zip((plain, fast), outputs, strict=True):
        step(scheduler, output).square().sum().backward()
    torch.testing.assert_close(outputs[1].grad, outputs[0].grad, rtol=1e-4, atol=1e-6)


def test_what_a_subclass_adds_to_a_step(device):
    """An argument that dpa does not know may change the step: such a call is the original's."""

    class Louder(diffusers.DDIMScheduler):
        def step(self, model_output, timestep, sample, gain=1.0, **kwargs):
            return super().step(gain * model_output, timestep, sample, **kwargs)

    plain = Louder(20)
    fast = dpa.accelerate(copy.deepcopy(plain))
    x = torch.randn(1, 4, 2, device=device)
    for scheduler in (plain, fast):
        scheduler.set_timesteps(5)
    t = plain.timesteps[2]
    for options in ({}, {}, {"gain": 2.0}, {"eta": 0.0}, {"eta": 0.5}, {"gain": 2.0}, {}):
        results = []
        for scheduler in (plain, fast):
            torch.manual_seed(1)
            results.append(scheduler.step(x, t, x, **options).prev_sample)
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert torch.equal(fast.step(x, t, x, 2.0).prev_sample, plain.step(x, t, x, 2.0).prev_sample)
    assert fast.step.shadow.agreed
