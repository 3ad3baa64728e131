"""Loops and networks of other kinds than LeRobot's and diffusion_policy's U-Nets."""

import copy
import pickle

import other_policies as others
import pytest
import torch
from policy_cases import CASES, start_over, state
from torch import nn

import dpa
from dpa.acceleration.known_loops import KNOWN
from dpa.acceleration.policy_loop import FastLoop
from dpa.packed.agreement import LOOP_LIMITS, relative_error
from dpa.tracking.replacing import replaced

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.fixture(params=CASES)
def case(request, device):
    torch.manual_seed(0)
    make, method, observe, loops = CASES[request.param]
    return make().to(device).eval(), method, lambda: observe(device), loops


def acts(policy, method, observations):
    """What a policy returns, call after call, and the random numbers after them."""
    torch.manual_seed(5)
    with torch.no_grad():
        results = [getattr(policy, method)(copy.copy(observed)) for observed in observations]
    device = next(policy.parameters()).device
    return [*results, torch.randn(3, device=device)]


def first(result):
    """The actions in what a policy returns."""
    held = tuple(result.values()) if isinstance(result, dict) else result
    return held[0] if isinstance(held, tuple) else held


def test_it_acts_as_before(case):
    plain, method, observe, loops = case
    fast = dpa.accelerate(copy.deepcopy(plain), fallback=False, graphs=False)
    observations = [observe() for _ in range(5)]
    expected = acts(copy.deepcopy(plain), method, observations)
    for _ in range(2):
        got = acts(fast, method, observations)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        start_over(fast)
    for name in loops:
        loop = replaced(fast, name)
        assert isinstance(loop, FastLoop)
        assert loop.shadow.errors and max(loop.shadow.errors.values()) < 1e-4, loop.shadow
        assert len(loop._routes) == 1  # nothing that calls change is taken for a setting
    findings = [f for f in dpa.explain(fast).findings if f.part == "loop"]
    assert len(findings) == len(loops) and all(f.active and f.errors for f in findings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_acts_as_before_in_sixteen_bits(case, dtype, device):
    """Whole loops, on packed weights where the device has kernels for the network.

    Untrained networks magnify rounding from step to step: where dpa's loop is off by more than the
    limit, so must PyTorch's own be, by half of it at least. That is the plain policy in autocast.
    """
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("on a CPU networks in float16 are as those in bfloat16, which are tried")
    plain, method, observe, loops = case
    fast = dpa.accelerate(copy.deepcopy(plain), dtype=dtype, fallback=False, graphs=False)
    observations = [observe() for _ in range(4)]
    fresh = copy.deepcopy(plain)
    expected, got = (acts(policy, method, observations) for policy in (plain, fast))

    def errors(results):
        pairs = zip(map(first, results), map(first, expected), strict=True)
        return [relative_error(got.to(known.dtype), known) for got, known in pairs]

    most, found, theirs = LOOP_LIMITS[dtype], errors(got), None
    if device.type == "cuda" and max(found) >= most:
        with torch.autocast(device.type, dtype):
            theirs = errors(acts(fresh, method, observations))
        most = max(most, 2 * max(theirs))
    assert max(found) < most, (found, theirs)
    for name in loops:
        assert max(replaced(fast, name).shadow.errors.values()) < LOOP_LIMITS[dtype]


def test_checkpoints_load(case):
    plain, method, observe, _ = case
    fast, observations = dpa.accelerate(copy.deepcopy(plain)), [observe(), observe()]
    acts(fast, method, observations)
    trained = {name: 0.9 * value for name, value in plain.state_dict().items()}
    for policy in (plain, fast):
        assert not any(policy.load_state_dict(trained))
        start_over(policy)
    got = acts(fast, method, observations)
    torch.testing.assert_close(got, acts(plain, method, observations), rtol=1e-4, atol=1e-4)


def test_restored_it_is_as_it_was(case):
    plain, method, observe, _ = case
    fast, observations = copy.deepcopy(plain), [observe()]
    dpa.restore(dpa.accelerate(fast))
    assert type(fast) is type(plain) and vars(fast).keys() == vars(plain).keys()
    expected = acts(plain, method, observations)
    torch.testing.assert_close(acts(fast, method, observations), expected, rtol=0, atol=0)


def test_explain_changes_nothing(case):
    policy, _, _, loops = case
    before = dict(vars(policy))
    report = dpa.explain(policy)
    assert vars(policy) == before
    assert sum(f.part == "loop" and f.can and not f.active for f in report.findings) == len(loops)


def test_copies_and_pickles_run_their_own(case):
    plain, method, observe, loops = case
    if "flow" in type(plain).__name__.lower():
        pytest.skip("its normalizer gives out functions")
    fast, observed = dpa.accelerate(copy.deepcopy(plain)), [observe(), observe()]
    twins, expected = (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))), None
    for twin in twins:
        for parameter in twin.parameters():
            parameter.data.mul_(0.9)
        if expected is None:
            expected = acts(dpa.restore(copy.deepcopy(twin)), method, observed)
        torch.testing.assert_close(acts(twin, method, observed), expected, rtol=1e-4, atol=1e-4)
        assert all(replaced(twin, name).policy is twin for name in loops)


