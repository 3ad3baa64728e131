"""What users do to accelerated policies, drawn at random: every answer is a plain twin's.

`make test` generates a few sequences, `make fuzz` thousands. Several processes at once each take
their share of ``DPA_FUZZ_CASES``, and a ``--hypothesis-seed`` of their own.
"""

import copy
import functools
import os
import pickle
import random
import threading
import warnings
from collections import Counter

import torch
import user_actions as users
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import dpa

_CASES = int(os.environ.get("DPA_FUZZ_CASES", "20"))
_KINDS = ("original", "lerobot", "around", "guided", "dpa.nn", "images")
# Relative errors in the norm, of loops. In bfloat16 groups of few values magnify roundings.
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25}
SEEN: Counter = Counter()

seeds = st.integers(0, 99)


class _Pair:
    """A policy that may be accelerated, and its twin, which is not."""

    def __init__(self, fast, plain, coarse=None):
        self.fast, self.plain, self.coarse = fast, plain, coarse
        self.samplers = []

    def copied(self, how):
        return _Pair(how(self.fast), how(self.plain), self.coarse)

    def limit(self, dtypes):
        return max(_LIMITS[dtype] for dtype in (*dtypes, self.coarse) if dtype is not None)


def _copied(policy):
    """A deep copy; what a solver keeps of a loop that was differentiated cannot be copied."""
    kept = [x for values in vars(policy.noise_scheduler).values() if isinstance(values, list)
            for x in values if isinstance(x, torch.Tensor)]  # fmt: skip
    return copy.deepcopy(policy, {id(x): x.detach().clone() for x in kept})


def _in_thread(call):
    """Run a call in another thread, while this one waits."""
    results = []
    thread = threading.Thread(target=lambda: results.append(_outcome(call)))
    thread.start()
    thread.join()
    return results[0]


def _outcome(call):
    """The result of a call, or the exception that it raises."""
    try:
        return call()
    except Exception as error:
        return error


