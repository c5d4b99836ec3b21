"""The search in real processes: local heats, rewind, resume, and plain training afterwards."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from hdet_scale import (
    AutoLR,
    FusedAdamW,
    FusedLion,
    FusedSGD,
    HDETConfig,
    OneCycleAutoLR,
    Replicas,
    fsdp,
)
from hdet_scale.phases.assembly import divides_by_the_gradient
from hdet_scale.search.probe import Probe, common_batches
from hdet_scale.search.schedule import outline_of
from hdet_scale.search.trials import STAGES
from hdet_scale.topology import local
from tests.support.fleet import Fleet
from tests.support.raced import blind, sighted
from tests.support.toy import batch, bits, buffers, learn, moments, parameters, same, toy
from tests.support.traffic import traffic

S = 600
KINDS = ("one cycle", "cosine")


def optimizer_for(model: nn.Module, kind: str = "adamw", lr: float = 3e-5) -> Optimizer:
    if kind == "sgd":
        return SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01)
    return {"adamw": AdamW, "fused": FusedAdamW}[kind](model.parameters(), lr=lr)


def common(model: nn.Module) -> Any:
    """The same four batches on every rank."""

    def losses() -> Any:
        for i in range(4):
            x, y = batch(10_000 + i, 0)
            yield (model(x) - y).square().mean()

    return losses


class Run:
    """Everything a script builds."""

    def __init__(
        self,
        rank: int,
        kind: str = "one cycle",
        lr: float = 3e-5,
        *,
        how: str = "adamw",
        total: int = S,
    ) -> None:
        self.rank = rank
        self.model = toy(rank, norm=True, rebuild=False)
        self.optimizer = optimizer_for(self.model, how, lr)
        probe = common(self.model)
        if kind == "one cycle":
            self.scheduler: Any = OneCycleAutoLR(
                self.optimizer, lr, total_steps=total, rule="race", model=self.model, probe=probe,
                cycle_momentum=False,
            )  # fmt: skip
        else:
            config = HDETConfig(rule="race", total_steps=total)
            inner = CosineAnnealingLR(self.optimizer, total)
            self.scheduler = AutoLR(inner, config, model=self.model, probe=probe)
        self.step = 0
        self.rates: list[float] = []
        self.records: list[Any] = []
        self.scheduler.on_record(self.records.append)
        self.rounds: list[Any] = []
        self.scheduler.on_round(self.rounds.append)

    def train(self, until: int) -> None:
        while self.step < until:
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            loss = learn(self.model, self.optimizer, self.step, self.rank)
            self.scheduler.step(loss)
            self.step += 1

    def save(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "own": self.scheduler.replica_state_dict(),
                "step": self.step,
            }
        )

    def load(self, saved: dict[str, Any], *, own: bool = True) -> None:
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        if own:
            self.scheduler.load_replica_state_dict(saved["own"])
        self.step = saved["step"]

    def everything(self) -> Any:
        return bits(
            [
                parameters(self.model),
                buffers(self.model),
                moments(self.optimizer),
                self.scheduler.state_dict()["search"],
                self.scheduler.get_last_lr(),
            ]
        )


# -- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["adamw", "sgd", "fused"])
@sighted
def test_one_replica_finds_a_better_rate_and_goes_back_to_its_start(how: str) -> None:
    torch.manual_seed(0)
    model = toy(wrap=False, norm=True)
    start, before = parameters(model), buffers(model)
    optimizer = optimizer_for(model, how, 1e-5)
    scheduler = OneCycleAutoLR(
        optimizer, 1e-5, total_steps=4000, rule="race", model=model, probe=common(model),
        cycle_momentum=False,
    )  # fmt: skip
    step = 0
    while scheduler.searching:
        assert scheduler._round.steering.found[0] == 1.0
        scheduler.step(learn(model, optimizer, step, 0))
        step += 1
    assert same(parameters(model), start)
    assert same(buffers(model), before)
    assert not any(optimizer.state.values())
    assert step == scheduler._search.rule.budget
    assert scheduler._round.steering.found[0] > 10, scheduler.verdict


def test_the_first_step_after_the_race_is_the_first_step_of_a_fresh_run() -> None:
    """Also for SGD, whose first step is not that of zeroed momentum with dampening."""
    model, other = toy(wrap=False), toy(wrap=False)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9, dampening=0.5)
    schedule = LambdaLR(optimizer, lambda _: 1e-4)
    config = HDETConfig(rule="race", total_steps=2 * S)
    scheduler = AutoLR(schedule, config, model=model, probe=common(model))
    step = 0
    while scheduler.searching:
        scheduler.step(learn(model, optimizer, step, 0))
        step += 1
    rate = scheduler.get_last_lr()[0]
    plain = SGD(other.parameters(), lr=rate, momentum=0.9, dampening=0.5)
    for t in range(step, step + 3):
        learn(model, optimizer, t, 0)
        learn(other, plain, t, 0)
    assert same(parameters(model), parameters(other))


def test_without_a_probe_the_end_of_each_heat_is_heard() -> None:
    """The first two thirds of a heat say nothing: a decay has yet to take the noise away."""
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=1e-5)
    scheduler = OneCycleAutoLR(
        optimizer, 1e-5, total_steps=4000, rule="race", model=model, cycle_momentum=False
    )
    search, step = scheduler._search, 0
    assert search is not None
    while scheduler.searching:
        heat = search.rule.heat()
        rate = heat.multipliers[0] * search.rule.translation(heat.stage)
        late = search.step >= heat.steps * 2 // 3
        learn(model, optimizer, step, 0)
        scheduler.step(1.0 + math.log(rate / 20.0) ** 2 if late else 1e6 * rate)
        step += 1
    assert scheduler._round.steering.found[0] == pytest.approx(20.0, rel=1e-6)


def test_a_run_that_skips_every_step_keeps_its_schedule() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = OneCycleAutoLR(
        optimizer, 0.01, total_steps=S * 5, rule="race", model=model, cycle_momentum=False
    )
    start = parameters(model)
    while scheduler.searching:
        scheduler.step(None)
    assert same(parameters(model), start)
    assert scheduler._round.steering.found == [1.0]
    assert "stays" in scheduler.verdict


@pytest.mark.parametrize(
    "make",
    [
        lambda o: CosineAnnealingLR(o, 100),
        lambda o: LambdaLR(o, lambda t: (t + 1) / 10 if t < 9 else 1 / (t - 8)),
        lambda o: SequentialLR(
            o, [LinearLR(o, 0.1, total_iters=10), CosineAnnealingLR(o, 90)], [10]
        ),
        lambda o: LambdaLR(o, lambda t: 3.0 if t == 50 else 1.0),
        lambda o: CyclicLR(o, 0.1, 0.5, step_size_up=20),
    ],
)
def test_the_peak_of_a_schedule_is_found_and_the_schedule_put_back(make: Any) -> None:
    def rates(peek: bool) -> list[float]:
        optimizer = AdamW(toy(wrap=False).parameters(), lr=0.5)
        scheduler = make(optimizer)
        before = dict(optimizer.param_groups[0])
        outline = outline_of(scheduler, 100) if peek else None
        assert optimizer.param_groups[0] == before, "a cycled momentum too"
        seen = [optimizer.param_groups[0]["lr"]]
        for _ in range(100):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        if outline is not None:
            assert outline.peaks == (max(seen),)
            assert outline.mean == pytest.approx(sum(seen) / len(seen) / max(seen))
            assert outline.share([max(seen) / 4]) == 0.25
        return seen

    assert rates(True) == rates(False)


def test_the_probe_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    model[2].eval()
    seen = []

    def losses() -> Any:
        while True:
            seen.append((model.training, torch.is_grad_enabled()))
            yield model(torch.randn(3, 4)).sum() + random.random()

    before = torch.get_rng_state(), random.getstate(), bits(model.state_dict())
    assert len(Probe(losses, model, 3)()) == 3
    assert seen == [(False, False)] * 3
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert bits(model.state_dict()) == before[2]
    assert [m.training for m in model] == [True, True, False]


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (lambda: iter(()), "yielded no loss"),
        (lambda: iter([torch.ones(2)]), "shape \\[2\\]"),
    ],
)
def test_a_probe_that_is_no_probe(losses: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Probe(losses)()


def test_auto_leaves_a_run_that_is_too_short_alone(caplog: Any) -> None:
    """No race, no probe, and torch's own learning rates."""
    model, other, called = toy(wrap=False), toy(wrap=False), []
    optimizer = AdamW(model.parameters(), lr=0.1)
    plain = AdamW(other.parameters(), lr=0.1)
    with caplog.at_level("INFO", "hdet_scale"):
        scheduler = OneCycleAutoLR(
            optimizer, 0.1, total_steps=3000, rule="auto", model=model, probe=called.append
        )
    assert "3000 steps are too few for 1 replicas, 3429 would do" in caplog.text
    assert not scheduler.searching
    reference = OneCycleLR(plain, 0.1, total_steps=3000)
    for step in range(5):
        assert scheduler.get_last_lr() == reference.get_last_lr()
        scheduler.step(learn(model, optimizer, step, 0))
        learn(other, plain, step, 0)
        reference.step()
    assert same(parameters(model), parameters(other))
    assert not called
    assert OneCycleAutoLR(plain, 0.1, total_steps=3429, rule="auto", model=model).searching


