"""A step of AdamW and of the averages in one op: against float64, PyTorch's fused op, and abuse."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import tolerance
from torch.testing import assert_close

from dpa import reference

_OP = torch.ops.dpa.adamw_ema_
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SCHEDULE = (0.75, 1.0, 0.0, 0.9999)
_NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-3}
_PAIRS = [(d, d) for d in _DTYPES] + [(torch.float32, d) for d in _DTYPES[2:]]
_each_pair = pytest.mark.parametrize(
    "dtypes", _PAIRS, ids=lambda d: "-".join(str(x).removeprefix("torch.") for x in d)
)


def _wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def _lists(shapes, dtype, device="cpu", grad_dtype=None, averages=True, seed=0):
    """The op's six lists; steps differ."""
    generator = torch.Generator().manual_seed(seed)
    new = lambda shape: torch.randn(shape, generator=generator)  # noqa: E731
    params, averaged = ([new(s) for s in shapes] for _ in range(2))
    grads, moments = [new(s) for s in shapes], [new(s) / 8 for s in shapes]
    squares = [new(s).abs() for s in shapes]
    steps = [torch.tensor(float(i % 4), device=device) for i, _ in enumerate(shapes)]
    to = lambda tensors, dtype: [x.to(device, dtype) for x in tensors]  # noqa: E731
    lists = [to(params, dtype), to(grads, grad_dtype or dtype), to(moments, dtype)]
    lists += [to(squares, dtype), to(averaged, _wide(dtype)) if averages else [], steps]
    return lists


def _options(lists, updates=9, **options):
    device = lists[0][0].device if lists[0] else "cpu"
    if lists[4]:
        options["updates"] = torch.tensor(updates, device=device)
        options["ema_schedule"] = list(_SCHEDULE)
    return {**_NUMBERS, **options}


def _expected(lists, options):
    """All lists after the step, in float64."""
    value = lambda name, other: float(options[name]) if name in options else other  # noqa: E731
    numbers = {name: options[name] for name in _NUMBERS}
    numbers["lr"] = value("tensor_lr", numbers["lr"])
    numbers["decoupled_weight_decay"] = options.get("decoupled_weight_decay", True)
    lost = value("found_inf", 0.0) != 0
    results = [[], [], [], [], [], []]
    decay = reference.ema_decay(int(value("updates", 0)), *_SCHEDULE)
    for i, step in enumerate(lists[5]):
        param, grad, moment, square = (x[i].double() for x in lists[:4])
        count = int(step) + (not lost)
        given = grad / value("grad_scale", 1.0) * value("clip_coef", 1.0)
        given = -given if options.get("maximize") else given
        if not lost:
            param, moment, square = reference.adamw(param, given, moment, square, count, **numbers)
        grad = grad * (not options.get("clear_grads"))
        now = [param, grad, moment, square]
        if lists[4]:
            stored = param.to(lists[0][i].dtype).double()  # what is averaged is what is kept
            now.append(decay * lists[4][i].double() + (1 - decay) * stored)
        for result, x in zip(results, now, strict=False):
            result.append(x)
        results[5].append(torch.tensor(float(count)))
    return results


def _check(lists, options):
    expected, held = _expected(lists, options), [x.data_ptr() for each in lists for x in each]
    _OP(*lists, **options)
    assert held == [x.data_ptr() for each in lists for x in each]
    for got, wanted in zip(lists, expected, strict=True):
        for x, y in zip(got, wanted, strict=True):
            close = tolerance(min(x.dtype, lists[0][0].dtype, key=lambda d: torch.finfo(d).bits))
            assert_close(x.double().cpu(), y.double().cpu(), **close)


