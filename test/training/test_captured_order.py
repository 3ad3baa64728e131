"""The orders of a captured pass: the bits of a called one, whatever else reads gradients."""

import contextlib
import ctypes

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dpa
from dpa.library.capture import leaving_failed


def _unet(seed=0, device="cuda"):
    """In TF32 the lower level's blocks read their weights in place."""
    torch.manual_seed(seed)
    with torch.device(device):
        return dpa.nn.ConditionalUnet1D(
            2,
            global_cond_dim=3,
            diffusion_step_embed_dim=64,
            down_dims=(128, 512),
            kernel_size=5,
            cond_predict_scale=True,
        )


class _Weights(TorchDispatchMode):
    """Records the weights of convolutions: those that are listed, and those that ops read."""

    def __init__(self):
        super().__init__()
        self.listed, self.read = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "pack_ahead":
            self.listed += [weight for weight in args[0] if weight.dim() == 3]
        elif name == "residual_block1d_forward":
            self.read += [args[i] for i in (1, 5, 9) if args[i] is not None]
        elif name == "conv1d_forward":
            self.read.append(args[1])
        return func(*args, **(kwargs or {}))


def test_weights_are_listed_in_the_order_in_which_a_forward_reads_them(monkeypatch):
    unet = _unet(device="cpu")
    sample, cond = torch.randn(2, 16, 2), torch.randn(2, 3)
    with _Weights() as weights:
        unet(sample, 1, None, cond)
        assert not weights.listed
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        unet._pack_ahead(sample)
    assert all(one is other for one, other in zip(weights.listed, weights.read, strict=True))


@pytest.mark.parametrize(
    ("weights", "counts", "message"),
    [
        ([(4, 4, 3)], [2], r"counts must add up to the 1 weights, got 2"),
        ([(4, 4, 3)], [0, 1], r"counts must be at least 1 each, got 0"),
        ([(4,)], [1], r"weights must have 2 or 3 dimensions, got shape \[4\]"),
        (
            [(4, 4), "double"],
            [2],
            r"weights must have the dtype of the first \(Float\), got Double",
        ),
        (["integer"], [1], r"weights must "),
        ([(4, 4, 3)], [1, (2, [8, 8])], r"lengths must be 1, one a layer, or none, got 2"),
        ([(4, 4, 3)], [1, (-1, [])], r"batch must not be negative, got -1"),
    ],
)
def test_what_pack_ahead_refuses(device, weights, counts, message):
    kinds = {"double": ((4, 4), torch.float64), "integer": ((4, 4), torch.int8)}
    sizes = [kinds.get(w, (w, torch.float32)) for w in weights]
    weights = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes]
    *counts, sizes = counts if isinstance(counts[-1], tuple) else [*counts, ()]
    with pytest.raises(RuntimeError, match="^dpa::pack_ahead: " + message):
        torch.ops.dpa.pack_ahead(weights, counts, torch.bfloat16, *sizes)


@pytest.fixture(params=[True, False], ids=["bf16", "tf32"])
def predict(request, monkeypatch, cuda):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.manual_seed(1)
    new = lambda *shape: torch.randn(48, *shape, device="cuda")  # noqa: E731
    batch = new(16, 2), torch.randint(50, (48,), device="cuda"), None, new(3)

    def run(unet, sample=None):
        with torch.autocast("cuda", torch.bfloat16, enabled=request.param):
            return unet(batch[0] if sample is None else sample, *batch[1:]).float()

    return run


def _called_and_captured(work, results):
    """What a pass gives when it is called, and in three replays over poisoned memory."""
    for _ in range(2):
        work()
    called = [x.clone() for x in results()]
    graph = torch.cuda.CUDAGraph()
    with leaving_failed(torch.device("cuda"), graph), torch.cuda.graph(graph):
        work()
    captured = results()
    for _ in range(3):
        for x in captured:
            x.detach().fill_(float("nan"))
        graph.replay()
        for i, (one, other) in enumerate(zip(captured, called, strict=True)):
            assert torch.equal(one, other), f"result {i} of {len(called)} differs"


