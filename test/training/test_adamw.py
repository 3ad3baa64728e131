"""dpa.training.AdamW and Adam: PyTorch's optimizers, clipping and EMA, in one op."""

import copy
import gc
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from dpa.training import EMA, Adam, AdamW, GraphedStep

_KINDS = pytest.mark.parametrize("kind", ["AdamW", "Adam"])
_OURS = {"AdamW": AdamW, "Adam": Adam}
# Updates are of the size of lr, whatever rounding does to small second moments.
_CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def _model(device="cpu", seed=0):
    """Layers that train, a BatchNorm, one that is frozen, and one that no loss reaches."""
    torch.manual_seed(seed)
    parts = {
        "first": torch.nn.Conv1d(3, 4, 3, padding=1, bias=False),
        "norm": torch.nn.BatchNorm1d(4),
        "last": torch.nn.Linear(4, 2),
        "frozen": torch.nn.Linear(2, 2).requires_grad_(False),
        "unused": torch.nn.Linear(2, 2),
    }
    return torch.nn.ModuleDict(parts).to(device)


def _loss(model, x):
    hidden = model["norm"](model["first"](x)).relu().mean(2)
    return model["frozen"](model["last"](hidden)).square().mean()


def _train(model, optimizer, steps=5, after=lambda: None, before=lambda: None):
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(model, torch.randn(6, 3, 8, generator=generator).to(device)).backward()
        before()
        optimizer.step()
        after()


def _equal_models(got, wanted, **close):
    for (name, x), y in zip(got.named_parameters(), wanted.parameters(), strict=True):
        assert_close(x, y, msg=lambda m, name=name: f"{name}: {m}", **(close or _CLOSE))


@_KINDS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.2},
        {"maximize": True, "weight_decay": 0.0},
        {"fused": True, "capturable": True, "foreach": None},
    ],
    ids=str,
)
def test_it_is_pytorch_s(kind, options, device):
    ours, theirs = _model(device), _model(device)
    if device.type == "cpu":
        options = {**options, "capturable": False}
    mine = _OURS[kind](ours.parameters(), **options)
    other = getattr(torch.optim, kind)(theirs.parameters(), **options)
    assert isinstance(mine, torch.optim.Adam)
    for name in ("lr", "betas", "eps", "weight_decay", "maximize"):
        assert mine.defaults[name] == other.defaults[name]
    _train(ours, mine)
    _train(theirs, other)
    _equal_models(ours, theirs)
    assert mine.state_dict()["state"].keys() == other.state_dict()["state"].keys()
    for name, value in mine.state_dict()["state"][0].items():
        assert_close(value.cpu(), other.state_dict()["state"][0][name].cpu(), **_CLOSE)
    assert mine.param_groups[0].keys() == other.param_groups[0].keys()


