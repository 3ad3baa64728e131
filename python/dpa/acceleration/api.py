"""Accelerate the policies that people already run, in place, and undo it.

The parts that run are replaced, not what the user sees: on each U-Net that is found the attribute
``forward`` of the object, and on each policy with a supported loop its ``conditional_sample`` and
its method from observations to actions.
Modules, parameters, state dicts, queues, normalizers and encoders stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from dpa.acceleration.example import call_on, why_no_example
from dpa.acceleration.known_loops import KNOWN
from dpa.acceleration.loops import Loop, Place, check_loops, find
from dpa.acceleration.policy_loop import FastLoop
from dpa.acceleration.scheduler_step import FastStep, why_no_step, why_no_table
from dpa.acceleration.shadow_run import Options
from dpa.acceleration.unet_forward import FastForward
from dpa.acceleration.whole_call import WHOLE_CALLS, WholeCall
from dpa.library import html
from dpa.nn.family import Network, NotInFamily, recognise
from dpa.packed.unet import config_of, runs_packed
from dpa.sampling.sampler import is_of_family
from dpa.schedulers.tables import MultistepTable
from dpa.tracking.replacing import BESIDE, Replacement, put_back, replace_method, replaced
from dpa.tracking.weights import MODES
from dpa.training.graphed_calls import graph_calls, replaced_forward, ungraph_calls

_MODES = ("loop", "step", "chain")
# What replaces methods of a model, but for the network's forward.
_LOOPS_AND_CALLS = (FastLoop, WholeCall)
_NEAR = ("down_modules", "up_modules")  # who has these meant to be a U-Net: say why it is none


@dataclass(frozen=True)
class Finding:
    """One part of a model: what it is, and what dpa does or would do with it.

    Attributes:
        path: where it was found, as attributes from the model.
        part: "U-Net", "loop", "call" (from observations to actions) or "scheduler".
        name: its class.
        can: whether it can be accelerated.
        active: whether it is accelerated now.
        how: what runs instead, or why nothing does.
        errors: relative errors that the self-checks found.

    """

    path: str
    part: str
    name: str
    can: bool
    active: bool
    how: str
    errors: tuple[float, ...] = ()

    @property
    def state(self) -> str:
        """``active`` and ``can`` in words."""
        return "accelerated" if self.active else "can be accelerated" if self.can else "unchanged"


@dataclass(frozen=True)
class Report:
    """What :func:`explain` found, in the order in which it lies in the model."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        """One line a finding."""
        if not self.findings:
            return "no conditional U-Net and no denoising loop was found"
        lines = []
        for f in self.findings:
            worst = f"; checked, error {max(f.errors):.1e}" if f.errors else ""
            lines.append(f"{f.path or '(itself)'} ({f.part}, {f.name}): {f.state}: {f.how}{worst}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self.findings:
            return f"<p>{self}</p>"
        rows = [
            [f.path or "(itself)", f"{f.part}, {f.name}", f.state, f.how] for f in self.findings
        ]
        heads = ["where", "what", "state", "how"]
        if any(f.errors for f in self.findings):
            heads.append("checked error")
            for row, f in zip(rows, self.findings, strict=True):
                row.append(f"{max(f.errors):.1e}" if f.errors else "")
        return html.table(rows, heads)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return plain lists and dicts, for JSON."""
        return [asdict(finding) for finding in self.findings]


