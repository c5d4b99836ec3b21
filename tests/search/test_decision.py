"""The search as a pure rule: its rounds, its verdict, its bounds, and that it can be resumed.

Losses are a mean, plus what makes a batch hard, common to all rates, plus noise of each rate.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_scale.search.constants import (
    CLEAR,
    GAIN,
    HEAD_START,
    LEAST_STEPS,
    REPEATS,
    SIGNIFICANT,
    STEP,
)
from hdet_scale.search.decision import NEAR, SEARCH_VERSION, RateSearch
from hdet_scale.search.evidence import ahead, lead
from hdet_scale.search.law import translation
from hdet_scale.search.trials import SHARES, Trial, rounds_of, team_size, trial_steps
from tests.support.trials import short_trials

S = 4000
BATCHES = 8
START = 9.0
SIZES = (1, 2, 3, 4, 6, 8, 64)
UP, DOWN = (0, 1, 2), (-2, -1, 0)
Curve = Callable[[str, int], float]


def search(replicas: int = 8, total_steps: int = S, **options: Any) -> RateSearch:
    return RateSearch(replicas=replicas, total_steps=total_steps, **({"adaptive": True} | options))


def batches(mean: float, *, noise: float = 0.0, seed: object = 0) -> list[float]:
    own = random.Random(f"{seed}")
    return [mean + 0.3 * j + noise * own.gauss(0, 1) for j in range(BATCHES)]


def by(errors: float, mean: float = 1.0) -> list[float]:
    """Losses that are `errors` standard errors below those of batches(mean); above, if negative."""
    width, size = math.sqrt(BATCHES - 1) / errors, math.copysign(0.1, errors)
    return [x - size * (1 + width * (-1) ** j) for j, x in enumerate(batches(mean))]


class Fed:
    """A search that gets its losses from a curve over stages and offsets until it is over.

    `head` is the loss of what goes on with the run, at any rate or by its rate.
    """

    def __init__(
        self,
        rule: RateSearch,
        curve: Curve,
        *,
        start: float | None = START,
        head: float | Mapping[float, float] | None = None,
        noise: float = 1e-4,
        seed: int = 0,
    ) -> None:
        self.rule, self.curve, self.noise, self.seed = rule, curve, noise, seed
        self.start = [] if start is None else batches(start)
        self.head = head
        self.trials: list[Trial] = []
        self.said: list[str] = []

    def losses(self, stage: str, offset: int) -> list[float]:
        """A function of the rate alone, so that a resumed search sees the same."""
        seed = (self.seed, stage, offset)
        return batches(self.curve(stage, offset), noise=self.noise, seed=seed)

    def one(self) -> None:
        trial = self.rule.trial
        self.trials.append(trial)
        told = {arm: self.losses(trial.stage, trial.offsets[arm]) for arm in trial.arms()}
        head = self.head[trial.head] if isinstance(self.head, Mapping) else self.head
        self.said.append(self.rule.close(told, self.start, [] if head is None else batches(head)))

    def all(self) -> Fed:
        while not self.rule.over:
            assert self.rule.scale == 1.0, "until it is over"
            self.one()
        assert self.rule.steps == sum(trial.steps for trial in self.trials) <= self.rule.longest
        assert self.rule.trials_run == len(self.trials)
        assert self.rule.last_trial == self.trials[-1].steps
        assert self.rule.ran
        return self

    @property
    def stages(self) -> dict[str, tuple[int, ...]]:
        """The rates of each stage."""
        return {trial.stage: trial.offsets for trial in self.trials}


def bowl(best: float) -> Curve:
    return lambda _, offset: 1.0 + abs(offset - best)


def in_second(at: Mapping[int, float], towards: int) -> Curve:
    """These losses in the second stage; the first one points up, down or nowhere (1, -1, 0)."""
    first = {0: {-1: 2.0, 0: 2.0, 1: 2.0}, 1: {-1: 3.0, 0: 2.0, 1: 1.0}}
    first[-1] = {-1: 1.0, 0: 2.0, 1: 3.0}
    return lambda stage, offset: (first[towards] if stage == "first" else at)[offset]


# -- rounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "team", "rounds"),
    [
        (1, 1, [[0], [1], [2]]),
        (2, 1, [[0], [1], [2]]),
        (3, 1, [[0, 1], [0, 2]]),
        (4, 1, [[0, 1, 2]]),
        (6, 1, [[0, 1, 2]]),
        (8, 2, [[0, 1, 2]]),
        (64, 16, [[0, 1, 2]]),
    ],
)
@pytest.mark.parametrize("adaptive", [True, False])
def test_the_rates_of_a_stage_are_divided_among_the_teams(
    n: int, team: int, rounds: list[list[int]], adaptive: bool
) -> None:
    with mock.patch("hdet_scale.search.trials.TEAMS", 4):
        fed = Fed(search(n, adaptive=adaptive), lambda *_: 2.0, noise=0.0).all()
        assert fed.rule.team == team
        assert fed.stages == {"first": NEAR, "second": NEAR}
        for stage in SHARES:
            trials = [trial for trial in fed.trials if trial.stage == stage]
            assert [trial.arms() for trial in trials] == rounds
            assert [trial.index for trial in trials] == list(range(len(rounds)))
            for trial in trials:
                assert trial.has_head_start is (n > 1)
                assert (trial.team, trial.teams) == (team, n // team)
                assert trial.steps == trial_steps(stage, n, S, len(NEAR))
                c = translation(n / team, trial.steps, S, adaptive=adaptive)
                assert trial.translation == c
        assert fed.rule.steps == fed.rule.longest
        assert [len(fed.rule.arms), len(set(fed.said[:-1]) - {""})] == [2 * len(NEAR), 1]


def test_a_rate_that_is_tried_twice_counts_once() -> None:
    """With three replicas the first rate is tried in both rounds; the first result stays."""
    rule = search(3)
    assert rule.trial.arms() == [0, 1]
    rule.close({0: [1.0, 1.1], 1: [2.0, 2.1]})
    assert rule.trial.arms() == [0, 2]
    rule.close({0: [7.0, 7.1], 2: [3.0, 3.1]})
    assert [(arm.offset, arm.losses) for arm in rule.arms] == [
        (-1, (1.0, 1.1)),
        (0, (2.0, 2.1)),
        (1, (3.0, 3.1)),
    ]


# -- the first stage ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_an_initial_rate_that_is_ahead_of_both_neighbours_ends_the_search(n: int) -> None:
    fed = Fed(search(n), lambda _, x: 1.0 + 4.0 * abs(x)).all()
    assert fed.stages == {"first": NEAR}
    assert fed.rule.scale == 1.0
    assert fed.rule.verdict == "the initial rate stays: it is well ahead of the rates beside it"
    assert fed.said == [""] * (len(fed.said) - 1) + [fed.rule.verdict]


@pytest.mark.parametrize(
    ("means", "second"),
    [
        ((2.0, 1.0, 1.0), NEAR),  # ahead of one of them only
        ((1.0, 1.0, 2.0), NEAR),
        ((1.0, 1.0, 1.0), NEAR),
        ((2.0, 1.0, 0.5), UP),
        ((0.5, 1.0, 2.0), DOWN),
        ((0.4, 1.0, 0.5), DOWN),  # both are ahead: the better one
        ((0.5, 1.0, 0.4), UP),
        ((0.5, math.inf, math.inf), DOWN),
        ((math.nan, math.inf, 0.5), UP),
        ((math.nan, 1.0, 0.5), UP),
        ((math.nan, math.inf, math.nan), DOWN),  # nothing finite: lower rates are next
    ],
)
def test_the_second_stage_looks_further_where_another_rate_is_ahead(
    means: tuple[float, ...], second: tuple[int, ...]
) -> None:
    at = dict(zip(NEAR, means, strict=True))
    fed = Fed(search(), lambda _, x: at.get(x, 2.0), noise=0.0)
    fed.one()
    assert fed.rule.trial.stage == "second"
    assert fed.rule.trial.offsets == second
    rates = ", ".join(f"{STEP**x:g}" for x in second)
    assert fed.said == [f"the second stage tries {rates} x the initial rate"]


@pytest.mark.parametrize("offset", [-1, 1])
@pytest.mark.parametrize(
    ("start", "share", "ends"),
    [(START, 0.9, False), (START, 1.1, True), (None, 0.01, True), (math.inf, 0.01, True)],
)
def test_the_search_ends_early_only_if_its_neighbours_lost_much(
    offset: int, start: float | None, share: float, ends: bool
) -> None:
    """A share of what the initial rate learnt, where that is known: CLEAR below it, GAIN above."""
    much = {-1: CLEAR, 1: GAIN}[offset]
    at = {-1: 5.0, 0: 1.0, 1: 5.0} | {offset: 1.0 + share * much * (START - 1.0)}
    fed = Fed(search(), lambda _, x: at[x], start=start, noise=0.0)
    fed.one()
    assert fed.rule.over is ends
    assert ends or fed.rule.trial.offsets == NEAR


@pytest.mark.parametrize("share", [-1.01, -0.99, 0.99, 1.01])
def test_a_lead_that_is_not_significant_neither_ends_the_search_nor_turns_it(share: float) -> None:
    """The highest rate is ahead of the initial one by this share of what is significant."""
    rule = search()
    rule.close({0: batches(9.0), 1: batches(1.0), 2: by(share * SIGNIFICANT)})
    assert rule.over is (share < -1)
    if share > -1:
        assert rule.trial.offsets == (UP if share > 1 else NEAR)


@pytest.mark.parametrize("n", SIZES)
def test_the_first_stage_is_left_out_where_its_trials_would_be_too_short(n: int) -> None:
    rounds = rounds_of(n // team_size(n), len(NEAR))
    least = math.ceil(LEAST_STEPS * rounds / SHARES["first"])
    assert search(n, least).trial.stage == "first"
    assert search(n, least).trial.steps == LEAST_STEPS
    short = Fed(search(n, least - 1), bowl(1.0)).all()
    assert short.stages == {"second": NEAR}
    assert short.rule.scale == STEP
    assert short.rule.steps == short.rule.longest


# -- the candidate ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("best", [-2, -1, 1, 2])
def test_a_far_better_rate_is_taken(n: int, adaptive: bool, best: int) -> None:
    fed = Fed(search(n, adaptive=adaptive), bowl(best)).all()
    assert fed.stages["second"] == (UP if best > 0 else DOWN)
    assert fed.rule.scale == STEP**best
    initial, taken = (
        next(arm for arm in fed.rule.arms if (arm.stage, arm.offset) == ("second", x))
        for x in (0, best)
    )
    leads = lead(initial.losses, taken.losses)
    assert fed.rule.verdict == (
        f"{STEP**best:g} x the initial rate: its trial is {leads:.1f} standard errors ahead"
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("between", "noise", "taken"),
    [
        (1.5, 0.0, 2),  # the farthest is ahead of the one between
        (1.001, 0.05, 1),  # better, but not by enough
        (1.0, 0.0, 1),  # as good
        (1.999, 0.05, 0),  # the one between is not ahead of the initial rate either
    ],
)
def test_a_rate_two_steps_away_must_be_ahead_of_the_one_between(
    sign: int, between: float, noise: float, taken: int
) -> None:
    far = 1.0 if between < 1.9 else 1.998
    at = {0: 2.0, sign: between, 2 * sign: far}
    fed = Fed(search(), in_second(at, sign), noise=noise).all()
    assert fed.rule.offset == sign * taken
    if taken:
        assert fed.rule.scale == STEP ** (sign * taken)
    else:
        assert fed.rule.verdict.endswith(f"ahead of it, and {SIGNIFICANT:g} are needed")


# -- acceptance ---------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("offset", [-1, 1])
@pytest.mark.parametrize("errors", [0.5 * SIGNIFICANT, 0.99 * SIGNIFICANT, 1.01 * SIGNIFICANT])
def test_a_candidate_must_be_significantly_ahead_of_the_initial_rate(
    adaptive: bool, offset: int, errors: float
) -> None:
    """The one that is ahead by less is the best as well."""
    rule = search(adaptive=adaptive)
    rule.close({arm: batches(1.0) for arm in range(3)}, batches(1.5))
    assert rule.trial.offsets == NEAR
    told = {0: batches(3.0), 1: batches(1.0), 2: batches(3.0)} | {1 + offset: by(errors)}
    assert lead(told[1], told[1 + offset]) == pytest.approx(errors)
    rule.close(told)
    taken = errors > SIGNIFICANT
    assert rule.scale == (STEP**offset if taken else 1.0)
    if not taken:
        assert rule.verdict == (
            f"the initial rate stays: {STEP**offset:g} x the initial rate is {errors:.1f} standard "
            f"errors ahead of it, and {SIGNIFICANT:g} are needed"
        )


@pytest.mark.parametrize("offset", [-1, 1, -2, 2])
@pytest.mark.parametrize(
    ("start", "share", "much"),
    [(START, 0.9, False), (START, 1.1, True), (None, 0.01, True), (math.inf, 0.01, True)],
)
def test_a_higher_rate_must_gain_much_and_a_lower_one_need_not(
    offset: int, start: float | None, share: float, much: bool
) -> None:
    """A share of GAIN of what the candidate learnt, where that is known."""
    at = {0: 1.0 + share * GAIN * (START - 1.0), offset // abs(offset): 8.0, offset: 1.0}
    if abs(offset) == 1:
        at[2 * offset] = 8.0
    sign = offset // abs(offset)
    rule = Fed(search(), in_second(at, sign), start=start, noise=0.0).all().rule
    assert rule.offset == (offset if much or offset < 0 else 0)
    if rule.offset == 0:
        assert rule.verdict.endswith("has learnt hardly more, and short trials flatter high rates")


ENOUGH, LITTLE = 1.01 * SIGNIFICANT, 0.99 * SIGNIFICANT


@pytest.mark.parametrize(
    ("initial", "start", "taken"),
    [
        (by(-2 * ENOUGH), by(-ENOUGH), True),
        (by(-2 * ENOUGH), by(-LITTLE), False),
        # The initial rate is worse than the initial weights: it is enough not to be.
        (by(-2 * ENOUGH), batches(1.0), True),
        (batches(9.0), by(-LITTLE), True),
        (batches(9.0), by(LITTLE), True),
        (batches(9.0), by(ENOUGH), False),
        (batches(math.nan), by(LITTLE), True),
        (batches(math.nan), by(ENOUGH), False),
    ],
)
def test_a_candidate_must_be_significantly_ahead_of_the_initial_weights(
    initial: list[float], start: list[float], taken: bool
) -> None:
    rule = search()
    rule.close({0: batches(3.0), 1: batches(2.0), 2: batches(1.9)}, start)
    assert rule.trial.offsets == UP
    rule.close({0: initial, 1: batches(1.0), 2: batches(9.0)})
    assert rule.scale == (STEP if taken else 1.0)
    assert rule.verdict.endswith("is best, but has learnt nothing") is not taken


def test_where_the_loss_of_the_initial_weights_is_not_known_it_is_not_asked() -> None:
    assert Fed(search(), bowl(2.0), start=0.0).all().rule.scale == 1.0
    assert Fed(search(), bowl(2.0), start=None).all().rule.scale == STEP**2


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("start", [START, math.inf, None])
def test_where_no_trial_stays_finite_the_initial_rate_stays(
    n: int, adaptive: bool, start: float | None
) -> None:
    fed = Fed(search(n, adaptive=adaptive), lambda *_: math.nan, start=start).all()
    assert fed.stages == {"first": NEAR, "second": DOWN}
    assert fed.rule.scale == 1.0
    assert fed.rule.verdict == "the initial rate stays: no trial stayed finite"


@pytest.mark.parametrize("n", SIZES)
def test_rates_without_a_loss_count_as_diverged(n: int) -> None:
    """Of a script that gives neither a probe nor training losses."""
    rule = search(n)
    while not rule.over:
        rule.close({})
    assert rule.scale == 1.0
    assert all(arm.mean == math.inf for arm in rule.arms)
    assert [arm.offset for arm in rule.arms] == [*NEAR, *DOWN]


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(
    ("head", "stays"),
    [
        (1.0, True),  # as good as the candidate
        (0.5, True),
        (1.5, False),
        (math.inf, False),
        (math.nan, False),
        (None, False),  # one replica has no head start
    ],
)
def test_an_initial_rate_that_diverged_stays_where_its_quarter_is_as_good(
    head: float | None, stays: bool, adaptive: bool
) -> None:
    at = {0: math.inf, -1: 1.0, -2: 2.0}
    fed = Fed(search(adaptive=adaptive), in_second(at, -1), head=head, noise=0.0).all()
    assert fed.rule.scale == (1.0 if stays else 1 / STEP)
    assert ("it diverged in its trial" in fed.rule.verdict) is stays
    finite = Fed(search(adaptive=adaptive), in_second(at | {0: 5.0}, -1), head=head, noise=0.0)
    assert finite.all().rule.scale == 1 / STEP, "only where the initial rate diverged"


def test_what_goes_on_at_less_than_a_quarter_says_nothing_of_the_initial_rate() -> None:
    """Below the initial rate the second stage has a lower head start."""
    curve = in_second({0: math.inf, -1: 1.0, -2: 2.0}, -1)
    for quarter, lower, scale in ((1.5, 1.0, 1 / STEP), (1.0, 1.5, 1.0), (1.0, math.nan, 1.0)):
        head = {HEAD_START: quarter, HEAD_START / STEP: lower}
        assert Fed(search(), curve, head=head, noise=0.0).all().rule.scale == scale


# -- passes over the data -----------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("adaptive", [True, False])
def test_a_run_that_repeats_its_data_has_trials_at_higher_rates(n: int, adaptive: bool) -> None:
    """By the law: a trial sees the data too few times to overfit."""
    fresh, repeats = (search(n, adaptive=adaptive, passes=passes) for passes in (None, 32.0))
    assert fresh.trial.offsets == repeats.trial.offsets == NEAR
    assert fresh.trial.translation == pytest.approx(4.0 * repeats.trial.translation)
    assert fresh.trial.arm(n - 1) is not None
    assert repeats.trial.multiplier(n - 1) == pytest.approx(4.0 * fresh.trial.multiplier(n - 1))
    assert Fed(repeats, bowl(2.0)).all().rule.scale == STEP**2


# -- the head start -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("best", [-2, 0.5, 2])
def test_the_head_start_is_lower_where_the_second_stage_looks_below(n: int, best: float) -> None:
    fed = Fed(search(n), bowl(best)).all()
    assert {trial.stage for trial in fed.trials} == set(SHARES)
    for trial in fed.trials:
        lower = trial.stage == "second" and best < 0
        assert trial.head == (HEAD_START / STEP if lower else HEAD_START)
        assert trial.goes_on(0) is (n > 1)
        assert n == 1 or trial.multiplier(0) == trial.head


@pytest.mark.parametrize(
    ("best", "head", "start", "keeps"),
    [
        (0, 5.0, START, True),
        (1, 5.0, START, True),
        (2, 5.0, START, True),
        (-1, 5.0, START, True),
        (-2, 0.1, START, False),  # its rate was above the one that is taken
        (0, START, START, True),  # not worse than the initial weights
        (0, START + 1.0, START, False),
        (0, 5.0, None, True),
        (0, math.inf, START, False),
        (0, math.nan, None, False),
        (0, math.inf, math.inf, False),
        (0, None, START, False),  # one replica
        (-1, None, START, False),
    ],
)
def test_a_head_start_is_kept_if_it_is_not_above_the_rate_and_no_worse_than_the_start(
    best: int, head: float | None, start: float | None, keeps: bool
) -> None:
    fed = Fed(search(), bowl(best), head=head, start=start, noise=0.0).all()
    assert fed.rule.scale == STEP**best
    assert (fed.rule.scale >= fed.trials[-1].head) is (best > -2)
    assert fed.rule.keeps_head_start is keeps


def test_the_head_start_is_judged_by_its_last_losses() -> None:
    rule = search()
    rule.close({arm: batches(1.0) for arm in range(3)}, batches(START), batches(math.inf))
    assert not rule.keeps_head_start
    rule.close({arm: batches(1.0) for arm in range(3)}, batches(0.0), batches(1.0))
    assert rule.start == tuple(batches(START)), "the first ones that were given"
    assert rule.keeps_head_start


# -- state --------------------------------------------------------------------------------------

CURVES: dict[str, tuple[Curve, dict[str, Any]]] = {
    "right": (bowl(0.0), {"head": 5.0}),
    "flat": (lambda *_: 1.0, {"head": 5.0}),
    "up": (bowl(2.0), {"head": 5.0}),
    "down, start unknown": (bowl(-2.0), {"start": None}),
    "diverged": (
        in_second({0: math.nan, -1: 1.0, -2: 2.0}, -1),
        {"head": {HEAD_START: 1.0, HEAD_START / STEP: math.inf}},
    ),
    "down, head start kept": (bowl(-1.0), {"head": 5.0}),
    "nothing finite": (lambda *_: math.inf, {"start": math.nan, "head": math.nan}),
}


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("name", CURVES)
def test_a_search_that_is_resumed_after_any_round_ends_the_same(name: str, n: int) -> None:
    curve, options = CURVES[name]
    whole = Fed(search(n), curve, **options).all()
    for ended in range(len(whole.trials) + 1):
        first = Fed(search(n), curve, **options)
        for _ in range(ended):
            first.one()
        for through in (copy.deepcopy, lambda state: json.loads(json.dumps(state))):
            saved = through(first.rule.state_dict())
            text = json.dumps(saved)
            second = Fed(search(n), curve, **options)
            second.rule.load_state_dict(saved)
            assert json.dumps(second.rule.state_dict()) == text
            second.trials, second.said = list(first.trials), list(first.said)
            second.all()
            assert (second.trials, second.said) == (whole.trials, whole.said)
            # As text: a loss that is not a number equals nothing, itself included.
            assert json.dumps(second.rule.state_dict()) == json.dumps(whole.rule.state_dict())
            assert second.rule.scale == whole.rule.scale
            assert second.rule.keeps_head_start is whole.rule.keeps_head_start
            assert json.dumps(saved) == text, "a state that is loaded stays as it was"


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("ended", [0, 1])
def test_a_resumed_search_keeps_the_law_that_it_began_with(n: int, ended: int) -> None:
    """Another version of the code may have another law."""
    fed = Fed(search(n), bowl(2.0))
    for _ in range(ended):
        fed.one()
    laws = {"first": 0.3, "second": 0.7}
    again = Fed(search(n), bowl(2.0))
    again.rule.load_state_dict(fed.rule.state_dict() | {"laws": laws})
    again.trials = list(fed.trials)
    again.all()
    assert {trial.stage for trial in again.trials[ended:]} >= {"second"}
    assert all(trial.translation == laws[trial.stage] for trial in again.trials[ended:])
    assert again.rule.state_dict()["laws"] == laws
    assert again.rule.scale == STEP**2


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [SEARCH_VERSION - 1, SEARCH_VERSION + 1, None, "5"])
def test_a_state_of_another_version_is_refused(version: Any) -> None:
    for state in (search().state_dict(), Fed(search(), bowl(1.0)).all().rule.state_dict()):
        rule = search()
        before = rule.state_dict()
        with pytest.raises(ValueError, match=f"has version {version!r} and .* {SEARCH_VERSION}:"):
            rule.load_state_dict(state | {"version": version})
        assert rule.state_dict() == before


@pytest.mark.parametrize(("n", "total"), [(4, S), (8, S + 1), (1, 5000)])
def test_a_search_under_way_is_refused_by_other_replicas_or_another_length(
    n: int, total: int
) -> None:
    fed = Fed(search(), bowl(1.0))
    fed.one()
    for rule in (search(n, total), search(n, total, idle=True)):
        before = rule.state_dict()
        with pytest.raises(ValueError, match=f"8 replicas and {S} .* has {n} and {total}: resume"):
            rule.load_state_dict(fed.rule.state_dict())
        assert rule.state_dict() == before
    fed.all()
    for rule in (search(n, total), search(n, 1, idle=True)):
        rule.load_state_dict(fed.rule.state_dict())
        assert (rule.over, rule.ran, rule.scale) == (True, True, STEP)
        assert rule.verdict == fed.rule.verdict


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("least", [1, 4, 5, 7, LEAST_STEPS, 100])
def test_a_run_that_is_too_short_is_refused(n: int, least: int) -> None:
    with short_trials(least):
        enough = RateSearch.least_steps(n)
        with pytest.raises(ValueError, match=f"total_steps={enough - 1} .* {n} .* {enough} steps"):
            search(n, enough - 1)
        rule = search(n, enough)
        assert (rule.trial.stage, rule.trial.steps) == ("second", least)
        assert rule.longest <= sum(SHARES.values()) * enough
    assert not search(n, enough - 1, idle=True).ran


def test_a_search_needs_a_replica() -> None:
    with pytest.raises(ValueError, match="at least one replica, got 0"):
        search(0)


def test_a_search_that_is_over_takes_no_losses() -> None:
    rule = Fed(search(), bowl(0.0)).all().rule
    before = rule.state_dict()
    with pytest.raises(ValueError, match="the search is over"):
        rule.close({0: [1.0]})
    assert rule.state_dict() == before


def test_a_search_that_is_skipped_leaves_the_initial_rate() -> None:
    fed = Fed(search(), bowl(2.0), head=0.5)
    fed.one()
    fed.rule.skip()
    for none in (fed.rule, search(8, 1, idle=True)):
        assert (none.over, none.ran, none.scale) == (True, False, 1.0)
        assert not none.keeps_head_start
        assert none.verdict == "no search was run"
        with pytest.raises(ValueError, match="the search is over"):
            _ = none.trial


# -- whatever the losses are --------------------------------------------------------------------

SEVERAL = st.sampled_from([0.5, 1.0, 1.5, 2.0, 40.0, math.inf, math.nan])


@settings(max_examples=400)
@given(
    data=st.data(),
    n=st.integers(1, 20) | st.just(64),
    total=st.integers(1, 20_000),
    count=st.integers(1, 4),
    adaptive=st.booleans(),
    passes=st.sampled_from([None, 0.1, 20.0, 2 * REPEATS]),
    one=st.sampled_from([SEVERAL, st.floats(width=32)]),
)
def test_whatever_the_losses_are_a_search_ends_in_time_at_a_rate_that_was_tried(
    data: st.DataObject,
    n: int,
    total: int,
    count: int,
    adaptive: bool,
    passes: float | None,
    one: st.SearchStrategy[float],
) -> None:
    """Any number that a loss in single precision can be, and those that are not finite."""
    total = max(total, RateSearch.least_steps(n))
    rule = search(n, total, adaptive=adaptive, passes=passes)
    losses = st.lists(one, min_size=count, max_size=count)
    start, head = data.draw(losses | st.just([])), data.draw(losses | st.just([]))
    while not rule.over:
        assert rule.trial.steps >= LEAST_STEPS
        head_rate = rule.trial.head
        rule.close({arm: data.draw(losses) for arm in rule.trial.arms()}, start, head)
    assert rule.steps <= rule.longest <= sum(SHARES.values()) * total
    last = {arm.offset: arm.losses for arm in rule.arms if arm.stage == rule.arms[-1].stage}
    assert rule.offset in last
    assert rule.scale == STEP**rule.offset
    better = {x for x in last if x and ahead(last[x], last[0])}
    assert rule.offset in better | {0}, "a rate that is not ahead is never taken"
    if not better:
        assert rule.scale == 1.0
    if rule.keeps_head_start:
        assert rule.scale >= head_rate
        assert all(map(math.isfinite, rule.head))


@given(st.floats(width=32), st.integers(1, 8), st.floats(width=32) | st.none(), st.booleans())
def test_equal_losses_leave_the_initial_rate(
    loss: float, count: int, before: float | None, adaptive: bool
) -> None:
    rule = search(adaptive=adaptive)
    while not rule.over:
        told = {arm: [loss] * count for arm in rule.trial.arms()}
        rule.close(told, [] if before is None else [before] * count)
    assert (rule.scale, rule.offset) == (1.0, 0)


def test_noise_alone_moves_the_initial_rate_no_more_often_than_two_tests_do() -> None:
    """Equal rates, with what makes a batch hard 30 times as large as the noise of a trial; two
    other rates may be ahead. Two standard deviations of the count more are chance."""
    rng = numpy.random.default_rng(0)
    pairs = rng.standard_normal((4000, 2, BATCHES)).tolist()
    one = sum(ahead(a, b) for a, b in pairs) / len(pairs)
    searches = 500
    for adaptive in (True, False):
        moved = [
            Fed(search(adaptive=adaptive), lambda *_: 1.0, noise=0.01, seed=seed).all().rule.offset
            for seed in range(searches)
        ]
        rate = sum(map(bool, moved)) / searches
        assert rate <= 2 * one + 2 * math.sqrt(2 * one / searches)
