"""Designs: orthogonal where N allows it, told apart where it does not, refused otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_scale.method.spread import assignment, multipliers
from hdet_scale.rules.designs import check_design, hadamard_column, hadamard_order, levels

NAMES = [f"factor{i}" for i in range(40)]


@pytest.mark.parametrize("order", [4, 8, 12, 16, 20, 24, 32, 40, 44, 48, 64, 96])
def test_hadamard_columns_are_orthogonal(order: int) -> None:
    H = np.array([hadamard_column(order, c) for c in range(order)])
    assert (H[0] == 1).all()
    np.testing.assert_array_equal(H @ H.T, order * np.eye(order))


@settings(max_examples=200, deadline=None)
@given(
    n=st.sampled_from([4, 8, 12, 16, 20, 24, 28, 36, 64]),
    share=st.floats(0, 1),
    seed=st.integers(0, 10_000),
    round=st.integers(0, 10_000),
)
def test_orthogonal_designs(n: int, share: float, seed: int, round: int) -> None:
    """Balanced columns, X'X diagonal, for every number of factors that the order holds."""
    most = max(g for g in range(2, n) if hadamard_order(n, g))
    g = 2 + int(share * (most - 2))
    X = np.array(
        levels(n, NAMES[:g] if g <= 40 else [str(i) for i in range(g)], seed=seed, round=round)
    )
    assert set(np.unique(X)) == {-1.0, 1.0}
    np.testing.assert_array_equal(X.sum(1), 0)
    np.testing.assert_array_equal(X @ X.T, n * np.eye(g))


@settings(max_examples=100, deadline=None)
@given(n=st.integers(4, 23), seed=st.integers(0, 1000), round=st.integers(0, 1000))
def test_any_allowed_number_of_factors_has_full_rank(n: int, seed: int, round: int) -> None:
    """G up to N - 2: the columns and the constant are linearly independent."""
    for g in {2, (n + 1) // 2, n - 2}:
        X = np.array(levels(n, NAMES[:g], seed=seed, round=round))
        assert np.linalg.matrix_rank(np.vstack([np.ones(n), X])) == g + 1
        np.testing.assert_allclose(X.mean(1), 0, atol=1e-15)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("round", [0, 1, 7])
def test_one_factor_is_the_fan_as_it_was(n: int, round: int) -> None:
    (column,) = levels(n, ["lr/group0"], seed=3, round=round)
    fan = multipliers(n, 0.3)
    order = assignment(n, seed=3, round=round, factor="lr/group0")
    assert [1.0 + 0.3 * x for x in column] == [fan[i] for i in order]


def test_pure_function_of_seed_and_round() -> None:
    for n in (8, 9):
        assert levels(n, NAMES[:3], seed=1, round=5) == levels(n, NAMES[:3], seed=1, round=5)
        drawn = {str(levels(n, NAMES[:3], seed=s, round=r)) for s in (1, 2) for r in range(20)}
        assert len(drawn) > 35


def test_signs_and_pairings_change_between_rounds() -> None:
    """Every factor meets every column: no interaction is confounded with it for ever."""
    X = np.array([levels(8, NAMES[:3], seed=0, round=r) for r in range(400)])
    third = (X[:, 0] * X[:, 1] * X[:, 2]).mean(1)
    assert abs(third.mean()) < 0.1
    assert abs(X[:, :, 0].mean()) < 0.15


@pytest.mark.parametrize(("n", "g", "needed"), [(2, 2, "4"), (3, 2, "4"), (4, 4, "6"), (5, 4, "6")])
def test_too_few_replicas_are_refused_with_the_number_needed(n: int, g: int, needed: str) -> None:
    with pytest.raises(ValueError, match=f"{g} factors .* by {n} replicas: at least {needed} are"):
        levels(n, NAMES[:g], seed=0, round=0)


def test_one_replica_explores_nothing() -> None:
    check_design(1, 4)
    assert levels(1, NAMES[:4], seed=0, round=3) == [[0.0]] * 4


def test_thousands_of_replicas() -> None:
    X = np.array(levels(4096, NAMES[:4], seed=0, round=1))
    np.testing.assert_array_equal(X @ X.T, 4096 * np.eye(4))
