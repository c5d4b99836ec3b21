"""Files of a mark: the slices of each shard, beside a checkpoint of sharded replicas.

Where a replica is one rank, the scheduler's state has the mark. Where it is sharded, no rank has
all of it, and a checkpoint that loads into other layouts has no place for it: each shard's slices
are a file, which a resume in the same layout finds.

    marks.save(folder, scheduler)      after the checkpoint, on every rank
    marks.load(folder, scheduler)      after it was loaded, on every rank
"""

from __future__ import annotations

from pathlib import Path

import torch

from hdet_scale.phases.exploring import Exploring


def save(folder: Path, scheduler: Exploring) -> None:
    """This rank's slices while what a race found is watched; the same on every replica, of which
    the first writes."""
    if _apart(scheduler) and scheduler.replicas.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(scheduler.mark_state(), _file(folder, scheduler))


def load(folder: Path, scheduler: Exploring) -> None:
    """Continue what `save` wrote; a checkpoint of other shards has none that fits."""
    path = _file(folder, scheduler)
    if _apart(scheduler) and path.is_file():
        scheduler.load_mark(torch.load(path, map_location="cpu", weights_only=True))


def _apart(scheduler: Exploring) -> bool:
    return scheduler.watching and scheduler.replicas.shard_size > 1


def _file(folder: Path, scheduler: Exploring) -> Path:
    at = scheduler.replicas
    return folder / f"mark_{at.shard_rank:02d}_of_{at.shard_size:02d}.pt"