def test_it_is_the_float64_formula(device):
    """Ten steps of one parameter, written out."""
    p = torch.nn.Parameter(torch.randn(50, dtype=torch.float64, device=device))
    optimizer = AdamW([p], lr=0.1, betas=(0.7, 0.9), eps=1e-5, weight_decay=0.3)
    x, m, v = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)
    for t in range(1, 11):
        p.grad = torch.randn_like(p)
        x = x - 0.1 * 0.3 * x
        m, v = 0.7 * m + 0.3 * p.grad, 0.9 * v + 0.1 * p.grad**2
        x = x - 0.1 * (m / (1 - 0.7**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-5)
        optimizer.step()
    assert_close(p.detach(), x.detach(), rtol=1e-10, atol=1e-12)


@_KINDS
def test_groups_schedules_and_hooks(kind, device):
    """Rates of their own, a scheduler that changes them, and hooks that run."""
    ours, theirs, seen = _model(device), _model(device), []

    def optimized(model, kind):
        first, *others = model.parameters()
        groups = [
            {"params": [first], "lr": 0.03, "weight_decay": 0.5},
            {"params": others, "betas": (0.5, 0.6)},
        ]
        optimizer = kind(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        optimizer.register_step_post_hook(lambda *_: seen.append(kind))
        _train(model, optimizer, after=scheduler.step)

    optimized(ours, _OURS[kind])
    optimized(theirs, getattr(torch.optim, kind))
    assert len(seen) == 10
    _equal_models(ours, theirs)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_rate_that_is_a_tensor(where, device):
    ours, theirs = _model(device), _model(device)
    lr = torch.tensor(0.02, device=device if where == "device" else "cpu")
    optimizer = AdamW(ours.parameters(), lr=lr)
    _train(ours, optimizer, after=lambda: lr.mul_(0.5))
    other = torch.optim.AdamW(theirs.parameters(), lr=0.02)

    def halve():
        other.param_groups[0]["lr"] /= 2

    _train(theirs, other, after=halve)
    _equal_models(ours, theirs)


@_KINDS
def test_states_load_into_each_other(kind, device, tmp_path):
    """From PyTorch's, whose steps lie on the host, to this one, on to PyTorch's again."""
    theirs, other = _model(device), getattr(torch.optim, kind)
    start = other(theirs.parameters(), lr=0.01)
    _train(theirs, start, 3)
    torch.save(start.state_dict(), tmp_path / "state")
    ours = copy.deepcopy(theirs)
    optimizer = _OURS[kind](ours.parameters(), lr=0.5)
    optimizer.load_state_dict(torch.load(tmp_path / "state"))
    _train(ours, optimizer, 3)
    third = copy.deepcopy(ours)
    last = other(third.parameters())
    last.load_state_dict(optimizer.state_dict())
    _train(theirs, start, 3)
    _equal_models(ours, theirs)
    _train(third, last, 3)
    _train(theirs, start, 3)
    _equal_models(third, theirs)


def test_copies_and_pickles_go_on(device):
    model = _model(device)
    optimizer = AdamW(model.parameters(), max_norm=0.1, ema=EMA(model), clear_grads=True)
    _train(model, optimizer, 3)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert again.max_norm == 0.1 and again.clear_grads and again.ema.updates == 3
        assert_close(again.ema.averages, optimizer.ema.averages)
        before = again.param_groups[0]["params"][0].detach().clone()
        again.param_groups[0]["params"][0].grad = torch.ones_like(before)
        again.step()
        assert not torch.equal(again.param_groups[0]["params"][0], before)
        assert again.ema.updates == 4 and again.ema.attached


@pytest.mark.parametrize("max_norm", [1e-3, 0.05, 100.0])
def test_clipping_is_pytorch_s(max_norm, device):
    ours, theirs = _model(device), _model(device)
    optimizer, norms = AdamW(ours.parameters(), lr=0.01, max_norm=max_norm), []
    _train(ours, optimizer, after=lambda: norms.append(optimizer.grad_norm))
    other, expected = torch.optim.AdamW(theirs.parameters(), lr=0.01), []

    def clip():
        expected.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))

    _train(theirs, other, before=clip)
    _equal_models(ours, theirs)
    assert_close(norms, expected)


@pytest.mark.parametrize(
    "schedule", [(0.75, 1.0, 0.0, 0.9999), (0.5, 1.0, 0.1, 0.6), (2 / 3, 4.0, 0.3, 0.9)]
)
def test_averages_are_those_of_ema(schedule, device):
    """BatchNorm's, frozen ones and those without gradients too; a layer freezes on the way."""
    power, inv_gamma, least, most = schedule
    ours, theirs = _model(device), _model(device)
    mine, other = (EMA(m, power, most, least, inv_gamma) for m in (ours, theirs))
    optimizer = AdamW(ours.parameters(), lr=0.01, ema=mine)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for frozen in (False, True):
        for model in (ours, theirs):
            model["last"].requires_grad_(not frozen)
        _train(ours, optimizer, 4)
        _train(theirs, plain, 4, after=other.update)
    assert mine.updates == other.updates == 8 and mine.decay == other.decay
    assert_close(mine.averages, other.averages, **_CLOSE)
    state = copy.deepcopy(mine.state_dict())
    assert state["updates"] == 8 and type(state["updates"]) is int
    mine.load_state_dict({**state, "updates": 2})
    assert mine.updates == 2
    mine.updates = 8
    with mine.applied():
        assert_close([p.detach() for p in ours.parameters()], mine.averages)


