"""dpa.accelerate on the published near-copies of the original network (support/near_copies.py)."""

import copy

import diffusers
import near_copies
import pytest
import torch
from policies import OriginalPolicy, assert_follows
from torch import nn

import dpa
from dpa.acceleration.policy_loop import FastLoop
from dpa.packed.agreement import LOOP_LIMITS, relative_error
from dpa.training.graphed_calls import replaced_forward

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
BATCH, HORIZON = 3, 8
TIMES = torch.tensor([1, 7, 30])


def state(*shape):
    return {"state": torch.randn(*shape)}


# name: (network, its arguments after the sample, by the names of its own forward)
ROWS = {
    "Simple DP3": (
        lambda: near_copies.DP3(2, 4, per_level=1),
        lambda: {"timestep": TIMES, "global_cond": torch.randn(BATCH, 4)},
    ),
    "DP3's mlp_film": (
        lambda: near_copies.DP3(2, 4, film="mlp_film"),
        lambda: {"timestep": 5, "global_cond": torch.randn(BATCH, 4)},
    ),
    "DP3's add": (
        lambda: near_copies.DP3(2, 4, film="add"),
        lambda: {"timestep": TIMES, "global_cond": torch.randn(BATCH, 4)},
    ),
    "DP3, local conditions": (
        lambda: near_copies.DP3(2, 4, local_cond_dim=3),
        lambda: {
            "timestep": TIMES,
            "local_cond": torch.randn(BATCH, HORIZON, 3),
            "global_cond": torch.randn(BATCH, 4),
        },
    ),
    "FlowPolicy": (
        lambda: near_copies.DP3(2, 4, var_est=True),
        lambda: {"timestep": 0.33 * TIMES, "global_cond": torch.randn(BATCH, 4)},
    ),
    "ManiSkill": (
        lambda: near_copies.ManiSkill(2, 4),
        lambda: {"timestep": TIMES, "global_cond": torch.randn(BATCH, 4)},
    ),
    "Consistency Policy": (
        lambda: near_copies.ConsistencyPolicy(2, 4, drop=0.5),
        lambda: {
            "timestep": 250 * torch.rand(BATCH),
            "stoptime": torch.rand(BATCH),
            "global_cond": torch.randn(BATCH, 4),
        },
    ),
    "Streaming Diffusion Policy": (
        lambda: near_copies.StreamingPolicy(2, 4),
        lambda: {
            "timestep": torch.randint(0, 50, (BATCH, HORIZON)),
            "global_cond": torch.randn(BATCH, 4),
        },
    ),
    "DPPO": (
        lambda: near_copies.DPPO(2, 6),
        lambda: {"time": TIMES, "cond": state(BATCH, 2, 3)},
    ),
    "DPPO, an MLP of conditions": (
        lambda: near_copies.DPPO(2, 6, film="film", eps=1e-4, cond_mlp_dims=[24, 12]),
        lambda: {"time": TIMES, "cond": state(BATCH, 2, 3)},
    ),
    "DPPO with ReLU": (
        lambda: near_copies.DPPO(2, 6, film="film", eps=1e-4, act=nn.ReLU),
        lambda: {"time": TIMES, "cond": state(BATCH, 2, 3)},
    ),
    "CleanDiffuser": (
        lambda: near_copies.ChiUnet(2, 3, 2),
        lambda: {"noise": 1.0 * TIMES, "condition": torch.randn(BATCH, 2, 3)},
    ),
    "Diffuser": (
        lambda: near_copies.TemporalUnet(2),
        lambda: {"cond": None, "time": TIMES},
    ),
    "Diffuser, attention": (
        lambda: near_copies.TemporalUnet(2, attention=True),
        lambda: {"cond": None, "time": TIMES},
    ),
}


