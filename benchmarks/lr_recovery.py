"""Who finds the learning rate: rules, optimizers that claim to need none, and a sweep.

    python -m benchmarks.lr_recovery                  all tasks, both lengths, resumes where it was
    python -m benchmarks.lr_recovery --tasks vit,ngram --seeds 3 --lengths 800
    python -m benchmarks.lr_recovery --table          what the rows say so far, and the figure
    python -m benchmarks.lr_recovery --markdown       the same as the tables of the documents

For each task and run length a grid of fixed learning rates, a factor of two apart, is the limit.
Every contender is started at 1/100, 1/10, 1 and 10 times the best of the grid (mean over the
seeds), with the same seeds as the grid: same weights, same batches in the main run. Excess is the
validation loss over that of the best of the grid with the same seed.

Replicas are simulated: eight copies in one process, a batch of 1/8 each (tests/test_lr_recovery.py
shows that this equals real processes). A run of rule="auto" has S / (1 - r) steps in all, so that
the main run has as many steps as everybody's and the race is the extra cost that the table shows;
the row "auto inside" has S in all.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import operator
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lr_tasks import JUDGED, TASKS, Params, Stacked, Task
from benchmarks.rows import RESULTS, where
from hdet_scale.climb import Climb
from hdet_scale.controller import Descent, PaperRule, Steering
from hdet_scale.designs import levels
from hdet_scale.race import SHARES, Level, Race, shape
from hdet_scale.slope import Slope, Sums, Width
from hdet_scale.spread import assignment, multipliers
from hdet_scale.watch import Watch

ROWS = RESULTS / "lr_recovery.jsonl"
FIGURE = RESULTS / "lr_recovery.png"
REPLICAS = 8
GRID = range(-3, 4)
STARTS = (0.01, 0.1, 1.0, 10.0)
FAILS = ("vit", "factor", "deep")
"""Tasks that no short race can see into: means of the tables leave them out, medians do not."""
SHORT = (
    *(("auto", start) for start in (0.1, 1.0, 10.0)),
    *(("fixed", start) for start in (0.1, 10.0)),
    *((name, 0.0) for name in ("prodigy", "d-adaptation", "schedule-free")),
)
"""Columns of the README's table."""
ORDER = (
    *(("auto", start) for start in STARTS),
    *(("auto inside", start) for start in (0.1, 10.0)),
    *(("fixed", start) for start in (0.01, 0.1, 10.0)),
    *((name, start) for name in ("slope", "climb") for start in (0.1, 10.0)),
    *((f"paper {sigma}", start) for sigma in (0.1, 0.002) for start in (0.1, 10.0)),
    ("prodigy", 0.0),
    ("d-adaptation", 0.0),
    *(("schedule-free", start) for start in (0.0, 0.1, 1.0, 10.0)),
)
"""Rows of the table: method and start."""
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


