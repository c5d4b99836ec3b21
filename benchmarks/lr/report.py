"""What the arbiter's rows say: a table for the screen and a figure."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from benchmarks.lr.rows import Rows, mean_or_inf
from benchmarks.lr.tasks import JUDGED

STARTS = (0.01, 0.1, 1.0, 10.0)
FREE = "auto beneath schedule-free"


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
