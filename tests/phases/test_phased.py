"""The phases of a run: which follows which, when, and what a step of each costs."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from hdet_scale import AutoLR, ConvergePolicy, HDETConfig, OneCycleAutoLR, Replicas
from hdet_scale.ddp import warm_init
from hdet_scale.phases.exploring import Exploring
from hdet_scale.phases.plain import Plain
from hdet_scale.phases.searching import Searching
from hdet_scale.phases.watched import Watched
from hdet_scale.search.constants import UNTIL
from hdet_scale.search.decision import RateSearch
from tests.support.calls import calls
from tests.support.fleet import Fleet
from tests.support.searched import Overfitting
from tests.support.searching import LOW, S, held_out, settled
from tests.support.toy import learn, parameters, same, toy

T = 5
SHORT = RateSearch.least_steps(1) - 1
"""Steps of a run that is too short for a search."""
FEW, MANY = 8, 16384


class Run:
    """A toy on one process, whose phases are listed as they begin."""

    def __init__(self, *, total: int = S, probed: bool = True, **options: Any) -> None:
        self.model = toy(wrap=False)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4)
        self.world = Overfitting(self.model)
        self.scheduler: Any = AutoLR(
            LambdaLR(self.optimizer, lambda _: 1.0),
            HDETConfig(total_steps=total, interval=T, **options),
            model=self.model,
            probe=self.world.losses if probed else None,
        )
        self.phases = [self.scheduler._phase]
        self.begins = [0]
        self.step = 0

    def train(self, until: int) -> None:
        while self.step < until:
            learn(self.model, self.optimizer, self.step, 0)
            self.scheduler.step(self.world.trained())
            self.step += 1
            if self.scheduler._phase is not self.phases[-1]:
                self.phases.append(self.scheduler._phase)
                self.begins.append(self.step)

    @property
    def kinds(self) -> list[type]:
        return [type(phase) for phase in self.phases]


# -- which phase follows which --------------------------------------------------------------------


def test_a_watch_follows_a_search_and_plain_training_a_watch() -> None:
    run = Run()
    seen = []
    while run.step < S:
        told = run.scheduler.phase, run.scheduler.searching, run.scheduler.watching
        if not seen or seen[-1] != told:
            seen.append(told)
        run.train(run.step + 1)
    assert run.kinds == [Searching, Watched, Plain]
    searched = run.scheduler.search_result.steps
    assert run.begins[1] == searched > 0
    assert 0.7 * UNTIL < (run.begins[2] - searched) / (S - searched) <= UNTIL
    assert seen == [("searching", True, False), ("watched", False, True), ("plain", False, False)]
    assert run.scheduler.snapshot is None
    assert run.scheduler.steps_done == S


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"probed": False}, [Searching, Plain]),
        ({"gradients": "local"}, [Searching, Exploring]),
        ({"gradients": "local", "probed": False}, [Searching, Exploring]),
        ({"total": SHORT}, [Plain]),
        ({"total": SHORT, "gradients": "local"}, [Exploring]),
        ({"rule": "none", "spread": 0.0, "probed": False}, [Plain]),
        ({"rule": "none", "spread": 0.0, "gradients": "local", "probed": False}, [Exploring]),
        ({"rule": "none", "spread": 0.1, "probed": False}, [Exploring]),
        ({"rule": "paper", "spread": 0.1, "probed": False}, [Exploring]),
        ({"rule": "slope", "spread": 0.0}, [Plain]),
    ],
    ids=str,
)
def test_the_phases_of_a_run(options: dict[str, Any], kinds: list[type]) -> None:
    run = Run(**options)
    run.train(S // 4)
    assert run.kinds == kinds
    assert run.phases[-1].successor is None


def test_plain_training_follows_an_exploration_whose_spread_ends() -> None:
    """Two halvings of a round each, then zero; one replica has no evidence to move by."""
    run = Run(rule="slope", spread=0.3, patience=1)
    run.train(5 * T)
    assert run.kinds == [Exploring, Plain]
    assert run.begins == [0, 3 * T]
    assert run.scheduler.round == 5


def test_a_search_that_is_given_up_is_followed_at_once() -> None:
    """By plain training, and with local gradients by rounds: there is nothing to watch."""
    for gradients, kind in (("shared", Plain), ("local", Exploring)):
        run = Run(gradients=gradients)
        while run.scheduler.searching:
            run.train(run.step + 1)
            run.scheduler.finalize()
        assert type(run.scheduler._phase) is kind
        assert run.scheduler.verdict.startswith("given up")
        assert run.scheduler.get_base_lr() == [1e-4]


def test_a_watch_without_a_snapshot_or_a_probe_ends_at_the_next_step() -> None:
    run = Run()
    while run.scheduler.searching:
        run.train(run.step + 1)
    state = run.scheduler.state_dict()
    lost = copy.deepcopy(state)
    lost["hdet"]["snapshot"] = None
    for probed, loaded in ((True, lost), (False, state)):
        other = Run(probed=probed)
        other.scheduler.load_state_dict(loaded)
        assert other.scheduler.phase == "watched"
        other.train(1)
        assert type(other.scheduler._phase) is Plain
        assert other.scheduler.get_base_lr() == run.scheduler.get_base_lr()


def test_the_stride_and_the_boundary_of_each_phase() -> None:
    run = Run()
    first = run.scheduler._phase.trial.steps
    assert (run.scheduler.stride, run.scheduler.at_boundary) == (0, True)
    run.train(1)
    assert (run.scheduler.stride, run.scheduler.at_boundary) == (0, False)
    run.train(first)
    assert (run.scheduler.stride, run.scheduler.at_boundary) == (first, True)
    while run.scheduler.searching:
        run.train(run.step + 1)
    assert (run.scheduler.stride, run.scheduler.at_boundary) == (1, True)
    rounds = Run(rule="none", spread=0.1, probed=False)
    rounds.train(T - 1)
    assert (rounds.scheduler.stride, rounds.scheduler.at_boundary) == (0, False)
    rounds.train(T)
    assert (rounds.scheduler.stride, rounds.scheduler.at_boundary) == (T, True)


# -- what a step costs ----------------------------------------------------------------------------


def searching(replicas: int, rank: int) -> Any:
    """In the middle of a trial, declared without a process group."""
    model = toy(wrap=False)
    optimizer = SGD(model.parameters(), lr=0.01)
    scheduler = OneCycleAutoLR(
        optimizer, 0.01, total_steps=S, rule="auto", model=model, gradients="local",
        replicas=Replicas(rank=rank, size=replicas), cycle_momentum=False,
    )  # fmt: skip
    phase = scheduler._phase
    assert isinstance(phase, Searching)
    phase.take_snapshot()
    phase.count(1.0)
    return scheduler


@pytest.mark.parametrize("last", [False, True])
def test_a_step_of_a_trial_makes_the_same_calls_at_any_number_of_replicas(last: bool) -> None:
    loss, counts = torch.tensor(2.0), []
    for n in (FEW, MANY):
        scheduler = searching(n, n - 1 if last else 0)
        phase = scheduler._phase
        done = phase.step
        work = (phase.write, lambda p=phase: p.count(loss), lambda s=scheduler: s.step(loss))
        counts.append([calls(each) for each in work])
        assert phase.step == done + 2, "within the trial"
    assert counts[0] == counts[1]
    assert counts[0][0] < 20
    assert counts[0][1] < 30


# -- a search before rounds of local gradients ----------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "fragments": {"fragments": 2},
    "int8": {"wire": "int8"},
    "outer": {"outer": {"lr": 0.7, "momentum": 0.9}},
}


def rounds(model: nn.Module, lr: float, policy: dict[str, Any], **options: Any) -> Any:
    optimizer = AdamW(model.parameters(), lr=lr)
    config = HDETConfig(gradients="local", interval=T, converge=ConvergePolicy(**policy), **options)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    probe = held_out(inner) if options.get("rule", "auto") == "auto" else None
    scheduler = AutoLR(LambdaLR(optimizer, lambda _: 1.0), config, model=model, probe=probe)
    return optimizer, scheduler


def _search_then_rounds(rank: int, size: int, policy: dict[str, Any], bad: bool) -> Any:
    """And beside it the rounds of a run that began with what the search left, at its rate."""
    model = settled(toy(rank, norm=True, rebuild=False))
    optimizer, scheduler = rounds(model, LOW, policy, total_steps=S)
    step = 0
    while scheduler.searching:
        loss = learn(model, optimizer, step, rank)
        if bad and scheduler._phase.trial.arm(rank) == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)
        scheduler.step(loss)
        step += 1
    phase, rate = scheduler.phase, scheduler.get_base_lr()[0]
    plain = toy(rank, norm=True, rebuild=False)
    other, beside = rounds(plain, rate, policy, rule="none", spread=0.0)
    plain.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    alike = [same(parameters(model), parameters(plain))]
    for at in range(step, step + 4 * T + 2):
        for m, o, s in ((model, optimizer, scheduler), (plain, other, beside)):
            s.step(learn(m, o, at, rank))
        alike.append(same(parameters(model), parameters(plain)))
    scheduler.finalize()
    return phase, rate, alike, parameters(model)


@pytest.mark.parametrize("bad", [False, True], ids=["", "NaN in a trial"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_nothing_of_the_trials_is_left_in_the_rounds_that_follow(
    pair: Fleet, policy: dict[str, Any], bad: bool
) -> None:
    one, two = pair.run(_search_then_rounds, policy, bad)
    for phase, rate, alike, _ in (one, two):
        assert phase == "exploring"
        assert rate == one[1]
        assert len(alike) == 4 * T + 3
        assert all(alike)
    assert one[1] > LOW
    assert same(one[3], two[3])
    assert all(bool(p.isfinite().all()) for p in one[3])


# -- making replicas equal ------------------------------------------------------------------------


def _finalized(rank: int, size: int) -> Any:
    """A run without a spread whose policy would overlap its averagings."""
    model = toy(rank, norm=True, rebuild=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    config = HDETConfig(rule="none", spread=0.0, converge=ConvergePolicy(overlap=True))
    scheduler = AutoLR(LambdaLR(optimizer, lambda _: 1.0), config, model=model)
    groups = len(dist.distributed_c10d._world.pg_map)
    equal = []
    for step in range(3):
        scheduler.step(learn(model, optimizer, step, rank))
        warm_init(model)
        scheduler.finalize()
        equal.append(parameters(model))
        scheduler.equalize()
    return scheduler.phase, equal, len(dist.distributed_c10d._world.pg_map) - groups


def test_making_replicas_equal_makes_no_process_group(pair: Fleet) -> None:
    (phase, one, made), (_, two, _) = pair.run(_finalized)
    assert phase == "plain"
    assert made == 0
    for a, b in zip(one, two, strict=True):
        assert same(a, b)


class Overlapped:
    """Replicas with a spread whose averaging is folded in two steps after it began."""

    def __init__(self, rank: int) -> None:
        self.rank, self.model = rank, toy(rank, norm=True, rebuild=False)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        policy = ConvergePolicy(overlap=True, overlap_steps=2)
        config = HDETConfig(rule="none", spread=0.3, interval=T, converge=policy)
        self.scheduler: Any = AutoLR(
            LambdaLR(self.optimizer, lambda _: 1.0), config, model=self.model
        )

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.scheduler.step(learn(self.model, self.optimizer, step, self.rank))

    def save(self) -> Any:
        own = self.scheduler.replica_state_dict()
        parts = (self.model, self.optimizer, self.scheduler)
        return copy.deepcopy(([part.state_dict() for part in parts], own))

    def load(self, saved: Any) -> None:
        states, own = copy.deepcopy(saved)
        for part, state in zip((self.model, self.optimizer, self.scheduler), states, strict=True):
            part.load_state_dict(state)
        self.scheduler.load_replica_state_dict(own)


def _loaded_again(rank: int, size: int) -> Any:
    """A state is loaded while an averaging is under way, twice."""
    run = Overlapped(rank)
    run.train(0, T + 3)
    saved, groups = run.save(), len(dist.distributed_c10d._world.pg_map)
    threads = 0
    for _ in range(2):
        run.train(T + 3, 2 * T)
        run.load(saved)
        threads += sum(t.name == "hdet-converge" for t in threading.enumerate())
    run.train(T + 3, 4 * T + 1)
    made = len(dist.distributed_c10d._world.pg_map) - groups
    fresh = Overlapped(rank)
    fresh.load(saved)
    fresh.train(T + 3, 4 * T + 1)
    for each in (run, fresh):
        each.scheduler.finalize()
    return made, threads, parameters(run.model), parameters(fresh.model)


def test_a_state_replaces_an_averaging_that_is_under_way(pair: Fleet) -> None:
    """Its thread has ended, and its process group is used again."""
    (made, threads, one, fresh), (_, _, two, _) = pair.run(_loaded_again)
    assert made == threads == 0
    assert same(one, two, fresh)
