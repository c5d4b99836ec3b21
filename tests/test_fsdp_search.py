"""A search on FSDP2 replicas of two shards: beside plain torch, and through checkpoints."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

from hdet_scale import FusedAdamW, OneCycleAutoLR, Replicas, fsdp
from hdet_scale.method.records import TrialRecord
from hdet_scale.search.constants import HEAD_START
from hdet_scale.search.decision import NEAR, RateSearch
from hdet_scale.topology import local
from tests.support.sharded import batch, build_model, loss_of

STEPS = RateSearch.least_steps(2)
"""Of the shortest run that two replicas search in: one stage, whose rates follow each other."""
AFTER = 15
"""Steps of the run that are compared, after the search."""
REPLICAS = SHARDS = 2
PROBE = 16
KINDS: dict[str, Any] = {
    "adamw": lambda params: AdamW(params, weight_decay=0.1),
    "fused": lambda params: FusedAdamW(params, weight_decay=0.1),
    "sgd": lambda params: SGD(params, lr=1e-3, momentum=0.9),
}


def moments_of(optimizer: Optimizer) -> list[Tensor]:
    """Every tensor of the optimizer's state, as this rank holds it."""
    states = [optimizer.state.get(p) or {} for g in optimizer.param_groups for p in g["params"]]
    return [
        local(v).detach().clone()
        for state in states
        for _, v in sorted(state.items())
        if isinstance(v, Tensor)
    ]


class Searched:
    """A run with a search on 2 x 2 ranks, the mean over replicas hooked in."""

    def __init__(self, rank: int, kind: str, lr: float) -> None:
        self.rank, self.step = rank, 0
        mesh = fsdp.build_mesh(shards=SHARDS, device="cpu")
        self.model = build_model()
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(self.model, mesh=mesh["shard"])
        self.optimizer = KINDS[kind](self.model.parameters())
        self.scheduler = OneCycleAutoLR(
            self.optimizer,
            lr,
            STEPS,
            rule="auto",
            cycle_momentum=False,
            replicas=Replicas.from_mesh(mesh),
            probe=lambda: (loss_of(self.model, batch(10_000 + i, 0)) for i in range(PROBE)),
        )
        self.hdet = fsdp.attach(self.model, self.optimizer, self.scheduler, mesh=mesh)
        self.rates: list[float] = []
        self.trials: list[TrialRecord] = []
        self.scheduler.on_record(self._note)

    def _note(self, record: Any) -> None:
        if isinstance(record, TrialRecord):
            self.trials.append(dataclasses.replace(record, seconds=0.0))  # a clock of each rank

    def train(self, until: int) -> None:
        while self.step < until:
            self.rates.append(self.scheduler.get_last_lr()[0])
            self.optimizer.zero_grad()
            loss = loss_of(self.model, batch(self.step, self.rank))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step(loss)
            self.step += 1

    def search(self) -> None:
        while self.scheduler.searching:
            self.train(self.step + 1)

    def full(self) -> list[Tensor]:
        return [p.full_tensor().detach().clone() for p in self.model.parameters()]  # type: ignore[attr-defined]

    def held(self) -> list[Tensor]:
        """What this rank holds of weights and moments."""
        own = [local(p).detach().clone() for p in self.model.parameters()]
        return own + moments_of(self.optimizer)

    def own(self) -> Any:
        """A copy of all that this rank needs to go on in the middle of a search."""
        slices = fsdp.local_state(self.model, self.optimizer)
        scheduler = self.scheduler.state_dict()
        replica = self.scheduler.replica_state_dict()
        return copy.deepcopy({**slices, "scheduler": scheduler, "replica": replica})

    def load_own(self, state: Any, step: int) -> None:
        fsdp.load_local_state(self.model, self.optimizer, state)
        self.scheduler.load_state_dict(state["scheduler"])
        self.scheduler.load_replica_state_dict(state["replica"])
        self.step = step

    def told(self) -> tuple[Any, ...]:
        """What all ranks must have in common."""
        scheduler = self.scheduler
        return self.step, scheduler._run.steering.scale, scheduler.verdict, self.trials


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- the search -----------------------------------------------------------------------------------


def _searched(rank: int, size: int, kind: str, lr: float) -> dict[str, Any]:
    run = Searched(rank, kind, lr)
    run.search()
    found = {"told": run.told(), "held": run.held(), "full": run.full(), "steps": run.step}
    run.train(run.step + AFTER)
    with torch.no_grad():
        output = run.model(batch(20_000, 0))
    return {**found, "end": run.held(), "rates": run.rates, "whole": run.full(), "out": output}


