"""Checkpoints of a search: at every step, for each replica or for all, and what is refused."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
from torch.optim import AdamW

from hdet_scale import HDETConfig, OneCycleAutoLR
from hdet_scale.ddp import warm_init
from hdet_scale.search.decision import SEARCH_VERSION
from tests.support.fleet import Fleet
from tests.support.searching import (
    BATCHES,
    BOTH,
    FIRST,
    HIGH,
    KINDS,
    LOW,
    RIGHT,
    STEPS,
    Run,
    S,
    held_out,
    hooks_of,
)
from tests.support.toy import batch, learn, parameters, same, toy

# -- a checkpoint of each replica -----------------------------------------------------------------


def _interrupted(
    rank: int, size: int, kind: str, lr: float, probed: bool, every: list[int], end: int
) -> Any:
    """A run that is saved after each of these steps; and one that goes on from each."""
    whole, saved, moments = Run(rank, kind, lr, probed=probed), [], [*every]
    while moments:
        whole.train(moments.pop(0))
        saved.append(whole.save())
    whole.train(end)
    bad, phases = [], []
    for state in saved:
        again = Run(rank, kind, lr, probed=probed)
        again.load(state)
        phases.append(again.scheduler.phase)
        again.train(end)
        tail = whole.records[len(whole.records) - len(again.records) :]
        if again.everything() != whole.everything() or told(again.records) != told(tail):
            bad.append(state["step"])
    return bad, phases


def told(records: list[Any]) -> list[str]:
    """The records, but for the time that they took."""
    return [
        str([getattr(record, name) for name in record.__slots__ if name != "seconds"])
        for record in records
    ]


@pytest.mark.parametrize("size", [2, 4], ids=lambda n: f"{n} replicas")
def test_a_search_resumes_to_the_bit_from_every_step(fleets: Any, size: int) -> None:
    every, kind = list(range(FIRST + 2)), {2: "one cycle", 4: "cosine"}[size]
    out = fleets(size).run(_interrupted, kind, RIGHT[size], True, every, FIRST + 5)
    for bad, phases in out:
        assert bad == []
        assert phases == ["searching"] * FIRST + ["watched"] * 2


MOMENTS = sorted(
    {
        1,
        STEPS["first", 2] - 1,
        FIRST - 1,
        FIRST,
        FIRST + 1,
        FIRST + STEPS["second", 2],
        FIRST + STEPS["second", 2] * 5 // 2,
        BOTH - 1,
        BOTH,
        BOTH + 3,
    }
)


@pytest.mark.parametrize(
    ("kind", "lr", "probed"),
    [("one cycle", LOW, True), ("cosine", HIGH, True), ("cosine", LOW, False)],
    ids=["moved up", "moved down", "no probe"],
)
def test_a_search_of_two_stages_resumes_to_the_bit(
    pair: Fleet, kind: str, lr: float, probed: bool
) -> None:
    """Also where what goes on with the run begins again between the stages."""
    last = "watched" if probed else "plain"
    for bad, phases in pair.run(_interrupted, kind, lr, probed, MOMENTS, BOTH + 6):
        assert bad == []
        assert phases == ["searching" if m < BOTH else last for m in MOMENTS]


def _skipped_and_saved(rank: int, size: int, forward: bool) -> bool:
    """Rank 1 has skipped its first three steps, after a forward or without."""

    def step(run: Run) -> None:
        if rank == 1 and run.step < 3:
            if forward:
                x, y = batch(run.step, rank)
                (run.model(x) - y).square().mean().backward()
            run.scheduler.step(None)
            run.step += 1
        else:
            run.train(run.step + 1)

    whole, again = Run(rank), Run(rank)
    for _ in range(2):
        step(whole)
    again.load(whole.save())
    for run in (whole, again):
        while run.step < FIRST + 3:
            step(run)
    return bool(whole.everything() == again.everything())


@pytest.mark.parametrize("forward", [True, False])
def test_a_replica_that_has_made_no_step_yet_resumes_too(pair: Fleet, forward: bool) -> None:
    """With or without a snapshot; its part of the initial losses is still to come."""
    assert pair.run(_skipped_and_saved, forward) == [True, True]


# -- one checkpoint for all -----------------------------------------------------------------------


def _agreed(rank: int, size: int, moment: int, how: str) -> Any:
    """One checkpoint for all ranks, made in the middle of a search."""
    run = Run(rank)
    start = run.held()
    run.train(moment)
    trial = run.scheduler._phase.trial
    getattr(run.scheduler, how)()
    agreed = run.held() == start and run.scheduler.at_boundary
    phase = run.scheduler._phase
    restarted = (phase.trial, phase.step, phase.head_steps) == (trial, 0, 0)
    saved, end = run.save(), BOTH + moment + 5
    run.train(end)
    again = Run(rank)
    again.load(saved, own=False)
    again.train(end)
    return {
        "agreed": agreed, "restarted": restarted, "run": run.scheduler.search_result,
        "again": again.scheduler.search_result, "alike": run.everything() == again.everything(),
        "rates": run.rates, "known": len(run.scheduler._phase.watch.start),
    }  # fmt: skip


@pytest.mark.parametrize("how", ["equalize", "finalize"])
@pytest.mark.parametrize(
    "moment", [2, STEPS["first", 2], FIRST + 5], ids=["trial", "round", "stage 2"]
)
def test_a_checkpoint_for_all_goes_back_and_starts_the_trial_again(
    pair: Fleet, moment: int, how: str
) -> None:
    """What went on with the run starts again too; what earlier rounds found is kept. The steps
    that were thrown away are part of the cost: the schedule has less left."""
    out = pair.run(_agreed, moment, how)
    for run in out:
        assert run["agreed"]
        assert run["restarted"]
        assert run["alike"]
        assert run["run"] == run["again"] == out[0]["run"]
        lost = {2: 2, STEPS["first", 2]: 0, FIRST + 5: 5}[moment]
        assert run["run"].steps == BOTH + lost
        assert run["run"].cost == run["run"].steps / S
        assert math.isfinite(run["run"].initial_loss)
        assert run["known"] == BATCHES
    goes_on = out[0]["rates"]
    assert goes_on[moment] == goes_on[0], "the warm-up of the head start begins again"


def _saves_too_often(rank: int, size: int) -> Any:
    """One checkpoint for all every third step, where trials have more."""
    lines: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda r: lines.append((r.levelname, r.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("hdet_scale")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel("INFO")
    run = Run(rank)
    start, longest = run.held(), run.scheduler._phase.rule.longest
    while run.scheduler.searching and run.step < S:
        run.train(run.step + 1)
        if run.step % 3 == 0:
            run.scheduler.equalize()
    logger.removeHandler(handler)
    logger.setLevel(level)
    hooks, back = hooks_of(run.model, run.optimizer), run.held() == start
    scheduler = run.scheduler
    return {
        "steps": run.step, "longest": longest, "back": back, "hooks": hooks, "lines": lines,
        "record": run.records[-1], "phase": scheduler.phase, "result": scheduler.search_result,
        "rate": scheduler.get_base_lr()[0],
    }  # fmt: skip


def test_a_search_that_never_ends_is_given_up(pair: Fleet) -> None:
    """After twice its length, with the initial weights and the initial rate."""
    one, two = pair.run(_saves_too_often)
    for run in (one, two):
        assert run["longest"] == BOTH
        assert 2 * BOTH <= run["steps"] < 2 * BOTH + 3
        assert run["back"]
        assert run["hooks"] == 0
        record = run["record"]
        assert record.verdict == "given up: checkpoints came more often than trials end"
        assert (record.kind, record.completed) == ("search", False)
        assert record.step == run["steps"], "a reader of the log knows where the run begins"
        assert record.taken == record.initial
        assert run["phase"] == "plain"
        assert run["result"].taken == (LOW,)
        assert (run["result"].steps, run["result"].curve) == (run["steps"], ())
        assert not run["result"].head_start
        assert run["rate"] == pytest.approx(LOW / 25), "the start of the user's own schedule"
    first, *again, last = one["lines"]
    assert "compare learning rates around 0.001; the run goes on in one team" in first[1]
    text = (
        "the trial and the head start begin again from the snapshot: a checkpoint needs equal "
        "replicas"
    )
    assert again == [("INFO", text)] * (one["steps"] // 3 - 1)
    assert last[0] == "WARNING"
    assert last[1].startswith(f"the search is given up after {one['steps']} steps")
    assert two["lines"] == [], "one rank writes the log"


def _noisy(rank: int, size: int, moment: int) -> Any:
    """Replicas that begin with noise of their own, and one checkpoint for all of them."""
    run = Run(rank)
    warm_init(run.model)
    seen = [parameters(run.model)]
    run.train(moment)
    run.scheduler.equalize()
    seen.append(parameters(run.model))
    saved = run.save()
    run.search()
    seen.append(parameters(run.model))
    run.train(run.step + 5)
    again = Run(rank)
    again.load(saved, own=False)
    again.train(run.step)
    return seen, run.everything() == again.everything()


@pytest.mark.parametrize("moment", [0, 2, STEPS["first", 2]])
def test_a_checkpoint_for_all_makes_noisy_replicas_equal(pair: Fleet, moment: int) -> None:
    """Before the first step, within a trial and between two; the search goes on from there."""
    (one, alike), (two, alike_too) = pair.run(_noisy, moment)
    assert alike
    assert alike_too
    assert not same(one[0], two[0])
    assert same(one[1], two[1])
    assert same(one[2], two[2])


def _refused(rank: int, size: int) -> list[str]:
    """A state without this replica's own; and another engine, in the middle of a search."""
    run, said = Run(rank), []
    run.train(2)
    again = Run(rank)
    again.load(run.save(), own=False)
    try:
        again.train(3)
    except RuntimeError as error:
        said.append(str(error))
    run.train(STEPS["first", 2])
    try:
        run.scheduler.attach_engine(again.scheduler.engine)
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_half_a_checkpoint_and_another_engine_are_refused(pair: Fleet) -> None:
    """Also between two rounds, where the replica that goes on with the run differs."""
    for state, engine in pair.run(_refused):
        assert "this state was saved 2 steps into a search" in state
        assert "call load_replica_state_dict() too" in state
        assert f"{STEPS['first', 2]} steps into the search the replicas differ" in engine


