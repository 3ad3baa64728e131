"""Where policies have their denoising loops: what :func:`dpa.accelerate` takes the place of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dpa.library.checks import require
from dpa.schedulers.conversion import from_diffusers
from dpa.schedulers.tables import StepTable, known_of, table_of
from dpa.tracking import Place, find
from dpa.tracking.replacing import class_of


@dataclass
class LoopCall:
    """What a call of a policy's loop comes to: what the loop begins with, and what holds in it.

    Attributes:
        shape: (B, T, Da) of the sample. None where the network says it.
        conditions: what the network is called with in every step, by name: tensors, or
            dictionaries of them.
        noise: (B, T, Da) to start from; None generates it.
        generator: of random numbers; None is the device's own.
        condition_data: (B, T, Da), inpainted where ``condition_mask`` is true.
        condition_mask: bool, or floating weights, (B, T, Da).
        options: of the scheduler's step: ``eta``, ``use_clipped_model_output``.
        inpainting: where ``condition_data`` holds, "sample" or "x0".
        last_chunk: (B, T, Da) that the loop starts from, with the noise of ``first_step``.
        first_step: the step to begin at.
        init_noise_sigma: what the random numbers to start from are multiplied by.
        one_stream: whether a generator that the method is given makes all its random numbers; where
            not, the device's own makes them.
        finish: ``finish(sample, generator)``, in the place of the loop's ``end`` where that takes
            random numbers too.

    """

    shape: tuple[int | None, int | None, int | None]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    noise: Tensor | None = None
    generator: Any = None
    condition_data: Tensor | None = None
    condition_mask: Tensor | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    inpainting: str = "sample"
    last_chunk: Tensor | None = None
    first_step: int = 0
    init_noise_sigma: float = 1.0
    one_stream: bool = True
    finish: Callable[[Tensor, Any], Any] | None = None


# What diffusion_policy's conditional_sample, and those made of it, take.
ORIGINAL = frozenset({"condition_data", "condition_mask", "generator"})
CONDITIONED = ORIGINAL | {"local_cond", "global_cond"}


def ddpm_table(
    policy: Any,
    means: tuple[Tensor, Tensor],
    deviations: Tensor,
    clip: float,
    transposed: tuple[bool, ...] = (),
) -> StepTable:
    """Return DDPM's steps, of which the last takes noise and adds none.

    ``means`` weigh x0 and sample; what the network predicts is as the policy says.
    """
    of_sample = policy.sqrt_recip_alphas_cumprod.tolist()
    of_noise = policy.sqrt_recipm1_alphas_cumprod.tolist()
    levels = [[1 / a, b / a] for a, b in zip(of_sample, of_noise, strict=True)]
    count = len(levels)
    to_x0 = [(0.0, 1.0)] * count
    if policy.predict_epsilon:
        to_x0 = [(a, -b) for a, b in zip(of_sample, of_noise, strict=True)]
    of_x0, of_x = (mean.tolist() for mean in means)
    columns = zip(to_x0, of_x0, of_x, [0.0, *deviations.tolist()[1:]], strict=True)
    rows = [[*pair, x0, x, 0.0, std] for pair, x0, x, std in columns][::-1]
    known = known_of(rows, levels[::-1])
    steps = list(reversed(range(count)))
    return table_of(steps, rows, clip, (True,) * count, transposed=transposed, **known)


def sample_itself(policy: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the sample: what a loop ends with that does nothing after it."""
    return sample


