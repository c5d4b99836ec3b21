"""Checkpoints of ZeRO replicas: who writes what, resumed bit for bit, refused where it must be."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.deepspeed.checkpoints import Layout
from tests.support.fleet import CaseHung, Fleet
from tests.support.toy import same
from tests.support.zero_runs import (
    STAGES,
    STEPS,
    Run,
    T,
    batch,
    common,
    loss_of,
    on,
    prepare,
    settings,
)

COSINE = {"type": "CosineAnnealingLR", "params": {"T_max": STEPS}}
ONE, AUTO = "HDETOneCycle", "HDETAutoLR"
JOBS = [
    *((stage, "fp32", "shared", ONE, at) for stage in STAGES for at in (T, T + 2)),
    *((stage, "bf16", "local", AUTO, T + 2) for stage in STAGES),
    *((stage, "fp16", "local", ONE, T) for stage in STAGES),
]


def _job_settings(stage: int, dtype: str, gradients: str, schedule: str) -> dict[str, Any]:
    """With HDETOneCycle, or HDETAutoLR around a cosine."""
    values = settings(stage, dtype, gradients=gradients)
    if schedule == "HDETAutoLR":
        values["scheduler"] = {"type": schedule, "params": {"scheduler": COSINE}}
    return values


def _save_and_go_on(
    rank: int, size: int, home: str, jobs: list[tuple[Any, ...]]
) -> list[list[Tensor]]:
    """For each job: train, save at `at`, train to the end; what the end looks like."""
    prepare(rank, size)
    ends = []
    for number, (stage, dtype, gradients, schedule, at) in enumerate(jobs):
        run = Run(_job_settings(stage, dtype, gradients, schedule))
        run.train(0, at)
        run.engine.save_checkpoint(str(Path(home, str(number))))
        run.train(at, 2 * T + 3)
        ends.append(run.bits())
    return ends


def _killed(rank: int, size: int) -> None:
    """Killed between a backward and its step."""
    prepare(rank, size)
    run = Run(settings(2))
    run.train(0, 2)
    run.engine.backward(loss_of(run.engine, batch(2, 0, rank), torch.float32))
    os.kill(os.getpid(), signal.SIGKILL)


def _resume(rank: int, size: int, home: str, jobs: list[tuple[Any, ...]]) -> list[list[Tensor]]:
    """The same ends from the checkpoints, in new processes."""
    prepare(rank, size)
    ends = []
    for number, (stage, dtype, gradients, schedule, at) in enumerate(jobs):
        run = Run(_job_settings(stage, dtype, gradients, schedule))
        path, _ = run.engine.load_checkpoint(str(Path(home, str(number))))
        assert path is not None
        assert run.counters() == (at, at // T, at % T, at)
        run.train(at, 2 * T + 3)
        ends.append(run.bits())
    return ends


def test_save_sigkill_resume_bit_for_bit(four: Fleet, tmp_path: Path) -> None:
    ends = on(four, _save_and_go_on, str(tmp_path), JOBS)
    with pytest.raises(CaseHung, match="died: exit -9"):
        on(four, _killed)
    resumed = on(four, _resume, str(tmp_path), JOBS)
    for rank in range(4):
        for job, mine, wanted in zip(JOBS, resumed[rank], ends[rank], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True)), (rank, job)


def _policies(rank: int, size: int, stage: int, policy: dict[str, Any]) -> Any:
    """Another converge policy, resumed in the middle of a round."""
    prepare(rank, size)
    config = settings(stage, "bf16", gradients="local", converge=policy)
    home = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(home)
    run = Run(config)
    run.train(0, T + 2)
    run.engine.save_checkpoint(home[0])
    run.train(T + 2, 3 * T - 1)
    ended = run.bits()
    fresh = Run(config)
    fresh.engine.load_checkpoint(home[0])
    fresh.train(T + 2, 3 * T - 1)
    equal = same(ended, fresh.bits())
    run.scheduler.finalize()
    return equal, run.output()


@pytest.mark.parametrize(
    "policy",
    [
        {"wire": "int8"},
        {"overlap": True, "overlap_steps": 2},
        {"fragments": 3},
        {"outer": {"lr": 0.7, "momentum": 0.5}},
    ],
    ids=["int8", "overlap", "fragments", "outer"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_other_converges_resume_bit_for_bit(
    four: Fleet, stage: int, policy: dict[str, Any]
) -> None:
    found = on(four, _policies, stage, policy)
    assert [equal for equal, _ in found] == [True] * 4
    assert len({output for _, output in found}) == 1


def _files(rank: int, size: int, home: str, stage: int, at: int) -> tuple[list[str], bool]:
    """The files that this rank writes, and whether zero_to_fp32 gives the converged model."""
    prepare(rank, size)
    run = Run(settings(stage))
    run.train(0, at)
    written: list[str] = []
    engine = run.engine.checkpoint_engine
    save = engine.save

    def noting(state_dict: Any, path: str) -> Any:
        written.append(path)
        return save(state_dict, path)

    engine.save = noting
    before = run.bits()
    run.engine.save_checkpoint(home)
    if stage < 3:
        run.engine.save_16bit_model(home)
        dist.barrier()  # rank 0 writes, and DeepSpeed does not make the others wait
    assert same(before, run.bits())
    run.scheduler.finalize()
    equal = True
    if stage < 3:
        whole = torch.load(Path(home, "pytorch_model.bin"), weights_only=True)
        equal = all(torch.equal(whole[n], p) for n, p in run.model.named_parameters())
    if stage > 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        saved = get_fp32_state_dict_from_zero_checkpoint(home)
        names = [n for n, _ in run.model.named_parameters()]
        wanted = dict(zip(names, run.parameters(), strict=True))
        equal = equal and all(torch.equal(saved[n], wanted[n]) for n in names)
    return written, equal


@pytest.mark.parametrize("at", [T, T + 2], ids=["converged", "diverged"])
@pytest.mark.parametrize("stage", STAGES)
def test_no_file_has_two_writers_and_the_converged_model_is_what_others_read(
    four: Fleet, tmp_path: Path, stage: int, at: int
) -> None:
    found = on(four, _files, str(tmp_path), stage, at)
    written = [path for paths, _ in found for path in paths]
    assert len(written) == len(set(written))
    assert written, "something was written"
    assert all(equal for _, equal in found)
    diverged = json.loads((tmp_path / f"global_step{at}" / "hdet.json").read_text())["diverged"]
    assert diverged is (at != T)
    assert any("replica_01" in path for path in written) is diverged


def _wrong_layouts(rank: int, size: int, home: str) -> list[str]:
    """What is said to a run that cannot continue a checkpoint."""
    prepare(rank, size)
    run = Run(settings(2, shards=2))
    run.train(0, 2)
    run.engine.save_checkpoint(home)
    said = []
    for other in (settings(2, shards=1), settings(1, shards=2), settings(0, shards=1)):
        try:
            Run(other).engine.load_checkpoint(home)
        except ValueError as error:
            said.append(str(error))
    zero = Run(settings(0, shards=2))
    zero.train(0, 2)
    zero.engine.save_checkpoint(home, tag="whole")
    try:
        Run(settings(0, shards=1)).engine.load_checkpoint(home, tag="whole")
    except ValueError as error:
        said.append(str(error))
    return said


def test_wrong_layouts_at_load(four: Fleet, tmp_path: Path) -> None:
    for said in on(four, _wrong_layouts, str(tmp_path)):
        assert len(said) == 4
        assert "a replica has 1 now" in said[0]
        assert "ZeRO stage 2 and this run has stage 1" in said[1]
        assert "ZeRO stage 2 and this run has stage 0" in said[2]
        assert "saved by 2 replicas that had diverged, and there are 4 now" in said[3]


def _more_replicas(rank: int, size: int, home: str) -> bool:
    """Saved right after a converge by two replicas, continued by four (stage 0)."""
    prepare(rank, size)
    run = Run(settings(0, shards=2))
    run.train(0, T)
    run.engine.save_checkpoint(home)
    fresh = Run(settings(0, shards=1))
    fresh.engine.load_checkpoint(home)
    return all(torch.equal(a, b) for a, b in zip(run.parameters(), fresh.parameters(), strict=True))


def test_after_a_converge_the_number_of_replicas_may_change(four: Fleet, tmp_path: Path) -> None:
    assert on(four, _more_replicas, str(tmp_path)) == [True] * 4


def _after_the_exploration(rank: int, size: int, home: str, stage: int) -> Any:
    """The slope rule has ended its exploration: one checkpoint is right for all replicas."""
    prepare(rank, size)

    def fresh(shards: int) -> Run:
        run = Run(settings(stage, shards=shards, rule="slope", spread=0.3, interval=2, patience=1))
        run.scheduler.probe_with(common(run))
        run.scheduler._run.steering.rule.false_moves = 1e-300  # it ends at once
        return run

    run = fresh(2)
    run.train(0, 7)
    phase = run.scheduler.phase
    run.engine.save_checkpoint(home)
    saved = run.parameters()
    run.train(7, 11)
    again = fresh(2)
    again.engine.load_checkpoint(home)
    again.train(7, 11)
    equal = same(run.bits(), again.bits())
    wider = True
    if stage == 0:
        other = fresh(1)
        other.engine.load_checkpoint(home)
        wider = same(other.parameters(), saved)
    return phase, equal, wider


@pytest.mark.parametrize("stage", [0, 2])
def test_after_an_exploration_one_checkpoint_is_right_for_all(
    four: Fleet, tmp_path: Path, stage: int
) -> None:
    """Replicas are equal again: one place for all of them."""
    for phase, equal, wider in on(four, _after_the_exploration, str(tmp_path), stage):
        assert phase == "plain"
        assert equal
        assert wider
    folder = tmp_path / "global_step7"
    assert json.loads((folder / "hdet.json").read_text())["diverged"] is False
    assert not list(folder.glob("replica_*"))


def test_the_layout_file_is_read_back(tmp_path: Path) -> None:
    layout = Layout(replicas=2, shards=2, stage=3, diverged=True, step=7)
    layout.write(tmp_path / "tag")
    assert Layout.read(tmp_path / "tag") == layout
    assert Layout.read(tmp_path) is None
