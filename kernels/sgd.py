"""SGD with momentum, dampening and Nesterov, the replica's learning rate inside: one launch.

With base LR eta and the replica's multiplier rho, in fp32 whatever the storage:

    g <- sign * g * clip / scale + lambda p      (weight decay is torch's: part of the gradient)
    b <- mu b + (1 - damping) g                  (b <- g at a tensor's first step, as torch does)
    p <- p - eta rho (g + mu b)   with Nesterov, else   p - eta rho b

Without momentum there is no b. Each array is read once and written once: 20 bytes a parameter for
fp32 with momentum, 12 without. Nothing is written when found_inf is set.
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
_MOMENTUM = tl.constexpr(scalars.MOMENTUM)
_DAMPENING = tl.constexpr(scalars.DAMPENING)
_NESTEROV = tl.constexpr(scalars.NESTEROV)
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
    BUFFER: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = None
    if not VECTOR:
        mask = i < tl.load(row + _NUMEL) - start
    p_at, g_at, b_at, _, w_at = arrays(row, start, P, M, VECTOR)
    if MASTER:
        p = tl.load(w_at + i, mask=mask)
    else:
        p = tl.load(p_at + i, mask=mask).to(tl.float32)
    g = tl.load(g_at + i, mask=mask).to(tl.float32) * factor + tl.load(group + _DECAY) * p
    step = tl.load(correction)
    words = 0
    if STOCHASTIC:
        first = tl.load(row + _OFFSET) + start
        words = words_at(tl.load(row + _KEY), step.to(tl.int32), first, i)
    if BUFFER:
        momentum = tl.load(group + _MOMENTUM)
        b = tl.load(b_at + i, mask=mask).to(tl.float32)
        b = tl.where(step == 1.0, g, momentum * b + (1.0 - tl.load(group + _DAMPENING)) * g)
        g = tl.where(tl.load(group + _NESTEROV) != 0.0, g + momentum * b, b)
        store_rounded(b_at + i, b, mask, words, M, 1, STOCHASTIC)
    p = p - tl.load(group + _LR) * tl.load(group + _MULTIPLIER) * g
    store_rounded(p_at + i, p, mask, words, P, 0, STOCHASTIC)
    if MASTER:
        tl.store(w_at + i, p, mask=mask)


@jit
def sgd_kernel(  # type: ignore[no-untyped-def]
    tensors,
    chunks,
    groups,
    corrections,
    found_inf,
    grad_scale,
    clip,
    P: tl.constexpr,
    M: tl.constexpr,
    BUFFER: tl.constexpr,
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
            _update(row, group, at, factor, start, P, M, BUFFER, MASTER, STOCHASTIC, BLOCK, True)
        else:
            _update(row, group, at, factor, start, P, M, BUFFER, MASTER, STOCHASTIC, BLOCK, False)


def sgd(
    tensors: table.TensorTable,
    combination: table.Combination,
    groups: torch.Tensor,
    corrections: torch.Tensor,
    found_inf: torch.Tensor,
    grad_scale: torch.Tensor,
    clip: torch.Tensor,
) -> None:
    """Update every tensor of one dtype combination in one launch."""
    chunks = tensors.chunks[combination]
    launch(
        sgd_kernel,
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
        M=tl_dtype(combination.moment or combination.param),
        BUFFER=combination.moment is not None,
        MASTER=combination.master,
        STOCHASTIC=combination.stochastic,
        BLOCK=tensors.block,
    )


def sgd_reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
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

    def put(target: torch.Tensor, value: torch.Tensor, slot: int) -> None:
        if key is not None:
            value = stochastic_round(
                value, target.dtype, key=key, step=step, offset=offset, slot=slot
            )
        target.copy_(value)

    p = param.float() if master is None else master
    g = grad.float() * (-factor if maximize else factor) + weight_decay * p
    if momentum_buffer is not None:
        b = g if step == 1 else momentum * momentum_buffer.float() + (1 - dampening) * g
        g = g + momentum * b if nesterov else b
        put(momentum_buffer, b, 1)
    p = p - lr * lr_multiplier * g
    put(param, p, 0)
    if master is not None:
        master.copy_(p)
