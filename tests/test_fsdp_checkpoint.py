"""DCP checkpoints of sharded replicas: the same bits in the same layout, any other layout too."""

from __future__ import annotations

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

from hdet_scale import ConvergePolicy, fsdp
from hdet_scale.converge.outer import OuterStep
from tests.support.sharded import Sharded, build_model

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


def _apart(rank: int, size: int, path: str) -> tuple[bool, bool]:
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
    assert fleets(4).run(_apart, str(tmp_path)) == [(False, True)] * 4
