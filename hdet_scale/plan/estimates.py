"""Estimate: what HDET costs a model on a cluster.

The buckets, the wires and the bytes are those of `Converge` itself, made over meta tensors of one
rank's shard; only the seconds come from a model (`hdet_scale.plan.links`). Overhead is what a
converge adds to T steps:

    blocking    check + exchange of losses + transfers
    overlap     exchange + copy with its check + fold, and what the overlap steps do not hide
    overhead  = added / (T x seconds of a step)

A step is forward and backward alone, 6 x parameters x tokens at the rate that the cluster's preset
says; with a measured step (--step-seconds) the overhead is yours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hdet_scale.config import HDETConfig
from hdet_scale.converge.costs import Cost, ring, tree
from hdet_scale.converge.pipeline import Converge
from hdet_scale.converge.transfers import Transfer
from hdet_scale.plan.links import Link
from hdet_scale.plan.rank_memory import RankMemory, rank_memory
from hdet_scale.plan.workload import MOMENTS, Workload
from hdet_scale.topology import Replicas, shard_size_of

EXCHANGED_BYTES = 6 * 8
"""What a replica tells the others at a converge: a loss, three flags and two fingerprints of its
tensors, float64 each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a job costs under an HDETConfig."""

    config: HDETConfig
    """With the number of shards."""
    replicas: int
    """World size over shards."""
    memory: RankMemory
    """Of a rank."""
    elements: int
    """Elements that a rank averages in a round."""
    buckets: int
    """Collectives of a round."""
    converge_bytes: int
    """Bytes that a rank sends for them."""
    gradient_bytes: int
    """Bytes that a rank sends to other replicas in a step for its gradients: 0 when local."""
    gradient_seconds: float
    """The same as time of the link; a backward pass hides what is shorter than itself."""
    ring_seconds: float
    """The transfers of a round, if every all-reduce were a ring."""
    tree_seconds: float
    """If every one were a tree."""
    transfer_seconds: float
    """The cheaper of the two for each bucket."""
    added_seconds: float
    """What a round's converge adds to training."""
    step_seconds: float
    """Of one optimizer step."""
    fits: bool
    """Whether the memory leaves room for activations."""

    @property
    def overhead(self) -> float:
        """What is added, as a share of the round."""
        return self.added_seconds / (self.config.interval * self.step_seconds)

    @property
    def bytes_a_step(self) -> float:
        """To other replicas, over a round: gradients and converge."""
        return self.gradient_bytes + self.converge_bytes / self.config.interval

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with what is derived."""
        values = dataclasses.asdict(self)
        values["memory"]["total"] = self.memory.total
        return values | {"overhead": self.overhead, "bytes_a_step": self.bytes_a_step}


def estimate(work: Workload, config: HDETConfig) -> Estimate:
    """Plan one rank's converge and price it.

    Args:
        work: what is trained, and on what.
        config: how; `config.shards` must be a number.

    Raises:
        ValueError: the shards do not divide the GPUs, or leave fewer than two replicas.
    """
    shards = shard_size_of(work.gpus, shard_size=_shards(config), replicas=None)
    n = work.gpus // shards
    if n < 2:
        raise ValueError(
            f"{shards} shards of {work.gpus} GPUs are one replica, and HDET needs two to compare: "
            f"give at most {work.gpus // 2} shards"
        )
    link = work.cluster.between_replicas(replicas=n, shards=shards)
    transfers = planned(work, config, shards).transfers()
    memory = rank_memory(work, config.converge, transfers, shards)
    shared = memory.gradients if config.gradients == "shared" else 0
    return Estimate(
        config=config,
        replicas=n,
        memory=memory,
        elements=_elements(transfers),
        buckets=len(transfers),
        converge_bytes=sum(t.sent_bytes for t in transfers),
        gradient_bytes=round(ring(n, shared).nbytes),
        gradient_seconds=link.seconds(link.all_reduce(n, shared)) if shared else 0.0,
        ring_seconds=sum(link.seconds(t.cost(ring)) for t in transfers),
        tree_seconds=sum(link.seconds(t.cost(tree)) for t in transfers),
        transfer_seconds=_seconds(transfers, link),
        added_seconds=_added(work, config, transfers, n, link),
        step_seconds=work.seconds_a_step,
        fits=memory.total <= work.room,
    )


def planned(work: Workload, config: HDETConfig, shards: int) -> Converge:
    """The converge of rank 0, over meta tensors.

    fp32 tensors are averaged, parameters or their masters. With local gradients the moments
    diverge too, and are averaged with them.
    """
    policy = config.converge
    moments = config.gradients == "local" if policy.moments is None else policy.moments
    copies = MOMENTS[work.optimizer] if moments else 0
    return Converge(
        work.model.shard(shards, torch.float32),
        Replicas(rank=0, size=work.gpus // shards),
        policy.bucket_bytes,
        wire=policy.wire,
        fragments=policy.fragments,
        outer=policy.outer,
        background=policy.overlap,
        plain=[t for _ in range(copies) for t in work.model.shard(shards, torch.float32)],
    )


def _seconds(transfers: Iterable[Transfer], link: Link) -> float:
    return sum(link.seconds(t.cost(link.all_reduce)) for t in transfers)


def _added(
    work: Workload, config: HDETConfig, transfers: Sequence[Transfer], n: int, link: Link
) -> float:
    """Seconds that the converges of a round add to its steps.

    The exchange is an all-gather around a ring. On the device: the check reads an element and a
    staged one is copied in and out; overlap copies it and checks the copy on the way (a read, a
    write), and folds it in (two reads, a write).
    """
    policy = config.converge
    rate = work.cluster.memory_bandwidth
    exchange = link.seconds(Cost(n - 1, (n - 1) * EXCHANGED_BYTES))
    total = 0.0
    for fragment in range(policy.fragments):
        part = [t for t in transfers if t.fragment == fragment]
        elements, staged = _elements(part), _elements(t for t in part if t.staged)
        total += exchange
        if policy.overlap:
            hidden = policy.overlap_steps * work.seconds_a_step
            total += 20 * elements / rate + max(0.0, _seconds(part, link) - hidden)
        else:
            total += (4 * elements + 16 * staged) / rate + _seconds(part, link)
    return total


def _elements(transfers: Iterable[Transfer]) -> int:
    return sum(t.elements for t in transfers)


def _shards(config: HDETConfig) -> int:
    if isinstance(config.shards, str):
        raise ValueError(
            f"shards must be a number to estimate, got {config.shards!r}: give a number, or let "
            "recommend() choose"
        )
    return config.shards
