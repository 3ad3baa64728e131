"""A checkpoint's call, plain and accelerated, and where its time goes.

A LeRobot policy, where LeRobot is installed, is measured whole: observation in, actions out, with
its encoders. Of any other checkpoint the denoising loop is, with the scheduler that it names.
Plain and accelerated calls take turns, so that a machine that is busier for a while is so for both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpa
from dpa.export.checkpoint import make_scheduler, read
from dpa.library.devices import choose_device

PARTS = ("whole call", "preparation", "network", "rest")
Call = Callable[[], object]


@dataclass(frozen=True)
class Options:
    """The options of ``dpa bench CHECKPOINT``; its ``--help`` explains each."""

    checkpoint: Path
    device: str = "auto"
    dtype: torch.dtype | None = None
    steps: int | None = None
    seconds: float = 20.0
    read: dict[str, Any] = field(default_factory=dict)  # options of dpa.load_checkpoint


@dataclass
class Subject:
    """What is measured: calls of one kind of policy, by what they do.

    Attributes:
        what: in words.
        steps: of the denoising loop.
        whole: from the observation to the actions.
        loop: the denoising loop alone, None where it is the whole.
        network: one evaluation of the network.
        chunk: from the prepared observation to a chunk of actions: encoders and loop.
        prepare: the preprocessing of an observation.
        how: notes on how it runs.

    """

    what: str
    steps: int
    whole: Call
    network: Call
    loop: Call | None = None
    chunk: Call | None = None
    prepare: Call | None = None
    how: list[str] = field(default_factory=list)


def measure(options: Options) -> dict[str, Any]:
    """Plain against accelerated: milliseconds of the call and its parts, ready for JSON.

    ``network`` is an evaluation of the plain network times the number of steps; where the fused
    loop runs, one op is the network and the scheduler's steps, and has the whole loop's time.

    Raises:
        ValueError: the checkpoint, or the device, is refused; the message says why.

    """
    device = choose_device(options.device)
    with torch.no_grad():
        plain, fast = subjects(options, device)
        started = time.perf_counter()
        fast.whole()  # compares, packs, captures
        _wait(device)
        first = (time.perf_counter() - started) * 1e3
        calls = {
            (name, part): call
            for name, subject in (("plain", plain), ("dpa", fast))
            for part, call in (("whole", subject.whole), ("loop", subject.loop))
            if call is not None
        }
        calls["plain", "network"] = plain.network
        times = in_turns(calls, options.seconds, device)
    found = {
        "checkpoint": str(options.checkpoint),
        "what": plain.what,
        "steps": plain.steps,
        "device": device_name(device),
        "torch": torch.__version__,
        "plain": _parts(times, "plain", plain),
        "dpa": _parts(times, "dpa", fast),
        "first call ms": first,
        "how": fast.how,
    }
    found["times faster"] = found["plain"]["whole call"] / found["dpa"]["whole call"]
    return found


def _parts(times: dict[Any, float], name: str, subject: Subject) -> dict[str, float]:
    """Milliseconds by :data:`PARTS`. No part is below zero, which noise could make it."""
    whole = times[name, "whole"]
    loop = times.get((name, "loop"), whole)
    network = loop
    if name == "plain":
        network = min(times[name, "network"] * subject.steps, loop)
    return {
        "whole call": whole,
        "preparation": max(whole - loop, 0.0),
        "network": network,
        "rest": max(loop - network, 0.0),
    }


def in_turns(calls: dict[Any, Call], seconds: float, device: torch.device) -> dict[Any, float]:
    """Return the medians in milliseconds, in turns for about ``seconds``, thrice at least."""
    times: dict[Any, list[float]] = {key: [] for key in calls}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 4 or (time.perf_counter() < end and rounds < 200):
        for key, call in calls.items():
            begin = time.perf_counter()
            call()
            _wait(device)
            if rounds:  # the first round warms up
                times[key].append((time.perf_counter() - begin) * 1e3)
        rounds += 1
    return {key: statistics.median(values) for key, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return what a device is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def subjects(options: Options, device: torch.device) -> tuple[Subject, Subject]:
    """Return what is measured of a checkpoint: plain, and accelerated."""
    return (_lerobot if _is_lerobot(options.checkpoint) else _loop)(options, device)


def _is_lerobot(path: Path) -> bool:
    """Whether it is a LeRobot folder that LeRobot, installed here, loads whole."""
    whole = (path / "policy_preprocessor.json").is_file()
    return whole and find_spec("lerobot") is not None


def _lerobot(options: Options, device: torch.device) -> tuple[Subject, Subject]:
    """The policy of a LeRobot folder, and its accelerated copy, on a made-up observation."""
    from dpa.eval.policies import LeRobotPolicy

    plain = _lerobot_subject(LeRobotPolicy(options.checkpoint, device, options.steps))
    policy = LeRobotPolicy(options.checkpoint, device, options.steps)
    dpa.accelerate(policy.policy, options.dtype)
    fast = _lerobot_subject(policy)
    fast.whole()
    fast.how = [
        f"{f['path']} ({f['part']}): {f['how']}" for f in dpa.explain(policy.policy).to_dict()
    ]
    return plain, fast


def _lerobot_subject(policy: Any) -> Subject:
    model = policy.policy.diffusion
    config = policy.policy.config
    generator = torch.Generator().manual_seed(0)
    observation = {
        name: torch.rand(shape, generator=generator) for name, shape in policy.inputs.items()
    }

    def whole() -> None:
        policy.reset()
        policy.act(observation)

    frames = policy.prepared(observation)
    if config.image_features:
        images = [frames[name] for name in config.image_features]
        frames["observation.images"] = torch.stack(images, dim=-4)
    batch = {
        name: torch.stack([frames[name]] * config.n_obs_steps, dim=1)
        for name in policy.policy._queues
        if name in frames and name.startswith("observation")
    }
    width = model.unet.diffusion_step_encoder[-1].out_features
    cond_dim = model.unet.down_modules[0][0].cond_encoder[-1].in_features - width
    shape = (1, config.horizon, config.action_feature.shape[0])
    weights = next(model.unet.parameters())
    cond = torch.randn(1, cond_dim, dtype=weights.dtype, device=weights.device)
    sample = torch.randn(shape, dtype=weights.dtype, device=weights.device)
    timestep = torch.full((1,), 5, device=weights.device)
    return Subject(
        "LeRobot's policy: preprocessing, encoders, denoising, postprocessing",
        model.num_inference_steps,
        whole,
        lambda: model.unet(sample, timestep, global_cond=cond),
        lambda: model.conditional_sample(1, global_cond=cond),
        lambda: model.generate_actions(batch),
        lambda: policy.prepared(observation),
    )


def _loop(options: Options, device: torch.device) -> tuple[Subject, Subject]:
    """The denoising loop of the checkpoint's U-Net in PyTorch's layers, and dpa's."""
    source = read(options.checkpoint, **options.read)
    scheduler = make_scheduler(source.scheduler, None)
    steps = options.steps or source.steps or scheduler.config.num_train_timesteps
    unet: nn.Module = source.unet.to(device)
    if source.unet.local_cond_dim:
        raise ValueError(
            f"{options.checkpoint}: dpa bench measures networks without local_cond, this one has a "
            f"width of {source.unet.local_cond_dim}"
        )
    multiple = source.unet.horizon_multiple
    horizon = source.horizon or -(-16 // multiple) * multiple
    width = source.unet.down_modules[0][0].blocks[0].block[0].weight.shape[1]
    weights = next(unet.parameters())
    sample = torch.randn(1, horizon, width, dtype=weights.dtype, device=device)
    cond = None
    if cond_dim := source.unet.global_cond_dim:
        cond = torch.randn(1, cond_dim, dtype=weights.dtype, device=device)
    network = dpa.reference.plain(unet)
    timestep = torch.full((1,), 5.0, device=device)

    def plain_loop() -> Tensor:
        scheduler.set_timesteps(steps)
        current = torch.randn_like(sample)
        for t in scheduler.timesteps:
            at = torch.full((1,), int(t), device=device)
            current = scheduler.step(network(current, at, None, cond), t, current).prev_sample
        return current

    sampler = dpa.DiffusionSampler(
        unet,
        make_scheduler(source.scheduler, None),
        steps,
        options.dtype,
        horizon=horizon,
        fallback=True,
    )
    what = f"the denoising loop of a checkpoint of {source.kind}"
    notes = [*source.assumed, "the encoder is not in the file, or not measured"]
    return (
        Subject(what, steps, plain_loop, lambda: network(sample, timestep, None, cond)),
        Subject(what, steps, lambda: sampler(cond, batch_size=1), lambda: None, how=notes),
    )
