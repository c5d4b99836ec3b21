"""How the best learning rate moves with the length and the batch of a trial, beside the law.

    python -m benchmarks.lr.bridge                   prints the tables; runs only what has no row
    python -m benchmarks.lr.bridge --tasks logit     of one task

Trials are complete schedules of h steps (5 % warm-up, cosine to zero) with 1/M of the batch; runs
have S steps and the whole batch. Both are trained at learning rates an octave apart and evaluated
on the same held-out examples. A minimum is that of a parabola through the five rates around the
lowest loss. Runs of 800 and 2,000 steps are those of benchmarks/lr/recovery.py, whose rows are
read; longer ones are run here, on a few cheap tasks. In their long runs examples repeat up to 85
times, and a run that overfits is best at a low rate: the tasks called "-fresh" have enough examples
for 20,000 steps. Without rows all of it takes about 25 minutes.

    above     the trial's minimum in octaves above the run's
    law       what hdet_scale.search.law says that number is
    left      above - law
    excess    of the run's loss at the translated rate over its lowest, in %, on lines between its
              rates; inf where the next higher rate has diverged
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lr.horizons import spread
from benchmarks.lr.parabola import Parabola
from benchmarks.lr.plateaus import counts, duels
from benchmarks.lr.problem import Stacked, Task
from benchmarks.lr.recovery import ROWS
from benchmarks.lr.rows import Rows, mean_or_inf
from benchmarks.lr.simulated import scheduled, weights
from benchmarks.lr.tables import factor, smooth
from benchmarks.lr.tasks import TASKS
from benchmarks.rows import RESULTS, table, where
from hdet_scale.search.law import translation

OUT = RESULTS / "lr_bridge.jsonl"
OCTAVES = tuple(float(k) for k in range(-6, 7))
"""Around the best rate of 800 steps on the grid."""
PARTS = (1, 8)
"""M."""
LONG = ("factor", "smooth", "twins", "tanh", "logit", "duels", "sigmoid", "bilinear")
"""Cheap tasks, four by AdamW and four by SGD: trials of all lengths, and long runs."""
TRIALS = (20, 40, 80, 160, 320, 640, 1280)
RUNS = (800, 2000, 8000, 20_000)
SHORT = (10, 20, 40, 80)
"""Lengths of the trials of all other tasks."""
FRESH = {
    task.name: task
    for task in (
        make(name=f"{make.__name__}-fresh", train=TASKS[make.__name__].batch * RUNS[-1])
        for make in (factor, smooth, duels, counts)
    )
}
"""The same problems with examples for 20,000 steps: in a long run of the others data repeat."""
BRIDGED: Mapping[str, Task] = {**TASKS, **FRESH}

Row = dict[str, Any]
Key = tuple[str, int, int, int]
"""Task, M, steps, seed."""


def losses_of(task: Task, seed: int, steps: int, parts: int, middle: float) -> list[float]:
    """Held-out losses after complete schedules at all rates, each on the same examples."""
    model = Stacked(task, weights(task, seed, len(OCTAVES)))
    peaks = torch.tensor([middle * 2.0**x for x in OCTAVES])
    drawn = 10**6 * (seed + 1) + 10 * steps + parts
    for t, batch in enumerate(task.draw(drawn, steps, max(1, task.batch // parts))):
        _, gradients = model.gradients(batch.expand(len(OCTAVES), -1))
        model.step(peaks * scheduled(t, steps), gradients)
    return [float(x) for x in task.validate(model.params)]


def minimum(rates: Sequence[float], losses: Sequence[float]) -> float:
    """log2 of the best learning rate."""
    octaves = [math.log2(rate / rates[0]) for rate in rates]
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    return math.log2(rates[0]) + Parabola.through(octaves, finite, width=2).minimum


class Bridge:
    """The curves measured so far, in a file, and the best rates of the grid."""

    def __init__(self, path: Path = OUT, grid: Path = ROWS) -> None:
        self.path, self.grid = path, Rows(grid)
        self.curves: dict[Key, Row] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            self._keep(json.loads(line))

    def _keep(self, row: Row) -> None:
        self.curves[row["task"], row["parts"], row["steps"], row["seed"]] = row

    def run(self, name: str, parts: int, steps: int, seed: int) -> None:
        """Measure a curve, unless it has a row."""
        if (name, parts, steps, seed) in self.curves:
            return
        middle = self.grid.best(name.removesuffix("-fresh"), 800)[0]
        losses = losses_of(BRIDGED[name], seed, steps, parts, middle)
        place = {"task": name, "parts": parts, "steps": steps, "seed": seed}
        rates = [middle * 2.0**x for x in OCTAVES]
        row = place | {"rates": rates, "losses": losses} | where()
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        self._keep(row)

    def trial(self, name: str, parts: int, steps: int) -> list[float]:
        """log2 of the best rate, for each seed."""
        found = [row for key, row in self.curves.items() if key[:3] == (name, parts, steps)]
        return [minimum(row["rates"], row["losses"]) for row in found]

    def best(self, name: str, steps: int) -> float | None:
        """log2 of the best rate of a whole run; None where there are no rows of it."""
        by_rate: dict[float, list[float]] = defaultdict(list)
        for row in self.grid.rows:
            if (row["task"], row["steps"], row["method"]) == (name, steps, "grid"):
                by_rate[row["rate"]].append(row["loss"])
        if by_rate:
            most = max(map(len, by_rate.values()))
            rates = sorted(rate for rate, losses in by_rate.items() if len(losses) == most)
            return minimum(rates, [mean_or_inf(by_rate[rate]) for rate in rates])
        found = self.trial(name, 1, steps)
        return statistics.fmean(found) if found else None

    def above(self, name: str, parts: int, steps: int, run: int) -> float | None:
        """Octaves of a trial's minimum above the run's, mean over seeds."""
        trials, best = self.trial(name, parts, steps), self.best(name, run)
        return statistics.fmean(trials) - best if trials and best is not None else None


def measure(bridge: Bridge, names: Iterable[str], seeds: int) -> None:
    """Every curve that has no row yet."""
    for name in names:
        long = name in LONG or name in FRESH
        lengths = sorted({*SHORT, *(TRIALS if long else ())})
        asked = [(parts, steps) for parts in PARTS for steps in lengths]
        asked += [(1, steps) for steps in RUNS if long and (steps > 2000 or name in FRESH)]
        for parts, steps in asked:
            for seed in range(seeds):
                bridge.run(name, parts, steps, seed)


# -- tables ---------------------------------------------------------------------------------------


def law(name: str, parts: int, steps: int, run: int) -> float:
    """Octaves that the law says a trial's minimum is above the run's."""
    adaptive = BRIDGED[name].optimizer == "adamw"
    return -math.log2(translation(parts, steps, run, adaptive=adaptive))


def excess(bridge: Bridge, name: str, parts: int, steps: int, run: int) -> float:
    """In %, of a long run at the rate that a trial says; mean over the seeds of the trial."""
    rows = [row for key, row in bridge.curves.items() if key[:3] == (name, 1, run)]
    octaves = [math.log2(rate) for rate in rows[0]["rates"]]
    losses = [mean_or_inf(some) for some in zip(*(row["losses"] for row in rows), strict=True)]
    shift = law(name, parts, steps, run)
    at = [found - shift for found in bridge.trial(name, parts, steps)]
    return statistics.fmean(100 * (_line(octaves, losses, x) / min(losses) - 1) for x in at)


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    inside = min(max(x, xs[0]), xs[-1])
    k = max(i for i in range(len(xs) - 1) if xs[i] <= inside)
    share = (inside - xs[k]) / (xs[k + 1] - xs[k])
    if not share:
        return ys[k]
    return (1 - share) * ys[k] + share * ys[k + 1]


def long_table(bridge: Bridge, names: Sequence[str], parts: int, run: int) -> str:
    """A line for each task: octaves above the run's best by the length of the trial."""
    lengths = [steps for steps in TRIALS if steps < run]
    lines = []
    for name in names:
        found = [bridge.above(name, parts, steps, run) for steps in lengths]
        if None not in found:
            lines.append([name, *(f"{x:+.1f}" for x in found if x is not None)])
    for family in ("adamw", "sgd"):
        member = next((name for name in names if BRIDGED[name].optimizer == family), None)
        if member:
            said = (law(member, parts, steps, run) for steps in lengths)
            lines.append([f"law, {family}", *(f"{x:+.1f}" for x in said)])
    return table([f"M = {parts}, S = {run}", *(f"h = {steps}" for steps in lengths)], lines)


