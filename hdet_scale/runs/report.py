"""`hdet report`: one page about one or several runs, which a browser opens without a network.

    hdet report runs/first runs/second -o report.html

Everything is in the file: the numbers as JSON, and the scripts of page/ that draw them on canvases.
If there are more rounds than a screen has pixels, they are thinned first: a point is then the mean
of a few rounds, and of rates the lowest and the highest; quarantines and verdicts are all kept.
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

from hdet_scale.runs.log import Log, plain, read
from hdet_scale.runs.search_log import search_of, steps_of_search, watch_of

POINTS = 2000
"""Rounds, and sampled steps, that a figure shows; if there are more, groups are formed."""
STROKES = 4000
"""Up to so many values every replica's rate is drawn; beyond that, the lowest and the highest."""
EVENTS = 500
"""The table shows the last ones."""
DIGITS = 6
"""Significant digits of the page's numbers: more than a screen shows."""
FIGURES = ("loss", "schedule", "fan", "search", "watch", "evidence", "replicas", "cost")
"""In the order of the page."""
SCRIPTS = ("palette", "numbers", "plot", "series", *(f"figures/{name}" for name in FIGURES), "page")
"""Files of page/, in the order in which a browser runs them."""
EXPLORING, HOLD = "exploring", "hold"
"""Phases of a rule that is fed by a probe: it explores in some rounds, then holds what it has."""


def page(logs: Sequence[Log]) -> str:
    """The HTML file for these runs, as text."""
    data = json.dumps(
        {"runs": [collect(log) for log in logs]}, allow_nan=False, separators=(",", ":")
    )
    text = _part("page.html").replace("/*STYLE*/", _part("page.css"))
    text = text.replace("/*SCRIPT*/", "\n".join(_part(f"{name}.js") for name in SCRIPTS))
    # A script element ends at its end tag, wherever that stands.
    return text.replace("/*DATA*/", data.replace("</", "<\\/"))


def _part(name: str) -> str:
    return files("hdet_scale.runs").joinpath("page", name).read_text(encoding="utf-8")


def collect(log: Log) -> dict[str, Any]:
    """What the page needs of one run, as JSON has it. The steps of a search are not part of the
    run's schedule."""
    groups = [*_groups(log.rounds)]
    run = {
        "name": log.name,
        "run": plain(log.starts[-1]["run"]) if log.starts else {},
        "finished": log.end is not None,
        "replicas": max((len(line["losses"]) for line in log.rounds), default=0),
        "factors": _factors(log),
        "search": search_of(log),
        "watch": watch_of(log),
        "rounds": len(log.rounds),
        "group": max(map(len, groups), default=1),
        "steps": _steps(log),
        "round": _rounds(groups, steps_of_search(log)),
        "verdicts": [
            [line["step"], line["probe"]["verdict"]]
            for line in log.rounds
            if line["probe"] and line["probe"]["verdict"]
        ],
        "events": _events(log)[-EVENTS:],
        "totals": _totals(log),
    }
    return _short(run)  # type: ignore[no-any-return]


def _steps_of_run(log: Log) -> list[dict[str, Any]]:
    """The sampled steps after the search."""
    searched = steps_of_search(log)
    return [line for line in log.steps if line["step"] > searched]


def _factors(log: Log) -> list[str]:
    lines = [*(x["bases"] for x in log.rounds[:1]), *(x["rates"] for x in log.trials[:1])]
    lines += [x["bases"] for x in log.steps[:1]]
    return [*lines[0]] if lines else []


def _groups(lines: Sequence[dict[str, Any]]) -> Iterable[Sequence[dict[str, Any]]]:
    size = max(1, math.ceil(len(lines) / POINTS))
    return (lines[i : i + size] for i in range(0, len(lines), size))


def _steps(log: Log) -> dict[str, Any]:
    """The loss and each factor's base at the sampled steps."""
    groups = [*_groups(_steps_of_run(log))]
    return {
        "x": [g[-1]["step"] for g in groups],
        "loss": [_mean(line["loss"] for line in g) for g in groups],
        "base": {
            name: [g[-1]["bases"].get(name, [None])[-1] for g in groups] for name in _factors(log)
        },
    }


def _rounds(groups: Sequence[Sequence[dict[str, Any]]], start: int) -> dict[str, Any]:
    """The rounds, column by column; the first began after step `start`."""
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
        "probe": [_mean(line["probe"]["seconds"] for line in g if line["probe"]) for g in groups],
        "phase": _phases(groups),
    }


