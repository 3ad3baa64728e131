"""LeRobot's policy with cameras: calls from images to actions, training steps, encoders alone.

Beside the plain policy and torch.compile of its parts, all in one run. LeRobot must be installed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dpa
from dpa.bench.ahead import Process, answers, on_request
from dpa.bench.bars import bar_of
from dpa.bench.timing import device_us, graphed, medians
from dpa.library.devices import choose_device
from dpa.nn.image_encoder import recognise
from dpa.packed.encoder_kernels import EncoderKernels
from dpa.packed.joint_encoders import JointEncoders

PLAIN, COMPILED, DPA = "plain", "torch.compile of its parts", "dpa"
CALLS, STEPS, ENCODERS = "image policies: calls", "image policies: training", "image encoders"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WARM_UP, _STEPS = 6, 10  # calls until whole calls replay; denoising steps
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A policy with cameras, and what is required of it on an H200 (and aimed at).

    Attributes:
        name: as the tables have it.
        cameras: each with an encoder of its own, two observations each.
        size: height and width of the images.
        down_dims: channels of the U-Net's levels.
        horizon: of the actions.
        samples: the batch of a training step.
        group_norm: in the encoders; else BatchNorm.
        call_ms: from images to actions, by weights.
        faster: a training step than the plain policy's, by what it computes in.

    """

    name: str
    cameras: int
    size: tuple[int, int]
    down_dims: tuple[int, ...]
    horizon: int
    samples: int
    group_norm: bool = True
    call_ms: tuple[tuple[float, float], ...] = ()
    faster: tuple[tuple[float, float], ...] = ()

    def build(self, device: torch.device) -> nn.Module:
        """LeRobot's policy with random weights, sampling by DDIM in ten steps."""
        from lerobot.configs.types import FeatureType, PolicyFeature
        from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
        from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

        vision, two = (FeatureType.VISUAL, (3, *self.size)), PolicyFeature(FeatureType.STATE, (2,))
        config = DiffusionConfig(
            input_features={name: PolicyFeature(*vision) for name in self.views()}
            | {"observation.state": two},
            output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
            device=device.type,
            down_dims=self.down_dims,
            horizon=self.horizon,
            use_group_norm=self.group_norm,
            use_separate_rgb_encoder_per_camera=self.cameras > 1,
            pretrained_backbone_weights=None,
            noise_scheduler_type="DDIM",
            num_inference_steps=_STEPS,
        )
        torch.manual_seed(0)
        with torch.device(device):
            return DiffusionPolicy(config).to(device).eval()

    def views(self) -> list[str]:
        """The names of the images."""
        return [f"observation.images.{i}" for i in range(self.cameras)]

    def batch(self, samples: int, device: torch.device, *times: int) -> dict[str, Tensor]:
        """Images and states, of one time or of ``times``."""
        new = lambda *shape: torch.rand(samples, *times, *shape, device=device)  # noqa: E731
        return {name: new(3, *self.size) for name in self.views()} | {"observation.state": new(2)}

    def actions(self, samples: int, device: torch.device) -> dict[str, Tensor]:
        """What is trained on."""
        action = torch.rand(samples, self.horizon, 2, device=device)
        return {"action": action, "action_is_pad": torch.zeros_like(action[..., 0]).bool()}


CASES = (
    Case(
        "one camera 84 x 84, 252 M",
        *(1, (84, 84), (512, 1024, 2048), 16, 64),
        call_ms=((3.8, 3.2), (2.0, 1.6)),
        faster=((3.5, 5.0), (6.0, 9.0)),
    ),
    Case(
        "two cameras 84 x 84, 80 M",
        *(2, (84, 84), (256, 512, 1024), 16, 64),
        call_ms=((1.9, 1.4), (1.3, 0.9)),
        faster=((4.0, 6.0), (6.0, 9.0)),
    ),
    Case(
        "two cameras 480 x 640, 252 M, T 64",
        *(2, (480, 640), (512, 1024, 2048), 64, 8),
        group_norm=False,
        call_ms=((6.2, 4.8), (3.0, 2.2)),
        faster=((2.5, 4.0), (4.0, 6.0)),
    ),
)
# Of the cases whose encoders are measured alone, microseconds by weights.
_ENCODERS_US = {
    CASES[0].name: ((260.0, 150.0), (150.0, 80.0)),
    CASES[2].name: ((1000.0, 700.0), (450.0, 300.0)),
}