def test_averages_follow_diffusion_policy_s_model(device):
    """Its EMAModel, written out in float64: decay, copies of BatchNorm and of frozen layers."""
    model = _model(device)
    ema = EMA(model)
    optimizer = AdamW(model.parameters(), lr=0.05, ema=ema)
    expected, count = [p.detach().double() for p in model.parameters()], 0
    copied = {id(p) for name in ("norm", "frozen") for p in model[name].parameters()}

    def follow():
        nonlocal count
        step = max(0, count - 1)
        decay = 0.0 if step <= 0 else max(0.0, min(1 - (1 + step) ** -0.75, 0.9999))
        for i, p in enumerate(model.parameters()):
            part = 0.0 if id(p) in copied else decay
            expected[i] = part * expected[i] + (1 - part) * p.detach().double()
        count += 1

    _train(model, optimizer, 12, after=follow)
    assert_close([x.double() for x in ema.averages], expected, rtol=1e-5, atol=1e-6)


def test_averages_have_one_owner(device):
    """As long as there is one; then another goes on, or ``update``, as if it were one run."""
    ours, theirs = _model(device), _model(device)
    ema, expected = EMA(ours), EMA(theirs)
    optimizer = AdamW(ours.parameters(), ema=ema)
    with pytest.raises(RuntimeError, match="EMA: update must be left to the optimizer"):
        ema.update()
    with pytest.raises(ValueError, match="EMA: averages must have one optimizer"):
        AdamW(ours.parameters(), ema=ema)
    for lr in (1e-3, 0.1):
        if lr == 0.1:
            optimizer = None
            gc.collect()
            optimizer = AdamW(ours.parameters(), lr=lr, ema=ema)
        _train(ours, optimizer, 4)
        plain = torch.optim.AdamW(theirs.parameters(), lr=lr)
        _train(theirs, plain, 4, after=expected.update)
    optimizer = None
    gc.collect()
    ema.update()
    expected.update()
    assert ema.updates == expected.updates == 9
    assert_close(ema.averages, expected.averages, **_CLOSE)


def test_16_bit_parameters_have_float32_averages(device):
    model = torch.nn.Linear(3, 4).to(device, torch.bfloat16)
    ema = EMA(model, max_decay=0.5, min_decay=0.5)
    optimizer = AdamW(model.parameters(), lr=0.1, ema=ema)
    old = [a.clone() for a in ema.averages]
    for i in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        part = 0.5 if i == 2 else 0.0
        now = [p.detach().float() for p in model.parameters()]
        old = [part * a + (1 - part) * p for a, p in zip(old, now, strict=True)]
        assert_close(ema.averages, old)


def test_cleared_gradients_keep_their_memory(device):
    ours, theirs = _model(device), _model(device)
    optimizer = AdamW(ours.parameters(), clear_grads=True)
    plain = torch.optim.AdamW(theirs.parameters())
    generator, places = torch.Generator().manual_seed(2), []
    for _ in range(3):
        x = torch.randn(6, 3, 8, generator=generator).to(device)
        for model, each in ((ours, optimizer), (theirs, plain)):
            _loss(model, x).backward()
            each.step()
        plain.zero_grad(set_to_none=False)
        grads = [p.grad for p in ours.parameters() if p.grad is not None]
        assert all((g == 0).all() for g in grads)
        places.append([g.data_ptr() for g in grads])
    assert places[0] == places[1] == places[2]
    _equal_models(ours, theirs)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_grad_scaler(max_norm, unscaled, device):
    """Scaled gradients, and a step that overflows: only the averages move."""
    ours, theirs = _model(device), _model(device)
    mine, other = EMA(ours), EMA(theirs)
    optimizer = AdamW(ours.parameters(), lr=0.01, max_norm=max_norm, ema=mine)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for model, each in ((ours, optimizer), (theirs, plain)):
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
        generator = torch.Generator().manual_seed(3)
        for i in range(5):
            each.zero_grad()
            loss = _loss(model, torch.randn(6, 3, 8, generator=generator).to(device))
            scaler.scale(loss * (float("inf") if i == 2 else 1.0)).backward()
            if unscaled or (each is plain and max_norm is not None):
                scaler.unscale_(each)
            if each is plain and max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(each)
            scaler.update()
            if each is plain:
                other.update()
    _equal_models(ours, theirs)
    assert_close(mine.averages, other.averages, **_CLOSE)
    assert optimizer.state[next(ours.parameters())]["step"] == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_scaled_gradients_in_16_bits(dtype, device):
    """Finite ones whose norm 16 bits do not hold: they are clipped, not taken for infinite."""
    if (dtype, device.type) == (torch.bfloat16, "cuda"):
        pytest.skip("PyTorch's GradScaler takes no gradients in bfloat16 on a GPU")
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(1000, dtype=dtype, device=device))
    other = torch.nn.Parameter(torch.zeros(5, device=device))
    x, y = torch.randn(1000, dtype=dtype, device=device) * 0.3, torch.randn(5, device=device)
    optimizer = AdamW([p, other], lr=0.01, max_norm=1.0, weight_decay=0.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**15)
    scaler.scale((p * x).float().sum() + (other * y).sum()).backward()
    assert p.grad.isfinite().all()
    scaler.step(optimizer)
    expected = torch.cat([x.double(), y.double()]).norm()
    assert_close(optimizer.grad_norm.double(), expected, rtol=2e-3, atol=0.0)
    assert p.abs().max() > 0.009


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    split=st.integers(0, 6),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_any_parameters(shapes, dtype, split, decay):
    """Empty ones and scalars, in one group or two, some without gradients."""
    generator = torch.Generator().manual_seed(4)
    new = lambda shape: torch.randn(shape, generator=generator, dtype=dtype)  # noqa: E731
    ours = [torch.nn.Parameter(new(shape)) for shape in shapes]
    theirs = copy.deepcopy(ours)
    optimizers = []
    for kind, params in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        parts = [part for part in (params[:split], params[split:]) if part]
        groups = [{"params": part, "lr": 0.1 / (i + 1)} for i, part in enumerate(parts)]
        optimizers.append(kind(groups, weight_decay=decay, eps=1e-3))
    for i in range(3):
        for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            x.grad = None if (i + k) % 3 == 0 else new(x.shape)
            y.grad = x.grad
        for optimizer in optimizers:
            optimizer.step()
    assert_close([p.detach() for p in ours], [p.detach() for p in theirs], **_CLOSE)