def _trains(predict, work, *unets):
    parameters = [p for unet in unets for p in unet.parameters() if p.requires_grad]

    def anew():
        for p in parameters:
            p.grad = None
        work()

    _called_and_captured(anew, lambda: [p.grad for p in parameters if p.grad is not None])


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_a_plain_pass(predict, deterministic):
    """PyTorch's deterministic mode fills new memory, on the stream that it is taken from."""
    unet = _unet()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        _trains(predict, lambda: predict(unet).square().mean().backward(), unet)
    finally:
        torch.use_deterministic_algorithms(False)


def _edges(graph):
    """How many dependencies there are between what was captured."""
    count, driver = ctypes.c_size_t(), ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    assert driver.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(count)) == 0
    return count.value


def test_every_capture_has_the_same_branches(predict):
    """Whatever streams PyTorch has given out by then: the capture's own is one of its 32."""
    unet, found = _unet(), set()

    def work():
        unet.zero_grad()
        predict(unet).square().mean().backward()

    work()
    for _ in range(12):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with leaving_failed(torch.device("cuda"), graph), torch.cuda.graph(graph):
            work()
        found.add(_edges(graph))
    assert len(found) == 1 and found.pop() > 100, found


@pytest.mark.parametrize("which", ["all", "one"])
def test_layers_that_read_nothing_of_what_was_packed(predict, which, monkeypatch):
    """PyTorch's own in all places, and a user's in one: the capture has to end all the same."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # PyTorch's own layers
    unet = _unet()
    if which == "all":
        unet = dpa.reference.plain(unet)
    else:
        halving = unet.down_modules[0][2]
        halving.conv = torch.nn.Conv1d(128, 128, 3, 2, 1, device="cuda")
    outputs = [None]
    with torch.no_grad():
        _called_and_captured(lambda: outputs.__setitem__(0, predict(unet)), lambda: outputs)
    _trains(predict, lambda: predict(unet).square().mean().backward(), unet)


def test_frozen_parameters(predict):
    unet = _unet()
    for p in list(unet.parameters())[::3]:
        p.requires_grad = False
    _trains(predict, lambda: predict(unet).square().mean().backward(), unet)


def _double(parameter):
    parameter.grad.mul_(2)


@pytest.mark.parametrize("kind", ["gradient", "accumulated", "output"])
def test_hooks(predict, kind):
    unet = _unet()
    seen = {}
    for p in list(unet.parameters())[::5]:
        if kind == "gradient":
            p.register_hook(lambda grad: grad * 2)
        elif kind == "accumulated":
            p.register_post_accumulate_grad_hook(_double)

    def look(_):
        for p in unet.parameters():
            if p.grad is not None:
                seen[p] = p.grad * 2

    def work():
        seen.clear()
        out = predict(unet)
        if kind == "output":
            unet.down_modules[0][2].conv.weight.register_hook(look)
        out.square().mean().backward()

    _trains(predict, work, unet)
    assert kind != "output" or seen


def test_weights_that_the_loss_reads_too(predict):
    unet = _unet()
    weights = [p for p in unet.parameters() if p.dim() == 3]

    def work():
        (predict(unet).square().mean() + sum(w.square().sum() for w in weights)).backward()

    _trains(predict, work, unet)


def test_weights_that_are_roots(predict):
    unet = _unet()
    weight = unet.mid_modules[0].blocks[0].block[0].weight

    def work():
        loss = predict(unet).square().mean()
        torch.autograd.backward([loss, weight], [torch.ones_like(loss), torch.ones_like(weight)])

    with contextlib.suppress(RuntimeError):  # the engine does not say so: such a capture fails
        _trains(predict, work, unet)


def test_gradients_that_add_up(predict):
    unet = _unet()

    def work():
        predict(unet).square().mean().backward()
        predict(unet).abs().mean().backward()

    _trains(predict, work, unet)


def test_a_second_backward_of_one_pass(predict):
    unet = _unet()

    def work():
        loss = predict(unet).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    _trains(predict, work, unet)


def test_create_graph(predict):
    unet = _unet()
    weights = [p for p in unet.parameters() if p.dim() == 1][:4]

    def work():
        grads = torch.autograd.grad(predict(unet).square().mean(), weights, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()

    _trains(predict, work, unet)


def test_gradients_that_are_returned(predict):
    unet = _unet()
    sample = torch.randn(48, 16, 2, device="cuda", requires_grad=True)
    grads = []

    def work():
        wanted = [sample, *unet.parameters()]
        grads[:] = torch.autograd.grad(predict(unet, sample).square().mean(), wanted)

    _called_and_captured(work, lambda: grads)


class _Same(torch.autograd.Function):
    """A function in Python, of which nobody knows what it reads."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("returned", [True, False])
