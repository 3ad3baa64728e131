"""The U-Net and the whole loop on packed weights, against the network in float64."""

import copy
import functools

import pytest
import torch
from packed_nets import ERROR, NETS, cond_of, error, net
from proofs import poisoned_memory
from torch import nn

import dpa
from dpa.packed.config import path_of, unet_config
from dpa.packed.local_cond import LocalEncoder
from dpa.packed.unet import PackedUnet

diffusers = pytest.importorskip("diffusers")


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_forward(device, name, dtype):
    unet = net(name, device)
    packed, exact = PackedUnet(unet, dtype), dpa.reference.plain(unet).double()
    for batch, horizon in [(1, 16), (3, 8), (2, 24), (16, 16)]:
        sample = torch.randn(batch, horizon, unet.input_dim, device=device)
        timestep = torch.randint(100, (batch,), device=device)
        cond = cond_of(unet, batch, device)
        with torch.no_grad():
            wide = None if cond is None else cond.double()
            expected = exact(sample.double(), timestep, None, wide)
            got = packed(sample, timestep, cond)
        assert got.dtype == torch.float32
        assert error(got, expected) < ERROR[dtype]
        again = packed(sample, timestep, cond)
        assert torch.equal(got, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_of_several_samples(cuda, dtype):
    """Sizes for which several samples have a kernel of their own, and chunks that are not full."""
    unet = net("several", cuda)
    packed, exact = PackedUnet(unet, dtype), dpa.reference.plain(unet).double()
    batches = torch.randint(1, 65, (4,)).tolist()
    for batch, horizon in [(2, 16), (5, 16), (16, 16), (16, 8), *((b, 16) for b in batches)]:
        sample = torch.randn(batch, horizon, unet.input_dim, device=cuda)
        timestep = torch.randint(100, (batch,), device=cuda)
        cond = cond_of(unet, batch, cuda)
        with torch.no_grad():
            expected = exact(sample.double(), timestep, None, cond.double())
        got = packed(sample, timestep, cond)
        assert error(got, expected) < ERROR[dtype]
        assert torch.equal(got, packed(sample, timestep, cond))


RELU_SIZES = [
    ((40, 80), 1, 4),
    ((64, 128, 256), 3, 8),
    ((24, 40, 32), 2, 8),
    ((256, 512, 1024), 1, 16),
]


@pytest.mark.parametrize("dtype", [*ERROR, torch.float8_e4m3fn], ids=str)
def test_relu_behind_the_norms(device, dtype):
    """In all kernels that serve it: no kernel for wide networks alone does."""
    on_gpu = torch.device(device).type == "cuda"
    if not on_gpu and dtype == torch.float8_e4m3fn:
        pytest.skip("e4m3 is the GPU's")
    paths = set()
    long = [((16, 32), 1, 16384)] if on_gpu else []
    for widths, batch, horizon in RELU_SIZES + long:
        sizes = {"global_cond_dim": 5, "down_dims": widths, "cond_predict_scale": batch != 2}
        unet = dpa.nn.ConditionalUnet1D(3, diffusion_step_embed_dim=32, **sizes).to(device).eval()
        for block in unet.modules():
            if isinstance(block, dpa.nn.Conv1dBlock):
                block.block[2] = nn.ReLU()
        packed, exact = PackedUnet(unet, dtype), dpa.reference.plain(unet).double()
        sample = torch.randn(batch, horizon, 3, device=device)
        timestep = torch.randint(100, (batch,), device=device)
        cond = cond_of(unet, batch, device)
        with torch.no_grad():
            expected = exact(sample.double(), timestep, None, cond.double())
        for weights in (packed, packed.sized(batch, horizon)):  # the latter perhaps among zeros
            got = weights(sample, timestep, cond)
            assert error(got, expected) < ERROR.get(dtype, 0.1), (widths, batch, horizon)
            assert torch.equal(got, weights(sample, timestep, cond))
        if on_gpu:
            paths.add(path_of(tuple(packed.config), dtype, batch, horizon, sample.device))
    few = {"teams"} if dtype == torch.float8_e4m3fn else set()  # which is faster in phases here
    assert not on_gpu or {"teams", "phases", "layered"} - few == paths


@pytest.mark.parametrize(
    "widths",
    [
        (512, 1024, 2048),
        (1024, 2048),
        (512, 512, 1024),
        (256, 512, 1024, 2048),
        (256, 256, 512, 512, 1024),
        (512, 1024, 1024),
        (1024, 1024),
    ],
    ids=str,
)
def test_wide_networks_of_several_samples_at_short_horizons(cuda, widths):
    """At few columns a tile is shared by fewer blocks than there are slices of weights."""
    sizes = {"global_cond_dim": 5, "down_dims": widths, "cond_predict_scale": True}
    unet = dpa.nn.ConditionalUnet1D(3, diffusion_step_embed_dim=32, **sizes).to(cuda).eval()
    exact = dpa.reference.plain(unet).double()
    for dtype in (torch.bfloat16, torch.float16):
        packed = PackedUnet(unet, dtype)
        for batch, horizon in [(2, 8), (3, 8), (8, 8), (16, 8), (2, 4), (7, 8), (4, 16), (3, 48)]:
            if horizon % (1 << len(widths) - 1):
                continue
            sample = torch.randn(batch, horizon, 3, device=cuda)
            timestep = torch.randint(100, (batch,), device=cuda)
            cond = cond_of(unet, batch, cuda)
            with torch.no_grad():
                expected = exact(sample.double(), timestep, None, cond.double())
            assert error(packed(sample, timestep, cond), expected) < ERROR[dtype], (batch, horizon)
            path = path_of(tuple(packed.config), dtype, batch, horizon, sample.device)
            assert path == "clusters" or horizon == 48, (batch, horizon)


def _rounded_to_e4m3(unet):
    """The network as e4m3 holds it: q = w / scale rounded, scale = max |w| of a channel / 448."""
    rounded = copy.deepcopy(unet)
    for name, module in rounded.named_modules():
        if not isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            continue
        if name.startswith(
            ("down_modules.0.0.blocks.0.", "down_modules.0.0.residual", "final_conv.1")
        ):
            continue  # float32 in every packing
        inputs = 0 if isinstance(module, nn.ConvTranspose1d) else 1
        weight = module.weight.data
        scale = weight.abs().amax((inputs, 2), keepdim=True) / 448
        weight.copy_((weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale)
    return rounded


def test_e4m3_reference_rounds_as_e4m3_does():
    """The rounding below is what its name says: 3 bits of fraction, so 2^-4 of each weight."""
    unet = net("one_level", torch.device("cpu"))
    before = dict(unet.named_parameters())
    for name, after in _rounded_to_e4m3(unet).named_parameters():
        kept = after.dim() == 1 or "encoder" in name or "0.0.blocks.0" in name or ".1.w" in name
        if kept or "0.0.residual" in name:
            continue
        off = (after - before[name]).abs()
        smallest = before[name].abs().amax() / 448 * 2**-10  # half the spacing of its subnormals
        assert (off <= before[name].abs() * 2**-4 * 1.001 + smallest).all()
        assert off.max() > 0


@pytest.mark.parametrize("name", NETS)
def test_forward_e4m3(cuda, name):
    """The arithmetic's error, on the rounded weights, apart from that of rounding them.

    The arithmetic is float16's, and its bound too. An e4m3 weight is off by up to 2^-4 of itself,
    2^-5 / sqrt(3) x sqrt(2) = 0.026 in the mean square, and so is each convolution's output; the
    residual path adds what some ten of them in a row leave.
    """
    unet = net(name, cuda)
    packed = PackedUnet(unet, torch.float8_e4m3fn)
    original = dpa.reference.plain(unet).double()
    rounded = dpa.reference.plain(_rounded_to_e4m3(unet)).double()
    for batch, horizon in [(1, 16), (1, 24), (3, 8)]:
        sample = torch.randn(batch, horizon, unet.input_dim, device=cuda)
        timestep = torch.randint(100, (batch,), device=cuda)
        cond = cond_of(unet, batch, cuda)
        wide = None if cond is None else cond.double()
        with torch.no_grad():
            got = packed(sample, timestep, cond)
            on_rounded = rounded(sample.double(), timestep, None, wide)
            on_original = original(sample.double(), timestep, None, wide)
        assert error(got, on_rounded) < ERROR[torch.float16]
        rounding = error(on_rounded, on_original)
        assert rounding < 0.2
        assert error(got, on_original) < rounding + ERROR[torch.float16]


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "inpainting"])
@pytest.mark.parametrize("batch", [1, 3])
def test_loop_is_the_eager_loop(device, kind, batch):
    """The same generator, hence the same noise: the same actions as the loop of separate ops."""
    unet = net("unconditional" if kind == "inpainting" else "small", device)
    cls = diffusers.DDIMScheduler if kind == "ddim" else diffusers.DDPMScheduler
    scheduler = cls(num_train_timesteps=50, beta_schedule="squaredcos_cap_v2", clip_sample=True)
    options = {"num_inference_steps": 10 if kind == "ddim" else 50, "horizon": 16}
    call = {"batch_size": batch}
    if kind == "inpainting":
        call["condition_data"] = torch.randn(batch, 16, 7, device=device)
        call["condition_mask"] = torch.rand(batch, 16, 7, device=device) < 0.3
    else:
        call["global_cond"] = cond_of(unet, batch, device)
    results = []
    for fused in (False, True):
        sampler = dpa.DiffusionSampler(unet, scheduler, fused=fused, **options)
        generator = torch.Generator(device).manual_seed(5)
        results.append(sampler(generator=generator, **call))
        results.append(torch.randn(3, device=device, generator=generator))
    torch.testing.assert_close(results[0], results[2], rtol=1e-3, atol=1e-4)
    assert torch.equal(results[1], results[3])  # the stream went on equally far


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_byte_is_written(device, dtype):
    """What lies between the weights too: packed weights go into files, and memory holds secrets."""
    unet = dpa.nn.ConditionalUnet1D(
        3, global_cond_dim=5, diffusion_step_embed_dim=32, down_dims=(24, 48, 40), n_groups=4
    ).to(device)
    plain = PackedUnet(unet, dtype).packed
    with poisoned_memory():
        assert torch.equal(PackedUnet(unet, dtype).packed, plain)


