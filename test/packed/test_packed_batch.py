"""Many samples on packed weights: layer by layer, on a GPU that has the GEMMs for it."""

import copy

import pytest
import torch
from test_packed import ERROR, _rounded_to_e4m3, error

import dpa
from dpa.nn import ConditionalUnet1D
from dpa.packed.unet import PackedUnet
from dpa.sampling.fused_loop import Window

diffusers = pytest.importorskip("diffusers")

KINDS = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]
ALL = [torch.float32, *KINDS]


def _net(device, dims=(256, 512), **more):
    torch.manual_seed(3)
    net = ConditionalUnet1D(3, global_cond_dim=20, down_dims=dims, **more)
    return net.to(device).eval()


def _inputs(device, count, horizon=16):
    torch.manual_seed(4)
    sample = torch.randn(count, horizon, 3, device=device)
    return sample, torch.randn(count, 20, device=device)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_forward(hopper, dtype):
    """A timestep each, and one for all, against float64."""
    unet = _net(hopper)
    exact = copy.deepcopy(unet if dtype.itemsize > 1 else _rounded_to_e4m3(unet)).double()
    packed = PackedUnet(unet, dtype)
    kind = torch.float16 if dtype.itemsize == 1 else dtype
    sample, cond = _inputs(hopper, 40)
    assert packed.in_layers(sample) is not None
    for steps in (torch.randint(100, (40,), device=hopper), torch.tensor(7, device=hopper)):
        got = packed(sample, steps, cond)
        with torch.no_grad():
            expected = exact(sample.double(), steps, global_cond=cond.double())
        assert got.dtype == torch.float32 and error(got, expected) < ERROR[kind]
        assert torch.equal(got, packed(sample, steps, cond))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize(
    ("dims", "kernel", "horizon"),
    [
        ((320, 480), 5, 16),
        ((96, 160, 240), 3, 24),
        ((48, 96), 7, 14),
        ((40, 72, 200), 3, 16),
        ((360, 520), 5, 8),
        ((264, 528), 3, 96),  # too long for a team's registers
    ],
)
def test_groups_of_no_whole_vectors(hopper, dtype, dims, kernel, horizon, monkeypatch):
    """Groups of 5 to 65 channels, and of two inputs side by side, against float64."""
    monkeypatch.setattr("dpa.packed.unet.path_of", lambda *_: "layers")
    unet = _net(hopper, dims, kernel_size=kernel)
    exact = copy.deepcopy(unet if dtype.itemsize > 1 else _rounded_to_e4m3(unet)).double()
    packed = PackedUnet(unet, dtype)
    for count in (7, 40):
        sample, cond = _inputs(hopper, count, horizon)
        assert packed.in_layers(sample) is not None
        steps = torch.randint(100, (count,), device=hopper)
        got = packed(sample, steps, cond)
        with torch.no_grad():
            expected = exact(sample.double(), steps, global_cond=cond.double())
        assert error(got, expected) < ERROR[torch.float16 if dtype.itemsize == 1 else dtype]
        assert torch.equal(got, packed(sample, steps, cond))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_states_of_one_observation(hopper, dtype, monkeypatch):
    """Those of parallel sampling, whose FiLM is made once for all timesteps, against float64."""
    monkeypatch.setattr("dpa.packed.unet.path_of", lambda *_: "layers")
    unet = _net(hopper)
    exact = copy.deepcopy(unet if dtype.itemsize > 1 else _rounded_to_e4m3(unet)).double()
    packed = PackedUnet(unet, dtype)
    sample, cond = _inputs(hopper, 40)
    inputs, steps = {"global_cond": cond[:1]}, torch.arange(40.0, device=hopper)
    window = Window(packed, one=True, layers=packed.in_layers(sample))
    got = window(inputs, sample, window.begin(inputs, steps))
    with torch.no_grad():
        expected = exact(sample.double(), steps, global_cond=cond[:1].double().expand(40, -1))
    assert error(got, expected) < ERROR[torch.float16 if dtype.itemsize == 1 else dtype]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(
    ("dims", "kernel", "count", "horizon"),
    [
        ((512, 1024, 2048), 3, 16, 16),
        ((512, 1024), 7, 3, 24),
        ((256, 512, 1024), 3, 4, 48),
        ((512, 512), 5, 4, 16),  # a level as wide as the one before it
        ((512, 512, 1024), 7, 8, 16),
        ((256, 512, 512), 3, 9, 16),
    ],
)
def test_batches_in_clusters(hopper, dtype, dims, kernel, count, horizon):
    """Batches of wide networks that one kernel runs, against float64."""
    unet = _net(hopper, dims, kernel_size=kernel)
    exact = copy.deepcopy(unet if dtype.itemsize > 1 else _rounded_to_e4m3(unet)).double()
    packed = PackedUnet(unet, dtype)
    kind = torch.float16 if dtype.itemsize == 1 else dtype
    sample, cond = _inputs(hopper, count, horizon)
    assert packed.in_layers(sample) is None
    steps = torch.randint(100, (count,), device=hopper)
    got = packed(sample, steps, cond)
    with torch.no_grad():
        expected = exact(sample.double(), steps, global_cond=cond.double())
    assert error(got, expected) < ERROR[kind]
    assert torch.equal(got, packed(sample, steps, cond))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("inpainting", [False, True])