def stages() -> dict[str, Callable[[], dict[str, list[Row]]]]:
    """A stage a case, and kind of measurement."""
    found: dict[str, Callable[[], dict[str, list[Row]]]] = {}
    for case in CASES:
        found[f"{case.name}, calls"] = partial(_calls_beside_compiled, case)
        found[f"{case.name}, training"] = lambda case=case: {STEPS: step_rows(case)}
    return found


def call_rows(case: Case, seconds: float = 15.0) -> list[Row]:
    """From a camera's images to the actions: the plain policy and the accelerated ones, in turns.

    ``error`` is of the actions from one noise, in the norm, against the plain policy without TF32.
    """
    device = choose_device("auto")
    plain, seen = case.build(device), case.batch(1, device)
    noise = torch.randn(1, case.horizon, 2, device=device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = (call := _call(plain, seen))(noise=noise)
    calls = {(PLAIN, "float32"): call}
    for name, dtype in DTYPES.items():
        calls[DPA, name] = _call(dpa.accelerate(copy.deepcopy(plain), dtype), seen)
    times = medians(calls, seconds, _WARM_UP)
    errors = {
        key: (call(noise=noise) - expected).norm() / expected.norm() for key, call in calls.items()
    }
    return [
        {"policy": case.name, "how": how, "weights": name, "ms": times[how, name]}
        | {"error": errors[how, name].item()}
        for how, name in calls
    ]


def _call(policy: Any, seen: dict[str, Tensor]) -> Callable[..., Tensor]:
    """A chunk of actions from what the policy has seen twice."""
    policy.reset()
    policy.select_action(seen)
    queued = {name: seen["observation.state"] for name in policy._queues if name != "action"}
    return partial(policy.predict_action_chunk, queued)


def step_rows(case: Case, seconds: float = 10.0) -> list[Row]:
    """Loss and backward, called, in float32 and under autocast in bfloat16.

    Gradients are cleared as trainers do it, by the optimizer.
    """
    device = choose_device("auto")
    plain = case.build(device).train()
    batch = case.batch(case.samples, device, 2) | case.actions(case.samples, device)
    policies = {PLAIN: plain, DPA: dpa.accelerate(copy.deepcopy(plain))}
    optimizers = {how: torch.optim.AdamW(policy.parameters()) for how, policy in policies.items()}
    steps = {
        (how, name): partial(
            _step, policy, optimizers[how], batch, None if name == "float32" else dtype
        )
        for how, policy in policies.items()
        for name, dtype in DTYPES.items()
    }
    times = medians(steps, seconds, _WARM_UP)
    about = {"policy": case.name, "samples": case.samples}
    return [
        about | {"how": how, "computes in": name, "ms": ms} for (how, name), ms in times.items()
    ]


def _step(
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    autocast: torch.dtype | None,
) -> None:
    optimizer.zero_grad()
    kind = batch["action"].device.type
    with torch.autocast(kind, autocast) if autocast else nullcontext():
        loss = policy(dict(batch))[0]
    loss.backward()


def encoder_rows(case: Case) -> list[Row]:
    """The encoders alone, of all cameras, in one graph; PyTorch's in TF32."""
    device = choose_device("auto")
    encoders = encoders_of(case.build(device))
    images = [torch.rand(2, 3, *case.size, device=device) for _ in encoders]
    runs = {(PLAIN, "float32"): partial(_each, encoders, images)}
    for name, dtype in DTYPES.items():
        kernels = [EncoderKernels(recognise(encoder), dtype).run for encoder in encoders]
        runs[DPA, name] = partial(_jointly, kernels, images)
    return [
        {"policy": case.name, "how": how, "weights": name, "us": device_us(graphed(run, 1))}
        for (how, name), run in runs.items()
    ]


def encoders_of(policy: Any) -> list[nn.Module]:
    """A policy's image encoders, one or one a camera."""
    encoder = policy.diffusion.rgb_encoder
    return list(encoder) if isinstance(encoder, nn.ModuleList) else [encoder]


def _each(runs: list[Callable[[Tensor], Tensor]], images: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [run(x) for run, x in zip(runs, images, strict=True)]


def _jointly(runs: list[Callable[[Tensor], Tensor]], images: list[Tensor]) -> list[Tensor]:
    with torch.no_grad(), JointEncoders():
        return _each(runs, images)


def _calls_beside_compiled(case: Case) -> dict[str, list[Row]]:
    """Compile first, so that nothing else runs where something is measured."""
    theirs = answers([Process(__name__, case.name, name) for name in DTYPES])
    found = {CALLS: call_rows(case) + [row for rows in theirs for row in rows[CALLS]]}
    if case.name in _ENCODERS_US:
        found[ENCODERS] = encoder_rows(case) + [row for rows in theirs for row in rows[ENCODERS]]
    return found


def _measure_compiled(case_name: str, name: str) -> None:
    """In a process of its own: the policy with its encoders and network compiled."""
    case, device = next(case for case in CASES if case.name == case_name), choose_device("auto")
    policy, half = case.build(device), name != "float32"
    alone = [copy.deepcopy(encoder).to(DTYPES[name]) for encoder in encoders_of(policy)]
    alone = [torch.compile(encoder.to(memory_format=torch.channels_last)) for encoder in alone]
    images = [torch.rand(2, 3, *case.size, dtype=DTYPES[name], device=device) for _ in alone]
    images = [x.contiguous(memory_format=torch.channels_last) for x in images]
    for part in (*encoders_of(policy), policy.diffusion.unet):
        _compile(part)
    with torch.autocast(device.type, DTYPES[name], enabled=half):
        call = _call(policy, case.batch(1, device))
        for _ in range(_WARM_UP):
            call()
        _each(alone, images)

        def measured() -> dict[str, list[Row]]:
            about = {"policy": case.name, "how": COMPILED, "weights": name}
            found = {CALLS: [about | {"ms": medians({"": call}, 5.0)[""]}]}
            us = device_us(graphed(partial(_each, alone, images), 1))
            return found | {ENCODERS: [about | {"us": us}]}

        on_request(measured)


def _compile(part: nn.Module) -> None:
    """Compile in CUDA graphs, which overwrite their outputs at the next call of any of them."""
    compiled = torch.compile(part.forward, mode="reduce-overhead")
    part.forward = lambda *args, **kwargs: compiled(*args, **kwargs).clone()


def bars(results: dict[str, Any]) -> list[Row]:
    """What is required of the cases that were measured, and whether it holds."""
    calls = {(r["policy"], r["how"], r["weights"]): r["ms"] for r in results.get(CALLS, [])}
    steps = {(r["policy"], r["how"], r["computes in"]): r["ms"] for r in results.get(STEPS, [])}
    alone = {(r["policy"], r["how"], r["weights"]): r["us"] for r in results.get(ENCODERS, [])}
    rows = []
    for case in CASES:
        for name, call, step, us in zip(
            DTYPES, case.call_ms, case.faster, _ENCODERS_US.get(case.name, ((), ())), strict=True
        ):
            key, about = (case.name, DPA, name), f"{case.name}, {name}"
            if key in calls:
                rows.append(bar_of(f"{about}: images to actions, ms", calls[key], *call))
            if key in steps:
                ratio = steps[case.name, PLAIN, name] / steps[key]
                rows.append(bar_of(f"{about}: a training step, faster than plain", ratio, *step))
            if key in alone:
                rows.append(bar_of(f"{about}: the encoders, us", alone[key], *us))
    return rows


if __name__ == "__main__":
    _measure_compiled(*sys.argv[1:])
