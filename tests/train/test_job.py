"""Which job the command line asks for: its options replace those of the files."""

from __future__ import annotations

import json

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


def test_auto_is_the_rule_unless_one_or_a_spread_is_named() -> None:
    assert job._with_rule({"shards": 2}) == {"shards": 2, "rule": "auto"}
    assert job._with_rule({"rule": "paper"}) == {"rule": "paper"}
    assert job._with_rule({"spread": 0.1}) == {"spread": 0.1}
