"""The weighted sum of the replicas' int8 buckets, in one pass.

out <- sum over replicas of  weight * s * q,  and where it is asked for
out <- point + that sum,  and  point <- out
"""

import torch

from hdet_scale.kernels.choice import on_kernels
from hdet_scale.kernels.int8_format import QUANTUM, check_packed
from hdet_scale.kernels.launch import device_block_size, jit, launch, tl, tl_dtype
from hdet_scale.kernels.rounding import nearest

NO_POINT, FROM_POINT, MOVE_POINT = range(3)
"""The last point: there is none; the sum is added to it; it takes the result too."""
_NO_POINT = tl.constexpr(NO_POINT)
_MOVE_POINT = tl.constexpr(MOVE_POINT)


@jit
def _unpack_block(  # type: ignore[no-untyped-def]
    codes,
    scales,
    weights,
    point,
    out,
    replicas,
    code_stride,
    scale_stride,
    left,
    B: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    Q: tl.constexpr,
    VECTOR: tl.constexpr,
):
    r = tl.arange(0, ROWS)
    i = r[:, None] * Q + tl.arange(0, Q)[None, :]
    mask = None
    filled = None
    if VECTOR:
        point = tl.multiple_of(point, 16)
        out = tl.multiple_of(out, 16)
    else:
        mask = i < left
        filled = r * Q < left
    total = tl.zeros([ROWS, Q], dtype=tl.float32)
    for replica in range(replicas):
        codes_at = codes + tl.cast(replica, tl.int64) * code_stride
        scales_at = scales + tl.cast(replica, tl.int64) * scale_stride + r
        if VECTOR:
            codes_at = tl.multiple_of(codes_at, 16)
        q = tl.load(codes_at + i, mask=mask).to(tl.float32)
        s = tl.load(scales_at, mask=filled)
        total += q * (s * tl.load(weights + replica))[:, None]
    if MODE != _NO_POINT:
        total += tl.load(point + i, mask=mask)
    if MODE == _MOVE_POINT:
        tl.store(point + i, total, mask=mask)
    tl.store(out + i, nearest(total, B), mask=mask)


@jit
def unpack_kernel(  # type: ignore[no-untyped-def]
    codes,
    scales,
    weights,
    point,
    out,
    replicas,
    code_stride,
    scale_stride,
    numel,
    B: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    Q: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK // Q
    pid = tl.program_id(0).to(tl.int64)
    at = pid * BLOCK
    left = numel - at
    codes += at
    scales += pid * ROWS
    point += at
    out += at
    if ALIGNED and left >= BLOCK:
        _unpack_block(
            codes,
            scales,
            weights,
            point,
            out,
            replicas,
            code_stride,
            scale_stride,
            left,
            B,
            MODE,
            ROWS,
            Q,
            True,
        )
    else:
        _unpack_block(
            codes,
            scales,
            weights,
            point,
            out,
            replicas,
            code_stride,
            scale_stride,
            left,
            B,
            MODE,
            ROWS,
            Q,
            False,
        )


def unpack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    point: torch.Tensor | None = None,
    *,
    move: bool = False,
) -> None:
    """out <- point + sum_r weights[r] * scales[r] * codes[r]: the weighted sum of the buckets.

    Args:
        codes: int8 [replicas, n].
        scales: fp32 [replicas, packed_blocks(n)].
        weights: fp32 [replicas].
        out: The flat bucket [n], overwritten.
        point: fp32 [n], what the sum is added to (default: None, which is 0).
        move: Overwrite the point too, with the result in fp32 (default: False).
    """
    if codes.dim() != 2 or scales.dim() != 2 or weights.shape != codes.shape[:1]:
        raise ValueError(
            f"codes {tuple(codes.shape)}, scales {tuple(scales.shape)}, weights "
            f"{tuple(weights.shape)}: they must be [replicas, n], [replicas, blocks], [replicas]"
        )
    check_packed(out, codes[0], scales[0])
    if point is not None and (point.shape != out.shape or point.dtype != torch.float32):
        raise ValueError(
            f"point is {point.dtype} {tuple(point.shape)}: it must be float32 {tuple(out.shape)}"
        )
    if not on_kernels(out):
        unpack_reference(codes, scales, weights, out, point, move=move)
        return
    block = device_block_size(out.device)
    kept = out if point is None else point
    aligned = codes.stride(0) % 16 == 0 or codes.shape[0] == 1
    launch(
        unpack_kernel,
        -(-out.numel() // block),
        out.device,
        codes,
        scales,
        weights,
        kept,
        out,
        codes.shape[0],
        codes.stride(0),
        scales.stride(0),
        out.numel(),
        B=tl_dtype(out.dtype),
        MODE=NO_POINT if point is None else MOVE_POINT if move else FROM_POINT,
        BLOCK=block,
        Q=QUANTUM,
        ALIGNED=aligned and all(t.data_ptr() % 16 == 0 for t in (codes, kept, out)),
    )


def unpack_reference(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    point: torch.Tensor | None = None,
    *,
    move: bool = False,
) -> None:
    """`unpack` in torch, in the kernel's order of summation."""
    total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    for replica in range(codes.shape[0]):
        s = (scales[replica] * weights[replica]).repeat_interleave(QUANTUM)[: out.numel()]
        total += codes[replica].float() * s
    if point is not None:
        total += point
    if point is not None and move:
        point.copy_(total)
    out.copy_(total)