@torch.no_grad()
def test_changes_are_followed(case):
    plain, method, observe, _ = case
    fast, observed = dpa.accelerate(copy.deepcopy(plain)), [observe(), observe()]
    acts(fast, method, observed)

    def both(change):
        for policy in (plain, fast):
            start_over(policy)
            change(policy)
        expected = acts(plain, method, observed)
        for _ in range(2):
            start_over(fast)
            torch.testing.assert_close(acts(fast, method, observed), expected, rtol=1e-4, atol=1e-4)
        return expected[0]

    def fewer_steps(policy):
        if isinstance(policy, others.RtiPolicy):
            policy.steps = [1, 0]
            return
        for owner in (policy, getattr(policy, "objective", policy)):
            for name in ("num_inference_steps", "num_inference_step"):
                if hasattr(owner, name):
                    setattr(owner, name, 4)
        if hasattr(policy, "num_diffusion_iters"):
            policy.noise_scheduler.set_timesteps(4)
        if hasattr(policy, "config"):
            policy.config.num_integration_steps = 3

    def weights(policy):
        for parameter in policy.parameters():
            parameter.mul_(1.2)

    both(lambda policy: None)
    both(fewer_steps)
    both(weights)
    both(lambda policy: setattr(policy, "kwargs", {}))


def test_a_network_with_hooks_runs_its_own_loop(device):
    policy = dpa.accelerate(others.TransformerPolicy().to(device).eval())
    seen = []
    policy.model.head.register_forward_hook(lambda *_: seen.append(1))
    acts(policy, "predict_action", [{"obs": state(device)}])
    assert len(seen) == 6
    assert "hooks" in str(dpa.explain(policy))


def test_a_loop_by_another_name(device):
    """ManiSkill's evaluation calls ``get_eval_action``, which its agent sets to ``get_action``."""
    plain = others.ManiSkillAgent().to(device).eval()
    fast, observations = dpa.accelerate(copy.deepcopy(plain)), [state(device) for _ in range(3)]
    expected = acts(plain, "get_eval_action", observations)
    for policy in (fast, copy.deepcopy(fast), dpa.accelerate(fast)):
        got = acts(policy, "get_eval_action", observations)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert policy.get_eval_action is replaced(policy, "get_action")
        assert sum(finding.part == "loop" for finding in dpa.explain(policy).findings) == 1
    assert dpa.restore(fast).get_eval_action == fast.get_action
    assert vars(fast).keys() == vars(plain).keys()


@pytest.mark.parametrize("name", ["maniskill", "maniskill_images", "maniskill_depth"])
def test_a_loop_that_turns_gradients_off_itself(name, device):
    """ManiSkill's get_action does, and scripts call it with gradients enabled."""
    make, method, observe, _ = CASES[name]
    plain = make().to(device).eval()
    fast, seen = dpa.accelerate(copy.deepcopy(plain), fallback=False), observe(device)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = getattr(plain, method)(copy.copy(seen))
        torch.manual_seed(seed)
        got = getattr(fast, method)(copy.copy(seen))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert not got.requires_grad and not expected.requires_grad
    assert len(replaced(fast, method).shadow.errors) == 1


def test_explain_says_where_no_comparison_came_to_a_verdict(device):
    """A loop that takes more random numbers than its entry says."""

    class More(others.ManiSkillAgent):
        def get_action(self, obs_seq):
            torch.randn(3, device=obs_seq.device)
            return super().get_action(obs_seq)

    fast = dpa.accelerate(More().to(device).eval())
    acts(fast, "get_action", [state(device)])
    assert "as it is in 1 calls, whose random numbers moved" in str(dpa.explain(fast))


