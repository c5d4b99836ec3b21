"""The plan of flat buckets over a set of local tensors.

Tensors are seen as *spans*, flat runs of memory: tensors that lie one behind the other in one
storage are one span, a tied parameter is one span however often it is listed, an empty shard is
none. A span of at least `direct_bytes` is averaged where it lies, with no copy; smaller ones are
packed, in the order given, into staging buckets of at most `bucket_bytes`.

The plan depends on shapes, strides, dtypes and the caps alone, so that every rank of a group
makes the same one; `check_same_plan` compares their fingerprints. Meta tensors can be planned too.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.optim.shards import is_dense
from hdet_scale.topology import Replicas

DIRECT_BYTES = 2**20
"""From here a span is worth a collective of its own: copying it twice would cost more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a span and its place in a bucket, in elements."""

    span: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one collective moves. A bucket of one piece may be moved where it lies."""

    dtype: torch.dtype
    device: torch.device
    numel: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Spans, their buckets, and the text that tells whether two ranks mean the same."""

    spans: tuple[Tensor, ...]
    buckets: tuple[Bucket, ...]
    layout: tuple[str, ...]
    """A line for each tensor."""
    settings: str
    """What else shapes the plan."""
    heads: tuple[tuple[int, int], ...]
    """For each span which of the tensors given lies at its begin, and its elements."""

    @property
    def numel(self) -> int:
        """Elements that a converge averages on this rank."""
        return sum(b.numel for b in self.buckets)

    @property
    def fingerprint(self) -> bytes:
        """Equal on two ranks exactly when their plans are."""
        return hashlib.sha256("\n".join([*self.layout, self.settings]).encode()).digest()

    def views(self, bucket: Bucket) -> list[Tensor]:
        """The memory of a bucket's pieces, in its order."""
        return [self.spans[p.span][p.start : p.start + p.length] for p in bucket.pieces]

    def over(self, tensors: Sequence[Tensor]) -> Plan:
        """The same plan over other tensors that are `laid_out` alike. Over none it can be kept
        without keeping memory alive."""
        heads = self.heads if tensors else ()
        spans = tuple(tensors[i].as_strided((size,), (1,)) for i, size in heads)
        return dataclasses.replace(self, spans=spans)