def accelerate(
    model: Any,
    dtype: torch.dtype | None = None,
    mode: str = "loop",
    *,
    tolerance: float | None = None,
    fallback: bool = True,
    graphs: bool = True,
    weights: str = "tracked",
    example: Any = None,
    loop: Loop | Sequence[Loop] | None = None,
) -> Any:
    """Accelerate every conditional U-Net and denoising loop inside ``model``, in place.

    The first call of each kind runs the original too, on the real input, compares, and returns the
    original's result; where they differ beyond the tolerance, a warning says so and the original
    runs from then on. In training, and wherever gradients are enabled, the network runs layer by
    layer with dpa's ops on its own parameters; optimizers, DDP and state dicts notice nothing. On a
    GPU its calls in training replay CUDA graphs, as :func:`dpa.training.graph_calls` says, and a
    policy's whole call, from observations to actions, is one graph from the third of a kind on.

    Whatever changes afterwards is noticed, and compared anew: weights (optimizer steps,
    ``load_state_dict``, EMA copies, ``.to()``), modules, settings, schedulers, and every attribute
    of a policy. ``weights`` says how writes through ``parameter.data`` are noticed.

    Args:
        model: a LeRobot or diffusion_policy policy, a U-Net, or an object that holds some; or a
            DDPM or DDIM scheduler of diffusers, whose ``step`` becomes one op.
        dtype: of packed weights, float32, float16 or bfloat16; None takes the dtype that the
            original computes in. Inputs and results keep their dtypes.
        mode: "loop" runs whole denoising loops as one op where the policy's loop is supported;
            "step" leaves the loops alone and accelerates each step; "chain" runs the network layer
            by layer with dpa's fused ops, on the live parameters, with no packed copy.
        tolerance: relative error in the norm beyond which the original runs, of a step or of a
            whole loop. None is, by the coarsest dtype at work, 1e-4, 1e-2 (float16), 5e-2
            (bfloat16) for a step, and 1e-3, 5e-2, 1e-1 for a loop.
        fallback: what to do where a loop cannot be fused, or a self-check fails. True warns with
            the reason, and the original runs; False raises.
        graphs: whether calls in training, and whole calls of a policy, replay. Activations and
            gradients stay allocated between the steps.
        weights: how changed weights are noticed by what runs on packed ones. "tracked": in every
            call, by where parameters lie, their versions and samples of their values;
            :class:`dpa.tracking.WeightTracker` says which writes that shows. "checked" compares a
            checksum of every element besides. "frozen" promises that nothing is written.
        example: an observation, as ``select_action`` or ``predict_action`` of the policy takes it.
            The policy is called on it at once, so that no call of a control loop pays for
            comparing and capturing what is of the same shapes. Its queues are empty afterwards;
            the generators of random numbers are as they were.
        loop: where the policy has its denoising loop, as :class:`dpa.Loop` says, or several;
            instead of those that are looked for. The network may be of any kind: one that dpa has
            no kernels for runs as it is, on a GPU with the whole loop in one CUDA graph.

    Returns:
        ``model``.

    Raises:
        TypeError: nothing in ``model`` can be accelerated, or with ``fallback=False`` not all that
            was found; or it has no such ``loop``, or ``example`` cannot be given to it. The message
            says why. The model stays as it was.
        ValueError: an unknown ``mode``, ``dtype`` or ``weights``, a ``tolerance`` that is none, or
            a ``loop`` whose method is no name.

    """
    check_options(dtype, mode, tolerance, weights)
    loops = None if loop is None else check_loops(loop)
    if example is not None and (why := why_no_example(model)) is not None:
        raise TypeError(f"accelerate: example needs {why}")
    before = [
        (part, name, replaced(part, name))
        for _, part in _owners(model)
        for name, held in list(vars(part).items())
        if isinstance(held, Replacement) and not name.startswith(BESIDE)
    ]
    restore(model)
    try:
        _replace(model, Options(dtype, mode, tolerance, fallback, weights), graphs, loops)
        if example is not None:
            call_on(model, example)
    except BaseException:
        restore(model)
        for part, name, value in before:
            replace_method(part, name, value)
        raise
    return model


def check_options(
    dtype: torch.dtype | None = None,
    mode: str = "loop",
    tolerance: float | None = None,
    weights: str = "tracked",
) -> None:
    """Raise ValueError for what :func:`accelerate` takes for no value of an option."""
    if mode not in _MODES:
        raise ValueError(f"accelerate: mode must be one of {', '.join(_MODES)}, got {mode!r}")
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"accelerate: dtype must be float32, float16 or bfloat16, got {dtype}")
    if weights not in MODES:
        raise ValueError(f"accelerate: weights must be one of {', '.join(MODES)}, got {weights!r}")
    if tolerance is not None and not 0 < tolerance < float("inf"):
        raise ValueError(f"accelerate: tolerance must be positive and finite, got {tolerance}")


