"""The slope rule inside a run: real replicas over gloo, several factors, resume, the end."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from hdet_scale import AutoLR, ConvergePolicy, HDETConfig, OneCycleAutoLR, Replicas
from hdet_scale.factors import beta, dropout, learning_rates, weight_decay
from hdet_scale.method.records import RoundRecord
from tests.support import sharded
from tests.support.fleet import Fleet
from tests.support.toy import batch, learn, moments, same, toy
from tests.support.traffic import traffic

T = 4


def probe_of(model: nn.Module, scheduler: list[Any]) -> Any:
    """Eight fresh batches a round, the same on every replica."""

    def losses() -> list[Tensor]:
        inner = model.module if hasattr(model, "module") else model
        with torch.no_grad():
            asked = [batch(100_000 + 8 * scheduler[0].round + j, 0) for j in range(8)]
            return [(inner(x) - y).square().mean() for x, y in asked]

    return losses


class Run:
    """The toy under DDP, AdamW, the slope rule."""

    def __init__(
        self,
        rank: int,
        lr: float = 1e-3,
        *,
        several: bool = False,
        l2: bool = False,
        **options: Any,
    ) -> None:
        options = {"spread": 0.3, "interval": T, "rule": "slope", **options}
        self.rank = rank
        self.model = toy(rank, rebuild=False)
        kind = torch.optim.Adam if l2 else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=lr, weight_decay=0.01)
        factors = [*learning_rates(self.optimizer), weight_decay(self.optimizer)]
        self.records: list[RoundRecord] = []
        me: list[Any] = []
        self.scheduler = AutoLR(
            LambdaLR(self.optimizer, lambda _: 1.0),
            HDETConfig(**options),
            model=self.model,
            factors=factors if several else None,
            probe=probe_of(self.model, me),
        )
        me.append(self.scheduler)
        self.scheduler.on_round(self.records.append)

    def steps(self, first: int, last: int, bad: int | None = None) -> None:
        for step in range(first, last):
            loss = learn(self.model, self.optimizer, step, self.rank)
            if step == bad and self.rank == 1:
                with torch.no_grad():
                    next(self.model.parameters()).fill_(math.nan)
            self.scheduler.step(loss)

    @property
    def phase(self) -> str:
        return self.scheduler.phase

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def save(self) -> bytes:
        out = io.BytesIO()
        torch.save([x.state_dict() for x in (self.model, self.optimizer, self.scheduler)], out)
        return out.getvalue()

    def load(self, file: bytes) -> None:
        model, optimizer, scheduler = torch.load(io.BytesIO(file), weights_only=False)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)


def _explored(rank: int, size: int, several: bool) -> Any:
    run = Run(rank, several=several)
    run.steps(0, 40 * T)
    return [(r.bases, r.probe.verdict, r.probe.evidence) for r in run.records], run.records[0]


@pytest.mark.parametrize("several", [False, True])
def test_a_learning_rate_that_is_too_low_is_raised(quartet: Fleet, several: bool) -> None:
    """Every replica decides alike; a second factor beside it does not disturb."""
    results = quartet.run(_explored, several)
    told = [r[0] for r in results]
    assert all(t == told[0] for t in told[1:])
    bases = told[0][-1][0]
    assert bases["lr/group0"] > 2e-3
    assert any("lr/group0 up" in verdict for _, verdict, _ in told[0])
    assert not any("lr/group0 down" in verdict for _, verdict, _ in told[0])
    first = results[0][1]
    assert len(first.probe.losses) == 8
    assert first.probe.seconds > 0
    assert set(first.probe.evidence) == set(bases)
    if several:
        low, high = sorted(set(first.values["weight_decay/group0"]))
        assert (low, high) == (pytest.approx(0.007), pytest.approx(0.013))


def _ended(rank: int, size: int, policy: dict[str, Any]) -> Any:
    run = Run(rank, patience=1, converge=ConvergePolicy(**policy))
    run.scheduler._run.steering.rule.false_moves = 1e-300  # no move: the exploration ends at once
    run.steps(0, 3 * T)
    at_end = run.weights()
    phase = run.phase
    plain = toy(rank, rebuild=False)
    plain.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    with traffic() as ours:
        run.steps(3 * T, 7 * T)
    with traffic() as theirs:
        for step in range(3 * T, 7 * T):
            learn(plain, optimizer, step, rank)
    same = all(torch.equal(a, b) for a, b in zip(run.weights(), plain.parameters(), strict=True))
    return phase, at_end, same, ours == theirs, len(run.records)


@pytest.mark.parametrize("policy", [{}, {"overlap": True}, {"fragments": 2}])
def test_an_exploration_that_is_over_leaves_plain_training(
    pair: Fleet, policy: dict[str, Any]
) -> None:
    """Bit for bit, and no collective of ours remains."""
    results = pair.run(_ended, policy)
    assert [r[0] for r in results] == ["plain", "plain"]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    assert all(same and quiet for _, _, same, quiet, _ in results)
    assert [r[4] for r in results] == [3, 3]


def _ended_with_own_moments(rank: int, size: int) -> Any:
    run = Run(rank, l2=True, patience=1, converge=ConvergePolicy(moments=False))
    run.scheduler._run.steering.rule.false_moves = 1e-300
    run.steps(0, 3 * T)
    at_end = moments(run.optimizer)
    run.steps(3 * T, 6 * T)
    return run.phase, at_end, run.weights()


def test_moments_of_each_replicas_own_are_averaged_when_an_exploration_is_over(pair: Fleet) -> None:
    """With L2 decay they drift, and nothing is averaged from there on."""
    one, two = pair.run(_ended_with_own_moments)
    assert one[0] == "plain"
    assert same(one[1], two[1])
    assert same(one[2], two[2])


def _resumed(rank: int, size: int, at: int, several: bool) -> Any:
    options = {"patience": 6, "several": several}
    whole = Run(rank, **options)
    whole.steps(0, 30 * T)
    first = Run(rank, **options)
    first.steps(0, at)
    file, phase = first.save(), first.phase
    second = Run(rank + 7, **options)
    second.rank = rank
    second.load(file)
    second.steps(at, 30 * T)
    same = all(torch.equal(a, b) for a, b in zip(whole.weights(), second.weights(), strict=True))
    return same, whole.scheduler.get_base_lr() == second.scheduler.get_base_lr(), phase


@pytest.mark.parametrize("at", [2 * T, 12 * T, 28 * T])
def test_resume_bit_for_bit(pair: Fleet, at: int) -> None:
    for equal, bases, phase in pair.run(_resumed, at, False):
        assert equal
        assert bases
        assert phase == ("plain" if at == 28 * T else "exploring")


def test_resume_bit_for_bit_with_several_factors(quartet: Fleet) -> None:
    assert all(same and bases for same, bases, _ in quartet.run(_resumed, 5 * T, True))


def _with_a_bad_replica(rank: int, size: int) -> Any:
    run = Run(rank)
    run.steps(0, 6 * T, bad=3 * T - 1)
    finite = all(bool(w.isfinite().all()) for w in run.weights())
    return [(r.quarantined, r.bases, r.probe.evidence) for r in run.records], finite


def test_a_replica_that_is_not_finite_is_left_out(quartet: Fleet) -> None:
    results = quartet.run(_with_a_bad_replica)
    assert all(r == results[0] for r in results)
    rounds, finite = results[0]
    assert finite
    assert [q for q, _, _ in rounds] == [(), (), (1,), (), (), ()]
    assert all(math.isfinite(z) for _, _, evidence in rounds for z in evidence.values())


def _added(rank: int, size: int) -> Any:
    """Two replicas of two shards: 10 + rank in every shard of its own."""
    replicas = Replicas.of(shard_size=2)
    cpu = torch.device("cpu")
    means = replicas.shard_means([10.0 + rank, math.nan if rank == 3 else 1.0], cpu)
    return means[0], math.isnan(means[1]), replicas.sum([means[0], 1.0], cpu)


def test_the_losses_of_shards_are_averaged_before_the_sum(quartet: Fleet) -> None:
    results = quartet.run(_added)
    assert [r[0] for r in results] == [10.5, 10.5, 12.5, 12.5]
    assert [r[1] for r in results] == [False, False, True, True]
    assert all(r[2] == [23.0, 2.0] for r in results)


# -- FSDP2: two replicas of two shards ------------------------------------------------------------

ROUNDS = 30
GUIDED = {"ensemble_lr_spread_ratio": 0.3, "model_sync_interval": T, "enable_auto_lr": False}


def sharded_probe(model: nn.Module, scheduler: OneCycleAutoLR) -> Any:
    """Eight fresh batches a round, the same on every rank."""

    def losses() -> Any:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        for j in range(8):
            yield sharded.loss_of(inner, sharded.batch(100_000 + 8 * scheduler.round + j, 0))

    return losses


def told_by(records: list[RoundRecord]) -> Any:
    return [(r.bases, r.probe.verdict, r.probe.evidence) for r in records if r.probe is not None]


def _slope_on_shards(rank: int, size: int) -> Any:
    run, records = sharded.Sharded(2, steps=400, rule="slope", **GUIDED), []
    run.scheduler.probe_with(sharded_probe(run.model, run.scheduler))
    run.scheduler.on_round(records.append)
    run.train(rank, 0, ROUNDS * T)
    return told_by(records)


def _slope_on_ddp(rank: int, size: int) -> Any:
    """The same computation: a replica takes the batches of its two shards."""
    model = DistributedDataParallel(sharded.build_model())
    optimizer, records = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    scheduler = sharded.scheduler_of(optimizer, 400, model=model, rule="slope", **GUIDED)
    scheduler.probe_with(sharded_probe(model, scheduler))
    scheduler.on_round(records.append)
    for step in range(ROUNDS * T):
        x = torch.cat([sharded.batch(step, 2 * rank + s) for s in range(2)])
        loss = sharded.loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step(loss)
    return told_by(records)


def test_the_slope_rule_decides_on_shards_as_on_whole_replicas(pair: Fleet, quartet: Fleet) -> None:
    told = quartet.run(_slope_on_shards)
    assert len(told[0]) == ROUNDS
    assert all(t == told[0] for t in told)
    whole = pair.run(_slope_on_ddp)[0]
    assert any(verdict for _, verdict, _ in whole), "the rule moved"
    for (bases, verdict, z), (bases_whole, verdict_whole, z_whole) in zip(
        told[0], whole, strict=True
    ):
        assert verdict == verdict_whole
        assert bases == pytest.approx(bases_whole, rel=1e-6)
        assert z == pytest.approx(z_whole, rel=1e-3, abs=1e-4)


# -- refused at once ----------------------------------------------------------------------------


def auto(factors: Any = None, **options: Any) -> AutoLR:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters())
    chosen = factors(model, optimizer) if factors else None
    inner = CosineAnnealingLR(optimizer, T_max=10)
    return AutoLR(inner, HDETConfig(**{"rule": "slope", **options}), factors=chosen)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['dropout/\*'\] act in forward or backward"):
        auto(lambda m, o: [dropout(m)])
    auto(lambda m, o: [dropout(m)], gradients="local")
    state = auto().state_dict()
    with pytest.raises(ValueError, match="another kind of rule than rule='paper'"):
        auto(rule="paper").load_state_dict(state)
    scheduler = auto(interval=1)
    scheduler.optimizer.step()
    with pytest.raises(RuntimeError, match="rule='slope' is fed by a probe, and none was given"):
        scheduler.step()


def test_explored_betas_make_moments_averaged() -> None:
    assert not auto()._phase.averaging.average_moments
    both = auto(lambda m, o: [*learning_rates(o), beta(o, 0)])
    assert both._phase.averaging.average_moments
