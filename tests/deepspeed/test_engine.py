"""The method on ZeRO stages 0 to 3, with four real processes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet_scale import ConvergePolicy, OneCycleAutoLR, Replicas
from tests.support.fleet import Fleet
from tests.support.zero_runs import (
    MAX_LR,
    MICRO,
    PARTS,
    STAGES,
    STEPS,
    Run,
    T,
    batch,
    loss_of,
    network,
    on,
    prepare,
    said,
    settings,
)


def _reference(rank: int, shards: int, gradients: str) -> tuple[list[Tensor], list[float]]:
    """The same run with DDP and OneCycleAutoLR: shards are ranks of a replica that stay equal."""
    replicas = Replicas.of(shard_size=shards)
    model: nn.Module = network()
    group = None if gradients == "shared" else replicas.shard_group
    if gradients == "shared" or shards > 1:
        model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=MAX_LR, eps=1e-3)
    scheduler = OneCycleAutoLR(
        optimizer,
        MAX_LR,
        total_steps=STEPS + 1,
        ensemble_lr_spread_ratio=0.5,
        model_sync_interval=T,
        auto_lr_warmup_steps=1,
        enable_auto_lr=True,
        gradients="shared",  # the group above says which; DDP's own all-reduce does it
        replicas=replicas,
        converge=ConvergePolicy(moments=None if gradients == "shared" else True),
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for part in range(PARTS):
            loss = loss_of(model, batch(step, part, rank), torch.float32)
            (loss / PARTS).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step(torch.stack(losses).mean())
    return [p.detach().clone() for p in model.parameters()], scheduler.get_base_lr()


def _a_round(rank: int, size: int, stage: int, dtype: str, shards: int, gradients: str) -> Any:
    """Output and moments in the middle of a round, outputs after converges, the distance from
    the reference."""
    prepare(rank, size)
    run = Run(settings(stage, dtype, shards, gradients=gradients))
    run.train(0, T - 1)
    middle = run.output(), [m.clone() for m in run.engine.partitions.moments()]
    run.train(T - 1, T)
    outputs = [run.output()]
    distance, rates = 0.0, (0.0, 0.0)
    if dtype == "fp32":
        run.train(T, STEPS)
        outputs.append(run.output())
        wanted, base = _reference(rank, shards, gradients)
        pairs = zip(run.parameters(), wanted, strict=True)
        distance = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        rates = (run.scheduler.get_base_lr()[0], base[0])
    return middle, outputs, distance, rates, run.engine.train_batch_size()


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shards", [2, 1], ids=["2x2", "4x1"])
@pytest.mark.parametrize("stage", STAGES)
def test_replicas_diverge_and_converge_and_equal_ddp(
    four: Fleet, stage: int, shards: int, dtype: str, gradients: str
) -> None:
    found = on(four, _a_round, stage, dtype, shards, gradients)
    middles = [output for (output, _), *_ in found]
    moments = [moments for (_, moments), *_ in found]
    replicas = 4 // shards
    assert len(set(middles)) == replicas, "replicas diverge within a round, shards do not"
    assert len(set(middles[:shards])) == 1
    for rank in range(shards, 4):
        pairs = zip(moments[rank], moments[rank % shards], strict=True)
        equal = all(torch.equal(a, b) for a, b in pairs)
        assert equal is (gradients == "shared"), "one gradient for all replicas, or each its own"
    for _, outputs, distance, (base, wanted), whole in found:
        assert outputs == found[0][1], "the forward is the same on all ranks after a converge"
        assert distance <= 1e-5, "30 steps equal DDP + HDET"
        assert base == pytest.approx(wanted, rel=1e-5)
        assert whole == MICRO * PARTS * 4


def _plain(rank: int, size: int, stage: int) -> float:
    """Spread 0 with shared gradients against plain DeepSpeed over the whole world."""
    prepare(rank, size)
    config = settings(stage, spread=0.0)
    run = Run(config)
    run.train(0, 8)
    mine = run.parameters()
    import deepspeed
    from deepspeed.utils import groups

    groups.mpu = None
    own = {k: v for k, v in config.items() if k not in ("hdet", "scheduler")}
    model = network()
    params = config["scheduler"]["params"]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=own,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, **params),
    )
    for step in range(8):
        for part in range(PARTS):
            loss = loss_of(engine, batch(step, part, rank), torch.float32)
            engine.backward(loss)
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        pairs = zip(mine, model.parameters(), strict=True)
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("stage", STAGES)
def test_spread_0_with_shared_gradients_is_plain_deepspeed(four: Fleet, stage: int) -> None:
    assert max(on(four, _plain, stage)) <= 1e-6


def _frozen(rank: int, size: int, stage: int) -> tuple[float, list[Tensor]]:
    """A frozen parameter that started different on every rank, and a buffer."""
    prepare(rank, size)
    model = network(seed=rank, frozen=True)
    model.register_buffer("mean", torch.full((3,), float(rank)))
    run = Run(settings(stage), model=model)
    run.train(0, T)
    return run.output(), [*run.parameters(), model.mean]


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_and_buffers_begin_as_replica_0_has_them(four: Fleet, stage: int) -> None:
    found = on(four, _frozen, stage)
    assert len({output for output, _ in found}) == 1
    for rank, (_, tensors) in enumerate(found):
        *parameters, buffer = tensors
        assert all(torch.equal(a, b) for a, b in zip(parameters, found[0][1][:-1], strict=True))
        # Within a replica DeepSpeed leaves buffers alone: a shard's is that of replica 0's shard.
        assert buffer.tolist() == [float(rank % 2)] * 3


def _overflow(rank: int, size: int, stage: int, gradients: str, offload: bool) -> Any:
    """Replica 1 overflows at step 2 and replica 0 at step 7."""
    prepare(rank, size)
    config = settings(stage, "fp16", gradients=gradients)
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    run = Run(config)
    run.train(0, 2 * T, bad={2: 1, 7: 0})
    engine = run.engine
    finite = all(bool(p.isfinite().all()) for p in run.parameters())
    return run.counters(), engine.skipped_steps, engine.optimizer.loss_scale, run.output(), finite


OVERFLOWS = [(stage, mode, False) for stage in STAGES for mode in ("shared", "local")]
OVERFLOWS += [(stage, mode, True) for stage in (1, 2, 3) for mode in ("shared", "local")]


@pytest.mark.parametrize(("stage", "gradients", "offload"), OVERFLOWS)
def test_an_overflow_on_one_replica_leaves_counters_equal(
    four: Fleet, stage: int, gradients: str, offload: bool
) -> None:
    found = on(four, _overflow, stage, gradients, offload)
    for counters, skipped, scale, output, finite in found:
        assert counters == (12, 2, 0, 12)
        assert skipped == (2 if gradients == "shared" else 1)
        assert scale == found[0][2]
        assert output == found[0][3]
        assert finite


def _losses(rank: int, size: int) -> dict[str, Any]:
    """Which losses the scheduler is given, and what becomes of an error inside its step."""
    prepare(rank, size)
    run = Run(settings(1))
    given: list[float | None] = []
    step = run.scheduler.step
    run.scheduler.step = lambda loss=None: (
        given.append(None if loss is None else float(loss)),
        step(loss),
    )
    run.train(0, 1)
    wanted = []
    with torch.no_grad():
        fresh = network().float()
        wanted = [
            float(loss_of(fresh, batch(0, part, rank), torch.float32)) for part in range(PARTS)
        ]
    for part in range(PARTS):
        run.engine.backward(loss_of(run.engine, batch(1, part, rank), torch.float32))
        run.engine.step(lr_kwargs={"loss": 1.25})
    calls = []

    def failing(loss: Any = None) -> None:
        calls.append(loss)
        raise TypeError("inside the step")

    run.scheduler.step = failing
    failed = said(lambda: run.train(2, 3))
    run.scheduler.step = step
    return {
        "given": given,
        "wanted": sum(wanted) / PARTS,
        "failed": failed,
        "calls": len(calls),
        "integer": said(lambda: run.scheduler.step(16)),
    }


def test_the_loss_is_taken_at_backward_or_given(four: Fleet) -> None:
    for found in on(four, _losses):
        assert found["given"] == [pytest.approx(found["wanted"], rel=1e-5), 1.25]


def test_a_type_error_inside_the_step_is_not_answered_with_a_second_step(four: Fleet) -> None:
    for found in on(four, _losses):
        assert found["failed"] == "TypeError: inside the step"
        assert found["calls"] == 1
        assert "must be a float" in found["integer"]


def _batches(rank: int, size: int) -> dict[str, Any]:
    """Batch arithmetic, the loader's samples, and the layouts of "auto"."""
    prepare(rank, size)
    from hdet_scale.deepspeed import initialize
    from hdet_scale.deepspeed.settings import Settings

    config = settings(2)
    data = torch.utils.data.TensorDataset(torch.arange(32).float())
    model = network()
    engine, _, loader, _ = initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=data
    )
    seen = sorted(int(v) for v in loader.data_sampler)

    def numbers() -> tuple[int, int, int]:
        return (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )

    start = numbers()
    engine.set_train_batch_size(MICRO * 4 * 3)
    changed = numbers()
    engine.set_train_micro_batch_size(2)
    small = numbers()
    refused = said(lambda: engine.set_train_batch_size(9))
    auto = {
        (stage, world): Settings.read(settings(stage, shards="auto")).shards(world)
        for stage, world in ((0, 4), (2, 4), (3, 9), (2, 1))
    }
    found = {"start": start, "changed": changed, "small": small}
    return {**found, "seen": seen, "auto": auto, "refused": refused}


