"""DeepSpeed with replicas: ZeRO stages 0 to 3 on four real processes, and the real launcher."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet_scale.deepspeed.settings import Settings, merged
from tests.support import kills
from tests.support import zero_runs as runs
from tests.support.fleet import CaseHung, Fleet

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
    ),
]

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def compiled() -> Iterator[None]:
    """DeepSpeed compiles ops when they are first used: with this environment's ninja, and into
    the checkout, so that two environments never build over each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        patch.setenv("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / "torch_extensions"))
        yield


@pytest.fixture(scope="module")
def four(compiled: None) -> Iterator[Fleet]:
    """Four workers of this file's own: DeepSpeed stays out of the other tests' processes."""
    fleet = Fleet(4)
    fleet.run(runs.warm_up, seconds=800)
    yield fleet
    fleet.stop()


def run(fleet: Fleet, case: Any, *args: Any) -> list[Any]:
    return fleet.run(case, *args, seconds=250)


# -- the method ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shards", [2, 1], ids=["2x2", "4x1"])
@pytest.mark.parametrize("stage", STAGES)
def test_replicas_part_and_agree_and_equal_ddp(
    four: Fleet, stage: int, shards: int, dtype: str, gradients: str
) -> None:
    found = run(four, runs.a_round, stage, dtype, shards, gradients)
    middles = [output for (output, _), *_ in found]
    moments = [moments for (_, moments), *_ in found]
    replicas = 4 // shards
    assert len(set(middles)) == replicas, "replicas are apart within a round, shards are not"
    assert len(set(middles[:shards])) == 1
    for rank in range(shards, 4):
        pairs = zip(moments[rank], moments[rank % shards], strict=True)
        equal = all(torch.equal(a, b) for a, b in pairs)
        assert equal is (gradients == "shared"), "one gradient for all replicas, or each its own"
    for _, outputs, distance, (base, wanted), whole in found:
        assert outputs == found[0][1], "the forward agrees on all ranks after a converge"
        assert distance <= 1e-5, "30 steps equal DDP + HDET"
        assert base == pytest.approx(wanted, rel=1e-5)
        assert whole == runs.MICRO * runs.PARTS * 4


@pytest.mark.parametrize("stage", STAGES)
def test_spread_0_with_shared_gradients_is_plain_deepspeed(four: Fleet, stage: int) -> None:
    assert max(run(four, runs.plain, stage)) <= 1e-6


def test_stage_1_with_fp32_accumulation(four: Fleet) -> None:
    found = run(four, runs.accumulated_wide)
    assert {kind for kind, *_ in found} == {"BF16_Optimizer"}
    assert len({middle for _, middle, _ in found}) == 2
    assert len({end for _, _, end in found}) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stage_0_with_a_fused_optimizer(four: Fleet, dtype: str) -> None:
    found = run(four, runs.flat, dtype)
    assert {kind for kind, *_ in found} == {"FP16_Optimizer"}
    assert len({output for _, (output, _), *_ in found}) == 2
    for _, (_, moments), end, skipped in found:
        assert all(torch.equal(a, b) for a, b in zip(moments, found[0][1][1], strict=True))
        assert end == found[0][2]
        assert skipped == 1, "a norm that is not finite, on all replicas alike"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_offload_equals_the_run_without(four: Fleet, stage: int) -> None:
    found = run(four, runs.offloaded, stage, True)
    assert len({output for output, *_ in found}) == 1
    assert {kind for _, kind, _ in found} == {"AdamW"}
    assert max(distance for *_, distance in found) <= 1e-5


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_and_buffers_begin_as_replica_0_has_them(four: Fleet, stage: int) -> None:
    found = run(four, runs.frozen, stage)
    assert len({output for output, _ in found}) == 1
    for rank, (_, tensors) in enumerate(found):
        *parameters, buffer = tensors
        assert all(torch.equal(a, b) for a, b in zip(parameters, found[0][1][:-1], strict=True))
        # Within a replica DeepSpeed leaves buffers alone: a shard's is that of replica 0's shard.
        assert buffer.tolist() == [float(rank % 2)] * 3


@pytest.mark.parametrize(
    "policy",
    [
        {"wire": "int8"},
        {"overlap": True, "overlap_steps": 2},
        {"fragments": 3},
        {"outer": {"lr": 0.7, "momentum": 0.5}},
    ],
    ids=["int8", "overlap", "fragments", "outer"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_other_converges_resume_bit_for_bit(
    four: Fleet, stage: int, policy: dict[str, Any]
) -> None:
    found = run(four, runs.policies, stage, policy)
    assert [same for same, _ in found] == [True] * 4
    assert len({output for _, output in found}) == 1


def test_what_pads_a_partition_does_not_count(four: Fleet) -> None:
    """Uninitialised padding of stage 3 once made all replicas look bad, now and then."""
    found = run(four, runs.padded, 3)
    assert [poisoned for *_, poisoned in found] == [False, True, False, True]
    assert {counters for _, counters, _ in found} == {(6, 1, 0, 6)}
    assert len({output for output, *_ in found}) == 1


# -- overflow -----------------------------------------------------------------------------------


OVERFLOWS = [(stage, mode, False) for stage in STAGES for mode in ("shared", "local")]
OVERFLOWS += [(stage, mode, True) for stage in (1, 2, 3) for mode in ("shared", "local")]


@pytest.mark.parametrize(("stage", "gradients", "offload"), OVERFLOWS)
def test_an_overflow_on_one_replica_leaves_counters_equal(
    four: Fleet, stage: int, gradients: str, offload: bool
) -> None:
    found = run(four, runs.overflow, stage, gradients, offload)
    for counters, skipped, scale, output, finite in found:
        assert counters == (12, 2, 0, 12)
        assert skipped == (2 if gradients == "shared" else 1)
        assert scale == found[0][2]
        assert output == found[0][3]
        assert finite


# -- searches -----------------------------------------------------------------------------------


def test_after_a_race_the_run_is_plain_deepspeed(four: Fleet) -> None:
    """Every heat goes back to the bit, all ranks hear one verdict, and the run that follows is
    that of an engine without HDET at the learning rates found."""
    found = run(four, runs.raced, 3)
    for back, told, distance in found:
        assert back == [True] * 9, "eight heats, and the gathered model"
        assert told == found[0][1]
        assert distance <= 1e-6
    steps, scale, verdict, rates = found[0][1]
    assert steps == 36
    assert verdict.startswith("found")
    assert scale > 2
    assert rates[0] == pytest.approx(scale * runs.MAX_LR / 50 / 25)


@pytest.mark.parametrize("stage", [0, 2])
def test_many_replicas_run_a_level_as_one_data_parallel_team(four: Fleet, stage: int) -> None:
    out = run(four, runs.teams, stage)
    for early, wanted, _ in out:
        torch.testing.assert_close(early, wanted, rtol=1e-5, atol=1e-6)
    assert runs.same(out[0][0], out[1][0])
    assert runs.same(out[2][0], out[3][0])
    assert not runs.same(out[0][0], out[2][0])
    assert runs.same(*[end for *_, end in out]), "after the race gradients are those of all"


@pytest.mark.parametrize(("stage", "shards"), [(1, 1), (3, 2)])
def test_what_overfits_starts_again_and_a_checkpoint_keeps_the_mark(
    four: Fleet, tmp_path: Path, stage: int, shards: int
) -> None:
    """Once for all where a replica is one rank; otherwise each shard's slices."""
    for back, watched, equal, scales in run(four, runs.guarded, str(tmp_path), stage, shards):
        assert back
        assert watched
        assert equal
        assert scales[0] == scales[1]
    files = sorted(p.name for p in tmp_path.glob("global_step*/mark_*.pt"))
    assert files == ([] if shards == 1 else ["mark_00_of_02.pt", "mark_01_of_02.pt"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_race_in_fp16_goes_back_to_one_loss_scale(four: Fleet, stage: int) -> None:
    found = run(four, runs.raced_in_fp16, stage)
    for rank, (moved, back, scale, output, start) in enumerate(found):
        assert (moved < start["cur_scale"]) is (rank >= 2), "replica 1 overflowed"
        assert back == [True] * 8
        assert scale == start["cur_scale"]
        assert output == found[0][3]


@pytest.mark.parametrize(("stage", "shards", "at"), [(1, 1, 4), (2, 2, 4), (3, 2, 5)])
def test_a_climb_goes_back_and_a_checkpoint_keeps_the_way(
    four: Fleet, tmp_path: Path, stage: int, shards: int, at: int
) -> None:
    """Saved after a converge, by whole replicas once for all and by shards each its slices; and
    in the middle of a round."""
    for back, equal, (cuts, scale) in run(four, runs.climbed, str(tmp_path), stage, shards, at):
        assert back
        assert equal
        assert cuts == 1
        assert scale


@pytest.mark.parametrize("stage", [0, 2])
def test_after_a_search_one_checkpoint_is_right_for_all(
    four: Fleet, tmp_path: Path, stage: int
) -> None:
    """Replicas are equal again; each used to be given a place of its own."""
    for phase, equal, wider in run(four, runs.after_the_search, str(tmp_path), stage):
        assert phase == "hold"
        assert equal
        assert wider
    folder = tmp_path / "global_step7"
    assert json.loads((folder / "hdet.json").read_text())["apart"] is False
    assert not list(folder.glob("replica_*"))


# -- the loss -----------------------------------------------------------------------------------


def test_the_loss_is_taken_at_backward_or_given(four: Fleet) -> None:
    for found in run(four, runs.losses):
        assert found["heard"] == [pytest.approx(found["wanted"], rel=1e-5), 1.25]


def test_a_type_error_inside_the_step_is_not_answered_with_a_second_step(four: Fleet) -> None:
    for found in run(four, runs.losses):
        assert found["said"] == "TypeError: inside the step"
        assert found["calls"] == 1
        assert "must be a float" in found["integer"]


# -- schedules ----------------------------------------------------------------------------------


def test_schedules_by_every_name(four: Fleet) -> None:
    peak = runs.MAX_LR
    halves = [[peak * 0.5**t, peak / 4 * 0.5**t] for t in range(4)]
    for found in run(four, runs.schedules):
        kind, rates = found["auto warmup"]
        factors = [0.2, 0.6, 1.0, 0.75]
        assert kind == "HDETAutoLR"
        assert rates == [pytest.approx([peak * f, peak / 4 * f]) for f in factors]
        kind, rates = found["one cycle warmup"]
        assert kind == "HDETOneCycle"
        assert rates[0] == pytest.approx([0.004, 0.001])
        assert max(r[0] for r in rates) == pytest.approx(peak)
        for name in ("named inside", "torch's own", "a callable"):
            assert found[name][1] == [pytest.approx(r) for r in halves], name
        assert found["none"][1] == [pytest.approx([peak, peak / 4])] * 4


def test_keys_in_params_and_block_must_not_contradict() -> None:
    assert merged({"spread": 0.1}, {"interval": 5, "max_lr": 1.0}) == {"spread": 0.1, "interval": 5}
    assert merged({"spread": 0.1}, {"spread": 0.1}) == {"spread": 0.1}
    with pytest.raises(ValueError, match=r"spread is 0\.1 .* and 0\.2"):
        merged({"spread": 0.1}, {"spread": 0.2})


def test_a_config_may_have_comments_and_no_key_twice(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"hdet": {"spread": 0.25} /* wide */}')
    assert Settings.read(path).hdet.spread == 0.25
    path.write_text('{"hdet": {"spread": 0.25, "spread": 0.5}}')
    with pytest.raises(ValueError, match=r"\['spread'\] twice"):
        Settings.read(path)
    with pytest.raises(ValueError, match='no "hdet" block'):
        Settings.read({"train_batch_size": 8})


# -- batches ------------------------------------------------------------------------------------


def test_batches_come_out_as_written(four: Fleet) -> None:
    found = run(four, runs.batches)
    for each in found:
        assert each["start"] == (32, 4, 2)
        assert each["changed"] == (48, 4, 3)
        assert each["small"] == (24, 2, 3)
        assert "give a multiple of 8" in each["said"]
        assert each["auto"] == {(0, 4): 1, (2, 4): 2, (3, 9): 3, (2, 1): 1}
    assert sorted(x for each in found for x in each["seen"]) == list(range(32))


# -- refusals -----------------------------------------------------------------------------------

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"hdet": {"shards": 4}}, 'Write "replicas": 2'),
    ({"hdet": {"shards": 3}}, "is not the world of 4 ranks"),
    ({"hdet": {"replicas": 4, "shards": 2}}, "one of ['1 x 4', '2 x 2', '4 x 1']"),
    ({"hdet": {"spred": 0.1}}, "did you mean 'spread'"),
    ({"zero_optimization": {"mics_shard_size": 2}}, 'write "shards" in the "hdet" block'),
    ({"zero_optimization": {"zero_hpz_partition_size": 2}}, 'write "shards" in the "hdet" block'),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, 'use "device": "cpu"'),
    ({"scheduler": {"params": {"max_lr": 1.0, "spread": 0.1}}}, "write it once"),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, 'use "HDETAutoLR"'),
    ({"scheduler": {"type": "HDETAutoLR", "params": {"T_max": 3}}}, "unknown params ['T_max']"),
    ({"scheduler": {"params": {"max_rl": 1.0}}}, "unknown params ['max_rl'] of HDETOneCycle"),
    ({"train_batch_size": 30}, "change one of them"),
    ({"hybrid_engine": {"enabled": True}}, "train with the plain engine"),
]


