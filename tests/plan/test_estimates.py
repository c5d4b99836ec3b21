"""Estimates: bytes and memory against a real converge, seconds against the model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hdet_scale import OneCycleAutoLR
from hdet_scale.config import HDETConfig
from hdet_scale.converge.outer import OuterStep
from hdet_scale.converge.overlap import with_own_group
from hdet_scale.converge.pipeline import Converge
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.plan import shapes
from hdet_scale.plan.estimates import EXCHANGED_BYTES, estimate
from hdet_scale.plan.links import PRESETS
from hdet_scale.plan.shapes import Shapes
from hdet_scale.plan.workload import Workload
from hdet_scale.topology import Replicas
from tests.support.fleet import Fleet

AWKWARD = Shapes("awkward", ((700, 500), (3,), (1, 9), (300_001,), (40, 50), (6,)), 350_000)


def real_converge(rank: int, size: int, policy: ConvergePolicy) -> tuple[int, int, int]:
    """(bytes on the wire, bytes kept, collectives) of two converges on real tensors."""
    torch.manual_seed(rank)
    tensors = [torch.randn(s) for s in AWKWARD.tensors]
    converge = Converge(
        tensors,
        with_own_group(Replicas.world()),
        policy.bucket_bytes,
        wire=policy.wire,
        fragments=policy.fragments,
        outer=policy.outer,
        background=policy.overlap,
    )
    everyone, sent = [True] * size, 0
    for _ in range(2):
        sent = 0
        for fragment in range(policy.fragments):
            part = fragment if policy.fragments > 1 else None
            if policy.overlap:
                sent += converge.start(everyone, part).finish().wire_bytes
            else:
                sent += converge.average(everyone, part).wire_bytes
    state = converge.state_dict()
    remembered = sum(t.nbytes for kind in state.values() for t in kind.values())
    return sent, converge.staging_bytes + remembered, len(converge.plan.buckets)


@pytest.mark.parametrize(
    "policy",
    [
        ConvergePolicy(),
        ConvergePolicy(bucket_bytes=2**16),
        ConvergePolicy(wire="bf16", bucket_bytes=2**18),
        ConvergePolicy(wire="int8", bucket_bytes=2**18),
        ConvergePolicy(overlap=True, bucket_bytes=2**18),
        ConvergePolicy(overlap=True, bucket_bytes=2**18, wire="int8", fragments=3),
        ConvergePolicy(outer=OuterStep(), bucket_bytes=2**18),
    ],
    ids=["fp32", "small buckets", "bf16", "int8", "overlap", "int8 in fragments", "outer"],
)
def test_bytes_and_memory_are_those_of_a_real_converge(pair: Fleet, policy: ConvergePolicy) -> None:
    config = HDETConfig(shards=1, converge=policy)
    found = estimate(Workload(model=AWKWARD, gpus=2), config)
    for sent, kept, collectives in pair.run(real_converge, policy):
        assert found.converge_bytes == sent
        assert found.buckets == collectives
        # A shelf keeps a buffer that was too small for the next bucket.
        assert kept <= found.memory.converge * 1.05
        assert found.memory.converge <= kept * 1.05


def exchanged_in_a_round(rank: int, size: int) -> list[int]:
    """How many numbers a replica tells the others in each exchange of a round of two steps."""
    told: list[int] = []
    real = Replicas.exchange

    def exchange(
        self: Replicas, numbers: Sequence[float], device: torch.device
    ) -> list[list[float]]:
        told.append(len(numbers))
        return real(self, numbers, device)

    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], lr=0.1)
    scheduler = OneCycleAutoLR(
        optimizer, 0.1, total_steps=9, ensemble_lr_spread_ratio=0.3, model_sync_interval=2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replicas, "exchange", exchange)
        for _ in range(2):
            p.grad = torch.ones(3)
            optimizer.step()
            scheduler.step(1.0)
    return told


def test_the_exchange_of_a_round_has_the_bytes_that_are_priced(pair: Fleet) -> None:
    for told in pair.run(exchanged_in_a_round):
        assert [8 * n for n in told] == [EXCHANGED_BYTES]


def test_local_gradients_send_a_converge_and_no_gradients() -> None:
    work = Workload(model=shapes.of("1B"), gpus=16)
    shared = estimate(work, HDETConfig(shards=1))
    local = estimate(work, HDETConfig(shards=1, gradients="local"))
    assert local.gradient_bytes == 0
    assert shared.gradient_bytes == pytest.approx(4 * work.model.parameters * 2 * 15 / 16)
    # Parameters and both moments, once in a thousand steps.
    assert local.bytes_a_step == pytest.approx(3 * shared.gradient_bytes / 1000, rel=1e-3)


def test_transfers_take_the_cheaper_way() -> None:
    wide = estimate(Workload(model=shapes.of("1B"), gpus=16_384), HDETConfig(shards=1))
    assert wide.transfer_seconds == wide.tree_seconds < wide.ring_seconds
    pair = estimate(Workload(model=shapes.of("1B"), gpus=2), HDETConfig(shards=1))
    assert pair.transfer_seconds == pair.ring_seconds < pair.tree_seconds


def test_overhead_falls_with_t_and_overlap_hides_the_transfers() -> None:
    work = Workload(model=shapes.of("1B"), gpus=64, cluster=PRESETS["25gbe"])
    blocking = estimate(work, HDETConfig(shards=1))
    rarer = estimate(work, HDETConfig(shards=1, interval=2000))
    assert rarer.overhead == pytest.approx(blocking.overhead / 2)
    policy = ConvergePolicy(overlap=True, overlap_steps=100)
    hidden = estimate(work, HDETConfig(shards=1, converge=policy))
    assert hidden.added_seconds < 0.01 * blocking.added_seconds
    short = ConvergePolicy(overlap=True, overlap_steps=1)
    partly = estimate(work, HDETConfig(shards=1, converge=short))
    assert hidden.added_seconds < partly.added_seconds < blocking.added_seconds
    gap = partly.added_seconds - hidden.added_seconds
    assert gap == pytest.approx(partly.transfer_seconds - work.seconds_a_step, rel=1e-6)


def test_shards_must_leave_two_replicas() -> None:
    work = Workload(model=AWKWARD, gpus=8)
    with pytest.raises(ValueError, match="give at most 4 shards"):
        estimate(work, HDETConfig(shards=8))
    with pytest.raises(ValueError, match="does not divide the world of 8"):
        estimate(work, HDETConfig(shards=3))
