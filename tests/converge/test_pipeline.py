"""The averaging with real processes: every element, the nearest float, the same bits everywhere."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.converge.pipeline import Converge, NoHealthyReplicaError
from tests.support.averaging import CAP, mean_of, same_everywhere, tensors_of
from tests.support.fleet import Fleet

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")

AWKWARD: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "plain": [((3, 5), F32), ((7,), F32)],
    "larger than the cap": [((200,), F32), ((2,), F32)],
    "mixed dtypes": [((9,), F32), ((4, 3), BF16), ((5,), F64), ((6,), F16), ((2,), F32)],
    "empty and scalar": [((0,), F32), ((), F32), ((3, 0), BF16), ((), F64), ((1,), F16)],
    "fewer elements than ranks": [((1,), F32)],
    "only empty": [((0,), F32)],
    "nothing": [],
    "sixteen bit only": [((33,), BF16), ((), F16)],
}


def draw(
    rank: int, kinds: list[tuple[tuple[int, ...], torch.dtype]], seed: int = 0
) -> list[Tensor]:
    """Replica `rank`'s tensors: numbers of many magnitudes, different on every replica."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    tensors = []
    for shape, dtype in kinds:
        x = torch.randn(shape, generator=g, dtype=F64)
        x *= torch.exp(3 * torch.randn(shape, generator=g, dtype=F64)).clamp(max=100)
        tensors.append(x.to(dtype))
    return tensors


def nearest_mean(replicas: list[list[Tensor]], wanted: list[int]) -> list[Tensor]:
    """The float64 mean of what went in."""
    columns = zip(*(replicas[r] for r in wanted), strict=True)
    return [torch.stack([t.double() for t in column]).mean(0) for column in columns]


def ulps(actual: Tensor, exact: Tensor) -> float:
    """Largest distance from the exact value in units of the last place of the tensor's type."""
    if not actual.numel():
        return 0.0
    eps, tiny = torch.finfo(actual.dtype).eps, torch.finfo(actual.dtype).tiny
    exponent = torch.floor(torch.log2(exact.abs().clamp(min=tiny)))
    return float(((actual.double() - exact).abs() / (eps * torch.exp2(exponent))).max())


def _average(
    rank: int, size: int, kinds: Any, cap: int, bad: dict[int, tuple[int, float]], seed: int
) -> tuple[list[Tensor], tuple[bool, ...], bool]:
    tensors = draw(rank, kinds, seed)
    if rank in bad:
        index, value = bad[rank]
        tensors[index].view(-1)[-1] = value
    converge = Converge(tensors, Replicas.world(), bucket_bytes=cap)
    healthy = converge.healthy()
    return tensors, converge().included, healthy


def check(fleet: Fleet, kinds: Any, cap: int, bad: Any = None, seed: int = 0) -> None:
    bad = bad or {}
    results = fleet.run(_average, kinds, cap, bad, seed)
    wanted = [r for r in range(fleet.size) if r not in bad]
    expected = nearest_mean([draw(r, kinds, seed) for r in range(fleet.size)], wanted)
    for rank, (tensors, included, healthy) in enumerate(results):
        assert included == tuple(r in wanted for r in range(fleet.size))
        assert healthy == (rank in wanted)
        for mine, first, exact in zip(tensors, results[0][0], expected, strict=True):
            assert torch.equal(mine, first)
            assert mine.isfinite().all()
            assert ulps(mine, exact) <= 1


@pytest.mark.parametrize("cap", [8, 64, 2**25], ids=["tiny", "small", "one bucket"])
@pytest.mark.parametrize("name", AWKWARD)
def test_every_element_is_the_mean(fleet: Fleet, name: str, cap: int) -> None:
    check(fleet, AWKWARD[name], cap)


def test_tensors_of_a_mebibyte_and_more(fleet: Fleet) -> None:
    check(fleet, [((300_001,), F32), ((17,), F32), ((2**18,), F32), ((300_000,), BF16)], 2**19)


@settings(max_examples=350)
@given(
    kinds=st.lists(
        st.tuples(
            st.lists(st.integers(0, 6), max_size=3).map(tuple),
            st.sampled_from([F32, F64, F16, BF16]),
        ),
        max_size=6,
    ),
    cap=st.integers(1, 300),
    seed=st.integers(0, 9),
)
def test_any_tensors(fleet: Fleet, kinds: Any, cap: int, seed: int) -> None:
    check(fleet, kinds, cap, seed=seed)


# -- memory that is shared or laid out otherwise ----------------------------------------------


def _layouts(rank: int, size: int, cap: int) -> dict[str, Tensor]:
    base = torch.arange(24.0) * (rank + 1)
    tied = base[:6].clone()
    image = (base.view(1, 2, 3, 4) + rank).contiguous(memory_format=torch.channels_last)
    behind = torch.full((5,), float(rank))
    parts = [behind[:2], behind[2:]]
    parameter = torch.nn.Parameter(base.view(4, 6).clone())
    tensors = [tied, image, tied.view(2, 3), *parts, parameter, tied]
    Converge(tensors, Replicas.world(), bucket_bytes=cap)()
    assert parameter.requires_grad
    return {"tied": tied, "image": image, "behind": behind, "parameter": parameter.detach()}


