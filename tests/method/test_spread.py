"""Multipliers as the equation says, and assignments that every rank draws alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_scale.method.spread import assignment, multipliers
from tests.support.rng import rng_states

SPREADS = st.floats(0, 1, exclude_max=True, allow_subnormal=False)


@given(n=st.integers(1, 257), a=SPREADS)
def test_multipliers_are_the_equation(n: int, a: float) -> None:
    d = max((n - 1) / 2, 0.5)
    expected = [1 + a * ((r - (n - 1) / 2) / d) for r in range(n)]
    assert multipliers(n, a) == expected


@given(n=st.integers(1, 257), a=SPREADS)
def test_mean_one_within_bounds_in_order(n: int, a: float) -> None:
    rho = multipliers(n, a)
    assert len(rho) == n
    assert np.mean(rho) == pytest.approx(1.0, abs=1e-15 * n)
    assert min(rho) >= 1 - a
    assert max(rho) <= 1 + a
    assert rho == sorted(rho)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 64])
def test_spread_zero_is_exactly_one(n: int) -> None:
    assert multipliers(n, 0.0) == [1.0] * n


def test_known_fans() -> None:
    assert multipliers(1, 0.5) == [1.0]
    assert multipliers(2, 0.5) == [0.5, 1.5]
    assert multipliers(3, 0.5) == [0.5, 1.0, 1.5]
    assert multipliers(5, 0.5) == [0.5, 0.75, 1.0, 1.25, 1.5]


@given(
    n=st.integers(1, 64),
    seed=st.integers(0, 2**63),
    round=st.integers(0, 10**9),
    factor=st.one_of(st.integers(0, 99), st.text(max_size=20)),
)
def test_assignment_is_a_permutation_and_a_pure_function(
    n: int, seed: int, round: int, factor: int | str
) -> None:
    pi = assignment(n, seed=seed, round=round, factor=factor)
    assert sorted(pi) == list(range(n))
    assert pi == assignment(n, seed=seed, round=round, factor=factor)


def test_round_zero_is_the_identity() -> None:
    for seed in range(5):
        assert assignment(6, seed=seed, round=0, factor="lr/group1") == list(range(6))


def test_rounds_factors_and_seeds_draw_different_permutations() -> None:
    draws = {
        tuple(assignment(12, seed=s, round=k, factor=f))
        for s in range(3)
        for k in range(1, 11)
        for f in ("lr/group0", "lr/group1", "weight_decay")
    }
    assert len(draws) == 3 * 10 * 3  # 12! permutations: a repeat means a key is ignored


def test_every_replica_sees_every_multiplier_alike() -> None:
    """4000 rounds of 4 replicas: each pairing 1000 times, within 5 standard deviations."""
    counts = np.zeros((4, 4))
    for k in range(1, 4001):
        for r, m in enumerate(assignment(4, seed=0, round=k, factor="lr/group0")):
            counts[r, m] += 1
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)


def test_permutations_stay_what_they_were() -> None:
    """Another hash or key would change what a resumed run draws."""
    drawn = [assignment(5, seed=7, round=k, factor="lr/group0") for k in (1, 2, 3)]
    assert drawn == [[2, 1, 3, 0, 4], [3, 1, 0, 4, 2], [3, 1, 4, 0, 2]]


def test_no_global_generator_is_touched() -> None:
    before = rng_states()
    multipliers(8, 0.3)
    assignment(8, seed=3, round=5, factor="lr/group0")
    assert rng_states() == before


@pytest.mark.parametrize("spread", [-0.1, 1.0, 1.5, float("nan"), float("inf")])
def test_spread_outside_is_refused(spread: float) -> None:
    with pytest.raises(ValueError, match=rf"\[0, 1\), got {spread}.*the paper uses 1/9"):
        multipliers(4, spread)


@pytest.mark.parametrize("spread", ["0.1", None, True])
def test_spread_of_another_type_is_refused(spread: object) -> None:
    with pytest.raises(TypeError, match=r"number in \[0, 1\)"):
        multipliers(4, spread)  # type: ignore[arg-type]


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 replica, got 0"):
        multipliers(0, 0.1)
    with pytest.raises(TypeError, match=r"int, got 2\.0"):
        multipliers(2.0, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 or more, got -1"):
        assignment(4, seed=0, round=-1)
