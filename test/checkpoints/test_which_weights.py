"""Which of a file's weights and settings are taken: by their names and modules, never by order."""

import argparse

import pytest
import torch
from lerobot_names import lerobot_name

import dpa
from dpa.checkpoints.files import CheckpointError
from dpa.checkpoints.loading import load_checkpoint

UNET = {"global_cond_dim": 5, "diffusion_step_embed_dim": 8, "down_dims": (8, 16), "n_groups": 4}


@pytest.fixture
def network():
    return dpa.reference.plain(dpa.nn.ConditionalUnet1D(3, **UNET)).eval()


@pytest.fixture
def states(network):
    """Raw weights, and averages."""
    raw = network.state_dict()
    return raw, {name: value + 1 for name, value in raw.items()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.ckpt"


def under(prefix, state):
    return {prefix + name: value for name, value in state.items()}


CONTENTS = {
    "a word that says no": lambda raw, averaged: {"non_ema_model": raw, "ema_model": averaged},
    "another": lambda raw, averaged: {"model_no_ema": raw, "model_ema": averaged},
    "a shared word": lambda raw, averaged: {"ema": {"model": raw, "ema_model": averaged}},
    "one dict": lambda raw, averaged: {
        "ema": under("online_model.", raw) | under("ema_model.", averaged)
    },
    "stochastic weight averaging": lambda raw, averaged: {"model": raw, "swa_model": averaged},
    "an average": lambda raw, averaged: {"model": raw, "model_average": averaged},
    "no underscore": lambda raw, averaged: {"model": raw, "emaModel": averaged},
    "Lightning": lambda raw, averaged: {
        "state_dict": under("model.", averaged),
        "current_model_state": under("model.", raw),
        "averaging_state": {"n_averaged": torch.tensor(3)},
    },
    "moments": lambda raw, averaged: {
        "optimizer": {"exp_avg": raw},
        "grads": raw,
        "model": raw,
        "ema_model": averaged,
    },
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("name", CONTENTS)
def test_averages_by_name(name, ema, reverse, states, path):
    content = CONTENTS[name](*states)
    torch.save(dict(reversed(content.items())) if reverse else content, path)
    loaded = load_checkpoint(path, ema=ema, n_groups=4)
    found = loaded.unet.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in states[ema].items())
    assert len(loaded.others) == 1


def test_averages_without_names(states, path):
    averages = {"shadow_params": list(states[1].values()), "decay": 0.99}
    torch.save({"model": states[0], "ema": averages}, path)
    with pytest.raises(CheckpointError, match="averages must have names, got averages in a list"):
        load_checkpoint(path, n_groups=4)
    assert load_checkpoint(path, n_groups=4, ema=False).source == "model: "


@pytest.mark.parametrize(
    "second",
    [
        lambda averaged: under("model._orig_mod.", averaged),
        lambda averaged: {f"model.{lerobot_name(name)}": v for name, v in averaged.items()},
    ],
)
def test_two_tensors_of_one_name(second, states, path):
    torch.save(under("model.", states[0]) | second(states[1]), path)
    with pytest.raises(CheckpointError, match="two tensors have one name"):
        load_checkpoint(path, n_groups=4)


@pytest.mark.parametrize(
    "settings",
    [
        {"hyper_parameters": {"n_groups": 4, "action_mean": torch.zeros(3)}},
        {"cfg": {"nets": [{"kind": "unet", "n_groups": 4}]}},
        {"args": argparse.Namespace(unet={"n_groups": 4})},
    ],
)
def test_groups_wherever_a_configuration_has_them(settings, states, path):
    around = []
    around.append(around)
    torch.save({"state_dict": states[0], "around": around, **settings}, path)
    assert load_checkpoint(path, trust_pickle=True).arguments["n_groups"] == 4


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pickled_network_says_its_groups(wrapped, network, path):
    around = torch.nn.ModuleDict({"unet": network, "encoder": torch.nn.GroupNorm(2, 4)})
    torch.save({"model": around if wrapped else network}, path)
    assert load_checkpoint(path, trust_pickle=True).arguments["n_groups"] == 4
    for module in network.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.eps = 0.3
    torch.save({"model": network}, path)
    with pytest.raises(CheckpointError, match=r"norms must have an eps of 1e-5, got 0\.3"):
        load_checkpoint(path, trust_pickle=True)