def run_heat(task: Task, seed: int, rule: Race, start: float, data: int) -> list[Level]:
    """All replicas through one heat, each with its own batches; sums at each level."""
    heat, n = rule.heat(), rule.replicas
    model = Stacked(task, weights(task, seed, n))
    small = max(1, task.batch // n)
    batches = torch.stack([task.draw(data * n + r, heat.steps, small) for r in range(n)], 1)
    peak = start * torch.tensor(heat.multipliers)
    for i, batch in enumerate(batches):
        _, gradients = model.gradients(batch)
        model.step(peak * shape(i, heat.steps), gradients)
    seen = [Level() for _ in range(rule.size)]
    for r, loss in enumerate(probe(task, model.params, seed).mean(0)):
        seen[heat.levels[r]] += Level.of(float(loss))
    return seen


def race(task: Task, seed: int, total: int, start: float) -> Race:
    """The rule as it stands after its last heat."""
    rule = Race(replicas=REPLICAS, total_steps=total, adaptive=task.optimizer == "adamw")
    first = Level.of(float(probe(task, weights(task, seed), seed).mean()))
    heats = 0
    while not rule.over:
        heats += 1
        rule.close(run_heat(task, seed, rule, start, 10_000 * (seed + 1) + heats), first)
    return rule


@dataclass
class Guarded:
    """A run that starts again where its watch says so."""

    loss: float
    scale: float
    looks: int
    verdicts: list[str]


def guarded(task: Task, seed: int, rule: Race, start: float) -> Guarded:
    """The run after a race, all replicas as one, under a watch where something was found."""
    total = rule.total_steps
    left = total - rule.budget
    if rule.found == 0.0:
        return Guarded(fixed(task, seed, left, [start])[0], 1.0, 0, [])
    watch = Watch(
        total_steps=total,
        begun=rule.budget,
        mean=statistics.fmean(scheduled(t, total) for t in range(total)),
        scale=rule.scale,
        before=probe(task, weights(task, seed), seed)[:, 0].tolist(),
        promise=rule.promise,
        contested=rule.contested,
    )
    out, t = Guarded(0.0, watch.scale, 1, []), 0
    model, batches = Stacked(task, weights(task, seed)), task.draw(seed, left)
    for batch in batches:
        share = scheduled(t, left)
        losses, gradients = model.gradients(batch[None])
        model.step(torch.tensor([start * out.scale * share]), gradients)
        t += 1
        watch.count(share)
        if not watch.due:
            continue
        out.looks += 1
        again = watch.look(probe(task, model.params, seed)[:, 0].tolist(), float(losses[0]))
        if watch.verdict not in ("", *out.verdicts):
            out.verdicts.append(watch.verdict)
        if again is not None:
            out.scale, left, t = again, left - t, 0
            model = Stacked(task, weights(task, seed))
    out.loss = float(task.validate(model.params, VALIDATED)[0])
    return out


def raced(task: Task, seed: int, steps: int, start: float, *, inside: bool) -> Row:
    """A race, then the run with what it found, under its watch."""
    total = steps if inside else math.ceil(steps / (1 - sum(SHARES)))
    rule = race(task, seed, total, start)
    run = guarded(task, seed, rule, start)
    # A forward is a third of a step; replicas of the same weights split a probe.
    probed = (2 * rule.heats + (1 + run.looks) / REPLICAS) * PROBES / 3
    return {
        "loss": run.loss,
        "rate": start * run.scale,
        "extra": (total + probed) / steps - 1,
        "verdict": "; ".join([rule.verdict, *run.verdicts]),
    }


# -- others -----------------------------------------------------------------------------------


def paper(task: Task, seed: int, steps: int, start: float, sigma: float) -> Row:
    """The paper's rule: shared gradients, spread 1/9, a converge every 10 steps."""
    n, interval, small = REPLICAS, 10, max(1, task.batch // REPLICAS)
    steering = Steering(
        ["lr"], lambda: PaperRule(sigma), Descent(start=round(WARM * steps), interval=interval)
    )
    model = Stacked(task, weights(task, seed, n))
    fan, heard = multipliers(n, 1 / 9), torch.zeros(n, dtype=torch.float64)
    order = list(range(n))
    for t, batch in enumerate(task.draw(seed, steps)):
        value = start * scheduled(t, steps)
        base = steering.bases([value])[0]
        losses, gradients = model.gradients(batch[: n * small].view(n, small))
        heard += losses
        shared = [g.mean(0, keepdim=True).expand_as(g) for g in gradients]
        model.step(base * torch.tensor([fan[i] for i in order]), shared)
        if (t + 1) % interval == 0:
            with torch.no_grad():
                for weight in model.params.values():
                    weight.copy_(weight.mean(0, keepdim=True).expand_as(weight))
            used = [base * fan[i] for i in order]
            steering.update(t + 1, [value], (heard / interval).tolist(), [used])
            heard.zero_()
            order = assignment(n, seed=seed, round=(t + 1) // interval, factor="lr")
    mean = {k: v.mean(0, keepdim=True) for k, v in model.params.items()}
    return {
        "loss": float(task.validate(mean)[0]),
        "rate": start * steering.scales[0],
        "extra": 0.0,
    }


def guided(task: Task, seed: int, steps: int, start: float, name: str) -> Row:
    """Rules that are fed by a probe at each converge: shared gradients, spread 0.3, fresh batches
    for each probe; a converge every 10 steps (slope) or 4 (climb)."""
    n, small = REPLICAS, max(1, task.batch // REPLICAS)
    rule: Slope | Climb = Slope(["lr"], Width(0.3)) if name == "slope" else Climb(["lr"], steps)
    interval = 10 if name == "slope" else 4
    model = Stacked(task, weights(task, seed, n))
    begun, probed, index = model.copies(), 0, 0
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
        decision = rule.update(functools.reduce(operator.add, each), t + 1)
        probed, index = probed + PROBES // 2, index + 1
        (column,) = levels(n, ["lr"], seed=seed, round=index)
        with torch.no_grad():
            for key, weight in model.params.items():
                mean = weight.mean(0, keepdim=True).expand_as(weight)
                weight.copy_(begun[key] if decision.rewind else mean)
        if decision.rewind:
            model.reset()
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


# -- the whole --------------------------------------------------------------------------------


class Arbiter:
    """Runs what is missing and writes a row for each run."""

    def __init__(self, path: Path) -> None:
        self.path, self.stamp = path, where()
        self.rows: list[Row] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines() if line]
        self.known = {self._key(row) for row in self.rows}

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return row["task"], row["steps"], row["seed"], row["method"], round(row["start"], 12)

    def run(
        self, task: Task, steps: int, seed: int, method: str, start: float, do: Callable[[], Row]
    ) -> None:
        place = {
            "task": task.name, "steps": steps, "seed": seed, "method": method, "start": start
        }  # fmt: skip
        if self._key(place) in self.known:
            return
        began = time.perf_counter()
        row = place | {"seconds": 0.0} | do()
        row |= {"seconds": round(row["seconds"] or time.perf_counter() - began, 2), **self.stamp}
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self.known.add(self._key(row))

    def grid(self, task: Task, steps: int, seed: int, powers: Iterable[int] = GRID) -> None:
        """One row for each learning rate of the grid; all of them run at once."""
        rates = [task.around * 2.0**k for k in powers]
        rates = [
            x
            for x in rates
            if (task.name, steps, seed, "grid", round(x, 12)) not in self.known
        ]  # fmt: skip
        if not rates:
            return
        began = time.perf_counter()
        losses = fixed(task, seed, steps, rates)
        seconds = (time.perf_counter() - began) / len(rates)
        for rate, loss in zip(rates, losses, strict=True):
            found = {"loss": loss, "rate": rate, "extra": 0.0, "seconds": seconds}
            self.run(task, steps, seed, "grid", rate, lambda found=found: found)  # type: ignore[misc]

    def whole_grid(self, task: Task, steps: int, seeds: int) -> None:
        """The grid of all seeds, continued where its best is at an edge."""
        first, last = GRID[0], GRID[-1]
        for _ in range(4):
            for seed in range(seeds):
                self.grid(task, steps, seed, range(first, last + 1))
            at = round(math.log2(self.best(task.name, steps)[0] / task.around))
            if first < at < last:
                return
            first, last = min(first, at - 2), max(last, at + 2)

    def best(self, task: str, steps: int) -> tuple[float, dict[int, float]]:
        """The learning rate with the lowest mean over seeds, and its loss for each seed."""
        by_rate: dict[float, dict[int, float]] = defaultdict(dict)
        for row in self.rows:
            if (row["task"], row["steps"], row["method"]) == (task, steps, "grid"):
                by_rate[row["rate"]][row["seed"]] = row["loss"]
        most = max(len(v) for v in by_rate.values())
        whole = {k: v for k, v in by_rate.items() if len(v) == most}
        rate = min(whole, key=lambda k: _mean_or_inf(whole[k].values()))
        return rate, whole[rate]

    def contenders(self, task: Task, steps: int, seed: int, *, short: bool) -> None:
        """Everybody but the grid."""
        best, _ = self.best(task.name, steps)
        for start in (0.1, 10.0) if short else STARTS:
            at = best * start
            self.run(
                task, steps, seed, "auto", start,
                lambda at=at: raced(task, seed, steps, at, inside=False),  # type: ignore[misc]
            )  # fmt: skip
        if short:
            return
        for name, start, do in others(task, seed, steps, best):
            self.run(task, steps, seed, name, start, do)
        rates = [best * x for x in (0.01, 0.1, 10.0)]
        if (task.name, steps, seed, "fixed", 0.1) not in self.known:
            for start, loss in zip((0.01, 0.1, 10.0), fixed(task, seed, steps, rates), strict=True):
                found = {"loss": loss, "rate": best * start, "extra": 0.0}
                self.run(task, steps, seed, "fixed", start, lambda found=found: found)  # type: ignore[misc]
        if steps == task.steps[0]:
            for start in (0.1, 10.0):
                at = best * start
                self.run(
                    task, steps, seed, "auto inside", start,
                    lambda at=at: raced(task, seed, steps, at, inside=True),  # type: ignore[misc]
                )  # fmt: skip
                for name in ("slope", "climb"):
                    self.run(
                        task, steps, seed, name, start,
                        lambda at=at, name=name: guided(task, seed, steps, at, name),  # type: ignore[misc]
                    )  # fmt: skip
                for sigma in (0.1, 0.002):
                    self.run(
                        task, steps, seed, f"paper {sigma}", start,
                        lambda at=at, sigma=sigma: paper(task, seed, steps, at, sigma),  # type: ignore[misc]
                    )  # fmt: skip

    def excesses(self) -> dict[tuple[str, int, str, float], list[tuple[float, float]]]:
        """(task, steps, method, start) -> for each seed (excess in %, rate over best)."""
        out: dict[tuple[str, int, str, float], list[tuple[float, float]]] = defaultdict(list)
        limits: dict[tuple[str, int], tuple[float, dict[int, float]]] = {}
        for row in self.rows:
            if row["method"] == "grid":
                continue
            where = (row["task"], row["steps"])
            rate, losses = limits.setdefault(where, self.best(*where))
            if row["seed"] in losses:
                excess = 100 * (row["loss"] / losses[row["seed"]] - 1)
                key = (*where, row["method"], row["start"])
                out[key].append((excess, row["rate"] / rate))
        return out

    def table(self) -> str:
        """Mean excess in % (standard error, LR found over best) by task and start."""
        found = self.excesses()
        methods = sorted({(m, s) for _, _, m, s in found})
        tasks = sorted({(t, s) for t, s, _, _ in found}, key=lambda k: (k[0] in JUDGED, k))
        lines = []
        for method, start in methods:
            cells, means = [], []
            for task, steps in tasks:
                drawn = found.get((task, steps, method, start))
                if not drawn:
                    continue
                excess = [e for e, _ in drawn]
                mean = _mean_or_inf(excess)
                means.append(mean)
                many = len(excess) > 1 and math.isfinite(mean)
                error = statistics.stdev(excess) / math.sqrt(len(excess)) if many else math.nan
                ratio = math.exp(statistics.fmean(math.log(max(r, 1e-12)) for _, r in drawn))
                flag = "*" if task in JUDGED else ""
                cells.append(
                    f"    {task}{flag} {steps}: {mean:+.1f} % +- {error:.1f} ({len(excess)} seeds, "
                    f"LR x {ratio:.2g})"
                )
            label = f"{method} from {start:g} x" if start else f"{method}, own default"
            if means:
                worst = max(means)
                average = statistics.fmean(means)
                lines.append(f"{label}: mean {average:+.1f} %, worst {worst:+.1f} %")
                lines += cells
        return "\n".join(lines)

    def markdown(self, steps: int) -> str:
        """The table of the documents: a row a method, a column a task, mean +- standard error."""
        found = self.excesses()
        tasks = [t for t in TASKS if any(key[:2] == (t, steps) for key in found)]
        heads = [f"{t} *" if t in JUDGED else t for t in tasks]
        lines = [f"| | {' | '.join(heads)} | without {' and '.join(FAILS)} |"]
        lines.append("|---" * (len(tasks) + 2) + "|")
        for method, start in ORDER:
            drawn = [[e for e, _ in found.get((t, steps, method, start), [])] for t in tasks]
            if not any(drawn):
                continue
            means = [_mean_or_inf(x) if x else math.nan for x in drawn]  # nan: not run
            rest = [m for m, t in zip(means, tasks, strict=True) if t not in FAILS]
            label = f"{method}, from {start:g} x" if start else f"{method}, own default"
            mean = [] if any(map(math.isnan, rest)) else [_mean_or_inf(rest)]
            cells = [_cell(x) for x in drawn] + [_cell(mean)]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def by_task(self, steps: int) -> str:
        """The README's table: a row a task, a column a method, means over the seeds."""
        found = self.excesses()
        heads = [f"{m} {s:g} x" if s else m for m, s in SHORT]
        lines = [f"| {steps:,} steps | {' | '.join(heads)} |", "|---" * (len(SHORT) + 1) + "|"]
        columns: list[list[float]] = [[] for _ in SHORT]
        seen = [t for t in TASKS if (t, steps, *SHORT[0]) in found]
        for task in seen:
            drawn = [[e for e, _ in found.get((task, steps, *key), [])] for key in SHORT]
            for column, cell in zip(columns, drawn, strict=True):
                column.append(_mean_or_inf(cell) if cell else math.nan)
            name = f"{task} *" if task in JUDGED else task
            cells = [_cell([c[-1]]) if d else "" for c, d in zip(columns, drawn, strict=True)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        kept = [i for i, t in enumerate(seen) if t not in FAILS]
        rows = {
            "median": [statistics.median(c) for c in columns],
            f"mean without {', '.join(FAILS)}": [
                _mean_or_inf([c[i] for i in kept]) for c in columns
            ],
        }
        for name, values in rows.items():
            cells = ["" if math.isnan(v) else _cell([v]) for v in values]
            lines.append(f"| **{name}** | {' | '.join(cells)} |")
        return "\n".join(lines)

    def figure(self, path: Path) -> None:
        """Mean excess by method and start, a dot a task."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        found = self.excesses()
        methods = sorted({(m, s) for _, _, m, s in found})
        figure, axes = pyplot.subplots(figsize=(9, 0.34 * len(methods) + 1.4))
        for y, (method, start) in enumerate(methods):
            for (task, steps, m, s), drawn in found.items():
                if (m, s) == (method, start):
                    mean = statistics.fmean(e for e, _ in drawn)
                    shown = min(mean, 150.0) if math.isfinite(mean) else 150.0
                    judged = task in JUDGED
                    axes.plot(
                        shown, y, "D" if judged else "o",
                        color="#d55e00" if judged else "#0072b2",
                        alpha=0.8, markersize=4 + (steps > 1000) * 2,
                    )  # fmt: skip
        axes.axvspan(-2, 2, color="0.9", zorder=0)
        axes.set_xscale("symlog", linthresh=2)
        ticks = (-5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100)
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_yticks(range(len(methods)))
        axes.set_yticklabels([f"{m} from {s:g} x" if s else m for m, s in methods], fontsize=8)
        axes.set_xlabel("validation loss over the best of the grid, % (150 and more at the edge)")
        axes.set_title("A dot is a task and a length; diamonds: tasks written after the rule")
        figure.tight_layout()
        figure.savefig(path, dpi=130)


def _cell(excess: list[float]) -> str:
    if not excess:
        return ""
    mean = _mean_or_inf(excess)
    if not math.isfinite(mean) or mean > 1000:
        return "diverges"
    if len(excess) == 1:
        return f"{mean:+.1f}"
    return f"{mean:+.1f} ± {statistics.stdev(excess) / math.sqrt(len(excess)):.1f}"


def _mean_or_inf(values: Iterable[float]) -> float:
    drawn = list(values)
    return statistics.fmean(drawn) if all(map(math.isfinite, drawn)) else math.inf


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma separated")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lengths", default="800,2000")
    parser.add_argument("--short", action="store_true", help="the race on two tasks, one seed")
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--markdown", action="store_true", help="print the documents' tables")
    parser.add_argument("--rows", type=Path, default=ROWS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.short:
        # Measured anew each time, and kept out of the rows.
        given.tasks, given.seeds, given.lengths = "denoise,ngram", 1, "800"
        given.rows = Path(tempfile.mkdtemp()) / "rows.jsonl"
    arbiter = Arbiter(given.rows)
    if given.markdown:
        for steps in map(int, given.lengths.split(",")):
            print(f"{arbiter.by_task(steps)}\n\n{arbiter.markdown(steps)}\n")
        return
    if not given.table:
        for steps in map(int, given.lengths.split(",")):
            for name in given.tasks.split(","):
                arbiter.whole_grid(TASKS[name], steps, given.seeds)
            for seed in range(given.seeds):
                for name in given.tasks.split(","):
                    arbiter.contenders(TASKS[name], steps, seed, short=given.short)
    print(arbiter.table())
    if given.short:
        for (task, _, _, start), drawn in sorted(arbiter.excesses().items()):
            print(
                f"figure: {task}, auto from {start:g} x: {drawn[0][0]:+.1f} % over the grid's best"
            )
    if given.table:
        arbiter.figure(FIGURE)


if __name__ == "__main__":
    main()
