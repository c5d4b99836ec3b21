"""A run, and a run of rule="auto", with simulated replicas: copies in one process, each with its
part of the batch (tests/benchmarks/test_simulated.py shows that this equals real processes)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.lr.problem import Params, Stacked, Task
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.trials import Level, shape
from hdet_scale.search.watch import Watch

REPLICAS = 8
PROBES = 16
"""Micro-batches of a probe."""
VALIDATED = 1024
"""Held-out examples that a run is judged by at its end; the probe has others."""
WARM = 0.05
"""Share of a run that is its warm-up; then a cosine to zero."""

Row = dict[str, Any]


def scheduled(t: int, steps: int) -> float:
    """The user's schedule over its peak."""
    warm = max(1, round(WARM * steps))
    if t < warm:
        return (t + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (t - warm) / (steps - warm)))


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


def run_trial(
    task: Task, seed: int, rule: RateSearch, start: float, data: int, make: type[Stacked] = Stacked
) -> list[Level]:
    """All teams through one trial, each with its own batches; sums of the losses at each level."""
    trial, n = rule.trial, rule.replicas // rule.team
    first = [rule.team * r for r in range(n)]  # the first replica of each team
    model = make(task, weights(task, seed, n))
    small = max(1, task.batch // n)
    batches = torch.stack([task.draw(data * n + r, trial.steps, small) for r in range(n)], 1)
    peak = start * torch.tensor([trial.multiplier(r) for r in first])
    for i, batch in enumerate(batches):
        _, gradients = model.gradients(batch)
        model.step(peak * shape(i, trial.steps), gradients)
    levels = [Level() for _ in range(rule.size)]
    for r, loss in zip(first, probe(task, model.judged(), seed).mean(0), strict=True):
        at, more = trial.level(r), Level.of(float(loss))
        levels[at] = Level(levels[at].count + more.count, levels[at].total + more.total)
    return levels


@dataclass
class Searched:
    """A search, and its cost."""

    rule: RateSearch
    steps: int = 0
    probed: float = 0.0
    """Batches that every replica has evaluated; the members of a team split them."""


def search(
    task: Task, seed: int, total: int, start: float, make: type[Stacked] = Stacked
) -> Searched:
    """A whole search of a run of `total` steps."""
    rule = RateSearch(replicas=REPLICAS, total_steps=total, adaptive=task.optimizer == "adamw")
    first = Level.of(float(probe(task, weights(task, seed), seed).mean()))
    out = Searched(rule)
    while not rule.over:
        out.steps += rule.trial.steps
        out.probed += PROBES / rule.team
        data = 10_000 * (seed + 1) + rule.trials_run + 1
        rule.close(run_trial(task, seed, rule, start, data, make), first)
    return out


@dataclass
class WatchedRun:
    """A run that restarts where its watch says so."""

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
) -> WatchedRun:
    """The run after a search, all replicas as one, under its watch; `plays` is the schedule."""
    rule = searched.rule
    total, left = rule.total_steps, rule.total_steps - searched.steps
    watch = Watch(
        total_steps=total,
        begun=searched.steps,
        mean=statistics.fmean(plays(t, total) for t in range(total)),
        scale=rule.scale,
        before=probe(task, weights(task, seed), seed)[:, 0].tolist(),
        target=rule.target,
        contested=rule.contested,
        duel=rule.duel,
    )
    out, t = WatchedRun(0.0, watch.scale, 1, []), 0
    model, batches = make(task, weights(task, seed)), task.draw(seed, left)
    for batch in batches:
        share = plays(t, left)
        losses, gradients = model.gradients(batch[None])
        model.step(torch.tensor([start * out.scale]) * share, gradients)
        t += 1
        watch.count(share)
        if not watch.due:
            continue
        out.evaluations += 1
        held = probe(task, model.judged(), seed)[:, 0].tolist()
        again = watch.evaluate(held, float(losses[0]))
        if watch.verdict not in ("", *out.verdicts):
            out.verdicts.append(watch.verdict)
        if again is not None:
            out.scale, left, t = again, left - t, 0
            model = make(task, weights(task, seed))
    out.loss = float(task.validate(model.judged(), VALIDATED)[0])
    return out


def around(steps: int) -> int:
    """Steps in all of which a search leaves just so many, unless it needs its long stage."""
    total = steps
    while total - RateSearch(replicas=REPLICAS, total_steps=total, adaptive=True).budget < steps:
        total += 1
    return total


def auto(
    task: Task,
    seed: int,
    steps: int,
    start: float,
    *,
    inside: bool = False,
    make: type[Stacked] = Stacked,
    plays: Callable[[int, int], float] = scheduled,
) -> Row:
    """A run of rule="auto": the search, then the run at the rate that won, under its watch."""
    total = steps if inside else around(steps)
    before = search(task, seed, total, start, make)
    run = watched(task, seed, before, start, make, plays)
    # A forward is a third of a step; replicas of the same weights split a probe.
    probed = (before.probed + (1 + run.evaluations) * PROBES / REPLICAS) / 3
    return {
        "loss": run.loss,
        "rate": start * run.scale,
        "cost": (before.steps + probed) / steps,
        "verdict": "; ".join([before.rule.verdict, *run.verdicts]),
    }
