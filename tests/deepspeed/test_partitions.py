"""Where each kind of DeepSpeed optimizer keeps what is averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdet_scale import Replicas
from hdet_scale.deepspeed.partitions import engine_of
from hdet_scale.engines.gradient_mean import GradientMean
from tests.support.fleet import Fleet
from tests.support.zero_runs import Run, T, on, prepare, said, settings


def _accumulated_wide(rank: int, size: int) -> Any:
    """Stage 1 in bf16 with fp32 gradient accumulation, which DeepSpeed does in another class."""
    prepare(rank, size)
    config = settings(1, "bf16")
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    run = Run(config)
    run.train(0, T - 1)
    middle = run.output()
    run.train(T - 1, T)
    return type(run.optimizer).__name__, middle, run.output()


def test_stage_1_with_fp32_accumulation(four: Fleet) -> None:
    found = on(four, _accumulated_wide)
    assert {kind for kind, *_ in found} == {"BF16_Optimizer"}
    assert len({middle for _, middle, _ in found}) == 2
    assert len({end for _, _, end in found}) == 1


def _flat(rank: int, size: int, dtype: str) -> Any:
    """Stage 0 with a fused optimizer, whose masters DeepSpeed lays flat. torch's AdamW stands in
    for FusedAdam, which would have to be compiled."""
    prepare(rank, size)
    from deepspeed.runtime import engine

    kept, engine.FusedAdam = engine.FusedAdam, torch.optim.AdamW
    try:
        run = Run(settings(0, dtype))
    finally:
        engine.FusedAdam = kept
    run.train(0, T - 1, bad={2: 1})
    middle = run.output(), [m.clone() for m in run.engine.partitions.moments()]
    run.train(T - 1, T)
    return type(run.optimizer).__name__, middle, run.output(), run.engine.skipped_steps


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stage_0_with_a_fused_optimizer(four: Fleet, dtype: str) -> None:
    found = on(four, _flat, dtype)
    assert {kind for kind, *_ in found} == {"FP16_Optimizer"}
    assert len({output for _, (output, _), *_ in found}) == 2
    for _, (_, moments), end, skipped in found:
        assert all(torch.equal(a, b) for a, b in zip(moments, found[0][1][1], strict=True))
        assert end == found[0][2]
        assert skipped == 1, "a norm that is not finite, on all replicas alike"


def _offloaded(rank: int, size: int, stage: int, torch_adam: bool) -> Any:
    """CPU offload against the same run without it."""
    prepare(rank, size)
    config = settings(stage)
    config["optimizer"]["params"]["torch_adam"] = torch_adam
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    run = Run(config)
    run.train(0, T)
    found = run.output(), type(run.engine.basic_optimizer).__name__
    other = Run(settings(stage))
    other.train(0, T)
    pairs = zip(run.parameters(), other.parameters(), strict=True)
    return *found, max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_offload_equals_the_run_without(four: Fleet, stage: int) -> None:
    found = on(four, _offloaded, stage, True)
    assert len({output for output, *_ in found}) == 1
    assert {kind for _, kind, _ in found} == {"AdamW"}
    assert max(distance for *_, distance in found) <= 1e-5


def _padded(rank: int, size: int, stage: int) -> tuple[float, tuple[int, ...], bool]:
    """NaN in every element that pads a partition, as uninitialised memory may hold it."""
    prepare(rank, size)
    run = Run(settings(stage, gradients="local"))
    z, shard = run.optimizer, run.engine.replicas.shard_rank
    poisoned = 0
    for params, flat in zip(z.fp16_groups, z.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for p in params:
            length = p.partition_numel()
            pad = length - min(max(p.ds_numel - shard * length, 0), length)
            with torch.no_grad():
                flat[start + length - pad : start + length] = float("nan")
            poisoned += pad
            start += length
    run.train(0, T)
    return run.output(), run.counters(), poisoned > 0


def test_what_pads_a_partition_does_not_count(four: Fleet) -> None:
    """Uninitialised padding of stage 3 once made all replicas look bad, now and then."""
    found = on(four, _padded, 3)
    assert [poisoned for *_, poisoned in found] == [False, True, False, True]
    assert {counters for _, counters, _ in found} == {(6, 1, 0, 6)}
    assert len({output for output, *_ in found}) == 1


def _other_version(rank: int, size: int) -> str:
    """A DeepSpeed that lacks what is relied on."""
    prepare(rank, size)
    from hdet_scale.deepspeed.partitions import Stages12

    kept = Stages12.needs
    Stages12.needs = (*kept, "a_name_of_tomorrow")
    try:
        return said(lambda: Run(settings(2)))
    finally:
        Stages12.needs = kept


def test_a_deepspeed_that_lacks_an_attribute_is_named(four: Fleet) -> None:
    for answer in on(four, _other_version):
        assert "has no a_name_of_tomorrow on DeepSpeedZeroOptimizer" in answer
        assert "pip install 'deepspeed>=0.19.8,<0.20'" in answer


def _unused(rank: int, size: int) -> list[Tensor]:
    """A parameter that the loss of one replica did not reach."""
    model = nn.ParameterList([torch.ones(2), torch.ones(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (model[0].sum() + (model[1].sum() if rank == 0 else 0)).backward()
    GradientMean(8)(engine_of(optimizer).gradients(), Replicas.world())
    dist.barrier()
    return [p.grad.clone() for p in model if p.grad is not None]


def test_a_gradient_that_one_replica_lacks_counts_as_0(pair: Any) -> None:
    for used, sometimes in pair.run(_unused):
        assert used.tolist() == [1.0, 1.0]
        assert sometimes.tolist() == [0.5, 0.5]


def test_an_unknown_optimizer_of_deepspeed_is_refused() -> None:
    class Strange:
        pass

    with pytest.raises(ValueError, match="made a Strange of the optimizer"):
        engine_of(Strange())
