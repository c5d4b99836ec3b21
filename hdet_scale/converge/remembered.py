"""Remembered: what the next converge builds on, bucket by bucket.

point       the last converged point, equal on all replicas; for a wire that sends differences
            and for the outer step
residual    what this replica's messages have left out so far; each replica's own
momentum    u of the outer step, equal on all replicas
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdet_scale.converge.buckets import Bucket

KINDS = ("points", "momenta", "residuals")


@dataclass(frozen=True, slots=True)
class Memory:
    """What a wire that sends differences remembers of a bucket, flat and in fp32."""

    point: Tensor
    """The last converged point, the same on every replica."""
    residual: Tensor
    """What this replica's messages have left out so far."""
    moves: bool = False
    """Whether the flight writes the mean to the point too, as a wire that `moves_point` does."""


class Remembered:
    """Points, residuals and momenta by the index of their bucket."""

    def __init__(self) -> None:
        self.points: dict[int, Tensor] = {}
        self.residuals: dict[int, Tensor] = {}
        self.momenta: dict[int, Tensor] = {}

    def memory(self, index: int, *, moves: bool = False) -> Memory | None:
        """A wire's memory of a bucket; None before its first mean, which sets the point."""
        point = self.points.get(index)
        if point is None:
            return None
        if index not in self.residuals:
            self.residuals[index] = torch.zeros_like(point)
        return Memory(point, self.residuals[index], moves)

    def momentum(self, index: int) -> Tensor:
        """u of the outer step of a bucket whose point is known; zeros at first."""
        if index not in self.momenta:
            self.momenta[index] = torch.zeros_like(self.points[index])
        return self.momenta[index]

    def set_point(self, index: int, mean: Tensor) -> None:
        """Keep a copy of what a bucket has converged to."""
        point = self.points.get(index)
        self.points[index] = mean.clone() if point is None else point.copy_(mean)

    def state_dict(self) -> dict[str, dict[int, Tensor]]:
        """The tensors themselves, by kind and bucket."""
        return {kind: dict(getattr(self, kind)) for kind in KINDS}

    def load_state_dict(self, state: Mapping[str, Any], buckets: Sequence[Bucket]) -> None:
        """Copy the tensors of a state, which must be of the same buckets."""
        for kind in KINDS:
            for index, saved in state.get(kind, {}).items():
                bucket = buckets[index] if index < len(buckets) else None
                if bucket is None or saved.numel() != bucket.numel:
                    raise ValueError(
                        f"the state's bucket {index} has {saved.numel()} elements and this plan's "
                        f"{bucket.numel if bucket else 0}: keep the model and bucket_bytes"
                    )
                getattr(self, kind)[index] = saved.to(bucket.device, copy=True)
