"""The arbiter's simulated replicas are the real ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from benchmarks.lr.free import Free
from benchmarks.lr.problem import Stacked, Task
from benchmarks.lr.simulated import (
    PROBES,
    REPLICAS,
    VALIDATED,
    Searched,
    auto,
    fixed,
    held_out,
    scheduled,
    search,
    warm_up,
    watched,
    weights,
)
from benchmarks.lr.tasks import JUDGED, TASKS
from hdet_scale import OneCycleAutoLR
from hdet_scale.method.records import TrialRecord
from hdet_scale.search.constants import FIRST, GROWTH, STEP, UNTIL
from hdet_scale.search.evidence import mean_loss
from tests.support.fleet import Fleet

SEED = 1


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


# -- the search -----------------------------------------------------------------------------------


def _real(rank: int, size: int, name: str, factor: float, total: int) -> Any:
    """The search of the library, in processes, on the simulation's batches: a team's is split."""
    torch.set_num_threads(1)
    task = TASKS[name]
    model = DistributedDataParallel(Copy(task, SEED))
    rate, warm = task.around * factor, warm_up(total)
    optimizer = optimizer_of(task, model, rate)

    def losses(part: int = 0, parts: int = 1) -> Any:
        return (model.module(b) for b in held_out(task, SEED)[part::parts])

    scheduler = OneCycleAutoLR(
        optimizer,
        rate,
        total_steps=total,
        pct_start=(warm + 1) / total,  # step `warm`, counted from 0, has the peak
        cycle_momentum=False,
        rule="auto",
        model=model,
        probe=losses,
        passes=total * task.batch / task.train,
    )
    phase: Any = scheduler._phase
    rule = phase.rule
    assert phase.schedule.warm == warm
    records: list[Any] = []
    scheduler.on_record(records.append)
    while scheduler.searching:
        trial, done = rule.trial, rule.trials_run
        data = (10_000 * (SEED + 1) + done + 1) * trial.teams + rank // trial.team
        for batch in task.draw(data, trial.steps, task.batch // trial.teams):
            optimizer.zero_grad()
            loss = model(batch.chunk(trial.team)[rank % trial.team])
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
    return {
        "losses": [list(r.losses) for r in records if isinstance(r, TrialRecord)],
        "start": list(rule.start),
        "steps": rule.steps,
        "decided": (rule.scale, rule.keeps_head_start, rule.verdict),
        "weights": {k: v.detach()[0] for k, v in model.module.weights.items()},
        "moments": [optimizer.state.get(p) for p in model.parameters()],
    }


def _real_in_pairs(rank: int, size: int, name: str, factor: float, total: int) -> Any:
    with mock.patch("hdet_scale.search.trials.TEAMS", 2):
        return _real(rank, size, name, factor, total)


def check_equal(found: Searched, name: str, real: Sequence[Any]) -> None:
    """Every rank of the real search against the simulated one: losses, decision, weights."""
    task, rule = TASKS[name], found.rule
    drawn = [arm.losses for arm in rule.arms]
    # Weights and moments that the run begins with; the optimizer is fresh without a head start.
    kept = found.head if rule.keeps_head_start else Stacked(task, weights(task, SEED))
    moment = "exp_avg" if task.optimizer == "adamw" else "momentum_buffer"
    for seen in real:
        assert seen["decided"][:2] == (rule.scale, rule.keeps_head_start)
        assert seen["decided"][2].split(":")[0] == rule.verdict.split(":")[0]
        assert seen["steps"] == rule.steps
        assert seen["start"] == pytest.approx(rule.start, rel=1e-5)
        assert len(seen["losses"]) == len(drawn)
        for mine, theirs in zip(drawn, seen["losses"], strict=True):
            finite = math.isfinite(mean_loss(mine))
            assert math.isfinite(mean_loss(theirs)) == finite
            assert not finite or theirs == pytest.approx(mine, rel=1e-3)
        for (key, value), state in zip(seen["weights"].items(), seen["moments"], strict=True):
            torch.testing.assert_close(value, kept.params[key][0], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(value, real[0]["weights"][key], rtol=0, atol=0)
            assert (state is not None) == rule.keeps_head_start
            if state is not None:
                first = kept.first[key]
                torch.testing.assert_close(state[moment], first, rtol=1e-3, atol=1e-4)


FOUR = [("logit", 0.1), ("logit", 1.0), ("factor", 10.0)]
TWO = [("logit", 0.1), ("tanh", 10.0)]


@pytest.mark.parametrize(("name", "factor"), FOUR)
def test_four_simulated_replicas_are_the_real_ones(
    quartet: Fleet, name: str, factor: float
) -> None:
    """One team goes on with the run, three try a rate each: a round for each stage."""
    found = search(TASKS[name], SEED, 600, TASKS[name].around * factor, replicas=4)
    check_equal(found, name, quartet.run(_real, name, factor, 600))


@pytest.mark.parametrize(("name", "factor"), TWO)
def test_two_simulated_replicas_are_the_real_ones(pair: Fleet, name: str, factor: float) -> None:
    """One goes on with the run, the other tries one rate after the other."""
    found = search(TASKS[name], SEED, 900, TASKS[name].around * factor, replicas=2)
    assert len(found.losses) in (3, 6)
    check_equal(found, name, pair.run(_real, name, factor, 900))


def test_simulated_teams_are_the_real_ones(quartet: Fleet) -> None:
    """Two replicas that share their gradients are one with twice the batch."""
    rate = TASKS["logit"].around * 0.1
    with mock.patch("hdet_scale.search.trials.TEAMS", 2):
        found = search(TASKS["logit"], SEED, 900, rate, replicas=4)
    assert found.probed == len(found.losses) * PROBES / 2, "the members of a team split a probe"
    check_equal(found, "logit", quartet.run(_real_in_pairs, "logit", 0.1, 900))


def test_the_cases_are_of_every_kind() -> None:
    """A rate that stays after one stage, higher and lower ones, with and without a head start."""
    found = [search(TASKS[n], SEED, 600, TASKS[n].around * x, replicas=4).rule for n, x in FOUR]
    found += [search(TASKS[n], SEED, 900, TASKS[n].around * x, replicas=2).rule for n, x in TWO]
    assert {rule.offset for rule in found} >= {-1, 0, 1}
    assert {len({arm.stage for arm in rule.arms}) for rule in found} == {1, 2}
    assert {rule.keeps_head_start for rule in found} == {False, True}


# -- the run --------------------------------------------------------------------------------------


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


def test_auto_is_a_search_and_the_watched_run_after_it() -> None:
    task, steps = TASKS["logit"], 400
    row = auto(task, 0, steps, task.around / 10)
    before = search(task, 0, steps, task.around / 10)
    spent = before.rule.steps
    run = watched(task, 0, before, task.around / 10)
    assert row["loss"] == run.loss
    assert row["rate"] == task.around / 10 * run.scale
    assert row["head_start"] == before.rule.keeps_head_start
    assert row["verdict"].startswith(before.rule.verdict)
    # Of a probe's batches a replica has 1 / team in a search, 1 / REPLICAS in the run.
    batches = PROBES * (len(before.losses) / before.rule.team + (1 + run.evaluations) / REPLICAS)
    assert row["cost"] == pytest.approx((spent + batches / 3) / steps)


def test_where_the_initial_rate_and_weights_stay_the_run_is_the_grids() -> None:
    """Bit for bit, under its watch: a row differs from the grid by the rate alone."""
    task, steps = TASKS["logit"], 600
    before = search(task, 0, steps, task.around)
    before.rule.skip()
    before.rule.steps = 0
    run = watched(task, 0, before, task.around)
    assert run.evaluations == len(evaluated(steps))
    assert run.loss == fixed(task, 0, steps, [task.around / 2, task.around])[1]


def evaluated(steps: int) -> list[int]:
    """Steps of a run after which its watch evaluates it."""
    at = [max(1, round(FIRST * steps))]
    while at[-1] <= UNTIL * steps:
        at.append(max(at[-1] + 1, round(at[-1] * GROWTH)))
    return at[:-1]


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_rate_that_is_lowered_has_the_steps_of_one_schedule(
    budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a plain loop; the third evaluation is told to be worse than the second, twice."""
    task, steps, rate = TASKS["logit"], 400, TASKS["logit"].around / 10
    before = search(task, 0, steps, rate)
    before.rule.skip()
    before.rule.steps = 0
    bad, seen = evaluated(steps)[2:4], []

    def told(task: Task, params: Any, seed: int) -> Tensor:
        step = evaluated(steps)[len(seen)]
        seen.append(step)
        value = 3.0 if step in bad else 1.0 - step / steps
        return (value + 0.001 * torch.arange(PROBES).double())[:, None]

    before.rule.start = tuple(4.0 + 0.001 * i for i in range(PROBES))
    monkeypatch.setattr("benchmarks.lr.simulated.probe", told)
    run = watched(task, 0, before, rate, budget=budget)
    assert seen == evaluated(steps)
    assert run.scale == 1 / STEP
    assert len(run.verdicts) == 1
    model = Stacked(task, weights(task, 0))
    kept = copy.deepcopy(model)
    for t, batch in enumerate(task.draw(0, steps)):
        if t == bad[1] and budget:
            model = kept
        scale = 1 / STEP if t >= bad[1] else 1.0
        _, gradients = model.gradients(batch[None])
        model.step(torch.tensor([rate * scale]) * scheduled(t, steps), gradients)
        if t + 1 == evaluated(steps)[1]:
            kept = copy.deepcopy(model)
    assert run.loss == float(task.validate(model.params, VALIDATED)[0])
