"""Trials: what one replica runs is found in the same time whatever the number of replicas."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest

from hdet_scale.search.decision import RateSearch
from hdet_scale.search.trials import SIZE, Level, Trial, shape
from tests.support.calls import calls

FEW, MANY = 8, 16384
S = 4000


def test_a_trial_is_a_complete_schedule() -> None:
    values = [shape(i, 100) for i in range(100)]
    assert max(values) == 1.0
    assert values[0] == pytest.approx(0.2)
    assert values[-1] < 1e-3
    assert all(0 <= b <= a for a, b in itertools.pairwise(values[5:]))


def search(replicas: int) -> RateSearch:
    return RateSearch(replicas=replicas, total_steps=S, adaptive=True)


def run_one(rule: RateSearch, replica: int) -> Trial:
    """What a replica asks for at the beginning of a trial and at its end."""
    trial = rule.trial
    trial.level(replica)
    trial.multiplier(replica)
    trial.counts(replica)
    return trial


@pytest.mark.parametrize("replica", [0, 7, -1])
def test_a_replica_finds_its_trial_in_the_same_calls_at_any_number_of_replicas(
    replica: int,
) -> None:
    counts = []
    for n in (FEW, MANY):
        rule = search(n)
        counts.append(calls(lambda rule=rule, r=replica % n: run_one(rule, r)))
    assert counts[0] == counts[1] < 12


def test_a_search_is_decided_in_the_same_calls_at_any_number_of_replicas() -> None:
    levels = [Level.of(2.0 + 0.1 * abs(k - 6)) for k in range(SIZE)]

    def whole(n: int) -> None:
        rule = search(n)
        while not rule.over:
            run_one(rule, n - 1)
            rule.close(levels, Level.of(3.0))
            rule.state_dict()

    assert calls(lambda: whole(FEW)) == calls(lambda: whole(MANY))


def test_nothing_is_kept_for_each_replica() -> None:
    def peak(n: int) -> int:
        search(n)  # what is made once is made
        tracemalloc.start()
        try:
            rule = search(n)
            run_one(rule, n - 1)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(MANY) < peak(FEW) + MANY, "less than a byte for each replica"


def test_left_over_replicas_train_with_the_last_team() -> None:
    trial = Trial(0, 0, 100, 3, 8, 1.0, tuple(float(k) for k in range(SIZE)))
    assert [trial.level(r) for r in (0, 2, 3, 23, 24, 25)] == [0, 0, 1, 7, 7, 7]
    assert [trial.counts(r) for r in (0, 23, 24, 25)] == [True, True, False, False]
    later = Trial(0, 1, 100, 1, 3, 1.0, trial.multipliers)
    assert later.levels(3) == [3, 4, 5]
    assert Trial(0, 2, 100, 1, 3, 1.0, trial.multipliers).levels(3) == [6, 7, 0]
