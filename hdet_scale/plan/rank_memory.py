"""RankMemory: the bytes that a rank keeps, by kind. Activations are not in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hdet_scale.converge.flights import must_wait
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.converge.transfers import Transfer
from hdet_scale.plan.workload import MOMENTS, PARAMETER_DTYPES, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of a rank, by kind."""

    parameters: int
    """The shard."""
    gradients: int
    """The same again."""
    optimizer: int
    """Moments, and fp32 masters of 16-bit parameters."""
    gathered: int
    """Two units that fully_shard has gathered; nothing where a replica is one GPU."""
    converge: int
    """Staging, copies and points that the converge keeps."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.converge


def rank_memory(
    work: Workload, policy: ConvergePolicy, transfers: Sequence[Transfer], shards: int
) -> RankMemory:
    """The memory of rank 0 of a replica, which holds the most.

    Args:
        work: the model, its dtype and its optimizer.
        policy: how it is averaged.
        transfers: the buckets of its converge.
        shards: ranks of a replica.
    """
    dtype = PARAMETER_DTYPES[work.dtype]
    held = work.model.shard(shards, dtype)
    kept = sum(t.nbytes for t in held)
    elements = sum(t.numel() for t in held)
    masters = 4 * elements if work.dtype != "fp32" else 0
    return RankMemory(
        parameters=kept,
        gradients=kept,
        optimizer=4 * elements * MOMENTS[work.optimizer] + masters,
        gathered=2 * dtype.itemsize * work.model.largest_unit if shards > 1 else 0,
        converge=converge_memory(policy, transfers),
    )


def converge_memory(policy: ConvergePolicy, transfers: Sequence[Transfer]) -> int:
    """Bytes that a converge keeps: buffers of the transfers under way, a copy of what overlaps, and
    what the next converge builds on."""
    parts = [[t for t in transfers if t.fragment == f] for f in range(policy.fragments)]
    kept = max(_most_in_buffers(part, overlap=policy.overlap) for part in parts)
    if policy.overlap:
        kept += max(4 * sum(t.elements for t in part) for part in parts)
    return kept + sum(t.remembered_bytes for t in transfers)


def _most_in_buffers(transfers: Iterable[Transfer], *, overlap: bool) -> int:
    """The most buffer bytes that a converge holds at once, its transfers under way as
    hdet_scale.converge.flights has them."""
    under_way: deque[tuple[bool, int]] = deque()
    most = 0
    for t in transfers:
        while must_wait([buffered for buffered, _ in under_way], t.buffered):
            under_way.popleft()
        flat = 4 * t.elements if t.staged or overlap else 0
        under_way.append((t.buffered, flat + t.buffer_bytes))
        most = max(most, sum(size for _, size in under_way))
    return most
