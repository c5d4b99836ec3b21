"""A search and the watch after it, read back from a run log.

A trial line has the peak rates that were trained with. The best rate of a trial, which is short and
has a part of the batch, differs from that of the run: all rates that are returned here are already
multiplied with the trial's `translation`, and can be compared with the rates of the run.

If a search begins again, with trial 0, only the last one counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hdet_scale.runs.log import Log
from hdet_scale.search.evidence import standard_error


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
        - stages: for each stage its name, its rates, losses and errors in order of the rate, and
          its verdict;
        - from, x, rates: the steps between which each trial was run, and for each factor its rate.
          Trials that were run side by side have the same steps.
    """
    trials, end = trials_of(log), _end(log)
    if not trials:
        return None
    stages = itertools.groupby(trials, key=lambda line: line["stage"])
    initial, ends = _first_bases(log) if end is None else end["initial"], [0]
    for line in trials:
        ends += [line["step"]] if line["step"] > ends[-1] else []
    return {
        "steps": steps_of_search(log),
        "trials": len(trials),
        "initial": initial,
        "taken": None if end is None else end["taken"],
        "completed": end is not None and end["completed"],
        "verdict": "" if end is None else end["verdict"],
        "stages": [_stage(name, list(lines), initial) for name, lines in stages],
        "from": [ends[ends.index(line["step"]) - 1] for line in trials],
        "x": [line["step"] for line in trials],
        "rates": {
            name: [x["rates"][name] * x["translation"] for x in trials]
            for name in trials[0]["rates"]
        },
    }


def watch_of(log: Log) -> dict[str, Any] | None:
    """Step, held-out loss and scale of each evaluation, and as `restarts` the steps after which the
    weights went back to those of the lowest loss; None without an evaluation."""
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


def _end(log: Log) -> dict[str, Any] | None:
    """The line that ended the last search; None while it is under way, and without one."""
    trials, ended = trials_of(log), log.searches[-1:]
    return next((line for line in ended if not trials or line["step"] >= trials[-1]["step"]), None)


def _first_bases(log: Log) -> dict[str, float]:
    """The bases of the first step: the initial rates, since a search begins with the run and does
    not move the base."""
    return {k: values[0] for line in log.steps[:1] for k, values in line["bases"].items()}


def _stage(
    name: str, lines: Sequence[dict[str, Any]], initial: Mapping[str, float]
) -> dict[str, Any]:
    """The trials of a stage in order of the rate."""
    factors = list(lines[0]["rates"])
    order = sorted(lines, key=lambda line: line["rates"][factors[0]])
    return {
        "name": name,
        "rates": {f: [x["rates"][f] * x["translation"] for x in order] for f in factors},
        "losses": [line["loss"] for line in order],
        "errors": _errors(order, initial),
        "verdict": lines[-1]["verdict"],
    }


def _errors(
    lines: Sequence[dict[str, Any]], initial: Mapping[str, float]
) -> Sequence[float | None]:
    """Of the differences to the initial rate's trial. A line that was written before that trial
    ended has the error of its own loss instead."""

    def first(line: dict[str, Any]) -> bool:
        rates = {f: rate * line["translation"] for f, rate in line["rates"].items()}
        return all(math.isclose(rates[f], initial.get(f, 0.0), rel_tol=1e-6) for f in rates)

    beside = next((line["losses"] for line in lines if first(line)), None)
    if beside is None:
        return [line["error"] for line in lines]
    return [line["error"] if first(line) else _error(line["losses"], beside) for line in lines]


def _error(losses: Sequence[float | None], beside: Sequence[float | None]) -> float | None:
    pairs = zip(losses, beside, strict=False)
    error = standard_error([math.nan if a is None or b is None else a - b for a, b in pairs])
    return error if math.isfinite(error) else None
