"""The recommendation: the simplest choice whose overhead stays below a target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from hdet_scale.config import HDETConfig
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.converge.wires import WIRES
from hdet_scale.plan.estimates import Estimate, estimate
from hdet_scale.plan.workload import ROOM, Workload

TARGET = 1e-3
"""Overhead that a recommendation stays below."""
LONGER = (2000, 5000, 10000)
"""T that are tried where the one asked for costs too much."""
MOST_FRAGMENTS = 8


def recommend(work: Workload, config: HDETConfig) -> tuple[Estimate, list[str]]:
    """The simplest choice below the target, and why.

    Tried in this order: blocking fp32; overlap; a narrower wire with overlap; then the same with
    a longer T. Where none stays below the target, the cheapest that fits.

    Args:
        work: what is trained, and on what.
        config: the gradients and the shortest T; with shards="auto" the fewest that fit are taken.

    Returns:
        The estimate of the choice, and the reasons as lines of text.

    Raises:
        ValueError: the model does not fit the GPUs as two replicas.
    """
    reasons = []
    if config.shards == "auto":
        config = dataclasses.replace(config, shards=fitting_shards(work, config))
        reasons.append(
            f"shards {config.shards}: the fewest GPUs that hold a replica in {ROOM:.0%} of their "
            f"{work.cluster.memory_bytes / 1e9:.0f} GB"
        )
    tried: list[Estimate] = []
    for candidate in _candidates(work, config):
        tried.append(estimate(work, candidate))
        if tried[-1].fits and tried[-1].overhead <= TARGET:
            break
    chosen = tried[-1]
    if not (chosen.fits and chosen.overhead <= TARGET):
        chosen = min(tried, key=lambda e: (not e.fits, e.overhead))
    return chosen, reasons + _reasons(tried[0], chosen)


def fitting_shards(work: Workload, config: HDETConfig) -> int:
    """The fewest GPUs that hold a replica and leave room for activations.

    Raises:
        ValueError: half of the GPUs are too few.
    """
    allowed = [s for s in range(1, work.gpus // 2 + 1) if work.gpus % s == 0]
    for shards in allowed:
        found = estimate(work, dataclasses.replace(config, shards=shards))
        if found.fits:
            return shards
    raise ValueError(
        f"{work.model.name} does not fit {work.gpus} GPUs as two replicas: {allowed[-1]} shards "
        f"need {found.memory.total / 1e9:.0f} GB a GPU and {work.room / 1e9:.0f} GB are there "
        "beside activations; take more GPUs, or bf16 parameters"
    )


def _candidates(work: Workload, config: HDETConfig) -> Iterator[HDETConfig]:
    intervals = [config.interval, *(t for t in LONGER if t > config.interval)]
    for interval in intervals:
        plain = dataclasses.replace(config, interval=interval, converge=ConvergePolicy())
        yield plain
        for wire in WIRES:
            yield _overlapped(work, plain, wire)


def _overlapped(work: Workload, config: HDETConfig, wire: str) -> HDETConfig:
    """Overlap for as many steps as the transfers last; longer than a step, in fragments, so that
    the network is used evenly and a part is folded in soon after it was taken."""
    narrow = dataclasses.replace(config, converge=ConvergePolicy(wire=wire))
    steps = math.ceil(estimate(work, narrow).transfer_seconds / work.seconds_a_step)
    fragments = max(1, min(MOST_FRAGMENTS, steps, config.interval))
    lasting = max(1, min(config.interval // fragments, math.ceil(steps / fragments)))
    policy = ConvergePolicy(wire=wire, overlap=True, overlap_steps=lasting, fragments=fragments)
    return dataclasses.replace(config, converge=policy)


def _reasons(simple: Estimate, chosen: Estimate) -> list[str]:
    policy = chosen.config.converge
    said = [
        f"T {chosen.config.interval}, wire {policy.wire}, "
        + (
            f"overlap of {policy.overlap_steps} steps in {policy.fragments} fragments"
            if policy.overlap
            else "blocking"
        )
        + f": {chosen.overhead:.3%} of the time"
        + ("" if chosen.overhead <= TARGET else f", above the target of {TARGET:.1%}")
    ]
    if chosen is not simple:
        said.append(f"blocking fp32 at T {simple.config.interval} would take {simple.overhead:.3%}")
    if chosen.gradient_seconds > chosen.step_seconds:
        said.append(
            f"shared gradients take {chosen.gradient_seconds:.3g} s of the link at each step of "
            f"{chosen.step_seconds:.3g} s: with local gradients nothing crosses replicas between "
            "converges"
        )
    if not chosen.fits:
        said.append("the memory leaves too little for activations: take more shards")
    return said
