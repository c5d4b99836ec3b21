"""The arbiter's simulated replicas are the real ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from benchmarks.lr.free import Free
from benchmarks.lr.problem import Stacked, Task
from benchmarks.lr.simulated import (
    REPLICAS,
    VALIDATED,
    around,
    fixed,
    held_out,
    probe,
    run_trial,
    scheduled,
    search,
    watched,
    weights,
)
from benchmarks.lr.tasks import JUDGED, TASKS
from hdet_scale import OneCycleAutoLR
from hdet_scale.method.records import TrialRecord
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.trials import Level
from tests.support.fleet import Fleet
from tests.support.trials import long_stage, short_trials

S, START = 600, 0.3


class Copy(nn.Module):
    """One copy of a task's model as an ordinary module."""

    def __init__(self, task: Task, seed: int) -> None:
        super().__init__()
        self.task = task
        self.weights = nn.ParameterDict({k: v.clone() for k, v in weights(task, seed).items()})

    def forward(self, indices: Tensor) -> Tensor:
        return self.task.losses(dict(self.weights.items()), indices[None])[0]


def optimizer_of(task: Task, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if task.optimizer == "sgd":
        return SGD(
            model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=task.weight_decay
        )
    return AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=task.weight_decay)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "graph"])
def test_stacked_copies_step_as_torchs_optimizers_do(name: str) -> None:
    """Three copies at three learning rates against three ordinary trainings; all tasks but the one
    with dropout, whose masks differ between copies. The loss of `poisson` overflows at `around`
    without a warm-up and with a batch of 8: it has half the rates."""
    task = TASKS[name]
    most = task.around / 2 if name == "poisson" else task.around
    rates = [most / 4, most / 2, most]
    stacked = Stacked(task, weights(task, 0, 3))
    batches = task.draw(5, 4, 8)
    for batch in batches:
        _, gradients = stacked.gradients(batch.expand(3, -1))
        stacked.step(torch.tensor(rates), gradients)
    for i, rate in enumerate(rates):
        model = Copy(task, 0)
        optimizer = optimizer_of(task, model, rate)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        for key, value in model.weights.items():
            torch.testing.assert_close(stacked.params[key][i], value[0], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["gpt", "conv", "vit"])
def test_copies_without_a_schedule_step_as_the_librarys_do(name: str) -> None:
    """Three copies at three learning rates, a warm-up and a decay, against three optimizers."""
    task = TASKS[name]
    rates = [task.around / 4, task.around / 2, task.around]
    free = Free(task, weights(task, 0, 3))
    batches = task.draw(5, 6, 8)
    shares = (0.5, 1.0, 1.0, 0.7, 0.2, 0.0)
    for batch, share in zip(batches, shares, strict=True):
        _, gradients = free.gradients(batch.expand(3, -1))
        free.step(torch.tensor(rates) * share, gradients)
    adam = task.optimizer == "adamw"
    kind = AdamWScheduleFree if adam else SGDScheduleFree
    for i, rate in enumerate(rates):
        model = Copy(task, 0)
        optimizer = kind(model.parameters(), lr=rate, weight_decay=task.weight_decay)
        optimizer.train()
        for batch, share in zip(batches, shares, strict=True):
            optimizer.param_groups[0]["lr"] = rate * share
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        optimizer.eval()
        judged = free.judged()
        for key, value in model.weights.items():
            torch.testing.assert_close(judged[key][i], value[0], rtol=2e-3, atol=2e-4)


