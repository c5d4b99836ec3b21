"""The int8 wire over many rounds: its error does not grow."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.converge.pipeline import Converge
from tests.support.averaging import CAP, distance, same_everywhere, tensors_of
from tests.support.fleet import Fleet


def _drifting(rank: int, size: int, wire: str, rounds: int) -> list[Tensor]:
    """Every replica adds a small step of its own in each round, as training does."""
    tensors = tensors_of(0)
    converge = Converge(tensors, Replicas.world(), CAP, wire=wire)
    for k in range(rounds):
        for t, step in zip(tensors, tensors_of(rank, k + 1), strict=True):
            t.add_(step, alpha=0.01)
        converge()
    return tensors


@pytest.mark.parametrize("size", [2, 3])
def test_int8_stays_close_to_fp32_over_twenty_rounds(fleets: Any, size: int) -> None:
    fleet: Fleet = fleets(size)
    int8 = fleet.run(_drifting, "int8", 20)
    fp32 = fleet.run(_drifting, "fp32", 20)
    same_everywhere(int8)
    error = distance(int8[0], fp32[0])
    print(f"int8 after 20 rounds, {size} ranks: {error:.2e}")
    assert error < 1e-3
