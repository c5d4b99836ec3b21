"""Guards around tensors, and the comparison of results."""

from __future__ import annotations

import pytest
import torch

from hdet_scale.acceptance.findings import WrongResultError
from hdet_scale.acceptance.guarded import GUARD, TOLERANCE, Guarded, compare, gap, sizes

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tensors_lie_as_far_behind_a_boundary_as_asked(dtype: torch.dtype) -> None:
    wanted = sizes(CPU)
    guarded = Guarded(wanted, dtype, CPU)
    for tensor, (numel, shift) in zip(guarded.tensors, wanted, strict=True):
        assert tensor.numel() == numel
        assert tensor.data_ptr() % 16 == shift * tensor.element_size() % 16
    assert any(shift for _, shift in wanted), "one tensor is not aligned"
    guarded.check("nothing was written")


@pytest.mark.parametrize("place", [-1, 0])
def test_a_write_before_or_behind_a_tensor_is_caught(place: int) -> None:
    guarded = Guarded([(10, 0), (10, 1)], torch.float32, CPU)
    second = guarded.tensors[1]
    arena = second._base
    assert arena is not None
    arena[GUARD + 1 + (place if place else second.numel())] = 0.0
    with pytest.raises(WrongResultError, match="outside of a tensor of 10 elements"):
        guarded.check("a kernel")


def test_a_difference_is_relative_to_the_largest_value() -> None:
    theirs = torch.tensor([100.0, 0.0])
    assert gap(theirs + torch.tensor([0.0, 1.0]), theirs) == pytest.approx(0.01)
    assert gap(torch.empty(0), torch.empty(0)) == 0.0


def test_what_is_not_a_number_is_an_infinite_difference() -> None:
    assert gap(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    with pytest.raises(WrongResultError, match="differs from torch by inf"):
        compare("x", torch.tensor([float("nan")]), torch.ones(1))


def test_dtype_shape_and_presence_are_compared_too() -> None:
    for ours in (None, torch.ones(2), torch.ones(1).half()):
        with pytest.raises(WrongResultError, match="x is"):
            compare("x", ours, torch.ones(1))


def test_a_difference_within_the_tolerance_is_returned_as_its_share() -> None:
    ours = torch.tensor([1.0 + 1e-6])
    assert compare("x", ours, torch.ones(1)) == pytest.approx(0.5, rel=0.1)
    with pytest.raises(WrongResultError, match=r"0\.0e\+00 is allowed"):
        compare("x", ours, torch.ones(1), exact=True)
