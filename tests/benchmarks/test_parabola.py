"""The parabola: its minimum is that of weighted least squares."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lr.parabola import Parabola


@given(
    st.lists(st.floats(0.5, 3.0), min_size=5, max_size=16),
    st.floats(0.1, 2.0),
)
@settings(deadline=None)
def test_the_parabola_is_the_weighted_least_squares_one(losses: list[float], gap: float) -> None:
    xs = [gap * k for k in range(len(losses))]
    found = Parabola.through(xs, losses, width=len(losses))
    best = min(range(len(losses)), key=losses.__getitem__)
    above = numpy.array(losses) - losses[best]
    typical = float(numpy.median(above))
    if typical < 1e-6:
        return
    root = numpy.sqrt(1 / (1 + (above / typical) ** 2))  # numpy squares its weights
    c2, c1, c0 = numpy.polyfit([x - xs[best] for x in xs], losses, 2, w=root)
    assert -gap * (1 + 1e-9) <= found.minimum - xs[best] <= gap / 2 * (1 + 1e-9)
    inside = -best * gap < -c1 / (2 * c2 or 1) < (len(losses) - 1 - best) * gap
    if c2 > 1e-6 and -gap < -c1 / (2 * c2) < gap / 2 and inside:
        at = -c1 / (2 * c2)
        assert found.minimum == pytest.approx(xs[best] + at, abs=1e-5)
        assert found.lowest == pytest.approx(c0 + c1 * at / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("losses", "at", "lowest"),
    [
        ([9, 4, 1, 0, 1, 4, 9], 3.0, 0.0),
        ([1, 2, math.inf], 0.0, 1.0),  # two levels: the lowest is all that is known
        ([0, 1, 4, 9, 16, 25], 0.0, 0.0),  # never below the levels
        ([0, 1, 1.5, 1.7, 1.8, 1.8], 0.0, 0.0),  # not convex
    ],
)
def test_the_minimum_of_known_levels(losses: list[float], at: float, lowest: float) -> None:
    found = Parabola.through([float(k) for k in range(len(losses))], losses, width=2)
    assert found.minimum == pytest.approx(at, abs=1e-9)
    assert found.lowest == pytest.approx(lowest, abs=1e-9)


def test_levels_that_diverged_are_left_out() -> None:
    xs, losses = [0.0, 1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 0.2, 0.0, 0.3]
    found = Parabola.through([*xs, 5.0, 6.0], [*losses, math.inf, math.inf], width=3)
    assert found == Parabola.through(xs, losses, width=3)
    assert 2.5 < found.minimum < 3.5
