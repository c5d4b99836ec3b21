"""The decision of a search as a pure rule: what it proposes, what it leaves alone."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_scale.search.decision import LEARNT, TOWARDS, RateSearch
from hdet_scale.search.trials import COARSE, FINE, LONG, STAGES, Level, Stage

S = 4000
SIZES = (*range(1, 10), 16, 64)


def summed(rule: RateSearch, loss: Callable[[float], float]) -> list[Level]:
    """The losses of the trial under way at each level; `loss` is given a replica's multiplier."""
    trial, levels = rule.trial, [Level() for _ in range(rule.size)]
    for replica in range(rule.replicas):
        own, at = Level.of(loss(trial.multiplier(replica))), trial.level(replica)
        levels[at] = Level(levels[at].count + own.count, levels[at].total + own.total)
    return levels


def levels_of(rule: RateSearch, loss: Callable[[float], float]) -> list[Level]:
    """The same; `loss` is given the rate of the run, over the initial one, that a replica's trial
    stands for."""
    c = rule.translation(rule.stage)
    return summed(rule, lambda x: loss(x * c))


def play(rule: RateSearch, loss: Callable[[float], float]) -> list[str]:
    """Run all trials; `loss` by the rate of the run over the initial one."""
    said = []
    while not rule.over:
        said.append(rule.close(levels_of(rule, loss)))
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
@pytest.mark.parametrize("best", [1 / 30, 0.1, 0.4, 3.0, 10.0, 60.0])
def test_finds_the_minimum_of_a_bowl(n: int, best: float) -> None:
    rule = RateSearch(replicas=n, total_steps=S, adaptive=True)
    play(rule, bowl(best))
    assert rule.scale == pytest.approx(best, rel=1e-6)


def stable(edge: float, best: float, start: float = 3.0) -> Callable[[float], float]:
    """By the learning rate of the trial itself: lowest at `best`, diverged above `edge`."""

    def loss(x: float) -> float:
        return 2.0 + 0.02 * math.log(x / best) ** 2 if x < edge else start + 7.0

    return loss


def searched(loss: Callable[[float], float], *, n: int = 8, first: float = 3.0) -> RateSearch:
    """A search of an optimizer that does not divide by the gradient's size; `loss` by the learning
    rate of the trial."""
    rule = RateSearch(replicas=n, total_steps=S, adaptive=False)
    while not rule.over:
        rule.close(summed(rule, loss), Level.of(first))
    return rule


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("edge", [1 / 30, 0.1, 0.5, 25.0, 60.0, 300.0])
def test_without_a_division_by_the_gradient_the_edge_is_what_counts(n: int, edge: float) -> None:
    """Within half of the distance of two levels of the second stage. Where trials are best, which
    the noise of their small batch decides, makes no difference."""
    proposed = set()
    for best in (edge / 4, edge / 30):
        rule = searched(stable(edge, best), n=n)
        proposed.add(rule.scale)
        assert abs(math.log2(rule.scale / (edge * rule.translation(1)))) <= 2 / 7 + 1e-9
    assert len(proposed) == 1
    assert rule.target == pytest.approx(2.5, abs=0.1)
    assert f"trials diverge at {rule.scale / rule.translation(1):.3g} x" in rule.verdict


@pytest.mark.parametrize("edge", [0.05, 0.2, 20.0, 60.0])
def test_networks_that_died_are_beyond_the_edge(edge: float) -> None:
    """If the initial loss is worse than chance, they end below it, at rates over decades."""
    learns = stable(edge, edge / 4)
    rule = searched(lambda x: learns(x) - 0.5 if x < edge else 2.303, first=2.49)
    assert abs(math.log2(rule.scale / (edge * rule.translation(1)))) <= 2 / 7 + 1e-9


@pytest.mark.parametrize("edge", [1.0, 2.0, 3.6])
def test_an_initial_rate_near_the_edge_stays(edge: float) -> None:
    """From below the edge to well above the proposed rate."""
    rule = searched(stable(edge, edge / 10))
    assert rule.scale == 1.0
    assert "too near to tell apart, the initial rate stays" in rule.verdict


def test_trials_that_never_diverge_are_not_extrapolated() -> None:
    rule = searched(stable(math.inf, 50.0))
    assert 10.0 < rule.scale <= 4.0**3 * 4.0
    assert not rule.contested


