"""Wires: how the mean of one bucket is formed from what the replicas hold.

A wire's `flight` is a generator: it posts a transfer and yields, each time before it has to wait;
run to its end it leaves the mean of the included replicas in the flat tensor that it was given, the
same bits on every rank. Converge keeps several flights in the air.

| wire | bytes an element | extra memory | error of the mean |
|---|---|---|---|
| AllReduce | 2 (N-1)/N x 4 | none | the backend's summation |
| Exact | 2 (N-1)/N x 4 | one bucket received | rounded once |
| Bf16 | 2 (N-1)/N x 2 | one bucket sent, one received, in bf16 | 2^-9 relative |
| Int8 | N = 2: 1; else (N-1)/N x 3 | last converged point and residual, fp32 each | fed back |

Two replicas send each other the whole bucket, which is no more than a ring all-reduce moves, in
one trip instead of two. From three on, rank j owns segment j: all send it theirs, it forms the
mean and sends it to all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.converge.int8 import CACHED, Codec, Memory, message_bytes
from hdet_scale.topology import Replicas

Flight = Generator[None, None, None]


class Shelf:
    """Buffers that live on: the first touch of fresh memory costs more than a copy into it."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], deque[Tensor]] = {}

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The smallest kept buffer that is large enough, or a new one."""
        free = self._free.setdefault((dtype, device), deque())
        fits = sorted((b.numel(), i) for i, b in enumerate(free) if b.numel() >= numel)
        if not fits:
            return torch.empty(numel, dtype=dtype, device=device)
        buffer = free[fits[0][1]]
        del free[fits[0][1]]
        return buffer[:numel]

    def give_back(self, *buffers: Tensor) -> None:
        """Keep the whole storage behind each for the next flight."""
        for b in buffers:
            whole = b.as_strided((b.untyped_storage().nbytes() // b.itemsize,), (1,), 0)
            self._free[b.dtype, b.device].append(whole)

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return sum(b.nbytes for free in self._free.values() for b in free)


class Wire:
    """Shared by all: who takes part, and buffers that are kept."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.shelf = Shelf()

    def flight(self, flat: Tensor, included: Sequence[bool], memory: Memory | None) -> Flight:
        """Form the mean of the included replicas' `flat` in place."""
        raise NotImplementedError

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes that this rank puts on the wire for a bucket."""
        n = self.replicas.size
        return numel * itemsize * 2 * (n - 1) // n


class AllReduce(Wire):
    """The backend's own all-reduce, where the bucket lies."""

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


class Exact(Wire):
    """Segments summed in float64 by their owner and rounded once."""

    def flight(self, flat: Tensor, included: Sequence[bool], memory: Memory | None) -> Flight:
        n, me = self.replicas.size, self.replicas.rank
        segments = list(flat.tensor_split(n))
        mine = segments[me]
        received = self.shelf.borrow(n * mine.numel(), flat.dtype, flat.device)
        rows = _rows(received, n, mine.numel())
        works = post(self.replicas, sends=segments, receives=rows)
        yield
        wait(works)
        rows[me].copy_(mine)
        for block in _blocks([mine, *_chosen(rows, included)]):
            out, first, *others = block
            total = first.double()
            for row in others:
                total.add_(row)
            out.copy_(total.div_(sum(included)))
        works = post(self.replicas, sends=[mine] * n, receives=segments)
        yield
        wait(works)
        self.shelf.give_back(received)


