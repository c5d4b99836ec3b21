"""The race as a pure rule: what it finds, what it leaves alone, what it survives."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_scale.race import SHARES, Level, Parabola, Race, shape

S = 4000
SIZES = (*range(1, 10), 16, 64)


def play(rule: Race, loss: Callable[[float], float]) -> list[str]:
    """Run all heats; `loss` is given the multiplier that the replica stands for."""
    said = []
    while not rule.over:
        heat = rule.heat()
        c = rule.translation(heat.stage)
        levels = [Level() for _ in range(rule.size)]
        for place, multiplier in zip(heat.levels, heat.multipliers, strict=True):
            levels[place] += Level.of(loss(multiplier * c))
        said.append(rule.close(levels))
    return said


def bowl(best: float, noise: float = 0.0, seed: int = 0) -> Callable[[float], float]:
    """2 + ln(x / best)^2 / 10 with noise; diverges at a hundred times the best."""
    rng = random.Random(seed)

    def loss(x: float) -> float:
        if x > 100 * best:
            return math.nan
        return 2.0 + 0.1 * math.log(x / best) ** 2 + rng.gauss(0.0, noise)

    return loss


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("best", [1 / 30, 0.1, 0.5, 3.0, 10.0, 60.0])
def test_finds_the_minimum_of_a_bowl(n: int, best: float) -> None:
    rule = Race(replicas=n, total_steps=S, adaptive=True)
    play(rule, bowl(best))
    assert rule.scale == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_what_is_found_does_not_depend_on_the_family(n: int) -> None:
    """The translation moves the heats' learning rates, never the comparison."""
    found = []
    for adaptive in (True, False):
        rule = Race(replicas=n, total_steps=S, adaptive=adaptive)
        play(rule, bowl(7.0))
        found.append(rule.scale)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_with_noise_within_a_factor_of_two(n: int) -> None:
    off = []
    for seed in range(100):
        rule = Race(replicas=n, total_steps=S, adaptive=True)
        play(rule, bowl(0.1, noise=0.02, seed=seed))
        off.append(abs(math.log2(rule.scale / 0.1)))
    assert numpy.quantile(off, 0.9) < 1.0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("value", [2.0, math.nan, math.inf])
def test_equal_or_no_losses_leave_the_schedule_alone(n: int, value: float) -> None:
    rule = Race(replicas=n, total_steps=S, adaptive=True)
    said = play(rule, lambda _: value)
    assert rule.scale == 1.0
    assert "stays" in said[-1]


@pytest.mark.parametrize("n", [2, 4, 8, 9, 64])
def test_the_learning_rate_given_is_a_level_of_both_stages(n: int) -> None:
    rule = Race(replicas=n, total_steps=S, adaptive=True)
    assert 0.0 in rule.offsets
    while rule.stage == 0:
        rule.close(levels_of(rule, bowl(1.3)))
    assert 0.0 in rule.offsets


def test_a_learning_rate_far_above_the_edge_of_stability_is_left() -> None:
    """Outside the second stage, where its nearest level is nearly as good as the best."""

    def loss(x: float) -> float:
        return 2.0 + 0.001 * math.log(x / 0.1) ** 2 + (5.0 if x > 0.5 else 0.0)

    rule = Race(replicas=8, total_steps=S, adaptive=True)
    play(rule, loss)
    assert rule.scale < 0.5, rule.verdict


def test_the_right_learning_rate_is_kept() -> None:
    """From the best, noise must not move it further than it can tell apart."""
    worst = 0.0
    for seed in range(200):
        rule = Race(replicas=8, total_steps=S, adaptive=True)
        play(rule, bowl(1.0, noise=0.01, seed=seed))
        worst = max(worst, 0.1 * math.log(rule.scale) ** 2)
    assert worst < 0.02  # of a loss of 2: 1 %


def test_missing_replicas_say_nothing() -> None:
    """A level without a finite loss counts as diverged; the others decide."""
    rule = Race(replicas=8, total_steps=S, adaptive=True)
    calls = itertools.count()
    play(rule, lambda x: math.nan if next(calls) % 5 == 4 else bowl(0.25)(x))
    assert abs(math.log2(rule.scale / 0.25)) < 1


@pytest.mark.parametrize("n", SIZES)
def test_costs_its_share_of_the_run_and_no_more(n: int) -> None:
    rule = Race(replicas=n, total_steps=S, adaptive=False)
    steps = 0
    while not rule.over:
        steps += rule.heat().steps
        rule.close(levels_of(rule, bowl(1.0)))
    assert steps == rule.budget <= round(sum(SHARES) * S)
    assert steps > 0.9 * sum(SHARES) * S


def levels_of(rule: Race, loss: Callable[[float], float]) -> list[Level]:
    heat, c = rule.heat(), rule.translation(rule.stage)
    levels = [Level() for _ in range(rule.size)]
    for place, multiplier in zip(heat.levels, heat.multipliers, strict=True):
        levels[place] += Level.of(loss(multiplier * c))
    return levels


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
def test_a_state_of_any_heat_goes_on_bit_for_bit(n: int) -> None:
    rule = Race(replicas=n, total_steps=S, adaptive=True)
    loss = bowl(0.2, noise=0.05)
    while not rule.over:
        other = Race(replicas=n, total_steps=S, adaptive=True)
        other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
        assert other.heat() == rule.heat()
        seen = levels_of(rule, loss)
        assert other.close(copy.deepcopy(seen)) == rule.close(seen)
        assert other.state_dict() == rule.state_dict()


