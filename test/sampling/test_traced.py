"""Networks of any kind, traced for a loop: what is computed in front of it, and in its steps."""

import functools

import other_policies as others
import pytest
import torch
from torch import nn
from torch.nn import functional

from dpa.library.capture import MaskAnswers
from dpa.nn import blocks1d
from dpa.sampling import traced
from dpa.sampling.traced import TracedNetwork

STEPS = [9, 5, 2]


class InPlace(nn.Module):
    """Writes to its own values, and to parts of them."""

    def __init__(self):
        super().__init__()
        self.embed, self.time, self.head = nn.Linear(2, 16), nn.Embedding(20, 16), nn.Linear(16, 2)

    def forward(self, sample, timestep, cond=None):
        hidden = self.embed(sample)
        hidden += self.time(timestep)[:, None]
        hidden[:, 0].mul_(2)
        return self.head(functional.relu_(hidden))


class Encoder(nn.Module):
    """PyTorch's encoder, over the sample with tokens of timestep and condition in front of it."""

    def __init__(self, norm_first):
        super().__init__()
        self.embed, self.time, self.head = nn.Linear(2, 16), nn.Embedding(20, 16), nn.Linear(16, 2)
        self.cond = nn.Linear(3, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, sample, timestep, cond):
        tokens = [self.time(timestep)[:, None], self.cond(cond), self.embed(sample)]
        return self.head(self.encoder(torch.cat(tokens, 1))[:, -sample.shape[1] :])


class Convolutions(nn.Module):
    """Convolutions that keep, halve and double the length, as PyTorch's layers or as dpa's."""

    def __init__(self, ours):
        super().__init__()
        self.time = nn.Embedding(20, 16)
        if ours:
            self.first = blocks1d.ConditionalResidualBlock1D(2, 16, 16, 5, n_groups=4)
            self.middle = nn.Sequential(blocks1d.Downsample1d(16), blocks1d.Upsample1d(16))
        else:
            self.first = nn.Conv1d(2, 16, 5, padding=2)
            halving = nn.Conv1d(16, 16, 3, stride=2, padding=1)
            self.middle = nn.Sequential(halving, nn.ConvTranspose1d(16, 16, 4, stride=2, padding=1))
        self.last, self.ours = nn.Conv1d(16, 2, 1), ours

    def forward(self, sample, timestep, cond=None):
        x, time = sample.transpose(1, 2), self.time(timestep)
        x = self.first(x, time) if self.ours else self.first(x) + time[:, :, None]
        return self.last(self.middle(x) + x).transpose(1, 2)


NETWORKS = {
    "convolutions": functools.partial(Convolutions, False),
    "dpa's blocks": functools.partial(Convolutions, True),
    "rotary": functools.partial(others.DiT, vector=6),
    "decoder": functools.partial(others.Transformer, horizon=8),
    "encoder": functools.partial(Encoder, False),
    "encoder, norms first": functools.partial(Encoder, True),
    "in place": InPlace,
}


@pytest.fixture(params=NETWORKS)
def network(request, device):
    torch.manual_seed(0)
    return others.awake(NETWORKS[request.param]()).to(device).eval()


def inputs_of(network, batch, device):
    cond = torch.randn(batch, 6) if isinstance(network, others.DiT) else torch.randn(batch, 2, 3)
    name = "conditioning_vec" if isinstance(network, others.DiT) else "cond"
    return torch.randn(batch, 8, 2).to(device), {name: cond.to(device)}


def traced_of(network, sample, conditions, dtype=torch.float32):
    """What a loop does: ``predict(sample, step)`` of the trace."""
    timesteps = torch.tensor(STEPS, device=sample.device)[:, None].expand(-1, len(sample))
    called = lambda x, t, given: network(x, t, **given)  # noqa: E731
    with MaskAnswers().used():
        trace = TracedNetwork(called, sample, timesteps, conditions, dtype)
    return trace, lambda: trace.ahead(timesteps, conditions)


def errors(network, predict, conditions, like):
    """The relative error of every step, each on another sample."""
    found = []
    for step, timestep in enumerate(STEPS):
        sample = torch.randn_like(like)
        timesteps = torch.full((len(like),), timestep, device=like.device)
        expected = network(sample, timesteps, **conditions)
        got = predict(sample, step)
        assert got.dtype == expected.dtype and got.shape == expected.shape
        found.append(float((got - expected).norm() / expected.norm()))
    return found


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_steps_are_the_networks(network, batch, device):
    sample, conditions = inputs_of(network, batch, device)
    _, ahead = traced_of(network, sample, conditions)
    assert max(errors(network, ahead(), conditions, sample)) < 2e-6
    conditions = {name: torch.randn_like(value) for name, value in conditions.items()}
    _, ahead = traced_of(network, sample, conditions)
    assert max(errors(network, ahead(), conditions, sample)) < 2e-6


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_in_float64(network, batch, device):
    if isinstance(network, others.DiT):
        pytest.skip("its embedding is float32 whatever its weights are")
    network.double()
    sample, conditions = inputs_of(network, batch, device)
    sample, conditions = sample.double(), {n: x.double() for n, x in conditions.items()}
    _, ahead = traced_of(network, sample, conditions, torch.float64)
    assert max(errors(network, ahead(), conditions, sample)) < 1e-12


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
@torch.no_grad()
def test_steps_in_sixteen_bits(network, dtype, most, device):
    sample, conditions = inputs_of(network, 2, device)
    _, ahead = traced_of(network, sample, conditions, dtype)
    found = errors(network, ahead(), conditions, sample)
    assert 1e-6 < max(found) < most, found


