"""Checkpoints of every layout, and files that are damaged, hostile or something else."""

import collections
import json
import math
import os
import pickle
import random
import zipfile

import near_copies
import pytest
import torch
from lerobot_names import lerobot_name
from typer.testing import CliRunner

import dpa
from dpa import cli
from dpa.checkpoints import loading
from dpa.checkpoints.loading import (
    CheckpointError,
    load_checkpoint,
    unet_from_state_dict,
)
from dpa.nn import family

ARGUMENTS = {
    "input_dim": 3,
    "global_cond_dim": 5,
    "diffusion_step_embed_dim": 8,
    "down_dims": (8, 16),
    "kernel_size": 5,
    "n_groups": 8,
    "cond_predict_scale": True,
}


@pytest.fixture
def unet():
    return dpa.nn.ConditionalUnet1D(**ARGUMENTS)


def equal(unet, state):
    return all(torch.equal(v, state[k]) for k, v in unet.state_dict().items())


def prefixed(state, prefix):
    return {prefix + name: value for name, value in state.items()}


def lerobot_names(state):
    return {lerobot_name(name): value for name, value in state.items()}


LAYOUTS = {
    "bare": lambda s: s,
    "original": lambda s: {"state_dict": prefixed(s, "model.") | {"normalizer.x": torch.ones(2)}},
    "lerobot": lambda s: prefixed(lerobot_names(s), "diffusion.unet."),
    "lerobot_compiled": lambda s: prefixed(lerobot_names(s), "diffusion.unet._orig_mod."),
    "ddp": lambda s: prefixed(s, "module.model."),
    "robomimic": lambda s: {
        "model": {
            "nets": prefixed(s, "policy.noise_pred_net.") | {"policy.obs_encoder.x": torch.ones(2)},
            "optimizers": {"policy": {"state": {0: {"exp_avg": torch.ones(2)}}}},
            "ema": None,
        },
        "config": json.dumps({"algo": {"unet": {"n_groups": 8}}}),
        "algo_name": "diffusion_policy",
    },
    "nomad": lambda s: prefixed(s, "noise_pred_net.") | {"dist_pred_net.x": torch.ones(2)},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, unet, tmp_path):
    torch.save(LAYOUTS[name](unet.state_dict()), tmp_path / "model.pt")
    loaded = load_checkpoint(tmp_path / "model.pt")
    assert equal(loaded.unet, unet.state_dict()) and loaded.arguments == ARGUMENTS
    assert not loaded.unet.training and not loaded.others


def test_weights_that_are_not_finite_are_read_as_they_are(unet, tmp_path):
    state = {name: value.clone() for name, value in unet.state_dict().items()}
    for at, value in enumerate(state.values()):
        value.view(-1)[at % value.numel()] = (math.nan, math.inf, -math.inf)[at % 3]
    torch.save(state, tmp_path / "model.pt")
    loaded = load_checkpoint(tmp_path / "model.pt").unet.state_dict()
    assert all(
        torch.equal(v.view(torch.int32), state[k].view(torch.int32)) for k, v in loaded.items()
    )


def test_averaged_weights_come_first(unet, tmp_path):
    state = unet.state_dict()
    averaged = {name: value + 1 for name, value in state.items()}
    content = {"model": prefixed(state, "model."), "ema_model": prefixed(averaged, "model.")}
    torch.save({"state_dicts": content}, tmp_path / "latest.ckpt")
    loaded = load_checkpoint(tmp_path / "latest.ckpt")
    assert equal(loaded.unet, averaged) and loaded.source == "state_dicts.ema_model: model."
    assert loaded.others == ("state_dicts.model: model.",)
    assert equal(load_checkpoint(tmp_path / "latest.ckpt", ema=False).unet, state)


@pytest.mark.parametrize("name", ["semantic", "schema", "demand"])
def test_names_that_only_sound_averaged(name, unet, tmp_path):
    state, other = unet.state_dict(), {n: v + 1 for n, v in unet.state_dict().items()}
    torch.save(
        {"model": prefixed(state, "unet."), name: prefixed(other, "unet.")}, tmp_path / "a.pt"
    )
    assert equal(load_checkpoint(tmp_path / "a.pt").unet, state)


