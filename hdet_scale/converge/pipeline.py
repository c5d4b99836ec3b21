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

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.converge.buckets import DIRECT_BYTES, Bucket, Plan, join, plan
from hdet_scale.converge.int8 import Memory
from hdet_scale.converge.staging import Stage
from hdet_scale.converge.wires import AllReduce, Bf16, Exact, Flight, Int8, Shelf, Wire
from hdet_scale.topology import Replicas, local

BUCKET_BYTES = 32 * 2**20
INT8_BYTES = 8 * 2**20
"""Cap of a bucket of the int8 wire on a CPU, which goes over it several times: in its cache."""
IN_FLIGHT = 8
"""Transfers from memory that needs no staging: enough to hide their latency."""
WIRES = ("fp32", "bf16", "int8")


class NoHealthyReplicaError(RuntimeError):
    """Every replica has a non-finite parameter or loss: there is nothing to average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """Nesterov momentum on the step from the last converged point to the mean (DiLoCo):

    delta = mean - point;  u <- momentum u + delta;  theta <- point + lr (delta + momentum u)

    lr 1 and momentum 0 are the mean. Memory: point and u, fp32.
    """

    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum."""

    def __post_init__(self) -> None:
        if not (isinstance(self.lr, int | float) and 0 < self.lr < 10):
            raise ValueError(f"outer lr must be in (0, 10), got {self.lr!r}; DiLoCo uses 0.7")
        if not (isinstance(self.momentum, int | float) and 0 <= self.momentum < 1):
            raise ValueError(
                f"outer momentum must be in [0, 1), got {self.momentum!r}; DiLoCo uses 0.9"
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a converge did."""

    included: tuple[bool, ...]
    """Which replicas are in the mean."""
    seconds: float
    """From the first collective to the last write, on this rank."""
    wire_bytes: int
    """Bytes that this rank put on the wire for the buckets."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a converge does with one bucket."""

    wire: Wire
    """How the mean is formed."""
    elements: int
    """Of the bucket."""
    sent_bytes: int
    """What this rank puts on the wire for it."""
    staged: bool
    """Whether it is copied into a buffer first."""
    fragment: int
    """The part of the round in which it is averaged."""


class Converge:
    """Averages `tensors` in place across replicas, each time it is called.

    bucket_bytes: cap of a staging bucket. Extra memory of the fp32 wire: at most two of them,
        allocated at the first converge and kept; tensors of 1 MiB or more are reduced where they
        lie. 16-bit tensors are summed in fp32.
    wire: "fp32"; "bf16" halves the bytes and rounds every value to bf16; "int8" sends the
        difference from the last converged point, with error feedback, and keeps two more fp32
        copies. Each gives the same bits on every rank. See hdet_scale.converge.wires.
    plain: tensors that take the mean itself whatever the wire and the outer step: moments and
        buffers, which an extrapolation or a quantised difference could make negative.
    fragments: P parts of the buckets that can be averaged one at a time.
    outer: an outer optimizer step instead of the plain mean.
    background: the averaging will be started with `start`; the replicas must then have a process
        group that the training step does not use (`with_own_group`).
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        replicas: Replicas,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        wire: str = "fp32",
        fragments: int = 1,
        outer: OuterStep | None = None,
        background: bool = False,
        plain: Iterable[Tensor] = (),
    ) -> None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int):
            raise TypeError(f"bucket_bytes must be an int, got {bucket_bytes!r}")
        if wire not in WIRES:
            raise ValueError(f"wire must be one of {list(WIRES)}, got {wire!r}")
        self.tensors = distinct(tensors)
        self.plain = distinct(plain)
        self.replicas = replicas
        self.outer = outer
        self.fragments = fragments
        self._shelf = Shelf()
        self._wide = _wide_wire(self.replicas, self.device)
        self._wire = {"fp32": self._wide, "bf16": Bf16(self.replicas), "int8": Int8(self.replicas)}[
            wire
        ]
        planned = self._plan(self.tensors, bucket_bytes, overlapped=background)
        self._remembering = len(planned.buckets)
        self.plan = join(planned, self._plan(self.plain, bucket_bytes, overlapped=background))
        self._fragment_of = _fragment_of(self.plan.buckets, fragments)
        self._stages = [Stage(self.plan.views(b)) for b in self.plan.buckets]
        self._snapshot: dict[int, Tensor] = {}
        self._points: dict[int, Tensor] = {}
        self._residuals: dict[int, Tensor] = {}
        self._momenta: dict[int, Tensor] = {}
        self._checked = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def _plan(self, tensors: list[Tensor], bucket_bytes: int, *, overlapped: bool) -> Plan:
        cap = bucket_bytes
        if isinstance(self._wide, Exact):
            cap = max(1, cap // 2)  # it receives as much as it stages: two halves make one bucket
        if isinstance(self._wire, Int8) and self.device.type == "cpu":
            cap = min(cap, INT8_BYTES)
        if self.fragments > 1:
            # Several buckets for each fragment, so that fragments come out equal.
            cap = max(1, min(cap, sum(t.nbytes for t in tensors) // (4 * self.fragments)))
        in_place = self.fragments == 1 and not overlapped
        return plan(
            tensors,
            bucket_bytes=cap,
            direct_bytes=DIRECT_BYTES if in_place else None,
            cut_direct=not isinstance(self._wire, AllReduce),
            itemsize=4,
        )

    @property
    def device(self) -> torch.device:
        """Where the small exchange of a round takes place."""
        known = self.tensors or self.plain
        return known[0].device if known else torch.device("cpu")

    @torch.no_grad()
    def __call__(self, *, healthy: bool = True) -> Outcome:
        """The whole of it, for callers without a round: check, exchange of flags, average."""
        fine = healthy and self.healthy()
        rows = self.replicas.exchange([float(fine)], self.device)
        return self.average([row[0] == 1.0 for row in rows])

    @torch.no_grad()
    def healthy(self, fragment: int | None = None, *, snapshot: bool = False) -> bool:
        """True when every local element is finite. One read, one host synchronisation.

        snapshot: for a `start` that follows before the tensors change: the copy that it needs is
            made now, and the check rides on it.
        """
        views = self._memory(fragment)
        if not views:
            return True
        if snapshot:
            found = self._take_snapshot(fragment)
        else:
            found = [v.sum(dtype=_summed(v)) for v in views]
        if bool(torch.stack([f.to(self.device) for f in found]).isfinite().all()):
            return True
        # A sum may overflow although its terms are finite: only now look at each element.
        return all(bool(v.isfinite().all()) for v in views)

    def _take_snapshot(self, fragment: int | None) -> list[Tensor]:
        """Copy what `start` will average; a scalar a bucket that is finite where it is."""
        self._drop_snapshot()
        found = []
        for index, bucket in self._chosen(fragment):
            self._snapshot[index] = self._shelf.borrow(*_staging(bucket))
            found.append(self._stages[index].gather_checked(self._snapshot[index]))
        return found

    def _drop_snapshot(self) -> None:
        self._shelf.give_back(*self._snapshot.values())
        self._snapshot = {}

    @torch.no_grad()
    def average(self, included: Sequence[bool], fragment: int | None = None) -> Outcome:
        """The mean over the replicas in `included`, the same sequence on every rank."""
        begin = time.perf_counter()
        chosen = self._check(included, fragment)
        self._drop_snapshot()
        with self._side_stream():
            self._fly((i, b, self._flight(i, b, included)) for i, b in chosen)
        sent = self._sent_bytes(chosen)
        return Outcome(tuple(included), time.perf_counter() - begin, sent)

    @torch.no_grad()
    def start(self, included: Sequence[bool], fragment: int | None = None) -> Pending:
        """Begin the averaging in the background; `finish()` of the result folds it in:

            theta <- theta_now + (mean - theta_at_start)

        theta_at_start is the snapshot that `healthy` has taken, or is copied now. A replica that is
        left out takes the mean as it is. Memory: one copy of what is averaged beside the staging.
        The converge needs `background=True`.
        """
        return Pending(self, self._check(included, fragment), included)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers that are kept from one converge to the next."""
        shelves = {id(s): s for s in (self._shelf, self._wide.shelf, self._wire.shelf)}
        return sum(shelf.nbytes for shelf in shelves.values())

    def transfers(self) -> list[Transfer]:
        """Bucket by bucket, in their order. On meta tensors what a GPU would do: nothing needs to
        be allocated or connected to plan a converge."""
        return [
            Transfer(
                wire=self._wire_of(i, b),
                elements=b.numel,
                sent_bytes=self._sent_bytes([(i, b)]),
                staged=not _lies_flat(b),
                fragment=self._fragment_of[i],
            )
            for i, b in enumerate(self.plan.buckets)
        ]

    def replicas_agree(self) -> bool:
        """True when all replicas hold the same bits, by a checksum: one read, one exchange."""
        total = 0
        for s in self.plan.spans:
            whole = s.view(_INTEGER[s.dtype.itemsize]).sum(dtype=torch.int64)
            total = (total * 1000003 + int(whole)) % 2**52  # exact as a float64
        rows = self.replicas.exchange([float(total)], self.device)
        return all(row == rows[0] for row in rows)

    # -- the pipeline ---------------------------------------------------------------------------

    def _fly(self, flights: Iterable[tuple[int, Bucket, Flight]]) -> None:
        """One behind the other: the next is started before the oldest has landed."""
        airborne: deque[tuple[bool, Flight]] = deque()
        for index, bucket, flight in flights:
            direct = isinstance(self._wire_of(index, bucket), AllReduce)
            staged = not (direct and _lies_flat(bucket))
            while len(airborne) >= IN_FLIGHT or (staged and sum(s for s, _ in airborne) >= 2):
                _land_one(airborne)
            next(flight)
            airborne.append((staged, flight))
        while airborne:
            _land_one(airborne)

    def _flight(self, index: int, bucket: Bucket, included: Sequence[bool]) -> Flight:
        """One bucket: gathered (or where it lies), averaged, scattered."""
        stage = self._stages[index]
        if _lies_flat(bucket):
            yield from self._mean(index, bucket, stage.views[0], included)
            return
        flat = stage.gather(self._shelf.borrow(*_staging(bucket)))
        yield from self._mean(index, bucket, flat, included)
        stage.scatter(flat)
        self._shelf.give_back(flat)

    def _mean(self, index: int, bucket: Bucket, flat: Tensor, included: Sequence[bool]) -> Flight:
        """The mean of a flat bucket in place, with the outer step and what is remembered."""
        point = self._points.get(index)
        wire = self._wire_of(index, bucket)
        if isinstance(wire, Int8) and point is None:
            wire = self._wide  # the first mean sets the point
        memory = None
        if isinstance(wire, Int8) and point is not None:
            residual = self._residuals.setdefault(index, torch.zeros_like(point))
            memory = Memory(point, residual)
        yield from wire.flight(flat, included, memory)
        if index >= self._remembering:
            return
        if self.outer is not None and point is not None:
            momentum = self._momenta.setdefault(index, torch.zeros_like(point))
            outer_step(flat, point, momentum, self.outer)
        if self.outer is not None or isinstance(self._wire_of(index, bucket), Int8):
            self._points[index] = flat.clone() if point is None else point.copy_(flat)

    def _wire_of(self, index: int, bucket: Bucket) -> Wire:
        whole = isinstance(self._wire, Int8) and index >= self._remembering
        return self._wide if whole or bucket.dtype == torch.float64 else self._wire

    def _sent_bytes(self, chosen: Iterable[tuple[int, Bucket]]) -> int:
        return sum(
            self._wire_of(i, b).sent_bytes(b.numel, _staging(b)[1].itemsize) for i, b in chosen
        )

    def _memory(self, fragment: int | None) -> list[Tensor]:
        if fragment is None:
            return list(self.plan.spans)
        return [v for _, b in self._chosen(fragment) for v in self.plan.views(b)]

    def _chosen(self, fragment: int | None) -> list[tuple[int, Bucket]]:
        return [
            (i, b)
            for i, b in enumerate(self.plan.buckets)
            if fragment is None or self._fragment_of[i] == fragment
        ]

    def _check(self, included: Sequence[bool], fragment: int | None) -> list[tuple[int, Bucket]]:
        """The buckets to average; errors, the same on every rank, before anything is written."""
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
        if self.replicas.size == 1:
            return []
        self._agree_on_plan()
        return self._chosen(fragment)

    def _agree_on_plan(self) -> None:
        """Once: a hang or a wrong mean becomes an error that names the first difference."""
        if self._checked:
            return
        n, group = self.replicas.size, self.replicas.connected()
        sent = torch.frombuffer(bytearray(self.plan.fingerprint), dtype=torch.uint8)
        sent = sent.to(self.device)
        rows = [torch.empty_like(sent) for _ in range(n)]
        dist.all_gather(rows, sent, group=group)
        if any(not torch.equal(row, rows[0]) for row in rows):
            layouts: list[tuple[tuple[str, ...], str]] = [((), "")] * n
            dist.all_gather_object(layouts, (self.plan.layout, self.plan.settings), group=group)
            raise ValueError(_first_difference(layouts))
        self._checked = True

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """On CUDA: inside, work goes to a stream of its own."""
        if self.device.type != "cuda":
            yield None
            return
        stream = self._streams.setdefault(self.device, torch.cuda.Stream(self.device))
        with torch.cuda.stream(stream):
            yield stream

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """The same, after what is queued now and before what is queued next: by events, with no
        device-wide synchronisation."""
        current = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        with self._own_stream() as stream:
            if stream is not None and current is not None:
                stream.wait_stream(current)
            yield
        if stream is not None and current is not None:
            current.wait_stream(stream)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next converge builds on, by bucket. The last converged points and the outer
        momenta are equal on all replicas; the residuals of the int8 wire are each replica's own.
        """
        return {
            "points": dict(self._points),
            "momenta": dict(self._momenta),
            "residuals": dict(self._residuals),
        }

    def forget_residuals(self) -> None:
        """Start the int8 wire's error feedback anew: what a checkpoint for all replicas does."""
        self._residuals.clear()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another run's converges, with the same tensors and caps."""
        for name in ("points", "momenta", "residuals"):
            for index, saved in state.get(name, {}).items():
                bucket = self.plan.buckets[index] if index < len(self.plan.buckets) else None
                if bucket is None or saved.numel() != bucket.numel:
                    raise ValueError(
                        f"the state's bucket {index} has {saved.numel()} elements and this plan's "
                        f"{bucket.numel if bucket else 0}: keep the model and bucket_bytes"
                    )
                getattr(self, f"_{name}")[index] = saved.to(bucket.device, copy=True)


class Pending:
    """An averaging under way in the background, from a copy of the tensors at its start."""

    def __init__(
        self, converge: Converge, chosen: list[tuple[int, Bucket]], included: Sequence[bool]
    ) -> None:
        self.converge = converge
        self.chosen = chosen
        self.included = tuple(included)
        self._error: BaseException | None = None
        self._begin = time.perf_counter()
        self._copies = [self._start(i, b) for i, b in chosen]
        converge._drop_snapshot()
        self._device = converge.device
        self._ready = torch.cuda.Event() if self._device.type == "cuda" else None
        if self._ready is not None:
            self._ready.record()
        self._thread = threading.Thread(target=self._work, name="hdet-converge", daemon=True)
        self._thread.start()

    def _start(self, index: int, bucket: Bucket) -> Tensor:
        taken = self.converge._snapshot.pop(index, None)
        if taken is not None:
            return taken
        flat = self.converge._shelf.borrow(*_staging(bucket))
        return self.converge._stages[index].gather(flat)

    def _work(self) -> None:
        try:
            # A thread starts on the default stream, where training may run: only the side stream.
            with torch.no_grad(), self.converge._own_stream():
                if self._ready is not None:
                    self._ready.wait(torch.cuda.current_stream(self._device))
                self.converge._fly(
                    (i, b, self._flight(i, b, copy))
                    for (i, b), copy in zip(self.chosen, self._copies, strict=True)
                )
                if self._ready is not None:
                    self._ready.record()
        except BaseException as error:
            self._error = error

    def _flight(self, index: int, bucket: Bucket, start: Tensor) -> Flight:
        """start <- mean - start: what the fold adds. A replica left out takes the mean."""
        shelf = self.converge._shelf
        mean = shelf.borrow(*_staging(bucket)).copy_(start)
        yield from self.converge._mean(index, bucket, mean, self.included)
        if self.included[self.converge.replicas.rank]:
            torch.sub(mean, start, out=start)
        else:
            start.copy_(mean)
        shelf.give_back(mean)

    def discard(self) -> None:
        """Wait for the averaging and forget it: another state has been loaded."""
        self._thread.join()

    @torch.no_grad()
    def finish(self) -> Outcome:
        """Wait for the averaging and fold it into the tensors."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._ready is not None:
            self._ready.wait(torch.cuda.current_stream(self._device))
        mine = self.included[self.converge.replicas.rank]
        for (_, bucket), correction in zip(self.chosen, self._copies, strict=True):
            views = self.converge.plan.views(bucket)
            for view, part in zip(views, correction.split([v.numel() for v in views]), strict=True):
                view.add_(part) if mine else view.copy_(part)
            self.converge._shelf.give_back(correction)
        sent = self.converge._sent_bytes(self.chosen)
        return Outcome(self.included, time.perf_counter() - self._begin, sent)


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local memory of each tensor, a tensor listed twice only once."""
    return [local(t) for t in {id(t): t for t in tensors}.values()]


def outer_step(flat: Tensor, point: Tensor, momentum: Tensor, outer: OuterStep) -> None:
    """flat <- point + lr (delta + mu u) with u <- mu u + delta, delta = flat - point."""
    delta = flat.sub_(point)
    momentum.mul_(outer.momentum).add_(delta)
    delta.add_(momentum, alpha=outer.momentum).mul_(outer.lr).add_(point)


_LANDED = object()
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _wide_wire(replicas: Replicas, device: torch.device) -> Wire:
    """For full precision: the backend's all-reduce; on gloo only where it rounds once. Meta
    tensors are planned as on a GPU."""
    native = device.type == "meta" or (
        device.type == "cuda"
        and replicas.group is not None
        and "nccl" in str(dist.get_backend(replicas.group))
    )
    if native or replicas.size <= 2:
        return AllReduce(replicas, native_average=native)
    return Exact(replicas)


def with_own_group(replicas: Replicas) -> Replicas:
    """The same replicas behind a process group of their own; collective over the group."""
    if replicas.size == 1:
        return replicas
    ranks = dist.get_process_group_ranks(replicas.connected())
    group = dist.new_group(ranks, use_local_synchronization=True)
    return dataclasses.replace(replicas, group=group)


def _fragment_of(buckets: Sequence[Bucket], fragments: int) -> list[int]:
    """The part that each bucket belongs to: contiguous, equal in elements as far as can be."""
    total, seen, parts = max(1, sum(b.numel for b in buckets)), 0, []
    for b in buckets:
        middle = seen + b.numel // 2
        parts.append(min(fragments - 1, fragments * middle // total))
        seen += b.numel
    return parts


def _staging(bucket: Bucket) -> tuple[int, torch.dtype, torch.device]:
    wide = torch.float64 if bucket.dtype == torch.float64 else torch.float32
    return bucket.numel, wide, bucket.device


def _lies_flat(bucket: Bucket) -> bool:
    """True when the bucket is one run of memory in the type that is summed: no copy is needed."""
    return len(bucket.pieces) == 1 and bucket.dtype in (torch.float32, torch.float64)


def _summed(view: Tensor) -> torch.dtype:
    return torch.float64 if view.dtype == torch.float64 else torch.float32


def _land_one(airborne: deque[tuple[bool, Flight]]) -> None:
    """Land the oldest. Where it has a second leg, the others fly on to theirs meanwhile."""
    oldest = airborne[0]
    while oldest in airborne:
        for plane in list(airborne):
            if next(plane[1], _LANDED) is _LANDED:
                airborne.remove(plane)
                break


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
