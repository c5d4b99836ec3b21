"""A flat bucket multiplied in place: bucket <- factor * bucket, in one pass."""

import torch

from hdet_scale.kernels.choice import on_kernels
from hdet_scale.kernels.launch import device_block_size, jit, launch, tl, tl_dtype
from hdet_scale.kernels.pieces import flat_view
from hdet_scale.kernels.rounding import nearest


@jit
def _scale_block(at, factor, left, B: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    mask = None
    if VECTOR:
        at = tl.multiple_of(at, 16)
    else:
        mask = i < left
    x = tl.load(at + i, mask=mask).to(tl.float32) * factor
    tl.store(at + i, nearest(x, B), mask=mask)


@jit
def scale_kernel(  # type: ignore[no-untyped-def]
    bucket, factor, numel, B: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    value = tl.load(factor)
    if ALIGNED and numel - start >= BLOCK:
        _scale_block(bucket + start, value, numel - start, B, BLOCK, True)
    else:
        _scale_block(bucket + start, value, numel - start, B, BLOCK, False)


def scale(bucket: torch.Tensor, factor: torch.Tensor) -> None:
    """bucket <- factor * bucket, computed in fp32 whatever the storage.

    Args:
        bucket: A contiguous tensor, changed in place.
        factor: A device scalar.
    """
    if not on_kernels(bucket):
        scale_reference(bucket, factor)
        return
    flat = flat_view(bucket, 0)
    block = device_block_size(bucket.device)
    launch(
        scale_kernel,
        -(-flat.numel() // block),
        flat.device,
        flat,
        factor,
        flat.numel(),
        B=tl_dtype(flat.dtype),
        BLOCK=block,
        ALIGNED=flat.data_ptr() % 16 == 0,
    )


def scale_reference(bucket: torch.Tensor, factor: torch.Tensor) -> None:
    """`scale` in torch; a 16-bit bucket is multiplied in fp32 and rounded once."""
    if bucket.dtype == torch.float32:
        bucket.mul_(factor)
    else:
        bucket.copy_(bucket.float() * factor)
