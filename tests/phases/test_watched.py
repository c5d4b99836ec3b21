"""The watch in real processes: evaluations, restarts, resume, and plain training once it is over.

The held-out loss here is lowest at a certain distance of the weights from their start, and the
training loss falls with that distance: a run overfits as soon as it has gone further.
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
from hdet_scale.phases.watched import evaluate
from hdet_scale.search.probe import Probe, common_batches
from tests.support.fleet import Fleet
from tests.support.searched import TURN, Overfitting
from tests.support.toy import bits, buffers, learn, moments, parameters, same, toy
from tests.support.traffic import traffic
from tests.support.trials import short_trials

S = 800
LR = 1e-4
KINDS = ("one cycle", "cosine")


def evaluations(records: list[Any]) -> list[EvaluationRecord]:
    return [record for record in records if isinstance(record, EvaluationRecord)]


def scale_of(scheduler: Any) -> float:
    """What the schedule is multiplied with."""
    return float(scheduler.get_base_lr()[0] / scheduler.get_schedule()[0])


class Run:
    """Everything a script builds."""

    def __init__(
        self,
        rank: int,
        kind: str = "one cycle",
        *,
        gradients: str = "shared",
        probed: bool = True,
    ) -> None:
        self.rank = rank
        self.model = toy(rank, norm=True, rebuild=False)
        self.world = Overfitting(self.model)
        self.optimizer = AdamW(self.model.parameters(), lr=LR)
        with short_trials():
            self.scheduler = self.scheduler_of(kind, gradients, probed)
        self.start = parameters(self.model), buffers(self.model)
        self.step = 0
        self.rates: list[float] = []
        self.restarts: list[int] = []
        self.records: list[Any] = []
        self.scheduler.on_record(self.records.append)

    def scheduler_of(self, kind: str, gradients: str, probed: bool) -> Any:
        probe = self.world.losses if probed else None
        if kind == "one cycle":
            return OneCycleAutoLR(
                self.optimizer, LR, total_steps=S, rule="auto", model=self.model,
                probe=probe, cycle_momentum=False, gradients=gradients,
            )  # fmt: skip
        return AutoLR(
            CosineAnnealingLR(self.optimizer, S),
            HDETConfig(rule="auto", total_steps=S, gradients=gradients),
            model=self.model,
            probe=probe,
        )

    def train(self, until: int) -> None:
        while self.step < until:
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            learn(self.model, self.optimizer, self.step, self.rank)
            self.scheduler.step(self.world.trained())
            self.step += 1
            if any(r.restart and r.step == self.step for r in evaluations(self.records)[-1:]):
                self.restarts.append(self.step)

    def begin(self) -> None:
        """To the first step of the run."""
        while self.scheduler.searching:
            self.train(self.step + 1)

    def until_restart(self) -> None:
        """To the step after which the run restarts."""
        had = len(self.restarts)
        while len(self.restarts) == had:
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
                self.scheduler.state_dict()["hdet"],
                self.scheduler.get_last_lr(),
            ]
        )


def _a_whole_run(rank: int, size: int, kind: str) -> Any:
    run = Run(rank, kind)
    run.begin()
    proposed = scale_of(run.scheduler)
    run.until_restart()
    back, scale = run.is_back(), scale_of(run.scheduler)
    while run.scheduler.watching:
        run.train(run.step + 1)
    evaluated, over, first = run.world.evaluations, run.step, run.restarts[-1]
    with traffic() as after:
        run.train(over + 20)
    phase = run.scheduler.phase
    run.train(S)
    hooks = len(run.optimizer._optimizer_step_pre_hooks) + len(run.model._forward_pre_hooks)
    return {
        "proposed": proposed, "back": back, "scale": scale, "over": over, "first": first,
        "rates": run.rates, "parameters": parameters(run.model), "after": after, "hooks": hooks,
        "evaluated": run.world.evaluations - evaluated, "distance": run.world.distance(),
        "restarts": run.restarts, "evaluations": evaluations(run.records), "phase": phase,
    }  # fmt: skip


def _plain(rank: int, size: int, first: int, rates: list[float], over: int) -> Any:
    """Plain DDP at the rates of the run, from its restart on."""
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
def test_a_run_that_overfits_restarts_and_is_plain_ddp_after_it(pair: Fleet, kind: str) -> None:
    one, two = pair.run(_a_whole_run, kind)
    assert one["back"]
    assert two["back"]
    assert one["proposed"] == two["proposed"] > 1.25, "the search proposed a higher rate"
    assert one["scale"] == two["scale"] < one["proposed"]
    assert one["restarts"] == two["restarts"]
    assert abs(math.log2(one["distance"] / TURN)) < 0.5, "it ends about where the loss is lowest"
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
    first, left = one["first"], S - one["first"]
    scale = one["evaluations"][-1].scale
    expected = [scale * whole[t * S // left] for t in range(left)]
    assert one["rates"][first:] == pytest.approx(expected, rel=1e-12)
    # Bit for bit plain training, and nothing of ours once the watch is over.
    plain = pair.run(_plain, first, one["rates"][first:], one["over"])
    assert same(one["parameters"], two["parameters"], *(weights for weights, _ in plain))
    assert one["over"] <= 0.75 * S
    assert one["after"] == plain[0][1]
    assert one["evaluated"] == one["hooks"] == 0
    assert one["phase"] == "plain"
    assert [e.step for e in one["evaluations"] if e.restart] == one["restarts"]
    for evaluation in one["evaluations"]:
        assert math.isfinite(evaluation.loss)
        assert len(evaluation.losses) == 8
        assert evaluation.rates == {"lr/group0": one["rates"][evaluation.step - 1]}
        assert bool(evaluation.verdict) is evaluation.restart


def _interrupted(rank: int, size: int, kind: str, moment: str, own: bool) -> tuple[Any, Any, bool]:
    whole = Run(rank, kind)
    whole.begin()
    if moment != "first":
        whole.train(whole.step + 20)
    if moment in ("restarted", "evaluated again"):
        whole.until_restart()
    if moment == "evaluated again":
        whole.train(whole.step + 85)
    file = [whole.save(own=own)]
    if not own:
        dist.broadcast_object_list(file)  # replica 0's for all
    watched = whole.scheduler.watching
    if moment in ("first", "evaluated"):
        whole.until_restart()
    else:
        whole.train(whole.step + 85)
    whole.train(end := whole.step + 10)
    again = Run(rank, kind)
    again.load(file[0])
    again.train(end)
    return whole.everything(), again.everything(), watched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["first", "evaluated", "restarted", "evaluated again"])
def test_resume_is_bit_for_bit_in_every_phase(pair: Fleet, kind: str, moment: str) -> None:
    for own in (False, True) if moment == "evaluated" else (False,):
        for whole, again, watched in pair.run(_interrupted, kind, moment, own):
            assert watched
            assert whole == again


DECISION = "hdet_scale.search.decision"


def _contested(rank: int, size: int, lr: float) -> Any:
    """The trial at the initial rate counts as diverged: the run itself has to decide."""
    with (
        mock.patch(f"{DECISION}.RateSearch._at_initial", [math.inf, math.inf]),
        mock.patch(f"{DECISION}.LEARNT", -1.0),
        mock.patch("tests.phases.test_watched.LR", lr),
    ):
        run = Run(rank)
        rule = run.scheduler._phase.rule
        run.begin()
        proposed, searched, verdict = rule.scale, run.step, run.scheduler.verdict
        first = scale_of(run.scheduler)
        run.until_restart()
        rate, now = run.rates[searched], scale_of(run.scheduler)
        run.train(searched + 250)
    return {
        "proposed": proposed, "first": first, "verdict": verdict, "rate": rate, "now": now,
        "restarts": run.restarts, "watching": run.scheduler.watching,
        "parameters": parameters(run.model),
    }  # fmt: skip


def test_a_contested_lower_rate_is_taken_by_the_run_itself(pair: Fleet) -> None:
    one, two = pair.run(_contested, 3.0)
    assert one["proposed"] < 0.1
    assert one["first"] == 1.0
    assert "so that the run has to decide" in one["verdict"]
    assert one["rate"] == pytest.approx(3.0 / 25), "the user's own schedule"
    assert one["restarts"]
    assert one["now"] == pytest.approx(one["proposed"], rel=1e-12)
    assert one["watching"]
    assert same(one["parameters"], two["parameters"])


def _duel(rank: int, size: int) -> Any:
    """From far too high, by levels that are all noise, where the initial rate learnt too."""
    with (
        mock.patch(f"{DECISION}.RateSearch._at_initial", [0.0, 0.0]),
        mock.patch(f"{DECISION}.CLEAR", math.inf),
        mock.patch(f"{DECISION}.LEARNT", -1.0),
        mock.patch("tests.phases.test_watched.LR", 3.0),
    ):
        run = Run(rank)
        rule = run.scheduler._phase.rule
        run.begin()
    watch = run.scheduler._phase.watch
    return rule.duel, rule.scale, watch.duel, watch.contested, watch.scale


def test_a_lower_rate_by_noisy_levels_is_a_duel_in_the_run(pair: Fleet) -> None:
    """What the search decided reaches the watch."""
    for duel, proposed, watched, contested, scale in pair.run(_duel):
        assert duel is watched is contested is True
        assert proposed < 0.5
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
    with short_trials():
        scheduler = OneCycleAutoLR(
            optimizer, LR, total_steps=S, rule="auto", model=model, probe=probe,
            cycle_momentum=False,
        )  # fmt: skip
    step = 0
    while scheduler.searching or (scheduler.watching and step < 120):
        scheduler.step(learn(model, optimizer, step, rank))
        step += 1
    return step, len(seen), scheduler.verdict, model.require_forward_param_sync


def test_more_replicas_than_batches_do_not_wait_for_each_other(pair: Fleet) -> None:
    one, two = pair.run(_few_batches)
    assert one[0] == two[0] == 120
    assert one[1] > two[1], "the second has no batch at an evaluation"
    assert one[2].startswith("proposed")
    assert one[3] is two[3] is True


def _not_watched(rank: int, size: int, why: str) -> Any:
    run = Run(rank, gradients="local" if why == "local" else "shared", probed=why != "no probe")
    run.begin()
    evaluated = run.world.evaluations
    run.train(run.step + 30)
    return run.scheduler.phase, run.world.evaluations - evaluated, run.scheduler.snapshot


@pytest.mark.parametrize(("why", "phase"), [("no probe", "plain"), ("local", "exploring")])
def test_without_a_probe_or_with_local_gradients_nothing_is_watched(
    pair: Fleet, why: str, phase: str
) -> None:
    for told in pair.run(_not_watched, why):
        assert told == (phase, 0, None)


def _sharded(rank: int, size: int, how: str, folder: str) -> Any:
    """Two replicas of two shards: back to the snapshot; and a resume from the watch."""

    def build() -> tuple[Any, Any, Any, Overfitting]:
        mesh = fsdp.build_mesh(shards=2, device="cpu")
        torch.manual_seed(0)
        model = toy(wrap=False)
        fully_shard(model.inner, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        world = Overfitting(model)
        optimizer = AdamW(model.parameters(), lr=LR)
        inner = CosineAnnealingLR(optimizer, S)
        config = HDETConfig(rule="auto", total_steps=S)
        with short_trials():
            replicas = Replicas.from_mesh(mesh)
            scheduler = AutoLR(inner, config, replicas=replicas, probe=world.losses)
            fsdp.attach(model, optimizer, scheduler, mesh=mesh)
        return model, optimizer, scheduler, world

    def mine(model: nn.Module) -> list[Tensor]:
        return [local(p).detach().clone() for p in model.parameters()]

    model, optimizer, scheduler, world = build()
    start, records, step = mine(model), [], 0
    scheduler.on_record(records.append)

    def train(model: Any, optimizer: Any, scheduler: Any, world: Overfitting, step: int) -> None:
        learn(model, optimizer, step, rank)
        scheduler.step(world.trained())

    saved: Any = None
    while not any(r.restart for r in evaluations(records)) and step < S:
        train(model, optimizer, scheduler, world, step)
        step += 1
        if saved is None and scheduler.watching:
            own = scheduler.replica_state_dict()
            saved = copy.deepcopy((scheduler.state_dict(), own, step))
            assert saved[0]["hdet"]["snapshot"] is None, "no rank holds all of it"
            if how == "files":
                scheduler.save_snapshot(folder)
    back = same(mine(model), start)
    for _ in range(3):
        train(model, optimizer, scheduler, world, step)
        step += 1
    after = mine(model)
    # The run began at the snapshot: a fresh model is what the saved one was.
    model, optimizer, scheduler, world = build()
    scheduler.load_state_dict(saved[0])
    if how == "own state":
        scheduler.load_replica_state_dict(saved[1])
    scheduler.load_snapshot(folder)
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet_scale").addHandler(handler)
    for at in range(saved[2], step):
        train(model, optimizer, scheduler, world, at)
    logging.getLogger("hdet_scale").removeHandler(handler)
    resumed = same(mine(model), after)
    return back, after, resumed, warned, scheduler.replicas.shard_rank, scheduler.phase


@pytest.mark.parametrize("how", ["own state", "files", "nothing"])
def test_sharded_replicas_go_back(quartet: Fleet, tmp_path: Path, how: str) -> None:
    """A resume goes back too where each rank has its slices of the snapshot."""
    out = quartet.run(_sharded, how, str(tmp_path))
    lost = how == "nothing"
    for back, _, resumed, warned, _, phase in out:
        assert back
        assert resumed is not lost
        assert any("no snapshot to go back to" in text for text in warned) is lost
        assert phase == ("plain" if lost else "watched")
    for shard in (0, 1):
        one, two = (after for _, after, _, _, at, _ in out if at == shard)
        assert same(one, two)


def _declared(rank: int, size: int) -> Any:
    """Replicas that were declared before the process group: it is found at the evaluation."""
    model = toy(rank)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleAutoLR(optimizer, 1e-3, 100, model=model, rank=rank, world_size=size)
    run = scheduler._run
    run.engine.replicas = Replicas(rank=rank, size=size)
    probe = Probe(lambda: [0.5 + rank, 1.5 + rank], run.engine)
    return evaluate(probe, run, 2.0 * rank)


def test_an_evaluation_finds_the_process_group_of_declared_replicas(pair: Fleet) -> None:
    for losses, trained in pair.run(_declared):
        assert losses == [1.0, 2.0]
        assert trained == 1.0
