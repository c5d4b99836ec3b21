"""The watch in real processes: evaluations, lower rates with and without going back, resume, and
plain training once it is over."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from hdet_scale import OneCycleAutoLR, Replicas
from hdet_scale.phases.watched import evaluate
from hdet_scale.search.constants import STEP, UNTIL
from hdet_scale.search.probe import Probe, common_batches
from tests.support.fleet import Fleet
from tests.support.searching import BATCHES, KINDS, RIGHT, Run, S, optimizer_for, whole_schedule
from tests.support.searching import FIRST as SEARCHED
from tests.support.toy import bits, learn, toy
from tests.support.traffic import traffic
from tests.support.watching import (
    AGAIN,
    BACK,
    EVALUATIONS,
    LEARNS,
    LEFT,
    LOWERED,
    ONCE,
    SCRIPT,
    Watching,
    evaluations,
)


def warnings_of(work: Any) -> list[str]:
    """What the package warns of meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hdet_scale")
    logger.addHandler(handler)
    try:
        work()
    finally:
        logger.removeHandler(handler)
    return lines


# -- a whole run ----------------------------------------------------------------------------------


def _a_whole_run(rank: int, size: int, kind: str, budget: float) -> Any:
    run = Watching(rank, kind, restart_budget=budget)
    kept, over, state = set(), 0, None

    def train() -> None:
        nonlocal over, state
        while run.step < S - 10:
            run.train(run.step + 1)
            if run.scheduler.watching:
                kept.add(run.scheduler.snapshot is not None)
                over = run.step + 1
            if run.step == EVALUATIONS[LOWERED]:
                state = run.save()

    lines = warnings_of(train)
    calls, probe = [], run.scheduler._run.probe
    inner, probe.losses = probe.losses, lambda **parts: calls.append(1) or inner(**parts)
    with traffic() as after:
        run.train(S)
    return {
        "rates": run.rates, "before": run.before, "after": run.after, "state": state,
        "evaluations": evaluations(run.records), "kept": kept, "over": over, "lines": lines,
        "traffic": after, "calls": len(calls), "phase": run.scheduler.phase, "held": run.held(),
        "snapshot": run.scheduler.snapshot,
    }  # fmt: skip


def _plain(rank: int, size: int, state: Any, rates: list[float], end: int) -> Any:
    """Plain DDP at the rates of the run, from the state of one moment to another."""
    run = Run.__new__(Run)
    run.model = toy(rank, norm=True, rebuild=False)
    run.optimizer = optimizer_for(run.model)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    for step in range(state["step"], end):
        run.optimizer.param_groups[0]["lr"] = rates[step]
        learn(run.model, run.optimizer, step, rank)
    held = run.held()
    with traffic() as counted:
        for step in range(S - 10, S):
            learn(run.model, run.optimizer, step, rank)
    return held, counted


