"""AdamW with the replica's learning rate inside.

With base LR eta and the replica's multiplier rho, in fp32 whatever the storage:

    g <- sign * g * clip / scale                 (maximize, gradient clipping, loss scaling)
    p <- p (1 - eta rho lambda)                  (decoupled weight decay)
    m <- m + (1 - beta1) (g - m)
    v <- beta2 v + (1 - beta2) g^2
    p <- p - (eta rho / c1) m / (sqrt(v) / c2 + eps)

c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t) come from `advance`. 28 bytes a parameter for fp32, and
28 for 16-bit p and g with an fp32 master and fp32 moments (p is then written and not read); 16.25
for fp32 with moments as 8-bit codes.
"""

import torch

from hdet_scale.kernels import scalars
from hdet_scale.kernels.launch import jit, tl
from hdet_scale.kernels.rounding import write_reference
from hdet_scale.kernels.update import Update

_DECAY = tl.constexpr(scalars.DECAY)
_FIRST_RATE = tl.constexpr(scalars.OWN)
_SECOND_BETA = tl.constexpr(scalars.OWN + 1)
_SECOND_RATE = tl.constexpr(scalars.OWN + 2)
_EPS = tl.constexpr(scalars.OWN + 3)


def adamw_scalars(betas: tuple[float, float], eps: float) -> list[float]:
    """What the rule reads of a group beside LR and weight decay, in the order of the columns."""
    first, second = betas
    return [1 - first, second, 1 - second, eps]


@jit
def adamw_rule(p, g, m, v, lr, group, correction, MOMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    p = p - lr * tl.load(group + _DECAY) * p
    m = m + tl.load(group + _FIRST_RATE) * (g - m)
    v = tl.load(group + _SECOND_BETA) * v + tl.load(group + _SECOND_RATE) * g * g
    denominator = tl.sqrt(v) / tl.load(correction + 2) + tl.load(group + _EPS)
    p = p - lr / tl.load(correction + 1) * (m / denominator)
    return p, m, v


def adamw_reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    master: torch.Tensor | None = None,
    step: int,
    lr: float,
    lr_multiplier: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    factor: float = 1.0,
    key: int | None = None,
    offset: int = 0,
) -> None:
    """The same equations in torch, one tensor, in place. `step` counts from 1; `key` (None: to
    nearest) seeds the stochastic rounding of the arrays that are 16 bits wide."""
    rate = lr * lr_multiplier
    g = grad.float() * (-factor if maximize else factor)
    p = param.float() if master is None else master
    # Not p (1 - rate decay): that factor, rounded to fp32, errs in the same direction each step.
    p = p - rate * weight_decay * p
    m = torch.lerp(exp_avg.float(), g, 1 - betas[0])
    v = exp_avg_sq.float() * betas[1] + g * g * (1 - betas[1])
    c1 = 1 - betas[0] ** step
    c2 = (1 - betas[1] ** step) ** 0.5
    p = p - rate / c1 * (m / (v.sqrt() / c2 + eps))
    arrays = [(param, p), (exp_avg, m), (exp_avg_sq, v)]
    write_reference(arrays, key=key, step=step, offset=offset)
    if master is not None:
        master.copy_(p)


ADAMW = Update(
    name="adamw",
    rule=adamw_rule,
    reference=adamw_reference,
    options=("betas", "eps", "weight_decay", "maximize"),
    moments=("exp_avg", "exp_avg_sq"),
    coded=True,
)
