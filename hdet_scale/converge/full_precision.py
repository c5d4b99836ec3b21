"""The fp32 wire: the backend's all-reduce where it rounds once, else an exact sum.

Buckets of float64 go over this wire too, whatever wire was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.converge.costs import AllReduceCost, Cost
from hdet_scale.converge.groups import backends_of
from hdet_scale.converge.peers import blocks, included_rows, post, rows_of, wait
from hdet_scale.converge.remembered import Memory
from hdet_scale.converge.wire_interface import Flight, Wire
from hdet_scale.topology import Replicas


class FullPrecision(Wire):
    """Sends elements as they are; `build` chooses between the two ways to sum them."""

    @classmethod
    def build(cls, replicas: Replicas, device: torch.device) -> Wire:
        """The backend's all-reduce on NCCL; on gloo only for two replicas, where it rounds once.
        Meta tensors are planned as on a GPU."""
        native = device.type == "meta" or (
            device.type == "cuda"
            and replicas.group is not None
            and backends_of(replicas.group).get("cuda") == "nccl"
        )
        if native or replicas.size <= 2:
            return AllReduce(replicas, native_average=native)
        return Exact(replicas)


class AllReduce(FullPrecision):
    """The backend's own all-reduce, where the bucket lies."""

    in_place = True

    def __init__(self, replicas: Replicas, *, native_average: bool) -> None:
        super().__init__(replicas)
        self.native_average = native_average

    def flight(self, flat: Tensor, included: Sequence[bool], memory: Memory | None) -> Flight:
        if not included[self.replicas.rank]:
            flat.zero_()
        native = self.native_average and all(included)
        if not native:
            # Before the sum, which then cannot overflow; exact for two replicas.
            flat.mul_(1.0 / sum(included))
        op = dist.ReduceOp.AVG if native else dist.ReduceOp.SUM
        work = dist.all_reduce(flat, op=op, group=self.replicas.group, async_op=True)
        yield
        work.wait()

    def cost(self, numel: int, itemsize: int, all_reduce: AllReduceCost) -> Cost:
        return all_reduce(self.replicas.size, numel * itemsize)


class Exact(FullPrecision):
    """Segments summed in float64 by their owner and rounded once."""

    def flight(self, flat: Tensor, included: Sequence[bool], memory: Memory | None) -> Flight:
        n, me = self.replicas.size, self.replicas.rank
        segments = list(flat.tensor_split(n))
        mine = segments[me]
        received = self.shelf.borrow(n * mine.numel(), flat.dtype, flat.device)
        rows = rows_of(received, n, mine.numel())
        works = post(self.replicas, sends=segments, receives=rows)
        yield
        wait(works)
        rows[me].copy_(mine)
        for block in blocks([mine, *included_rows(rows, included)]):
            out, first, *others = block
            total = first.double()
            for row in others:
                total.add_(row)
            out.copy_(total.div_(sum(included)))
        works = post(self.replicas, sends=[mine] * n, receives=segments)
        yield
        wait(works)
        self.shelf.give_back(received)

    def bucket_cap(self, cap: int, device: torch.device) -> int:
        """Half: it receives as much as is staged, and both together must stay below the cap."""
        return max(1, cap // 2)

    def buffer_bytes(self, numel: int, itemsize: int) -> int:
        return numel * itemsize
