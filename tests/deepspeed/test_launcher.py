"""The recipes in configs/, DeepSpeed's own launcher, and a run that is ended and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet_scale.deepspeed.settings import Settings
from tests.support import kills
from tests.support.fleet import Fleet
from tests.support.zero_runs import prepare, warm_up

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"


def _from_file(rank: int, size: int, path: str, batch_size: int) -> Any:
    """A config of the repository at a small size: a tiny GPT over bytes."""
    prepare(rank, size)
    from hdet_scale.deepspeed import initialize
    from hdet_scale.models.gpt import GPT, GPTConfig

    config = json.loads(Path(path).read_text())
    config |= {"train_micro_batch_size_per_gpu": batch_size, "gradient_accumulation_steps": 1}
    config["scheduler"]["params"]["total_steps"] = 100  # too short for a search
    model = GPT(GPTConfig(layers=1, width=16, heads=2, context=8))
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(256, (batch_size, 8), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(2):
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        output = float(engine(tokens.new_zeros(1, 8), tokens.new_zeros(1, 8)))
    return losses, output, engine.global_steps, type(engine.basic_optimizer).__name__


@pytest.mark.parametrize(
    "name", ["ds_hdet", "ds_hdet_zero3", "ds_hdet_zero3_offload", "ds_hdet_1b"]
)
def test_configs_run_at_a_small_size(four: Fleet, name: str) -> None:
    path = CONFIGS / f"{name}.json"
    assert Settings.read(path).shards(4) == 2
    found = four.run(_from_file, str(path), 2, seconds=800)
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
    four.run(warm_up, seconds=800)  # the ops are compiled before the clock runs
    kills.finish(kills.command(tmp_path, "deepspeed", "whole", 60))
    words = [*kills.command(tmp_path, "deepspeed", "broken", 60), "--resume"]
    assert kills.break_off(words, signal.SIGTERM, heard=2, pause=0) == 143
    assert kills.break_off(words, signal.SIGKILL, heard=5, pause=0.02) == -signal.SIGKILL
    kills.finish(words)
    assert kills.story(tmp_path / "broken") == kills.story(tmp_path / "whole")
    assert kills.doubles(tmp_path / "broken") == 0
