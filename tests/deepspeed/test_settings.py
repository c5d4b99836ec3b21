"""The "hdet" block of a DeepSpeed config: what is read, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hdet_scale import OneCycleAutoLR
from hdet_scale.deepspeed.settings import Settings, merged
from tests.support.fleet import Fleet
from tests.support.zero_runs import Run, T, network, on, prepare, said, settings

ROOT = Path(__file__).parents[2]


def test_keys_in_params_and_block_must_not_contradict() -> None:
    assert merged({"spread": 0.1}, {"interval": 5, "max_lr": 1.0}) == {"spread": 0.1, "interval": 5}
    assert merged({"spread": 0.1}, {"spread": 0.1}) == {"spread": 0.1}
    with pytest.raises(ValueError, match=r"spread is 0\.1 .* and 0\.2"):
        merged({"spread": 0.1}, {"spread": 0.2})


def test_a_config_may_have_comments_and_no_key_twice(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"hdet": {"rule": "paper", "spread": 0.25} /* wide */}')
    assert Settings.read(path).hdet.spread == 0.25
    path.write_text('{"hdet": {"spread": 0.25, "spread": 0.5}}')
    with pytest.raises(ValueError, match=r"\['spread'\] twice"):
        Settings.read(path)
    with pytest.raises(ValueError, match='no "hdet" block'):
        Settings.read({"train_batch_size": 8})


def _refused(rank: int, size: int, changes: list[dict[str, Any]]) -> list[str]:
    """What is said to each config."""
    prepare(rank, size)
    answers = []
    for change in changes:
        config = settings(2)
        for key, value in change.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        answers.append(said(lambda config=config: Run(config)))
    return answers


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"hdet": {"shards": 4}}, 'Set "replicas": 2'),
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
    for answers in on(four, _refused, changes):
        for (change, words), answer in zip(REFUSALS, answers, strict=True):
            assert words in answer, (change, answer)


def _refused_models(rank: int, size: int) -> dict[str, str]:
    prepare(rank, size)
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from hdet_scale.deepspeed import initialize, shard_group

    class Unit:
        def get_model_parallel_world_size(self) -> int:
            return 2

    def made(group: Any) -> nn.Module:
        with deepspeed.zero.Init(data_parallel_group=group, dtype=torch.float32):
            return network()

    config = settings(3)
    alone = network()
    answers = {
        "pipeline": said(lambda: Run(config, model=PipelineModule([nn.Linear(8, 1)], 1))),
        "unit": said(lambda: Run(config, mpu=Unit())),
        "zero.Init": said(lambda: Run(config, model=made(None))),
        "plain initialize": said(
            lambda: deepspeed.initialize(
                model=alone, model_parameters=alone.parameters(), config=config
            )
        ),
        "no model": said(lambda: initialize(config=config)),
        "two configs": said(lambda: Run(config, config_params=config)),
        "own exploring": said(
            lambda: Run(
                {k: v for k, v in config.items() if k != "scheduler"},
                lr_scheduler=lambda o: OneCycleAutoLR(o, 0.1, total_steps=9),
            )
        ),
    }
    run = Run(config, model=made(shard_group(config)))
    run.train(0, T)
    answers["ours"] = f"{run.output():.9f}"
    return answers


def test_models_that_are_refused(four: Fleet) -> None:
    found = on(four, _refused_models)
    for answers in found:
        assert "PipelineModule" in answers["pipeline"]
        assert "splits the model over 2 ranks" in answers["unit"]
        assert "partitioned 0.weight over ranks [0, 1, 2, 3]" in answers["zero.Init"]
        assert "Start with hdet_scale.deepspeed.initialize" in answers["plain initialize"]
        assert "needs model=" in answers["no model"]
        assert "2 configs were given" in answers["two configs"]
        assert 'name "HDETOneCycle"' in answers["own exploring"]
        assert answers["ours"] == found[0]["ours"]


def test_a_missing_deepspeed_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('none')")
    code = "import hdet_scale.deepspeed"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "pip install hdet_scale[deepspeed]" in done.stderr
