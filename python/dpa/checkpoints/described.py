"""The U-Net that LeRobot's configuration describes, where there are no weights yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpa.checkpoints.files import CheckpointError, read_config
from dpa.checkpoints.loading import Checkpoint
from dpa.library.checks import require
from dpa.nn.family import template


def described(folder: Path) -> Checkpoint:
    """Return the U-Net of a folder's ``config.json``, with weights of no meaning."""
    path = folder / "config.json"
    config = read_config(path)
    kind, rule = config.get("type"), "be 'diffusion' to describe a U-Net"
    require(kind == "diffusion", f"{path}: type", rule, repr(kind), CheckpointError)
    try:
        arguments = _arguments(config)
        unet = template(arguments)
    except KeyError as error:
        raise CheckpointError(f"{path}: lacks {error}, which the U-Net's sizes need") from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: describes no U-Net of the family: {error}") from None
    unet = unet.to_empty(device="cpu").eval()
    return Checkpoint(unet, arguments, "not read: the sizes are those of config.json", config)


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the network's arguments, by LeRobot's rules."""
    observed = config["input_features"]
    kinds = [feature["type"] for feature in observed.values()]
    vectors = {"observation.state": "STATE", "observation.environment_state": "ENV"}
    width = sum(
        feature["shape"][0]
        for name, feature in observed.items()
        if vectors.get(name) == feature["type"]
    )
    width += kinds.count("VISUAL") * 2 * config["spatial_softmax_num_keypoints"]
    return {
        "input_dim": config["output_features"]["action"]["shape"][0],
        "global_cond_dim": width * config["n_obs_steps"],
        "diffusion_step_embed_dim": config["diffusion_step_embed_dim"],
        "down_dims": tuple(config["down_dims"]),
        "kernel_size": config["kernel_size"],
        "n_groups": config["n_groups"],
        "cond_predict_scale": config["use_film_scale_modulation"],
    }
