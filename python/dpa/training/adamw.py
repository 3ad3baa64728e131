"""Adam and AdamW with gradient clipping, moving averages and clearing of gradients, as one op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from dpa.library.checks import require
from dpa.training.ema import EMA, local

_Call = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


class _OneOp(torch.optim.Optimizer):
    """What :class:`Adam` and :class:`AdamW` have in common, before PyTorch's class of the name."""

    _WEIGHT_DECAY = 0.0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        ema: EMA | None = None,
        clear_grads: bool = False,
        foreach: bool | None = None,
        capturable: bool = True,
        differentiable: bool = False,
        fused: bool | None = True,
        **of_adam: bool,
    ):
        name = type(self).__name__
        self._check_options({"amsgrad": amsgrad, "differentiable": differentiable})
        is_number = max_norm is None or isinstance(max_norm, Real | Tensor)
        require(is_number, f"{name}: max_norm", "be a number", repr(max_norm))
        require(max_norm is None or max_norm > 0, f"{name}: max_norm", "be above 0", max_norm)
        require(isinstance(ema, EMA | None), f"{name}: ema", "be a dpa.training.EMA", type(ema))
        self.max_norm, self.ema, self.clear_grads = max_norm, ema, clear_grads
        self._norms: dict[str, Tensor] = {}  # torch.compile lets no attribute be set in a step
        weight_decay = self._WEIGHT_DECAY if weight_decay is None else weight_decay
        of_adam.update(maximize=maximize, capturable=True, fused=True)
        super().__init__(params, lr, betas, eps, weight_decay, **of_adam)
        if ema is not None:
            ema.attach(self)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last step's gradients, where there is a ``max_norm``."""
        return self._norms.get("last")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as to any optimizer; a parameter given twice raises."""
        is_dict, name = isinstance(param_group, dict), type(self).__name__
        require(is_dict, f"{name}: param_group", "be a dict", type(param_group), TypeError)
        params = param_group["params"]
        if not isinstance(params, Tensor | set):  # PyTorch's refuses a set
            params = param_group["params"] = list(params)
            tensors = [p[1] if isinstance(p, tuple) else p for p in params]
            differ = len({id(p) for p in tensors}) == len(tensors)
            require(differ, f"{name}: params", "differ", "one twice in a group")
        self._check_options(param_group)
        super().add_param_group(param_group)

    def _check_options(self, options: dict[str, Any]) -> None:
        for option in ("amsgrad", "differentiable"):
            name = f"{type(self).__name__}: {option}"
            require(not options.get(option), name, "be False", "True; torch.optim has it")
        decay = options.get("weight_decay", 0.0)
        require(decay is not None, f"{type(self).__name__}: weight_decay", "be a number", decay)

    def __getstate__(self) -> dict[str, Any]:
        own = ("max_norm", "ema", "clear_grads", "_norms", "_step_supports_amp_scaling")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.ema is not None and not self.ema.attached:
            self.ema.attach(self)
        # The state of another kind of AdamW counts steps on the host.
        for group in self.param_groups:
            group.update(foreach=None, capturable=True, differentiable=False, fused=True)
            for p in group["params"]:
                if p in self.state and "step" in self.state[p]:
                    step = torch.as_tensor(self.state[p]["step"])
                    self.state[p]["step"] = step.to(p.device, torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of PyTorch's of the same name."""
        plain = not any(group.get("amsgrad") for group in state_dict["param_groups"])
        require(plain, f"{type(self).__name__}: the state", "have no amsgrad", "one")
        super().load_state_dict(state_dict)  # ends in __setstate__

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients, and the averages.

        A ``closure`` computes the loss, which is returned, and its gradients, as for any optimizer.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in trained]
        layouts = {grad.layout for grad in grads} - {torch.strided}
        name, got = type(self).__name__, ", ".join(map(str, layouts))
        require(not layouts, f"{name}: gradients", "be dense", got, RuntimeError)
        differ = not self.clear_grads or _differ(grads)
        rule, got = "differ with clear_grads", "one of two parameters"
        require(differ, f"{name}: gradients", rule, got, RuntimeError)
        coefficient = self._clip_coefficient(grads)
        ema = None if self.ema is None or self._only_makes_state(grads) else self.ema
        averages = {} if ema is None else ema.averaged()
        for group in self.param_groups:
            self._check_options(group)
            for call in self._calls(group, averages).values():
                self._run(group, call, coefficient)
        if ema is not None:
            ema.finish_update(trained)
        return loss

    def _only_makes_state(self, grads: list[Tensor]) -> bool:
        """Whether a step moves nothing: a first one at a rate of 0, of gradients that are 0.

        ``torch.distributed.checkpoint.state_dict`` makes it before it loads or returns a state.
        """
        if self.state or not grads:
            return False
        if any(g.is_cuda for g in grads) and torch.cuda.is_current_stream_capturing():
            return False
        return not any(group["lr"] for group in self.param_groups) and not _total_norm(grads)

    def _clip_coefficient(self, grads: list[Tensor]) -> Tensor | None:
        """What all gradients are multiplied by, on the device; None where nothing is clipped."""
        if self.max_norm is None or not grads:
            return None
        norm = _total_norm(grads)
        if (scale := getattr(self, "grad_scale", None)) is not None:
            norm = norm / scale.to(norm.device)
        self._norms["last"] = norm
        return torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)

    def _calls(self, group: dict[str, Any], averages: dict[int, Tensor]) -> dict[Any, _Call]:
        """The op's lists, for each device and dtype, and with and without averages."""
        calls: dict[Any, _Call] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            state, average = self.state[p], averages.get(id(p))
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            key = (p.device, p.dtype, p.grad.dtype, average is not None)
            lists = calls.setdefault(key, ([], [], [], [], [], []))
            tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
            for to, tensor in zip(lists, tensors, strict=False):
                to.append(local(tensor))
            if average is not None:
                lists[4].append(average)
            lists[5].append(state["step"])
        return calls

    def _run(self, group: dict[str, Any], call: _Call, coefficient: Tensor | None) -> None:
        device, dtype = call[0][0].device, call[0][0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        on_device = lambda x, of=torch.float32: None if x is None else x.to(device, of)  # noqa: E731
        lr, (beta1, beta2) = group["lr"], group["betas"]
        on_host = not isinstance(lr, Tensor) or lr.device.type == "cpu"
        torch.ops.dpa.adamw_ema_(
            *call,
            lr=float(lr) if on_host else 0.0,
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            clear_grads=self.clear_grads,
            tensor_lr=None if on_host else on_device(lr),
            grad_scale=on_device(getattr(self, "grad_scale", None)),
            found_inf=on_device(getattr(self, "found_inf", None)),
            clip_coef=on_device(coefficient, wide),
            updates=on_device(self.ema.count, torch.int64) if call[4] else None,
            ema_schedule=self.ema.schedule if call[4] else [],
        )


def _differ(grads: list[Tensor]) -> bool:
    """Whether none is another's memory, which would be cleared before it is read."""
    places = list(map(id, grads))
    if not torch.compiler.is_compiling():
        shards = [local(grad) for grad in grads]
        places += [x.data_ptr() for x in shards if x.numel() > 0 and not x.is_meta]
    return len(set(places)) == len(places)


def _total_norm(grads: list[Tensor]) -> Tensor:
    narrow = [g for g in grads if g.dtype in (torch.float16, torch.bfloat16)]
    if narrow:  # 16 bits would not hold the norm of scaled gradients
        wide = [g for g in grads if g.dtype not in (torch.float16, torch.bfloat16)]
        grads = [*wide, *torch._foreach_norm(narrow, 2.0, dtype=torch.float32)]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # DTensors: all ranks'


class AdamW(_OneOp, torch.optim.AdamW):
    r"""AdamW, gradient clipping, :class:`EMA` and clearing of gradients in one pass over memory.

    ``torch.optim.AdamW(fused=True)`` with its parameter groups, its state dict and its arithmetic;
    states of either load into the other. With :math:`g` the gradient, divided by a
    ``GradScaler``'s scale and clipped, :math:`t` the steps of the parameter::

        parameter  <- parameter - lr weight_decay parameter
        exp_avg    <- beta1 exp_avg + (1 - beta1) g
        exp_avg_sq <- beta2 exp_avg_sq + (1 - beta2) g^2
        parameter  <- parameter
                      - lr / (1 - beta1^t) exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
        average    <- decay average + (1 - decay) parameter

    On a GPU each element is read and written once, by a kernel for up to 320 parameters. Everything
    that a step counts is on the device: a step can be captured in a CUDA graph
    (:class:`GraphedStep`), averages included::

        ema = EMA(model)
        optimizer = AdamW(model.parameters(), lr=1e-4, max_norm=1.0, ema=ema)
        loss.backward()
        optimizer.step()  # clips, updates, averages

    ``grad`` keeps the values of the backward: neither scale nor clipping is written to it.
    Parameters are float64, float32, float16 or bfloat16, in any strides; gradients have the dtype
    of the parameter, or 16 bits beside float32. Parameters without a gradient stay; their averages
    move. DDP needs nothing special, and under FSDP2 each process updates its shards; the clipped
    norm is that of all of them.

    Args:
        params: parameters, named parameters or groups of them.
        lr: learning rate; a tensor on the device where a captured step is to follow a schedule.
        betas: of the moving averages of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: of the parameters, per step and learning rate.
        maximize: whether steps go up the gradient.
        max_norm: the largest 2-norm of all gradients together; larger ones are scaled, as
            ``torch.nn.utils.clip_grad_norm_`` does. ``grad_norm`` is the last step's, on the
            device, before the scaling. The norm is that of the parameters given: with PyTorch's
            ``ZeroRedundancyOptimizer`` of each process's own, so clip before the step there.
        ema: the averages that ``step`` moves, as its ``update`` would after the step. That is not
            called any more. Not with ``ZeroRedundancyOptimizer``, which sends the other processes'
            parameters later: there ``update`` follows its step.
        clear_grads: whether ``step`` leaves zeros in ``grad``, for loops that keep gradients'
            memory (``zero_grad(set_to_none=False)``).
        amsgrad, foreach, capturable, differentiable, fused: as for ``torch.optim.AdamW``, so that
            its calls serve. ``amsgrad`` and ``differentiable`` must be False; the others change
            nothing.

    Raises:
        ValueError: on an option that is out of range or not supported, and a parameter given twice.
        RuntimeError: from ``step``, on sparse gradients, and tensors that the op refuses:
            ``dpa::adamw_ema_`` names them.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019); the average's
    schedule is that of Chi et al., Diffusion Policy (2023).

    """

    _WEIGHT_DECAY = 1e-2


class Adam(_OneOp, torch.optim.Adam):
    """Adam as :class:`AdamW` has it: the weight decay is added to the gradient.

    ``torch.optim.Adam(fused=True)``, which LeRobot's Diffusion Policy trains with. Its weight decay
    is 0 unless it is given, and as AdamW's with ``decoupled_weight_decay=True``.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization (2015).
    """
