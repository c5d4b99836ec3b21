"""A search in real processes: what each replica trains, what all hold after it, and the plain run
that follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet_scale import AutoLR, HDETConfig, OneCycleAutoLR, Replicas, fsdp
from hdet_scale.search.constants import STEP
from hdet_scale.topology import local
from tests.support.fleet import Fleet
from tests.support.searching import (
    ABOVE,
    BATCHES,
    BOTH,
    FIRST,
    HIGH,
    KINDS,
    LOW,
    RIGHT,
    ROUNDS,
    STEPS,
    UNCLEAR,
    Run,
    S,
    held_out,
    optimizer_for,
    rates_of_a_search,
    scale_of,
    settled,
    whole_schedule,
)
from tests.support.toy import batch, learn, parameters, same, toy
from tests.support.traffic import traffic

NEAR = (-1, 0, 1)
SIZES = (2, 4)


@pytest.fixture(params=SIZES, ids=lambda n: f"{n} replicas")
def replicas(request: pytest.FixtureRequest, fleets: Any) -> Fleet:
    fleet: Fleet = fleets(request.param)
    return fleet


# -- the trials -----------------------------------------------------------------------------------


def _step_by_step(rank: int, size: int, kind: str, lr: float) -> Any:
    """What a replica holds before each step, and the rates of the search."""
    run = Run(rank, kind, lr)
    start, begins = run.held(), []
    while run.scheduler.searching:
        if run.scheduler._phase.step == 0:
            begins.append((run.step, run.held() == start))
        run.train(run.step + 1)
    return {
        "rates": run.rates, "begins": begins, "start": start, "stepped": run.stepped,
        "held": run.held(), "result": run.scheduler.search_result, "records": run.records,
        "scale": scale_of(run.scheduler), "verdict": run.scheduler.verdict,
        "phase": run.scheduler.phase, "boundary": run.scheduler.at_boundary,
    }  # fmt: skip


def assert_trials(out: list[Any], kind: str, lr: float, stages: dict[str, Any]) -> None:
    """Each replica steps with the rates of its team; explorers begin at the snapshot's bits."""
    size = len(out)
    for rank, run in enumerate(out):
        wanted = rates_of_a_search(rank, size, kind, lr, stages)
        assert run["rates"] == pytest.approx(wanted, rel=1e-12)
        begins, step = [], 0
        for stage, offsets in stages.items():
            for _ in range(ROUNDS[size]):
                again = step == 0 or (min(offsets) < -1 and step == FIRST)
                begins.append((step, rank > 0 or again))
                step += STEPS[stage, size]
        assert run["begins"] == begins, "the snapshot, but for the replica that goes on"
        assert run["start"] == out[0]["start"]
        assert run["result"] == out[0]["result"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_rate_is_right_keeps_it_and_its_head_start(replicas: Fleet, kind: str) -> None:
    """At a quarter of the rate and with the schedule's warm-up; after the first stage if the rate
    is well ahead of those beside it."""
    clear = (replicas.size, kind) != (4, "one cycle")
    lr = RIGHT[replicas.size] if clear else UNCLEAR
    out = replicas.run(_step_by_step, kind, lr)
    assert_trials(out, kind, lr, {"first": NEAR} if clear else {"first": NEAR, "second": NEAR})
    for run in out:
        assert run["held"] == out[0]["stepped"], "weights, buffers and moments of the first"
        assert run["result"].steps == (FIRST if clear else BOTH)
        assert run["result"].head_start
        assert run["result"].proposed is None
        assert run["scale"] == 1.0
        why = "ahead of the rates beside it" if clear else "no other rate learnt more in its trial"
        assert run["verdict"].endswith(why)
        assert (run["phase"], run["boundary"]) == ("watched", True)
    explorers = [run["stepped"] for run in out[1:]]
    assert all(stepped != out[0]["held"] for stepped in explorers)
    moved = out[0]["held"] != out[0]["start"]
    assert moved


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_rate_is_too_low_is_moved_up(replicas: Fleet, kind: str) -> None:
    """The second stage looks a step further; the head start stays, since its rate was lower."""
    lr = LOW
    out = replicas.run(_step_by_step, kind, lr)
    assert_trials(out, kind, lr, {"first": NEAR, "second": (0, 1, 2)})
    result = out[0]["result"]
    assert result.taken == result.proposed
    assert result.taken[0] in (pytest.approx(10 * lr), pytest.approx(100 * lr))
    assert result.head_start
    for run in out:
        assert run["held"] == out[0]["stepped"]
        assert run["scale"] == pytest.approx(result.taken[0] / lr, rel=1e-12)


def test_a_run_whose_rate_is_too_high_is_moved_down(replicas: Fleet) -> None:
    """What goes on with the run begins again at a lower rate for the second stage, and is kept."""
    lr = ABOVE[replicas.size]
    out = replicas.run(_step_by_step, "cosine", lr)
    assert_trials(out, "cosine", lr, {"first": NEAR, "second": (-2, -1, 0)})
    result = out[0]["result"]
    assert result.taken == (pytest.approx(lr / STEP),)
    assert result.head_start
    for run in out:
        assert run["held"] == out[0]["stepped"] != run["start"]


def test_a_run_whose_rate_is_far_too_high_begins_at_its_initial_weights(replicas: Fleet) -> None:
    out = replicas.run(_step_by_step, "one cycle", HIGH)
    assert_trials(out, "one cycle", HIGH, {"first": NEAR, "second": (-2, -1, 0)})
    assert out[0]["result"].taken == (pytest.approx(HIGH / STEP**2),)
    assert not out[0]["result"].head_start
    for run in out:
        assert run["held"] == run["start"], "without an entry in the optimizer's state"


def test_what_a_listener_is_told_of_a_search(replicas: Fleet) -> None:
    """A record for each rate, with the peak that was trained; then one for the search."""
    lr = LOW
    out = replicas.run(_step_by_step, "one cycle", lr)
    *trials, end = out[0]["records"]
    result = out[0]["result"]
    assert [r.kind for r in trials] == ["trial"] * 6
    assert [r.trial for r in trials] == list(range(6))
    assert [r.stage for r in trials] == ["first"] * 3 + ["second"] * 3
    each = [STEPS[r.stage, replicas.size] for r in trials]
    if ROUNDS[replicas.size] == 1:
        assert [r.step for r in trials] == [FIRST] * 3 + [BOTH] * 3
    else:
        assert [r.step for r in trials] == [sum(each[: i + 1]) for i in range(6)]
    assert [bool(r.verdict) for r in trials] == [False, False, True] * 2
    assert trials[2].verdict == "the second stage tries 1, 10, 100 x the initial rate"
    for record, point in zip(trials, result.curve, strict=True):
        assert record.loss == point.loss
        if replicas.size == 4 or point.rates[0] >= lr:
            assert record.error == point.error, "once the initial rate's trial is known"
        assert record.rates == {
            "lr/group0": pytest.approx(point.rates[0] / record.translation, rel=1e-12)
        }
    if replicas.size == 2:  # the explorer's peaks, one round after the other
        begin = 0
        for record in trials:
            used = max(out[1]["rates"][begin : record.step])
            assert record.rates["lr/group0"] == pytest.approx(used, rel=1e-12)
            begin = record.step
    assert (end.kind, end.trials, end.completed, end.step) == ("search", 6, True, BOTH)
    assert end.verdict == trials[-1].verdict == result.verdict == out[0]["verdict"]
    assert end.initial == {"lr/group0": lr}
    assert end.taken == {"lr/group0": pytest.approx(result.taken[0], rel=1e-12)}
    told = [[_told(r) for r in run["records"]] for run in out]
    assert all(one == told[0] for one in told), "the same on every rank"


def _told(record: Any) -> str:
    names = (n for n in record.__slots__ if n != "seconds")
    return str([getattr(record, name) for name in names])


def _beside_local_training(rank: int, size: int, lr: float) -> bool:
    """The last trial, and plain training of this replica alone at its rates."""
    run = Run(rank, lr=lr)
    run.search()
    last = STEPS["second", size]
    first = 0 if rank == 0 else len(run.rates) - last
    model = settled(toy(wrap=False, norm=True))
    optimizer = optimizer_for(model)
    for step in range(first, len(run.rates)):
        optimizer.param_groups[0]["lr"] = run.rates[step]
        learn(model, optimizer, step, rank)
    beside = Run.__new__(Run)
    beside.model, beside.optimizer = model, optimizer
    return bool(beside.held() == run.stepped)


def test_a_trial_is_local_training_from_the_snapshot(replicas: Fleet) -> None:
    """To the bit, and so is the head start, over the whole search."""
    assert replicas.run(_beside_local_training, LOW) == [True] * replicas.size


# -- the run afterwards ---------------------------------------------------------------------------


AFTER = 40
"""Steps of the run that are compared with plain training."""


def _then_the_run(
    rank: int, size: int, kind: str, lr: float, probed: bool, counted: int = 0
) -> Any:
    """Collectives of the search are counted from its step `counted` on."""
    run = Run(rank, kind, lr, probed=probed)
    run.train(counted)
    with traffic() as during:
        run.search()
    searched, state, scale = run.step, run.save(), scale_of(run.scheduler)
    tensors = len(parameters(run.model)) + len(list(run.model.buffers()))
    tensors += sum(len(state or {}) for state in run.moments())
    if run.scheduler.watching:
        run.scheduler._phase.watch.next = 10
    with traffic() as after:
        run.train(searched + AFTER)
    return {
        "searched": searched, "during": during, "after": after, "scale": scale, "state": state,
        "evaluations": sum(r.kind == "evaluation" for r in run.records), "rates": run.rates,
        "held": run.held(), "tensors": tensors, "result": run.scheduler.search_result,
    }  # fmt: skip


def _plain(rank: int, size: int, state: Any, rates: list[float]) -> Any:
    """Plain DDP at the rates of the run, from the weights and moments that the search left."""
    run = Run.__new__(Run)
    run.model = toy(rank, norm=True, rebuild=False)
    run.optimizer = optimizer_for(run.model)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    with traffic() as counted:
        for step in range(state["step"], len(rates)):
            run.optimizer.param_groups[0]["lr"] = rates[step]
            learn(run.model, run.optimizer, step, rank)
    return run.held(), counted


@pytest.mark.parametrize(
    ("which", "kind", "probed"),
    [("right", "one cycle", False), ("right", "one cycle", True), ("low", "cosine", True)],
)
def test_after_the_search_the_run_is_plain_ddp_bit_for_bit(
    replicas: Fleet, which: str, kind: str, probed: bool
) -> None:
    """And collective for collective: during the search one all-reduce a round, and at its end a
    broadcast of what the first replica holds; afterwards what plain DDP sends, and one all-reduce
    an evaluation."""
    size, lr = replicas.size, RIGHT[replicas.size] if which == "right" else LOW
    counted = 0 if which == "right" else BOTH - STEPS["second", size]
    out = replicas.run(_then_the_run, kind, lr, probed, counted)
    plain = replicas.run(_plain, out[0]["state"], out[0]["rates"])
    searched, scale = out[0]["searched"], out[0]["scale"]
    left, whole = S - searched, whole_schedule(kind, lr)
    expected = [scale * whole[t * S // left] for t in range(AFTER)]
    stages = len({point.stage for point in out[0]["result"].curve})
    assert searched == (FIRST if stages == 1 else BOTH)
    rounds = stages * ROUNDS[size] if which == "right" else 1
    for run, (held, sent) in zip(out, plain, strict=True):
        assert run["during"] == {
            "allreduce_": rounds,
            "broadcast_": 2 + run["tensors"],
        }
        assert run["rates"][searched:] == pytest.approx(expected, rel=1e-12)
        assert run["held"] == held
        assert bool(run["evaluations"]) is probed
        evaluated = {"allreduce_": run["evaluations"]} if probed else {}
        assert run["after"] - sent == evaluated
        assert not sent - run["after"]


def test_a_search_whose_head_start_is_not_kept_broadcasts_nothing(replicas: Fleet) -> None:
    out = replicas.run(_then_the_run, "one cycle", HIGH, True, BOTH - 5)
    plain = replicas.run(_plain, out[0]["state"], out[0]["rates"])
    for run, (held, _) in zip(out, plain, strict=True):
        assert run["during"] == {"allreduce_": 1}
        assert run["held"] == held


# -- gradients ------------------------------------------------------------------------------------


def _gradients(rank: int, size: int) -> list[list[Tensor]]:
    run = Run(rank)
    out = []
    for _ in range(2):
        x, y = batch(run.step, rank)
        run.optimizer.zero_grad()
        (run.model(x) - y).square().mean().backward()
        out.append([p.grad.clone() for p in run.model.parameters() if p.grad is not None])
        run.search()
    return out


def test_gradients_stay_local_in_the_search_and_are_shared_after_it(pair: Fleet) -> None:
    one, two = pair.run(_gradients)
    assert not same(one[0], two[0])
    assert same(one[1], two[1])


def _unwrapped(rank: int, size: int) -> str:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = OneCycleAutoLR(optimizer, 0.1, total_steps=S, rule="auto", cycle_momentum=False)
    try:
        scheduler.step(learn(model, optimizer, 0, rank))
    except RuntimeError as error:
        return str(error)
    return ""


def test_replicas_whose_gradients_cannot_stay_local_are_refused(pair: Fleet) -> None:
    for said in pair.run(_unwrapped):
        assert "pass model=" in said


def _native(rank: int, size: int) -> str:
    mesh = fsdp.build_mesh(shards=2, device="cpu")
    model = toy(wrap=False)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=LOW)
    inner, config = CosineAnnealingLR(optimizer, S), HDETConfig(rule="auto", total_steps=S)
    try:
        fsdp.attach(model, optimizer, inner, config=config)
    except ValueError as error:
        return str(error)
    return ""


def test_replicas_whose_gradients_hsdp_averages_are_refused(quartet: Fleet) -> None:
    for said in quartet.run(_native):
        assert "mesh=mesh['shard']" in said


class Team:
    """Plain training on the batches of some ranks, beside the first steps of a trial."""

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
    """Four replicas in two teams: ranks 0 and 1 go on with the run, 2 and 3 run the trials."""
    with mock.patch("hdet_scale.search.trials.TEAMS", 2):
        model, mesh = toy(wrap=False), None
        if engine == "ddp":
            model = DistributedDataParallel(model)
        else:
            mesh = fsdp.build_mesh(shards=1, device="cpu")
            fully_shard(model, mesh=mesh["shard"])
        optimizer = AdamW(model.parameters(), lr=0.01)
        config = HDETConfig(rule="auto", total_steps=S)
        where = Replicas.world() if mesh is None else Replicas.from_mesh(mesh)
        scheduler = AutoLR(
            CosineAnnealingLR(optimizer, S), config,
            model=model if mesh is None else None, replicas=where, probe=held_out(model),
        )  # fmt: skip
        if mesh is not None:
            fsdp.attach(model, optimizer, scheduler, mesh=mesh)
        search, step, seen = scheduler._phase, 0, []

        def whole() -> list[Tensor]:
            return [local(p).detach().clone() for p in model.parameters()]

        mates = [rank // 2 * 2, rank // 2 * 2 + 1]
        beside = Team(mates)
        while scheduler.searching:
            if search.step == 0 and rank > 1:
                beside = Team(mates)
            if search.step < 5 or rank < 2:
                beside.step(step, optimizer.param_groups[0]["lr"])
            scheduler.step(learn(model, optimizer, step, rank))
            step += 1
            if search.step == 5:
                seen.append((whole(), parameters(beside.model)))
        result, equal = scheduler.search_result, whole()
    for after in range(3):
        scheduler.step(learn(model, optimizer, step + after, rank))
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return {"seen": seen, "equal": equal, "end": whole(), "hooks": hooks, "result": result}


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_replicas_of_a_team_train_as_one(quartet: Fleet, engine: str) -> None:
    """With the mean of their gradients, and nothing of the other team's."""
    out = quartet.run(_teams, engine)
    for run in out:
        assert len(run["seen"]) == len(run["result"].curve) in (3, 6)
        for got, wanted in run["seen"]:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    for trial in range(len(out[0]["seen"])):
        weights = [run["seen"][trial][0] for run in out]
        assert same(weights[0], weights[1])
        assert same(weights[2], weights[3])
        assert not same(weights[0], weights[2])
    assert same(*[run["equal"] for run in out])
    assert same(*[run["end"] for run in out]), "after the search gradients are shared by all"
    if engine == "ddp":
        assert [run["hooks"] for run in out] == [0] * 4


# -- what goes wrong ------------------------------------------------------------------------------


def _not_finite(rank: int, size: int, bad: tuple[int, ...]) -> Any:
    """The weights of some replicas are NaN after each step of the search."""
    run = Run(rank)
    start = run.held()
    while run.scheduler.searching:
        loss = learn(run.model, run.optimizer, run.step, rank)
        if rank in bad:
            with torch.no_grad():
                for tensor in (*run.model.parameters(), *run.model.buffers()):
                    if tensor.is_floating_point():
                        tensor.fill_(math.nan)
        run.stepped = run.held()
        run.scheduler.step(loss)
        run.step += 1
    held, result = run.held(), run.scheduler.search_result
    run.train(run.step + 30)
    finite = all(bool(w.isfinite().all()) for w in parameters(run.model))
    return held == start, held, run.stepped, result, finite


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)])
def test_replicas_of_nans_leave_a_finite_run(pair: Fleet, bad: tuple[int, ...]) -> None:
    """NaN on the replica that goes on: its weights are not kept. On the explorer: no rate is."""
    one, two = pair.run(_not_finite, bad)
    result = one[3]
    assert str(result) == str(two[3])
    assert one[4]
    assert two[4]
    assert result.head_start is (0 not in bad)
    if 0 in bad:
        assert one[0]
        assert two[0]
    else:
        assert one[1] == two[1] == one[2]
    if 1 in bad:
        assert result.proposed is None
        assert result.verdict == "the initial rate stays: no trial stayed finite"
        assert all(p.loss == math.inf for p in result.curve)
    else:
        assert result.taken[0] > LOW, "the trials themselves were not touched"


