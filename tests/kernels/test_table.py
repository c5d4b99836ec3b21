"""The table of tensors: what a step uploads, and what it leaves as it was built."""

from typing import Any

import pytest
import torch

from hdet_scale.kernels import table
from hdet_scale.kernels.launch import SPAN
from hdet_scale.kernels.table import Combination, Row, TensorTable, span_table

FP32 = Combination(param=torch.float32, moment=torch.float32)


def row(numel: int, combination: Combination = FP32) -> Row:
    return Row(
        param=torch.zeros(numel),
        first=torch.zeros(numel),
        second=torch.zeros(numel),
        master=None,
        step=torch.zeros(()),
        group=0,
        key=0,
        offset=0,
        combination=combination,
    )


def test_every_element_is_in_one_span() -> None:
    sizes = [(3, 0), (4, 1), (5, SPAN), (7, 2 * SPAN + 1)]
    assert span_table(sizes, SPAN).tolist() == [[4, 0], [5, 0], [7, 0], [7, 1], [7, 2]]
    assert span_table([(0, 0)], SPAN).shape == (0, 2)


def test_a_moved_gradient_rebuilds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets of gradients, one of them off a 16-byte boundary."""
    built: list[Any] = []
    make = table.span_table
    monkeypatch.setattr(table, "span_table", lambda *a: built.append(a) or make(*a))
    written: list[Any] = []
    write = TensorTable._write_rows
    monkeypatch.setattr(TensorTable, "_write_rows", lambda t: written.append(t) or write(t))
    rows = TensorTable([row(100), row(SPAN + 1)], SPAN)
    sets = [[torch.zeros(100), torch.zeros(SPAN + 1)] for _ in range(2)]
    sets.append([torch.zeros(101)[1:], torch.zeros(SPAN + 2)[1:]])
    for grads in (*sets, sets[0]):
        column = rows.refresh(grads)
        assert column.tolist() == [g.data_ptr() for g in grads]
    assert len(built) == len(written) == 1
    assert rows.chunks[FP32].tolist() == [[0, 0], [1, 0], [1, 1]]


def test_a_parameter_that_moved_is_found_and_its_chunks_stay() -> None:
    rows = TensorTable([row(10)], SPAN)
    grads = [torch.zeros(10)]
    rows.refresh(grads)
    chunks = rows.chunks[FP32]
    rows.rows[0].param.data = torch.ones(10)
    rows.refresh(grads)
    assert rows.tensors[0, table.PARAM] == rows.rows[0].param.data_ptr()
    assert rows.chunks[FP32] is chunks
    rows.rows[0].param.data = torch.ones(SPAN + 1)
    rows.refresh(grads)
    assert len(rows.chunks[FP32]) == 2


def test_a_parameter_that_moves_inside_a_capture_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = TensorTable([row(10)], SPAN)
    monkeypatch.setattr(table, "capturing", lambda _: True)
    with pytest.raises(RuntimeError, match="Take one step with these tensors before the capture"):
        rows.refresh([torch.zeros(10)])


def test_a_table_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        TensorTable([], SPAN)
