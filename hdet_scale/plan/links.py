"""Links: the seconds of a transfer, by the alpha-beta model, and the clusters that people have.

    seconds = hops x alpha + bytes x beta          alpha: latency of a hop, beta: 1 / bandwidth

Hops and bytes are those of `hdet_scale.converge.costs`. An all-reduce takes the cheaper of ring and
tree for each message, as NCCL does. `fit` finds alpha and beta of a machine from a few measured
transfers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdet_scale.converge.costs import Cost, ring, tree

GBIT = 1e9 / 8
"""Bytes a second of one Gb/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between ranks."""

    latency: float
    """alpha: seconds of a hop."""
    bandwidth: float
    """1 / beta: bytes a second that one rank sends."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency must be 0 s or more, got {self.latency}")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be above 0 bytes a second, got {self.bandwidth}")

    def seconds(self, cost: Cost) -> float:
        """The model itself."""
        return cost.hops * self.latency + cost.nbytes / self.bandwidth

    def all_reduce(self, n: int, nbytes: float) -> Cost:
        """The cheaper of ring and tree for a message of `nbytes`."""
        return min(ring(n, nbytes), tree(n, nbytes), key=self.seconds)


def fit(costs: Sequence[Cost], seconds: Sequence[float]) -> Link:
    """alpha and beta by least squares of the *relative* error, neither below zero.

    min sum ((hops_i alpha + bytes_i beta) / t_i - 1)^2. Relative, since a long transfer would
    otherwise drown the latency.
    """
    if len(costs) != len(seconds) or len(costs) < 2:
        raise ValueError(
            f"a fit needs two measured transfers or more, and a time for each: got {len(costs)} "
            f"costs and {len(seconds)} times"
        )
    if any(t <= 0 for t in seconds):
        raise ValueError(f"times must be above 0 s, got {list(seconds)}")
    h = [c.hops / t for c, t in zip(costs, seconds, strict=True)]
    b = [c.nbytes / t for c, t in zip(costs, seconds, strict=True)]
    hh, hb, bb = _dot(h, h), _dot(h, b), _dot(b, b)
    det = hh * bb - hb * hb
    # Sizes that are all multiples of one another in hops and bytes cannot separate alpha from beta.
    if det <= 1e-9 * hh * bb:
        return Link(latency=0.0, bandwidth=bb / sum(b))
    alpha = (sum(h) * bb - sum(b) * hb) / det
    beta = (sum(b) * hh - sum(h) * hb) / det
    if alpha < 0:
        alpha, beta = 0.0, sum(b) / bb
    if beta <= 0:
        raise ValueError(
            f"the times {list(seconds)} do not grow with the bytes "
            f"{[c.nbytes for c in costs]}: measure larger sizes, on a quiet machine"
        )
    return Link(latency=alpha, bandwidth=1 / beta)


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of GPUs: links within a node and between nodes. Figures of the makers, times what
    transfers are known to reach."""

    name: str
    gpus_per_node: int
    inside: Link
    """Within a node."""
    across: Link
    """Between nodes, one GPU's share of the node's adapters."""
    memory_bytes: float
    """Of a GPU."""
    memory_bandwidth: float
    """Bytes a second that a GPU reads or writes."""
    flops: float
    """Dense bf16 operations a second that training reaches."""

    def between_replicas(self, *, replicas: int, shards: int) -> Link:
        """The link of a group of ranks that hold the same shard, consecutive ranks to a replica.

        g = max(1, gpus_per_node / shards) members of a group share a node. A group within a node
        runs at the speed of the node. Else its rings leave the node through the adapters of its g
        members, since the node's other groups use theirs: g times one GPU's share.
        """
        members = max(1, self.gpus_per_node // shards)
        if replicas <= members:
            return self.inside
        fast = min(self.inside.bandwidth, members * self.across.bandwidth)
        return dataclasses.replace(self.across, bandwidth=fast)


REACHED = 0.8
"""Share of a link's nominal bandwidth that large collectives reach."""
MFU = 0.4
"""Share of the peak that training of a large model reaches."""


def _cluster(
    name: str,
    *,
    inside: Link,
    across: Link,
    gigabytes: float,
    terabytes_a_second: float,
    teraflops: float,
    gpus_per_node: int = 8,
) -> Cluster:
    return Cluster(
        name=name,
        gpus_per_node=gpus_per_node,
        inside=dataclasses.replace(inside, bandwidth=REACHED * inside.bandwidth),
        across=dataclasses.replace(across, bandwidth=REACHED * across.bandwidth),
        memory_bytes=gigabytes * 1e9,
        memory_bandwidth=terabytes_a_second * 1e12,
        flops=MFU * teraflops * 1e12,
    )


PRESETS = {
    "h100": _cluster(
        "H100, NVLink, 400 Gb/s InfiniBand a GPU",
        inside=Link(latency=3e-6, bandwidth=450e9),
        across=Link(latency=8e-6, bandwidth=400 * GBIT),
        gigabytes=80,
        terabytes_a_second=3.35,
        teraflops=989,
    ),
    "a100": _cluster(
        "A100, NVLink, 200 Gb/s InfiniBand a GPU",
        inside=Link(latency=3e-6, bandwidth=300e9),
        across=Link(latency=8e-6, bandwidth=200 * GBIT),
        gigabytes=80,
        terabytes_a_second=2.0,
        teraflops=312,
    ),
    "25gbe": _cluster(
        "A100 on PCIe, one 25 Gb/s Ethernet for 8 GPUs",
        inside=Link(latency=10e-6, bandwidth=25e9),
        across=Link(latency=40e-6, bandwidth=25 * GBIT / 8),
        gigabytes=80,
        terabytes_a_second=2.0,
        teraflops=312,
    ),
    "region": _cluster(
        "sites of 8 H100 with NVLink, 1 Gb/s and 50 ms between sites",
        inside=Link(latency=3e-6, bandwidth=450e9),
        across=Link(latency=50e-3, bandwidth=1 * GBIT / 8),
        gigabytes=80,
        terabytes_a_second=3.35,
        teraflops=989,
    ),
}
