"""Trials: which replica runs what, for how long, and by which schedule."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_scale.search.constants import MOST_STEPS, STEP, TEAMS
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.trials import (
    SHARES,
    Trial,
    head_start,
    rounds_of,
    shape,
    team_size,
    trial_steps,
)
from tests.support.calls import calls

FEW, MANY = 4 * TEAMS, 4096 * TEAMS
S = 4000
C = 0.7
HEAD = 0.1


def rounds(replicas: int, offsets: tuple[int, ...]) -> list[Trial]:
    """All rounds of a stage."""
    team = team_size(replicas)
    first = Trial("first", 40, team, replicas // team, offsets, 0, C, HEAD)
    return [replace(first, index=index) for index in range(first.rounds)]


# -- which replica runs what --------------------------------------------------------------------


@given(st.integers(1, 300))
def test_teams_are_of_one_size_and_their_batch_does_not_shrink_with_the_replicas(n: int) -> None:
    team = team_size(n)
    teams = n // team
    assert n - teams * team < team, "fewer than a team are left over"
    if n < TEAMS:
        assert (team, teams) == (1, n)
    else:
        assert TEAMS <= teams < 2 * TEAMS


@given(st.integers(1, 300), st.sampled_from([(-1, 0), (-1, 0, 1), (0, 1, 2), (-2, -1, 0)]))
def test_every_rate_is_tried_and_the_members_of_a_team_agree(
    n: int, offsets: tuple[int, ...]
) -> None:
    team, teams, seen = team_size(n), n // team_size(n), []
    for trial in rounds(n, offsets):
        arms = [trial.arm(r) for r in range(n)]
        goes_on = [trial.goes_on(r) for r in range(n)]
        first = team if teams > 1 else 0
        assert goes_on == [r < first for r in range(n)], "one team, unless it is the only one"
        assert arms[:first] == [None] * first
        assert arms[teams * team :] == [None] * (n - teams * team), "left-over replicas"
        for begin in range(first, teams * team, team):
            assert len(set(arms[begin : begin + team])) == 1
            assert arms[begin] in range(len(offsets))
        assert trial.arms() == sorted({arm for arm in arms if arm is not None})
        for replica, arm in enumerate(arms):
            rate = HEAD if arm is None else STEP ** offsets[arm] / C
            assert trial.multiplier(replica) == rate
        seen.append(set(trial.arms()))
    assert set().union(*seen) == set(range(len(offsets)))
    assert set().union(*seen[:-1]) < set(range(len(offsets))), "no round more than needed"


@pytest.mark.parametrize("team", [0, 1, TEAMS - 1])
def test_a_replica_finds_its_trial_in_the_same_calls_at_any_number_of_replicas(team: int) -> None:
    def asked(n: int) -> int:
        rule, at = RateSearch(replicas=n, total_steps=S, adaptive=True), team * team_size(n)

        def ask() -> None:
            trial = rule.trial
            trial.multiplier(at)
            trial.goes_on(at)
            trial.arm(at)

        return calls(ask)

    assert asked(FEW) == asked(MANY) < 16


def test_a_search_is_decided_in_the_same_calls_at_any_number_of_replicas() -> None:
    def whole(n: int) -> None:
        rule = RateSearch(replicas=n, total_steps=S, adaptive=True)
        while not rule.over:
            trial = rule.trial
            rule.close({arm: [2.0 - 0.1 * arm, 3.0] for arm in trial.arms()}, [3.0, 3.5])
            rule.state_dict()

    whole(FEW)  # what is made once is made
    assert calls(lambda: whole(FEW)) == calls(lambda: whole(MANY))


def test_nothing_is_kept_for_each_replica() -> None:
    def peak(n: int) -> int:
        RateSearch(replicas=n, total_steps=S, adaptive=True)  # what is made once is made
        tracemalloc.start()
        try:
            rule = RateSearch(replicas=n, total_steps=S, adaptive=True)
            rule.trial.multiplier(n - 1)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(MANY) < peak(FEW) + MANY, "less than a byte for each replica"


# -- for how long -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", SHARES)
@given(n=st.integers(1, 70), total=st.integers(1, 10**7), rates=st.integers(1, 5))
def test_the_rounds_of_a_stage_take_its_share_and_no_more(
    stage: str, n: int, total: int, rates: int
) -> None:
    count = rounds_of(n // team_size(n), rates)
    share = SHARES[stage] * min(total, MOST_STEPS / sum(SHARES.values()))
    taken = count * trial_steps(stage, n, total, rates)
    assert share - count - 1 < taken <= share * (1 + 1e-12)


@given(n=st.integers(1, 70), total=st.integers(1, 10**7), rates=st.integers(1, 5))
def test_both_stages_have_at_most_most_steps(n: int, total: int, rates: int) -> None:
    count = rounds_of(n // team_size(n), rates)
    taken = sum(count * trial_steps(stage, n, total, rates) for stage in SHARES)
    assert taken <= MOST_STEPS
    longest = math.ceil(MOST_STEPS / sum(SHARES.values()))
    if total >= longest:
        assert [trial_steps(stage, n, total, rates) for stage in SHARES] == [
            trial_steps(stage, n, longest, rates) for stage in SHARES
        ]
        assert taken > MOST_STEPS - 2 * count - 2


# -- by which schedule --------------------------------------------------------------------------


@given(st.integers(2, 2000), st.integers(0, 2000))
def test_a_trial_is_a_complete_schedule(steps: int, warm: int) -> None:
    """It warms up as long as the run but at most half of its steps, and its cosine ends at zero."""
    values = [shape(i, steps, warm) for i in range(steps)]
    ups = max(1, warm) if 2 * warm <= steps else steps // 2
    assert values[:ups] == pytest.approx([(i + 1) / ups for i in range(ups)])
    assert values[ups - 1] == max(values) == 1.0
    down = steps - ups
    assert values[ups:] == pytest.approx(
        [math.cos(math.pi / 2 * i / down) ** 2 for i in range(down)]
    )
    assert all(b < a for a, b in itertools.pairwise(values[ups:]))
    assert min(values) > 0.0
    assert shape(steps, steps, warm) == 0.0


def test_the_shortest_trial_is_one_step_at_its_peak() -> None:
    assert [shape(0, 1, warm) for warm in (0, 1, 9)] == [1.0] * 3


@given(st.integers(0, 500))
def test_the_team_that_goes_on_with_the_run_warms_up_like_the_run_and_does_not_decay(
    warm: int,
) -> None:
    values = [head_start(i, warm) for i in range(2 * warm + 3)]
    ups = max(1, warm)
    assert values[:ups] == [(i + 1) / ups for i in range(ups)]
    assert values[ups:] == [1.0] * (len(values) - ups)
