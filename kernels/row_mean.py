"""The mean of some rows of a 16-bit table, summed in fp32 in their order, in one pass.

out <- sum of the included rows / their number

Which rows these are is compiled into the kernel: a replica that is left out of a mean is rare.
"""

from collections.abc import Sequence

import torch

from hdet_scale.kernels.choice import on_kernels
from hdet_scale.kernels.launch import constant, device_block_size, jit, launch, tl, tl_dtype
from hdet_scale.kernels.rounding import nearest


@jit
def _mean_block(  # type: ignore[no-untyped-def]
    rows,
    factor,
    out,
    stride,
    start,
    numel,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    INCLUDED: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = None
    if not VECTOR:
        mask = i < numel - start
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for at in tl.static_range(ROWS):
        if (INCLUDED >> at) & 1 != 0:
            row = rows + tl.cast(at, tl.int64) * stride + start
            if VECTOR:
                row = tl.multiple_of(row, 16)
            x = tl.load(row + i, mask=mask).to(tl.float32)
            if INCLUDED & ((1 << at) - 1) == 0:
                total = x  # not added to zeros, which would turn -0 into 0
            else:
                total += x
    place = out + start
    if VECTOR:
        place = tl.multiple_of(place, 16)
    tl.store(place + i, nearest(total * factor, B), mask=mask)


@jit
def row_mean_kernel(  # type: ignore[no-untyped-def]
    rows,
    factor,
    out,
    stride,
    numel,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    INCLUDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    value = tl.load(factor)
    if ALIGNED and numel - start >= BLOCK:
        _mean_block(rows, value, out, stride, start, numel, B, ROWS, INCLUDED, BLOCK, True)
    else:
        _mean_block(rows, value, out, stride, start, numel, B, ROWS, INCLUDED, BLOCK, False)


def row_mean(rows: torch.Tensor, included: Sequence[bool], out: torch.Tensor) -> None:
    """out <- mean of the included rows.

    Args:
        rows: [replicas, n], 16 bits wide; a row is contiguous, and a stride of a multiple of eight
            elements makes the accesses 128 bits wide.
        included: A flag for each row; at least one is set.
        out: [n], contiguous, overwritten; it may be one of the rows.
    """
    if rows.dim() != 2 or rows.shape[1:] != out.shape or (out.numel() and rows.stride(1) != 1):
        raise ValueError(
            f"rows {tuple(rows.shape)} of strides {rows.stride()} and out {tuple(out.shape)}: they "
            "must be [replicas, n], each row contiguous, and [n]"
        )
    if len(included) != rows.shape[0] or not any(included):
        raise ValueError(
            f"included {list(included)} for {rows.shape[0]} rows: give a flag for each, and set at "
            "least one"
        )
    if not on_kernels(out):
        row_mean_reference(rows, included, out)
        return
    block = device_block_size(out.device)
    aligned = rows.stride(0) * rows.itemsize % 16 == 0 or rows.shape[0] == 1
    launch(
        row_mean_kernel,
        -(-out.numel() // block),
        out.device,
        rows,
        constant(1.0 / sum(included), out.device),
        out,
        rows.stride(0),
        out.numel(),
        B=tl_dtype(out.dtype),
        ROWS=rows.shape[0],
        INCLUDED=sum(1 << row for row, wanted in enumerate(included) if wanted),
        BLOCK=block,
        ALIGNED=aligned and all(t.data_ptr() % 16 == 0 for t in (rows, out)),
    )


def row_mean_reference(rows: torch.Tensor, included: Sequence[bool], out: torch.Tensor) -> None:
    """`row_mean` in torch."""
    first, *others = (row for row, wanted in zip(rows, included, strict=True) if wanted)
    total = first.float()
    for row in others:
        total = total + row
    out.copy_(total * (1.0 / sum(included)))