@_each_pair
@pytest.mark.parametrize("averages", [True, False], ids=["averages", "none"])
def test_values(dtypes, averages, device):
    shapes = [(3, 5), (), (0, 4), (4100,), (2, 3, 4), (1,)]
    lists = _lists(shapes, dtypes[0], device, dtypes[1], averages)
    _check(lists, _options(lists))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_every_option(dtype, device):
    number = lambda x, dtype=torch.float32: torch.tensor(x, device=device, dtype=dtype)  # noqa: E731
    for options in (
        {"decoupled_weight_decay": False},
        {"maximize": True, "weight_decay": 0.0},
        {"clear_grads": True, "tensor_lr": number(0.03)},
        {"grad_scale": number(512.0), "clip_coef": number(0.25, dtype)},
        {"found_inf": number(1.0)},
        {"found_inf": number(1.0), "clear_grads": True},
        {"found_inf": number(0.0), "grad_scale": number(2.0)},
    ):
        for averages in (True, False):
            lists = _lists([(7,), (2, 3)], dtype, device, averages=averages)
            _check(lists, _options(lists, **options))


def test_the_averages_schedule(device):
    for updates in (0, 1, 2, 3, 1000, 2**40):
        lists = _lists([(17,)], torch.float64, device)
        _check(lists, _options(lists, updates))


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=5),
    dtypes=st.sampled_from(_PAIRS),
    averages=st.booleans(),
    clear=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_sizes(shapes, dtypes, averages, clear, seed):
    lists = _lists(shapes, dtypes[0], "cpu", dtypes[1], averages, seed)
    _check(lists, _options(lists, clear_grads=clear))


def _strided(kind, x):
    if kind == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "channels_last":
        return x.to(memory_format=torch.channels_last)
    if kind == "gaps":
        return torch.full((*x.shape, 2), torch.nan).to(x)[..., 0].copy_(x)
    if kind == "offset":  # an address that is no multiple of 16 bytes
        return torch.full((x.numel() + 1,), torch.nan).to(x)[1:].view(x.shape).copy_(x)
    return x


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "gaps", "offset"])
@pytest.mark.parametrize("which", [[0], [1], [2, 3], [4], [0, 1, 2, 3, 4]], ids=str)
def test_any_strides(kind, which, device):
    lists = _lists([(4, 3, 5, 2)], torch.float32, device)
    for i in which:
        lists[i] = [_strided(kind, x) for x in lists[i]]
    strides = [x.stride() for each in lists for x in each]
    _check(lists, _options(lists, clear_grads=True))
    assert strides == [x.stride() for each in lists for x in each]


def test_gaps_stay_as_they_are(device):
    whole = torch.full((4, 8), 7.0, device=device)
    lists = _lists([(4, 4)], torch.float32, device)
    lists[0] = [whole[:, ::2].copy_(lists[0][0])]
    _check(lists, _options(lists))
    assert (whole[:, 1::2] == 7).all()


def test_writes_count_as_changes(device):
    lists = _lists([(3,), (2, 2)], torch.float32, device)
    before = [[x._version for x in each] for each in lists]
    _OP(*lists, **_options(lists))
    for i, (each, old) in enumerate(zip(lists, before, strict=True)):
        assert all((x._version > v) == (i != 1) for x, v in zip(each, old, strict=True))
    _OP(*lists, **_options(lists, clear_grads=True))
    assert all(x._version > v for x, v in zip(lists[1], before[1], strict=True))


def test_inference_mode(device):
    with torch.inference_mode():
        lists = _lists([(3,)], torch.float32, device)
        _check(lists, _options(lists))


def test_tensors_with_history_are_rejected(device):
    """What requires a gradient is written under no_grad, as an optimizer does it."""
    for i in range(5):
        lists = _lists([(3,)], torch.float32, device)
        options = _options(lists)
        expected = copy.deepcopy(lists)
        lists[i][0].requires_grad_()
        with pytest.raises(RuntimeError, match="dpa::adamw_ema_: tensors must not require grad"):
            _OP(*lists, **options)
        with torch.no_grad():
            _OP(*lists, **options)
            _OP(*expected, **options)
        assert_close(lists[0][0].detach(), expected[0][0], rtol=0, atol=0)


