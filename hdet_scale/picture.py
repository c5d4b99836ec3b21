"""The demo's picture: the loss of both runs, the schedule, the fan of learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hdet_scale.demo import Run

# Okabe and Ito's palette: told apart by every kind of colour vision, and in grey by lightness.
BLUE, VERMILION = "#0072B2", "#D55E00"
FAN = ("#56B4E9", "#009E73", "#E69F00", "#CC79A7")
GREY = "#666666"


def draw(plain: Run, hdet: Run, path: Path) -> None:
    """Write the PNG; its folder is made."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), dpi=150, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.1))
    loss = figure.add_subplot(grid[:, 0])
    rate = figure.add_subplot(grid[0, 1])
    fan = figure.add_subplot(grid[1, 1], sharex=rate)
    _draw_losses(loss, plain, hdet)
    _draw_rates(rate, plain, hdet)
    _draw_fan(fan, plain, hdet)
    for axes in (loss, rate, fan):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_xlim(0, len(plain.bases) + 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_losses(axes: Any, plain: Run, hdet: Run) -> None:
    window = max(1, len(plain.bases) // 30)
    for run, colour, style in ((plain, BLUE, "-"), (hdet, VERMILION, "--")):
        losses = run.mean_losses
        smooth = _trailing_mean(losses, window)
        steps = range(1, len(losses) + 1)
        label = f"{run.name}: training {run.training:.3f}, validation {run.validation:.3f}"
        axes.plot(steps, losses, color=colour, alpha=0.2, linewidth=0.7)
        axes.plot(steps, smooth, color=colour, linestyle=style, linewidth=1.8, label=label)
        axes.plot(len(losses), run.validation, "D", color=colour, markersize=6, clip_on=False)
    # From the uniform guess down to the first plateau every run looks the same: leave it out.
    smooth = _trailing_mean(plain.mean_losses, window)
    axes.set_ylim(0.95 * min(smooth), smooth[len(smooth) // 10])
    axes.set_title(
        f"Loss, mean of the replicas over {window} steps (\u25c6 validation)", loc="left"
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy (nats per byte)")
    axes.legend(frameon=False, loc="upper right")


def _draw_rates(axes: Any, plain: Run, hdet: Run) -> None:
    steps = range(1, len(plain.bases) + 1)
    _draw_replicas(axes, hdet, [1e-3] * len(plain.bases))
    axes.plot(steps, _thousands(hdet.bases), color=VERMILION, linewidth=1.6, label="HDET base")
    axes.plot(
        steps, _thousands(plain.bases), color=BLUE, linestyle=":", linewidth=1.8, label="plain DDP"
    )
    axes.set_title("Learning rate", loc="left")
    axes.set_ylabel("learning rate (10$^{-3}$)")
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False, ncols=2, loc="upper right", fontsize="small")


def _draw_fan(axes: Any, plain: Run, hdet: Run) -> None:
    steps = range(1, len(plain.bases) + 1)
    _draw_replicas(axes, hdet, plain.counted)
    scale = [b / s for b, s in zip(hdet.bases, plain.counted, strict=True)]
    axes.plot(steps, scale, color=VERMILION, linewidth=1.6)
    axes.axhline(1, color=BLUE, linestyle=":", linewidth=1.8)
    moved = next((step for step, x in zip(steps, scale, strict=True) if x != 1), None)
    if moved is not None:
        axes.axvline(moved, color=GREY, linewidth=0.8)
        place = {"xycoords": ("data", "axes fraction"), "va": "top", "fontsize": "small"}
        axes.annotate("  the rule takes over", (moved, 1), color=GREY, **place)
    axes.set_title("The fan: rate / plain schedule (where above 2 % of its peak)", loc="left")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("ratio")


def _draw_replicas(axes: Any, hdet: Run, unit: Sequence[float]) -> None:
    """Each replica's rate over `unit`, a stroke a round: a new round draws a new multiplier."""
    ends = {r.step for r in hdet.rounds}
    for replica, (rates, colour) in enumerate(zip(hdet.rates, FAN, strict=False)):
        x: list[float] = []
        y: list[float] = []
        for step, (rate, one) in enumerate(zip(rates, unit, strict=True), start=1):
            x += [step - 0.5, step + 0.5]
            y += [rate / one, rate / one]
            if step in ends:
                x.append(math.nan)
                y.append(math.nan)
        axes.plot(x, y, color=colour, linewidth=1.1, label=f"replica {replica}")


def _thousands(values: Sequence[float]) -> list[float]:
    return [1e3 * v for v in values]


def _trailing_mean(values: Sequence[float], window: int) -> list[float]:
    means = []
    for i in range(1, len(values) + 1):
        recent = values[max(0, i - window) : i]
        means.append(sum(recent) / len(recent))
    return means