@pytest.mark.parametrize("cap", [8, 2**20])
def test_tied_adjoining_and_channels_last(fleet: Fleet, cap: int) -> None:
    """A tied parameter averaged twice would be right by luck only: it is averaged once."""
    n = fleet.size
    rank, factor = (n - 1) / 2, (n + 1) / 2
    for result in fleet.run(_layouts, cap):
        base = torch.arange(24.0)
        assert torch.equal(result["tied"], base[:6] * factor)
        assert torch.equal(result["image"], (base * factor + rank).view(1, 2, 3, 4))
        assert torch.equal(result["behind"], torch.full((5,), rank))
        assert torch.equal(result["parameter"], (base * factor).view(4, 6))


def _again(rank: int, size: int) -> list[Tensor]:
    t = torch.tensor([float(rank)])
    converge = Converge([t], Replicas.world(), bucket_bytes=64)
    seen = []
    for k in range(3):
        t += rank * k
        converge()
        seen.append(t.clone())
    return seen


def test_the_same_converge_can_be_called_again(fleet: Fleet) -> None:
    m = (fleet.size - 1) / 2
    for seen in fleet.run(_again):
        assert [float(x) for x in seen] == [m, 2 * m, 4 * m]


# -- sixteen bits -----------------------------------------------------------------------------


def _fill(rank: int, size: int, dtype: torch.dtype, values: list[float]) -> Tensor:
    t = torch.full((65,), values[rank % len(values)], dtype=dtype)
    Converge([t], Replicas.world(), bucket_bytes=64)()
    return t


def test_fp16_near_its_end_does_not_overflow(fleet: Fleet) -> None:
    for t in fleet.run(_fill, F16, [65504.0]):
        assert torch.equal(t, torch.full((65,), 65504.0, dtype=F16))


def test_sixteen_bits_are_summed_in_fp32(quartet: Fleet) -> None:
    """1024 + 3 + 3 + 2 stays 1024 in bf16, a mean of 256: the mean is 258. So in fp16."""
    for t in quartet.run(_fill, BF16, [1024.0, 3.0, 3.0, 2.0]):
        assert torch.equal(t, torch.full((65,), 258.0, dtype=BF16))
    for t in quartet.run(_fill, F16, [8192.0, 3.0, 3.0, 2.0]):
        assert torch.equal(t, torch.full((65,), 2050.0, dtype=F16))


def test_equal_replicas_stay_as_they_are(fleet: Fleet) -> None:
    for dtype in (F32, F64, BF16, F16):
        for t in fleet.run(_fill, dtype, [1 / 3]):
            assert torch.equal(t, torch.full((65,), 1 / 3, dtype=dtype))


# -- a replica gone bad -----------------------------------------------------------------------

SEVERAL = [((40,), F32), ((9,), BF16), ((40,), F32)]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("cap", [8, 2**20], ids=["last of many buckets", "one bucket"])
def test_a_bad_replica_takes_the_mean_of_the_others(
    trio: Fleet, value: float, index: int, cap: int
) -> None:
    check(trio, SEVERAL, cap, bad={1: (index, value)})


def test_a_bad_replica_among_two_and_four(pair: Fleet, quartet: Fleet) -> None:
    for who in range(2):
        check(pair, SEVERAL, 16, bad={who: (2, NAN)})
        check(pair, [((2**18,), F32)], 16, bad={who: (0, NAN)})
    check(quartet, SEVERAL, 16, bad={0: (0, INF), 3: (2, NAN)})
    check(quartet, SEVERAL, 16, bad={0: (0, INF), 1: (1, NAN), 3: (2, NAN)})


def _opposite_infinities(rank: int, size: int) -> tuple[bool, Tensor]:
    t = torch.tensor([3e38, 3e38, 3e38]) if rank == 0 else torch.tensor([INF, -INF, 1.0])
    c = Converge([t], Replicas.world())
    healthy = c.healthy()
    c()
    return healthy, t


def test_a_sum_that_overflows_is_no_bad_replica(pair: Fleet) -> None:
    results = pair.run(_opposite_infinities)
    assert [healthy for healthy, _ in results] == [True, False]
    for _, t in results:
        assert torch.equal(t, torch.tensor([3e38, 3e38, 3e38]))


def _said_bad(rank: int, size: int) -> Tensor:
    t = torch.tensor([float(rank)])
    Converge([t], Replicas.world())(healthy=rank != 0)
    return t


def test_a_caller_may_leave_a_replica_out(trio: Fleet) -> None:
    assert [float(t) for t in trio.run(_said_bad)] == [1.5, 1.5, 1.5]


def _all_bad(rank: int, size: int) -> tuple[str, Tensor]:
    t = torch.tensor([float(rank), NAN, 5.0])
    try:
        Converge([t], Replicas.world(), bucket_bytes=4)()
    except NoHealthyReplicaError as error:
        return str(error), t
    return "no error", t