@pytest.mark.parametrize("n", [*range(1, 40), 64, 100, 4096])
def test_teams_are_of_one_size_and_every_level_is_run(n: int) -> None:
    rule = Race(replicas=n, total_steps=S, adaptive=True)
    run: set[int] = set()
    for index in range(rule.heats):
        rule.index = index
        heat = rule.heat()
        assert len(heat.levels) == n
        assert n - heat.judged < rule.team, "fewer than a team sit out"
        for first in range(0, heat.judged, rule.team):
            assert len(set(heat.levels[first : first + rule.team])) == 1
        run |= set(heat.levels[: heat.judged])
    assert run == set(range(rule.size))
    assert 8 <= rule.teams < 16 or n < 8
    assert rule.translation(1) <= Race(replicas=15, total_steps=S, adaptive=True).translation(1), (
        "the batch of a team is never less than a fifteenth of the run's"
    )


def plateau(x: float) -> float:
    """Hardly anything is learnt, and low learning rates look best; bad at ten times, and no number
    at a hundred."""
    bad = math.inf if x > 100.0 else 50.0 if x > 10.0 else 0.0
    return 2.3 - 0.05 / (1 + math.log(x / 0.05) ** 2) + bad


def played(first: float, loss: Callable[[float], float]) -> Race:
    rule = Race(replicas=8, total_steps=S, adaptive=True)
    while not rule.over:
        rule.close(levels_of(rule, loss), Level.of(first))
    return rule


def test_where_nothing_was_learnt_it_goes_down_only_if_the_run_shows_it() -> None:
    rule = played(2.31, plateau)
    assert rule.scale == pytest.approx(0.05, rel=0.2)
    assert rule.contested
    assert rule.promise == pytest.approx((2.31 + 2.25) / 2, abs=0.01)
    assert "only came from a loss of 2.31 to 2.25, so that the run has to show it" in rule.verdict
    copied = Race(replicas=8, total_steps=S, adaptive=True)
    copied.load_state_dict(rule.state_dict())
    assert (copied.contested, copied.promise) == (True, rule.promise)
    rule.settle()
    assert rule.scale == 1.0
    assert not rule.contested
    assert rule.verdict.endswith("nobody looks, the schedule given stays")


def test_where_much_was_learnt_it_does() -> None:
    rule = played(5.0, plateau)
    assert rule.scale == pytest.approx(0.05, rel=0.2)
    assert not rule.contested
    assert rule.promise == pytest.approx((5.0 + 2.25) / 2, abs=0.01)
    assert played(math.nan, plateau).scale == pytest.approx(0.05, rel=0.2)
    assert played(-1.0, plateau).scale == pytest.approx(0.05, rel=0.2)


def test_where_nothing_was_learnt_it_goes_up_and_away_from_what_diverges() -> None:
    """What a run shows is in test_watch; here nobody looks."""
    up = played(2.31, lambda x: plateau(x / 100))
    assert not up.contested
    assert up.promise == math.inf, "hardly anything was learnt"
    assert up.scale == pytest.approx(5.0, rel=0.2)
    for first in (2.31, 5.0):
        rule = played(first, lambda x: plateau(x * 3000))
        assert rule.contested, "its batch and warm-up may bear what a heat could not"
        rule.settle()
        assert rule.scale < 0.01
    rule = played(2.31, lambda x: plateau(x * 30))
    rule.settle()
    assert rule.scale == 1.0, "bad, but finite"


def test_a_state_of_another_race_is_refused_until_it_is_over() -> None:
    rule = Race(replicas=4, total_steps=S, adaptive=True)
    other = Race(replicas=8, total_steps=S, adaptive=True)
    with pytest.raises(ValueError, match="4 replicas and 4000 steps, and this run has 8"):
        other.load_state_dict(rule.state_dict())
    play(rule, bowl(0.2))
    other.load_state_dict(rule.state_dict())
    assert other.over
    assert other.scale == rule.scale


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="total_steps=60 leaves heats of 1 steps"):
        Race(replicas=8, total_steps=60, adaptive=True)
    with pytest.raises(ValueError, match="at least one replica, got 0"):
        Race(replicas=0, total_steps=S, adaptive=True)
    rule = Race(replicas=8, total_steps=S, adaptive=True)
    with pytest.raises(ValueError, match="8 levels, got 3"):
        rule.close([Level()] * 3)
    rule.skip()
    with pytest.raises(ValueError, match="the race is over"):
        rule.close([Level()] * 8)


def test_a_heat_is_a_complete_schedule() -> None:
    values = [shape(i, 100) for i in range(100)]
    assert max(values) == 1.0
    assert values[0] == pytest.approx(0.2)
    assert values[-1] < 1e-3
    assert all(0 <= b <= a for a, b in itertools.pairwise(values[5:]))


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


def test_a_cliff_does_not_pass_for_noise() -> None:
    """Beyond the edge of stability losses are finite and huge: what is found stays below, and is
    found all the same."""

    def loss(x: float) -> float:
        return 2.0 + 0.1 * math.log(x / 10.0) ** 2 + (40.0 if x > 15.0 else 0.0)

    rule = Race(replicas=8, total_steps=S, adaptive=False)
    play(rule, loss)
    assert rule.verdict.startswith("found")
    assert 4.0 < rule.scale < 15.0, rule.verdict


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40))
def test_sums_are_all_that_a_level_needs(losses: list[float]) -> None:
    total = sum((Level.of(x) for x in losses), Level())
    assert total.count == len(losses)
    assert total.mean == pytest.approx(sum(losses) / len(losses), abs=1e-9)
    assert Level.of(math.nan) == Level()
