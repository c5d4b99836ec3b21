"""HDETConfig: every value checked at construction, every error with the next move."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_scale import ConvergePolicy, HDETConfig

CONFIGS = st.builds(
    HDETConfig,
    spread=st.floats(0, 0.99),
    interval=st.integers(1, 10**6),
    gradients=st.sampled_from(["shared", "local"]),
    rule=st.sampled_from(["none", "paper"]),
    warmup_steps=st.integers(0, 10**6),
    loss_scale=st.floats(1e-6, 10),
    momentum=st.floats(0, 0.99),
    step_size=st.floats(0, 10),
    decay=st.sampled_from(["auto", "floor", "schedule", "literal"]),
    seed=st.integers(0, 2**32),
    replicas=st.one_of(st.just("auto"), st.integers(1, 99)),
    shards=st.one_of(st.just("auto"), st.integers(1, 99)),
    converge=st.builds(
        ConvergePolicy,
        bucket_bytes=st.integers(1, 2**30),
        buffers=st.booleans(),
        moments=st.one_of(st.none(), st.booleans()),
    ),
)


def test_defaults() -> None:
    config = HDETConfig()
    assert (config.spread, config.interval, config.gradients) == (1 / 9, 1000, "shared")
    assert (config.loss_scale, config.momentum, config.step_size) == (0.002, 0.9, 0.5)
    assert config.converge.moments is None


@given(CONFIGS)
def test_a_config_survives_json(config: HDETConfig) -> None:
    assert HDETConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_json_file_with_and_without_a_block(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for text in ({"spread": 0.25}, {"hdet": {"spread": 0.25}, "train_batch_size": 8}):
        path.write_text(json.dumps(text), encoding="utf-8")
        assert HDETConfig.from_json(path) == HDETConfig(spread=0.25)


def test_json_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(TypeError, match=r"mapping of options, got \[1\]"):
        HDETConfig.from_json(path)


def test_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        HDETConfig(0.1)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        HDETConfig().spread = 0.2  # type: ignore[misc]


@pytest.mark.parametrize(("spread", "gradients"), [(0.1, "shared"), (0, "local"), (0.1, "local")])
def test_what_comes_apart(spread: float, gradients: str) -> None:
    assert HDETConfig(spread=spread, gradients=gradients).diverges


def test_plain_training_does_not_come_apart() -> None:
    assert not HDETConfig(spread=0).diverges


VALUE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"spread": 1.0}, r"\[0, 1\), got 1\.0"),
    ({"spread": -0.1}, r"\[0, 1\), got -0\.1"),
    ({"interval": 0}, r"interval must be at least 1, got 0"),
    ({"interval": -5}, r"interval must be at least 1, got -5"),
    ({"warmup_steps": -1}, r"at least 0, got -1"),
    ({"seed": -1}, r"at least 0, got -1"),
    ({"gradients": "global"}, r"\['shared', 'local'\], got 'global'"),
    ({"rule": "papper"}, r"\['none', 'paper', .*\], got 'papper'"),
    ({"decay": "linear"}, r"'floor', 'schedule', 'literal'\], got 'linear'"),
    ({"replicas": 0}, r'at least 1 or "auto", got 0'),
    ({"shards": 0}, r'at least 1 or "auto", got 0'),
    ({"converge": {"bucket_bytes": 0}}, r"at least 1, got 0"),
    ({"converge": {"bucket_mb": 1}}, r"'bucket_mb' in converge; did you mean 'bucket_bytes'"),
    ({"intervall": 5}, r"unknown key 'intervall' in hdet; did you mean 'interval'.*Valid keys"),
    ({"zzz": 5}, r"unknown key 'zzz' in hdet.*Valid keys.*'spread'"),
    ({"loss_scale": 0.0}, r"above 0, got 0\.0"),
    ({"loss_scale": float("nan")}, r"finite, got nan"),
    ({"momentum": 1.0}, r"\[0, 1\), got 1\.0"),
    ({"step_size": -0.5}, r"0 or more, got -0\.5"),
]
TYPE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"spread": "0.1"}, r"number in \[0, 1\), got '0\.1'"),
    ({"interval": 10.0}, r"int, got 10\.0"),
    ({"interval": True}, r"int, got True"),
    ({"replicas": "four"}, r"int or \"auto\", got 'four'"),
    ({"converge": 3}, r"ConvergePolicy, got 3"),
    ({"converge": {"buffers": 1}}, r"bool, got 1"),
    ({"converge": {"moments": "yes"}}, r"bool, got 'yes'"),
    ({"loss_scale": "small"}, r"number, got 'small'"),
]


@pytest.mark.parametrize(("values", "message"), VALUE_ERRORS)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HDETConfig.from_dict(values)


@pytest.mark.parametrize(("values", "message"), TYPE_ERRORS)
def test_wrong_types_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        HDETConfig.from_dict(values)
