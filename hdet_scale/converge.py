"""Converge: theta_r <- mean over replicas of theta, elementwise on local shards, in place.

The order of a converge:

1. `healthy`: one read of the local tensors; a replica with a non-finite element must be known
   before anything is summed, since 0 x NaN is NaN.
2. one small exchange of the flags (the round sends its losses along).
3. `average`: the buckets of the plan in flight one behind the other. A replica that is left out
   contributes nothing and receives the others' mean.

Nothing is written before step 3; when no replica is healthy every rank raises the same error
there, with its tensors as they were.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.buckets import DIRECT_BYTES, Bucket, Plan, plan
from hdet_scale.topology import Replicas

BUCKET_BYTES = 32 * 2**20
IN_FLIGHT = 8
"""Collectives on memory that needs no staging: enough to hide their latency."""
CACHED = 65536
"""Elements of a block whose second read still comes out of the cache."""

Flight = Iterator[None]


class NoHealthyReplicaError(RuntimeError):
    """Every replica has a non-finite parameter or loss: there is nothing to average."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a converge did."""

    included: tuple[bool, ...]
    """Which replicas are in the mean."""
    seconds: float
    """From the first collective to the last write, on this rank."""
    wire_bytes: int
    """Bytes that this rank put on the wire for the buckets."""


