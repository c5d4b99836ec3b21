"""Overlap: an averaging in the background, while training goes on.

    theta <- theta_now + (mean - theta_at_start)

A thread runs the flights over copies of the tensors; `finish` folds the result in. A replica that
is left out takes the mean as it is.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.converge.flights import Flights
from hdet_scale.converge.transfers import Outcome, Transfer
from hdet_scale.converge.wire_interface import Flight
from hdet_scale.topology import Replicas


def with_own_group(replicas: Replicas) -> Replicas:
    """The same replicas behind a process group of their own, which the training step does not use.
    Collective over the group."""
    if replicas.size == 1:
        return replicas
    ranks = dist.get_process_group_ranks(replicas.connected())
    group = dist.new_group(ranks, use_local_synchronization=True)
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
        self._begin = time.perf_counter()
        self._copies = flights.take_copies(transfers)
        self._ready = torch.cuda.Event() if flights.device.type == "cuda" else None
        if self._ready is not None:
            self._ready.record()
        self._thread = threading.Thread(target=self._work, name="hdet-converge", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            # A thread starts on the default stream, where training may run: only the side stream.
            with torch.no_grad(), self._flights.stream.alone():
                self._wait_for_device()
                self._flights.run(
                    (t, self._flight(t, copy))
                    for t, copy in zip(self._transfers, self._copies, strict=True)
                )
                if self._ready is not None:
                    self._ready.record()
        except BaseException as error:
            self._error = error

    def _wait_for_device(self) -> None:
        """Let the current stream wait for what was recorded last; the host goes on."""
        if self._ready is not None:
            self._ready.wait(torch.cuda.current_stream(self._flights.device))

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
        """Wait for the averaging and drop its result: another state has been loaded."""
        self._thread.join()

    @torch.no_grad()
    def finish(self) -> Outcome:
        """Wait for the averaging and fold it into the tensors.

        Raises:
            BaseException: what the thread raised, if it did; the tensors are as they were.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._wait_for_device()
        for transfer, result in zip(self._transfers, self._copies, strict=True):
            self._flights.fold(transfer, result, replace=self._left_out)
            self._flights.shelf.give_back(result)
        sent = sum(t.sent_bytes for t in self._transfers)
        return Outcome(self.included, time.perf_counter() - self._begin, sent)