def test_wrong_use_is_refused_at_once() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.1)
    inner = CosineAnnealingLR(optimizer, 100)
    with pytest.raises(ValueError, match="must know its length: set total_steps"):
        AutoLR(inner, HDETConfig(rule="race"))
    with pytest.raises(ValueError, match="leaves heats of"):
        AutoLR(inner, HDETConfig(rule="race", total_steps=50))
    with pytest.raises(ValueError, match="asks for no probe"):
        AutoLR(inner, HDETConfig(rule="paper"), probe=list)
    with pytest.raises(TypeError, match="callable that yields losses"):
        AutoLR(inner, HDETConfig(rule="race", total_steps=5000), probe=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="total_steps must be at least 1"):
        HDETConfig(rule="race", total_steps=0)


# -- processes ------------------------------------------------------------------------------------


@sighted
def _a_whole_run(rank: int, size: int, kind: str, lr: float) -> Any:
    """The race, then the run; the same rates on every rank once it is over."""
    run = Run(rank, kind, lr)
    start = parameters(run.model)
    with traffic() as during:
        while run.scheduler.searching:
            run.train(run.step + 1)
        raced = run.step
        back = same(parameters(run.model), start)
    with traffic() as after:
        run.train(raced + 20)
    run.train(S)
    found = run.scheduler._round.steering.found[0]
    return {
        "raced": raced, "back": back, "during": during, "after": after, "found": found,
        "rates": run.rates, "parameters": parameters(run.model), "records": run.records,
        "rounds": run.rounds,
    }  # fmt: skip


