"""Trials and runs of many lengths: rows that are measured once, and what is read off them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.lr import bridge
from benchmarks.lr.bridge import Bridge, law, long_table, minimum


def test_a_curve_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    Bridge(path).run("logit", 8, 4, 0)
    monkeypatch.setattr(bridge, "losses_of", lambda *_: pytest.fail("measured again"))
    again = Bridge(path)
    again.run("logit", 8, 4, 0)
    assert len(path.read_text().splitlines()) == 1
    assert [len(row["losses"]) for row in again.curves.values()] == [len(bridge.OCTAVES)]


def test_minima_are_in_octaves() -> None:
    rates = [0.01 * 2.0**k for k in range(9)]
    assert minimum(rates, [(k - 4.0) ** 2 for k in range(9)]) == pytest.approx(math.log2(0.16))
    broken = [(k - 4.0) ** 2 for k in range(6)] + [math.nan, math.inf, math.nan]
    assert minimum(rates, broken) == pytest.approx(math.log2(0.16), abs=0.5)


def test_above_is_the_trial_over_the_run_of_the_same_task(tmp_path: Path) -> None:
    found = Bridge(tmp_path / "none.jsonl")
    rates = [2.0**k for k in range(-9, 0)]
    for steps, at in ((20, 5), (8000, 3)):
        losses = [1 + (k - at) ** 2.0 for k in range(9)]
        place = {"task": "duels-fresh", "parts": 1, "steps": steps, "seed": 0}
        found._keep(place | {"rates": rates, "losses": losses})
    assert found.above("duels-fresh", 1, 20, 8000) == pytest.approx(2)
    assert found.above("duels-fresh", 8, 20, 8000) is None
    assert bridge.excess(found, "duels-fresh", 1, 20, 8000) > 0
    assert "law, sgd" in long_table(found, ["duels-fresh"], 1, 8000)


def test_the_law_is_that_of_the_task_s_optimizer() -> None:
    assert law("gpt", 8, 800, 800) == pytest.approx(-1)
    assert law("duels", 8, 800, 800) == pytest.approx(-2)
