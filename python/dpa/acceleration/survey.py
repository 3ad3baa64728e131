"""What a model holds that dpa can accelerate: networks, loops and calls, and why not the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from dpa.acceleration.encoder_forward import FastEncoder
from dpa.acceleration.known_loops import KNOWN
from dpa.acceleration.loops import Loop
from dpa.acceleration.policy_loop import FastLoop
from dpa.acceleration.scheduler_step import FastStep, why_no_step, why_no_table
from dpa.acceleration.unet_forward import FastForward
from dpa.acceleration.whole_call import WholeCall
from dpa.library import html
from dpa.nn import image_encoder
from dpa.nn.family import Network, NotInFamily, is_of_family, recognise, resembles
from dpa.nn.image_encoder import Encoder, NotAnEncoder
from dpa.packed.config import config_of, runs_packed
from dpa.packed.encoder import why_not
from dpa.packed.encoder_program import EncoderProgram
from dpa.tracking import find
from dpa.tracking.replacing import replaced
from dpa.training.graphed_calls import replaced_forward


@dataclass(frozen=True)
class Finding:
    """One part of a model: what it is, and what dpa does or would do with it.

    Attributes:
        path: where it was found, as attributes from the model.
        part: "U-Net", "encoder" (of images), "loop", "call" (from observations to actions) or
            "scheduler".
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


def replacements(owner: Any) -> dict[str, FastLoop | WholeCall]:
    """Return what replaces an object's loops and calls, by the names of their methods."""
    kinds, held = FastLoop | WholeCall, vars(owner).items()
    names = [name for name, value in held if isinstance(value, kinds) and name == value.METHOD]
    return {name: replaced(owner, name) for name in names}


@dataclass(frozen=True)
class Found:
    """An object that has a denoising loop: which one, or why none that dpa knows."""

    path: str
    owner: Any
    loop: Loop | None
    why: str | None


class Survey:
    """What a model holds: which of its modules are U-Nets or image encoders, and its loops.

    Args:
        model: the model.
        given: the loops that a user names; None finds those that are known.

    Attributes:
        networks: of each module that means to be a U-Net, what it was recognised as, or why not.
        encoders: of each module that means to be an image encoder, likewise.
        loops: in the order in which their owners lie in the model.

    """

    def __init__(self, model: Any, given: tuple[Loop, ...] | None = None):
        self.model = model
        owners = list(owners_of(model))
        modules = [owner for _, owner in owners if isinstance(owner, nn.Module)]
        self.networks: dict[nn.Module, Network | str] = {
            module: _recognised(module, _network) for module in modules if resembles(module)
        }
        self.encoders: dict[nn.Module, Encoder | str] = {}
        inside: set[nn.Module] = set()  # no encoder lies inside of another
        for module in modules:
            apart = module not in inside and image_encoder.resembles(module)
            if apart and next(module.parameters(), None) is not None:
                self.encoders[module] = _recognised(module, _encoder)
                inside.update(module.modules())
        owners = [] if is_scheduler(model) else owners
        places = [place for path, owner in owners for place in _loops_of(path, owner)]
        # A part of a policy may have a loop that its owner's is known by.
        held = [(place.owner, h) for place in places if place.loop for h in place.loop.holders]
        around = {id(find(owner, place)) for owner, place in held}
        self.loops = [p for p in places if p.loop is not None or id(p.owner) not in around]
        for loop in given or ():
            found = [(path, owner) for path, owner in owners if loop.missing(owner) is None]
            if not found:
                why = loop.missing(model)
                raise TypeError(f"accelerate: model must have the loop {loop.method}, but {why}")
            others = [p for p in self.loops if p.owner is not found[0][1] or p.loop in given]
            self.loops = [*others, Found(*found[0], loop, None)]

    def report(self) -> Report:
        """Return the findings, in the order in which they lie in the model."""
        findings = [_scheduler_finding(self.model)] if is_scheduler(self.model) else []
        for path, owner in owners_of(self.model):
            if isinstance(owner, nn.Module) and owner in self.networks:
                findings.append(self._unet_finding(path, owner))
            if isinstance(owner, nn.Module) and owner in self.encoders:
                findings.append(self._encoder_finding(path, owner))
            mine = [place for place in self.loops if place.owner is owner]
            findings.extend(self._loop_finding(place) for place in mine)
            if mine and isinstance(owner, nn.Module):
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
                precision = ", in bfloat16" if forward.options.training_dtype else ""
                return f"layer by layer with dpa's ops{precision} while it is in training mode"
            return _how(module, forward.network, forward.options.mode)

        return _finding(path, "U-Net", module, forward, why, how)

    def _encoder_finding(self, path: str, module: nn.Module) -> Finding:
        forward, found = replaced_forward(module), self.encoders[module]
        why = None if isinstance(found, Encoder) else found
        fast = forward if isinstance(forward, FastEncoder) else None
        if fast is not None:
            why = fast.fallback_reason() or fast.shadow.failed
        how = "convolutions with what follows them, on packed weights"
        return _finding(path, "encoder", module, fast, why, lambda: how)

    def _loop_finding(self, place: Found) -> Finding:
        owner, loop = place.owner, place.loop
        held = None if loop is None else replaced(owner, loop.method)
        fast = held if isinstance(held, FastLoop) else None
        why, scheduler = place.why, None if loop is None else loop.scheduler_of(owner)
        if scheduler is not None:
            why = why or why_no_table(scheduler)
        if fast is not None:
            why = why or fast.fallback_reason() or fast.shadow.failed or fast.refused
        how = functools.partial(self._how_loop, owner, loop, fast)
        return _finding(place.path, "loop", owner, fast, why, how)

    def _how_loop(self, policy: Any, loop: Loop, fast: FastLoop | None) -> str:
        """Say how a loop runs whose scheduler has a table."""
        try:
            loop.table_of(policy, {})
        except (AttributeError, TypeError, ValueError) as error:
            return str(error)
        how, network = "the whole loop by DiffusionSampler", loop.network_of(policy)
        if fast is not None and (calls := fast.shadow.undecided):
            how = f"as it is in {calls} calls, whose random numbers moved otherwise; then {how}"
        if network.training:
            how = f"as it is while its network is in training mode; in evaluation {how}"
        found = self.networks.get(network)
        if isinstance(found, Network) or (found is None and is_of_family(network)):
            return how
        name = type(network).__name__
        if fast is not None and (found := fast.untraced()) is not None:
            return f"{how}, {found[0]} around {name} as it is: {found[1]}"
        parameter = next(network.parameters(), None)
        if parameter is not None and parameter.is_cuda:
            return f"{how}, one CUDA graph around {name}, which is traced for it"
        return f"{how}, step by step around {name} as it is"


