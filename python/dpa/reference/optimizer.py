"""The formulas of an optimizer's step and of the average of its weights."""

from __future__ import annotations

from torch import Tensor


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled_weight_decay: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one parameter's step of AdamW, or Adam: its new value and moments.

    ``step`` counts this one. With decoupled weight decay the parameter shrinks by
    ``lr * weight_decay``, without it ``weight_decay * param`` is added to the gradient.
    """
    if decoupled_weight_decay:
        param = param * (1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
    first, second = exp_avg / (1 - beta1**step), exp_avg_sq / (1 - beta2**step)
    return param - lr * first / (second.sqrt() + eps), exp_avg, exp_avg_sq


def ema_decay(
    updates: int, power: float, inv_gamma: float, min_decay: float, max_decay: float
) -> float:
    """Return the decay of the update that follows ``updates`` others: 0 for the first two."""
    if updates < 2:
        return 0.0
    grown = 1.0 - (1.0 + (updates - 1) / inv_gamma) ** -power
    return min(max(grown, min_decay), max_decay)
