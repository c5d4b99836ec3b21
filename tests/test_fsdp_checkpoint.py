"""DCP checkpoints of sharded replicas: the same bits in the same layout, any other layout too."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from hdet_scale import ConvergePolicy, OneCycleAutoLR, Replicas, fsdp
from hdet_scale.converge.outer import OuterStep
from hdet_scale.method.records import EvaluationRecord
from hdet_scale.search.decision import RateSearch
from tests.support.sharded import Sharded, batch, build_model, loss_of

STEPS = 30


def _saved(
    rank: int, size: int, shards: int, mode: str, at: int, path: str, how: str, policy: Any
) -> dict[str, Any]:
    """Train, save at `at`, go on to the end."""
    run = Sharded(shards, mode, steps=STEPS, converge=policy)
    run.train(rank, 0, at)
    state = {"app": run.hdet.checkpoint()}
    if how == "async":
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)
    at_save = {
        "full": run.full(),
        "base": run.scheduler.get_base_lr(),
        "round": run.scheduler.round,
    }
    run.train(rank, at, STEPS)
    return {**at_save, "end": run.full(), "local": run.local()}


def _loaded(
    rank: int, size: int, shards: int, mode: str, at: int, path: str, policy: Any
) -> dict[str, Any]:
    """A fresh run of another seed and position, loaded, then to the end."""
    run = Sharded(shards, mode, steps=STEPS, converge=policy)
    with torch.no_grad():
        for p in run.model.parameters():
            p.zero_()
    dcp.load({"app": run.hdet.checkpoint()}, checkpoint_id=path)
    at_load = {
        "full": run.full(),
        "base": run.scheduler.get_base_lr(),
        "round": run.scheduler.round,
    }
    run.train(rank, at, STEPS)
    return {**at_load, "end": run.full(), "local": run.local()}


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


POLICIES = {
    "plain": ConvergePolicy(),
    "outer": ConvergePolicy(outer=OuterStep(lr=0.8, momentum=0.5)),
}


@pytest.mark.parametrize("how", ["blocking", "async"])
@pytest.mark.parametrize("mode", ["shared", "local"])
def test_a_resumed_run_in_the_same_layout_gives_the_same_bits(
    fleets: Any, tmp_path: Path, mode: str, how: str
) -> None:
    at = random.Random(f"{mode} {how}").randrange(9, STEPS - 2)
    where = str(tmp_path / "checkpoint")
    policy = POLICIES["outer" if how == "blocking" else "plain"]
    unbroken = fleets(4).run(_saved, 2, mode, at, where, how, policy)
    resumed = fleets(4).run(_loaded, 2, mode, at, where, policy)
    for a, b in zip(unbroken, resumed, strict=True):
        assert same(a["full"], b["full"])
        assert (a["base"], a["round"]) == (b["base"], b["round"])
        assert same(a["local"], b["local"])
        assert same(a["end"], b["end"])


@pytest.mark.parametrize(("ranks", "shards"), [(4, 1), (2, 1), (2, 2), (3, 1)])
def test_a_checkpoint_of_two_by_two_loads_into_another_layout_and_back(
    fleets: Any, tmp_path: Path, ranks: int, shards: int
) -> None:
    """Parameters, moments, base and round are those that were saved."""
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    plain = POLICIES["plain"]
    saved = fleets(4).run(_saved, 2, "shared", 12, there, "blocking", plain)
    for other in fleets(ranks).run(_loaded, shards, "shared", 12, there, plain):
        assert same(other["full"], saved[0]["full"])
        assert (other["base"], other["round"]) == (saved[0]["base"], saved[0]["round"])
    second = fleets(ranks).run(_saved, shards, "shared", 12, back, "blocking", plain)
    for other in fleets(4).run(_loaded, 2, "shared", 12, back, plain):
        assert same(other["full"], second[0]["full"])


def _without_hdet(rank: int, size: int, path: str) -> list[Tensor]:
    """Plain FSDP over two ranks reads the model of an HDET checkpoint."""
    mesh = fsdp.build_mesh(replicas=1, device="cpu")
    model = build_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    state = {"app": {"model": get_model_state_dict(model)}}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["app"]["model"])
    return [p.full_tensor().detach() for p in model.parameters()]


def test_a_run_without_hdet_reads_the_model(fleets: Any, tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoint")
    saved = fleets(4).run(_saved, 2, "local", 11, where, "blocking", POLICIES["plain"])
    for params in fleets(2).run(_without_hdet, where):
        assert same(params, saved[0]["full"][: len(params)])


def _in_mid_round(rank: int, size: int, path: str) -> tuple[bool, bool]:
    """In mid-round replicas differ; the state that is written does not."""
    run = Sharded(2, steps=STEPS)
    run.train(rank, 0, 11)
    before = run.local()
    state = run.hdet.checkpoint().state_dict()
    group = run.hdet.replicas.group
    flat = torch.cat([t.to_local().flatten() for t in state["model"].values()])
    old = torch.cat([t.flatten() for t in before])
    rows, olds = ([torch.empty_like(flat) for _ in range(2)] for _ in range(2))
    dist.all_gather(rows, flat, group=group)
    dist.all_gather(olds, old, group=group)
    return torch.equal(olds[0], olds[1]), torch.equal(rows[0], rows[1])


def test_no_mixture_of_replicas_can_be_written(fleets: Any, tmp_path: Path) -> None:
    assert fleets(4).run(_in_mid_round, str(tmp_path)) == [(False, True)] * 4


def _folder(rank: int, size: int, path: str) -> bool:
    """`save` and `load` of the handle, in the middle of a round."""
    run = Sharded(2, steps=STEPS)
    run.train(rank, 0, 11)
    run.hdet.save(path)
    run.train(rank, 11, 20)
    again = Sharded(2, steps=STEPS)
    again.hdet.load(path)
    again.train(rank, 11, 20)
    return same(run.full(), again.full())


def test_a_folder_holds_a_whole_checkpoint(fleets: Any, tmp_path: Path) -> None:
    assert fleets(4).run(_folder, str(tmp_path / "checkpoint")) == [True] * 4


# -- the watch of a run ---------------------------------------------------------------------------


class Watched:
    """A run with a search that overfits as soon as its weights are some way from their start."""

    STEPS = RateSearch.least_steps(2)

    def __init__(self, rank: int, shards: int) -> None:
        self.rank, self.step = rank, 0
        mesh = fsdp.build_mesh(shards=shards, device="cpu")
        self.model = build_model()
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(self.model, mesh=mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for step in range(2):  # the optimizer has moments where the search begins
            self.learn(batch(step, 0))
        self.start = self.own()
        self.scheduler = OneCycleAutoLR(
            self.optimizer,
            1e-4,
            self.STEPS,
            rule="auto",
            restart_budget=0.5,
            cycle_momentum=False,
            replicas=Replicas.from_mesh(mesh),
            probe=self.losses,
        )
        self.hdet = fsdp.attach(self.model, self.optimizer, self.scheduler, mesh=mesh)
        self.evaluated: list[float] = []
        self.best: list[Tensor] = []
        """Weights and moments of the lowest held-out loss."""
        self.restarts: list[int] = []
        self.scheduler.on_record(self.note)

    def own(self) -> list[Tensor]:
        return [p.to_local().detach().clone() for p in self.model.parameters()]  # type: ignore[operator]

    def full(self) -> list[Tensor]:
        """Whole weights and moments."""
        params = list(self.model.parameters())
        states = [self.optimizer.state[p] for p in params]
        tensors = [*params, *(s[name] for s in states for name in ("exp_avg", "exp_avg_sq"))]
        counts = [s["step"].clone() for s in states]
        return [*(t.full_tensor().detach().clone() for t in tensors), *counts]  # type: ignore[attr-defined]

    def note(self, record: Any) -> None:
        if not isinstance(record, EvaluationRecord):
            return
        self.evaluated.append(record.loss)
        if record.restart:
            self.restarts.append(record.step)
        elif record.loss == min(self.evaluated):
            self.best = self.full()

    def distance(self) -> float:
        pairs = zip(self.own(), self.start, strict=True)
        squares = torch.stack([(a - b).double().square().sum() for a, b in pairs]).sum()
        if self.scheduler.replicas.shard_group is not None:
            dist.all_reduce(squares, group=self.scheduler.replicas.shard_group)
        return math.sqrt(float(squares))

    def losses(self) -> Any:
        held_out = 0.5 + math.log((self.distance() + 1e-3) / 0.3) ** 2
        return (held_out + 0.01 * i for i in range(8))

    def learn(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, x).backward()
        self.optimizer.step()

    def train(self) -> None:
        self.learn(batch(self.step, self.rank))
        self.scheduler.step(1.0 / (0.1 + self.distance()))
        self.step += 1

    def until_restart(self) -> tuple[list[int], list[Tensor], list[Tensor]]:
        """The steps of restarts, weights and moments after the first of them, and three steps
        later."""
        while not self.restarts:
            assert self.step < self.STEPS
            self.train()
        back = self.full()
        for _ in range(3):
            self.train()
        return self.restarts, back, self.full()


def _restarted(rank: int, size: int, shards: int, path: str) -> Any:
    """Saved when the held-out loss has risen for the first time, and gone on with."""
    run = Watched(rank, shards)
    while not run.best or run.evaluated[-1] == min(run.evaluated):
        run.train()
    for _ in range(3):
        run.train()
    run.hdet.save(path)
    step, restarts, back, end = run.step, *run.until_restart()
    return step, restarts, back, end, same(back, run.best)


def _restarted_after_load(rank: int, size: int, shards: int, path: str, step: int) -> Any:
    run = Watched(rank, shards)
    run.hdet.load(path)
    run.step = step
    assert run.scheduler.watching
    return run.until_restart()


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (2, 1), (2, 4), (1, 2)])
def test_a_watch_goes_on_and_restarts_in_another_layout(
    fleets: Any, tmp_path: Path, saved: int, loaded: int
) -> None:
    """Four ranks; `saved` and `loaded` are the shards of a replica. The snapshot of whole replicas
    is cut into shards, that of shards put together."""
    path = str(tmp_path / "checkpoint")
    wanted = fleets(4).run(_restarted, saved, path)
    step, restarts, back, end, is_best = wanted[0]
    assert is_best
    for again in fleets(4).run(_restarted_after_load, loaded, path, step):
        assert again[0] == restarts
        assert same(again[1], back)
        if saved == loaded:
            assert same(again[2], end)
        for a, b in zip(again[2], end, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
