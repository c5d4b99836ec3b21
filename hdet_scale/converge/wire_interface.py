"""Wire: what Converge, checkpoints and `hdet plan` ask of a wire.

A wire forms the mean of one bucket from what the replicas hold. Its `flight` is a generator: it
posts a transfer and yields, each time before it has to wait. Run to its end it leaves the mean of
the included replicas in the flat tensor that it was given, the same bits on every rank. Converge
keeps several flights under way at once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hdet_scale.converge.costs import AllReduceCost, Cost, direct
from hdet_scale.converge.remembered import Memory
from hdet_scale.converge.shelf import Shelf
from hdet_scale.topology import Replicas

Flight = Generator[None, None, None]


class Wire:
    """The base of all wires, with the answers of one that exchanges messages between ranks.

    A new wire is a subclass in a file of its own and a name in `hdet_scale.converge.wires.WIRES`.
    Sizes are given as numel, the elements of a bucket, and itemsize, the bytes of an element in the
    dtype that is averaged: 4, or 8 for float64.
    """

    remembers: ClassVar[bool] = False
    """Whether it needs a `Memory` of each bucket. Converge then keeps it, the first mean of a
    bucket goes over the fp32 wire and sets the point, and tensors that take the plain mean always
    go over the fp32 wire."""
    moves_point: ClassVar[bool] = False
    """Whether its flight can write the mean to the `Memory`'s point as well, where the memory says
    so: one pass instead of a copy afterwards. For a wire that remembers."""
    in_place: ClassVar[bool] = False
    """Whether it averages a bucket where it lies, without buffers. If not, long tensors are cut at
    the cap of a bucket, and two buckets are under way at once."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.shelf = Shelf()

    @classmethod
    def build(cls, replicas: Replicas, device: torch.device) -> Wire:
        """The wire for these replicas and tensors on this device."""
        return cls(replicas)

    def flight(self, flat: Tensor, included: Sequence[bool], memory: Memory | None) -> Flight:
        """Form the mean of the included replicas' `flat` in place.

        Args:
            flat: one bucket, contiguous, fp32 or float64.
            included: one flag for each replica, the same on every rank.
            memory: the point and the residual, for a wire that `remembers`; the residual is
                updated.
        """
        raise NotImplementedError

    def bucket_cap(self, cap: int, device: torch.device) -> int:
        """The cap of a bucket in bytes, given the one that the user asked for."""
        return cap

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes that this rank puts on the wire for a bucket."""
        n = self.replicas.size
        return numel * itemsize * 2 * (n - 1) // n

    def buffer_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the buffers that a bucket is sent from and received into."""
        return 0

    def cost(self, numel: int, itemsize: int, all_reduce: AllReduceCost) -> Cost:
        """Hops and bytes of a bucket; `all_reduce` prices the backend's all-reduce."""
        return direct(self.replicas.size, self.sent_bytes(numel, itemsize))
