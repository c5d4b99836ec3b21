"""What a converge needs around its collective, each in one pass over memory.

    gather    bucket[o:o+n] <- cast(scale * tensor), and a flag if any element is not finite
    scatter   tensor <- cast(scale * bucket[o:o+n]), unless a flag says to skip
    scale     bucket <- scale * bucket
    pack      y = x + e;  s = max|y| / 127 over a block;  q = round(y / s);  e <- y - s q
    unpack    out <- sum over replicas of  weight * s * q

Every factor and flag is a device scalar: nothing here waits for the device. The finite check looks
at what was cast, so that a value that is finite in fp32 and overflows in fp16 is found too. The
error e of int8 packing is fed back into the next pack, so that over rounds nothing is lost.

On a CPU each function runs its torch reference, which stands at the end of the file.
"""

from collections.abc import Sequence

import torch

from hdet_scale.kernels.launch import (
    constant,
    device_block_size,
    interpreting,
    jit,
    launch,
    tl,
    tl_dtype,
)
from hdet_scale.kernels.rounding import nearest
from hdet_scale.kernels.table import chunk_table

QUANTUM = 256
"""Elements that share one scale of the int8 format."""

FAINT = 1e-30
"""A scale below this says nothing that a parameter could show, and its inverse may overflow: the
block is sent as zeros and stays in the error."""

_FAINT = tl.constexpr(FAINT)
_WHOLE = tl.constexpr(1.5 * 2.0**23)
_LARGEST = tl.constexpr(3.4028234663852886e38)


