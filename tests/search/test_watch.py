"""The watch as a pure rule: when it restarts a run, at which rate, and that it can be resumed."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_scale.search.watch import GROWTH, UNTIL, Watch

S = 1000
BEFORE = [2.3 + 0.01 * i for i in range(8)]


def watch(scale: float = 50.0, begun: int = 70) -> Watch:
    return Watch(total_steps=S, begun=begun, mean=0.5, scale=scale, before=BEFORE)


def overfits(path: float, turn: float) -> tuple[list[float], float]:
    """Held-out losses that are lowest at path x peak = turn, and a training loss that falls."""
    far = math.log(max(path, 1e-9) / turn)
    held = 0.5 + 0.1 * far * far
    return [held + 0.01 * i for i in range(8)], 1.0 / (1.0 + path)


class Played:
    """A whole run of a cosine under a watch: the schedule is compressed after each restart."""

    def __init__(self, rule: Watch, losses: Any) -> None:
        self.rule, self.scales = rule, [rule.scale]
        self.evaluations: list[int] = []
        left, t, used = S - rule.begun, 0, rule.begun
        while used < S:
            share = 0.5 * (1 + math.cos(math.pi * t / left))
            t, used = t + 1, used + 1
            rule.count(share)
            if not rule.due:
                continue
            self.evaluations.append(used)
            again = rule.evaluate(*losses(rule.path * rule.scale))
            if again is not None:
                self.scales.append(again)
                left, t = left - t, 0
        self.path = rule.path * rule.scale


@settings(max_examples=60, deadline=None)
@given(early=st.floats(0.02, 0.12), scale=st.floats(2.0, 100.0))
def test_a_run_that_overfits_restarts_with_the_peak_that_ends_at_its_turn(
    early: float, scale: float
) -> None:
    """The loss depends on the path alone here, so that the end tells whether the rate is right.
    Its turn is after a share `early` of the run, and evaluations begin at 1.5 % of it."""
    rule, turn = watch(scale), early * S * scale
    run = Played(rule, lambda path: overfits(path, turn))
    assert len(run.scales) >= 2, rule.verdict
    assert abs(math.log2(run.path / turn)) < 0.5, (run.path, turn, run.scales)
    assert "restarts with" in rule.verdict


def test_evaluations_are_rare_and_end_at_three_quarters_of_the_run() -> None:
    run = Played(watch(), lambda path: ([1.0 / (1.0 + path) + 0.01 * i for i in range(8)], 0.5))
    assert run.scales == [50.0]
    assert run.rule.over
    assert max(run.evaluations) <= UNTIL * S
    assert len(run.evaluations) <= 2 + math.log(UNTIL / 0.015) / math.log(GROWTH)
    gaps = [b - a for a, b in zip(run.evaluations, run.evaluations[1:], strict=False)]
    assert gaps == sorted(gaps)


def test_a_spike_of_both_losses_is_not_overfitting() -> None:
    """The edge of stability: held-out and training loss rise, by less than a tenth of what was
    learnt."""

    def losses(path: float) -> tuple[list[float], float]:
        held = [min(x, 0.68) for x in overfits(path, 60.0)[0]]
        return held, held[0]

    run = Played(watch(), losses)
    assert run.scales == [50.0]
    assert run.rule.verdict == ""


def test_one_rise_is_no_verdict_and_neither_is_a_small_one() -> None:
    calls = []

    def once(path: float) -> tuple[list[float], float]:
        calls.append(path)
        bump = 1.0 if len(calls) == 5 else 0.0
        return [1.0 / len(calls) + bump + 0.01 * i for i in range(8)], 1.0 / len(calls)

    assert Played(watch(), once).scales == [50.0]

    def small(path: float) -> tuple[list[float], float]:
        return [1.0 + (0.029 if path > 500 else 0.0)] * 8, 0.6

    assert Played(watch(), small).scales == [50.0]


def test_memorised_training_examples_are_overfitting_without_a_rise() -> None:
    """The held-out loss stays while the training loss falls by more than half."""
    run = Played(watch(), lambda path: ([max(0.5, 2.0 - path / 500)] * 8, 500.0 / (500.0 + path)))
    assert len(run.scales) >= 2
    assert run.scales[1] < 10.0


def test_noise_between_batches_is_no_rise() -> None:
    """A mean rise of 10 % whose standard error is as large."""

    def losses(path: float) -> tuple[list[float], float]:
        noise = [0.8, -0.6, 0.9, -0.7, 0.6, -0.5, 0.9, -0.6] if path > 500 else [0.0] * 8
        return [1.0 + x for x in noise], 0.6

    assert Played(watch(), losses).scales == [50.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 40.0])
def test_a_rate_that_diverges_is_divided_until_it_does_not(bad: float) -> None:
    rule = watch()

    def losses(path: float) -> tuple[list[float], float]:
        return ([bad] * 8, bad) if rule.scale > 10 and path > 300 else ([1.0 / (1.0 + path)] * 8, 1)

    run = Played(rule, losses)
    assert run.scales == [50.0, 12.5, 3.125]
    assert "the run restarts with 3.12 x the initial rate" in rule.verdict
    assert rule.over


@pytest.mark.parametrize("target", [math.inf, 1.0])
def test_a_rate_that_misses_its_target_loss_is_divided(target: float) -> None:
    """A dead network: finite, even a little below where it began, and the trials did better."""

    def losses(_: float) -> tuple[list[float], float]:
        return [x - 0.1 for x in BEFORE], 2.3

    rule = Watch(
        total_steps=S, begun=70, mean=0.5, scale=8.0, before=BEFORE, target=target
    )  # fmt: skip
    run = Played(rule, losses)
    assert run.scales == ([8.0] if target > 2.3 else [8.0, 2.0, 1.0])
    assert rule.over


def test_a_rate_below_the_initial_one_that_diverges_is_never_raised() -> None:
    run = Played(watch(0.1), lambda _: ([x + 10.0 for x in BEFORE], 9.0))
    assert run.scales == [0.1]
    assert "not above the initial one" in run.rule.verdict


def test_a_turn_that_is_seen_too_late_does_not_restart_the_run() -> None:
    """After 600 steps at the peak the turn is seen at 450: 400 steps are left, at a mean of a half,
    less than half of that path."""
    rule = Watch(total_steps=S, begun=0, mean=0.5, scale=1.0, before=BEFORE)
    for step, loss, trained in ((350, 0.6, 1.0), (450, 0.5, 0.9), (550, 0.6, 0.4), (600, 0.7, 0.3)):
        rule.next = step
        while not rule.due:
            rule.count(1.0)
        assert rule.evaluate([loss] * 8, trained) is None
    assert "lowest (0.5) at step 450, too late to restart" in rule.verdict
    assert rule.over


def test_without_a_training_loss_no_overfitting_is_seen() -> None:
    run = Played(watch(), lambda path: (overfits(path, 60.0)[0], math.nan))
    assert run.scales == [50.0]


def contested(scale: float = 0.1) -> Watch:
    return Watch(
        total_steps=S,
        begun=70,
        mean=0.5,
        scale=scale,
        before=BEFORE,
        target=2.0,
        contested=True,
    )


def test_a_contested_rate_is_dropped_where_the_run_learns_at_the_initial_one() -> None:
    rule = contested()
    assert rule.contested
    assert rule.scale == 1.0
    run = Played(rule, lambda path: ([max(1.8, 2.3 - path / 50)] * 8, 1.8))
    assert run.scales == [1.0]
    assert rule.verdict.startswith("the initial rate stays: the held-out loss is")
    assert not rule.contested
    assert max(run.evaluations) > 0.6 * S, "it is watched like any other rate"


@pytest.mark.parametrize("proposed", [0.1, 30.0])
def test_an_initial_rate_that_stays_and_overfits_restarts_the_run_too(proposed: float) -> None:
    """A search does not see overfitting, whatever it says of the initial rate."""
    run = Played(contested(proposed), lambda path: overfits(path, 100.0))
    assert run.scales[0] == 1.0
    assert 0.05 < run.scales[-1] < 0.6
    run = Played(watch(1.0), lambda path: overfits(path, 100.0))
    assert 0.05 < run.scales[-1] < 0.6


def test_while_the_initial_rate_warms_up_no_overfitting_is_seen() -> None:
    """Few steps, a loss that goes up and down: no example was repeated."""
    rule = watch(1.0)

    def losses(path: float) -> tuple[list[float], float]:
        early = path < 20.0
        return [0.2 if path < 15.0 else 0.4 if early else 0.2 / (1.0 + path)] * 8, 0.1

    assert Played(rule, losses).scales == [1.0]


def test_a_quarter_is_given_four_times_the_path() -> None:
    """A run on a plateau learns by the learning rate times the path, and no sooner."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=16.0, before=BEFORE, target=2.0)

    def losses(path: float) -> tuple[list[float], float]:
        dies = rule.scale > 4.0
        return [2.25 if dies else 2.3 - rule.scale * rule.path / 1000] * 8, 2.3

    run = Played(rule, losses)
    assert run.scales == [16.0, 4.0]
    assert rule.tried


