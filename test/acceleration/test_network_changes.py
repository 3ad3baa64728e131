"""What users do to an accelerated model afterwards, and what dpa.accelerate then says and does."""

import copy
import pickle
import types
import warnings
from collections import OrderedDict

import near_copies
import pytest
import torch
from diffusers import DDIMScheduler
from policies import (
    ONE_LEVEL,
    SMALL,
    assert_follows,
    call_of,
    diffusers,
    lerobot_unet,
    original_policy,
    sampled,
    unet_and_inputs,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import dpa
from dpa.training.graphed_calls import replaced_forward

# Nothing falls back here unless a test says so.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def running(device="cpu", **options):
    """An accelerated U-Net whose self-check is over, and its inputs."""
    unet, inputs = unet_and_inputs(device)
    dpa.accelerate(unet, **options)
    with torch.no_grad():
        unet(*inputs)
    return unet, inputs


class Adapter(nn.Module):
    """Wraps a layer, as LoRA does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def replace_layer(unet):
    unet.final_conv[1] = nn.Conv1d(16, 2, 1, device=next(unet.parameters()).device)


def wrap_layer(unet):
    unet.mid_modules[0].cond_encoder[1] = Adapter(unet.mid_modules[0].cond_encoder[1])


def parametrize_layer(unet):
    nn.utils.parametrizations.weight_norm(unet.final_conv[1])
    unet.final_conv[1].parametrizations.weight.original0.data.mul_(2)


def change_activation(unet):
    unet.mid_modules[0].blocks[0].block[2] = nn.SiLU()


def give_a_layer_its_own_forward(unet):
    """As those do that move layers to the GPU one by one, or quantize them."""
    layer = unet.mid_modules[0].cond_encoder[1]
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)


def give_a_block_its_own_forward(unet):
    block = unet.mid_modules[0]
    block.forward = lambda *args: 2 * type(block).forward(block, *args)


def give_a_sequence_its_own_forward(unet):
    sequence = unet.diffusion_step_encoder
    sequence.forward = lambda x: 2 * type(sequence).forward(sequence, x)


def append_a_layer(unet):
    unet.final_conv.append(nn.Hardtanh(-0.01, 0.01))


def change_eps(unet):
    unet.mid_modules[0].blocks[0].block[1].eps = 0.1


def change_padding(unet):
    unet.final_conv[0].block[0].padding_mode = "circular"


def change_dilation(unet):
    conv = unet.mid_modules[0].blocks[0].block[0]
    conv.dilation, conv.padding = (2,), (2 * conv.padding[0],)


def change_paddings(unet):
    for i, padding in enumerate((2, 0)):
        unet.mid_modules[0].blocks[i].block[0].padding = (padding,)


def change_groups_of_a_norm(unet):
    unet.mid_modules[0].blocks[0].block[1].num_groups = 2


def test_a_layer_replaced_by_its_like_runs(device):
    unet, inputs = running(device)
    replace_layer(unet)
    assert_follows(unet, inputs)
    assert replaced_forward(unet).shadow.errors and dpa.explain(unet).findings[0].active


@pytest.mark.parametrize(
    "alter",
    [
        wrap_layer,
        parametrize_layer,
        change_activation,
        give_a_layer_its_own_forward,
        give_a_block_its_own_forward,
        give_a_sequence_its_own_forward,
        append_a_layer,
        change_eps,
        change_padding,
        change_dilation,
        change_paddings,
        change_groups_of_a_norm,
    ],
)
def test_layers_that_become_others_stop_it(alter, device):
    unet, inputs = running(device)
    alter(unet)
    with pytest.warns(RuntimeWarning, match="ConditionalUnet1D has changed: .* the original runs"):
        unet(*inputs)
    assert_follows(unet, inputs)
    [finding] = dpa.explain(unet).findings
    assert not finding.active and finding.state == "unchanged" and "has changed" in finding.how


def test_a_layer_that_acts_later_is_no_part_of_the_family(device):
    """No comparison of a first call shows it."""
    unet, inputs = unet_and_inputs(device)
    unet.final_conv.append(nn.Hardtanh(-100, 100))
    with pytest.raises(TypeError, match="final_conv has a Hardtanh that the family's lacks"):
        dpa.accelerate(unet)
    sampler = dpa.DiffusionSampler(unet, DDIMScheduler(), 3)
    plain = dpa.DiffusionSampler(lambda *args, **kwargs: unet(*args, **kwargs), DDIMScheduler(), 3)
    noise = torch.randn(3, 8, 2, device=device)
    for _ in range(2):
        got = sampler(global_cond=inputs[-1], noise=noise)
        want = plain(global_cond=inputs[-1], noise=noise)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            unet.final_conv[1].bias += 300


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
def test_a_layer_that_begins_to_drop_values(kind, device):
    """As for estimates of what a policy does not know, in a policy that else evaluates."""
    policy = original_policy(device)
    policy.model.final_conv.append(kind(0.5))
    policy.eval()
    plain = copy.deepcopy(policy)
    dpa.accelerate(policy)
    call = call_of(device)
    samplers = [dpa.DiffusionSampler(one.model, DDIMScheduler(), 3) for one in (policy, plain)]
    noise = torch.randn(2, 8, 2, device=device)

    def sample(sampler):
        torch.manual_seed(7)
        return sampler(global_cond=call[-1], noise=noise)

    found = []
    for drops in (False, True, False):
        for one in (policy, plain):
            one.model.final_conv[-1].train(drops)
        for _ in range(2):
            want = sampled(plain, call)
            torch.testing.assert_close(sampled(policy, call), want, rtol=1e-4, atol=1e-4)
            want = sample(samplers[1])
            torch.testing.assert_close(sample(samplers[0]), want, rtol=1e-4, atol=1e-4)
        found.append(want)
    assert not torch.allclose(found[0], found[1], rtol=1e-2, atol=1e-2)  # both samplers drop values
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-4)
    policy.model.final_conv[-1].train()
    samplers[0].fused = True
    with pytest.raises(
        ValueError, match="fused must be left out for this network: it drops values"
    ):
        sample(samplers[0])


def test_conditions_that_are_no_floats_are_the_originals(device):
    policy = original_policy(device)
    plain = copy.deepcopy(policy)
    dpa.accelerate(policy)
    call = (*call_of(device)[:-1], torch.randint(3, (2, 4), device=device))
    with pytest.warns(RuntimeWarning, match=r"global_cond is torch\.int64, the network"):
        got = sampled(policy, call)
    torch.testing.assert_close(got, sampled(plain, call), rtol=1e-5, atol=1e-5)


def test_what_changed_for_a_while_is_found_again_when_asked(device):
    unet, inputs = running(device)
    nn.utils.parametrizations.weight_norm(unet.final_conv[1])
    with pytest.warns(RuntimeWarning, match="has changed"):
        unet(*inputs)
    nn.utils.parametrize.remove_parametrizations(unet.final_conv[1], "weight")
    dpa.repack(unet)
    assert_follows(unet, inputs)
    assert dpa.explain(unet).findings[0].active


def assign_weights(unet):
    weights = {name: 1.3 * value for name, value in unet.state_dict().items()}
    unet.load_state_dict(weights, assign=True)


def hook_layer(unet):
    unet.final_conv[1].register_forward_hook(lambda module, inputs, out: 3 * out)


@pytest.mark.parametrize("before", [True, False], ids=["compiled-before", "compiled-after"])
@pytest.mark.parametrize(
    "alter",
    [
        assign_weights,
        replace_layer,
        wrap_layer,
        parametrize_layer,
        give_a_layer_its_own_forward,
        change_eps,
        change_padding,
        hook_layer,
    ],
)
@torch.no_grad()
def test_compiled_calls_follow(alter, before):
    if before and alter is hook_layer:
        pytest.skip("torch.compile checks for hooks once only")
    unet, inputs = unet_and_inputs(**ONE_LEVEL)
    dpa.accelerate(unet)
    compiled = torch.compile(unet, backend="eager", fullgraph=True)
    if before:
        compiled(*inputs)
    alter(unet)
    want = type(unet).forward(unet, *inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says of most that they have changed
        torch.testing.assert_close(compiled(*inputs), want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_compiled_calls_stay_compiled_when_weights_are_packed_again():
    unet, inputs = unet_and_inputs(**ONE_LEVEL)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(dpa.accelerate(unet), backend=counter, fullgraph=True)
    for _ in range(4):
        unet.final_conv[1].weight.data.mul_(1.1)
        dpa.repack(unet)
        want = type(unet).forward(unet, *inputs)
        torch.testing.assert_close(compiled(*inputs), want, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@torch.no_grad()
def test_compiled_functional_calls_take_the_weights_given():
    unet, inputs = unet_and_inputs(**ONE_LEVEL)
    weights = {name: 1.3 * value for name, value in unet.named_parameters()}
    want = torch.func.functional_call(unet, weights, inputs)
    dpa.accelerate(unet)
    compiled = torch.compile(lambda w: torch.func.functional_call(unet, w, inputs), backend="eager")
    torch.testing.assert_close(compiled(weights), want, rtol=1e-5, atol=1e-5)


def test_a_parameter_that_goes_stops_it(device):
    unet, inputs = running(device)
    with torch.no_grad():
        unet(*inputs)
    unet.final_conv[1].bias = None
    with pytest.warns(RuntimeWarning, match="has changed: .*missing: final_conv.1.bias"):
        unet(*inputs)
    assert_follows(unet, inputs)


@torch.no_grad()
def test_loops_notice_replaced_layers(device):
    fast = dpa.accelerate(policy := original_policy(device))
    call = call_of(device)
    sampled(fast, call), sampled(fast, call)
    replace_layer(fast.model)
    plain = dpa.restore(copy.deepcopy(policy))
    for _ in range(2):
        torch.testing.assert_close(sampled(fast, call), sampled(plain, call), rtol=1e-4, atol=1e-4)
    wrap_layer(fast.model)
    wrap_layer(plain.model)
    with pytest.warns(RuntimeWarning, match="has changed"):
        sampled(fast, call)
    torch.testing.assert_close(sampled(fast, call), sampled(plain, call), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_fused_sampler_notices_replaced_layers(device):
    unet, _ = unet_and_inputs(device)
    sampler = dpa.DiffusionSampler(unet, diffusers.DDIMScheduler(20), 4, fused=True, horizon=8)
    noise, cond = torch.randn(2, 8, 2, device=device), torch.randn(2, 4, device=device)
    sampler(cond, noise=noise), sampler(cond, noise=noise)
    replace_layer(unet)
    plain = dpa.DiffusionSampler(unet, diffusers.DDIMScheduler(20), 4, horizon=8, fused=False)
    for _ in range(2):
        torch.testing.assert_close(
            sampler(cond, noise=noise), plain(cond, noise=noise), rtol=1e-4, atol=1e-4
        )
    change_activation(unet)
    with pytest.raises(ValueError, match=r"must be Mish\(\), got SiLU"):
        sampler(cond, noise=noise)


@torch.no_grad()
def test_copies_of_a_fused_sampler_follow_their_own_weights(device):
    unet, _ = unet_and_inputs(device)
    sampler = dpa.DiffusionSampler(unet, diffusers.DDIMScheduler(20), 4, fused=True, horizon=8)
    noise, cond = torch.randn(2, 8, 2, device=device), torch.randn(2, 4, device=device)
    want = sampler(cond, noise=noise)
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        torch.testing.assert_close(other(cond, noise=noise), want)
        for parameter in other.unet.parameters():
            parameter.data.mul_(1.1)
        plain = dpa.DiffusionSampler(
            other.unet, diffusers.DDIMScheduler(20), 4, horizon=8, fused=False
        )
        for _ in range(2):
            got, expected = other(cond, noise=noise), plain(cond, noise=noise)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sampler(cond, noise=noise), want)


def test_what_looks_inside_runs_the_original():
    """torch.func, the meta device and fake tensors see the network's own layers."""
    unet, inputs = running()
    plain = dpa.restore(copy.deepcopy(unet))
    weights = dict(unet.named_parameters())
    gradients = [
        torch.func.grad(lambda w, u=u: torch.func.functional_call(u, w, inputs).square().sum())(
            weights
        )
        for u in (unet, plain)
    ]
    for name, want in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], want)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [x if x is None else mode.from_tensor(x) for x in inputs]
        assert unet(*fakes).shape == (3, 8, 2)
    unet.to("meta")
    assert unet(*[x if x is None else x.to("meta") for x in inputs]).is_meta
    assert "it is on meta" in str(dpa.explain(unet))


