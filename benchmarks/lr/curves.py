"""Loss curves of short trials: the best rate and the edge, against the best rate of the run.

    python -m benchmarks.lr.curves                   all tasks of both lengths, in a few minutes

The constants of the search are chosen by these curves. For each task a trial of the search's fine
stage, with an eighth of the batch, at learning rates half an octave apart; in octaves above the
best of the grid (benchmarks/lr/recovery.py, whose rows it reads), mean and standard deviation over
the seeds:

    minimum     the lowest point of the parabola
    edge        where a trial learns half as much as the best
    torn        where it ends a tenth above its start
    learnt      share of the first loss that the best trial removed
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lr.problem import Stacked, Task
from benchmarks.lr.recovery import ROWS
from benchmarks.lr.rows import Rows
from benchmarks.lr.simulated import REPLICAS, around, probe, weights
from benchmarks.lr.tasks import TASKS
from benchmarks.rows import RESULTS, where
from hdet_scale.search.curve import Parabola, edge
from hdet_scale.search.decision import EDGE, TORN, RateSearch
from hdet_scale.search.trials import shape

OCTAVES = [k / 2 for k in range(-16, 15)]
SEEDS = 4
OUT = RESULTS / "lr_valleys.jsonl"


def losses_of(task: Task, seed: int, steps: int, best: float) -> list[float]:
    """Losses after a trial at each learning rate, every one with batches of its own."""
    count, small = len(OCTAVES), max(1, task.batch // REPLICAS)
    model = Stacked(task, weights(task, seed, count))
    peaks = torch.tensor([best * 2.0**x for x in OCTAVES])
    drawn = [task.draw(800_000 + 100 * seed + k, steps, small) for k in range(count)]
    for i, batch in enumerate(torch.stack(drawn, 1)):
        _, gradients = model.gradients(batch)
        model.step(peaks * shape(i, steps), gradients)
    losses = [float(x) for x in probe(task, model.params, seed).mean(0)]
    return [x if math.isfinite(x) else math.inf for x in losses]


def points_of(losses: Sequence[float], first: float) -> dict[str, float]:
    """The points of a loss curve, in octaves above the best rate of the run."""
    top = OCTAVES[-1]
    best = min(losses)
    edges = {"edge": first - EDGE["fine"] * (first - best), "torn": (1 + TORN) * first}
    found = {k: edge(OCTAVES, losses, limit) for k, limit in edges.items()}
    return {
        "minimum": Parabola.through(OCTAVES, losses, width=3).minimum,
        **{k: top if at is None else at for k, at in found.items()},
        "learnt": 1 - best / first,
    }


def measure(task: Task, steps: int, best: float) -> dict[str, Any]:
    """Over the seeds."""
    rule = RateSearch(replicas=REPLICAS, total_steps=around(steps), adaptive=True)
    seen, trial = [], rule.steps(1)
    for seed in range(SEEDS):
        first = float(probe(task, weights(task, seed), seed).mean())
        seen.append(points_of(losses_of(task, seed, trial, best), first))
    row: dict[str, Any] = {"task": task.name, "steps": steps, "trial": trial, "best": best}
    for name in seen[0]:
        drawn = [x[name] for x in seen]
        row |= {name: statistics.fmean(drawn), f"{name}_sd": statistics.stdev(drawn)}
    return row


def told(row: dict[str, Any], optimizer: str) -> str:
    cells = [f"{row[k]:+.1f} ± {row[f'{k}_sd']:.1f}" for k in ("minimum", "edge", "torn")]
    learnt = f"{row['learnt']:.2f}"
    return f"| {row['task']} | {optimizer} | {row['trial']} | {' | '.join(cells)} | {learnt} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma separated")
    parser.add_argument("--lengths", default="800,2000")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, stamp = Rows(ROWS), where()
    with given.out.open("w", encoding="utf-8") as out:
        for steps in map(int, given.lengths.split(",")):
            print(
                f"\n| {steps:,} steps | | trial | minimum | edge | torn | learnt |\n"
                + "|---" * 7
                + "|"
            )
            for name in given.tasks.split(","):
                row = measure(TASKS[name], steps, rows.best(name, steps)[0])
                print(told(row, TASKS[name].optimizer), flush=True)
                out.write(json.dumps(row | stamp) + "\n")


if __name__ == "__main__":
    main()
