"""An averaging in the background, folded in while the tensors have moved on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.converge.pipeline import Converge
from tests.support.averaging import CAP, mean_of, tensors_of


def _overlapped(rank: int, size: int, bad: int | None) -> tuple[list[Tensor], list[Tensor]]:
    tensors = tensors_of(rank)
    if rank == bad:
        tensors[0][0, 0] = float("inf")
    converge = Converge(tensors, Replicas.world(), CAP, background=True)
    included = [r != bad for r in range(size)]
    pending = converge.start(included)
    moves = tensors_of(rank, 1)
    for t, move in zip(tensors, moves, strict=True):
        t.add_(move)
    pending.finish()
    return tensors, moves


@pytest.mark.parametrize("bad", [None, 0], ids=["all", "one left out"])
@pytest.mark.parametrize("size", [2, 3])
def test_overlap_folds_in_mean_minus_start(fleets: Any, size: int, bad: int | None) -> None:
    """theta <- theta_now + (mean - theta_at_start); a replica left out takes the mean."""
    results = fleets(size).run(_overlapped, bad)
    mean = mean_of([tensors_of(r) for r in range(size) if r != bad])
    for rank, (tensors, moves) in enumerate(results):
        moved = [torch.zeros_like(m) for m in moves] if rank == bad else moves
        exact = [m + move.double() for m, move in zip(mean, moved, strict=True)]
        for actual, wanted in zip(tensors, exact, strict=True):
            torch.testing.assert_close(actual.double(), wanted, rtol=1e-6, atol=1e-6)
