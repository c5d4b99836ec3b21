"""The weighted sum of the replicas' int8 buckets, in one pass.

out <- sum over replicas of  weight * s * q
"""

import torch

from hdet_scale.kernels.choice import on_kernels
from hdet_scale.kernels.int8_format import QUANTUM, check_packed
from hdet_scale.kernels.launch import device_block_size, jit, launch, tl, tl_dtype
from hdet_scale.kernels.rounding import nearest


@jit
def _unpack_block(  # type: ignore[no-untyped-def]
    codes,
    scales,
    weights,
    out,
    replicas,
    code_stride,
    scale_stride,
    left,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    Q: tl.constexpr,
    VECTOR: tl.constexpr,
):
    r = tl.arange(0, ROWS)
    i = r[:, None] * Q + tl.arange(0, Q)[None, :]
    total = tl.zeros([ROWS, Q], dtype=tl.float32)
    for replica in range(replicas):
        codes_at = codes + tl.cast(replica, tl.int64) * code_stride
        scales_at = scales + tl.cast(replica, tl.int64) * scale_stride + r
        if VECTOR:
            q = tl.load(tl.multiple_of(codes_at, 16) + i).to(tl.float32)
            s = tl.load(scales_at)
        else:
            q = tl.load(codes_at + i, mask=i < left, other=0).to(tl.float32)
            s = tl.load(scales_at, mask=r * Q < left, other=0.0)
        total += q * (s * tl.load(weights + replica))[:, None]
    if VECTOR:
        tl.store(tl.multiple_of(out, 16) + i, nearest(total, B))
    else:
        tl.store(out + i, nearest(total, B), mask=i < left)


@jit
def unpack_kernel(  # type: ignore[no-untyped-def]
    codes,
    scales,
    weights,
    out,
    replicas,
    code_stride,
    scale_stride,
    numel,
    B: tl.constexpr,
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
    out += at
    if ALIGNED and left >= BLOCK:
        _unpack_block(
            codes, scales, weights, out, replicas, code_stride, scale_stride, left, B, ROWS, Q, True
        )
    else:
        _unpack_block(
            codes,
            scales,
            weights,
            out,
            replicas,
            code_stride,
            scale_stride,
            left,
            B,
            ROWS,
            Q,
            False,
        )


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """out <- sum_r weights[r] * scales[r] * codes[r]: the weighted sum of the replicas' buckets.

    Args:
        codes: int8 [replicas, n].
        scales: fp32 [replicas, packed_blocks(n)].
        weights: fp32 [replicas].
        out: The flat bucket [n], overwritten.
    """
    if codes.dim() != 2 or scales.dim() != 2 or weights.shape != codes.shape[:1]:
        raise ValueError(
            f"codes {tuple(codes.shape)}, scales {tuple(scales.shape)}, weights "
            f"{tuple(weights.shape)}: they must be [replicas, n], [replicas, blocks], [replicas]"
        )
    check_packed(out, codes[0], scales[0])
    if not on_kernels(out):
        unpack_reference(codes, scales, weights, out)
        return
    block = device_block_size(out.device)
    aligned = codes.stride(0) % 16 == 0 or codes.shape[0] == 1
    launch(
        unpack_kernel,
        -(-out.numel() // block),
        out.device,
        codes,
        scales,
        weights,
        out,
        codes.shape[0],
        codes.stride(0),
        scales.stride(0),
        out.numel(),
        B=tl_dtype(out.dtype),
        BLOCK=block,
        Q=QUANTUM,
        ALIGNED=aligned and all(t.data_ptr() % 16 == 0 for t in (codes, out)),
    )


def unpack_reference(
    codes: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """`unpack` in torch, in the kernel's order of summation."""
    total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    for replica in range(codes.shape[0]):
        s = (scales[replica] * weights[replica]).repeat_interleave(QUANTUM)[: out.numel()]
        total += codes[replica].float() * s
    out.copy_(total)
