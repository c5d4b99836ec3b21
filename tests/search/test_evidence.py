"""Evidence: the one test of the search and the watch, in standard errors of paired differences."""

from __future__ import annotations

import math
import statistics

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hdet_scale.search.constants import CLIP, SIGNIFICANT
from hdet_scale.search.evidence import ahead, lead, mean_loss, standard_error

# Multiples of 1/64 below 2^20: their sums and differences are exact, so that a property which
# holds for real numbers holds bit for bit.
EXACT = st.integers(-(2**26), 2**26).map(lambda k: k / 64)
ANY = st.floats(width=32)
NOT_FINITE = [math.inf, -math.inf, math.nan]


def pairs(one: st.SearchStrategy[float], least: int = 2) -> st.SearchStrategy[list[list[float]]]:
    """Losses of two rates on the same batches."""
    sizes = st.integers(least, 12)
    return sizes.flatmap(
        lambda n: st.lists(st.lists(one, min_size=n, max_size=n), min_size=2, max_size=2)
    )


def reference(behind: list[float], below: list[float]) -> float:
    """The same for finite losses, on arrays."""
    d = numpy.subtract(behind, below)
    limit = CLIP * numpy.median(abs(d))
    d = d if limit == 0 else numpy.clip(d, -limit, limit)
    return float(d.mean() / (d.std(ddof=1) / math.sqrt(len(d))))


def test_it_is_the_mean_difference_over_its_standard_error() -> None:
    behind, below = [3.0, 5.0, 4.0, 8.0], [2.0, 3.0, 3.5, 5.0]
    differences = [1.0, 2.0, 0.5, 3.0]
    error = statistics.stdev(differences) / 2
    assert lead(behind, below) == pytest.approx(1.625 / error)
    assert standard_error(differences) == pytest.approx(error)
    assert mean_loss(differences) == 1.625


def test_differences_are_clipped_at_a_multiple_of_their_median_size() -> None:
    """One rate diverges on one of many batches: its error would be as large as its difference."""
    below = [1.0 + 0.1 * j for j in range(9)]
    sizes = [0.9, 1.0, 1.1, 0.8, 1.2, 1.0, 0.9, 1.1]
    behind = [x + d for x, d in zip(below, [*sizes, 1e6], strict=True)]
    clipped = [*sizes, CLIP * statistics.median([*sizes, 1e6])]
    error = statistics.stdev(clipped) / 3
    assert lead(behind, below) == pytest.approx(statistics.fmean(clipped) / error)
    assert lead(behind, below) > 4 > SIGNIFICANT
    unclipped = [a - b for a, b in zip(behind, below, strict=True)]
    assert mean_loss(unclipped) / standard_error(unclipped) < 1.01
    assert lead([x + d for x, d in zip(below, [*sizes, -1e6], strict=True)], below) > 0, (
        "and no single batch turns the sign"
    )


def test_where_most_batches_are_equal_nothing_is_clipped() -> None:
    """The median is zero, and clipping would remove every difference."""
    one, other = [1.0, 1.0, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0]
    assert lead(one, other) == pytest.approx(1.0)
    assert lead(other, one) == pytest.approx(-1.0)


