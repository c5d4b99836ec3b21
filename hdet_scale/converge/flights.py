"""Flights: the means of the buckets, several under way at once.

A flight is a generator that yields each time before it has to wait for a transfer. `run` starts the
next one before the oldest has ended: up to IN_FLIGHT of those that need no buffer, and two of those
that do, so that one is copied while the other is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hdet_scale.converge.buckets import Plan
from hdet_scale.converge.clock import Clock
from hdet_scale.converge.outer import outer_step
from hdet_scale.converge.remembered import Remembered
from hdet_scale.converge.shelf import Shelf
from hdet_scale.converge.side_stream import SideStream
from hdet_scale.converge.staging import StagedBucket
from hdet_scale.converge.transfers import Transfer
from hdet_scale.converge.wire_interface import Flight, Wire
from hdet_scale.topology import Replicas

IN_FLIGHT = 8
"""Transfers from memory that needs no staging: enough to hide their latency."""
BUFFERED_IN_FLIGHT = 2

_ENDED = object()


def must_wait(under_way: Sequence[bool], buffered: bool) -> bool:
    """Whether the oldest flight has to end before another may start.

    Args:
        under_way: for each flight under way, whether it needs a buffer.
        buffered: whether the next one does.
    """
    return len(under_way) >= IN_FLIGHT or (buffered and sum(under_way) >= BUFFERED_IN_FLIGHT)


class Flights:
    """Averages buckets over the wires of their transfers, and keeps what the next converge needs.

    Args:
        plan: the buckets and their memory.
        transfers: what to do with each bucket of the plan, in its order.
        replicas: who takes part.
        full_precision: the wire of a bucket's first mean, where its own wire sends differences.
        device: where the tensors lie.
    """

    def __init__(
        self,
        plan: Plan,
        transfers: Sequence[Transfer],
        replicas: Replicas,
        full_precision: Wire,
        device: torch.device,
    ) -> None:
        self.replicas = replicas
        self.device = device
        self.stream = SideStream(device)
        self.clock = Clock.of(device)
        self.shelf = Shelf()
        self.remembered = Remembered()
        self._full_precision = full_precision
        self._staged = [StagedBucket(plan.views(t.bucket)) for t in transfers]
        self._copies: dict[int, Tensor] = {}

    def average(self, transfers: Iterable[Transfer], included: Sequence[bool]) -> None:
        """Replace the tensors by the mean over the included replicas."""
        self.drop_copies()
        with self.stream.in_order():
            self.run((t, self.flight(t, included)) for t in transfers)

    def run(self, flights: Iterable[tuple[Transfer, Flight]]) -> None:
        """Run flights to their end, the next started before the oldest has ended."""
        under_way: deque[tuple[bool, Flight]] = deque()
        for transfer, flight in flights:
            while must_wait([buffered for buffered, _ in under_way], transfer.buffered):
                _end_one(under_way)
            next(flight)
            under_way.append((transfer.buffered, flight))
        while under_way:
            _end_one(under_way)

    def flight(self, transfer: Transfer, included: Sequence[bool]) -> Flight:
        """One bucket: gathered unless it lies flat, averaged, scattered."""
        staged = self._staged[transfer.index]
        if not transfer.staged:
            yield from self.mean(transfer, staged.views[0], included)
            return
        flat = staged.gather(self.borrow(transfer))
        yield from self.mean(transfer, flat, included)
        staged.scatter(flat)
        self.shelf.give_back(flat)

    def mean(self, transfer: Transfer, flat: Tensor, included: Sequence[bool]) -> Flight:
        """The mean of a flat bucket in place, with the outer step and what is remembered."""
        index, wire, kept = transfer.index, transfer.wire, self.remembered
        moves = wire.moves_point and transfer.outer is None
        memory = kept.memory(index, moves=moves) if wire.remembers else None
        if wire.remembers and memory is None:
            wire = self._full_precision  # the first mean sets the point
        yield from wire.flight(flat, included, memory)
        if transfer.outer is not None and index in kept.points:
            outer_step(flat, kept.points[index], kept.momentum(index), transfer.outer)
        if transfer.keeps_point and not (moves and memory is not None):
            kept.set_point(index, flat)

    def borrow(self, transfer: Transfer) -> Tensor:
        """A staging buffer for a bucket."""
        return self.shelf.borrow(transfer.elements, transfer.dtype, transfer.bucket.device)

    # -- copies of the tensors, for an averaging in the background ------------------------------

    def copy_checked(self, transfers: Iterable[Transfer]) -> list[Tensor]:
        """Copy the buckets for the `take_copies` that follows.

        Returns:
            A scalar for each bucket that is finite where all of its elements are.
        """
        self.drop_copies()
        self.stream.join()  # a buffer that was given back there may be in use until then
        found = []
        for t in transfers:
            self._copies[t.index] = self.borrow(t)
            found.append(self._staged[t.index].gather_checked(self._copies[t.index]))
        return found

    def take_copies(self, transfers: Iterable[Transfer]) -> list[Tensor]:
        """Copies of the buckets: those of `copy_checked`, or made now."""
        taken = []
        self.stream.join()
        for t in transfers:
            copy = self._copies.pop(t.index, None)
            taken.append(self._staged[t.index].gather(self.borrow(t)) if copy is None else copy)
        self.drop_copies()
        return taken

    def drop_copies(self) -> None:
        """Give back the copies that nothing has taken."""
        self.shelf.give_back(*self._copies.values())
        self._copies = {}

    def fold(self, transfer: Transfer, result: Tensor, *, replace: bool) -> None:
        """Add a flat result to the tensors of a bucket, or replace them by it."""
        staged = self._staged[transfer.index]
        staged.scatter(result) if replace else staged.add(result)


def _end_one(under_way: deque[tuple[bool, Flight]]) -> None:
    """End the oldest. Where it has a second leg, the others go on to theirs meanwhile."""
    oldest = under_way[0]
    while oldest in under_way:
        for one in list(under_way):
            if next(one[1], _ENDED) is _ENDED:
                under_way.remove(one)
                break
