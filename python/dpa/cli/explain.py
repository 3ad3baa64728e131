"""The ``dpa explain`` command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dpa.cli.options import Checkpoint, Ema, Json, Prefix, TrustPickle, located

if TYPE_CHECKING:
    from dpa.checkpoints.loading import Checkpoint as Loaded

# What dpa.accelerate does with a policy of LeRobot whose network is no U-Net.
_AROUND = "the whole loop around its own network, on a GPU one CUDA graph of its trace"

HELP = """Show the U-Net in a checkpoint, and how dpa runs it.

CHECKPOINT is of LeRobot (a folder, or user/repo on the Hub), of diffusion_policy or robomimic, of
`dpa demo`, or a bare U-Net's weights. The network's sizes follow from the shapes; of a LeRobot
folder without weights, from its config.json. Nothing is changed.

Examples:

  dpa explain outputs/train/checkpoints/last/pretrained_model

  dpa explain lerobot/diffusion_pusht

  dpa explain latest.ckpt --trust-pickle
"""


def explain(
    checkpoint: Checkpoint,
    prefix: Prefix = None,
    ema: Ema = True,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Show the U-Net in a checkpoint, and how dpa runs it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    import dpa
    from dpa.checkpoints.described import described
    from dpa.checkpoints.loading import read_config

    path = located(checkpoint)
    config = read_config(path / "config.json") if path.is_dir() else {}
    if config.get("type") == "multi_task_dit":
        facts = {"checkpoint": str(checkpoint), "policy": config["type"], "accelerated": _AROUND}
    else:
        if config and not any(path.glob("*.safetensors")):
            loaded = described(path)
        else:
            loaded = dpa.load_checkpoint(path, prefix=prefix, ema=ema, trust_pickle=trust_pickle)
        facts = _facts_of(loaded, str(checkpoint), as_json)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        text = f"{value:,}" if key == "parameters" else str(value)
        table.add_row(f"[bold]{key}[/bold]", escape("none" if value == [] else text))
    Console().print(table)


def _facts_of(loaded: Loaded, checkpoint: str, as_json: bool) -> dict[str, Any]:
    import dpa

    parameters, report = list(loaded.unet.parameters()), dpa.explain(loaded.unet)
    arguments = {"arguments": loaded.arguments} if as_json else loaded.arguments
    return {
        "checkpoint": checkpoint,
        "weights": loaded.source or "(the file itself)",
        "other U-Nets": list(loaded.others),
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "horizon": f"a multiple of {loaded.unet.horizon_multiple}",
        **arguments,
        "accelerated": report.to_dict() if as_json else str(report),
    }
