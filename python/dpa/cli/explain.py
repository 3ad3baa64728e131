"""The ``dpa explain`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpa.cli.options import Checkpoint, Ema, Json, Prefix, TrustPickle, located

if TYPE_CHECKING:
    from dpa.checkpoints.loading import Checkpoint as Loaded
    from dpa.checkpoints.near_copies import NearCopy

_OWN_CLASS = "an object of its own class, which dpa.accelerate takes"
# What dpa.accelerate does with policies of LeRobot whose network is no U-Net.
_AROUND = "the whole loop around its own network, on a GPU one CUDA graph of its trace"
_NO = "no: it has no denoising loop that dpa knows"
# LeRobot's policies without one, to 0.6. Others may be anybody's, and hold a U-Net.
_WITHOUT = (
    *("act", "eo1", "evo1", "fastwam", "gaussian_actor", "groot", "lingbot_va", "molmoact2"),
    *("pi0", "pi05", "pi0_fast", "reward_classifier", "robometer", "sac", "sarm", "smolvla"),
    *("tdmpc", "topreward", "vla_jepa", "vqbet", "wall_x", "xvla"),
)


def explain(
    checkpoint: Checkpoint,
    prefix: Prefix = None,
    ema: Ema = True,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Show the U-Net in a checkpoint, and how dpa runs it.

    CHECKPOINT is of LeRobot (a folder, or user/repo on the Hub), of diffusion_policy or robomimic,
    of `dpa demo`, or a bare U-Net's weights. The network's sizes follow from the shapes; of a
    LeRobot folder without weights, from its config.json, and of the Hub that alone is fetched where
    it says enough. Near-copies of other projects are recognised by their parameters. Nothing is
    changed.

    Examples:

      dpa explain outputs/train/checkpoints/last/pretrained_model

      dpa explain lerobot/diffusion_pusht

      dpa explain latest.ckpt --trust-pickle
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from dpa.checkpoints.files import read_config
    from dpa.checkpoints.loading import NearCopyError, NoUnetError

    path = located(checkpoint, only="config.json")
    config = read_config(path / "config.json") if path.is_dir() else {}
    policy = {"checkpoint": str(checkpoint), "policy": config.get("type")}
    if config.get("type") == "multi_task_dit":
        facts = policy | {"accelerated": _AROUND}
    elif config.get("type") in _WITHOUT:
        facts = policy | {"accelerated": _NO}
    else:
        try:
            options = {"prefix": prefix, "ema": ema, "trust_pickle": trust_pickle}
            facts = _facts_of(_read(path, checkpoint, config, options), checkpoint, as_json)
        except NearCopyError as error:
            facts = _facts_of_near_copy(error.found, checkpoint, as_json)
        except NoUnetError:
            if config.get("type") in (None, "diffusion"):
                raise
            facts = policy | {"accelerated": _NO}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        text = f"{value:,}" if key == "parameters" else str(value)
        table.add_row(f"[bold]{key}[/bold]", escape("none" if value == [] else text))
    Console().print(table)


def _read(path: Path, checkpoint: str, config: dict[str, Any], options: dict[str, Any]) -> Loaded:
    """Read weights, or what LeRobot's configuration says where there are none here."""
    import dpa
    from dpa.checkpoints.described import described
    from dpa.checkpoints.files import CheckpointError

    on_hub = not Path(checkpoint).exists()
    bare = on_hub or not any(path.glob("*.safetensors"))
    if config and bare and options["prefix"] is None:
        try:
            return described(path)
        except CheckpointError:
            if not on_hub:
                raise
    path = located(checkpoint) if on_hub else path
    return dpa.load_checkpoint(path, **options)


def _facts_of(loaded: Loaded, checkpoint: str, as_json: bool) -> dict[str, Any]:
    import dpa

    parameters, report = list(loaded.unet.parameters()), dpa.explain(loaded.unet)
    facts = {
        "checkpoint": checkpoint,
        **_sizes(loaded, sum(p.numel() for p in parameters), parameters[0].dtype, as_json),
        "accelerated": report.to_dict() if as_json else str(report),
    }
    if loaded.perhaps:
        width = loaded.arguments["global_cond_dim"] - loaded.arguments["diffusion_step_embed_dim"]
        facts["perhaps"] = (
            f"{loaded.perhaps}'s student, whose weights have the same names and shapes: then its "
            f"global_cond_dim is {width or None}, and only {_OWN_CLASS}, runs accelerated"
        )
    return facts


def _facts_of_near_copy(found: NearCopy, checkpoint: str, as_json: bool) -> dict[str, Any]:
    parts = f"; PyTorch runs {', '.join(found.by_pytorch)}" if found.by_pytorch else ""
    around = "; dpa runs the loop around its network, which as published fails in such a loop"
    return {
        "checkpoint": checkpoint,
        "network of": found.policies,
        **_sizes(found, found.parameters, found.dtype, as_json),
        "accelerated": _OWN_CLASS + (parts if found.in_family else around),
    }


def _sizes(
    found: Loaded | NearCopy, parameters: int, dtype: object, as_json: bool
) -> dict[str, Any]:
    return {
        "weights": found.source or "(the file itself)",
        "other U-Nets": list(found.others),
        "parameters": parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "horizon": f"a multiple of {2 ** (len(found.arguments['down_dims']) - 1)}",
        **({"arguments": found.arguments} if as_json else found.arguments),
    }
