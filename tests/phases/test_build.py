"""How a run is put together: whether a search comes first, and how long it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from hdet_scale import HDETConfig, OneCycleAutoLR, Replicas
from hdet_scale.phases.build import searches
from hdet_scale.search.constants import FIRST_SHARE, LEAST_STEPS, SECOND_SHARE, TEAMS


@pytest.mark.parametrize(("replicas", "rounds"), [(1, 3), (2, 3), (3, 2), (TEAMS, 1), (1024, 1)])
def test_a_search_needs_a_run_whose_second_stage_can_tell_rates_apart(
    replicas: int, rounds: int
) -> None:
    """Three rates; all teams but one try a rate at a time."""
    where, config = Replicas(rank=0, size=replicas), HDETConfig(rule="auto")
    least = math.ceil(rounds * LEAST_STEPS / SECOND_SHARE)
    assert searches(config, where, least)
    assert not searches(config, where, least - 1)
    assert not searches(HDETConfig(rule="none", spread=0.0), where, 10**6)


def test_only_one_rank_warns_that_a_run_is_too_short(caplog: Any) -> None:
    places = [
        Replicas(rank=replica, size=2, shard_rank=shard, shard_size=2)
        for replica in range(2)
        for shard in range(2)
    ]
    for where in places:
        searches(HDETConfig(rule="auto"), where, 10)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "10 steps are too few for 2 replicas" in record.getMessage()


@pytest.mark.parametrize("replicas", [1, 2, TEAMS, 16])
def test_a_search_is_a_share_of_the_run(replicas: int) -> None:
    """Whatever the number of replicas; teams share their gradients."""
    weight, total = nn.Parameter(torch.ones(2, 2)), 1200
    scheduler = OneCycleAutoLR(
        AdamW([weight]), 0.1, total_steps=total, rule="auto", cycle_momentum=False,
        replicas=Replicas(rank=0, size=replicas), gradients="local",
    )  # fmt: skip
    phase: Any = scheduler._phase
    assert phase.trial.steps * phase.trial.rounds == pytest.approx(FIRST_SHARE * total, abs=3)
    assert phase.rule.longest == pytest.approx((FIRST_SHARE + SECOND_SHARE) * total, abs=6)
    assert phase.team == max(1, replicas // TEAMS)
