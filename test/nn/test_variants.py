"""Recognising the published near-copies: which entry each is, and which parts PyTorch runs."""

from pathlib import Path

import near_copies
import pytest
import torch
from torch import nn

import dpa
from dpa.nn import family
from dpa.nn.family import NotInFamily
from dpa.nn.network import shapes, template
from dpa.nn.parts import ENCODER, place
from dpa.nn.variants import VARIANTS

FILM = "the layers that make FiLM's parameters"
CONDITION, EMBEDDING = "the conditioning", "the timestep's embedding"
# its entry, the network, what PyTorch runs, whether packed weights hold the rest on any device
ROWS = [
    ("diffusion_policy", lambda: near_copies.DP3(2, 4), [], True),
    ("diffusion_policy", lambda: near_copies.ManiSkill(2, 4), [], True),
    ("diffusion_policy", lambda: near_copies.DP3(2, 4, film="mlp_film"), [FILM], False),
    ("Simple DP3", lambda: near_copies.DP3(2, 4, per_level=1), [], True),
    ("FlowPolicy", lambda: near_copies.DP3(2, 4, var_est=True), [], True),
    ("Consistency Policy", lambda: near_copies.ConsistencyPolicy(2, 4), [CONDITION], True),
    ("Streaming", lambda: near_copies.StreamingPolicy(2, 4), [EMBEDDING], False),
    ("DPPO", lambda: near_copies.DPPO(2, 6), [CONDITION, FILM], False),
    ("DPPO", lambda: near_copies.DPPO(2, 6, film="film", eps=1e-4), [CONDITION], True),
    ("DPPO", lambda: near_copies.DPPO(2, 6, film="film", act=nn.ReLU), [CONDITION, FILM], False),
    ("CleanDiffuser", lambda: near_copies.ChiUnet(2, 3, 2), [CONDITION, EMBEDDING], False),
    ("Diffuser", lambda: near_copies.TemporalUnet(2), [], True),
    ("Diffuser", lambda: near_copies.TemporalUnet(2, attention=True), ["attention"], False),
]


@pytest.mark.parametrize(("policies", "make", "parts", "packs"), ROWS)
def test_each_is_recognised(policies, make, parts, packs):
    network = family.recognise(unet := make())
    assert network.parts_in_words() == parts
    assert network.variant.policies.startswith(policies)
    own = {id(p) for p in unet.parameters()}
    assert {id(p) for p in network.parameters().values()} == own
    wanted = shapes(template(network.packed_arguments))
    assert {name: value.shape for name, value in network.weights().items()} == wanted
    if packs:
        config = dpa.packed.config.config_of(network)
        names = torch.ops.dpa.unet1d_weight_names(config)
        assert network.weights().keys() >= set(names)
    else:
        with pytest.raises(ValueError, match="unet must "):
            dpa.packed.config.config_of(network)
    assert family.resembles(unet)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.policies)
def test_the_documentation_has_a_row_of_each(variant):
    table = (Path(__file__).parents[2] / "docs" / "works-with.md").read_text()
    assert f"\n| {variant.policies} |" in table


def test_one_mark_fits_each():
    """The order of the entries decides nothing but that the original comes last."""
    for _, make, *_ in ROWS:
        unet = make()
        names = [name for name, _ in unet.named_parameters()]
        names += type(unet).forward.__code__.co_varnames
        assert sum(variant.fits(names) for variant in VARIANTS if variant.mark) <= 1


def test_blocks_that_are_not_there_add_nothing():
    """Packed as a network of two blocks a level, the second of which add zero."""
    simple = near_copies.DP3(2, 4, per_level=1).eval()
    full = dpa.nn.ConditionalUnet1D(
        **family.recognise(simple).arguments | {"diffusion_step_embed_dim": 16}
    ).eval()
    full.load_state_dict(family.recognise(simple).weights())
    sample, cond = torch.randn(2, 8, 2), torch.randn(2, 4)
    with torch.no_grad():
        want = simple(sample, 3, None, cond)
        torch.testing.assert_close(full(sample, 3, None, cond), want, rtol=1e-5, atol=1e-5)


def test_another_eps_becomes_a_factor():
    unet = near_copies.DPPO(2, 6, film="film", eps=1e-2).eval()
    network = family.recognise(unet)
    assert network.eps == 1e-2
    same = dpa.nn.ConditionalUnet1D(**network.arguments).eval()
    same.load_state_dict(network.weights())
    sample, state = torch.randn(2, 8, 2), torch.randn(2, 2, 3)
    with torch.no_grad():
        want = unet(sample, 3, {"state": state})
        got = same(sample, 3, None, state.flatten(1))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_none_says_why():
    unet = near_copies.DPPO(2, 6)
    unet.mid_modules[0].blocks[1].block[4] = nn.ReLU()
    with pytest.raises(NotInFamily, match=r"must be Mish\(\), got ReLU"):
        family.recognise(unet)
    unet = near_copies.DPPO(2, 6, act=nn.ReLU)
    unet.final_conv[0].block[4] = nn.Mish()
    with pytest.raises(NotInFamily, match=r"must be ReLU\(\), got Mish"):
        family.recognise(unet)
    unet = near_copies.DP3(2, 4, film="cross_attention_film")
    with pytest.raises(NotInFamily, match=r"must have a .*cond_encoder\.1\.weight"):
        family.recognise(unet)
    unet = near_copies.DP3(2, 4, per_level=1)
    unet.mid_modules[0].blocks[0].block[1].eps = 1e-3
    with pytest.raises(NotInFamily, match=r"DP3.mid_modules\.0\..*must be GroupNorm\(8, 32, eps"):
        family.recognise(unet)
    unet = near_copies.TemporalUnet(2)
    unet.downs[0][0].blocks[0].block[4] = nn.SiLU()
    with pytest.raises(NotInFamily, match=r"downs\.0\.0\.blocks\.0\.block\.4 must be Mish"):
        family.recognise(unet)
    unet = near_copies.ChiUnet(2, 3, 2)
    unet.downs[0][0].conv1[1].eps = 1e-3
    with pytest.raises(NotInFamily, match=r"ChiUnet.*must be GroupNorm"):
        family.recognise(unet)

    class Other(near_copies.DPPO):
        def forward(self, x, time, image):
            return x

    with pytest.raises(
        NotInFamily, match=r"must take \(sample, time, cond\) .* \(x, time, image\)"
    ):
        family.recognise(Other(2, 6))
    # One block's FiLM is another: not a network of that kind, but one that somebody has changed.
    unet = near_copies.DP3(2, 4)
    unet.mid_modules[0].cond_encoder = (
        near_copies.DP3(2, 4, film="mlp_film").mid_modules[0].cond_encoder
    )
    with pytest.raises(NotInFamily, match=r"mid_modules\.0\.cond_encoder"):
        family.recognise(unet)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_of_any_kind_has_the_dtype_of_its_weights(dtype):
    """Sines are float32, whatever the weights are."""

    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.frequencies = nn.Parameter(torch.randn(1, 16))

        def forward(self, t):
            return (t.float()[:, None] @ self.frequencies).sin()

    unet = dpa.nn.ConditionalUnet1D(2, diffusion_step_embed_dim=16, down_dims=(16, 32))
    place(unet, ENCODER, Fourier())
    unet.to(dtype).eval()
    out = unet(torch.randn(3, 8, 2, dtype=dtype), torch.tensor([1, 5, 9]))
    assert out.dtype == dtype and out.isfinite().all()
