"""Many calls of torch.randn in one op: the bits of PyTorch's own, one after the other."""

import pytest
import torch

from dpa.sampling import rng as noise

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(
    "shape", [(1, 16, 2), (1, 1, 1), (3, 7, 5), (16, 64, 20), (56, 48, 16), (300, 64, 8), (0, 4, 2)]
)
def test_the_bits_are_those_of_single_draws(device, shape, dtype):
    """(300, 64, 8) has more numbers than the kernel takes."""
    for seed, before in ((0, 0), (2**63 + 12345, 5), (7, 1000)):
        made, into, expected = (torch.Generator(device).manual_seed(seed) for _ in range(3))
        for generator in (made, into, expected):
            for _ in range(before):
                torch.randn(3, generator=generator, device=device)
        like = torch.empty(shape, dtype=dtype, device=device)
        got = torch.ops.dpa.normal_draws(like, 5, 7, made)
        draw = {"generator": expected, "dtype": dtype, "device": device}
        assert got.shape == (7, *shape) and got.dtype == dtype
        assert torch.equal(got[:5], torch.stack([torch.randn(shape, **draw) for _ in range(5)]))
        assert not got[5:].any()
        again = torch.full_like(got, torch.nan)
        torch.ops.dpa.normal_draws.out(5, into, out=again)
        assert torch.equal(again, got)
        after = [torch.randn(9, generator=g, device=device) for g in (made, into, expected)]
        assert torch.equal(after[0], after[2])  # the stream stands where it would
        assert torch.equal(after[1], after[2])


def test_the_global_stream(device):
    like = torch.empty(2, 8, 3, device=device)
    torch.manual_seed(3)
    expected = [torch.randn(2, 8, 3, device=device) for _ in range(3)]
    torch.manual_seed(3)
    assert torch.equal(torch.ops.dpa.normal_draws(like, 3, 3), torch.stack(expected))


def test_in_a_graph():
    """Replays go on in the stream, and follow a seed that changed."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda", 0)
    like, graph = torch.empty(1, 16, 2, device=device), torch.cuda.CUDAGraph()
    generator = torch.Generator(device)
    graph.register_generator_state(generator)
    assert noise._agrees_with_pytorch(device, like.shape, like.dtype)
    with torch.cuda.graph(graph):
        single = torch.randn(1, 16, 2, device=device, generator=generator)
        got = torch.ops.dpa.normal_draws(like, 4, 5, generator)
    torch.cuda.synchronize()  # the capture's own seed was written on another stream than a replay's
    for seed in (1, 2):
        expected = torch.Generator(device).manual_seed(seed)
        generator.manual_seed(seed)
        for _ in range(3):
            graph.replay()
            drawn = [torch.randn(1, 16, 2, device=device, generator=expected) for _ in range(5)]
            assert torch.equal(torch.cat([single[None], got[:4]]), torch.stack(drawn))
        assert generator.get_offset() == expected.get_offset()


@pytest.mark.parametrize("flags", [(True,) * 4, (True, True, False), (True, False, True), ()])
@pytest.mark.parametrize("first", [True, False])
def test_a_loop_s_numbers_are_those_of_its_steps(device, first, flags):
    shape = (2, 8, 3)
    for sequence in (False, True):
        pairs = [
            [torch.Generator(device).manual_seed(s) for s in (1, 2)] if sequence else g
            for g in (torch.Generator(device).manual_seed(1) for _ in range(2))
        ]
        numbers = noise.RandomNumbers(first, flags, shape, torch.float32, device)
        got = numbers(pairs[0])
        expected = [noise.draw_normal(shape, pairs[1], device, torch.float32)] if first else []
        for drawn in flags:
            one = noise.draw_normal(shape, pairs[1], device, torch.float32) if drawn else None
            expected.append(torch.zeros(shape, device=device) if one is None else one)
        assert numbers.rows == len(expected)
        assert torch.equal(got, torch.stack(expected) if expected else got.new_empty(0, *shape))
        into = torch.full_like(got, torch.nan)
        several = pairs[0] if sequence else pairs[:1]
        for generator, seed in zip(several, (1, 2), strict=False):
            generator.manual_seed(seed)
        numbers.into(into, pairs[0])
        assert torch.equal(into, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loops_inputs_are_written_at_once(device, dtype):
    """Beside the random numbers: copies of all kinds, in more than one launch, at odd places."""
    new = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    given = [
        new(3, 37),
        new(2, 5, 3) > 0,
        new(1, 132).half(),
        new(4, 6).t(),
        new(0, 3),
        new(1, 4).expand(3, 4),
        new(5000)[3:],
        (new(1001) > 0)[1:],
    ]
    kept = [torch.empty(x.shape, device=device, dtype=x.dtype) for x in given]
    kept[2] = kept[2].float()
    kept[6] = torch.empty(4998, device=device)[1:]
    made, expected = (torch.Generator(device).manual_seed(5) for _ in range(2))
    out = torch.full((4, 2, 16, 3), torch.nan, device=device, dtype=dtype)
    for numbers in ((out, 3, made), ()):
        for x in kept:
            x.fill_(1)
        torch.ops.dpa.loop_inputs_(kept, given, *numbers)
        assert all(torch.equal(k, x.to(k.dtype)) for k, x in zip(kept, given, strict=True))
    draw = {"generator": expected, "dtype": dtype, "device": device}
    assert torch.equal(out[:3], torch.stack([torch.randn(2, 16, 3, **draw) for _ in range(3)]))
    assert not out[3:].any()
    assert torch.equal(made.get_state(), expected.get_state())
    op = torch.ops.dpa.loop_inputs_
    with pytest.raises(RuntimeError, match="dpa::loop_inputs_: given must be as many tensors"):
        op(kept, given[1:])
    with pytest.raises(RuntimeError, match="dpa::loop_inputs_: given must have the shapes of kept"):
        op(kept[1:], given[:-1])
    with pytest.raises(RuntimeError, match="dpa::loop_inputs_: out must be contiguous"):
        op([], [], out, 5)
    with pytest.raises(RuntimeError, match="dpa::loop_inputs_: out must be given"):
        op(kept[:1], given[:1], None, 1)


def test_rejected_and_registered(device):
    op, like = torch.ops.dpa.normal_draws, torch.empty(2, 3, device=device)
    with pytest.raises(RuntimeError, match="dpa::normal_draws: draws must be at least 0, got -1"):
        op(like, -1, 2)
    with pytest.raises(RuntimeError, match="dpa::normal_draws: rows must be at least draws, got 1"):
        op(like, 2, 1)
    with pytest.raises(RuntimeError, match=r"dpa::normal_draws: like must be float64, .*got Int"):
        op(like.int(), 1, 1)
    with pytest.raises(RuntimeError, match="dpa::normal_draws: out must be contiguous"):
        op.out(1, out=torch.empty(4, 4, device=device).t())
    with pytest.raises(RuntimeError, match="dpa::normal_draws: draws must be 0 to the rows of out"):
        op.out(3, out=like)
    if like.is_cuda:
        with pytest.raises(RuntimeError, match="'cuda' device type for generator but found 'cpu'"):
            op(like, 1, 1, torch.Generator())
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.default, (like, 2, 3), test_utils=checks)
    assert op(torch.empty(4, 5, device="meta"), 2, 3).shape == (3, 4, 5)
