"""The run log: what a run did, one JSON object a line, in RUN/log.jsonl.

Replica 0 writes one line for each record (a round, a trial, the end of a search, an evaluation) and
one for each sampled step. A line is appended with a single write, so that a kill leaves at most one
torn line, at the end. `step` never falls along the file: what a resumed run does again is a tail of
the file, which is cut off before the first new line. No step and no record is there twice.
docs/runlog.md has the schema.

    log = RunLog("runs/first")
    log.begin({"engine": "ddp"})
    scheduler.on_record(log.record)
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdet_scale.method.records import (
    EvaluationRecord,
    Record,
    RoundRecord,
    SearchRecord,
    TrialRecord,
)
from hdet_scale.runs.boards import Board, record_scalars, step_scalars

SCHEMA = 4
"""Raised when a reader of the older one would misread; new kinds and fields do not raise it."""
FILE = "log.jsonl"
LOCK_SECONDS = 10.0
"""How long to wait for the lock of a writer that was just killed."""


class RunLog:
    """The log of one run, open for writing by this process alone.

    Args:
        folder: the run's folder; it is made if it is missing.
        step: optimizer steps that the run has done (default 0). Lines of later steps, and a torn
            line at the end, are cut off.
        boards: where the same numbers are shown (default none); they are closed with the log.

    Raises:
        BlockingIOError: another process writes this run.
        ValueError: the folder has a log of another schema.
    """

    def __init__(self, folder: str | Path, *, step: int = 0, boards: Sequence[Board] = ()) -> None:
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.boards = list(boards)
        self.now = step
        """The step under way, for events that do not say one."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(self._file, self.path)
            self._begun = self._cut(step)
        except BaseException:
            os.close(self._file)
            raise

    def begin(self, run: Mapping[str, Any]) -> None:
        """Write the line that says what runs: "start" the first time, "resume" after that.

        Args:
            run: engine, layout, model, recipe, versions; anything that JSON or str() can hold.
        """
        kind = "resume" if self._begun else "start"
        self._begun = True
        self._write(kind, self.now, {"schema": SCHEMA, "run": dict(run)})

    def step(
        self,
        step: int,
        loss: float,
        bases: Mapping[str, Sequence[float]],
        **numbers: float,
    ) -> None:
        """Write a sampled step.

        Args:
            step: optimizer steps done.
            loss: the training loss of that step; NaN where it is not known.
            bases: for each factor the base of every step since the line before, so that the lines
                together hold the whole schedule.
            numbers: what else to keep, such as tokens_per_second.
        """
        values = {"loss": loss, "bases": {k: list(v) for k, v in bases.items()}, **numbers}
        self._write("step", step, values)
        self._show(step_scalars(loss, {k: v[-1] for k, v in bases.items() if v}, numbers), step)

    def record(self, record: Record) -> None:
        """Write every field of a record, as a line of the record's kind; a listener for
        `scheduler.on_record`."""
        values = plain(record)
        self._write(record.kind, values.pop("step"), values)
        self._show(record_scalars(record), record.step)

    def event(self, event: str, text: str, step: int | None = None) -> None:
        """Write something that happened once: a checkpoint, a stop, a message of the library."""
        self._write("event", self.now if step is None else step, {"event": event, "text": text})

    def end(self, step: int, **results: Any) -> None:
        """Write that the run has reached its last step."""
        self._write("end", step, results)

    @contextlib.contextmanager
    def hearing(self, level: int = logging.INFO) -> Iterator[None]:
        """Write the messages of the logger "hdet_scale" (clamps, quarantines) as events while the
        context is open; afterwards the logger is as it was."""
        logger, handler = logging.getLogger("hdet_scale"), _Events(self)
        before = logger.level
        handler.setLevel(level)
        logger.addHandler(handler)
        logger.setLevel(min(level, logger.getEffectiveLevel()))
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)

    def sync(self) -> None:
        """Wait until the lines are on the disk: a checkpoint must not be ahead of the log."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file and the boards."""
        os.close(self._file)
        for board in self.boards:
            board.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _show(self, scalars: Mapping[str, float], step: int) -> None:
        for board in self.boards:
            board.write(scalars, step)

    def _write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        data = (json.dumps(plain(line), allow_nan=False, separators=(",", ":")) + "\n").encode()
        written = os.write(self._file, data)
        if written != len(data):
            raise OSError(
                errno.ENOSPC,
                f"{written} of {len(data)} bytes of a line were written: the disk may be full",
                str(self.path),
            )

    def _cut(self, step: int) -> bool:
        """Truncate at the first line of a later step; True if a start line is left."""
        keep, begun = 0, False
        with open(self.path, "rb") as file:
            for raw in file:
                line = _parse(raw)
                if line is not None and line["kind"] == "start":
                    _check_schema(line, self.path)
                if line is None or line["step"] > step or line["kind"] == "end":
                    break
                keep += len(raw)
                begun = begun or line["kind"] == "start"
        os.ftruncate(self._file, keep)
        return begun