@torch.no_grad()
def test_wrong_inputs_raise_as_before(device):
    """After the self-check too: nothing is dropped or converted that the original would refuse."""
    unet, (sample, timestep, _, cond) = running(device)
    unet(sample, timestep, None, cond)
    local = torch.randn(3, 8, 2, device=device)
    for wrong in (
        (sample[:, :7], timestep, None, cond),
        (sample[..., :1], timestep, None, cond),
        (sample, timestep, None, None),
        (sample, timestep, None, cond[:, :3]),
        (sample, timestep, None, cond[:2]),
        (sample, timestep[:2], None, cond),
        (sample.long(), timestep, None, cond),
        (sample.double(), timestep, None, cond),
        (sample, timestep, local, cond),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            unet(*wrong)
    fast, (data, mask, _, cond) = dpa.accelerate(original_policy(device)), call_of(device)
    for _ in range(2):
        fast.conditional_sample(data, mask, None, cond)
    calls = (data[:, :7], mask[:, :7], None, cond), (data, mask), (data, mask, None, cond[:1])
    for wrong in (*calls, (data, mask, data, cond)):
        with pytest.raises((RuntimeError, ValueError)):
            fast.conditional_sample(*wrong)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["LeRobot", "CleanDiffuser"])
def test_timesteps_raise_as_before(kind, device):
    """These networks take a timestep for each sample; no layer takes wider numbers than it has."""
    sample, cond = torch.randn(3, 8, 2, device=device), torch.randn(3, 4, device=device)
    timestep = torch.arange(3, device=device)
    if kind == "LeRobot":
        unet = lerobot_unet({"input_dim": 2, "global_cond_dim": 4, **SMALL})
    else:
        unet = near_copies.ChiUnet(2, 2, 2)
    unet = dpa.accelerate(unet.to(device).eval())
    for _ in range(2):
        unet(sample, timestep, cond)
    for wrong in (3, timestep[1], timestep[1:2], timestep.double(), timestep + 0j):
        with pytest.raises((AttributeError, IndexError, RuntimeError, TypeError)):
            unet(sample, wrong, cond)


