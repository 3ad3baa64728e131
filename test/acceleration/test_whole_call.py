"""Whole calls of a policy, from observations to actions, in one CUDA graph."""

import copy
import pickle
import threading

import pytest
import torch
from policies import OriginalPolicy, diffusers
from torch import nn

import dpa
from dpa.acceleration.whole_call import WholeCall

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Encoder(nn.Module):
    """Images (N, 3, H, W) to features (N, 8), with statistics that evaluation only reads."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2)
        self.norm = nn.BatchNorm2d(8)
        self.scale = 1.0

    def forward(self, images):
        return self.norm(self.conv(images)).relu().mean((2, 3)) * self.scale


class ImagePolicy(OriginalPolicy):
    """The original's loop behind an encoder, as its image policies have it."""

    def __init__(self, steps=5):
        scheduler = diffusers.DDPMScheduler(20, beta_schedule="squaredcos_cap_v2")
        unet = dpa.nn.ConditionalUnet1D(
            2, None, 2 * 11, diffusion_step_embed_dim=16, down_dims=(16, 32)
        )
        super().__init__(dpa.reference.plain(unet), scheduler, steps)
        self.obs_encoder = Encoder()
        self.n_action_steps = 4

    def predict_action(self, obs_dict):
        images, state = obs_dict["image"], obs_dict["state"]
        batch = len(state)
        features = self.obs_encoder(images.flatten(0, 1)).unflatten(0, (batch, 2))
        cond = torch.cat([features, state], -1).flatten(1)
        data = torch.zeros(batch, 8, 2, device=cond.device, dtype=cond.dtype)
        actions = self.conditional_sample(data, torch.zeros_like(data, dtype=bool), None, cond)
        return {"action": actions[:, 1 : 1 + self.n_action_steps], "action_pred": actions}


def observation(batch=1, device="cuda"):
    return {
        "image": torch.rand(batch, 2, 3, 24, 24, device=device),
        "state": torch.randn(batch, 2, 3, device=device),
    }


def policies(behind=None, **options):
    """A policy on the GPU, accelerated, and the same as it was; with a layer behind its encoder."""
    torch.manual_seed(0)
    plain = ImagePolicy().cuda().eval()
    with torch.no_grad():
        plain.obs_encoder.norm.running_var.uniform_(0.5, 2)
    if behind is not None:
        plain.obs_encoder.norm = nn.Sequential(plain.obs_encoder.norm, behind).eval()
    return dpa.accelerate(copy.deepcopy(plain), **options), plain


@torch.no_grad()
def assert_same(fast, plain, calls=4, **of):
    """Both act alike on new observations, and leave the generator in the same place."""
    for call in range(calls):
        observed = observation(**of)
        torch.manual_seed(call)
        expected = plain.predict_action(observed)
        behind = torch.randn(3, device="cuda")
        torch.manual_seed(call)
        got = fast.predict_action(observed)
        assert torch.equal(torch.randn(3, device="cuda"), behind)
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-3)


def captured(fast):
    return vars(fast)["predict_action"].captured


def test_on_the_cpu_calls_run_part_by_part():
    fast = dpa.accelerate(ImagePolicy().eval())
    assert isinstance(vars(fast)["predict_action"], WholeCall)
    with torch.no_grad():
        observed = observation(device="cpu")
        for _ in range(3):
            torch.manual_seed(1)
            got = fast.predict_action(observed)["action"]
    dpa.restore(fast)
    assert "predict_action" not in vars(fast)
    torch.manual_seed(1)
    with torch.no_grad():
        torch.testing.assert_close(got, fast.predict_action(observed)["action"])
    assert "predict_action" not in vars(dpa.accelerate(ImagePolicy().eval(), graphs=False))


@gpu
@pytest.mark.parametrize("inference", [False, True])
def test_from_the_third_call_on_a_graph_answers(inference):
    fast, plain = policies()
    with torch.inference_mode(inference):
        assert_same(fast, plain, 2)
        assert captured(fast)
        assert_same(fast, plain)
        assert_same(fast, plain, batch=3)
    [finding] = [f for f in dpa.explain(fast).findings if f.part == "call"]
    assert finding.active and max(finding.errors) < 1e-3


@gpu
def test_policies_on_two_devices_are_both_captured():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    fast, plain = policies()
    assert_same(fast, plain)
    for device in ("cuda:1", "cuda:0"):
        fast, plain = (dpa.restore(each).to(device) for each in (fast, plain))
        fast = dpa.accelerate(fast)
        assert_same(fast, plain, device=device)
        assert captured(fast)


class SpatialSoftmax(nn.Module):
    """Keeps what it has last returned, as robomimic's does."""

    def __init__(self):
        super().__init__()
        self.kps = None

    def forward(self, x):
        self.kps = x.detach()
        return x


