"""`hdet train`: real workers, kills and signals, recipes, and what is refused."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet_scale import cli
from hdet_scale.config import HDETConfig
from hdet_scale.models.gpt import GPT, GPTConfig
from hdet_scale.runs.log import RunLog, read
from hdet_scale.runs.search_log import steps_of_search
from hdet_scale.search.decision import Race
from hdet_scale.train import command as train
from hdet_scale.train import progress
from hdet_scale.train.torch_job import Recipe, TorchJob
from hdet_scale.train.workers import Refused
from tests.support import kills
from tests.support.fleet import Fleet

CONFIG = kills.CONFIGS / "fsdp_hdet.json"
STEPS = 100


def broken_and_resumed(home: Path, layout: str) -> Path:
    """A run that SIGTERM and then SIGKILL have ended, and that was resumed to its end."""
    words = [*kills.command(home, layout, "broken", STEPS), "--resume"]
    assert kills.break_off(words, signal.SIGTERM, heard=2, pause=0) == 143
    told = [line["text"] for line in kills.lines(home / "broken") if line["kind"] == "event"]
    assert told[-1].startswith("stopped by SIGTERM after step")
    assert kills.break_off(words, signal.SIGKILL, heard=7, pause=0.02) == -signal.SIGKILL
    kills.finish(words)
    return home / "broken"


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_run_that_is_ended_goes_on_as_if_it_had_not(tmp_path: Path, layout: str) -> None:
    said = kills.finish(kills.command(tmp_path, layout, "whole", STEPS))
    broken = broken_and_resumed(tmp_path, layout)
    assert kills.story(broken) == kills.story(tmp_path / "whole")
    assert kills.doubles(broken) == 0
    assert [line["kind"] for line in kills.lines(broken)].count("resume") == 2
    rounds = [line for line in said if line["kind"] == "round"]
    assert [line["step"] for line in rounds] == list(range(4, STEPS + 1, 4))
    assert len(set(rounds[0]["losses"])) == 2
    assert said[-1]["kind"] == "end"
    whole = {p.name for p in (tmp_path / "whole").iterdir()}
    assert whole == {"log.jsonl", *(f"step-{s:08d}" for s in [*range(8, STEPS, 8), STEPS])}


def test_a_race_on_shards_that_is_ended_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    """Heats of two steps see nothing, so the race is blind and longest.

    At the resume the probe must see neither the fresh weights nor leave them behind.
    """
    end = ["--stop-at", "72"]
    kills.finish([*kills.command(tmp_path, "fsdp race", "whole", 600), *end])
    words = [*kills.command(tmp_path, "fsdp race", "broken", 600), "--resume", *end]
    assert kills.break_off(words, signal.SIGKILL, heard=12, pause=0) == -signal.SIGKILL
    race = steps_of_search(read(tmp_path / "whole"))
    assert kills.reached(tmp_path / "broken") < race < 72
    assert race == Race(replicas=2, total_steps=600, adaptive=True).longest
    kills.finish(words)
    assert kills.story(tmp_path / "broken") == kills.story(tmp_path / "whole")


def test_a_replayed_run_has_the_schedule_and_no_replicas_apart(tmp_path: Path) -> None:
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


def job_losses(
    rank: int, size: int, engine: str, recipe: dict[str, Any]
) -> tuple[list[float], set[torch.dtype]]:
    """Four steps of a tiny GPT; the batches of a step are the same however they are cut."""
    shape = GPTConfig.named("tiny", context=16)
    job = TorchJob(engine, GPT(shape), Recipe(**recipe), HDETConfig(spread=0.2, interval=2))
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


def test_the_command_line_goes_over_the_files(tmp_path: Path) -> None:
    args = train.parse(
        ["--config", str(CONFIG), "--shards", "2", "--steps", "50", "--lr", "0.5", "--bf16"]
    )
    assert train._asked(args) == {"shards": 2}
    values = json.loads(CONFIG.read_text())
    recipe = train._recipe(args, Recipe(**{k: v for k, v in values.items() if k != "hdet"}))
    assert recipe.schedule == values["schedule"] | {"total_steps": 50, "max_lr": 0.5}
    assert recipe.dtype == "bf16"
    args = train.parse(["--replay", "s.json"])
    assert (args.spread, args.rule) == (0.0, "none")


def test_auto_is_the_rule_unless_one_or_a_spread_is_named() -> None:
    assert train._with_rule({"shards": 2}) == {"shards": 2, "rule": "auto"}
    assert train._with_rule({"rule": "paper"}) == {"rule": "paper"}
    assert train._with_rule({"spread": 0.1}) == {"spread": 0.1}


def test_deepspeeds_config_takes_it_too() -> None:
    from hdet_scale.train.deepspeed_job import with_asked

    config = json.loads((kills.CONFIGS / "ds_hdet.json").read_text())
    config["scheduler"]["params"]["spread"] = 0.1
    before = json.dumps(config)
    args = train.parse(
        ["--deepspeed_config", "x", "--spread", "0.3", "--steps", "9", "--accumulation", "3"]
    )
    made = with_asked(config, train._asked(args), args)
    assert json.dumps(config) == before
    assert args.engine == "deepspeed"
    assert made["hdet"]["spread"] == 0.3
    assert "spread" not in made["scheduler"]["params"]
    assert made["scheduler"]["params"]["total_steps"] == 9
    assert made["gradient_accumulation_steps"] == 3


def test_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err
    for words, answer in (
        (["--engine", "deepspeed"], "needs --config"),
        (["--resume"], "--resume needs --run"),
        (["--every", "0"], "--every must be at least 1: 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["train", *words])
        assert stopped.value.code == 2
        assert answer in capsys.readouterr().err
    with RunLog(tmp_path) as log:
        log.begin({})
    assert cli.main(["train", "--run", str(tmp_path)]) == 2
    assert "holds a run already: add --resume" in capsys.readouterr().err


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
    args = train.parse([*words, "--run", str(tmp_path), "--context", "16"])
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 1)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Refused, match=answer) as refused:
            train.run(args, print)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "\n" not in str(refused.value)


def test_a_worker_that_refuses_ends_the_command_with_2(tmp_path: Path) -> None:
    words = kills.command(tmp_path, "ddp", "run", 8)
    process = kills.start([*words, "--shards", "2"])
    _, err = process.communicate(timeout=kills.SECONDS)
    assert process.returncode == 2
    assert err.startswith("hdet train: shards=2 with --engine ddp")
    assert err.count("\n") == 1


def test_srun_is_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert not train._launched()  # a batch script itself, outside srun
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(Refused, match="export MASTER_ADDR="):
        train._launched()
    monkeypatch.setenv("MASTER_ADDR", "node1")
    with monkeypatch.context() as inner:
        inner.setattr(os, "environ", dict(os.environ))
        assert train._launched()
        found = {k: os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def under_torchrun(words: list[str]) -> list[str]:
    """The same command under torchrun, which has an option of its own that begins with --run."""
    told = ["--folder" if word == "--run" else word for word in words]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *start, "-m", "hdet_scale.train", *told[told.index("train") + 1 :]]


def under_srun(words: list[str]) -> None:
    """The same command as two tasks of a step of SLURM's, to its end."""
    told = [sys.executable, "-m", "hdet_scale.train", *words[words.index("train") + 1 :]]
    place = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    tasks = [
        subprocess.Popen(
            told,
            env={**os.environ, **place, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)},
            stdout=subprocess.DEVNULL,
        )
        for r in range(2)
    ]
    try:
        assert [task.wait(timeout=kills.SECONDS) for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()


def test_every_launcher_gives_the_same_run(tmp_path: Path) -> None:
    """torchrun begins, SIGTERM ends it, srun goes on: the story of our own workers."""
    kills.finish(kills.command(tmp_path, "ddp", "whole", 60))
    words = [*kills.command(tmp_path, "ddp", "handed on", 60), "--resume"]
    assert kills.break_off(under_torchrun(words), signal.SIGTERM, heard=9, pause=0) != 0
    told = [line.get("text", "") for line in kills.lines(tmp_path / "handed on")]
    assert told[-1].startswith("stopped by SIGTERM after step")
    under_srun(words)
    assert kills.story(tmp_path / "handed on") == kills.story(tmp_path / "whole")
    assert kills.doubles(tmp_path / "handed on") == 0


def a_step(step: int, **changes: Any) -> dict[str, Any]:
    told = {"kind": "step", "step": step, "steps": 20, "loss": 2.5, "base": 1e-3, "change": 0.021}
    told |= {"tokens_per_second": 41_234.5, "converge_in": 5.0, "left": 7200.0}
    return told | changes


def test_a_step_in_words() -> None:
    assert progress.describe(a_step(10)) == (
        "loss 2.5000  base LR 1.000e-03 (+2.1% on the schedule)  41,234 tokens/s  "
        "converge in 5 s  left 2.0 h"
    )
    assert "not finite" in progress.describe(a_step(10, loss=None))
    assert "converge" not in progress.describe(a_step(10, converge_in=None))


def test_plain_lines_are_few_and_the_last_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown(False) as show:
        for step in (5, 10, 15, 20):
            show(a_step(step))
        show({"kind": "round", "step": 20})
        show({"kind": "event", "text": "checkpoint at step 20"})
    out = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in out] == [
        "step 5/20",
        "step 20/20",
        "checkpoint at step 20",
    ]
    with progress.shown(True) as show:
        show({"kind": "round", "step": 20})
    assert json.loads(capsys.readouterr().out) == {"kind": "round", "step": 20}


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown(False) as show:
        show(a_step(20))
        show({"kind": "end", "text": "done: 20 steps"})
    assert "20/20" in screen.getvalue()
    assert "loss 2.5000" in screen.getvalue()
    assert "done: 20 steps" in screen.getvalue()


def test_a_batch_is_never_nothing() -> None:
    with pytest.raises(ValueError, match="accumulation must be an int of at least 1, got 0"):
        Recipe(accumulation=0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        Recipe(dtype="fp8")
    assert math.isclose(Recipe().schedule["max_lr"], 1e-3)