@torch.no_grad()
def test_conditions_of_other_dtypes_are_joined_as_before(device):
    _, (sample, timestep, _, cond) = unet_and_inputs(device)
    unet = dpa.accelerate(near_copies.DP3(2, 4).to(device).eval(), fallback=False)
    unet(sample, timestep, None, cond)
    for other in (cond.half(), (4 * cond).long(), (4 * cond).int(), cond > 0):
        assert_follows(unet, (sample, timestep, None, other))
    with pytest.raises(RuntimeError, match="same dtype"):
        unet(sample, timestep, None, cond.double())


@pytest.mark.parametrize("first", [7, 8])
@torch.no_grad()
def test_a_horizon_that_the_levels_do_not_halve(first, device):
    """The original gives a longer result of it, and says of no other horizon's calls anything."""
    _, (sample, timestep, _, cond) = unet_and_inputs(device)
    unet = near_copies.DP3(2, 4).to(device).eval()
    plain = copy.deepcopy(unet)
    dpa.accelerate(unet, fallback=False)
    for horizon in (first, 7, 8, 8, 7):
        call = sample[:, :horizon], timestep, None, cond
        got, want = unet(*call), plain(*call)
        assert want.shape == (3, 8, 2)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert replaced_forward(unet).shadow.agreed


