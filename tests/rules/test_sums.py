"""The sums over replicas and the fit of slopes to them, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_scale.rules.designs import levels
from hdet_scale.rules.sums import Sums

M = 8


def vectors(X: np.ndarray, L: np.ndarray) -> np.ndarray:
    """The sums of all replicas at once, for many rounds of one design: L is (..., N, M)."""
    n, G = X.shape
    fixed = [n, *X.sum(0), *(X[:, g] @ X[:, h] for g in range(G) for h in range(g + 1))]
    cross = (X.T @ L).reshape(*L.shape[:-2], -1)
    squares = (L.mean(-1) ** 2).sum(-1, keepdims=True)
    repeated = np.broadcast_to(fixed, (*L.shape[:-2], len(fixed)))
    return np.concatenate([repeated, L.sum(-2), cross, squares], axis=-1)


def sums_of(X: np.ndarray, L: np.ndarray) -> Sums:
    """The same numbers as adding the replicas one by one."""
    return Sums.read(X.shape[1], L.shape[1], vectors(X, L).tolist())


def added(X: np.ndarray, L: np.ndarray) -> Sums:
    total = Sums.none(X.shape[1], L.shape[1])
    for x, losses in zip(X, L, strict=True):
        total = total + Sums.of(x.tolist(), losses.tolist())
    return total


class World:
    """Losses of N replicas that lie `offsets` away from a base: slopes, and three kinds of noise.

    batch: an error of each probe batch that is linear in the offsets, as shared gradients give it.
    own: an error of each replica that all batches see. each: of each replica in each batch.
    """

    def __init__(self, slopes: list[float], *, seed: int, batch=0.0, own=0.0, each=0.0) -> None:
        self.slopes = np.array(slopes)
        self.noise = (batch, own, each)
        self.random = np.random.default_rng(seed)

    def losses(self, X: np.ndarray, *rounds: int) -> np.ndarray:
        n, G = X.shape
        batch, own, each = self.noise
        b = self.slopes[:, None] + batch * self.random.standard_normal((*rounds, G, M))
        level = 2.0 + 0.3 * self.random.standard_normal((*rounds, 1, M))
        noise = own * self.random.standard_normal((*rounds, n, 1))
        return level + X @ b + noise + each * self.random.standard_normal((*rounds, n, M))


def design(n: int, names: list[str], spread: float, round: int, seed: int = 0) -> np.ndarray:
    return np.log1p(spread * np.array(levels(n, names, seed=seed, round=round))).T


@settings(max_examples=300, deadline=None)
@given(n=st.integers(2, 9) | st.just(64), g=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_fit_is_least_squares(n: int, g: int, seed: int) -> None:
    if n < g + 1:
        return
    random = np.random.default_rng(seed)
    X, L = random.standard_normal((n, g)), 2 + random.standard_normal((n, M))
    total = added(X, L)
    assert total.vector == pytest.approx(sums_of(X, L).vector, rel=1e-9, abs=1e-9)
    fit = total.fit()
    if fit is None:
        assert np.linalg.cond(np.corrcoef(X.T)) > 1e4
        return
    design = np.column_stack([np.ones(n), X])
    expected = np.linalg.lstsq(design, L, rcond=None)[0][1:]
    found = np.array([fit.slopes[i].mean for i in range(g)])
    np.testing.assert_allclose(found, expected.mean(1), rtol=1e-6, atol=1e-6)
    between = [fit.slopes[i].between for i in range(g)]
    np.testing.assert_allclose(between, expected.var(1, ddof=1) / M, rtol=1e-5, atol=1e-9)
    assert fit.free == n - g - 1
    if fit.free:
        rest = L.mean(1) - design @ np.linalg.lstsq(design, L.mean(1), rcond=None)[0]
        inverse = np.linalg.inv(design.T @ design)[1:, 1:]
        expected = (rest @ rest) / fit.free * np.diag(inverse)
        residual = [fit.slopes[i].residual for i in range(g)]
        np.testing.assert_allclose(residual, expected, rtol=1e-4, atol=1e-8)


def test_the_vector_does_not_grow_with_the_replicas() -> None:
    X = design(4096, ["a", "b", "c", "d"], 0.3, 1)
    world = World([0.1] * 4, seed=0, each=0.1)
    assert len(sums_of(X, world.losses(X)).vector) == Sums.length(4, M) == 2 + 4 + 10 + 8 + 32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "offset"])
def test_a_replica_with_a_bad_number_is_left_out(bad: float, where: str) -> None:
    X = design(8, ["a", "b"], 0.3, 1)
    L = World([0.5, -0.2], seed=1, each=0.01).losses(X)
    spoilt_x, spoilt_l = X.copy(), L.copy()
    if where == "loss":
        spoilt_l[3, 5] = bad
    else:
        spoilt_x[3, 0] = bad
    kept = [r for r in range(8) if r != 3]
    assert added(spoilt_x, spoilt_l) == added(X[kept], L[kept])


def test_sums_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="1 factors and 8 probe batches make 20 sums, got 3"):
        Sums.read(1, 8, [0.0] * 3)
    with pytest.raises(ValueError, match="cannot be added"):
        Sums.none(1, 8) + Sums.none(2, 8)
