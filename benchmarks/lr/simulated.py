"""A run, and a run of rule="auto", with simulated replicas: copies in one process, each with its
part of the batch (tests/benchmarks/test_simulated.py shows that this equals real processes)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.lr.problem import Params, Stacked, Task
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.trials import Trial, head_start, shape
from hdet_scale.search.watch import Watch

REPLICAS = 8
PROBES = 64
"""Micro-batches of a probe."""
VALIDATED = 1024
"""Held-out examples that a run is judged by at its end; the probe has others."""
WARM = 0.05
"""Share of a run that is its warm-up; then a cosine to zero."""

Row = dict[str, Any]


def scheduled(t: int, steps: int) -> float:
    """The user's schedule over its peak."""
    warm = warm_up(steps)
    if t < warm:
        return (t + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (t - warm) / (steps - warm)))


def warm_up(steps: int) -> int:
    """Steps of the user's warm-up."""
    return max(1, round(WARM * steps))


def weights(task: Task, seed: int, copies: int = 1) -> Params:
    """The start of a seed, the same for all copies."""
    init = task.init(torch.Generator().manual_seed(seed))
    return {k: v.expand(copies, *v.shape) for k, v in init.items()}


def fixed(task: Task, seed: int, steps: int, rates: list[float]) -> list[float]:
    """Validation losses of runs at fixed learning rates, all at once."""
    model = Stacked(task, weights(task, seed, len(rates)))
    peak, batches = torch.tensor(rates), task.draw(seed, steps)
    for t, batch in enumerate(batches):
        _, gradients = model.gradients(batch.expand(len(rates), -1))
        model.step(peak * scheduled(t, steps), gradients)
    return [float(x) for x in task.validate(model.params)]


# -- the search -------------------------------------------------------------------------------


