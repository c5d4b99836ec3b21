"""Traffic: what a process puts on the wire, whoever asked for it, counted by torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile

PREFIX = "c10d::"
"""Every collective, DDP's own included, passes through an operator of this family."""


@contextmanager
def traffic() -> Iterator[Counter[str]]:
    """Inside, collectives are counted by name; the counter is filled on leaving."""
    counts: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield counts
    for event in seen.key_averages():
        if event.key.startswith(PREFIX):
            counts[event.key.removeprefix(PREFIX)] += event.count
