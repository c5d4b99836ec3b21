"""The table of the groups' numbers."""

import math

import pytest
import torch

from hdet_scale.kernels import scalars
from hdet_scale.kernels.scalars import ScalarTable, scalar_row


def test_a_row_has_the_shared_columns_then_the_optimizers_own() -> None:
    row = scalar_row(0.1, 1.5, 0.01, True, [7.0, 8.0], (0.9, 0.0))
    assert len(row) == scalars.ROW_WIDTH
    assert row[scalars.LR] == 0.1
    assert row[scalars.MULTIPLIER] == 1.5
    assert row[scalars.DECAY] == 0.01
    assert row[scalars.SIGN] == -1.0
    assert row[scalars.LOG_BETA1] == math.log(0.9)
    assert row[scalars.LOG_BETA2] == -math.inf
    assert row[scalars.OWN :] == [7.0, 8.0, 0.0, 0.0, 0.0, 0.0]


def test_more_numbers_than_a_row_holds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"7 numbers .* room for 6"):
        scalar_row(0.1, 1.0, 0.0, False, [0.0] * 7)


def test_only_changed_numbers_are_copied_and_tensors_always() -> None:
    table = ScalarTable(1, torch.device("cpu"))
    rate = torch.tensor(0.5)
    row = scalar_row(rate, 2.0, 0.0, False, [])
    assert table.write([row])
    rate.fill_(0.25)
    assert not table.write([row])
    assert table.values[0, scalars.LR] == 0.25
    assert table.values[0, scalars.MULTIPLIER] == 2.0