def _on_kernels(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" or (tensor.device.type == "cpu" and interpreting())


# --- kernels ---------------------------------------------------------------------------------


@jit
def _ends(row, start, T: tl.constexpr, B: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The addresses of a tensor and of its place in the bucket, at element `start`."""
    t_at = tl.load(row).to(tl.pointer_type(T))
    b_at = tl.load(row + 2).to(tl.pointer_type(B))
    if VECTOR:
        t_at = tl.multiple_of(t_at, 16)
        b_at = tl.multiple_of(b_at, 16)
    return t_at + start, b_at + start


@jit
def _gather_block(  # type: ignore[no-untyped-def]
    row,
    start,
    flag,
    scale,
    T: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = None
    inside = i >= 0
    if not VECTOR:
        mask = i < tl.load(row + 1) - start
        inside = mask
    t_at, b_at = _ends(row, start, T, B, VECTOR)
    y = nearest(tl.load(t_at + i, mask=mask).to(tl.float32) * scale, B)
    tl.store(b_at + i, y, mask=mask)
    # Every writer writes 1, so that the order does not matter; a finite bucket writes nothing.
    broken = (tl.abs(y.to(tl.float32)) <= _LARGEST) == 0
    tl.store(flag + i * 0, 1, mask=broken & inside)


@jit
def gather_kernel(  # type: ignore[no-untyped-def]
    pieces, chunks, flag, scale, T: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr
):
    chunk = chunks + tl.program_id(0) * 2
    row = pieces + tl.load(chunk) * 3
    packed = tl.load(chunk + 1)
    start = (packed // 2).to(tl.int64) * BLOCK
    factor = tl.load(scale)
    if packed % 2 != 0:
        _gather_block(row, start, flag, factor, T, B, BLOCK, True)
    else:
        _gather_block(row, start, flag, factor, T, B, BLOCK, False)


@jit
def _scatter_block(  # type: ignore[no-untyped-def]
    row,
    start,
    scale,
    T: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = None
    if not VECTOR:
        mask = i < tl.load(row + 1) - start
    t_at, b_at = _ends(row, start, T, B, VECTOR)
    x = tl.load(b_at + i, mask=mask).to(tl.float32) * scale
    tl.store(t_at + i, nearest(x, T), mask=mask)


@jit
def scatter_kernel(  # type: ignore[no-untyped-def]
    pieces, chunks, skip, scale, T: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr
):
    if tl.load(skip) == 0:
        chunk = chunks + tl.program_id(0) * 2
        row = pieces + tl.load(chunk) * 3
        packed = tl.load(chunk + 1)
        start = (packed // 2).to(tl.int64) * BLOCK
        factor = tl.load(scale)
        if packed % 2 != 0:
            _scatter_block(row, start, factor, T, B, BLOCK, True)
        else:
            _scatter_block(row, start, factor, T, B, BLOCK, False)


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


@jit
def _pack_block(  # type: ignore[no-untyped-def]
    x_at, e_at, q_at, s_at, left, ROWS: tl.constexpr, Q: tl.constexpr, VECTOR: tl.constexpr
):
    r = tl.arange(0, ROWS)
    i = r[:, None] * Q + tl.arange(0, Q)[None, :]
    mask = None
    filled = r >= 0
    if VECTOR:
        x_at = tl.multiple_of(x_at, 16)
        e_at = tl.multiple_of(e_at, 16)
        q_at = tl.multiple_of(q_at, 16)
        y = tl.load(x_at + i).to(tl.float32) + tl.load(e_at + i)
    else:
        mask = i < left
        filled = r * Q < left
        x = tl.load(x_at + i, mask=mask, other=0.0).to(tl.float32)
        y = x + tl.load(e_at + i, mask=mask, other=0.0)
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
    x, error, codes, scales, numel, BLOCK: tl.constexpr, Q: tl.constexpr, ALIGNED: tl.constexpr
):
    ROWS: tl.constexpr = BLOCK // Q
    pid = tl.program_id(0).to(tl.int64)
    at = pid * BLOCK
    left = numel - at
    if ALIGNED and left >= BLOCK:
        _pack_block(x + at, error + at, codes + at, scales + pid * ROWS, left, ROWS, Q, True)
    else:
        _pack_block(x + at, error + at, codes + at, scales + pid * ROWS, left, ROWS, Q, False)


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


# --- what converge calls ---------------------------------------------------------------------


class Pieces:
    """Tensors and their places in a flat bucket.

    `offsets` are the tensors' first elements in the bucket; without them the tensors follow one
    another. Tensors may have several dtypes: one launch for each. The table of addresses is kept
    on the device and rebuilt only when one of them changes.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], offsets: Sequence[int] | None = None
    ) -> None:
        self.tensors = [_flat(t, position) for position, t in enumerate(tensors)]
        ends = [0]
        for tensor in self.tensors:
            ends.append(ends[-1] + tensor.numel())
        self.offsets = list(offsets) if offsets is not None else ends[:-1]
        if len(self.offsets) != len(self.tensors):
            raise ValueError(
                f"{len(self.offsets)} offsets for {len(self.tensors)} tensors: give one for each"
            )
        pairs = zip(self.offsets, self.tensors, strict=True)
        self.numel = max([o + t.numel() for o, t in pairs], default=0)
        self._seen: list[int] = []
        self._rows = torch.empty(0)
        self._chunks: dict[torch.dtype, torch.Tensor] = {}

    def gather(
        self,
        bucket: torch.Tensor,
        scale: torch.Tensor | None = None,
        flag: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill the bucket; returns `flag`, an int32 tensor [1] set to 1 if an element that was
        written is not finite. A flag that is passed in is only ever raised, so that one can serve
        several buckets."""
        self._check(bucket)
        if flag is None:
            flag = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        if not _on_kernels(bucket):
            gather_reference(self.tensors, self.offsets, bucket, flag, scale)
            return flag
        self._launch(gather_kernel, bucket, flag, scale)
        return flag

    def scatter(
        self,
        bucket: torch.Tensor,
        scale: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Copy the bucket back; a `skip` flag (int32 [1]) other than 0 leaves every tensor."""
        self._check(bucket)
        if not _on_kernels(bucket):
            scatter_reference(self.tensors, self.offsets, bucket, scale, skip)
            return
        if skip is None:
            skip = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        self._launch(scatter_kernel, bucket, skip, scale)

    def _check(self, bucket: torch.Tensor) -> None:
        if bucket.dim() != 1 or not bucket.is_contiguous() or bucket.numel() < self.numel:
            raise ValueError(
                f"bucket of shape {tuple(bucket.shape)}, contiguous={bucket.is_contiguous()}: it "
                f"must be flat, contiguous and hold at least {self.numel} elements"
            )
        strangers = {str(t.device) for t in self.tensors if t.device != bucket.device}
        if strangers:
            raise ValueError(
                f"tensors on {sorted(strangers)} and a bucket on {bucket.device}: "
                "make one bucket for each device"
            )

    def _launch(
        self, kernel: object, bucket: torch.Tensor, flag: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        block = device_block_size(bucket.device)
        self._refresh(bucket, block)
        factor = constant(1.0, bucket.device) if scale is None else scale
        for dtype, chunks in self._chunks.items():
            launch(
                kernel,
                chunks.shape[0],
                bucket.device,
                self._rows,
                chunks,
                flag,
                factor,
                T=tl_dtype(dtype),
                B=tl_dtype(bucket.dtype),
                BLOCK=block,
            )

    def _refresh(self, bucket: torch.Tensor, block: int) -> None:
        now = [bucket.data_ptr(), bucket.element_size(), *(t.data_ptr() for t in self.tensors)]
        if now == self._seen:
            return
        pairs = list(zip(self.tensors, self.offsets, strict=True))
        rows = [[t.data_ptr(), t.numel(), now[0] + offset * now[1]] for t, offset in pairs]
        self._rows = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).to(bucket.device)
        self._chunks = {}
        for dtype in dict.fromkeys(t.dtype for t in self.tensors):
            sizes = [
                (i, t.numel(), (t.data_ptr() | (now[0] + o * now[1])) % 16 == 0)
                for i, (t, o) in enumerate(pairs)
                if t.dtype == dtype
            ]
            self._chunks[dtype] = chunk_table(sizes, block).to(bucket.device)
        self._seen = now


def scale(bucket: torch.Tensor, factor: torch.Tensor) -> None:
    """bucket <- factor * bucket, in fp32 whatever the storage; `factor` is a device scalar."""
    if not _on_kernels(bucket):
        scale_reference(bucket, factor)
        return
    flat = _flat(bucket, 0)
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


def pack(x: torch.Tensor, error: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise x + error to int8 with one scale for each `QUANTUM` elements, and keep what was lost
    in `error` (fp32). x must be finite: `gather` has checked it."""
    _check_packed(x, codes, scales)
    if error.shape != x.shape or error.dtype != torch.float32:
        raise ValueError(
            f"error is {error.dtype} {tuple(error.shape)}: it must be float32 {tuple(x.shape)}"
        )
    if not _on_kernels(x):
        pack_reference(x, error, codes, scales)
        return
    block = device_block_size(x.device)
    launch(
        pack_kernel,
        -(-x.numel() // block),
        x.device,
        x,
        error,
        codes,
        scales,
        x.numel(),
        BLOCK=block,
        Q=QUANTUM,
        ALIGNED=all(t.data_ptr() % 16 == 0 for t in (x, error, codes)),
    )


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """out <- sum_r weights[r] * scales[r] * codes[r]: the weighted sum of the replicas' buckets,
    codes [replicas, n] and scales [replicas, ceil(n / QUANTUM)], in one pass."""
    if codes.dim() != 2 or scales.dim() != 2 or weights.shape != codes.shape[:1]:
        raise ValueError(
            f"codes {tuple(codes.shape)}, scales {tuple(scales.shape)}, weights "
            f"{tuple(weights.shape)}: they must be [replicas, n], [replicas, blocks], [replicas]"
        )
    _check_packed(out, codes[0], scales[0])
    if not _on_kernels(out):
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


def packed_blocks(numel: int) -> int:
    """How many scales a bucket of `numel` elements has."""
    return -(-numel // QUANTUM)


def _flat(tensor: torch.Tensor, position: int) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor {position} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is "
            "not contiguous: its elements have no flat order. Pass a contiguous tensor."
        )
    return tensor.detach().view(-1)


def _check_packed(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    wanted = (torch.int8, (x.numel(),), torch.float32, (packed_blocks(x.numel()),))
    received = (codes.dtype, tuple(codes.shape), scales.dtype, tuple(scales.shape))
    if x.dim() != 1 or received != wanted:
        raise ValueError(f"codes and scales are {received}; for x {tuple(x.shape)}: {wanted}")
    if not (x.is_contiguous() and codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("x, codes and scales must be contiguous: pass .contiguous() buffers")


# --- torch references ------------------------------------------------------------------------


def gather_reference(
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    bucket: torch.Tensor,
    flag: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """`Pieces.gather` in torch. Several passes: a CPU bucket stays in its cache between them."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        piece = bucket[offset : offset + tensor.numel()]
        if scale is None:
            piece.copy_(tensor)
        elif tensor.dtype == piece.dtype == torch.float32:
            torch.mul(tensor, scale, out=piece)
        else:
            piece.copy_(tensor.float() * scale)
        # A sum is finite only if its terms are, and needs no array of booleans. It may overflow
        # where they are finite: then, and only then, look at each of them.
        if not torch.isfinite(piece.sum(dtype=torch.float32)) and not piece.isfinite().all():
            flag.fill_(1)


def scatter_reference(
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    bucket: torch.Tensor,
    scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """`Pieces.scatter` in torch."""
    if skip is not None and bool(skip):
        return
    for tensor, offset in zip(tensors, offsets, strict=True):
        piece = bucket[offset : offset + tensor.numel()]
        tensor.copy_(piece if scale is None else piece.float() * scale)


def scale_reference(bucket: torch.Tensor, factor: torch.Tensor) -> None:
    """`scale` in torch; a 16-bit bucket is multiplied in fp32 and rounded once."""
    if bucket.dtype == torch.float32:
        bucket.mul_(factor)
    else:
        bucket.copy_(bucket.float() * factor)


def pack_reference(
    x: torch.Tensor, error: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """`pack` in torch."""
    blocks = packed_blocks(x.numel())
    y = torch.zeros(blocks * QUANTUM, dtype=torch.float32, device=x.device)
    y[: x.numel()] = x.float() + error
    y = y.view(blocks, QUANTUM)
    s = y.abs().amax(dim=1) / 127.0
    inverse = torch.where(s >= FAINT, 1.0 / s, 0.0)
    q = (y * inverse[:, None]).round_()
    error.copy_((y - q * s[:, None]).view(-1)[: x.numel()])
    codes.copy_(q.view(-1)[: x.numel()])
    scales.copy_(s)


def unpack_reference(
    codes: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """`unpack` in torch, in the kernel's order of summation."""
    total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    for replica in range(codes.shape[0]):
        s = (scales[replica] * weights[replica]).repeat_interleave(QUANTUM)[: out.numel()]
        total += codes[replica].float() * s
    out.copy_(total)