def test_refusals_say_what_to_write(four: Fleet) -> None:
    changes = [{"gradient_accumulation_steps": 2, **change} for change, _ in REFUSALS]
    for said in run(four, runs.refused, changes):
        for (change, words), answer in zip(REFUSALS, said, strict=True):
            assert words in answer, (change, answer)


def test_models_that_are_refused(four: Fleet) -> None:
    found = run(four, runs.refused_models)
    for said in found:
        assert "PipelineModule" in said["pipeline"]
        assert "splits the model over 2 ranks" in said["unit"]
        assert "partitioned 0.weight over ranks [0, 1, 2, 3]" in said["zero.Init"]
        assert "start with hdet_scale.deepspeed.initialize" in said["plain initialize"]
        assert "needs model=" in said["no model"]
        assert "2 configs were given" in said["two configs"]
        assert 'name "HDETOneCycle"' in said["own exploring"]
        assert said["ours"] == found[0]["ours"]


def test_a_deepspeed_that_lacks_an_attribute_is_named(four: Fleet) -> None:
    for said in run(four, runs.other_version):
        assert "has no a_name_of_tomorrow on DeepSpeedZeroOptimizer" in said
        assert "pip install 'deepspeed>=0.19.8,<0.20'" in said


def test_a_missing_deepspeed_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('none')")
    code = "import hdet_scale.deepspeed"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "pip install hdet_scale[deepspeed]" in done.stderr


