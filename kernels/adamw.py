"""AdamW with the replica's learning rate inside: one launch for all tensors of a dtype combination.

With base LR eta and the replica's multiplier rho, in fp32 whatever the storage:

    g <- sign * g * clip / scale                 (maximize, gradient clipping, loss scaling)
    p <- p (1 - eta rho lambda)                  (decoupled weight decay)
    m <- m + (1 - beta1) (g - m)
    v <- beta2 v + (1 - beta2) g^2
    p <- p - (eta rho / c1) m / (sqrt(v) / c2 + eps)

c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t) come from `advance`. Each array is read once and
written once: 28 bytes a parameter for fp32, and 28 for 16-bit p and g with an fp32 master and
fp32 moments (p is then written and not read). Nothing is written when found_inf is set.
"""

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
_SECOND_BETA = tl.constexpr(scalars.SECOND_BETA)
_SECOND_RATE = tl.constexpr(scalars.SECOND_RATE)
_EPS = tl.constexpr(scalars.EPS)
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
    p_at, g_at, m_at, v_at, w_at = arrays(row, start, P, M, VECTOR)
    if MASTER:
        p = tl.load(w_at + i, mask=mask)
    else:
        p = tl.load(p_at + i, mask=mask).to(tl.float32)
    g = tl.load(g_at + i, mask=mask).to(tl.float32) * factor
    m = tl.load(m_at + i, mask=mask).to(tl.float32)
    v = tl.load(v_at + i, mask=mask).to(tl.float32)

    lr = tl.load(group + _LR) * tl.load(group + _MULTIPLIER)
    p = p - lr * tl.load(group + _DECAY) * p
    m = m + tl.load(group + _FIRST_RATE) * (g - m)
    v = tl.load(group + _SECOND_BETA) * v + tl.load(group + _SECOND_RATE) * g * g
    denominator = tl.sqrt(v) / tl.load(correction + 2) + tl.load(group + _EPS)
    p = p - lr / tl.load(correction + 1) * (m / denominator)

    words = 0
    if STOCHASTIC:
        step = tl.load(correction).to(tl.int32)
        words = words_at(tl.load(row + _KEY), step, tl.load(row + _OFFSET) + start, i)
    store_rounded(m_at + i, m, mask, words, M, 1, STOCHASTIC)
    store_rounded(v_at + i, v, mask, words, M, 2, STOCHASTIC)
    store_rounded(p_at + i, p, mask, words, P, 0, STOCHASTIC)
    if MASTER:
        tl.store(w_at + i, p, mask=mask)


@jit
def adamw_kernel(  # type: ignore[no-untyped-def]
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
        correction = corrections + index * _CORRECTIONS
        factor = grad_factor(group, grad_scale, clip)
        if vector:
            _update(
                row, group, correction, factor, start, P, M, MASTER, STOCHASTIC, BLOCK, VECTOR=True
            )
        else:
            _update(
                row, group, correction, factor, start, P, M, MASTER, STOCHASTIC, BLOCK, VECTOR=False
            )


def adamw(
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
        raise ValueError("AdamW has moments: moment=None is valid for SGD alone")
    chunks = tensors.chunks[combination]
    launch(
        adamw_kernel,
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
    for slot, (target, value) in enumerate([(param, p), (exp_avg, m), (exp_avg_sq, v)]):
        if key is not None and target.dtype != torch.float32:
            value = stochastic_round(
                value, target.dtype, key=key, step=step, offset=offset, slot=slot
            )
        target.copy_(value)
    if master is not None:
        master.copy_(p)
