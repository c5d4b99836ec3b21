"""What happens to rule="auto" when one of its tuned numbers is halved or doubled.

    python -m benchmarks.lr.sensitivity                       runs what has no row, prints the table
    python -m benchmarks.lr.sensitivity --only STEP,LOST      of two numbers
    python -m benchmarks.lr.sensitivity --table               prints what is there, runs nothing

Every number of hdet_scale/search/constants.py that can change a run of 800 steps is halved and
doubled, one at a time. `auto` then runs inside the budget, on ten cheap tasks and two seeds, from a
tenth, one and ten times the best rate of the grid (benchmarks/lr/recovery.py, whose rows it reads).
The excess of a task is the mean over its seeds, over the best of the grid. All of it takes about
12 minutes on one core.

A row is kept under the number's name and value. Delete the file after any other change of the rule:
the rows of "as it is" do not tell which rule they are of.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from benchmarks.lr.rows import RECOVERY, Rows, mean_or_inf
from benchmarks.lr.simulated import auto
from benchmarks.lr.tasks import DEVELOPED
from benchmarks.rows import RESULTS
from hdet_scale.search import constants
from hdet_scale.search.trials import SHARES

OUT = RESULTS / "lr_sensitivity.jsonl"
TASKS = (
    *("regress", "vae", "factor", "smooth", "few"),
    *("logit", "over", "sigmoid", "duels", "bilinear"),
)
"""Cheap ones, five by AdamW and five by SGD. In `few` and `over` the data repeat, and a run may
overfit."""
STEPS, SEEDS, STARTS = 800, (0, 1), (0.1, 1.0, 10.0)
FACTORS = (0.5, 2.0)
NEAR = 5.0
"""Excess in % up to which a run is called near the best."""
AS_IT_IS = "as it is"
HELD = ("hdet_scale.search.", "benchmarks.lr.simulated")
"""Modules that hold a number under its name."""
STAGES = {"FIRST_SHARE": "first", "SECOND_SHARE": "second"}
"""Numbers that are also in SHARES."""
SKIPPED = {
    ("MOST_STEPS", 0.5): "acts on runs of more than 4,000 steps",
    ("MOST_STEPS", 2.0): "acts on runs of more than 8,000 steps",
    ("LEAST_STEPS", 0.5): "acts on runs of fewer than 300 steps",
    ("LEAST_STEPS", 2.0): "acts on runs of fewer than 600 steps",
    ("GROWTH", 0.5): "below 1: the run would be evaluated after each step",
}
"""What is not run, and why."""


@dataclass(frozen=True, slots=True)
class Change:
    """One number with another value, which is computed before any number is changed."""

    name: str
    factor: float
    before: float
    value: float

    @classmethod
    def of(cls, name: str, factor: float) -> Change:
        """A whole number stays one."""
        before = getattr(constants, name)
        return cls(name, factor, before, type(before)(before * factor))

    @property
    def method(self) -> str:
        """Its name in the rows."""
        return f"{self.name} = {self.value:g}"

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Every module that holds the name has the new value."""
        with contextlib.ExitStack() as stack:
            for module in holders(self.name):
                if vars(module)[self.name] != self.before:
                    raise ValueError(f"{module} has another number called {self.name}")
                stack.enter_context(mock.patch.object(module, self.name, self.value))
            if self.name in STAGES:
                stack.enter_context(mock.patch.dict(SHARES, {STAGES[self.name]: self.value}))
            yield


def holders(name: str) -> list[object]:
    """The modules of the search and of its simulation that have a number of this name."""
    found = [m for key, m in sorted(sys.modules.items()) if key.startswith(HELD) and m is not None]
    return [m for m in found if name in vars(m)]


def numbers() -> list[str]:
    """The tuned numbers, in the order of their file."""
    return [name for name in vars(constants) if name.isupper()]


def changes(names: Iterable[str]) -> list[Change]:
    """What is run."""
    asked = (Change.of(name, factor) for name in names for factor in FACTORS)
    return [change for change in asked if (change.name, change.factor) not in SKIPPED]


def measure(rows: Rows, method: str, tasks: Iterable[str], steps: int) -> None:
    """The runs of a method that have no row yet."""
    for name in tasks:
        task, best = DEVELOPED[name], rows.best(name, steps)[0]
        for seed in SEEDS:
            for start in STARTS:
                rows.run(
                    task, steps, seed, method, start,
                    lambda at=best * start, task=task, seed=seed: auto(  # type: ignore[misc]
                        task, seed, steps, at
                    ),
                )  # fmt: skip


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """What the rows say of one method."""

    median: float
    """Excess in % from 1 x: median of the tasks."""
    worst: float
    near: float
    """Share of tasks and starts near the best, from 1/10 and 10 x."""


def told(rows: Rows, method: str) -> Told | None:
    """None where nothing was run."""
    means = {
        (task, start): mean_or_inf([excess for excess, _ in drawn])
        for (task, _, name, start), drawn in rows.excesses().items()
        if name == method
    }
    there = [excess for (_, start), excess in means.items() if start == 1.0]
    far = [excess for (_, start), excess in means.items() if start != 1.0]
    if not there or not far:
        return None
    near = sum(excess <= NEAR for excess in far) / len(far)
    return Told(statistics.median(there), max(there), near)


def table(rows: Rows, names: Iterable[str]) -> str:
    """A line for each change: by how much it moves the three numbers of the first line."""
    head = "| | x | median from 1 x | worst from 1 x | within 5 % from 1/10 and 10 x |"
    lines, base = [head, "|---" * 5 + "|"], told(rows, AS_IT_IS)
    if base is None:
        return "no rows yet"
    lines.append(
        f"| {AS_IT_IS} | 1 | {base.median:.1f} % | {base.worst:.1f} % | {100 * base.near:.0f} % |"
    )
    for name in names:
        for factor in FACTORS:
            change, why = Change.of(name, factor), SKIPPED.get((name, factor))
            found = told(rows, change.method)
            if why is not None:
                lines.append(f"| {change.method} | {factor:g} | not run: {why} | | |")
            elif found is not None:
                moved = (found.median - base.median, found.worst - base.worst)
                cells = [f"{x:+.1f}" for x in moved] + [f"{100 * (found.near - base.near):+.0f}"]
                lines.append(f"| {change.method} | {factor:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default=",".join(numbers()), help="numbers, comma separated")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma separated")
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--rows", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names, tasks, rows = given.only.split(","), given.tasks.split(","), Rows(given.rows, RECOVERY)
    unknown = sorted(set(names) - set(numbers()))
    if unknown:
        raise SystemExit(f"no number called {', '.join(unknown)}: choose among {numbers()}")
    if not given.table:
        measure(rows, AS_IT_IS, tasks, STEPS)
        for change in changes(names):
            with change.made():
                measure(rows, change.method, tasks, STEPS)
            print(change.method, flush=True)
    print(table(rows, names))


if __name__ == "__main__":
    main()