def plan(
    tensors: Iterable[Tensor],
    *,
    bucket_bytes: int,
    direct_bytes: int | None = DIRECT_BYTES,
    cut_direct: bool = False,
    itemsize: int = 1,
) -> Plan:
    """Buckets over `tensors`.

    bucket_bytes: cap of a staging bucket, counted in at least `itemsize` bytes an element: 4
        where 16-bit tensors are staged in fp32.
    direct_bytes: spans from this size on become a bucket of their own, whatever the cap, to be
        reduced where they lie; None: every span goes through capped buckets.
    cut_direct: such spans are cut at the cap, for a wire that needs a buffer as long as what it
        sends.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    given = list(tensors)
    heads = _heads(given)
    spans = tuple(given[i].as_strided((size,), (1,)) for i, size in heads)
    buckets: list[Bucket] = []
    for kind in dict.fromkeys((s.dtype, s.device) for s in spans):
        members = [i for i, s in enumerate(spans) if (s.dtype, s.device) == kind]
        cap = max(1, bucket_bytes // max(itemsize, kind[0].itemsize))
        direct = None if direct_bytes is None else max(1, direct_bytes // kind[0].itemsize)
        buckets += _pack(spans, members, cap, direct, cut_direct)
    settings = (
        f"bucket_bytes {bucket_bytes}, direct_bytes {direct_bytes}, cut {cut_direct}, "
        f"item {itemsize}, runs of memory {[s.numel() for s in spans]}"
    )
    layout = tuple(_describe(t) for t in given)
    return Plan(spans, tuple(buckets), layout, settings, tuple(heads))


def laid_out(tensors: Iterable[Tensor]) -> Hashable:
    """What a plan depends on beside its caps: equal for tensors that have moved, but lie in their
    memory and beside each other as before."""
    storages: dict[int, int] = {}
    return tuple(
        (
            t.dtype,
            t.device,
            t.shape,
            t.stride(),
            t.storage_offset(),
            storages.setdefault(t.untyped_storage().data_ptr(), len(storages)),
        )
        for t in tensors
    )


def join(first: Plan, second: Plan) -> Plan:
    """The buckets of both, those of the second behind those of the first."""
    moved = [
        dataclasses.replace(
            b,
            pieces=tuple(dataclasses.replace(p, span=p.span + len(first.spans)) for p in b.pieces),
        )
        for b in second.buckets
    ]
    return Plan(
        first.spans + second.spans,
        (*first.buckets, *moved),
        first.layout + second.layout,
        f"{first.settings}; {second.settings}",
        first.heads + tuple((i + len(first.layout), size) for i, size in second.heads),
    )


def check_same_plan(plan: Plan, replicas: Replicas, device: torch.device) -> None:
    """Refuse replicas whose plans differ: a hang or a wrong mean becomes an error. Collective.

    Args:
        plan: this rank's plan.
        replicas: who compares.
        device: where the fingerprint is sent from.

    Raises:
        ValueError: the same on every rank, with the first tensor that differs.
    """
    n, group = replicas.size, replicas.connected()
    sent = torch.frombuffer(bytearray(plan.fingerprint), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(sent) for _ in range(n)]
    dist.all_gather(rows, sent, group=group)
    if any(not torch.equal(row, rows[0]) for row in rows):
        layouts: list[tuple[tuple[str, ...], str]] = [((), "")] * n
        dist.all_gather_object(layouts, (plan.layout, plan.settings), group=group)
        raise ValueError(_first_difference(layouts))


def _first_difference(layouts: Sequence[tuple[Sequence[str], str]]) -> str:
    said = "replicas would average different things: "
    advice = ". Build the same model and optimizer on every replica, in the same order"
    tensors = [lines for lines, _ in layouts]
    for i in range(max(len(lines) for lines in tensors)):
        found = [lines[i] if i < len(lines) else "nothing" for lines in tensors]
        for replica, line in enumerate(found):
            if line != found[0]:
                both = f"{found[0]} on replica 0 and {line} on replica {replica}"
                return f"{said}tensor {i} is {both}{advice}"
    settings = [text for _, text in layouts]
    replica = next(r for r, text in enumerate(settings) if text != settings[0])
    return f"{said}{settings[0]} on replica 0 and {settings[replica]} on replica {replica}{advice}"


def _pack(
    spans: Sequence[Tensor], members: Sequence[int], cap: int, direct: int | None, cut: bool
) -> list[Bucket]:
    buckets: list[Bucket] = []
    open_pieces: list[Piece] = []
    filled = 0

    def close() -> None:
        nonlocal open_pieces, filled
        if open_pieces:
            first = spans[open_pieces[0].span]
            buckets.append(Bucket(first.dtype, first.device, filled, tuple(open_pieces)))
        open_pieces, filled = [], 0

    for i in members:
        size = spans[i].numel()
        if direct is not None and size >= direct:
            step = cap if cut else size
            for begin in range(0, size, step):
                piece = Piece(i, begin, min(step, size - begin), 0)
                buckets.append(Bucket(spans[i].dtype, spans[i].device, piece.length, (piece,)))
            continue
        start = 0
        while start < size:
            length = min(cap - filled, size - start)
            open_pieces.append(Piece(i, start, length, filled))
            filled += length
            start += length
            if filled == cap:
                close()
    close()
    return buckets


def _heads(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Flat runs of memory, each listed once, in the order in which they first appear: the tensor
    that lies at the begin of each, and its elements."""
    flats = [(order, *_place(t), t.numel()) for order, t in enumerate(tensors) if t.numel()]
    flats.sort(key=lambda f: (f[1], f[2], -f[3]))
    runs: list[tuple[int, tuple[object, ...], int, int, int]] = []
    for order, home, start, numel in flats:
        stop = start + numel
        if runs and runs[-1][1] == home and start <= runs[-1][3]:
            first, _, run_start, run_stop, head = runs[-1]
            runs[-1] = (min(first, order), home, run_start, max(run_stop, stop), head)
        else:
            runs.append((order, home, start, stop, order))
    runs.sort(key=lambda r: r[0])
    return [(head, stop - start) for _, _, start, stop, head in runs]


def _place(tensor: Tensor) -> tuple[tuple[object, ...], int]:
    """(storage, first element) of a tensor whose memory is one run."""
    if tensor.is_sparse or tensor.is_complex() or not tensor.is_floating_point():
        raise TypeError(
            f"only dense floating-point tensors can be averaged, got {_describe(tensor)}"
        )
    if not is_dense(tensor):
        raise ValueError(
            f"a tensor with gaps or overlaps in memory cannot be averaged in place, got "
            f"{_describe(tensor)}: pass tensor.contiguous(), or the tensor it is a view of"
        )
    # Any dense layout (channels-last too) is one run of memory; the order of elements in it is
    # the same on every rank, since strides are part of the fingerprint.
    storage = tensor.untyped_storage()
    where = id(tensor) if tensor.is_meta else storage.data_ptr()
    return (str(tensor.device), str(tensor.dtype), where), int(tensor.storage_offset())


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} strides {list(tensor.stride())}"