class Own(nn.Module):
    """A policy that nobody knows: names of its own, and steps between encoder and loop."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"denoiser": others.Transformer()})
        self.steps = others.diffusers.DDIMScheduler(20)
        self.count, self.calls = 6, 0

    def plan(self, seen, *, scale=1.0):
        self.calls += 1
        x = torch.randn(len(seen), 8, 2, device=seen.device)
        self.steps.set_timesteps(self.count)
        for t in self.steps.timesteps:
            out = self.parts["denoiser"](x, t, cond=seen * 2)
            x = self.steps.step(out, t, x).prev_sample
        return {"plan": x * scale, "calls": self.calls}


def begin(policy, seen, scale=1.0):
    if len(seen) > 3:
        raise ValueError("it plans for three at most")
    return dpa.LoopCall((len(seen), 8, 2), {"cond": seen * 2})


def end(policy, sample, seen, scale=1.0):
    return {"plan": sample * scale, "calls": policy.calls}


LOOP = dpa.Loop(
    "plan",
    lambda policy: policy.parts["denoiser"],
    begin,
    end,
    scheduler="steps",
    steps="count",
    changing=("calls",),
)


def test_a_loop_that_the_user_names(device):
    plain = Own().to(device).eval()
    assert "no denoising loop" in str(dpa.explain(plain))
    with pytest.raises(TypeError, match="no denoising loop was found"):
        dpa.accelerate(plain)
    fast = dpa.accelerate(copy.deepcopy(plain), loop=LOOP)
    seen = torch.randn(2, 2, 3, device=device)
    for call in range(4):
        torch.manual_seed(call)
        with torch.no_grad():
            expected = plain.plan(seen, scale=0.5)["plan"]
            torch.manual_seed(call)
            got = fast.plan(seen, scale=0.5)["plan"]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(replaced(fast, "plan")._routes) == 1
    assert "accelerated: the whole loop" in str(dpa.explain(fast))
    refused = "plan cannot be accelerated: it plans for three"
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=refused):
        assert fast.plan(seen.repeat(2, 1, 1))["plan"].shape == (4, 8, 2)
    dpa.restore(fast)
    assert "plan" not in vars(fast)


class Solved(Own):
    """The same with one of diffusers' solvers, as diffusers' pipelines run them."""

    def __init__(self, kind, **options):
        super().__init__()
        kind = getattr(others.diffusers, f"{kind}Scheduler")
        self.steps = kind(num_train_timesteps=20, **options)

    def plan(self, seen, *, scale=1.0):
        self.calls += 1
        self.steps.set_timesteps(self.count)
        x = torch.randn(len(seen), 8, 2, device=seen.device) * self.steps.init_noise_sigma
        for t in self.steps.timesteps:
            out = self.parts["denoiser"](self.steps.scale_model_input(x, t), t, cond=seen * 2)
            x = self.steps.step(out, t, x).prev_sample
        return {"plan": x * scale, "calls": self.calls}


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("UniPCMultistep", {"final_sigmas_type": "sigma_min"}),
        ("UniPCMultistep", {"prediction_type": "v_prediction"}),
        ("HeunDiscrete", {"prediction_type": "sample"}),
        ("EulerDiscrete", {"use_karras_sigmas": True}),
        ("EDMEuler", {"sigma_data": 1.0}),
        ("EDMDPMSolverMultistep", {"solver_type": "heun"}),
    ],
)
@torch.no_grad()
def test_a_loop_with_a_solver(kind, setting, device):
    plain = Solved(kind).to(device).eval()
    fast = copy.deepcopy(plain)
    dpa.accelerate(fast, loop=dpa.Loop(**{**vars(LOOP), "scaled": True}), fallback=False)
    seen, loop, results = torch.randn(2, 2, 3, device=device), replaced(fast, "plan"), []
    for change in ({}, setting):
        for policy in (plain, fast):
            policy.steps.register_to_config(**change)
        for _ in range(3):
            torch.manual_seed(1)
            expected = plain.plan(seen)["plan"]
            torch.manual_seed(1)
            torch.testing.assert_close(fast.plan(seen)["plan"], expected, rtol=1e-4, atol=1e-4)
        results.append(expected)
    assert not torch.allclose(*results)
    assert len(loop._routes) == 2 and max(loop.shadow.errors.values()) < 1e-4
    assert "accelerated: the whole loop" in str(dpa.explain(fast))


def test_a_loop_that_scales_and_does_not_say_so(device):
    plain, seen = Solved("EulerDiscrete").to(device).eval(), torch.randn(2, 2, 3, device=device)
    fast = dpa.accelerate(copy.deepcopy(plain), loop=LOOP)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="differs from the original"):
        fast.plan(seen)


def test_a_loop_of_a_part_of_the_model(device):
    whole = nn.ModuleDict({"policy": Own()}).to(device).eval()
    dpa.accelerate(whole, loop=LOOP)
    assert isinstance(replaced(whole["policy"], "plan"), FastLoop)


def test_an_adapter_that_does_something_else_is_found_out(device):
    wrong = dpa.Loop(
        "plan",
        lambda policy: policy.parts["denoiser"],
        lambda policy, seen, scale=1.0: dpa.LoopCall((len(seen), 8, 2), {"cond": seen * 3}),
        end,
        scheduler="steps",
        steps="count",
        changing=("calls",),
    )
    plain = Own().to(device).eval()
    fast = dpa.accelerate(copy.deepcopy(plain), loop=wrong)
    seen = torch.randn(2, 2, 3, device=device)
    for call in range(2):
        torch.manual_seed(2)
        with torch.no_grad():
            expected = plain.plan(seen)["plan"]
        torch.manual_seed(2)
        if call:
            got = fast.plan(seen)["plan"]
        else:
            with pytest.warns(RuntimeWarning, match="differs from the original"), torch.no_grad():
                got = fast.plan(seen)["plan"]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"method": "act"}, TypeError, "must have the loop act, but it has no method act"),
        ({"method": "a b"}, ValueError, "loop.method must name a method, got 'a b'"),
        ({"network": "unet"}, TypeError, "it has no network unet that is a module"),
        ({"network": "steps"}, TypeError, "it has no network steps that is a module"),
        ({"scheduler": "noise_scheduler"}, TypeError, "it has no noise_scheduler"),
        ({"steps": "num_inference_steps"}, TypeError, "it has no num_inference_steps"),
        ({"needs": frozenset({"obs"})}, TypeError, "its plan does not take obs"),
        ({"begin": None}, TypeError, "loop.begin must be a function, got NoneType"),
        ({"table": 3}, TypeError, "loop.table must be a function, got int"),
    ],
)
def test_adapters_that_are_refused(change, error, message):
    loop = dpa.Loop(**{**vars(LOOP), **change})
    policy = Own().eval()
    with pytest.raises(error, match=message):
        dpa.accelerate(policy, loop=loop)
    assert "plan" not in vars(policy)


def test_what_is_no_adapter():
    with pytest.raises(TypeError, match=r"loop must be a dpa.Loop, got str"):
        dpa.accelerate(Own(), loop="plan")


@pytest.mark.parametrize(
    ("result", "message"),
    [(3, "must return a dpa.LoopCall or None, got int"), ("missing", "has no attribute")],
)
def test_adapters_that_fail_in_a_call(result, message):
    def bad(policy, seen, scale=1.0):
        return policy.nothing if result == "missing" else result

    loop = dpa.Loop(**{**vars(LOOP), "begin": bad})
    fast = dpa.accelerate(Own().eval(), loop=loop)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=message):
        assert fast.plan(torch.randn(1, 2, 3))["plan"].shape == (1, 8, 2)


def test_every_known_loop_is_tried_here_or_beside():
    """A new entry needs a policy above; robomimic's is tried with its own classes."""
    methods = {name for *_, loops in CASES.values() for name in loops}
    assert {loop.method for loop in KNOWN} == methods | {"_get_action_trajectory"}


class NoisyCloud(others.CloudEncoder):
    """It keeps some points alone, others in each call."""

    def forward(self, frames):
        cloud = frames["point_cloud"]
        kept = torch.randperm(cloud.shape[1], device=cloud.device)[:3]
        return super().forward({**frames, "point_cloud": cloud[:, kept]})


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_an_encoder_that_takes_random_numbers_takes_those_of_the_original(device):
    torch.manual_seed(0)
    plain = others.FlowPolicy().to(device).eval()
    plain.obs_encoder = NoisyCloud().to(device)
    fast = dpa.accelerate(copy.deepcopy(plain))
    seen = {"point_cloud": torch.randn(2, 2, 5, 6), "agent_pos": torch.randn(2, 2, 2)}
    observations = [{name: x.to(device) for name, x in seen.items()}] * 4
    expected = acts(plain, "predict_action", observations)
    got = acts(fast, "predict_action", observations)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