def moved(value, device):
    if isinstance(value, dict):
        return {name: moved(inner, device) for name, inner in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def network_and_call(name, device):
    """A network with random weights everywhere, and what it is called with."""
    torch.manual_seed(0)
    make, further = ROWS[name]
    unet = make()
    for parameter in unet.parameters():
        nn.init.normal_(parameter, parameter.mean().item(), 0.15)
    call = moved(further(), device)
    return unet.to(device).eval(), torch.randn(BATCH, HORIZON, 2, device=device), call


def gradients(unet, sample, call):
    sample = sample.clone().requires_grad_()
    loss = unet(sample, **call).square().sum()
    inputs = [sample, *unet.parameters()]
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", ROWS)
def test_a_near_copy(name, device):
    unet, sample, call = network_and_call(name, device)
    plain, before = copy.deepcopy(unet), dict(vars(unet))
    assert dpa.accelerate(unet, fallback=False) is unet
    for _ in range(2):
        for weight in unet.parameters():  # as an optimizer does
            weight.data.mul_(1.01)
        plain.load_state_dict(unet.state_dict())
        with torch.no_grad():
            for _ in range(2):
                want = plain(sample, **call)
                torch.testing.assert_close(unet(sample, **call), want, rtol=1e-4, atol=1e-5)
        for _ in range(2):
            got, want = (gradients(network, sample, call) for network in (unet, plain))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    [finding] = dpa.explain(unet).findings
    assert finding.active and finding.errors and max(finding.errors) < 1e-4
    dpa.restore(unet)
    assert vars(unet).keys() == before.keys() and type(unet) is type(plain)
    with torch.no_grad():
        assert torch.equal(unet(sample, **call), plain(sample, **call))


APART = ["DP3's mlp_film", "Streaming Diffusion Policy", "DPPO", "DPPO with ReLU", "CleanDiffuser"]


@torch.no_grad()
@pytest.mark.parametrize("name", [*APART, "Simple DP3", "ManiSkill", "DP3, local conditions"])
def test_single_passes_replay(name, cuda):
    """A loop that dpa does not know calls the network alone; nothing of it is missed."""
    plain, sample, call = network_and_call(name, cuda)
    fast = dpa.accelerate(copy.deepcopy(plain), fallback=False)

    def assert_same(sample, call, times=4):
        for _ in range(times):
            sample = sample + 0.1
            got, want = (network(sample, **call) for network in (fast, plain))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    assert_same(sample, call)
    kept = replaced_forward(fast)._forwards._graphs
    assert len(kept) == 1 and not kept.refused
    for write in (
        lambda weight: weight.mul_(1.1),
        lambda weight: weight.data.mul_(1.1),
        lambda weight: setattr(weight, "data", 1.1 * weight.data),
    ):
        for network in (fast, plain):
            for weight in network.parameters():
                write(weight)
        assert_same(sample, call)
    further = moved(ROWS[name][1](), cuda)  # other conditions and timesteps
    assert_same(sample, further)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same(sample, call)
    torch.cuda.synchronize()
    for network in (fast, plain):
        network.final_conv[-1].bias = nn.Parameter(torch.ones(2, device=cuda))
    assert_same(sample, further)


def sampled_alike(plain, policy, seed, data, mask, cond):
    """Assert that both sample the same from a seed; return what the plain one does."""
    results = []
    for each in (plain, policy):
        torch.manual_seed(seed)
        results.append(each.conditional_sample(data, mask, None, cond))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    return results[0]


LOOPS = [(1, "film"), (1, "add"), (1, "mlp_film"), (2, "mlp_film")]


@pytest.mark.parametrize(("per_level", "film"), LOOPS)
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_a_loop_of_dp3s(batch, per_level, film, device):
    scheduler = diffusers.DDIMScheduler(20, prediction_type="sample")
    unet = near_copies.DP3(2, 4, film=film, per_level=per_level)
    policy = OriginalPolicy(unet, scheduler, 5).to(device).eval()
    plain = copy.deepcopy(policy)
    dpa.accelerate(policy, fallback=False)
    assert isinstance(vars(policy)["conditional_sample"], FastLoop)
    data = torch.randn(batch, 8, 2, device=device)
    mask = torch.zeros_like(data, dtype=torch.bool)
    mask[:, 0] = True
    for seed in range(3):
        cond = torch.randn(batch, 4, device=device)
        sampled_alike(plain, policy, seed, data, mask, cond)
    loop = next(f for f in dpa.explain(policy).findings if f.part == "loop")
    assert loop.active and max(loop.errors) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("per_level", "film"), LOOPS)
