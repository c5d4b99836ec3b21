"""A run, and a run of rule="auto", with simulated replicas: copies in one process, each with its
part of the batch (tests/test_lr_recovery.py shows that this equals real processes)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.lr.problem import Params, Stacked, Task
from hdet_scale.search.decision import Race
from hdet_scale.search.trials import Level, shape
from hdet_scale.search.watch import Watch

REPLICAS = 8
PROBES = 16
"""Micro-batches of a probe."""
VALIDATED = 1024
"""Held-out examples that a run is judged by in the end; the probe's are others."""
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


# -- the race ---------------------------------------------------------------------------------


def held_out(task: Task, seed: int) -> Tensor:
    """The probe's batches, [PROBES, b]: examples that nobody trains on, nor validates with."""
    generator = torch.Generator().manual_seed(10**6 + seed)
    size = (PROBES, max(1, task.batch // REPLICAS))
    first = task.train + VALIDATED
    return first + torch.randint(task.held_out - VALIDATED, size, generator=generator)


def probe(task: Task, params: Params, seed: int) -> Tensor:
    """Each copy's loss on each of the same batches, [PROBES, R]."""
    count = next(iter(params.values())).shape[0]
    with torch.no_grad():
        drawn = [task.losses(params, b.expand(count, -1)) for b in held_out(task, seed)]
    return torch.stack(drawn).double()


def run_heat(
    task: Task, seed: int, rule: Race, start: float, data: int, make: type[Stacked] = Stacked
) -> list[Level]:
    """All replicas through one heat, each with its own batches; sums at each level."""
    heat, n = rule.heat(), rule.replicas // rule.team
    model = make(task, weights(task, seed, n))
    small = max(1, task.batch // n)
    batches = torch.stack([task.draw(data * n + r, heat.steps, small) for r in range(n)], 1)
    peak = start * torch.tensor(heat.multipliers[:: rule.team])
    for i, batch in enumerate(batches):
        _, gradients = model.gradients(batch)
        model.step(peak * shape(i, heat.steps), gradients)
    seen = [Level() for _ in range(rule.size)]
    for r, loss in enumerate(probe(task, model.judged(), seed).mean(0)):
        seen[heat.levels[r * rule.team]] += Level.of(float(loss))
    return seen


@dataclass
class Raced:
    """A race, and what it has cost."""

    rule: Race
    steps: int = 0
    probed: float = 0.0
    """Batches that every replica has evaluated; the members of a team split them."""


def race(task: Task, seed: int, total: int, start: float, make: type[Stacked] = Stacked) -> Raced:
    """To its end."""
    rule = Race(replicas=REPLICAS, total_steps=total, adaptive=task.optimizer == "adamw")
    first = Level.of(float(probe(task, weights(task, seed), seed).mean()))
    out = Raced(rule)
    while not rule.over:
        out.steps += rule.heat().steps
        out.probed += PROBES / rule.team
        data = 10_000 * (seed + 1) + rule.heats_run + 1
        rule.close(run_heat(task, seed, rule, start, data, make), first)
    return out


@dataclass
class Guarded:
    """A run that starts again where its watch says so."""

    loss: float
    scale: float
    looks: int
    verdicts: list[str]


def guarded(
    task: Task,
    seed: int,
    raced: Raced,
    start: float,
    make: type[Stacked] = Stacked,
    plays: Callable[[int, int], float] = scheduled,
) -> Guarded:
    """The run after a race, all replicas as one, under its watch; `plays` is the schedule."""
    rule = raced.rule
    total, left = rule.total_steps, rule.total_steps - raced.steps
    watch = Watch(
        total_steps=total,
        begun=raced.steps,
        mean=statistics.fmean(plays(t, total) for t in range(total)),
        scale=rule.scale,
        before=probe(task, weights(task, seed), seed)[:, 0].tolist(),
        promise=rule.promise,
        contested=rule.contested,
        duel=rule.duel,
    )
    out, t = Guarded(0.0, watch.scale, 1, []), 0
    model, batches = make(task, weights(task, seed)), task.draw(seed, left)
    for batch in batches:
        share = plays(t, left)
        losses, gradients = model.gradients(batch[None])
        model.step(torch.tensor([start * out.scale]) * share, gradients)
        t += 1
        watch.count(share)
        if not watch.due:
            continue
        out.looks += 1
        seen = probe(task, model.judged(), seed)[:, 0].tolist()
        again = watch.look(seen, float(losses[0]))
        if watch.verdict not in ("", *out.verdicts):
            out.verdicts.append(watch.verdict)
        if again is not None:
            out.scale, left, t = again, left - t, 0
            model = make(task, weights(task, seed))
    out.loss = float(task.validate(model.judged(), VALIDATED)[0])
    return out


def around(steps: int) -> int:
    """Steps in all of which a race leaves just so many, unless it is blind."""
    total = steps
    while total - Race(replicas=REPLICAS, total_steps=total, adaptive=True).budget < steps:
        total += 1
    return total


def raced(
    task: Task,
    seed: int,
    steps: int,
    start: float,
    *,
    inside: bool = False,
    make: type[Stacked] = Stacked,
    plays: Callable[[int, int], float] = scheduled,
) -> Row:
    """A race, then the run with what it found, under its watch."""
    total = steps if inside else around(steps)
    before = race(task, seed, total, start, make)
    run = guarded(task, seed, before, start, make, plays)
    # A forward is a third of a step; replicas of the same weights split a probe.
    probed = (before.probed + (1 + run.looks) * PROBES / REPLICAS) / 3
    return {
        "loss": run.loss,
        "rate": start * run.scale,
        "extra": (total + probed) / steps - 1,
        "verdict": "; ".join([before.rule.verdict, *run.verdicts]),
    }
