"""The watch of sharded replicas: going back, and a resume with each rank's part of the snapshot."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet_scale import AutoLR, HDETConfig, Replicas, fsdp
from hdet_scale.search.decision import RateSearch
from hdet_scale.topology import local
from tests.phases.test_watched import warnings_of
from tests.support.fleet import Fleet
from tests.support.toy import learn, same, toy
from tests.support.watching import evaluations

S = RateSearch.least_steps(2)
LR = 1e-3


class Run:
    """Two replicas of two shards, whose held-out loss is infinite once the search is over."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0
        mesh = fsdp.build_mesh(shards=2, device="cpu")
        torch.manual_seed(0)
        self.model = toy(wrap=False)
        fully_shard(self.model.inner, mesh=mesh["shard"])
        fully_shard(self.model, mesh=mesh["shard"])
        self.optimizer = AdamW(self.model.parameters(), lr=LR)
        self.scheduler = AutoLR(
            CosineAnnealingLR(self.optimizer, S),
            HDETConfig(rule="auto", total_steps=S),
            replicas=Replicas.from_mesh(mesh),
            probe=self.losses,
        )
        fsdp.attach(self.model, self.optimizer, self.scheduler, mesh=mesh)
        self.records: list[Any] = []
        self.scheduler.on_record(self.records.append)

    def losses(self) -> list[float]:
        first = float(local(self.model.inner.weight).sum())
        loss = 1.0 + 0.01 * first if self.scheduler.searching else math.inf
        return [loss + 0.01 * i for i in range(8)]

    def train(self, until: int) -> None:
        while self.step < until:
            self.scheduler.step(learn(self.model, self.optimizer, self.step, self.rank))
            self.step += 1

    def held(self) -> list[Tensor]:
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        kept = [v for state in states for _, v in sorted(state.items())]
        return [local(t).clone() for t in (*self.model.parameters(), *kept)]

    def load(self, weights: list[Tensor], optimizer: Any, scheduler: Any) -> None:
        with torch.no_grad():
            for p, kept in zip(self.model.parameters(), weights, strict=False):
                local(p).copy_(kept)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)


def _sharded(rank: int, size: int, how: str, folder: str) -> Any:
    run = Run(rank)
    while run.scheduler.searching:
        run.train(run.step + 1)
    start = run.held()
    run.train(run.step + 2)
    state = copy.deepcopy((run.held(), run.optimizer.state_dict(), run.scheduler.state_dict()))
    own, at = copy.deepcopy(run.scheduler.replica_state_dict()), run.step
    assert state[2]["hdet"]["snapshot"] is None, "no rank holds all of it"
    run.scheduler.save_snapshot(folder)
    while not evaluations(run.records):
        run.train(run.step + 1)
    back, restarted = same(run.held(), start), evaluations(run.records)[0].restart
    run.train(run.step + 3)
    again = Run(rank)
    again.load(*state)
    again.step = at
    if how == "own state":
        again.scheduler.load_replica_state_dict(own)
    if how == "files":
        again.scheduler.load_snapshot(folder)
    warned = warnings_of(lambda: again.train(run.step))
    return {
        "back": back and restarted, "after": run.held(), "resumed": same(again.held(), run.held()),
        "warned": warned, "shard": run.scheduler.replicas.shard_rank,
        "phase": again.scheduler.phase, "moved": not same(start, state[0]),
    }  # fmt: skip


@pytest.mark.parametrize("how", ["own state", "files", "nothing"])
def test_sharded_replicas_go_back(quartet: Fleet, tmp_path: Path, how: str) -> None:
    """A resume goes back too where each rank has its slices of the snapshot; without them the
    watch ends, and says so."""
    out = quartet.run(_sharded, how, str(tmp_path))
    lost = how == "nothing"
    for rank, run in enumerate(out):
        assert run["back"]
        assert run["moved"]
        assert run["resumed"] is not lost
        told = any("no snapshot to go back to" in text for text in run["warned"])
        assert told is (lost and rank == 0), "one rank says so"
        assert run["phase"] == ("plain" if lost else "watched")
    for shard in (0, 1):
        one, two = (run["after"] for run in out if run["shard"] == shard)
        assert same(one, two)