def test_averages_go_on_from_a_distributed_checkpoint(device):
    """PyTorch makes missing state by a step of zero gradients; as a run without a break."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint.state_dict")

    def started():
        model = torch.nn.Linear(3, 2).to(device)
        ema = EMA(model)
        return model, AdamW(model.parameters(), lr=0.1, max_norm=1.0, ema=ema), ema

    def train(model, optimizer, seeds):
        for seed in seeds:
            optimizer.zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).to(device)
            model(x).square().sum().backward()
            optimizer.step()

    model, optimizer, ema = started()
    checkpoint.get_optimizer_state_dict(model, optimizer)  # before the first step
    assert ema.updates == 0
    train(model, optimizer, range(5))
    parts = model.state_dict(), ema.state_dict()
    parts = copy.deepcopy((*parts, checkpoint.get_optimizer_state_dict(model, optimizer)))
    again, resumed, averages = started()
    again.load_state_dict(parts[0])
    averages.load_state_dict(parts[1])
    checkpoint.set_optimizer_state_dict(again, resumed, parts[2])
    assert averages.updates == 5
    assert_close(averages.averages, ema.averages, rtol=0, atol=0)
    train(model, optimizer, range(5, 8))
    train(again, resumed, range(5, 8))
    assert averages.updates == ema.updates == 8
    assert_close(averages.averages, ema.averages)


def test_a_first_rate_of_zero_is_an_update(device):
    """As a schedule that warms up begins; the averages are those of PyTorch's AdamW and EMA."""
    found = []
    for kind in (AdamW, torch.optim.AdamW):
        model = _model(device)
        ema = EMA(model)
        own = {"ema": ema} if kind is AdamW else {}
        optimizer = kind(model.parameters(), lr=0.05, **own)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, i / 3))
        after = [warm_up.step] if own else [warm_up.step, ema.update]
        _train(model, optimizer, after=lambda after=after: [do() for do in after])
        found.append((ema.updates, ema.averages))
    assert found[0][0] == found[1][0] == 5
    assert_close(found[0][1], found[1][1], **_CLOSE)