# -- checkpoints --------------------------------------------------------------------------------

ONE, AUTO = "HDETOneCycle", "HDETAutoLR"
JOBS = [
    *((stage, "fp32", "shared", ONE, at) for stage in STAGES for at in (runs.T, runs.T + 2)),
    *((stage, "bf16", "local", AUTO, runs.T + 2) for stage in STAGES),
    *((stage, "fp16", "local", ONE, runs.T) for stage in STAGES),
]


def test_save_sigkill_resume_bit_for_bit(four: Fleet, tmp_path: Path) -> None:
    ends = run(four, runs.save_and_go_on, str(tmp_path), JOBS)
    with pytest.raises(CaseHung, match="died: exit -9"):
        run(four, runs.killed)
    resumed = run(four, runs.resume, str(tmp_path), JOBS)
    for rank in range(4):
        for job, mine, wanted in zip(JOBS, resumed[rank], ends[rank], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True)), (rank, job)


@pytest.mark.parametrize("at", [runs.T, runs.T + 2], ids=["converged", "apart"])
@pytest.mark.parametrize("stage", STAGES)
def test_no_file_has_two_writers_and_the_converged_model_is_what_others_read(
    four: Fleet, tmp_path: Path, stage: int, at: int
) -> None:
    found = run(four, runs.files, str(tmp_path), stage, at)
    written = [path for paths, _ in found for path in paths]
    assert len(written) == len(set(written))
    assert written, "something was written"
    assert all(same for _, same in found)
    apart = json.loads((tmp_path / f"global_step{at}" / "hdet.json").read_text())["apart"]
    assert apart is (at != runs.T)
    assert any("replica_01" in path for path in written) is apart