def _plain(kind: str, rates: list[float], searched: int, *, kept: bool) -> tuple[Any, Any, Any]:
    """Without HDET: the batches of the first replica in the search, where that is what the run
    begins with, then those of all; weights after the search and at the end."""
    model = build_model()
    optimizer = KINDS[kind](model.parameters())
    early: list[Tensor] = [p.detach().clone() for p in model.parameters()]
    for step, rate in enumerate(rates):
        if step < searched and not kept:
            continue
        ranks = range(SHARDS) if step < searched else range(REPLICAS * SHARDS)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(step, rank) for rank in ranks])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == searched - 1:
            early = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        output = model(batch(20_000, 0))
    return early, [p.detach().clone() for p in model.parameters()], output


CASES = [
    ("adamw", 3e-4, True),
    ("fused", 3e-4, True),
    ("sgd", 3e-4, True),
    ("adamw", 0.7, False),
]


@pytest.mark.parametrize(("kind", "lr", "kept"), CASES)
def test_after_a_search_all_replicas_go_on_with_the_run_of_the_first(
    fleets: Any, kind: str, lr: float, kept: bool
) -> None:
    """From a rate that is too low the head start is kept, and from one that is too high it is not.
    Equal to the bit among replicas, and to plain torch's at the same rates up to rounding."""
    found = fleets(REPLICAS * SHARDS).run(_searched, kind, lr)
    steps, scale, _, trials = found[0]["told"]
    assert steps == RateSearch(replicas=REPLICAS, total_steps=STEPS, adaptive=True).longest
    assert len(trials) == len(NEAR), "with two replicas one rate after the other"
    assert scale > 1 if kept else scale < HEAD_START
    early, end, output = _plain(kind, found[0]["rates"], steps, kept=kept)
    for rank, each in enumerate(found):
        first = found[rank % SHARDS]
        assert each["told"] == found[0]["told"]
        assert same(each["held"], first["held"])
        assert same(each["end"], first["end"]), "the optimizer steps with what was adopted"
        assert each["rates"][steps:] == found[0]["rates"][steps:]
        for mine, wanted in (("full", early), ("whole", end), ("out", output)):
            torch.testing.assert_close(each[mine], wanted, rtol=1e-4, atol=1e-6)


# -- checkpoints ----------------------------------------------------------------------------------

TRIAL = RateSearch(replicas=REPLICAS, total_steps=STEPS, adaptive=True).trial.steps
MOMENTS = {"in the first trial": TRIAL // 2, "between two": TRIAL, "in the last": 5 * TRIAL // 2}


def _to_the_end(run: Searched) -> Any:
    run.search()
    steps, scale, verdict, _ = run.told()
    run.train(steps + AFTER)
    return (steps, scale, verdict), run.held()


def _own_files(rank: int, size: int, kind: str, at: int) -> Any:
    """A run without a checkpoint, one that takes each rank's own state, and one that loads it."""
    unbroken, saved, resumed = (Searched(rank, kind, 3e-4) for _ in range(3))
    saved.train(at)
    state = saved.own()
    resumed.load_own(state, at)
    return [_to_the_end(run) for run in (unbroken, saved, resumed)]


@pytest.mark.parametrize("at", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("kind", ["adamw", "fused"])
def test_each_ranks_own_state_goes_on_with_the_search(fleets: Any, kind: str, at: int) -> None:
    """Between two trials the optimizer of the first replica has a state and the others have none:
    to take it must not make one, which would turn the next trial's first step into a second."""
    for unbroken, saved, resumed in fleets(4).run(_own_files, kind, at):
        assert saved[0] == resumed[0] == unbroken[0]
        assert same(saved[1], unbroken[1])
        assert same(resumed[1], unbroken[1])


def _one_folder(rank: int, size: int, path: str, at: int) -> Any:
    """A run that is saved to a folder in its search, and one that loads it."""
    run, again = Searched(rank, "adamw", 3e-4), Searched(rank, "adamw", 3e-4)
    start = run.held()
    run.train(at)
    run.hdet.save(path)
    back = same(run.held(), start)
    again.hdet.load(path)
    again.step = at
    return back, _to_the_end(run), _to_the_end(again)


@pytest.mark.parametrize("at", MOMENTS.values(), ids=MOMENTS)
def test_a_folder_starts_the_trial_again_from_the_initial_weights(
    fleets: Any, tmp_path: Path, at: int
) -> None:
    """One state for all replicas: what was done of the trial, and the head start, are lost."""
    for back, saved, resumed in fleets(4).run(_one_folder, str(tmp_path / "checkpoint"), at):
        assert back
        assert saved[0] == resumed[0]
        assert saved[0][0] == len(NEAR) * TRIAL + at % TRIAL
        assert saved[0][1] > 1
        assert same(saved[1], resumed[1])
