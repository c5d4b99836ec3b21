"""A search before the run, and the watch after it, on ZeRO replicas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hdet_scale.method.records import EvaluationRecord, TrialRecord
from hdet_scale.search.constants import HEAD_START
from hdet_scale.search.decision import NEAR, RateSearch
from tests.support.fleet import Fleet
from tests.support.toy import same
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

STEPS = RateSearch.least_steps(2)
"""Of the shortest run that two replicas search in: one stage, whose rates follow each other."""
TRIAL = RateSearch(replicas=2, total_steps=STEPS, adaptive=True).trial.steps
LOW, HIGH = MAX_LR / 50, MAX_LR * 50
AFTER = 10
"""Steps of the run that are compared, after the search."""


def _searching(stage: int, dtype: str = "fp32", shards: int = 2, *, peak: float = LOW) -> Run:
    """A run that begins with a search, from a rate that is far too low."""
    config = settings(stage, dtype, shards, rule="auto", spread=0.0)
    config["train_batch_size"] = MICRO * PARTS * dist.get_world_size()
    params = {"max_lr": peak, "total_steps": STEPS, "cycle_momentum": False}
    config["scheduler"]["params"] = params
    run = Run(config)
    run.scheduler.probe_with(common(run))
    return run


def _search(run: Run, step: int = 0) -> tuple[int, list[float]]:
    """To the first step of the run: that step, and this replica's rates."""
    rates = []
    while run.scheduler.searching:
        rates.append(run.scheduler.get_last_lr()[0])
        run.train(step, step + 1)
        step += 1
    return step, rates


def _scale(run: Run) -> float:
    return float(run.scheduler._run.steering.scale)


# -- the search -----------------------------------------------------------------------------------


def _plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rate: float, ranks: range
) -> None:
    """A step of torch's own AdamW on the batches of these ranks."""
    optimizer.param_groups[0]["lr"] = rate
    drawn = [batch(step, part, rank) for part in range(PARTS) for rank in ranks]
    optimizer.zero_grad()
    torch.stack([loss_of(model, x, torch.float32) for x in drawn]).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def _kept(rank: int, size: int, stage: int, shards: int) -> Any:
    """A search whose head start is kept and the steps after it, beside torch's own AdamW on the
    batches of the first replica and then on those of all, at their rates."""
    prepare(rank, size)
    run = _searching(stage, shards=shards)
    trials: list[Any] = []

    def note(record: Any) -> None:
        if isinstance(record, TrialRecord):
            trials.append((record.stage, record.trial, record.rates, record.losses))

    run.scheduler.on_record(note)
    steps, rates = _search(run)
    told = [rates]
    dist.broadcast_object_list(told, src=0)
    held_then, early = held(run), run.parameters()
    reference = network()
    plain = torch.optim.AdamW(reference.parameters(), eps=1e-3)
    for step, rate in enumerate(told[0]):
        _plainly(reference, plain, step, rate, range(shards))
    wanted = [p.detach().clone() for p in reference.parameters()]
    output, before = run.output(), float(_output(reference))
    for step in range(steps, steps + AFTER):
        rate = run.scheduler.get_last_lr()[0]
        run.train(step, step + 1)
        _plainly(reference, plain, step, rate, range(size))
    common_to_all = (steps, _scale(run), run.scheduler.verdict, trials, run.scheduler.get_last_lr())
    return {
        "told": common_to_all,
        "held": (held_then, held(run)),
        "mine": (early, output, run.parameters(), run.output()),
        "plain": (wanted, before, list(reference.parameters()), float(_output(reference))),
    }


@torch.no_grad()
def _output(model: nn.Module) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 32).view(4, 8)).double().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world", "shards"), [("two", 1), ("four", 2), ("four", 1)])
def test_after_a_search_all_replicas_go_on_with_the_run_of_the_first(
    request: pytest.FixtureRequest, world: str, shards: int, stage: int
) -> None:
    """Partitions and moments are equal to the bit among replicas, and the weights that the forward
    uses are those of plain torch at the same rates, right after the search and later on."""
    found = on(request.getfixturevalue(world), _kept, stage, shards)
    replicas = len(found) // shards
    rule = RateSearch(replicas=replicas, total_steps=STEPS, adaptive=True)
    steps, scale, _, trials, _ = found[0]["told"]
    assert steps == rule.longest
    stages = ["second"] if replicas == 2 else ["first", "second"]
    assert [stage for stage, *_ in trials] == [name for name in stages for _ in NEAR]
    assert scale > 1
    for rank, each in enumerate(found):
        assert each["told"] == found[0]["told"]
        for mine, first in zip(each["held"], found[rank % shards]["held"], strict=True):
            assert same(mine, first)
        torch.testing.assert_close(each["mine"], each["plain"], rtol=1e-4, atol=1e-6)