def _replace(
    model: Any, options: Options, graphs: bool, loops: tuple[Loop, ...] | None = None
) -> None:
    """Accelerate a model that is not, or raise TypeError."""
    if _is_scheduler(model):
        if (why := why_no_step(model)) is not None:
            raise TypeError(f"accelerate: scheduler must be one whose step can be fused: {why}")
        replace_method(model, "step", FastStep(model, options))
        return
    survey = _Survey(model, loops)
    report = survey.report()
    left = tuple(finding for finding in report.findings if not finding.can)
    if not any(finding.can for finding in report.findings):
        raise TypeError(f"accelerate: model must hold a conditional U-Net, got: {report}")
    if left and not options.fallback:
        raise TypeError(f"accelerate: with fallback=False all must be fused, got: {Report(left)}")
    for module, network in survey.networks.items():
        if isinstance(network, Network):
            replace_method(module, "forward", FastForward(module, options, network))
            if graphs:
                graph_calls(module)
    for finding in left:
        warnings.warn(f"dpa.accelerate: {Report((finding,))}", RuntimeWarning, stacklevel=3)
    for place in survey.loops if options.mode != "step" else []:
        if place.loop is not None:
            _replace_loop(place.owner, place.loop, options, graphs)


def _replace_loop(owner: Any, loop: Loop, options: Options, graphs: bool) -> None:
    fast = FastLoop(owner, loop, options)
    replace_method(owner, loop.method, fast)
    scheduler = loop.scheduler_of(owner)
    fast.refused = None if scheduler is None else why_no_table(scheduler)  # said already
    method = _whole_call(owner)
    whole = loop.method == "conditional_sample" and not fast.is_around_any()
    if graphs and whole and options.mode == "loop" and method is not None:
        replace_method(owner, method, WholeCall(owner, method, options))


def restore(model: Any) -> Any:
    """Undo :func:`accelerate`, attribute for attribute, and return ``model``."""
    if _is_scheduler(model) and isinstance(replaced(model, "step"), FastStep):
        put_back(model, "step")
    for _, owner in _owners(model):
        if isinstance(owner, nn.Module) and isinstance(replaced_forward(owner), FastForward):
            put_back(ungraph_calls(owner), "forward")
        for name in _replacements(owner):
            put_back(owner, name)
    return model


def repack(model: Any) -> Any:
    """Pack the weights of every accelerated U-Net anew, and return ``model``."""
    for _, module in _modules(model):
        forward = replaced_forward(module)
        if isinstance(forward, FastForward):
            forward.repack()
    for _, owner in _owners(model):
        for replacement in _replacements(owner).values():
            replacement.forget()
    return model


def _replacements(owner: Any) -> dict[str, FastLoop | WholeCall]:
    """Return what replaces an object's loops and calls, by the names of their methods."""
    held = [name for name, value in vars(owner).items() if isinstance(value, _LOOPS_AND_CALLS)]
    return {name: replaced(owner, name) for name in held if not name.startswith(BESIDE)}


def explain(model: Any) -> Report:
    """Say what in ``model`` is or can be accelerated, and why the rest is not. Changes nothing."""
    return _Survey(model).report()


@dataclass(frozen=True)
class _Found:
    """An object that has a denoising loop: which one, or why none that dpa knows."""

    path: str
    owner: Any
    loop: Loop | None
    why: str | None


