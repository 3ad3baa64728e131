"""The U-Net against LeRobot's and against plain PyTorch, and under every compiler of PyTorch."""

import copy
import io

import pytest
import torch
from policies import lerobot_unet
from tolerances import gradient_tolerance, tolerance
from torch._dynamo.testing import CompileCounterWithBackend

import dpa
from dpa.nn import ConditionalResidualBlock1D, ConditionalUnet1D, Conv1dBlock
from dpa.nn.blocks1d import Conv1d

SMALL = {"diffusion_step_embed_dim": 16, "down_dims": (16, 32)}
# name: (constructor arguments, batch, horizon)
CONFIGS = {
    "unconditional": ({"input_dim": 2, **SMALL}, 3, 8),
    "film_shift": ({"input_dim": 3, "global_cond_dim": 5, **SMALL}, 2, 6),
    "film_scale": (
        {"input_dim": 7, "global_cond_dim": 5, "cond_predict_scale": True, **SMALL},
        1,
        4,
    ),
    "local_cond": (
        {"input_dim": 2, "global_cond_dim": 4, "local_cond_dim": 3, "kernel_size": 5, **SMALL},
        2,
        8,
    ),
    "one_level": ({"input_dim": 1, "diffusion_step_embed_dim": 4, "down_dims": [8]}, 2, 5),
    "four_levels": (
        {
            "input_dim": 5,
            "global_cond_dim": 1,
            "diffusion_step_embed_dim": 8,
            "down_dims": (16, 8, 24, 8),
            "kernel_size": 5,
            "n_groups": 4,
            "cond_predict_scale": True,
        },
        2,
        16,
    ),
}


def make(name, device="cpu", dtype=torch.float32):
    """Return a net, and arguments for it."""
    options, batch, horizon = CONFIGS[name]
    torch.manual_seed(0)
    net = ConditionalUnet1D(**options).to(device, dtype)
    return net, make_inputs(options, batch, horizon, device, dtype)


