"""The demo's picture: the loss of both runs, the schedule, the fan of learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hdet_scale.demo import Run

# Okabe and Ito's palette: told apart by every kind of colour vision, and in grey by lightness.
BLUE, VERMILION = "#0072B2", "#D55E00"
FAN = ("#56B4E9", "#009E73", "#E69F00", "#CC79A7")
GREY = "#666666"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the PNG; its folder is made."""
    from matplotlib.figure import Figure

    plain, hdet = runs
    figure = Figure(figsize=(12, 6.2), dpi=150, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.1, 1))
    loss = figure.add_subplot(grid[:, 0])
    rate = figure.add_subplot(grid[0, 1])
    fan = figure.add_subplot(grid[1, 1], sharex=rate)
    _draw_losses(loss, plain, hdet)
    _draw_rates(rate, plain, hdet)
    _draw_fan(fan, plain, hdet)
    for axes in (loss, rate, fan):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_xlim(0, len(plain.bases))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_losses(axes: Any, plain: Run, hdet: Run) -> None:
    window = max(1, len(plain.bases) // 30)
    for run, colour, style in ((plain, BLUE, "-"), (hdet, VERMILION, "--")):
        losses = run.mean_losses
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, color=colour, alpha=0.18, linewidth=0.7)
        axes.plot(
            steps,
            _trailing_mean(losses, window),
            color=colour,
            linestyle=style,
            linewidth=1.8,
            label=f"{run.name}: training {run.training:.3f}, validation {run.validation:.3f}",
        )
        axes.plot(len(losses), run.validation, "D", color=colour, markersize=6, clip_on=False)
    axes.set_title(f"Loss (mean of the replicas, smoothed over {window} steps; ◆ validation)")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy (nats per byte)")
    axes.legend(frameon=False, loc="upper right")


def _draw_rates(axes: Any, plain: Run, hdet: Run) -> None:
    steps = range(1, len(plain.bases) + 1)
    for r, (rates, colour) in enumerate(zip(hdet.rates, FAN, strict=False)):
        axes.plot(steps, _milli(rates), color=colour, linewidth=0.7, label=f"replica {r}")
    axes.plot(steps, _milli(hdet.bases), color=VERMILION, linewidth=1.8, label="HDET base")
    axes.plot(steps, _milli(plain.bases), color=BLUE, linestyle=":", linewidth=1.8, label="plain")
    axes.set_title("Learning rate")
    axes.set_ylabel("learning rate (10$^{-3}$)")
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False, ncols=2, loc="upper right", fontsize="small")


def _draw_fan(axes: Any, plain: Run, hdet: Run) -> None:
    steps = range(1, len(plain.bases) + 1)
    for rates, colour in zip(hdet.rates, FAN, strict=False):
        relative = [x / s for x, s in zip(rates, plain.bases, strict=True)]
        axes.plot(steps, relative, color=colour, linewidth=0.7, alpha=0.9)
    scale = [b / s for b, s in zip(hdet.bases, plain.bases, strict=True)]
    axes.plot(steps, scale, color=VERMILION, linewidth=1.8)
    axes.axhline(1, color=BLUE, linestyle=":", linewidth=1.8)
    takeover = next((i for i, x in enumerate(scale) if abs(x - 1) > 1e-9), None)
    if takeover is not None:
        axes.axvline(takeover, color=GREY, linewidth=0.8)
        axes.annotate(
            " the rule takes over",
            (takeover, 1),
            xycoords=("data", "axes fraction"),
            va="top",
            color=GREY,
            fontsize="small",
        )
    axes.set_title("The fan: learning rate relative to the plain schedule")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("ratio")


def _milli(values: Sequence[float]) -> list[float]:
    return [1e3 * v for v in values]


def _trailing_mean(values: Sequence[float], window: int) -> list[float]:
    means = []
    for i in range(1, len(values) + 1):
        recent = values[max(0, i - window) : i]
        means.append(sum(recent) / len(recent))
    return means