@pytest.mark.parametrize("whose", ["all", "one"])
@pytest.mark.parametrize("kind", ["forward", "full_backward"])
def test_whoever_watches_the_layers_sees_them(whose, kind):
    unet, inputs = running()
    seen = []
    every = torch.nn.modules.module
    register = (
        getattr(every, f"register_module_{kind}_hook")
        if whose == "all"
        else getattr(unet.mid_modules[0].cond_encoder[1], f"register_{kind}_hook")
    )
    handle = register(lambda module, *_: seen.append(module))
    try:
        for _ in range(2):
            unet(*inputs).sum().backward()
    finally:
        handle.remove()
    assert sum(module is unet.mid_modules[0].cond_encoder[1] for module in seen) == 2


def test_inference_mode_and_no_grad_mix(device):
    policy = original_policy(device)
    fast, call = dpa.accelerate(copy.deepcopy(policy)), call_of(device)
    want = sampled(policy, call)
    for context in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with context():
                got = sampled(fast, call)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for current in (policy, fast):
            for parameter in current.model.parameters():
                parameter.mul_(1.1)
    want = sampled(policy, call)
    with torch.inference_mode():
        torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)


def test_a_default_device_is_not_taken(device):
    """torch.set_default_device moves nothing that is measured, packed or drawn."""
    policy = original_policy(device)
    fast, call = copy.deepcopy(policy), call_of(device)
    want = sampled(policy, call)
    with torch.device("meta"):
        dpa.accelerate(fast, fallback=False)
        for _ in range(2):
            torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)


