"""Reading U-Nets out of checkpoints."""

from .loading import Checkpoint, CheckpointError, load_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint"]
