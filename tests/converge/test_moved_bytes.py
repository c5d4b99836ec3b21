"""The bytes that an averaging moves in a GPU's memory, counted on the device path as it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.converge.outer import OuterStep
from hdet_scale.converge.pipeline import Converge
from tests.support.fleet import Fleet
from tests.support.moved_bytes import moved_bytes

NUMEL = 2**18
"""Averaged where it lies: nothing is staged."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _of_a_wire(rank: int, size: int, wire: str, outer: bool) -> float:
    """Bytes an element of the second converge; the first one sets the point."""
    tensor = draw(NUMEL, seed=rank)
    step = OuterStep() if outer else None
    converge = Converge([tensor], Replicas.world(), wire=wire, outer=step)
    converge.average([True] * size)
    tensor.add_(draw(NUMEL, seed=10 + rank), alpha=0.01)
    with moved_bytes() as moved:
        converge.average([True] * size)
    return moved.total / NUMEL


def test_print(device_pair: Fleet) -> None:
    for wire in ("fp32", "bf16", "int8"):
        print(wire, device_pair.run(_of_a_wire, wire, False))
    print(device_pair.run(_of_a_wire, "int8", True))
