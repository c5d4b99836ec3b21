"""Checkpoints of replicas: who writes what, and where.

DeepSpeed's file names know the rank within a replica only, so that all replicas would write the
same files. Here

    <dir>/<tag>/                   DeepSpeed's own layout, written by replica 0: what zero_to_fp32,
                                   inference and any other reader find
    <dir>/<tag>/hdet.json          the layout, and whether the replicas had diverged
    <dir>/<tag>/replica_<r>/       only where they had: the same files of each replica, and what
                                   each of its ranks remembers of the round
    <dir>/<tag>/snapshot/          only of sharded replicas whose run is watched

Right after a converge replicas are equal and the first is all there is. In the middle of a round
each replica has its own place, and what stands in DeepSpeed's layout is the converged model: the
parameters are averaged for the writing and put back.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from hdet_scale.converge.pipeline import Converge
from hdet_scale.deepspeed.partitions import ZeroEngine
from hdet_scale.phases.phased import PhasedScheduler
from hdet_scale.topology import Replicas

LAYOUT_FILE = "hdet.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a checkpoint's reader must know before it opens a file."""

    replicas: int
    shards: int
    stage: int
    diverged: bool
    """Each replica has its own place."""
    step: int

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LAYOUT_FILE).write_text(
            json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8"
        )

    @classmethod
    def read(cls, folder: Path) -> Layout | None:
        """None for a checkpoint that plain DeepSpeed wrote."""
        path = folder / LAYOUT_FILE
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def check(self, now: Layout, folder: Path, *, resume: bool) -> None:
        """Refuse a checkpoint that this run cannot continue, the same on every rank."""
        if self.stage != now.stage:
            raise ValueError(
                f"{folder} was saved with ZeRO stage {self.stage} and this run has stage "
                f"{now.stage}: set the stage to {self.stage}, or start from its weights "
                "(zero_to_fp32)"
            )
        if self.shards != now.shards and self.stage > 0:
            raise ValueError(
                f"{folder} was saved by replicas of {self.shards} ranks and a replica has "
                f'{now.shards} now: ZeRO\'s partitions fit "shards": {self.shards} only'
            )
        if resume and self.diverged and self.replicas != now.replicas:
            raise ValueError(
                f"{folder} was saved by {self.replicas} replicas that had diverged, and there are "
                f'{now.replicas} now: use "replicas": {self.replicas}, or a checkpoint saved right '
                "after a converge, or load_module_only=True for the converged weights"
            )


def place(replica: int) -> str:
    """The folder of a replica below a tag's."""
    return f"replica_{replica:02d}"


def save_rank(folder: Path, scheduler: PhasedScheduler) -> None:
    """What this rank remembers of the round: its losses, the wire's and the outer step's memory."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"replica": scheduler.replica_state_dict(), "hdet": scheduler.state_dict()["hdet"]}
    torch.save(own, folder / _file(scheduler))


def load_rank(folder: Path, scheduler: PhasedScheduler) -> None:
    """Continue what `save_rank` wrote."""
    own = torch.load(folder / _file(scheduler), map_location="cpu", weights_only=True)
    scheduler.load_state_dict({**scheduler.state_dict(), "hdet": own["hdet"]})
    scheduler.load_replica_state_dict(own["replica"])


def _file(scheduler: PhasedScheduler) -> str:
    return f"round_{scheduler.replicas.shard_rank:02d}.pt"


@contextlib.contextmanager
def converged(engine: ZeroEngine, replicas: Replicas) -> Iterator[None]:
    """Inside, every replica holds the mean; afterwards its own parameters again, to the bit.

    Memory: a copy of the local fp32 partition on the host.
    """
    tensors = engine.parameters() + engine.buffers()
    kept: list[Tensor] = [t.detach().to("cpu", copy=True) for t in tensors]
    Converge(tensors, replicas)()
    engine.refresh()
    try:
        yield
    finally:
        with torch.no_grad():
            for t, own in zip(tensors, kept, strict=True):
                t.copy_(own)
        engine.refresh()
