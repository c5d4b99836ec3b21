"""What the arbiter's rows say: a table for the screen, those of the documents, a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.lr.rows import Rows, mean_or_inf
from benchmarks.lr.tasks import FIRST, JUDGED, TASKS

STARTS = (0.01, 0.1, 1.0, 10.0)
FREE = "auto beneath schedule-free"
MEANS = {"mean of the first seven": [*FIRST], "mean of those with *": [*JUDGED]}
"""Of which tasks the tables have a mean; beside the median of all."""
Column = tuple[int, str, float]
"""Steps of the run, method, start over the best; 0 for a method's own default."""


def readme(short: int, long: int) -> list[Column]:
    """Columns of the README's table."""
    return [
        *((steps, "auto on top", start) for steps in (short, long) for start in (0.1, 1.0, 10.0)),
        *((short, "fixed", start) for start in (0.1, 10.0)),
        *((short, name, 0.0) for name in ("prodigy", "d-adaptation", "schedule-free")),
    ]


def documents(steps: int) -> list[list[Column]]:
    """Columns of the tables of docs/search.md: auto, the other rules from where all tasks were
    run and from where some were, the other methods."""
    auto = [
        *(("auto on top", start) for start in STARTS),
        *(("auto", start) for start in (0.1, 1.0, 10.0)),
        *((FREE, start) for start in (0.1, 1.0, 10.0)),
    ]
    rules = [
        [(name, start) for name in ("slope", "paper 0.1", "paper 0.002") for start in pair]
        for pair in ((0.1, 10.0), (0.01, 1.0))
    ]
    others = [
        *(("fixed", start) for start in (0.01, 0.1, 10.0)),
        *((name, 0.0) for name in ("prodigy", "d-adaptation")),
        *(("schedule-free", start) for start in (0.0, 0.1, 1.0, 10.0)),
    ]
    return [[(steps, *column) for column in part] for part in (auto, *rules, others)]


def table(rows: Rows) -> str:
    """Mean excess in % (standard error, LR found over best) by task and start."""
    found = rows.excesses()
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
            mean = mean_or_inf(excess)
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


def markdown(rows: Rows, columns: list[Column], tasks: Iterable[str], *, errors: bool) -> str:
    """A row a task and the means of all of them, a column a method; only what was run."""
    found = rows.excesses()
    drawn = {
        (task, *column): [e for e, _ in found.get((task, *column), [])]
        for task in TASKS
        for column in columns
    }
    columns = [c for c in columns if any(drawn[(task, *c)] for task in TASKS)]
    if not columns:
        return ""
    steps = columns[0][0]
    heads = [_head(column, steps) for column in columns]
    lines = [
        f"| {steps:,} steps | {' | '.join(heads)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for task in tasks:
        cells = [drawn[(task, *c)] for c in columns]
        if any(cells):
            shown = [_cell(x if errors or not x else [mean_or_inf(x)]) for x in cells]
            lines.append(f"| {task}{' *' * (task in JUDGED)} | {' | '.join(shown)} |")
    told = [
        summary({task: mean_or_inf(x) for task in TASKS if (x := drawn[(task, *c)])})
        for c in columns
    ]
    for name in (name for name in told[0] if any(x[name] for x in told)):
        lines.append(f"| **{name}** | {' | '.join(_cell(x[name]) for x in told)} |")
    return "\n".join(lines)


def ratios(rows: Rows, columns: list[Column]) -> str:
    """The learning rate at the end of the run over the best of the grid: geometric mean,
    extremes."""
    found, heads = rows.excesses(), [_head(column, 0) for column in columns]
    lines = [
        f"| LR over the best | {' | '.join(heads)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for task in TASKS:
        cells = []
        for column in columns:
            drawn = [ratio for _, ratio in found.get((task, *column), [])]
            cells.append(_ratio(drawn) if drawn else "")
        lines.append(f"| {task}{' *' * (task in JUDGED)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(drawn: list[float]) -> str:
    mean = statistics.geometric_mean(drawn)
    return f"{mean:.2g} ({min(drawn):.2g} to {max(drawn):.2g})"


def _head(column: Column, usual: int) -> str:
    steps, method, start = column
    told = f"{method}, from {start:g} x" if start else f"{method}, own default"
    return told if steps == usual else f"{steps:,}: {told}"


def summary(means: dict[str, float]) -> dict[str, list[float]]:
    """The median of all tasks, and means of some; nothing where one of them was not run."""
    told: dict[str, list[float]] = {"median of all": []}
    if len(means) == len(TASKS):
        told["median of all"] = [statistics.median(means.values())]
    for name, tasks in MEANS.items():
        drawn = [means[t] for t in tasks if t in means]
        told[name] = [mean_or_inf(drawn)] if len(drawn) == len(tasks) else []
    return told


def figure(rows: Rows, path: Path) -> None:
    """Mean excess by method and start, a dot a task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = rows.excesses()
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
    mean = mean_or_inf(excess)
    if not math.isfinite(mean) or mean > 1000:
        return "diverges"
    if len(excess) == 1:
        return f"{mean:+.1f}"
    return f"{mean:+.1f} ± {statistics.stdev(excess) / math.sqrt(len(excess)):.1f}"
