"""DeepSpeed's config with the options of the command line."""

from __future__ import annotations

import json

import pytest

from hdet_scale.train.command import parse
from hdet_scale.train.deepspeed_job import with_overrides
from hdet_scale.train.job import hdet_overrides
from tests.support import kills


def test_the_command_line_goes_over_the_config() -> None:
    config = json.loads((kills.CONFIGS / "ds_hdet.json").read_text())
    config["scheduler"]["params"]["spread"] = 0.1
    before = json.dumps(config)
    args = parse(
        ["--deepspeed_config", "x", "--spread", "0.3", "--steps", "9", "--accumulation", "3"]
    )
    made = with_overrides(config, hdet_overrides(args), args)
    assert json.dumps(config) == before
    assert args.engine == "deepspeed"
    assert made["hdet"]["spread"] == 0.3
    assert "spread" not in made["scheduler"]["params"]
    assert made["scheduler"]["params"]["total_steps"] == 9
    assert made["gradient_accumulation_steps"] == 3


def test_a_replay_is_refused() -> None:
    args = parse(["--deepspeed_config", "x", "--replay", "s.json"])
    with pytest.raises(ValueError, match=r"--replay s\.json with --engine deepspeed"):
        with_overrides({}, {}, args)
