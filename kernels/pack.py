"""What a flat bucket has gained on its last point, quantised to int8, with the error fed back, in
one pass.

    y = x - point + e;  s = max|y| / 127 over a run of QUANTUM;  q = round(y / s);  e <- y - s q

The error e is added to what the next pack receives, so that over rounds nothing is lost.
"""

import torch

from hdet_scale.kernels.choice import on_kernels
from hdet_scale.kernels.int8_format import FAINT, QUANTUM, check_packed, packed_blocks
from hdet_scale.kernels.launch import device_block_size, jit, launch, tl

_FAINT = tl.constexpr(FAINT)
_WHOLE = tl.constexpr(1.5 * 2.0**23)


@jit
def _pack_block(  # type: ignore[no-untyped-def]
    x_at, p_at, e_at, q_at, s_at, left, ROWS: tl.constexpr, Q: tl.constexpr, VECTOR: tl.constexpr
):
    r = tl.arange(0, ROWS)
    i = r[:, None] * Q + tl.arange(0, Q)[None, :]
    mask = None
    filled = r >= 0
    if VECTOR:
        x_at = tl.multiple_of(x_at, 16)
        p_at = tl.multiple_of(p_at, 16)
        e_at = tl.multiple_of(e_at, 16)
        q_at = tl.multiple_of(q_at, 16)
        y = tl.load(x_at + i).to(tl.float32) - tl.load(p_at + i) + tl.load(e_at + i)
    else:
        mask = i < left
        filled = r * Q < left
        x = tl.load(x_at + i, mask=mask, other=0.0).to(tl.float32)
        gained = x - tl.load(p_at + i, mask=mask, other=0.0)
        y = gained + tl.load(e_at + i, mask=mask, other=0.0)
    s = tl.max(tl.abs(y), axis=1) / 127.0
    inverse = tl.where(s >= _FAINT, 1.0 / tl.where(s >= _FAINT, s, 1.0), 0.0)
    # Between -127 and 127 this sum has no bits left for a fraction: to nearest, ties to even.
    q = (y * inverse[:, None] + _WHOLE) - _WHOLE
    q = tl.minimum(tl.maximum(q, -127.0), 127.0)
    tl.store(e_at + i, y - q * s[:, None], mask=mask)
    tl.store(q_at + i, q.to(tl.int8), mask=mask)
    tl.store(s_at + r, s, mask=filled)


@jit
def pack_kernel(  # type: ignore[no-untyped-def]
    x,
    point,
    error,
    codes,
    scales,
    numel,
    BLOCK: tl.constexpr,
    Q: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK // Q
    pid = tl.program_id(0).to(tl.int64)
    at = pid * BLOCK
    left = numel - at
    s_at = scales + pid * ROWS
    if ALIGNED and left >= BLOCK:
        _pack_block(x + at, point + at, error + at, codes + at, s_at, left, ROWS, Q, True)
    else:
        _pack_block(x + at, point + at, error + at, codes + at, s_at, left, ROWS, Q, False)


def pack(
    x: torch.Tensor,
    point: torch.Tensor,
    error: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Quantise x - point + error to int8, and keep what was lost in `error`.

    Args:
        x: A flat, finite bucket (`Pieces.gather` has checked it).
        point: fp32, of the same shape.
        error: fp32, of the same shape: added to the difference, then overwritten with what was
            lost.
        codes: int8, of the same shape, overwritten.
        scales: fp32 [packed_blocks(n)], overwritten: one scale for each QUANTUM elements.
    """
    check_packed(x, codes, scales)
    for name, tensor in (("point", point), ("error", error)):
        if tensor.shape != x.shape or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: it must be float32 "
                f"{tuple(x.shape)}"
            )
    if not on_kernels(x):
        pack_reference(x, point, error, codes, scales)
        return
    block = device_block_size(x.device)
    launch(
        pack_kernel,
        -(-x.numel() // block),
        x.device,
        x,
        point,
        error,
        codes,
        scales,
        x.numel(),
        BLOCK=block,
        Q=QUANTUM,
        ALIGNED=all(t.data_ptr() % 16 == 0 for t in (x, point, error, codes)),
    )


def pack_reference(
    x: torch.Tensor,
    point: torch.Tensor,
    error: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """`pack` in torch."""
    blocks = packed_blocks(x.numel())
    y = torch.zeros(blocks * QUANTUM, dtype=torch.float32, device=x.device)
    y[: x.numel()] = x.float() - point + error
    y = y.view(blocks, QUANTUM)
    s = y.abs().amax(dim=1) / 127.0
    inverse = torch.where(s >= FAINT, 1.0 / s, 0.0)
    q = (y * inverse[:, None]).round_()
    error.copy_((y - q * s[:, None]).view(-1)[: x.numel()])
    codes.copy_(q.view(-1)[: x.numel()])
    scales.copy_(s)
