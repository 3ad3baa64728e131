"""The op on packed weights, unet1d_batch: its shapes, and what it refuses."""

import pytest
import torch
from architectures import CONFIGS
from hypothesis import assume, given
from hypothesis import strategies as st
from packed_nets import ERROR
from proofs import poisoned_memory
from strategies import Draw
from test_properties import cases

import dpa
from dpa.nn import ConditionalUnet1D
from dpa.packed.config import unet_config

CONFIG = [2, 5, 8, 32, 20, 1, 64, 128]


def _meta(dtype=torch.float32):
    with torch.device("meta"):
        net = ConditionalUnet1D(**CONFIGS["film_scale"][0]).to(dtype)
    names = torch.ops.dpa.unet1d_weight_names(CONFIG)
    parameters = dict(net.named_parameters())
    return [parameters[name].detach() for name in names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_without_a_gpu(dtype):
    parameters = _meta()
    packed = torch.ops.dpa.unet1d_batch_pack(parameters, CONFIG, dtype)
    assert packed.dtype == dtype and packed.dim() == 1
    new = lambda *size: torch.empty(size, device="meta")  # noqa: E731
    out = torch.ops.dpa.unet1d_batch(new(3, 8, 2), new(3), new(3, 20), parameters, packed, CONFIG)
    assert out.shape == (3, 8, 2) and out.dtype == dtype
    given = new(3, 8, 2), new(3), new(3, 20), parameters, packed, CONFIG
    assert torch.ops.dpa.unet1d_batch(*given, new(3, 8, CONFIG[6])).shape == (3, 8, 2)
    film, conds = torch.ops.dpa.unet1d_batch_film(new(5), new(3, 20), parameters, packed, CONFIG)
    assert len(film) == 5 and len(conds) == 3 and film.dtype == dtype
    on_film = torch.ops.dpa.unet1d_batch_on_film
    out = on_film(new(3, 8, 2), film[0], conds, parameters, packed, CONFIG)
    assert out.shape == (3, 8, 2) and out.dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"^dpa::unet1d_batch_on_film: step must have shape"):
        on_film(new(3, 8, 2), film[0, 1:], conds, parameters, packed, CONFIG)
    with pytest.raises(RuntimeError, match=r"^dpa::unet1d_batch_on_film: cond must have shape"):
        on_film(new(3, 8, 2), film[0], conds[:2], parameters, packed, CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": (3, 8, 5)}, r"sample must have shape \(B, T, 2\), got \[3, 8, 5\]"),
        ({"sample": (3, 7, 2)}, "sample must have a horizon that is a positive multiple of 2"),
        ({"timesteps": (2,)}, r"timesteps must have shape \(1\) or \(B\), got \[2\]"),
        ({"global_cond": (3, 4)}, r"global_cond must have shape \(B, 20\), got \[3, 4\]"),
        ({"local": (3, 8, 4)}, r"local must have shape \(B, T, \d+\), got \[3, 8, 4\]"),
        ({"packed": (7,)}, r"packed must be the \d+ elements that unet1d_batch_pack makes"),
    ],
    ids=str,
)
def test_rejected(change, message):
    parameters = _meta()
    sizes = {"sample": (3, 8, 2), "timesteps": (3,), "global_cond": (3, 20)}
    packed = torch.ops.dpa.unet1d_batch_pack(parameters, CONFIG, torch.bfloat16)
    sizes = {"sample": (3, 8, 2), "timesteps": (3,), "global_cond": (3, 20)}
    sizes = {**sizes, "packed": packed.shape, **change}
    dtypes = {"packed": torch.bfloat16}
    args = {
        k: torch.empty(v, device="meta", dtype=dtypes.get(k, torch.float32))
        for k, v in sizes.items()
    }
    with pytest.raises(RuntimeError, match=f"^dpa::unet1d_batch: {message}"):
        torch.ops.dpa.unet1d_batch(
            args["sample"],
            args["timesteps"],
            args["global_cond"],
            parameters,
            args["packed"],
            CONFIG,
            args.get("local"),
        )


def test_rejected_parameters():
    pack = torch.ops.dpa.unet1d_batch_pack
    parameters = _meta()
    head = "^dpa::unet1d_batch_pack: "
    message = "dtype must be float32, float16 or bfloat16, got Double"
    with pytest.raises(RuntimeError, match=head + message):
        pack(parameters, CONFIG, torch.float64)
    with pytest.raises(
        RuntimeError, match=head + "config must have a kernel_size of at most 9 for"
    ):
        with torch.device("meta"):
            net = ConditionalUnet1D(**CONFIGS["film_scale"][0] | {"kernel_size": 11})
        named, wide = dict(net.named_parameters()), [2, 11, *CONFIG[2:]]
        longer = [named[name].detach() for name in torch.ops.dpa.unet1d_weight_names(wide)]
        pack(longer, wide, torch.float32)
    out, seen = pack(parameters, CONFIG, torch.float32), torch.empty(1, device="meta")
    with pytest.raises(RuntimeError, match=head + "seen must be left out for weights in float32"):
        pack.out(parameters, CONFIG, torch.float32, seen, out=out)
    with pytest.raises(RuntimeError, match=head + "parameters must be the .* tensors"):
        pack(parameters[1:], CONFIG, torch.bfloat16)
    with pytest.raises(RuntimeError, match=head + "config must have down_dims"):
        pack(parameters, [2, 5, 4, 32, 20, 1, 64, 132], torch.bfloat16)
    with pytest.raises(RuntimeError, match=head + "config must have Mish behind the norms, got"):
        pack(parameters, [*CONFIG[:5], CONFIG[5] + 2, *CONFIG[6:]], torch.bfloat16)
    with pytest.raises(RuntimeError, match=head + "parameters must be float32 or BFloat16"):
        pack(_meta(torch.float16), CONFIG, torch.bfloat16)
    parameters[3] = torch.empty(5, device="meta")
    with pytest.raises(RuntimeError, match=head + "diffusion_step_encoder.* must have shape"):
        pack(parameters, CONFIG, torch.bfloat16)


