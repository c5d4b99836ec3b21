"""Rows of the arbiter: one for each run, kept in a file, held against the best of the grid."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.lr.problem import Task
from benchmarks.rows import RESULTS, where

Row = dict[str, Any]
RECOVERY = RESULTS / "lr_recovery.jsonl"
"""Rows of the grid, of fixed learning rates and of rule="auto"."""
RIVALS = RESULTS / "lr_rivals.jsonl"
"""Rows of the other methods."""
GONE = ("climb",)
"""Methods that no longer exist: their rows stay in the file and are not read."""


class Rows:
    """What was run, and what is run only once.

    Args:
        path: the file that rows are read from and appended to.
        also: further files to read rows from. What is in them is not run again.
    """

    def __init__(self, path: Path, *also: Path) -> None:
        self.path, self.stamp = path, where()
        files = [file for file in (path, *also) if file.exists()]
        rows = [json.loads(x) for file in files for x in file.read_text().splitlines() if x]
        self.rows: list[Row] = [row for row in rows if row["method"] not in GONE]
        self.known = {self._key(row) for row in self.rows}

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return row["task"], row["steps"], row["seed"], row["method"], round(row["start"], 12)

    def run(
        self, task: Task, steps: int, seed: int, method: str, start: float, do: Callable[[], Row]
    ) -> None:
        place = {
            "task": task.name, "steps": steps, "seed": seed, "method": method, "start": start
        }  # fmt: skip
        if self._key(place) in self.known:
            return
        began = time.perf_counter()
        row: Row = place | {"seconds": 0.0} | do()
        row |= {"seconds": round(row["seconds"] or time.perf_counter() - began, 2), **self.stamp}
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self.known.add(self._key(row))

    def best(self, task: str, steps: int) -> tuple[float, dict[int, float]]:
        """The learning rate with the lowest mean over seeds, and its loss for each seed."""
        by_rate: dict[float, dict[int, float]] = defaultdict(dict)
        for row in self.rows:
            if (row["task"], row["steps"], row["method"]) == (task, steps, "grid"):
                by_rate[row["rate"]][row["seed"]] = row["loss"]
        most = max(len(v) for v in by_rate.values())
        whole = {k: v for k, v in by_rate.items() if len(v) == most}
        rate = min(whole, key=lambda k: mean_or_inf(whole[k].values()))
        return rate, whole[rate]

    def excesses(self) -> dict[tuple[str, int, str, float], list[tuple[float, float]]]:
        """(task, steps, method, start) -> for each seed (excess in %, rate over best); only where
        there is a grid."""
        out: dict[tuple[str, int, str, float], list[tuple[float, float]]] = defaultdict(list)
        gridded = {(row["task"], row["steps"]) for row in self.rows if row["method"] == "grid"}
        limits = {where: self.best(*where) for where in gridded}
        for row in self.rows:
            where = (row["task"], row["steps"])
            if row["method"] == "grid" or where not in limits:
                continue
            rate, losses = limits[where]
            if row["seed"] in losses:
                excess = 100 * (row["loss"] / losses[row["seed"]] - 1)
                key = (*where, row["method"], row["start"])
                out[key].append((excess, row["rate"] / rate))
        return out


def mean_or_inf(values: Iterable[float]) -> float:
    """Infinite where one of them is not finite."""
    drawn = list(values)
    return statistics.fmean(drawn) if all(map(math.isfinite, drawn)) else math.inf