def _not_kept(rank: int, size: int, stage: int) -> Any:
    """A search from a rate that is far too high; then plain DeepSpeed over the whole world."""
    prepare(rank, size)
    run = _searching(stage, peak=HIGH)
    back: list[bool] = []
    start, whole = held(run), run.parameters()

    def note(record: Any) -> None:
        if isinstance(record, TrialRecord):
            back.append(same(held(run), start))

    run.scheduler.on_record(note)
    step, _ = _search(run)
    back += [same(held(run), start), same(run.parameters(), whole)]
    rates = []
    for i in range(AFTER):
        rates.append(run.scheduler.get_last_lr()[0])
        run.train(step + i, step + i + 1)
    mine, scale = run.parameters(), _scale(run)
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
def test_after_a_search_without_a_head_start_the_run_is_plain_deepspeed(
    four: Fleet, stage: int
) -> None:
    """Trials go back to the bit, all ranks reach one verdict, and the run that follows is that of
    an engine without HDET at the rates of the search, evaluations included."""
    found = on(four, _not_kept, stage)
    for rank, (back, told, distance) in enumerate(found):
        # The first replica goes on with the run until the search ends.
        assert back == [rank >= 2] * len(NEAR) + [True, True]
        assert told == found[0][1]
        assert distance <= 1e-6
    steps, scale, _, rates = found[0][1]
    assert steps == len(NEAR) * TRIAL
    assert scale < HEAD_START
    assert rates[0] == pytest.approx(scale * HIGH / 25)


def _in_teams(rank: int, size: int, stage: int) -> Any:
    """Four replicas in two teams: three steps of the second trial against torch's own AdamW on the
    batches of the team, which for the first team began with the search."""
    prepare(rank, size)
    with mock.patch("hdet_scale.search.trials.TEAMS", 2):
        run = _searching(stage, shards=1)
        first, trial = rank // 2 * 2, run.scheduler._phase.trial.steps
        reference = network()
        plain = torch.optim.AdamW(reference.parameters(), eps=1e-3)
        for step in range(trial + 3):
            rate = run.scheduler.get_last_lr()[0]
            run.train(step, step + 1)
            if first == 0 or step >= trial:
                _plainly(reference, plain, step, rate, range(first, first + 2))
        early = run.parameters()
        step, _ = _search(run, trial + 3)
    run.train(step, step + 3)
    return early, [p.detach().clone() for p in reference.parameters()], held(run)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_replicas_of_a_team_share_their_gradients(four: Fleet, stage: int) -> None:
    out = on(four, _in_teams, stage)
    for early, wanted, _ in out:
        torch.testing.assert_close(early, wanted, rtol=1e-4, atol=1e-6)
    assert same(out[0][0], out[1][0])
    assert same(out[2][0], out[3][0])
    assert not same(out[0][0], out[2][0])
    assert same(*[end for *_, end in out]), "after the search gradients are those of all"


def _in_fp16(rank: int, size: int, stage: int, bad: dict[int, int]) -> Any:
    """Loss scales after the overflows, after each trial and three steps after the search."""
    prepare(rank, size)
    run = _searching(stage, "fp16")
    scale = run.engine.partitions.loss_scale
    scales = [scale()]

    def note(record: Any) -> None:
        if isinstance(record, TrialRecord):
            scales.append(scale())

    run.scheduler.on_record(note)
    run.train(0, TRIAL - 1, bad=bad)
    moved = scale()
    step, _ = _search(run, TRIAL - 1)
    adopted = scale()
    run.train(step, step + 3)
    end = (float(run.optimizer.loss_scale), run.output(), step)
    return moved, scales, adopted, end, held(run), run.scheduler._run.steering.scale


