"""diffusion_policy's own training loop, unedited, with and without acceleration."""

import pytest
import torch
import workspace
from torch.testing import assert_close

from dpa.acceleration import construction
from dpa.acceleration.policy_loop import FastLoop
from dpa.acceleration.unet_forward import FastForward
from dpa.tracking.replacing import replaced
from dpa.training.graphed_calls import replaced_forward


@pytest.fixture
def kind(monkeypatch):
    """Import the workspace; policies are no longer accelerated afterwards."""
    kind = workspace.workspace_class(monkeypatch)
    if kind is None:
        pytest.skip("diffusion_policy's source tree is not on PYTHONPATH")
    yield kind
    construction.leave_new()


def _run(kind, folder, device):
    folder.mkdir()
    made = kind(workspace.configuration(str(device)), output_dir=str(folder))
    made.run()
    made._saving_thread.join()
    return made, workspace.logged(folder)


def test_a_run_trains_and_acts_as_before(kind, tmp_path, device):
    plain, expected = _run(kind, tmp_path / "plain", device)
    lines = []
    construction.accelerate_new(lines.append)
    fast, found = _run(kind, tmp_path / "fast", device)
    assert len(lines) == 1 and "U-Net" in lines[0]
    forward, loop = (
        replaced_forward(fast.model.model),
        replaced(fast.ema_model, "conditional_sample"),
    )
    assert isinstance(forward, FastForward) and forward.shadow.agreed and not forward.shadow.failed
    assert isinstance(loop, FastLoop) and loop.shadow.agreed and not loop.shadow.failed
    assert len(found) == len(expected) == 2 * 3
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys() and {"train_loss", "lr"} <= one.keys()
        assert_close(one, other, rtol=1e-3, atol=1e-4)
    for name in ("model", "ema_model"):
        weights, wanted = (getattr(w, name).state_dict() for w in (fast, plain))
        assert weights.keys() == wanted.keys()
        assert_close(dict(weights), dict(wanted), rtol=1e-3, atol=1e-4)
    import dill  # as the workspace does

    saved = tmp_path / "fast" / "checkpoints" / "latest.ckpt"
    payload = torch.load(saved, pickle_module=dill, weights_only=False, map_location="cpu")
    assert_close(dict(payload["state_dicts"]["ema_model"]), dict(fast.ema_model.cpu().state_dict()))
