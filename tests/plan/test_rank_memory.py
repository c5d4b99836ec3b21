"""The memory of a rank, by kind."""

from __future__ import annotations

import dataclasses

import pytest

from hdet_scale.config import HDETConfig
from hdet_scale.converge.outer import OuterStep
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.plan import shapes
from hdet_scale.plan.estimates import estimate
from hdet_scale.plan.workload import Workload


def test_memory_by_kind() -> None:
    work = Workload(model=shapes.of("7B"), gpus=8)
    p = work.model.parameters
    fp32 = estimate(work, HDETConfig(shards=1)).memory
    assert (fp32.parameters, fp32.gradients, fp32.optimizer) == (4 * p, 4 * p, 8 * p)
    assert fp32.gathered == 0
    bf16 = estimate(dataclasses.replace(work, dtype="bf16"), HDETConfig(shards=4)).memory
    assert bf16.parameters == pytest.approx(2 * p / 4, rel=1e-3)
    assert bf16.optimizer == pytest.approx(12 * p / 4, rel=1e-3)
    assert bf16.gathered == 2 * 2 * work.model.largest_unit
    sgd = estimate(dataclasses.replace(work, optimizer="sgd"), HDETConfig(shards=1)).memory
    assert sgd.optimizer == 4 * p
    assert sgd.total < fp32.total


def test_an_outer_step_keeps_point_and_momentum_of_parameters_alone() -> None:
    """Moments take the plain mean: they are averaged with local gradients, and nothing is kept."""
    work = Workload(model=shapes.of("1B"), gpus=8)
    plain = HDETConfig(shards=1, gradients="local")
    outer = HDETConfig(shards=1, gradients="local", converge=ConvergePolicy(outer=OuterStep()))
    more = estimate(work, outer).memory.converge - estimate(work, plain).memory.converge
    assert more == 8 * work.model.parameters