def test_norms_between_functions_in_python(cuda, returned):
    """What autograd.grad returns nobody has read before, whoever is in the graph."""
    torch.manual_seed(0)
    images = torch.randn(70, 64, 11, 11, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(64, device=cuda, requires_grad=True) for _ in range(12)]
    grads = []

    def work():
        x = images.contiguous(memory_format=torch.channels_last)
        for weight, bias in zip(weights[::2], weights[1::2], strict=True):
            x = _Same.apply(torch.ops.dpa.group_norm_act(x, 4, weight, bias, 1e-5, x))
        loss = x.float().square().mean()
        if returned:
            grads[:] = torch.autograd.grad(loss, [images, *weights])
            return
        for leaf in (images, *weights):
            leaf.grad = None
        loss.backward()
        grads[:] = [leaf.grad for leaf in (images, *weights)]

    _called_and_captured(work, lambda: grads)


def test_saved_tensor_hooks(predict):
    unet = _unet()

    def work():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            out = predict(unet)
        out.square().mean().backward()

    _trains(predict, work, unet)


def test_two_networks_in_one_graph(predict):
    first, second = _unet(0), _unet(1)

    def work():
        predict(second, predict(first)).square().mean().backward()

    _trains(predict, work, first, second)


def test_one_network_twice(predict):
    unet = _unet()
    _trains(predict, lambda: predict(unet, predict(unet)).square().mean().backward(), unet)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(predict, reentrant):
    unet = _unet()
    sample = torch.randn(48, 16, 2, device="cuda", requires_grad=True)

    def work():
        options = {"use_reentrant": reentrant, "preserve_rng_state": False}
        out = checkpoint(lambda x: predict(unet, x), sample, **options)
        out.square().mean().backward()

    _trains(predict, work, unet)


def test_a_python_function_that_reads_gradients(predict):
    unet = _unet()
    weight = unet.up_modules[0][0].blocks[0].block[0].weight
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen[:] = [] if weight.grad is None else [weight.grad * 2]
            return grad

    def run():
        unet.zero_grad(set_to_none=True)
        sample = torch.ones(48, 16, 2, device="cuda", requires_grad=True)
        predict(unet, Look.apply(sample)).square().mean().backward()

    _called_and_captured(run, lambda: seen)
    assert seen


def test_a_backward_that_raises_leaves_the_next_capture_right(predict):
    unet = _unet()

    def stop(grads):
        raise RuntimeError("stop")

    def failing():
        out = predict(unet)
        node = out.grad_fn
        for _ in range(12):  # somewhere inside
            node = next(n for n, _ in node.next_functions if n is not None)
        node.register_prehook(stop)
        out.square().mean().backward()

    graph, device = torch.cuda.CUDAGraph(), torch.device("cuda")
    with pytest.raises(RuntimeError), leaving_failed(device, graph), torch.cuda.graph(graph):
        failing()
    target = torch.zeros(48, 16, 2, device=device)
    _trains(predict, lambda: F.l1_loss(predict(unet), target).backward(), unet)