def _phases(groups: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """The phase of each group; empty where the run's rule is not fed by a probe."""
    if not any(line["probe"] for g in groups for line in g):
        return [""] * len(groups)
    return [EXPLORING if g[-1]["probe"] else HOLD for g in groups]


def _evidence(groups: Sequence[Sequence[dict[str, Any]]]) -> dict[str, list[float | None]]:
    """The evidence of the probe where the rule is fed by one, and the rule's velocity elsewhere."""
    shown = [[line["probe"]["evidence"] for line in g if line["probe"]] for g in groups]
    names = sorted({name for g in shown for evidence in g for name in evidence})
    if names:
        return {n: [_mean(evidence.get(n) for evidence in g) for g in shown] for n in names}
    moving = sorted({name for g in groups for line in g for name in line["velocities"]})
    return {
        f"velocity of {n}": [_mean(line["velocities"].get(n) for line in g) for g in groups]
        for n in moving
    }


def _events(log: Log) -> list[dict[str, Any]]:
    """Resumes, quarantines, changes of phase, verdicts of a search and its watch, clamps and other
    messages, by step."""
    events = [
        _event(line, "resume", f"resumed at step {line['step']}")
        for line in log.starts
        if line["kind"] == "resume"
    ]
    for line in log.rounds:
        if line["quarantined"]:
            who = ", ".join(map(str, line["quarantined"]))
            text = f"replica {who} left out of the mean: a parameter or a loss was not finite"
            events.append(_event(line, "quarantine", text))
    for line in log.events:
        # What the library logs of each trial and evaluation is in their lines too.
        if not line["text"].startswith(("search, step ", "watch, step ")):
            clamp = line["event"] == "info" and "below the floor" in line["text"]
            events.append(_event(line, "clamp" if clamp else line["event"], line["text"]))
    return sorted([*events, *_changes(log), *_decided(log)], key=lambda e: e["step"])


def _event(line: dict[str, Any], event: str, text: str) -> dict[str, Any]:
    return {"step": line["step"], "event": event, "text": text}


def _decided(log: Log) -> list[dict[str, Any]]:
    """Verdicts of stages, searches and evaluations. A search that was completed has the verdict of
    its last stage, which is there once."""
    stages = [_event(line, "search", line["verdict"]) for line in log.trials if line["verdict"]]
    ends = [_event(line, "search", line["verdict"]) for line in log.searches if line["verdict"]]
    watch = [_event(line, "watch", line["verdict"]) for line in log.evaluations if line["verdict"]]
    return [*stages, *(end for end in ends if end not in stages), *watch]


def _changes(log: Log) -> list[dict[str, Any]]:
    """Where a rule that is fed by a probe begins to explore, and where it begins to hold."""
    probed = [line for line in log.rounds if line["probe"]]
    if not probed:
        return []
    last = probed[-1]
    # Nothing is averaged any more once the rule holds: no round may follow, only steps.
    interval = last["step"] // (last["round"] + 1)
    reached = max(line["step"] for line in (*log.rounds, *log.steps))
    changes = [_event(probed[0], "phase", f"start \u2192 {EXPLORING}")]
    if reached >= last["step"] + interval:
        changes.append(_event(last, "phase", f"{EXPLORING} \u2192 {HOLD}"))
    return changes


def _totals(log: Log) -> dict[str, Any]:
    """The numbers of the table at the top."""
    lines = [*log.steps, *log.records]
    clock = [line["time"] for line in lines]
    spent = math.fsum(line["seconds"] or 0 for line in log.rounds)
    # A rule may explore at the beginning only: the last loss is the last of either.
    rounds, steps = log.rounds, _steps_of_run(log)
    late = rounds and (not steps or rounds[-1]["step"] >= 0.8 * steps[-1]["step"])
    shown = [_mean(x["losses"]) for x in rounds] if late else [x["loss"] for x in steps]
    last = shown[-max(1, len(shown) // 20) :]
    return {
        "steps": max((line["step"] for line in lines), default=0),
        "loss": _mean(last),
        "seconds": max(clock) - min(clock) if clock else 0,
        "converge": spent,
        "bytes": rounds[-1]["wire_bytes"] if rounds else None,
        "speed": _median(line.get("tokens_per_second") for line in log.steps),
        "quarantined": sum(len(line["quarantined"]) for line in log.rounds),
        "resumes": sum(line["kind"] == "resume" for line in log.starts),
    }


def _of(line: dict[str, Any], name: str) -> list[float]:
    return [v for v in line["values"].get(name, ()) if v is not None] or [math.nan]


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _short(value: Any) -> Any:
    """The value with numbers of DIGITS digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list) else value


# -- tables -------------------------------------------------------------------------------------


def write_tables(logs: Sequence[Log], folder: Path) -> list[Path]:
    """Write every step and every record of every run, unthinned, as CSV files.

    Returns:
        rounds.csv and steps.csv; trials.csv, searches.csv and evaluations.csv if there are some.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps = [
        {"run": log.name, "step": i + 1, **dict(zip(bases, row, strict=True))}
        for log in logs
        for bases in [log.bases()]
        for i, row in enumerate(zip(*bases.values(), strict=True))
    ]
    tables = {"rounds": _rows(logs, "rounds"), "steps": steps}
    tables |= {k: r for k in ("trials", "searches", "evaluations") if (r := _rows(logs, k))}
    written = []
    for name, rows in tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        written.append(folder / f"{name}.csv")
        with open(written[-1], "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(rows)
    return written


def _rows(logs: Sequence[Log], name: str) -> list[dict[str, Any]]:
    """The lines in one of the lists of each log."""
    return [
        {"run": log.name, **_flat({k: v for k, v in line.items() if k != "kind"})}
        for log in logs
        for line in getattr(log, name)
    ]


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """One cell for each value: {"losses": [1, 2]} becomes losses.0 and losses.1."""
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
        description="One page, without a network, that shows what the replicas of a run did.",
        epilog="example: hdet report runs/first runs/second -o report.html",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument(
        "--csv", type=Path, metavar="FOLDER", help="every step and record as tables"
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    options = parser.parse_args(argv)
    try:
        logs = [read(run) for run in options.runs]
        for log in logs:
            if not (log.steps or log.records):
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