@pytest.mark.parametrize(
    ("proposed", "tried"), [(64.0, [64.0, 16.0, 4.0, 1.0]), (30.0, [30.0, 7.5, 1.875, 1.0])]
)
def test_where_nothing_learns_the_initial_rate_is_the_last(
    proposed: float, tried: list[float]
) -> None:
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=proposed, before=BEFORE, target=2.0)
    assert Played(rule, lambda _: ([2.25] * 8, 2.25)).scales == pytest.approx(tried)


def test_a_lower_rate_that_fails_gives_way_to_the_initial_one_unless_that_has_failed() -> None:
    """A search may be wrong about lower rates too."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=0.1, before=BEFORE, target=2.0)

    def dead(_: float) -> tuple[list[float], float]:
        return [2.25] * 8, 2.25

    assert Played(rule, dead).scales == [0.1, 1.0]
    assert Played(contested(0.1), dead).scales == [1.0, 0.1]


def test_a_rate_at_which_a_network_learns_and_then_dies_is_divided() -> None:
    """It has reached its target loss in time."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=8.0, before=BEFORE, target=1.5)

    def losses(path: float) -> tuple[list[float], float]:
        dead = rule.scale > 4.0 and rule.path > 60.0
        return [2.3 if dead else max(0.5, 2.3 - rule.path / 20)] * 8, 2.3

    run = Played(rule, losses)
    assert run.scales == [8.0, 2.0]
    assert "the held-out loss is 2.3 after" in rule.verdict


