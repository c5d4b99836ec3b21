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
from hdet_scale.config import AUTHORS, described, with_authors_names

CONFIGS = st.builds(
    HDETConfig,
    spread=st.floats(0, 0.99),
    interval=st.integers(1, 10**6),
    gradients=st.sampled_from(["shared", "local"]),
    rule=st.sampled_from(["none", "paper", "slope"]),
    warmup_steps=st.integers(0, 10**6),
    loss_scale=st.floats(1e-6, 10),
    momentum=st.floats(0, 0.99),
    step_size=st.floats(0, 10),
    decay=st.sampled_from(["auto", "floor", "schedule"]),
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
    assert (config.rule, config.interval, config.gradients) == ("auto", 1000, "shared")
    assert config.spread == 1 / 9
    assert (config.loss_scale, config.momentum, config.step_size) == (0.002, 0.9, 0.5)
    assert config.converge.moments is None


@given(CONFIGS)
def test_a_config_survives_json(config: HDETConfig) -> None:
    assert HDETConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_json_file_with_and_without_a_block(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    block = {"rule": "paper", "spread": 0.25}
    for text in (block, {"hdet": block, "train_batch_size": 8}):
        path.write_text(json.dumps(text), encoding="utf-8")
        assert HDETConfig.from_json(path) == HDETConfig(rule="paper", spread=0.25)


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
def test_a_spread_or_local_gradients_make_replicas_diverge(spread: float, gradients: str) -> None:
    assert HDETConfig(rule="paper", spread=spread, gradients=gradients).diverges


def test_plain_training_does_not_diverge() -> None:
    assert not HDETConfig(rule="paper", spread=0).diverges


def test_a_search_has_no_spread_after_it() -> None:
    assert HDETConfig().searches
    assert not HDETConfig().diverges
    assert HDETConfig(gradients="local").diverges
    assert not HDETConfig(rule="paper").searches


def test_a_search_with_a_spread_is_refused() -> None:
    assert HDETConfig(rule="auto", spread=0.0).spread == 0.0
    with pytest.raises(ValueError, match=r"spread=0\.3 has no effect .*leave it out, or use rule="):
        HDETConfig(rule="auto", spread=0.3)


@pytest.mark.parametrize(
    ("policy", "remembers"),
    [({}, False), ({"wire": "bf16"}, False), ({"wire": "int8"}, True), ({"outer": {}}, True)],
)
def test_which_converge_builds_on_the_last_one(policy: dict[str, Any], remembers: bool) -> None:
    assert HDETConfig.from_dict({"converge": policy}).converge.remembers is remembers


# -- the authors' names -----------------------------------------------------------------------


def authors(**changes: Any) -> dict[str, Any]:
    """The authors' arguments with their defaults, as OneCycleAutoLR passes them."""
    defaults = {name: default for name, (_, default) in AUTHORS.items()}
    return {**defaults, "enable_auto_lr": False, **changes}


def test_the_authors_defaults_are_plain_training() -> None:
    config = with_authors_names(None, {}, **authors())
    assert (config.rule, config.spread, config.interval) == ("none", 0.0, 1000)
    assert (config.warmup_steps, config.loss_scale) == (100000, 0.002)
    assert (config.step_size, config.momentum) == (0.5, 0.9)


def test_the_authors_names_stand_for_keys() -> None:
    changes = {
        "enable_auto_lr": True,
        "ensemble_lr_spread_ratio": 0.2,
        "model_sync_interval": 7,
        "auto_lr_warmup_steps": 5,
        "loss_scale": 0.1,
        "lr_of_lr": 0.3,
        "momentum_of_lr": 0.4,
    }
    assert with_authors_names(None, {"seed": 3}, **authors(**changes)) == HDETConfig(
        rule="paper",
        spread=0.2,
        interval=7,
        warmup_steps=5,
        loss_scale=0.1,
        step_size=0.3,
        momentum=0.4,
        seed=3,
    )


def test_a_rule_is_over_the_authors_name_and_other_keys_may_not_contradict() -> None:
    config = with_authors_names(None, {"rule": "slope"}, **authors(enable_auto_lr=True))
    assert config.rule == "slope"
    with pytest.raises(ValueError, match=r"interval=20 contradicts .* 10: write one"):
        with_authors_names(None, {"interval": 20}, **authors(model_sync_interval=10))


def test_a_config_takes_the_place_of_the_authors_names() -> None:
    given = HDETConfig(rule="paper", spread=0.2)
    assert with_authors_names(given, {}, **authors()) is given
    assert with_authors_names(given, {"rule": "paper"}, **authors(enable_auto_lr=True)) is given
    with pytest.raises(ValueError, match=r"interval=7 beside config=, which says interval=1000"):
        with_authors_names(given, {}, **authors(model_sync_interval=7))
    with pytest.raises(ValueError, match=r"rule='none' beside config=, which says rule='paper'"):
        with_authors_names(given, {"rule": "none"}, **authors())


def test_every_field_has_a_line_for_help_texts() -> None:
    for kind in (HDETConfig, ConvergePolicy):
        told = described(kind)
        assert set(told) == {f.name for f in dataclasses.fields(kind)}
        assert all(told.values())


# -- refusals ---------------------------------------------------------------------------------


VALUE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"spread": 1.0}, r"\[0, 1\), got 1\.0"),
    ({"spread": -0.1}, r"\[0, 1\), got -0\.1"),
    ({"interval": 0}, r"interval must be at least 1, got 0"),
    ({"interval": -5}, r"interval must be at least 1, got -5"),
    ({"warmup_steps": -1}, r"at least 0, got -1"),
    ({"seed": -1}, r"at least 0, got -1"),
    ({"gradients": "global"}, r"\['shared', 'local'\], got 'global'"),
    ({"rule": "papper"}, r"\['auto', 'paper', 'slope', 'none'\], got 'papper'"),
    ({"rule": "climb"}, r"\['auto', 'paper', 'slope', 'none'\], got 'climb'"),
    ({"decay": "linear"}, r"\['auto', 'floor', 'schedule'\], got 'linear'"),
    ({"total_steps": 0}, r"total_steps must be at least 1 or None, got 0"),
    ({"patience": 0}, r"patience must be at least 1 or None, got 0"),
    ({"probe_batches": 0}, r"probe_batches must be at least 1, got 0"),
    ({"interval": 3, "converge": {"fragments": 4}}, r"fragments=4 of an interval of 3 steps"),
    (
        {"interval": 4, "converge": {"fragments": 2, "overlap": True, "overlap_steps": 3}},
        r"overlap_steps=3 must be at most interval / fragments = 2",
    ),
    ({"converge": {"wire": "fp8"}}, r"wire must be one of .*got 'fp8'"),
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
    ({"total_steps": 1.5}, r"int or None, got 1\.5"),
    ({"converge": {"outer": 3}}, r"OuterStep, got 3"),
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
