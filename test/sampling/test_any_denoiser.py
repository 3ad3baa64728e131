"""DiffusionSampler around networks of any kind: its loop, and the graph of it."""

import copy
import functools

import near_policies
import other_policies
import pytest
import torch
from proofs import Calls
from samplers import diffusers
from torch import nn

import dpa
from dpa.library import capture
from dpa.sampling import fused_loop, module_loops, stepwise_loop
from dpa.sampling import sampler as sampler_module
from dpa.sampling.traced import TracedNetwork

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Denoiser(nn.Module):
    """Neither a U-Net nor called as one: its condition is a sequence of another length."""

    def __init__(self, width=16):
        super().__init__()
        self.embed, self.head = nn.Linear(2, width), nn.Linear(width, 2)
        self.time, self.cond = nn.Embedding(20, width), nn.Linear(3, width)
        self.scale = 1.0

    def forward(self, sample, timestep, memory=None):
        place = timestep.abs().round().long()  # of EDM they are logarithms
        hidden = self.embed(sample) + self.time(place)[:, None]
        if memory is not None:
            hidden = hidden + self.cond(memory).mean(1, keepdim=True)
        return self.head(hidden.tanh()) * self.scale


def scheduler(kind="DDPM", **options):
    return getattr(diffusers, f"{kind}Scheduler")(num_train_timesteps=20, **options)


def sampler_of(denoiser, kind="DDPM", steps=6, **options):
    return dpa.DiffusionSampler(
        denoiser, scheduler(kind), steps, horizon=8, action_dim=2, **options
    )


def plain_loop(denoiser, kind, steps, memory, generator):
    live = scheduler(kind)
    live.set_timesteps(steps)
    x = torch.randn(len(memory), 8, 2, generator=generator, device=memory.device)
    x = x * float(live.init_noise_sigma)
    options = {"generator": generator} if kind in ("DDPM", "DDIM") else {}
    for t in live.timesteps:
        out = denoiser(live.scale_model_input(x, t), t.to(x.device).expand(len(x)), memory)
        x = live.step(out, t, x, **options).prev_sample
    return x


SOLVERS = ["DPMSolverMultistep", "UniPCMultistep", "HeunDiscrete", "EulerDiscrete"]
SOLVERS += ["EDMEuler", "EDMDPMSolverMultistep"]


@pytest.mark.parametrize("kind", ["DDPM", "DDIM", *SOLVERS])
@torch.no_grad()
def test_it_follows_the_plain_loop(kind, device):
    denoiser = Denoiser().to(device).eval()
    sampler = sampler_of(denoiser, kind)
    for call in range(4):
        memory = torch.randn(2, 5, 3, device=device)
        ours, theirs = (torch.Generator(device).manual_seed(call) for _ in range(2))
        expected = plain_loop(denoiser, kind, 6, memory, theirs)
        got = sampler(conditions={"memory": memory}, generator=ours)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(
            torch.randn(3, generator=ours, device=device),
            torch.randn(3, generator=theirs, device=device),
        )
    assert len(sampler._loops) == (device.type == "cuda")


def test_without_conditions(device):
    sampler = sampler_of(Denoiser().to(device).eval())
    assert sampler(batch_size=3).shape == (3, 8, 2)


def test_parallel_sweeps_take_conditions(device):
    denoiser = Denoiser().to(device).eval()
    options = {"conditions": {"memory": torch.randn(2, 5, 3, device=device)}}
    options["noise"] = torch.randn(2, 8, 2, device=device)
    expected = sampler_of(denoiser, "DDIM")(**options)
    swept = sampler_of(denoiser, "DDIM", parallel=dpa.Parallel(window=4, tolerance=1e-5))
    torch.testing.assert_close(swept(**options), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"memory": torch.zeros(())}, "memory must have a batch"),
        ({"memory": torch.zeros(3, 5, 3)}, "memory must have a batch of 1 or 2"),
        ({"memory": 1}, "memory must be a tensor, got int"),
        ({"noise": torch.zeros(2, 8, 2)}, "conditions must have names of their own, got noise"),
        ([torch.zeros(2)], "conditions must map names to tensors, got list"),
    ],
)
def test_conditions_that_are_refused(conditions, message):
    sampler = sampler_of(Denoiser().eval())
    with pytest.raises(ValueError, match=message):
        sampler(conditions=conditions, batch_size=2)