def degrades(rule: Watch, stable: float, trained: float | None = None) -> Any:
    """All is learnt that can be, and above a scale of `stable` a fifth of it is lost again."""

    def losses(_: float) -> tuple[list[float], float]:
        lost = rule.scale > stable and rule.path > 100.0
        held = max(0.3, 2.3 - rule.path / 25) + 0.4 * lost
        return [held] * 8, held if trained is None else trained

    return losses


@pytest.mark.parametrize(
    ("proposed", "stable", "tried"),
    [
        (8.0, 4.0, [8.0, 2.0]),
        (64.0, 4.0, [64.0, 16.0, 4.0]),
        (3.0, 0.1, [3.0, 1.0]),
        (1.0, 0.1, [1.0]),
        (0.4, 0.2, [0.4, 0.1]),
        (8.0, 8.0, [8.0]),
    ],
)
def test_a_rate_that_degrades_is_divided_down_to_the_initial_one(
    proposed: float, stable: float, tried: list[float]
) -> None:
    """The initial rate is the user's and stays; a rate below it is never raised."""
    rule = watch(proposed)
    run = Played(rule, degrades(rule, stable))
    assert run.scales == pytest.approx(tried)
    if len(tried) > 1:
        assert "before them, 0.3 at its lowest: the run restarts with" in rule.verdict


