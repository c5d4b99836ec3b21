"""The count of steps, once a tensor before the update. For each tensor of the table

    t <- t + 1 (unless found_inf),   c1 = 1 - beta1^t,   c2 = sqrt(1 - beta2^t)

and (t, c1, c2) is written where the update kernel reads it: computed in double precision, once a
tensor, and not once a program of the update.
"""

import torch

from hdet_scale.kernels import scalars, table
from hdet_scale.kernels.launch import jit, launch, tl

CORRECTIONS = 4
"""Floats that are kept of a tensor: t, c1, c2 and one unused, so that a row is 16 bytes."""

_BLOCK = 128

_COLUMNS = tl.constexpr(table.COLUMNS)
_GROUP = tl.constexpr(table.GROUP)
_STEP = tl.constexpr(table.STEP)
_WIDTH = tl.constexpr(scalars.ROW_WIDTH)
_LOG_BETA1 = tl.constexpr(scalars.LOG_BETA1)
_LOG_BETA2 = tl.constexpr(scalars.LOG_BETA2)
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
    log1 = tl.load(group + _LOG_BETA1, mask=inside, other=0.0).to(tl.float64)
    log2 = tl.load(group + _LOG_BETA2, mask=inside, other=0.0).to(tl.float64)
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
    """Count the step of every tensor of the table and write its bias corrections.

    Args:
        tensors: `TensorTable.tensors`.
        groups: `ScalarTable.values`.
        corrections: fp32 [rows, CORRECTIONS], overwritten with (t, c1, c2) of each tensor.
        found_inf: one fp32 element; other than 0, no step is counted.
    """
    count = tensors.shape[0]
    args = (tensors, groups, corrections, found_inf, count)
    launch(advance_kernel, -(-count // _BLOCK), tensors.device, *args, BLOCK=_BLOCK)
