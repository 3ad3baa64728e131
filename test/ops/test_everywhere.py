"""Every op and the U-Net from TorchScript, torch.export, AOTInductor and torch.compile's modes."""

import copy

import pytest
import torch
from everywhere import EveryOp
from torch.testing import assert_close

import dpa
from dpa.export.packages import compile_package, open_package
from dpa.packed.unet import PackedUnet


class Unet(torch.nn.Module):
    """The U-Net with its inputs in a row, as exporters like them."""

    def __init__(self):
        super().__init__()
        self.unet = dpa.nn.ConditionalUnet1D(
            2,
            global_cond_dim=5,
            diffusion_step_embed_dim=16,
            down_dims=(16, 32),
            cond_predict_scale=True,
        )

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, cond: torch.Tensor
    ) -> torch.Tensor:
        return self.unet(sample, timestep, None, cond)


class PackedLoop(torch.nn.Module):
    """A U-Net on packed weights: a forward pass, and a denoising loop that begins with it."""

    def __init__(self, device: torch.device):
        super().__init__()
        packed = PackedUnet(Unet().to(device).unet)
        self.config = packed.config
        self.register_buffer("weights", packed.packed)
        self.register_buffer("steps", torch.tensor([3.0, 2.0, 0.0], device=device))
        self.register_buffer("table", torch.rand(3, 6, device=device) / 2)

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, cond: torch.Tensor
    ) -> torch.Tensor:
        config, weights = self.config, self.weights
        t = timestep.to(torch.float32)
        out = torch.ops.dpa.unet1d(sample, t, cond, weights, config, torch.float32)
        return torch.ops.dpa.diffusion_sample(
            out, self.steps, cond, weights, config, torch.float32, self.table, 1.0
        )


def every_op(device, batch=3):
    return EveryOp().to(device).eval(), (torch.randn(batch, 3, 12, device=device),)


def _unet_inputs(device, batch):
    sample, cond = torch.randn(batch, 8, 2, device=device), torch.randn(batch, 5, device=device)
    return sample, torch.arange(batch, device=device), cond


def unet(device, batch=3):
    return Unet().to(device).eval(), _unet_inputs(device, batch)


def packed(device, batch=3):
    torch.manual_seed(1)  # the same weights at every size
    return PackedLoop(device).eval(), _unet_inputs(device, batch)


@pytest.fixture(params=[every_op, unet, packed], ids=lambda f: f.__name__)
def case(request):
    return request.param


def test_torchscript(device, case, tmp_path):
    module, inputs = case(device)
    expected = module(*inputs)
    scripted = torch.jit.script(module)
    frozen = torch.jit.freeze(scripted)
    traced = torch.jit.trace(module, inputs)
    variants = [scripted, frozen, traced]
    for i, variant in enumerate(variants.copy()):
        torch.jit.save(variant, str(tmp_path / f"{i}.pt"))
        variants.append(torch.jit.load(str(tmp_path / f"{i}.pt")))
    for variant in variants:
        for _ in range(3):  # the profiling executor changes its plan in the first runs
            assert_close(variant(*inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [every_op, unet], ids=lambda f: f.__name__)
def test_torchscript_gradients(device, case):
    module, inputs = case(device)
    scripted = torch.jit.script(copy.deepcopy(module))
    for _ in range(3):
        module.zero_grad()
        scripted.zero_grad()
        module(*inputs).square().sum().backward()
        scripted(*inputs).square().sum().backward()
        ours = dict(scripted.named_parameters())
        for name, parameter in module.named_parameters():
            assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_batch(device, case, strict):
    module, inputs = case(device)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = tuple({0: batch} for _ in inputs)
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any(name.startswith("dpa.") for name in names)
    for size in (3, 7):
        _, fresh = case(device, size)
        assert_close(program.module()(*fresh), module(*fresh), rtol=1e-5, atol=1e-5)


# Not the packed ops: a package of torch 2.11 hands a custom op its dtype arguments by other numbers
# than the op's own, and goes on after the error that follows.
@pytest.mark.parametrize("case", [every_op, unet], ids=lambda f: f.__name__)
def test_aot_inductor(device, case, tmp_path):
    module, inputs = case(device)
    path = tmp_path / "module.pt2"
    with torch.no_grad():
        path.write_bytes(compile_package(module, inputs))
        loaded = open_package(path)
        assert_close(loaded(*inputs), module(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(device, case, mode):
    if mode == "reduce-overhead" and device.type == "cpu":
        pytest.skip("reduce-overhead means CUDA graphs")
    module, inputs = case(device)
    compiled = torch.compile(module, mode=mode, fullgraph=True)
    side = torch.cuda.Stream() if device.type == "cuda" else None
    for _ in range(4):  # warm-up, recording, replay
        fresh = tuple(torch.randn_like(x) if x.is_floating_point() else x for x in inputs)
        with torch.no_grad():
            if side is None:
                got = compiled(*fresh).clone()
            else:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    got = compiled(*fresh).clone()
                torch.cuda.current_stream().wait_stream(side)
            assert_close(got, module(*fresh), rtol=1e-4, atol=1e-4)


def test_ops_run_on_the_current_stream(device):
    """Work queued on a side stream behind a long wait: on another stream an op reads too early."""
    if device.type == "cpu":
        pytest.skip("the CPU has no streams")
    module, (x,) = every_op(device, 64)
    expected = module(x)
    target = torch.full_like(x, torch.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        target.copy_(x)
        got = module(target)
    side.synchronize()
    assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    module, (x,) = every_op(torch.device("cuda", 1))
    assert torch.cuda.current_device() == 0
    assert_close(module(x).cpu(), copy.deepcopy(module).cpu()(x.cpu()), rtol=1e-4, atol=1e-4)