def test_loop(hopper, dtype, inpainting, monkeypatch):
    """Captured or not, the loop of layers is the loop in one kernel up to rounding."""
    monkeypatch.setattr("dpa.packed.unet.path_of", lambda *_: "layers")
    unet = _net(hopper)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=6, beta_schedule="squaredcos_cap_v2")
    _, cond = _inputs(hopper, 40)
    given = {}
    if inpainting:
        mask = torch.zeros(40, 16, 3, dtype=torch.bool, device=hopper)
        mask[:, :2] = True
        given = {"condition_data": torch.rand(40, 16, 3, device=hopper), "condition_mask": mask}

    def run(**options):
        sampler = dpa.DiffusionSampler(unet, scheduler, 6, dtype, horizon=16, fused=True, **options)
        generator = torch.Generator(hopper).manual_seed(1)
        first = sampler(cond, generator=generator, **given)
        generator = torch.Generator(hopper).manual_seed(1)
        assert torch.equal(first, sampler(cond, generator=generator, **given))  # the replay
        return first

    layers, called = run(), run(cuda_graph=False)
    assert torch.equal(layers, called)
    if inpainting:
        assert torch.equal(layers[:, :2], given["condition_data"][:, :2])
    monkeypatch.setattr("dpa.packed.unet.path_of", lambda *_: "phases")
    assert error(layers, run()) < 2 * ERROR[torch.float16 if dtype.itemsize == 1 else dtype]


def test_weights_that_change_are_followed(hopper):
    """In place, through data, and replaced: replays of the captured loop are of the new ones."""
    unet = _net(hopper)
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=50, beta_schedule="squaredcos_cap_v2")
    noise, cond = _inputs(hopper, 40)

    def sampler():
        return dpa.DiffusionSampler(unet, scheduler, 4, torch.bfloat16, horizon=16, fused=True)

    kept = sampler()
    before = kept(cond, noise=noise)
    weight = unet.mid_modules[0].blocks[0].block[0].weight

    def in_place():
        with torch.no_grad():
            weight.mul_(0.5)

    def by_data():
        weight.data.mul_(3.0)

    def replace():
        weight.data = weight.data * 0.7

    def bias():
        with torch.no_grad():
            unet.mid_modules[0].blocks[0].block[0].bias.add_(0.3)

    for change in (in_place, by_data, replace, bias):
        change()
        got = kept(cond, noise=noise)
        assert not torch.equal(got, before), change.__name__
        assert torch.equal(got, sampler()(cond, noise=noise)), change.__name__
        before = got


def test_a_capture_of_the_callers_own(hopper):
    packed = PackedUnet(_net(hopper), torch.bfloat16)
    sample, cond = _inputs(hopper, 40)
    steps = torch.full((40,), 9.0, device=hopper)
    expected = packed(sample, steps, cond)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed(sample, steps, cond)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