class _Events(logging.Handler):
    """Messages of the library as lines of the log."""

    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        self.log.event(record.levelname.lower(), record.getMessage())


@dataclass(slots=True)
class Log:
    """A log that was read, each line as a dict."""

    path: Path
    starts: list[dict[str, Any]] = field(default_factory=list)
    """The start, and each resume."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)
    searches: list[dict[str, Any]] = field(default_factory=list)
    """One line for each search that is over."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.path.resolve().parent.name

    @property
    def records(self) -> list[dict[str, Any]]:
        """Lines of every kind of record, kind by kind."""
        return [*self.rounds, *self.trials, *self.searches, *self.evaluations]

    def bases(self) -> dict[str, list[float]]:
        """For each factor the base of every step, from the first on."""
        bases: dict[str, list[float]] = {}
        done = 0
        for line in self.steps:
            for name, values in line["bases"].items():
                if done + len(values) != line["step"]:
                    raise ValueError(
                        f"{self.path}: the line of step {line['step']} has {len(values)} bases of "
                        f"{name} after {done} steps: the schedule has a gap; was the log begun in "
                        "the middle of a run?"
                    )
                bases.setdefault(name, []).extend(values)
            done = line["step"]
        return bases


def read(run: str | Path) -> Log:
    """Read the log of a run. A torn last line is left out, and so are kinds that this version does
    not know.

    Args:
        run: the run's folder, or the file itself.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: a line is not of a run log, or the log has another schema.
    """
    path = Path(run)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"no run log at {path}: give the folder of a run, which has a {FILE} in it (hdet train "
            "--run FOLDER writes one)"
        )
    log = Log(path)
    kinds = {"start": log.starts, "resume": log.starts, "step": log.steps, "event": log.events}
    kinds |= {RoundRecord.kind: log.rounds, TrialRecord.kind: log.trials}
    kinds |= {SearchRecord.kind: log.searches, EvaluationRecord.kind: log.evaluations}
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            line = _parse(raw)
            if line is None:
                if raw.endswith(b"\n"):
                    raise ValueError(f"{path}, line {number} is not a line of a run log: {raw!r}")
                break
            if line["kind"] == "end":
                log.end = line
            elif line["kind"] in kinds:
                kinds[line["kind"]].append(line)
    for line in log.starts:
        _check_schema(line, log.path)
    return log


def _check_schema(line: Mapping[str, Any], path: Path) -> None:
    schema = line.get("schema")
    if schema == SCHEMA:
        return
    older = isinstance(schema, int) and schema < SCHEMA
    whose = "an older version of hdet_scale" if older else "another version of hdet_scale"
    raise ValueError(
        f"{path} has schema {schema!r}, of {whose}; this version reads and writes schema {SCHEMA}: "
        "report, replay or resume that run with the version that wrote it, or choose another "
        "folder for a new run"
    )


def plain(value: Any) -> Any:
    """A value as JSON has it: a dict for a record, a list for a tuple, None for a number that is
    not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def _parse(raw: bytes) -> dict[str, Any] | None:
    """The line as a dict; None if it is torn or not of a run log."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    whole = isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line
    return line if whole else None


def _lock(file: int, path: Path) -> None:
    """Lock the file: two writers would write lines twice. The lock ends with the process."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BlockingIOError(
                    errno.EWOULDBLOCK,
                    "another process writes this run: wait for it, or choose another folder",
                    str(path),
                ) from None
        except OSError:
            return  # a file system without locks
        time.sleep(0.1)
