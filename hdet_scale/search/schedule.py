"""The outline of a schedule: its peaks and its mean, and how to put it back to a place.

Schedulers compute the next value from the last one in ways of their own, so that nothing shorter
than playing a schedule through is right for all of them.
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
class Outline:
    """What a search must know of a schedule."""

    peaks: tuple[float, ...]
    """The highest value of each param group."""
    mean: float
    """Of all steps and param groups, each over its peak."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> Outline:
        """From the values of each step, one for each param group."""
        columns = [*zip(*rows, strict=True)]
        peaks = tuple(max(column) for column in columns)
        means = [sum(c) / len(c) / p if p > 0 else 1.0 for c, p in zip(columns, peaks, strict=True)]
        return cls(peaks, sum(means) / len(means))

    def share(self, values: Sequence[float]) -> float:
        """Where a step's values are: 1 at the peak."""
        over = [v / p if p > 0 else 1.0 for v, p in zip(values, self.peaks, strict=True)]
        return sum(over) / len(over)


def outline_of(scheduler: LRScheduler, total_steps: int) -> Outline:
    """Of a whole schedule, which is played through and put back."""
    groups, place = scheduler.optimizer.param_groups, place_of(scheduler)
    rows = [[float(g["lr"]) for g in groups]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(total_steps):
            scheduler.step()
            rows.append([float(g["lr"]) for g in groups])
    put_back(scheduler, place)
    return Outline.of(rows)


def place_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Where a schedule stands, and the learning rates and momenta that it has in the optimizer."""
    groups = scheduler.optimizer.param_groups
    rates = [g["lr"] for g in groups]
    return {
        "scheduler": copy.deepcopy(scheduler.state_dict()),
        "rates": [x.clone() if isinstance(x, Tensor) else x for x in rates],
        "options": [options_of(g) for g in groups],
    }


@torch.no_grad()
def put_back(scheduler: LRScheduler, place: Mapping[str, Any]) -> None:
    """To what `place_of` saw, to the bit."""
    scheduler.load_state_dict(copy.deepcopy(place["scheduler"]))
    groups = scheduler.optimizer.param_groups
    for group, rate, options in zip(groups, place["rates"], place["options"], strict=True):
        put_options(group, options)  # some schedules move the momentum too
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"] = float(rate)
