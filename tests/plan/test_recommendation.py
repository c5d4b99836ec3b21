"""What is recommended: layouts that fit, and the simplest way below the target."""

from __future__ import annotations

import pytest

from hdet_scale.config import HDETConfig
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.plan import shapes
from hdet_scale.plan.estimates import estimate
from hdet_scale.plan.links import PRESETS
from hdet_scale.plan.recommendation import TARGET, recommend
from hdet_scale.plan.workload import Workload


@pytest.mark.parametrize(
    ("asked", "gpus", "layout"),
    [
        ("1B", 8, (8, 1)),
        ("7B", 8, (2, 4)),
        ("7B", 64, (16, 4)),
        ("7B", 512, (128, 4)),
        ("70B", 64, (2, 32)),
        ("70B", 512, (16, 32)),
    ],
)
def test_layouts_on_80_gb(asked: str, gpus: int, layout: tuple[int, int]) -> None:
    chosen, reasons = recommend(Workload(model=shapes.of(asked), gpus=gpus), HDETConfig())
    assert (chosen.replicas, chosen.config.shards) == layout
    assert chosen.fits
    assert chosen.overhead <= TARGET
    assert "the fewest GPUs" in reasons[0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"70B does not fit 8 GPUs .* take more GPUs"):
        recommend(Workload(model=shapes.of("70B"), gpus=8), HDETConfig())


def test_a_fast_network_needs_nothing_special() -> None:
    chosen, _ = recommend(Workload(model=shapes.of("70B"), gpus=1024), HDETConfig())
    assert chosen.config.converge == ConvergePolicy()
    assert chosen.config.interval == 1000


def test_a_slow_network_overlaps_in_fragments() -> None:
    work = Workload(model=shapes.of("1B"), gpus=64, cluster=PRESETS["25gbe"])
    chosen, reasons = recommend(work, HDETConfig())
    policy = chosen.config.converge
    assert (policy.overlap, policy.wire) == (True, "fp32")
    assert policy.fragments > 1
    assert chosen.overhead <= TARGET < estimate(work, HDETConfig(shards=1)).overhead
    assert any("blocking fp32" in line for line in reasons)


@pytest.mark.slow
def test_a_network_that_is_too_slow_for_fp32_gets_fewer_bytes_or_a_longer_round() -> None:
    work = Workload(model=shapes.of("7B"), gpus=16, cluster=PRESETS["region"], tokens=256)
    chosen, reasons = recommend(work, HDETConfig(interval=100, gradients="local"))
    assert chosen.config.interval > 100 or chosen.config.converge.wire != "fp32"
    shared, said = recommend(work, HDETConfig())
    assert shared.gradient_seconds > shared.step_seconds
    assert any("local gradients" in line for line in said)
    assert not any("local gradients" in line for line in reasons)


def test_a_choice_that_misses_the_target_says_so() -> None:
    work = Workload(model=shapes.of("1B"), gpus=4096, step_seconds=1e-4, cluster=PRESETS["region"])
    chosen, reasons = recommend(work, HDETConfig())
    assert chosen.overhead > TARGET
    assert any("above the target" in line for line in reasons)
