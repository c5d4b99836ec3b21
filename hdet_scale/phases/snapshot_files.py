"""Snapshots of sharded replicas in a checkpoint: one call on every engine.

Where a replica is one rank, the scheduler's state holds the snapshot. Where it is sharded, no rank
has all of it: it is saved with torch.distributed.checkpoint in `snapshot/` below the checkpoint's
folder. The snapshot is equal on all replicas, so that each shard is written once. FSDP2 describes
its shards as DTensors, which another number of shards can load; a ZeRO partition is stored by
shard, for the same number alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hdet_scale.engines.protocol import Engine
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.topology import local

logger = logging.getLogger("hdet_scale")
FOLDER = "snapshot"


@dataclass
class Opaque:
    """A dict that is one value to a checkpoint, whatever is in it."""

    values: dict[str, Any]


def save(folder: Path, snapshot: Snapshot | None) -> None:
    """Save a sharded snapshot below `folder`; collective. Nothing where replicas are whole."""
    if snapshot is None or snapshot.engine.replicas.shard_size == 1:
        return
    engine = snapshot.engine
    described = {
        f"tensor {i}": _described(engine, snapshot, i, value)
        for i, value in enumerate(snapshot.tensors)
    }
    names: list[dict[str, Any] | None] = []
    for i, kept in enumerate(snapshot.state):
        names.append(None if kept is None else {})
        for name, value in (kept or {}).items():
            if isinstance(value, Tensor):
                described[f"state {i} {name}"] = _described(engine, snapshot, i, value)
                names[-1][name] = (value.dtype, tuple(value.shape) if value.dim() == 0 else None)  # type: ignore[index]
            else:
                names[-1][name] = value  # type: ignore[index]
    about = {
        "shards": engine.replicas.shard_size,
        "state": names,
        "options": snapshot.options,
        "scale": snapshot.scale,
    }
    dcp_save(_keyed(engine, about, described), checkpoint_id=str(folder / FOLDER))


def load(folder: Path, engine: Engine) -> dict[str, Any] | None:
    """What `save` saved, as a snapshot's state; collective. None where there is nothing to load."""
    if not (folder / FOLDER).is_dir():
        return None
    about = _about(folder, engine)
    if about is None:
        return None
    targets = [*engine.stepped(), *engine.restored_buffers()]
    blank = {f"tensor {i}": _blank(engine, t, i, local(t).dtype) for i, t in enumerate(targets)}
    for i, kept in enumerate(about["state"]):
        for name, value in (kept or {}).items():
            if isinstance(value, tuple) and isinstance(value[0], torch.dtype):
                blank[f"state {i} {name}"] = (
                    _blank(engine, targets[i], i, value[0])
                    if value[1] is None
                    else torch.empty(value[1], dtype=value[0])
                )
    holder = _keyed(engine, {}, blank)
    dcp_load(holder, checkpoint_id=str(folder / FOLDER))
    found = holder[_key(engine)]
    return {
        "tensors": [local(found[f"tensor {i}"]).cpu() for i in range(len(targets))],
        "state": [
            None
            if kept is None
            else {
                name: local(found[f"state {i} {name}"]).cpu()
                if f"state {i} {name}" in found
                else value
                for name, value in kept.items()
            }
            for i, kept in enumerate(about["state"])
        ],
        "options": about["options"],
        "scale": about["scale"],
    }


def _about(folder: Path, engine: Engine) -> dict[str, Any] | None:
    """What is not a tensor; None where the shards do not fit this engine."""
    holder: dict[str, Any] = {"about": Opaque({})}
    dcp_load(holder, checkpoint_id=str(folder / FOLDER))
    about: dict[str, Any] = holder["about"].values
    if about["shards"] != engine.replicas.shard_size and not engine.resharded:
        logger.warning(
            "%s was saved by replicas of %d shards and these have %d: this engine loads the same "
            "number alone, and the watch ends",
            folder / FOLDER,
            about["shards"],
            engine.replicas.shard_size,
        )
        return None
    return about


def _key(engine: Engine) -> str:
    where = engine.replicas
    return "whole" if engine.resharded else f"shard {where.shard_rank} of {where.shard_size}"


def _keyed(engine: Engine, about: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    keyed: dict[str, Any] = {_key(engine): tensors}
    return {"about": Opaque(about), **keyed} if about else keyed


def _described(engine: Engine, snapshot: Snapshot, index: int, value: Tensor) -> Tensor:
    """A part of the snapshot as the engine stores it; buffers and scalars are whole everywhere."""
    if index >= len(snapshot.params) or value.dim() == 0:
        return value
    return engine.as_saved(snapshot.params[index], value)


def _blank(engine: Engine, target: Tensor, index: int, dtype: torch.dtype) -> Tensor:
    """Memory for a part, as the engine stores it."""
    own = local(target)
    empty = torch.empty(own.shape, dtype=dtype, device="cpu")
    return engine.as_saved(target, empty) if index < len(engine.stepped()) else empty