def excess_table(bridge: Bridge, names: Sequence[str], run: int) -> str:
    """A line for each task and M: what the translated rate costs a long run."""
    lines = [
        [f"{name}, M = {parts}"]
        + [f"{excess(bridge, name, parts, steps, run):.2f}" for steps in TRIALS]
        for name in names
        for parts in PARTS
    ]
    return table([f"excess %, S = {run}", *(f"h = {steps}" for steps in TRIALS)], lines)


def short_table(bridge: Bridge, names: Sequence[str]) -> str:
    """What the law leaves on short trials: median and spread over the tasks."""
    lines = []
    for family in ("adamw", "sgd"):
        some = [name for name in names if BRIDGED[name].optimizer == family]
        for parts in PARTS:
            for run in RUNS[:2]:
                lines.append([f"{family}, M = {parts}, S = {run}", str(len(some))])
                for steps in SHORT:
                    pairs = [(bridge.above(n, parts, steps, run), n) for n in some]
                    above = [x for x, _ in pairs if x is not None]
                    left = [x - law(n, parts, steps, run) for x, n in pairs if x is not None]
                    lines[-1].append(
                        f"{statistics.median(above):+.1f} -> {statistics.median(left):+.1f} "
                        f"± {spread(left):.1f}"
                    )
    return table(["above -> left ± spread", "tasks", *(f"h = {h}" for h in SHORT)], lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(BRIDGED), help="comma separated")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names, bridge = given.tasks.split(","), Bridge(given.out)
    measure(bridge, names, given.seeds)
    long = [name for name in names if name in LONG or name in FRESH]
    fresh = [name for name in names if name in FRESH]
    for run in RUNS if long else ():
        for parts in PARTS:
            print(f"\n{long_table(bridge, long, parts, run)}")
    for run in RUNS[2:] if fresh else ():
        print(f"\n{excess_table(bridge, fresh, run)}")
    short = [name for name in names if name in TASKS]
    if {TASKS[name].optimizer for name in short} == {"adamw", "sgd"}:
        print(f"\n{short_table(bridge, short)}")


if __name__ == "__main__":
    main()
