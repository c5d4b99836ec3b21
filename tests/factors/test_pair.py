"""Pair: what it writes in each space, what it refuses, and a factor of a user's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_scale.factors.pair import Pair
from hdet_scale.factors.space import check_factors

RHO = st.floats(0.05, 20)


def held(value: float, **options: Any) -> Pair:
    box = [value]
    return Pair("box", lambda: box[0], lambda x: box.__setitem__(0, x), **options)


@given(base=st.floats(1e-6, 1e6), rho=RHO)
def test_log_space_multiplies(base: float, rho: float) -> None:
    factor = held(base)
    assert factor.at(base, rho) == base * rho
    assert factor.offset(base, rho) == math.log(rho)


@given(base=st.floats(-5, 5), rho=RHO, unit=st.floats(0.01, 10))
def test_linear_space_adds(base: float, rho: float, unit: float) -> None:
    value = held(base, space="linear", unit=unit).at(base, rho)
    assert value == pytest.approx(base + unit * math.log(rho), rel=1e-12, abs=1e-12)


@given(base=st.floats(0.001, 0.999), rho=RHO)
def test_logit_space_multiplies_the_odds(base: float, rho: float) -> None:
    value = held(base, space="logit").at(base, rho)
    assert 0 < value < 1
    assert value / (1 - value) == pytest.approx(base / (1 - base) * rho, rel=1e-9)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: held(0.0), "box is 0.0, which a multiplier in log space can never move"),
        (lambda: held(1.0, space="logit"), "can never move"),
        (lambda: held(math.nan, space="linear"), "box is nan"),
        (lambda: held(5.0, bounds=(0.1, 1.0)), r"outside its bounds \[0.1, 1.0\]"),
        (lambda: held(0.5, space="cubic"), r"one of \['log', 'linear', 'logit'\], got 'cubic'"),
        (lambda: held(0.5, bounds=(1.0, 0.1)), "low below high, got"),
        (lambda: held(0.5, bounds=(-1.0, 1.0)), "low must be 0 or more"),
        (lambda: held(0.5, space="logit", bounds=(0.0, 2.0)), r"lie in \[0, 1\]"),
        (lambda: held(0.5, space="linear", unit=0.0), "unit must be above 0, got 0.0"),
    ],
)
def test_wrong_spaces_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_the_base_is_the_last_one_written() -> None:
    """A schedule may move it, and a resumed run brings its own."""
    factor = held(0.5)
    factor.write(0.4, 1.1)
    assert factor.scheduled() == 0.4


class Clip:
    """What a training loop would read in each step."""

    norm = 2.0


class ClipNorm(Pair):
    """The example of the manual."""

    in_step = True
    moves_moments = True

    def __init__(self, clip: Clip) -> None:
        super().__init__(
            "clip_norm", lambda: clip.norm, lambda x: setattr(clip, "norm", x), bounds=(0.01, 3.0)
        )


def test_a_subclass_with_a_getter_and_a_setter_is_a_factor() -> None:
    clip = Clip()
    (factor,) = check_factors([ClipNorm(clip)], gradients="shared")
    factor.write(2.0, 0.5)
    assert clip.norm == factor.read() == 1.0
    factor.write(2.0, 4.0)
    assert (clip.norm, factor.scheduled()) == (3.0, 2.0)