def test_a_fused_loop_takes_no_further_conditions():
    unet = dpa.nn.ConditionalUnet1D(2, None, 4, diffusion_step_embed_dim=16, down_dims=(16, 32))
    sampler = dpa.DiffusionSampler(unet.eval(), scheduler(), 3, horizon=8, fused=True)
    with pytest.raises(ValueError, match="fused must be left out where there is memory"):
        sampler(conditions={"memory": torch.zeros(1, 2)})


class Recorded:
    """Stands where a graph does on a machine without a GPU: replays what it captured."""

    captured, replayed = 0, 0

    def __init__(self, device, body, inputs, known=True):
        self.inputs = {n: v.clone() for n, v in fused_loop.in_float32(inputs).items()}
        self._body = body
        type(self).captured += 1

    def replay(self, inputs, numbers, generator):
        for name, value in inputs.items():
            self.inputs[name].copy_(value)
        if numbers is not None:
            self.inputs["random"].copy_(numbers(generator))
        type(self).replayed += 1
        return self._body(self.inputs)


@pytest.fixture
def recorded(traced, monkeypatch):
    """The same, where networks run as they are: bits are those of the plain loop."""
    monkeypatch.setattr(stepwise_loop, "TracedNetwork", _refused)
    return traced


def _refused(*given):
    raise RuntimeError("it is not traced")


@pytest.fixture
def traced(monkeypatch):
    """A device on which loops are captured: a GPU, or the CPU with graphs that record."""

    class Graph(Recorded):
        captured, replayed = 0, 0

    monkeypatch.setattr(module_loops, "LoopGraph", Graph)
    monkeypatch.setattr(sampler_module, "can_capture", lambda device: True)
    return Graph


def call(sampler, seed=0, batch=2):
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(batch, 5, 3, generator=torch.Generator().manual_seed(seed))
    return sampler(conditions={"memory": memory}, generator=generator)


def test_calls_of_a_kind_are_captured_once(recorded):
    denoiser = Denoiser().eval()
    sampler, plain = sampler_of(denoiser), sampler_of(denoiser, cuda_graph=False)
    for seed in range(4):
        torch.testing.assert_close(call(sampler, seed), call(plain, seed), rtol=0, atol=0)
    assert (recorded.captured, recorded.replayed) == (1, 1 + 3)  # one replay is compared
    call(sampler, batch=3)
    assert recorded.captured == 2
    assert len(copy.deepcopy(sampler)._loops) == 0


@pytest.mark.parametrize(
    ("fused", "drops", "captured"), [(None, False, 1), (False, False, 0), (None, True, 0)]
)
def test_a_unet_that_is_not_packed_is_captured(recorded, fused, drops, captured):
    """It has six levels; step by step with ``fused=False``, or where a layer drops values."""
    torch.manual_seed(0)
    unet = dpa.nn.ConditionalUnet1D(2, None, 4, 16, (8,) * 6).eval()
    unet.final_conv.append(torch.nn.Dropout(0.5).train(drops))
    options = {"horizon": 32, "fused": fused}
    sampler = dpa.DiffusionSampler(unet, scheduler(), 3, **options)
    plain = dpa.DiffusionSampler(unet, scheduler(), 3, cuda_graph=False, **options)
    cond = torch.randn(2, 4)
    for seed in range(3):
        got, want = (each(cond, generator=torch.manual_seed(seed)) for each in (sampler, plain))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert recorded.captured == captured
    replayed = recorded.replayed
    with Calls():  # a mode that is to see what runs
        sampler(cond)
    assert (recorded.captured, recorded.replayed) == (captured, replayed)


def test_a_loop_without_random_numbers_is_captured(recorded):
    denoiser = Denoiser().eval()
    sampler, plain = (sampler_of(denoiser, "DDIM", cuda_graph=one) for one in (True, False))
    for _ in range(3):
        given = {"noise": torch.randn(2, 8, 2), "conditions": {"memory": torch.randn(2, 5, 3)}}
        torch.testing.assert_close(sampler(**given), plain(**given), rtol=0, atol=0)
    assert recorded.captured == 1


def test_a_network_of_nested_conditions_is_captured(recorded):
    """DPPO's MLP, which takes a dictionary."""
    torch.manual_seed(0)
    plain = near_policies.DiffusionModel(network=near_policies.ActorMlp(), steps=4).eval()
    fast, cond = dpa.accelerate(copy.deepcopy(plain)), {"state": torch.randn(2, 1, 6)}
    for seed in range(4):
        results = []
        for policy in (plain, fast):
            torch.manual_seed(seed)
            results.append(policy(cond)[0])
        torch.testing.assert_close(results[1], results[0])
    assert recorded.captured == 1