def test_no_healthy_replica_is_an_error_everywhere(fleet: Fleet) -> None:
    for rank, (message, t) in enumerate(fleet.run(_all_bad)):
        assert message.startswith(f"none of the {fleet.size} replicas has finite parameters")
        assert "checkpoint" in message
        np.testing.assert_array_equal(t.numpy(), [rank, NAN, 5.0])


# -- replicas that do not fit -----------------------------------------------------------------

MINE: list[tuple[tuple[int, ...], torch.dtype]] = [((4, 3), F32), ((5,), F32), ((6,), BF16)]
OTHERS = {
    "shape": ([((4, 3), F32), ((7,), F32), ((6,), BF16)], r"float32\[5\].*float32\[7\]"),
    "order": ([((5,), F32), ((4, 3), F32), ((6,), BF16)], r"tensor 0 .*\[4, 3\].*\[5\]"),
    "dtype": ([((4, 3), F32), ((5,), F64), ((6,), BF16)], r"float32\[5\].*float64\[5\]"),
    "missing": (MINE[:1] + MINE[2:], r"float32\[5\]"),
    "all missing": ([], r"tensor 0 is float32\[4, 3\]"),
}


def _mismatch(rank: int, size: int, others: Any) -> tuple[str, bool]:
    tensors = draw(rank, MINE if rank == 0 else others)
    before = [t.clone() for t in tensors]
    try:
        Converge(tensors, Replicas.world(), bucket_bytes=64)()
    except ValueError as error:
        same = all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
        return str(error), same
    return "no error", False


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_that_do_not_fit_are_refused_everywhere(fleets: Any, size: int, name: str) -> None:
    others, pattern = OTHERS[name]
    for message, untouched in fleets(size).run(_mismatch, others, seconds=20):
        assert "replicas would average different things" in message
        assert re.search(pattern, message), message
        assert "same model and optimizer on every replica" in message
        assert untouched


def _caps(rank: int, size: int) -> str:
    try:
        Converge([torch.ones(100)], Replicas.world(), bucket_bytes=64 * (rank + 1))()
    except ValueError as error:
        return str(error)
    return "no error"


def test_caps_that_differ_are_refused_everywhere(pair: Fleet) -> None:
    for message in pair.run(_caps, seconds=20):
        assert "bucket" in message


def test_wrong_arguments_are_refused() -> None:
    alone = Replicas()
    with pytest.raises(TypeError, match=r"int, got 1\.5"):
        Converge([torch.ones(2)], alone, bucket_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Converge([torch.ones(2)], alone, bucket_bytes=0)
    with pytest.raises(TypeError, match="floating-point"):
        Converge([torch.ones(2, dtype=torch.int32)], alone)
    with pytest.raises(ValueError, match="one flag for each of 1 replicas, got 2"):
        Converge([torch.ones(2)], alone).average([True, True])


# -- shards -----------------------------------------------------------------------------------


def _sharded(rank: int, size: int) -> Tensor:
    where = Replicas.of(shard_size=2)
    t = torch.full((3,), 10.0 * where.rank + 100.0 * where.shard_rank)
    Converge([t], where)()
    return t


def test_a_shard_is_averaged_with_the_same_shard_alone(quartet: Fleet) -> None:
    for rank, t in enumerate(quartet.run(_sharded)):
        assert torch.equal(t, torch.full((3,), 5.0 + 100.0 * (rank % 2)))


def _bad_shard(rank: int, size: int) -> tuple[tuple[bool, ...], Tensor]:
    where = Replicas.of(shard_size=2)
    t = torch.full((3,), 10.0 * where.rank + 100.0 * where.shard_rank)
    if rank == 3:
        t[1] = NAN
    return Converge([t], where)().included, t


def test_a_bad_shard_takes_its_whole_replica_out(quartet: Fleet) -> None:
    for rank, (included, t) in enumerate(quartet.run(_bad_shard)):
        assert included == (True, False)
        assert torch.equal(t, torch.full((3,), 100.0 * (rank % 2)))


# -- fragments --------------------------------------------------------------------------------


def _fragmented(rank: int, size: int, parts: int) -> list[tuple[list[Tensor], int]]:
    tensors = tensors_of(rank)
    converge = Converge(tensors, Replicas.world(), CAP, fragments=parts)
    seen = []
    for part in range(parts):
        outcome = converge.average([True] * size, part)
        seen.append(([t.clone() for t in tensors], outcome.wire_bytes))
    return seen


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_fragments_average_each_element_once(fleets: Any, parts: int) -> None:
    results = fleets(2).run(_fragmented, parts)
    mean = mean_of([tensors_of(r) for r in range(2)])
    before = torch.cat([t.flatten() for t in tensors_of(0)])
    target = torch.cat([m.flatten() for m in mean]).float()
    for done in range(parts):
        now = torch.cat([t.flatten() for t in results[0][done][0]])
        averaged, untouched = now == target, now == before
        assert bool((averaged | untouched).all())
        share = float(averaged.float().mean())
        assert share == pytest.approx((done + 1) / parts, abs=0.1)
    same_everywhere([r[-1][0] for r in results])
    bytes_ = [sent for _, sent in results[0]]
    assert max(bytes_) < 1.35 * sum(bytes_) / parts