@pytest.mark.parametrize("where", ["argument", "group", "state"])
def test_adam_decouples_the_weight_decay_as_pytorch_s(where, device):
    found = []
    for kind in (Adam, torch.optim.Adam):
        model = _model(device)
        options = {"weight_decay": 0.5, "decoupled_weight_decay": True}
        if where == "argument":
            optimizer = kind(model.parameters(), lr=0.1, **options)
        elif where == "group":
            optimizer = kind([{"params": model.parameters(), **options}], lr=0.1)
        else:
            optimizer = kind(model.parameters())
            given = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
            optimizer.load_state_dict(given.state_dict())
        _train(model, optimizer)
        found.append(model)
    _equal_models(*found)
    with pytest.raises(TypeError, match="unexpected keyword argument 'decoupled_weight_decay'"):
        AdamW(model.parameters(), decoupled_weight_decay=True)


def test_groups_are_the_caller_s():
    """A rate that is set in them counts, as with PyTorch's; a set has no order."""
    for kind in (AdamW, torch.optim.AdamW):
        p = torch.nn.Parameter(torch.zeros(1))
        group = {"params": (p for p in [p]), "lr": 1e-3}
        optimizer = kind([group])
        group["lr"] = 1.0
        assert optimizer.param_groups[0] is group and group["params"] == [p]
        p.grad = torch.ones(1)
        optimizer.step()
        assert_close(p.detach(), -torch.ones(1))
        with pytest.raises(TypeError, match="ordered collections"):
            kind([{"params": {p}}])


def test_a_compiled_step_clips_and_averages(device):
    """As PyTorch's optimizer, clipping and EMA, called one by one; the norm can be read."""
    ours, theirs = _model(device), _model(device)
    mine, other = EMA(ours), EMA(theirs)
    optimizer = AdamW(ours.parameters(), lr=0.02, max_norm=0.05, ema=mine)
    plain, norms, expected = torch.optim.AdamW(theirs.parameters(), lr=0.02), [], []
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    _train(ours, optimizer, after=lambda: norms.append(optimizer.grad_norm))

    def clip():
        expected.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05))

    _train(theirs, plain, before=clip, after=other.update)
    _equal_models(ours, theirs)
    assert_close(norms, expected)
    assert mine.updates == 5
    assert_close(mine.averages, other.averages, **_CLOSE)


