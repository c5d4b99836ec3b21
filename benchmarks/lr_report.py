"""What the arbiter's rows say: a table for the screen, those of the documents, a figure."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from benchmarks.lr_rows import Rows, mean_or_inf
from benchmarks.lr_tasks import DEVELOPED, JUDGED, TASKS

STARTS = (0.01, 0.1, 1.0, 10.0)
FREE = "auto beneath schedule-free"
MEANS = {"first seven": [*DEVELOPED][:7], "with *": [*JUDGED]}
"""Of which tasks the tables have a mean; beside the median of all."""
SHORT = (
    *(("auto", start) for start in (0.1, 1.0, 10.0)),
    *(("fixed", start) for start in (0.1, 10.0)),
    *((name, 0.0) for name in ("prodigy", "d-adaptation", "schedule-free")),
)
"""Columns of the README's table."""
ORDER = (
    *(("auto", start) for start in STARTS),
    *((FREE, start) for start in (0.1, 1.0, 10.0)),
    *(("auto inside", start) for start in (0.1, 10.0)),
    *(("fixed", start) for start in (0.01, 0.1, 10.0)),
    *((name, start) for name in ("slope", "climb") for start in (0.1, 10.0)),
    *((f"paper {sigma}", start) for sigma in (0.1, 0.002) for start in (0.1, 10.0)),
    ("prodigy", 0.0),
    ("d-adaptation", 0.0),
    *(("schedule-free", start) for start in (0.0, 0.1, 1.0, 10.0)),
)
"""Rows of the table: method and start."""


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


def markdown(rows: Rows, steps: int) -> str:
    """The table of the documents: a row a method, a column a task, mean +- standard error."""
    found = rows.excesses()
    tasks = [t for t in TASKS if any(key[:2] == (t, steps) for key in found)]
    heads = [f"{t} *" if t in JUDGED else t for t in tasks]
    lines = [f"| | {' | '.join([*heads, 'median', *MEANS])} |"]
    lines.append("|---" * (len(tasks) + 2 + len(MEANS)) + "|")
    for method, start in ORDER:
        drawn = [[e for e, _ in found.get((t, steps, method, start), [])] for t in tasks]
        if not any(drawn):
            continue
        means = {t: mean_or_inf(x) for t, x in zip(tasks, drawn, strict=True) if x}
        label = f"{method}, from {start:g} x" if start else f"{method}, own default"
        cells = [_cell(x) for x in drawn] + [_cell(x) for x in summary(means).values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_task(rows: Rows, steps: int) -> str:
    """The README's table: a row a task, a column a method, means over the seeds."""
    found = rows.excesses()
    heads = [f"{m} {s:g} x" if s else m for m, s in SHORT]
    lines = [f"| {steps:,} steps | {' | '.join(heads)} |", "|---" * (len(SHORT) + 1) + "|"]
    columns: list[dict[str, float]] = [{} for _ in SHORT]
    seen = [t for t in TASKS if (t, steps, *SHORT[0]) in found]
    for task in seen:
        drawn = [[e for e, _ in found.get((task, steps, *key), [])] for key in SHORT]
        for column, cell in zip(columns, drawn, strict=True):
            column.update({task: mean_or_inf(cell)} if cell else {})
        name = f"{task} *" if task in JUDGED else task
        cells = [_cell([c[task]] if task in c else []) for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    told = [summary(c) for c in columns]
    for name in told[0]:
        lines.append(f"| **{name}** | {' | '.join(_cell(x[name]) for x in told)} |")
    return "\n".join(lines)


def summary(means: dict[str, float]) -> dict[str, list[float]]:
    """The median of all tasks, and means of some; nothing where one of them was not run."""
    told = {"median": [statistics.median(means.values())]}
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
