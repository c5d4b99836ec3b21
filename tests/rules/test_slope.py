"""The slope rule: the gate in simulation, the width, resume."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest

from hdet_scale.method.spread import fan
from hdet_scale.rules.guided import Decision
from hdet_scale.rules.slope import Evidence, Slope, Width, gate
from hdet_scale.rules.sums import Fit, Slopes, Sums
from tests.rules.test_sums import M, World, added, design, sums_of, vectors


@pytest.mark.parametrize("left", [0, 1, 2])
def test_too_few_replicas_left_say_nothing(left: int) -> None:
    X = design(8, ["a", "b"], 0.3, 1)[:left]
    L = World([0.5, -0.2], seed=1).losses(X)
    rule = Slope(["a", "b"], Width(0.3))
    assert rule.update(added(X, L), 1).offsets == (0.0, 0.0)
    assert [e.n for e in rule.gathered] == [0, 0]


def test_sums_of_another_rule_are_refused() -> None:
    with pytest.raises(ValueError, match="sums of 2 factors for the rule of"):
        Slope(["a"], Width(0.3)).update(Sums.none(2, 8), 1)
    with pytest.raises(ValueError, match="between the probe batches, got 1: probe at least 2"):
        Slope(["a"], Width(0.3)).update(Sums.none(1, 1), 1)


# -- the gate -----------------------------------------------------------------------------------


def run(
    rule: Slope, world: World, n: int, rounds: int, *, seed: int = 0, start: int = 0
) -> list[Decision]:
    made = []
    for r in range(start, start + rounds):
        X = design(n, rule.factors, rule.decision.spread, r, seed)
        made.append(rule.update(sums_of(X, world.losses(X)), r))
    return made


def drift(noise: dict[str, float], n: int, seeds: int, rounds: int) -> list[float]:
    """Octaves that the base of a factor without effect was ever away from the schedule."""
    worst = []
    X = design(n, ["null"], 1 / 9, 0)
    for seed in range(seeds):
        rule = Slope(["null"], Width(1 / 9, patience=None))
        world = World([0.0], seed=seed, **noise)
        rows = vectors(X, world.losses(X, rounds)).tolist()
        told = (Sums.read(1, M, row) for row in rows)
        far = [rule.update(sums, r).offsets[0] for r, sums in enumerate(told)]
        worst.append(max(abs(m) for m in far) / math.log(2))
    return worst


@pytest.mark.slow
def test_a_factor_without_effect_does_not_drift_in_500_rounds() -> None:
    """200 seeds. Noise of the kind that shared gradients give: no residual shows it."""
    assert max(drift({"batch": 1.0}, 8, 200, 500)) < 0.1


@pytest.mark.parametrize(
    ("noise", "n"),
    [
        ({"own": 1.0, "batch": 0.01}, 8),  # dropout masks, local gradients: all batches see it
        ({"each": 1.0}, 8),
        ({"own": 1.0, "batch": 0.01}, 2),  # no residual left
        ({"batch": 1.0, "own": 0.3}, 3),
        ({"batch": 1.0, "own": 1.0, "each": 1.0}, 64),
    ],
)
def test_nor_under_any_other_kind_of_noise(noise: dict[str, float], n: int) -> None:
    assert max(drift(noise, n, 50, 120)) < 0.1


def test_a_fixed_threshold_would_drift() -> None:
    """Why the gate rises with n: 2.5 standard deviations are crossed by one sum of noise in six."""
    random = np.random.default_rng(0)
    sums = random.standard_normal((2000, 500)).cumsum(1) / np.sqrt(np.arange(1, 501))
    gates = np.array([gate(n) for n in range(1, 501)])
    assert (np.abs(sums) > 2.5).any(1).mean() > 0.15
    assert (np.abs(sums) > gates).any(1).mean() <= 0.001


@pytest.mark.parametrize("n", [*range(2, 10), 64])
def test_an_effect_is_followed_at_any_number_of_replicas(n: int) -> None:
    """Down the slope, whichever sign it has, and never up."""
    for sign in (-1.0, 1.0):
        rule = Slope(["a"], Width(0.3))
        made = run(rule, World([sign], seed=n, batch=0.5, own=0.02), n, 60)
        assert -sign * made[-1].offsets[0] > 0
        assert all(-sign * d.offsets[0] >= 0 for d in made)


def permuted(n: int, names: list[str], spread: float, round: int, seed: int) -> np.ndarray:
    """The paper's design: the fan for each factor, permuted."""
    steps = np.array(fan(n))
    random = np.random.default_rng([seed, round])
    return np.log1p(spread * np.array([random.permutation(steps) for _ in names])).T


@pytest.mark.slow
def test_four_factors_one_of_them_weak() -> None:
    """The weak factor's sign in each round, at a noise at which a joint fit of permutations has it
    right in three rounds of four; no move of the two without effect; both others go down."""
    names = ["lr", "weak", "null1", "null2"]
    right, baseline, moved = [], [], 0
    for seed in range(20):
        world = World([1.0, 0.1, 0.0, 0.0], seed=seed, own=0.0245)
        rule = Slope(names, Width(1 / 9, patience=None))
        for r in range(100):
            X, P = design(8, names, 1 / 9, r, seed), permuted(8, names, 1 / 9, r, seed)
            total = sums_of(X, world.losses(X))
            fit, plain = total.fit(), sums_of(P, world.losses(P)).fit()
            assert fit is not None
            right.append(fit.slopes[1].mean > 0)
            if plain is not None:
                baseline.append(plain.slopes[1].mean > 0)
            made = rule.update(total, r)
        moved += sum(m != 0 for m in made.offsets[2:])
        assert made.offsets[0] < 0
        assert made.offsets[1] < 0
    print(f"sign right: {np.mean(right):.3f}, with permutations {np.mean(baseline):.3f}")
    assert np.mean(baseline) < 0.8
    assert np.mean(right) >= 0.85
    assert moved == 0


