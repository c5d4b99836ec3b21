"""The bf16 wire: half the bytes of fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_scale.converge.peers import blocks, included_rows, post, wait
from hdet_scale.converge.remembered import Memory
from hdet_scale.converge.wire_interface import Flight, Wire
from hdet_scale.kernels.choice import on_kernels


class Bf16(Wire):
    """bf16 on the wire, sums in fp32, the mean of the rounded values.

    Every replica's value is rounded to bf16 (2^-9 relative) before the mean, this rank's own
    too, so that all have the same bits. From three replicas on the mean is rounded once more.
    """

    def flight(self, flat: Tensor, included: Sequence[bool], memory: Memory | None) -> Flight:
        return self._pair(flat, included) if self.replicas.size == 2 else self._many(flat, included)

    def _pair(self, flat: Tensor, included: Sequence[bool]) -> Flight:
        rows, me = self._rows(2, flat), self.replicas.rank
        rows[me].copy_(flat)
        works = post(self.replicas, sends=[rows[me]] * 2, receives=list(rows))
        yield
        wait(works)
        mean_into(flat, rows, included, flat)
        self.shelf.give_back(rows)

    def _many(self, flat: Tensor, included: Sequence[bool]) -> Flight:
        n, me = self.replicas.size, self.replicas.rank
        sent = self.shelf.borrow(flat.numel(), torch.bfloat16, flat.device)
        sent.copy_(flat)
        segments, mine = list(sent.tensor_split(n)), flat.tensor_split(n)[me]
        rows = self._rows(n, mine)
        works = post(self.replicas, sends=segments, receives=list(rows))
        yield
        wait(works)
        rows[me].copy_(segments[me])
        mean_into(segments[me], rows, included, mine)
        works = post(self.replicas, sends=[segments[me]] * n, receives=segments)
        yield
        wait(works)
        flat.copy_(sent)
        self.shelf.give_back(sent, rows)

    def _rows(self, n: int, like: Tensor) -> Tensor:
        """A table of bf16 rows as long as `like`, each aligned to 128 bits."""
        stride = _padded(like.numel())
        table = self.shelf.borrow(n * stride, torch.bfloat16, like.device)
        return table.view(n, stride)[:, : like.numel()]

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        return super().sent_bytes(numel, torch.bfloat16.itemsize)

    def buffer_bytes(self, numel: int, itemsize: int) -> int:
        """One bucket sent and one received."""
        n = self.replicas.size
        elements = 2 * _padded(numel) if n == 2 else numel + n * _padded(-(-numel // n))
        return torch.bfloat16.itemsize * elements


def mean_into(out: Tensor, rows: Tensor, included: Sequence[bool], total: Tensor) -> None:
    """The mean of the included 16-bit rows in fp32, summed in the order of the replicas.

    Args:
        out: overwritten.
        rows: a replica a row.
        included: one flag for each row.
        total: fp32, as long as `out`, which it may be; where a CPU forms the sum.
    """
    if on_kernels(out):
        from hdet_scale.kernels.row_mean import row_mean

        row_mean(rows, included, out)
        return
    for into, acc, first, *others in blocks([out, total, *included_rows(list(rows), included)]):
        acc.copy_(first)
        for row in others:
            acc.add_(row)
        acc.mul_(1.0 / sum(included))
        if into.data_ptr() != acc.data_ptr():
            into.copy_(acc)


def _padded(numel: int) -> int:
    return 8 * -(-numel // 8)
