"""The bf16 wire: half the bytes of fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_scale.converge.peers import blocks, included_rows, post, rows_of, wait
from hdet_scale.converge.remembered import Memory
from hdet_scale.converge.wire_interface import Flight, Wire


class Bf16(Wire):
    """bf16 on the wire, sums in fp32, the mean of the rounded values.

    Every replica's value is rounded to bf16 (2^-9 relative) before the mean, this rank's own
    too, so that all have the same bits. From three replicas on the mean is rounded once more.
    """

    def flight(self, flat: Tensor, included: Sequence[bool], memory: Memory | None) -> Flight:
        return self._pair(flat, included) if self.replicas.size == 2 else self._many(flat, included)

    def _pair(self, flat: Tensor, included: Sequence[bool]) -> Flight:
        mine = self.shelf.borrow(flat.numel(), torch.bfloat16, flat.device)
        theirs = self.shelf.borrow(flat.numel(), torch.bfloat16, flat.device)
        mine.copy_(flat)
        rows = [mine, theirs] if self.replicas.rank == 0 else [theirs, mine]
        works = post(self.replicas, sends=[mine, mine], receives=rows)
        yield
        wait(works)
        mean_into(flat, included_rows(rows, included))
        self.shelf.give_back(mine, theirs)

    def _many(self, flat: Tensor, included: Sequence[bool]) -> Flight:
        n, me = self.replicas.size, self.replicas.rank
        sent = self.shelf.borrow(flat.numel(), torch.bfloat16, flat.device)
        sent.copy_(flat)
        segments = list(sent.tensor_split(n))
        received = self.shelf.borrow(n * segments[me].numel(), torch.bfloat16, flat.device)
        rows = rows_of(received, n, segments[me].numel())
        works = post(self.replicas, sends=segments, receives=rows)
        yield
        wait(works)
        rows[me].copy_(segments[me])
        mean = flat.tensor_split(n)[me]
        mean_into(mean, included_rows(rows, included))
        segments[me].copy_(mean)
        works = post(self.replicas, sends=[segments[me]] * n, receives=segments)
        yield
        wait(works)
        flat.copy_(sent)
        self.shelf.give_back(sent, received)

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        return super().sent_bytes(numel, torch.bfloat16.itemsize)

    def buffer_bytes(self, numel: int, itemsize: int) -> int:
        """One bucket sent and one received."""
        return 2 * torch.bfloat16.itemsize * numel


def mean_into(out: Tensor, rows: Sequence[Tensor]) -> None:
    """The mean of 16-bit rows in fp32, summed in the order of the replicas."""
    for block in blocks([out, *rows]):
        total, first, *others = block
        total.copy_(first)
        for row in others:
            total.add_(row)
        total.mul_(1.0 / len(rows))