def _plain(rank: int, size: int, raced: int, rates: list[float]) -> tuple[list[Tensor], Any]:
    """Plain DDP at the rates of the run, from where the race left off."""
    model = toy(rank, norm=True, rebuild=False)
    optimizer = optimizer_for(model)

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.param_groups[0]["lr"] = rates[step - raced]
            learn(model, optimizer, step, rank)

    with traffic() as counted:
        train(raced, raced + 20)
    train(raced + 20, S)
    return parameters(model), counted


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_race_the_run_is_plain_ddp_bit_for_bit(pair: Fleet, kind: str) -> None:
    one, two = pair.run(_a_whole_run, kind, 3e-5)
    assert one["raced"] == two["raced"] <= 0.085 * S
    assert one["back"]
    assert two["back"]
    assert one["found"] == two["found"] > 4
    # One all-reduce a heat, four heats for two replicas in each stage.
    assert one["during"] == {"allreduce_": 8}
    assert one["rates"][one["raced"] :] == two["rates"][two["raced"] :]
    assert one["rates"][: one["raced"]] != two["rates"][: two["raced"]]
    plain = pair.run(_plain, one["raced"], one["rates"][one["raced"] :])
    assert same(one["parameters"], two["parameters"], *(weights for weights, _ in plain))
    assert one["after"] == plain[0][1]
    assert one["rounds"] == [], "on_round gives rounds only"
    *trials, end = one["records"]
    assert [r.kind for r in trials] == ["trial"] * 8
    assert [r.trial for r in trials] == list(range(8))
    assert [r.stage for r in trials] == ["coarse"] * 4 + ["fine"] * 4
    assert [bool(r.verdict) for r in trials] == [False, False, False, True] * 2
    assert (end.kind, end.trials, end.completed) == ("search", 8, True)
    assert end.step == trials[-1].step == one["raced"]
    assert end.verdict == trials[-1].verdict
    assert end.verdict.startswith("found")
    assert end.initial == {"lr/group0": 3e-5}
    assert end.taken == {"lr/group0": 3e-5 * one["found"]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_schedule_is_played_in_the_steps_that_are_left(pair: Fleet, kind: str) -> None:
    got = pair.run(_a_whole_run, kind, 0.01)[0]
    rates = [x / got["found"] for x in got["rates"][got["raced"] :]]
    optimizer = AdamW(toy(wrap=False).parameters(), lr=0.01)
    inner: Any = CosineAnnealingLR(optimizer, S)
    if kind == "one cycle":
        inner = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.01, total_steps=S, cycle_momentum=False
        )
    whole = []
    for _ in range(S):
        whole.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        inner.step()
    left = S - got["raced"]
    expected = [whole[t * S // left] for t in range(left)]
    assert rates == pytest.approx(expected, rel=1e-12)


def _interrupted(rank: int, size: int, kind: str, moment: int) -> tuple[Any, Any]:
    whole = Run(rank, kind)
    whole.train(moment)
    saved = whole.save()
    whole.train(moment + 60)
    again = Run(rank, kind)
    again.load(saved)
    again.train(moment + 60)
    return whole.everything(), again.everything()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", [1, 4, 5, 16, 30, 44, 200])
def test_resume_is_bit_for_bit_in_every_phase(pair: Fleet, kind: str, moment: int) -> None:
    for whole, again in pair.run(_interrupted, kind, moment):
        assert whole == again


def _agreed(rank: int, size: int, moment: int) -> Any:
    """One checkpoint for all ranks, made in the middle of a heat."""
    run = Run(rank)
    start = parameters(run.model)
    run.train(moment)
    run.scheduler.agree_for_checkpoint()
    agreed = same(parameters(run.model), start)
    saved = run.save()
    run.train(S // 2)
    again = Run(rank)
    again.load(saved, own=False)
    again.train(S // 2)
    return agreed, run.everything(), again.everything()


@pytest.mark.parametrize("moment", [2, 20, 35])
def test_a_checkpoint_for_all_starts_the_heat_again(pair: Fleet, moment: int) -> None:
    for agreed, whole, again in pair.run(_agreed, moment):
        assert agreed
        assert whole == again


def _orphan(rank: int, size: int) -> str:
    run = Run(rank)
    run.train(2)
    again = Run(rank)
    again.load(run.save(), own=False)
    try:
        again.train(3)
    except RuntimeError as error:
        return str(error)
    return ""


def _saves_too_often(rank: int, size: int) -> Any:
    """One checkpoint for all every third step, where heats have four and more."""
    run = Run(rank)
    start = parameters(run.model)
    while run.scheduler.searching and run.step < S:
        run.train(run.step + 1)
        if run.step % 3 == 0:
            run.scheduler.agree_for_checkpoint()
    hooks = len(run.optimizer._optimizer_step_pre_hooks) + len(run.model._forward_pre_hooks)
    longest, back = run.scheduler._search.rule.longest, same(parameters(run.model), start)
    return run.step, longest, back, hooks, run.records[-1]


def test_a_race_that_never_ends_is_given_up(pair: Fleet) -> None:
    for steps, longest, back, hooks, record in pair.run(_saves_too_often):
        assert 2 * longest <= steps < 2 * longest + 3
        assert back
        assert hooks == 0
        assert record.verdict.startswith("given up")
        assert (record.kind, record.completed) == ("search", False)
        assert record.step == steps, "a reader of the log knows where the run begins"
        assert record.taken == record.initial


def test_a_finished_race_is_carried_into_a_run_that_runs_none() -> None:
    """Resumed where auto leaves the race out: the schedule stays compressed, no hook is left."""
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)

    def scheduler(total: int) -> Any:
        return OneCycleAutoLR(
            optimizer, 0.01, total_steps=total, rule="auto", model=model, probe=common(model)
        )

    first = scheduler(3500)
    while first.searching:
        first.step(learn(model, optimizer, first.steps_done, 0))
    state = copy.deepcopy(first.state_dict())
    first.detach()
    with mock.patch("hdet_scale.phases.assembly.ENOUGH", 100):
        other = scheduler(3500)
    assert not other.searching
    other.load_state_dict(state)
    assert other.steps_done == first.steps_done > 0
    assert [other._turns() for _ in range(50)] == [first._turns() for _ in range(50)]
    other.detach()
    assert not optimizer._optimizer_step_pre_hooks
    assert not model._forward_pre_hooks


def test_teams_leave_nothing_behind_when_detached() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    where = Replicas(rank=0, size=16)
    scheduler = OneCycleAutoLR(
        optimizer, 0.01, total_steps=S, rule="race", model=model, replicas=where, gradients="local"
    )
    hooked = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    assert hooked == [1] * len(hooked)
    scheduler.detach()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_state_from_within_a_heat_needs_each_replicas_own(pair: Fleet) -> None:
    for said in pair.run(_orphan):
        assert "load replica_state_dict() too" in said


def _one_bad(rank: int, size: int) -> Any:
    run = Run(rank)
    for _ in range(S // 4):
        run.rates.append(0.0)
        loss = learn(run.model, run.optimizer, run.step, rank)
        if rank == 1 and run.scheduler.searching:
            with torch.no_grad():
                next(run.model.parameters()).fill_(math.nan)
        run.scheduler.step(loss)
        run.step += 1
    return run.scheduler._round.steering.found, parameters(run.model), run.scheduler.verdict


def test_a_replica_of_nans_is_not_heard_and_goes_back_whole(pair: Fleet) -> None:
    (one, weights, said), (two, other, _) = pair.run(_one_bad)
    assert one == two
    assert same(weights, other)
    assert all(bool(w.isfinite().all()) for w in weights), said


def _unwrapped(rank: int, size: int) -> str:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = OneCycleAutoLR(optimizer, 0.1, total_steps=S, rule="race", cycle_momentum=False)
    try:
        scheduler.step(learn(model, optimizer, 0, rank))
    except RuntimeError as error:
        return str(error)
    return ""


def test_replicas_that_cannot_part_are_refused(pair: Fleet) -> None:
    for said in pair.run(_unwrapped):
        assert "pass model=" in said


def _gradients(rank: int, size: int) -> list[list[Tensor]]:
    run = Run(rank)
    out = []
    for _ in range(2):
        x, y = batch(run.step, rank)
        run.optimizer.zero_grad()
        (run.model(x) - y).square().mean().backward()
        out.append([p.grad.clone() for p in run.model.parameters() if p.grad is not None])
        while run.scheduler.searching:
            run.train(run.step + 1)
    return out


def test_gradients_stay_local_in_the_race_and_are_shared_after_it(pair: Fleet) -> None:
    one, two = pair.run(_gradients)
    assert not same(one[0], two[0])
    assert same(one[1], two[1])


def _loaders(rank: int, size: int) -> list[float]:
    """Every rank's loader gives other batches; the probe's are replica 0's."""
    drawn = ([float(10 * rank + i)] for i in range(5))
    losses = common_batches(drawn, lambda b: b[0], count=3)
    return Probe(losses)() + Probe(losses)()


def test_common_batches_are_those_of_replica_0(pair: Fleet) -> None:
    assert pair.run(_loaders) == [[0.0, 1.0, 2.0] * 2] * 2


def test_replicas_of_equal_weights_split_a_probe() -> None:
    seen: list[int] = []

    def loss(batch: int) -> float:
        seen.append(batch)
        return float(batch)

    probe = Probe(common_batches(iter(range(8)), loss, count=8), limit=8)
    drawn = [probe(part, 4) for part in range(4)]
    assert drawn == [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]
    assert len(seen) == 8
    assert probe() == [float(i) for i in range(8)]
    assert probe(9, 64) == [1.0], "never less than a batch each"
    few = Probe(common_batches(iter(range(3)), loss, count=3), limit=16)
    assert [few(part, 9) for part in (2, 3)] == [[2.0], [0.0, 1.0, 2.0]], "never nothing"
    assert [few.parts(part, 9) for part in (2, 3)] == [{2: 2.0}, {}], "and never one twice"
    assert [probe.parts(part, 4) for part in (1, 5)] == [{1: 1.0, 5: 5.0}] * 2
    whole = Probe(lambda: iter([1.0, 2.0]))
    assert whole(1, 2) == [1.0, 2.0], "a callable that cannot split"


@sighted
def _wide(rank: int, size: int, lr: float) -> Any:
    """From far too high it is contested, and nobody looks at the run: what is found is taken."""
    with mock.patch("hdet_scale.search.decision.Race.settle"):
        run = Run(rank, lr=lr, how="sgd", total=8 * S)
        while run.scheduler.searching:
            run.train(run.step + 1)
    run.train(run.step + 3)
    return run.scheduler._search.rule.scale * lr, parameters(run.model)


def test_four_replicas_from_far_below_and_far_above_meet(quartet: Fleet) -> None:
    low, high = (quartet.run(_wide, lr) for lr in (3e-4, 3.0))
    assert same(*[p for _, p in low])
    assert same(*[p for _, p in high])
    assert abs(math.log2(low[0][0] / high[0][0])) < 2.5, (low[0][0], high[0][0])


@sighted
def _sharded(rank: int, size: int) -> Any:
    """Two replicas of two shards each race, go back, and train on with shared gradients."""
    mesh = fsdp.build_mesh(shards=2, device="cpu")
    torch.manual_seed(0)
    model = toy(wrap=False)
    fully_shard(model.inner, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    start = [p.to_local().clone() for p in model.parameters()]
    optimizer = AdamW(model.parameters(), lr=3e-5)
    config = HDETConfig(rule="race", total_steps=S)
    inner = CosineAnnealingLR(optimizer, S)
    where = Replicas.from_mesh(mesh)
    scheduler = AutoLR(inner, config, replicas=where, probe=common(model))
    with fsdp.attach(model, optimizer, scheduler, mesh=mesh) as hdet:
        step, gradients = 0, []
        while scheduler.searching:
            scheduler.step(learn(model, optimizer, step, rank))
            gradients.append(model.inner.weight.grad.to_local().clone())
            step += 1
        back = same([p.to_local().clone() for p in model.parameters()], start)
        for _ in range(3):
            scheduler.step(learn(model, optimizer, step, rank))
            gradients.append(model.inner.weight.grad.to_local().clone())
            step += 1
        mine = [p.to_local().clone() for p in model.parameters()]
        found = scheduler._round.steering.found[0]
        return back, found, mine, gradients[0], gradients[-1], hdet.replicas.shard_rank


def test_sharded_replicas_race_and_go_back(quartet: Fleet) -> None:
    out = quartet.run(_sharded)
    assert all(back for back, *_ in out)
    assert len({found for _, found, *_ in out}) == 1
    assert out[0][1] > 4
    for shard in (0, 1):
        one, two = (o for o in out if o[5] == shard)
        assert same(one[2], two[2])
        assert not torch.equal(one[3], two[3])
        assert torch.equal(one[4], two[4])


def _native(rank: int, size: int) -> str:
    mesh = fsdp.build_mesh(shards=2, device="cpu")
    model = toy(wrap=False)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=3e-5)
    inner, config = CosineAnnealingLR(optimizer, S), HDETConfig(rule="race", total_steps=S)
    try:
        fsdp.attach(model, optimizer, inner, config=config)
    except ValueError as error:
        return str(error)
    return ""


def test_replicas_that_hsdp_keeps_in_step_are_refused(quartet: Fleet) -> None:
    for said in quartet.run(_native):
        assert "mesh=mesh['shard']" in said


class Team:
    """Five steps of plain training on the batches of some ranks, beside those of a heat."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.model = ranks, toy(wrap=False)
        self.optimizer = AdamW(self.model.parameters())

    def step(self, step: int, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        drawn = [batch(step, rank) for rank in self.ranks]
        losses = [(self.model(x) - y).square().mean() for x, y in drawn]
        torch.stack(losses).mean().backward()
        self.optimizer.step()


def _teams(rank: int, size: int, engine: str) -> Any:
    """Four replicas: each a team in the coarse stage; in the long one ranks 0 and 1, 2 and 3."""
    model, mesh = toy(wrap=False), None
    if engine == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = fsdp.build_mesh(shards=1, device="cpu")
        fully_shard(model, mesh=mesh["shard"])
    optimizer = AdamW(model.parameters(), lr=3e-3)
    config = HDETConfig(rule="race", total_steps=2 * S)
    where = Replicas.world() if mesh is None else Replicas.from_mesh(mesh)
    scheduler = AutoLR(
        CosineAnnealingLR(optimizer, 2 * S), config,
        model=model if mesh is None else None, replicas=where, probe=common(model),
    )  # fmt: skip
    if mesh is not None:
        fsdp.attach(model, optimizer, scheduler, mesh=mesh)
    search, step, seen = scheduler._search, 0, {}
    assert search is not None

    def whole() -> list[Tensor]:
        return [local(p).detach().clone() for p in model.parameters()]

    with blind(parts=2):
        while scheduler.searching:
            if search.step == 0:
                mates = [rank] if search.rule.team == 1 else [rank // 2 * 2, rank // 2 * 2 + 1]
                beside, stage = Team(mates), STAGES[search.rule.stage].name
            if search.step < 5:
                beside.step(step, optimizer.param_groups[0]["lr"])
            scheduler.step(learn(model, optimizer, step, rank))
            step += 1
            if search.step == 5:
                seen[stage] = whole(), parameters(beside.model)
    for after in range(3):
        scheduler.step(learn(model, optimizer, step + after, rank))
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return seen, whole(), hooks


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_replicas_of_a_team_run_a_level_as_one(quartet: Fleet, engine: str) -> None:
    """And are regrouped between two stages."""
    out = quartet.run(_teams, engine)
    for seen, *_ in out:
        assert list(seen) == ["coarse", "long"]
        for got, wanted in seen.values():
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    coarse, long = ([seen[name][0] for seen, *_ in out] for name in ("coarse", "long"))
    assert not any(same(coarse[0], other) for other in coarse[1:])
    assert same(long[0], long[1])
    assert same(long[2], long[3])
    assert not same(long[0], long[2])
    assert same(*[end for _, end, _ in out]), "after the race gradients are those of all"
    if engine == "ddp":
        assert [hooks for *_, hooks in out] == [0] * 4


def _interrupted_team(rank: int, size: int, moment: int) -> tuple[int, Any, Any]:
    """A checkpoint of the long stage, where replicas share gradients by two."""
    with blind(parts=2):
        whole = Run(rank, total=2 * S)
        while whole.scheduler._search.rule.team == 1:
            whole.train(whole.step + 1)
        whole.train(whole.step + moment)
        saved, team = whole.save(), whole.scheduler._search.rule.team
        whole.train(end := whole.step + 60)
        again = Run(rank, total=2 * S)
        again.load(saved)
        again.train(end)
    return team, whole.everything(), again.everything()


@pytest.mark.parametrize("moment", [0, 7])
def test_a_race_in_teams_goes_on_where_it_was_interrupted(quartet: Fleet, moment: int) -> None:
    for team, whole, again in quartet.run(_interrupted_team, moment):
        assert team == 2
        assert whole == again


@pytest.mark.parametrize(
    ("make", "divides"),
    [
        (AdamW, True),
        (FusedAdamW, True),
        (FusedLion, True),
        (torch.optim.Adagrad, True),
        (torch.optim.RMSprop, True),
        (torch.optim.Muon, True),
        (torch.optim.Adafactor, True),
        (SGD, False),
        (FusedSGD, False),
    ],
)
def test_the_family_of_an_optimizer_is_told_by_what_it_divides_by(make: Any, divides: bool) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert divides_by_the_gradient(make([weight], lr=0.1)) is divides