def _real(rank: int, size: int, name: str) -> Any:
    """The search of the library, in processes, on the simulation's batches: a team's is split."""
    torch.set_num_threads(1)
    task = TASKS[name]
    model = DistributedDataParallel(Copy(task, 1))
    rate = task.around * START
    optimizer = optimizer_of(task, model, rate)

    def probe() -> Any:
        return (model.module(b) for b in held_out(task, 1))

    cycle = {"total_steps": S, "cycle_momentum": False}
    with short_trials():
        scheduler = OneCycleAutoLR(optimizer, rate, rule="auto", model=model, probe=probe, **cycle)
    records: list[Any] = []
    scheduler.on_record(records.append)
    trials, rule = 0, scheduler._phase.rule  # type: ignore[attr-defined]
    while scheduler.searching:
        trials += 1
        teams, team = size // rule.team, rule.team
        data = (20_000 + trials) * teams + rank // team
        for batch in task.draw(data, rule.trial.steps, task.batch // teams):
            optimizer.zero_grad()
            loss = model(batch.chunk(team)[rank % team])
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
    return [r.losses for r in records if isinstance(r, TrialRecord)], rule.scale


def _real_in_teams(rank: int, size: int, name: str) -> Any:
    with long_stage(parts=2):
        return _real(rank, size, name)


def simulated(name: str, replicas: int) -> tuple[list[tuple[float, ...]], RateSearch]:
    """Losses of each trial, by replica, and the rule at the end."""
    task = TASKS[name]
    rule = RateSearch(replicas=replicas, total_steps=S, adaptive=task.optimizer == "adamw")
    losses = []
    first = Level.of(float(probe(task, weights(task, 1), 1).mean()))
    while not rule.over:
        levels = run_trial(task, 1, rule, task.around * START, 20_000 + rule.trials_run + 1)
        losses.append(tuple(levels[k].mean for k in rule.trial.levels(replicas)))
        rule.close(levels, first)
    return losses, rule


def check_equal(losses: list[tuple[float, ...]], rule: RateSearch, real: Any) -> None:
    for seen, scale in real:
        for mine, theirs in zip(losses, seen, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                both = math.isfinite(a) and math.isfinite(b)
                assert a == pytest.approx(b, rel=2e-3) if both else math.isfinite(a) == both
        assert scale == pytest.approx(rule.scale, rel=0.05)


@pytest.mark.parametrize("name", ["denoise", "ngram", "factor"])
def test_simulated_replicas_are_the_real_ones(pair: Fleet, name: str) -> None:
    check_equal(*simulated(name, 2), pair.run(_real, name))


def test_simulated_teams_are_the_real_ones(quartet: Fleet) -> None:
    """Of a long stage: two replicas that share their gradients are one with twice the batch."""
    with long_stage(parts=2):
        losses, rule = simulated("logit", 4)
    assert len(losses) == 2 + 4
    check_equal(losses, rule, quartet.run(_real_in_teams, "logit"))


def test_nothing_was_tuned_on_what_is_judged() -> None:
    judged = "full-batch post-norm lora-few rank poisson batchnorm-sgd distill"
    assert set(JUDGED) == set(judged.split())
    assert all(task.held_out > VALIDATED + 300 for task in TASKS.values())


def test_probe_training_and_validation_have_no_example_in_common() -> None:
    for task in TASKS.values():
        for seed in (0, 1):
            probed = held_out(task, seed)
            assert int(probed.min()) >= task.train + VALIDATED
            assert int(probed.max()) < task.train + task.held_out


def test_held_out_examples_are_never_drawn() -> None:
    for task in TASKS.values():
        assert int(task.draw(0, 50).max()) < task.train


def test_the_schedule_warms_up_and_ends_at_nothing() -> None:
    values = [scheduled(t, 400) for t in range(400)]
    assert max(values) == 1.0
    assert values.index(1.0) == 19
    assert values[-1] < 1e-4


@pytest.mark.parametrize("steps", [600, 800, 2000])
def test_the_run_after_a_search_is_as_long_as_those_of_other_methods(steps: int) -> None:
    total = around(steps)
    assert total - RateSearch(replicas=REPLICAS, total_steps=total, adaptive=True).budget == steps
    assert total - RateSearch(replicas=REPLICAS, total_steps=total, adaptive=False).budget == steps


def test_where_the_initial_rate_stays_the_run_is_the_grids() -> None:
    """Bit for bit, under its watch: a row differs from the grid by the rate alone."""
    task, steps = TASKS["logit"], 600
    before = search(task, 0, around(steps), task.around)
    before.rule.proposed, before.rule.contested = 0.0, False
    run = watched(task, 0, before, task.around)
    assert run.evaluations > 10
    assert run.loss == fixed(task, 0, steps, [task.around / 2, task.around])[1]
