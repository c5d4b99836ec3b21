"""Boards: TensorBoard and W&B get the run log's values, under keys that do not change.

hdet/base_lr/group0    hdet/replica3/lr          hdet/converge_seconds
hdet/slope/group0      hdet/replica3/loss        hdet/wire_bytes
hdet/velocity/group0   hdet/loss                 hdet/quarantined
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hdet_scale.method.records import RoundRecord

BOARDS = ("tensorboard", "wandb")


class Board(Protocol):
    """What shows numbers along the steps."""

    def write(self, scalars: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in a folder; what an earlier run wrote after `step` is purged."""

    def __init__(self, folder: str | Path, *, step: int = 0) -> None:
        _require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A W&B run of the folder's name, continued when it is resumed."""

    def __init__(self, folder: str | Path, *, run: Mapping[str, Any] | None = None) -> None:
        _require("wandb")
        import wandb

        name = Path(folder).resolve().name
        self._run: Any = wandb.init(
            project="hdet_scale",
            name=name,
            id=name,
            resume="allow",
            dir=str(folder),
            config=dict(run or {}),
        )

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def boards(
    names: Sequence[str], folder: Path, *, step: int, run: Mapping[str, Any] | None = None
) -> list[Board]:
    """The boards by name, for a run that has done `step` steps."""
    made: list[Board] = []
    for name in names:
        if name == "tensorboard":
            made.append(TensorBoard(folder / "tensorboard", step=step))
        elif name == "wandb":
            made.append(WandB(folder, run=run))
        else:
            raise ValueError(f"no board called {name!r}: choose among {list(BOARDS)}")
    return made


def round_scalars(record: RoundRecord) -> dict[str, float]:
    """A round under the stable keys; what is not a finite number is left out."""
    found = {_key("base_", name): value for name, value in record.bases.items()}
    found |= {f"hdet/velocity/{_place(n)}": v for n, v in record.velocities.items()}
    for name, value in (record.probe.evidence if record.probe else {}).items():
        # A factor's name alone stands for the slope along it, in standard errors.
        found[f"hdet/slope/{_place(name)}" if name in record.bases else f"hdet/{name}"] = value
    for name, values in record.values.items():
        factor, _, place = name.partition("/")
        last = "" if place in ("", "group0") else f"/{place}"
        found |= {f"hdet/replica{r}/{factor}{last}": v for r, v in enumerate(values)}
    found |= {f"hdet/replica{r}/loss": v for r, v in enumerate(record.losses)}
    found |= {
        "hdet/converge_seconds": record.seconds,
        "hdet/wire_bytes": float(record.wire_bytes),
        "hdet/quarantined": float(len(record.quarantined)),
    }
    return {k: v for k, v in found.items() if math.isfinite(v)}


def step_scalars(
    loss: float, bases: Mapping[str, float], numbers: Mapping[str, float]
) -> dict[str, float]:
    """A sampled step under the same keys."""
    found = {"hdet/loss": loss}
    found |= {_key("base_", name): value for name, value in bases.items()}
    found |= {f"hdet/{name}": value for name, value in numbers.items()}
    return {k: v for k, v in found.items() if math.isfinite(v)}


def _key(prefix: str, factor: str) -> str:
    kind, _, place = factor.partition("/")
    return f"hdet/{prefix}{kind}" + (f"/{place}" if place else "")


def _place(factor: str) -> str:
    """ "group0" of "lr/group0"; another factor keeps its name."""
    return factor.removeprefix("lr/")


def _require(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as missing:
        raise ImportError(
            f"{module} is not installed: pip install hdet_scale[boards], or leave it out of --board"
        ) from missing
