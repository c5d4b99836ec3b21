"""Checkpoints of a run: which is the newest, and which cannot be continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdet_scale.train.saving import CheckpointInfo, newest_checkpoint, remove_partial


def test_the_newest_is_complete_and_partial_ones_are_removed(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for name in ("step-00000008", "step-00000100", "partial-104"):
        (tmp_path / name).mkdir()
    remove_partial(tmp_path)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000100"
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_run_cannot_continue_is_refused(tmp_path: Path) -> None:
    now = CheckpointInfo(engine="ddp", ranks=2, diverged=False)
    CheckpointInfo(engine="ddp", ranks=4, diverged=False).write(tmp_path)
    CheckpointInfo.read(tmp_path).check(now, tmp_path)
    with pytest.raises(ValueError, match="saved with --engine fsdp and this run has --engine ddp"):
        CheckpointInfo(engine="fsdp", ranks=2, diverged=False).check(now, tmp_path)
    with pytest.raises(ValueError, match="by 4 ranks in the middle of a round and there are 2 now"):
        CheckpointInfo(engine="ddp", ranks=4, diverged=True).check(now, tmp_path)