def test_below_a_rate_that_degraded_the_initial_one_is_not_tried() -> None:
    """It reaches its target and degrades; a quarter learns nothing, and more would degrade."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=0.4, before=BEFORE, target=2.0)
    above = degrades(rule, 0.2)

    def losses(path: float) -> tuple[list[float], float]:
        return above(path) if rule.scale > 0.2 else ([2.25] * 8, 2.25)

    assert Played(rule, losses).scales == pytest.approx([0.4, 0.1])
    assert "at a rate that is not above the initial one" in rule.verdict


@pytest.mark.parametrize("warm_up", [0.05, 0.3, 0.6])
def test_losses_that_rise_with_the_schedule_are_no_degradation(warm_up: float) -> None:
    """Noise by the present learning rate, and a warm-up that goes on after all has been learnt."""
    rule = watch(8.0)
    for step in range(1, S - rule.begun):
        up = step / (warm_up * S)
        share = up if up < 1 else 0.5 * (1 + math.cos(math.pi * (step - warm_up * S) / S))
        rule.count(share)
        if rule.due:
            held = 0.5 + 1.8 * math.exp(-step / 20) + 0.4 * share
            assert rule.evaluate([held] * 8, held) is None, rule.verdict
    assert rule.scale == 8.0
    assert rule.over


def test_a_network_that_dies_while_the_schedule_rises_degrades_too() -> None:
    """At its peak, after all had been learnt on the way up: more than a quarter of it is gone."""
    rule, restarts = watch(8.0), []
    for step in range(1, S - rule.begun):
        rule.count(min(1.0, step / (0.3 * S)))
        if rule.due:
            dead = rule.scale > 4.0 and step > 0.2 * S
            held = 1.0 if dead else 0.5 + 1.8 * math.exp(-step / 20)
            restarts += [rule.evaluate([held] * 8, held)]
    assert [x for x in restarts if x is not None] == [2.0]


def test_where_the_training_loss_falls_nothing_degrades() -> None:
    """With dropout or smoothed labels it is above the held-out loss from the beginning."""
    rule = watch(8.0)

    def losses(_: float) -> tuple[list[float], float]:
        held = max(1.0, 2.3 - rule.path / 25) + 0.3 * (rule.path > 100.0)
        return [held] * 8, 1.95 - rule.path / 400

    assert Played(rule, losses).scales == [8.0]


def test_fewer_batches_after_a_resume_are_compared_with_the_same_ones() -> None:
    rule, losses = watch(8.0), [1.8] * 4 + [1.0] * 4
    for k in range(12):
        while not rule.due:
            rule.count(1.0)
        few = losses[: 8 if k < 8 else 6]
        assert rule.evaluate(few, 1.9 + 0.01 * k) is None, rule.verdict
    assert rule.scale == 8.0


def test_a_run_that_degrades_late_is_left_to_the_decay() -> None:
    rule = watch(8.0)

    def losses(_: float) -> tuple[list[float], float]:
        held = 0.3 + 0.4 * (rule.step > 0.4 * S)
        return [held] * 8, held

    assert Played(rule, losses).scales == [8.0]


def test_a_quarter_below_the_initial_rate_has_four_times_the_path_too() -> None:
    """It degrades at 0.4 x; a quarter of that learns a quarter as fast, and reaches the target."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=0.4, before=BEFORE, target=1.5)

    def losses(_: float) -> tuple[list[float], float]:
        lost = rule.scale > 0.2 and rule.path > 100.0
        held = max(0.3, 2.3 - rule.scale * rule.path / 10) + 0.4 * lost
        return [held] * 8, held

    run = Played(rule, losses)
    assert run.scales == pytest.approx([0.4, 0.1])
    assert "not above the initial one" not in rule.verdict


@pytest.mark.parametrize("trained", [math.nan, 0.45])
def test_without_a_training_loss_above_it_too_nothing_degrades(trained: float) -> None:
    """Not known; or of memorised examples, which another rule sees."""
    rule = watch(8.0)
    run = Played(rule, degrades(rule, 4.0, trained))
    assert "at its lowest" not in rule.verdict
    assert 2.0 not in run.scales


def test_one_evaluation_that_has_lost_much_does_not_decide() -> None:
    rule, seen = watch(8.0), []

    def losses(_: float) -> tuple[list[float], float]:
        seen.append(rule.step)
        held = 2.0 if len(seen) in (9, 11, 13) else max(0.3, 2.3 - rule.path / 25)
        return [held] * 8, held

    assert Played(rule, losses).scales == [8.0]
    assert len(seen) >= 13


@pytest.mark.parametrize("proposed", [0.1, 30.0])
@pytest.mark.parametrize(("loss", "steps"), [(2.1, 81), (40.0, 20), (math.nan, 20), (math.inf, 20)])
def test_a_contested_rate_is_taken_where_the_run_fails_at_the_initial_one(
    loss: float, steps: int, proposed: float
) -> None:
    """At once where it diverges; otherwise after a twentieth of the path."""
    rule = contested(proposed)

    def losses(path: float) -> tuple[list[float], float]:
        return ([loss] * 8 if rule.contested else [1.0 / (1.0 + path)] * 8), 1.0

    run = Played(rule, losses)
    assert run.scales == [1.0, proposed]
    assert f"the run restarts with {proposed:g} x the initial rate" in rule.verdict
    assert rule.begun <= 70 + steps
    assert rule.over
    assert len(run.evaluations) > 12, "the proposed rate is watched like any other"


@pytest.mark.parametrize("moment", [10, 30, 60, 200])
def test_a_contest_goes_on_where_it_was_interrupted(moment: int) -> None:
    def run(rule: Watch, first: int, last: int) -> Watch:
        for _ in range(first, last):
            rule.count(0.7)
            if rule.due:
                rule.evaluate([2.2 if rule.contested else 1.0 / rule.path] * 8, 1.0)
        return rule

    whole = run(contested(), 0, moment)
    again = Watch.of_state(copy.deepcopy(whole.state_dict()))
    assert run(whole, moment, S).state_dict() == run(again, moment, S).state_dict()
    assert whole.scale == 0.1


