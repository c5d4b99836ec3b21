"""Overlap: an averaging in the background, while training goes on.

    theta <- theta_now + (mean - theta_at_start)

The flights run over copies of the tensors; `finish` folds the result in. A replica that is left out
takes the mean as it is.

On CUDA the calling thread queues the flights on the side stream and goes on. No second thread may:
NCCL can deadlock where two communicators are launched in an order that differs between ranks, and
two threads have no common order. On a CPU, where a flight waits for its transfers, a thread runs
them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.converge.flights import Flights
from hdet_scale.converge.groups import backends_of, background_options
from hdet_scale.converge.transfers import Outcome, Transfer
from hdet_scale.converge.wire_interface import Flight
from hdet_scale.topology import Replicas


def with_own_group(replicas: Replicas) -> Replicas:
    """The same replicas behind a process group of their own, which the training step does not use
    and which leaves it most of a GPU. Collective over the group."""
    if replicas.size == 1:
        return replicas
    ranks = dist.get_process_group_ranks(replicas.connected())
    options = background_options(backends_of(replicas.connected()))
    group = dist.new_group(
        ranks,
        use_local_synchronization=True,
        pg_options=options,
        timeout=None if options is None else options._timeout,
    )
    return dataclasses.replace(replicas, group=group)


class Pending:
    """An averaging under way in the background, from a copy of the tensors at its start."""

    def __init__(
        self, flights: Flights, transfers: Sequence[Transfer], included: Sequence[bool]
    ) -> None:
        self.included = tuple(included)
        self._flights = flights
        self._transfers = transfers
        self._left_out = not self.included[flights.replicas.rank]
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._begin = flights.clock.begin()
        self._copies = flights.take_copies(transfers)
        if flights.stream.enqueues:
            with flights.stream.behind():
                self._average()
        else:
            self._thread = threading.Thread(target=self._work, name="hdet-converge", daemon=True)
            self._thread.start()

    @torch.no_grad()
    def _average(self) -> None:
        self._flights.run(
            (t, self._flight(t, copy))
            for t, copy in zip(self._transfers, self._copies, strict=True)
        )

    def _work(self) -> None:
        try:
            self._average()
        except BaseException as error:
            self._error = error

    def _join(self) -> None:
        """Wait for the thread; let the current stream wait for the side stream."""
        if self._thread is not None:
            self._thread.join()
        self._flights.stream.join()

    def _flight(self, transfer: Transfer, start: Tensor) -> Flight:
        """start <- mean - start: what the fold adds. A replica left out takes the mean."""
        mean = self._flights.borrow(transfer).copy_(start)
        yield from self._flights.mean(transfer, mean, self.included)
        if self._left_out:
            start.copy_(mean)
        else:
            torch.sub(mean, start, out=start)
        self._flights.shelf.give_back(mean)

    def discard(self) -> None:
        """Wait for the averaging and drop its result: another state has been loaded.

        The side stream writes to the copies until it is done: given back before, they would be
        another's memory.
        """
        self._join()
        self._flights.shelf.give_back(*self._copies)

    @torch.no_grad()
    def finish(self) -> Outcome:
        """Wait for the averaging and fold it into the tensors.

        Raises:
            BaseException: what the thread raised, if it did; the tensors are as they were.
        """
        self._join()
        if self._error is not None:
            raise self._error
        for transfer, result in zip(self._transfers, self._copies, strict=True):
            self._flights.fold(transfer, result, replace=self._left_out)
            self._flights.shelf.give_back(result)
        sent = sum(t.sent_bytes for t in self._transfers)
        return Outcome(self.included, self._flights.clock.end(self._begin), sent)