def test_equal_losses_move_nothing() -> None:
    rule = Slope(["a"], Width(0.3, patience=None))
    for r in range(100):
        X = design(8, ["a"], 0.3, r)
        made = rule.update(added(X, np.full((8, M), 2.5)), r)
    assert made.offsets == (0.0,)
    assert abs(made.evidence["a"]) < 1


def test_a_base_is_held_at_its_limit() -> None:
    rule = Slope(["a"], Width(0.3), limit=0.5)
    made = run(rule, World([-3.0], seed=0, batch=0.1), 8, 40)
    assert made[-1].offsets == (0.5,)
    assert made[-1].evidence["a"] < 0


def test_two_replicas_wait_for_the_scatter_between_rounds() -> None:
    evidence = Evidence()
    for mean in (0.9, 1.1):
        evidence.add(Slopes(mean, 1e-8, 0.0, 0.1), Fit({}, batch_degrees=7, free=0))
        assert abs(evidence.z) < 2.5
    seen = Evidence()
    for mean in (0.9, 1.1):
        seen.add(Slopes(mean, 1e-8, 1e-8, 0.1), Fit({}, batch_degrees=7, free=6))
    assert seen.z > gate(2)


# -- the width ----------------------------------------------------------------------------------


def test_width_narrows_and_ends() -> None:
    width = Width(0.4, patience=3, halvings=2)
    seen = [width.update(moved=False) for _ in range(12)]
    assert seen == [0.4, 0.4, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0]
    width = Width(0.4, patience=3)
    assert [width.update(moved=m) for m in (False, False, False, True)][-2:] == [0.2, 0.4]
    assert Width(0.4, patience=None).update(moved=False) == 0.4


def test_the_exploration_ends_with_a_spread_of_zero() -> None:
    rule = Slope(["a"], Width(0.3, patience=5, halvings=1))
    made = run(rule, World([0.0], seed=0, batch=1.0), 8, 10)
    assert [d.spread for d in made] == [0.3] * 4 + [0.15] * 5 + [0.0]
    assert [d.verdict for d in made[:-1]] == [""] * 9
    assert made[-1].verdict == "no evidence is left: the exploration ends"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Width(0.3, patience=0), "patience must be at least 1 round or None, got 0"),
        (lambda: Width(0.3, halvings=-1), "halvings must be 0 or more, got -1"),
        (lambda: Slope(["a"], Width(0.3), false_moves=0), r"false_moves must be in \(0, 1\)"),
        (lambda: Slope(["a"], Width(0.0)), "step and limit must be above 0"),
    ],
)
def test_wrong_options_are_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# -- resume -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8])
def test_resume_bit_for_bit_after_every_round(n: int) -> None:
    """Through JSON, after moves, with a narrowed spread, and after the exploration."""
    rule = Slope(["a"], Width(0.3, patience=6, halvings=1))
    world = World([0.6], seed=3, batch=0.5, own=0.05)
    spreads = set()
    for r in range(60):
        if r == 30:
            world.slopes = np.zeros(1)
        twin = Slope(["a"], Width(0.3, patience=6, halvings=1))
        twin.load_state_dict(json.loads(json.dumps(rule.state_dict())))
        assert twin.decision == rule.decision
        X = design(n, ["a"], rule.decision.spread, r)
        total = sums_of(X, world.losses(X))
        assert twin.update(total, r) == rule.update(total, r)
        assert twin.state_dict() == rule.state_dict()
        spreads.add(rule.decision.spread)
    assert spreads == {0.3, 0.15, 0.0}


def test_a_state_of_other_factors_is_refused() -> None:
    state = copy.deepcopy(Slope(["a", "b"], Width(0.3)).state_dict())
    with pytest.raises(ValueError, match="the state is of 2 factors"):
        Slope(["a"], Width(0.3)).load_state_dict(state)


# -- thousands of replicas ----------------------------------------------------------------------


def rounds_to_move(n: int, seed: int, most: int = 4000) -> int:
    """Rounds until a weak effect under the replicas' own noise has passed the gate."""
    rule = Slope(["a"], Width(1 / 9, patience=None))
    world = World([0.1], seed=seed, own=0.05, batch=0.01)
    for r in range(most):
        X = np.log1p(np.linspace(-1 / 9, 1 / 9, n))[:, None]
        if rule.update(sums_of(X, world.losses(X)), r).offsets != (0.0,):
            return r + 1
    return most


def test_rounds_needed_fall_with_the_replicas() -> None:
    """In proportion to 1/N while the replicas' own noise rules, then one or two rounds."""
    need = {
        n: float(np.median([rounds_to_move(n, s) for s in range(5)])) for n in (64, 256, 1024, 4096)
    }
    print("".join(f"\n{n:5d} replicas: {r:.0f} rounds" for n, r in need.items()))
    assert need[64] >= 2.5 * need[256]
    assert need[256] >= 2 * need[1024]
    assert need[4096] <= 3