@torch.no_grad()
def test_a_loop_of_dp3s_in_sixteen_bits(per_level, film, dtype, device):
    """On packed weights. What the network predicts is the sample, so rounding grows little."""
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("on a CPU networks in float16 are as those in bfloat16, which are tried")
    torch.manual_seed(0)
    scheduler = diffusers.DDIMScheduler(20, prediction_type="sample")
    unet = near_copies.DP3(2, 4, film=film, per_level=per_level)
    plain = OriginalPolicy(unet, scheduler, 5).to(device).eval()
    policy = copy.deepcopy(plain)
    dpa.accelerate(policy, dtype=dtype, fallback=False)
    data = torch.zeros(2, 8, 2, device=device)
    mask, cond = torch.zeros_like(data, dtype=torch.bool), torch.randn(2, 4, device=device)

    def sampled(one, seed):
        torch.manual_seed(seed)
        return one.conditional_sample(data, mask, None, cond)

    found = []
    for seed in range(4):
        expected, got = sampled(plain, seed), sampled(policy, seed)
        found.append(relative_error(got, expected))
    assert found[0] < 1e-3 and min(found[1:]) > 0  # the first call is the original's
    assert max(found) < LOOP_LIMITS[dtype], found
    loop = vars(policy)["conditional_sample"]
    assert 0 < max(loop.shadow.errors.values()) < LOOP_LIMITS[dtype]
    [route] = loop._routes
    apart = film == "mlp_film" and device.type == "cpu"  # layer by layer, in the policy's dtype
    assert route.sampler.dtype == (None if apart else dtype)