@pytest.mark.parametrize("n", SIZES)
def test_where_no_trial_stays_finite_lower_rates_are_next(n: int) -> None:
    c = RateSearch(replicas=n, total_steps=S, adaptive=False).translation(0)
    limit = 4.0**-4 / c / 3
    rule = searched(lambda x: 2.0 if x < limit else math.inf, n=n)
    assert rule.contested, "the run's own batch and warm-up may allow more"
    assert abs(math.log2(rule.scale / (limit * c))) < 0.5
    rule = searched(lambda _: math.nan, n=n)
    assert rule.scale == 1.0
    assert "no trial of the fine stage stayed finite" in rule.verdict


def test_a_lower_rate_is_contested_if_the_trial_at_the_initial_rate_diverged() -> None:
    worse = searched(stable(0.05, 0.01))
    assert worse.scale < 0.1
    assert not worse.contested
    torn = searched(lambda x: stable(0.05, 0.01)(x) if x < 2.0 else math.inf)
    assert torn.contested, "the trial at the initial rate stayed finite, the next did not"
    assert torn.target == pytest.approx(2.5, abs=0.1)
    torn.settle()
    assert torn.scale == worse.scale


@pytest.mark.parametrize("n", [2, 8, 64])
def test_with_noise_within_a_factor_of_two(n: int) -> None:
    off = []
    for seed in range(100):
        rule = RateSearch(replicas=n, total_steps=S, adaptive=True)
        play(rule, bowl(0.1, noise=0.02, seed=seed))
        off.append(abs(math.log2(rule.scale / 0.1)))
    assert numpy.quantile(off, 0.9) < 1.0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("value", [2.0, math.nan, math.inf])
def test_equal_or_no_losses_leave_the_initial_rate(n: int, value: float) -> None:
    rule = RateSearch(replicas=n, total_steps=S, adaptive=True)
    said = play(rule, lambda _: value)
    assert rule.scale == 1.0
    assert "stays" in said[-1]


@pytest.mark.parametrize("n", [2, 4, 8, 9, 64])
def test_the_initial_rate_is_a_level_of_both_stages(n: int) -> None:
    rule = RateSearch(replicas=n, total_steps=S, adaptive=True)
    assert 0.0 in rule.offsets
    while rule.stage == 0:
        rule.close(levels_of(rule, bowl(1.3)))
    assert 0.0 in rule.offsets


def test_an_initial_rate_far_above_the_edge_of_stability_is_lowered() -> None:
    """Outside the second stage, where its nearest level is nearly as good as the best."""

    def loss(x: float) -> float:
        return 2.0 + 0.001 * math.log(x / 0.1) ** 2 + (5.0 if x > 0.5 else 0.0)

    rule = RateSearch(replicas=8, total_steps=S, adaptive=True)
    play(rule, loss)
    assert rule.scale < 0.5, rule.verdict


def test_the_right_initial_rate_is_kept() -> None:
    """From the best, noise must not move it further than it can tell apart."""
    worst = 0.0
    for seed in range(200):
        rule = RateSearch(replicas=8, total_steps=S, adaptive=True)
        play(rule, bowl(1.0, noise=0.01, seed=seed))
        worst = max(worst, 0.1 * math.log(rule.scale) ** 2)
    assert worst < 0.02  # of a loss of 2: 1 %


def test_replicas_without_a_loss_are_left_out() -> None:
    """A level without a finite loss counts as diverged; the others decide."""
    rule = RateSearch(replicas=8, total_steps=S, adaptive=True)
    calls = itertools.count()
    play(rule, lambda x: math.nan if next(calls) % 5 == 4 else bowl(0.25)(x))
    assert abs(math.log2(rule.scale / 0.25)) < 1


@pytest.mark.parametrize("n", SIZES)
def test_costs_its_share_of_the_run_and_no_more(n: int) -> None:
    rule = RateSearch(replicas=n, total_steps=S, adaptive=False)
    steps = 0
    while not rule.over:
        steps += rule.trial.steps
        rule.close(levels_of(rule, bowl(1.0)))
    share = COARSE.share + FINE.share
    assert steps == rule.budget <= round(share * S)
    assert steps > 0.9 * share * S


