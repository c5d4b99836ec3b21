"""Which job the command line asks for: its options replace those of the files."""

from __future__ import annotations

import dataclasses
import json

from hdet_scale.config import HDETConfig
from hdet_scale.train import job
from hdet_scale.train.command import parse
from hdet_scale.train.torch_job import Recipe
from tests.support import kills

CONFIG = kills.CONFIGS / "fsdp_hdet.json"


def test_the_command_line_goes_over_the_files() -> None:
    args = parse(
        ["--config", str(CONFIG), "--shards", "2", "--steps", "50", "--lr", "0.5", "--bf16"]
    )
    assert job.hdet_overrides(args) == {"shards": 2}
    values = json.loads(CONFIG.read_text())
    recipe = job._recipe(args, Recipe(**{k: v for k, v in values.items() if k != "hdet"}))
    assert recipe.schedule == values["schedule"] | {"total_steps": 50, "max_lr": 0.5}
    assert recipe.dtype == "bf16"
    args = parse(["--replay", "s.json"])
    assert (args.spread, args.rule) == (0.0, "none")


def test_every_key_of_the_config_is_an_option() -> None:
    words = ["--patience", "null", "--spread", "0.5", "--rule", "slope", "--probe-batches", "4"]
    args = parse([*words, "--converge", '{"wire": "bf16"}'])
    wanted = {"spread": 0.5, "rule": "slope", "probe_batches": 4, "converge": {"wire": "bf16"}}
    assert job.hdet_overrides(args) == wanted | {"patience": None}
    assert job.hdet_overrides(parse([])) == {}
    for field in dataclasses.fields(HDETConfig):
        if field.name not in ("total_steps", "seed"):  # the run's own --steps and --seed
            named = parse([f"--{field.name.replace('_', '-')}", "1"])
            assert job.hdet_overrides(named) == {field.name: 1}
    assert HDETConfig.from_dict(wanted).converge.wire == "bf16"
