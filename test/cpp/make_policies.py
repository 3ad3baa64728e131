"""Write what the robot example opens: make_policies.py FOLDER.

Policies as `dpa export` writes them, each with an observation, noise, and the actions that Python
gets from the same file.
"""

import sys
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


def write(path, to, policy, inputs, data, facts=None):
    """Write a policy, and what the program compares."""
    export_policy(policy, path, to, inputs, facts)
    with torch.no_grad():
        actions = load_policy(path)(*inputs.values())
    torch.jit.script(Data(**data, actions=actions)).save(f"{path}.data")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