class Bf16(Wire):
    """Half the bytes: bf16 on the wire, sums in fp32, the mean of the rounded values.

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
        mean_into(flat, _chosen(rows, included))
        self.shelf.give_back(mine, theirs)

    def _many(self, flat: Tensor, included: Sequence[bool]) -> Flight:
        n, me = self.replicas.size, self.replicas.rank
        sent = self.shelf.borrow(flat.numel(), torch.bfloat16, flat.device)
        sent.copy_(flat)
        segments = list(sent.tensor_split(n))
        received = self.shelf.borrow(n * segments[me].numel(), torch.bfloat16, flat.device)
        rows = _rows(received, n, segments[me].numel())
        works = post(self.replicas, sends=segments, receives=rows)
        yield
        wait(works)
        rows[me].copy_(segments[me])
        mean = flat.tensor_split(n)[me]
        mean_into(mean, _chosen(rows, included))
        segments[me].copy_(mean)
        works = post(self.replicas, sends=[segments[me]] * n, receives=segments)
        yield
        wait(works)
        flat.copy_(sent)
        self.shelf.give_back(sent, received)

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        return super().sent_bytes(numel, 2)


class Int8(Wire):
    """Blockwise int8 of the difference from the last converged point, with error feedback.

        d_r = theta_r - point + residual_r
        q_r = round(d_r / s),  s = max |d_r| of a block / 127
        residual_r <- d_r - s q_r
        mean = point + mean over replicas of s q_r

    What a message leaves out is sent later, so that the error does not grow with the rounds.
    Two replicas exchange their messages whole; from three on the owner of a segment sends the
    mean difference back in bf16.
    """

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        self.codec = Codec()

    def flight(self, flat: Tensor, included: Sequence[bool], memory: Memory | None) -> Flight:
        if memory is None:
            raise ValueError("the int8 wire needs the last converged point: converge in fp32 first")
        if not included[self.replicas.rank]:
            # What a bad replica holds says nothing, and neither does what it failed to send.
            flat.copy_(memory.point)
            memory.residual.zero_()
        work = self._pair if self.replicas.size == 2 else self._many
        return work(flat, included, memory)

    def _pair(self, flat: Tensor, included: Sequence[bool], memory: Memory) -> Flight:
        me, size = self.replicas.rank, message_bytes(flat.numel())
        rows = self.shelf.borrow(2 * size, torch.uint8, flat.device).view(2, size)
        self.codec.pack(flat, memory, rows[me])
        works = post(self.replicas, sends=[rows[me]] * 2, receives=list(rows))
        yield
        wait(works)
        self.codec.mean(rows, _weights(included), flat, memory.point)
        self.shelf.give_back(rows)

    def _many(self, flat: Tensor, included: Sequence[bool], memory: Memory) -> Flight:
        n, me = self.replicas.size, self.replicas.rank
        parts = list(flat.tensor_split(n))
        points, left = memory.point.tensor_split(n), memory.residual.tensor_split(n)
        sizes = [message_bytes(p.numel()) for p in parts]
        sent = self.shelf.borrow(sum(sizes), torch.uint8, flat.device)
        messages = list(sent.split(sizes))
        rows = self.shelf.borrow(n * sizes[me], torch.uint8, flat.device).view(n, sizes[me])
        messages[me] = rows[me]
        for part, point, rest, message in zip(parts, points, left, messages, strict=True):
            self.codec.pack(part, Memory(point, rest), message)
        works = post(self.replicas, sends=messages, receives=list(rows))
        yield
        wait(works)
        self.codec.mean(rows, _weights(included), parts[me])
        down = self.shelf.borrow(flat.numel(), torch.bfloat16, flat.device)
        pieces = list(down.tensor_split(n))
        pieces[me].copy_(parts[me])
        works = post(self.replicas, sends=[pieces[me]] * n, receives=pieces)
        yield
        wait(works)
        torch.add(memory.point, down, out=flat)
        self.shelf.give_back(sent, rows, down)

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        n = self.replicas.size
        message = message_bytes(numel)
        return message if n == 2 else (message + 2 * numel) * (n - 1) // n


# -- transfers -------------------------------------------------------------------------------------


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


def _rows(received: Tensor, n: int, length: int) -> list[Tensor]:
    return [received[i * length : (i + 1) * length] for i in range(n)]


def _weights(included: Sequence[bool]) -> list[float]:
    return [float(wanted) / sum(included) for wanted in included]


def _chosen(rows: Sequence[Tensor], included: Sequence[bool]) -> list[Tensor]:
    return [row for row, wanted in zip(rows, included, strict=True) if wanted]


def _blocks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Equally long flat tensors, on a CPU cut alike into blocks that fit the cache."""
    length = CACHED if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    yield from (
        list(b) for b in zip(*(t.split(length) for t in tensors), strict=True) if b[0].numel()
    )


def mean_into(out: Tensor, rows: Sequence[Tensor]) -> None:
    """The mean of 16-bit rows in fp32, summed in the order of the replicas."""
    for block in _blocks([out, *rows]):
        total, first, *others = block
        total.copy_(first)
        for row in others:
            total.add_(row)
        total.mul_(1.0 / len(rows))