class _Survey:
    """What a model holds: its modules by path, which of them are U-Nets of the family, its loops.

    Args:
        model: the model.
        given: the loops that a user names; None looks for those that are known.

    Attributes:
        modules: (path, module), once each.
        networks: of each module that means to be a U-Net, what it was recognised as, or why not.
        loops: in the order in which their owners lie in the model.

    """

    def __init__(self, model: Any, given: tuple[Loop, ...] | None = None):
        self.model = model
        self.modules = list(_modules(model))
        self.networks: dict[nn.Module, Network | str] = {}
        for _, module in self.modules:
            if all(hasattr(module, part) for part in _NEAR):
                self.networks[module] = _recognised(module)
        owners = [] if _is_scheduler(model) else list(_owners(model))
        places = [place for path, owner in owners for place in _loops_of(path, owner)]
        # A part of a policy may have a loop that its owner's is known by.
        around = [find(place.owner, held) for place in places for held in _holders(place.loop)]
        self.loops = [p for p in places if p.loop is not None or not _is_one_of(p.owner, around)]
        for loop in given or ():
            found = [(path, owner) for path, owner in owners if loop.missing(owner) is None]
            if not found:
                why = loop.missing(model)
                raise TypeError(f"accelerate: model must have the loop {loop.method}, but {why}")
            mine = [place for place in self.loops if place.owner is not found[0][1]]
            same = [
                place for place in self.loops if place.owner is found[0][1] and place.loop in given
            ]
            self.loops = [*mine, *same, _Found(*found[0], loop, None)]

    def report(self) -> Report:
        """Return the findings, in the order in which they lie in the model."""
        findings = [_scheduler_finding(self.model)] if _is_scheduler(self.model) else []
        places = list(self.loops)
        for path, owner in _owners(self.model):
            if isinstance(owner, nn.Module) and owner in self.networks:
                findings.append(self._unet_finding(path, owner))
            mine = [place for place in places if place.owner is owner]
            findings.extend(_loop_finding(place) for place in mine)
            if mine:
                findings.extend(_call_finding(path, owner))
        if not any(finding.part == "loop" for finding in findings):
            findings = [_alone(finding) for finding in findings]
        return Report(tuple(findings))

    def _unet_finding(self, path: str, module: nn.Module) -> Finding:
        forward, network = replaced_forward(module), self.networks[module]
        if not isinstance(forward, FastForward):
            why = None if isinstance(network, Network) else network
            return _finding(path, "U-Net", module, None, why, lambda: _how(module, network, "loop"))
        why = forward.fallback_reason() or forward.shadow.failed

        def how() -> str:
            if module.training:
                return "layer by layer with dpa's ops while it is in training mode"
            return _how(module, forward.network, forward.options.mode)

        return _finding(path, "U-Net", module, forward, why, how)


def _holders(loop: Loop | None) -> tuple[Place, ...]:
    return () if loop is None else loop.holders


def _is_one_of(owner: Any, objects: list[Any]) -> bool:
    return any(owner is one for one in objects)


def _loops_of(path: str, owner: Any) -> list[_Found]:
    """Return the loops of an object: those that run accelerated, else those that are known."""
    active = [fast.loop for fast in _replacements(owner).values() if isinstance(fast, FastLoop)]
    if active:
        return [_Found(path, owner, loop, None) for loop in active]
    fitting = [loop for loop in KNOWN if loop.missing(owner) is None]
    taken = [loop for loop in fitting if loop.method in vars(owner)]
    if taken:
        return [_Found(path, owner, None, f"its {taken[0].method} was replaced on the object")]
    if fitting:
        return [_Found(path, owner, loop, None) for loop in fitting]
    if not hasattr(type(owner), "conditional_sample"):
        return []
    why = [loop.missing(owner) for loop in KNOWN if loop.method == "conditional_sample"]
    other = [reason for reason in why if "does not take" not in reason]
    takes = "its conditional_sample takes other arguments than LeRobot's and the original's"
    return [_Found(path, owner, None, other[0] if other else takes)]


def _loop_finding(place: _Found) -> Finding:
    owner, loop = place.owner, place.loop
    held = None if loop is None else replaced(owner, loop.method)
    fast = held if isinstance(held, FastLoop) else None
    why, scheduler = place.why, None if loop is None else loop.scheduler_of(owner)
    if scheduler is not None:
        why = why or why_no_table(scheduler)
    if fast is not None:
        why = why or fast.fallback_reason() or fast.shadow.failed or fast.refused
    return _finding(place.path, "loop", owner, fast, why, lambda: _how_loop(owner, loop))


def _whole_call(policy: nn.Module) -> str | None:
    """Return the name of a policy's method from observations to actions, or None."""
    names = [n for n in WHOLE_CALLS if hasattr(type(policy), n) and n not in vars(policy)]
    return names[0] if names else None


