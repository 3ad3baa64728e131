"""Recognising the networks of the family, and what is not one."""

import pytest
import torch
from architectures import architectures
from hypothesis import given, settings
from lerobot_names import lerobot_name
from policies import lerobot_unet
from torch import nn

import dpa
from dpa.nn import family
from dpa.nn.family import NotInFamily

SMALL = {"input_dim": 2, "diffusion_step_embed_dim": 8, "down_dims": (8, 16), "global_cond_dim": 3}


@given(architectures())
@settings(max_examples=25, deadline=None)
def test_arguments_follow_from_the_shapes(arguments):
    unet = family.template(arguments)
    found = family.arguments_from_shapes(dict(unet.named_parameters()), arguments["n_groups"])
    assert {"local_cond_dim": None, **found} == arguments
    assert {"local_cond_dim": None, **family.recognise(unet).arguments} == arguments


@given(architectures())
@settings(max_examples=10, deadline=None)
def test_lerobot_is_recognised_as_the_same_network(arguments):
    del arguments["local_cond_dim"]
    with torch.device("meta"):
        theirs = lerobot_unet(arguments)
    network = family.recognise(theirs)
    assert network.arguments == arguments
    assert network.inputs == ("x", "timestep", "global_cond")
    assert network.parameters().keys() == dict(family.template(arguments).named_parameters()).keys()
    names = dict(theirs.named_parameters())
    assert all(lerobot_name(key) in names for key in network.slots)
    assert all(family.original_name(key) in network.slots for key in names)


def test_prefixes_are_found_under_every_wrapper():
    names = [
        "diffusion.unet._orig_mod.down_modules.0.0.conv1.block.0.weight",
        "module.model.down_modules.0.0.blocks.0.block.0.weight",
        "module.model.down_modules.0.0.blocks.0.block.0.bias",
        "obs_encoder.down_modules.0.0.weight",
    ]
    assert family.prefixes(names) == ["diffusion.unet._orig_mod.", "module.model."]


def test_what_differs_is_named():
    with pytest.raises(NotInFamily, match="Linear has no diffusion_step_encoder, down_modules"):
        family.recognise(nn.Linear(2, 2))
    unet = dpa.nn.ConditionalUnet1D(**SMALL)
    unet.mid_modules[0].blocks[0].block[2] = nn.SiLU()
    with pytest.raises(NotInFamily, match=r"mid_modules\.0\..*\.2 must be Mish\(\), got SiLU"):
        family.recognise(unet)
    unet.mid_modules[0].blocks[0].block[2] = nn.Module()
    with pytest.raises(NotInFamily, match=r"mid_modules\.0\..*\.2 must be Mish\(\), got Module"):
        family.recognise(unet)
    unet = dpa.nn.ConditionalUnet1D(**SMALL)
    unet.final_conv[1] = type("Other", (nn.Conv1d,), {})(8, 2, 1)
    with pytest.raises(NotInFamily, match=r"final_conv\.1 must be .*Conv1d\(8, 2, .*got Other"):
        family.recognise(unet)
    unet = dpa.nn.ConditionalUnet1D(**SMALL)
    unet.mid_modules[0].blocks[0].block[1].eps = 1e-3
    with pytest.raises(NotInFamily, match=r"must be GroupNorm\(8, 16, eps=1e-05"):
        family.recognise(unet)
    unet = dpa.nn.ConditionalUnet1D(**SMALL)
    unet.extra = nn.Linear(2, 2)
    with pytest.raises(NotInFamily, match=r"unexpected: extra.weight \(2, 2\) and 1 more"):
        family.recognise(unet)
    unet = dpa.nn.ConditionalUnet1D(**SMALL)
    unet.mid_modules[1] = nn.Identity()
    with pytest.raises(NotInFamily, match=r"missing: mid_modules.1.*and \d+ more"):
        family.recognise(unet)

    class Other(dpa.nn.ConditionalUnet1D):
        def forward(self, sample, timestep, image):
            return sample

    with pytest.raises(NotInFamily, match=r"forward must take .* got \(sample, timestep, image\)"):
        family.recognise(Other(**SMALL))


def test_switched_off_conditioning_becomes_a_constant_film():
    """DP3's use_*_condition=False runs those blocks without FiLM."""
    unet = dpa.nn.ConditionalUnet1D(**SMALL, cond_predict_scale=True)
    unet.use_up_condition = False
    weights = family.recognise(unet).weights()
    bias = weights["up_modules.0.0.cond_encoder.1.bias"]
    assert bias.tolist() == [1.0] * 8 + [0.0] * 8
    assert not weights["up_modules.0.1.cond_encoder.1.weight"].any()
    down = "down_modules.0.0.cond_encoder.1.weight"
    assert torch.equal(weights[down], unet.get_parameter(down))