def _loops_of(path: str, owner: Any) -> list[Found]:
    """Return the loops of an object: those that run accelerated, else those that are known."""
    active = [fast.loop for fast in replacements(owner).values() if isinstance(fast, FastLoop)]
    if active:
        return [Found(path, owner, loop, None) for loop in active]
    fits = {loop.method: loop for loop in KNOWN if loop.missing(owner) is None}
    fitting = list(fits.values())  # of those for one method the last one
    taken = [loop for loop in fitting if loop.method in vars(owner)]
    if taken:
        return [Found(path, owner, None, f"its {taken[0].method} was replaced on the object")]
    if fitting:
        return [Found(path, owner, loop, None) for loop in fitting]
    if not hasattr(type(owner), "conditional_sample"):
        return []
    why = [loop.missing(owner) for loop in KNOWN if loop.method == "conditional_sample"]
    other = [reason for reason in why if "does not take" not in reason]
    takes = "its conditional_sample takes other arguments than LeRobot's and the original's"
    return [Found(path, owner, None, other[0] if other else takes)]


def _call_finding(path: str, policy: nn.Module) -> Iterator[Finding]:
    """Yield what replays a policy's whole call, on a GPU."""
    calls = [call for call in replacements(policy).values() if isinstance(call, WholeCall)]
    parameter = next(policy.parameters(), None)
    for call in calls if parameter is not None and parameter.is_cuda else []:
        why = call.refused
        how = why or ("one CUDA graph" if call.captured else "part by part, until it was compared")
        errors = tuple(call.shadow.errors.values())
        name = f"{type(policy).__name__}.{call.METHOD}"
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


def owners_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model and the modules inside it, or inside its attributes, by path, once each."""
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

    if not isinstance(model, nn.Module) and hasattr(model, "__dict__"):
        yield "", model
    yield from walk("", model, 3)


def is_scheduler(model: Any) -> bool:
    """Whether a model is a scheduler of diffusers."""
    parts = ("step", "set_timesteps", "timesteps", "config")
    return not isinstance(model, nn.Module) and all(hasattr(model, part) for part in parts)


def _recognised(module: nn.Module, recognise: Callable[[nn.Module], Any]) -> Any:
    """Return what a module was recognised as, or why it cannot be accelerated."""
    forward = replaced_forward(module)
    if isinstance(forward, FastForward | FastEncoder):
        return forward.prepare() or str(forward.refused)
    if forward is not None:
        return "its forward was replaced on the object"
    try:
        return recognise(module)
    except (NotInFamily, NotAnEncoder) as error:
        return str(error)


def _network(module: nn.Module) -> Network | str:
    network = recognise(module)
    if network.unconditioned and network.local_cond_dim is not None:
        return "blocks without conditioning are not supported beside local conditioning"
    return network


def _encoder(module: nn.Module) -> Encoder | str:
    """Return an image encoder that dpa runs where it lies, or why it does not."""
    first = next(module.parameters())
    # Whether float32 may round to TF32 is asked in every call: it is a setting of PyTorch's.
    why = why_not(first.dtype, first.device, torch.bfloat16 if first.is_cuda else None)
    encoder = image_encoder.recognise(module)
    if first.is_cuda and why is None:
        EncoderProgram.of(encoder)
    return why or encoder


def _how(module: nn.Module, network: Network, mode: str) -> str:
    parameter, kinds = next(module.parameters()), network.parts_in_words()
    beside = f"; PyTorch runs {' and '.join(kinds)}" if kinds else ""
    if mode == "chain" or parameter.dtype == torch.float64:
        return f"layer by layer with dpa's ops{beside}"
    try:
        config_of(network)
    except ValueError as error:
        return f"layer by layer with dpa's ops: {error}{beside}"
    kind = parameter.device.type
    if not runs_packed(parameter.device):
        return f"layer by layer with dpa's ops: no packed kernels on {kind}{beside}"
    return f"one op on packed weights{beside}"