def _call_finding(path: str, policy: nn.Module) -> Iterator[Finding]:
    """Yield what replays a policy's whole call, on a GPU."""
    found = [replaced(policy, name) for name in WHOLE_CALLS]
    calls = [call for call in found if isinstance(call, WholeCall)]
    parameter = next(policy.parameters(), None)
    for call in calls if parameter is not None and parameter.is_cuda else []:
        why = call.refused
        how = why or ("one CUDA graph" if call.captured else "part by part, until it was compared")
        errors = tuple(call.shadow.errors.values())
        name = f"{type(policy).__name__}.{call.method}"
        yield Finding(path, "call", name, why is None, call.captured, how, errors)


def _scheduler_finding(scheduler: Any) -> Finding:
    step, why = replaced(scheduler, "step"), why_no_step(scheduler)
    fast = step if isinstance(step, FastStep) else None
    why = why or (None if fast is None else fast.shadow.failed)
    return _finding("", "scheduler", scheduler, fast, why, lambda: "each step one op")


def _finding(
    path: str, part: str, owner: Any, fast: Any, why: str | None, how: Callable[[], str]
) -> Finding:
    """Say what is found of a part that ``fast`` replaces, where it is not None."""
    errors = () if fast is None else tuple(fast.shadow.errors.values())
    can, name = why is None, type(owner).__name__
    return Finding(path, part, name, can, can and fast is not None, why or how(), errors)


def _alone(finding: Finding) -> Finding:
    """Say of a U-Net inside a model in which no loop was found that its loop stays (robomimic)."""
    if finding.part != "U-Net" or not finding.path or not finding.can:
        return finding
    how = f"{finding.how}, step by step: the loop around it is not supported"
    return replace(finding, how=how)


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside a module, or inside the attributes of a plain object, once each."""
    seen: set[int] = set()

    def walk(path: str, value: Any, depth: int) -> Iterator[tuple[str, nn.Module]]:
        if id(value) in seen:
            return
        if isinstance(value, nn.Module):
            for name, module in value.named_modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    if "_orig_mod" in module._modules:  # torch.compile's wrapper shows its parts
                        continue
                    yield ".".join(part for part in (path, name) if part), module
        elif depth > 0 and hasattr(value, "__dict__") and not isinstance(value, type):
            seen.add(id(value))
            for name, inner in list(vars(value).items()):
                yield from walk(f"{path}.{name}".lstrip("."), inner, depth - 1)

    yield from walk("", model, 3)


def _owners(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules inside a model, and the model itself where it is none."""
    if not isinstance(model, nn.Module) and hasattr(model, "__dict__"):
        yield "", model
    yield from _modules(model)


def _is_scheduler(model: Any) -> bool:
    parts = ("step", "set_timesteps", "timesteps", "config")
    return not isinstance(model, nn.Module) and all(hasattr(model, part) for part in parts)


def _recognised(module: nn.Module) -> Network | str:
    """Return a U-Net as one of the family, or why it cannot be accelerated."""
    forward = replaced_forward(module)
    if isinstance(forward, FastForward):
        return forward.prepare() or str(forward.refused)
    if forward is not None:
        return "its forward was replaced on the object"
    try:
        network = recognise(module)
    except NotInFamily as error:
        return str(error)
    if network.unconditioned and network.local_cond_dim is not None:
        return "blocks without conditioning are not supported beside local conditioning"
    return network


def _how(module: nn.Module, network: Network, mode: str) -> str:
    parameter = next(module.parameters())
    if mode == "chain" or parameter.dtype == torch.float64:
        return "layer by layer with dpa's ops"
    try:
        config_of(network)
    except ValueError as error:
        return f"layer by layer with dpa's ops: {error}"
    if not runs_packed(parameter.device):
        return f"layer by layer with dpa's ops: no packed kernels on {parameter.device.type}"
    return "one op on packed weights"


def _how_loop(policy: Any, loop: Loop) -> str:
    """Say how a loop runs whose scheduler has a table."""
    try:
        table = loop.table_of(policy, {})
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    network = loop.network_of(policy)
    if not is_of_family(network):
        parameter = next(network.parameters(), None)
        how = "one CUDA graph" if parameter is not None and parameter.is_cuda else "step by step"
        return f"the whole loop by DiffusionSampler, {how} around {type(network).__name__} as it is"
    if isinstance(table, MultistepTable):
        return "by DiffusionSampler, step by step: its solver has several steps"
    return "the whole loop by DiffusionSampler"