@pytest.mark.parametrize(("dtype", "most"), [(None, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_traced_loop_follows_its_module(traced, dtype, most):
    denoiser = Denoiser().eval()
    sampler, plain = sampler_of(denoiser, dtype=dtype), sampler_of(denoiser, cuda_graph=False)

    def agrees(captured):
        for seed in range(3):
            got, expected = call(sampler, seed), call(plain, seed)
            assert (got - expected).norm() < most * expected.norm()
        assert traced.captured == captured and not sampler._loops.untraced
        assert sampler._copy is None  # replays need none

    agrees(1)
    with torch.no_grad():
        denoiser.time.weight.add_(0.5)
        denoiser.head.weight.mul_(2)
    agrees(1)
    denoiser.scale = 2.0
    agrees(2)
    denoiser.head = nn.Linear(16, 2)
    agrees(3)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_module_that_no_trace_stands_for_is_captured_as_it_is(traced, dtype, monkeypatch):
    """Its trace computes something else, as where kernels write behind PyTorch's back."""
    ahead = TracedNetwork.ahead

    def wrong(self, *given):
        predict = ahead(self, *given)
        return lambda sample, step: predict(sample, step) + 1

    monkeypatch.setattr(TracedNetwork, "ahead", wrong)
    denoiser = Denoiser().eval()
    make = functools.partial(sampler_of, denoiser, dtype=dtype)
    sampler, plain = make(), make(cuda_graph=False)
    for seed in range(3):
        assert torch.equal(call(sampler, seed), call(plain, seed))
    assert traced.captured == 2  # the trace, which is left, and the module
    way, why = sampler.untraced
    assert way == "one CUDA graph" and "its replay differs by" in why


def test_rounding_that_a_network_magnifies_leaves_its_trace(traced, monkeypatch):
    """Where two loops in 16 bits differ by more than the limit, the one in float32 decides."""
    monkeypatch.setattr(module_loops, "LOOP_LIMITS", dict.fromkeys(module_loops.LOOP_LIMITS, 1e-9))
    denoiser, errors = Denoiser().eval(), []
    plain = sampler_of(denoiser, cuda_graph=False)
    for options in ({}, {"cuda_graph": False}):
        sampler = sampler_of(denoiser, dtype=torch.bfloat16, **options)
        results = [call(sampler, seed=1) for _ in range(2)]
        errors.append(float((results[1] - call(plain, seed=1)).norm()))
        assert sampler.untraced is None
    assert 0 < errors[0] <= 1.5 * errors[1] and traced.captured == 1


def test_explain_says_what_was_not_traced(recorded):
    torch.manual_seed(0)
    policy = dpa.accelerate(other_policies.TransformerPolicy().eval())
    with torch.no_grad():
        policy.predict_action({"obs": torch.randn(2, 2, 3)})
    expected = "one CUDA graph around Transformer as it is: it is not traced"
    assert expected in str(dpa.explain(policy))


@pytest.mark.parametrize("change", ["setting", "module", "parameter", "written", "hook", "train"])
def test_a_changed_module_is_captured_anew_or_not_at_all(recorded, change):
    denoiser = Denoiser().eval()
    sampler, plain = sampler_of(denoiser), sampler_of(denoiser, cuda_graph=False)
    for seed in range(2):
        call(sampler, seed)
    captured = recorded.captured
    with torch.no_grad():
        if change == "setting":
            denoiser.scale = 2.0
        elif change == "module":
            denoiser.head = nn.Linear(16, 2)
        elif change == "parameter":
            denoiser.head.bias = nn.Parameter(torch.ones(2))
        elif change == "written":
            denoiser.head.bias.add_(1)
        elif change == "hook":
            denoiser.head.register_forward_hook(lambda *seen: seen[2] * 2)
        elif change == "train":
            denoiser.train()
    for seed in range(3):
        torch.testing.assert_close(call(sampler, seed), call(plain, seed), rtol=0, atol=0)
    anew = {"setting": 1, "module": 1, "parameter": 1, "written": 0, "hook": 0, "train": 0}
    assert recorded.captured == captured + anew[change]


def test_a_module_that_changes_in_every_call_is_left_alone(recorded):
    class Counting(Denoiser):
        calls = 0

        def forward(self, *given, **named):
            self.calls += 1
            return super().forward(*given, **named)

    sampler = sampler_of(Counting().eval())
    for seed in range(20):
        call(sampler, seed)
    assert 0 < recorded.captured <= module_loops._MISSES + 1


def test_a_replay_that_differs_is_refused_with_a_warning(recorded, monkeypatch):
    monkeypatch.setattr(
        recorded, "replay", lambda self, *_: torch.full_like(self._body(self.inputs), 3.0)
    )
    denoiser = Denoiser().eval()
    sampler, plain = sampler_of(denoiser), sampler_of(denoiser, cuda_graph=False)
    with pytest.warns(RuntimeWarning, match="replay differs by"):
        call(sampler)
    for seed in range(2):
        assert torch.equal(call(sampler, seed), call(plain, seed))
    assert recorded.captured == 1


class Masked(nn.Module):
    """A transformer of PyTorch's whose mask is causal, which PyTorch finds out from its values."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(2, 16), nn.Linear(16, 2)
        layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)
        mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
        self.register_buffer("mask", mask)

    def forward(self, sample, timestep, memory):
        hidden = self.embed(sample) + (timestep[:, None, None] / 20).to(sample.dtype)
        return self.head(self.decoder(hidden, memory, tgt_mask=self.mask))


def masked_call(sampler, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    memory = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed)).to(device)
    return sampler(conditions={"memory": memory}, generator=generator)


def test_a_mask_is_looked_at_once_and_again_when_it_is_written(recorded, monkeypatch):
    asked, ask = [], capture._ask
    monkeypatch.setattr(capture, "_ask", lambda *of: asked.append(of) or ask(*of))
    denoiser, cpu = Masked().eval(), torch.device("cpu")
    sampler, plain = sampler_of(denoiser), sampler_of(denoiser, cuda_graph=False)
    masked_call(sampler, cpu)
    assert len(asked) == 1  # by the loop that runs, and not by the capture nor by replays of it
    captured = recorded.captured
    denoiser.mask.zero_()
    torch.testing.assert_close(masked_call(sampler, cpu), masked_call(plain, cpu), rtol=0, atol=0)
    assert recorded.captured == captured + 1
    assert torch.nn.modules.transformer._detect_is_causal_mask is ask or not capture._asked


def test_a_copy_in_sixteen_bits_is_captured_once_and_follows_writes(recorded):
    """What brings the copy up to date in every call writes its mask, with what is there already."""
    denoiser, cpu = Masked().eval(), torch.device("cpu")
    make = functools.partial(sampler_of, denoiser, dtype=torch.bfloat16)
    sampler, plain = make(), make(cuda_graph=False)
    assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
    for seed in range(3):
        assert_equal(masked_call(sampler, cpu, seed), masked_call(plain, cpu, seed))
    assert recorded.captured == 1
    for captured, write in (
        (1, lambda: denoiser.head.weight.data.mul_(2)),
        (2, denoiser.mask.zero_),
    ):
        with torch.no_grad():
            write()
        for seed in range(2):
            assert_equal(masked_call(sampler, cpu, seed), masked_call(plain, cpu, seed))
        assert recorded.captured == captured


@gpu
@torch.no_grad()
def test_a_transformer_with_a_causal_mask_is_captured(cuda):
    denoiser = Masked().to(cuda).eval()
    sampler, plain = sampler_of(denoiser), sampler_of(denoiser, cuda_graph=False)
    for seed in range(3):
        got, expected = masked_call(sampler, cuda, seed), masked_call(plain, cuda, seed)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert len(sampler._loops) == 1 and not sampler._loops.refused


@gpu
@torch.no_grad()
def test_writes_and_other_places_are_followed_on_a_gpu(cuda):
    denoiser = Denoiser().to(cuda).eval()
    sampler, plain = sampler_of(denoiser), sampler_of(denoiser, cuda_graph=False)
    memory = torch.randn(2, 5, 3, device=cuda)

    def assert_same():
        for _ in range(3):
            ours, theirs = (torch.Generator(cuda).manual_seed(1) for _ in range(2))
            got = sampler(conditions={"memory": memory}, generator=ours)
            expected = plain(conditions={"memory": memory}, generator=theirs)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    assert_same()
    assert len(sampler._loops) == 1 and not sampler._loops.refused
    denoiser.head.weight.mul_(2)
    denoiser.head.bias.data.add_(1)
    assert_same()
    denoiser.head = nn.Linear(16, 2).to(cuda)
    assert_same()
    with torch.autocast("cuda", torch.bfloat16):
        sampler(conditions={"memory": memory})
    assert_same()
