"""`hdet train`: real workers, a real recipe, checkpoints that go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hdet_scale import cli, train

CONFIG = Path(__file__).parents[1] / "configs" / "fsdp_hdet.json"


def recipe(home: Path, **hdet: Any) -> Path:
    """The shipped recipe, made short."""
    values = json.loads(CONFIG.read_text())
    values["batch"] = 2
    values["schedule"]["total_steps"] = 12
    values["hdet"] |= {"interval": 4, "warmup_steps": 1, "spread": 0.2, **hdet}
    path = home / "recipe.json"
    path.write_text(json.dumps(values))
    return path


def hdet_train(*words: str) -> list[dict[str, Any]]:
    """The lines that rank 0 printed."""
    command = [sys.executable, "-m", "hdet_scale.cli", "train", "--context", "16", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("engine", "workers", "hdet"),
    [
        ("fsdp", "4", {"replicas": 2}),
        ("fsdp", "2", {"replicas": 2, "gradients": "local"}),
        ("ddp", "2", {"replicas": "auto"}),
    ],
    ids=["fsdp 2 x 2", "fsdp local", "ddp"],
)
def test_a_run_that_stops_goes_on_as_if_it_had_not(
    tmp_path: Path, engine: str, workers: str, hdet: dict[str, Any]
) -> None:
    config = str(recipe(tmp_path, **hdet))
    common = ["--engine", engine, "--config", config, "--workers", workers]
    whole = hdet_train(*common)
    first = hdet_train(*common, "--steps", "8", "--save", str(tmp_path / "run"), "--every", "4")
    second = hdet_train(*common, "--save", str(tmp_path / "run"))
    assert [line["step"] for line in whole[:-1]] == [4, 8, 12]
    assert len(set(whole[0]["losses"])) == 2
    assert first[:2] + second == whole
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "step-00000004",
        "step-00000008",
        "step-00000012",
    }


def test_the_shipped_recipe_is_read() -> None:
    args = train.parse(["--engine", "fsdp", "--config", str(CONFIG), "--shards", "2"])
    values = json.loads(CONFIG.read_text())
    assert train._asked(args) == {"shards": 2}
    assert values["hdet"]["replicas"] == 2


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--engine", "deepspeed"])
    assert stopped.value.code == 2
    assert "--deepspeed_config" in capsys.readouterr().err


def test_ddp_has_no_shards(tmp_path: Path) -> None:
    config = str(recipe(tmp_path))
    command = [sys.executable, "-m", "hdet_scale.cli", "train", "--config", config]
    command += ["--shards", "2", "--workers", "1", "--context", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "use --engine fsdp" in done.stderr
