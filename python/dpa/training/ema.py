"""The moving average of a network's weights."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpa.library.checks import require


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor (FSDP2), or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sharded_as(parameter: Tensor, average: Tensor) -> Tensor:
    """Return an average as a parameter is: a DTensor of it where that is one.

    Checkpoints of several ranks would take a plain tensor of one name for the same on all.
    """
    if not hasattr(parameter, "to_local"):
        return average
    from torch.distributed.tensor import DTensor

    where, whole = (parameter.device_mesh, parameter.placements), parameter.detach()
    sizes = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(average, *where, run_check=False, **sizes)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """A model's parameters; of modules that FSDP2 shards the shards, whatever has been gathered.

    After a forward without backward its root has all of them gathered, and its next forward would
    not see what is written to the shards.
    """
    for module in model.modules():
        if hasattr(type(module), "reshard"):  # an FSDPModule
            module.reshard()
    return list(model.parameters())


_Pairs = list[tuple[Tensor, Tensor]]


def _values(pairs: _Pairs) -> list[Tensor]:
    """The parameters, in the dtypes of their averages."""
    return [local(parameter.detach()).to(old.dtype) for parameter, old in pairs]


def _copy_values(pairs: _Pairs) -> None:
    if pairs:
        torch._foreach_copy_([old for _, old in pairs], _values(pairs))


class EMA:
    """Exponential moving average of a model's parameters, all of them in a few kernels.

    ``average <- decay * average + (1 - decay) * parameter``, where the decay grows with the number
    ``n`` of updates before, so that the start is forgotten::

        decay = 0                                                                 for n < 2
        decay = clamp(1 - (1 + (n - 1) / inv_gamma) ** -power, min_decay, max_decay)    after

    Parameters of BatchNorm layers, and those that do not train, are copied. Averages are float32
    for 16-bit parameters. Buffers are taken as they are when the averages are applied. A sharded
    model (FSDP2) has its averages sharded in the same way.

    Args:
        model: whose parameters are averaged, those that train and those that do not.
        power: of the decay's growth; 2/3 for a million steps, 3/4 for fewer.
        max_decay: the decay's limit.
        min_decay: the least decay.
        inv_gamma: how many updates the growth takes to set in.

    Source: the schedule is that of Chi et al., Diffusion Policy (2023).

    """

    def __init__(
        self,
        model: nn.Module,
        power: float = 0.75,
        max_decay: float = 0.9999,
        min_decay: float = 0.0,
        inv_gamma: float = 1.0,
    ):
        ordered, got = 0.0 <= min_decay <= max_decay <= 1.0, f"{min_decay}, {max_decay}"
        require(ordered, "EMA: min_decay and max_decay", "be ordered in 0..1", got)
        rule, got = "be at least 0 and inv_gamma above 0", f"{power}, {inv_gamma}"
        require(power >= 0 and inv_gamma > 0, "EMA: power", rule, got)
        require(isinstance(model, nn.Module), "EMA: model", "be a module", type(model))
        self.model = model
        self.power, self.max_decay, self.min_decay = power, max_decay, min_decay
        self.inv_gamma = inv_gamma
        self._updates = 0
        # Of the updates, where an optimizer makes them: int64 on the device of the averages.
        self.count: Tensor | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self.averages = [self._copy(parameter) for parameter in _parameters(model)]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_optimizer": None}  # a copied optimizer attaches its own averages

    @staticmethod
    def _copy(parameter: Tensor) -> Tensor:
        value = local(parameter.detach())
        wide = torch.promote_types(value.dtype, torch.float32)
        return value.to(wide if value.is_floating_point() else value.dtype, copy=True)

    @property
    def updates(self) -> int:
        """How many there have been; where an optimizer makes them, read from the device."""
        return self._updates if self.count is None else int(self.count)

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates = value
        if self.count is not None:
            self.count.fill_(value)

    @property
    def schedule(self) -> list[float]:
        """``power``, ``inv_gamma``, ``min_decay`` and ``max_decay``."""
        return [self.power, self.inv_gamma, self.min_decay, self.max_decay]

    @property
    def decay(self) -> float:
        """The decay of the next update."""
        if self.updates < 2:
            return 0.0
        grown = 1.0 - (1.0 + (self.updates - 1) / self.inv_gamma) ** -self.power
        return min(max(grown, self.min_decay), self.max_decay)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the model; call it after the optimizer's step."""
        if self.attached:
            raise RuntimeError("EMA: update must be left to the optimizer that these averages have")
        averaged, copied = self._parts()
        if averaged:
            olds = [old for _, old in averaged]
            torch._foreach_lerp_(olds, _values(averaged), 1.0 - self.decay)
        _copy_values(copied)
        self.updates += 1

    def _parts(self) -> tuple[_Pairs, _Pairs]:
        """The parameters with their averages: what is averaged, and what is copied."""
        layers = (m for m in self.model.modules() if isinstance(m, _BatchNorm))
        normalising = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        averaged: _Pairs = []
        copied: _Pairs = []
        for parameter, old in zip(self._parameters(), self.averages, strict=True):
            trains = parameter.requires_grad and id(parameter) not in normalising
            (averaged if trains else copied).append((parameter, old))
        return averaged, copied

    def _parameters(self) -> list[nn.Parameter]:
        found, rule = _parameters(self.model), f"have {len(self.averages)} parameters, as before"
        require(len(found) == len(self.averages), "EMA: model", rule, len(found))
        self._check_shapes("model", list(map(local, found)))
        return found

    @property
    def attached(self) -> bool:
        """Whether an optimizer makes the updates, as long as there is one."""
        return self._optimizer is not None and self._optimizer() is not None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Count updates on the device: an optimizer's step makes them from now on."""
        require(not self.attached, "EMA: averages", "have one optimizer", "a second one")
        device = self.averages[0].device if self.averages else "cpu"
        self.count = torch.tensor(self.updates, device=device)
        self._optimizer = weakref.ref(optimizer)

    def averaged(self) -> dict[int, Tensor]:
        """The averages that an optimizer's op may move, by the identities of their parameters."""
        return {id(parameter): old for parameter, old in self._parts()[0]}

    @torch.no_grad()
    def finish_update(self, moved: Sequence[Tensor]) -> None:
        """Do what is left of an update when the averages of some parameters have been moved."""
        done = {id(parameter) for parameter in moved}
        averaged, copied = self._parts()
        left = [(parameter, old) for parameter, old in averaged if id(parameter) not in done]
        if left:
            count = self.count.double()
            grown = 1.0 - (1.0 + (count - 1.0) / self.inv_gamma) ** -self.power
            weight = torch.where(count < 2, 1.0, 1.0 - grown.clamp(self.min_decay, self.max_decay))
            for (_, old), new in zip(left, _values(left), strict=True):
                old.lerp_(new, weight.to(old.device, old.dtype))
        _copy_values(copied)
        self.count.add_(1)

    def _check_shapes(self, name: str, tensors: Sequence[Tensor]) -> None:
        count, given = len(self.averages), len(tensors)
        require(given == count, f"EMA: {name}", f"hold {count} averages", given)
        pairs = [(new.shape, kept.shape) for new, kept in zip(tensors, self.averages, strict=True)]
        differ = [f"{tuple(new)} for {tuple(kept)}" for new, kept in pairs if new != kept]
        got = differ[0] if differ else None
        require(not differ, f"EMA: {name}", "have the shapes of the averages", got)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Write the averages, and the trained model's buffers, into a model of the same shapes.

        Raises:
            ValueError: its parameters or buffers are others; then nothing has changed.

        """
        parameters = [local(parameter.detach()) for parameter in _parameters(model)]
        self._check_shapes("model", parameters)
        buffers, news = list(model.buffers()), list(self.model.buffers())
        shapes, given = ([tuple(x.shape) for x in those] for those in (news, buffers))
        require(given == shapes, "EMA: model", f"have buffers of the shapes {shapes}", given)
        torch._foreach_copy_(parameters, self.averages)
        for kept, new in zip(buffers, news, strict=True):
            kept.copy_(new)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Give the model its averages inside a ``with`` block, and its own weights back after."""
        parameters = [local(parameter.detach()) for parameter in self._parameters()]
        own = [parameter.clone() for parameter in parameters]
        try:
            torch._foreach_copy_(parameters, self.averages)
            yield self.model
        finally:
            # Of what is there now, as a change of dtype replaces tensors.
            torch._foreach_copy_([local(p.detach()) for p in self._parameters()], own)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the averages themselves, under FSDP2 as DTensors."""
        averages, parameters = self.averages, _parameters(self.model)
        if any(hasattr(parameter, "to_local") for parameter in parameters):
            pairs = zip(parameters, averages, strict=True)
            averages = [_sharded_as(*pair) for pair in pairs]
        return {"updates": self.updates, "averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the averages of a checkpoint.

        Raises:
            ValueError: it holds others; then nothing has changed.

        """
        missing = {"averages", "updates"} - set(state)
        require(not missing, "EMA: state", "hold averages and updates", f"none of {missing}")
        updates, kept = state["updates"], state["averages"]
        counted = isinstance(updates, Integral | Tensor) and updates >= 0
        require(counted, "EMA: state", "hold a number of updates", updates)
        tensors = all(isinstance(average, Tensor) for average in kept)
        require(tensors, "EMA: state", "hold averages", "something else")
        news = [local(average.detach()) for average in kept]
        self._check_shapes("state", news)
        for kept, new in zip(self.averages, news, strict=True):
            kept.copy_(new)
        self.updates = int(updates)
