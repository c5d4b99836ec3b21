"""The watch as a rule: what it sees, what it makes of it, and that it can be interrupted."""

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
    """A whole run of a cosine under a watch: the same schedule is compressed after each start."""

    def __init__(self, rule: Watch, losses: Any) -> None:
        self.rule, self.losses, self.scales, self.looks = rule, losses, [rule.scale], []
        left, t, used = S - rule.begun, 0, rule.begun
        while used < S:
            share = 0.5 * (1 + math.cos(math.pi * t / left))
            t, used = t + 1, used + 1
            rule.count(share)
            if not rule.due:
                continue
            self.looks.append(used)
            again = rule.look(*losses(rule.path * rule.scale))
            if again is not None:
                self.scales.append(again)
                left, t = left - t, 0
        self.path = rule.path * rule.scale


@settings(max_examples=60, deadline=None)
@given(early=st.floats(0.02, 0.12), scale=st.floats(2.0, 100.0))
def test_a_run_that_overfits_starts_again_with_the_peak_that_ends_at_its_turn(
    early: float, scale: float
) -> None:
    """In this world the loss depends on the path alone, so that the end tells whether it fits.
    Its turn is after a share `early` of the run, which looks from 1.5 % of it on can see."""
    rule, turn = watch(scale), early * S * scale
    run = Played(rule, lambda path: overfits(path, turn))
    assert len(run.scales) >= 2, rule.verdict
    assert abs(math.log2(run.path / turn)) < 0.5, (run.path, turn, run.scales)
    assert "starts again with" in rule.verdict


def test_looks_are_rare_and_end_with_three_quarters_of_the_run() -> None:
    run = Played(watch(), lambda path: ([1.0 / (1.0 + path) + 0.01 * i for i in range(8)], 0.5))
    assert run.scales == [50.0]
    assert run.rule.over
    assert max(run.looks) <= UNTIL * S
    assert len(run.looks) <= 2 + math.log(UNTIL / 0.015) / math.log(GROWTH)
    gaps = [b - a for a, b in zip(run.looks, run.looks[1:], strict=False)]
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


def test_training_examples_learnt_by_heart_are_overfitting_without_a_rise() -> None:
    """The held-out loss stands still while the training loss falls by more than half."""
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
def test_what_breaks_is_divided_until_it_holds(bad: float) -> None:
    rule = watch()

    def losses(path: float) -> tuple[list[float], float]:
        return ([bad] * 8, bad) if rule.scale > 10 and path > 300 else ([1.0 / (1.0 + path)] * 8, 1)

    run = Played(rule, losses)
    assert run.scales == [50.0, 12.5, 3.125]
    assert "the run starts again with 3.12 x the learning rate given" in rule.verdict
    assert rule.over


@pytest.mark.parametrize("promise", [math.inf, 1.0])
def test_what_does_not_keep_its_promise_is_divided(promise: float) -> None:
    """A dead network: finite, even a little below where it began, and the heats did better."""

    def losses(_: float) -> tuple[list[float], float]:
        return [x - 0.1 for x in BEFORE], 2.3

    rule = Watch(
        total_steps=S, begun=70, mean=0.5, scale=8.0, before=BEFORE, promise=promise
    )  # fmt: skip
    run = Played(rule, losses)
    assert run.scales == ([8.0] if promise > 2.3 else [8.0, 2.0, 1.0])
    assert rule.over


def test_what_is_not_above_the_learning_rate_given_is_never_raised() -> None:
    run = Played(watch(0.1), lambda _: ([x + 10.0 for x in BEFORE], 9.0))
    assert run.scales == [0.1]
    assert "not above the one given" in run.rule.verdict


