"""Checkpoints of a run: a folder for each, whole once it has its name.

    RUN/partial-400/          while it is written
    RUN/step-00000400/        when every rank has written its part
    RUN/step-00000400/checkpoint.json

A kill leaves at most a partial one, which nothing reads and the next start removes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

FILE = "checkpoint.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a reader must know before it opens a checkpoint."""

    engine: str
    ranks: int
    apart: bool
    """Saved in the middle of a round: every rank has its own file."""

    @classmethod
    def read(cls, folder: Path) -> Kept:
        return cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    def check(self, now: Kept, folder: Path) -> None:
        """Refuse what this run cannot continue."""
        if self.engine != now.engine:
            raise ValueError(
                f"{folder} was saved with --engine {self.engine} and this run has --engine "
                f"{now.engine}: use the same engine"
            )
        if self.apart and self.ranks != now.ranks:
            raise ValueError(
                f"{folder} was saved by {self.ranks} ranks in the middle of a round and there are "
                f"{now.ranks} now: use as many, or remove it to go on from the one before it"
            )


def newest(run: Path) -> Path | None:
    """The newest whole checkpoint."""
    return max(run.glob("step-*"), default=None)


def clear(run: Path) -> None:
    """Remove what a kill has left half written."""
    for partial in run.glob("partial-*"):
        shutil.rmtree(partial)


@contextmanager
def writing(run: Path, step: int, kept: Kept) -> Iterator[Path]:
    """On every rank: the folder to write to; it gets its name when all have left the block."""
    partial, whole, first = run / f"partial-{step}", run / f"step-{step:08d}", dist.get_rank() == 0
    if first:
        partial.mkdir(parents=True, exist_ok=True)
        kept.write(partial)
    dist.barrier()
    yield partial
    dist.barrier()
    if first:
        partial.rename(whole)
    dist.barrier()
