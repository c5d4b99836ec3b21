"""Rivals: the paper's rule, the slope rule, optimizers that claim to need no learning rate."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.lr.problem import Stacked, Task
from benchmarks.lr.simulated import PROBES, REPLICAS, WARM, Row, scheduled, weights
from hdet_scale.method.paper import Descent, PaperRule, PaperSteering
from hdet_scale.rules.designs import levels
from hdet_scale.rules.slope import Slope, Width
from hdet_scale.rules.sums import Sums


def paper(task: Task, seed: int, steps: int, start: float, sigma: float) -> Row:
    """The paper's rule: shared gradients, spread 1/9, a converge every 10 steps."""
    n, interval, small = REPLICAS, 10, max(1, task.batch // REPLICAS)
    steering = PaperSteering(
        ["lr"],
        lambda: PaperRule(sigma),
        Descent(start=round(WARM * steps), interval=interval),
        spread=1 / 9,
        seed=seed,
    )
    model = Stacked(task, weights(task, seed, n))
    total = torch.zeros(n, dtype=torch.float64)
    (fan,) = steering.fans(n, 0)
    for t, batch in enumerate(task.draw(seed, steps)):
        value = start * scheduled(t, steps)
        base = steering.bases([value])[0]
        losses, gradients = model.gradients(batch[: n * small].view(n, small))
        total += losses
        shared = [g.mean(0, keepdim=True).expand_as(g) for g in gradients]
        model.step(base * torch.tensor(fan), shared)
        if (t + 1) % interval == 0:
            with torch.no_grad():
                for weight in model.params.values():
                    weight.copy_(weight.mean(0, keepdim=True).expand_as(weight))
            used = [base * rho for rho in fan]
            steering.update(t + 1, [value], (total / interval).tolist(), [used])
            total.zero_()
            (fan,) = steering.fans(n, (t + 1) // interval)
    mean = {k: v.mean(0, keepdim=True) for k, v in model.params.items()}
    return {
        "loss": float(task.validate(mean)[0]),
        "rate": start * steering.scales[0],
        "extra": 0.0,
    }


def slope(task: Task, seed: int, steps: int, start: float) -> Row:
    """The slope rule, fed by a probe at each converge: shared gradients, spread 0.3, a converge
    every 10 steps, fresh batches for each probe."""
    n, interval, small = REPLICAS, 10, max(1, task.batch // REPLICAS)
    rule = Slope(["lr"], Width(0.3))
    model = Stacked(task, weights(task, seed, n))
    probed, index = 0, 0
    (column,) = levels(n, ["lr"], seed=seed, round=index)
    for t, batch in enumerate(task.draw(seed, steps)):
        decision = rule.decision
        rho = [1 + decision.spread * x for x in column]
        base = start * scheduled(t, steps) * math.exp(decision.offsets[0])
        _, gradients = model.gradients(batch[: n * small].view(n, small))
        shared = [g.mean(0, keepdim=True).expand_as(g) for g in gradients]
        model.step(base * torch.tensor(rho), shared)
        if (t + 1) % interval or not decision.spread:
            continue
        batches = task.draw(10**6 + 1000 * seed + index, PROBES // 2, small)
        with torch.no_grad():
            drawn = [task.losses(model.params, b.expand(n, -1)).double() for b in batches]
        rows = torch.stack(drawn, 1).tolist()
        each = [Sums.of([math.log(r)], row) for r, row in zip(rho, rows, strict=True)]
        rule.update(functools.reduce(operator.add, each), t + 1)
        probed, index = probed + PROBES // 2, index + 1
        (column,) = levels(n, ["lr"], seed=seed, round=index)
        with torch.no_grad():
            for weight in model.params.values():
                weight.copy_(weight.mean(0, keepdim=True).expand_as(weight))
    mean = {k: v.mean(0, keepdim=True) for k, v in model.params.items()}
    return {
        "loss": float(task.validate(mean)[0]),
        "rate": start * math.exp(rule.decision.offsets[0]),
        "extra": probed / 3 / steps,
        "verdict": rule.decision.verdict,
    }


def with_torch(
    task: Task,
    seed: int,
    steps: int,
    make: Callable[[list[Tensor]], Any],
    *,
    decays: bool = True,
) -> Row:
    """A run by a torch optimizer of another library, with its own learning rate."""
    params = {k: v.clone().requires_grad_() for k, v in weights(task, seed).items()}
    optimizer = make(list(params.values()))
    own = [g["lr"] for g in optimizer.param_groups]
    if not decays:
        optimizer.train()
    for t, batch in enumerate(task.draw(seed, steps)):
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr * scheduled(t, steps) if decays else lr
        optimizer.zero_grad()
        task.losses(params, batch[None]).sum().backward()
        optimizer.step()
    if not decays:
        optimizer.eval()
    found = optimizer.param_groups[0]
    return {
        "loss": float(task.validate(params)[0]),
        "rate": float(found.get("d", 1.0)) * own[0],
        "extra": 0.0,
    }


def others(task: Task, seed: int, steps: int, best: float) -> Iterable[tuple[str, float, Any]]:
    """Optimizers that claim to need no learning rate, or less of one: name, start, run."""
    import dadaptation
    import prodigyopt
    import schedulefree

    adam, decay = task.optimizer == "adamw", task.weight_decay
    warm = round(WARM * steps)

    def run(make: Callable[[list[Tensor]], Any], decays: bool = True) -> Callable[[], Row]:
        return lambda: with_torch(task, seed, steps, make, decays=decays)

    yield "prodigy", 0.0, run(lambda p: prodigyopt.Prodigy(p, lr=1.0, weight_decay=decay))
    if adam:
        yield "d-adaptation", 0.0, run(lambda p: dadaptation.DAdaptAdam(p, lr=1.0))
    else:
        yield "d-adaptation", 0.0, run(lambda p: dadaptation.DAdaptSGD(p, lr=1.0, momentum=0.9))

    def free(rate: float) -> Callable[[], Row]:
        kind = schedulefree.AdamWScheduleFree if adam else schedulefree.SGDScheduleFree
        return run(lambda p: kind(p, lr=rate, weight_decay=decay, warmup_steps=warm), decays=False)

    yield "schedule-free", 0.0, free(0.0025 if adam else 1.0)
    for start in (0.1, 1.0, 10.0):
        yield "schedule-free", start, free(best * start)
