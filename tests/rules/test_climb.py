"""The climb on a landscape with a known best learning rate, and each of its safeguards."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hdet_scale.rules.climb import CUT, Climb
from hdet_scale.rules.designs import levels
from hdet_scale.rules.slope import Sums

TOTAL = 1000
EVERY = 4


def spoken(slope: float, n: int = 8, seed: int = 0, noise: float = 0.01, loss: float = 2.0) -> Sums:
    """A round in which the probe saw this slope on ln rho."""
    random = np.random.default_rng(seed)
    (column,) = levels(n, ["together"], seed=0, round=seed)
    total = Sums.none(1, 8)
    batches = slope + noise * random.standard_normal(8)
    for level in column:
        x = math.log1p(0.3 * level)
        total = total + Sums.of([x], (loss + batches * x).tolist())
    return total


def climb(best: float, rule: Climb, *, n: int = 8, edge: float = math.inf) -> list[str]:
    """The slope is steep far below m = best and vanishes there; above `edge` nothing is finite."""
    said = []
    for k in range(1, TOTAL // EVERY):
        m = rule.m
        slope = -min(1.0, max(best - m, -2.0))
        bad = Sums.none(1, 8)
        made = rule.update(bad if m > edge else spoken(slope, n, seed=k), k * EVERY)
        said.append(made.verdict)
        if made.phase == "hold":
            break
    return said


@pytest.mark.parametrize("n", [*range(2, 10), 64])
@pytest.mark.parametrize("best", [-2.0, 0.0, 2.0])
def test_it_stops_where_the_slope_gives_out(best: float, n: int) -> None:
    """Between 30 % of the steepest slope and one step further."""
    rule = Climb(["a", "b"], TOTAL)
    said = climb(best, rule, n=n)
    assert said[-1] == "hold: the slope has given out"
    assert best - 0.31 - 0.4 <= rule.m <= best + 0.15
    assert rule.decision.spread == 0.0
    assert rule.decision.offsets == (rule.m, rule.m)
    assert not rule.decision.rewind


def test_a_hold_is_for_good() -> None:
    rule = Climb(["a"], TOTAL)
    climb(0.0, rule)
    held = rule.decision
    assert rule.update(spoken(-5.0), 999) is held


def test_a_reversal_within_the_grace_is_no_verdict() -> None:
    rule = Climb(["a"], TOTAL)
    start = rule.m
    for step in (4, 8, 12):
        made = rule.update(spoken(-1.0, seed=step), step)
    climbed = made.offsets[0]
    assert climbed == pytest.approx(start + 3 * 0.4)
    for step in (16, 96):
        assert rule.update(spoken(0.5, seed=step), step).verdict == "within the grace"
    assert rule.m == climbed
    assert rule.update(spoken(0.5, seed=3), 100).verdict == "hold: the slope has given out"


def test_a_start_that_is_too_high_is_cut_with_a_rewind() -> None:
    rule = Climb(["a"], TOTAL, below=1.0)
    verdicts = [rule.update(spoken(0.5, seed=k), 4 * k) for k in range(1, 40)]
    first = next(d for d in verdicts if d.rewind)
    assert first.offsets == (-CUT,)
    assert first.verdict.startswith("started too high")
    index = verdicts.index(first)
    assert 4 * (index + 1) >= 100
    assert not any(d.rewind for d in verdicts[:index])


def test_a_rewind_is_asked_once() -> None:
    rule = Climb(["a"], TOTAL, below=1.0, grace=0.0)
    while not rule.update(spoken(0.5, seed=1), 4).rewind:
        pass
    assert not rule.update(spoken(-1.0, seed=2), 8).rewind


def test_divergence_is_cut_within_the_grace_and_is_a_ceiling() -> None:
    rule = Climb(["a"], TOTAL, below=10.0, longest=1.0)
    said = climb(10.0, rule, edge=0.5)
    assert any(v.startswith("diverged: a tenth") for v in said)
    assert said[-1] == "hold: the ceiling is reached"
    assert -0.8 < rule.m <= 0.5


@pytest.mark.parametrize("loss", [3.2, 50.0])
def test_a_loss_far_above_the_lowest_is_divergence(loss: float) -> None:
    rule = Climb(["a"], TOTAL)
    rule.update(spoken(-1.0, loss=2.0), 4)
    assert rule.update(spoken(-1.0, loss=loss), 8).rewind
    assert not rule.update(spoken(-1.0, loss=loss), 12).rewind


def test_cuts_end() -> None:
    """A loss that is never finite again does not cut for ever."""
    rule = Climb(["a"], TOTAL, longest=1.0)
    for k in range(1, 30):
        rule.update(spoken(-1.0, seed=k), 2 * k)
        made = rule.update(Sums.none(1, 8), 2 * k + 1)
    assert made.phase == "hold"
    assert "6 cuts have not helped" in made.verdict


def test_the_time_is_up() -> None:
    rule = Climb(["a"], TOTAL, step=0.001)
    assert climb(5.0, rule)[-1] == "hold: the time is up"
    quiet = Climb(["a"], TOTAL)
    assert quiet.update(Sums.none(1, 8), 4).verdict == "nothing was heard"
    assert quiet.update(Sums.none(1, 8), 200).verdict == "hold: the time is up"


def test_equal_losses_do_not_climb() -> None:
    rule = Climb(["a"], TOTAL)
    start = rule.m
    for k in range(1, 60):
        rule.update(spoken(0.0, seed=k, noise=0.0), 4 * k)
    assert rule.m == start
    assert rule.decision.phase == "hold"


def test_resume_bit_for_bit_in_every_phase() -> None:
    """Climbing, waiting, cut, and held."""
    rule = Climb(["a"], TOTAL, below=10.0, longest=0.5)
    seen = set()
    for k in range(1, 130):
        twin = Climb(["a"], TOTAL, below=10.0, longest=0.5)
        twin.load_state_dict(json.loads(json.dumps(rule.state_dict())))
        assert twin.decision == rule.decision
        slope = -1.0 if k % 7 else 0.4
        said = Sums.none(1, 8) if k == 9 else spoken(slope, seed=k)
        assert twin.update(said, EVERY * k) == rule.update(said, EVERY * k)
        assert twin.state_dict() == rule.state_dict()
        seen.add(rule.decision.verdict.split(":")[0])
    assert seen == {"up", "within the grace", "diverged", "hold"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"total_steps": 0}, "total_steps must be at least 1, got 0"),
        ({"below": 0.5}, "below must be 1 or more, got 0.5"),
        ({"spread": 0.0}, r"spread must be in \(0, 1\)"),
        ({"share": 1.0}, r"share \(f\) must be in \[0, 1\), got 1.0"),
        ({"grace": 0.5}, "grace=0.5 and longest=0.2"),
        ({"diverged": 1.0}, "diverged must be above 1, got 1.0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Climb(["a"], **{"total_steps": TOTAL, **options})  # type: ignore[arg-type]


def test_a_state_of_other_factors_is_refused() -> None:
    with pytest.raises(ValueError, match="the state is of 2 factors"):
        Climb(["a"], TOTAL).load_state_dict(Climb(["a", "b"], TOTAL).state_dict())
