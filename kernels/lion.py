"""Lion (evolved sign momentum) with the replica's learning rate inside: one launch.

With base LR eta and the replica's multiplier rho, in fp32 whatever the storage:

    g <- sign * g * clip / scale
    p <- p (1 - eta rho lambda)                              (decoupled weight decay)
    p <- p - eta rho sgn(beta1 m + (1 - beta1) g)
    m <- beta2 m + (1 - beta2) g

Each array is read once and written once: 20 bytes a parameter for fp32. Nothing is written when
found_inf is set.
"""

from typing import Any

import torch

from hdet_scale.kernels import scalars, table
from hdet_scale.kernels.advance import CORRECTIONS, arrays, grad_factor, locate
from hdet_scale.kernels.launch import jit, launch, tl, tl_dtype
from hdet_scale.kernels.rounding import stochastic_round, store_rounded, words_at

_COLUMNS = tl.constexpr(table.COLUMNS)
_NUMEL = tl.constexpr(table.NUMEL)
_GROUP = tl.constexpr(table.GROUP)
_KEY = tl.constexpr(table.KEY)
_OFFSET = tl.constexpr(table.OFFSET)
_WIDTH = tl.constexpr(scalars.WIDTH + 2)
_LR = tl.constexpr(scalars.LR)
_MULTIPLIER = tl.constexpr(scalars.MULTIPLIER)
_DECAY = tl.constexpr(scalars.DECAY)
_FIRST_RATE = tl.constexpr(scalars.FIRST_RATE)
_SECOND_RATE = tl.constexpr(scalars.SECOND_RATE)
_CORRECTIONS = tl.constexpr(CORRECTIONS)


@jit
def _update(  # type: ignore[no-untyped-def]
    row,
    group,
    correction,
    factor,
    start,
    P: tl.constexpr,
    M: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = None
    if not VECTOR:
        mask = i < tl.load(row + _NUMEL) - start
    p_at, g_at, m_at, _, w_at = arrays(row, start, P, M, VECTOR)
    if MASTER:
        p = tl.load(w_at + i, mask=mask)
    else:
        p = tl.load(p_at + i, mask=mask).to(tl.float32)
    g = tl.load(g_at + i, mask=mask).to(tl.float32) * factor
    m = tl.load(m_at + i, mask=mask).to(tl.float32)

    lr = tl.load(group + _LR) * tl.load(group + _MULTIPLIER)
    p = p - lr * tl.load(group + _DECAY) * p
    direction = m + tl.load(group + _FIRST_RATE) * (g - m)
    # A direction that is not a number must reach p, as it does through torch.sign.
    sign = tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, direction))
    p = p - lr * sign
    m = m + tl.load(group + _SECOND_RATE) * (g - m)

    words = 0
    if STOCHASTIC:
        step = tl.load(correction).to(tl.int32)
        words = words_at(tl.load(row + _KEY), step, tl.load(row + _OFFSET) + start, i)
    store_rounded(m_at + i, m, mask, words, M, 1, STOCHASTIC)
    store_rounded(p_at + i, p, mask, words, P, 0, STOCHASTIC)
    if MASTER:
        tl.store(w_at + i, p, mask=mask)


@jit
def lion_kernel(  # type: ignore[no-untyped-def]
    tensors,
    chunks,
    groups,
    corrections,
    found_inf,
    grad_scale,
    clip,
    P: tl.constexpr,
    M: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(found_inf) == 0.0:
        index, start, vector = locate(tensors, chunks, BLOCK)
        row = tensors + index * _COLUMNS
        group = groups + tl.load(row + _GROUP) * _WIDTH
        at = corrections + index * _CORRECTIONS
        factor = grad_factor(group, grad_scale, clip)
        if vector:
            _update(row, group, at, factor, start, P, M, MASTER, STOCHASTIC, BLOCK, True)
        else:
            _update(row, group, at, factor, start, P, M, MASTER, STOCHASTIC, BLOCK, False)


def lion(
    tensors: table.TensorTable,
    combination: table.Combination,
    groups: torch.Tensor,
    corrections: torch.Tensor,
    found_inf: torch.Tensor,
    grad_scale: torch.Tensor,
    clip: torch.Tensor,
) -> None:
    """Update every tensor of one dtype combination in one launch."""
    if combination.moment is None:
        raise ValueError("Lion has a moment: moment=None is valid for SGD alone")
    chunks = tensors.chunks[combination]
    launch(
        lion_kernel,
        chunks.shape[0],
        tensors.device,
        tensors.tensors,
        chunks,
        groups,
        corrections,
        found_inf,
        grad_scale,
        clip,
        P=tl_dtype(combination.param),
        M=tl_dtype(combination.moment),
        MASTER=combination.master,
        STOCHASTIC=combination.stochastic,
        BLOCK=tensors.block,
    )


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
    for slot, (target, value) in enumerate([(param, p), (exp_avg, m)]):
        if key is not None:
            value = stochastic_round(
                value, target.dtype, key=key, step=step, offset=offset, slot=slot
            )
        target.copy_(value)
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
