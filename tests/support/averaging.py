"""Tensors that differ between replicas, and their mean: for tests of the converge."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPES: list[tuple[int, ...]] = [(300, 300), (7,), (), (0,), (1000,), (33, 5)]
"""Several buckets under a cap of 64 KiB, a tensor larger than it, a scalar, an empty shard."""
CAP = 64 * 1024


def tensors_of(rank: int, turn: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Replica `rank`'s tensors, others in each turn."""
    g = torch.Generator().manual_seed(100 * turn + rank)
    return [torch.randn(s, generator=g).to(dtype) for s in SHAPES]


def mean_of(replicas: list[list[Tensor]]) -> list[Tensor]:
    """The float64 mean of what the replicas hold."""
    return [torch.stack([t.double() for t in c]).mean(0) for c in zip(*replicas, strict=True)]


def distance(actual: list[Tensor], exact: list[Tensor]) -> float:
    """Relative to the norm of all."""
    a = torch.cat([t.double().flatten() for t in actual])
    b = torch.cat([t.double().flatten() for t in exact])
    return float((a - b).norm() / b.norm())


def same_everywhere(results: list[list[Tensor]]) -> None:
    """Assert that all replicas hold the same bits."""
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
