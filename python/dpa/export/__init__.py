"""A whole policy in one file for Python and C++: weights, scheduler table and denoising loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..schedulers import StepTable

FORMATS = {"torchscript": ".pt", "exported-program": ".pt2", "aoti": ".pt2"}
Affine = tuple[Tensor, Tensor]


class ExportedPolicy(nn.Module):
    """From an observation and noise to actions, as :class:`dpa.DiffusionSampler` computes them.

    ``actions = sample * scale + offset`` where ``sample`` is the loop's result under
    ``global_cond = encoder(observation * scale + offset)``. Random numbers are an input, so that
    the caller owns the stream: ``noise[0]`` starts the loop, each step that draws takes the next.

    Args:
        unet: the network, in the dtype that it shall run in (float32 or bfloat16).
        table: the steps, as :func:`dpa.schedulers.from_diffusers` gives them.
        encoder: maps observations (B, Do) to ``global_cond``; None passes them through.
        observation_affine: scale and offset that observations are normalised with; None is 1 and 0.
        action_affine: scale and offset that actions are unnormalised with; None is 1 and 0.

    Raises:
        ValueError: the table is a multistep one, whose memory is not exported.

    """

    def __init__(
        self,
        unet: nn.Module,
        table: StepTable,
        encoder: nn.Module | None = None,
        observation_affine: Affine | None = None,
        action_affine: Affine | None = None,
    ):
        super().__init__()
        if type(table) is not StepTable:
            raise ValueError(f"ExportedPolicy: table must be a StepTable, got {type(table)}")
        self.unet = unet
        self.encoder = nn.Identity() if encoder is None else encoder
        self.steps = len(table)
        self.clip = float(table.clip)
        self.dtype = next(unet.parameters()).dtype
        draws = iter(range(1, self.steps + 1))
        # The entry of ``noise`` that a step takes; 0, which starts the loop, stands for none.
        self.draws = [next(draws) if drawn else 0 for drawn in table.draws_noise]
        one, zero = torch.ones(1), torch.zeros(1)
        given = {"observation": observation_affine, "action": action_affine}
        for name, (scale, offset) in ((n, a or (one, zero)) for n, a in given.items()):
            self.register_buffer(f"{name}_scale", scale.float())
            self.register_buffer(f"{name}_offset", offset.float())
        self.register_buffer("timesteps", table.timesteps.float())
        self.register_buffer("coefficients", table.coefficients.float())
        self.register_buffer("index", torch.arange(self.steps))

    def forward(self, observation: Tensor, noise: Tensor) -> Tensor:
        """Map (B, Do) and (1 + draws, B, T, Da), float32, to actions (B, T, Da), float32."""
        observation = observation * self.observation_scale + self.observation_offset
        cond = self.encoder(observation).to(self.dtype)
        sample = noise[0]
        for step in range(self.steps):
            timestep = self.timesteps[step].expand(sample.shape[0])
            output = self.unet(sample.to(self.dtype), timestep, None, cond).to(torch.float32)
            drawn: Tensor | None = None
            if self.draws[step] > 0:
                drawn = noise[self.draws[step]]
            sample = torch.ops.dpa.scheduler_step(
                output, sample, self.coefficients, self.index[step], drawn, self.clip
            )
        return sample * self.action_scale + self.action_offset


def export_policy(
    policy: ExportedPolicy, path: Path, to: str, observation: Tensor, noise: Tensor
) -> dict[str, Any]:
    """Write ``policy`` to ``path`` and its manifest beside it, as ``path`` with ``.json`` appended.

    Args:
        policy: on the device that it shall run on.
        path: the file.
        to: ``torchscript`` (Python and C++), ``aoti`` (an AOTInductor package: Python and C++, for
            machines like this one) or ``exported-program`` (Python, and tools that read it).
        observation: (B, Do), an example whose shape and device the file is made for.
        noise: (1 + draws, B, T, Da), likewise.

    Returns:
        The manifest.

    Raises:
        ValueError: for another format.

    """
    if to not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {to}")
    policy = policy.eval().requires_grad_(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        if to == "torchscript":
            torch.jit.script(policy).save(str(path))
        else:
            program = torch.export.export(policy, (observation, noise))
            if to == "aoti":
                torch._inductor.aoti_compile_and_package(program, package_path=str(path))
            else:
                torch.export.save(program, path)
        actions = policy(observation, noise)
    manifest = _manifest(policy, path, to, {"observation": observation, "noise": noise}, actions)
    path.with_name(path.name + ".json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def _manifest(
    policy: ExportedPolicy, path: Path, to: str, inputs: dict[str, Tensor], actions: Tensor
) -> dict[str, Any]:
    def described(name: str, value: Tensor) -> dict[str, Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"name": name, "shape": list(value.shape), "dtype": dtype}

    normalisation = {
        name: {
            part: getattr(policy, f"{name}_{part}").flatten().tolist()
            for part in ("scale", "offset")
        }
        for name in ("observation", "action")
    }
    return {
        "file": path.name,
        "format": to,
        "torch": torch.__version__,
        "device": actions.device.type,
        "network_dtype": str(policy.dtype).removeprefix("torch."),
        "inputs": [described(name, value) for name, value in inputs.items()],
        "outputs": [described("actions", actions)],
        "normalisation": normalisation,
        "steps": policy.steps,
        "timesteps": policy.timesteps.tolist(),
        "clip": policy.clip if policy.clip < float("inf") else None,
    }
