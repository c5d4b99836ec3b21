"""Tuned numbers are changed in every module that holds them, one at a time, and put back."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from benchmarks.lr import sensitivity
from benchmarks.lr.rows import Rows
from benchmarks.lr.sensitivity import AS_IT_IS, SKIPPED, Change, changes, numbers, table
from benchmarks.lr.simulated import REPLICAS
from benchmarks.lr.tasks import DEVELOPED
from hdet_scale.search import constants, decision, law, trials, watch
from hdet_scale.search.decision import RateSearch

STEPS = sensitivity.STEPS


def held() -> dict[tuple[str, str], float]:
    """Every number in every module of the search, by module and name."""
    search = {k: m for k, m in sys.modules.items() if k.startswith("hdet_scale.search.")}
    return {(k, n): vars(m)[n] for k, m in search.items() for n in numbers() if n in vars(m)}


def test_every_number_is_changed_wherever_it_is_held() -> None:
    before, shares = held(), dict(trials.SHARES)
    assert {name for _, name in before} == set(numbers())
    for change in changes(numbers()):
        with change.made():
            for (module, name), value in held().items():
                wanted = before[module, name] * (change.factor if name == change.name else 1)
                assert value == wanted, (module, name)
            first, second = constants.FIRST_SHARE, constants.SECOND_SHARE
            assert {"first": first, "second": second} == trials.SHARES
    assert held() == before
    assert shares == trials.SHARES
    for module, name in ((decision, "STEP"), (law, "TURN"), (watch, "LOST"), (trials, "TEAMS")):
        assert (module.__name__, name) in before, "imported under its name, so that it is found"


def test_what_is_skipped_would_change_no_run() -> None:
    assert {name for name, _ in SKIPPED} <= set(numbers())
    assert not [c for c in changes(numbers()) if (c.name, c.factor) in SKIPPED]

    def lengths() -> list[int]:
        rule = RateSearch(replicas=REPLICAS, total_steps=STEPS, adaptive=True)
        return [rule.trial.steps, rule.longest]

    before = lengths()
    for name, factor in SKIPPED:
        if name != "GROWTH":
            with Change.of(name, factor).made():
                assert lengths() == before
    assert Change.of("GROWTH", 0.5).value < 1


def test_tasks_are_developed_ones_of_both_kinds() -> None:
    assert len(sensitivity.TASKS) == len(set(sensitivity.TASKS)) == 10
    kinds = [DEVELOPED[name].optimizer for name in sensitivity.TASKS]
    assert kinds.count("adamw") == kinds.count("sgd") == 5


def test_what_was_run_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss is told that depends on what the rule holds at the time of the run."""
    ran: list[float] = []

    def told(task: object, seed: int, steps: int, at: float) -> dict[str, object]:
        ran.append(trials.STEP)
        return {"loss": trials.STEP, "rate": at, "cost": 1.0}

    monkeypatch.setattr(sensitivity, "auto", told)
    given = ["--only", "STEP", "--tasks", "logit,vae", "--rows", str(tmp_path / "rows.jsonl")]
    sensitivity.main(given)
    each, step = 2 * len(sensitivity.SEEDS) * len(sensitivity.STARTS), constants.STEP
    assert ran == [step] * each + [step / 2] * each + [2 * step] * each
    printed = capsys.readouterr().out
    sensitivity.main([*given, "--table"])
    assert printed.endswith(capsys.readouterr().out)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines[:-2]))
    sensitivity.main(given)
    assert ran[3 * each :] == [2 * step] * 2
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3 * each
    with pytest.raises(SystemExit, match="no number called STEPP"):
        sensitivity.main(["--only", "STEPP"])


def test_the_table_has_changes_in_points(tmp_path: Path) -> None:
    """Two tasks and two seeds of a best loss of 1, with the excess of each method in % told."""
    rows = Rows(tmp_path / "rows.jsonl")
    lost = {
        AS_IT_IS: {0.1: (4, 6), 1.0: (1, 3), 10.0: (4.9, 90)},
        f"LOST = {2 * constants.LOST:g}": {0.1: (6, 6), 1.0: (1, 9), 10.0: (4.9, math.inf)},
    }
    for i, name in enumerate(("logit", "vae")):
        for seed in (0, 1):
            best = {"loss": 1.0, "rate": 0.1}
            rows.run(DEVELOPED[name], STEPS, seed, "grid", 0.1, lambda best=best: best)  # type: ignore[misc]
            for method, starts in lost.items():
                for start, excesses in starts.items():
                    row = {"loss": 1 + excesses[i] / 100, "rate": 0.1, "cost": 1.0}
                    rows.run(DEVELOPED[name], STEPS, seed, method, start, lambda row=row: row)  # type: ignore[misc]
    assert table(rows, ["LOST", "GROWTH"]).splitlines()[2:] == [
        f"| {AS_IT_IS} | 1 | 2.0 % | 3.0 % | 50 % |",
        f"| LOST = {2 * constants.LOST:g} | 2 | +3.0 | +6.0 | -25 |",
        f"| GROWTH = {constants.GROWTH / 2:g} | 0.5 | not run: {SKIPPED['GROWTH', 0.5]} | | |",
    ]