@torch.no_grad()
def test_weights_that_are_written_count_in_the_next_loop(network, device):
    sample, conditions = inputs_of(network, 2, device)
    _, ahead = traced_of(network, sample, conditions, torch.float32)
    before = ahead()(sample, 0)
    for parameter in network.parameters():
        parameter.mul_(1.1)
    assert not torch.allclose(ahead()(sample, 0), before)
    assert max(errors(network, ahead(), conditions, sample)) < 2e-6


def ops(part):
    return [str(node.target) for node in part.graph.nodes if node.op == "call_function"]


@torch.no_grad()
def test_what_no_sample_reaches_is_computed_in_front(device):
    network = others.awake(others.DiT(vector=6, layers=2)).to(device).eval()
    sample, conditions = inputs_of(network, 1, device)
    trace, _ = traced_of(network, sample, conditions)
    step = ops(trace._step)
    gemms = [op for op in step if "addmm" in op]
    assert len(gemms) == 2 * 4 + 2  # none for the timestep's embedding and the modulation
    assert sum("native_layer_norm" in op for op in step) == 4
    # One sample's modulation is the weights of LayerNorm; gates and rotations take one kernel.
    assert sum("addcmul" in op for op in step) == 2 * (2 + 1)
    assert not [op for op in step if "neg" in op or "sin" in op or "aten.add." in op]
    assert any("sin" in op for op in ops(trace._each))
    assert not ops(trace._each)[0].startswith("aten.t.")  # weights serve all steps


class ChannelNorm(nn.Module):
    """A norm over channels written out, as Diffuser's is; or something near to one."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(2, 8)
        self.g, self.b = (nn.Parameter(torch.randn(1, 8, 1)) for _ in range(2))

    def forward(self, sample, timestep, cond=None):
        x, dim = self.layer(sample).transpose(1, 2), 2 if self.kind == "of times" else 1
        if self.kind == "together":
            var, mean = torch.var_mean(x, dim=1, unbiased=False, keepdim=True)
        else:
            var = torch.var(x, dim=dim, unbiased=self.kind == "unbiased", keepdim=True)
            mean = torch.mean(x + 1 if self.kind == "of another" else x, dim=dim, keepdim=True)
        root = (
            (var + 1e-3).sqrt() if self.kind != "scaled" else torch.add(var, 1e-3, alpha=2).sqrt()
        )
        return ((x - mean) / root * self.g + self.b).transpose(1, 2)[..., :2]


@pytest.mark.parametrize(
    "kind", ["together", "apart", "unbiased", "of times", "of another", "scaled"]
)
@torch.no_grad()
def test_norms_over_channels_are_layer_norms(kind, device):
    network = ChannelNorm(kind).to(device).eval()
    sample, conditions = inputs_of(network, 2, device)
    trace, ahead = traced_of(network, sample, conditions)
    found = sum("native_layer_norm" in op for op in ops(trace._step))
    assert found == (kind in ("together", "apart"))
    assert max(errors(network, ahead(), conditions, sample)) < 2e-6


@torch.no_grad()
def test_several_samples_are_modulated_each(device):
    network = others.awake(others.DiT(vector=6, layers=1)).to(device).eval()
    sample, conditions = inputs_of(network, 3, device)
    trace, ahead = traced_of(network, sample, conditions)
    assert sum("addcmul" in op for op in ops(trace._step)) == 2 + 2 + 1
    assert max(errors(network, ahead(), conditions, sample)) < 2e-6


@torch.no_grad()
def test_pytorchs_layers_of_one_sample_copy_nothing(device):
    network = others.awake(others.Transformer(horizon=8)).to(device).eval()
    for batch, copies in ((1, False), (3, True)):
        sample, conditions = inputs_of(network, batch, device)
        trace, ahead = traced_of(network, sample, conditions)
        assert any("clone" in op for op in ops(trace._step)) == copies
        assert not any("aten.mm" in op for op in ops(trace._step))
        assert max(errors(network, ahead(), conditions, sample)) < 2e-6


@torch.no_grad()
def test_what_is_too_much_for_all_steps_is_computed_in_each(network, device, monkeypatch):
    monkeypatch.setattr(traced, "_AHEAD", 0)
    sample, conditions = inputs_of(network, 2, device)
    trace, ahead = traced_of(network, sample, conditions)
    assert len(trace._of_steps) == len(ops(trace._each)) + 1 == 1  # the timestep alone
    assert max(errors(network, ahead(), conditions, sample)) < 2e-6


class Noisy(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.head, self.kind = nn.Linear(2, 2), kind
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, sample, timestep):
        if self.kind == "noise":
            return self.head(sample + torch.randn_like(sample))
        if self.kind == "dropout":
            return functional.dropout(self.head(sample), 0.5, training=True)
        if self.kind == "value":
            return self.head(sample) * (2.0 if float(sample.sum()) > 0 else 1.0)
        self.seen.add_(sample.mean((0, 1)))
        return self.head(sample) + self.seen


@pytest.mark.parametrize("kind", ["noise", "dropout", "value", "buffer"])
@torch.no_grad()
def test_what_no_trace_stands_for(kind, device):
    network = Noisy(kind).to(device).eval()
    with pytest.raises(RuntimeError, match=r"its network (runs|cannot be traced)"):
        traced_of(network, torch.randn(2, 8, 2, device=device), {})


@torch.no_grad()
def test_a_condition_that_the_network_ignores(device):
    network = InPlace().to(device).eval()
    sample = torch.randn(2, 8, 2, device=device)
    _, ahead = traced_of(network, sample, {"cond": torch.randn(2, 4, device=device)})
    assert max(errors(network, ahead(), {}, sample)) < 2e-6
