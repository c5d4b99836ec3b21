"""Which method finds the learning rate: rules, optimizers that claim to need none, and a sweep.

    python -m benchmarks.lr.recovery                  all tasks, both lengths, resumes where it was
    python -m benchmarks.lr.recovery --tasks vit,ngram --seeds 3 --lengths 800
    python -m benchmarks.lr.recovery --auto           only the grid, fixed rates and auto
    python -m benchmarks.lr.recovery --table          what the rows say so far, and the figure

For each task and run length a grid of fixed learning rates, a factor of two apart, is the limit.
Every contender is started at 1/10, 1 and 10 times the best of the grid (mean over the seeds; some
at 1/100 too), with the same seeds as the grid: same weights, same batches in the main run. Excess
is the validation loss over that of the best of the grid with the same seed.

Replicas are simulated: eight copies in one process, a batch of 1/8 each
(tests/benchmarks/test_simulated.py shows that this equals real processes). `auto` has S steps in
all, its search included; docs/results.md (benchmarks/lr/results.py) shows what the rows say.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.lr.free import Free, warmed
from benchmarks.lr.problem import Task
from benchmarks.lr.report import FREE, STARTS, figure, table
from benchmarks.lr.rivals import others, paper, slope
from benchmarks.lr.rows import Rows
from benchmarks.lr.simulated import auto, fixed
from benchmarks.lr.tasks import FIRST, TASKS
from benchmarks.rows import RESULTS

ROWS = RESULTS / "lr_recovery.jsonl"
FIGURE = RESULTS / "lr_recovery.png"
GRID = range(-3, 4)
RIVAL_SEEDS = 2
"""Seeds of all methods but the grid and "auto"."""


class Arbiter(Rows):
    """Runs what is missing."""

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

    def contenders(self, task: Task, steps: int, seed: int, *, short: bool) -> None:
        """All methods but the grid."""
        best, _ = self.best(task.name, steps)
        self.auto(task, steps, seed, short=short)
        if short or seed >= RIVAL_SEEDS:
            return
        for name, start, do in others(task, seed, steps, best):
            self.run(task, steps, seed, name, start, do)
        self.fixed(task, steps, seed, (0.01, 0.1, 10.0))
        if steps == task.steps[0]:
            self.beneath_schedule_free(task, steps, seed)
        if task.name in FIRST:
            self.rules(task, steps, seed, STARTS)
        elif steps == task.steps[0]:
            self.rules(task, steps, seed, (0.1, 10.0))

    def auto(self, task: Task, steps: int, seed: int, *, short: bool = False) -> None:
        """`auto`, and the fixed rates that it began with."""
        best, _ = self.best(task.name, steps)
        for start in (0.1, 10.0) if short else (0.1, 1.0, 10.0):
            self.run(
                task, steps, seed, "auto", start,
                lambda at=best * start: auto(task, seed, steps, at),  # type: ignore[misc]
            )  # fmt: skip
        self.fixed(task, steps, seed, () if short else (0.1, 10.0))

    def fixed(self, task: Task, steps: int, seed: int, starts: Sequence[float]) -> None:
        """Fixed rates, all at once, as they lie around the best one."""
        best, _ = self.best(task.name, steps)
        starts = [x for x in starts if (task.name, steps, seed, "fixed", x) not in self.known]
        if not starts:
            return
        at = [best * start for start in starts]
        for start, rate, loss in zip(starts, at, fixed(task, seed, steps, at), strict=True):
            found = {"loss": loss, "rate": rate, "extra": 0.0}
            self.run(task, steps, seed, "fixed", start, lambda found=found: found)  # type: ignore[misc]

    def beneath_schedule_free(self, task: Task, steps: int, seed: int) -> None:
        """`auto` with Schedule-Free as the optimizer."""
        best, _ = self.best(task.name, steps)
        for start in (0.1, 1.0, 10.0):
            self.run(
                task, steps, seed, FREE, start,
                lambda at=best * start: auto(  # type: ignore[misc]
                    task, seed, steps, at, make=Free, plays=warmed
                ),
            )  # fmt: skip

    def rules(self, task: Task, steps: int, seed: int, starts: Sequence[float]) -> None:
        """The slope rule and the paper's."""
        best, _ = self.best(task.name, steps)
        for at, start in ((best * start, start) for start in starts):
            self.run(
                task, steps, seed, "slope", start,
                lambda at=at: slope(task, seed, steps, at),  # type: ignore[misc]
            )  # fmt: skip
            for sigma in (0.1, 0.002):
                self.run(
                    task, steps, seed, f"paper {sigma}", start,
                    lambda at=at, sigma=sigma: paper(task, seed, steps, at, sigma),  # type: ignore[misc]
                )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma separated")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--lengths", default="800,2000")
    parser.add_argument("--short", action="store_true", help="auto on two tasks, one seed")
    parser.add_argument("--auto", action="store_true", help="only the grid, fixed rates and auto")
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--rows", type=Path, default=ROWS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.short:
        # Measured anew each time, and kept out of the rows.
        given.tasks, given.seeds, given.lengths = "denoise,ngram", 1, "800"
        given.rows = Path(tempfile.mkdtemp()) / "rows.jsonl"
    arbiter = Arbiter(given.rows)
    if not given.table:
        for steps in map(int, given.lengths.split(",")):
            for name in given.tasks.split(","):
                arbiter.whole_grid(TASKS[name], steps, given.seeds)
            for seed in range(given.seeds):
                for name in given.tasks.split(","):
                    if given.auto:
                        arbiter.auto(TASKS[name], steps, seed)
                    else:
                        arbiter.contenders(TASKS[name], steps, seed, short=given.short)
    print(table(arbiter))
    if given.short:
        for (task, _, _, start), drawn in sorted(arbiter.excesses().items()):
            print(
                f"figure: {task}, auto from {start:g} x: {drawn[0][0]:+.1f} % over the grid's best"
            )
    if given.table:
        figure(arbiter, FIGURE)


if __name__ == "__main__":
    main()
