"""Boards: every record and sampled step under keys that do not change."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from hdet_scale.runs import boards
from hdet_scale.runs.boards import record_scalars, step_scalars
from hdet_scale.runs.log import RunLog
from tests.support.sample_records import a_round, a_search, a_trial, an_evaluation

ROUND = {
    "hdet/base_lr/group0": 1.1e-3,
    "hdet/base_lr/group1": 1.1e-4,
    "hdet/velocity/group0": 3e-5,
    "hdet/velocity/group1": -3e-6,
    "hdet/replica0/lr": 1e-3,
    "hdet/replica1/lr": 1.2e-3,
    "hdet/replica0/lr/group1": 1e-4,
    "hdet/replica1/lr/group1": 1.2e-4,
    "hdet/replica0/loss": 2.5,
    "hdet/converge_seconds": 0.25,
    "hdet/wire_bytes": 4096.0,
    "hdet/quarantined": 1.0,
}


def test_the_keys_of_each_kind() -> None:
    """A board keeps runs of years: these keys and their meaning stay. Not finite is left out."""
    assert record_scalars(a_round(10)) == ROUND
    probed = record_scalars(a_round(10, probed=True))
    assert probed == {**ROUND, "hdet/slope/group0": -0.5, "hdet/noise": 2.0}
    assert record_scalars(a_trial(8, trial=3)) == {
        "hdet/trial3/lr": 1e-3,
        "hdet/trial3/lr/group1": 1e-4,
        "hdet/trial3/loss": 2.5,
        "hdet/trial3/error": 0.1,
        "hdet/trial3/translation": 0.5,
    }
    assert record_scalars(a_search(8)) == {
        "hdet/search/initial_lr/group0": 1e-4,
        "hdet/search/initial_lr/group1": 1e-5,
        "hdet/search/taken_lr/group0": 1e-3,
        "hdet/search/taken_lr/group1": 1e-4,
        "hdet/search/trials": 1.0,
        "hdet/search/completed": 1.0,
    }
    finite = {
        "hdet/base_lr/group0": 1e-3,
        "hdet/base_lr/group1": 1e-4,
        "hdet/scale": 2.5,
        "hdet/restart": 1.0,
        "hdet/evaluation_seconds": 0.03,
    }
    assert record_scalars(an_evaluation(12)) == finite
    seen = dataclasses.replace(an_evaluation(12), loss=2.0)
    assert record_scalars(seen) == {**finite, "hdet/held_out": 2.0}
    assert step_scalars(3.0, {"lr/group0": 1e-3}, {"tokens_per_second": 9.0}) == {
        "hdet/loss": 3.0,
        "hdet/base_lr/group0": 1e-3,
        "hdet/tokens_per_second": 9.0,
    }


def test_other_factors_have_keys_of_their_own() -> None:
    record = dataclasses.replace(
        a_round(10),
        values={"weight_decay/group0": (0.1, 0.2), "dropout": (0.3, 0.4)},
        bases={"weight_decay/group0": 0.1, "dropout": 0.3},
        velocities={},
    )
    scalars = record_scalars(record)
    assert scalars["hdet/replica1/weight_decay"] == 0.2
    assert scalars["hdet/replica0/dropout"] == 0.3
    assert scalars["hdet/base_dropout"] == 0.3


def test_tensorboard_purges_what_is_done_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the boards extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((0, 30), (10, 20)):  # killed at 30, resumed at 10
        board = boards.TensorBoard(tmp_path / "tensorboard", step=first)
        with RunLog(tmp_path, step=first, boards=[board]) as log:
            if first == 0:
                log.record(a_search(4))
            for step in range(first + 10, last + 1, 10):
                log.step(step, 1 / step, {"lr/group0": [0.1] * 10})
                log.record(a_round(step))
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {*ROUND, *record_scalars(a_search(4)), "hdet/loss"}
    assert [e.step for e in found.Scalars("hdet/wire_bytes")] == [10, 20]
    assert found.Scalars("hdet/replica1/lr")[0].value == pytest.approx(1.2e-3)


def test_boards_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no board called 'easel'"):
        boards.boards(["easel"], tmp_path, step=0)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install hdet_scale\[boards\]"):
        boards.boards(["wandb"], tmp_path, step=0)
