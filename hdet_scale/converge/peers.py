"""Peers: point-to-point transfers between replicas, and sums over what was received.

Two replicas send each other the whole bucket, which is no more than a ring all-reduce moves, in
one trip instead of two. From three on, rank j owns segment j: all send it theirs, it forms the
mean and sends it to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from hdet_scale.converge.int8 import CACHED
from hdet_scale.topology import Replicas


def post(
    replicas: Replicas, *, sends: Sequence[Tensor], receives: Sequence[Tensor]
) -> list[dist.Work]:
    """Post sends[r] to replica r and receives[r] from it, for every other replica at once."""
    group, n, me = replicas.connected(), replicas.size, replicas.rank
    ops: list[dist.P2POp] = []
    for step in range(1, n):
        to, source = (me + step) % n, (me - step) % n
        if sends[to].numel():
            ops.append(dist.P2POp(dist.isend, sends[to], group=group, group_peer=to))
        if receives[source].numel():
            ops.append(dist.P2POp(dist.irecv, receives[source], group=group, group_peer=source))
    return dist.batch_isend_irecv(ops) if ops else []


def wait(works: Iterable[dist.Work]) -> None:
    """Wait for all."""
    for work in works:
        work.wait()


def rows_of(received: Tensor, n: int, length: int) -> list[Tensor]:
    """A flat buffer as n rows of `length` elements."""
    return [received[i * length : (i + 1) * length] for i in range(n)]


def included_rows(rows: Sequence[Tensor], included: Sequence[bool]) -> list[Tensor]:
    """The rows of the replicas that are in the mean."""
    return [row for row, wanted in zip(rows, included, strict=True) if wanted]


def blocks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Equally long flat tensors, on a CPU cut alike into blocks that fit the cache."""
    length = CACHED if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    yield from (
        list(b) for b in zip(*(t.split(length) for t in tensors), strict=True) if b[0].numel()
    )
