"""An averaging in the background, folded in while the tensors have moved on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.converge.flights import Flights
from hdet_scale.converge.full_precision import Exact
from hdet_scale.converge.overlap import Pending
from hdet_scale.converge.pipeline import Converge
from hdet_scale.converge.remembered import Memory
from hdet_scale.converge.shelf import Shelf
from hdet_scale.converge.side_stream import SideStream
from hdet_scale.converge.wire_interface import Flight
from hdet_scale.converge.wires import WIRES
from tests.support.averaging import CAP, mean_of, tensors_of


def _overlapped(rank: int, size: int, bad: int | None) -> tuple[list[Tensor], list[Tensor]]:
    tensors = tensors_of(rank)
    if rank == bad:
        tensors[0][0, 0] = float("inf")
    converge = Converge(tensors, Replicas.world(), CAP, background=True)
    included = [r != bad for r in range(size)]
    pending = converge.start(included)
    moves = tensors_of(rank, 1)
    for t, move in zip(tensors, moves, strict=True):
        t.add_(move)
    pending.finish()
    return tensors, moves


@pytest.mark.parametrize("bad", [None, 0], ids=["all", "one left out"])
@pytest.mark.parametrize("size", [2, 3])
def test_overlap_folds_in_mean_minus_start(fleets: Any, size: int, bad: int | None) -> None:
    """theta <- theta_now + (mean - theta_at_start); a replica left out takes the mean."""
    results = fleets(size).run(_overlapped, bad)
    mean = mean_of([tensors_of(r) for r in range(size) if r != bad])
    for rank, (tensors, moves) in enumerate(results):
        moved = [torch.zeros_like(m) for m in moves] if rank == bad else moves
        exact = [m + move.double() for m, move in zip(mean, moved, strict=True)]
        for actual, wanted in zip(tensors, exact, strict=True):
            torch.testing.assert_close(actual.double(), wanted, rtol=1e-6, atol=1e-6)


# -- who runs the flights, and when their memory is free -------------------------------------------


class Named(Exact):
    """The fp32 wire, which notes the thread that runs each flight."""

    threads: list[str]

    @classmethod
    def build(cls, replicas: Replicas, device: torch.device) -> Named:
        return cls(replicas)

    def flight(self, flat: Tensor, included: Sequence[bool], memory: Memory | None) -> Flight:
        Named.threads.append(threading.current_thread().name)
        yield from super().flight(flat, included, memory)
        Named.threads.append(threading.current_thread().name)


class Queued(SideStream):
    """A side stream that answers as one on CUDA: work is queued by the thread that calls."""

    enqueues = True


def _run_by(rank: int, size: int, queued: bool) -> tuple[list[Tensor], set[str], list[str]]:
    WIRES["named"] = Named
    Named.threads = []
    try:
        tensors = tensors_of(rank)
        converge = Converge(tensors, Replicas.world(), CAP, wire="named", background=True)
        flights: Flights = converge._flights
        if queued:
            flights.stream = Queued(flights.device)
        pending = converge.start([True] * size)
        alive = [t.name for t in threading.enumerate() if t.name == "hdet-converge" and queued]
        for t in tensors:
            t.add_(1.0)
        pending.finish()
        return tensors, set(Named.threads), alive
    finally:
        del WIRES["named"]


def test_where_work_is_queued_no_second_thread_enters_a_collective(trio: Any) -> None:
    """Two threads of a rank have no common order, which two communicators of NCCL need."""
    threaded, queued = trio.run(_run_by, False), trio.run(_run_by, True)
    for (ours, names, alive), (theirs, others, _) in zip(queued, threaded, strict=True):
        assert names == {"MainThread"}
        assert alive == []
        assert others == {"hdet-converge"}
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Noting(Shelf):
    """Notes what is given back, among the other events."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def give_back(self, *buffers: Tensor) -> None:
        self.events += ["given back"] * len(buffers)
        super().give_back(*buffers)


def _discarded(rank: int, size: int) -> tuple[list[str], int, int, list[Tensor]]:
    """The events of a discard; bytes kept by it and by a finish; the tensors, as they were."""

    class Joined(Queued):
        def join(self) -> None:
            events.append("joined")

    events: list[str] = []
    tensors = tensors_of(rank)
    converge = Converge(tensors, Replicas.world(), CAP, background=True)
    flights: Flights = converge._flights
    flights.stream, flights.shelf = Joined(flights.device), Noting(events)
    finished: Pending = converge.start([True] * size)
    finished.finish()
    kept = converge.staging_bytes
    for t, mine in zip(tensors, tensors_of(rank), strict=True):
        t.copy_(mine)
    pending = converge.start([True] * size)
    events.clear()
    pending.discard()
    return events, converge.staging_bytes, kept, tensors


def test_a_discard_waits_for_the_side_stream_before_it_frees(fleets: Any) -> None:
    """Freed before, the copies would be another's memory while the side stream writes to them."""
    for rank, (events, kept, before, tensors) in enumerate(fleets(2).run(_discarded)):
        assert events[0] == "joined"
        assert set(events[1:]) == {"given back"}
        assert len(events) > 2
        assert kept == before
        assert all(torch.equal(a, b) for a, b in zip(tensors, tensors_of(rank), strict=True))
