"""The watch as a pure rule: when it evaluates and lowers a rate, and that it can be resumed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_scale.search.constants import (
    FIRST,
    GROWTH,
    LOST,
    PATIENCE,
    SIGNIFICANT,
    STEP,
    UNTIL,
)
from hdet_scale.search.evidence import ahead, mean_loss
from hdet_scale.search.watch import Move, Watch

S, BEGUN = 1000, 70
BATCHES = 8
START, LOW = 2.3, 0.3
LITTLE, MUCH = (LOW + share * LOST * (START - LOW) for share in (0.9, 1.1))
"""Losses of a run that lost a little less, and a little more, than what counts."""
Losses = Callable[[], Sequence[float]]


def batches(mean: float) -> list[float]:
    """Held-out losses: some batches are harder than others, whatever the weights."""
    return [mean + 0.01 * (j - (BATCHES - 1) / 2) for j in range(BATCHES)]


def watch(scale: float = 1.0, *, budget: float = 0.15, start: Sequence[float] = ()) -> Watch:
    return Watch(
        total_steps=S, begun=BEGUN, scale=scale, start=start or batches(START), budget=budget
    )


def told(means: Iterable[float]) -> Losses:
    """These held-out losses, one for each evaluation, and the last one from then on."""
    rest, last = iter(means), [math.nan]

    def following() -> list[float]:
        last[0] = next(rest, last[0])
        return batches(last[0])

    return following


def schedule(steps: int) -> list[int]:
    """When a run of so many steps is evaluated, written without the code under test."""
    at, found = max(1, round(FIRST * steps)), []
    while at <= UNTIL * steps:
        found.append(at)
        at = max(at + 1, round(GROWTH * at))
    return found


class Played:
    """A whole run under a watch."""

    def __init__(self, rule: Watch, losses: Losses) -> None:
        self.rule, self.losses = rule, losses
        self.evaluations: list[int] = []
        self.moves: list[Move] = []

    def step(self) -> None:
        if self.rule.count():
            self.evaluations.append(self.rule.step)
            self.moves.append(self.rule.evaluate(self.losses()))

    def all(self) -> Played:
        while self.rule.step < self.rule.steps:
            self.step()
        assert self.rule.over
        assert self.evaluations == schedule(self.rule.steps), "whatever the losses"
        return self

    @property
    def lowered(self) -> dict[int, Move]:
        """The moves that changed the rate, by the number of their evaluation."""
        return {k: move for k, move in enumerate(self.moves) if move.scale is not None}


def play(losses: Iterable[float], scale: float = 1.0, *, budget: float = 0.15) -> Played:
    return Played(watch(scale, budget=budget), told(losses)).all()


# -- when it evaluates --------------------------------------------------------------------------


@given(total=st.integers(100, 20_000), begun=st.floats(0.0, 0.12))
def test_evaluations_are_a_factor_apart_from_first_until_until(total: int, begun: float) -> None:
    """Shares of the run after the search."""
    searched = round(begun * total)
    rule = Watch(total_steps=total, begun=searched, scale=1.0, start=[2.0, 2.1], budget=0.1)
    steps, at = total - searched, []
    for step in range(1, steps + 1):
        if rule.count():
            assert rule.step == step
            at.append(step)
            rule.evaluate([1.0 / step, 1.1 / step])
        assert rule.over is (max(1, round(FIRST * steps)) > UNTIL * steps or at == schedule(steps))
    assert at == schedule(steps)
    assert len(at) <= 2 + math.log(UNTIL / FIRST) / math.log(GROWTH)


# -- a run that learns --------------------------------------------------------------------------


@given(
    st.lists(st.integers(-800, 36).map(lambda k: k / 16), min_size=30, unique=True),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.floats(0.0, 1.0),
)
def test_a_loss_that_falls_never_moves_the_rate(
    losses: list[float], scale: float, budget: float
) -> None:
    run = play(sorted(losses, reverse=True), scale, budget=budget)
    assert set(run.moves) == {Move(best=True)}
    assert (run.rule.scale, run.rule.verdict, run.rule.discarded) == (scale, "", 0)


@pytest.mark.parametrize("above", [1.001, 3.0, 1e30])
def test_a_run_that_has_learnt_nothing_yet_never_fails(above: float) -> None:
    """However far it is above the initial weights, as long as it is finite."""
    run = play([above * START])
    assert set(run.moves) == {Move()}
    assert run.rule.best == tuple(batches(START))


def test_neither_does_one_whose_lowest_loss_is_not_significantly_below_the_initial_one() -> None:
    """The mean is 0.1 lower, and single batches are higher or lower by far more."""
    noisy = [x - 0.1 + 0.6 * (-1) ** j for j, x in enumerate(batches(START))]
    assert not ahead(noisy, batches(START))
    clear = [x - 0.1 for x in batches(START)]
    for first, moves in ((noisy, False), (clear, True)):
        rest = iter([first])
        run = Played(watch(), lambda rest=rest: next(rest, batches(40.0))).all()
        assert run.moves[0] == Move(best=True)
        assert bool(run.lowered) is moves


# -- a run that degrades ------------------------------------------------------------------------


def test_a_rise_of_a_small_share_of_what_was_learnt_is_no_failure() -> None:
    run = play([1.0, LOW, LITTLE])
    assert run.moves[:2] == [Move(best=True)] * 2
    assert set(run.moves[2:]) == {Move()}
    assert run.rule.failures == 0


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("bad", [MUCH, 40.0])
def test_a_rise_of_a_larger_share_lowers_the_rate_after_its_patience(
    scale: float, bad: float
) -> None:
    """And the weights go back, in the schedule as it goes on."""
    run = play([1.0, LOW, *[bad] * PATIENCE, LOW], scale, budget=1.0)
    decided = 1 + PATIENCE
    assert run.lowered == {decided: Move(scale=scale / STEP, back=True)}
    assert run.moves[2:decided] == [Move()] * (PATIENCE - 1)
    steps = run.evaluations[decided] - run.evaluations[1]
    assert run.rule.discarded == steps
    assert run.rule.best == tuple(batches(LOW))
    assert run.rule.verdict == (
        f"held-out loss {bad:.4g}, {LOW:.4g} {steps} steps ago: the rate is divided by {STEP:g}, "
        "and the weights go back there"
    )


@pytest.mark.parametrize("good", [LITTLE, LOW, LOW - 0.1])
def test_failures_must_be_in_a_row(good: float) -> None:
    """A loss that is no failure, or a new lowest, begins the count again."""
    run = play([1.0, LOW, *([MUCH] * (PATIENCE - 1) + [good]) * 30])
    assert not run.lowered
    assert run.rule.verdict == ""


@pytest.mark.parametrize("errors", [0.9 * SIGNIFICANT, 1.1 * SIGNIFICANT])
def test_a_rise_that_noise_explains_is_no_failure(errors: float) -> None:
    """The mean rises by far more than counts, on some batches and not on others."""
    width = math.sqrt(BATCHES - 1) / errors
    risen = [x + 1.0 + width * (-1) ** j for j, x in enumerate(batches(LOW))]
    rest = iter([batches(LOW)])
    run = Played(watch(), lambda: next(rest, risen)).all()
    assert bool(run.lowered) is (errors > SIGNIFICANT)


def test_on_a_single_batch_only_a_loss_that_is_not_finite_is_significant() -> None:
    for bad, lowered in ((40.0, 0), (math.nan, 1)):
        rest = iter([[LOW], [bad], [bad]])
        rule = watch(start=[START])
        run = Played(rule, lambda rest=rest: next(rest, [0.2])).all()
        assert len(run.lowered) == lowered * 2


# -- going back and its budget ------------------------------------------------------------------


def test_the_weights_go_back_while_the_budget_lasts_and_then_stay() -> None:
    """It learns once and then degrades, at any rate: each time `discarded` grows by the steps since
    the lowest loss or the last move. In place the present loss is what later ones compare with."""
    at = schedule(S - BEGUN)
    first = at[PATIENCE] - at[0]
    second = at[2 * PATIENCE] - at[PATIENCE]
    budget = (first + 0.5 * second) / S
    run = play(
        [LOW, *[2.0] * (2 * PATIENCE), *[2.0 + 0.01 * k for k in range(1, 30)]], budget=budget
    )
    back, stays = list(run.lowered)[:2]
    assert (back, stays) == (PATIENCE, 2 * PATIENCE)
    assert run.moves[back] == Move(scale=1 / STEP, back=True)
    assert run.moves[stays] == Move(scale=STEP**-2, best=True)
    assert run.rule.discarded == first <= budget * S
    assert run.rule.best == tuple(batches(2.0)), "a little above that is no failure"
    assert list(run.lowered) == [back, stays]
    assert run.rule.verdict == (
        f"held-out loss 2, {LOW:.4g} {second} steps ago: the rate is divided by {STEP:g}"
    )


def test_the_budget_is_spent_to_its_last_step() -> None:
    at = schedule(S - BEGUN)
    steps = at[PATIENCE] - at[0]
    for spent, back in ((steps, True), (steps - 1, False)):
        run = play([LOW, *[2.0] * PATIENCE, LOW], budget=spent / S)
        assert run.moves[PATIENCE].back is back
        assert run.rule.discarded == steps * back


def test_without_a_budget_the_rate_is_lowered_in_place() -> None:
    losses = [LOW, *[0.6] * PATIENCE, *[1.2] * PATIENCE, *[2.0] * 20]
    run = play(losses, budget=0.0)
    assert run.lowered == {
        k * PATIENCE: Move(scale=STEP**-k, best=True) for k in range(1, len(run.lowered) + 1)
    }
    assert len(run.lowered) >= 2
    assert run.rule.discarded == 0
    assert "go back" not in run.rule.verdict


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("before", [[], [1.0, LOW]])
def test_a_loss_that_is_not_finite_lowers_the_rate_at_once(bad: float, before: list[float]) -> None:
    """Also where nothing was learnt yet."""
    run = play([*before, bad, LOW])
    assert run.lowered == {len(before): Move(scale=1 / STEP, back=True)}
    steps = run.evaluations[len(before)] - (run.evaluations[len(before) - 1] if before else 0)
    assert run.rule.discarded == steps
    assert f"held-out loss inf, {LOW if before else START:.4g} {steps} steps" in run.rule.verdict


def test_one_batch_that_is_not_finite_is_enough() -> None:
    broken = batches(LOW)
    broken[3] = math.nan
    rest = iter([batches(1.0), broken])
    run = Played(watch(), lambda: next(rest, batches(0.2))).all()
    assert run.lowered == {1: Move(scale=1 / STEP, back=True)}


@pytest.mark.parametrize(("budget", "back"), [(1e-6, True), (0.0, False)])
def test_weights_that_are_not_finite_go_back_whatever_is_left_of_the_budget(
    budget: float, back: bool
) -> None:
    """Unless there is none: then no weights were kept."""
    run = play([LOW, math.nan, math.nan, LOW], budget=budget)
    assert run.lowered == {k: Move(scale=STEP**-k, back=back) for k in (1, 2)}
    assert run.rule.discarded == (run.evaluations[2] - run.evaluations[0]) * back
    assert run.rule.best == tuple(batches(LOW))


@given(
    losses=st.lists(
        st.sampled_from([LOW, LITTLE, MUCH, 1.0, 2.0, 40.0, math.inf, math.nan]), min_size=30
    ),
    budget=st.sampled_from([0.0, 0.05, 0.15, 1.0]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_whatever_the_losses_the_rate_only_falls_and_the_budget_holds(
    losses: list[float], budget: float, scale: float
) -> None:
    run = Played(watch(scale, budget=budget), told(losses))
    rule, lowest = run.rule, START
    while rule.step < rule.steps:
        before, seen = (rule.scale, rule.discarded), len(run.moves)
        run.step()
        if len(run.moves) == seen:
            assert (rule.scale, rule.discarded) == before
            continue
        move, finite = run.moves[-1], math.isfinite(losses[seen])
        assert rule.scale == (before[0] if move.scale is None else before[0] / STEP)
        assert move.scale in (None, rule.scale)
        assert not (move.back and move.best)
        assert not move.best or finite, "weights that are not finite are never kept"
        assert move.scale is not None or finite
        assert (rule.discarded > before[1]) is move.back
        assert not move.back or budget > 0
        assert not move.back or not finite or rule.discarded <= budget * S
        if move.best:
            lowest = losses[seen]
        assert mean_loss(rule.best) == pytest.approx(lowest)


# -- state --------------------------------------------------------------------------------------

RUNS: dict[str, tuple[list[float], float]] = {
    "learns": ([2.0 / k for k in range(1, 40)], 0.15),
    "degrades": ([LOW, 2.0], 0.15),
    "in place": ([LOW, *[0.6] * PATIENCE, *[1.2] * PATIENCE, 2.0], 0.0),
    "diverges": ([math.nan], 0.15),
    "diverges in place": ([1.0, math.inf], 0.0),
}


@pytest.mark.parametrize("through", [copy.deepcopy, lambda state: json.loads(json.dumps(state))])
@pytest.mark.parametrize("name", RUNS)
def test_it_goes_on_where_it_was_interrupted(name: str, through: Any) -> None:
    """At every evaluation, and a step before it; a state that is loaded stays as it was."""
    losses, budget = RUNS[name]
    whole = play(losses, 10.0, budget=budget)
    assert bool(whole.lowered) is (name != "learns")
    for at in whole.evaluations:
        for stop in (at - 1, at):
            first = Played(watch(10.0, budget=budget), told(losses))
            while first.rule.step < stop:
                first.step()
            state = through(first.rule.state_dict())
            text = json.dumps(state)
            again = Played(Watch.of_state(state), first.losses)
            assert json.dumps(again.rule.state_dict()) == text
            again.evaluations, again.moves = list(first.evaluations), list(first.moves)
            again.all()
            assert again.moves == whole.moves
            assert json.dumps(again.rule.state_dict()) == json.dumps(whole.rule.state_dict())
            assert json.dumps(state) == text
