"""Performance profiles, on rows made by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lr.profile import (
    TAUS,
    Column,
    calibrate,
    calibrate_without_own_task,
    complete,
    excess,
    figure,
    initial_losses,
    mean_losses,
    over_best,
    profiles,
)
from benchmarks.lr.tasks import TASKS

FIRST = {"a": 10.0, "b": 10.0}


def row(task: str, method: str, loss: float, seed: int = 0, start: float = 0.0) -> dict[str, Any]:
    place = {"task": task, "steps": 800, "seed": seed, "method": method, "start": start}
    return {**place, "loss": loss, "rate": start}


def of(*rows: dict[str, Any]) -> dict[Column, list[float]]:
    """Excesses of each method on all tasks of the rows."""
    losses = mean_losses(rows, 800, {row["seed"] for row in rows})
    tasks = sorted({row["task"] for row in rows})
    return over_best(losses, FIRST, tasks)


def test_the_profile_is_the_share_of_tasks_within_tau_of_the_best() -> None:
    found = profiles(of(
        row("a", "x", 2.0), row("b", "x", 3.0),  # best on a, 50 % above on b
        row("a", "y", 2.5), row("b", "y", 2.0),  # 25 % above on a, best on b
        row("a", "z", 4.5), row("b", "z", math.nan),
    ))  # fmt: skip
    x, y, z = (found[name, 0.0] for name in "xyz")
    assert x.taus == TAUS
    assert (TAUS[0], TAUS[-1]) == (0.0, 1.0)
    shares = dict(zip(TAUS, x.shares, strict=True))
    assert (shares[0.0], shares[0.495], shares[0.5], shares[1.0]) == (0.5, 0.5, 1.0, 1.0)
    assert x.score == pytest.approx((1 + 0.5) / 2)
    assert y.score == pytest.approx((0.75 + 1) / 2)
    assert (set(z.shares), z.score) == ({0.0}, 0.0)


def test_the_score_is_the_area_under_the_shares() -> None:
    rows = (("x", "a", 1.0), ("x", "b", 1.3), ("y", "a", 1.7), ("y", "b", 1.0))
    found = profiles(of(*(row(task, method, loss) for method, task, loss in rows)))
    for profile in found.values():
        assert profile.score == pytest.approx(sum(profile.shares) / len(profile.shares), abs=0.01)


def test_losses_near_zero_are_compared_on_an_absolute_scale() -> None:
    assert excess(0.002, 0.001, first=0.001) == pytest.approx(1.0)
    assert excess(0.002, 0.001, first=1.0) == pytest.approx(0.02)
    assert excess(0.0, 0.0, first=1.0) == 0
    assert excess(math.inf, 0.0, first=1.0) == math.inf


def test_a_mean_is_of_all_seeds_and_infinite_if_one_diverged() -> None:
    rows = [row("a", "x", 1.0, 0), row("a", "x", 3.0, 1), row("a", "y", 1.0, 0)]
    rows += [row("a", "z", 1.0, 0), row("a", "z", math.inf, 1), row("a", "x", 99.0, 2)]
    losses = mean_losses(rows, 800, (0, 1))
    assert losses["x", 0.0] == {"a": 2.0}
    assert losses["y", 0.0] == {}, "a seed was not run"
    assert losses["z", 0.0] == {"a": math.inf}
    assert mean_losses(rows, 2000, (0, 1)) == {}


def test_a_method_that_lacks_a_task_has_no_profile_but_counts_for_the_best() -> None:
    rows = [row("a", "x", 2.0), row("b", "x", 2.0), row("a", "grid", 1.0, start=0.1)]
    losses = mean_losses(rows, 800, (0,))
    assert complete(losses, ["a", "b"]) == [("x", 0.0)]
    assert over_best(losses, FIRST, ["a", "b"]) == {("x", 0.0): [1.0, 0.0]}


def test_the_calibrated_rate_is_the_one_with_the_highest_score_over_all_tasks() -> None:
    """The best rate of each task is another one; that in the middle has the highest score."""
    losses = {"a": (1.0, 1.1, 3.0), "b": (3.0, 1.1, 1.0)}
    found = of(*(
        row(task, "adamw grid", loss, start=rate)
        for task, drawn in losses.items()
        for rate, loss in zip((0.1, 0.2, 0.4), drawn, strict=True)
    ))  # fmt: skip
    assert calibrate(found) == {"adamw": 0.2}
    # With the best rate of the other task, the loss of each is three times the best.
    assert calibrate_without_own_task(found) == {"adamw": 0.0}


def test_the_initial_loss_is_that_of_the_weights_before_training() -> None:
    found = initial_losses([TASKS["logit"]], (0, 1))
    assert found["logit"] > math.log(2)


def test_the_figure_is_the_same_for_the_same_profiles(tmp_path: Path) -> None:
    profile = profiles(of(row("a", "x", 1.0), row("b", "x", 1.0)))["x", 0.0]
    path, drawn = tmp_path / "profile.svg", []
    for _ in range(2):
        figure({"auto, from 1 x": profile, "x": profile}, "2 tasks", path)
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
