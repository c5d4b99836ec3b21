"""The guard in real processes: looks, going back, resume, and plain training once it is over.

The held-out loss here is lowest where the weights are a certain way from their start, and the
training loss falls with that way: a run overfits as soon as it has gone further.
"""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from hdet_scale import AutoLR, HDETConfig, OneCycleAutoLR, Replicas, fsdp
from hdet_scale.converge.pipeline import local
from hdet_scale.method.records import EvaluationRecord
from hdet_scale.search import marks
from hdet_scale.search.probe import common_batches
from tests.support.fleet import Fleet
from tests.support.raced import TURN, Way, short_runs
from tests.support.toy import bits, buffers, learn, moments, parameters, same, toy
from tests.support.traffic import traffic

S = 800
LR = 1e-4
KINDS = ("one cycle", "cosine")


def evaluations(records: list[Any]) -> list[EvaluationRecord]:
    return [record for record in records if isinstance(record, EvaluationRecord)]


class Run:
    """Everything a script builds."""

    def __init__(self, rank: int, kind: str = "one cycle", *, gradients: str = "shared") -> None:
        self.rank = rank
        self.model = toy(rank, norm=True, rebuild=False)
        self.way = Way(self.model)
        self.optimizer = AdamW(self.model.parameters(), lr=LR)
        with short_runs():
            self.scheduler = self.scheduler_of(kind, gradients)
        self.start = parameters(self.model), buffers(self.model)
        self.step = 0
        self.rates: list[float] = []
        self.backs: list[int] = []
        self.records: list[Any] = []
        self.scheduler.on_record(self.records.append)

    def scheduler_of(self, kind: str, gradients: str) -> Any:
        if kind == "one cycle":
            return OneCycleAutoLR(
                self.optimizer, LR, total_steps=S, rule="auto", model=self.model,
                probe=self.way.losses, cycle_momentum=False, gradients=gradients,
            )  # fmt: skip
        return AutoLR(
            CosineAnnealingLR(self.optimizer, S),
            HDETConfig(rule="auto", total_steps=S, gradients=gradients),
            model=self.model,
            probe=self.way.losses,
        )

    def train(self, until: int) -> None:
        while self.step < until:
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            learn(self.model, self.optimizer, self.step, self.rank)
            self.scheduler.step(self.way.trained())
            self.step += 1
            if any(r.restart and r.step == self.step for r in evaluations(self.records)[-1:]):
                self.backs.append(self.step)

    def begin(self) -> None:
        """To the first step of the run."""
        while self.scheduler.searching:
            self.train(self.step + 1)

    def until_back(self) -> None:
        """To the step after which the run starts again."""
        had = len(self.backs)
        while len(self.backs) == had:
            assert self.step < S
            self.train(self.step + 1)

    def is_back(self) -> bool:
        fresh = not any(self.optimizer.state.values())
        return fresh and same(parameters(self.model), self.start[0]) and same(
            buffers(self.model), self.start[1]
        )  # fmt: skip

    def save(self, *, own: bool) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "own": self.scheduler.replica_state_dict() if own else None,
                "step": self.step,
            }
        )

    def load(self, saved: dict[str, Any]) -> None:
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        if saved["own"] is not None:
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


def _a_whole_run(rank: int, size: int, kind: str) -> Any:
    run = Run(rank, kind)
    run.begin()
    raced, found = run.step, run.scheduler._round.steering.found[0]
    run.until_back()
    back, rate = run.is_back(), run.scheduler._round.steering.found[0]
    while run.scheduler.watching:
        run.train(run.step + 1)
    looked, over, left = run.way.looked, run.step, run.backs[-1]
    with traffic() as after:
        run.train(over + 20)
    run.train(S)
    hooks = len(run.optimizer._optimizer_step_pre_hooks) + len(run.model._forward_pre_hooks)
    return {
        "raced": raced, "found": found, "back": back, "rate": rate, "over": over, "left": left,
        "rates": run.rates, "parameters": parameters(run.model), "after": after, "hooks": hooks,
        "looked": run.way.looked - looked, "gone": run.way.gone(), "backs": run.backs,
        "looks": evaluations(run.records),
    }  # fmt: skip


