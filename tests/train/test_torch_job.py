"""TorchJob: accumulation, bf16, a checkpoint in the middle of a round, and wrong recipes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet_scale.config import HDETConfig
from hdet_scale.models.gpt import GPT, GPTConfig
from hdet_scale.train.saving import CheckpointInfo, newest_checkpoint
from hdet_scale.train.torch_job import Recipe, TorchJob
from tests.support.fleet import Fleet


def job_losses(
    rank: int, size: int, engine: str, recipe: dict[str, Any]
) -> tuple[list[float], set[torch.dtype]]:
    """Four steps of a tiny GPT; the batches of a step are the same however they are cut."""
    shape = GPTConfig.named("tiny", context=16)
    job = TorchJob(
        engine, GPT(shape), Recipe(**recipe), HDETConfig(rule="paper", spread=0.2, interval=2)
    )
    drawn = torch.randint(256, (64, 17), generator=torch.Generator().manual_seed(rank))
    parts = job.recipe.accumulation

    def draw(count: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = index * count
        assert first + count <= 64
        window = drawn[first : first + count]
        return window[:, :-1], window[:, 1:]

    assert job.sequences == parts * job.recipe.batch
    losses = [float(job.train_step(draw)) for _ in range(4)]
    kinds = {p.dtype for p in job.model.parameters()}
    job.scheduler.detach()
    return losses, kinds


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_accumulation_and_bf16(pair: Fleet, engine: str) -> None:
    whole, kinds = pair.run(job_losses, engine, {"batch": 8})[0]
    parts, _ = pair.run(job_losses, engine, {"batch": 2, "accumulation": 4})[0]
    half, still = pair.run(job_losses, engine, {"batch": 8, "dtype": "bf16"})[0]
    assert parts == pytest.approx(whole, rel=1e-5)
    assert half == pytest.approx(whole, rel=2e-2)
    assert half != pytest.approx(whole, rel=1e-6)
    assert kinds == still == {torch.float32}


def continued(
    rank: int, size: int, engine: str, run: str, hdet: dict[str, Any]
) -> tuple[bool, int]:
    """Whether a job that loads a checkpoint of step 3, within a round of 2 steps, has the losses
    and the weights of the job that saved it; and the checkpoint's number of files."""
    drawn = torch.randint(256, (16, 17), generator=torch.Generator().manual_seed(rank))

    def draw(count: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = drawn[index * count : (index + 1) * count]
        return window[:, :-1], window[:, 1:]

    def build() -> TorchJob:
        model = GPT(GPTConfig.named("tiny", context=16))
        return TorchJob(
            engine, model, Recipe(batch=2), HDETConfig(rule="paper", spread=0.2, interval=2, **hdet)
        )

    def end(job: TorchJob) -> list[torch.Tensor]:
        losses = [job.train_step(draw) for _ in range(3)]
        job.scheduler.detach()
        parameters = [p.detach() for p in job.model.parameters()]
        return [*losses, *(p.to_local() if engine == "fsdp" else p for p in parameters)]

    first, second = build(), build()
    for _ in range(3):
        first.train_step(draw)
    first.save(Path(run))
    folder = newest_checkpoint(Path(run))
    assert folder is not None
    assert CheckpointInfo.read(folder).diverged
    second.resume(folder)
    assert second.step == 3
    same = all(torch.equal(a, b) for a, b in zip(end(first), end(second), strict=True))
    return same, len(list(folder.glob("rank-*.pt")))


@pytest.mark.parametrize(("engine", "ranks"), [("ddp", 2), ("fsdp", 4)])
def test_a_checkpoint_within_a_round_has_the_slices_of_each_rank(
    fleets: Any, tmp_path: Path, engine: str, ranks: int
) -> None:
    options = {"replicas": 2} if engine == "fsdp" else {}
    told = fleets(ranks).run(continued, engine, str(tmp_path), options)
    assert told == [(True, ranks)] * ranks


def test_a_batch_is_never_nothing() -> None:
    with pytest.raises(ValueError, match="accumulation must be an int of at least 1, got 0"):
        Recipe(accumulation=0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        Recipe(dtype="fp8")
    assert math.isclose(Recipe().schedule["max_lr"], 1e-3)
