"""The mean of chosen rows of a 16-bit table, summed in fp32 in their order, in one pass.

out <- (rows[chosen[0]] + rows[chosen[1]] + ...) / number of chosen rows
"""

import functools
from collections.abc import Sequence

import torch

from hdet_scale.kernels.choice import on_kernels
from hdet_scale.kernels.launch import constant, device_block_size, jit, launch, tl, tl_dtype
from hdet_scale.kernels.rounding import nearest


@jit
def _mean_block(  # type: ignore[no-untyped-def]
    rows,
    chosen,
    factor,
    out,
    stride,
    start,
    numel,
    B: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = None
    if not VECTOR:
        mask = i < numel - start
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for at in tl.static_range(COUNT):
        row = rows + tl.load(chosen + at).to(tl.int64) * stride + start
        if VECTOR:
            row = tl.multiple_of(row, 16)
        x = tl.load(row + i, mask=mask).to(tl.float32)
        if at == 0:
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
    chosen,
    factor,
    out,
    stride,
    numel,
    B: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    value = tl.load(factor)
    if ALIGNED and numel - start >= BLOCK:
        _mean_block(rows, chosen, value, out, stride, start, numel, B, COUNT, BLOCK, True)
    else:
        _mean_block(rows, chosen, value, out, stride, start, numel, B, COUNT, BLOCK, False)


def row_mean(rows: torch.Tensor, chosen: Sequence[int], out: torch.Tensor) -> None:
    """out <- mean of the chosen rows.

    Args:
        rows: [replicas, n], 16 bits wide; a row is contiguous, and a stride of a multiple of eight
            elements makes the accesses 128 bits wide.
        chosen: Which rows, in the order of the sum; at least one.
        out: [n], contiguous, overwritten; it may be one of the rows.
    """
    if rows.dim() != 2 or rows.shape[1:] != out.shape or (out.numel() and rows.stride(1) != 1):
        raise ValueError(
            f"rows {tuple(rows.shape)} of strides {rows.stride()} and out {tuple(out.shape)}: they "
            "must be [replicas, n], each row contiguous, and [n]"
        )
    if not chosen or not all(0 <= row < rows.shape[0] for row in chosen):
        raise ValueError(f"rows {list(chosen)} of {rows.shape[0]}: choose at least one of them")
    if not on_kernels(out):
        row_mean_reference(rows, chosen, out)
        return
    block = device_block_size(out.device)
    aligned = rows.stride(0) * rows.itemsize % 16 == 0 or len(chosen) == rows.shape[0] == 1
    launch(
        row_mean_kernel,
        -(-out.numel() // block),
        out.device,
        rows,
        _indices(tuple(chosen), out.device),
        constant(1.0 / len(chosen), out.device),
        out,
        rows.stride(0),
        out.numel(),
        B=tl_dtype(out.dtype),
        COUNT=len(chosen),
        BLOCK=block,
        ALIGNED=aligned and all(t.data_ptr() % 16 == 0 for t in (rows, out)),
    )


def row_mean_reference(rows: torch.Tensor, chosen: Sequence[int], out: torch.Tensor) -> None:
    """`row_mean` in torch."""
    total = rows[chosen[0]].float()
    for row in chosen[1:]:
        total += rows[row]
    out.copy_(total * (1.0 / len(chosen)))


@functools.lru_cache(maxsize=64)
def _indices(chosen: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(chosen, dtype=torch.int32, device=device)
