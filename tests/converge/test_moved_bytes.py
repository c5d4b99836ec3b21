"""The bytes and launches of an averaging in a GPU's memory, counted on the device path as it runs.

What the backend moves in a collective is not counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.converge.int8 import message_bytes
from hdet_scale.converge.outer import OuterStep
from hdet_scale.converge.pipeline import Converge
from hdet_scale.converge.side_stream import SideStream
from hdet_scale.engines.gradient_mean import GradientMean
from hdet_scale.kernels import pieces
from tests.support.fleet import Fleet
from tests.support.moved_bytes import moved_bytes

NUMEL = 2**18
"""Averaged where it lies: nothing is staged."""
SCALES = message_bytes(NUMEL) / NUMEL - 1
"""Bytes of the int8 scales for each element."""
TABLES = 0.02
"""Scalars and tables that a program of 1,024 elements reads, for each element."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _of_a_wire(rank: int, size: int, wire: str, outer: bool) -> float:
    """Bytes an element of the third converge; the others set the point and the residual."""
    tensor = draw(NUMEL, seed=rank)
    step = OuterStep() if outer else None
    converge = Converge([tensor], Replicas.world(), wire=wire, outer=step)
    for turn in range(2):
        converge.average([True] * size)
        tensor.add_(draw(NUMEL, seed=10 * turn + rank), alpha=0.01)
    with moved_bytes() as moved:
        converge.average([True] * size)
    return moved.total / NUMEL


@pytest.mark.parametrize(
    ("wire", "wanted"),
    [
        ("bf16", 6 + 8),  # rounded to the wire; then two rows read and the mean written
        ("int8", 2 + 29 + 3 * SCALES),  # two replicas' scales are read, and one's written
    ],
)
def test_two_replicas_average_in_the_fewest_passes(
    device_pair: Fleet, wire: str, wanted: float
) -> None:
    for found in device_pair.run(_of_a_wire, wire, False):
        print(f"{wire}: {found:.3f} bytes an element")
        assert wanted <= found < wanted + TABLES


def test_an_outer_step_still_reads_the_last_point(device_pair: Fleet) -> None:
    """The flight must not move the point then: the step goes from it."""
    (found, other) = device_pair.run(_of_a_wire, "int8", True)
    print(f"int8 with an outer step: {found:.3f} bytes an element")
    assert found == other > 2 + 29


# -- tables ----------------------------------------------------------------------------------------


def _tables(rank: int, size: int, buckets: int) -> tuple[int, list[int], list[int]]:
    """Staged buckets; tables of blocks that were made, and addresses sent, at each converge."""
    tensors = [draw(1100, seed=rank + i).bfloat16() for i in range(buckets)]
    converge = Converge(tensors, Replicas.world(), 4 * 1100)
    made, sent = Counter[int](), Counter[int]()
    turn = 0
    chunk_table, point = pieces.chunk_table, pieces.Pieces._point

    def counting_table(*args: Any) -> Tensor:
        made[turn] += 1
        return chunk_table(*args)

    def counting_point(self: pieces.Pieces, device: torch.device) -> None:
        before = self._seen
        point(self, device)
        sent[turn] += self._seen is not before

    with (
        patch.object(pieces, "chunk_table", counting_table),
        patch.object(pieces.Pieces, "_point", counting_point),
    ):
        for turn in range(4):  # noqa: B007 - read by the counters
            converge.average([True] * size)
    return len(converge.plan.buckets), [made[t] for t in range(4)], [sent[t] for t in range(4)]


@pytest.mark.parametrize("buckets", [3, 5])
def test_buckets_that_take_turns_with_buffers_keep_their_tables(
    device_pair: Fleet, buckets: int
) -> None:
    """An odd number of them finds itself in the other of two buffers at each converge."""
    first = [buckets, 0, 0, 0]
    assert device_pair.run(_tables, buckets) == [(buckets, first, first)] * 2


# -- in the background -----------------------------------------------------------------------------


class Queued(SideStream):
    """Answers as a side stream on CUDA: the thread that is counted runs the flights."""

    enqueues = True


def _in_the_background(rank: int, size: int) -> tuple[int, float]:
    """Launches, and bytes an element, from the start to the fold, of 20 tensors in one bucket."""
    tensors = [draw(1024, seed=i) + rank for i in range(20)]
    converge = Converge(tensors, Replicas.world(), background=True)
    converge._flights.stream = Queued(converge.device)
    for _ in range(2):
        with moved_bytes() as moved:
            converge.start([True] * size).finish()
    return moved.launches, moved.total / (20 * 1024)


def test_a_background_averaging_is_copied_and_folded_in_by_one_launch_each(
    device_pair: Fleet,
) -> None:
    """8 bytes an element for the copy, 8 for the mean's own, 12 for the difference, 12 to fold it
    in; and 8 to scale before gloo's sum, which NCCL's mean does not need."""
    for launches, moved in device_pair.run(_in_the_background):
        print(f"overlap: {moved:.3f} bytes an element")
        assert launches == 2
        assert 48 <= moved < 48.1


# -- gradients -------------------------------------------------------------------------------------


def _gradient_launches(rank: int, size: int) -> tuple[list[int], list[float], list[int]]:
    """Launches, and bytes an element, of the mean of 20 small gradients in one bucket, at three
    steps at which they lie elsewhere; tables of blocks made at each."""
    mean, kept, made = GradientMean(2**20), [], Counter[int]()
    chunk_table = pieces.chunk_table
    launches, moved_at = [], []
    turn = 0

    def counting_table(*args: Any) -> Tensor:
        made[turn] += 1
        return chunk_table(*args)

    with patch.object(pieces, "chunk_table", counting_table):
        for turn in range(3):  # noqa: B007 - read by the counter
            gradients = [draw(1024, seed=i) + rank for i in range(20)]
            kept.append(gradients)  # so that the next ones lie elsewhere
            with moved_bytes() as moved:
                mean(gradients, Replicas.world())
            launches.append(moved.launches)
            moved_at.append(moved.total / (20 * 1024))
            for i, g in enumerate(gradients):
                torch.testing.assert_close(g, draw(1024, seed=i) + (size - 1) / 2)
    return launches, moved_at, [made[t] for t in range(3)]


def test_gradients_are_copied_in_one_launch_and_divided_on_the_way(device_pair: Fleet) -> None:
    """One launch there and one back, of 8 bytes an element each."""
    for launches, moved, tables in device_pair.run(_gradient_launches):
        print(f"gradients: {moved[-1]:.3f} bytes an element")
        assert launches == [2, 2, 2]
        assert tables == [1, 0, 0]
        assert all(16 <= bytes_an_element < 16.1 for bytes_an_element in moved[1:])