def test_a_turn_that_is_seen_too_late_is_left() -> None:
    """After 600 steps at the peak the turn is found at 450: 400 are left, of a mean of a half, less
    than half of that way."""
    rule = Watch(total_steps=S, begun=0, mean=0.5, scale=1.0, before=BEFORE)
    for step, loss, trained in ((350, 0.6, 1.0), (450, 0.5, 0.9), (550, 0.6, 0.4), (600, 0.7, 0.3)):
        rule.next = step
        while not rule.due:
            rule.count(1.0)
        assert rule.look([loss] * 8, trained) is None
    assert "lowest (0.5) at step 450, too late to start again" in rule.verdict
    assert rule.over


def test_without_a_training_loss_nothing_is_overfitted() -> None:
    run = Played(watch(), lambda path: (overfits(path, 60.0)[0], math.nan))
    assert run.scales == [50.0]


def contested(scale: float = 0.1) -> Watch:
    return Watch(
        total_steps=S,
        begun=70,
        mean=0.5,
        scale=scale,
        before=BEFORE,
        promise=2.0,
        contested=True,
    )


def test_what_is_contested_is_left_where_the_run_learns_with_the_learning_rate_given() -> None:
    rule = contested()
    assert rule.contested
    assert rule.scale == 1.0
    run = Played(rule, lambda path: ([max(1.8, 2.3 - path / 50)] * 8, 1.8))
    assert run.scales == [1.0]
    assert rule.verdict.startswith("the learning rate given stays: the held-out loss is")
    assert not rule.contested
    assert max(run.looks) > 0.6 * S, "it is watched like any other"


@pytest.mark.parametrize("found", [0.1, 30.0])
def test_what_is_kept_and_overfits_starts_again_too(found: float) -> None:
    """A race does not see what overfits, whatever it says of the learning rate given."""
    run = Played(contested(found), lambda path: overfits(path, 100.0))
    assert run.scales[0] == 1.0
    assert 0.05 < run.scales[-1] < 0.6
    run = Played(watch(1.0), lambda path: overfits(path, 100.0))
    assert 0.05 < run.scales[-1] < 0.6


def test_while_the_learning_rate_given_warms_up_nothing_is_overfitted() -> None:
    """Few steps, a loss that goes up and down: no example has come twice."""
    rule = watch(1.0)

    def losses(path: float) -> tuple[list[float], float]:
        early = path < 20.0
        return [0.2 if path < 15.0 else 0.4 if early else 0.2 / (1.0 + path)] * 8, 0.1

    assert Played(rule, losses).scales == [1.0]


def test_a_quarter_is_given_four_times_the_path() -> None:
    """A run on a plateau learns by the learning rate times the path, and no sooner."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=16.0, before=BEFORE, promise=2.0)

    def losses(path: float) -> tuple[list[float], float]:
        dies = rule.scale > 4.0
        return [2.25 if dies else 2.3 - rule.scale * rule.path / 1000] * 8, 2.3

    run = Played(rule, losses)
    assert run.scales == [16.0, 4.0]
    assert rule.tried


@pytest.mark.parametrize(
    ("found", "tried"), [(64.0, [64.0, 16.0, 4.0, 1.0]), (30.0, [30.0, 7.5, 1.875, 1.0])]
)
def test_where_nothing_learns_the_learning_rate_given_is_the_last(
    found: float, tried: list[float]
) -> None:
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=found, before=BEFORE, promise=2.0)
    assert Played(rule, lambda _: ([2.25] * 8, 2.25)).scales == pytest.approx(tried)


def test_less_than_was_given_goes_back_to_it_unless_that_has_failed() -> None:
    """A race may be wrong on the way down too."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=0.1, before=BEFORE, promise=2.0)

    def dead(_: float) -> tuple[list[float], float]:
        return [2.25] * 8, 2.25

    assert Played(rule, dead).scales == [0.1, 1.0]
    assert Played(contested(0.1), dead).scales == [1.0, 0.1]