@pytest.mark.parametrize("n", SIZES)
def test_a_search_with_a_long_stage_costs_its_share(n: int) -> None:
    rule = RateSearch(replicas=n, total_steps=S, adaptive=False)
    steps = trials = 0
    while not rule.over:
        steps, trials = steps + rule.trial.steps, trials + 1
        rule.close(levels_of(rule, lambda _: 2.3), Level.of(2.31))
        assert rule.trials_run == trials
    share = COARSE.share + LONG.share
    assert 0.9 * share * S < steps <= round(share * S)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
def test_a_state_after_any_trial_goes_on_bit_for_bit(n: int) -> None:
    rule = RateSearch(replicas=n, total_steps=S, adaptive=True)
    loss = bowl(0.2, noise=0.05)
    while not rule.over:
        other = RateSearch(replicas=n, total_steps=S, adaptive=True)
        other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
        assert other.trial == rule.trial
        seen = levels_of(rule, loss)
        assert other.close(copy.deepcopy(seen)) == rule.close(seen)
        assert other.state_dict() == rule.state_dict()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
@pytest.mark.parametrize("n", [*range(1, 40), 64, 100, 4096])
def test_teams_are_of_one_size_and_every_level_is_run(n: int, stage: Stage) -> None:
    rule = RateSearch(replicas=n, total_steps=S, adaptive=True)
    run: set[int] = set()
    for index in range(stage.trials(n)):
        rule.load_state_dict(rule.state_dict() | {"stage": STAGES.index(stage), "index": index})
        trial = rule.trial
        assert trial.team == rule.team
        assert trial.translation == rule.translation(rule.stage)
        levels = trial.levels(n)
        assert levels == [trial.level(r) for r in range(n)]
        members = [r for r in range(n) if trial.counts(r)]
        assert members == list(range(len(members)))
        assert n - len(members) < rule.team, "fewer than a team are left over"
        for first in range(0, len(members), rule.team):
            assert len(set(levels[first : first + rule.team])) == 1
        run |= set(levels[: len(members)])
        rates = [math.exp(x) / trial.translation for x in rule.offsets]
        assert [trial.multiplier(r) for r in range(n)] == [rates[k] for k in levels]
    assert run == set(range(rule.size))
    assert stage.parts <= stage.teams(n) < 2 * stage.parts or n < stage.parts, (
        "the batch of a team does not shrink with the number of replicas"
    )


def plateau(edge: float) -> Callable[[float], float]:
    """By the learning rate of the trial: little is learnt, most at a tenth of the edge."""

    def loss(x: float) -> float:
        bad = math.inf if x > 100.0 * edge else 50.0 if x > edge else 0.0
        return 2.3 - 0.05 / (1 + math.log(10 * x / edge) ** 2) + bad

    return loss


def played(first: float, loss: Callable[[float], float]) -> RateSearch:
    rule = RateSearch(replicas=8, total_steps=S, adaptive=True)
    while not rule.over:
        c = rule.translation(rule.stage)
        rule.close(levels_of(rule, lambda x, c=c: loss(x / c)), Level.of(first))
    return rule


@pytest.mark.parametrize("edge", [0.05, 0.4, 40.0, 300.0])
def test_where_no_trial_learns_the_rate_goes_towards_the_edge_of_long_trials(edge: float) -> None:
    """Up or down, where even long trials learn nothing: their minimum is noise, their edge is
    not."""
    rule = played(2.31, plateau(edge))
    low = edge / 10
    assert abs(math.log(rule.scale / low) - TOWARDS * math.log(edge / low)) < 0.5
    assert "between long trials that learn next to nothing at" in rule.verdict
    assert rule.target == pytest.approx((2.31 + 2.25) / 2, abs=0.01)
    assert not rule.contested


def test_a_long_stage_that_points_nearby_leaves_the_initial_rate() -> None:
    rule = played(2.31, plateau(4.0))
    assert rule.scale == 1.0
    assert "too near to tell apart" in rule.verdict


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("best", [0.02, 0.1, 10.0, 40.0])
def test_where_long_trials_learn_their_minimum_counts(best: float, adaptive: bool) -> None:
    """Of either family: short trials of small teams learn nothing, long ones show a curve."""
    rule = RateSearch(replicas=8, total_steps=S, adaptive=adaptive)

    def loss(x: float) -> float:
        if x > 8 * best:
            return math.inf
        return bowl(best)(x) if STAGES[rule.stage] is LONG else 2.99

    said = []
    while not rule.over:
        c = rule.translation(rule.stage)
        said.append(rule.close(levels_of(rule, lambda x, c=c: loss(x / c)), Level.of(3.0)))
    assert "trials learnt next to nothing (loss 2.99, 3 before)" in said[0]
    assert f"proposed {rule.scale:.3g} x the initial rate, long trials are best at" in said[-1]
    assert abs(math.log2(rule.scale / best)) < 0.8


