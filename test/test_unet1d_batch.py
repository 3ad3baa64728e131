"""The op of kept weights, unet1d_batch: its shapes, and what it refuses."""

import pytest
import torch

from dpa.nn import ConditionalUnet1D
from test_kept import CONFIGS

CONFIG = [2, 5, 8, 32, 20, 1, 64, 128]


def _meta(dtype=torch.float32):
    with torch.device("meta"):
        net = ConditionalUnet1D(**CONFIGS["film_scale"][0]).to(dtype)
    names = torch.ops.dpa.unet1d_weight_names(CONFIG)
    parameters = dict(net.named_parameters())
    return [parameters[name].detach() for name in names]


def test_shapes_without_a_gpu():
    parameters = _meta()
    packed = torch.ops.dpa.unet1d_batch_pack(parameters, CONFIG, torch.bfloat16)
    assert packed.dtype == torch.bfloat16 and packed.dim() == 1
    new = lambda *size: torch.empty(size, device="meta")  # noqa: E731
    out = torch.ops.dpa.unet1d_batch(new(3, 8, 2), new(3), new(3, 20), parameters, packed, CONFIG)
    assert out.shape == (3, 8, 2) and out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": (3, 8, 5)}, r"sample must have shape \(B, T, 2\), got \[3, 8, 5\]"),
        ({"sample": (3, 7, 2)}, "sample must have a horizon that is a positive multiple of 2"),
        ({"timesteps": (2,)}, r"timesteps must have shape \(1\) or \(B\), got \[2\]"),
        ({"global_cond": (3, 4)}, r"global_cond must have shape \(B, 20\), got \[3, 4\]"),
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
        )


def test_rejected_parameters():
    pack = torch.ops.dpa.unet1d_batch_pack
    parameters = _meta()
    head = "^dpa::unet1d_batch_pack: "
    with pytest.raises(RuntimeError, match=head + "dtype must be float16 or bfloat16, got Float"):
        pack(parameters, CONFIG, torch.float32)
    with pytest.raises(RuntimeError, match=head + "parameters must be the .* tensors"):
        pack(parameters[1:], CONFIG, torch.bfloat16)
    with pytest.raises(RuntimeError, match=head + "config must have down_dims"):
        pack(parameters, [2, 5, 4, 32, 20, 1, 64, 132], torch.bfloat16)
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