def test_what_learns_at_first_and_dies_is_divided() -> None:
    """It has kept its promise by the end of its trial."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=8.0, before=BEFORE, promise=1.5)

    def losses(path: float) -> tuple[list[float], float]:
        dead = rule.scale > 4.0 and rule.path > 60.0
        return [2.3 if dead else max(0.5, 2.3 - rule.path / 20)] * 8, 2.3

    run = Played(rule, losses)
    assert run.scales == [8.0, 2.0]
    assert "the held-out loss is 2.3 after" in rule.verdict


def unlearns(rule: Watch, bears: float, trained: float | None = None) -> Any:
    """All is learnt that can be, and above `bears` a fifth of it is lost again."""

    def losses(_: float) -> tuple[list[float], float]:
        lost = rule.scale > bears and rule.path > 100.0
        held = max(0.3, 2.3 - rule.path / 25) + 0.4 * lost
        return [held] * 8, held if trained is None else trained

    return losses


@pytest.mark.parametrize(
    ("found", "bears", "tried"),
    [
        (8.0, 4.0, [8.0, 2.0]),
        (64.0, 4.0, [64.0, 16.0, 4.0]),
        (3.0, 0.1, [3.0, 1.0]),
        (1.0, 0.1, [1.0]),
        (0.4, 0.2, [0.4, 0.1]),
        (8.0, 8.0, [8.0]),
    ],
)
def test_what_unlearns_is_divided_down_to_the_learning_rate_given(
    found: float, bears: float, tried: list[float]
) -> None:
    """The learning rate given is the user's and stays; what is below it has no way up."""
    rule = watch(found)
    run = Played(rule, unlearns(rule, bears))
    assert run.scales == pytest.approx(tried)
    if len(tried) > 1:
        assert "before them, 0.3 at its lowest: the run starts again with" in rule.verdict