@dataclass(frozen=True)
class Loop:
    """Where a policy has its denoising loop, for :func:`dpa.accelerate`.

    Places are paths of attributes from the policy, such as ``"objective.noise_scheduler"``, or
    functions of the policy.

    Attributes:
        method: the name of the method that holds the loop; the policy calls it on itself.
        network: the place of the network, a module called as ``network(sample, timestep, ...)``.
        begin: ``begin(policy, ...)``, with the method's arguments: all that the method does before
            the loop. Returns the :class:`LoopCall`; None leaves this call to the original, and so
            does a ValueError, with its reason.
        end: ``end(policy, sample, ...)``, with the method's arguments: all that it does after the
            loop. Returns what the method returns; by default that is the sample.
        scheduler: the place of the scheduler of diffusers.
        steps: the place of the number of steps; None takes the timesteps that the scheduler holds.
        table: where no scheduler of diffusers says the steps, ``table(policy, **options)`` returns
            the loop's :class:`dpa.schedulers.StepTable`.
        scaled: whether the loop calls the scheduler's ``scale_model_input``, and starts from noise
            times its ``init_noise_sigma``.
        no_grad: whether the method runs without gradients whoever calls it.
        changing: names of attributes that calls change or leave aside, no settings of the loop.
        holders: places of further objects whose attributes are settings of the loop.
        knows: names of all arguments that ``begin`` takes; None is whatever the method has.
        needs: names of arguments that the method must have, where the loop is looked for.

    """

    method: str
    network: Place
    begin: Callable[..., LoopCall | None]
    end: Callable[..., Any] = sample_itself
    scheduler: Place | None = "noise_scheduler"
    steps: Place | None = "num_inference_steps"
    table: Callable[..., StepTable] | None = None
    scaled: bool = False
    no_grad: bool = False
    changing: tuple[str, ...] = ()
    holders: tuple[Place, ...] = ("config",)
    knows: frozenset[str] | None = None
    needs: frozenset[str] = frozenset()

    def network_of(self, policy: Any) -> nn.Module | None:
        """Return the network, out of torch.compile's wrapper; None where there is no module."""
        network = find(policy, self.network)
        network = getattr(network, "_orig_mod", network)
        return network if isinstance(network, nn.Module) else None

    def scheduler_of(self, policy: Any) -> Any:
        """Return the scheduler, or None."""
        return None if self.table is not None else find(policy, self.scheduler)

    def table_of(self, policy: Any, options: Mapping[str, Any]) -> StepTable:
        """Return the steps; raise what :func:`from_diffusers` raises."""
        if self.table is not None:
            return self.table(policy, **options)
        scheduler, steps = find(policy, self.scheduler), find(policy, self.steps)
        return from_diffusers(scheduler, steps, **options, scaled=self.scaled)

    def missing(self, policy: Any) -> str | None:
        """Return what a policy lacks of this loop, or None."""
        if not callable(getattr(class_of(policy), self.method, None)):
            return f"it has no method {self.method}"
        method = inspect.signature(getattr(class_of(policy), self.method))
        if lacks := self.needs - method.parameters.keys():
            return f"its {self.method} does not take {', '.join(sorted(lacks))}"
        places = [("scheduler", self.scheduler), ("steps", self.steps)]
        for what, place in places if self.table is None else []:
            if place is not None and find(policy, place) is None:
                return f"it has no {place if isinstance(place, str) else what}"
        if self.network_of(policy) is None:
            where = f" {self.network}" if isinstance(self.network, str) else ""
            return f"it has no network{where} that is a module"
        return None


def check_loops(loops: Any) -> tuple[Loop, ...]:
    """Return what a user gave as loops; raise TypeError or ValueError for what is none."""
    found = tuple(loops) if isinstance(loops, Sequence) else (loops,)
    for loop in found:
        got, right = type(loop).__name__, isinstance(loop, Loop)
        require(right, "accelerate: loop", "be a dpa.Loop", got, TypeError)
        right = isinstance(loop.method, str) and loop.method.isidentifier()
        require(right, "accelerate: loop.method", "name a method", repr(loop.method))
        for name in ("begin", "end", *["table"] * (loop.table is not None)):
            got = type(getattr(loop, name)).__name__
            right = callable(getattr(loop, name))
            require(right, f"accelerate: loop.{name}", "be a function", got, TypeError)
    return found
