"""Performance profiles of methods over tasks, in the manner of AlgoPerf (arXiv 2306.07179).

Let L be the held-out loss of a method on a task, the mean over the seeds; L_best the lowest such
mean of any method at any learning rate; and L_first the loss of the initial weights. The excess is

    (L - L_best) / max(L_best, 0.05 L_first)

so that it is relative, except where the best loss is below 5 % of the initial one: there a factor
of two is a small difference, and the excess is a share of those 5 %. A loss that is not finite has
an infinite excess. The profile of a method at tau is the share of tasks with an excess of at most
tau; its score is the area under the profile for tau from 0 to 1: 1 if the method is the best on
every task, 0 if its loss is at least twice the best on every task.

L_best is the best of many runs of the same tasks and seeds, so that part of it is luck: no method
is expected to score 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.lr.calibrated import RECIPES, grid_of
from benchmarks.lr.problem import Task
from benchmarks.lr.rows import Row, mean_or_inf
from benchmarks.lr.simulated import weights

FLOOR = 0.05
"""Share of the initial loss below which losses are compared on an absolute scale."""
TAUS = tuple(i / 200 for i in range(201))

Column = tuple[str, float]
"""A method and where it starts: 0 for its own default, the rate itself for a calibrated one."""
Losses = Mapping[Column, Mapping[str, float]]
"""Mean loss of each method on each task."""


class Profile(NamedTuple):
    """The profile of one method."""

    taus: tuple[float, ...]
    shares: tuple[float, ...]
    """Share of tasks with an excess of at most tau, for each tau."""
    score: float
    """Area under the profile, from 0 to 1."""


def mean_losses(rows: Iterable[Row], steps: int, seeds: Collection[int]) -> Losses:
    """The mean loss over `seeds` of each method on each task; only where all seeds were run."""
    drawn: dict[Column, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["steps"] == steps and row["seed"] in seeds:
            drawn[row["method"], row["start"]][row["task"]][row["seed"]] = row["loss"]
    return {
        column: {
            task: mean_or_inf(by_seed.values())
            for task, by_seed in by_task.items()
            if len(by_seed) == len(seeds)
        }
        for column, by_task in drawn.items()
    }


def complete(losses: Losses, tasks: Collection[str]) -> list[Column]:
    """The methods that were run on all of the tasks."""
    return [column for column, by_task in losses.items() if by_task.keys() >= set(tasks)]


def excess(loss: float, best: float, first: float) -> float:
    """By how much a loss is above the best one; see the top of the file."""
    if not math.isfinite(loss):
        return math.inf
    return (loss - best) / max(best, FLOOR * first)


def over_best(
    losses: Losses, first: Mapping[str, float], tasks: Collection[str]
) -> dict[Column, list[float]]:
    """The excess on each task of every method that was run on all of them.

    Args:
        losses: mean losses, as from `mean_losses`. Methods that lack a task are not returned, but
            count for the best loss of the tasks that they have.
        first: loss of the initial weights of each task.
        tasks: the tasks, in the order of the excesses.
    """
    best = {task: min(x[task] for x in losses.values() if task in x) for task in tasks}
    return {
        column: [excess(losses[column][t], best[t], first[t]) for t in tasks]
        for column in complete(losses, tasks)
    }


def score(excesses: Collection[float]) -> float:
    """Area under the profile of these excesses."""
    # The integral over tau from 0 to 1 of [x <= tau] is 1 - x, or 0 if x is above 1.
    return math.fsum(max(0.0, 1 - x) for x in excesses) / len(excesses)


def profiles(found: Mapping[Column, Collection[float]]) -> dict[Column, Profile]:
    """The profile of every method, of its excesses as from `over_best`."""
    return {
        column: Profile(
            TAUS, tuple(sum(x <= tau for x in drawn) / len(drawn) for tau in TAUS), score(drawn)
        )
        for column, drawn in found.items()
    }


def calibrate(found: Mapping[Column, Collection[float]]) -> dict[str, float]:
    """The learning rate with the highest score, for each recipe that was run."""
    out: dict[str, float] = {}
    for name in RECIPES:
        rates = {start: score(x) for (method, start), x in found.items() if method == grid_of(name)}
        if rates:
            out[name] = max(rates, key=lambda rate: rates[rate])
    return out


def calibrate_without_own_task(found: Mapping[Column, Sequence[float]]) -> dict[str, float]:
    """Score of each recipe if each task has the rate with the highest score on the other tasks."""
    count = len(next(iter(found.values())))
    drawn: dict[str, list[float]] = defaultdict(list)
    for i in range(count):
        others = {column: [*x[:i], *x[i + 1 :]] for column, x in found.items()}
        for name, rate in calibrate(others).items():
            drawn[name].append(found[grid_of(name), rate][i])
    return {name: score(x) for name, x in drawn.items()}


def initial_losses(tasks: Iterable[Task], seeds: Collection[int]) -> dict[str, float]:
    """Held-out loss of the initial weights of each task, the mean over the seeds."""
    return {
        task.name: mean_or_inf(float(task.validate(weights(task, seed))[0]) for seed in seeds)
        for task in tasks
    }


def figure(found: Mapping[str, Profile], title: str, path: Path) -> None:
    """Draw profiles, the highest score first; those whose name starts with "auto" are thick."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same bytes for the same profiles
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(9, 5))
    colors = [pyplot.get_cmap("tab20")(i) for i in range(20)]
    ordered = sorted(found.items(), key=lambda item: -item[1].score)
    for i, (name, profile) in enumerate(ordered):
        own = name.startswith("auto")
        axes.step(
            [100 * tau for tau in profile.taus],
            [100 * share for share in profile.shares],
            where="post",
            color=colors[i % len(colors)],
            linewidth=2.6 if own else 1.2,
            linestyle="-" if own or i < len(colors) // 2 else "--",
            label=f"{name} ({profile.score:.2f})",
        )
    axes.set(xlim=(0, 100), ylim=(0, 100), title=title)
    axes.set_xlabel("excess over the best loss of any method, % (tau)")
    axes.set_ylabel("tasks with at most this excess, %")
    axes.grid(alpha=0.3)
    axes.legend(title="method (score)", loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    drawing.tight_layout()
    drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(drawing)
