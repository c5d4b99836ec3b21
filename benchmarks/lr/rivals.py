"""Rivals: the paper's rule, the slope rule, optimizers that claim to need no learning rate, and
optimizers at one learning rate for all tasks.

    python -m benchmarks.lr.rivals                    all tasks, 800 steps, two seeds; resumes
    python -m benchmarks.lr.rivals --tasks vit,ngram --lengths 800,2000

Rows go to `lr_rivals.jsonl`; what `lr_recovery.jsonl` has already is not run again.
`python -m benchmarks.lr.results` makes tables of both.
"""

from __future__ import annotations

import argparse
import functools
import math
import operator
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lr.calibrated import RATES, RECIPES, at_rates, grid_of
from benchmarks.lr.dowg import DoWG
from benchmarks.lr.problem import Stacked, Task
from benchmarks.lr.rows import RECOVERY, RIVALS, Rows
from benchmarks.lr.simulated import PROBES, REPLICAS, WARM, Row, scheduled, weights
from benchmarks.lr.tasks import TASKS
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


Maker = Callable[[list[Tensor]], Any]
"""Makes an optimizer of parameters."""


def with_torch(
    task: Task,
    seed: int,
    steps: int,
    make: Maker,
    *,
    decays: bool = True,
    takes_loss: bool = False,
) -> Row:
    """A run by a torch optimizer of another library, with its own learning rate.

    Args:
        task: what is trained.
        seed: the seed of the weights and batches.
        steps: length of the run.
        make: makes the optimizer.
        decays: whether its learning rate follows the arbiter's warm-up and cosine. Default True.
        takes_loss: whether `optimizer.step` needs the loss of the batch. Default False.
    """
    params = {k: v.clone().requires_grad_() for k, v in weights(task, seed).items()}
    optimizer = make(list(params.values()))
    own = [g["lr"] for g in optimizer.param_groups]
    averages = hasattr(optimizer, "train")  # Schedule-Free: evaluated at other weights
    if averages:
        optimizer.train()
    for t, batch in enumerate(task.draw(seed, steps)):
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr * scheduled(t, steps) if decays else lr
        optimizer.zero_grad()
        loss = task.losses(params, batch[None]).sum()
        loss.backward()
        optimizer.step(**({"loss": loss} if takes_loss else {}))
    if averages:
        optimizer.eval()
    return {
        "loss": float(task.validate(params)[0]),
        "rate": _scale(optimizer) * own[0],
        "extra": 0.0,
    }


def _scale(optimizer: Any) -> float:
    """What an optimizer has multiplied its own learning rate by; 1 where it does not tell."""
    if "_mechanic" in optimizer.state:
        return float(optimizer.state["_mechanic"]["s"].sum())
    return float(optimizer.param_groups[0].get("d", 1.0))


def others(task: Task, seed: int, steps: int, best: float) -> Iterable[tuple[str, float, Any]]:
    """Prodigy, D-Adaptation and Schedule-Free, this also at multiples of the best learning rate:
    name, start, run."""
    import dadaptation
    import prodigyopt
    import schedulefree

    adam, decay = task.optimizer == "adamw", task.weight_decay
    warm = round(WARM * steps)

    def run(make: Maker, decays: bool = True) -> Callable[[], Row]:
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


def further(task: Task, seed: int, steps: int) -> Iterable[tuple[str, Callable[[], Row]]]:
    """Mechanic, DoWG, MoMo and Prodigy with Schedule-Free, as documented: name, run.

    DoWG and MoMo are documented without a schedule. They are also run with the arbiter's warm-up
    and cosine, as methods of their own.
    """
    import mechanic_pytorch
    import momo
    import prodigyplus

    adam, decay = task.optimizer == "adamw", task.weight_decay

    def run(make: Maker, **options: bool) -> Callable[[], Row]:
        return lambda: with_torch(task, seed, steps, make, **options)

    def mechanic(p: list[Tensor]) -> Any:
        if adam:
            kind = mechanic_pytorch.mechanize(torch.optim.AdamW)
            return kind(p, lr=1.0, betas=(0.9, 0.99), weight_decay=decay)
        kind = mechanic_pytorch.mechanize(torch.optim.SGD)
        return kind(p, lr=1.0, momentum=0.9, nesterov=True, weight_decay=decay)

    def momentum_models(p: list[Tensor]) -> Any:
        if adam:
            return momo.MomoAdam(p, lr=1e-2, weight_decay=decay)
        return momo.Momo(p, lr=1.0, weight_decay=decay)

    yield "mechanic", run(mechanic)
    yield "dowg", run(DoWG, decays=False)
    yield "dowg cosine", run(DoWG)
    yield "momo", run(momentum_models, decays=False, takes_loss=True)
    yield "momo cosine", run(momentum_models, takes_loss=True)
    yield (
        "prodigy schedule-free",
        run(lambda p: prodigyplus.ProdigyPlusScheduleFree(p, weight_decay=decay), decays=False),
    )


class Contest(Rows):
    """Runs the rivals that are missing."""

    def calibrated(self, task: Task, steps: int, seed: int) -> None:
        """A row for each learning rate of each recipe; the rates of a recipe run at once."""
        for name, recipe in RECIPES.items():
            method = grid_of(name)
            if all((task.name, steps, seed, method, round(x, 12)) in self.known for x in RATES):
                continue
            began = time.perf_counter()
            losses = at_rates(recipe, task, seed, steps)
            seconds = (time.perf_counter() - began) / len(RATES)
            for rate, loss in zip(RATES, losses, strict=True):
                found = {"loss": loss, "rate": rate, "extra": 0.0, "seconds": seconds}
                self.run(task, steps, seed, method, rate, lambda found=found: found)  # type: ignore[misc]

    def defaults(self, task: Task, steps: int, seed: int) -> None:
        """The optimizers that are started at their own default."""
        for name, start, do in others(task, seed, steps, math.nan):
            if not start:
                self.run(task, steps, seed, name, start, do)
        for name, do in further(task, seed, steps):
            self.run(task, steps, seed, name, 0.0, do)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma separated")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lengths", default="800")
    parser.add_argument("--rows", type=Path, default=RIVALS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    contest = Contest(given.rows, RECOVERY)
    for steps in map(int, given.lengths.split(",")):
        for seed in range(given.seeds):
            for name in given.tasks.split(","):
                contest.defaults(TASKS[name], steps, seed)
                contest.calibrated(TASKS[name], steps, seed)
                print(f"{steps} steps, seed {seed}: {name}", flush=True)


if __name__ == "__main__":
    main()
