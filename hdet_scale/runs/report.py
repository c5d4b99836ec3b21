"""`hdet report`: what the replicas found, as one page that opens in a browser without a network.

    hdet report runs/first runs/second -o report.html

Everything is in the file: the numbers as JSON, and a page (report.html of this package) that draws
them on canvases. More rounds than a screen has pixels are thinned first: a point is then the mean
of a few rounds, and of rates the lowest and the highest; quarantines and moves are all kept.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hdet_scale.runs.searched import PHASE, race_of, steps_of_race, watch_of
from hdet_scale.runs.log import Log, plain, read
WATCH = "watch"

POINTS = 2000
"""Rounds, and sampled steps, that a figure shows; beyond them groups are formed."""
STROKES = 4000
"""Up to so many values every replica's rate is drawn; beyond them only the fan's edges."""
EVENTS = 500
"""The last ones, in the table."""
DIGITS = 6


def page(logs: Sequence[Log]) -> str:
    """The whole HTML file."""
    data = json.dumps(
        {"runs": [collect(log) for log in logs]}, allow_nan=False, separators=(",", ":")
    )
    text = files("hdet_scale.runs").joinpath("report.html").read_text(encoding="utf-8")
    # A script element ends at its end tag, wherever that stands.
    return text.replace("/*DATA*/", data.replace("</", "<\\/"))


def collect(log: Log) -> dict[str, Any]:
    """What the page needs of one run. A race is a thing of its own: its heats are no rounds, and
    its steps none of the schedule."""
    race, rounds = race_of(log), _rounds_of_run(log)
    groups = [*_groups(rounds)]
    found = {
        "name": log.name,
        "run": plain(log.starts[-1]["run"]) if log.starts else {},
        "finished": log.end is not None,
        "replicas": max((len(line["losses"]) for line in rounds), default=0),
        "factors": _factors(log),
        "race": race,
        "watch": watch_of(log),
        "rounds": len(rounds),
        "group": max(map(len, groups), default=1),
        "steps": _steps(log),
        "round": _rounds(groups, steps_of_race(log)),
        "marks": _marks(rounds),
        "events": _events(log)[-EVENTS:],
        "totals": _totals(log),
    }
    return _short(found)  # type: ignore[no-any-return]


def _rounds_of_run(log: Log) -> list[dict[str, Any]]:
    return [line for line in log.rounds if line.get("phase") not in (PHASE, WATCH)]


def _steps_of_run(log: Log) -> list[dict[str, Any]]:
    race = steps_of_race(log)
    return [line for line in log.steps if line["step"] > race]


def _factors(log: Log) -> list[str]:
    names = [name for line in log.rounds[:1] for name in line["bases"]]
    return names or [name for line in log.steps[:1] for name in line["bases"]]


def _groups(lines: Sequence[dict[str, Any]]) -> Iterable[Sequence[dict[str, Any]]]:
    size = max(1, math.ceil(len(lines) / POINTS))
    return (lines[i : i + size] for i in range(0, len(lines), size))


def _steps(log: Log) -> dict[str, Any]:
    """Sampled steps: the loss, and of each factor the base."""
    groups = [*_groups(_steps_of_run(log))]
    return {
        "x": [g[-1]["step"] for g in groups],
        "loss": [_mean(line["loss"] for line in g) for g in groups],
        "base": {
            name: [g[-1]["bases"].get(name, [None])[-1] for g in groups] for name in _factors(log)
        },
    }


def _rounds(groups: Sequence[Sequence[dict[str, Any]]], start: int) -> dict[str, Any]:
    """Column by column; the first round began after step `start`."""
    if not groups:
        return {"x": []}
    first = groups[0][0]
    replicas = len(first["losses"])
    all_rates = sum(map(len, groups)) * replicas <= STROKES
    return {
        "x": [g[-1]["step"] for g in groups],
        "from": [start, *(g[-1]["step"] for g in groups[:-1])],
        "losses": [
            [_mean(_at(line["losses"], r) for line in g) for g in groups] for r in range(replicas)
        ],
        "base": {n: [g[-1]["bases"].get(n) for g in groups] for n in first["bases"]},
        "low": {n: [min(min(_of(line, n)) for line in g) for g in groups] for n in first["values"]},
        "high": {
            n: [max(max(_of(line, n)) for line in g) for g in groups] for n in first["values"]
        },
        "values": {
            n: [[_at(g[-1]["values"].get(n, ()), r) for g in groups] for r in range(replicas)]
            for n in first["values"]
            if all_rates
        },
        "evidence": _evidence(groups),
        "seconds": [_mean(line["seconds"] for line in g) for g in groups],
        "probe": [_mean(line.get("probe_seconds") for line in g) for g in groups],
        "phase": [g[-1].get("phase") or "" for g in groups],
    }


def _evidence(groups: Sequence[Sequence[dict[str, Any]]]) -> dict[str, list[float | None]]:
    """The rule's own evidence where it gives one, and its velocity elsewhere."""
    lines = [line for g in groups for line in g]
    named = sorted({name for line in lines for name in line.get("evidence") or {}})
    found = {
        name: [_mean((line.get("evidence") or {}).get(name) for line in g) for g in groups]
        for name in named
    }
    moving = sorted({name for line in lines for name in line.get("velocities") or {}})
    for name in moving if not named else ():
        values = [_mean(line["velocities"].get(name) for line in g) for g in groups]
        found[f"velocity of {name}"] = values
    return found