def test_wrong_layouts_at_load(four: Fleet, tmp_path: Path) -> None:
    for said in run(four, runs.wrong_layouts, str(tmp_path)):
        assert len(said) == 4
        assert "a replica has 1 now" in said[0]
        assert "ZeRO stage 2 and this run has stage 1" in said[1]
        assert "ZeRO stage 2 and this run has stage 0" in said[2]
        assert "saved by 2 replicas that were apart, and there are 4 now" in said[3]


def test_after_a_converge_the_number_of_replicas_may_change(four: Fleet, tmp_path: Path) -> None:
    assert run(four, runs.more_replicas, str(tmp_path)) == [True] * 4


def test_one_rank_is_one_replica(compiled: None) -> None:
    fleet = Fleet(1)
    try:
        [(moved, whole, at_boundary)] = run(fleet, runs.alone)
    finally:
        fleet.stop()
    assert moved > 0
    assert whole == 32
    assert at_boundary


# -- the monitor --------------------------------------------------------------------------------


def test_the_monitor_gets_what_a_round_did(four: Fleet, tmp_path: Path) -> None:
    run(four, runs.monitored, str(tmp_path))
    values = {}
    for path in (tmp_path / "job").glob("Train_HDET_*.csv"):
        rows = list(csv.reader(path.open()))
        values[path.stem.removeprefix("Train_HDET_")] = float(rows[-1][1])
    assert {"base_lr_group0", "velocity_lr_group0", "converge_seconds"} <= set(values)
    assert values["lr_group0_replica1"] / values["lr_group0_replica0"] == pytest.approx(3.0)
    assert values["loss_replica0"] != values["loss_replica1"]
    assert values["converge_bytes"] > 0