def test_networks_that_died_seem_best_until_a_long_trial_learns() -> None:
    """The loss of chance at rates over four decades; long trials learn at one of them."""

    def loss(x: float, stage: Stage) -> float:
        dead = 2.3026
        return dead - 0.5 if stage is LONG and 0.04 < x < 0.25 else dead if x > 0.25 else 2.36

    rule = RateSearch(replicas=8, total_steps=S, adaptive=False)
    while not rule.over:
        stage, c = STAGES[rule.stage], rule.translation(rule.stage)
        rule.close(levels_of(rule, lambda x, c=c, s=stage: loss(x / c, s)), Level.of(2.4))
    assert 0.03 < rule.scale < 0.3, rule.verdict


@pytest.mark.parametrize("adaptive", [True, False])
def test_an_initial_rate_that_learnt_as_much_as_the_best_stays(adaptive: bool) -> None:
    rule = RateSearch(replicas=8, total_steps=S, adaptive=adaptive)

    def loss(x: float) -> float:
        if x > 1.5:
            return math.inf
        if STAGES[rule.stage] is COARSE:
            return 2.99
        return 2.0 if x > 0.2 else 1.95 if x > 0.02 else 2.5

    while not rule.over:
        c = rule.translation(rule.stage)
        rule.close(levels_of(rule, lambda x, c=c: loss(x / c)), Level.of(3.0))
    assert rule.scale == 1.0
    assert "at the initial rate, which stays" in rule.verdict


@pytest.mark.parametrize("n", SIZES)
def test_noise_alone_moves_nothing_of_the_second_family(n: int) -> None:
    """Losses just above and below the initial one, and nothing else."""
    for seed in range(30):
        rng = random.Random(seed)
        rule = searched(lambda x, r=rng: 3.0 + r.gauss(0.0, 0.01) if x < 8.0 else 50.0, n=n)
        assert rule.scale == 1.0, rule.verdict
        assert "stays" in rule.verdict


def test_an_initial_rate_that_diverged_is_lowered_even_if_nothing_was_learnt() -> None:
    rng = random.Random(0)
    rule = searched(lambda x: 3.0 + rng.gauss(0.0, 0.01) if x < 0.1 else 50.0)
    assert rule.scale < 0.3


def test_where_no_trial_reduces_the_loss_the_initial_rate_stays() -> None:
    """Also for losses below zero, of which a share means nothing."""
    for first in (3.0, -3.0):
        rule = searched(lambda x, y=first: y + 0.2 + 0.1 * abs(math.log(x)), first=first)
        assert rule.scale == 1.0
        assert "stays" in rule.verdict


def test_a_state_of_another_version_is_refused() -> None:
    rule = RateSearch(replicas=4, total_steps=S, adaptive=True)
    old = {k: v for k, v in rule.state_dict().items() if k != "version"}
    with pytest.raises(ValueError, match="has version None and this version of hdet_scale reads 3"):
        rule.check_state(old)


def test_where_much_was_learnt_the_minimum_counts_and_nothing_is_contested() -> None:
    rule = played(5.0, plateau(200.0))
    assert rule.scale == pytest.approx(20.0 * rule.translation(1), rel=0.25)
    assert not rule.contested
    assert rule.target == pytest.approx((5.0 + 2.25) / 2, abs=0.01)
    unknown = played(math.nan, plateau(200.0))
    below_zero = played(-2.0, lambda x: plateau(200.0)(x) - 7.0)
    for again in (unknown, below_zero):
        assert again.scale == pytest.approx(rule.scale, rel=0.1)
        assert not again.contested
    down = played(5.0, plateau(0.5))
    assert down.scale < 0.1
    assert not down.contested
    torn = played(5.0, plateau(0.02))
    assert torn.contested, "the trial at the initial rate diverged"


