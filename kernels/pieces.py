"""Tensors copied into a flat bucket and back, one launch for each dtype.

    gather    bucket[o:o+n] <- cast(scale * tensor), and a flag if any element is not finite
    scatter   tensor <- cast(scale * bucket[o:o+n]), or that added to the tensor, unless a flag says
              to skip

Scale and flag are device scalars: nothing here waits for the device. The finite check looks at
what was cast, so that a value that is finite in fp32 and overflows in fp16 is found too. Where no
kernel runs, the torch references at the end of the file do.
"""

from collections.abc import Sequence

import torch

from hdet_scale.kernels.choice import on_kernels
from hdet_scale.kernels.launch import constant, device_block_size, jit, launch, tl, tl_dtype
from hdet_scale.kernels.rounding import nearest
from hdet_scale.kernels.table import chunk_table

_LARGEST = tl.constexpr(3.4028234663852886e38)


@jit
def _place_in(bucket, offset, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address of an element of the bucket. As an integer: the compiler joins sums of pointers,
    and a hint on one of them is lost."""
    SIZE: tl.constexpr = B.primitive_bitwidth // 8
    return bucket.to(tl.int64) + offset * SIZE


@jit
def _ends(t_at, b_at, start, T: tl.constexpr, B: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Element `start` of a tensor and of its place in the bucket, both given by their addresses.
    The compiler cannot see how these are aligned: the hint makes the accesses 128 bits wide."""
    tensor = t_at.to(tl.pointer_type(T))
    place = b_at.to(tl.pointer_type(B))
    if VECTOR:
        tensor = tl.multiple_of(tensor, 16)
        place = tl.multiple_of(place, 16)
    return tensor + start, place + start


@jit
def _gather_block(  # type: ignore[no-untyped-def]
    t_at,
    b_at,
    start,
    numel,
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
        mask = i < numel - start
        inside = mask
    tensor, place = _ends(t_at, b_at, start, T, B, VECTOR)
    y = nearest(tl.load(tensor + i, mask=mask).to(tl.float32) * scale, B)
    tl.store(place + i, y, mask=mask)
    # Every writer writes 1, so that the order does not matter; a finite bucket writes nothing.
    broken = (tl.abs(y.to(tl.float32)) <= _LARGEST) == 0
    tl.store(flag + i * 0, 1, mask=broken & inside)


@jit
def gather_kernel(  # type: ignore[no-untyped-def]
    addresses,
    places,
    chunks,
    bucket,
    flag,
    scale,
    T: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = chunks + tl.program_id(0) * 2
    row = tl.load(chunk)
    packed = tl.load(chunk + 1)
    start = (packed // 2).to(tl.int64) * BLOCK
    t_at = tl.load(addresses + row)
    b_at = _place_in(bucket, tl.load(places + row * 2 + 1), B)
    numel = tl.load(places + row * 2)
    factor = tl.load(scale)
    # A bucket may lie anywhere: whether both ends of a whole block are aligned is known here.
    if packed % 2 != 0 and (t_at | b_at) % 16 == 0:
        _gather_block(t_at, b_at, start, numel, flag, factor, T, B, BLOCK, True)
    else:
        _gather_block(t_at, b_at, start, numel, flag, factor, T, B, BLOCK, False)


@jit
def _scatter_block(  # type: ignore[no-untyped-def]
    t_at,
    b_at,
    start,
    numel,
    scale,
    T: tl.constexpr,
    B: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = None
    if not VECTOR:
        mask = i < numel - start
    tensor, place = _ends(t_at, b_at, start, T, B, VECTOR)
    x = tl.load(place + i, mask=mask).to(tl.float32) * scale
    if ADD:
        x += tl.load(tensor + i, mask=mask).to(tl.float32)
    tl.store(tensor + i, nearest(x, T), mask=mask)


@jit
def scatter_kernel(  # type: ignore[no-untyped-def]
    addresses,
    places,
    chunks,
    bucket,
    skip,
    scale,
    T: tl.constexpr,
    B: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(skip) == 0:
        chunk = chunks + tl.program_id(0) * 2
        row = tl.load(chunk)
        packed = tl.load(chunk + 1)
        start = (packed // 2).to(tl.int64) * BLOCK
        t_at = tl.load(addresses + row)
        b_at = _place_in(bucket, tl.load(places + row * 2 + 1), B)
        numel = tl.load(places + row * 2)
        factor = tl.load(scale)
        if packed % 2 != 0 and (t_at | b_at) % 16 == 0:
            _scatter_block(t_at, b_at, start, numel, factor, T, B, ADD, BLOCK, True)
        else:
            _scatter_block(t_at, b_at, start, numel, factor, T, B, ADD, BLOCK, False)


class Pieces:
    """Tensors and their places in a flat bucket.

    What a launch reads lies on the device: the tensors' addresses, their sizes and offsets, and a
    list of blocks. Another bucket changes none of them, and tensors that have moved change the
    addresses alone.

    Args:
        tensors: Contiguous tensors on one device. They may have several dtypes: one launch for
            each.
        offsets: The index in the bucket of each tensor's first element. Without it the tensors
            follow one another (default: None).
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], offsets: Sequence[int] | None = None
    ) -> None:
        self.tensors = [flat_view(t, position) for position, t in enumerate(tensors)]
        self._kinds = [(t.numel(), t.dtype) for t in self.tensors]
        ends = [0]
        for size, _ in self._kinds:
            ends.append(ends[-1] + size)
        self.offsets = list(offsets) if offsets is not None else ends[:-1]
        if len(self.offsets) != len(self.tensors):
            raise ValueError(
                f"{len(self.offsets)} offsets for {len(self.tensors)} tensors: give one for each"
            )
        pairs = zip(self.offsets, self.tensors, strict=True)
        self.numel = max([o + t.numel() for o, t in pairs], default=0)
        self._seen: list[int] = []
        self._addresses = self._places = torch.empty(0)
        self._chunks: dict[torch.dtype, torch.Tensor] = {}

    def move_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Work on other tensors of the same sizes and dtypes, in the same order.

        Args:
            tensors: The others; none to let go of the present ones.
        """
        flats = [flat_view(t, position) for position, t in enumerate(tensors)]
        if flats and [(t.numel(), t.dtype) for t in flats] != self._kinds:
            raise ValueError(
                f"{len(flats)} tensors differ in size or dtype from the {len(self._kinds)} that "
                "the pieces were made for: make new Pieces"
            )
        self.tensors = flats

    def gather(
        self,
        bucket: torch.Tensor,
        scale: torch.Tensor | None = None,
        flag: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill the bucket with the tensors.

        Args:
            bucket: Flat, contiguous, at least `numel` elements long.
            scale: A device scalar that multiplies every element (default: None, which is 1).
            flag: An int32 tensor [1] to raise; it is only ever raised, so that one can serve
                several buckets (default: None, a new one).

        Returns:
            The flag: 1 if an element that was written is not finite.
        """
        self._check(bucket)
        if flag is None:
            flag = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        if not on_kernels(bucket):
            gather_reference(self.tensors, self.offsets, bucket, flag, scale)
            return flag
        self._launch(gather_kernel, bucket, flag, scale)
        return flag

    def scatter(
        self,
        bucket: torch.Tensor,
        scale: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        *,
        add: bool = False,
    ) -> None:
        """Copy the bucket back into the tensors.

        Args:
            bucket: What `gather` has filled.
            scale: A device scalar that multiplies every element (default: None, which is 1).
            skip: An int32 tensor [1]; other than 0, every tensor is left as it is (default: None).
            add: Add to the tensors instead, in fp32 and rounded once (default: False).
        """
        self._check(bucket)
        if not on_kernels(bucket):
            scatter_reference(self.tensors, self.offsets, bucket, scale, skip, add=add)
            return
        flag = constant(0.0, bucket.device).view(torch.int32) if skip is None else skip
        self._launch(scatter_kernel, bucket, flag, scale, ADD=add)

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
        self,
        kernel: object,
        bucket: torch.Tensor,
        flag: torch.Tensor,
        scale: torch.Tensor | None,
        **constants: bool,
    ) -> None:
        block = device_block_size(bucket.device)
        if not self._chunks:
            self._lay_out(bucket.device, block)
        self._point(bucket.device)
        factor = constant(1.0, bucket.device) if scale is None else scale
        for dtype, chunks in self._chunks.items():
            launch(
                kernel,
                chunks.shape[0],
                bucket.device,
                self._addresses,
                self._places,
                chunks,
                bucket,
                flag,
                factor,
                T=tl_dtype(dtype),
                B=tl_dtype(bucket.dtype),
                BLOCK=block,
                **constants,
            )

    def _lay_out(self, device: torch.device, block: int) -> None:
        """What depends on sizes and offsets alone."""
        sizes = [size for size, _ in self._kinds]
        places = torch.tensor([sizes, self.offsets], dtype=torch.int64).t().contiguous()
        self._places = places.to(device)
        self._addresses = torch.empty(len(sizes), dtype=torch.int64, device=device)
        for dtype in dict.fromkeys(dtype for _, dtype in self._kinds):
            chosen = [(i, n, True) for i, (n, kind) in enumerate(self._kinds) if kind == dtype]
            self._chunks[dtype] = chunk_table(chosen, block).to(device)

    def _point(self, device: torch.device) -> None:
        """Bring the addresses up to date, without waiting for the device."""
        now = [t.data_ptr() for t in self.tensors]
        if now == self._seen:
            return
        host = torch.tensor(now, dtype=torch.int64)
        if device.type == "cuda":
            host = host.pin_memory()
        self._addresses.copy_(host, non_blocking=True)
        self._seen = now


def flat_view(tensor: torch.Tensor, position: int) -> torch.Tensor:
    """A contiguous tensor seen as one dimension; `position` names it in the error."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor {position} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is "
            "not contiguous: its elements have no flat order. Pass a contiguous tensor."
        )
    return tensor.detach().view(-1)


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
    *,
    add: bool = False,
) -> None:
    """`Pieces.scatter` in torch."""
    if skip is not None and bool(skip):
        return
    for tensor, offset in zip(tensors, offsets, strict=True):
        piece = bucket[offset : offset + tensor.numel()]
        value = piece if scale is None else piece.float() * scale
        tensor.copy_(value.float() + tensor.float() if add else value)