def test_opcheck(device):
    for averages in (True, False):
        lists = _lists([(3, 2), (4,)], torch.float32, device, averages=averages)
        torch.library.opcheck(_OP.default, tuple(lists), _options(lists))


def test_compiled(device):
    lists = _lists([(3, 2), (4,)], torch.float32, device)
    options = _options(lists)
    expected = copy.deepcopy(lists)
    _OP(*expected, **options)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(*lists):
        _OP(*lists, **options)
        return lists[0][0] * 2

    assert_close(step(*lists), expected[0][0] * 2)
    for got, wanted in zip(lists, expected, strict=True):
        assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            0,
            torch.zeros(3, dtype=torch.int64),
            "params must be float64, float32, float16 or bfloat16, got Long",
        ),
        (1, torch.zeros(4), r"grads must have the shape of params \(\[3\]\), got \[4\]"),
        (1, torch.zeros(3, dtype=torch.float64), "grads must have the dtype of params"),
        (2, torch.zeros(3, dtype=torch.float64), "exp_avgs must have dtype Float, got Double"),
        (3, torch.zeros(3, device="meta"), "exp_avg_sqs must be on the device of params"),
        (4, torch.zeros(3, dtype=torch.float64), "averages must have dtype Float, got Double"),
        (5, torch.zeros(2), "state_steps must be one Float"),
        (5, torch.zeros((), dtype=torch.int64), "state_steps must be one Float, got Long"),
    ],
)
def test_rejected_tensors(place, value, message):
    lists = _lists([(3,)], torch.float32)
    before = copy.deepcopy(lists)
    lists[place], options = [value], _options(lists)
    with pytest.raises(RuntimeError, match=f"dpa::adamw_ema_: {message}"):
        _OP(*lists, **options)
    for i, (each, old) in enumerate(zip(lists, before, strict=True)):
        if i != place:
            assert_close(each, old, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\), got 1"),
        ({"beta2": float("nan")}, r"beta2 must be in \[0, 1\), got nan"),
        ({"eps": -1.0}, "eps must be at least 0, got -1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1"),
        ({"tensor_lr": torch.zeros(2)}, "tensor_lr must be one Float"),
        ({"grad_scale": torch.zeros((), dtype=torch.float64)}, "grad_scale must be one Float"),
        ({"found_inf": torch.zeros((), device="meta")}, "found_inf must be on the device"),
        ({"clip_coef": torch.zeros((), dtype=torch.float64)}, "clip_coef must be one Float"),
        ({"updates": None}, "updates must be given where there are averages, got none"),
        ({"updates": torch.zeros(())}, "updates must be one Long"),
        ({"ema_schedule": [1.0]}, "ema_schedule must be power, inv_gamma"),
        ({"ema_schedule": [1.0, 0.0, 0.0, 1.0]}, "ema_schedule must have power >= 0"),
        ({"ema_schedule": [1.0, 1.0, 0.9, 0.5]}, "ema_schedule must have power >= 0"),
    ],
)
def test_rejected_options(options, message):
    lists = _lists([(3,)], torch.float32)
    with pytest.raises(RuntimeError, match=f"dpa::adamw_ema_: {message}"):
        _OP(*lists, **{**_options(lists), **options})


def test_lists_of_other_lengths_are_named():
    for i, name in enumerate(("grads", "exp_avgs", "exp_avg_sqs", "averages", "state_steps"), 1):
        lists = _lists([(3,), (2,)], torch.float32)
        lists[i] = lists[i][:1]
        with pytest.raises(RuntimeError, match=rf"{name} must be as many tensors as params \(2\)"):
            _OP(*lists, **_options(lists))


