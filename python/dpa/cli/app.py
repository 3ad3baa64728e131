"""The ``dpa`` command: exit status 0 on success alone, errors of one clear line."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import dpa
from dpa.bench.command import HELP as BENCH_HELP
from dpa.bench.command import bench
from dpa.checkpoints.options import Checkpoint, Ema, Prefix, TrustPickle
from dpa.demo.command import HELP as DEMO_HELP
from dpa.demo.command import demo
from dpa.eval.command import HELP as EVAL_HELP
from dpa.eval.command import evaluate
from dpa.export.command import HELP as EXPORT_HELP
from dpa.export.command import export

app = typer.Typer(
    help="Fast registered operators for Diffusion Policy in PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _group() -> None:
    """Keep the commands as subcommands, even a single one."""


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Versions, device, architectures, every op with its keys, and a smoke test.

    Says what to do about each problem found. Fails if the smoke test fails on any device.

    Examples:

      dpa info

      dpa info --json
    """
    facts = dpa.info()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_info(facts)
    if any(result != "ok" for result in facts["smoke test"].values()):
        raise typer.Exit(1)


@app.command()
def explain(
    checkpoint: Checkpoint,
    prefix: Prefix = None,
    ema: Ema = True,
    trust_pickle: TrustPickle = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the U-Net in a checkpoint, and how dpa runs it.

    CHECKPOINT is of LeRobot (a folder), of diffusion_policy or robomimic, of `dpa demo`, or a bare
    U-Net's weights. The network's sizes follow from the shapes; nothing is changed.

    Examples:

      dpa explain outputs/train/checkpoints/last/pretrained_model

      dpa explain latest.ckpt --trust-pickle
    """
    loaded = dpa.load_checkpoint(checkpoint, prefix=prefix, ema=ema, trust_pickle=trust_pickle)
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


app.command(help=DEMO_HELP)(demo)
app.command(help=BENCH_HELP)(bench)
app.command(help=EXPORT_HELP)(export)
app.command("eval", help=EVAL_HELP)(evaluate)


def _print_info(facts: dict) -> None:
    console = Console()
    summary = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key in ("dpa", "torch", "python", "cuda", "library", "built for"):
        summary.add_row(f"[bold]{key}[/bold]", str(facts[key] or "not available"))
    for device, name in facts["devices"].items():
        result = facts["smoke test"][device]
        mark = "[green]works[/green]" if result == "ok" else f"[red]{result}[/red]"
        summary.add_row(f"[bold]{device}[/bold]", f"{name}: {mark}")
    console.print(summary)
    for line in facts["advice"]:
        console.print(f"[yellow]to do[/yellow]  {escape(line)}", highlight=False)
    ops = Table("op", "kernels", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, keys in facts["ops"].items():
        ops.add_row(name, " ".join(keys))
    console.print(ops)


def _flowing(text: str) -> str:
    """Join the lines of each paragraph, which the terminal's width shall break; examples stay."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)


for _command in app.registered_commands:
    _command.help = _flowing(_command.help or inspect.getdoc(_command.callback) or "")


def main() -> None:
    """Run the command line; an expected failure is one line on standard error."""
    try:
        app()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"dpa: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