OVERFLOWS = {
    "in its trial": {1: 1, 2: 1},
    "from its first step on": dict.fromkeys(range(TRIAL // 2), 1),
    "in the head start": {1: 0, 2: 0},
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("bad", OVERFLOWS.values(), ids=OVERFLOWS)
def test_a_replica_that_overflows_in_a_search_takes_the_others_along_nowhere(
    four: Fleet, stage: int, bad: dict[int, int]
) -> None:
    """Its steps are skipped and its own loss scale falls. A trial goes back to the scale that it
    began with; after the search all have the scale of the weights that they go on with."""
    found = on(four, _in_fp16, stage, bad)
    loser = set(bad.values()).pop()
    for rank, (moved, scales, adopted, end, mine, factor) in enumerate(found):
        replica, start = rank // 2, scales[0]["cur_scale"]
        assert (moved["cur_scale"] < start) is (replica == loser)
        assert len(scales) == len(NEAR) + 1
        if replica == 1:
            assert all(scale == scales[0] for scale in scales[1:])
        assert adopted == found[0][2], "that of the head start"
        assert (adopted["cur_scale"] < start) is (loser == 0)
        assert end == found[0][3]
        assert end[2] == len(NEAR) * TRIAL, "a step that is skipped counts"
        assert factor > 1
        assert same(mine, found[rank % 2][4])


def _saved_in_a_search(rank: int, size: int, home: str, stage: int, at: int) -> Any:
    """A checkpoint after `at` steps, in the middle of a trial or between two; then the rest of the
    search and ten steps, here and in a run that loads it."""
    prepare(rank, size)
    run = _searching(stage)
    start = held(run)
    run.train(0, at)
    run.engine.save_checkpoint(home)
    back = same(held(run), start)

    def to_the_end(run: Run) -> tuple[int, Any]:
        step, _ = _search(run, at)
        run.train(step, step + AFTER)
        return step, run.bits()

    steps, end = to_the_end(run)
    again = _searching(stage)
    again.engine.load_checkpoint(home)
    steps_again, end_again = to_the_end(again)
    return back, (steps, steps_again), same(end, end_again), [_scale(run), _scale(again)]


@pytest.mark.parametrize(
    ("stage", "at"), [(1, TRIAL // 2), (2, TRIAL * 3 // 2), (3, TRIAL * 3 // 2), (3, TRIAL)]
)
def test_a_checkpoint_in_a_search_starts_the_trial_again(
    four: Fleet, tmp_path: Path, stage: int, at: int
) -> None:
    """In the first trial, in the second, and between two: there only the head start is lost."""
    for back, steps, equal, scales in on(four, _saved_in_a_search, str(tmp_path), stage, at):
        assert back
        assert steps == (len(NEAR) * TRIAL + at % TRIAL,) * 2
        assert equal
        assert scales[0] == scales[1]
        assert scales[0] > 1


# -- the watch ------------------------------------------------------------------------------------


def _watched(rank: int, size: int, home: str, stage: int, shards: int) -> Any:
    """A run under a watch that overfits as soon as the weights are some way from their start; and
    the same from a checkpoint when the held-out loss has risen once."""
    prepare(rank, size)
    config = settings(stage, "bf16", shards, rule="auto", spread=0.0, restart_budget=0.5)
    params = {"max_lr": 1e-4, "total_steps": STEPS, "cycle_momentum": False}
    config["scheduler"]["params"] = params
    config["train_batch_size"] = MICRO * 4  # one part a step

    def fresh() -> tuple[Run, Any]:
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

    (run, distance), evaluations, best = fresh(), [], []

    def note(record: Any) -> None:
        if isinstance(record, EvaluationRecord):
            evaluations.append(record)
            if not record.restart and record.loss == min(e.loss for e in evaluations):
                best[:] = held(run)

    def rises(_: int) -> bool:
        losses = [e.loss for e in evaluations]
        return bool(best) and losses[-1] > min(losses)

    run.scheduler.on_record(note)
    step = train(run, distance, 0, rises)
    run.engine.save_checkpoint(home)
    saved = step
    step = train(run, distance, step, lambda _: evaluations[-1].restart)
    back = same(held(run), best)
    end = step + 20
    train(run, distance, step, lambda at: at == end)
    again, distance = fresh()
    again.engine.load_checkpoint(home)
    watched = again.scheduler.watching
    train(again, distance, saved, lambda at: at == end)
    scales = [r.scheduler._run.steering.scale for r in (run, again)]
    return back, watched, same(run.bits(), again.bits()), scales


@pytest.mark.parametrize(("stage", "shards"), [(1, 1), (2, 2), (3, 2)])
def test_what_overfits_goes_back_and_a_checkpoint_keeps_the_snapshot(
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
