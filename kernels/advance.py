"""What the kernels of an optimizer share: where a program works, and the count of steps.

`advance` goes through the table once before the update: for each tensor

    t <- t + 1 (unless found_inf),   c1 = 1 - beta1^t,   c2 = sqrt(1 - beta2^t)

and writes (t, c1, c2) where the update kernel reads it: in double precision, once a tensor, and
not once a program of the update.
"""

import torch

from hdet_scale.kernels import scalars, table
from hdet_scale.kernels.launch import jit, launch, tl

CORRECTIONS = 4
_BLOCK = 128

_COLUMNS = tl.constexpr(table.COLUMNS)
_GROUP = tl.constexpr(table.GROUP)
_STEP = tl.constexpr(table.STEP)
_PARAM = tl.constexpr(table.PARAM)
_GRAD = tl.constexpr(table.GRAD)
_FIRST = tl.constexpr(table.FIRST)
_SECOND = tl.constexpr(table.SECOND)
_MASTER = tl.constexpr(table.MASTER)
_SIGN = tl.constexpr(scalars.SIGN)
_WIDTH = tl.constexpr(scalars.WIDTH + 2)
_LOG1 = tl.constexpr(scalars.WIDTH)
_LOG2 = tl.constexpr(scalars.WIDTH + 1)
_CORRECTIONS = tl.constexpr(CORRECTIONS)


@jit
def advance_kernel(  # type: ignore[no-untyped-def]
    tensors, groups, corrections, found_inf, count, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tensors + at * _COLUMNS
    step_at = tl.load(row + _STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    group = groups + tl.load(row + _GROUP, mask=inside, other=0) * _WIDTH
    taken = tl.where(tl.load(found_inf) == 0.0, 1.0, 0.0)
    step = tl.load(step_at, mask=inside, other=0.0) + taken
    log1 = tl.load(group + _LOG1, mask=inside, other=0.0).to(tl.float64)
    log2 = tl.load(group + _LOG2, mask=inside, other=0.0).to(tl.float64)
    times = tl.maximum(step, 1.0).to(tl.float64)
    out = corrections + at * _CORRECTIONS
    tl.store(step_at, step, mask=inside)
    tl.store(out, step, mask=inside)
    tl.store(out + 1, (1.0 - tl.exp(times * log1)).to(tl.float32), mask=inside)
    tl.store(out + 2, tl.sqrt((1.0 - tl.exp(times * log2)).to(tl.float32)), mask=inside)


def advance(
    tensors: torch.Tensor,
    groups: torch.Tensor,
    corrections: torch.Tensor,
    found_inf: torch.Tensor,
) -> None:
    """Count the step of every tensor of the table and write its bias corrections."""
    count = tensors.shape[0]
    args = (tensors, groups, corrections, found_inf, count)
    launch(advance_kernel, -(-count // _BLOCK), tensors.device, *args, BLOCK=_BLOCK)


@jit
def locate(tensors, chunks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's row index, first element (int64), and whether to use 128-bit accesses."""
    chunk = chunks + tl.program_id(0) * 2
    index = tl.load(chunk)
    packed = tl.load(chunk + 1)
    start = (packed // 2).to(tl.int64) * BLOCK
    return index, start, packed % 2 != 0


@jit
def arrays(row, start, P: tl.constexpr, M: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The addresses of element `start` of a tensor's arrays: parameter, gradient, first and second
    moment, master. A kernel that leaves one unused pays nothing: the compiler drops its load.

    The addresses come from memory, where the compiler cannot see their alignment: the hint is what
    makes the accesses 128 bits wide.
    """
    p = tl.load(row + _PARAM).to(tl.pointer_type(P))
    g = tl.load(row + _GRAD).to(tl.pointer_type(P))
    m = tl.load(row + _FIRST).to(tl.pointer_type(M))
    v = tl.load(row + _SECOND).to(tl.pointer_type(M))
    w = tl.load(row + _MASTER).to(tl.pointer_type(tl.float32))
    if VECTOR:
        p = tl.multiple_of(p, 16)
        g = tl.multiple_of(g, 16)
        m = tl.multiple_of(m, 16)
        v = tl.multiple_of(v, 16)
        w = tl.multiple_of(w, 16)
    return p + start, g + start, m + start, v + start, w + start


@jit
def grad_factor(group, grad_scale, clip):  # type: ignore[no-untyped-def]
    """sign * clip / scale: ascent or descent, clipping, and the inverse of the loss scale."""
    return tl.load(group + _SIGN) * tl.load(clip) / tl.load(grad_scale)
