"""The run log: whole lines whatever kills the writer, no step and no record twice."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_scale.method.records import RoundRecord
from hdet_scale.runs import log as runlog
from hdet_scale.runs.log import RunLog, read
from tests.support.sample_records import a_round, a_search, a_trial, an_evaluation


def run(log: RunLog, first: int, last: int) -> None:
    """Steps (first, last] of a run with rounds of 10 and a line every 5."""
    for step in range(first + 5, last + 1, 5):
        log.step(step, 1 / step, {"lr/group0": [1 / (step - 4 + i) for i in range(5)]})
        if step % 10 == 0:
            log.record(a_round(step))


def told(folder: Path) -> list[dict[str, Any]]:
    """The lines without their clock."""
    lines = (folder / runlog.FILE).read_bytes().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def test_lines_read_back_as_they_were_written(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.begin({"engine": "ddp", "where": Path("x")})
        run(log, 0, 20)
        log.event("checkpoint", "step-20", 20)
        log.end(20, loss=math.inf)
    found = read(tmp_path)
    assert found.name == tmp_path.name
    assert found.starts[0]["run"] == {"engine": "ddp", "where": "x"}
    assert [line["step"] for line in found.steps] == [5, 10, 15, 20]
    assert found.bases() == {"lr/group0": [1 / k for k in range(1, 21)]}
    assert found.rounds[1]["round"] == 1
    assert found.rounds[0]["losses"] == [2.5, None]
    assert found.rounds[0]["quarantined"] == [1]
    assert found.rounds[0]["probe"] is None
    assert found.events[0]["text"] == "step-20"
    assert found.end is not None
    assert found.end["loss"] is None


@given(cut=st.integers(0, 3000), resumed=st.sampled_from([0, 5, 10, 25]))
def test_a_run_cut_anywhere_and_resumed_has_the_lines_of_the_unbroken_one(
    tmp_path_factory: pytest.TempPathFactory, cut: int, resumed: int
) -> None:
    whole, broken = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")
    with RunLog(whole) as log:
        log.begin({})
        run(log, 0, 40)
    lines = (whole / runlog.FILE).read_bytes()
    # A checkpoint of step s is there only once the log has s: cut no earlier than that.
    least = len(lines.split(b'"kind":"step","step":%d,' % (resumed + 5))[0].rpartition(b"\n")[0])
    (broken / runlog.FILE).write_bytes(lines[: max(cut, least + 1)])
    with RunLog(broken, step=resumed) as log:
        log.begin({})
        run(log, resumed, 40)
    lines_of = [line for line in told(broken) if line["kind"] != "resume"]
    assert lines_of == told(whole)
    assert sum(line["kind"] == "resume" for line in told(broken)) == 1


def test_a_finished_run_that_goes_on_has_one_end(tmp_path: Path) -> None:
    for first, last in ((0, 20), (20, 20), (20, 30)):
        with RunLog(tmp_path, step=first) as log:
            log.begin({})
            run(log, first, last)
            log.end(last)
    kinds = [line["kind"] for line in told(tmp_path)]
    assert kinds.count("end") == 1
    assert kinds.count("round") == 3
    assert kinds.count("start") == 1


def _write_for_ever(folder: Path) -> None:
    log = RunLog(folder)
    log.begin({})
    step = 0
    while True:
        step += 1
        log.step(step, 0.5, {"lr/group0": [0.1] * 1})


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_writer_leaves_lines_that_can_be_read_and_the_lock(tmp_path: Path) -> None:
    writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(tmp_path,))
    writer.start()
    while not (tmp_path / runlog.FILE).exists() or (tmp_path / runlog.FILE).stat().st_size < 5000:
        time.sleep(0.01)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    found = read(tmp_path)
    assert [line["step"] for line in found.steps] == list(range(1, len(found.steps) + 1))
    with RunLog(tmp_path, step=10) as log:
        log.begin({})
    assert len(read(tmp_path).steps) == 10


def test_two_writers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "LOCK_SECONDS", 0.1)
    with RunLog(tmp_path), pytest.raises(BlockingIOError, match="another process writes this run"):
        RunLog(tmp_path)


def test_what_the_library_says_becomes_events(tmp_path: Path) -> None:
    logger = logging.getLogger("hdet_scale")
    before = (logger.level, list(logger.handlers))
    with RunLog(tmp_path) as log:
        log.now = 7
        with log.hearing():
            logger.info("held at %.3g", 1e-8)
        logger.info("not heard")
    assert [(e["event"], e["step"], e["text"]) for e in read(tmp_path).events] == [
        ("info", 7, "held at 1e-08")
    ]
    assert (logger.level, logger.handlers) == before


def test_every_field_of_every_record_is_in_a_line_of_its_kind(tmp_path: Path) -> None:
    records = [a_trial(8, diverged=True), a_search(8), an_evaluation(12), a_round(20, probed=True)]
    with RunLog(tmp_path) as log:
        for record in records:
            log.record(record)
    assert [line["kind"] for line in told(tmp_path)] == ["trial", "search", "evaluation", "round"]
    for record, line in zip(records, told(tmp_path), strict=True):
        assert set(line) == {"kind", *(f.name for f in dataclasses.fields(record))}
    found = read(tmp_path)
    assert found.records == [*found.rounds, *found.trials, *found.searches, *found.evaluations]
    assert (found.rounds[0]["step"], found.rounds[0]["probe"]["evidence"]["noise"]) == (20, 2.0)
    assert found.trials[0]["stage"] == "first"
    assert found.trials[0]["rates"] == {"lr/group0": 1e-2, "lr/group1": 1e-3}
    assert found.trials[0]["losses"] == [2.4, None]
    assert (found.trials[0]["loss"], found.trials[0]["error"]) == (None, None), "it diverged"
    assert found.searches[0]["taken"] == {"lr/group0": 1e-3, "lr/group1": 1e-4}
    assert found.searches[0]["completed"] is True
    assert (found.evaluations[0]["loss"], found.evaluations[0]["losses"]) == (None, [2.0, None])
    assert found.evaluations[0]["restart"] is True


def test_a_resume_cuts_records_of_later_steps(tmp_path: Path) -> None:
    for step in (0, 8):
        with RunLog(tmp_path, step=step) as log:
            log.begin({})
            for record in [a_trial(8), a_search(8)] if step == 0 else []:
                log.record(record)
            log.record(an_evaluation(12))
    kinds = [line["kind"] for line in told(tmp_path)]
    assert kinds == ["start", "trial", "search", "resume", "evaluation"]


def test_the_examples_of_the_document_are_lines_of_this_schema(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "runlog.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    lines = [json.loads(line) for block in blocks for line in block.splitlines()]
    records = {r.kind: r for r in (a_round(10), a_trial(4), a_search(4), an_evaluation(8))}
    kinds = [line["kind"] for line in lines]
    assert kinds == ["start", "step", "round", "trial", "search", "evaluation", "event", "end"]
    for line in lines:
        if line["kind"] in records:
            fields = {f.name for f in dataclasses.fields(records[line["kind"]])}
            assert set(line) == {"kind", "time", *fields}
            assert all(f"`{name}`" in text for name in fields)
    (tmp_path / runlog.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read(tmp_path)
    assert len(found.records) == 4
    assert found.end is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Later(RoundRecord):
    """A record that has gained a field."""

    mood: str = "calm"


def test_fields_that_a_record_gains_are_written(tmp_path: Path) -> None:
    base = a_round(10)
    later = Later(**{name: getattr(base, name) for name in RoundRecord.__slots__})
    with RunLog(tmp_path) as log:
        log.record(later)
    assert read(tmp_path).rounds[0]["mood"] == "calm"


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_a_log_of_an_older_schema_is_refused_and_left_as_it_is(tmp_path: Path, schema: int) -> None:
    path = tmp_path / runlog.FILE
    path.write_text(f'{{"kind":"start","step":0,"schema":{schema}}}\n')
    before = path.read_bytes()
    wanted = (
        rf"log.jsonl has schema {schema}, of an older version of hdet_scale; this version reads "
        r"and writes schema 4: report, replay or resume that run with the version that wrote it, "
        r"or choose another folder"
    )
    with pytest.raises(ValueError, match=wanted):
        read(tmp_path)
    with pytest.raises(ValueError, match=wanted):
        RunLog(tmp_path, step=5)  # a resume would leave a log that no version can read
    assert path.read_bytes() == before


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has a log\.jsonl in it"):
        read(tmp_path)
    path = tmp_path / runlog.FILE
    path.write_text("what is this\n")
    with pytest.raises(ValueError, match="line 1 is not a line of a run log"):
        read(tmp_path)
    path.write_text('{"kind":"start","step":0,"schema":99}\n')
    with pytest.raises(ValueError, match="has schema 99, of another version of hdet_scale"):
        read(tmp_path)
    path.write_text('{"kind":"step","step":9,"loss":1,"bases":{"lr/group0":[0.1]}}\n')
    with pytest.raises(ValueError, match="the schedule has a gap"):
        read(tmp_path).bases()


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLog(tmp_path) as log:
        monkeypatch.setattr(os, "write", lambda file, data: len(data) - 1)
        with pytest.raises(OSError, match="the disk may be full"):
            log.begin({})