# -- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("probed", [False, True], ids=["no probe", "probe"])
def test_one_replica_resumes_to_the_bit_from_every_step(kind: str, probed: bool) -> None:
    options: dict[str, Any] = {"kind": kind, "probed": probed, "wrap": False, "lr": RIGHT[1]}
    whole, saved = Run(0, best=0, **options), []
    for moment in range(FIRST + 1):
        whole.train(moment)
        saved.append(whole.save())
    whole.train(end := FIRST + 3)
    assert whole.scheduler.search_result.steps == FIRST
    for state in saved:
        again = Run(0, best=0, **options)
        again.load(state)
        again.train(end)
        assert again.everything() == whole.everything(), state["step"]


def test_a_checkpoint_of_one_replica_between_two_trials_is_whole() -> None:
    """Nothing of the replica's own is needed there: its weights are the initial ones."""
    whole = Run(0, wrap=False)
    whole.train(STEPS["first", 1])
    assert whole.scheduler.at_boundary
    assert whole.scheduler.stride == STEPS["first", 1]
    again = Run(0, wrap=False)
    again.load(whole.save(), own=False)
    for run in (whole, again):
        run.search()
    assert again.everything() == whole.everything()


def test_a_finished_search_is_carried_into_a_run_that_runs_none() -> None:
    """Resumed where auto leaves the search out: the schedule stays compressed, no hook is left."""
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)

    def scheduler(total: int) -> Any:
        return OneCycleAutoLR(
            optimizer, 0.01, total_steps=total, rule="auto", model=model, probe=held_out(model)
        )

    first = scheduler(S)
    while first.searching:
        first.step(learn(model, optimizer, first.steps_done, 0))
    state = copy.deepcopy(first.state_dict())
    first.detach()
    other = scheduler(S // 4)
    assert other.phase == "plain"
    other.load_state_dict(state)
    assert other.steps_done == first.steps_done > 0
    assert other.phase == first.phase == "watched"
    assert other.verdict == first.verdict != ""
    assert other.search_result is None, "what a resumed run does not know"
    assert other._run.lost == first._run.lost > 0
    other.detach()
    assert hooks_of(model, optimizer) == 0


@pytest.mark.parametrize("total", [100, 5000])
def test_a_state_from_within_a_search_of_another_length_is_refused(total: int) -> None:
    """Before anything is changed; also by a run that is too short for a search."""

    def scheduler(total: int) -> Any:
        model = toy(wrap=False)
        optimizer = AdamW(model.parameters(), lr=0.01)
        return OneCycleAutoLR(optimizer, 0.01, total_steps=total, rule="auto", model=model)

    state, other = scheduler(4000).state_dict(), scheduler(total)
    before = other.state_dict()
    with pytest.raises(ValueError, match=f"4000 steps, and this run has 1 and {total}: resume"):
        other.load_state_dict(state)
    assert other.state_dict() == before


def test_a_state_of_an_earlier_version_of_the_search_is_refused() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = OneCycleAutoLR(optimizer, 0.01, total_steps=S, rule="auto", model=model)
    state: Any = copy.deepcopy(scheduler.state_dict())
    state["hdet"]["phase_state"]["rule"]["version"] = SEARCH_VERSION - 1
    with pytest.raises(ValueError, match=f"has version {SEARCH_VERSION - 1} and this version"):
        scheduler.load_state_dict(state)


def test_a_search_is_left_out_by_a_run_with_another_rule() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    first = OneCycleAutoLR(optimizer, 0.01, total_steps=S, rule="auto", model=model)
    state = first.state_dict()
    first.detach()
    for rule, spread, phase in (("none", 0.0, "plain"), ("paper", 0.1, "exploring")):
        other = OneCycleAutoLR(
            optimizer, 0.01, total_steps=S, config=HDETConfig(rule=rule, spread=spread)
        )
        other.load_state_dict(state)
        assert other.phase == phase
        other.detach()