@given(pairs(EXACT))
def test_it_is_the_lead_of_the_reference(two: list[list[float]]) -> None:
    differences = [a - b for a, b in zip(*two, strict=True)]
    limit = CLIP * statistics.median(map(abs, differences)) or math.inf
    clipped = [min(limit, max(-limit, d)) for d in differences]
    assume(standard_error(clipped) > 1e-6 * max(map(abs, clipped)))
    assert lead(*two) == pytest.approx(reference(*two), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("batches", [8, 16])
@pytest.mark.parametrize("tails", [3.0, math.inf], ids=["heavy tails", "normal"])
def test_equal_rates_are_seldom_ahead_of_each_other(batches: int, tails: float) -> None:
    """As often as Student's t is above SIGNIFICANT, with a degree of freedom less than there are
    batches; a quarter more for the clipping. What makes a batch hard is far larger than the noise
    and changes nothing."""
    rng = numpy.random.default_rng(0)

    def noise(*size: int) -> numpy.ndarray:
        return rng.standard_normal(size) if math.isinf(tails) else rng.standard_t(tails, size)

    drawn = rng.standard_normal((200_000, batches))
    t = drawn.mean(1) / (drawn.std(1, ddof=1) / math.sqrt(batches))
    expected, trials = float((t >= SIGNIFICANT).mean()), 4000
    hard = 100.0 * rng.standard_normal((trials, batches))
    one, other = hard + noise(trials, batches), hard + noise(trials, batches)
    found = [ahead(a, b) for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    by_hand = [reference(b, a) >= SIGNIFICANT for a, b in zip(one, other, strict=True)]
    assert found == by_hand
    spread = math.sqrt(expected / trials)
    assert 0 < sum(found) / trials <= 1.25 * expected + 2 * spread


@given(pairs(ANY, least=0))
def test_ahead_is_a_lead_that_is_significant(two: list[list[float]]) -> None:
    one, other = two
    assert ahead(one, other) is (lead(other, one) >= SIGNIFICANT)
    assert not (ahead(one, other) and ahead(other, one))


@given(pairs(ANY, least=0))
def test_it_is_antisymmetric(two: list[list[float]]) -> None:
    one, other = two
    assert lead(one, other) == -lead(other, one)
    assert not math.isnan(lead(one, other))


@given(pairs(ANY, least=0))
def test_an_infinite_loss_decides_the_sign(two: list[list[float]]) -> None:
    one, other = map(mean_loss, two)
    if math.isinf(one) or math.isinf(other):
        assert lead(*two) == (0.0 if one == other else math.copysign(math.inf, one - other))


@given(pairs(EXACT), st.lists(EXACT, min_size=12, max_size=12))
def test_what_makes_a_batch_hard_cancels_out(two: list[list[float]], hard: list[float]) -> None:
    harder = [[x + h for x, h in zip(losses, hard, strict=False)] for losses in two]
    assert lead(*harder) == lead(*two)


@given(pairs(EXACT), st.integers(-20, 20))
def test_the_scale_of_the_loss_does_not_matter(two: list[list[float]], power: int) -> None:
    scaled = [[x * 2.0**power for x in losses] for losses in two]
    assert lead(*scaled) == pytest.approx(lead(*two), rel=1e-9)


@given(pairs(EXACT), st.floats(1e-3, 1e3))
def test_neither_does_a_factor_that_rounds(two: list[list[float]], factor: float) -> None:
    differences = [a - b for a, b in zip(*two, strict=True)]
    size = max(abs(x) for losses in two for x in losses)
    assume(standard_error(differences) > 1e-6 * size)
    scaled = [[x * factor for x in losses] for losses in two]
    assert lead(*scaled) == pytest.approx(lead(*two), rel=1e-6, abs=1e-6)


@given(st.lists(ANY, max_size=12))
def test_equal_losses_lead_by_nothing(losses: list[float]) -> None:
    assert lead(losses, list(losses)) == 0.0


@given(EXACT, EXACT)
def test_on_a_single_batch_nothing_is_significant(one: float, other: float) -> None:
    assert lead([one], [other]) == 0.0
    assert not ahead([min(one, other)], [max(one, other)])
    assert standard_error([one]) == math.inf


@pytest.mark.parametrize("bad", NOT_FINITE)
@given(losses=st.lists(EXACT, min_size=1, max_size=8), at=st.integers(0, 7))
def test_one_batch_that_is_not_finite_loses_to_any_finite_losses(
    bad: float, losses: list[float], at: int
) -> None:
    broken = list(losses)
    broken[at % len(losses)] = bad
    assert mean_loss(broken) == math.inf
    assert standard_error(broken) == math.inf
    assert lead(broken, losses) == math.inf
    assert lead(losses, broken) == -math.inf
    assert ahead(losses, broken)
    assert lead(broken, [bad] * len(losses)) == 0.0


def test_no_losses_are_worse_than_any() -> None:
    assert mean_loss([]) == math.inf
    assert standard_error([]) == math.inf
    assert lead([], []) == 0.0
    assert lead([], [1.0, 1.0]) == math.inf


@given(st.lists(EXACT, min_size=2, max_size=12), st.integers(1, 2**20))
def test_a_difference_that_is_the_same_on_all_batches_is_certain(
    losses: list[float], k: int
) -> None:
    """Its standard error is zero."""
    lower = [x - k / 64 for x in losses]
    assert lead(losses, lower) == math.inf
    assert lead(lower, losses) == -math.inf
    assert ahead(lower, losses)


def test_where_one_has_fewer_batches_the_common_ones_are_compared() -> None:
    assert lead([3.0, 5.0, 100.0], [2.0, 3.0]) == lead([3.0, 5.0], [2.0, 3.0]) == 3.0
    assert lead([2.0, 3.0], [3.0, 5.0, 100.0]) == -3.0


@given(st.lists(EXACT, min_size=2, max_size=12))
def test_the_standard_error_is_that_of_the_mean(losses: list[float]) -> None:
    expected = statistics.stdev(losses) / math.sqrt(len(losses))
    assert standard_error(losses) == pytest.approx(expected)
    assert mean_loss(losses) == pytest.approx(statistics.fmean(losses))
