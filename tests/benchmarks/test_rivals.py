"""Optimizers of other libraries on the arbiter's tasks, and DoWG by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.lr import rivals
from benchmarks.lr.dowg import DoWG
from benchmarks.lr.rivals import Contest, further
from benchmarks.lr.simulated import weights
from benchmarks.lr.tasks import TASKS

FURTHER = ("mechanic", "dowg", "dowg cosine", "momo", "momo cosine", "prodigy schedule-free")


def test_two_steps_of_dowg_by_hand() -> None:
    """x_0 = (3, 4), f = |x|^2 / 2, so that the gradient is x: first r = 0.01, then the distance."""
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    optimizer = DoWG([x])
    expected, weighted = 5.0, 0.0
    for r in (0.01, 0.01):  # the first step moves x by 0.01
        weighted += r**2 * expected**2
        expected -= r**2 / math.sqrt(weighted) * expected
        optimizer.zero_grad()
        (x.square().sum() / 2).backward()
        optimizer.step()
        assert float(x.detach().norm()) == pytest.approx(expected, rel=1e-6)
    assert optimizer.param_groups[0]["d"] == pytest.approx(0.01**2 / math.sqrt(weighted), rel=1e-6)


def test_dowgs_distance_grows_with_the_way() -> None:
    x = torch.tensor([1.0], requires_grad=True)
    optimizer = DoWG([x])
    for _ in range(200):
        optimizer.zero_grad()
        ((x - 8) ** 2).sum().backward()
        optimizer.step()
    assert float(optimizer.squared) ** 0.5 > 6
    assert float(x.detach()) == pytest.approx(8, abs=0.5)


@pytest.mark.parametrize("name", ["denoise", "logit"])
def test_further_optimizers_learn(name: str) -> None:
    """One task of AdamW, one of SGD."""
    task = TASKS[name]
    before = float(task.validate(weights(task, 0))[0])
    found = {method: do() for method, do in further(task, 0, 200)}
    assert tuple(found) == FURTHER
    for method, row in found.items():
        assert row["loss"] < 0.9 * before, method
        assert row["rate"] > 0, method


def test_a_contest_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "RATES", (0.01, 0.02))
    monkeypatch.setattr(rivals, "at_rates", lambda *_: [1.0, 2.0])
    path = tmp_path / "rows.jsonl"
    contest = Contest(path)
    for _ in range(2):
        contest.calibrated(TASKS["logit"], 800, 0)
        contest.defaults(TASKS["logit"], 5, 0)
    methods = [row["method"] for row in Contest(path).rows]
    assert methods[:3] == ["adamw grid", "adamw grid", "nadamw grid"]
    assert set(methods[6:]) == {"prodigy", "d-adaptation", "schedule-free", *FURTHER}
    assert len(methods) == 6 + 9
    monkeypatch.setattr(rivals, "at_rates", None)
    Contest(path).calibrated(TASKS["logit"], 800, 0)
