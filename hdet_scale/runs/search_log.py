"""A search and the watch after it, read back from a run log.

A trial line has the peak rates that the replicas trained with. A trial is short and uses a part of
the batch, so that the same rate of the run is higher: all rates that are returned here are already
multiplied with the trial's `translation`, and can be compared with the rates of the run.

If a run is resumed with another number of replicas during its search, a new search begins, with
trial 0. Only the last search counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hdet_scale.runs.log import Log


def trials_of(log: Log) -> list[dict[str, Any]]:
    """The trial lines of the last search."""
    first = max((i for i, line in enumerate(log.trials) if line["trial"] == 0), default=0)
    return log.trials[first:]


def search_of(log: Log) -> dict[str, Any] | None:
    """What the search showed, for the report; None if no trial of a search has ended.

    Returns:
        A dict with
        - steps, trials: of the search so far;
        - initial: for each factor the initial rate; empty while a search is under way whose log
          has no sampled step yet;
        - taken: for each factor the rate that the run begins with; None while it is under way;
        - completed: False while it is under way, and if it was given up;
        - verdict: of the whole search; empty while it is under way;
        - stages: for each stage its name, rates and losses by level, and its verdict;
        - x, rates: the step at which each trial ended, and for each factor the replicas' rates.
    """
    trials, end = trials_of(log), _end(log)
    if not trials:
        return None
    stages = itertools.groupby(trials, key=lambda line: line["stage"])
    return {
        "steps": steps_of_search(log),
        "trials": len(trials),
        "initial": _first_bases(log) if end is None else end["initial"],
        "taken": None if end is None else end["taken"],
        "completed": end is not None and end["completed"],
        "verdict": "" if end is None else end["verdict"],
        "stages": [_stage(name, list(lines)) for name, lines in stages],
        "x": [line["step"] for line in trials],
        "rates": {
            name: [[rate * x["translation"] for rate in x["rates"][name]] for x in trials]
            for name in trials[0]["rates"]
        },
    }


def watch_of(log: Log) -> dict[str, Any] | None:
    """Step, held-out loss and scale of each evaluation, and the steps after which the run
    restarted; None without an evaluation."""
    lines = log.evaluations
    if not lines:
        return None
    return {
        "x": [line["step"] for line in lines],
        "losses": [line["loss"] for line in lines],
        "scales": [line["scale"] for line in lines],
        "restarts": [line["step"] for line in lines if line["restart"]],
    }


def steps_of_search(log: Log) -> int:
    """Steps of the search: all steps so far while it is under way, 0 without one."""
    trials, end = trials_of(log), _end(log)
    if end is not None:
        return int(end["step"])
    return max((int(line["step"]) for line in (*trials, *log.steps)), default=0) if trials else 0


def steps_before_run(log: Log) -> int:
    """Steps before the run whose weights are kept: those of the search, and those before the last
    restart."""
    restarts = [int(line["step"]) for line in log.evaluations if line["restart"]]
    return max(steps_of_search(log), *restarts, 0)


def _end(log: Log) -> dict[str, Any] | None:
    """The line that ended the last search; None while it is under way, and without one."""
    trials, ended = trials_of(log), log.searches[-1:]
    return next((line for line in ended if not trials or line["step"] >= trials[-1]["step"]), None)


def _first_bases(log: Log) -> dict[str, float]:
    """The bases of the first step: the initial rates, since a search begins with the run and does
    not move the base."""
    return {k: values[0] for line in log.steps[:1] for k, values in line["bases"].items()}


def _stage(name: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The levels of a stage by rate; replicas that ran the same level have its mean loss."""
    levels: dict[tuple[float, ...], list[float | None]] = {}
    factors, translation = list(lines[0]["rates"]), lines[0]["translation"]
    for line in lines:
        rows = zip(*(line["rates"][factor] for factor in factors), strict=True)
        for rates, loss in zip(rows, line["losses"], strict=True):
            levels.setdefault(rates, []).append(loss)
    order = sorted(levels)
    return {
        "name": name,
        "rates": {f: [rates[i] * translation for rates in order] for i, f in enumerate(factors)},
        "losses": [_mean(levels[rates]) for rates in order],
        "verdict": lines[-1]["verdict"],
    }


def _mean(losses: Sequence[float | None]) -> float | None:
    """None if no loss was finite: the level diverged."""
    finite = [loss for loss in losses if loss is not None]
    return math.fsum(finite) / len(finite) if finite else None
