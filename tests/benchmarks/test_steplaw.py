"""The law of the search on pre-training runs of language models."""

from __future__ import annotations

import math

import pytest

from benchmarks.lr.steplaw import LAWS, Figures, Losses, alike, paired, read
from hdet_scale.search.law import translation

OLD = "M^0.25 (h/S)^0.4"


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Losses, Losses]]:
    return paired(read())


def missed(found: Figures) -> list[str]:
    """The requirements that a law misses."""
    limits = {"error": 0.25, "median": 0.10, "p90": 0.35, "median_between": 0.10,
              "p90_between": 0.35}  # fmt: skip
    return [name for name, limit in limits.items() if abs(getattr(found, name)) > limit]


def test_the_law_holds_on_language_models(pairs: list[tuple[Losses, Losses]]) -> None:
    assert len(pairs) == 376
    assert len(alike(pairs)) == 20
    assert missed(Figures.of(translation, pairs)) == []


def test_the_old_law_misses_every_requirement(pairs: list[tuple[Losses, Losses]]) -> None:
    found = Figures.of(LAWS[OLD], pairs)
    assert missed(found) == ["error", "median", "p90", "median_between", "p90_between"]
    assert found.error == pytest.approx(-0.92, abs=0.005)


def test_a_curve_is_read_off_a_parabola_and_off_lines() -> None:
    runs = {2.0 ** (k / 2): 3 + 0.1 * (k / 2 - 2.1) ** 2 for k in range(9)}
    curve = Losses.of(1, 8, 100, runs)
    assert curve is not None
    assert (curve.best, curve.lowest, curve.bend) == pytest.approx((2.1, 3, 0.1))
    assert curve.excess(3.1) == pytest.approx(100 * 0.1 / 3)
    assert curve.between(2.0) == 0
    assert curve.between(2.25) == pytest.approx(100 * (0.016 - 0.001) / 2 / 3.001)
    assert curve.between(-9) == pytest.approx(100 * (3.441 / 3.001 - 1))


def test_curves_without_a_minimum_are_left_out() -> None:
    assert Losses.of(1, 8, 100, {2.0**k: float(k) for k in range(9)}) is None
    assert Losses.of(1, 8, 100, {2.0**k: (k - 1.0) ** 2 for k in range(4)}) is None


def test_pairs_are_of_one_model_and_a_quarter_of_the_tokens() -> None:
    def curve(n: int, batch: int, steps: int) -> Losses:
        found = Losses.of(n, batch, steps, {2.0**k: 3 + (k - 2.0) ** 2 for k in range(5)})
        assert found is not None
        return found

    trial, run = curve(1, 8, 100), curve(1, 16, 200)
    others = [curve(2, 8, 400), curve(1, 8, 399), curve(1, 256, 100), curve(1, 64, 99)]
    assert paired([trial, run]) == [(trial, run)]
    assert not [pair for pair in paired([trial, *others]) if pair[0] is trial]
    assert math.isclose(run.best, 2)
