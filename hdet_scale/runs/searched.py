"""Heats: what a race showed, and the watch after it, read back from the log of their run.

A heat's line says what each replica's peak learning rate was and the loss after its decay. A heat
is short and has a part of the batch: the learning rate of the run that it stands for is c times as
high, the `translation` in its evidence. The round that closes a stage has the race's verdict, and
the last is `over`.

A look of the watch is a round of its own kind, with the held-out loss. One that sent the run back
says so ("back" in its evidence): the run began anew after that step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hdet_scale.runs.log import Log
WATCH = "watch"

PHASE = "race"


def heats(log: Log) -> list[dict[str, Any]]:
    """The rounds of the race; of one that was begun anew, with other replicas, the last."""
    found = [line for line in log.rounds if line.get("phase") == PHASE]
    first = max((i for i, line in enumerate(found) if line["round"] == 0), default=0)
    return found[first:]


def looks(log: Log) -> list[dict[str, Any]]:
    """The rounds of the watch."""
    return [line for line in log.rounds if line.get("phase") == WATCH]


def steps_before(log: Log) -> int:
    """Steps before the run whose weights are kept: the race's, and those that a watch took back."""
    back = [int(line["step"]) for line in looks(log) if line["evidence"]["back"]]
    return max(steps_of_race(log), *back, 0)


def watch_of(log: Log) -> dict[str, Any] | None:
    """Steps, held-out losses and the learning rates' scale of each look; None without one."""
    lines = looks(log)
    if not lines:
        return None
    return {
        "x": [line["step"] for line in lines],
        "losses": [line["evidence"]["held_out"] for line in lines],
        "scales": [line["evidence"]["scale"] for line in lines],
        "back": [line["step"] for line in lines if line["evidence"]["back"]],
    }


def steps_of_race(log: Log) -> int:
    """Steps before the run itself began, all there are while the race lasts; 0 without one."""
    lines = heats(log)
    if not lines:
        return 0
    return int(lines[-1]["step"] if _over(lines) else max(x["step"] for x in (*lines, *log.steps)))


def race_of(log: Log) -> dict[str, Any] | None:
    """Stages, what was given, what was found (None while it lasts); None without a race."""
    lines = heats(log)
    if not any(line["losses"] for line in lines):
        return None  # given up before its first heat ended
    return {
        "steps": steps_of_race(log),
        "heats": len(lines),
        "given": lines[0]["bases"],
        "found": lines[-1]["bases"] if _over(lines) else None,
        "stages": [_stage(stage) for stage in _stages(lines) if stage[0]["losses"]],
        "x": [line["step"] for line in lines],
        "peaks": {
            name: [[rate * _translation(x) for rate in x["values"][name]] for x in lines]
            for name in lines[0]["values"]
        },
    }


def _over(lines: Sequence[dict[str, Any]]) -> bool:
    return bool(lines[-1]["evidence"]["over"])


def _translation(line: dict[str, Any]) -> float:
    """c: what a learning rate of the run is over that of the heat which stands for it."""
    return float(line["evidence"]["translation"])


def _stages(lines: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    stages: list[list[dict[str, Any]]] = [[]]
    for line in lines:
        if stages[-1] and stages[-1][-1]["verdict"]:
            stages.append([])
        stages[-1].append(line)
    return stages


def _stage(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Its levels in order. Replicas that ran the same one have told the mean of that heat."""
    levels: dict[tuple[float, ...], list[float | None]] = {}
    names = list(lines[0]["values"])
    for line in lines:
        rates = zip(*(line["values"][name] for name in names), strict=True)
        for at, loss in zip(rates, line["losses"], strict=True):
            levels.setdefault(at, []).append(loss)
    order, scale = sorted(levels), _translation(lines[0])
    return {
        "rates": {name: [at[i] * scale for at in order] for i, name in enumerate(names)},
        "losses": [_mean(levels[at]) for at in order],
        "verdict": lines[-1]["verdict"],
    }


def _mean(losses: Sequence[float | None]) -> float | None:
    """None where no replica's loss was finite: the level diverged."""
    heard = [x for x in losses if x is not None]
    return math.fsum(heard) / len(heard) if heard else None
