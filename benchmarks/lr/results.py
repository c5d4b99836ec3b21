"""docs/results.md: what the rows say of rule="auto" and of the other methods.

    python -m benchmarks.lr.results          writes docs/results.md and results/lr_profile_*.svg

Nothing is run but the initial weights of each task. A table that has no rows yet says so.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.lr.calibrated import RATES, RECIPES, grid_of
from benchmarks.lr.profile import (
    FLOOR,
    Column,
    Losses,
    Profile,
    calibrate,
    calibrate_without_own_task,
    figure,
    initial_losses,
    mean_losses,
    over_best,
    profiles,
)
from benchmarks.lr.rows import RECOVERY, RIVALS, Row, Rows, mean_or_inf
from benchmarks.lr.tasks import JUDGED, TASKS
from benchmarks.rows import RESULTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "results.md"
LENGTHS = (800, 2000, 8000)
STARTS = (0.1, 1.0, 10.0)
AUTO = "auto"
RIVAL_SEEDS = (0, 1)
"""The seeds that all methods were run with, and that table 3 is of."""
REFERENCE = "best of the grid"
NEAR = 5.0
"""Excess in % up to which a run is called within reach of the best."""
HARM = 2.0
"""Excess in % over the start above which a run is called worse than its start."""
NOTHING = "No rows yet.\n"

NAMES = {
    "paper 0.1": "the paper's rule, sigma 0.1",
    "paper 0.002": "the paper's rule, sigma 0.002",
    "slope": "slope rule",
    "prodigy": "Prodigy",
    "d-adaptation": "D-Adaptation",
    "schedule-free": "Schedule-Free",
    "mechanic": "Mechanic",
    "dowg": "DoWG, no schedule",
    "dowg cosine": "DoWG, cosine",
    "momo": "MoMo, no schedule",
    "momo cosine": "MoMo, cosine",
    "prodigy schedule-free": "Prodigy with Schedule-Free",
    "fixed": "fixed rate",
}
"""Methods of table 3 as the document calls them."""
CALIBRATED = {
    "adamw": "AdamW",
    "nadamw": "NadamW",
    "schedule-free": "Schedule-Free AdamW",
}


# -- excess of rule="auto" --------------------------------------------------------------------


def mean_and_error(drawn: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; not finite if a value is not, or if there is one alone."""
    mean = mean_or_inf(drawn)
    if len(drawn) < 2 or not math.isfinite(mean):
        return mean, math.nan
    return mean, statistics.stdev(drawn) / math.sqrt(len(drawn))


def cell(drawn: Sequence[float]) -> str:
    """A mean in % and its standard error."""
    if not drawn:
        return ""
    mean, error = mean_and_error(drawn)
    if not math.isfinite(mean):
        return "diverges"
    return f"{mean:+.1f}" if math.isnan(error) else f"{mean:+.1f} ± {error:.1f}"


def over_start(
    rows: Rows, task: str, steps: int, method: str, start: float, *, floor: float = 0.0
) -> list[float]:
    """By how much in % a run is worse than the run at its initial learning rate, by seed.

    The initial rate's loss is that of the method "fixed", or of the best of the grid from 1 x.
    Seeds for which it diverged, or was not run, are left out. A difference is a share of at least
    `floor`.
    """
    own: dict[int, float] = {}
    before = dict(rows.best(task, steps)[1]) if start == 1 else {}
    for row in rows.rows:
        if (row["task"], row["steps"], row["start"]) == (task, steps, start):
            if row["method"] == method:
                own[row["seed"]] = row["loss"]
            elif row["method"] == "fixed":
                before[row["seed"]] = row["loss"]
    return [
        100 * (own[seed] - before[seed]) / max(before[seed], floor)
        if math.isfinite(own[seed])
        else math.inf
        for seed in sorted(own.keys() & before.keys())
        if math.isfinite(before[seed])
    ]


def is_harmed(drawn: Sequence[float]) -> bool:
    """Whether runs are more than 2 % worse than their start, and by more than two standard errors
    of the mean."""
    if not drawn:
        return False
    mean, error = mean_and_error(drawn)
    return mean > HARM and not mean <= 2 * error


