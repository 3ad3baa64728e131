"""What is the CPU's own about packed weights: instruction sets, threads, odd widths."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dpa
from dpa.packed.unet import PackedUnet

_LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx")
_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def _net(**options):
    unet = dpa.nn.ConditionalUnet1D(diffusion_step_embed_dim=32, **options).eval()
    for parameter in unet.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return unet


def _inputs(unet, batch, horizon, cond_dim):
    cond = torch.randn(batch, cond_dim) if cond_dim else None
    return torch.randn(batch, horizon, unet.input_dim), torch.randint(100, (batch,)), cond


def _poison():
    """Fill the allocator's free memory with NaN: what is read before it is written shows."""
    torch.full((1 << 22,), torch.nan)


def _check(unet, dtype, batch, horizon, cond_dim):
    sample, timestep, cond = _inputs(unet, batch, horizon, cond_dim)
    wide = None if cond is None else cond.double()
    packed, exact = PackedUnet(unet, dtype), dpa.reference.plain(unet).double()
    with torch.no_grad():
        expected = exact(sample.double(), timestep, None, wide)
    _poison()
    got = packed(sample, timestep, cond)
    assert (got.double() - expected).norm() / expected.norm() < _ERROR[dtype]
    return got


def test_timesteps_as_the_network_takes_them():
    unet = _net(input_dim=2, down_dims=(8, 16))
    sample, _, _ = _inputs(unet, 3, 4, None)
    packed = PackedUnet(unet)
    for form in (7, 7.0, torch.tensor(7), torch.tensor([7]), torch.full((3,), 7)):
        assert torch.equal(packed(sample, form), packed(sample, torch.full((3,), 7.0)))


def _has(level, monkeypatch):
    monkeypatch.setenv("DPA_CPU_LEVEL", level)
    unet = _net(input_dim=1, down_dims=(8,))
    try:
        PackedUnet(unet)(torch.zeros(1, 1, 1), torch.zeros(1))
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize("level", _LEVELS)
@pytest.mark.parametrize("dtype", _ERROR, ids=str)
def test_every_level(level, dtype, monkeypatch):
    _has(level, monkeypatch)
    unet = _net(input_dim=3, global_cond_dim=5, down_dims=(24, 48, 40), n_groups=4)
    for batch, horizon in ((1, 4), (1, 16), (3, 8), (9, 4), (16, 16), (19, 4), (2, 36)):
        _check(unet, dtype, batch, horizon, 5)


@pytest.mark.parametrize("width", [32, 40])
def test_tiles_multiply_activations_unrounded(width, monkeypatch):
    """Activations are sums of two bfloat16: of weights that are bfloat16, little error is left."""
    _has("amx", monkeypatch)
    unet = _net(input_dim=2, global_cond_dim=5, down_dims=(width, 2 * width))
    for parameter in unet.parameters():
        parameter.data = parameter.data.bfloat16().float()
    sample, timestep, cond = _inputs(unet, 5, 16, 5)
    with torch.no_grad():
        expected = dpa.reference.plain(unet).double()(
            sample.double(), timestep, None, cond.double()
        )
    got = PackedUnet(unet, torch.bfloat16)(sample, timestep, cond)
    assert (got.double() - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("what", ["activations", "weights", "sums"])
def test_what_float16_does_not_hold(what):
    """Levels that multiply bfloat16 weights in float16 notice what is too large for it."""
    unet = _net(input_dim=2, global_cond_dim=5, down_dims=(32, 64), cond_predict_scale=True)
    first, second = (block.block for block in unet.down_modules[0][0].blocks)
    with torch.no_grad():
        if what == "activations":
            first[1].weight.fill_(3e6)
        elif what == "weights":
            second[0].weight *= 1e6
        else:
            first[1].weight.fill_(300.0)
            second[0].weight.abs_().mul_(1000.0)
    _check(unet, torch.bfloat16, 3, 16, 5)


@pytest.mark.parametrize("dtype", _ERROR, ids=str)
def test_threads_change_nothing(dtype):
    unet = _net(input_dim=2, global_cond_dim=4, down_dims=(64, 128), cond_predict_scale=True)
    packed, before = PackedUnet(unet, dtype), torch.get_num_threads()
    try:
        for batch in (1, 5, 13):
            inputs = _inputs(unet, batch, 16, 4)
            results = []
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                results.append(packed(*inputs))
            assert all(torch.equal(results[0], other) for other in results[1:])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_network(data):
    groups = data.draw(st.sampled_from([1, 2, 4, 8]), "n_groups")
    levels = data.draw(st.integers(1, 3), "levels")
    dims = [8 * data.draw(st.integers(1, 6), "width") for _ in range(levels)]
    cond_dim = data.draw(st.sampled_from([0, 1, 7, 33]), "global_cond_dim")
    unet = _net(
        input_dim=data.draw(st.integers(1, 19), "input_dim"),
        global_cond_dim=cond_dim or None,
        down_dims=tuple(dims),
        kernel_size=data.draw(st.sampled_from([1, 3, 5, 7]), "kernel_size"),
        n_groups=groups,
        cond_predict_scale=data.draw(st.booleans(), "scale"),
    )
    horizon = 2 ** (levels - 1) * data.draw(st.integers(1, 9), "horizon")
    dtype = data.draw(st.sampled_from(list(_ERROR)), "dtype")
    # A group of few numbers may have a deviation near zero, by which rounding is then divided.
    numbers = min(min(dims) // groups * (horizon >> (levels - 1)), dims[0] // 8 * horizon)
    assume(numbers >= (4 if dtype == torch.float32 else 16))
    _check(unet, dtype, data.draw(st.integers(1, 17), "batch"), horizon, cond_dim)


def test_bytes_packed_elsewhere_are_refused():
    unet = _net(input_dim=2, down_dims=(16,))
    packed = PackedUnet(unet)
    foreign = torch.zeros_like(packed.packed)
    with pytest.raises(RuntimeError, match=r"dpa::unet1d: packed must be what unet1d_pack made"):
        torch.ops.dpa.unet1d(
            torch.zeros(1, 4, 2), torch.zeros(1), None, foreign, packed.config, torch.float32
        )


def test_float8_is_refused():
    with pytest.raises(RuntimeError, match=r"dpa::unet1d_pack: dtype must be .* on the CPU"):
        _ = PackedUnet(_net(input_dim=2, down_dims=(16,)), torch.float8_e4m3fn).packed


def test_an_unknown_level_is_refused(monkeypatch):
    packed = PackedUnet(_net(input_dim=2, down_dims=(16,)))
    _ = packed.packed
    monkeypatch.setenv("DPA_CPU_LEVEL", "sse9")
    with pytest.raises(RuntimeError, match=r"dpa::unet1d: DPA_CPU_LEVEL must be one .*portable"):
        packed(torch.zeros(1, 4, 2), torch.zeros(1))
