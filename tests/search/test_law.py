"""The law that translates a trial's best rate into the run's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_scale.search.constants import BATCH, EXTRA, FRESH, REPEATS, TURN
from hdet_scale.search.law import translation

ratios = st.floats(1, 1e6)
steps = st.integers(1, 10**9)


@given(ratios, steps, steps, st.booleans())
def test_it_is_bounded(ratio: float, one: int, two: int, adaptive: bool) -> None:
    c = translation(ratio, min(one, two), max(one, two), adaptive=adaptive)
    power = ratio ** (BATCH if adaptive else 2 * BATCH)
    assert math.isfinite(c)
    assert power / (1 + EXTRA) * (1 - 1e-9) <= c <= power * (1 + 1e-9)


@given(ratios, ratios, st.lists(steps, min_size=3, max_size=3), st.booleans())
def test_it_rises_with_the_batch_ratio_and_the_trial_and_falls_with_the_run(
    one: float, two: float, lengths: list[int], adaptive: bool
) -> None:
    (few, more), (short, middle, long) = sorted((one, two)), sorted(lengths)
    slack = 1 + 1e-9

    def c(ratio: float, trial: int, run: int) -> float:
        return translation(ratio, trial, run, adaptive=adaptive)

    assert c(few, short, long) <= c(more, short, long) * slack
    assert c(few, short, long) <= c(few, middle, long) * slack
    assert c(few, short, long) <= c(few, short, middle) * slack


@given(ratios, st.lists(steps, min_size=3, max_size=3), st.booleans())
def test_two_translations_in_a_row_are_one(
    ratio: float, lengths: list[int], adaptive: bool
) -> None:
    short, middle, long = sorted(lengths)
    first = translation(ratio, short, middle, adaptive=adaptive)
    then = translation(1, middle, long, adaptive=adaptive)
    assert first * then == pytest.approx(translation(ratio, short, long, adaptive=adaptive))


@given(steps, st.booleans())
def test_a_trial_that_is_the_run_needs_no_translation(length: int, adaptive: bool) -> None:
    assert translation(1, length, length, adaptive=adaptive) == 1


@given(ratios, steps, st.floats(1e-3, 1e9), st.floats(1e-3, 1e9), st.booleans())
def test_it_falls_with_the_passes_up_to_a_bound(
    ratio: float, length: int, one: float, two: float, adaptive: bool
) -> None:
    few, many = sorted((one, two))
    fresh = translation(ratio, length, length, adaptive=adaptive)
    c, less = (translation(ratio, length, length, adaptive=adaptive, passes=p) for p in (few, many))
    assert less <= c * (1 + 1e-9)
    assert fresh * FRESH / REPEATS * (1 - 1e-9) <= less <= c <= fresh
    if many <= FRESH or few >= REPEATS:
        assert less == c


def test_values_of_the_passes() -> None:
    for passes, divisor in ((0.3, 1), (8, 1), (16, 2), (40, 5), (64, 8), (1000, 8)):
        assert translation(1, 300, 300, passes=passes) == pytest.approx(1 / divisor)


@pytest.mark.parametrize("passes", [0.0, -1.0, math.inf, math.nan])
def test_passes_must_be_a_positive_number(passes: float) -> None:
    with pytest.raises(ValueError, match=f"passes must be .* got {passes}: give"):
        translation(1, 10, 100, passes=passes)


def test_values() -> None:
    assert translation(8, 300, 300) == pytest.approx(8**BATCH)
    assert translation(8, 300, 300, adaptive=False) == pytest.approx(64**BATCH)
    # At h = TURN half of EXTRA is left, at 3 TURN a quarter, at 9 TURN a tenth.
    half, quarter, tenth = (1 + EXTRA / n for n in (2, 4, 10))
    assert translation(1, TURN, 3 * TURN) == pytest.approx(quarter / half)
    assert translation(1, 3 * TURN, 9 * TURN) == pytest.approx(tenth / quarter)
    assert translation(8, TURN, 9 * TURN) == pytest.approx(8**BATCH * tenth / half)
    assert translation(8, TURN, 9 * TURN, adaptive=False) == pytest.approx(64**BATCH * tenth / half)


def test_the_fit() -> None:
    """In octaves, of the runs that the constants were fitted to."""
    assert (BATCH, EXTRA, TURN) == (1 / 3, 2, 300)
    assert math.log2(translation(1, 20, 800)) == pytest.approx(-0.90, abs=0.01)
    assert math.log2(translation(1, 5000, 100_000)) == pytest.approx(-0.14, abs=0.01)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ((0.5, 10, 100), "batch_ratio .* got 0.5"),
        ((math.nan, 10, 100), "batch_ratio .* got nan"),
        ((math.inf, 10, 100), "batch_ratio .* got inf"),
        ((1, 0, 100), "trial_steps .* got 0"),
        ((1, math.nan, 100), "trial_steps .* got nan"),
        ((1, 10, 9), "run_steps must be at least trial_steps, 10, got 9"),
        ((1, 10, math.inf), "run_steps .* got inf"),
    ],
)
def test_nonsense_is_refused(given_: tuple[float, float, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        translation(*given_)
