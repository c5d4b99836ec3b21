"""The law of hdet_scale.search.law on pre-training runs of language models.

    python -m benchmarks.lr.steplaw [--no-rows]

benchmarks/data/steplaw_dense.csv has the final losses of 1,911 runs of dense models of 0.2 to 1
billion parameters (step-law/steplaw, arXiv 2503.04715): parameters n, learning rate, batch in
sequences of 2,048 tokens, steps and loss. The runs of one n, batch and number of steps form a
curve; its best rate is the minimum of a parabola in log2 of the rate through the five rates around
the lowest. Curves whose lowest loss is at their first or last rate, or that have fewer than five
rates, are left out.

A pair is two curves of one n: a trial, and a run with at least as many steps, 1 to 16 times the
batch and at least 4 times the tokens.

    error     log2(best rate of the trial x c / best rate of the run), mean and deviation, octaves
    excess    of the run's loss at the translated rate over its lowest, in %: median and 90th
              percentile, read off its parabola, and off lines between its runs. The parabola
              overstates rates that are far off; the lines count the distance of the lowest run too
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.rows import append, table
from hdet_scale.search.law import translation

DATA = Path(__file__).parents[1] / "data" / "steplaw_dense.csv"
NEAR = 5
"""Rates that a parabola goes through."""
TOKENS = 0.25
"""Of the run's: at most so many has a trial."""
RATIO = 16
"""M at most."""

Law = Callable[[float, int, int], float]
"""c of M, h and S."""
LAWS: dict[str, Law] = {
    "hdet_scale.search.law": translation,
    "M^0.34": lambda ratio, trial, run: ratio**0.34,
    "M^0.25 (h/S)^0.4": lambda ratio, trial, run: ratio**0.25 * (trial / run) ** 0.4,
}


@dataclass(frozen=True)
class Losses:
    """The runs of one n, batch and number of steps."""

    n: int
    batch: int
    steps: int
    octaves: tuple[float, ...]
    """log2 of the learning rates, rising."""
    losses: tuple[float, ...]
    best: float
    """log2 of the best learning rate."""
    lowest: float
    """Loss of the parabola there."""
    bend: float
    """Of the parabola: the coefficient of its square."""

    @classmethod
    def of(cls, n: int, batch: int, steps: int, runs: dict[float, float]) -> Losses | None:
        """None where the runs have no minimum between them."""
        octaves, losses = zip(*sorted((math.log2(k), v) for k, v in runs.items()), strict=True)
        at = losses.index(min(losses))
        if len(runs) < NEAR or at in (0, len(runs) - 1):
            return None
        first = max(0, min(at - NEAR // 2, len(runs) - NEAR))
        near = slice(first, first + NEAR)
        x = torch.tensor(octaves[near], dtype=torch.float64) - octaves[at]
        columns = torch.stack([x.square(), x, torch.ones_like(x)], 1)
        right = torch.tensor(losses[near], dtype=torch.float64)[:, None]
        a, b, c = torch.linalg.lstsq(columns, right).solution[:, 0].tolist()
        if a <= 0:
            return None
        best, lowest = octaves[at] - b / (2 * a), c - b * b / (4 * a)
        return cls(n, batch, steps, octaves, losses, best, lowest, a)

    def excess(self, octave: float) -> float:
        """In %, read off the parabola."""
        return 100 * self.bend * (octave - self.best) ** 2 / self.lowest

    def between(self, octave: float) -> float:
        """In %, read off lines between the runs; beyond them it is that of the outermost."""
        x, y = self.octaves, self.losses
        inside = min(max(octave, x[0]), x[-1])
        k = max(i for i in range(len(x) - 1) if x[i] <= inside)
        share = (inside - x[k]) / (x[k + 1] - x[k])
        return 100 * ((y[k] + share * (y[k + 1] - y[k])) / min(y) - 1)


def read(path: Path = DATA) -> list[Losses]:
    """All curves that have a minimum."""
    runs: dict[tuple[int, int, int], dict[float, float]] = defaultdict(dict)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            place = int(row["n"]), int(row["bs"]), int(row["steps"])
            runs[place][float(row["lr"])] = float(row["loss"])
    found = (Losses.of(*place, some) for place, some in runs.items())
    return [curve for curve in found if curve]


def paired(curves: Sequence[Losses]) -> list[tuple[Losses, Losses]]:
    """Every trial with every run that it may stand for."""
    return [
        (trial, run)
        for trial in curves
        for run in curves
        if trial.n == run.n
        and trial.steps <= run.steps
        and trial.batch <= run.batch <= RATIO * trial.batch
        and trial.batch * trial.steps <= TOKENS * run.batch * run.steps
    ]


def alike(pairs: Sequence[tuple[Losses, Losses]]) -> list[tuple[Losses, Losses]]:
    """Pairs of the same batch, with trials of at most a tenth of the run's steps."""
    return [(t, r) for t, r in pairs if t.batch == r.batch and t.steps <= 0.1 * r.steps]


@dataclass(frozen=True)
class Figures:
    """How well a law does."""

    pairs: int
    error: float
    spread: float
    median: float
    p90: float
    median_between: float
    p90_between: float

    @classmethod
    def of(cls, law: Law, pairs: Sequence[tuple[Losses, Losses]]) -> Figures:
        at = [t.best + math.log2(law(r.batch / t.batch, t.steps, r.steps)) for t, r in pairs]
        errors = [x - run.best for x, (_, run) in zip(at, pairs, strict=True)]
        excess = [run.excess(x) for x, (_, run) in zip(at, pairs, strict=True)]
        between = [run.between(x) for x, (_, run) in zip(at, pairs, strict=True)]
        quantiles = (_quantile(v, q) for v in (excess, between) for q in (0.5, 0.9))
        return cls(len(pairs), statistics.fmean(errors), statistics.stdev(errors), *quantiles)


def _quantile(values: Sequence[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--no-rows", action="store_true", help="only print")
    given = parser.parse_args(arguments)
    pairs = paired(read())
    lines, rows = [], []
    for which, some in (("all", pairs), ("same batch, h/S <= 0.1", alike(pairs))):
        for name, law in LAWS.items():
            found = Figures.of(law, some)
            rows.append({"law": name, "which": which, **vars(found)})
            lines.append([
                which, str(found.pairs), name, f"{found.error:+.2f} +- {found.spread:.2f}",
                f"{found.median:.3f}, {found.p90:.3f}",
                f"{found.median_between:.3f}, {found.p90_between:.3f}",
            ])  # fmt: skip
    header = ["pairs", "count", "law", "error", "excess % (parabola)", "excess % (lines)"]
    print(table(header, lines))
    if not given.no_rows:
        print(append("lr_steplaw", rows).name)


if __name__ == "__main__":
    main()
