"""Write what the robot example opens: make_policies.py FOLDER.

Policies as `dpa export` writes them, each with an observation, noise, and the actions that Python
gets from the same file.
"""

import json
import shutil
import sys
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from exported import make_image_policy, make_policy
from make_models import Data

from dpa.export import ContinuingLoop, PackedLoop, export_policy, load_policy

POLICIES = [
    ("float32.pt", "torchscript", torch.float32, PackedLoop),
    ("bfloat16.pt", "torchscript", torch.bfloat16, PackedLoop),
    ("continuing.pt", "torchscript", torch.float32, ContinuingLoop),
    ("float32.pt2", "aoti", torch.float32, PackedLoop),
    ("bfloat16.pt2", "aoti", torch.bfloat16, PackedLoop),
    ("continuing.pt2", "aoti", torch.float32, ContinuingLoop),
]


def main(folder: Path) -> None:
    """Write each policy, and beside it POLICY.data."""
    for name, to, dtype, kind in POLICIES:
        policy = make_policy("ddpm", torch.device("cpu"), dtype, kind)[0]
        inputs = {"observation": torch.randn(1, 5), "noise": torch.randn(3, 1, 8, 2)}
        if kind is ContinuingLoop:
            inputs |= {"last_chunk": torch.randn(1, 8, 2), "weights": torch.rand(1, 8, 2)}
        write(folder / name, to, policy, inputs, inputs)
    policy, inputs = make_image_policy()
    *observations, noise = inputs.values()
    named = {f"observation_{place}": value for place, value in enumerate(observations)}
    facts = {"frames": 2}
    write(folder / "images.pt", "torchscript", policy, inputs, named | {"noise": noise}, facts)
    for part in ("float32.pt", "continuing.pt"):
        write_late(folder / part)
    write_damaged(folder / "continuing.pt")


class Late(torch.nn.Module):
    """Its first two actions, for the time before the newest observation, are no numbers."""

    def forward(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor,
        last_chunk: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ):
        if last_chunk is not None and weights is not None:  # what is left is numbers, if it holds
            assert bool(((weights == 0) | last_chunk.isfinite()).all())
        return torch.cat([torch.full((1, 2, 2), float("nan")), torch.zeros(1, 6, 2)], 1)


def write_late(like: Path) -> None:
    """Write a policy whose chunks begin before the newest observation, as LeRobot's do."""
    path = like.with_name(f"late-{like.name}")
    torch.jit.script(Late()).save(path)
    facts = {"file": path.name, "first_action": 2, "crc32": zlib.crc32(path.read_bytes())}
    manifest = json.loads(like.with_name(f"{like.name}.json").read_text()) | facts
    path.with_name(f"{path.name}.json").write_text(json.dumps(manifest))


def write_damaged(like: Path) -> None:
    """Write copies whose manifests lack what the program needs, or are of another version."""
    manifest = json.loads(like.with_name(f"{like.name}.json").read_text())
    first, *rest = manifest["inputs"]
    damages = {
        "format": {"format": "torchscript2"},
        "no-part": {"part": None},
        "no-noise": {"inputs": [first, *rest[1:]]},
        "two-inputs": {"inputs": rest[:2]},
        "shape-of-noise": {"inputs": [first, rest[0] | {"shape": []}, *rest[1:]]},
        "shape-of-observation": {"inputs": [first | {"shape": [1]}, *rest]},
        "width-of-observation": {"inputs": [first | {"shape": [1, 3]}, *rest]},
        "shape-of-weights": {"inputs": [first, *rest[:2], rest[2] | {"shape": [1, 1, 2]}]},
        "frames": {"frames": 10**9},
        "first-action": {"first_action": -1},
        "crc32": {"crc32": "x"},
    }
    folder = like.parent / "damaged"
    folder.mkdir(exist_ok=True)
    for name, damage in damages.items():
        shutil.copy(like, folder / f"{name}.pt")
        (folder / f"{name}.pt.json").write_text(json.dumps(manifest | damage))


def write(path, to, policy, inputs, data, facts=None):
    """Write a policy, and what the program compares."""
    export_policy(policy, path, to, inputs, facts)
    with torch.no_grad():
        actions = load_policy(path)(*inputs.values())
    torch.jit.script(Data(**data, actions=actions)).save(f"{path}.data")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