def _plain(rank: int, size: int, first: int, rates: list[float], over: int) -> Any:
    """Plain DDP at the rates of the run, from where it started again."""
    model = toy(rank, norm=True, rebuild=False)
    optimizer = AdamW(model.parameters())

    def train(begin: int, end: int) -> None:
        for step in range(begin, end):
            optimizer.param_groups[0]["lr"] = rates[step - first]
            learn(model, optimizer, step, rank)

    train(first, over)
    with traffic() as counted:
        train(over, over + 20)
    train(over + 20, S)
    return parameters(model), counted


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_overfits_starts_again_and_is_plain_ddp_after_it(pair: Fleet, kind: str) -> None:
    one, two = pair.run(_a_whole_run, kind)
    assert one["back"]
    assert two["back"]
    assert one["found"] == two["found"] > 1.25, "the race found more"
    assert one["rate"] == two["rate"] < one["found"]
    assert one["backs"] == two["backs"]
    assert abs(math.log2(one["gone"] / TURN)) < 0.5, "it ends about where the loss is lowest"
    # The whole schedule again, in the steps that are left.
    optimizer = AdamW(toy(wrap=False).parameters(), lr=LR)
    inner: Any = CosineAnnealingLR(optimizer, S)
    if kind == "one cycle":
        inner = OneCycleLR(optimizer, LR, total_steps=S, cycle_momentum=False)
    whole = []
    for _ in range(S):
        whole.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        inner.step()
    first, left = one["left"], S - one["left"]
    scale = one["looks"][-1].scale
    expected = [scale * whole[t * S // left] for t in range(left)]
    assert one["rates"][first:] == pytest.approx(expected, rel=1e-12)
    # Bit for bit plain training, and nothing of ours once the watch is over.
    plain = pair.run(_plain, first, one["rates"][first:], one["over"])
    assert same(one["parameters"], two["parameters"], *(weights for weights, _ in plain))
    assert one["over"] <= 0.75 * S
    assert one["after"] == plain[0][1]
    assert one["looked"] == one["hooks"] == 0
    for look in one["looks"]:
        assert math.isfinite(look.loss)
        assert len(look.losses) == 8


def _interrupted(rank: int, size: int, kind: str, moment: str, own: bool) -> tuple[Any, Any, bool]:
    whole = Run(rank, kind)
    whole.begin()
    if moment != "first":
        whole.train(whole.step + 20)
    if moment in ("back", "again"):
        whole.until_back()
    if moment == "again":
        whole.train(whole.step + 85)  # a look
    file = [whole.save(own=own)]
    if not own:
        dist.broadcast_object_list(file)  # replica 0's for all
    watched = whole.scheduler.watching
    if moment in ("first", "looked"):
        whole.until_back()
    else:
        whole.train(whole.step + 85)
    whole.train(end := whole.step + 10)
    again = Run(rank, kind)
    again.load(file[0])
    again.train(end)
    return whole.everything(), again.everything(), watched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["first", "looked", "back", "again"])
def test_resume_is_bit_for_bit_in_every_phase(pair: Fleet, kind: str, moment: str) -> None:
    for own in (False, True) if moment == "looked" else (False,):
        for whole, again, watched in pair.run(_interrupted, kind, moment, own):
            assert watched
            assert whole == again


def _contested(rank: int, size: int, lr: float) -> Any:
    """No heat at the learning rate given is heard of: the run itself must take what was found."""
    with (
        mock.patch("hdet_scale.search.decision.Race._given", [math.inf, math.inf]),
        mock.patch("hdet_scale.search.decision.LEARNT", -1.0),
        mock.patch("tests.search.test_guard.LR", lr),
    ):
        run = Run(rank)
        run.begin()
        found, raced = run.scheduler._search.rule.scale, run.step
        first = run.scheduler._round.steering.found[0]
        said = run.scheduler.verdict
        run.until_back()
        rates = run.rates[raced], run.scheduler._round.steering.found[0]
        run.train(raced + 250)
    return found, first, said, rates, run.backs, run.scheduler.watching, parameters(run.model)


def test_a_way_down_that_is_contested_is_taken_by_the_run_itself(pair: Fleet) -> None:
    one, two = pair.run(_contested, 3.0)
    found, first, said, (rate, now), backs, watching, _ = one
    assert found < 0.1
    assert first == 1.0
    assert "the run has to show it" in said
    assert rate == pytest.approx(3.0 / 25), "the schedule given"
    assert backs
    assert now == found
    assert watching
    assert same(one[-1], two[-1])


def _duel(rank: int, size: int) -> Any:
    """From far too high, by levels that are all noise, where the learning rate given learnt too."""
    with (
        mock.patch("hdet_scale.search.decision.Race._given", [0.0, 0.0]),
        mock.patch("hdet_scale.search.decision.CLEAR", math.inf),
        mock.patch("hdet_scale.search.decision.LEARNT", -1.0),
        mock.patch("tests.search.test_guard.LR", 3.0),
    ):
        run = Run(rank)
        run.begin()
    rule, guard = run.scheduler._search.rule, run.scheduler._search.guard
    return rule.duel, rule.scale, guard.watch.duel, guard.watch.contested, guard.watch.scale


def test_a_noisy_way_down_is_a_duel_in_the_run(pair: Fleet) -> None:
    """What the rule says reaches the watch."""
    for duel, found, watched, contested, scale in pair.run(_duel):
        assert duel is watched is contested is True
        assert found < 0.5
        assert scale == 1.0


def _few_batches(rank: int, size: int) -> Any:
    """One batch for two replicas, of a model whose buffers DDP broadcasts in a forward."""
    model = toy(rank, norm=True, rebuild=False)
    optimizer = AdamW(model.parameters(), lr=LR)
    seen = []

    def loss(batch: float) -> Tensor:
        seen.append(batch)
        return model(torch.full((4, 4), batch)).square().mean()

    probe = common_batches(iter([0.5]), loss, count=1)
    with short_runs():
        scheduler = OneCycleAutoLR(
            optimizer, LR, total_steps=S, rule="auto", model=model, probe=probe,
            cycle_momentum=False,
        )  # fmt: skip
    step = 0
    while scheduler.searching or (scheduler.watching and step < 120):
        scheduler.step(learn(model, optimizer, step, rank))
        step += 1
    return step, len(seen), scheduler.verdict, model.require_forward_param_sync


def test_more_replicas_than_batches_wait_for_nobody(pair: Fleet) -> None:
    one, two = pair.run(_few_batches)
    assert one[0] == two[0] == 120
    assert one[1] > two[1], "the second has no batch at a look"
    assert one[2].startswith("found")
    assert one[3] is two[3] is True


def _not_guarded(rank: int, size: int, why: str) -> Any:
    run = Run(rank, gradients="local" if why == "local" else "shared")
    if why == "race":
        object.__setattr__(run.scheduler._round.config, "rule", "race")
    run.begin()
    looked = run.way.looked
    run.train(run.step + 30)
    return run.scheduler.watching, run.way.looked - looked, run.scheduler._search._mark


@pytest.mark.parametrize("why", ["race", "local"])
def test_a_race_alone_and_replicas_that_stay_apart_are_not_guarded(pair: Fleet, why: str) -> None:
    for told in pair.run(_not_guarded, why):
        assert told == (False, 0, None)


def _sharded(rank: int, size: int, how: str, folder: str) -> Any:
    """Two replicas of two shards: back to the mark; and a resume from the watch."""

    def build() -> tuple[Any, Any, Any, Way]:
        mesh = fsdp.build_mesh(shards=2, device="cpu")
        torch.manual_seed(0)
        model = toy(wrap=False)
        fully_shard(model.inner, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        way = Way(model)
        optimizer = AdamW(model.parameters(), lr=LR)
        inner = CosineAnnealingLR(optimizer, S)
        config = HDETConfig(rule="auto", total_steps=S)
        with short_runs():
            replicas = Replicas.from_mesh(mesh)
            scheduler = AutoLR(inner, config, replicas=replicas, probe=way.losses)
            fsdp.attach(model, optimizer, scheduler, mesh=mesh)
        return model, optimizer, scheduler, way

    def mine(model: nn.Module) -> list[Tensor]:
        return [local(p).detach().clone() for p in model.parameters()]

    model, optimizer, scheduler, way = build()
    start, records, step = mine(model), [], 0
    scheduler.on_record(records.append)

    def train(model: Any, optimizer: Any, scheduler: Any, way: Way, step: int) -> None:
        learn(model, optimizer, step, rank)
        scheduler.step(way.trained())

    saved: Any = None
    while not any(r.restart for r in evaluations(records)) and step < S:
        train(model, optimizer, scheduler, way, step)
        step += 1
        if saved is None and scheduler.watching:
            own = scheduler.replica_state_dict()
            saved = copy.deepcopy((scheduler.state_dict(), own, step))
            if how == "files":
                marks.save(Path(folder), scheduler)
                dist.barrier()
    back = same(mine(model), start)
    for _ in range(3):
        train(model, optimizer, scheduler, way, step)
        step += 1
    after = mine(model)
    # The run began at the mark: a fresh model is what the saved one was.
    model, optimizer, scheduler, way = build()
    scheduler.load_state_dict(saved[0])
    if how == "own state":
        scheduler.load_replica_state_dict(saved[1])
    marks.load(Path(folder), scheduler)
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet_scale").addHandler(handler)
    for at in range(saved[2], step):
        train(model, optimizer, scheduler, way, at)
    logging.getLogger("hdet_scale").removeHandler(handler)
    return back, after, same(mine(model), after), warned, scheduler.replicas.shard_rank


@pytest.mark.parametrize("how", ["own state", "files", "nothing"])
def test_sharded_replicas_go_back(quartet: Fleet, tmp_path: Path, how: str) -> None:
    """A resume goes back too where each rank has its slices of the mark."""
    out = quartet.run(_sharded, how, str(tmp_path))
    for back, _, resumed, warned, _ in out:
        assert back
        assert resumed is (how != "nothing")
        assert any("no mark to go back to" in text for text in warned) is (how == "nothing")
    for shard in (0, 1):
        one, two = (after for _, after, _, _, at in out if at == shard)
        assert same(one, two)
