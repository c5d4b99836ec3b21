"""The training loop through real processes: kills and signals, resumes, a replay, refusals."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from hdet_scale import cli
from hdet_scale.runs.log import read
from hdet_scale.runs.search_log import steps_of_search
from hdet_scale.search.decision import RateSearch
from hdet_scale.train import training_loop
from hdet_scale.train.command import parse
from hdet_scale.train.saving import newest_checkpoint
from hdet_scale.train.workers import Refused
from tests.support import kills

pytestmark = pytest.mark.slow

STEPS = 100


def broken_and_resumed(words: list[str], run: Path) -> int:
    """SIGTERM and then SIGKILL end a run, and it is resumed to its end; its step at the kill."""
    assert kills.break_off(words, signal.SIGTERM, heard=2, pause=0) == 143
    told = [line["text"] for line in kills.lines(run) if line["kind"] == "event"]
    assert told[-1].startswith("stopped by SIGTERM after step")
    assert kills.break_off(words, signal.SIGKILL, heard=7, pause=0.02) == -signal.SIGKILL
    reached = kills.reached(run)
    kills.finish(words)
    return reached


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_run_that_is_ended_goes_on_as_if_it_had_not(tmp_path: Path, layout: str) -> None:
    said = kills.finish(kills.command(tmp_path, layout, "whole", STEPS))
    broken = tmp_path / "broken"
    broken_and_resumed([*kills.command(tmp_path, layout, "broken", STEPS), "--resume"], broken)
    assert kills.story(broken) == kills.story(tmp_path / "whole")
    assert kills.doubles(broken) == 0
    assert [line["kind"] for line in kills.lines(broken)].count("resume") == 2
    rounds = [line for line in said if line["kind"] == "round"]
    assert [line["step"] for line in rounds] == list(range(4, STEPS + 1, 4))
    assert len(set(rounds[0]["losses"])) == 2
    assert said[-1]["kind"] == "end"
    whole = {p.name for p in (tmp_path / "whole").iterdir()}
    assert whole == {"log.jsonl", *(f"step-{s:08d}" for s in [*range(8, STEPS, 8), STEPS])}


@pytest.mark.parametrize(
    "layout",
    [
        "ddp auto",
        "fsdp auto",
        pytest.param(
            "deepspeed auto",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
            ),
        ),
    ],
)
def test_a_search_that_is_ended_goes_on_as_if_it_had_not(tmp_path: Path, layout: str) -> None:
    """At the resume the probe must neither use the fresh weights nor leave them in the model. On
    DDP and FSDP2 a checkpoint in a trial has each rank's own state, so that SIGTERM loses nothing;
    on DeepSpeed the trial starts again, and the run is killed, to go on from the end of one."""
    # Long enough to be ended in time, and from a rate that is too low, so that both stages are run.
    total, broken = 3 * RateSearch.least_steps(2), tmp_path / "broken"
    rule = RateSearch(replicas=2, total_steps=total, adaptive=True)
    end = ["--stop-at", str(rule.longest + 10), "--lr", "1e-5"]
    kills.finish([*kills.command(tmp_path, layout, "whole", total), *end])
    assert steps_of_search(read(tmp_path / "whole")) == rule.longest
    words = [*kills.command(tmp_path, layout, "broken", total), "--resume", *end]
    if layout == "deepspeed auto":
        assert kills.break_off(words, signal.SIGKILL, heard=8, pause=0) == -signal.SIGKILL
        kept, reached = newest_checkpoint(broken), kills.reached(broken)
        assert kept is not None
        assert int(kept.name.removeprefix("step-")) in range(rule.trial.steps, rule.longest)
        kills.finish(words)
    else:
        reached = broken_and_resumed(words, broken)
    assert reached < rule.longest
    assert kills.story(broken) == kills.story(tmp_path / "whole")
    assert kills.doubles(broken) == 0


def test_a_replayed_run_has_the_schedule_and_no_diverged_replicas(tmp_path: Path) -> None:
    words = [*kills.command(tmp_path, "ddp", "first", 30), "--spread", "0.3"]
    kills.finish(words)
    assert cli.main(["replay", str(tmp_path / "first")]) == 0
    schedule = tmp_path / "first" / "schedule.json"
    again = kills.command(tmp_path, "ddp", "second", 30)
    said = kills.finish([*again, "--replay", str(schedule)])
    assert not [line for line in said if line["kind"] == "round"]
    first, second = read(tmp_path / "first"), read(tmp_path / "second")
    assert first.bases() == second.bases()
    assert len(first.bases()["lr/group0"]) == 30
    assert cli.main(["report", str(tmp_path / "first"), "-o", str(tmp_path / "r.html")]) == 0


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--shards", "2"], "use --engine fsdp"),
        (["--tokens", "no.bin"], "needs --vocabulary"),
        (["--rule", "guess"], "rule must be one of"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(
    words: list[str], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse([*words, "--run", str(tmp_path), "--context", "16"])
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Refused, match=answer) as refused:
            training_loop.run(args, print)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "\n" not in str(refused.value)