def test_explain_says_why_the_original_runs():
    unet, _ = running()
    assert dpa.explain(unet).findings[0].active
    assert "in training mode" in str(dpa.explain(unet.train()))
    unet.config = types.SimpleNamespace(gradient_checkpointing=True)  # LeRobot's
    assert "unchanged: it recomputes activations" in str(dpa.explain(unet))
    unet.eval().mid_modules[0].register_forward_hook(lambda *_: None)
    assert "unchanged: its layers have hooks" in str(dpa.explain(unet))


def test_gradient_checkpointing_is_the_networks_own(device, monkeypatch):
    """LeRobot's network recomputes its blocks in training: dpa leaves it alone there, not later."""
    unet, inputs = running(device)
    plain, calls = dpa.restore(copy.deepcopy(unet)), []
    kind = type(replaced_forward(unet))
    own = kind.original
    monkeypatch.setattr(kind, "original", lambda *a, **k: calls.append(1) or own(*a, **k))
    unet.config = types.SimpleNamespace(gradient_checkpointing=True)
    for current in (unet, plain):
        for _ in range(5):  # a call of a kind is captured after the first ones, if at all
            current.train().zero_grad()
            current(*inputs).square().sum().backward()
    assert len(calls) == 5
    pairs = zip(unet.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    unet.eval()
    with torch.no_grad():
        unet(*inputs)
    before = len(calls)
    assert_follows(unet, inputs)
    assert len(calls) == before


def test_without_fallback_everything_is_fused_or_raises():
    def unknown():
        policy = original_policy("cpu")
        policy.noise_scheduler = diffusers.EulerAncestralDiscreteScheduler(20)
        return policy

    before = list(vars(policy := unknown()))
    with pytest.raises(TypeError, match=r"fallback=False all must be fused, got: .*EulerAncestral"):
        dpa.accelerate(policy, fallback=False)
    assert list(vars(policy)) == before and "forward" not in vars(policy.model)
    with pytest.warns(RuntimeWarning, match=r"dpa.accelerate: .* unchanged: .*EulerAncestral"):
        dpa.accelerate(policy)
    fast, call = dpa.accelerate(original_policy("cpu"), fallback=False), call_of()
    sampled(fast, call), sampled(fast, call)
    fast.noise_scheduler = diffusers.DDIMScheduler(20, thresholding=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot be accelerated: .*thresholding"):
            sampled(fast, call)
    fast = dpa.accelerate(original_policy("cpu"), fallback=False, tolerance=1e-12)
    for _ in range(4):  # the loop's comparison, then the network's
        with pytest.raises(
            RuntimeError, match=r"differs .* more than 1e-12, and fallback is False"
        ):
            sampled(fast, call)
    fast = dpa.accelerate(original_policy("cpu"), fallback=False)
    sampled(fast, call)
    fast.model.mid_modules[0].blocks[0].block[2] = nn.SiLU()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"has changed: .* and fallback is False"):
            sampled(fast, call)


def test_hooks_in_dictionaries_that_were_replaced():
    """Who removes all hooks of a network puts an empty dictionary in the place of each."""
    unet, inputs = unet_and_inputs()
    dpa.accelerate(unet)
    with torch.no_grad():
        for _ in range(2):
            before = unet(*inputs)
        for module in unet.modules():
            module._forward_hooks = OrderedDict()
        unet.final_conv[1].register_forward_hook(lambda module, given, result: 2 * result)
        torch.testing.assert_close(unet(*inputs), 2 * before, rtol=1e-4, atol=1e-4)


def test_a_parameter_of_another_shape_is_not_packed_as_zeros():
    unet, inputs = unet_and_inputs()
    dpa.accelerate(unet)
    plain = dpa.restore(copy.deepcopy(unet))
    with torch.no_grad():
        for _ in range(2):
            unet(*inputs)
        for each in (unet, plain):
            each.mid_modules[0].cond_encoder[1].bias = nn.Parameter(torch.ones(1))
        with pytest.warns(RuntimeWarning, match="has changed: .*cond_encoder.1.bias"):
            torch.testing.assert_close(unet(*inputs), plain(*inputs), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_results_lie_in_memory_as_the_originals_do(device):
    """Numbers that are drawn like a result are drawn in its order."""
    plain, inputs = unet_and_inputs(device)
    fast = dpa.accelerate(copy.deepcopy(plain))
    for _ in range(3):
        want, got = plain(*inputs), fast(*inputs)
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
