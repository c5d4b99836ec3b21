"""The shape of the user's schedule: its peaks and its mean, and how to go back to a position.

Schedulers compute the next value from the last one in ways of their own, so that stepping through
the whole schedule is the only way that is right for all of them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hdet_scale.search.snapshot import options_of, put_options


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """What a search must know of a schedule."""

    peaks: tuple[float, ...]
    """The highest value of each param group."""
    mean: float
    """Of all steps and param groups, each over its peak."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> ScheduleShape:
        """From the values of each step, one for each param group."""
        columns = [*zip(*rows, strict=True)]
        peaks = tuple(max(column) for column in columns)
        means = [sum(c) / len(c) / p if p > 0 else 1.0 for c, p in zip(columns, peaks, strict=True)]
        return cls(peaks, sum(means) / len(means))

    def share(self, values: Sequence[float]) -> float:
        """A step's values over the peaks, averaged: 1 at the peak."""
        over = [v / p if p > 0 else 1.0 for v, p in zip(values, self.peaks, strict=True)]
        return sum(over) / len(over)


def shape_of(scheduler: LRScheduler, total_steps: int) -> ScheduleShape:
    """The shape of a whole schedule; it is stepped through and put back."""
    groups, position = scheduler.optimizer.param_groups, position_of(scheduler)
    rows = [[float(g["lr"]) for g in groups]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(total_steps):
            scheduler.step()
            rows.append([float(g["lr"]) for g in groups])
    go_to(scheduler, position)
    return ScheduleShape.of(rows)


def position_of(scheduler: LRScheduler) -> dict[str, Any]:
    """The schedule's state, and the learning rates and options that it has in the optimizer."""
    groups = scheduler.optimizer.param_groups
    rates = [g["lr"] for g in groups]
    return {
        "scheduler": copy.deepcopy(scheduler.state_dict()),
        "rates": [x.clone() if isinstance(x, Tensor) else x for x in rates],
        "options": [options_of(g) for g in groups],
    }


@torch.no_grad()
def go_to(scheduler: LRScheduler, position: Mapping[str, Any]) -> None:
    """Restore what `position_of` returned, to the bit."""
    scheduler.load_state_dict(copy.deepcopy(position["scheduler"]))
    groups = scheduler.optimizer.param_groups
    for group, rate, options in zip(groups, position["rates"], position["options"], strict=True):
        put_options(group, options)  # some schedules move the momentum too
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"] = float(rate)
