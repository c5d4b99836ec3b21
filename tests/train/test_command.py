"""`hdet train` as a command: options, refusals, exit codes, and every launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hdet_scale import cli
from hdet_scale.runs.log import FILE, RunLog
from hdet_scale.train import command
from hdet_scale.train.workers import Refused
from tests.support import kills

pytestmark = pytest.mark.slow


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


def test_a_worker_that_refuses_ends_the_command_with_2(tmp_path: Path) -> None:
    words = kills.command(tmp_path, "ddp", "run", 8)
    process = kills.start([*words, "--shards", "2"])
    _, err = process.communicate(timeout=kills.RUN_SECONDS)
    assert process.returncode == 2
    assert err.startswith("hdet train: shards=2 with --engine ddp")
    assert err.count("\n") == 1


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_find_prints_the_rate_of_the_search_and_ends(engine: str, tmp_path: Path) -> None:
    """The rate that `hdet train` goes on with, from the same options."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    words = ["--engine", engine, "--rule", "auto", "--lr", "1e-5", "--steps", "450", "--json"]
    words += ["--context", "16", "--run", str(tmp_path / "found")]
    if engine == "deepspeed":
        words += ["--config", "configs/ds_hdet.json", "--shards", "1"]
    process = kills.start([sys.executable, "-m", "hdet_scale.cli", "find", *words])
    out, err = process.communicate(timeout=kills.RUN_SECONDS)
    assert process.returncode == 0, err
    last = json.loads(out.splitlines()[-1])
    assert last["kind"] == "end"
    assert last["step"] <= 0.12 * 450
    assert last["lr"][0] in (pytest.approx(1e-4), pytest.approx(1e-3))
    low, high = last["range"]
    assert low < last["lr"][0] < high
    assert last["text"].startswith(f"max_lr 1e-05 -> {last['lr'][0]:.3g}, plausible ")
    assert [path.name for path in (tmp_path / "found").iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--steps", "60"], "a run of 60 steps is too short for a search: give --steps, at least"),
        (["--rule", "paper"], "rule='paper' does not search: hdet find needs --rule auto"),
    ],
)
def test_find_without_a_search_is_refused(words: list[str], answer: str, tmp_path: Path) -> None:
    start = [sys.executable, "-m", "hdet_scale.cli", "find", "--context", "16"]
    process = kills.start([*start, "--run", str(tmp_path), *words])
    _, err = process.communicate(timeout=kills.RUN_SECONDS)
    assert process.returncode == 2
    assert answer in err


def test_srun_is_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert not command._launched()  # a batch script itself, outside srun
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(Refused, match="export MASTER_ADDR="):
        command._launched()
    monkeypatch.setenv("MASTER_ADDR", "node1")
    with monkeypatch.context() as inner:
        inner.setattr(os, "environ", dict(os.environ))
        assert command._launched()
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
        assert [task.wait(timeout=kills.RUN_SECONDS) for task in tasks] == [0, 0]
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
