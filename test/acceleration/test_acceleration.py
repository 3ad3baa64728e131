"""dpa.accelerate on unmodified policies: the same actions, and nothing else changes."""

import copy
import inspect
import operator
import pickle
import warnings

import pytest
import torch
from policies import (
    call_of,
    diffusers,
    lerobot_policy,
    observations,
    original_policy,
    sampled,
    unet_and_inputs,
)
from tolerances import tolerance
from torch import nn

import dpa
from dpa.acceleration import survey, unet_forward
from dpa.acceleration.policy_loop import FastLoop
from dpa.acceleration.unet_forward import FastForward
from dpa.nn import family
from dpa.nn.family import recognise
from dpa.packed import config, unet
from dpa.packed.agreement import relative_error
from dpa.training.graphed_calls import replaced_forward


def attributes(model):
    return [
        (name, list(vars(m)), [id(v) for v in vars(m).values()])
        for name, m in model.named_modules()
    ]


def test_replaced_methods_have_the_originals_signatures():
    """Whoever passes only what a method takes asks it: diffusers' pipelines, torch.export."""
    policy = lerobot_policy("cpu", noise_scheduler_type="DDIM")
    places = ("diffusion.conditional_sample", "diffusion.unet.forward")
    found = [inspect.signature(operator.attrgetter(place)(policy)) for place in places]
    dpa.accelerate(policy)
    unet = policy.diffusion.unet
    assert replaced_forward(unet) is not None
    assert [inspect.signature(operator.attrgetter(place)(policy)) for place in places] == found
    horizon, conditions = 8, unet.diffusion_step_encoder[3].out_features
    wide = unet.down_modules[0][0].cond_encoder[1].in_features - conditions
    inputs = (torch.randn(2, horizon, 2), torch.arange(2), torch.randn(2, wide))
    batch = torch.export.Dim("batch", min=2, max=16)
    sizes = {name: {0: batch} for name in found[1].parameters}
    exported = torch.export.export(unet, inputs, dynamic_shapes=sizes).module()
    more = [torch.cat([x, x, x]) for x in inputs]
    with torch.no_grad():
        torch.testing.assert_close(exported(*more), unet(*more), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_lerobot_over_episodes_with_reset(kind, device):
    plain = lerobot_policy(device, noise_scheduler_type=kind, num_inference_steps=10)
    fast = dpa.accelerate(copy.deepcopy(plain))
    results = []
    for policy in (plain, fast):
        torch.manual_seed(1)
        actions = []
        for _ in range(2):
            policy.reset()
            actions += [policy.select_action(o) for o in observations(11, device)]
        results.append(torch.stack([*actions, torch.randn(1, 2, device=device)]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    loop = vars(fast.diffusion)["conditional_sample"]
    assert isinstance(loop, FastLoop) and max(loop.shadow.errors.values()) < 1e-4
    assert torch.equal(
        fast.diffusion.noise_scheduler.timesteps, plain.diffusion.noise_scheduler.timesteps
    )


def test_restore_leaves_every_attribute_as_it_was():
    policy = lerobot_policy()
    before, state = attributes(policy), {k: v.clone() for k, v in policy.state_dict().items()}
    assert "can be accelerated" in str(dpa.explain(policy))
    assert attributes(policy) == before
    dpa.accelerate(policy)
    assert policy.state_dict().keys() == state.keys()
    assert len(list(policy.modules())) == len(before)
    policy.select_action(next(observations(1, "cpu")))
    assert [f.active for f in dpa.explain(policy).findings] == [True, True]
    policy.reset()
    dpa.restore(policy)
    queues = next(i for i, (name, *_) in enumerate(before) if name == "")
    after = attributes(policy)
    assert [a for i, a in enumerate(after) if i != queues] == [
        b for i, b in enumerate(before) if i != queues
    ]
    assert after[queues][1] == before[queues][1]


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
@pytest.mark.parametrize("inpainting", [False, True])
def test_original_policy(kind, inpainting, device):
    policy = original_policy(device, kind, global_cond_dim=None if inpainting else 4)
    fast = dpa.accelerate(copy.deepcopy(policy))
    data = torch.randn(3, 8, 2, device=device)
    mask = torch.zeros_like(data, dtype=torch.bool)
    mask[:, :2, 1] = inpainting
    cond = None if inpainting else torch.randn(3, 4, device=device)
    options = {"eta": 0.5} if kind == "DDIM" else {}
    for steps in (5, 5, 7):
        results = []
        for current in (policy, fast):
            current.num_inference_steps = steps
            generator = torch.Generator(device).manual_seed(steps)
            with torch.no_grad():
                x = current.conditional_sample(
                    data, mask, global_cond=cond, generator=generator, **options
                )
            results.append((x, torch.randn(2, generator=generator, device=device)))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert len(vars(fast)["conditional_sample"].shadow.errors) == 2


def test_local_conditioning(device):
    policy = original_policy(device, local_cond_dim=3)
    fast = dpa.accelerate(copy.deepcopy(policy))
    data = torch.zeros(2, 8, 2, device=device)
    mask = torch.zeros_like(data, dtype=torch.bool)
    call = {
        "local_cond": torch.randn(2, 8, 3, device=device),
        "global_cond": torch.randn(2, 4, device=device),
    }
    for _ in range(2):
        results = []
        for current in (policy, fast):
            torch.manual_seed(2)
            with torch.no_grad():
                results.append(current.conditional_sample(data, mask, **call))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_wrong_local_conditions_are_the_networks_to_refuse(device):
    unet = dpa.nn.ConditionalUnet1D(2, 3, 4, 16, (16, 32))
    plain = dpa.reference.plain(unet).to(device).eval()
    fast = dpa.accelerate(copy.deepcopy(plain))
    new = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    sample, cond, local = new(2, 8, 2), new(2, 4), new(2, 8, 3)
    for _ in range(4):
        want = plain(sample, 1, local_cond=local, global_cond=cond)
        got = fast(sample, 1, local_cond=local, global_cond=cond)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    for wrong in (local.half(), local.long(), local > 0, local[:1], local[..., :2], local[0]):
        messages = []
        for network in (plain, fast):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                network(sample, 1, local_cond=wrong, global_cond=cond)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


class _Thrice(dpa.nn.ConditionalUnet1D):
    def forward(self, sample, timestep, local_cond=None, global_cond=None):
        local_cond = None if local_cond is None else 3 * local_cond
        return super().forward(sample, timestep, local_cond, global_cond)


@torch.no_grad()
def test_calls_without_local_conditions_say_nothing_of_those_with(device):
    torch.manual_seed(0)
    plain = _Thrice(2, 3, 4, 16, (16, 32)).to(device).eval()
    fast = dpa.accelerate(copy.deepcopy(plain))
    new = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    sample, cond, local = new(2, 8, 2), new(2, 4), new(2, 8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in (None, None, local, local, None, local):
            want = plain(sample, 1, given, cond)
            torch.testing.assert_close(fast(sample, 1, given, cond), want, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_changed_weights_are_noticed(device):
    unet, inputs = unet_and_inputs(device)
    plain = copy.deepcopy(unet)
    dpa.accelerate(unet)
    for change in range(4):
        for current in (unet, plain):
            parameters = list(current.parameters())
            if change == 1:
                for parameter in parameters:
                    parameter.mul_(1.1)
            elif change == 2:
                current.load_state_dict({k: v * 0.9 for k, v in current.state_dict().items()})
            elif change == 3:
                vector = nn.utils.parameters_to_vector(parameters) * 1.2
                nn.utils.vector_to_parameters(vector, parameters)
        for _ in range(2):
            torch.testing.assert_close(unet(*inputs), plain(*inputs), **tolerance(torch.float32))


@torch.no_grad()
def test_copies_pickles_and_moves_go_on(device):
    unet, inputs = unet_and_inputs("cpu")
    expected = unet(*inputs)
    dpa.accelerate(unet)
    unet(*inputs)
    for other in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        forward = replaced_forward(other)
        assert isinstance(forward, FastForward) and forward.unet is other
        for _ in range(2):
            torch.testing.assert_close(other(*inputs), expected, **tolerance(torch.float32))
    unet.to(device)
    moved = [x if x is None else x.to(device) for x in inputs]
    for _ in range(2):
        torch.testing.assert_close(unet(*moved).cpu(), expected, rtol=1e-4, atol=1e-4)
    unet.double()
    wide = [x if x is None or not x.is_floating_point() else x.double() for x in moved]
    for _ in range(2):
        assert unet(*wide).dtype == torch.float64
    assert max(replaced_forward(unet).shadow.errors.values()) < 1e-4


@pytest.mark.parametrize("called", [False, True], ids=["fresh", "called"])
@pytest.mark.parametrize("by", ["dill", "cloudpickle", "pickle"])
@torch.no_grad()
def test_snapshots_of_whole_objects(by, called):
    """As diffusion_policy's workspace saves itself: by dill, which pickles classes its own way."""
    module = pytest.importorskip(by)
    policy = original_policy("cpu")
    fast, call = dpa.accelerate(copy.deepcopy(policy)), call_of()
    expected = sampled(policy, call)
    if called:
        sampled(fast, call)
    loaded = module.loads(module.dumps({"policy": fast, "scheduler": fast.noise_scheduler}))
    other = loaded["policy"]
    assert isinstance(other, type(policy)) and other.noise_scheduler is loaded["scheduler"]
    assert isinstance(vars(other)["conditional_sample"], FastLoop)
    for _ in range(2):
        torch.testing.assert_close(sampled(other, call), expected, **tolerance(torch.float32))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(fast.noise_scheduler, protocol))
        assert isinstance(again, type(policy.noise_scheduler))
        assert again.config == policy.noise_scheduler.config


@torch.no_grad()
def test_weights_written_through_data_are_noticed(device):
    """As diffusers' EMAModel.copy_to writes them: no version counter moves."""
    policy = original_policy(device)
    fast = dpa.accelerate(copy.deepcopy(policy))
    averages = diffusers.training_utils.EMAModel(fast.parameters())
    for shadow in averages.shadow_params:
        shadow.mul_(1.2)
    data = torch.zeros(1, 8, 2, device=device)
    call = (data, data.bool(), None, torch.randn(1, 4, device=device))
    step = (torch.randn(1, 8, 2, device=device), torch.tensor([3], device=device), None, call[3])
    for current in (fast, fast, policy):
        current.conditional_sample(*call)
        current.model(*step)
    averages.copy_to(fast.parameters())
    policy.load_state_dict(fast.state_dict())
    results = []
    for current in (policy, fast):
        torch.manual_seed(4)
        results.append((current.model(*step), current.conditional_sample(*call)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


SIXTEEN_BITS = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_sixteen_bit_policies(kind, dtype, device):
    """LeRobot's own stops in 16 bits without autocast; the accelerated one runs as under it."""
    plain = lerobot_policy(device, noise_scheduler_type=kind, num_inference_steps=10)
    cond = torch.randn(4, 14, device=device)
    low = copy.deepcopy(plain).to(dtype)
    with pytest.raises(RuntimeError, match="same dtype"):
        low.diffusion.conditional_sample(4, cond.to(dtype))
    fast = dpa.accelerate(copy.deepcopy(low))
    results = []
    with torch.no_grad():
        for policy, autocast in ((low, True), (fast, False), (fast, False)):
            torch.manual_seed(5)
            with torch.autocast(device.type, dtype, enabled=autocast):
                sample = policy.diffusion.conditional_sample(4, cond.to(dtype))
            results.append((sample, torch.randn(2, device=device)))
    loop = vars(fast.diffusion)["conditional_sample"]
    assert len(loop.shadow.errors) == 1
    for sample, behind in results[1:]:
        assert sample.dtype == dtype and torch.equal(behind, results[0][1])
        error = (sample.float() - results[0][0].float()).norm() / results[0][0].float().norm()
        assert error < (5e-2 if dtype == torch.float16 else 1e-1)
    assert torch.equal(results[1][0], results[0][0])  # the first is the original's
    assert not torch.equal(results[2][0], results[0][0])
    actions = [fast.select_action({k: v.to(dtype) for k, v in o.items()})
               for o in observations(6, device)]  # fmt: skip
    assert all(a.dtype == dtype and torch.isfinite(a).all() for a in actions)


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_under_autocast(kind, dtype, device):
    """There DDPM's noise is of 16 bits, and the policy's parameters stay float32."""
    policy = lerobot_policy(device, noise_scheduler_type=kind, num_inference_steps=10)
    fast = dpa.accelerate(copy.deepcopy(policy))
    cond, results = torch.randn(4, 14, device=device), []
    with torch.no_grad(), torch.autocast(device.type, dtype):
        for current in (policy, fast, fast):
            torch.manual_seed(6)
            results.append(current.diffusion.conditional_sample(4, cond))
            results.append(torch.randn(2, device=device))
    assert max(vars(fast.diffusion)["conditional_sample"].shadow.errors.values()) < 0.1
    assert torch.equal(results[5], results[1]) and results[4].dtype == torch.float32
    assert (results[4] - results[0]).norm() < 0.1 * results[0].norm()


class Float32Output(nn.Module):
    """A network whose prediction leaves autocast in float32, and so does a step's noise."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(17, 64), nn.Mish(), nn.Linear(64, 16))

    def forward(self, sample, timestep, local_cond=None, global_cond=None):
        step = torch.as_tensor(timestep).reshape(-1, 1).to(sample).expand(len(sample), 1) / 20
        return self.layers(torch.cat([sample.flatten(1), step], 1)).view_as(sample).float()


def test_noise_like_an_output_that_is_cast_under_autocast(device):
    plain = original_policy(device, "DDPM")
    torch.manual_seed(0)
    plain.model = Float32Output().to(device)
    fast = dpa.accelerate(copy.deepcopy(plain), fallback=False)
    data, call = torch.zeros(2, 8, 2, device=device), torch.zeros(2, 4, device=device)

    @torch.no_grad()
    def act(policy, dtype=torch.bfloat16):
        torch.manual_seed(7)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return policy.conditional_sample(data, data.bool(), None, call)

    wanted = act(plain, torch.float32)
    near = relative_error(act(plain), wanted)
    for _ in range(3):
        assert relative_error(act(fast), wanted) < 2 * near + 1e-3


def test_policies_are_copied_pickled_and_saved(tmp_path):
    policy = lerobot_policy(num_inference_steps=5)
    expected = [policy.select_action(o) for o in observations(9, "cpu")]
    dpa.accelerate(policy)
    policy.save_pretrained(tmp_path)
    read = dpa.accelerate(type(policy).from_pretrained(tmp_path))
    for other in (policy, copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), read):
        assert vars(other.diffusion)["conditional_sample"].policy is other.diffusion
        for _ in range(2):
            other.reset()
            torch.manual_seed(0)
            found = [other.select_action(o) for o in observations(9, "cpu")]
        assert len(found) == len(expected) and found[0].shape == expected[0].shape
    torch.manual_seed(0)
    dpa.restore(policy).reset()
    plain = [policy.select_action(o) for o in observations(9, "cpu")]
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_training_mode_and_gradients(device):
    unet, inputs = unet_and_inputs(device)
    plain = copy.deepcopy(unet)
    dpa.accelerate(unet)
    optimizers = [torch.optim.SGD(current.parameters(), lr=1e-6) for current in (unet, plain)]
    for mode in (True, True, False, True):
        for current, optimizer in zip((unet, plain), optimizers, strict=True):
            optimizer.step()
            current.train(mode).zero_grad()
            current(*inputs).square().sum().backward()
        replaced_forward(unet).original = None  # the first call compared; no later one needs it
        for got, expected in zip(unet.parameters(), plain.parameters(), strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(got.grad, expected.grad, rtol=1e-3, atol=1e-4)


def test_a_network_is_recognised_once(device, monkeypatch):
    recognised, policy = [], original_policy(device)
    for module in (survey, unet_forward, config, unet, family):
        monkeypatch.setattr(module, "recognise", lambda m: recognised.append(m) or recognise(m))
    dpa.accelerate(policy)
    sampled(policy, call_of(device))
    assert recognised == [policy.model]


def test_a_network_of_another_kind_is_not_recognised_at_all(monkeypatch):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(2, 2)

        def forward(self, sample, timestep, local_cond=None, global_cond=None):
            return self.mix(sample)

    def recognised(module):
        raise AssertionError(f"{type(module).__name__} was recognised")

    policy = original_policy("cpu")
    policy.model = Mixing().eval()
    for module in (survey, unet_forward, config, unet, family):
        monkeypatch.setattr(module, "recognise", recognised)
    dpa.accelerate(policy)
    sampled(policy, call_of("cpu"))
    assert "around Mixing as it is" in str(dpa.explain(policy))


def doubled_and_inputs(device="cpu", **options):
    """A network whose layers are the family's, and whose forward is not."""
    unet, inputs = unet_and_inputs(device, **options)

    class Doubled(type(unet)):
        def forward(self, sample, timestep, local_cond=None, global_cond=None):
            return 2 * super().forward(sample, timestep, local_cond, global_cond)

    unet.__class__ = Doubled
    return unet, inputs


@pytest.mark.parametrize("first", ["empty", "zero", "nan"])
@torch.no_grad()
def test_a_first_call_that_shows_nothing_is_no_check(first):
    for make, fits in ((doubled_and_inputs, False), (unet_and_inputs, True)):
        unet, inputs = make()
        state, want = copy.deepcopy(unet.state_dict()), unet(*inputs)
        dpa.accelerate(unet)
        if first == "empty":
            unet(*[x if x is None else x[:0] for x in inputs])
        elif first == "nan":
            assert unet(inputs[0] * float("nan"), *inputs[1:]).isnan().all()
        else:
            for parameter in unet.final_conv[1].parameters():
                parameter.zero_()
            unet(*inputs)
            unet.load_state_dict(state)
        forward = replaced_forward(unet)
        assert not forward.shadow.errors and forward.shadow.failed is None
        if fits:
            assert torch.equal(unet(*inputs), want)
        else:
            with pytest.warns(RuntimeWarning, match="differs"):
                assert torch.equal(unet(*inputs), want)
        assert (forward.shadow.failed is None) == fits and len(forward.shadow.errors) == 1


def test_bfloat16_on_the_real_input():
    if not torch.cuda.is_available():
        pytest.skip("packed bfloat16 weights need a CUDA device here")
    policy = lerobot_policy("cuda", noise_scheduler_type="DDIM", num_inference_steps=10)
    fast = dpa.accelerate(copy.deepcopy(policy), dtype=torch.bfloat16)
    noise = torch.randn(1, 8, 2, device="cuda")
    cond = torch.randn(1, 14, device="cuda")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            got = fast.diffusion.conditional_sample(1, cond, noise=noise)
        want = policy.diffusion.conditional_sample(1, cond, noise=noise)
    assert (got - want).norm() < 0.1 * want.norm()
