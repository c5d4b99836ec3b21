"""A search and its watch read back from a log: in the report's numbers and in the replay."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from hdet_scale import cli
from hdet_scale.runs import report
from hdet_scale.runs.log import RunLog, read
from hdet_scale.runs.replay import discovered
from hdet_scale.runs.search_log import (
    search_of,
    steps_of_search,
    trials_of,
    watch_of,
)
from hdet_scale.search.constants import STEP
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.trials import trial_steps
from tests.support.sample_records import a_search, a_trial
from tests.support.searched import EVERY, INITIAL, STEPS, searched


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """From far too low a rate; it overfits late, and its rate is then lowered in place."""
    folder = tmp_path_factory.mktemp("searched") / "run"
    return folder, searched(folder, overfits=True)


def test_trials_are_translated_to_the_run(run: tuple[Path, Any]) -> None:
    """One replica tries one rate after the other: three in each of two stages."""
    folder, scheduler = run
    log, rule = read(folder), RateSearch(replicas=1, total_steps=STEPS, adaptive=True)
    search, result = search_of(log), scheduler.search_result
    assert search is not None
    assert search["steps"] == result.steps == steps_of_search(log) == rule.longest
    assert search["completed"]
    assert search["initial"] == {"lr/group0": INITIAL[0], "lr/group1": INITIAL[1]}
    first, second = search["stages"]
    assert (first["name"], second["name"]) == ("first", "second")
    lines, short = trials_of(log), trial_steps("first", 1, STEPS, 3)
    ends = [short * k for k in (1, 2, 3)]
    ends += [ends[-1] + trial_steps("second", 1, STEPS, 3) * k for k in (1, 2, 3)]
    assert search["x"] == ends
    assert search["from"] == [0, *ends[:-1]]
    assert search["trials"] == len(lines) == 6
    for i, peak in enumerate(INITIAL):
        # The first stage shows that a higher rate is better, and the second looks further.
        for stage, offsets in ((first, (-1, 0, 1)), (second, (0, 1, 2))):
            wanted = [peak * STEP**k for k in offsets]
            assert stage["rates"][f"lr/group{i}"] == pytest.approx(wanted)
        assert search["rates"][f"lr/group{i}"] == pytest.approx([p.rates[i] for p in result.curve])
    for stage, some in ((first, lines[:3]), (second, lines[3:])):
        assert stage["losses"] == [line["loss"] for line in some]
        assert stage["verdict"] == some[-1]["verdict"] != ""
    taken = search["taken"]["lr/group0"]
    assert taken == pytest.approx(result.taken[0]) == pytest.approx(INITIAL[0] * STEP**2)
    assert second["verdict"] == search["verdict"] == scheduler.verdict


def test_errors_are_of_the_difference_to_the_initial_rate(run: tuple[Path, Any]) -> None:
    """Also of the rate that was tried before it, whose line has the error of its own loss."""
    log = read(run[0])
    search = search_of(log)
    assert search is not None
    errors, lines = search["stages"][0]["errors"], trials_of(log)[:3]
    spread = statistics.stdev(0.01 * i for i in range(8)) / math.sqrt(8)
    assert [line["error"] for line in lines[:2]] == pytest.approx([spread, spread])
    assert errors[1] == lines[1]["error"]
    # The batches of this probe differ by the same for all weights.
    assert errors[0] == pytest.approx(0.0, abs=1e-12)
    assert errors[2] == lines[2]["error"] == pytest.approx(0.0, abs=1e-12)


def test_trials_side_by_side_have_one_step(tmp_path: Path) -> None:
    """A line for each rate; the one that diverged has no error."""
    with RunLog(tmp_path) as log:
        for i, step in enumerate((4, 4, 4, 12, 12, 12)):
            stage, over = ("first", "second")[i // 3], i % 3 == 2
            verdict = f"{stage} is over" if over else ""
            log.record(a_trial(step, trial=i, stage=stage, verdict=verdict, diverged=over))
        log.record(a_search(12, trials=6, verdict="second is over"))
    search = search_of(read(tmp_path))
    assert search is not None
    assert search["x"] == [4, 4, 4, 12, 12, 12]
    assert search["from"] == [0, 0, 0, 4, 4, 4]
    assert [stage["verdict"] for stage in search["stages"]] == ["first is over", "second is over"]
    assert [stage["losses"] for stage in search["stages"]] == [[2.5, 2.5, None]] * 2
    assert [stage["errors"][-1] for stage in search["stages"]] == [None, None]
    events = report.collect(read(tmp_path))["events"]
    assert [(e["step"], e["text"]) for e in events] == [
        (4, "first is over"),
        (12, "second is over"),
    ]


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
    taken = search_of(log)["taken"]["lr/group0"]  # type: ignore[index]
    assert made["bases"]["lr/group0"][0] == pytest.approx(taken / 25)  # of OneCycleLR


def test_a_search_under_way_has_taken_no_rate_yet(
    run: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the first trial of the second stage, and in its last."""
    end, longer = steps_of_search(read(run[0])), trial_steps("second", 1, STEPS, 3)
    early, late = end - 2 * longer - 5, end - 5
    searched(tmp_path / "early", stop=early, overfits=True)
    search = search_of(read(tmp_path / "early"))
    assert search is not None
    assert [bool(stage["verdict"]) for stage in search["stages"]] == [True]
    tmp_path /= "late"
    searched(tmp_path, stop=late, overfits=True)
    log = read(tmp_path)
    search = search_of(log)
    assert search is not None
    assert search["taken"] is None
    assert not search["completed"]
    assert search["initial"] == {"lr/group0": INITIAL[0], "lr/group1": INITIAL[1]}
    assert [bool(stage["verdict"]) for stage in search["stages"]] == [True, False]
    assert [len(stage["losses"]) for stage in search["stages"]] == [3, 2]
    reached = late // EVERY * EVERY  # the steps of the trial under way are not the run's
    assert steps_of_search(log) == reached
    assert cli.main(["replay", str(tmp_path)]) == 1
    told = f"is still in its search, at step {reached}: replay it when"
    assert told in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0


