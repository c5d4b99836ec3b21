"""Spaces and their bounds, and which factors can be explored together."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_scale.factors.pair import Pair
from hdet_scale.factors.space import Space, check_factors


def constant(name: str) -> Pair:
    return Pair(name, lambda: 1.0, lambda _: None)


@given(
    space=st.sampled_from(["log", "linear", "logit"]),
    base=st.floats(0.2, 0.6),
    rho=st.floats(0.05, 20),
)
def test_bounds_hold_and_the_offset_says_what_is_left(space: str, base: float, rho: float) -> None:
    kind = Space(space, (0.2, 0.6))
    value = kind.at(base, rho)
    assert 0.2 <= value <= 0.6
    assert kind.at(base, 1.0) == base
    told = kind.offset(base, rho)
    assert abs(told) <= abs(math.log(rho)) + 1e-12
    assert kind.at(base, math.exp(told)) == pytest.approx(value, rel=1e-9)


def test_what_is_no_factor_is_refused() -> None:
    with pytest.raises(TypeError, match="3 is no factor, it lacks"):
        check_factors([3])  # type: ignore[list-item]


def test_two_factors_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="factors need different names"):
        check_factors([constant("box"), constant("box")])