@pytest.mark.parametrize("film", ["cross_attention_film", "cross_attention_add"])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_a_loop_of_dp3s_whose_actions_ask_the_observations(batch, film, device):
    """The network, of another kind, takes a vector for each frame; the loop is fused around it."""
    scheduler = diffusers.DDIMScheduler(20, prediction_type="sample")
    unet = near_copies.DP3(2, 4, film=film)
    plain = OriginalPolicy(unet, scheduler, 5).to(device).eval()
    policy, data = copy.deepcopy(plain), torch.randn(batch, 8, 2, device=device)
    with pytest.warns(RuntimeWarning, match=r"unchanged: .*cond_encoder"):
        dpa.accelerate(policy)
    mask = torch.zeros_like(data, dtype=torch.bool)
    mask[:, 0] = True
    for seed in range(4):
        cond = torch.randn(batch, 2 + seed // 2, 4, device=device)
        if seed == 3:
            for each in (plain, policy):  # as an optimizer does
                each.model.mid_modules[0].cond_encoder.key_proj.weight.mul_(1.3)
        expected = sampled_alike(plain, policy, seed, data, mask, cond)
    loop = next(f for f in dpa.explain(policy).findings if f.part == "loop")
    assert loop.active and loop.errors and max(loop.errors) < 1e-4
    dpa.restore(policy)
    torch.manual_seed(seed)
    assert torch.equal(policy.conditional_sample(data, mask, None, cond), expected)


@torch.no_grad()
def test_what_the_original_says_of_wrong_arguments(device):
    unet, sample, call = network_and_call("DPPO", device)
    dpa.accelerate(unet)(sample, **call)
    with pytest.raises(KeyError, match="state"):
        unet(sample, call["time"], {})
    with pytest.raises((RuntimeError, ValueError), match=r"global_cond|shape"):
        unet(sample, call["time"], {"state": torch.randn(BATCH, 5, device=device)})
    with pytest.raises(TypeError, match="cond"):
        unet(sample, call["time"])


@torch.no_grad()
def test_a_layer_that_changes_stops_it(device):
    unet, sample, call = network_and_call("Simple DP3", device)
    dpa.accelerate(unet)(sample, **call)
    unet.mid_modules[0].blocks[0].block[2] = nn.SiLU()
    with pytest.warns(RuntimeWarning, match="DP3 has changed: .*must be Mish.*, got SiLU"):
        unet(sample, **call)
    [finding] = dpa.explain(unet).findings
    assert not finding.active and "has changed" in finding.how


@torch.no_grad()
def test_layers_that_pytorch_runs_may_change(device):
    """They run as they are: another activation there is no other network."""
    unet, sample, call = network_and_call("DPPO", device)
    dpa.accelerate(unet, fallback=False)(sample, **call)
    encoder = unet.mid_modules[0].cond_encoder
    encoder[1] = nn.ReLU()
    encoder[4] = nn.Linear(64, 64, device=device)
    assert_follows_call(unet, sample, call)
    assert dpa.explain(unet).findings[0].active


def assert_follows_call(unet, sample, call):
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.unet = unet

        def forward(self, x):
            return self.unet(x, **call)

    assert_follows(Called(), (sample,))


@torch.no_grad()
def test_dropout_in_training_is_the_originals(device):
    unet, sample, call = network_and_call("Consistency Policy", device)
    dpa.accelerate(unet.train())
    plain = dpa.restore(copy.deepcopy(unet))
    results = []
    for network in (unet, plain):
        torch.manual_seed(3)
        results.append(network(sample, **call))
    assert torch.equal(*results)
    assert "drops values" in dpa.explain(unet).findings[0].how
    assert replaced_forward(unet.eval()).fallback_reason() is None


@torch.no_grad()
def test_a_sampler_refuses_what_takes_no_global_cond():
    unet, *_ = network_and_call("DPPO, an MLP of conditions", "cpu")
    scheduler = diffusers.DDIMScheduler(20)
    sampler = dpa.DiffusionSampler(unet, scheduler, 4, fused=True, horizon=8)
    with pytest.raises(ValueError, match=r"unet must take global_cond .* got DPPO"):
        sampler(torch.randn(1, 12))


class Planner(nn.Module):
    """A loop of its own around a network that takes its conditions under another name."""

    def __init__(self, unet):
        super().__init__()
        self.unet, self.noise_scheduler = unet, diffusers.DDIMScheduler(20)
        self.num_inference_steps = 4

    def plan(self, seen):
        x = torch.randn(len(seen), HORIZON, 2, device=seen.device)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            times = t.to(x.device).expand(len(x))
            x = self.noise_scheduler.step(self.unet(x, times, condition=seen), t, x).prev_sample
        return x


@torch.no_grad()
def test_a_loop_that_is_named_around_a_near_copy(device):
    unet, _, call = network_and_call("CleanDiffuser", device)
    policy = Planner(unet).eval()
    plain = copy.deepcopy(policy)
    loop = dpa.Loop(
        "plan",
        "unet",
        lambda policy, seen: dpa.LoopCall((len(seen), HORIZON, 2), {"condition": seen}),
    )
    dpa.accelerate(policy, loop=loop, fallback=False)
    for step in range(3):
        for each in (policy, plain):  # as an optimizer does, at every place
            each.unet.mids[0].conv1[0].weight.mul_(1.1)
        results = []
        for each in (plain, policy):
            torch.manual_seed(step)
            results.append(each.plan(call["condition"]))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert all(finding.active for finding in dpa.explain(policy).findings)


@torch.no_grad()
def test_horizons_that_the_network_refuses(device):
    """CleanDiffuser's raises for those that are no powers of two, also where others have run."""
    unet = near_copies.ChiUnet(2, 3, 2).to(device).eval()
    fast = dpa.accelerate(copy.deepcopy(unet))
    condition = torch.randn(2, 2, 3, device=device)
    for horizon in (8, 8, 16):
        sample = torch.randn(2, horizon, 2, device=device)
        torch.testing.assert_close(
            fast(sample, TIMES[:2].to(device), condition),
            unet(sample, TIMES[:2].to(device), condition),
            rtol=1e-3,
            atol=1e-3,
        )
    with pytest.raises(AssertionError, match="powers of two"):
        fast(torch.randn(2, 12, 2, device=device), TIMES[:2].to(device), condition)
