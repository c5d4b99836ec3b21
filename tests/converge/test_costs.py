"""Hops and bytes of the ways to form a mean."""

from __future__ import annotations

from hdet_scale.converge.costs import Cost, direct, ring, tree


def test_formulas() -> None:
    assert ring(8, 800.0) == Cost(14, 1400.0)
    assert tree(8, 800.0) == Cost(6, 1600.0)
    assert tree(9, 800.0).hops == 8
    assert direct(2, 800.0) == Cost(1, 800.0)
    assert direct(4, 600.0) == Cost(6, 600.0)
    assert ring(1, 800.0) == tree(1, 800.0) == Cost(0, 0.0)
    assert Cost(1, 2.0) + Cost(3, 4.0) == Cost(4, 6.0)