@given(st.floats(0.0, 0.3))
def test_a_long_stage_follows_where_less_than_a_share_of_the_loss_was_removed(share: float) -> None:
    rule = RateSearch(replicas=8, total_steps=S, adaptive=True)
    c = rule.translation(0)
    first = Level.of(2.25 / (1 - share))
    long = "next to nothing" in rule.close(levels_of(rule, lambda x: plateau(40.0)(x / c)), first)
    if abs(share - LEARNT) > 0.01:
        assert long is (share < LEARNT)


def test_a_state_of_another_search_is_refused_until_it_is_over() -> None:
    rule = RateSearch(replicas=4, total_steps=S, adaptive=True)
    other = RateSearch(replicas=8, total_steps=S, adaptive=True)
    with pytest.raises(ValueError, match="4 replicas and 4000 steps, and this run has 8"):
        other.load_state_dict(rule.state_dict())
    play(rule, bowl(0.2))
    other.load_state_dict(rule.state_dict())
    assert other.over
    assert other.scale == rule.scale


def test_a_run_that_is_too_short_checks_a_state_all_the_same() -> None:
    """With trials of no steps at all."""
    rule = RateSearch(replicas=4, total_steps=S, adaptive=True)
    short = RateSearch(replicas=4, total_steps=30, adaptive=True, idle=True)
    assert short.over
    assert short.scale == 1.0
    assert not short.ran
    with pytest.raises(ValueError, match="4 replicas and 4000 steps, and this run has 4 and 30"):
        short.check_state(rule.state_dict())
    with pytest.raises(ValueError, match="the search is over: there is no trial"):
        _ = short.trial


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="total_steps=60 leaves trials of 1 steps"):
        RateSearch(replicas=8, total_steps=60, adaptive=True)
    with pytest.raises(ValueError, match="at least one replica, got 0"):
        RateSearch(replicas=0, total_steps=S, adaptive=True)
    rule = RateSearch(replicas=8, total_steps=S, adaptive=True)
    with pytest.raises(ValueError, match="8 levels, got 3"):
        rule.close([Level()] * 3)
    rule.skip()
    with pytest.raises(ValueError, match="the search is over"):
        rule.close([Level()] * 8)


def test_a_cliff_is_not_taken_for_noise() -> None:
    """Beyond the edge of stability losses are finite and huge: the proposed rate stays below."""

    def loss(x: float) -> float:
        return 2.0 + 0.1 * math.log(x / 10.0) ** 2 + (40.0 if x > 15.0 else 0.0)

    rule = RateSearch(replicas=8, total_steps=S, adaptive=True)
    play(rule, loss)
    assert rule.verdict.startswith("proposed")
    assert 4.0 < rule.scale < 15.0, rule.verdict


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40))
def test_a_level_needs_only_a_count_and_a_sum(losses: list[float]) -> None:
    rule, rest = RateSearch(replicas=1, total_steps=S, adaptive=True), [Level()] * 7
    rule.seen[0] = Level.of(losses[0])
    for loss in losses[1:]:
        rule.index = 0
        rule.close([Level.of(loss), *rest])
    assert rule.seen[0].count == len(losses)
    assert rule.seen[0].mean == pytest.approx(sum(losses) / len(losses), abs=1e-9)
    assert all(level.mean == math.inf for level in rule.seen[1:])
    assert Level.of(math.nan) == Level()


@pytest.mark.parametrize(("noise", "duel"), [(0.0, False), (0.25, True)])
def test_a_lower_rate_by_noisy_levels_is_a_duel_if_the_initial_rate_learnt_too(
    noise: float, duel: bool
) -> None:
    """The noise of trials of few examples has a minimum of its own."""
    rng = random.Random(3)

    def loss(x: float) -> float:
        return 2.0 + 0.05 * math.log(x / 0.05) ** 2 + rng.gauss(0.0, noise)

    rule = played(3.0, loss)
    assert rule.scale < 0.4
    assert rule.duel is rule.contested is duel
    assert ("the levels are noisy" in rule.verdict) is duel
    copied = RateSearch(replicas=8, total_steps=S, adaptive=True)
    copied.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert copied.duel is duel
    rule.settle()
    assert (rule.scale == 1.0) is duel
    torn = played(3.0, lambda x: loss(x) + (9.0 if x > 0.2 else 0.0))
    assert not torn.duel, "the trial at the initial rate diverged"
    up = played(3.0, lambda x: loss(x / 1000))
    assert not up.contested