class Counter(nn.Module):
    """Counts its calls, and depends on their number."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + 0 * self.calls


@gpu
def test_what_keypoints_keep_is_no_setting():
    fast, plain = policies(SpatialSoftmax())
    assert_same(fast, plain)
    assert captured(fast)


@gpu
def test_a_call_that_changes_its_own_modules_runs_part_by_part():
    fast, plain = policies(Counter())
    assert_same(fast, plain, 3)
    whole, counter = vars(fast)["predict_action"], fast.obs_encoder.norm[1]
    assert not whole.captured and "changes attributes of its own" in whole.refused
    before = counter.calls
    assert_same(fast, plain, 3)
    assert counter.calls == before + 3  # and nothing is captured again


@gpu
def test_results_are_not_written_over():
    fast, _ = policies()
    with torch.no_grad():
        results = [fast.predict_action(observation())["action"] for _ in range(5)]
        kept = [result.clone() for result in results]
        fast.predict_action(observation())
    assert all(map(torch.equal, results, kept))
    assert not torch.equal(results[3], results[4])


def _write_encoder(policy):
    policy.obs_encoder.conv.weight.data.mul_(1.5)


def _write_network(policy):
    policy.model.final_conv[1].weight.mul_(1.5)


def _write_data_of_network(policy):
    policy.model.final_conv[1].bias.data.add_(0.25)


def _write_statistics(policy):
    policy.obs_encoder.norm.running_mean.add_(0.5)


def _replace_parameter(policy):
    conv = policy.obs_encoder.conv
    conv.weight = nn.Parameter(conv.weight * 2)


def _load(policy):
    state = {name: x * 1.25 for name, x in policy.state_dict().items() if x.is_floating_point()}
    policy.load_state_dict(state, strict=False, assign=True)


def _replace_module(policy):
    torch.manual_seed(5)
    policy.obs_encoder = Encoder().cuda().eval()


def _set_attribute(policy):
    policy.obs_encoder.scale = 2.0


def _fewer_actions(policy):
    policy.n_action_steps = 2


def _more_steps(policy):
    policy.num_inference_steps = 7


def _hook(policy):
    policy.obs_encoder.register_forward_hook(lambda module, args, out: out * 2)


def _hook_inside(policy):
    policy.obs_encoder.conv.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def _train_norm(policy):
    policy.obs_encoder.norm.eval().momentum = 0.0
    policy.obs_encoder.norm.train()


CHANGES = [
    change
    for name, change in list(globals().items())
    if name.startswith("_") and callable(change) and getattr(change, "__module__", None) == __name__
]


@gpu
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changes_count_at_the_next_call(change):
    fast, plain = policies()
    assert_same(fast, plain, 3)
    assert captured(fast)
    with torch.no_grad():
        for policy in (fast, plain):
            change(policy)
    assert_same(fast, plain)


@gpu
def test_with_gradients_and_in_training_the_parts_run():
    fast, plain = policies()
    assert_same(fast, plain, 3)
    fast.predict_action(observation())["action"].sum().backward()
    assert fast.obs_encoder.conv.weight.grad is not None
    fast.train()
    with torch.no_grad():
        fast.predict_action(observation())
    assert not torch.equal(fast.obs_encoder.norm.running_mean, plain.obs_encoder.norm.running_mean)
    plain.obs_encoder.load_state_dict(fast.obs_encoder.state_dict())
    fast.eval()
    assert_same(fast, plain)


@gpu
def test_under_autocast_weights_are_cast_in_the_graph():
    fast, plain = policies()
    for scale in (1.0, 3.0):
        with torch.no_grad():
            for policy in (fast, plain):
                policy.obs_encoder.conv.weight.mul_(scale)
        for _ in range(3):  # casts that are cached end with each context
            observed = observation()
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                torch.manual_seed(0)
                got = fast.predict_action(observed)["action"].float()
                torch.manual_seed(0)
                expected = plain.predict_action(observed)["action"].float()
            assert (got - expected).norm() < 0.1 * expected.norm()
    assert captured(fast)


class Waiting(Encoder):
    """An encoder that reads a value, which no graph can hold."""

    def forward(self, images):
        return super().forward(images) * (2.0 if images.mean().item() > 0.5 else 1.0)


@gpu
def test_what_waits_for_the_device_runs_part_by_part():
    fast, plain = policies()
    for policy in (fast, plain):
        policy.obs_encoder.__class__ = Waiting
    assert_same(fast, plain, 5)
    assert not captured(fast)
    assert "cannot be captured" in str(dpa.explain(fast))
    for policy in (fast, plain):
        policy.obs_encoder.__class__ = Encoder
    assert_same(fast, plain)
    assert captured(fast)


@gpu
def test_copies_and_pickles_have_graphs_of_their_own():
    fast, plain = policies()
    assert_same(fast, plain, 3)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with torch.no_grad():
            other.obs_encoder.conv.weight.mul_(2)
        assert_same(fast, plain, 1)
        twin = copy.deepcopy(plain)
        twin.load_state_dict(other.state_dict())
        assert_same(other, twin)


@gpu
def test_streams_and_threads_wait_for_one_another():
    fast, plain = policies()
    assert_same(fast, plain, 3)
    observed = [observation() for _ in range(8)]
    errors = []

    def act(mine):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for o in mine * 5:
                result = fast.predict_action(o)["action"]
                torch.cuda.current_stream().synchronize()
                errors.append(not result.isfinite().all())

    torch.cuda.synchronize()
    threads = [threading.Thread(target=act, args=(observed[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 40 and not any(errors)
    assert_same(fast, plain)
