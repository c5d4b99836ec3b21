"""SGD with momentum, dampening and Nesterov, the replica's learning rate inside.

With base LR eta and the replica's multiplier rho, in fp32 whatever the storage:

    g <- sign * g * clip / scale + lambda p      (weight decay is torch's: part of the gradient)
    b <- mu b + (1 - damping) g                  (b <- g at a tensor's first step, as torch does)
    p <- p - eta rho (g + mu b)   with Nesterov, else   p - eta rho b

Without momentum there is no b. 20 bytes a parameter for fp32 with momentum, 12 without.
"""

import torch

from hdet_scale.kernels import scalars
from hdet_scale.kernels.launch import jit, tl
from hdet_scale.kernels.rounding import write_reference
from hdet_scale.kernels.update import Update

_DECAY = tl.constexpr(scalars.DECAY)
_MOMENTUM = tl.constexpr(scalars.OWN)
_DAMPENING = tl.constexpr(scalars.OWN + 1)
_NESTEROV = tl.constexpr(scalars.OWN + 2)


def sgd_scalars(momentum: float, dampening: float, nesterov: bool) -> list[float]:
    """What the rule reads of a group beside LR and weight decay, in the order of the columns."""
    return [momentum, dampening, float(nesterov)]


@jit
def sgd_rule(p, g, b, v, lr, group, correction, MOMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    g = g + tl.load(group + _DECAY) * p
    if MOMENTS > 0:
        momentum = tl.load(group + _MOMENTUM)
        damped = momentum * b + (1.0 - tl.load(group + _DAMPENING)) * g
        b = tl.where(tl.load(correction) == 1.0, g, damped)
        g = tl.where(tl.load(group + _NESTEROV) != 0.0, g + momentum * b, b)
    p = p - lr * g
    return p, b, v


def sgd_reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None = None,
    *,
    master: torch.Tensor | None = None,
    step: int,
    lr: float,
    lr_multiplier: float = 1.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    factor: float = 1.0,
    key: int | None = None,
    offset: int = 0,
) -> None:
    """The same equations in torch, one tensor, in place. `step` counts from 1; `key` (None: to
    nearest) seeds the stochastic rounding of the arrays that are 16 bits wide."""
    p = param.float() if master is None else master
    g = grad.float() * (-factor if maximize else factor) + weight_decay * p
    buffers = []
    if momentum_buffer is not None:
        b = g if step == 1 else momentum * momentum_buffer.float() + (1 - dampening) * g
        g = g + momentum * b if nesterov else b
        buffers = [(momentum_buffer, b)]
    p = p - lr * lr_multiplier * g
    write_reference([(param, p), *buffers], key=key, step=step, offset=offset)
    if master is not None:
        master.copy_(p)


SGD = Update(
    name="sgd",
    rule=sgd_rule,
    reference=sgd_reference,
    options=("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    moments=("momentum_buffer",),
    momentless=True,
)
