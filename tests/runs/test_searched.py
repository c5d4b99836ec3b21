"""Heats: a race read back from its log, in the report's numbers and in the replay."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hdet_scale import cli
from hdet_scale.runs import report
from hdet_scale.runs.searched import heats, race_of, steps_before, steps_of_race, watch_of
from hdet_scale.search.decision import Race
from hdet_scale.runs.replay import discovered
from hdet_scale.runs.log import RunLog, read
from tests.support.raced import GIVEN, STEPS, raced


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("raced") / "run"
    return folder, raced(folder)


def test_levels_are_those_of_the_run_they_stand_for(run: tuple[Path, Any]) -> None:
    folder, scheduler = run
    log, fresh = read(folder), Race(replicas=1, total_steps=STEPS, adaptive=True)
    race = race_of(log)
    assert race is not None
    assert race["steps"] == fresh.budget == steps_of_race(log)
    coarse, fine = race["stages"]
    for i, peak in enumerate(GIVEN):
        wanted = [peak * math.exp(x) for x in fresh.offsets]
        assert coarse["rates"][f"lr/group{i}"] == pytest.approx(wanted)
    lines = heats(log)
    assert sorted(coarse["losses"]) == sorted(line["losses"][0] for line in lines[:8])
    assert coarse["verdict"] == lines[7]["verdict"] != ""
    # What was found is a level's neighbour, in the run's own learning rates.
    found = race["found"]["lr/group0"]
    assert found == pytest.approx(GIVEN[0] * scheduler._search.rule.scale)
    assert found != GIVEN[0]
    assert min(fine["rates"]["lr/group0"]) <= found <= max(fine["rates"]["lr/group0"])
    assert fine["verdict"] == scheduler.verdict


def test_the_race_is_no_part_of_the_runs_rounds_and_steps(run: tuple[Path, Any]) -> None:
    log = read(run[0])
    found, race = report.collect(log), steps_of_race(log)
    assert found["rounds"] == 0
    assert min(found["steps"]["x"]) > race
    after = [line["loss"] for line in log.steps if line["step"] > race]
    assert found["steps"]["loss"] == pytest.approx(after, rel=1e-5)
    told = [e["text"] for e in found["events"] if e["event"] == "race"]
    assert told == [stage["verdict"] for stage in found["race"]["stages"]]


def test_a_replay_leaves_the_race_out(
    run: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, log = run[0], read(run[0])
    race, out = steps_of_race(log), tmp_path / "schedule.json"
    assert cli.main(["replay", str(folder), "-o", str(out)]) == 0
    assert f"{race} steps of a search are left out" in capsys.readouterr().out
    made = json.loads(out.read_text())
    assert made["steps"] == STEPS - race
    assert made["bases"] == {name: values[race:] for name, values in log.bases().items()}
    assert max(made["bases"]["lr/group0"]) == pytest.approx(
        race_of(log)["found"]["lr/group0"],  # type: ignore[index]
        rel=1e-3,
    )


def test_a_race_under_way_has_found_nothing_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raced(tmp_path, stop=50)
    log = read(tmp_path)
    race = race_of(log)
    assert race is not None
    assert race["found"] is None
    assert [bool(stage["verdict"]) for stage in race["stages"]] == [True, False]
    assert steps_of_race(log) == 50  # those of the heat under way are none of the run's
    assert cli.main(["replay", str(tmp_path)]) == 1
    assert "is still in its race: wait" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0


def test_no_race_is_none(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.begin({})
        log.step(1, 2.0, {"lr/group0": [0.1]})
    assert race_of(read(tmp_path)) is None
    assert steps_of_race(read(tmp_path)) == 0


def test_what_a_watch_took_back_is_left_out(tmp_path: Path) -> None:
    """A run that overfits: the page has its looks, a replay the schedule of the last start."""
    folder = tmp_path / "overfits"
    scheduler = raced(folder, overfits=True)
    log = read(folder)
    seen, back = watch_of(log), scheduler._search.taken_back
    assert seen is not None
    assert seen["back"] == [scheduler._search.done + back]
    assert steps_before(log) == seen["back"][0] > steps_of_race(log)
    made = discovered(log)
    assert made["steps"] == STEPS - seen["back"][0]
    found = race_of(log)
    assert found is not None
    last = found["given"]["lr/group0"] * seen["scales"][-1]
    assert max(made["bases"]["lr/group0"]) == pytest.approx(last, rel=1e-2)
    page = report.collect(log)
    assert page["watch"]["x"] == seen["x"]
    assert page["rounds"] == 0, "looks are no rounds"
    told = [e["text"] for e in page["events"] if e["event"] == "watch"]
    assert len(told) == 1
    assert "the run starts again with" in told[0]