def test_batches_come_out_as_written(four: Fleet) -> None:
    found = on(four, _batches)
    for each in found:
        assert each["start"] == (32, 4, 2)
        assert each["changed"] == (48, 4, 3)
        assert each["small"] == (24, 2, 3)
        assert "give a multiple of 8" in each["refused"]
        assert each["auto"] == {(0, 4): 1, (2, 4): 2, (3, 9): 3, (2, 1): 1}
    assert sorted(x for each in found for x in each["seen"]) == list(range(32))


def _alone(rank: int, size: int) -> tuple[float, int, bool]:
    """One rank: one replica, for trying a script out."""
    prepare(rank, size)
    run = Run(settings(2, shards=1))
    before = run.output()
    run.train(0, T)
    return abs(run.output() - before), run.engine.train_batch_size(), run.scheduler.at_boundary


def test_one_rank_is_one_replica(compiled: None) -> None:
    fleet = Fleet(1)
    try:
        [(moved, whole, at_boundary)] = on(fleet, _alone)
    finally:
        fleet.stop()
    assert moved > 0
    assert whole == 32
    assert at_boundary


def _monitored(rank: int, size: int, home: str) -> None:
    """A run with the csv monitor."""
    prepare(rank, size)
    config = settings(1)
    config["csv_monitor"] = {"enabled": True, "output_path": home, "job_name": "job"}
    run = Run(config)
    run.train(0, T)


def test_the_monitor_gets_what_a_round_did(four: Fleet, tmp_path: Path) -> None:
    on(four, _monitored, str(tmp_path))
    values = {}
    for path in (tmp_path / "job").glob("Train_HDET_*.csv"):
        rows = list(csv.reader(path.open()))
        values[path.stem.removeprefix("Train_HDET_")] = float(rows[-1][1])
    assert {"base_lr_group0", "velocity_lr_group0", "converge_seconds"} <= set(values)
    assert values["lr_group0_replica1"] / values["lr_group0_replica0"] == pytest.approx(3.0)
    assert values["loss_replica0"] != values["loss_replica1"]
    assert values["converge_bytes"] > 0