def held_out(task: Task, seed: int) -> Tensor:
    """The probe's batches, [PROBES, b]: examples that are neither trained on nor validated with."""
    generator = torch.Generator().manual_seed(10**6 + seed)
    size = (PROBES, max(1, task.batch // REPLICAS))
    first = task.train + VALIDATED
    return first + torch.randint(task.held_out - VALIDATED, size, generator=generator)


def probe(task: Task, params: Params, seed: int) -> Tensor:
    """Each copy's loss on each of the same batches, [PROBES, R]."""
    count = next(iter(params.values())).shape[0]
    with torch.no_grad():
        drawn = [task.evaluated(params, b.expand(count, -1)) for b in held_out(task, seed)]
    return torch.stack(drawn).double()


@dataclass
class Searched:
    """A search, what it leaves for the run, and its cost."""

    rule: RateSearch
    head: Stacked
    """The team that goes on with the run."""
    head_steps: int = 0
    probed: float = 0.0
    """Batches that every replica has evaluated; the members of a team split them."""
    losses: list[dict[int, list[float]]] = field(default_factory=list)
    """Of each round, by rate."""


def run_trials(
    task: Task, seed: int, trial: Trial, start: float, data: int, warm: int, make: type[Stacked]
) -> dict[int, list[float]]:
    """All teams but the first through one round, each with its own batches; the losses of each
    rate by batch."""
    first = 1 if trial.has_head_start else 0
    teams = range(first, trial.teams)
    replicas = [team * trial.team for team in teams]
    model = make(task, weights(task, seed, len(teams)))
    size = max(1, task.batch // trial.teams)
    batches = torch.stack(
        [task.draw(data * trial.teams + team, trial.steps, size) for team in teams], 1
    )
    peak = start * torch.tensor([trial.multiplier(r) for r in replicas])
    for i, batch in enumerate(batches):
        _, gradients = model.gradients(batch)
        model.step(peak * shape(i, trial.steps, warm), gradients)
    by_team = probe(task, model.judged(), seed).T.tolist()
    drawn: dict[int, list[list[float]]] = {}
    for replica, losses in zip(replicas, by_team, strict=True):
        arm = trial.arm(replica)
        if arm is not None:
            drawn.setdefault(arm, []).append(losses)
    return {arm: [sum(x) / len(x) for x in zip(*rows, strict=True)] for arm, rows in drawn.items()}


def go_on(task: Task, found: Searched, trial: Trial, start: float, data: int, warm: int) -> None:
    """The first team through one round: the run at a quarter of the initial rate."""
    size = max(1, task.batch // trial.teams)
    for batch in task.draw(data * trial.teams, trial.steps, size):
        _, gradients = found.head.gradients(batch[None])
        rate = start * trial.multiplier(0) * head_start(found.head_steps, warm)
        found.head.step(torch.tensor([rate]), gradients)
        found.head_steps += 1


def search(
    task: Task,
    seed: int,
    total: int,
    start: float,
    make: type[Stacked] = Stacked,
    replicas: int = REPLICAS,
) -> Searched:
    """A whole search of a run of `total` steps."""
    rule = RateSearch(
        replicas=replicas,
        total_steps=total,
        adaptive=task.optimizer == "adamw",
        passes=total * task.batch / task.train,
    )
    out, warm = Searched(rule, make(task, weights(task, seed))), warm_up(total)
    initial = probe(task, weights(task, seed), seed)[:, 0].tolist()
    while not rule.over:
        trial, data = rule.trial, 10_000 * (seed + 1) + rule.trials_run + 1
        losses, head = run_trials(task, seed, trial, start, data, warm, make), []
        if trial.has_head_start:
            go_on(task, out, trial, start, data, warm)
            head = probe(task, out.head.judged(), seed)[:, 0].tolist()
        out.losses.append(losses)
        out.probed += PROBES / trial.team
        rule.close(losses, initial, head)
        if not rule.over and rule.trial.head < trial.head:  # it begins again, at a lower rate
            out.head, out.head_steps = make(task, weights(task, seed)), 0
    return out


@dataclass
class WatchedRun:
    """A run whose rate its watch may lower."""

    loss: float
    scale: float
    evaluations: int
    verdicts: list[str]


def watched(
    task: Task,
    seed: int,
    searched: Searched,
    start: float,
    make: type[Stacked] = Stacked,
    plays: Callable[[int, int], float] = scheduled,
    budget: float = 0.15,
) -> WatchedRun:
    """The run after a search, all replicas as one, under its watch; `plays` is the schedule."""
    rule = searched.rule
    left = rule.total_steps - rule.steps
    model = searched.head if rule.keeps_head_start else make(task, weights(task, seed))
    watch = Watch(
        total_steps=rule.total_steps,
        begun=rule.steps,
        scale=rule.scale,
        start=rule.start,
        budget=budget,
    )
    out, best = WatchedRun(0.0, watch.scale, 0, []), copy.deepcopy(model)
    for t, batch in enumerate(task.draw(seed, left)):
        _, gradients = model.gradients(batch[None])
        model.step(torch.tensor([start * watch.scale]) * plays(t, left), gradients)
        if not watch.count():
            continue
        out.evaluations += 1
        move = watch.evaluate(probe(task, model.judged(), seed)[:, 0].tolist())
        if move.back:
            model = copy.deepcopy(best)
        elif move.best:
            best = copy.deepcopy(model)
        if move.scale is not None:
            out.verdicts.append(watch.verdict)
    out.loss, out.scale = float(task.validate(model.judged(), VALIDATED)[0]), watch.scale
    return out


def auto(
    task: Task,
    seed: int,
    steps: int,
    start: float,
    *,
    make: type[Stacked] = Stacked,
    plays: Callable[[int, int], float] = scheduled,
) -> Row:
    """A run of rule="auto" of so many steps in all: the search, then the run at the rate that won,
    under its watch."""
    before = search(task, seed, steps, start, make)
    run = watched(task, seed, before, start, make, plays)
    # A forward is a third of a step; replicas of the same weights split a probe.
    probed = (before.probed + (1 + run.evaluations) * PROBES / REPLICAS) / 3
    return {
        "loss": run.loss,
        "rate": start * run.scale,
        "cost": (before.rule.steps + probed) / steps,
        "head_start": before.rule.keeps_head_start,
        "verdict": "; ".join([before.rule.verdict, *run.verdicts]),
    }
