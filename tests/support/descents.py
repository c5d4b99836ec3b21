"""Descents: how often a step calls from one file of the package into another, on rank 0.

    python -m tests.support.descents            # the counts of a plain step, a trial, their ends
    python -m tests.support.descents --calls    # and each call

A reader who follows a step has to open a file at each descent. Counted is every call of a function
of the package whose caller lies in another file, torch's files and the training loop included. The
resumption of a generator at the end of a `with` block is no call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet_scale
from hdet_scale import OneCycleAutoLR
from tests.support.fleet import Fleet

HOME = os.path.dirname(os.path.realpath(hdet_scale.__file__))
TOTAL = 900
"""Steps of a run whose search with two replicas has two stages."""
LIMITS = {"plain step": 12, "trial step": 12, "end of trial": 50, "end of search": 125}
"""The end of a search happens once in a run. Half of it is one short call for each tensor that all
replicas adopt and that the watch keeps."""


class Trace:
    """A profile function that lists the descents."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self._begun: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or caller is None or code.co_name.startswith("<genexpr"):
            return
        here, there = (os.path.realpath(c.co_filename) for c in (code, caller.f_code))
        if here.startswith(HOME) and here != there and frame not in self._begun:
            self._begun.add(frame)
            self.calls.append((os.path.basename(there), os.path.basename(here), code.co_name))


def _steps(rule: str, steps: int) -> Iterator[tuple[bool, bool, bool, Trace]]:
    """For each step: whether it was of the search, whether the search goes on, whether a trial
    ended, and its descents."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    truth, held = torch.randn(8, 1), [torch.randn(16, 8) for _ in range(8)]

    def probe(part: int = 0, parts: int = 1) -> list[Tensor]:
        return [nn.functional.mse_loss(model.module(x), x @ truth) for x in held[part::parts]]

    scheduler = OneCycleAutoLR(
        optimizer,
        1e-2,
        total_steps=TOTAL,
        rule=rule,
        model=model,
        probe=probe if rule == "auto" else None,
        cycle_momentum=False,
    )
    batches = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(4, 8, generator=batches)
        loss = nn.functional.mse_loss(model(x), x @ truth)
        optimizer.zero_grad()
        loss.backward()
        searching, trace = scheduler.searching, Trace()
        sys.setprofile(trace)
        optimizer.step()
        scheduler.step(loss)
        sys.setprofile(None)
        yield searching, scheduler.searching, scheduler.stride > 0, trace


def measured(rank: int, size: int) -> dict[str, list[tuple[str, str, str]]]:
    """A case for a fleet of two: the descents of each kind of step, the most of all such steps."""
    search = [s for s in _steps("auto", TOTAL // 8) if s[0]]
    plain = [*_steps("none", 5)][1:]
    kinds = {
        "plain step": [trace for _, _, _, trace in plain],
        # The first step takes the snapshot and evaluates the initial weights.
        "trial step": [trace for _, _, ended, trace in search[1:] if not ended],
        "end of trial": [trace for _, on, ended, trace in search if ended and on],
        "end of search": [trace for _, on, _, trace in search if not on],
    }
    return {kind: max((t.calls for t in traces), key=len) for kind, traces in kinds.items()}


def main() -> int:
    """Print the counts; 1 where one is above its limit."""
    from tests.support import descents  # the workers import the case by its module's name

    fleet = Fleet(2)
    found = fleet.run(descents.measured)[0]
    fleet.stop()
    for kind, calls in found.items():
        print(f"{kind:14} {len(calls):3d} descents, at most {LIMITS[kind]}")
        if "--calls" in sys.argv:
            print("\n".join(f"    {a} -> {b} {name}" for a, b, name in calls))
    return int(any(len(calls) > LIMITS[kind] for kind, calls in found.items()))


if __name__ == "__main__":
    raise SystemExit(main())