class Converge:
    """Averages `tensors` in place across replicas, each time it is called.

    Extra memory: at most two staging buckets of `bucket_bytes`, allocated at the first converge
    and kept. Tensors of 1 MiB or more are reduced where they lie. 16-bit tensors are summed in
    fp32. With more than two replicas on gloo the mean is summed in float64 by the rank that owns
    a segment and rounded once, so that every rank has the same bits, the nearest to the true
    mean; elsewhere the backend's own average is used.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        replicas: Replicas,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int):
            raise TypeError(f"bucket_bytes must be an int, got {bucket_bytes!r}")
        self.replicas = replicas
        self.tensors = distinct(tensors)
        self.bucket_bytes = bucket_bytes
        self._checked = False
        self._staging: dict[tuple[torch.dtype, torch.device], deque[Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        wide = [t for t in self.tensors if t.dtype in (torch.float32, torch.float64)]
        narrow = [t for t in self.tensors if t.dtype not in (torch.float32, torch.float64)]
        # The exact mean receives as much as it stages: two halves make the same two buckets.
        cap = max(1, bucket_bytes // 2) if self._exact else bucket_bytes
        direct = None if self._exact else DIRECT_BYTES
        self.plans = [
            p
            for p in (
                plan(wide, bucket_bytes=cap, direct_bytes=direct),
                plan(narrow, bucket_bytes=cap, direct_bytes=None, itemsize=4),
            )
            if p.buckets
        ]

    @property
    def device(self) -> torch.device:
        """Where the small exchange of a round takes place."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @torch.no_grad()
    def __call__(self, *, healthy: bool = True) -> Outcome:
        """The whole of it, for callers without a round: check, exchange of flags, average."""
        fine = healthy and self.healthy()
        rows = self.replicas.exchange([float(fine)], self.device)
        return self.average([row[0] == 1.0 for row in rows])

    @torch.no_grad()
    def healthy(self) -> bool:
        """True when every local element is finite. One read, one host synchronisation."""
        spans = [s for p in self.plans for s in p.spans]
        if not spans:
            return True
        sums = torch.stack([s.sum(dtype=_summed(s)).to(self.device) for s in spans])
        if bool(sums.isfinite().all()):
            return True
        # A sum may overflow although its terms are finite: only now look at each element.
        return all(bool(s.isfinite().all()) for s in spans)

    @torch.no_grad()
    def average(self, included: Sequence[bool]) -> Outcome:
        """The mean over the replicas in `included`, the same sequence on every rank."""
        if len(included) != self.replicas.size:
            raise ValueError(
                f"one flag for each of {self.replicas.size} replicas, got {len(included)}"
            )
        if not any(included):
            raise NoHealthyReplicaError(
                f"none of the {self.replicas.size} replicas has finite parameters and losses: "
                "the parameters are left as they were. Resume from the last checkpoint with a "
                "lower learning rate or spread"
            )
        begin = time.perf_counter()
        sent = 0
        if self.replicas.size > 1:
            self._agree_on_plan()
            for p in self.plans:
                self._run([self._flight(p, b, included) for b in p.buckets], p)
                sent += sum(self._wire_bytes(b) for b in p.buckets)
        return Outcome(tuple(included), time.perf_counter() - begin, sent)

    def replicas_agree(self) -> bool:
        """True when all replicas hold the same bits, by a checksum: one read, one exchange."""
        total = 0
        for s in (s for p in self.plans for s in p.spans):
            whole = s.view(_INTEGER[s.dtype.itemsize]).sum(dtype=torch.int64)
            total = (total * 1000003 + int(whole)) % 2**52  # exact as a float64
        rows = self.replicas.exchange([float(total)], self.device)
        return all(row == rows[0] for row in rows)

    # -- the pipeline ---------------------------------------------------------------------------

    def _run(self, flights: Sequence[Flight], p: Plan) -> None:
        """Flights one behind the other: the next is started before the oldest is finished."""
        if p.spans[0].device.type == "cuda":
            with self._side_stream(p.spans[0].device):
                self._fly(flights, p)
        else:
            self._fly(flights, p)

    def _fly(self, flights: Sequence[Flight], p: Plan) -> None:
        airborne: deque[tuple[bool, Flight]] = deque()
        for flight, bucket in zip(flights, p.buckets, strict=True):
            staged = self._stages(bucket)
            while len(airborne) >= IN_FLIGHT or (staged and sum(s for s, _ in airborne) >= 2):
                _land(airborne.popleft()[1])
            next(flight)
            airborne.append((staged, flight))
        while airborne:
            _land(airborne.popleft()[1])

    def _flight(self, p: Plan, bucket: Bucket, included: Sequence[bool]) -> Flight:
        reduce = self._exact_mean if self._exact else self._reduced_mean
        return reduce(p.views(bucket), bucket, included)

    def _reduced_mean(
        self, views: list[Tensor], bucket: Bucket, included: Sequence[bool]
    ) -> Flight:
        """All-reduce of one bucket: where it lies, or through a staging buffer."""
        mine = included[self.replicas.rank]
        flat, release = self._gathered(views, bucket, wanted=mine)
        average = self._averages and all(included)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        work = dist.all_reduce(flat, op=op, group=self.replicas.group, async_op=True)
        yield
        work.wait()
        if not average:
            flat.mul_(1.0 / sum(included))
        _scatter(flat, views)
        release()

    def _exact_mean(self, views: list[Tensor], bucket: Bucket, included: Sequence[bool]) -> Flight:
        """Scatter, sum in float64, gather: the bytes of a ring all-reduce, rounded once.

        Rank j owns segment j: all send it their segment j, it sums the included ones in
        float64, divides, rounds, and sends the result to all.
        """
        n, me = self.replicas.size, self.replicas.rank
        flat, release = self._gathered(views, bucket, wanted=True)
        segments = list(flat.tensor_split(n))
        received = self._borrow(bucket, n * segments[me].numel())
        rows = list(received.view(n, -1)) if segments[me].numel() else [received] * n
        flags = _post(self.replicas, sends=segments, receives=rows)
        yield
        _wait(flags)
        rows[me].copy_(segments[me])
        for block in _blocks(rows, included):
            mean = torch.stack(block).double().sum(0).div_(sum(included))
            block[0].copy_(mean)
        first = rows[next(r for r in range(n) if included[r])]
        segments[me].copy_(first)
        _wait(_post(self.replicas, sends=[segments[me]] * n, receives=segments))
        _scatter(flat, views)
        release()
        self._give_back(bucket, received)

    # -- memory ---------------------------------------------------------------------------------

    def _stages(self, bucket: Bucket) -> bool:
        return self._exact or len(bucket.pieces) > 1 or _staging_dtype(bucket) != bucket.dtype

    def _gathered(
        self, views: list[Tensor], bucket: Bucket, *, wanted: bool
    ) -> tuple[Tensor, Callable[[], None]]:
        """The bucket as one run of memory, and the call that gives the staging back."""
        if len(views) == 1 and _staging_dtype(bucket) == bucket.dtype:
            if not wanted:
                views[0].zero_()
            return views[0], lambda: None
        flat = self._borrow(bucket, bucket.numel)
        if wanted:
            for piece, view in zip(bucket.pieces, views, strict=True):
                flat[piece.offset : piece.offset + piece.length].copy_(view)
        else:
            flat.zero_()
        return flat, lambda: self._give_back(bucket, flat)

    def _borrow(self, bucket: Bucket, numel: int) -> Tensor:
        """A kept buffer: the first touch of fresh memory costs more than the copy into it."""
        dtype = _staging_dtype(bucket)
        shelf = self._staging.setdefault((dtype, bucket.device), deque())
        for i, buffer in enumerate(shelf):
            if buffer.numel() >= numel:
                del shelf[i]
                return buffer[:numel]
        return torch.empty(numel, dtype=dtype, device=bucket.device)

    def _give_back(self, bucket: Bucket, buffer: Tensor) -> None:
        whole = buffer.as_strided((buffer.untyped_storage().nbytes() // buffer.itemsize,), (1,), 0)
        self._staging[_staging_dtype(bucket), bucket.device].append(whole)

    # -- the group ------------------------------------------------------------------------------

    @property
    def _backend(self) -> str:
        if self.replicas.group is None:
            return "none"
        return str(dist.get_backend(self.replicas.group))

    @property
    def _averages(self) -> bool:
        return "nccl" in self._backend and self.device.type == "cuda"

    @property
    def _exact(self) -> bool:
        return self.replicas.size > 2 and not self._averages

    def _wire_bytes(self, bucket: Bucket) -> int:
        n = self.replicas.size
        return bucket.numel * _staging_dtype(bucket).itemsize * 2 * (n - 1) // n

    def _agree_on_plan(self) -> None:
        """Once: a hang or a wrong mean becomes an error that names the first difference."""
        if self._checked:
            return
        group = self.replicas._connected()
        mine = [line for p in self.plans for line in p.layout]
        digest = b"".join(p.fingerprint for p in self.plans).ljust(64, b"\0")[:64]
        sent = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(sent) for _ in range(self.replicas.size)]
        dist.all_gather(rows, sent, group=group)
        if any(not torch.equal(row, rows[0]) for row in rows):
            layouts: list[list[str]] = [[] for _ in range(self.replicas.size)]
            dist.all_gather_object(layouts, mine, group=group)
            raise ValueError(_first_difference(layouts))
        self._checked = True

    def _side_stream(self, device: torch.device) -> _OnStream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return _OnStream(self._streams[device])


class _OnStream:
    """Work inside runs on a side stream, ordered after and before the current one by events."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self.current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(self.current)
        self.context.__enter__()

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)
        self.current.wait_stream(self.stream)


def local(tensor: Tensor) -> Tensor:
    """The memory that this rank holds of a tensor: a DTensor's local shard, or the tensor."""
    inner = getattr(tensor, "_local_tensor", None)
    return (tensor if inner is None else inner).detach()


_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.int8}


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local memory of each tensor, a tensor listed twice only once."""
    return [local(t) for t in {id(t): t for t in tensors}.values()]


def _staging_dtype(bucket: Bucket) -> torch.dtype:
    return bucket.dtype if bucket.dtype == torch.float64 else torch.float32


def _summed(span: Tensor) -> torch.dtype:
    return torch.float64 if span.dtype == torch.float64 else torch.float32


def _scatter(flat: Tensor, views: list[Tensor]) -> None:
    if len(views) == 1 and views[0].data_ptr() == flat.data_ptr():
        return
    for view, part in zip(views, flat.split([v.numel() for v in views]), strict=True):
        view.copy_(part)


def _land(flight: Flight) -> None:
    for _ in flight:
        pass


def _blocks(rows: Sequence[Tensor], included: Sequence[bool]) -> Iterator[list[Tensor]]:
    """The included rows, cut into blocks that fit the cache."""
    wanted = [row for row, wanted in zip(rows, included, strict=True) if wanted]
    yield from (list(block) for block in zip(*(r.split(CACHED) for r in wanted), strict=True))


def _post(
    replicas: Replicas, *, sends: Sequence[Tensor], receives: Sequence[Tensor]
) -> list[dist.Work]:
    """Post sends[r] to replica r and receives[r] from it, for every other replica at once."""
    group = replicas._connected()
    ops: list[dist.P2POp] = []
    for step in range(1, replicas.size):
        to, source = (replicas.rank + step) % replicas.size, (replicas.rank - step) % replicas.size
        if sends[to].numel():
            ops.append(dist.P2POp(dist.isend, sends[to], group=group, group_peer=to))
        if receives[source].numel():
            ops.append(dist.P2POp(dist.irecv, receives[source], group=group, group_peer=source))
    return dist.batch_isend_irecv(ops) if ops else []


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def _first_difference(layouts: Sequence[Sequence[str]]) -> str:
    for i in range(max(len(x) for x in layouts)):
        lines = [x[i] if i < len(x) else "nothing" for x in layouts]
        if len(set(lines)) > 1:
            other = next(r for r, line in enumerate(lines) if line != lines[0])
            return (
                f"replicas would average different things: tensor {i} is {lines[0]} on replica 0 "
                f"and {lines[other]} on replica {other}. Build the same model and optimizer on "
                "every replica, in the same order"
            )
    return "replicas would average different things: their bucket settings differ"
