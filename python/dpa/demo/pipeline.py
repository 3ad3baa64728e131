"""The demo from end to end: train, roll out, compare, draw, report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import TimeRemainingColumn

from dpa.demo import Options, report, show
from dpa.demo import train as training
from dpa.demo import world as W
from dpa.demo.compare import compare
from dpa.demo.rollout import STEPS, Rollout, make_plan, rollout
from dpa.demo.train import Policy
from dpa.library.devices import choose_device
from dpa.library.files import replacing
from dpa.library.progress import progress as progress_bar
from dpa.training.distributed import Ranks, ranks

EVALUATION_EPISODES = 100  # of each evaluation during training
PICTURED_EPISODES = 48
COMPARED = 32  # observations whose chunks are compared
REPEATS = {"DDPM": 7, "DDIM": 25}  # timed chunks


def run(options: Options, console: Console) -> dict:
    """Do everything, in order; return the results, which are also written to results.json.

    Under torchrun the processes train together; the first of them does all else.
    """
    device = None if options.device == "auto" else choose_device(options.device)
    with cpu_threads(options.threads), ranks(device) as team:
        if team.first:
            return _run(options, console, team)
        if not options.checkpoint:
            training.train(options.train_steps, options.seed, team.device, team=team)
        return {"rank": team.rank, "passed": None}


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Set PyTorch's number of CPU threads inside the block, and restore it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(options: Options, console: Console, team: Ranks) -> dict:
    started, started_cpu = time.perf_counter(), time.process_time()
    device = team.device
    results = describe(options, device)
    console.print(
        f"[bold]dpa demo[/] on {results['device']}, CPU threads: {results['threads']}, "
        f"seed {options.seed}"
    )
    options.out.mkdir(parents=True, exist_ok=True)  # fails before the training
    policy = obtain_policy(options, team, console, results)
    results["passed"], results["misses"] = None, []
    if not options.train_only:
        evaluate(options, policy, device, console, results)
    results["seconds"] = time.perf_counter() - started
    results["cpu_seconds"] = time.process_time() - started_cpu
    with replacing(options.out / "results.json") as temporary:
        temporary.write_text(json.dumps(results, indent=2) + "\n")
    if not options.train_only:
        console.print(report.table(results))
    console.print(f"files in {options.out}: {', '.join(results['files'])}", highlight=False)
    console.print(report.verdict(results))
    return results


def describe(options: Options, device: torch.device) -> dict:
    """The options and the machine, as the results' first entries."""
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(options).items()
    }
    return {
        "options": given,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "files": ["results.json"],
    }


def obtain_policy(options: Options, team: Ranks, console: Console, results: dict) -> Policy:
    """Train a policy and save it, or load the checkpoint."""
    if options.checkpoint:
        policy = training.load(options.checkpoint, team.device)
        console.print(f"policy from {options.checkpoint}", highlight=False)
    else:
        started = time.perf_counter()
        policy = train(options, team, console)
        results["train_seconds"] = time.perf_counter() - started
        training.save(policy, options.out / "checkpoint.pt")
        results["files"].append("checkpoint.pt")
    results["training"] = {
        "steps": policy.train_steps,
        "seed": policy.seed,
        "history": policy.history,
        "parameters": sum(value.numel() for value in policy.network.parameters()),
    }
    return policy


def train(options: Options, team: Ranks, console: Console) -> Policy:
    """Train with a progress bar; evaluate the EMA weights now and then."""
    device = team.device
    shown = "loss {task.fields[loss]}, success {task.fields[success]}"
    with progress_bar(console, 18, TimeRemainingColumn(), shown) as bar:
        task = bar.add_task("training", total=options.train_steps, loss="-", success="-")

        def evaluate_average(policy: Policy) -> dict:
            count = min(EVALUATION_EPISODES, options.episodes)
            result = episodes("DDIM", policy, device, count, options.seed + 2).summary()
            bar.update(task, success=f"{result['success']:.0%}")
            return result

        def progress(step: int, loss: float) -> None:
            bar.update(task, completed=step, loss=f"{loss:.4f}")

        return training.train(
            options.train_steps,
            options.seed,
            device,
            evaluate_average,
            progress=progress,
            team=team,
        )


def episodes(
    name: str,
    policy: Policy,
    device: torch.device,
    count: int,
    seed: int,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    """Closed-loop episodes in the worlds of this seed, sampled by dpa."""
    generator = torch.Generator().manual_seed(seed)
    plan = make_plan(name, policy, device, seed, dtype)
    return rollout(W.sample_worlds(count, generator), plan, generator, progress)


def evaluate(
    options: Options, policy: Policy, device: torch.device, console: Console, results: dict
) -> None:
    """Run the episodes, compare with plain PyTorch, draw, and judge."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    seed = options.seed + 1
    results["episodes"] = options.episodes
    results["rollout"], results["compare"] = {}, {}
    observations = observe_starts(COMPARED, seed).to(device)
    repeats = {name: 2 if options.quick else count for name, count in REPEATS.items()}
    with progress_bar(console, 18, TimeRemainingColumn(), "{task.fields[state]}") as bar:
        for name, steps in STEPS.items():
            task = bar.add_task(f"{name}, {steps} steps", total=W.STEP_LIMIT, state="")

            def progress(step: int, live: int, task=task) -> None:
                bar.update(task, completed=step, state=f"{live} episodes under way")

            result = episodes(name, policy, device, options.episodes, seed, dtype, progress)
            bar.update(task, completed=W.STEP_LIMIT, state=f"{result.success.sum()} arrived")
            results["rollout"][name] = {"steps": steps, **result.summary()}
        task = bar.add_task("timing", total=len(STEPS), state="dpa and plain PyTorch in turn")
        for name in STEPS:
            results["compare"][name] = compare(
                name, policy, observations, dtype, repeats[name], seed
            )
            bar.advance(task)
        task = bar.add_task("pictures", total=len(show.PICTURES), state="")
        count = min(PICTURED_EPISODES, options.episodes)
        for name, picture in show.PICTURES.items():
            bar.update(task, state=name)
            picture(options.out / name, policy, device, count, options.seed)
            results["files"].append(name)
            bar.advance(task)
    if options.episodes >= report.MIN_EPISODES and not options.quick:
        results["misses"] = report.judge(results["rollout"])
        results["passed"] = not results["misses"]


def observe_starts(count: int, seed: int) -> torch.Tensor:
    """Observations at the starts of ``count`` worlds."""
    worlds = W.sample_worlds(count, torch.Generator().manual_seed(seed))
    return W.observe(worlds, worlds.start, worlds.start)
