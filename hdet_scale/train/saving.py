"""Checkpoints of a run: one folder each, renamed when it is complete.

    RUN/partial-400/          while it is written
    RUN/step-00000400/        when every rank has written its part
    RUN/step-00000400/checkpoint.json

A kill leaves at most a partial folder. No run loads it, and the next start removes it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

INFO_FILE = "checkpoint.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a run must know of a checkpoint before it loads it."""

    engine: str
    """The --engine of the run that saved it."""
    ranks: int
    """Its world size."""
    diverged: bool
    """Saved in the middle of a round: every rank has its own file."""

    @classmethod
    def read(cls, folder: Path) -> CheckpointInfo:
        """Read the info of a checkpoint."""
        return cls(**json.loads((folder / INFO_FILE).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        """Write it into the folder of a checkpoint."""
        (folder / INFO_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    def check(self, now: CheckpointInfo, folder: Path) -> None:
        """Raise ValueError if a run cannot continue from this checkpoint.

        Args:
            now: the engine and the ranks of the run.
            folder: of this checkpoint, for the error.
        """
        if self.engine != now.engine:
            raise ValueError(
                f"{folder} was saved with --engine {self.engine} and this run has --engine "
                f"{now.engine}: use the same engine"
            )
        if self.diverged and self.ranks != now.ranks:
            raise ValueError(
                f"{folder} was saved by {self.ranks} ranks in the middle of a round and there are "
                f"{now.ranks} now: use as many, or remove it to go on from the one before it"
            )


def newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run; None if there is none."""
    return max(run.glob("step-*"), default=None)


def remove_partial(run: Path) -> None:
    """Remove checkpoints that a kill left incomplete."""
    for partial in run.glob("partial-*"):
        shutil.rmtree(partial)


@contextmanager
def writing(run: Path, step: int, info: CheckpointInfo) -> Iterator[Path]:
    """Yield the folder that every rank writes its part of a checkpoint to. Collective.

    The folder gets its final name when all ranks have left the block.
    """
    partial, whole, first = run / f"partial-{step}", run / f"step-{step:08d}", dist.get_rank() == 0
    if first:
        partial.mkdir(parents=True, exist_ok=True)
        info.write(partial)
    dist.barrier()
    yield partial
    dist.barrier()
    if first:
        partial.rename(whole)
    dist.barrier()
