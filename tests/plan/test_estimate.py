"""`hdet plan`: bytes and memory against a real converge, the recommendation, the command."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from typing import Any

import pytest
import torch

from hdet_scale import cli
from hdet_scale.config import ConvergePolicy, HDETConfig
from hdet_scale.converge.pipeline import Converge, OuterStep, with_own_group
from hdet_scale.plan import estimate as plan
from hdet_scale.plan import shapes
from hdet_scale.plan.estimate import Job, estimate, recommend
from hdet_scale.plan.links import PRESETS
from hdet_scale.plan.shapes import Shapes
from hdet_scale.topology import Replicas
from tests.support.fleet import Fleet

AWKWARD = Shapes("awkward", ((700, 500), (3,), (1, 9), (300_001,), (40, 50), (6,)), 350_000)


def real_converge(rank: int, size: int, policy: ConvergePolicy) -> tuple[int, int, int]:
    """(bytes on the wire, bytes kept, collectives) of two converges on real tensors."""
    torch.manual_seed(rank)
    tensors = [torch.randn(s) for s in AWKWARD.tensors]
    converge = Converge(
        tensors,
        with_own_group(Replicas.world()),
        policy.bucket_bytes,
        wire=policy.wire,
        fragments=policy.fragments,
        outer=policy.outer,
        background=policy.overlap,
    )
    everyone, sent = [True] * size, 0
    for _ in range(2):
        sent = 0
        for fragment in range(policy.fragments):
            part = fragment if policy.fragments > 1 else None
            if policy.overlap:
                sent += converge.start(everyone, part).finish().wire_bytes
            else:
                sent += converge.average(everyone, part).wire_bytes
    state = converge.state_dict()
    remembered = sum(t.nbytes for kind in state.values() for t in kind.values())
    return sent, converge.staging_bytes + remembered, len(converge.plan.buckets)


@pytest.mark.parametrize(
    "policy",
    [
        ConvergePolicy(),
        ConvergePolicy(bucket_bytes=2**16),
        ConvergePolicy(wire="bf16", bucket_bytes=2**18),
        ConvergePolicy(wire="int8", bucket_bytes=2**18),
        ConvergePolicy(overlap=True, bucket_bytes=2**18),
        ConvergePolicy(overlap=True, bucket_bytes=2**18, wire="int8", fragments=3),
        ConvergePolicy(outer=OuterStep(), bucket_bytes=2**18),
    ],
    ids=["fp32", "small buckets", "bf16", "int8", "overlap", "int8 in fragments", "outer"],
)
def test_bytes_and_memory_are_those_of_a_real_converge(pair: Fleet, policy: ConvergePolicy) -> None:
    config = HDETConfig(shards=1, converge=policy)
    found = estimate(Job(model=AWKWARD, gpus=2), config)
    for sent, kept, collectives in pair.run(real_converge, policy):
        assert found.converge_bytes == sent
        assert found.buckets == collectives
        # A shelf keeps a buffer that was too small for the next bucket.
        assert kept <= found.memory.converge * 1.05
        assert found.memory.converge <= kept * 1.05


def test_memory_by_kind() -> None:
    job = Job(model=shapes.of("7B"), gpus=8)
    p = job.model.parameters
    fp32 = estimate(job, HDETConfig(shards=1)).memory
    assert (fp32.parameters, fp32.gradients, fp32.optimizer) == (4 * p, 4 * p, 8 * p)
    assert fp32.gathered == 0
    bf16 = estimate(dataclasses.replace(job, dtype="bf16"), HDETConfig(shards=4)).memory
    assert bf16.parameters == pytest.approx(2 * p / 4, rel=1e-3)
    assert bf16.optimizer == pytest.approx(12 * p / 4, rel=1e-3)
    assert bf16.gathered == 2 * 2 * job.model.largest_unit
    sgd = estimate(dataclasses.replace(job, optimizer="sgd"), HDETConfig(shards=1)).memory
    assert sgd.optimizer == 4 * p
    assert sgd.total < fp32.total


def test_local_gradients_send_a_converge_and_no_gradients() -> None:
    job = Job(model=shapes.of("1B"), gpus=16)
    shared = estimate(job, HDETConfig(shards=1))
    local = estimate(job, HDETConfig(shards=1, gradients="local"))
    assert local.gradient_bytes == 0
    assert shared.gradient_bytes == pytest.approx(4 * job.model.parameters * 2 * 15 / 16)
    # Parameters and both moments, once in a thousand steps.
    assert local.bytes_a_step == pytest.approx(3 * shared.gradient_bytes / 1000, rel=1e-3)


def test_transfers_take_the_cheaper_way() -> None:
    wide = estimate(Job(model=shapes.of("1B"), gpus=16_384), HDETConfig(shards=1))
    assert wide.transfer_seconds == wide.tree_seconds < wide.ring_seconds
    pair = estimate(Job(model=shapes.of("1B"), gpus=2), HDETConfig(shards=1))
    assert pair.transfer_seconds == pair.ring_seconds < pair.tree_seconds


def test_overhead_falls_with_t_and_overlap_hides_the_transfers() -> None:
    job = Job(model=shapes.of("1B"), gpus=64, cluster=PRESETS["25gbe"])
    blocking = estimate(job, HDETConfig(shards=1))
    rarer = estimate(job, HDETConfig(shards=1, interval=2000))
    assert rarer.overhead == pytest.approx(blocking.overhead / 2)
    policy = ConvergePolicy(overlap=True, overlap_steps=100)
    hidden = estimate(job, HDETConfig(shards=1, converge=policy))
    assert hidden.added_seconds < 0.01 * blocking.added_seconds
    short = ConvergePolicy(overlap=True, overlap_steps=1)
    partly = estimate(job, HDETConfig(shards=1, converge=short))
    assert hidden.added_seconds < partly.added_seconds < blocking.added_seconds
    gap = partly.added_seconds - hidden.added_seconds
    assert gap == pytest.approx(partly.transfer_seconds - job.seconds_a_step, rel=1e-6)


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
    chosen, reasons = recommend(Job(model=shapes.of(asked), gpus=gpus), HDETConfig())
    assert (chosen.replicas, chosen.config.shards) == layout
    assert chosen.fits
    assert chosen.overhead <= plan.TARGET
    assert "the fewest GPUs" in reasons[0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"70B does not fit 8 GPUs .* take more GPUs"):
        recommend(Job(model=shapes.of("70B"), gpus=8), HDETConfig())


def test_a_fast_network_needs_nothing_special() -> None:
    chosen, _ = recommend(Job(model=shapes.of("70B"), gpus=1024), HDETConfig())
    assert chosen.config.converge == ConvergePolicy()
    assert chosen.config.interval == 1000


def test_a_slow_network_overlaps_in_fragments() -> None:
    job = Job(model=shapes.of("1B"), gpus=64, cluster=PRESETS["25gbe"])
    chosen, reasons = recommend(job, HDETConfig())
    policy = chosen.config.converge
    assert (policy.overlap, policy.wire) == (True, "fp32")
    assert policy.fragments > 1
    assert chosen.overhead <= plan.TARGET < estimate(job, HDETConfig(shards=1)).overhead
    assert any("blocking fp32" in line for line in reasons)


def test_a_network_that_is_too_slow_for_fp32_gets_fewer_bytes_or_a_longer_round() -> None:
    job = Job(model=shapes.of("7B"), gpus=16, cluster=PRESETS["region"], tokens=256)
    chosen, reasons = recommend(job, HDETConfig(interval=100, gradients="local"))
    assert chosen.config.interval > 100 or chosen.config.converge.wire != "fp32"
    shared, said = recommend(job, HDETConfig())
    assert shared.gradient_seconds > shared.step_seconds
    assert any("local gradients" in line for line in said)
    assert not any("local gradients" in line for line in reasons)


def test_a_choice_that_misses_the_target_says_so() -> None:
    job = Job(model=shapes.of("1B"), gpus=4096, step_seconds=1e-4, cluster=PRESETS["region"])
    chosen, reasons = recommend(job, HDETConfig())
    assert chosen.overhead > plan.TARGET
    assert any("above the target" in line for line in reasons)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpus": 1}, "at least 2, got 1"),
        ({"dtype": "fp8"}, "one of .*, got 'fp8'"),
        ({"optimizer": "adam"}, "one of .*, got 'adam'"),
        ({"tokens": 0}, "at least 1, got 0"),
        ({"step_seconds": 0.0}, "above 0, got 0.0"),
    ],
)
def test_a_job_refuses(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Job(**({"model": AWKWARD, "gpus": 8} | values))


def test_shards_must_leave_two_replicas() -> None:
    job = Job(model=AWKWARD, gpus=8)
    with pytest.raises(ValueError, match="give at most 4 shards"):
        estimate(job, HDETConfig(shards=8))
    with pytest.raises(ValueError, match="does not divide the world of 8"):
        estimate(job, HDETConfig(shards=3))


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "7B", "--gpus", "64", "--shards", "8", "--interval", "500", "--wire", "bf16"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["asked"]["config"]["converge"]["wire"] == "bf16"
    assert found["asked"]["replicas"] == found["recommended"]["replicas"] == 8
    assert found["hdet"] == {"shards": 8, "interval": 500}
    assert HDETConfig.from_dict(found["hdet"]).shards == 8
    assert found["asked"]["overhead"] > 0


def test_the_command_answers_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "70B", "--gpus", "8"]) == 2
    assert "does not fit 8 GPUs" in capsys.readouterr().err
    assert cli.main(["plan", "7B", "--gpus", "8", "--gpus-per-node", "0"]) == 2
    assert "gpus_per_node must be above 0, got 0" in capsys.readouterr().err


def test_own_links_change_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def transfer(*words: str) -> float:
        assert cli.main(["plan", "70B", "--gpus", "1024", "--json", *words]) == 0
        return float(json.loads(capsys.readouterr().out)["asked"]["transfer_seconds"])

    slow, fast = transfer("--gbit", "10"), transfer("--gbit", "1000", "--latency-us", "1")
    assert slow > 30 * fast


def test_seventy_billion_on_a_thousand_gpus_in_five_seconds() -> None:
    """Processor seconds of the whole command, start of Python and imports included: a busy
    machine changes them little."""
    command = [sys.executable, "-m", "hdet_scale.cli", "plan", "70B", "--gpus", "1024"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "32 x 32" in done.stdout
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert 0.1 < spent < 5.0
