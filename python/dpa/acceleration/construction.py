"""Accelerate policies as they are made, for programs that nobody edits.

The constructors of known policies are wrapped: in modules that are imported already, and by a hook
on imports in those that come later. What leaves its outermost constructor is accelerated. Weights
that are loaded afterwards, a move to another device and deep copies are noticed as ever.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from dpa.acceleration.api import accelerate, explain
from dpa.acceleration.example import ACTS
from dpa.acceleration.shadow_run import Options
from dpa.library.checks import require

# Modules, and which of their classes are policies.
KNOWN = (
    (r"lerobot\.policies\.(diffusion|multi_task_dit)\.modeling_\w+", r"\w+Policy"),
    # diffusion_policy and what is made of it, such as diffusion_policy_3d and flow_policy_3d.
    (r"(\w+\.)*\w+_policy(_\w+)?\.policy\.\w+", r"\w+"),
    (r"robomimic\.algo\.diffusion_policy", r"DiffusionPolicyUNet"),
)
_SWITCH = "DPA_ACCELERATE"
_OFF, _ON = ("0", "off", "no", "false"), ("", "1", "on", "yes", "true")
_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}

Say = Callable[[str], None]
_making = threading.local()  # the objects whose constructors run
_hook: _Hook | None = None


def options_from(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the options of :func:`dpa.accelerate` that an environment says; None switches off.

    ``DPA_ACCELERATE`` is the switch. ``DPA_DTYPE``, ``DPA_MODE``, ``DPA_TOLERANCE``,
    ``DPA_FALLBACK``, ``DPA_GRAPHS``, ``DPA_WEIGHTS`` and ``DPA_TRAINING_DTYPE`` are the options of
    those names. ValueError names variable, rule and value.
    """
    if not _flag(_SWITCH, environment.get(_SWITCH, "")):
        return None
    names = {name: f"DPA_{name.upper()}" for name in _READ}
    given = {name: environment.get(variable) for name, variable in names.items()}
    return {name: _READ[name](names[name], value) for name, value in given.items() if value}


def _flag(name: str, value: str) -> bool:
    choices = ", ".join(filter(None, _ON + _OFF))
    require(value.lower() in _OFF + _ON, name, f"be one of {choices}", repr(value))
    return value.lower() in _ON


def _dtype(name: str, value: str) -> torch.dtype:
    require(value in _DTYPES, name, f"be one of {', '.join(_DTYPES)}", repr(value))
    return _DTYPES[value]


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {value!r}") from None


# How each option is read.
_READ: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("mode", "weights"), lambda _, value: value),
    **dict.fromkeys(("fallback", "graphs"), _flag),
    **dict.fromkeys(("dtype", "training_dtype"), _dtype),
    "tolerance": _number,
}


def accelerate_new(say: Say, policies: tuple[str, ...] = (), **options: Any) -> None:
    """Accelerate every policy that this process makes from now on, until :func:`leave_new`.

    A second call changes nothing: the first one's options stay.

    Args:
        say: called with one line for each policy: what of it is accelerated, or why nothing is.
        policies: further classes, as "module:Class", where the module may import the class.
        options: of :func:`dpa.accelerate`.

    Raises:
        ValueError: a policy is not written as "module:Class", or an option has no such value.

    """
    global _hook
    Options(**{name: value for name, value in options.items() if name != "graphs"})
    further = []
    for policy in policies:
        module, colon, name = policy.partition(":")
        right = module and colon and name.isidentifier()
        require(right, "policy", "be written as module:Class", repr(policy))
        further.append((module, name))
    if _hook is None:
        _hook = _Hook(further, say, options)
        _hook.start()


def accelerate_new_by_environment(say: Say) -> None:
    """Accelerate new policies as the environment says."""
    options = options_from(os.environ)
    if options is not None:
        accelerate_new(say, **options)


def leave_new() -> None:
    """Accelerate no new policies any more. Those that are stay accelerated."""
    global _hook
    if _hook is not None:
        _hook.stop()
    _hook = None


def _acts(kind: type) -> bool:
    return any(hasattr(kind, method) for method in ACTS)


class _Hook:
    """Wraps the constructors of policies; a finder of modules, ahead of all others."""

    def __init__(self, further: list[tuple[str, str]], say: Say, options: dict[str, Any]):
        self.say, self.options, self._further = say, options, further
        modules = [module for module, _ in KNOWN] + [re.escape(module) for module, _ in further]
        self._modules = re.compile("|".join(f"({module})" for module in modules))
        self._wrapped: list[tuple[type, Any]] = []

    def start(self) -> None:
        sys.meta_path.insert(0, self)
        for module in list(sys.modules.values()):
            self._wrap_policies(module)

    def stop(self) -> None:
        sys.meta_path.remove(self)
        for kind, own in reversed(self._wrapped):
            if own is None:
                del kind.__init__
            else:
                kind.__init__ = own

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module that may hold policies, and look for them once it ran."""
        if not self._modules.fullmatch(name):
            return None
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._wrap_policies(module)

            spec.loader.exec_module = exec_module
        return spec

    def _wrap_policies(self, module: ModuleType) -> None:
        name = getattr(module, "__name__", "")
        named = [kind for of, kind in KNOWN if re.fullmatch(of, name)]
        for value in list(vars(module).values()) if named else []:
            own = isinstance(value, type) and value.__module__ == name
            if own and any(re.fullmatch(kind, value.__name__) for kind in named):
                self._wrap(value)
        for of, kind in self._further:
            value = getattr(module, kind, None) if of == name else None
            if isinstance(value, type) and _acts(value):
                self._wrap(value)
            elif of == name:
                self.say(f"dpa: {of}:{kind} is no policy, so it runs as it is")

    def _wrap(self, kind: type) -> None:
        if kind in [wrapped for wrapped, _ in self._wrapped] or not _acts(kind):
            return
        self._wrapped.append((kind, vars(kind).get("__init__")))
        construct = kind.__init__

        @functools.wraps(construct)
        def init(policy: Any, *args: Any, **kwargs: Any) -> None:
            outer = vars(_making).setdefault("objects", [])
            outermost = not any(one is policy for one in outer)
            outer.append(policy)
            try:
                construct(policy, *args, **kwargs)
            finally:
                outer.pop()
            if outermost:
                self._accelerate(policy)

        kind.__init__ = init

    def _accelerate(self, policy: Any) -> None:
        name = type(policy).__name__
        try:
            accelerate(policy, **self.options)
        except TypeError as error:
            if not self.options.get("fallback", True):
                raise
            self.say(f"dpa: {name} runs as it is: {str(error).removeprefix('accelerate: ')}")
            return
        modes = [(module, module.training) for module in getattr(policy, "modules", tuple)()]
        try:  # what runs in evaluation
            for module, _ in modes:
                module.training = False
            parts = ", ".join(dict.fromkeys(f.part for f in explain(policy).findings if f.active))
        finally:
            for module, training in modes:
                module.training = training
        dtype = self.options.get("dtype")
        weights = "" if dtype is None else f" on {str(dtype).removeprefix('torch.')} weights"
        self.say(f"dpa: {name} runs accelerated: {parts}{weights} ({_SWITCH}=0: as it is)")