def test_elements_that_share_memory_are_rejected():
    for i in (0, 2, 3, 4):
        lists = _lists([(3, 4)], torch.float32)
        lists[i] = [torch.zeros(4).expand(3, 4)]
        with pytest.raises(RuntimeError, match="dpa::adamw_ema_: tensors that are written must"):
            _OP(*lists, **_options(lists))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_the_bits_of_pytorch_on_a_gpu(decoupled, dtype, cuda):
    """Parameters, moments and averages: equal in every bit, over many steps.

    But for Adam's weight decay, which PyTorch's kernel rounds in another way, and float64's decay
    of the averages, whose power has another last bit.
    """
    shapes = [(1,), (7,), (4096,), (333, 3), (100003,)]
    ours = _lists(shapes, dtype, cuda)
    ours[5] = [torch.zeros((), device=cuda) for _ in shapes]
    ours[4] = [x.to(_wide(dtype), copy=True) for x in ours[0]]
    theirs, fused = copy.deepcopy(ours), torch._fused_adamw_ if decoupled else torch._fused_adam_
    numbers = _NUMBERS if decoupled else {**_NUMBERS, "weight_decay": 0.0}
    for updates in range(12):
        ours[1] = theirs[1] = [torch.randn_like(x) for x in ours[0]]
        _OP(*ours, **_options(ours, updates, **numbers, decoupled_weight_decay=decoupled))
        torch._foreach_add_(theirs[5], 1)
        fused(*theirs[:4], [], theirs[5], **numbers, amsgrad=False, maximize=False)
        weight = 1 - reference.ema_decay(updates, *_SCHEDULE)
        torch._foreach_lerp_(theirs[4], [x.to(_wide(dtype)) for x in theirs[0]], weight)
        for got, wanted in zip(ours, theirs, strict=True):
            if got is ours[4] and dtype == torch.float64:
                assert_close(got, wanted, rtol=1e-14, atol=1e-14)
            else:
                assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_a_captured_step(cuda):
    """Steps and updates count on; other rates, scales and gradients are read at each replay."""
    lists = _lists([(5, 3), (4097,)], torch.float32, cuda)
    options = _options(lists, 0, clear_grads=True)
    for name in ("tensor_lr", "grad_scale", "found_inf", "clip_coef"):
        options[name] = torch.ones((), device=cuda)
    options["found_inf"].zero_()
    kept, graph = copy.deepcopy((lists, options)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _OP(*lists, **options)
        options["updates"].add_(1)
    expected, others = kept
    for i in range(6):
        grads = [torch.randn_like(x) for x in lists[0]]
        for now in (options, others):
            now["tensor_lr"].fill_(0.1 / (i + 1))
            now["grad_scale"].fill_(i + 1.0)
            now["found_inf"].fill_(float(i == 3))
        torch._foreach_copy_(lists[1], grads)
        torch._foreach_copy_(expected[1], grads)
        graph.replay()
        _OP(*expected, **others)
        others["updates"].add_(1)
        for got, wanted in zip(lists, expected, strict=True):
            assert_close(got, wanted, rtol=0, atol=0)


def test_more_tensors_than_a_launch_takes(cuda):
    lists = _lists([(i % 37,) for i in range(1000)], torch.float32, cuda)
    _check(lists, _options(lists))


def test_the_second_device(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices here")
    lists = _lists([(5, 3)], torch.float32, torch.device("cuda", 1))
    _check(lists, _options(lists))


def test_more_than_2_31_elements(cuda):
    """In one tensor, of 16 bits: the ends, and elements on both sides of 2^31."""
    count = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 2 * count * 5:
        pytest.skip("too little memory")
    big, small = (
        [[torch.ones(n, dtype=torch.bfloat16, device=cuda)] for _ in range(4)] for n in (count, 3)
    )
    for lists in (big, small):
        _OP(*lists, [], [torch.zeros((), device=cuda)], **_NUMBERS)
    for (all_of_them,), (few,) in zip(big, small, strict=True):
        for part in (slice(4), slice(2**31 - 4, 2**31 + 4), slice(-4, None)):
            assert (all_of_them[part] == few[0]).all()
    del big, all_of_them
    torch.cuda.empty_cache()  # other processes' tests want it
