"""Inference ops, one tensor of a valid call corrupted in every way: an error that names the op.

Where the device has no kernel for an op its rule of shapes, which all devices share, is asked.
"""

import pytest
import torch
from proofs import Sample, call
from torch.utils._pytree import tree_leaves

import dpa
from dpa.diagnostics.info import op_names

# action_dim, kernel_size, n_groups, diffusion_step_embed_dim, global_cond_dim, scale, down_dims
CONFIG = [2, 3, 8, 16, 7, 1, 16, 32]
F32 = torch.float32


def _samples(device):
    new = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
    unet = dpa.nn.ConditionalUnet1D(
        2,
        global_cond_dim=7,
        diffusion_step_embed_dim=16,
        down_dims=(16, 32),
        kernel_size=3,
        cond_predict_scale=True,
    ).to(device)
    named = {name: p.detach() for name, p in unet.named_parameters()}
    weights = [named[name] for name in torch.ops.dpa.unet1d_weight_names(CONFIG)]
    packed = torch.ops.dpa.unet1d_pack(weights, CONFIG, F32)
    sample, cond, table, noise = new(2, 4, 2), new(2, 7), new(3, 6), new(3, 2, 4, 2)
    mask = sample.bool()
    step, loop = (sample, new(2), cond, packed, CONFIG), (sample, new(3), cond, packed, CONFIG)
    yield "unet1d", Sample((*step, F32, new(2, 4, 16)))
    yield "unet1d_by_name", Sample((*step, "float32"))
    yield "unet1d_pack", Sample((weights, CONFIG, F32))
    yield (
        "diffusion_sample",
        Sample((*loop, F32, table, 1.0, noise, sample, mask, new(3, 2, 4, 16))),
    )
    yield "diffusion_sample_by_name", Sample((*loop, "float32", table, 1.0, noise))
    one = (sample[:1], new(3), cond[:1], packed, CONFIG, F32, table, 1.0, noise[:, :1])
    yield "diffusion_sample_clocks", Sample(one)
    film = torch.ops.dpa.unet1d_film(
        *(x.to("meta") for x in (new(2), cond[:1], packed)), CONFIG, F32
    )
    yield "unet1d_film", Sample((new(2), cond[:1], packed, CONFIG, F32))
    yield "unet1d_step_film", Sample((new(3), packed, CONFIG, F32))
    rest = (packed, CONFIG, F32, table, 1.0, noise[:, :1], sample[:1], mask[:1])
    step_film = new(3, film.shape[1])
    yield "diffusion_sample_on_film", Sample((sample[:1], step_film, cond[:1], *rest))
    yield "unet1d_on_film", Sample((sample, new(*film.shape), packed, CONFIG, F32))
    batch_dtype = torch.bfloat16
    batch = torch.ops.dpa.unet1d_batch_pack([w.to("meta") for w in weights], CONFIG, batch_dtype)
    kept = torch.randn(batch.shape, device=device).mul_(0.1).to(batch_dtype)
    yield "unet1d_batch_pack", Sample((weights, CONFIG, batch_dtype))
    yield "unet1d_batch", Sample((sample, new(2), cond, weights, kept, CONFIG, new(2, 4, 16)))
    yield "unet1d_batch_film", Sample((new(3), cond, weights, kept, CONFIG))
    rows = torch.zeros(2, film.shape[1], dtype=batch_dtype, device=device)
    on_film = (sample, rows[0], rows, weights, kept, CONFIG, new(2, 4, 16))
    yield "unet1d_batch_on_film", Sample(on_film)
    layer, row = [3, 0, 0, -1, 8, 3, 1, 1, 0, 0, 1, 0], new(8)
    parameters = [new(8, 3, 3, 3), row, row + 1]
    yield "image_encoder_pack", Sample((parameters, layer, F32))
    size = torch.ops.dpa.image_encoder_pack([x.to("meta") for x in parameters], layer, F32)
    kept = torch.zeros(size.shape, dtype=torch.uint8, device=device)
    yield "image_encoder", Sample(([new(2, 3, 6, 6)], [kept], layer, [0.0], F32))
    yield "normal_draws", Sample((new(2, 3), 1, 2))
    yield "values_differ", Sample(([row, row[::2]], torch.zeros(48, dtype=torch.uint8).to(device)))
    states, position = new(4, 2, 4, 2), torch.zeros(1, dtype=torch.int64, device=device)
    yield "parallel_window", Sample((states, table, position, 2))


_IN_LAYERS = ("unet1d_batch", "unet1d_batch_film", "unet1d_batch_on_film")

