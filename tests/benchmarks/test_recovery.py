"""The arbiter's rows and tables: resumed, paired by seed, and of what was run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.lr.recovery import Arbiter
from benchmarks.lr.report import table
from benchmarks.lr.rows import GONE, Rows
from benchmarks.lr.tasks import TASKS


def test_the_arbiter_resumes_and_pairs_seeds(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arbiter = Arbiter(path)
    task, calls = TASKS["over"], []

    def row(loss: float, rate: float) -> Any:
        return lambda: calls.append(loss) or {"loss": loss, "rate": rate, "cost": 0.0}

    for seed, shift in ((0, 0.0), (1, 1.0)):
        for rate, loss in ((0.1, 3.0), (0.2, 2.0), (0.4, math.nan)):
            arbiter.run(task, 800, seed, "grid", rate, row(loss + shift, rate))
        arbiter.run(task, 800, seed, "auto", 0.1, row(2.2 + 1.1 * shift, 0.1))
    again = Arbiter(path)
    again.run(task, 800, 0, "auto", 0.1, row(9.0, 9.0))
    assert 9.0 not in calls
    assert again.best("over", 800) == (0.2, {0: 2.0, 1: 3.0})
    excess = again.excesses()["over", 800, "auto", 0.1]
    assert [round(e, 6) for e, _ in excess] == [10.0, 10.0]
    assert len([json.loads(x) for x in path.read_text().splitlines()]) == 8
    assert "auto from 0.1 x: mean +10.0 %" in table(again)


def row(loss: float, rate: float) -> dict[str, Any]:
    return {"loss": loss, "rate": rate, "cost": 0.0}


def test_rows_of_what_no_longer_exists_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    place = {"task": "gpt", "steps": 800, "seed": 0, "start": 0.1, "loss": 2.0, "rate": 0.1}
    made = [{**place, "method": m} for m in ("grid", *GONE, "auto")]
    path.write_text("".join(json.dumps(x) + "\n" for x in made))
    assert [r["method"] for r in Rows(path).rows] == ["grid", "auto"]
    assert len(path.read_text().splitlines()) == len(made), "the file is left as it is"


def test_rows_of_further_files_are_read_and_not_run_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    Rows(second).run(TASKS["gpt"], 800, 0, "prodigy", 0.0, lambda: row(2.0, 0.1))
    rows = Rows(first, second)
    rows.run(TASKS["gpt"], 800, 0, "prodigy", 0.0, lambda: row(9.0, 0.1))
    rows.run(TASKS["gpt"], 800, 1, "prodigy", 0.0, lambda: row(3.0, 0.1))
    assert [r["loss"] for r in rows.rows] == [2.0, 3.0]
    assert [len(path.read_text().splitlines()) for path in (first, second)] == [1, 1]


def test_there_is_no_excess_without_a_grid(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.run(TASKS["gpt"], 800, 0, "prodigy", 0.0, lambda: row(2.0, 0.1))
    assert rows.excesses() == {}