def test_no_search_is_none(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.begin({})
        log.step(1, 2.0, {"lr/group0": [0.1]})
    assert search_of(read(tmp_path)) is None
    assert steps_of_search(read(tmp_path)) == 0
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
    assert steps_of_search(log) == 20
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
    """A search may begin again with trial 0."""
    with RunLog(tmp_path) as log:
        log.begin({})
        for i in range(3):
            log.record(a_trial(4 * (i + 1), trial=i, stage="first" if i < 2 else "second"))
    with RunLog(tmp_path, step=12) as log:
        log.begin({})
        for i, stage in enumerate(("first", "second")):
            log.record(a_trial(16 + 4 * i, trial=i, stage=stage, verdict=f"{stage} is over"))
        if over:
            log.record(a_search(20, trials=2, verdict="second is over"))
        log.step(24, 2.0, {"lr/group0": [1e-4] * 24})
    log = read(tmp_path)
    assert [line["step"] for line in trials_of(log)] == [16, 20]
    search = search_of(log)
    assert search is not None
    assert search["trials"] == 2
    assert [stage["name"] for stage in search["stages"]] == ["first", "second"]
    assert search["completed"] is over
    assert steps_of_search(log) == (20 if over else 24)


def test_a_stage_is_in_order_of_the_rate(tmp_path: Path) -> None:
    """The trial with the higher rate was first, and diverged."""
    with RunLog(tmp_path) as log:
        log.record(a_trial(4, diverged=True))
        log.record(a_trial(8, trial=1))
    search = search_of(read(tmp_path))
    assert search is not None
    (stage,) = search["stages"]
    assert stage["losses"] == [2.5, None]
    assert stage["errors"] == [0.1, None]
    assert stage["rates"] == {"lr/group0": [5e-4, 5e-3], "lr/group1": [5e-5, 5e-4]}
    assert search["rates"]["lr/group0"] == [5e-3, 5e-4]
    assert search["initial"] == {}, "no sampled step and no end of the search tells it"


@pytest.mark.parametrize("back", [False, True])
def test_the_schedule_goes_on_where_the_watch_lowers_the_rate(
    run: tuple[Path, Any], tmp_path: Path, back: bool
) -> None:
    """With the weights of the lowest loss or without: a replay has every step since the search."""
    folder = run[0]
    if back:
        folder = tmp_path / "back"
        searched(folder, overfits=True, restart_budget=0.5)
    log = read(folder)
    seen, search = watch_of(log), search_of(log)
    assert seen is not None
    assert search is not None
    moves = [line for line in log.evaluations if line["verdict"]]
    assert len(moves) == 1
    assert seen["restarts"] == ([moves[0]["step"]] if back else [])
    scale = search["taken"]["lr/group0"] / INITIAL[0]
    lower = [scale / STEP if x >= moves[0]["step"] else scale for x in seen["x"]]
    assert seen["scales"] == pytest.approx(lower)
    made, before = discovered(log), steps_of_search(log)
    assert (made["steps_before"], made["steps"]) == (before, STEPS - before)
    # The bases are OneCycleLR's, stretched over the steps left, times the scale of their step.
    rates, at = made["bases"]["lr/group0"], moves[0]["step"] - before
    assert rates[at] / rates[at - 1] == pytest.approx(1 / STEP, rel=0.02)
    page = report.collect(log)
    assert page["watch"]["x"] == seen["x"]
    assert page["rounds"] == 0, "evaluations are no rounds"
    told = [e["text"] for e in page["events"] if e["event"] == "watch"]
    assert told == [moves[0]["verdict"]]
    assert ("the weights go back there" in told[0]) is back