def test_below_what_unlearnt_nothing_goes_back_to_the_learning_rate_given() -> None:
    """It keeps its promise and unlearns, and a quarter of it learns nothing: more would unlearn."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=0.4, before=BEFORE, promise=2.0)
    above = unlearns(rule, 0.2)

    def losses(path: float) -> tuple[list[float], float]:
        return above(path) if rule.scale > 0.2 else ([2.25] * 8, 2.25)

    assert Played(rule, losses).scales == pytest.approx([0.4, 0.1])
    assert "at a learning rate that is not above the one given" in rule.verdict


@pytest.mark.parametrize("warm_up", [0.05, 0.3, 0.6])
def test_losses_that_rise_with_the_schedule_are_not_unlearnt(warm_up: float) -> None:
    """Noise by the present learning rate, and a warm-up that goes on after all has been learnt."""
    rule = watch(8.0)
    for step in range(1, S - rule.begun):
        up = step / (warm_up * S)
        share = up if up < 1 else 0.5 * (1 + math.cos(math.pi * (step - warm_up * S) / S))
        rule.count(share)
        if rule.due:
            held = 0.5 + 1.8 * math.exp(-step / 20) + 0.4 * share
            assert rule.look([held] * 8, held) is None, rule.verdict
    assert rule.scale == 8.0
    assert rule.over


def test_what_dies_while_the_schedule_rises_unlearns_too() -> None:
    """At its peak, after all had been learnt on the way up: more than a quarter of it is gone."""
    rule, restarts = watch(8.0), []
    for step in range(1, S - rule.begun):
        rule.count(min(1.0, step / (0.3 * S)))
        if rule.due:
            dead = rule.scale > 4.0 and step > 0.2 * S
            held = 1.0 if dead else 0.5 + 1.8 * math.exp(-step / 20)
            restarts += [rule.look([held] * 8, held)]
    assert [x for x in restarts if x is not None] == [2.0]


def test_a_training_loss_that_falls_does_not_unlearn() -> None:
    """With dropout or smoothed labels it is above the held-out loss from the beginning."""
    rule = watch(8.0)

    def losses(_: float) -> tuple[list[float], float]:
        held = max(1.0, 2.3 - rule.path / 25) + 0.3 * (rule.path > 100.0)
        return [held] * 8, 1.95 - rule.path / 400

    assert Played(rule, losses).scales == [8.0]


def test_fewer_batches_after_a_resume_are_held_against_themselves() -> None:
    rule, losses = watch(8.0), [1.8] * 4 + [1.0] * 4
    for k in range(12):
        while not rule.due:
            rule.count(1.0)
        few = losses[: 8 if k < 8 else 6]
        assert rule.look(few, 1.9 + 0.01 * k) is None, rule.verdict
    assert rule.scale == 8.0


def test_what_unlearns_late_is_left_to_the_decay() -> None:
    rule = watch(8.0)

    def losses(_: float) -> tuple[list[float], float]:
        held = 0.3 + 0.4 * (rule.step > 0.4 * S)
        return [held] * 8, held

    assert Played(rule, losses).scales == [8.0]


def test_a_quarter_below_the_learning_rate_given_has_four_times_the_path_too() -> None:
    """It unlearns at 0.4 x; what is left learns a quarter as fast, and keeps the promise."""
    rule = Watch(total_steps=S, begun=70, mean=0.5, scale=0.4, before=BEFORE, promise=1.5)

    def losses(_: float) -> tuple[list[float], float]:
        lost = rule.scale > 0.2 and rule.path > 100.0
        held = max(0.3, 2.3 - rule.scale * rule.path / 10) + 0.4 * lost
        return [held] * 8, held

    run = Played(rule, losses)
    assert run.scales == pytest.approx([0.4, 0.1])
    assert "not above the one given" not in rule.verdict


@pytest.mark.parametrize("trained", [math.nan, 0.45])
def test_without_a_training_loss_above_it_too_nothing_is_unlearnt(trained: float) -> None:
    """Not known; or of what was learnt by heart, which is for another rule to see."""
    rule = watch(8.0)
    run = Played(rule, unlearns(rule, 4.0, trained))
    assert "at its lowest" not in rule.verdict
    assert 2.0 not in run.scales


def test_one_look_that_has_lost_much_is_no_verdict() -> None:
    rule, looks = watch(8.0), []

    def losses(_: float) -> tuple[list[float], float]:
        looks.append(rule.step)
        held = 2.0 if len(looks) in (9, 11, 13) else max(0.3, 2.3 - rule.path / 25)
        return [held] * 8, held

    assert Played(rule, losses).scales == [8.0]
    assert len(looks) >= 13


@pytest.mark.parametrize("found", [0.1, 30.0])
@pytest.mark.parametrize(("loss", "steps"), [(2.1, 81), (40.0, 20), (math.nan, 20), (math.inf, 20)])
def test_what_is_contested_is_taken_where_the_run_does_not(
    loss: float, steps: int, found: float
) -> None:
    """At once where it breaks; otherwise after a twentieth of the path."""
    rule = contested(found)

    def losses(path: float) -> tuple[list[float], float]:
        return ([loss] * 8 if rule.contested else [1.0 / (1.0 + path)] * 8), 1.0

    run = Played(rule, losses)
    assert run.scales == [1.0, found]
    assert f"the run starts again with {found:g} x the learning rate given" in rule.verdict
    assert rule.begun <= 70 + steps
    assert rule.over
    assert len(run.looks) > 12, "what was found is watched like any other"


@pytest.mark.parametrize("moment", [10, 30, 60, 200])
def test_a_contest_goes_on_where_it_was_interrupted(moment: int) -> None:
    def run(rule: Watch, first: int, last: int) -> Watch:
        for _ in range(first, last):
            rule.count(0.7)
            if rule.due:
                rule.look([2.2 if rule.contested else 1.0 / rule.path] * 8, 1.0)
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
        assert rule.look([2.0 - 0.3 * k] * 8, 1.0) is None
    for few in (7, 8, 6):
        while not rule.due:
            rule.count(1.0)
        rule.look([1.7] * few, 0.5)
    assert rule.scale < 50.0, "what rose on the batches that are left is a rise"


def test_losses_without_a_natural_zero_are_never_learnt_by_heart() -> None:
    run = Played(watch(), lambda path: ([max(-1.0, 2.0 - path / 500)] * 8, -path))
    assert run.scales == [50.0]


@pytest.mark.parametrize("moment", [1, 16, 100, 160, 161, 300, 480, 900])
def test_it_goes_on_where_it_was_interrupted(moment: int) -> None:
    def run(rule: Watch, first: int, last: int) -> Watch:
        for _ in range(first, last):
            rule.count(0.7)
            if rule.due:
                rule.look(*overfits(rule.path * rule.scale, 400.0))
        return rule

    whole = run(watch(), 0, moment)
    again = Watch.of_state(copy.deepcopy(whole.state_dict()))
    assert run(whole, moment, S).state_dict() == run(again, moment, S).state_dict()


@pytest.mark.parametrize("moment", [60, 120, 160, 220, 300, 480])
def test_unlearning_goes_on_where_it_was_interrupted(moment: int) -> None:
    def run(rule: Watch, first: int, last: int) -> Watch:
        for _ in range(first, last):
            rule.count(0.7)
            if rule.due:
                rule.look(*unlearns(rule, 4.0)(0.0))
        return rule

    whole = run(watch(8.0), 0, moment)
    again = Watch.of_state(copy.deepcopy(whole.state_dict()))
    assert run(whole, moment, S).state_dict() == run(again, moment, S).state_dict()
    assert whole.scale == 2.0


def test_a_state_from_before_unlearning_was_counted_loads() -> None:
    state = watch().state_dict()
    del state["unlearnt"]
    assert Watch.of_state(state).unlearnt == 0


def duel() -> Watch:
    return Watch(
        total_steps=S,
        begun=70,
        mean=0.5,
        scale=0.1,
        before=BEFORE,
        promise=2.0,
        contested=True,
        duel=True,
    )


def turns(given: float, found: float) -> Any:
    """Held-out losses that fall towards these values, by who has the turn."""

    def losses(rule: Watch) -> tuple[list[float], float]:
        end = given if rule.scale == 1.0 else found
        return [end + 2.0 / (1.0 + rule.step)] * 8, 1.0

    return losses


@pytest.mark.parametrize(
    ("given", "found", "scales"),
    [
        (1.5, 1.4, [1.0, 0.1]),
        (1.4, 1.5, [1.0, 0.1, 1.0]),
        (1.5, 1.5, [1.0, 0.1, 1.0]),  # a tie is the user's
        (1.5, math.nan, [1.0, 0.1, 1.0]),
        (math.nan, 1.5, [1.0, 0.1]),
        (40.0, 1.5, [1.0, 0.1]),
    ],
)
def test_in_a_duel_both_have_a_turn_and_the_lower_loss_is_the_runs(
    given: float, found: float, scales: list[float]
) -> None:
    rule, losses = duel(), turns(given, found)
    run = Played(rule, lambda _: losses(rule))
    assert run.scales == scales
    assert not rule.duel
    assert not rule.contested
    if scales[-1] == 1.0:
        assert "with the learning rate given: the run starts again with 1 x" in rule.verdict
        assert rule.begun < 70 + 2 * 0.2 * S, "a fifth of the path for both"
    elif given == 1.5:
        assert rule.verdict.startswith("what was found stays: the held-out loss is")
        assert "with the learning rate given" in rule.verdict


@pytest.mark.parametrize("moment", [10, 60, 100, 130, 300])
def test_a_duel_goes_on_where_it_was_interrupted(moment: int) -> None:
    losses = turns(1.4, 1.5)

    def run(rule: Watch, first: int, last: int) -> Watch:
        for _ in range(first, last):
            rule.count(0.7)
            if rule.due:
                rule.look(*losses(rule))
        return rule

    whole = run(duel(), 0, moment)
    again = Watch.of_state(copy.deepcopy(whole.state_dict()))
    one, two = (run(w, moment, S).state_dict() for w in (whole, again))
    assert one == two
    assert one["scale"] == 1.0
