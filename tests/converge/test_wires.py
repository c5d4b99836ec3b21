"""Wires: the mean and the same bits from each, what each answers, and one that is added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale import ConvergePolicy, HDETConfig, Replicas
from hdet_scale.converge.costs import Cost, direct, ring
from hdet_scale.converge.pipeline import Converge
from hdet_scale.converge.remembered import Memory
from hdet_scale.converge.wire_interface import Flight, Wire
from hdet_scale.converge.wires import WIRES
from hdet_scale.plan.estimates import estimate
from hdet_scale.plan.shapes import Shapes
from hdet_scale.plan.workload import Workload
from tests.support.averaging import CAP, distance, mean_of, same_everywhere, tensors_of


def _averaged(rank: int, size: int, wire: str, bad: int | None, dtype: torch.dtype) -> list[Tensor]:
    tensors = tensors_of(rank, dtype=dtype)
    converge = Converge(tensors, Replicas.world(), CAP, wire=wire)
    if wire == "int8":  # the first mean is in full precision and sets the point
        converge()
        for t, new in zip(tensors, tensors_of(rank, 1, dtype), strict=True):
            t.copy_(new)
    if rank == bad:
        tensors[-1].view(-1)[-1] = float("nan")
    converge()
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bad", [None, 1], ids=["all", "one left out"])
@pytest.mark.parametrize(("wire", "error"), [("fp32", 6e-8), ("bf16", 3e-3), ("int8", 1.2e-2)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_wire_gives_the_mean_and_the_same_bits(
    fleets: Any, size: int, wire: str, error: float, bad: int | None, dtype: torch.dtype
) -> None:
    results = fleets(size).run(_averaged, wire, bad, dtype)
    same_everywhere(results)
    turn = 1 if wire == "int8" else 0
    wanted = [r for r in range(size) if r != bad]
    exact = mean_of([tensors_of(r, turn, dtype) for r in wanted])
    rounding = 0.0 if dtype == torch.float32 else 2e-3
    assert distance(results[0], exact) < error + rounding


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fp8'.*|fp32"):
        Converge([torch.zeros(1)], Replicas(), wire="fp8")


# -- what a wire answers ---------------------------------------------------------------------------


def planned(wire: str, size: int, **options: Any) -> Converge:
    """Over meta tensors: one long enough to be averaged where it lies, a short one, a plain one."""
    tensors = [torch.empty(s, device="meta") for s in ((2**19,), (100,))]
    plain = [torch.empty(50, device="meta"), torch.empty(7, dtype=torch.float64, device="meta")]
    return Converge(tensors, Replicas(size=size), 2**20, wire=wire, plain=plain, **options)


@pytest.mark.parametrize(
    ("wire", "buckets", "sent"),
    [("fp32", [2**19, 100, 50, 7], 4), ("bf16", [2**18, 2**18, 100, 50, 7], 2)],
)
def test_long_tensors_are_cut_where_a_wire_needs_a_buffer(
    wire: str, buckets: list[int], sent: int
) -> None:
    transfers = planned(wire, 2).transfers()
    assert [t.elements for t in transfers] == buckets
    assert [t.buffered for t in transfers] == [wire != "fp32"] * (len(buckets) - 1) + [False]
    assert [t.sent_bytes for t in transfers] == [sent * n for n in buckets[:-1]] + [8 * 7]
    assert all(t.remembered_bytes == 0 for t in transfers)


def test_int8_remembers_a_point_and_a_residual_but_nothing_of_plain_tensors() -> None:
    transfers = planned("int8", 2).transfers()
    assert [t.wire.remembers for t in transfers] == [True, True, True, False, False]
    assert [t.remembered_bytes for t in transfers] == [8 * 2**18, 8 * 2**18, 8 * 100, 0, 0]


@pytest.mark.parametrize("size", [2, 5])
def test_an_all_reduce_costs_what_the_backend_takes_and_others_what_they_send(size: int) -> None:
    for t in planned("fp32", size).transfers():
        assert t.cost(ring) == ring(size, t.elements * t.dtype.itemsize)
    for name in ("bf16", "int8"):
        first = planned(name, size).transfers()[0]
        assert first.cost(ring) == direct(size, first.sent_bytes)


# -- a wire that is added --------------------------------------------------------------------------


class Difference(Wire):
    """The difference from the last converged point, in fp32: all that a new wire has to be."""

    remembers = True

    def flight(self, flat: Tensor, included: Any, memory: Memory | None) -> Flight:
        assert memory is not None
        flat.sub_(memory.point).mul_(1.0 / self.replicas.size)
        work = dist.all_reduce(flat, group=self.replicas.group, async_op=True)
        yield
        assert work is not None
        work.wait()
        flat.add_(memory.point)

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        return 3 * numel

    def buffer_bytes(self, numel: int, itemsize: int) -> int:
        return 5 * numel


def _with_difference(rank: int, size: int) -> tuple[list[Tensor], dict[str, Any]]:
    WIRES["difference"] = Difference
    try:
        tensors = tensors_of(rank)
        converge = Converge(tensors, Replicas.world(), CAP, wire="difference")
        converge()
        for t, new in zip(tensors, tensors_of(rank, 1), strict=True):
            t.copy_(new)
        converge()
        return tensors, converge.state_dict()
    finally:
        del WIRES["difference"]


def test_a_wire_is_a_class_and_a_name(fleets: Any) -> None:
    results = fleets(3).run(_with_difference)
    same_everywhere([tensors for tensors, _ in results])
    assert distance(results[0][0], mean_of([tensors_of(r, 1) for r in range(3)])) < 1e-6
    state = results[0][1]
    assert list(state["points"]) == list(state["residuals"])
    assert len(state["points"]) > 1


def test_policy_checkpoints_and_plan_ask_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"\['fp32', 'bf16', 'int8'\], got 'difference'"):
        ConvergePolicy(wire="difference")
    monkeypatch.setitem(WIRES, "difference", Difference)
    policy = ConvergePolicy(wire="difference")
    assert policy.remembers
    n, size = 300, 4
    work = Workload(model=Shapes("one", ((n,),), n), gpus=size)
    found = estimate(work, HDETConfig(shards=1, converge=policy))
    assert found.converge_bytes == 3 * n
    assert found.memory.converge == 5 * n + 8 * n
    link = work.cluster.between_replicas(replicas=size, shards=1)
    assert found.transfer_seconds == link.seconds(Cost(2 * (size - 1), 3 * n))
