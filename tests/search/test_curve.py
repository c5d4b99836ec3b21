"""The loss curve: its minimum by least squares, its edge from the lowest level upwards."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_scale.search.curve import Parabola, edge

LEVELS = [float(k) for k in range(8)]


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
    ("losses", "limit", "found"),
    [
        ([3, 2, 1, 2, 4, 9, 9, 9], 3.0, 3.5),  # half of the way from 2 to 4
        ([3, 2, 1, 2, 3.5, 9, 9, 9], 3.0, 3 + 2 / 3),
        ([3, 2, 1, 2, 400, 9, 9, 9], 3.0, 3.5),  # a cliff: anywhere between the two
        ([3, 2, 1, 2, math.inf, 9, 9, 9], 3.0, 3.5),
        ([3, 2, 1, 2, math.nan, 9, 9, 9], 3.0, 3.5),
        ([9, 9, 9, 2, 1, 2, 9, 9], 3.0, 5.5),  # what is high below the lowest is no edge
        ([3, 2, 1, 2, 4, 1.5, 1.5, 9], 3.0, 3.5),  # the first, not the last
        ([3, 2, 1, 1, 1, 1, 1, 1], 3.0, None),
        ([3, 2, 1, 1, 1, 1, 1, 0], 3.0, None),
        ([5, 6, 7, 8, 9, 9, 9, 9], 3.0, 0.0),  # above it from the first on
        ([math.inf] * 8, 3.0, 0.0),
    ],
)
def test_the_edge_is_where_losses_first_come_above_a_limit(
    losses: list[float], limit: float, found: float | None
) -> None:
    at = edge(LEVELS, losses, limit)
    assert at is None if found is None else at == pytest.approx(found)


@given(st.lists(st.floats(0.5, 3.0) | st.just(math.inf), min_size=2, max_size=16), st.floats(1, 2))
def test_below_the_edge_and_above_the_lowest_nothing_is_above_the_limit(
    losses: list[float], limit: float
) -> None:
    xs = [float(k) for k in range(len(losses))]
    at, best = edge(xs, losses, limit), losses.index(min(losses))
    if min(losses) > limit:
        assert at == 0.0
        return
    last = len(losses) if at is None else math.ceil(at)
    assert all(y <= limit for y in losses[best:last])
    if at is not None:
        assert best < at <= len(losses) - 1
        assert losses[math.ceil(at)] > limit or losses[math.floor(at) + 1] > limit
