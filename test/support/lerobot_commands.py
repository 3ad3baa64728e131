"""LeRobot's commands in this process, with the plugin installed or absent."""

import logging
import sys
from pathlib import Path

import pytest
import torch

from dpa.acceleration import construction
from dpa.acceleration.policy_loop import FastLoop
from dpa.tracking.replacing import replaced

PLUGIN = Path(__file__).parents[2] / "plugins" / "lerobot"
NAME = "lerobot_policy_dpa"


def install_plugin(folder, monkeypatch):
    """Leave the plugin as pip does: a module, and a folder that names the distribution."""
    monkeypatch.syspath_prepend(PLUGIN)
    facts = folder / "site" / f"{NAME}-0.1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    monkeypatch.syspath_prepend(facts.parent)


def unload_plugin():
    """Leave policies that are made from now on as they are."""
    construction.leave_new()
    sys.modules.pop(NAME, None)


def policies_made(monkeypatch):
    """Return a list that every policy joins that is made from now on."""
    modeling = sys.modules["lerobot.policies.diffusion.modeling_diffusion"]
    found, construct = [], modeling.DiffusionPolicy.__init__

    def init(self, *args, **kwargs):
        found.append(self)
        construct(self, *args, **kwargs)

    monkeypatch.setattr(modeling.DiffusionPolicy, "__init__", init)
    return found


def command(name, monkeypatch, **options):
    """Run a command of LeRobot's in this process."""
    main = pytest.importorskip(f"lerobot.scripts.lerobot_{name}", exc_type=ImportError).main
    given = [f"--{option.replace('__', '.')}={value}" for option, value in options.items()]
    monkeypatch.setattr(sys, "argv", [f"lerobot-{name}", *given])
    docstring = pytest.importorskip("draccus.wrappers.docstring")
    # The text of --help, for which every configuration's source is parsed: 20 s of CPU time.
    no_help = docstring.AttributeDocString()
    monkeypatch.setattr(docstring, "get_attribute_docstring", lambda *_: no_help)
    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    settings = cudnn.benchmark, matmul.allow_tf32
    try:
        main()
    finally:  # what commands set for their process
        root.handlers[:] = handlers
        cudnn.benchmark, matmul.allow_tf32 = settings


def is_fast(policy):
    """Whether a policy runs accelerated."""
    return isinstance(replaced(policy.diffusion, "conditional_sample"), FastLoop)


def largest_error(policy):
    """Return the largest difference that a comparison with the original found."""
    return max(replaced(policy.diffusion, "conditional_sample").shadow.errors.values())
