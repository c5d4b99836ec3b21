"""A search before the run, and the watch after it, on ZeRO replicas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hdet_scale.method.records import EvaluationRecord, TrialRecord
from tests.support.fleet import Fleet
from tests.support.toy import same
from tests.support.trials import long_stage, short_trials
from tests.support.zero_runs import (
    MAX_LR,
    MICRO,
    PARTS,
    Run,
    batch,
    common,
    held,
    loss_of,
    network,
    on,
    prepare,
    settings,
)

SEARCHED_STEPS = 600
"""About the shortest run that two replicas can search in: trials of 4 and 5 steps."""
WATCHED_STEPS = 800
"""Of a run of two replicas under a watch."""


def _searching(stage: int, dtype: str = "fp32", shards: int = 2, *, peak: float = 0.0) -> Run:
    """A run that begins with a search, from far below a good rate."""
    config = settings(stage, dtype, shards, rule="auto", spread=0.0)
    peak = peak or MAX_LR / 50
    params = {"max_lr": peak, "total_steps": SEARCHED_STEPS, "cycle_momentum": False}
    config["scheduler"]["params"] = params
    with short_trials():
        run = Run(config)
    run.scheduler.probe_with(common(run))
    return run


# -- the search -----------------------------------------------------------------------------------


def _searched(rank: int, size: int, stage: int) -> Any:
    """The search; then ten steps against plain DeepSpeed over the whole world at its rates."""
    prepare(rank, size)
    run, step = _searching(stage), 0
    back: list[bool] = []
    start, whole = held(run), run.parameters()

    def note(record: Any) -> None:
        if isinstance(record, TrialRecord):
            back.append(same(held(run), start))

    run.scheduler.on_record(note)
    while run.scheduler.searching:
        run.train(step, step + 1)
        step += 1
    back.append(same(run.parameters(), whole))
    rates = []
    for i in range(10):
        rates.append(run.scheduler.get_last_lr()[0])
        run.train(step + i, step + i + 1)
    mine, scale = run.parameters(), run.scheduler._run.steering.scale
    import deepspeed
    from deepspeed.utils import groups

    groups.mpu = None
    own = {k: v for k, v in settings(stage).items() if k not in ("hdet", "scheduler")}
    model = network()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=own
    )
    for i, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for part in range(PARTS):
            engine.backward(loss_of(engine, batch(step + i, part, rank), torch.float32))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        pairs = zip(mine, model.parameters(), strict=True)
        distance = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return back, (step, scale, run.scheduler.verdict, rates), distance


@pytest.mark.parametrize("stage", [2, 3])
def test_after_a_search_the_run_is_plain_deepspeed(four: Fleet, stage: int) -> None:
    """Every trial goes back to the bit, all ranks reach one verdict, and the run that follows is
    that of an engine without HDET at the rates of the search, evaluations included."""
    found = on(four, _searched, stage)
    for back, told, distance in found:
        assert back == [True] * 9, "eight trials, and the gathered model"
        assert told == found[0][1]
        assert distance <= 1e-6
    steps, scale, verdict, rates = found[0][1]
    assert steps == 36
    assert verdict.startswith("proposed")
    assert scale > 2
    assert rates[0] == pytest.approx(scale * MAX_LR / 50 / 25)


def _in_teams(rank: int, size: int, stage: int) -> Any:
    """Four replicas that search in teams of two in the long stage: five steps of it against torch's
    own AdamW on the batches of the team."""
    prepare(rank, size)
    run = _searching(stage, shards=1, peak=MAX_LR)
    reference = network()
    plain = torch.optim.AdamW(reference.parameters(), eps=1e-3)
    first, phase, step = rank // 2 * 2, run.scheduler._phase, 0
    with long_stage(parts=2):
        while phase.team == 1:
            run.train(step, step + 1)
            step += 1
        for _ in range(5):
            plain.param_groups[0]["lr"] = run.scheduler.get_last_lr()[0]
            run.train(step, step + 1)
            drawn = [
                batch(step, part, mate) for part in range(PARTS) for mate in (first, first + 1)
            ]
            plain.zero_grad()
            torch.stack([loss_of(reference, x, torch.float32) for x in drawn]).mean().backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            plain.step()
            step += 1
        early = run.parameters()
        while run.scheduler.searching:
            run.train(step, step + 1)
            step += 1
    run.train(step, step + 3)
    return early, [p.detach().clone() for p in reference.parameters()], run.parameters()


@pytest.mark.parametrize("stage", [0, 2])
def test_many_replicas_run_a_level_as_one_data_parallel_team(four: Fleet, stage: int) -> None:
    out = on(four, _in_teams, stage)
    for early, wanted, _ in out:
        torch.testing.assert_close(early, wanted, rtol=1e-5, atol=1e-6)
    assert same(out[0][0], out[1][0])
    assert same(out[2][0], out[3][0])
    assert not same(out[0][0], out[2][0])
    assert same(*[end for *_, end in out]), "after the search gradients are those of all"


def _in_fp16(rank: int, size: int, stage: int) -> Any:
    """Replica 1 overflows twice in the first trial, which halves its loss scale."""
    prepare(rank, size)
    run = _searching(stage, "fp16")
    scales: list[bool] = []
    start = run.engine.partitions.loss_scale()

    def note(record: Any) -> None:
        if isinstance(record, TrialRecord):
            scales.append(run.engine.partitions.loss_scale() == start)

    run.scheduler.on_record(note)
    run.train(0, 3, bad={1: 1, 2: 1})
    moved = float(run.optimizer.loss_scale)
    step = 3
    while run.scheduler.searching:
        run.train(step, step + 1)
        step += 1
    run.train(step, step + 3)
    return moved, scales, float(run.optimizer.loss_scale), run.output(), start


@pytest.mark.parametrize("stage", [0, 3])
def test_a_search_in_fp16_goes_back_to_one_loss_scale(four: Fleet, stage: int) -> None:
    found = on(four, _in_fp16, stage)
    for rank, (moved, back, scale, output, start) in enumerate(found):
        assert (moved < start["cur_scale"]) is (rank >= 2), "replica 1 overflowed"
        assert back == [True] * 8
        assert scale == start["cur_scale"]
        assert output == found[0][3]


def _saved_in_a_trial(rank: int, size: int, home: str, stage: int, at: int) -> Any:
    """A checkpoint after `at` steps, in the middle of a trial or between two; then the rest of the
    search and ten steps, here and in a run that loads it."""
    prepare(rank, size)
    run = _searching(stage)
    start = held(run)
    run.train(0, at)
    run.engine.save_checkpoint(home)
    back = same(held(run), start)

    def to_the_end(run: Run) -> tuple[int, Any]:
        step = at
        while run.scheduler.searching:
            run.train(step, step + 1)
            step += 1
        run.train(step, step + 10)
        return step, run.bits()

    steps, end = to_the_end(run)
    again = _searching(stage)
    again.engine.load_checkpoint(home)
    steps_again, end_again = to_the_end(again)
    scales = [r.scheduler._run.steering.scale for r in (run, again)]
    return back, (steps, steps_again), same(end, end_again), scales


@pytest.mark.parametrize(("stage", "at"), [(2, 6), (3, 6), (3, 16)])
def test_a_checkpoint_in_a_search_starts_the_trial_again(
    four: Fleet, tmp_path: Path, stage: int, at: int
) -> None:
    """After 6 steps: two into the second trial. After 16: between the stages, nothing is lost."""
    for back, steps, equal, scales in on(four, _saved_in_a_trial, str(tmp_path), stage, at):
        assert back
        assert steps == (36 + at % 4,) * 2
        assert equal
        assert scales[0] == scales[1]
        assert scales[0] > 2


# -- the watch ------------------------------------------------------------------------------------


def _watched(rank: int, size: int, home: str, stage: int, shards: int) -> Any:
    """A run under a watch that overfits as soon as the weights are some way from their start; and
    the same from a checkpoint after its first evaluation."""
    prepare(rank, size)
    config = settings(stage, "bf16", shards, rule="auto", spread=0.0)
    replicas = 4 // shards
    total = WATCHED_STEPS if replicas == 2 else WATCHED_STEPS // 2
    params = {"max_lr": 1e-4, "total_steps": total, "cycle_momentum": False}
    config["scheduler"]["params"] = params
    config["train_batch_size"] = MICRO * 4  # one part a step

    def fresh() -> tuple[Run, Any]:
        with short_trials():
            run = Run(config)
        start = [m.detach().clone() for m in run.engine.partitions.masters()]

        def distance() -> float:
            masters = zip(run.engine.partitions.masters(), start, strict=True)
            squares = torch.stack([(m.detach() - s).square().sum() for m, s in masters]).sum()
            if run.engine.replicas.shard_group is not None:
                dist.all_reduce(squares, group=run.engine.replicas.shard_group)
            return float(squares) ** 0.5

        def losses() -> Any:
            held_out = 0.5 + math.log((distance() + 1e-3) / 0.3) ** 2
            return (held_out + 0.01 * i for i in range(8))

        run.scheduler.probe_with(losses)
        return run, distance

    def train(run: Run, distance: Any, first: int, until: Any) -> int:
        step = first
        while not until(step):
            run.engine.backward(loss_of(run.engine, batch(step, 0, rank), run.dtype))
            run.engine.step(lr_kwargs={"loss": 1.0 / (0.1 + distance())})
            step += 1
        return step

    (run, distance), evaluations = fresh(), []

    def note(record: Any) -> None:
        if isinstance(record, EvaluationRecord):
            evaluations.append(record)

    run.scheduler.on_record(note)
    start = held(run)
    step = train(run, distance, 0, lambda _: evaluations)
    run.engine.save_checkpoint(home)
    saved = step
    step = train(run, distance, step, lambda _: evaluations[-1].restart)
    back = same(held(run), start)
    end = step + 20
    train(run, distance, step, lambda at: at == end)
    again, distance = fresh()
    again.engine.load_checkpoint(home)
    watched = again.scheduler.watching
    train(again, distance, saved, lambda at: at == end)
    scales = [r.scheduler._run.steering.scale for r in (run, again)]
    return back, watched, same(run.bits(), again.bits()), scales


@pytest.mark.parametrize(("stage", "shards"), [(1, 1), (2, 2), (3, 2)])
def test_what_overfits_restarts_and_a_checkpoint_keeps_the_snapshot(
    four: Fleet, tmp_path: Path, stage: int, shards: int
) -> None:
    """Within the scheduler's state where a replica is one rank; otherwise each shard's part in a
    folder of its own."""
    for back, watched, equal, scales in on(four, _watched, str(tmp_path), stage, shards):
        assert back
        assert watched
        assert equal
        assert scales[0] == scales[1]
    folders = list(tmp_path.glob("global_step*/snapshot"))
    assert [folder.is_dir() for folder in folders] == ([] if shards == 1 else [True])
    assert not list(tmp_path.glob("global_step*/replica_*")), "replicas were equal"
