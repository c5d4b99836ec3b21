"""The shape of the user's schedule: its peaks and its warm-up.

Schedulers compute the next value from the last one in ways of their own, so that stepping through
the whole schedule is the only way that is right for all of them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hdet_scale.engines.replica_state import options_of, put_options


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """What a search must know of a schedule."""

    peaks: tuple[float, ...]
    """The highest value of each param group."""
    warm: int
    """Steps until the peak is reached."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> ScheduleShape:
        """From the values of each step, one for each param group."""
        listed = [tuple(row) for row in rows]
        peaks = tuple(max(column) for column in zip(*listed, strict=True))
        shares = [sum(v / p for v, p in zip(row, peaks, strict=True) if p > 0) for row in listed]
        return cls(peaks, shares.index(max(shares)))


@torch.no_grad()
def shape_of(scheduler: LRScheduler, total_steps: int) -> ScheduleShape:
    """The shape of a whole schedule; it is stepped through and put back, to the bit."""
    groups, state = scheduler.optimizer.param_groups, copy.deepcopy(scheduler.state_dict())
    rates = [g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"] for g in groups]
    options = [options_of(g) for g in groups]  # some schedules move the momentum too
    rows = [[float(g["lr"]) for g in groups]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(total_steps):
            scheduler.step()
            rows.append([float(g["lr"]) for g in groups])
    scheduler.load_state_dict(state)
    for group, rate, kept in zip(groups, rates, options, strict=True):
        put_options(group, kept)
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"] = rate
    return ScheduleShape.of(rows)
