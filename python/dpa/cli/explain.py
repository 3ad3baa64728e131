"""The ``dpa explain`` command."""

from __future__ import annotations

import json

from dpa.cli.options import Checkpoint, Ema, Json, Prefix, TrustPickle, located

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

    path = located(checkpoint)
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        loaded = described(path)
    else:
        loaded = dpa.load_checkpoint(path, prefix=prefix, ema=ema, trust_pickle=trust_pickle)
    parameters = list(loaded.unet.parameters())
    facts = {
        "checkpoint": str(checkpoint),
        "weights": loaded.source or "(the file itself)",
        "other U-Nets": list(loaded.others),
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "arguments": loaded.arguments,
        "horizon": f"a multiple of {loaded.unet.horizon_multiple}",
        "accelerated": dpa.explain(loaded.unet).to_dict(),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts |= facts.pop("arguments") | {"accelerated": str(dpa.explain(loaded.unet))}
    for key, value in facts.items():
        text = f"{value:,}" if key == "parameters" else str(value)
        table.add_row(f"[bold]{key}[/bold]", escape("none" if value == [] else text))
    Console().print(table)