def test_a_closure_is_called(device):
    model = _model(device)
    optimizer, x = AdamW(model.parameters(), lr=0.01), torch.randn(6, 3, 8, device=device)

    def closure():
        optimizer.zero_grad()
        loss = _loss(model, x)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_what_is_refused():
    p = torch.nn.Parameter(torch.zeros(3))
    for options, message in (
        ({"amsgrad": True}, "AdamW: amsgrad must be False"),
        ({"differentiable": True}, "AdamW: differentiable must be False"),
        ({"max_norm": 0.0}, "AdamW: max_norm must be above 0, got 0.0"),
        ({"max_norm": float("nan")}, "AdamW: max_norm must be above 0, got nan"),
        ({"max_norm": "1"}, "AdamW: max_norm must be a number, got '1'"),
        ({"ema": p}, "AdamW: ema must be a dpa.training.EMA"),
        ({"lr": -1.0}, "Invalid learning rate"),
    ):
        with pytest.raises(ValueError, match=message):
            AdamW([p], **options)
    with pytest.raises(ValueError, match="Adam: params must differ, got one twice"):
        Adam([p, p])
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        AdamW([{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match="AdamW: amsgrad must be False"):
        AdamW([{"params": [p], "amsgrad": True}])
    with pytest.raises(ValueError, match="AdamW: weight_decay must be a number, got None"):
        AdamW([{"params": [p], "weight_decay": None}])
    optimizer = AdamW([p])
    with pytest.raises(TypeError, match="AdamW: param_group must be a dict, got <class 'list'>"):
        optimizer.add_param_group([p])
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="AdamW: amsgrad must be False"):
        optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = False
    p.grad = torch.zeros(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"gradients must be dense, got torch\.sparse_coo"):
        optimizer.step()
    with pytest.raises(ValueError, match="AdamW: the state must have no amsgrad"):
        optimizer.load_state_dict(torch.optim.AdamW([p], amsgrad=True).state_dict())
    whole = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    whole.grad = torch.zeros_like(whole)
    with pytest.raises(RuntimeError, match="dpa::adamw_ema_: params must be float64, float32"):
        AdamW([whole]).step()


def test_one_gradient_of_two_parameters_is_not_cleared_between_them(device):
    parameters = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    parameters[0].grad = parameters[1].grad = torch.ones(3, device=device)
    AdamW(parameters, lr=0.1).step()
    assert torch.equal(*parameters) and (parameters[0] != 1).all()
    empty = [torch.nn.Parameter(torch.ones(0, 2, device=device)) for _ in range(2)]
    for each in empty:  # which all lie nowhere
        each.grad = torch.zeros_like(each)
    AdamW(empty, lr=0.1, clear_grads=True).step()
    parameters[1].grad = parameters[0].grad.detach()  # another tensor of the same memory
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gradients must differ with clear_grads"):
            AdamW(parameters, lr=0.1, clear_grads=True).step()
        parameters[1].grad = parameters[0].grad


def test_lerobot_makes_and_saves_it(tmp_path):
    """A config of LeRobot's registry builds it, and its checkpoints restore it."""
    optimizers = pytest.importorskip("lerobot.optim.optimizers")

    class Config(optimizers.AdamWConfig):
        def build(self, params):
            return AdamW(params, self.lr, self.betas, self.eps, self.weight_decay)

    ours, theirs = _model(), _model()
    mine = Config(lr=0.01).build(ours.parameters())
    _train(ours, mine, 3)
    optimizers.save_optimizer_state(mine, tmp_path)
    again = copy.deepcopy(ours)
    restored = optimizers.load_optimizer_state(Config().build(again.parameters()), tmp_path)
    for model, each in ((ours, mine), (again, restored)):
        _train(model, each, 3)
        assert each.state[next(model.parameters())]["step"] == 6
    _equal_models(again, ours, rtol=0, atol=0)
    plain = optimizers.AdamWConfig(lr=0.01).build(theirs.parameters())
    _train(theirs, plain, 3)
    _train(theirs, plain, 3)
    _equal_models(ours, theirs)


def test_a_captured_step_counts_on(cuda):
    """Every replay: another rate, norm, scale and decay; equal to the steps one by one."""

    def train(run_of):
        model = _model(cuda)
        model["norm"].eval()
        ema, lr = EMA(model), torch.tensor(0.02, device=cuda)
        optimizer = AdamW(model.parameters(), lr=lr, max_norm=0.05, ema=ema)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)

        def step(x):
            optimizer.zero_grad(set_to_none=True)
            loss = _loss(model, x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach(), optimizer.grad_norm

        run, generator, seen = run_of(step), torch.Generator().manual_seed(5), []
        for i in range(9):
            x = torch.randn(6, 3, 8, generator=generator).to(cuda)
            seen.append(run(x.fill_(torch.inf) if i == 6 else x))
            lr.mul_(0.8)
        return [p.detach() for p in model.parameters()], ema, seen[:6]

    weights, ema, seen = train(lambda step: step)
    graphed, graphed_ema, graphed_seen = train(GraphedStep)
    assert_close(graphed, weights, **_CLOSE)
    assert_close(graphed_ema.averages, ema.averages, **_CLOSE)
    assert graphed_ema.updates == ema.updates == 9
    assert_close(graphed_seen, seen, rtol=1e-4, atol=1e-5)


def test_a_step_of_a_graph_has_few_kernels(cuda):
    """Two for all parameters, one for the number of updates."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8))).to(cuda)
    optimizer = AdamW(model.parameters(), ema=EMA(model))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 3, kernels


def test_it_trains_as_it_does_with_plain_parts(device):
    """A small network, clipped and averaged: the losses go down together."""

    def losses(fused):
        torch.manual_seed(6)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 32), torch.nn.Mish(), torch.nn.Linear(32, 2)
        ).to(device)
        ema = EMA(model)
        options = {"lr": 2e-2, "weight_decay": 1e-4}
        if fused:
            optimizer = AdamW(model.parameters(), **options, max_norm=0.5, ema=ema)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **options)
        found = []
        for _ in range(60):
            x = torch.randn(256, 4, device=device)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x[:, :2] * x[:, 2:])
            loss.backward()
            if not fused:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if not fused:
                ema.update()
            found.append(loss.item())
        return torch.tensor(found), ema.averages

    (ours, mine), (theirs, other) = losses(True), losses(False)
    assert ours[-10:].mean() < 0.5 * ours[:10].mean()
    assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert_close(mine, other, rtol=1e-3, atol=1e-4)
