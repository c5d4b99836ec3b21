"""The arbiter's rows and tables: resumed, paired by seed, and of what was run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.lr.recovery import ROWS, Arbiter
from benchmarks.lr.report import documents, markdown, ratios, readme, summary, table
from benchmarks.lr.rows import GONE, Rows
from benchmarks.lr.tasks import FIRST, TASKS


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


def test_tables_are_of_what_was_run(tmp_path: Path) -> None:
    """Two tasks, two seeds: the excess over the best of the grid with the same seed, its mean and
    standard error, stars, and no column of what was not run."""
    rows = Rows(tmp_path / "rows.jsonl")
    for name in ("gpt", "distill"):
        for seed, best in ((0, 2.0), (1, 4.0)):
            for rate, loss in ((0.1, best), (0.2, 1.5 * best)):
                rows.run(TASKS[name], 800, seed, "grid", rate, lambda x=loss, r=rate: row(x, r))
            loss = best * (1.01 + 0.02 * seed)
            rows.run(TASKS[name], 800, seed, "auto", 0.1, lambda x=loss: row(x, 0.2))
    columns = [(800, "auto", 0.1), (800, "auto", 10.0)]
    lines = markdown(rows, columns, TASKS, errors=True).splitlines()
    assert lines[0] == "| 800 steps | auto, from 0.1 x |"
    assert lines[2:4] == ["| gpt | +2.0 ± 1.0 |", "| distill * | +2.0 ± 1.0 |"]
    assert len(lines) == 4, "neither a median nor a mean of tasks that were not all run"
    assert "| gpt | +2.0 |" in markdown(rows, columns, TASKS, errors=False)
    assert markdown(rows, columns[1:], TASKS, errors=True) == ""
    shown = ratios(rows, columns).splitlines()
    assert shown[0] == "| LR over the best | 800: auto, from 0.1 x | 800: auto, from 10 x |"
    assert "| gpt | 2 (2 to 2) |  |" in shown


def test_a_median_is_of_all_tasks_and_a_mean_of_all_of_its_own() -> None:
    of_all = dict.fromkeys(TASKS, 2.0) | {"gpt": 9.0}
    assert summary(of_all)["median of all"] == [2.0]
    assert summary(of_all)["mean of the first seven"] == [3.0]
    first = {task: of_all[task] for task in FIRST}
    assert summary(first) == {
        "median of all": [],
        "mean of the first seven": [3.0],
        "mean of those with *": [],
    }


def row(loss: float, rate: float) -> dict[str, Any]:
    return {"loss": loss, "rate": rate, "cost": 0.0}


def test_rows_of_what_no_longer_exists_are_not_read(tmp_path: Path) -> None:
    """And rows of rule="auto" from before they had a cost have another name today."""
    path = tmp_path / "rows.jsonl"
    place = {"task": "gpt", "steps": 800, "seed": 0, "start": 0.1, "loss": 2.0, "rate": 0.1}
    made = [{**place, "method": m} for m in ("grid", *GONE, "auto", "auto inside")]
    made.append({**place, "method": "auto", "cost": 0.1, "seed": 1})
    path.write_text("".join(json.dumps(x) + "\n" for x in made))
    rows = Rows(path)
    shown = [(r["method"], r["seed"]) for r in rows.rows]
    assert shown == [("grid", 0), ("auto on top", 0), ("auto", 0), ("auto", 1)]
    assert len(path.read_text().splitlines()) == len(made), "the file is left as it is"
    rows.run(TASKS["gpt"], 800, 0, "auto", 0.1, lambda: row(3.0, 0.2))
    assert len(rows.rows) == 4, "what was run under its former name is not run again"


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


def test_the_tables_of_the_documents_are_made_from_the_rows_that_are_kept() -> None:
    rows = Rows(ROWS)
    shown = {row["method"] for row in rows.rows}
    assert {"grid", "slope", "paper 0.1"} <= shown
    columns = [readme(800, 2000), *documents(800)[1:], *documents(2000)[1:]]
    tables = [markdown(rows, part, TASKS, errors=True) for part in columns]
    assert all(tables)
    assert not any(name in text for name in GONE for text in tables)