def test_changed_weights_are_packed_again(device):
    unet = net("small", device)
    packed = PackedUnet(unet)
    sample, t, cond = (
        torch.randn(1, 16, 2, device=device),
        torch.zeros(1, device=device),
        cond_of(unet, 1, device),
    )
    before = packed(sample, t, cond)
    with torch.no_grad():
        unet.final_conv[1].bias.add_(1.0)
    torch.testing.assert_close(packed(sample, t, cond), before + 1, rtol=1e-5, atol=1e-5)
    other = net("small", device)
    unet.load_state_dict(other.state_dict())
    assert torch.equal(packed(sample, t, cond), PackedUnet(other)(sample, t, cond))


def test_weights_that_cannot_be_packed_leave_none_of_before(device):
    """A layer in another dtype raises in every call, and its new values count once it fits."""
    unet = net("small", device)
    packed, sample = PackedUnet(unet), torch.randn(1, 16, 2, device=device)
    call = functools.partial(packed, sample, 3, cond_of(unet, 1, device))
    call()
    unet.final_conv[1].double().weight.data.mul_(2.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must have the dtype of the first weight"):
            call()
    unet.float()
    assert torch.equal(call(), PackedUnet(unet)(*call.args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(device, dtype):
    unet = net("small", device)
    weights, config = PackedUnet(unet, dtype).packed, unet_config(unet)
    sample, cond = torch.randn(2, 16, 2, device=device), cond_of(unet, 2, device)
    local = torch.randn(3, 2, 16, config[6], device=device)
    torch.library.opcheck(
        torch.ops.dpa.unet1d.default,
        (sample, torch.ones(2, device=device), cond, weights, config, dtype, local[0]),
    )
    table, noise = torch.rand(3, 6, device=device) / 2, torch.randn(3, 2, 16, 2, device=device)
    steps = torch.arange(3.0, device=device)
    torch.library.opcheck(
        torch.ops.dpa.diffusion_sample.default,
        (sample, steps, cond, weights, config, dtype, table, 1.0, noise, sample, sample > 0, local),
    )


def test_no_gradient_is_pretended(device):
    unet = net("small", device)
    packed = PackedUnet(unet)
    sample = torch.randn(1, 16, 2, device=device, requires_grad=True)
    out = packed(sample, torch.zeros(1, device=device), cond_of(unet, 1, device))
    with pytest.raises(RuntimeError, match=r"dpa::unet1d.*not implemented"):
        out.sum().backward()


def test_weight_names_are_the_networks():
    """Every parameter of the network is packed: none is forgotten, none invented."""
    for name in NETS:
        unet = net(name, torch.device("cpu"))
        names = torch.ops.dpa.unet1d_weight_names(unet_config(unet))
        assert sorted(names) == sorted(n for n, _ in unet.named_parameters())


def rejected_unet1d(new, packed, config):
    head, f32 = r"^dpa::unet1d: ", torch.float32
    sample, t, cond = new(2, 16, 2), new(2), new(2, 7)
    rest = (packed, config, f32)
    yield head + r"sample must be float32, got Half", (sample.half(), t, cond, *rest)
    yield head + r"sample must have shape \(B, T, 2\), got \[16, 2\]", (sample[0], t, cond, *rest)
    yield (
        head + r"sample must have a horizon that is a positive multiple of 2, got 15",
        (sample[:, 1:], t, cond, *rest),
    )
    yield head + r"timesteps must have shape \(B\) = \[2\], got \[1\]", (sample, t[:1], cond, *rest)
    yield head + r"global_cond must be given to this network, got none", (sample, t, None, *rest)
    yield (
        head + r"global_cond must have shape \(B, global_cond_dim\) = \[2, 7\], got \[2, 6\]",
        (sample, t, cond[:, 1:], *rest),
    )
    yield (
        head + r"packed must be the .* bytes that unet1d_pack makes for this config, got",
        (sample, t, cond, packed[1:], config, f32),
    )
    yield head + r"packed must be the", (sample, t, cond, packed, config, torch.bfloat16)
    yield (
        head + r"dtype of packed weights must be float32, float16, bfloat16 or float8_e4m3fn",
        (sample, t, cond, packed, config, torch.float64),
    )
    yield (
        head + r"config must be \[action_dim, kernel_size, n_groups, .* with 1 to 5 down_dims, got",
        (sample, t, cond, packed, config[:5], f32),
    )
    yield (
        head + r"config must hold numbers in 0..65536, got 1099511627776",
        (sample, t, cond, packed, [2**40, *config[1:]], f32),
    )
    yield (
        head + r"config must have flags of 0 to 3: 1 for FiLM with a scale, 2 for ReLU, got 4",
        (sample, t, cond, packed, [*config[:5], 4, *config[6:]], f32),
    )
    yield (
        head + r"config is refused: kernel_size must be odd, got 4",
        (sample, t, cond, packed, [2, 4, *config[2:]], f32),
    )


def rejected_diffusion_sample(new, packed, config):
    head = r"^dpa::diffusion_sample: "
    sample, t, cond, table = new(2, 16, 2), new(4), new(2, 7), new(4, 6)
    rest = (cond, packed, config, torch.float32)
    yield head + r"sample must be float32, got Half", (sample.half(), t, *rest, table, 1.0)
    yield (
        head + r"timesteps must have one dimension, got shape \[4, 1\]",
        (sample, new(4, 1), *rest, table, 1.0),
    )
    yield (
        head + r"table must have shape \(S, 6\) = \[3, 6\], got \[4, 6\]",
        (sample, new(3), *rest, table, 1.0),
    )
    yield head + r"clip must be at least 0 .*, got -1", (sample, t, *rest, table, -1.0)
    noise = new(3, 2, 16, 2)
    yield (
        head + r"noise must have shape \(S, B, T, A\) = \[4, 2, 16, 2\], got",
        (sample, t, *rest, table, 1.0, noise),
    )
    yield (
        head + r"known and known_mask must be given together, got known alone",
        (sample, t, *rest, table, 1.0, None, sample),
    )
    yield (
        head + r"known_mask must be bool of the shape of sample .*, got Float",
        (sample, t, *rest, table, 1.0, None, sample, sample),
    )


@pytest.mark.parametrize("target", ["meta", "cpu", "cuda"])
def test_rejected(target):
    if target == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    unet = net("small", torch.device("cpu"))
    config = unet_config(unet)
    names = torch.ops.dpa.unet1d_weight_names(config)
    weights = [dict(unet.named_parameters())[n].detach().to(target) for n in names]
    packed = torch.ops.dpa.unet1d_pack(weights, config, torch.float32)
    new = lambda *shape: torch.zeros(shape, device=target)  # noqa: E731
    for op, wrong in (
        (torch.ops.dpa.unet1d, rejected_unet1d),
        (torch.ops.dpa.diffusion_sample, rejected_diffusion_sample),
    ):
        for match, args in wrong(new, packed, config):
            with pytest.raises(RuntimeError, match=match):
                op(*args)
    with pytest.raises(RuntimeError, match=r"unet1d_pack: weights must be the \d+ tensors"):
        torch.ops.dpa.unet1d_pack(weights[1:], config, torch.float32)
    with pytest.raises(RuntimeError, match=r"unet1d_pack: .* must have shape"):
        torch.ops.dpa.unet1d_pack([weights[1], *weights[1:]], config, torch.float32)


def test_what_cannot_be_packed_says_why():
    with pytest.raises(ValueError, match="Linear has no diffusion_step_encoder"):
        unet_config(torch.nn.Linear(2, 2))
    local = dpa.nn.ConditionalUnet1D(
        2, local_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(16, 32)
    )
    same = dpa.nn.ConditionalUnet1D(2, diffusion_step_embed_dim=16, down_dims=(16, 32))
    assert unet_config(local) == unet_config(same)


def _local_unet(device, dims, global_cond=None, kernel=3, scale=True):
    torch.manual_seed(3)
    with torch.device(device):
        unet = dpa.nn.ConditionalUnet1D(3, 5, global_cond, 32, dims, kernel, 8, scale).eval()
        with torch.no_grad():
            for p in unet.parameters():
                if p.dim() == 1:
                    p.add_(torch.randn_like(p) * 0.1)
    return unet


@pytest.mark.parametrize("kind", ["DDPM", "DDIM", "DPMSolverMultistep"])
@pytest.mark.parametrize(
    ("dims", "horizon", "batch", "global_cond", "scale", "dtype", "limit"),
    [
        ((32, 64), 16, 1, 7, True, torch.float32, 2e-5),
        ((32, 64), 8, 3, None, True, torch.float32, 2e-5),
        ((48, 96, 96), 12, 17, 7, False, torch.float32, 2e-5),
        ((64, 128), 20, 2, 7, True, torch.bfloat16, 3e-2),
    ],
    ids=str,
)
def test_loops_with_local_conditions(
    device, kind, dims, horizon, batch, global_cond, scale, dtype, limit
):
    """Against the network in float64, a step at a time; then with other weights, and none given."""
    unet = _local_unet(device, dims, global_cond, scale=scale)
    scheduler = getattr(diffusers, f"{kind}Scheduler")(50)
    local, noise = (torch.randn(batch, horizon, n, device=device) for n in (5, 3))
    cond = None if global_cond is None else torch.randn(batch, global_cond, device=device)
    data, mask = torch.randn_like(noise), torch.rand_like(noise) > 0.7
    held = {"condition_data": data, "condition_mask": mask}

    def make(fused):
        network = unet if fused else copy.deepcopy(unet).double()
        options = {"horizon": horizon, "fused": fused, "noise_dtype": torch.float32}
        return dpa.DiffusionSampler(network, scheduler, 5, dtype if fused else None, **options)

    def sample(sampler, **given):
        generator = torch.Generator(device).manual_seed(1)
        return sampler(cond, noise=noise, generator=generator, batch_size=batch, **given).double()

    fast = make(True)
    for given in ({"local_cond": local}, {}, {"local_cond": local, **held}):
        want = sample(make(False), **given)
        for _ in range(3):  # eager, captured, replayed
            assert error(sample(fast, **given), want) < limit
    assert fast.packed is not None
    weight = unet.local_cond_encoder[0].blocks[0].block[0].weight
    for change in ("in place", "replaced"):
        with torch.no_grad():
            if change == "in place":
                weight.mul_(-2)
            else:
                weight.data = weight.flip(0).clone()
        want = sample(make(False), local_cond=local)
        for _ in range(2):
            assert error(sample(fast, local_cond=local), want) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_layers_with_local_conditions(hopper, dtype):
    """So many samples run layer by layer, beside the module's rounding of the same type."""
    unet = _local_unet(hopper, (192, 288), 7, kernel=5)
    local, noise = (torch.randn(256, 32, n, device=hopper) for n in (5, 3))
    cond, scheduler = torch.randn(256, 7, device=hopper), diffusers.DDIMScheduler(50)

    def loop(network, dtype=None, **options):
        sampler = dpa.DiffusionSampler(network, scheduler, 3, dtype, horizon=32, **options)
        data = [x.double() if options.get("fused") is False else x for x in (cond, local, noise)]
        result = lambda: sampler(data[0], local_cond=data[1], noise=data[2]).double()  # noqa: E731
        return sampler, [result() for _ in range(3)]

    sampler, found = loop(unet, dtype)
    assert sampler.packed.in_layers(noise) is not None
    exact = loop(copy.deepcopy(unet).double(), fused=False)[1][0]
    # The weights' own rounding is as large as e4m3's, and scales keep it below 2^-4 of each.
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float8_e4m3fn: 1e-1}[dtype]
    for each in found:
        assert error(each, exact) < limit
    assert torch.equal(found[1], found[2])


def test_local_conditions_of_many_steps_are_encoded_in_parts(device, monkeypatch):
    unet = _local_unet(device, (32, 64), 7)
    encoder = LocalEncoder(unet, torch.float32)
    timesteps = torch.arange(7.0, device=device)
    cond, local = torch.randn(2, 7, device=device), torch.randn(2, 8, 5, device=device)
    want = encoder.at_each(timesteps, cond, local)
    assert want.shape == (7, 2, 8, 32)
    monkeypatch.setattr("dpa.packed.local_cond._AT_ONCE", 40)
    torch.testing.assert_close(encoder.at_each(timesteps, cond, local), want)
    filled = LocalEncoder.filled_up(want, 64, groups=8).unflatten(3, (8, -1))
    torch.testing.assert_close(filled[..., :4].flatten(3), want)
    assert not filled[..., 4:].any()
    halves = LocalEncoder(copy.deepcopy(unet).bfloat16(), torch.float32)
    assert halves.at_each(timesteps, cond, local).dtype == torch.float32
    for step, rows in enumerate(want):
        block = unet.local_cond_encoder[0]
        embedding = torch.cat([unet.embed(local, timesteps[step].expand(2)), cond], dim=1)
        alone = block(local.transpose(1, 2), embedding).transpose(1, 2)
        torch.testing.assert_close(rows, alone.detach(), rtol=1e-4, atol=1e-5)


def test_what_local_conditions_are_not_packed_with(device):
    other = dpa.nn.ConditionalUnet1D(3, None, None, 32, (32, 64), 3).to(device)
    packed = PackedUnet(other)
    with pytest.raises(ValueError, match="unet must have local conditioning to be given local_co"):
        packed(torch.zeros(2, 8, 3, device=device), 1, None, torch.zeros(2, 8, 5, device=device))
    with pytest.raises(RuntimeError, match=r"unet1d: local must have shape \(B, T, down_dims"):
        torch.ops.dpa.unet1d(
            torch.zeros(2, 8, 3, device=device),
            torch.zeros(2, device=device),
            None,
            packed.packed,
            packed.config,
            torch.float32,
            torch.zeros(2, 8, 3, device=device),
        )


@pytest.mark.parametrize("dims", [(256, 512, 1024), (512, 1024, 2048)], ids=["67M", "252M"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
def test_published_sizes(cuda, dims, dtype):
    """The sizes of the published policies, for one sample and for several."""
    unet = dpa.nn.ConditionalUnet1D(
        2,
        global_cond_dim=132,
        diffusion_step_embed_dim=128,
        down_dims=dims,
        cond_predict_scale=True,
    )
    unet = unet.to(cuda).eval()
    kind = torch.float16 if dtype == torch.float8_e4m3fn else dtype
    exact = dpa.reference.plain(unet if kind == dtype else _rounded_to_e4m3(unet)).double()
    packed = PackedUnet(unet, dtype)
    for batch in (1, 2, 5, 16):
        sample, cond = torch.randn(batch, 16, 2, device=cuda), torch.randn(batch, 132, device=cuda)
        timestep = torch.randint(100, (batch,), device=cuda)
        with torch.no_grad():
            expected = exact(sample.double(), timestep, None, cond.double())
            assert error(packed(sample, timestep, cond), expected) < ERROR[kind]


def test_export_keeps_nothing_that_it_packed(device):
    """Its weights have no values; a call behind it packs those that have."""
    packed = PackedUnet(dpa.nn.ConditionalUnet1D(3, None, 7, 16, (32, 64), 3).to(device))

    class Called(torch.nn.Module):
        def forward(self, sample, cond):
            return packed(sample, 1.0, cond)

    sample, cond = torch.randn(2, 8, 3, device=device), torch.randn(2, 7, device=device)
    torch.export.export(Called(), (sample, cond))
    got = packed(sample, 1.0, cond)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, PackedUnet(packed.unet)(sample, 1.0, cond))
