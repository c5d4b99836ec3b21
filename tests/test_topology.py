"""Replicas and shards: who is where, who averages with whom, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hdet_scale import Replicas
from tests.support.fleet import Fleet


def _place(where: Replicas) -> dict[str, Any]:
    def ranks(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    return {
        "rank": where.rank,
        "size": where.size,
        "group": ranks(where.group),
        "shard_rank": where.shard_rank,
        "shard_size": where.shard_size,
        "shard_group": ranks(where.shard_group),
    }


def _world(rank: int, size: int) -> dict[str, Any]:
    return _place(Replicas.world())


def _of(rank: int, size: int, arguments: dict[str, int]) -> dict[str, Any]:
    return _place(Replicas.of(**arguments))


def _mesh(
    rank: int,
    size: int,
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    arguments: dict[str, str],
) -> dict[str, Any]:
    return _place(
        Replicas.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), **arguments)
    )


def _error(rank: int, size: int, case: Any, *arguments: Any) -> str:
    try:
        case(rank, size, *arguments)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _exchange(rank: int, size: int, shard_size: int, mine: list[float]) -> list[list[float]]:
    where = Replicas.of(shard_size=shard_size)
    return where.exchange([mine[rank], float(rank)], torch.device("cpu"))


TWO_BY_TWO = [
    {
        "rank": rank // 2,
        "size": 2,
        "group": [rank % 2, rank % 2 + 2],
        "shard_rank": rank % 2,
        "shard_size": 2,
        "shard_group": [rank // 2 * 2, rank // 2 * 2 + 1],
    }
    for rank in range(4)
]


def everyone_a_replica(size: int) -> list[dict[str, Any]]:
    ranks = list(range(size))
    alone = {"shard_rank": 0, "shard_size": 1, "shard_group": None}
    return [{"rank": r, "size": size, "group": ranks, **alone} for r in ranks]


def test_without_torch_distributed_there_is_one_replica() -> None:
    assert Replicas.world() == Replicas.of(shard_size=1) == Replicas()
    assert Replicas().exchange([1.5, 2.5], torch.device("cpu")) == [[1.5, 2.5]]


def test_in_the_world_everyone_is_a_replica(fleet: Fleet) -> None:
    assert fleet.run(_world) == everyone_a_replica(fleet.size)


def test_shards_of_one_are_the_world(fleet: Fleet) -> None:
    assert fleet.run(_of, {"shard_size": 1}) == everyone_a_replica(fleet.size)
    assert fleet.run(_of, {"replicas": fleet.size}) == everyone_a_replica(fleet.size)


def test_two_by_two(quartet: Fleet) -> None:
    assert quartet.run(_of, {"shard_size": 2}) == TWO_BY_TWO
    assert quartet.run(_of, {"replicas": 2}) == TWO_BY_TWO


def test_one_replica_of_four_shards(quartet: Fleet) -> None:
    for rank, place in enumerate(quartet.run(_of, {"shard_size": 4})):
        assert (place["rank"], place["size"], place["group"]) == (0, 1, [rank])
        assert (place["shard_rank"], place["shard_group"]) == (rank, [0, 1, 2, 3])


def test_a_mesh_of_two_by_two(quartet: Fleet) -> None:
    assert quartet.run(_mesh, (2, 2), ("replica", "shard"), {}) == TWO_BY_TWO
    own_names = {"replica": "dp", "shard": "fsdp"}
    assert quartet.run(_mesh, (2, 2), ("dp", "fsdp"), own_names) == TWO_BY_TWO


def test_a_mesh_with_the_shards_outside(quartet: Fleet) -> None:
    """Names decide, not the order of the dimensions."""
    places = quartet.run(_mesh, (2, 2), ("shard", "replica"), {})
    assert [(p["rank"], p["shard_rank"]) for p in places] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [p["group"] for p in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_mesh_of_replicas_alone(pair: Fleet) -> None:
    assert pair.run(_mesh, (2,), ("replica",), {}) == everyone_a_replica(2)
    assert pair.run(_mesh, (2, 1), ("replica", "shard"), {}) == everyone_a_replica(2)


def test_a_mesh_that_does_not_say_which_is_which(quartet: Fleet) -> None:
    for names in (("a", "b"), None):
        for text in quartet.run(_error, _mesh, (2, 2), names, {}):
            assert text.startswith("ValueError: the mesh has dimensions")
            assert 'mesh_dim_names=("replica", "shard")' in text


def test_a_mesh_with_a_third_dimension(quartet: Fleet) -> None:
    for text in quartet.run(_error, _mesh, (2, 1, 2), ("replica", "shard", "tp"), {}):
        assert "further dimensions ['tp']" in text
        assert 'mesh["replica", "shard"]' in text


@pytest.mark.parametrize("arguments", [{"shard_size": 3}, {"replicas": 3}, {"shard_size": 0}])
def test_what_does_not_divide_the_world(quartet: Fleet, arguments: dict[str, int]) -> None:
    ((name, value),) = arguments.items()
    for text in quartet.run(_error, _of, arguments):
        assert f"{name}={value} does not divide the world of 4 ranks" in text
        assert "choose one of [1, 2, 4]" in text


def test_both_or_neither_is_refused() -> None:
    for arguments in ({}, {"shard_size": 1, "replicas": 1}):
        with pytest.raises(ValueError, match="exactly one of shard_size and replicas"):
            Replicas.of(**arguments)
    with pytest.raises(TypeError, match="shard_size must be an int, got True"):
        Replicas.of(shard_size=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "size": 2}, r"rank must be in \[0, size\) = \[0, 2\), got 2"),
        ({"rank": -1, "size": 2}, "got -1"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"shard_rank": 1}, r"shard_rank must be in \[0, shard_size\)"),
    ],
)
def test_impossible_places_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Replicas(**arguments)


def test_declared_replicas_without_a_group_cannot_be_reached() -> None:
    with pytest.raises(RuntimeError, match=r"2 replicas were declared.*init_process_group"):
        Replicas(rank=0, size=2).exchange([1.0], torch.device("cpu"))


def test_exchange_is_a_row_for_each_replica(quartet: Fleet) -> None:
    third = 1 / 3  # float64 survives
    losses = [third, 2.0, 3.0, 4.0]
    assert quartet.run(_exchange, 1, losses) == [[[losses[r], float(r)] for r in range(4)]] * 4


def test_exchange_takes_the_mean_over_shards(quartet: Fleet) -> None:
    rows = [[1.5, 0.5], [3.5, 2.5]]
    assert quartet.run(_exchange, 2, [1.0, 2.0, 3.0, 4.0]) == [rows] * 4


def test_one_bad_shard_marks_its_replica(quartet: Fleet) -> None:
    for first, second in quartet.run(_exchange, 2, [1.0, float("nan"), 3.0, 4.0]):
        assert first[0] != first[0]
        assert second == [3.5, 2.5]