class UserActions(RuleBasedStateMachine):
    """Does the same to both twins of some policies, and compares their answers."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")  # falling back is right, where the answer is

    def teardown(self):
        self._caught.__exit__(None, None, None)

    @initialize(
        kind=st.sampled_from(_KINDS),
        mode=st.sampled_from(("loop", "loop", "step", "chain")),
        weights=st.sampled_from(("tracked", "checked")),
    )
    def start(self, kind, mode, weights):
        fast, plain = (one.to(self.device) for one in _prototypes(kind))
        self.options = {"mode": mode, "weights": weights}
        if kind != "dpa.nn":
            dpa.accelerate(fast, **self.options)
        self.pairs = [_Pair(fast, plain)]
        SEEN["sequences"] += 1

    def _pair(self, which):
        return self.pairs[which % len(self.pairs)]

    def _act(self, which, name, seed, probe):
        pair = self._pair(which)
        if name == "write inside" and self.options["weights"] != "checked":
            return
        results = [
            _outcome(lambda p=policy: users.ACTIONS[name](p, random.Random(seed)))
            for policy in (pair.fast, pair.plain)
        ]
        errors = [type(one) for one in results if isinstance(one, Exception)]
        assert len(errors) in (0, 2), results
        SEEN[name] += 1
        self._probe(pair, probe)

    @rule(which=seeds, name=st.sampled_from(users.OF_WEIGHTS), seed=seeds, probe=seeds)
    def weights(self, which, name, seed, probe):
        self._act(which, name, seed, probe)

    @rule(which=seeds, name=st.sampled_from(users.OF_MODULES), seed=seeds, probe=seeds)
    def modules(self, which, name, seed, probe):
        self._act(which, name, seed, probe)

    @rule(which=seeds, name=st.sampled_from(users.OF_SCHEDULERS), seed=seeds, probe=seeds)
    def schedulers(self, which, name, seed, probe):
        self._act(which, name, seed, probe)

    @rule(which=seeds, name=st.sampled_from(users.OF_MODES), seed=seeds, probe=seeds)
    def modes(self, which, name, seed, probe):
        self._act(which, name, seed, probe)

    @precondition(lambda self: hasattr(self.pairs[0].fast, "encoder"))
    @rule(which=seeds, name=st.sampled_from(users.OF_ENCODERS), seed=seeds, probe=seeds)
    def encoders(self, which, name, seed, probe):
        self._act(which, name, seed, probe)

    @rule(which=seeds, how=st.sampled_from(sorted(users.COPIES)), probe=seeds, other=seeds)
    def copied(self, which, how, probe, other):
        pair = self._pair(which)
        results = [_outcome(lambda: pair.copied(users.COPIES[how]))]
        if isinstance(results[0], Exception):  # lambdas and hooks of a test are not pickled
            assert isinstance(_outcome(lambda: users.COPIES[how](pair.plain)), type(results[0]))
            return
        self.pairs = [*self.pairs[-2:], results[0]]
        SEEN[how] += 1
        self._probe(results[0], probe)
        self._probe(self._pair(other), other)

    @rule(which=seeds, again=st.booleans(), dtype=st.sampled_from((None, None, torch.bfloat16)),
          mode=st.sampled_from(("loop", "step", "chain")), probe=seeds)  # fmt: skip
    def accelerated_again(self, which, again, dtype, mode, probe):
        pair = self._pair(which)
        dpa.restore(pair.fast)
        if again and not isinstance(
            _outcome(lambda: dpa.accelerate(pair.fast, dtype, mode, **self._weights())), TypeError
        ):
            for other in self.pairs:  # who shares the network
                if users.network(other.fast) is users.network(pair.fast):
                    other.coarse = dtype
        SEEN["accelerate" if again else "restore"] += 1
        self._probe(pair, probe)

    def _weights(self):
        return {"weights": self.options["weights"]}

    @rule(which=seeds, restore=st.booleans(), probe=seeds)
    def accelerated_scheduler(self, which, restore, probe):
        pair = self._pair(which)
        scheduler = pair.fast.noise_scheduler
        if restore:
            dpa.restore(scheduler)
        else:
            _outcome(lambda: dpa.accelerate(scheduler))
        SEEN["scheduler accelerated"] += 1
        self._probe(pair, probe)

    @rule(which=seeds, fused=st.booleans(), probe=seeds)
    def sampler(self, which, fused, probe):
        """A sampler of the network: the twin's loop with the scheduler as it is now."""
        pair = self._pair(which)
        if users.network(pair.fast).training or hasattr(pair.fast, "unet"):
            return
        options = {"horizon": 4, "action_dim": 2, "fused": fused, "fallback": True}
        made = _outcome(
            lambda: dpa.DiffusionSampler(
                users.network(pair.fast), pair.fast.noise_scheduler, 2, **self._weights(), **options
            )
        )
        if isinstance(made, Exception):
            return
        plain = type(pair.plain)(
            users.network(pair.plain), copy.deepcopy(pair.plain.noise_scheduler), 2
        )
        pair.samplers = [(made, plain)]
        SEEN["sampler"] += 1
        self._probe(pair, probe)

    @rule(which=seeds, probe=seeds)
    def observed(self, which, probe):
        with users.hook_of_all():
            self._probe(self._pair(which), probe)
        SEEN["hook of all"] += 1

    @rule(which=seeds)
    def repacked(self, which):
        dpa.repack(self._pair(which).fast)

    # Answers.
    def _probe(self, pair, seed):
        for _ in range(2):  # the first call of a kind is the original's
            self._compare(pair, random.Random(seed))

    def _compare(self, pair, draw):
        kinds = {"loop": self._loop, "step": self._step, "train": self._train,
                 "scheduler": self._scheduler, "sampler": self._sampler,
                 "encoder": self._encoder}  # fmt: skip
        name = draw.choice(
            ("loop", "loop", "loop", "step", "step", "train", "scheduler", "sampler")
        )
        if name == "sampler" and not pair.samplers:
            name = "loop"
        if hasattr(pair.fast, "encoder") and draw.random() < 0.6:
            name = "encoder"
        call = kinds[name](draw)
        thread, seed = draw.random() < 0.1, draw.randrange(100)
        mode = draw.choice((torch.no_grad, torch.no_grad, torch.inference_mode, torch.enable_grad))
        if name in ("train", "scheduler", "sampler"):
            mode = torch.enable_grad if name == "train" else torch.no_grad
        low = draw.random() < 0.1
        answers = [
            self._answer(call, pair, policy, mode, low, seed, thread)
            for policy in (pair.fast, pair.plain)
        ]
        exact = None
        weight = next(users.network(pair.plain).parameters())
        if low or weight.dtype == torch.bfloat16:
            narrow = weight.dtype == torch.bfloat16
            wide = _copied(pair.plain) if narrow or name == "encoder" else pair.plain
            wide = wide.float() if narrow else wide
            exact = self._answer(call, pair, wide, mode, False, seed, False)[0]
        self._same(pair, name, *answers, exact, weight.dtype)
        SEEN[f"probe of a {name}"] += 1

    def _answer(self, call, pair, policy, mode, low, seed, thread):
        """What a call gives, the random numbers' state afterwards, and the scheduler's times."""
        torch.manual_seed(seed)
        weight = next(users.network(policy).parameters())
        # The originals' position embedding is float32: in 16 bits they want autocast.
        low = low or weight.dtype == torch.bfloat16

        def one():  # modes are a thread's own
            with mode(), torch.autocast(weight.device.type, torch.bfloat16, enabled=low):
                return call(pair, policy)

        result = _in_thread(one) if thread else _outcome(one)
        state = torch.cuda.get_rng_state() if weight.is_cuda else torch.get_rng_state()
        return result, state, policy.noise_scheduler.timesteps

    def _same(self, pair, name, got, want, exact, dtype):
        """Compare two answers; where both are rounded much, their distances from the exact one."""
        (fast, moved, times), (plain, moves, twins_times) = got, want
        if isinstance(plain, Exception):
            assert isinstance(fast, Exception), f"{name}: only the plain one raised {plain!r}"
            return
        if isinstance(fast, Exception):
            raise AssertionError(f"{name}: only the accelerated one raised") from fast
        if isinstance(exact, Exception):  # what a wide copy of it does not take
            exact = tuple(torch.full_like(x, torch.nan) for x in plain)
        limit = pair.limit([dtype, None if exact is None else torch.bfloat16])
        for one, other, true in zip(fast, plain, exact or plain, strict=True):
            assert one.shape == other.shape and one.device == other.device, name
            assert one.dtype == other.dtype or name == "sampler", (name, one.dtype, other.dtype)
            if not bool(other.isfinite().all() and true.isfinite().all()):
                continue
            off, own = (float((x.double() - true.double()).norm()) for x in (one, other))
            error = (off - 2 * own) / max(float(true.double().norm()), 1e-3)
            assert error < limit, f"{name}: off by {error:.1e}, where {limit:.0e} is allowed"
        assert torch.equal(moved, moves), f"{name}: other random numbers were used"
        if name == "loop":
            assert torch.equal(times, twins_times)
        if name != "train":
            pairs = zip(pair.fast.parameters(), pair.plain.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs if a.shape == b.shape)
        if name == "encoder":  # a BatchNorm's statistics
            pairs = zip(pair.fast.encoder.buffers(), pair.plain.encoder.buffers(), strict=True)
            assert all(torch.equal(a, b) or a.isnan().any() for a, b in pairs)

    def _inputs(self, draw, policy, horizons=(4, 8)):
        weight = next(users.network(policy).parameters())
        generator = torch.Generator().manual_seed(draw.randrange(100))
        batch, horizon = draw.choice((1, 2, 3)), draw.choice(horizons)
        place = {"device": weight.device, "dtype": weight.dtype}
        sample = torch.randn(batch, horizon, 2, generator=generator)
        wide = 3 if not hasattr(policy, "unet") else 14
        cond = torch.randn(batch, wide, generator=generator)
        return sample.bfloat16().to(**place), cond.bfloat16().to(**place), generator

    def _loop(self, draw):
        state = draw.getstate()

        def call(pair, policy):
            draw.setstate(state)
            sample, cond, _ = self._inputs(draw, policy)
            own = draw.choice((None, None, 3))
            if own is not None:
                own = torch.Generator(sample.device).manual_seed(own)
            if hasattr(policy, "unet"):
                if draw.random() < 0.3:
                    return (policy.conditional_sample(len(cond), cond, own),)
                return (policy.conditional_sample(len(cond), global_cond=cond, generator=own),)
            mask = torch.zeros(sample.shape, dtype=torch.bool, device=sample.device)
            if draw.random() < 0.3:
                mask[:, 0] = True
            more = {}
            if isinstance(policy, users.Guided) and draw.random() < 0.3:
                more["guidance"] = draw.choice((0.0, 1.0))
            is_ddim = "DDIM" in type(policy.noise_scheduler).__name__
            if is_ddim and draw.random() < 0.2:
                more["eta"] = 0.5
            if draw.random() < 0.3:
                return (policy.conditional_sample(sample, mask, None, cond, own, **more),)
            return (
                policy.conditional_sample(sample, mask, global_cond=cond, generator=own, **more),
            )

        return call

    def _step(self, draw, grad=False):
        state = draw.getstate()

        def call(pair, policy):
            draw.setstate(state)
            sample, cond, _ = self._inputs(draw, policy)
            device = sample.device
            times = draw.choice(
                (3, torch.tensor(3, device=device), torch.full((len(cond),), 5, device=device))
            )
            if hasattr(policy, "unet") or isinstance(policy, users.AroundLeRobots):
                times = torch.full((len(cond),), 5, device=device)
            unet = users.network(policy)
            result = unet(sample, times, global_cond=cond)
            if not grad:
                return (result,)
            weights = [p for _, p in sorted(unet.named_parameters()) if p.requires_grad]
            loss = result.square().sum()
            grads = torch.autograd.grad(loss, weights, allow_unused=True) if weights else ()
            parts = [g.double().flatten() for g in grads if g is not None]
            return (result, torch.cat(parts)) if parts else (result,)

        return call

    def _encoder(self, draw):
        state = draw.getstate()

        def call(pair, policy):
            draw.setstate(state)
            weight = next(policy.encoder.parameters())
            generator = torch.Generator().manual_seed(draw.randrange(100))
            size = draw.choice(((16, 16), (16, 16), (15, 14)))
            images = torch.rand(draw.choice((1, 2, 3)), 3, *size, generator=generator)
            return (policy.encoder(images.bfloat16().to(weight)),)

        return call

    def _train(self, draw):
        return self._step(draw, grad=True)

    def _scheduler(self, draw):
        state = draw.getstate()

        def call(pair, policy):
            draw.setstate(state)
            scheduler = copy.deepcopy(policy.noise_scheduler)
            scheduler.set_timesteps(3)
            sample, _, numbers = self._inputs(draw, policy)
            output = torch.randn(sample.shape, generator=numbers).to(sample)
            t = draw.choice(list(scheduler.timesteps))
            t = draw.choice((t, int(t), float(t)))
            own = torch.Generator(sample.device).manual_seed(2) if draw.random() < 0.5 else None
            return (scheduler.step(output, t, sample, generator=own).prev_sample,)

        return call

    def _sampler(self, draw):
        state = draw.getstate()

        def call(pair, policy):
            draw.setstate(state)
            sample, cond, _ = self._inputs(draw, policy, horizons=(4,))
            made, plain = pair.samplers[0]
            if policy is pair.fast:
                return (made(cond),)
            if policy is not pair.plain:  # a wide copy of it
                scheduler = copy.deepcopy(plain.noise_scheduler)
                plain = type(plain)(users.network(policy), scheduler, 2)
            mask = torch.zeros(sample.shape, dtype=torch.bool, device=sample.device)
            return (plain.conditional_sample(sample, mask, global_cond=cond),)

        return call


@functools.cache
def _made(kind):
    return pickle.dumps(users.make_policies(kind))


def _prototypes(kind):
    return pickle.loads(_made(kind))  # a tenth of the time of a deep copy


def test_user_actions(device):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks as small as these
    SEEN.clear()
    try:
        run_state_machine_as_test(
            functools.partial(UserActions, device),
            settings=settings(
                max_examples=_CASES,
                stateful_step_count=7,
                deadline=None,
                derandomize="DPA_FUZZ_CASES" not in os.environ,
                suppress_health_check=list(HealthCheck),
                database=None,
                phases=[Phase.generate],  # shrinking a sequence takes minutes
            ),
        )
    finally:
        torch.set_num_threads(threads)
        print(dict(SEEN))
    assert SEEN["sequences"] >= _CASES