def test_robomimic_averages(unet, tmp_path):
    state = unet.state_dict()
    averaged = prefixed({name: value + 1 for name, value in state.items()}, "policy.net.")
    torch.save(
        {"model": {"nets": prefixed(state, "policy.net."), "ema": averaged}}, tmp_path / "a.pth"
    )
    loaded = load_checkpoint(tmp_path / "a.pth")
    assert loaded.source == "model.ema: policy.net."
    assert equal(loaded.unet, {name: value + 1 for name, value in state.items()})
    assert equal(load_checkpoint(tmp_path / "a.pth", ema=False).unet, state)


@pytest.mark.parametrize(
    "config",
    [
        {"cfg": {"policy": {"model": {"n_groups": 4}}}},  # diffusion_policy and DP3
        {"config": json.dumps({"algo": {"unet": {"n_groups": 4}}})},  # robomimic
    ],
)
def test_groups_follow_the_configuration(config, unet, tmp_path):
    torch.save({"state_dict": unet.state_dict(), **config}, tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt").arguments["n_groups"] == 4
    assert load_checkpoint(tmp_path / "a.pt", n_groups=2).arguments["n_groups"] == 2
    config["more"] = {"n_groups": 8, "self": config}
    torch.save({"state_dict": unet.state_dict(), **config}, tmp_path / tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"must have one n_groups, got (8, 4|4, 8)"):
        load_checkpoint(tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt", n_groups=2).arguments["n_groups"] == 2


def test_the_widest_of_several_dtypes(unet, tmp_path):
    state = unet.state_dict()
    first, *others = state
    torch.save({first: state[first].half()} | {n: state[n] for n in others}, tmp_path / "a.pt")
    assert equal(load_checkpoint(tmp_path / "a.pt").unet, {**state, first: state[first].half()})


@torch.no_grad()
def test_switched_off_conditioning_follows_the_configuration(unet, tmp_path):
    config = {"cfg": {"policy": {"use_down_condition": True, "use_mid_condition": False}}}
    torch.save({"state_dict": unet.state_dict(), **config}, tmp_path / "a.pt")
    loaded = load_checkpoint(tmp_path / "a.pt").unet
    unet.use_mid_condition = False
    expected = family.recognise(unet).weights()
    assert equal(loaded, expected) and not equal(loaded, unet.state_dict())


@pytest.mark.parametrize("value", ["no", "false", 0, None, "${policy.other}", [False]], ids=str)
def test_switches_that_are_neither_true_nor_false_are_refused(value, unet, tmp_path):
    """A word counts as true in Python, whatever it says."""
    config = {"cfg": {"policy": {"use_down_condition": value}}}
    torch.save({"state_dict": unet.state_dict(), **config}, tmp_path / tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="use_down_condition must be true or false, got "):
        load_checkpoint(tmp_path / "a.pt")


def test_nesting_has_a_limit_whatever_the_names(unet, tmp_path):
    """Empty names do not appear in the path of the weights."""
    content = unet.state_dict()
    for _ in range(400):
        content = {"": content}
    torch.save(content, tmp_path / tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds no conditional U-Net"):
        load_checkpoint(tmp_path / "a.pt")
    folder = tmp_path / "folder"
    folder.mkdir()
    pytest.importorskip("safetensors.torch").save_file(
        unet.state_dict(), folder / "model.safetensors"
    )
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config.json: is no JSON object"):
        load_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps({"config": "{" * 100_000}))
    assert equal(load_checkpoint(folder).unet, unet.state_dict())


def test_lerobot_folder(unet, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(
        prefixed(lerobot_names(unet.state_dict()), "diffusion.unet."),
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"n_groups": 4, "horizon": 16}))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        loaded = load_checkpoint(path)
        assert equal(loaded.unet, unet.state_dict()) and loaded.config["horizon"] == 16
        assert loaded.arguments["n_groups"] == 4


def test_a_partial_state_dict_lists_what_differs(unet):
    state = dict(unet.state_dict())
    del state["mid_modules.0.blocks.0.block.0.bias"]
    state["mid_modules.1.blocks.0.block.0.bias"] = torch.zeros(3)
    state["more"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as error:
        unet_from_state_dict(state)
    for line in (
        r"missing: mid_modules.0.blocks.0.block.0.bias (16,)",
        r"unexpected: more (2,)",
        r"shape: mid_modules.1.blocks.0.block.0.bias must be (16,), got (3,)",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize(
    ("make", "whose"),
    [
        (lambda: near_copies.DP3(2, 4, per_level=1), "Simple DP3"),
        (lambda: near_copies.DP3(2, 4, var_est=True), "FlowPolicy"),
        (lambda: near_copies.StreamingPolicy(2, 4), "Streaming Diffusion Policy"),
        (lambda: near_copies.DPPO(2, 6), "DPPO"),
    ],
)
def test_a_near_copy_is_called_by_its_name(make, whose, tmp_path):
    torch.save(
        {f"model.{name}": value for name, value in make().state_dict().items()}, tmp_path / "a.pt"
    )
    with pytest.raises(CheckpointError, match=f"it is that of {whose}.*dpa.accelerate"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_truncated_and_empty_files(suffix, unet, tmp_path):
    whole, part = tmp_path / f"whole.{suffix}", tmp_path / f"part.{suffix}"
    if suffix == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(unet.state_dict(), whole)
    else:
        torch.save(unet.state_dict(), whole)
    for size in (0, 100, whole.stat().st_size // 2):
        part.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(CheckpointError, match=f"part.{suffix}: is damaged"):
            load_checkpoint(part)


def test_flipped_bits_of_a_weight(unet, tmp_path):
    """torch.load does not look at the checksums that torch.save writes."""
    path = tmp_path / "flipped.pt"
    torch.save(unet.state_dict(), path)
    content = bytearray(path.read_bytes())
    middle = content.index(next(iter(unet.state_dict().values())).numpy().tobytes())
    content[middle + 1] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"flipped.pt: is damaged: the checksum of"):
        load_checkpoint(path)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_random_damage_raises_one_kind_of_error(suffix, unet, tmp_path):
    """Or leaves the weights as they were; a safetensors file has no checksum of them."""
    path, random_ = tmp_path / f"x.{suffix}", random.Random(0)
    if suffix == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(unet.state_dict(), path)
    else:
        torch.save(unet.state_dict(), path)
    whole = path.read_bytes()
    for _ in range(60):
        content = bytearray(whole)
        end = 2000 if suffix == "safetensors" else len(content)
        for _ in range(random_.choice([1, 4, 20])):
            content[random_.randrange(end)] ^= 1 << random_.randrange(8)
        path.write_bytes(content)
        try:
            loaded = load_checkpoint(path)
        except CheckpointError:
            continue
        assert suffix == "safetensors" or equal(loaded.unet, unet.state_dict())


def test_archives_that_unpack_to_more(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(CheckpointError, match=r"bomb.pt: holds packed entries"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda x: x.int(),
        lambda x: x.cfloat(),
        lambda x: x > 0,
        lambda x: x.to_sparse(),
        lambda x: x.to("meta"),
        lambda x: torch.quantize_per_tensor(x.contiguous(), 0.1, 0, torch.qint8),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.flatten()[:1].expand(2**40),
    ],
)
def test_weights_that_are_no_dense_floating_tensors(corrupt, unet):
    state = dict(unet.state_dict())
    name = next(n for n, x in state.items() if x.dim() == 3)
    state[name] = corrupt(state[name])
    with pytest.raises(CheckpointError, match=r"weights must be dense floating tensors"):
        unet_from_state_dict(state)


def test_dicts_without_an_end(unet, tmp_path):
    """One that holds itself, and one whose paths double with every level."""
    content = {"model": unet.state_dict()}
    content["again"] = content
    many = content
    for _ in range(60):
        many = {"left": many, "right": many}
    torch.save({"here": unet.state_dict(), "many": many, "self": content}, tmp_path / "x.pt")
    assert equal(load_checkpoint(tmp_path / "x.pt").unet, unet.state_dict())


@pytest.mark.parametrize("groups", ["x", 0, -3, None, True, 2.5, [8]])
def test_groups_that_are_no_number(groups, unet, tmp_path):
    pytest.importorskip("safetensors.torch").save_file(
        unet.state_dict(), tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"n_groups": groups}))
    with pytest.raises(CheckpointError, match=r"n_groups must be a positive integer"):
        load_checkpoint(tmp_path)


class Hostile:
    def __reduce__(self):
        return (os.mkdir, ("harm",))


@pytest.mark.parametrize("save", ["torch", "pickle"])
def test_a_hostile_pickle_is_not_run(save, tmp_path, monkeypatch, unet):
    monkeypatch.chdir(tmp_path)
    if save == "torch":
        torch.save({"model": unet.state_dict(), "cfg": Hostile()}, "bad.ckpt")
    else:
        (tmp_path / "bad.ckpt").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match=r"bad.ckpt: .*(trust_pickle=True|damaged)"):
        load_checkpoint("bad.ckpt")
    assert not (tmp_path / "harm").exists()


class Settings:
    """Stands for a configuration object of the training code."""


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"# a text\n", "it begins as neither"),
        (b"\x89PNG\r\n\x1a\n", "it begins as neither"),
        (b"PK, and no archive", "it begins as neither"),
        (b"PK\x03\x04, and no archive", "PytorchStreamReader failed"),
    ],
)
@pytest.mark.parametrize("trust", [False, True])
def test_a_file_of_another_kind_is_called_so(content, why, trust, tmp_path):
    path = tmp_path / "unet.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"damaged or no checkpoint: {why}"):
        load_checkpoint(path, trust_pickle=trust)