def test_gradients_are_refused():
    parameters = [p.requires_grad_() for p in _meta()]
    packed = torch.ops.dpa.unet1d_batch_pack(parameters, CONFIG, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"not implemented|derivative"):
        packed.sum().backward()


def _drawn_network(data, device):
    """A network of any sizes that the op takes, and the levels of its horizon."""
    pick = lambda strategy, label: data.draw(strategy, label=label)  # noqa: E731
    groups = pick(st.sampled_from([1, 2, 4, 8]), "groups")
    widths = st.integers(1, 12).map(lambda n: 8 * n)
    dims = pick(st.lists(widths, min_size=1, max_size=3), "down_dims")
    assume(all(dim % groups == 0 for dim in dims))
    torch.manual_seed(pick(st.integers(0, 2**32), "seed"))
    net = ConditionalUnet1D(
        pick(st.integers(1, 9), "action_dim"),
        global_cond_dim=pick(st.sampled_from([None, 1, 3, 20]), "global_cond_dim"),
        diffusion_step_embed_dim=pick(st.sampled_from([4, 10, 32]), "diffusion_step_embed_dim"),
        down_dims=dims,
        kernel_size=pick(st.sampled_from([1, 3, 5, 9]), "kernel_size"),
        n_groups=groups,
        cond_predict_scale=pick(st.booleans(), "cond_predict_scale"),
    )
    for parameter in net.parameters():  # biases and norms away from their plain beginnings
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return net.to(device).eval(), len(dims)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("actions", [3, 20, 40])
@pytest.mark.parametrize("cond_dim", [None, 20])
@pytest.mark.parametrize("with_local", [False, True])
def test_halves_of_a_loop(hopper, dtype, actions, cond_dim, with_local):
    """FiLM of all timesteps and samples, then the network on it, against float64."""
    torch.manual_seed(5)
    net = ConditionalUnet1D(
        actions,
        global_cond_dim=cond_dim,
        down_dims=(64, 128),
        kernel_size=5,
        diffusion_step_embed_dim=32,
        cond_predict_scale=True,
    )
    net = net.to(hopper).eval()
    config = unet_config(net)
    named = dict(net.named_parameters())
    parameters = [named[name].detach() for name in torch.ops.dpa.unet1d_weight_names(config)]
    weights = parameters, torch.ops.dpa.unet1d_batch_pack(parameters, config, dtype), config
    sample = torch.randn(40, 12, actions, device=hopper)
    cond = None if cond_dim is None else torch.randn(40, cond_dim, device=hopper)
    steps = torch.tensor([3.0, 70.0], device=hopper)
    film, conds = torch.ops.dpa.unet1d_batch_film(steps, cond, *weights)
    exact = dpa.reference.plain(net).double()
    local = torch.randn(40, 12, 64, device=hopper) if with_local else None
    if with_local:
        more = local.double().transpose(1, 2)
        exact.down_modules[0][0].register_forward_hook(lambda *call: call[2] + more)
    for step, row in zip(steps, film, strict=True):
        got = torch.ops.dpa.unet1d_batch_on_film(sample, row, conds, *weights, local)
        again = torch.ops.dpa.unet1d_batch_on_film(sample, row, conds, *weights, local)
        assert torch.equal(got, again)
        with torch.no_grad():
            expected = exact(
                sample.double(), step, global_cond=None if cond is None else cond.double()
            )
        assert (got.double() - expected).norm() < ERROR[dtype] * expected.norm()


@cases
@given(data=st.data())
def test_any_network(hopper, data):
    """Drawn networks, batches and layouts against float64, beside plain PyTorch's rounding."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    net, levels = _drawn_network(data, hopper)
    draw = Draw(data, hopper, torch.float32, hostile=False)
    batch = draw(st.sampled_from([0, 1, 2, 3, 7, 16, 33]), "batch")
    horizon = draw(st.integers(1, 40 >> levels)) << (levels - 1)
    # PyTorch normalises no single value a channel.
    assume(batch * (horizon >> (levels - 1)) != 1)
    config = unet_config(net)
    sample = draw.tensor(batch, horizon, config[0])
    cond = draw.tensor(batch, config[4]) if config[4] else None
    steps = torch.randint(0, 100, (batch,), device=hopper)
    named = dict(net.named_parameters())
    parameters = [named[name].detach() for name in torch.ops.dpa.unet1d_weight_names(config)]
    with poisoned_memory():
        packed = torch.ops.dpa.unet1d_batch_pack(parameters, config, dtype)
        got = torch.ops.dpa.unet1d_batch(sample, steps.float(), cond, parameters, packed, config)
    plain = dpa.reference.plain(net)
    with torch.no_grad():
        tf32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with tf32, torch.autocast("cuda", dtype, enabled=dtype.itemsize == 2):
            rounded = plain(sample, steps, global_cond=cond)
        exact = plain.double()(
            sample.double(), steps, global_cond=None if cond is None else cond.double()
        )
    assert got.shape == exact.shape and got.dtype == dtype
    if batch:
        # Both errors are estimates: over few outputs they differ by chance.
        unit = torch.finfo(dtype).eps * exact.abs().max()
        apart = lambda x: (x.double() - exact).abs().max()  # noqa: E731
        assert apart(got) <= 3 * apart(rounded) + 4 * unit
