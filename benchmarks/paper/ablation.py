"""The paper's six rows, on a task that a CPU can train: a byte-level GPT on Python's own source.

    python -m benchmarks.paper.ablation          # 8 replicas, 3 seeds; a table, rows, a figure

    Baseline-Low       vanilla DDP at a learning rate that is known to be fine
    Baseline-High      vanilla DDP at the first of a grid at which it diverges
    Warm-Init          the same, with noise of its own on each replica's weights
    HDET w/o auto-LR   high LR, spread, averaging every T steps, warm init
    HDET w/o warm      high LR, spread, averaging, the paper's auto-LR
    HDET full          all three

The HDET rows with shared gradients (the paper) and with local ones. A run has diverged when its
final training loss is not finite, or not 5 % below that of a model that knows only how frequent
each byte is: norms and Adam keep a GPT's loss finite at any learning rate, it then learns nothing.
Warm-Init never averages before its end: without a spread there is nothing to converge.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import ranks, rows
from benchmarks.paper.learning import Curve, Recipe, trailing_mean, train, unigram_entropy
from hdet_scale.models.text import Text, standard_library

LOW = 0.003
GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SPREAD = 1 / 9
LEARNT = 0.95
"""Below this share of the loss of byte frequencies alone a run has learnt something."""


def six_rows(low: float, high: float) -> list[Recipe]:
    """The table; the HDET rows twice."""
    made = [
        Recipe(name="Baseline-Low", lr=low),
        Recipe(name="Baseline-High", lr=high),
        Recipe(name="Warm-Init", lr=high, warm=True),
    ]
    for gradients in ("shared", "local"):
        hdet = Recipe(name="", lr=high, spread=SPREAD, gradients=gradients)
        made += [
            dataclasses.replace(hdet, name=f"HDET w/o auto-LR, {gradients}", warm=True),
            dataclasses.replace(hdet, name=f"HDET w/o warm, {gradients}", rule=True),
            dataclasses.replace(hdet, name=f"HDET full, {gradients}", rule=True, warm=True),
        ]
    return made


def diverged(curve: Curve, entropy: float) -> bool:
    """Not finite, or hardly better than the frequencies of bytes."""
    return not (math.isfinite(curve.final) and curve.final < LEARNT * entropy)


def work(send: ranks.Send, options: Any) -> None:
    """In each rank: find the high LR, then every row with every seed."""
    text = Text.read(standard_library())
    entropy = unigram_entropy(text)
    common = {"steps": options.steps, "interval": options.interval}
    tell = send if ranks.first() else lambda _: None
    high = options.high
    if high is None:
        for high in GRID:
            tried = train(Recipe(name="grid", lr=high, **common), text)
            tell(("grid", tried, diverged(tried, entropy), entropy))
            if diverged(tried, entropy):
                break
    for seed in range(options.seeds):
        for recipe in six_rows(LOW, high):
            curve = train(dataclasses.replace(recipe, seed=seed, **common), text)
            tell(("row", curve, diverged(curve, entropy), entropy))


def summary(found: list[Any]) -> list[dict[str, Any]]:
    """A row of the table for each name: mean and spread over the seeds."""
    curves: dict[str, list[tuple[Curve, bool]]] = {}
    for kind, curve, lost, _ in found:
        if kind == "row":
            curves.setdefault(curve.recipe.name, []).append((curve, lost))
    results = []
    for name, some in curves.items():
        finals, valid = [c.final for c, _ in some], [c.final_validation for c, _ in some]
        results.append(
            {
                "row": name,
                "lr": some[0][0].recipe.lr,
                "seeds": len(some),
                "diverged": sum(lost for _, lost in some),
                "training": statistics.fmean(finals),
                "training_spread": _spread(finals),
                "validation": statistics.fmean(valid),
                "validation_spread": _spread(valid),
                "validation_each": valid,
                "steps": some[0][0].recipe.steps,
                "interval": some[0][0].recipe.interval,
            }
        )
    return results


def _spread(values: list[float]) -> float:
    """Standard deviation; NaN of one value or of values that are not finite."""
    fine = len(values) > 1 and all(math.isfinite(v) for v in values)
    return statistics.stdev(values) if fine else math.nan


def draw(found: list[Any], path: Path) -> None:
    """Training loss against steps, mean over the seeds; shared and local side by side."""
    from matplotlib.figure import Figure

    entropy = found[0][3]
    curves: dict[str, list[list[float]]] = {}
    for kind, curve, _, _ in found:
        if kind == "row":
            curves.setdefault(curve.recipe.name, []).append(curve.losses)
    figure = Figure(figsize=(12, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    # Okabe and Ito's palette: told apart by every kind of colour vision.
    colours = ["#000000", "#D55E00", "#E69F00", "#56B4E9", "#009E73", "#CC79A7"]
    for axes, mode in zip(panels, ("shared", "local"), strict=True):
        names = [n for n in curves if not n.startswith("HDET") or n.endswith(mode)]
        for name, colour in zip(names, colours, strict=True):
            mean = [statistics.fmean(at) for at in zip(*curves[name], strict=True)]
            window = max(1, len(mean) // 30)
            smooth = trailing_mean(mean, window)
            axes.plot(range(1, len(mean) + 1), smooth, color=colour, label=name, linewidth=1.4)
        axes.axhline(entropy, color="#666666", linestyle=":", linewidth=0.8)
        axes.set(xlabel="optimizer step", ylim=(1.5, 6.5))
        axes.set_title(f"HDET with {mode} gradients", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False, fontsize="small")
    panels[0].set_ylabel("training loss (nats a byte)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    """Start the replicas, tell."""
    parser = ranks.parser(__doc__)
    parser.set_defaults(ranks=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--interval", type=int, default=10, help="T")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--high", type=float, help="the high LR, instead of looking for it")
    options = parser.parse_args(arguments)
    found = ranks.run(work, options)
    if found is None:
        return 0
    for kind, curve, lost, entropy in found:
        if kind == "grid":
            said = "diverges" if lost else "trains"
            print(f"LR {curve.recipe.lr:g}: {said}, {curve.final:.3f} (bytes alone {entropy:.3f})")
    results = summary(found)
    lines = [
        [
            r["row"],
            f"{r['lr']:g}",
            f"{r['training']:.3f} +- {r['training_spread']:.3f}",
            f"{r['validation']:.3f} +- {r['validation_spread']:.3f}",
            f"{r['diverged']} of {r['seeds']}",
        ]
        for r in results
    ]
    print(f"{options.ranks} replicas, {options.steps} steps, T = {options.interval}")
    print(rows.table(["row", "LR", "training", "validation", "diverged"], lines))
    for r in results:
        print(f"figure: {r['row']}: validation {r['validation']:.3f}")
    if not options.no_rows:
        common = {"replicas": options.ranks, "bytes_alone": found[0][3], "learnt": LEARNT}
        print("rows:", rows.append("ablation", [{**common, **r} for r in results]))
        draw(found, rows.RESULTS / "ablation.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