# What another value of is no mistake: by op and place among its tensors.
_VALID = {
    ("image_encoder", 0): {"length"},
    ("normal_draws", 0): {"rank", "length", "double"},
    ("unet1d_batch", 0): {"double"},
    ("unet1d_batch", 1): {"double", "integer"},
    ("unet1d_batch", 2): {"double"},
    ("unet1d_batch_film", 0): {"length", "double", "integer"},
    ("unet1d_batch_film", 1): {"length", "double"},
    ("unet1d_batch_on_film", 0): {"double"},
    ("unet1d_film", 0): {"length"},
    ("unet1d_step_film", 0): {"length"},
    ("parallel_window", 0): {"length", "rank"},
    ("parallel_window", 1): {"length"},
    ("parallel_window", 2): {"rank"},
}
NAMES = [name for name, _ in _samples(torch.device("meta"))]


def _has_kernel(name, device):
    if name == "diffusion_sample_clocks":
        return False  # of networks larger than this one alone
    if device.type == "cuda" and name in ("image_encoder", *_IN_LAYERS):
        major, _ = torch.cuda.get_device_capability(device)
        return major >= 8 if name in _IN_LAYERS else major == 9
    key = {"cpu": "CPU", "cuda": "CUDA"}[device.type]
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"dpa::{name}", key)


def _corrupted(tensor):
    yield "rank", tensor[(None,) * 3]
    yield "length", torch.cat([tensor, tensor]) if tensor.dim() else tensor.expand(2)
    yield "complex", tensor.to(torch.complex64)
    yield "integer", tensor.to(torch.int8)
    yield "double", tensor.double()
    yield "sparse", tensor.to_sparse() if not tensor.is_meta else tensor.to(torch.complex64)


@pytest.mark.parametrize("name", NAMES)
def test_a_corrupted_tensor_raises(device, name):
    where = device if _has_kernel(name, device) else torch.device("meta")
    sample = dict(_samples(where))[name]
    op = getattr(torch.ops.dpa, name)
    call(op, sample)  # it is valid
    tensors = [x for x in tree_leaves(sample.args) if isinstance(x, torch.Tensor)]
    for place, victim in enumerate(tensors):
        for how, wrong in _corrupted(victim):
            if how in _VALID.get((name, place), ()):
                continue
            corrupted = sample.map(lambda x: wrong if x is victim else x)  # noqa: B023
            with pytest.raises((RuntimeError, NotImplementedError), match="dpa::"):
                call(op, corrupted)


def _kinds_that_no_op_takes(plain):
    yield torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)
    yield plain.to_sparse()
    yield plain[0].to_sparse_csr()
    for layout in (torch.strided, torch.jagged):
        yield torch.nested.nested_tensor(list(plain), layout=layout)


def _argument(argument, tensor):
    """A value of the argument's type."""
    kind = str(argument.type)
    values = {"List[Tensor]": [tensor], "int": 1, "float": 1.0, "bool": True, "str": "float32"}
    values |= {"List[int]": CONFIG, "List[bool]": [True] * (argument.N or 1), "List[float]": [1.0]}
    return tensor if kind in ("Tensor", "Optional[Tensor]") else values.get(kind)


@pytest.mark.parametrize("name", op_names())
def test_quantised_sparse_and_nested_tensors_raise(device, name):
    """Each tensor of every registered op in turn, out variants and inner ops too."""
    packet = getattr(torch.ops.dpa, name.removeprefix("dpa::"))
    plain = torch.randn(2, 3, 4, device=device)
    for op in (getattr(packet, overload) for overload in packet.overloads()):
        arguments = op._schema.arguments
        for victim in (a for a in arguments if "Tensor" in str(a.type)):
            for wrong in _kinds_that_no_op_takes(plain):
                given = {
                    a.name: _argument(a, wrong if a.name == victim.name else plain)
                    for a in arguments
                }
                with pytest.raises(NotImplementedError, match=name.replace("::", "(::|.)")):
                    op(**given)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_begin_inside_a_vector(device, name):
    """One element into their storage, which is not where memory is aligned for vectors."""
    if not _has_kernel(name, device):
        pytest.skip("no kernel for this device")

    def moved(x):
        storage = x.new_zeros(x.numel() + 1)
        return storage[1:].view(x.shape).copy_(x)

    sample, op = dict(_samples(device))[name], getattr(torch.ops.dpa, name)
    torch.manual_seed(1)  # of normal_draws
    expected = tree_leaves(call(op, sample))
    torch.manual_seed(1)
    for got, wanted in zip(tree_leaves(call(op, sample.map(moved))), expected, strict=True):
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())  # all NaN are one answer