@pytest.mark.parametrize("budget", [ONCE, 0.0], ids=["goes back once", "never goes back"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_loses_what_it_learnt_goes_on_at_a_lower_rate(
    pair: Fleet, kind: str, budget: float
) -> None:
    """The first time from the weights of the lowest loss, while the budget lasts; the second time
    from where it is. The schedule goes on in any case."""
    out = pair.run(_a_whole_run, kind, budget)
    scales = {LOWERED: 1 / STEP, AGAIN: 1 / STEP**2}
    for run in out:
        assert [e.step for e in run["evaluations"]] == EVALUATIONS
        scale, expected = 1.0, []
        for index, evaluation in enumerate(run["evaluations"]):
            step, back = evaluation.step, index == LOWERED and budget > 0
            wanted = run["after"][EVALUATIONS[BACK]] if back else run["before"][step]
            assert run["after"][step] == wanted
            scale = scales.get(index, scale)
            expected.append(scale)
            assert evaluation.scale == pytest.approx(scale, rel=1e-12)
            assert evaluation.restart is back
            assert bool(evaluation.verdict) is (index in scales)
            assert evaluation.rates == {"lr/group0": run["rates"][step - 1]}
            assert len(evaluation.losses) == BATCHES
            if index < len(SCRIPT):
                assert evaluation.losses[0] == pytest.approx(SCRIPT[index], rel=1e-6)
        whole = whole_schedule(kind, RIGHT[2])
        for t in range(LEFT):
            passed = sum(step <= SEARCHED + t for step in EVALUATIONS)
            now = expected[passed - 1] if passed else 1.0
            wanted_rate = now * whole[t * S // LEFT]
            assert run["rates"][SEARCHED + t] == pytest.approx(wanted_rate, rel=1e-12)
        assert run["kept"] == {budget > 0}, "without a budget nothing is kept"
        assert run["over"] <= SEARCHED + UNTIL * LEFT + 1
        assert (run["phase"], run["calls"], run["snapshot"]) == ("plain", 0, None)
    assert_told(out, back=budget > 0)
    plain = pair.run(_plain, out[0]["state"], out[0]["rates"], EVALUATIONS[AGAIN])
    for run, (held, counted) in zip(out, plain, strict=True):
        assert run["before"][EVALUATIONS[AGAIN]] == held, "plain DDP from one move to the next"
        assert run["traffic"] == counted


def assert_told(out: list[Any], *, back: bool) -> None:
    """A warning for each move, on one rank, as in the records."""
    moves = [e for e in out[0]["evaluations"] if e.verdict]
    assert out[0]["lines"] == [f"watch, step {e.step}: {e.verdict}" for e in moves]
    assert out[1]["lines"] == []
    steps = EVALUATIONS[LOWERED] - EVALUATIONS[BACK]
    assert f"{steps} steps ago: the rate is divided by {STEP:g}" in moves[0].verdict
    assert ("the weights go back there" in moves[0].verdict) is back
    assert "the weights go back there" not in moves[1].verdict


def _not_finite(rank: int, size: int, budget: float) -> Any:
    run = Watching(rank, script=[*LEARNS, math.inf], restart_budget=budget)
    run.train(EVALUATIONS[len(LEARNS)])
    step, best = run.step, EVALUATIONS[BACK]
    return run.after[step] == run.after[best], run.after[step] == run.before[step], run.records[-1]


@pytest.mark.parametrize("budget", [1e-6, 0.0])
def test_a_loss_that_is_not_finite_goes_back_at_once(pair: Fleet, budget: float) -> None:
    """However many steps that discards, unless nothing is kept."""
    for back, stayed, record in pair.run(_not_finite, budget):
        assert back is (budget > 0)
        assert stayed is (budget == 0)
        assert record.restart is back
        assert record.scale == pytest.approx(1 / STEP)
        assert record.loss == math.inf


# -- resume ---------------------------------------------------------------------------------------

MOMENTS = {
    "the first step": SEARCHED,
    "before an evaluation": EVALUATIONS[0] - 1,
    "the lowest loss": EVALUATIONS[BACK],
    "after it": EVALUATIONS[BACK] + 3,
    "one failure": EVALUATIONS[BACK + 1] + 2,
    "lowered": EVALUATIONS[LOWERED],
    "lowered and on": EVALUATIONS[LOWERED] + 5,
    "lowered again": EVALUATIONS[AGAIN] + 1,
}


def _interrupted(rank: int, size: int, kind: str, budget: float, own: bool) -> Any:
    """A run that is saved at each moment; and one that goes on from each."""
    whole, saved = Watching(rank, kind, restart_budget=budget), []
    for moment in MOMENTS.values():
        whole.train(moment)
        saved.append(whole.save_for_all(own=own))
    whole.train(end := EVALUATIONS[AGAIN] + 4)
    alike, kept = [], []
    for state in saved:
        again = Watching(rank, kind, restart_budget=budget)
        again.load(state, own=own)
        assert again.scheduler.watching
        kept.append(state["scheduler"]["hdet"]["snapshot"] is not None)
        again.train(end)
        alike.append(
            compared(again, full=own or rank == 0) == compared(whole, full=own or rank == 0)
        )
    return dict(zip(MOMENTS, alike, strict=True)), kept


def compared(run: Watching, *, full: bool) -> Any:
    """Everything; without the buffers of the snapshot where another rank's were loaded: DDP makes
    those of the first replica everyone's in each forward, and a snapshot is taken after it."""
    state = run.scheduler.state_dict()["hdet"]
    if not full and state["snapshot"] is not None:
        weights = len(list(run.model.parameters()))
        state["snapshot"] = {**state["snapshot"], "tensors": state["snapshot"]["tensors"][:weights]}
    return [run.held(), bits([state, run.scheduler.get_last_lr()])]


@pytest.mark.parametrize("own", [False, True], ids=["one file", "own files"])
@pytest.mark.parametrize(("kind", "budget"), [("one cycle", ONCE), ("cosine", 0.0)])
def test_a_watch_resumes_to_the_bit(pair: Fleet, kind: str, budget: float, own: bool) -> None:
    """The snapshot is in the state: a resumed run goes back to the same weights."""
    for alike, kept in pair.run(_interrupted, kind, budget, own):
        assert alike == dict.fromkeys(MOMENTS, True)
        assert kept == [budget > 0] * len(MOMENTS)


# -- evaluations ----------------------------------------------------------------------------------


def _few_batches(rank: int, size: int) -> Any:
    """One batch for two replicas, of a model whose buffers DDP broadcasts in a forward."""
    model = toy(rank, norm=True, rebuild=False)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    seen = []

    def loss(batch: float) -> Tensor:
        seen.append(batch)
        return model(torch.full((4, 4), batch)).square().mean()

    probe = common_batches(iter([0.5]), loss, count=1)
    scheduler = OneCycleAutoLR(
        optimizer, 1e-4, total_steps=S, rule="auto", model=model, probe=probe,
        cycle_momentum=False,
    )  # fmt: skip
    step = 0
    while step < 240:
        scheduler.step(learn(model, optimizer, step, rank))
        step += 1
    watching, result = scheduler.watching, scheduler.search_result
    return watching, len(seen), str(result), result.proposed, model.require_forward_param_sync


def test_more_replicas_than_batches_do_not_wait_for_each_other(pair: Fleet) -> None:
    one, two = pair.run(_few_batches)
    assert one[0] is two[0] is True
    assert one[1] > two[1] > 0, "the second has no batch at an evaluation of equal weights"
    assert one[2] == two[2]
    assert one[3] is None, "the error of a single batch is not known"
    assert one[4] is two[4] is True


def _not_watched(rank: int, size: int, why: str) -> Any:
    local = "local" if why == "local" else "shared"
    run = Watching(rank, probed=why != "no probe", best=0, gradients=local)
    run.train(EVALUATIONS[0] + 2)
    return run.scheduler.phase, len(evaluations(run.records)), run.scheduler.snapshot


@pytest.mark.parametrize(("why", "phase"), [("no probe", "plain"), ("local", "exploring")])
def test_without_a_probe_or_with_local_gradients_nothing_is_watched(
    pair: Fleet, why: str, phase: str
) -> None:
    for told in pair.run(_not_watched, why):
        assert told == (phase, 0, None)


def _declared(rank: int, size: int) -> Any:
    """Replicas that were declared before the process group: it is found at the evaluation."""
    model = toy(rank)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleAutoLR(optimizer, 1e-3, 100, model=model, rank=rank, world_size=size)
    run = scheduler._run
    run.engine.replicas = Replicas(rank=rank, size=size)
    probe = Probe(lambda: [0.5 + rank, 1.5 + rank], run.engine)
    return evaluate(probe, run)


def test_an_evaluation_finds_the_process_group_of_declared_replicas(pair: Fleet) -> None:
    assert pair.run(_declared) == [[1.0, 2.0]] * 2


def test_an_engine_is_refused_during_a_watch() -> None:
    run = Run(0, lr=RIGHT[1], wrap=False)
    run.search()
    assert run.scheduler.watching
    with pytest.raises(ValueError, match="has taken a snapshot of the model as it was"):
        run.scheduler.attach_engine(run.scheduler.engine)
