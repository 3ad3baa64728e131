"""Which path a sampler takes by default: packed weights and one op, or step by step."""

import copy

import pytest
import torch
from torch import nn

import dpa
from dpa.packed.unet import PackedUnet

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")


class Doubled(dpa.nn.ConditionalUnet1D):
    """All parts of the family, and another forward."""

    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


def case(device="cpu", kind=dpa.nn.ConditionalUnet1D):
    torch.manual_seed(0)
    unet = kind(2, global_cond_dim=4, down_dims=(16, 32), diffusion_step_embed_dim=16)
    call = {"global_cond": torch.randn(3, 4), "noise": torch.randn(3, 8, 2)}
    return unet.to(device), {name: value.to(device) for name, value in call.items()}


def make(unet, kind="DDIM", **options):
    scheduler = getattr(diffusers, f"{kind}Scheduler")(20, prediction_type="sample")
    return dpa.DiffusionSampler(unet, scheduler, 4, **options)


def same_path(unet, call, fused, **options):
    """Whether two calls of the default give what the path gives that ``fused`` chooses.

    To the bit; in float64 to far less than packed weights, which are float32, would allow: there
    PyTorch's sums turn with the addresses of what they read.
    """
    sampler, chosen = make(unet, **options), make(unet, **options, fused=fused)
    double = next(unet.parameters()).dtype == torch.float64
    near = {"rtol": 0, "atol": 1e-12 if double else 0}
    return all(torch.allclose(sampler(**call), chosen(**call), **near) for _ in range(2))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_network_of_the_family_runs_as_one_op(device, dtype):
    unet, call = case(device)
    assert same_path(unet, call, True, dtype=dtype)
    assert not torch.equal(make(unet)(**call), make(unet, fused=False)(**call))


def _half_hook(unet):
    unet.final_conv[0].register_forward_hook(lambda module, args, out: out / 2)


def _forward(unet):
    own = unet.forward
    unet.forward = lambda *args, **kwargs: own(*args, **kwargs) / 2


def _activation(unet):
    for module in unet.mid_modules.modules():
        if isinstance(module, nn.Sequential) and isinstance(module[-1], nn.Mish):
            module[-1] = nn.SiLU()


def _no_head(unet):
    nn.init.zeros_(unet.final_conv[1].weight)
    nn.init.zeros_(unet.final_conv[1].bias)


CHANGES = [_half_hook, _forward, _activation]


@pytest.mark.parametrize("change", [*CHANGES, _no_head])
def test_what_one_op_would_pass_over_runs_step_by_step(device, change, recwarn):
    unet, call = case(device)
    change(unet)
    assert same_path(unet, call, False)
    assert not [w for w in recwarn if "DiffusionSampler" in str(w.message)]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_check_runs_what_a_call_runs(device, batch, monkeypatch):
    """No kernel for batches where one sample is called: some drivers compile them for seconds."""
    seen, own = [], PackedUnet.__call__

    def counted(self, sample, *args, **conditions):
        seen.append(len(sample))
        return own(self, sample, *args, **conditions)

    monkeypatch.setattr(PackedUnet, "__call__", counted)
    unet, call = case(device)
    call = {name: value[:batch] for name, value in call.items()}
    assert same_path(unet, call, True)
    assert seen == ([1, 1] if batch == 1 else [2])
    assert same_path(case(device, Doubled)[0], call, False)


def test_another_forward_runs_step_by_step(device):
    unet, call = case(device, Doubled)
    assert same_path(unet, call, False)
    expected = make(case(device)[0], fused=False)(**call)
    assert not torch.allclose(make(unet)(**call), expected, atol=1e-2)


def test_other_arithmetic_and_other_schedulers_run_step_by_step():
    unet, call = case()
    assert same_path(unet, call, True, kind="UniPCMultistep")  # whose steps are in a table
    assert same_path(unet, call, False, kind="DEISMultistep", fallback=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_path(unet, call, False)
    assert same_path(unet.double(), call, False)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_the_first_call_are_noticed(device, change):
    unet, call = case(device)
    sampler = make(unet)
    before = [sampler(**call) for _ in range(2)][1]
    change(unet)
    for _ in range(2):
        assert torch.equal(sampler(**call), make(unet, fused=False)(**call))
    assert not torch.allclose(sampler(**call), before, atol=1e-4)


def test_changed_weights_are_noticed(device):
    unet, call = case(device)
    sampler = make(unet)
    wide = {name: value.double() for name, value in call.items()}
    for _ in range(3):
        sampler(**call)
        for parameter in unet.parameters():
            parameter.data.mul_(1.1)
        exact = make(copy.deepcopy(unet).double(), fused=False)(**wide)
        torch.testing.assert_close(sampler(**call).double(), exact, rtol=1.3e-6, atol=1e-5)
        assert torch.equal(sampler(**call), make(unet, fused=True)(**call))


def test_fused_true_still_raises(device):
    unet, call = case(device)
    _activation(unet)
    with pytest.raises(ValueError, match="SiLU"):
        make(unet, fused=True)(**call)
    assert same_path(unet, call, False)
