"""The alpha-beta model: its seconds, the choice between ring and tree, the fit, the clusters."""

from __future__ import annotations

import dataclasses

import pytest

from hdet_scale.converge.costs import Cost, ring, tree
from hdet_scale.plan.links import GBIT, PRESETS, Link, fit

FAST = Link(latency=1e-5, bandwidth=1e10)


def test_seconds_are_latency_of_the_hops_and_time_of_the_bytes() -> None:
    assert FAST.seconds(Cost(10, 1e9)) == pytest.approx(1e-4 + 0.1)


def test_small_messages_take_the_tree_and_large_ones_the_ring() -> None:
    assert FAST.all_reduce(1024, 1e4) == tree(1024, 1e4)
    assert FAST.all_reduce(1024, 1e12) == ring(1024, 1e12)
    # 2 (n-1) alpha against 2 log2(n) alpha, 2 (n-1)/n m beta against 2 m beta: the ring's saving
    # of 2 m beta / n pays for its hops from this message on.
    n = 16
    even = (n - 1 - 4) * FAST.latency * FAST.bandwidth * n
    assert FAST.all_reduce(n, 0.99 * even) == tree(n, 0.99 * even)
    assert FAST.all_reduce(n, 1.01 * even) == ring(n, 1.01 * even)


def test_a_fit_finds_the_constants_and_predicts() -> None:
    truth = Link(latency=3e-4, bandwidth=2e9)
    sizes = [Cost(40, 2e6), Cost(60, 3e7), Cost(120, 2e8)]
    exact = fit(sizes, [truth.seconds(c) for c in sizes])
    assert exact.latency == pytest.approx(truth.latency, rel=1e-9)
    assert exact.bandwidth == pytest.approx(truth.bandwidth, rel=1e-9)
    noisy = fit(sizes, [truth.seconds(c) * x for c, x in zip(sizes, (1.1, 0.9, 1.1), strict=True)])
    fourth = Cost(200, 6e8)
    assert noisy.seconds(fourth) == pytest.approx(truth.seconds(fourth), rel=0.25)


def test_a_fit_never_has_a_negative_latency() -> None:
    # Longer per byte at larger sizes, as where a cache ends: a straight line starts below zero.
    sizes = [Cost(4, 1e6), Cost(4, 1e7), Cost(4, 1e8)]
    found = fit(sizes, [0.5e-3, 9e-3, 100e-3])
    assert found.latency == 0.0
    assert 1e8 / found.bandwidth == pytest.approx(0.08, rel=0.3)


def test_alike_sizes_are_taken_for_bandwidth() -> None:
    found = fit([Cost(2, 1e6), Cost(4, 2e6)], [1e-3, 2e-3])
    assert found.latency == 0.0
    assert found.bandwidth == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("costs", "seconds", "words"),
    [
        ([Cost(2, 1e6)], [1e-3], "two measured transfers"),
        ([Cost(2, 1e6), Cost(2, 2e6)], [1e-3], "a time for each"),
        ([Cost(2, 1e6), Cost(2, 2e6)], [1e-3, 0.0], "above 0 s"),
        ([Cost(2, 1e6), Cost(2, 2e6)], [2e-3, 1e-5], "do not grow"),
    ],
)
def test_a_fit_refuses(costs: list[Cost], seconds: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(costs, seconds)


def test_a_group_within_a_node_stays_in_it() -> None:
    h100 = PRESETS["h100"]
    assert h100.between_replicas(replicas=8, shards=1) == h100.inside
    assert h100.between_replicas(replicas=2, shards=4) == h100.inside


def test_a_group_across_nodes_has_the_adapters_of_its_members() -> None:
    h100 = PRESETS["h100"]
    one = h100.across.bandwidth
    assert one == pytest.approx(0.8 * 400 * GBIT)
    assert h100.between_replicas(replicas=32, shards=32) == h100.across
    assert h100.between_replicas(replicas=16, shards=4).bandwidth == pytest.approx(2 * one)
    wide = dataclasses.replace(h100, across=Link(latency=1e-5, bandwidth=1e12))
    assert wide.between_replicas(replicas=16, shards=1).bandwidth == h100.inside.bandwidth


@pytest.mark.parametrize("wrong", [{"latency": -1.0}, {"bandwidth": 0.0}])
def test_a_link_refuses(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"got {next(iter(wrong.values()))}"):
        Link(**({"latency": 1e-6, "bandwidth": 1e9} | wrong))
