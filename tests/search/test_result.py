"""The result of a search: which rates it names, the errors of its curve, and what it cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest

from hdet_scale.search.constants import STEP
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.evidence import standard_error
from hdet_scale.search.result import curve_of, result_of

S = 4000
PEAKS = [0.1, 0.002]
HARD = [0.0, 0.7, 0.2, 0.4]
START = 9.0


def ended(
    curve: Callable[[int], float],
    *,
    start: float | None = START,
    head: float | None = None,
    total_steps: int = S,
    replicas: int = 2,
) -> RateSearch:
    """A search over a loss curve by offset, with noise that differs from rate to rate."""
    rule = RateSearch(replicas=replicas, total_steps=total_steps, adaptive=True)

    def losses(mean: float, noise: float) -> list[float]:
        return [mean + hard + 1e-3 * noise * j for j, hard in enumerate(HARD)]

    while not rule.over:
        trial = rule.trial
        told = {k: losses(curve(trial.offsets[k]), trial.offsets[k]) for k in trial.arms()}
        first, on = (([] if x is None else losses(x, 0.0)) for x in (start, head))
        rule.close(told, first, on)
    return rule


def bowl(best: float) -> Callable[[int], float]:
    return lambda offset: 1.0 + abs(offset - best)


def test_where_the_initial_rate_stays_nothing_is_proposed() -> None:
    rule = ended(bowl(0.0), head=5.0)
    result = result_of(rule, PEAKS)
    assert result.initial == result.taken == tuple(PEAKS)
    assert result.proposed is None
    assert result.verdict == rule.verdict
    assert result.initial_loss == pytest.approx(START + statistics.fmean(HARD))
    assert result.head_start
    assert str(result) == (
        f"max_lr stays 0.1 ({rule.verdict}); {rule.steps} steps, {rule.steps / S:.1%}; the run "
        "begins with the weights of the search"
    )


@pytest.mark.parametrize("best", [-2, -1, 1, 2])
def test_a_proposed_rate_is_taken_for_every_group(best: int) -> None:
    rule = ended(bowl(best))
    result = result_of(rule, PEAKS)
    assert result.initial == tuple(PEAKS)
    assert result.proposed == result.taken == tuple(peak * STEP**best for peak in PEAKS)
    assert not result.head_start
    assert str(result) == (
        f"max_lr 0.1 -> {0.1 * STEP**best:.3g} ({rule.verdict}); {rule.steps} steps, "
        f"{rule.steps / S:.1%}; the run begins with the initial weights"
    )


def test_the_curve_has_every_rate_in_order_and_paired_errors() -> None:
    """What makes a batch hard is in the error of the initial rate's loss, and in no other."""
    rule = ended(bowl(2.0))
    points = curve_of(rule, PEAKS)
    assert points == result_of(rule, PEAKS).curve
    tried = [("first", -1), ("first", 0), ("first", 1)]
    tried += [("second", 0), ("second", 1), ("second", 2)]
    assert [(arm.stage, arm.offset) for arm in rule.arms] == tried
    for arm, point in zip(rule.arms, points, strict=True):
        assert point.stage == arm.stage
        assert point.rates == tuple(peak * STEP**arm.offset for peak in PEAKS)
        assert point.loss == pytest.approx(statistics.fmean(arm.losses))
        initial = next(x for x in rule.arms if x.stage == arm.stage and x.offset == 0)
        paired = [a - b for a, b in zip(arm.losses, initial.losses, strict=True)]
        own = arm is initial
        assert point.error == standard_error(arm.losses if own else paired)
        assert (point.error > 0.1) is own


def test_a_trial_that_diverged_has_no_error() -> None:
    points = curve_of(ended(lambda x: 1.0 if x <= 0 else math.nan), PEAKS)
    up = next(point for point in points if point.rates[0] > PEAKS[0])
    assert (up.loss, up.error) == (math.inf, math.inf)
    points = curve_of(ended(lambda x: math.inf if x == 0 else 2.0 + x), PEAKS)
    down, initial, _ = points[:3]
    assert (initial.loss, initial.error) == (math.inf, math.inf)
    assert down.loss < math.inf
    assert down.error == math.inf, "the difference to a loss that is not finite"


def test_the_curve_of_a_search_under_way_has_the_rates_whose_rounds_have_ended() -> None:
    """Without the initial rate's trial yet, an error is that of the loss itself."""
    rule = RateSearch(replicas=2, total_steps=S, adaptive=True)
    assert curve_of(rule, PEAKS) == ()
    rule.close({0: [1.0, 3.0]})
    (point,) = curve_of(rule, PEAKS)
    assert point.rates == tuple(peak * STEP**-1 for peak in PEAKS)
    assert (point.loss, point.error) == (2.0, 1.0)


def test_without_a_loss_of_the_initial_weights_it_is_not_a_number() -> None:
    assert math.isnan(result_of(ended(bowl(0.0), start=None), PEAKS).initial_loss)
    assert result_of(ended(bowl(0.0), start=math.nan), PEAKS).initial_loss == math.inf


def test_the_result_of_no_search_is_the_initial_rate() -> None:
    rule = RateSearch(replicas=4, total_steps=S, adaptive=True)
    rule.skip()
    result = result_of(rule, PEAKS)
    assert (result.taken, result.proposed, result.curve) == (tuple(PEAKS), None, ())
    assert (result.steps, result.cost, result.head_start) == (0, 0.0, False)


@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("total_steps", [1000, 12345])
def test_the_cost_is_a_share_of_the_whole_run(total_steps: int, replicas: int) -> None:
    rule = ended(bowl(9.0), total_steps=total_steps, replicas=replicas)
    result = result_of(rule, PEAKS)
    assert result.steps == rule.longest
    assert result.cost == result.steps / total_steps
