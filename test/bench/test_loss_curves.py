"""Training on dpa follows the loss curve of plain PyTorch: a short run of the demo's policy."""

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("matplotlib")

from dpa.bench import loss_curves
from dpa.bench.train import DPA, EAGER


@pytest.mark.parametrize("lower", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_losses_are_those_of_pytorch(device, monkeypatch, lower):
    """Step by step on equal weights and batches; another seed is far outside the tolerance."""
    cuda = device.type == "cuda"
    monkeypatch.setattr(loss_curves.demo, "BATCH_SIZE", 256 if cuda else 32)
    monkeypatch.setattr(loss_curves.demo, "DEMONSTRATIONS", 100)
    widths = (256, 512) if cuda else (32, 64)
    data = loss_curves.demonstrations(device)
    run = lambda how, seed: torch.tensor(  # noqa: E731
        loss_curves.curve(data, how, widths, lower, seed, 20)
    )
    plain, ours, other = run(EAGER, 0), run(DPA, 0), run(EAGER, 1)
    assert plain[-5:].mean() < 0.9 * plain[:5].mean(), "it learns"
    error = lambda x: ((x - plain).square().mean().sqrt() / plain.mean()).item()  # noqa: E731
    assert error(ours) < (1e-2 if lower else 1e-3 if cuda else 1e-5)
    assert error(other) > 4e-2
