"""A search and its watch read back from a log: in the report's numbers and in the replay."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hdet_scale import cli
from hdet_scale.runs import report
from hdet_scale.runs.log import RunLog, read
from hdet_scale.runs.replay import discovered
from hdet_scale.runs.search_log import (
    search_of,
    steps_before_run,
    steps_of_search,
    trials_of,
    watch_of,
)
from hdet_scale.search.decision import RateSearch
from tests.support.sample_records import a_search, a_trial
from tests.support.searched import INITIAL, STEPS, searched


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("searched") / "run"
    return folder, searched(folder)


def test_levels_are_translated_to_the_run(run: tuple[Path, Any]) -> None:
    folder, scheduler = run
    log, fresh = read(folder), RateSearch(replicas=1, total_steps=STEPS, adaptive=True)
    search = search_of(log)
    assert search is not None
    assert search["steps"] == fresh.budget == steps_of_search(log)
    assert search["completed"]
    assert search["initial"] == {"lr/group0": INITIAL[0], "lr/group1": INITIAL[1]}
    coarse, fine = search["stages"]
    assert (coarse["name"], fine["name"]) == ("coarse", "fine")
    for i, peak in enumerate(INITIAL):
        wanted = [peak * math.exp(x) for x in fresh.offsets]
        assert coarse["rates"][f"lr/group{i}"] == pytest.approx(wanted)
    lines = trials_of(log)
    assert search["trials"] == len(lines) == len(search["x"]) == 16
    assert sorted(coarse["losses"]) == sorted(line["losses"][0] for line in lines[:8])
    assert coarse["verdict"] == lines[7]["verdict"] != ""
    # The rate taken is near a level, in the run's own learning rates.
    taken = search["taken"]["lr/group0"]
    assert taken == pytest.approx(INITIAL[0] * scheduler._run.steering.scale)
    assert taken != INITIAL[0]
    assert min(fine["rates"]["lr/group0"]) <= taken <= max(fine["rates"]["lr/group0"])
    assert fine["verdict"] == search["verdict"] == scheduler.verdict


def test_a_search_is_no_part_of_the_runs_rounds_and_steps(run: tuple[Path, Any]) -> None:
    log = read(run[0])
    page, searched = report.collect(log), steps_of_search(log)
    assert page["rounds"] == 0
    assert min(page["steps"]["x"]) > searched
    after = [line["loss"] for line in log.steps if line["step"] > searched]
    assert page["steps"]["loss"] == pytest.approx(after, rel=1e-5)
    told = [e["text"] for e in page["events"] if e["event"] == "search"]
    assert told == [stage["verdict"] for stage in page["search"]["stages"]]


def test_a_replay_leaves_the_search_out(
    run: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, log = run[0], read(run[0])
    searched, out = steps_of_search(log), tmp_path / "schedule.json"
    assert cli.main(["replay", str(folder), "-o", str(out)]) == 0
    assert f"{searched} steps of a search are left out" in capsys.readouterr().out
    made = json.loads(out.read_text())
    assert made["steps"] == STEPS - searched
    assert made["steps_before"] == searched
    assert made["bases"] == {name: values[searched:] for name, values in log.bases().items()}
    assert max(made["bases"]["lr/group0"]) == pytest.approx(
        search_of(log)["taken"]["lr/group0"],  # type: ignore[index]
        rel=1e-3,
    )


def test_a_search_under_way_has_taken_no_rate_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searched(tmp_path, stop=50)
    log = read(tmp_path)
    search = search_of(log)
    assert search is not None
    assert search["taken"] is None
    assert not search["completed"]
    assert search["initial"] == {"lr/group0": INITIAL[0], "lr/group1": INITIAL[1]}
    assert [bool(stage["verdict"]) for stage in search["stages"]] == [True, False]
    assert steps_of_search(log) == 50  # the steps of the trial under way are not the run's
    assert cli.main(["replay", str(tmp_path)]) == 1
    assert "is still in its search, at step 50: replay it when" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0


def test_no_search_is_none(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.begin({})
        log.step(1, 2.0, {"lr/group0": [0.1]})
    assert search_of(read(tmp_path)) is None
    assert steps_of_search(read(tmp_path)) == steps_before_run(read(tmp_path)) == 0
    assert watch_of(read(tmp_path)) is None


def given_up(folder: Path, *, trials: int) -> Path:
    """A search that ended at step 20, after so many trials of 4 steps, and a run of 10 steps."""
    with RunLog(folder) as log:
        log.begin({})
        for i in range(trials):
            log.record(a_trial(4 * (i + 1), trial=i))
        log.step(20, 2.0, {"lr/group0": [1e-4] * 20, "lr/group1": [1e-5] * 20})
        log.record(a_search(20, trials=trials, completed=False, verdict="given up: too many saves"))
        log.step(30, 2.0, {"lr/group0": [2e-4] * 10, "lr/group1": [2e-5] * 10})
    return folder


@pytest.mark.parametrize("trials", [0, 1, 3])
def test_a_search_that_was_given_up_keeps_the_initial_rate(tmp_path: Path, trials: int) -> None:
    log = read(given_up(tmp_path, trials=trials))
    assert steps_of_search(log) == steps_before_run(log) == 20
    assert discovered(log)["bases"]["lr/group0"] == [2e-4] * 10
    search, page = search_of(log), report.collect(log)
    told = [(e["step"], e["text"]) for e in page["events"] if e["event"] == "search"]
    assert told == [(20, "given up: too many saves")]
    assert page["steps"]["x"] == [30]
    if trials == 0:
        assert search is None
        return
    assert search is not None
    assert not search["completed"]
    assert search["taken"] == search["initial"] == {"lr/group0": 1e-4, "lr/group1": 1e-5}
    assert search["verdict"].startswith("given up")
    assert [stage["verdict"] for stage in search["stages"]] == [""]
    assert search["trials"] == trials


@pytest.mark.parametrize("over", [False, True])
def test_only_the_last_search_counts(tmp_path: Path, over: bool) -> None:
    """Resumed with other replicas, a search begins again with trial 0."""
    with RunLog(tmp_path) as log:
        log.begin({})
        for i in range(3):
            log.record(a_trial(4 * (i + 1), trial=i, stage="coarse" if i < 2 else "fine"))
    with RunLog(tmp_path, step=12) as log:
        log.begin({})
        for i, stage in enumerate(("coarse", "fine")):
            log.record(a_trial(16 + 4 * i, trial=i, stage=stage, verdict=f"{stage} is over"))
        if over:
            log.record(a_search(20, trials=2, verdict="fine is over"))
        log.step(24, 2.0, {"lr/group0": [1e-4] * 24})
    log = read(tmp_path)
    assert [line["step"] for line in trials_of(log)] == [16, 20]
    search = search_of(log)
    assert search is not None
    assert search["trials"] == 2
    assert [stage["name"] for stage in search["stages"]] == ["coarse", "fine"]
    assert search["completed"] is over
    assert steps_of_search(log) == (20 if over else 24)


def test_a_level_is_the_mean_of_the_trials_that_ran_it(tmp_path: Path) -> None:
    """Two trials of two replicas at the same two levels; one level diverged in both."""
    with RunLog(tmp_path) as log:
        log.record(a_trial(4))
        log.record(a_trial(8, trial=1))
    search = search_of(read(tmp_path))
    assert search is not None
    (stage,) = search["stages"]
    assert stage["losses"] == [2.5, None]
    assert stage["rates"] == {"lr/group0": [5e-4, 2e-3], "lr/group1": [5e-5, 2e-4]}
    assert search["rates"]["lr/group0"] == [[5e-4, 2e-3]] * 2
    assert search["initial"] == {}, "no sampled step and no end of the search tells it"


def test_steps_before_a_restart_are_left_out(tmp_path: Path) -> None:
    """A run that overfits: a replay has the schedule since the restart."""
    folder = tmp_path / "overfits"
    scheduler = searched(folder, overfits=True)
    log = read(folder)
    seen = watch_of(log)
    assert seen is not None
    assert seen["restarts"] == [scheduler._run.lost]
    assert steps_before_run(log) == seen["restarts"][0] > steps_of_search(log)
    made = discovered(log)
    assert made["steps"] == STEPS - seen["restarts"][0]
    search = search_of(log)
    assert search is not None
    last = search["initial"]["lr/group0"] * seen["scales"][-1]
    assert max(made["bases"]["lr/group0"]) == pytest.approx(last, rel=1e-2)
    page = report.collect(log)
    assert page["watch"]["x"] == seen["x"]
    assert page["rounds"] == 0, "evaluations are no rounds"
    told = [e["text"] for e in page["events"] if e["event"] == "watch"]
    restarts = [line["verdict"] for line in log.evaluations if line["restart"]]
    assert told == restarts
    assert len(told) == 1
