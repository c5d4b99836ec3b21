"""The run log: what a run did, a JSON line at a time, in RUN/log.jsonl.

One line a round and a sampled line a step, written by replica 0. A line is appended with a single
write: a kill leaves at most one torn line, at the end. Steps never fall along the file, so that
what a resumed run has to do again is a tail of it: it is cut before the first new line, and no
step and no round is there twice. docs/runlog.md has the schema.

    log = RunLog("runs/first")
    log.begin({"engine": "ddp"})
    scheduler.on_round(log.round)
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

from hdet_scale.runs.boards import Board, round_scalars, step_scalars
from hdet_scale.method.records import RoundRecord

SCHEMA = 2
"""Raised when a reader of the older one would misread; new kinds and fields do not raise it."""
FILE = "log.jsonl"
LOCK_SECONDS = 10.0
"""How long a writer that was just killed may take to be gone."""


class RunLog:
    """The log of one run, open for writing by this process alone."""

    def __init__(self, folder: str | Path, *, step: int = 0, boards: Sequence[Board] = ()) -> None:
        """Open RUN's log for a run that has done `step` steps; what it says of later ones, and a
        torn line at its end, is cut off."""
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
        """The line that says what runs: "start" the first time, "resume" after it."""
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
        """A sampled step. `bases`: for each factor the base of every step since the line before,
        so that the lines together hold the whole schedule."""
        told = {"loss": loss, "bases": {k: list(v) for k, v in bases.items()}, **numbers}
        self._write("step", step, told)
        self._show(step_scalars(loss, {k: v[-1] for k, v in bases.items() if v}, numbers), step)

    def record(self, record: Any) -> None:
        values = dataclasses.asdict(record)
        self._write(record.kind, values.pop("step"), values)
        if record.kind == "round":
            self._show(round_scalars(record), record.step)

    def event(self, event: str, text: str, step: int | None = None) -> None:
        """Something that happened once: a checkpoint, a stop, a message of the library."""
        self._write("event", self.now if step is None else step, {"event": event, "text": text})

    def end(self, step: int, **results: Any) -> None:
        """The run is whole."""
        self._write("end", step, results)

    @contextlib.contextmanager
    def hearing(self, level: int = logging.INFO) -> Iterator[None]:
        """Inside, what hdet_scale says (clamps, quarantines) becomes events; afterwards the
        logger is as it was."""
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
        """On the disk: a checkpoint must not know more than the log."""
        os.fsync(self._file)

    def close(self) -> None:
        """The boards too."""
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
        """Truncate at the first line of a later step; True when the run had begun."""
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
    """A log that was read; each line as the dict that it is."""

    path: Path
    starts: list[dict[str, Any]] = field(default_factory=list)
    """The start, and each resume."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The run's folder."""
        return self.path.resolve().parent.name

    def bases(self) -> dict[str, list[float]]:
        """For each factor the base of every step, from the first on."""
        found: dict[str, list[float]] = {}
        done = 0
        for line in self.steps:
            for name, values in line["bases"].items():
                if done + len(values) != line["step"]:
                    raise ValueError(
                        f"{self.path}: the line of step {line['step']} has {len(values)} bases of "
                        f"{name} after {done} steps: the schedule has a gap; was the log begun in "
                        "the middle of a run?"
                    )
                found.setdefault(name, []).extend(values)
            done = line["step"]
        return found


def read(run: str | Path) -> Log:
    """The log of a run, from its folder or the file itself. A torn last line is left out, and so
    are kinds that this version does not know."""
    path = Path(run)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"no run log at {path}: give the folder of a run, which has a {FILE} in it (hdet train "
            "--run FOLDER writes one)"
        )
    log = Log(path)
    kinds = {"start": log.starts, "resume": log.starts, "step": log.steps}
    kinds |= {"round": log.rounds, "event": log.events}
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
    if line.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {line.get('schema')!r} and this version reads and writes {SCHEMA}: "
            "use the version of hdet_scale that wrote it, or another folder"
        )


def plain(value: Any) -> Any:
    """As JSON has it: lists for tuples, null for what is not a finite number."""
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
    """None for a torn line or none of ours."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    whole = isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line
    return line if whole else None


def _lock(file: int, path: Path) -> None:
    """Two writers would make double lines. The lock goes with the process, however it ends."""
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
