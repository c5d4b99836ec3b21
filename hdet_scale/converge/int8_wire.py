"""The int8 wire: a quarter of the bytes of fp32, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_scale.converge.int8 import Codec, message_bytes
from hdet_scale.converge.peers import post, wait
from hdet_scale.converge.remembered import Memory
from hdet_scale.converge.wire_interface import Flight, Wire
from hdet_scale.topology import Replicas

INT8_BYTES = 8 * 2**20
"""Cap of a bucket on a CPU, which reads a bucket several times: small enough for its cache."""


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

    remembers = True
    moves_point = True

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
        self.codec.mean(rows, _weights(included), flat, memory.point, move=memory.moves)
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
        down = self.shelf.borrow(flat.numel(), torch.bfloat16, flat.device)
        pieces = list(down.tensor_split(n))
        self.codec.mean(rows, _weights(included), pieces[me])
        works = post(self.replicas, sends=[pieces[me]] * n, receives=pieces)
        yield
        wait(works)
        torch.add(memory.point, down, out=flat)
        if memory.moves:
            memory.point.copy_(flat)
        self.shelf.give_back(sent, rows, down)

    def bucket_cap(self, cap: int, device: torch.device) -> int:
        return min(cap, INT8_BYTES) if device.type == "cpu" else cap

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        n = self.replicas.size
        message = message_bytes(numel)
        return message if n == 2 else (message + 2 * numel) * (n - 1) // n

    def buffer_bytes(self, numel: int, itemsize: int) -> int:
        """Messages sent and received; from three replicas on the mean difference in bf16 too."""
        down = 2 * numel if self.replicas.size > 2 else 0
        return 2 * message_bytes(numel) + down


def _weights(included: Sequence[bool]) -> list[float]:
    return [float(wanted) / sum(included) for wanted in included]