def _told_nan(rank: int, size: int) -> Any:
    """Without a probe; the replica of the higher rate tells NaN at a single step of its end."""
    run = Run(rank, lr=RIGHT[4], probed=False, best=1)
    run.search()
    clean = run.scheduler.search_result
    other = Run(rank, lr=RIGHT[4], probed=False, best=1)
    while other.scheduler.searching:
        loss: Any = other.told(learn(other.model, other.optimizer, other.step, rank))
        if rank == 3 and other.scheduler._phase.step == other.scheduler._phase.trial.steps - 2:
            loss = math.nan
        other.scheduler.step(loss)
        other.step += 1
    return clean, other.scheduler.search_result, other.held()


def test_a_rate_whose_loss_was_nan_is_not_taken(quartet: Fleet) -> None:
    out = quartet.run(_told_nan)
    clean, result, held = out[0]
    assert clean.taken[0] == pytest.approx(10 * RIGHT[4]), "what it takes without the NaN"
    assert [p.loss == math.inf for p in result.curve][:3] == [False, False, True]
    assert result.proposed is None
    for _, other, theirs in out:
        assert str(other) == str(result)
        assert theirs == held


def _skips(rank: int, size: int, skipped: list[int], probed: bool) -> Any:
    """Rank 1 makes none of these optimizer steps, as after an overflow that it alone has seen."""
    run = Run(rank, probed=probed)
    while run.scheduler.searching:
        if rank == 1 and run.step in skipped:
            x, y = batch(run.step, rank)
            (run.model(x) - y).square().mean().backward()
            run.scheduler.step(None)
        else:
            run.scheduler.step(run.told(learn(run.model, run.optimizer, run.step, rank)))
        run.step += 1
    known = len(run.scheduler._phase.watch.start) if probed else 0
    return run.step, run.held(), run.scheduler.search_result, run.scheduler.phase, known


SKIPPED = {
    "the first": [0],
    "a round": list(range(STEPS["first", 2])),
    "the end of a round": list(range(STEPS["first", 2] * 2 // 3, STEPS["first", 2])),
    "some": [3, STEPS["first", 2] + 1, FIRST + 2],
    "all": list(range(S)),
}


@pytest.mark.parametrize("probed", [False, True], ids=["no probe", "probe"])
@pytest.mark.parametrize("skipped", SKIPPED.values(), ids=SKIPPED)
def test_a_replica_that_skips_steps_holds_what_the_others_hold(
    pair: Fleet, skipped: list[int], probed: bool
) -> None:
    """It hangs nobody, and the initial weights are evaluated on all batches."""
    one, two = pair.run(_skips, skipped, probed)
    assert one[0] == two[0]
    assert one[1] == two[1]
    assert str(one[2]) == str(two[2]), "a loss that is not known is NaN"
    assert one[3] == two[3] == ("watched" if probed else "plain")
    assert one[2].head_start
    if probed:
        assert one[4] == two[4] == BATCHES, "of the initial weights"
    elif len(skipped) >= STEPS["first", 2]:
        assert one[2].curve[0].loss == math.inf, "a rate without any loss"
