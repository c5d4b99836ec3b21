"""`hdet plan`: what it prints, what it refuses, how long it takes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from hdet_scale import cli
from hdet_scale.config import HDETConfig


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
