"""Snapshots of sharded replicas: saved by one layout of four ranks and loaded by another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet_scale import AutoLR, FusedAdamW, HDETConfig, Replicas, fsdp
from hdet_scale.search.decision import RateSearch
from tests.support.fleet import Fleet
from tests.support.sharded import batch, build_model, loss_of
from tests.support.toy import same

S = RateSearch.least_steps(1)
"""The shortest run that one or two replicas search in; four have both stages."""
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: AdamW(p, lr=3e-5),
    # Its state is there before the first step, so that the snapshot holds it.
    "adagrad": lambda p: Adagrad(p, lr=1e-3, initial_accumulator_value=0.1),
    "fused adamw": lambda p: FusedAdamW(p, lr=3e-5),
}


def whole(tensors: Any) -> list[Tensor]:
    """Collective over the shards of a replica."""
    return [t.full_tensor().detach().clone() for t in tensors]


class Run:
    """Four ranks as replicas of so many shards; rows do not divide by them."""

    def __init__(self, rank: int, shards: int, kind: str) -> None:
        self.rank, self.diverged = rank, False
        mesh = fsdp.build_mesh(shards=shards, device="cpu")
        self.model = build_model()
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(self.model, mesh=mesh["shard"])
        self.model.register_buffer("seen", torch.zeros(()))
        self.optimizer: Optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scheduler = AutoLR(
            CosineAnnealingLR(self.optimizer, S),
            HDETConfig(rule="auto", total_steps=S),
            replicas=Replicas.from_mesh(mesh),
            probe=self.losses,
        )
        self.hdet = fsdp.attach(self.model, self.optimizer, self.scheduler, mesh=mesh)
        self.records: list[Any] = []
        self.scheduler.on_record(self.records.append)
        self.step = 0

    def losses(self) -> Any:
        for i in range(4):
            loss = loss_of(self.model, batch(10_000 + i, 0))
            yield math.inf if self.diverged else loss

    def train(self, until: int) -> None:
        while self.step < until:
            loss = loss_of(self.model, batch(self.step, self.rank))
            self.optimizer.zero_grad()
            loss.backward()
            self.model.seen += 1.0
            self.optimizer.step()
            self.scheduler.step(loss)
            self.step += 1

    def held(self) -> list[Tensor]:
        """Whole parameters, the buffer, and the optimizer's state."""
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        kept = [v for state in states for _, v in sorted(state.items()) if v.dim()]
        counts = [v.clone() for state in states for _, v in sorted(state.items()) if not v.dim()]
        buffer = [self.model.seen.clone()]
        return whole(self.model.parameters()) + buffer + whole(kept) + counts

    def until_restart(self) -> int:
        """The held-out loss is infinite: the watch goes back to the weights of the lowest loss."""
        self.diverged = True
        had = len(self.records)
        while not any(r.kind == "evaluation" and r.restart for r in self.records[had:]):
            if not self.scheduler.watching:
                return -1
            self.train(self.step + 1)
        return self.step


def _resharded(rank: int, size: int, home: str, by: int, to: tuple[int, ...], kind: str) -> Any:
    run = Run(rank, by, kind)
    while run.scheduler.searching:
        run.train(run.step + 1)
    assert run.scheduler.watching
    start = run.held()
    run.train(run.step + 12)
    run.hdet.save(home)
    saved, at = run.held(), run.step
    end, back = run.until_restart(), same(run.held(), start)
    bases = run.scheduler.get_base_lr()
    told = []
    for shards in to:
        other = Run(rank, shards, kind)
        with torch.no_grad():
            for p in other.model.parameters():
                p.mul_(3.0)
        other.hdet.load(home)
        other.step = at
        told.append(
            {
                "shards": shards,
                "phase": other.scheduler.phase,
                "saved": same(other.held(), saved),
                "end": other.until_restart(),
                "back": same(other.held(), start),
                "bases": other.scheduler.get_base_lr() == bases,
            }
        )
    return end > at, back, end, told


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("by", [2, 4, 1])
def test_a_snapshot_is_loaded_by_another_number_of_shards(
    quartet: Fleet, tmp_path: Path, by: int, kind: str
) -> None:
    """Saved with a checkpoint by 2 x 2, 1 x 4 or 4 x 1; a restart goes back to the same weights."""
    to = (1, 2, 4) if kind == "adamw" else (2, 4)
    for restarted, back, end, told in quartet.run(_resharded, str(tmp_path), by, to, kind):
        assert restarted
        assert back
        for other in told:
            assert other["phase"] == "watched"
            assert other["saved"], other
            assert other["end"] == end, other
            assert other["back"], other
            assert other["bases"], other