def make_inputs(options, batch, horizon, device="cpu", dtype=torch.float32):
    def randn(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    inputs = {"sample": randn(batch, horizon, options["input_dim"])}
    inputs["timestep"] = torch.arange(batch, device=device) * 7 + 3
    if "local_cond_dim" in options:
        inputs["local_cond"] = randn(batch, horizon, options["local_cond_dim"])
    if "global_cond_dim" in options:
        inputs["global_cond"] = randn(batch, options["global_cond_dim"])
    return inputs


def leaf_copies(inputs):
    def leaf(x):
        return x.detach().clone().requires_grad_() if x.is_floating_point() else x

    return {name: leaf(x) for name, x in inputs.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_matches_plain_pytorch_in_value_and_gradient(name, device):
    net, inputs = make(name, device, torch.float64)
    plain = dpa.reference.plain(net)
    results = []
    for module in (net, plain):
        arguments = leaf_copies(inputs)
        out = module(**arguments)
        (out * torch.linspace(-1, 1, out.numel(), device=device).view_as(out)).sum().backward()
        gradients = {n: x.grad for n, x in arguments.items() if x.is_floating_point()}
        gradients |= {n: p.grad for n, p in module.named_parameters()}
        results.append((out, gradients))
    (out, gradients), (expected_out, expected) = results
    torch.testing.assert_close(out, expected_out, **tolerance(torch.float64))
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        if gradient is None:
            assert gradients[key] is None and key.startswith("local_cond_encoder.1"), key
        else:
            torch.testing.assert_close(
                gradients[key], gradient, **gradient_tolerance(torch.float64)
            )


@pytest.mark.parametrize("name", CONFIGS)
def test_matches_lerobot(name, device):
    options, _, _ = CONFIGS[name]
    if "local_cond_dim" in options:
        pytest.skip("LeRobot's U-Net has no local conditioning")
    net, inputs = make(name, device)
    theirs = lerobot_unet(options)
    theirs.load_state_dict({lerobot_key(k): v for k, v in net.state_dict().items()})
    expected = theirs.to(device)(
        inputs["sample"], inputs["timestep"], global_cond=inputs.get("global_cond")
    )
    torch.testing.assert_close(net(**inputs), expected, **tolerance(torch.float32))


def lerobot_key(key):
    """Return LeRobot's name of a parameter of the original."""
    key = key.replace("blocks.0.block.", "conv1.block.").replace("blocks.1.block.", "conv2.block.")
    return key.replace(".2.conv.", ".2.") if key.startswith(("down_", "up_")) else key


def test_state_dict_keys_are_the_originals():
    def layer(name):
        return {f"{name}.weight", f"{name}.bias"}

    def residual(name, projected):
        keys = layer(f"{name}.cond_encoder.1")
        for index in (0, 1):
            keys |= layer(f"{name}.blocks.{index}.block.0")
            keys |= layer(f"{name}.blocks.{index}.block.1")
        return keys | (layer(f"{name}.residual_conv") if projected else set())

    expected = layer("diffusion_step_encoder.1") | layer("diffusion_step_encoder.3")
    expected |= residual("local_cond_encoder.0", True) | residual("local_cond_encoder.1", True)
    for level in range(3):
        expected |= residual(f"down_modules.{level}.0", True)
        expected |= residual(f"down_modules.{level}.1", False)
    expected |= layer("down_modules.0.2.conv") | layer("down_modules.1.2.conv")
    expected |= residual("mid_modules.0", False) | residual("mid_modules.1", False)
    for level in range(2):
        expected |= residual(f"up_modules.{level}.0", True)
        expected |= residual(f"up_modules.{level}.1", False)
        expected |= layer(f"up_modules.{level}.2.conv")
    expected |= layer("final_conv.0.block.0") | layer("final_conv.0.block.1")
    expected |= layer("final_conv.1")

    net = ConditionalUnet1D(2, 3, 4, 16, [8, 16, 32])
    assert set(net.state_dict()) == expected
    assert set(dpa.reference.plain(net).state_dict()) == expected


@pytest.mark.parametrize(
    ("input_dim", "global_cond_dim", "down_dims", "kernel_size", "embed_dim", "scale", "millions"),
    [
        (2, 40, (256, 512, 1024), 5, 256, True, 65.8),
        (2, 1028, (256, 512, 1024), 5, 256, True, 80.0),
        (10, 1568, (256, 512, 1024), 5, 128, True, 85.5),
        (2, 132, (512, 1024, 2048), 5, 128, True, 251.5),
        (8, 84, (64, 128, 256), 5, 64, True, 4.4),
        (2, 256, (64, 128, 256), 3, 256, False, 3.9),
    ],
)
def test_published_networks_have_their_number_of_parameters(
    input_dim, global_cond_dim, down_dims, kernel_size, embed_dim, scale, millions
):
    with torch.device("meta"):
        net = ConditionalUnet1D(
            input_dim,
            global_cond_dim=global_cond_dim,
            diffusion_step_embed_dim=embed_dim,
            down_dims=down_dims,
            kernel_size=kernel_size,
            cond_predict_scale=scale,
        )
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_quirks_that_checkpoints_depend_on():
    net, inputs = make("local_cond")
    expected = net(**inputs)
    for parameter in net.local_cond_encoder[1].parameters():
        torch.nn.init.constant_(parameter, 3.0)
    torch.testing.assert_close(net(**inputs), expected, rtol=0, atol=0)
    without = {**inputs, "local_cond": None}
    assert not torch.allclose(net(**without), expected)
    assert ConditionalUnet1D(2, n_groups=4, **SMALL).final_conv[0].block[1].num_groups == 8
    assert len(net.up_modules) == 1 and net.up_modules[0][2].conv.stride == (2,)


def test_timestep_forms(device):
    net, inputs = make("film_shift", device)
    inputs["timestep"] = torch.full((2,), 9, device=device)
    expected = net(**inputs)
    forms = [9, 9.0, torch.tensor(9), torch.tensor([9]), torch.tensor(9.0, device=device)]
    forms += [torch.tensor([9, 9], dtype=torch.int32), torch.full((2,), 9.0, dtype=torch.float64)]
    for form in forms:
        got = net(**{**inputs, "timestep": form})
        torch.testing.assert_close(got, expected, **tolerance(torch.float32))
    flow = net(**{**inputs, "timestep": 0.25})
    assert not torch.allclose(flow, net(**{**inputs, "timestep": 0}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_weights_resolve_large_timesteps(dtype, device):
    net, inputs = make("film_scale", device)
    inputs["timestep"] = torch.full((1,), 999, device=device)
    expected = net(**inputs)
    half = {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
    got = copy.deepcopy(net).to(dtype)(**half)
    assert got.dtype == dtype
    error = (got.float() - expected).abs().max() / expected.abs().max()
    # 16-bit angles near 999 radians would be off by a radian or more, and the output by its size.
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_autocast(device):
    net, inputs = make("film_scale", device)
    expected = net(**inputs)
    with torch.autocast(device.type, torch.bfloat16):
        got = net(**inputs)
        got.float().square().sum().backward()
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).abs().max() < 0.1 * expected.abs().max()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("trained", [False, True], ids=["cond_given", "cond_trained"])
def test_mixed_precision_gradients_are_as_good_as_plain_pytorchs(device, trained):
    """Of every parameter, against float64, at widths that the 16-bit kernels take.

    And of the inputs, where an encoder before the network is trained with it.
    """
    if device.type == "cpu":
        pytest.skip("the 16-bit kernels are the GPU's")
    torch.manual_seed(0)
    net = ConditionalUnet1D(2, None, 20, 32, (64, 128), kernel_size=5, cond_predict_scale=True).to(
        device
    )
    plain = dpa.reference.plain(net)
    exact = copy.deepcopy(plain).double()
    sample, cond = torch.randn(24, 16, 2, device=device), torch.randn(24, 20, device=device)
    timestep = torch.arange(24, device=device)

    def gradients(module):
        dtype = next(module.parameters()).dtype
        inputs = [t.to(dtype, copy=True).requires_grad_(trained) for t in (sample, cond)]
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.float32):
            out = module(inputs[0], timestep, global_cond=inputs[1])
        loss = (out.to(dtype) - sample).square().mean()
        return torch.autograd.grad(loss, [*module.parameters(), *inputs[: 2 * trained]])

    expected = gradients(exact)

    def errors(module):
        pairs = zip(gradients(module), expected, strict=True)
        return torch.stack([(g - e).norm() / e.norm() for g, e in pairs])

    ours, theirs = errors(net), errors(plain)
    assert ours.median() < 1.25 * theirs.median()
    assert (ours < 1.5 * theirs.clamp(min=theirs.median().item())).all()


def test_empty_batch_strided_input_and_inference_mode(device):
    net, inputs = make("film_shift", device)
    empty = net(torch.empty(0, 4, 3, device=device), 1, global_cond=inputs["global_cond"][:0])
    assert empty.shape == (0, 4, 3)
    expected = net(**inputs)
    strided = inputs["sample"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not strided.is_contiguous()
    with torch.inference_mode():
        got = net(**{**inputs, "sample": strided})
    torch.testing.assert_close(got, expected, **tolerance(torch.float32))


ERRORS = [
    ({"sample": torch.zeros(2, 7, 3)}, r"horizon must be a positive multiple of 2 .*, got 7"),
    ({"sample": torch.zeros(2, 0, 3)}, r"horizon must be a positive multiple of 2 .*, got 0"),
    ({"sample": torch.zeros(2, 6, 4)}, r"sample must be \(B, T, 3\).*, got \[2, 6, 4\]"),
    ({"sample": torch.zeros(6, 3)}, r"sample must be \(B, T, 3\).*, got \[6, 3\]"),
    ({"global_cond": None}, r"global_cond must be given, of shape \(2, 5\), got None"),
    ({"global_cond": torch.zeros(2, 4)}, r"global_cond must be \(2, 5\), got \[2, 4\]"),
    ({"global_cond": torch.zeros(3, 5)}, r"global_cond must be \(2, 5\), got \[3, 5\]"),
    ({"local_cond": torch.zeros(2, 6, 1)}, r"local_cond must be None where local_cond_dim is None"),
    ({"timestep": torch.zeros(3)}, r"timestep must be .*\(2,\), got shape \[3\]"),
    ({"timestep": torch.zeros(2, 1)}, r"timestep must be .*, got shape \[2, 1\]"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_inputs_that_are_refused(change, message):
    net, inputs = make("film_shift")
    with pytest.raises(ValueError, match=message):
        net(**{**inputs, **change})


def test_conditioning_that_is_refused():
    net, inputs = make("unconditional")
    with pytest.raises(ValueError, match="global_cond must be None where global_cond_dim is None"):
        net(**inputs, global_cond=torch.zeros(3, 2))
    net, inputs = make("local_cond")
    inputs["local_cond"] = inputs["local_cond"][:, 1:]
    with pytest.raises(ValueError, match=r"local_cond must be \(2, 8, 3\), got \[2, 7, 3\]"):
        net(**inputs)


def test_constructors_that_are_refused():
    with pytest.raises(ValueError, match="kernel_size must be odd, got 4"):
        ConditionalUnet1D(2, kernel_size=4, **SMALL)
    with pytest.raises(ValueError, match="multiple of the 8 groups, got 20"):
        ConditionalUnet1D(2, diffusion_step_embed_dim=16, down_dims=(20, 40))
    with pytest.raises(ValueError, match=r"diffusion_step_embed_dim must be even .*, got 15"):
        ConditionalUnet1D(2, diffusion_step_embed_dim=15, down_dims=(16,))
    with pytest.raises(ValueError, match="down_dims must name at least one level"):
        ConditionalUnet1D(2, down_dims=())
    for sizes in [{"input_dim": 0}, {"input_dim": 2, "down_dims": (16, 0)}]:
        with pytest.raises(ValueError, match="input_dim and down_dims must be positive, got"):
            ConditionalUnet1D(**sizes)
    for name in ("local_cond_dim", "global_cond_dim"):
        with pytest.raises(ValueError, match=f"{name} .*must be widths or None, got .*-1"):
            ConditionalUnet1D(2, **{name: -1}, **SMALL)


def test_blocks_on_their_own(device):
    block = Conv1dBlock(3, 16, 5, n_groups=4).to(device)
    x, film = torch.randn(2, 3, 9, device=device), torch.randn(2, 16, device=device)
    expected = block.block(x)
    torch.testing.assert_close(block(x), expected, **tolerance(torch.float32))
    expected = expected * film[..., None] - film[..., None]
    torch.testing.assert_close(block(x, film, -film), expected, **tolerance(torch.float32))
    residual = ConditionalResidualBlock1D(3, 16, 6, cond_predict_scale=True).to(device)
    cond = torch.randn(2, 6, device=device)
    expected = dpa.reference.plain(residual)(x, cond)
    torch.testing.assert_close(residual(x, cond), expected, **tolerance(torch.float32))


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "same"},
        {"padding": "valid", "stride": 2},
        {"padding": "same", "dilation": 2},
        {"padding": 1, "padding_mode": "circular", "bias": False},
        {"groups": 2},
    ],
    ids=str,
)
def test_a_convolution_takes_every_argument_of_pytorchs(options, device):
    torch.manual_seed(0)
    theirs = torch.nn.Conv1d(4, 6, 3, **options).to(device)
    ours = Conv1d(4, 6, 3, **options).to(device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 11, device=device)
    for module in (ours, torch.jit.script(ours)):
        torch.testing.assert_close(module(x), theirs(x), **tolerance(torch.float32))


@pytest.mark.parametrize("name", ["film_scale", "local_cond"])
def test_one_dynamic_compile_serves_every_batch_and_horizon(name, device):
    net, _ = make(name, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    # No size equals a width of the network: the compiler would take the two for one.
    for batch, horizon in [(6, 8), (9, 16), (2, 12), (11, 40)]:
        inputs = make_inputs(CONFIGS[name][0], batch, horizon, device)
        for argument, value in inputs.items():
            torch._dynamo.mark_dynamic(value, 0)
            if argument in ("sample", "local_cond"):
                torch._dynamo.mark_dynamic(value, 1)
        torch.testing.assert_close(compiled(**inputs), net(**inputs), **tolerance(torch.float32))
        assert counter.frame_count == 1


def test_compiled_backward(device):
    net, inputs = make("film_shift", device)
    net(**inputs).square().sum().backward()
    expected = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    compiled(**inputs).square().sum().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], **gradient_tolerance(torch.float32)
        )


@pytest.mark.parametrize("name", ["unconditional", "film_scale", "local_cond"])
def test_script_save_and_load(name, device):
    net, inputs = make(name, device)
    expected = net(**inputs)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(net), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    torch.testing.assert_close(loaded(**inputs), expected, **tolerance(torch.float32))
    inputs["timestep"] = 3
    torch.testing.assert_close(loaded(**inputs), net(**inputs), **tolerance(torch.float32))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_batch(strict, device):
    net, inputs = make("local_cond", device)
    batch = torch.export.Dim("batch", min=1, max=64)
    dynamic = {argument: {0: batch} for argument in inputs}
    program = torch.export.export(net, (), inputs, dynamic_shapes=dynamic, strict=strict)
    for size in (2, 5):
        inputs = make_inputs(CONFIGS["local_cond"][0], size, 8, device)
        got = program.module()(**inputs)
        torch.testing.assert_close(got, net(**inputs), **tolerance(torch.float32))


def test_a_call_never_waits_for_the_gpu(device):
    if device.type == "cpu":
        pytest.skip("there is nothing to wait for on the CPU")
    net, inputs = make("film_scale", device)
    net(**inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        net(**inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
