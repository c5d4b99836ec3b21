"""Transfer: one bucket of a converge, how its mean is formed and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdet_scale.converge.buckets import Bucket
from hdet_scale.converge.costs import AllReduceCost, Cost
from hdet_scale.converge.outer import OuterStep
from hdet_scale.converge.wire_interface import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What a converge does with one bucket."""

    index: int
    """Of the bucket in the plan."""
    bucket: Bucket
    """Which memory is averaged."""
    wire: Wire
    """How the mean is formed."""
    outer: OuterStep | None
    """The outer step that follows the mean; None where the mean itself is taken."""
    fragment: int
    """The part of the round in which it is averaged."""

    @property
    def elements(self) -> int:
        """Of the bucket."""
        return self.bucket.numel

    @property
    def dtype(self) -> torch.dtype:
        """What the mean is formed in: float64 for float64, else fp32."""
        return torch.float64 if self.bucket.dtype == torch.float64 else torch.float32

    @property
    def staged(self) -> bool:
        """Whether it is copied into a buffer first: not where it is one run of memory in the dtype
        that is averaged."""
        return len(self.bucket.pieces) != 1 or self.bucket.dtype != self.dtype

    @property
    def buffered(self) -> bool:
        """Whether it needs a buffer, of the staging or of the wire."""
        return self.staged or not self.wire.in_place

    @property
    def keeps_point(self) -> bool:
        """Whether the converged point is kept for the next converge."""
        return self.wire.remembers or self.outer is not None

    @property
    def sent_bytes(self) -> int:
        """What this rank puts on the wire."""
        return self.wire.sent_bytes(self.elements, self.dtype.itemsize)

    @property
    def buffer_bytes(self) -> int:
        """What the wire sends from and receives into, while the transfer is under way."""
        return self.wire.buffer_bytes(self.elements, self.dtype.itemsize)

    @property
    def remembered_bytes(self) -> int:
        """What is kept for the next converge: the point, the wire's residual, the momentum."""
        copies = self.keeps_point + self.wire.remembers + (self.outer is not None)
        return copies * self.elements * self.dtype.itemsize

    def cost(self, all_reduce: AllReduceCost) -> Cost:
        """Hops and bytes on a link where an all-reduce costs what `all_reduce` says."""
        return self.wire.cost(self.elements, self.dtype.itemsize, all_reduce)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a converge did."""

    included: tuple[bool, ...]
    """Which replicas are in the mean."""
    seconds: float
    """From the first collective to the last write, on this rank. On CUDA by events, for which the
    host does not wait: of the averagings that have ended since the last outcome, as a rule the one
    of the round before, and 0 at first."""
    wire_bytes: int
    """Bytes that this rank put on the wire for the buckets."""
