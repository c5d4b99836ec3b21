"""The paper rule against a transcription of its equations, and the steering around it."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_scale.method.paper import Descent, PaperRule, PaperSteering, floor_decay
from hdet_scale.method.spread import assignment, multipliers

EPS = float(np.finfo(np.float64).eps)
LOSS = st.floats(-20, 20)
ODD_LOSS = st.sampled_from([math.nan, math.inf, -math.inf])
RATE = st.floats(1e-8, 10)


@st.composite
def losses_and_rates(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """N replicas: random or equal losses, at most one of them not finite."""
    n = draw(st.sampled_from([1, 2, 2, 3, 4, 8]))
    pairs = draw(st.lists(st.tuples(LOSS, RATE), min_size=n, max_size=n))
    losses, rates = [x for x, _ in pairs], [y for _, y in pairs]
    kind = draw(st.sampled_from(["random", "random", "equal", "one bad"]))
    if kind == "equal":
        losses = losses[:1] * n
    elif kind == "one bad" and n > 1:
        losses[draw(st.integers(0, n - 1))] = draw(ODD_LOSS)
    return losses, rates


def transcription(
    losses: list[float], etas: list[float], v: float, beta: float, sigma: float
) -> tuple[float, float]:
    """D and v of the equations, in numpy float64; a loss that is not finite says nothing."""
    L, eta = np.asarray(losses, np.float64), np.asarray(etas, np.float64)
    L, eta = L[np.isfinite(L)], eta[np.isfinite(L)]
    z = (L.mean() - L) / sigma
    e = np.exp(z - z.max())
    w = e / e.sum()
    D = float((w * eta).sum() - eta.mean())
    return D, beta * v + (1 - beta) * D


def rounding(losses: list[float], etas: list[float], sigma: float) -> float:
    """How far two float64 evaluations of D may differ: by the rounding of L - mean(L), which
    the softmax divides by sigma, and by that of the sums of eta."""
    finite = [abs(x) for x in losses if math.isfinite(x)]
    n = len(losses)
    return (4 * max(finite) / sigma + 4 * n) * n * EPS * max(etas)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(
    replicas=losses_and_rates(),
    v=st.floats(-1, 1),
    settings=st.sampled_from([(0.002, 0.9, 0.5, 0.0), (0.1, 0.5, 2.0, 0.01), (1.0, 0.0, 0.5, 0.5)]),
)
def test_paper_rule_is_its_transcription(
    replicas: tuple[list[float], list[float]],
    v: float,
    settings: tuple[float, float, float, float],
) -> None:
    losses, etas = replicas
    sigma, beta, lam, gamma = settings
    rule = PaperRule(sigma, beta, lam, gamma)
    rule.load_state_dict({"velocity": v, "decay": gamma})
    base = rule.update(losses, etas)
    _, v = transcription(losses, etas, v, beta, sigma)
    mean = float(np.mean(etas))
    slack = rounding(losses, etas, sigma) + 4 * EPS * abs(v)
    assert abs(rule.velocity - v) <= slack
    assert abs(base - (mean * (1 - gamma) + lam * v)) <= lam * slack + 16 * EPS * (mean + abs(v))


@given(n=st.integers(1, 16), loss=LOSS, etas=st.data())
def test_equal_losses_say_nothing(n: int, loss: float, etas: st.DataObject) -> None:
    values = etas.draw(st.lists(RATE, min_size=n, max_size=n))
    rule = PaperRule()
    assert rule.update([loss] * n, values, base=0.1) == 0.1
    assert rule.velocity == 0.0


def test_one_replica_gives_no_signal() -> None:
    rule = PaperRule(decay=0.25)
    assert rule.update([3.0], [0.4]) == 0.4 * 0.75


@pytest.mark.parametrize(("losses", "sign"), [([1.0, 2.0], -1), ([2.0, 1.0], 1)])
def test_the_base_moves_towards_the_better_replica(losses: list[float], sign: int) -> None:
    base = PaperRule().update(losses, [0.9, 1.1])
    assert math.copysign(1, base - 1.0) == sign
    assert abs(base - 1.0) == pytest.approx(0.5 * 0.1 * 0.1)  # lambda (1 - beta) D, D = 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_loss_is_as_if_its_replica_were_not_there(bad: float) -> None:
    with_it, without = PaperRule(), PaperRule()
    assert with_it.update([1.0, bad, 1.001], [0.8, 1.0, 1.3], base=1.0) == without.update(
        [1.0, 1.001], [0.8, 1.3], base=1.0
    )


def test_no_finite_loss_is_an_error_of_the_bare_rule() -> None:
    rule = PaperRule()
    with pytest.raises(ValueError, match=r"no replica has a finite loss, got \[nan, inf\]"):
        rule.update([math.nan, math.inf], [1.0, 2.0])
    assert rule.velocity == 0.0


def test_rule_state_continues() -> None:
    rule, other = PaperRule(), PaperRule()
    rule.update([1.0, 1.001], [0.9, 1.1])
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert other.update([1.0, 1.1], [0.9, 1.1]) == rule.update([1.0, 1.1], [0.9, 1.1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_scale": 0}, "above 0, got 0"),
        ({"momentum": 1.0}, r"\[0, 1\), got 1\.0"),
        ({"momentum": -0.1}, r"\[0, 1\), got -0\.1"),
        ({"step_size": -1}, "0 or more, got -1"),
        ({"decay": -0.1}, r"\[0, 1\], got -0\.1.*grow"),
        ({"loss_scale": math.inf}, "finite, got inf"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PaperRule(**arguments)


def test_uneven_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="2 losses and 3 values"):
        PaperRule().update([1.0, 2.0], [1.0, 2.0, 3.0])


# -- decay ------------------------------------------------------------------------------------


@given(start=st.floats(1e-6, 10), ratio=st.floats(1e-9, 1), k=st.integers(1, 1000))
def test_floor_decay_meets_the_floor_in_k_rounds(start: float, ratio: float, k: int) -> None:
    gamma = floor_decay(start, start * ratio, k)
    assert 0 <= gamma < 1
    # gamma is rounded once and applied k times.
    assert start * (1 - gamma) ** k == pytest.approx(start * ratio, rel=4 * k * EPS / (1 - gamma))


def test_floor_decay_at_or_below_the_floor_stays() -> None:
    assert floor_decay(0.1, 0.1, 5) == 0.0
    assert floor_decay(0.05, 0.1, 5) == 0.0


@pytest.mark.parametrize("rounds", [0, -1.5])
def test_nothing_left_to_decay_over_is_refused(rounds: float) -> None:
    with pytest.raises(ValueError, match=f"rounds must be above 0, got {rounds}"):
        floor_decay(1.0, 0.1, rounds)


# -- steering ---------------------------------------------------------------------------------


def floor_steering(**changes: object) -> PaperSteering:
    settings = {"kind": "floor", "start": 30, "total_steps": 100, "interval": 10, "floors": (0.01,)}
    return PaperSteering(["lr/group0"], PaperRule, Descent(**(settings | changes)))  # type: ignore[arg-type]


def test_the_schedule_is_followed_until_the_start() -> None:
    steering = floor_steering()
    steering.update(20, [0.7], [1.0, 2.0], [[0.6, 0.8]])
    assert steering.bases([0.7]) == [0.7]
    assert not steering.taken_over
    steering.update(30, [0.7], [1.0, 1.0], [[0.6, 0.8]])
    assert steering.taken_over
    assert steering.bases([0.123]) != [0.123]


def test_without_a_signal_the_base_meets_the_floor_at_the_end() -> None:
    steering = floor_steering()
    for step in range(30, 100, 10):
        (b,) = steering.bases([1.0])
        steering.update(step, [1.0], [2.0, 2.0], [[0.9 * b, 1.1 * b]])
    assert steering.bases([1.0])[0] == pytest.approx(0.01, rel=1e-12)


def test_the_floor_holds_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    steering = floor_steering(floors=(0.69,))
    with caplog.at_level(logging.INFO, logger="hdet_scale"):
        for step in range(30, 100, 10):
            steering.update(step, [0.7], [1.0, 2.0], [[0.1, 1.3]])
            assert steering.bases([0.7])[0] >= 0.69
    assert steering.bases([0.7]) == [0.69]
    assert "lr/group0" in caplog.text
    assert "below the floor of the schedule: held at 0.69" in caplog.text


def test_no_loss_leaves_the_decay_alone() -> None:
    steering, quiet = floor_steering(), floor_steering()
    steering.update(30, [0.7], [math.nan, math.nan], [[0.6, 0.8]])
    quiet.update(30, [0.7], [2.0, 2.0], [[0.6, 0.8]])
    assert steering.bases([0.7]) == quiet.bases([0.7])
    assert steering.bases([0.7])[0] < 0.7


def test_schedule_decay_follows_the_shape() -> None:
    steering = PaperSteering(["lr"], PaperRule, Descent(kind="schedule", start=0, interval=10))
    steering.update(10, [1.0], [1.0, 2.0], [[0.9, 1.1]])
    (at_one,) = steering.bases([1.0])
    assert at_one == pytest.approx(1.0 - 0.5 * 0.1 * 0.1)
    assert steering.bases([0.25])[0] == pytest.approx(0.25 * at_one, rel=1e-15)


def test_without_a_rule_the_schedule_rules() -> None:
    steering = PaperSteering(["lr"], None, Descent(start=0))
    steering.update(10, [1.0], [1.0, 2.0], [[0.9, 1.1]])
    assert steering.bases([0.3]) == [0.3]
    assert not steering.taken_over


@pytest.mark.parametrize("kind", ["floor", "schedule"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_steering_state_continues(kind: str, scale: float) -> None:
    one, other = (floor_steering(kind=kind) for _ in "ab")
    one.scale = scale
    one.update(30, [0.7], [1.0, 1.001], [[0.6, 0.8]])
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for steering in (one, other):
        steering.update(40, [0.6], [1.0, 1.002], [[0.5, 0.7]])
    assert one.bases([0.5]) == other.bases([0.5]) != [0.5]


def test_the_scale_of_a_search_multiplies_the_schedule_until_the_rule_takes_over() -> None:
    steering = floor_steering()
    steering.scale = 3.0
    assert steering.bases([0.2]) == [0.2 * 3.0]
    steering.update(30, [0.2], [2.0, 2.0], [[0.5, 0.7]])
    assert steering.held is not None
    gamma = floor_decay(0.2 * 3.0, 0.01, 7)
    assert steering.held == [0.2 * 3.0 * (1 - gamma)]
    assert steering.bases([0.1]) == steering.held


@pytest.mark.parametrize("round", [0, 1, 7])
def test_each_factor_draws_its_own_permutation_of_the_multipliers(round: int) -> None:
    names = ["lr/group0", "lr/group1"]
    steering = PaperSteering(names, None, Descent(), spread=0.3, seed=5)
    rho = multipliers(6, 0.3)
    orders = [assignment(6, seed=5, round=round, factor=name) for name in names]
    assert steering.fans(6, round) == [[rho[i] for i in order] for order in orders]


def test_along_a_falling_schedule_the_rule_moves_the_scale_evenly() -> None:
    """The same evidence moves base / schedule alike, however far the schedule fell."""
    steering = PaperSteering(["lr"], lambda: PaperRule(0.1, 0.0, 0.5), Descent(kind="schedule"))
    ratios = []
    for k in range(6):
        schedule = [10.0**-k]
        base = steering.bases(schedule)[0]
        steering.update(k, schedule, [1.0, 1.1], [[1.1 * base, 0.9 * base]])
        ratios.append(steering.bases(schedule)[0] / base)
    assert ratios == pytest.approx([ratios[0]] * 6)
    assert ratios[0] > 1.01


def test_along_a_falling_schedule_an_old_velocity_keeps_its_proportion() -> None:
    steering = PaperSteering(["lr"], lambda: PaperRule(0.1, 0.9, 0.5), Descent(kind="schedule"))
    steering.update(0, [1.0], [1.0, 1.1], [[1.1, 0.9]])
    before = steering.scales[0]
    steering.update(1, [1e-6], [1.0, 1.0], [[1.1e-6 * before, 0.9e-6 * before]])
    assert steering.scales[0] / before < 1.05
