"""docs/results.md, from rows made by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lr import results
from benchmarks.lr.calibrated import RATES, RECIPES, grid_of
from benchmarks.lr.results import is_harmed, label, over_start, table_of_auto, table_of_cost
from benchmarks.lr.rows import Rows
from benchmarks.lr.tasks import TASKS

SHOWN = ("logit", "distill")


def filled(path: Path) -> Rows:
    """Two tasks, two seeds. The best of the grid is 0.1, with a loss of 2 and 4."""
    rows = Rows(path)

    def add(task: str, seed: int, method: str, start: float, loss: float, **more: Any) -> None:
        found = {"loss": loss, "rate": start, "extra": 0.0, **more}
        rows.run(TASKS[task], 800, seed, method, start, lambda: found)

    for task in SHOWN:
        for seed, best in ((0, 2.0), (1, 4.0)):
            add(task, seed, "grid", 0.1, best)
            add(task, seed, "grid", 0.2, 1.5 * best)
            add(task, seed, "fixed", 0.1, 1.2 * best)
            add(task, seed, "fixed", 10.0, math.nan)
            add(
                task, seed, "auto", 0.1, best * (1.01 + 0.02 * seed), cost=0.1, head_start=seed == 0
            )
            add(task, seed, "auto", 1.0, best * (1.10 + 0.02 * seed), cost=0.2, verdict="")
            add(task, seed, "auto", 10.0, 1.3 * best if task == "logit" else math.nan, cost=0.3)
            add(task, seed, "prodigy", 0.0, 1.5 * best)
            for name in RECIPES:
                for rate in RATES:
                    add(task, seed, grid_of(name), rate, best * (2 - (rate == 2.0**-6)))
    return rows


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return filled(tmp_path / "rows.jsonl")


def test_the_table_of_auto_has_excesses_and_a_summary(rows: Rows) -> None:
    lines = table_of_auto(rows, 800).splitlines()
    assert lines[0] == "| 800 steps | from 1/10 | from 1 x | from 10 x |"
    assert lines[2] == "| logit | +2.0 ± 1.0 | +11.0 ± 1.0 | +30.0 ± 0.0 |"
    assert lines[3] == "| distill * | +2.0 ± 1.0 | +11.0 ± 1.0 | diverges |"
    assert lines[4] == "| **median** | +2.0 | +11.0 | diverges |"
    assert lines[5] == "| **within 5 %** | 2 of 2 (100 %) | 0 of 2 (0 %) | 0 of 2 (0 %) |"
    assert lines[6] == "| **worst** | +2.0 | +11.0 | diverges |"
    assert lines[7] == "| **worse than the start** | 0 | 2 | 0 |"
    assert lines[8] == "| **the same, absolute scale** | 0 | 2 | 0 |"
    assert table_of_auto(rows, 2000) == results.NOTHING


def test_a_run_is_compared_with_the_rate_that_it_was_given(rows: Rows) -> None:
    """From 1 x that is the best of the grid; where it diverged, nothing can be worse."""
    from_tenth = over_start(rows, "logit", 800, "auto", 0.1)
    assert from_tenth == pytest.approx([100 * (1.01 / 1.2 - 1), 100 * (1.03 / 1.2 - 1)])
    assert over_start(rows, "logit", 800, "auto", 1.0) == pytest.approx([10.0, 12.0])
    assert over_start(rows, "logit", 800, "auto", 10.0) == []


def test_near_zero_a_difference_is_a_share_of_the_floor(rows: Rows) -> None:
    shares = over_start(rows, "logit", 800, "auto", 1.0, floor=8.0)
    assert shares == pytest.approx([100 * 0.2 / 8.0, 100 * 0.48 / 8.0])
    assert over_start(rows, "logit", 800, "auto", 1.0, floor=1.0) == pytest.approx([10.0, 12.0])


def test_harm_is_more_than_two_percent_and_two_standard_errors() -> None:
    assert is_harmed([3.0, 3.1, 3.2])
    assert not is_harmed([1.0, 1.1, 1.2]), "below 2 %"
    assert not is_harmed([0.0, 8.0]), "4 +- 4"
    assert is_harmed([math.inf, 1.0])
    assert is_harmed([5.0]), "one seed has no standard error"
    assert not is_harmed([])


def test_the_table_of_cost_has_steps_and_shares(rows: Rows) -> None:
    lines = table_of_cost(rows).splitlines()
    assert lines[2] == "| 800 | 1/10 | 4 | 80 | 10.0 % | 10.0 % | 2 of 4 |"
    assert lines[3] == "| 800 | 1 x | 4 | 160 | 20.0 % | 20.0 % |  |", "rows without that key"
    assert {line.count("|") for line in lines} == {8}
    assert len(lines) == 5


def test_methods_are_named() -> None:
    assert label(("adamw grid", 2.0**-6)) == "AdamW, 2^-6 for all tasks"
    assert label(("auto", 0.1)) == "auto, from 1/10"
    assert label(("prodigy", 0.0)) == "Prodigy, own default"
    assert label(("fixed", 0.01)) == "fixed rate, from 1/100"


def test_the_document_is_written_with_its_figure(tmp_path: Path) -> None:
    filled(tmp_path / "rows.jsonl")
    out = tmp_path / "results.md"
    paths = {"--out": out, "--figures": tmp_path, "--rows": tmp_path / "rows.jsonl"}
    results.main([str(x) for pair in paths.items() for x in pair])
    text = out.read_text()
    assert (tmp_path / "lr_profile_800.svg").exists()
    assert "(../benchmarks/results/lr_profile_800.svg)" in text
    assert "2 tasks, 800 steps, seeds 0 and 1." in text
    assert "| AdamW, 2^-6 for all tasks | +0.0 | 2 of 2 (100 %) | +0.0 | 1.000 |" in text
    assert "| Prodigy, own default | +50.0 | 0 of 2 (0 %) | +50.0 | 0.500 |" in text
    assert "2^-7" not in text, "only the rate with the highest score"
    assert "No rows yet" not in text
    widest = max(line.count("|") - 1 for line in text.splitlines() if line.startswith("|"))
    assert widest <= 7


def test_a_task_that_was_not_run_at_all_rates_is_left_out(rows: Rows) -> None:
    assert results.contested(rows, 800) == [*SHOWN]
    rows.rows = [r for r in rows.rows if (r["task"], r["rate"]) != ("distill", RATES[3])]
    assert results.contested(rows, 800) == ["logit"]
    assert results.contested(rows, 2000) == []
