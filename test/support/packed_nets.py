"""The networks that the tests of packed weights share."""

import torch

import dpa
from dpa.packed.config import unet_config

# Relative error of a forward pass in the norm. float32: sums in float32, GEMMs in three tf32
# parts. bfloat16 and float16: weights and activations of 8 and 11 bits through some 30 layers.
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

NETS = {
    "small": {
        "input_dim": 2,
        "global_cond_dim": 7,
        "down_dims": (128, 256),
        "cond_predict_scale": True,
    },
    "no_scale": {
        "input_dim": 5,
        "global_cond_dim": 3,
        "down_dims": (64, 128, 256),
        "kernel_size": 5,
    },
    "unconditional": {
        "input_dim": 7,
        "down_dims": (32, 64),
        "n_groups": 4,
        "cond_predict_scale": True,
    },
    "one_level": {"input_dim": 2, "global_cond_dim": 4, "down_dims": (128,), "kernel_size": 7},
}
# A network of which several samples have a kernel of their own on Hopper.
SEVERAL = {
    "input_dim": 3,
    "global_cond_dim": 5,
    "down_dims": (256, 512),
    "cond_predict_scale": True,
}
# Both kernels that stay for a whole loop: a network, a batch.
RESIDENT = [("small", 1), ("several", 8), ("several", 20)]


def net(name, device):
    sizes = SEVERAL if name == "several" else NETS[name]
    unet = dpa.nn.ConditionalUnet1D(diffusion_step_embed_dim=32, **sizes).to(device).eval()
    for parameter in unet.parameters():  # biases and norms away from their plain beginnings
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return unet


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def cond_of(unet, batch, device):
    dim = unet_config(unet)[4]
    return torch.randn(batch, dim, device=device) if dim else None