def _marks(rounds: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """[step, verdict] of every round whose rule said something."""
    return [[line["step"], line["verdict"]] for line in rounds if line.get("verdict")]


def _events(log: Log) -> list[dict[str, Any]]:
    """Quarantines, verdicts of a race and its watch, changes of phase, resumes, clamps and other
    messages, by step."""
    found = [
        {"step": line["step"], "event": "resume", "text": f"resumed at step {line['step']}"}
        for line in log.starts
        if line["kind"] == "resume"
    ]
    phase = ""
    for line in log.rounds:
        if line["quarantined"]:
            who = ", ".join(map(str, line["quarantined"]))
            text = f"replica {who} left out of the mean: a parameter or a loss was not finite"
            found.append({"step": line["step"], "event": "quarantine", "text": text})
        now = line.get("phase") or ""
        if now in (PHASE, WATCH):
            if line["verdict"]:
                found.append({"step": line["step"], "event": now, "text": line["verdict"]})
        elif now != phase:
            text = f"{phase or 'start'} \u2192 {now or 'none'}"
            found.append({"step": line["step"], "event": "phase", "text": text})
            phase = now
    for line in log.events:
        if line["text"].startswith(("race, step", "watch, step")):
            continue  # the verdict that its round has
        clamp = line["event"] == "info" and "below the floor" in line["text"]
        name = "clamp" if clamp else line["event"]
        found.append({"step": line["step"], "event": name, "text": line["text"]})
    return sorted(found, key=lambda e: e["step"])


def _totals(log: Log) -> dict[str, Any]:
    """The numbers of the table at the top, of all lines."""
    clock = [line["time"] for line in (*log.steps, *log.rounds)]
    spent = math.fsum(line["seconds"] or 0 for line in log.rounds)
    # A rule may explore at the beginning only: the last loss is the last of either.
    rounds, steps = _rounds_of_run(log), _steps_of_run(log)
    late = rounds and (not steps or rounds[-1]["step"] >= 0.8 * steps[-1]["step"])
    shown = [_mean(x["losses"]) for x in rounds] if late else [x["loss"] for x in steps]
    last = shown[-max(1, len(shown) // 20) :]
    lines = log.rounds or log.steps
    return {
        "steps": max((line["step"] for line in (*log.steps, *log.rounds)), default=0),
        "loss": _mean(last),
        "seconds": max(clock) - min(clock) if clock else 0,
        "converge": spent,
        "bytes": lines[-1].get("wire_bytes") if lines else None,
        "speed": _median(line.get("tokens_per_second") for line in log.steps),
        "quarantined": sum(len(line["quarantined"]) for line in log.rounds),
        "resumes": sum(line["kind"] == "resume" for line in log.starts),
    }


def _of(line: dict[str, Any], name: str) -> list[float]:
    return [v for v in line["values"].get(name, ()) if v is not None] or [math.nan]


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _mean(values: Iterable[float | None]) -> float | None:
    heard = [v for v in values if v is not None]
    return math.fsum(heard) / len(heard) if heard else None


def _median(values: Iterable[float | None]) -> float | None:
    heard = [v for v in values if v is not None]
    return statistics.median(heard) if heard else None


def _short(value: Any) -> Any:
    """Six digits are more than a screen shows."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list) else value


# -- tables -------------------------------------------------------------------------------------


def write_tables(logs: Sequence[Log], folder: Path) -> list[Path]:
    """Every round and every step of every run, unthinned: rounds.csv and steps.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    rounds = [
        {"run": log.name, **_flat({k: v for k, v in line.items() if k != "kind"})}
        for log in logs
        for line in log.rounds
    ]
    steps = [
        {"run": log.name, "step": i + 1, **dict(zip(bases, row, strict=True))}
        for log in logs
        for bases in [log.bases()]
        for i, row in enumerate(zip(*bases.values(), strict=True))
    ]
    written = []
    for name, rows in (("rounds.csv", rounds), ("steps.csv", steps)):
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with open(folder / name, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(rows)
        written.append(folder / name)
    return written


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """One cell for each number: {"losses": [1, 2]} as losses.0 and losses.1."""
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    else:
        return {key: value}
    return {
        k: v for name, inner in pairs for k, v in _flat(inner, f"{key}.{name}".lstrip(".")).items()
    }


# -- the command --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; the exit code."""
    parser = argparse.ArgumentParser(
        prog="hdet report",
        description="One page, without a network, that shows what the replicas of a run found.",
        epilog="example: hdet report runs/first runs/second -o report.html",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="every round and step as tables")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    options = parser.parse_args(argv)
    try:
        logs = [read(run) for run in options.runs]
        for log in logs:
            if not (log.steps or log.rounds):
                raise ValueError(f"{log.path} has no step yet: wait for the run's first lines")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page(logs), encoding="utf-8")
        tables = write_tables(logs, options.csv) if options.csv else []
    except (OSError, ValueError) as error:
        print(f"hdet report: {error}", file=sys.stderr)
        return 1
    written = [options.out, *tables]
    if options.json:
        print(json.dumps({"written": [str(p) for p in written], "runs": [g.name for g in logs]}))
    else:
        print("\n".join(f"{p}   ({p.stat().st_size / 1e6:.1f} MB)" for p in written))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