def table_of_auto(rows: Rows, steps: int) -> str:
    """Table 1: excess over the best of the grid, one row a task, then the summary."""
    found = rows.excesses()
    columns = [
        c for c in ((AUTO, x) for x in STARTS) if any((task, steps, *c) in found for task in TASKS)
    ]
    if not columns:
        return NOTHING
    drawn = {
        (task, c): [e for e, _ in found.get((task, steps, *c), [])]
        for task in TASKS
        for c in columns
    }
    heads = [f"from {_times(x)}" for _, x in columns]
    lines = [f"| {steps:,} steps | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for task in TASKS:
        cells = [cell(drawn[task, c]) for c in columns]
        if any(cells):
            lines.append(f"| {task}{' *' * (task in JUDGED)} | {' | '.join(cells)} |")
    first = initial_losses([TASKS[t] for t in TASKS if any(drawn[t, c] for c in columns)], (0,))
    summaries = []
    for c in columns:
        means = {task: mean_or_inf(drawn[task, c]) for task in TASKS if drawn[task, c]}
        harmed = {
            name: sum(is_harmed(over_start(rows, t, steps, *c, floor=x * first[t])) for t in means)
            for name, x in (("worse than the start", 0.0), ("the same, absolute scale", FLOOR))
        }
        summaries.append({**summary(means.values()), **{k: str(v) for k, v in harmed.items()}})
    for name in summaries[0]:
        lines.append(f"| **{name}** | {' | '.join(x[name] for x in summaries)} |")
    return "\n".join(lines) + "\n"


def summary(means: Iterable[float]) -> dict[str, str]:
    """Median, share of tasks within 5 %, worst."""
    drawn = sorted(means)
    near = sum(x <= NEAR for x in drawn)
    return {
        "median": percent(statistics.median(drawn)),
        f"within {NEAR:g} %": f"{near} of {len(drawn)} ({100 * near / len(drawn):.0f} %)",
        "worst": percent(drawn[-1]),
    }


def percent(x: float) -> str:
    """A value in %, with its sign."""
    return f"{x:+.1f}" if math.isfinite(x) else "diverges"


def _times(start: float) -> str:
    return f"1/{1 / start:g}" if start < 1 else f"{start:g} x"


# -- cost -------------------------------------------------------------------------------------


def table_of_cost(rows: Rows) -> str:
    """Table 2: what the search takes of a run, and how often its weights are kept, by length and
    start."""
    lines = []
    for steps in LENGTHS:
        for start in STARTS:
            found = [
                row
                for row in rows.rows
                if (row["method"], row["steps"], row["start"]) == (AUTO, steps, start)
                and "cost" in row
            ]
            if found:
                costs = [row["cost"] for row in found]
                kept = [row["head_start"] for row in found if "head_start" in row]
                middle = statistics.median(costs)
                lines.append(
                    f"| {steps:,} | {_times(start)} | {len(costs)} | {steps * middle:.0f} | "
                    f"{100 * middle:.1f} % | {100 * max(costs):.1f} % | "
                    f"{f'{sum(kept)} of {len(kept)}' if kept else ''} |"
                )
    if not lines:
        return NOTHING
    head = (
        "| steps in all | from | runs | steps of search, median | share, median | share, largest | "
        "head start kept |"
    )
    return "\n".join([head, "|---" * 7 + "|", *lines]) + "\n"


# -- rivals -----------------------------------------------------------------------------------


def label(column: Column) -> str:
    """A method of table 3 as the document calls it."""
    method, start = column
    for name, told in CALIBRATED.items():
        if method == grid_of(name):
            return f"{told}, 2^{math.log2(start):.0f} for all tasks"
    if method in (REFERENCE, AUTO):
        return method if method == REFERENCE else f"{method}, from {_times(start)}"
    name = NAMES[method]
    return f"{name}, from {_times(start)}" if start else f"{name}, own default"


def contested(rows: Rows, steps: int) -> list[str]:
    """The tasks that were run at all calibrated rates with all seeds, and that have a grid."""
    losses = mean_losses(rows.rows, steps, RIVAL_SEEDS)
    every = [losses.get((grid_of(name), rate), {}) for name in RECIPES for rate in RATES]
    gridded = {
        row["task"] for row in rows.rows if row["method"] == "grid" and row["steps"] == steps
    }
    return [task for task in TASKS if task in gridded and all(task in x for x in every)]


def with_reference(rows: Rows, steps: int, tasks: Sequence[str]) -> list[Row]:
    """The rows, and the best of each task's grid as one more method."""
    place = {"steps": steps, "method": REFERENCE, "start": 1.0}
    best = {task: rows.best(task, steps)[1] for task in tasks}
    more = [
        {**place, "task": task, "seed": seed, "loss": loss}
        for task, by_seed in best.items()
        for seed, loss in by_seed.items()
    ]
    return [*rows.rows, *more]


def shown(found: dict[Column, list[float]]) -> dict[Column, Profile]:
    """What table 3 has: each calibrated method at its rate alone, no other run of a grid."""
    rates = {(grid_of(name), rate) for name, rate in calibrate(found).items()}
    named = {AUTO, REFERENCE, *NAMES}
    return {c: p for c, p in profiles(found).items() if c in rates or c[0] in named}


def is_drawn(column: Column) -> bool:
    """Whether the figure has a method: not those of table 3 that need an initial rate."""
    method, start = column
    return not start or method in (AUTO, REFERENCE) or method.endswith("grid")


def table_of_rivals(losses: Losses, tasks: Sequence[str], found: dict[Column, Profile]) -> str:
    """Table 3: each method's excess over the best of the grid, and the score of its profile."""
    limit = losses[REFERENCE, 1.0]
    lines = ["| method | median | within 5 % | worst | score |", "|---" * 5 + "|"]
    for column, profile in sorted(found.items(), key=lambda item: -item[1].score):
        means = [100 * (losses[column][task] / limit[task] - 1) for task in tasks]
        told = " | ".join(summary(means).values())
        lines.append(f"| {label(column)} | {told} | {profile.score:.3f} |")
    return "\n".join(lines) + "\n"


def rivals(rows: Rows, steps: int, folder: Path, link: str) -> str:
    """Table 3 and its figure, of the tasks that all calibrated methods were run on."""
    tasks = contested(rows, steps)
    if not tasks:
        return NOTHING
    first = initial_losses([TASKS[name] for name in tasks], RIVAL_SEEDS)
    losses = mean_losses(with_reference(rows, steps, tasks), steps, RIVAL_SEEDS)
    excesses = over_best(losses, first, tasks)
    found, path = shown(excesses), folder / f"lr_profile_{steps}.svg"
    drawn = {label(column): profile for column, profile in found.items() if is_drawn(column)}
    figure(drawn, f"{len(tasks)} tasks, {steps:,} steps", path)
    without = calibrate_without_own_task(excesses)
    told = ", ".join(f"{CALIBRATED[name]} {x:.3f}" for name, x in without.items())
    return "\n".join([
        f"{len(tasks)} tasks, {steps:,} steps, seeds {' and '.join(map(str, RIVAL_SEEDS))}.\n",
        table_of_rivals(losses, tasks, found),
        f"Scores if the rate of each task is chosen on the other tasks: {told}.\n",
        f"![Share of tasks within tau of the best loss, by method]({link}/{path.name})\n",
    ])  # fmt: skip


# -- the document -----------------------------------------------------------------------------


def measured(rows: Rows) -> str:
    """How it was measured: seeds and lengths, hardware and dates as the rows' stamps say."""
    lines = ["| steps | grid | auto | fixed rates | other methods |", "|---" * 5 + "|"]
    for steps in LENGTHS:
        of = [row for row in rows.rows if row["steps"] == steps]
        others = [row for row in of if row["method"] not in ("grid", AUTO, "fixed")]
        kinds = [[row for row in of if row["method"] == name] for name in ("grid", AUTO, "fixed")]
        if of:
            cells = [_seeds(kind) for kind in (*kinds, others)]
            lines.append(f"| {steps:,} | {' | '.join(cells)} |")
    dates = sorted({row["date"] for row in rows.rows})
    cpus = sorted({f"{row['cpu']}, {row['cores']} cores" for row in rows.rows})
    versions = sorted({f"torch {row['torch']}, Python {row['python']}" for row in rows.rows})
    return (
        f"{len(TASKS)} tasks. {len(JUDGED)} of them (marked *) were run when the rule was done; "
        f"after that the effect of the passes was changed once. Number of seeds:\n\n"
        + "\n".join(lines)
        + f"\n\nMeasured from {dates[0]} to {dates[-1]} on {'; '.join(cpus)}, one thread, no GPU; "
        f"{'; '.join(versions)}. Each row of `benchmarks/results/lr_recovery.jsonl` and "
        "`lr_rivals.jsonl` names its commit.\n"
    )


def _seeds(rows: Sequence[Row]) -> str:
    return str(len({row["seed"] for row in rows}) or "")


def document(rows: Rows, folder: Path, link: str) -> str:
    """The text of docs/results.md; figures are written to `folder`, which it calls `link`."""
    lengths = [n for n in LENGTHS if any(row["steps"] == n for row in rows.rows)]
    parts = [
        "# Results: which method finds the learning rate\n",
        "Written by `python -m benchmarks.lr.results`; do not edit.\n",
        "## How it was measured\n",
        measured(rows),
        METHOD,
        '## 1. rule="auto"\n',
        ABOUT_AUTO,
    ]
    for steps in lengths:
        parts += [f"### {steps:,} steps\n", table_of_auto(rows, steps)]
    parts += ['## 2. Cost of rule="auto"\n', ABOUT_COST, table_of_cost(rows)]
    parts += ["## 3. Other methods\n", ABOUT_RIVALS]
    for steps in lengths:
        parts += [f"### {steps:,} steps\n", rivals(rows, steps, folder, link)]
    return "\n".join(parts)


METHOD = """\
Each task is trained at fixed learning rates a factor of two apart, with a warm-up of 5 % and a
cosine to zero: the grid. The best of the grid is the rate with the lowest mean held-out loss.
A method that needs an initial rate is given 1/10, 1 or 10 times that rate. Seeds are paired:
a method and the grid have the same initial weights and batches. Excess is the held-out loss of a
method over that of the best of the grid with the same seed, in %. A cell is the mean over the
seeds ± its standard error.
"""
ABOUT_AUTO = f"""\
A run has the given number of steps in all, search included. *Worse than the start* is the number of
tasks whose loss is more than 2 % above that of the fixed initial rate with the same seed, by more
than two standard errors. On the *absolute scale* a difference of losses that are below
{100 * FLOOR:g} % of the initial loss is a share of those {100 * FLOOR:g} %.
"""
ABOUT_COST = """\
Steps that the search takes of a run with the given number of steps in all, and the forwards of its
evaluations, a third of a step each. In these steps a quarter of the replicas goes on with the run;
*head start kept* is the number of runs that begin with its weights. Steps that are discarded where
the weights go back are not counted. Rows from before this was recorded are left out.
"""
ABOUT_RIVALS = f"""\
*Own default*: the method as its documentation recommends. *For all tasks*: one learning rate for
all tasks, the one with the highest score; all tasks, also those whose own optimizer is SGD, were
trained at {len(RATES)} rates from 2^{math.log2(RATES[0]):.0f} to 2^{math.log2(RATES[-1]):.0f}.
This rate is chosen on the tasks and seeds that it is judged on, which favours these methods; the
line below the table has their scores without this advantage.

Median, share within 5 % and worst are of the excess of the mean loss over that of the best of the
grid, in %. In the first row every task has the rate that is best for it.
The score is the area under the performance profile: the share of tasks whose loss is within tau
of the best loss of any method at any rate, for tau from 0 to 100 %. In the profile, losses below
{100 * FLOOR:g} % of the initial loss are compared on an absolute scale
(`benchmarks/lr/profile.py`).
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    parser.add_argument("--figures", type=Path, default=RESULTS)
    parser.add_argument("--rows", type=Path, nargs="+", default=[RECOVERY, RIVALS])
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = Rows(*given.rows)
    link = "../benchmarks/results"
    given.out.write_text(document(rows, given.figures, link), encoding="utf-8")
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