def test_trust_pickle_reads_objects_besides_tensors(unet, tmp_path):
    content = {"cfg": Settings(), "state_dicts": {"model": prefixed(unet.state_dict(), "model.")}}
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(
        CheckpointError, match=r"pickled objects besides tensors.*trust_pickle=True"
    ):
        load_checkpoint(tmp_path / "a.ckpt")
    loaded = load_checkpoint(tmp_path / "a.ckpt", trust_pickle=True)
    assert equal(loaded.unet, unet.state_dict())


class Interpolated(collections.UserDict):
    """As omegaconf's DictConfig, with an expression of hydra's inside, such as ${now:%Y.%m.%d}."""

    def items(self):
        raise ValueError("Unsupported interpolation type now")

    def items_ex(self, resolve):
        assert not resolve
        return self.data.items()


def test_expressions_in_a_configuration_stay_as_they_are(unet, tmp_path):
    config = Interpolated(name="${now:%H}", policy=Interpolated(model={"n_groups": 4}))
    torch.save({"cfg": config, "state_dicts": {"model": unet.state_dict()}}, tmp_path / "a.ckpt")
    loaded = load_checkpoint(tmp_path / "a.ckpt", trust_pickle=True)
    assert loaded.arguments["n_groups"] == 4


def test_files_without_a_unet(tmp_path, unet):
    torch.save({"weight": torch.zeros(2)}, tmp_path / tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds no conditional U-Net of the family"):
        load_checkpoint(tmp_path / tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_checkpoint(tmp_path / "b.pt")
    torch.save(unet.state_dict(), tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"under the prefix 'model\.'"):
        load_checkpoint(tmp_path / "c.pt", prefix="model.")
    both = prefixed(unet.state_dict(), "a.") | prefixed(unet.state_dict(), "b.")
    with pytest.raises(CheckpointError, match=r"must hold one U-Net, got a\., b\."):
        loading.unet_from_state_dict(both)


def test_explain_command(unet, tmp_path):
    torch.save(prefixed(unet.state_dict(), "model."), tmp_path / "a.pt")
    runner = CliRunner()
    result = runner.invoke(cli.app, ["explain", str(tmp_path / "a.pt"), "--json"])
    facts = json.loads(result.stdout)
    assert result.exit_code == 0 and facts["arguments"]["down_dims"] == [8, 16]
    assert facts["parameters"] == sum(p.numel() for p in unet.parameters())
    assert facts["accelerated"][0]["can"] is True
    result = runner.invoke(cli.app, ["explain", str(tmp_path / "a.pt")])
    assert result.exit_code == 0 and "can be accelerated" in " ".join(result.stdout.split())
    assert runner.invoke(cli.app, ["explain", str(tmp_path / "none.pt")]).exit_code != 0