def test_a_resume_may_have_another_number_of_batches() -> None:
    """The probe is split among other replicas, and its last batches may fall away."""
    rule = watch()
    for k in range(3):
        while not rule.due:
            rule.count(1.0)
        assert rule.evaluate([2.0 - 0.3 * k] * 8, 1.0) is None
    for few in (7, 8, 6):
        while not rule.due:
            rule.count(1.0)
        rule.evaluate([1.7] * few, 0.5)
    assert rule.scale < 50.0, "what rose on the batches that are left is a rise"


def test_losses_without_a_natural_zero_are_never_memorised() -> None:
    run = Played(watch(), lambda path: ([max(-1.0, 2.0 - path / 500)] * 8, -path))
    assert run.scales == [50.0]


@pytest.mark.parametrize("moment", [1, 16, 100, 160, 161, 300, 480, 900])
def test_it_goes_on_where_it_was_interrupted(moment: int) -> None:
    def run(rule: Watch, first: int, last: int) -> Watch:
        for _ in range(first, last):
            rule.count(0.7)
            if rule.due:
                rule.evaluate(*overfits(rule.path * rule.scale, 400.0))
        return rule

    whole = run(watch(), 0, moment)
    again = Watch.of_state(copy.deepcopy(whole.state_dict()))
    assert run(whole, moment, S).state_dict() == run(again, moment, S).state_dict()


@pytest.mark.parametrize("moment", [60, 120, 160, 220, 300, 480])
def test_a_degrading_run_goes_on_where_it_was_interrupted(moment: int) -> None:
    def run(rule: Watch, first: int, last: int) -> Watch:
        for _ in range(first, last):
            rule.count(0.7)
            if rule.due:
                rule.evaluate(*degrades(rule, 4.0)(0.0))
        return rule

    whole = run(watch(8.0), 0, moment)
    again = Watch.of_state(copy.deepcopy(whole.state_dict()))
    assert run(whole, moment, S).state_dict() == run(again, moment, S).state_dict()
    assert whole.scale == 2.0


def duel() -> Watch:
    return Watch(
        total_steps=S,
        begun=70,
        mean=0.5,
        scale=0.1,
        before=BEFORE,
        target=2.0,
        contested=True,
        duel=True,
    )


def turns(initial: float, proposed: float) -> Any:
    """Held-out losses that fall towards these values, by which rate has its turn."""

    def losses(rule: Watch) -> tuple[list[float], float]:
        end = initial if rule.scale == 1.0 else proposed
        return [end + 2.0 / (1.0 + rule.step)] * 8, 1.0

    return losses


@pytest.mark.parametrize(
    ("initial", "proposed", "scales"),
    [
        (1.5, 1.4, [1.0, 0.1]),
        (1.4, 1.5, [1.0, 0.1, 1.0]),
        (1.5, 1.5, [1.0, 0.1, 1.0]),  # a tie is the user's
        (1.5, math.nan, [1.0, 0.1, 1.0]),
        (math.nan, 1.5, [1.0, 0.1]),
        (40.0, 1.5, [1.0, 0.1]),
    ],
)
def test_in_a_duel_both_rates_have_a_turn_and_the_lower_loss_decides(
    initial: float, proposed: float, scales: list[float]
) -> None:
    rule, losses = duel(), turns(initial, proposed)
    run = Played(rule, lambda _: losses(rule))
    assert run.scales == scales
    assert not rule.duel
    assert not rule.contested
    if scales[-1] == 1.0:
        assert "at the initial rate: the run restarts with 1 x" in rule.verdict
        assert rule.begun < 70 + 2 * 0.2 * S, "a fifth of the path for both"
    elif initial == 1.5:
        assert rule.verdict.startswith("the proposed rate stays: the held-out loss is")
        assert "at the initial rate" in rule.verdict


@pytest.mark.parametrize("moment", [10, 60, 100, 130, 300])
def test_a_duel_goes_on_where_it_was_interrupted(moment: int) -> None:
    losses = turns(1.4, 1.5)

    def run(rule: Watch, first: int, last: int) -> Watch:
        for _ in range(first, last):
            rule.count(0.7)
            if rule.due:
                rule.evaluate(*losses(rule))
        return rule

    whole = run(duel(), 0, moment)
    again = Watch.of_state(copy.deepcopy(whole.state_dict()))
    one, two = (run(w, moment, S).state_dict() for w in (whole, again))
    assert one == two
    assert one["scale"] == 1.0
