"""What a beginning says of a whole run: where its loss is lowest, by batch, horizon and weights.

    python -m benchmarks.lr.horizons [--tasks gpt,conv] [--seeds 2] [--steps 800]

Copies begin the run's own schedule at learning rates an octave apart, each with 1/M of the batch.
After a share of the schedule's path their held-out loss has its lowest point so many octaves above
the best learning rate of the whole run. Three kinds of weights are evaluated:

    last      as they are, in the middle of a run
    averaged  along the way, step t with the weight of t^8: what a decay would have led to, for free
    decayed   after a cosine to zero over a quarter of the steps so far

A rule that reads its learning rate off beginnings is as good as these numbers are equal for all
tasks: their mean is a constant that can be taken off, their spread is what is left.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.lr.parabola import Parabola
from benchmarks.lr.problem import Params, Stacked, Task
from benchmarks.lr.recovery import ROWS
from benchmarks.lr.rows import Rows
from benchmarks.lr.simulated import probe, scheduled, weights
from benchmarks.lr.tasks import TASKS
from benchmarks.rows import RESULTS, where

OUT = RESULTS / "lr_horizons.jsonl"
OCTAVES = tuple(float(k) for k in range(-6, 8))
SHARES = (0.025, 0.05, 0.1, 0.2)
"""Of the schedule's path."""
PARTS = (8, 4, 2, 1)
"""M."""
AVERAGED = 8
"""Exponent of the weights in the average."""
KINDS = ("last", "averaged", "decayed")


class Beginning:
    """Copies at all learning rates, on their way."""

    def __init__(self, task: Task, seed: int, steps: int, best: float, parts: int) -> None:
        self.task, self.seed, self.steps = task, seed, steps
        self.model = Stacked(task, weights(task, seed, len(OCTAVES)))
        self.peaks = torch.tensor([best * 2.0**x for x in OCTAVES])
        self.size = max(1, task.batch // parts)
        self.drawn = torch.Generator().manual_seed(777_000 + 100 * seed + parts)
        self.t, self.path, self.average = 0, 0.0, self.model.copies()

    def step(self) -> None:
        share = scheduled(self.t, self.steps)
        self._train(self.model, share)
        self.t += 1
        self.path += share
        for name, value in self.model.params.items():
            self.average[name].lerp_(value.detach(), (AVERAGED + 1) / (self.t + AVERAGED))

    def _train(self, model: Stacked, share: float) -> None:
        size = (len(OCTAVES), self.size)
        batch = torch.randint(self.task.train, size, generator=self.drawn)
        model.step(self.peaks * share, model.gradients(batch)[1])

    def decayed(self) -> Params:
        """After a branch that ends at zero; the beginning itself stays where it is."""
        branch, share = copy.copy(self.model), scheduled(self.t - 1, self.steps)
        branch.params = {k: v.requires_grad_() for k, v in self.model.copies().items()}
        branch.first = {k: v.clone() for k, v in self.model.first.items()}
        branch.second = {k: v.clone() for k, v in self.model.second.items()}
        last = max(4, self.t // 4)
        for i in range(1, last + 1):
            self._train(branch, share * 0.5 * (1 + math.cos(math.pi * i / (last + 1))))
        return branch.params

    def minima(self) -> dict[str, float]:
        """In octaves above the best learning rate of the run."""
        kinds = zip(KINDS, (self.model.params, self.average, self.decayed()), strict=True)
        return {kind: self._minimum(params) for kind, params in kinds}

    def _minimum(self, params: Params) -> float:
        drawn = [float(x) for x in probe(self.task, params, self.seed).mean(0)]
        losses = [x if math.isfinite(x) else math.inf for x in drawn]
        return Parabola.through(OCTAVES, losses, width=3).minimum


def measure(task: Task, seed: int, steps: int, best: float) -> Iterator[dict[str, Any]]:
    """A row for each batch and horizon."""
    whole = sum(scheduled(t, steps) for t in range(steps))
    for parts in PARTS:
        beginning = Beginning(task, seed, steps, best, parts)
        for share in SHARES:
            while beginning.path < share * whole:
                beginning.step()
            yield {"parts": parts, "share": share, "t": beginning.t, **beginning.minima()}


def table(rows: list[dict[str, Any]], kind: str, family: str) -> str:
    """A line for each task, a column for each batch and horizon, and the spread over tasks."""
    columns = [(parts, share) for share in SHARES for parts in PARTS]
    seen: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for row in rows:
        if row["optimizer"] == family:
            seen[row["task"], row["parts"], row["share"]].append(row[kind])
    tasks = list(dict.fromkeys(task for task, *_ in seen))
    lines = [
        f"| {kind}, {family} | " + " | ".join(f"1/{p}, {100 * s:g} %" for p, s in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    means = {c: [statistics.fmean(seen[(task, *c)]) for task in tasks] for c in columns}
    for i, task in enumerate(tasks):
        lines.append(f"| {task} | " + " | ".join(f"{means[c][i]:+.1f}" for c in columns) + " |")
    spreads = (f"{statistics.median(means[c]):+.1f} ± {spread(means[c]):.1f}" for c in columns)
    lines.append("| **median ± spread** | " + " | ".join(spreads) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> float:
    """Half of what the middle two thirds of the tasks differ by: one of them may be far off."""
    ordered = sorted(values)
    cut = len(ordered) // 6
    return (ordered[-1 - cut] - ordered[cut]) / 2


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma separated")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800, help="of the whole run")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    known, stamp, rows = Rows(ROWS), where(), []
    with given.out.open("w", encoding="utf-8") as out:
        for name in given.tasks.split(","):
            task, best = TASKS[name], known.best(name, given.steps)[0]
            for seed in range(given.seeds):
                for found in measure(task, seed, given.steps, best):
                    place = {"task": name, "optimizer": task.optimizer, "seed": seed}
                    rows.append(place | found)
                    out.write(json.dumps(rows[-1] | {"steps": given.steps} | stamp) + "\n")
            print(name, flush=True)
    for family in ("adamw", "sgd"):
        for kind in KINDS:
            if any(row["optimizer"] == family for row in rows):
                print(f"\n{table(rows, kind, family)}")


if __name__ == "__main__":
    main()