# -- configs and the launcher -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ds_hdet", "ds_hdet_zero3", "ds_hdet_zero3_offload", "ds_hdet_1b"]
)
def test_configs_run_at_a_small_size(four: Fleet, name: str) -> None:
    path = CONFIGS / f"{name}.json"
    assert Settings.read(path).shards(4) == 2
    found = four.run(runs.from_file, str(path), 2, seconds=800)
    assert len({output for _, output, _, _ in found}) == 1
    for losses, _, steps, kind in found:
        assert steps == 2
        assert losses[1] < losses[0]
        assert kind == ("DeepSpeedCPUAdam" if "offload" in name else "AdamW")


def test_the_launcher_trains_and_saves(compiled: None, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 64)
    config = json.loads((CONFIGS / "ds_hdet.json").read_text())
    config["train_micro_batch_size_per_gpu"] = 2
    config["scheduler"]["params"]["total_steps"] = 6
    config["hdet"] |= {"rule": "paper", "interval": 2, "warmup_steps": 2}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    command = [launcher, "--num_accelerators", "4", "--module", "hdet_scale.train"]
    command += ["--deepspeed_config", str(tmp_path / "ds.json"), "--text", str(text)]
    command += ["--context", "16", "--run", str(tmp_path / "saved"), "--json"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(x) for x in done.stdout.splitlines() if x.startswith('{"')]
    rounds = [x for x in said if x["kind"] == "round"]
    assert [x["step"] for x in rounds] == [2, 4, 6]
    assert (said[-1]["kind"], said[-1]["step"]) == ("end", 6)
    assert all(len(x["losses"]) == 2 for x in rounds)
    assert (tmp_path / "saved" / "latest").read_text() == "step-00000006"
    assert (tmp_path / "saved" / "step-00000006" / "hdet.json").is_file()


def test_a_run_that_is_ended_goes_on_as_if_it_had_not(four: Fleet, tmp_path: Path) -> None:
    four.run(runs.warm_up, seconds=800)  # the ops are compiled before the clock runs
    kills.finish(kills.command(tmp_path, "deepspeed", "whole", 60))
    words = [*kills.command(tmp_path, "deepspeed", "broken", 60), "--resume"]
    assert kills.break_off(words, signal.SIGTERM, heard=2, pause=0) == 143
    assert kills.break_off(words, signal.SIGKILL, heard=5, pause=0.02) == -signal.SIGKILL
    kills.finish(words)
    assert kills.story(tmp_path / "broken") == kills.story(tmp_path / "whole")
    assert kills.doubles(tmp_path / "broken") == 0
