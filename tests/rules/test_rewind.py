"""A climb that overshoots really goes back: weights, buffers, optimizer state, on every engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from hdet_scale import ConvergePolicy, OneCycleAutoLR
from hdet_scale.method.records import RoundRecord
from tests.rules.test_guided import Run, T
from tests.support import sharded
from tests.support.fleet import Fleet
from tests.support.toy import bits, buffers, learn, moments, parameters, same, toy

BACK = "back to the start"
ENDS = 15 * T
"""The learning rate below is cut after rounds 2 and 4; the climb holds after round 12."""


def climbing(rank: int, **options: Any) -> Run:
    return Run(rank, lr=300.0, rule="climb", total_steps=100 * T, norm=True, **options)


def everything(run: Run) -> list[Tensor]:
    return [*parameters(run.model), *buffers(run.model), *moments(run.optimizer)]


def _overshot(rank: int, size: int) -> Any:
    run = climbing(rank)
    start = parameters(run.model), buffers(run.model)
    run.steps(0, 3 * T)
    back = (
        same(parameters(run.model), start[0])
        and same(buffers(run.model), start[1])
        and not any(run.optimizer.state.values())
    )
    plain = toy(rank, rebuild=False, norm=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0, weight_decay=0.01)
    for step in range(3 * T, 4 * T - 1):
        optimizer.param_groups[0]["lr"] = run.scheduler.get_last_lr()[0]
        learn(plain, optimizer, step, rank)
        run.steps(step, step + 1)
    lockstep = same(everything(run), [*parameters(plain), *buffers(plain), *moments(optimizer)])
    run.steps(4 * T - 1, ENDS)
    kept = run.scheduler._round._mark is not None or len(run.scheduler._hooks) > 0
    return back, lockstep, kept, [r.probe.verdict for r in run.records], run.phase


def test_the_way_down_goes_back_to_the_bit(pair: Fleet) -> None:
    """From there the steps are those of a fresh run at a tenth of the learning rate; the mark is
    given up once the climb holds."""
    results = pair.run(_overshot)
    for back, lockstep, kept, told, phase in results:
        assert back
        assert lockstep
        assert not kept
        assert told == results[0][3]
        assert phase == "hold"
    said = results[0][3]
    assert [BACK in verdict for verdict in said[:5]] == [False, False, True, False, True]
    assert said[-1] == "hold: the slope has given out"


def _resumed(rank: int, size: int, at: int) -> Any:
    """Rank 0's state for all at a converge, each rank's own in the middle of a round."""
    whole = climbing(rank)
    whole.steps(0, at)
    own = whole.scheduler.replica_state_dict() if at % T else None
    file = [whole.save()]
    if own is None:
        dist.broadcast_object_list(file)
    phase = whole.scheduler._round.steering.decision.phase
    whole.steps(at, ENDS)
    again = climbing(rank + 7)
    again.rank = rank
    again.load(file[0])
    if own is not None:
        again.scheduler.load_replica_state_dict(own)
    again.steps(at, ENDS)
    ends = [bits([everything(r), r.scheduler.get_base_lr()]) for r in (whole, again)]
    return ends[0] == ends[1], phase


@pytest.mark.parametrize("at", [2, 2 * T, 3 * T, 3 * T + 2, 5 * T, 9 * T, 11 * T + 3, 14 * T])
def test_resume_bit_for_bit_in_each_phase(pair: Fleet, at: int) -> None:
    """Before a cut, right after one, within the round that follows, on the way up, in the hold."""
    for equal, phase in pair.run(_resumed, at):
        assert equal
        assert phase == ("hold" if at == 14 * T else "climb")


@torch.no_grad()
def lose(run: Run) -> None:
    next(run.model.parameters()).fill_(math.nan)


def _all_lost(rank: int, size: int) -> Any:
    run = climbing(rank)
    start = parameters(run.model)
    run.steps(0, 2 * T - 1)
    lose(run)
    run.steps(2 * T - 1, 2 * T)
    back = same(parameters(run.model), start)
    run.steps(2 * T, 3 * T)
    return back, run.records[1].probe.verdict, run.records[1].quarantined, parameters(run.model)


def test_when_no_replica_is_finite_all_go_back(pair: Fleet) -> None:
    """There is nothing to average, and nothing needs to be."""
    one, two = pair.run(_all_lost)
    assert one[0]
    assert two[0]
    assert "diverged" in one[1]
    assert one[2] == (0, 1)
    assert same(one[3], two[3])
    assert all(bool(p.isfinite().all()) for p in one[3])


def _other_converge(rank: int, size: int, policy: dict[str, Any]) -> Any:
    run = climbing(rank, converge=ConvergePolicy(**policy))
    start, back = parameters(run.model), []

    def look(record: RoundRecord) -> None:
        if record.probe is not None and BACK in record.probe.verdict:
            back.append(same(parameters(run.model), start))

    run.scheduler.on_round(look)
    run.steps(0, 3 * T - 1)
    lose(run)
    run.steps(3 * T - 1, 25 * T)
    return back, run.phase, parameters(run.model)


@pytest.mark.parametrize(
    "policy",
    [{"overlap": True}, {"fragments": 2}, {"wire": "int8"}, {"outer": {"lr": 0.7}}],
    ids=["overlap", "fragments", "int8", "outer"],
)
def test_nothing_of_the_way_is_left_in_other_converges(pair: Fleet, policy: dict[str, Any]) -> None:
    (back, phase, one), (_, _, two) = pair.run(_other_converge, policy)
    assert back
    assert all(back)
    assert phase == "hold"
    assert same(one, two)
    assert all(bool(p.isfinite().all()) for p in one)


# -- FSDP2: two replicas of two shards ------------------------------------------------------------


def probe(model: nn.Module, scheduler: OneCycleAutoLR) -> Any:
    """Eight fresh batches a round, the same on every rank."""

    def losses() -> Any:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        for j in range(8):
            yield sharded.loss_of(inner, sharded.batch(100_000 + 8 * scheduler.round + j, 0))

    return losses


ROUNDS = 30
GUIDED = {"ensemble_lr_spread_ratio": 0.3, "model_sync_interval": T, "enable_auto_lr": False}


def on_shards(rule: str) -> Any:
    run = sharded.Sharded(2, steps=400, rule=rule, **GUIDED)
    run.scheduler.probe_with(probe(run.model, run.scheduler), run.model)
    return run


def _slope_on_shards(rank: int, size: int) -> Any:
    run, records = on_shards("slope"), []
    run.scheduler.on_round(records.append)
    run.train(rank, 0, ROUNDS * T)
    return [(r.bases, r.probe.verdict, r.probe.evidence) for r in records]


def _slope_on_ddp(rank: int, size: int) -> Any:
    """The same computation: a replica takes the batches of its two shards."""
    model = DistributedDataParallel(sharded.build_model())
    optimizer, records = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    scheduler = sharded.scheduler_of(optimizer, 400, model=model, rule="slope", **GUIDED)
    scheduler.probe_with(probe(model, scheduler), model)
    scheduler.on_round(records.append)
    for step in range(ROUNDS * T):
        x = torch.cat([sharded.batch(step, 2 * rank + s) for s in range(2)])
        loss = sharded.loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step(loss)
    return [(r.bases, r.probe.verdict, r.probe.evidence) for r in records]


def test_the_slope_rule_decides_on_shards_as_on_whole_replicas(pair: Fleet, quartet: Fleet) -> None:
    told = quartet.run(_slope_on_shards)
    assert all(t == told[0] for t in told)
    whole = pair.run(_slope_on_ddp)[0]
    assert any(verdict for _, verdict, _ in whole), "the rule moved"
    for (bases, verdict, z), (bases_whole, verdict_whole, z_whole) in zip(
        told[0], whole, strict=True
    ):
        assert verdict == verdict_whole
        assert bases == pytest.approx(bases_whole, rel=1e-6)
        assert z == pytest.approx(z_whole, rel=1e-3, abs=1e-4)


def _climb_on_shards(rank: int, size: int, folder: str) -> Any:
    """Cut after a round that poisons all shards; saved before that, resumed, cut again."""

    def run_on(run: Any, first: int) -> None:
        run.train(rank, first, 3 * T - 1)
        with torch.no_grad():
            next(run.model.parameters()).to_local().fill_(math.nan)
        run.train(rank, 3 * T - 1, 3 * T)
        ends.append(run.local())
        run.train(rank, 3 * T, 5 * T)
        ends.append(run.local())

    run, ends = on_shards("climb"), []
    start = run.local()
    run.train(rank, 0, 2 * T)
    save({"job": run.hdet.checkpoint()}, checkpoint_id=folder)
    run_on(run, 2 * T)
    again = on_shards("climb")
    load({"job": again.hdet.checkpoint()}, checkpoint_id=folder)
    run_on(again, 2 * T)
    rates = [r.scheduler.get_base_lr() for r in (run, again)]
    return same(start, ends[0], ends[2]), same(ends[1], ends[3]), rates[0] == rates[1]


def test_shards_go_back_and_a_checkpoint_keeps_the_way(quartet: Fleet, tmp_path: Path) -> None:
    for back, equal, rates in quartet.run(_climb_on_shards, str(tmp_path)):
        assert back
        assert equal
        assert rates
