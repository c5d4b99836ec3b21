"""Lion (evolved sign momentum) with the replica's learning rate inside.

With base LR eta and the replica's multiplier rho, in fp32 whatever the storage:

    g <- sign * g * clip / scale
    p <- p (1 - eta rho lambda)                              (decoupled weight decay)
    p <- p - eta rho sgn(beta1 m + (1 - beta1) g)
    m <- beta2 m + (1 - beta2) g

20 bytes a parameter for fp32.
"""

from typing import Any

import torch

from hdet_scale.kernels import scalars
from hdet_scale.kernels.launch import jit, tl
from hdet_scale.kernels.rounding import write_reference
from hdet_scale.kernels.update import Update

_DECAY = tl.constexpr(scalars.DECAY)
_FIRST_RATE = tl.constexpr(scalars.OWN)
_SECOND_RATE = tl.constexpr(scalars.OWN + 1)


def lion_scalars(betas: tuple[float, float]) -> list[float]:
    """What the rule reads of a group beside LR and weight decay, in the order of the columns."""
    return [1 - betas[0], 1 - betas[1]]


@jit
def lion_rule(p, g, m, v, lr, group, correction, MOMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    p = p - lr * tl.load(group + _DECAY) * p
    direction = m + tl.load(group + _FIRST_RATE) * (g - m)
    # A direction that is not a number must reach p, as it does through torch.sign.
    sign = tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, direction))
    p = p - lr * sign
    m = m + tl.load(group + _SECOND_RATE) * (g - m)
    return p, m, v


def lion_reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    *,
    master: torch.Tensor | None = None,
    step: int,
    lr: float,
    lr_multiplier: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
    factor: float = 1.0,
    key: int | None = None,
    offset: int = 0,
) -> None:
    """The same equations in torch, one tensor, in place. `step` counts from 1; `key` (None: to
    nearest) seeds the stochastic rounding of the arrays that are 16 bits wide."""
    rate = lr * lr_multiplier
    g = grad.float() * (-factor if maximize else factor)
    m = exp_avg.float()
    p = param.float() if master is None else master
    p = p - rate * weight_decay * p
    p = p - rate * torch.sign(torch.lerp(m, g, 1 - betas[0]))
    m = torch.lerp(m, g, 1 - betas[1])
    write_reference([(param, p), (exp_avg, m)], key=key, step=step, offset=offset)
    if master is not None:
        master.copy_(p)


def lion_foreach(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    *,
    lr: Any,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """A list of tensors whose arrays share a dtype, in few passes: torch has no fused Lion, and
    this is what a CPU runs. The arithmetic is in that dtype, as in torch's own foreach steps."""
    directions = list(torch._foreach_lerp(exp_avgs, grads, 1 - betas[0]))
    torch._foreach_sign_(directions)
    torch._foreach_mul_(directions, lr)
    if weight_decay:
        # Not p (1 - lr decay): that factor, rounded to fp32, errs in the same direction each step.
        torch._foreach_add_(directions, torch._foreach_mul(params, lr * weight_decay))
    torch._foreach_sub_(params, directions)
    torch._foreach_lerp_(exp_avgs, grads, 1 - betas[1])


LION = Update(
    name="lion",
    rule=lion_rule,
    reference=lion_reference,
    options=("betas", "weight_decay", "maximize"),
    moments=("exp_avg",),
)
