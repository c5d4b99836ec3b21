"""Boards: TensorBoard and W&B get the run log's numbers, under keys that do not change.

step         hdet/loss                 hdet/base_lr/group0      hdet/tokens_per_second
round        hdet/base_lr/group0       hdet/replica3/lr         hdet/converge_seconds
             hdet/velocity/group0      hdet/replica3/loss       hdet/wire_bytes
             hdet/slope/group0         hdet/quarantined
trial        hdet/trial3/lr            hdet/trial3/loss         hdet/trial3/translation
                                       hdet/trial3/error
search       hdet/search/initial_lr/group0   hdet/search/taken_lr/group0
             hdet/search/trials        hdet/search/completed
evaluation   hdet/held_out             hdet/base_lr/group0      hdet/evaluation_seconds
             hdet/scale                hdet/restart

The second param group: hdet/base_lr/group1, hdet/replica3/lr/group1. A number that is not finite
is left out. Trials have keys of their own by their index: several end at the same step, and W&B
keeps one value of a key for each step.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hdet_scale.method.records import Record, RoundRecord, SearchRecord, TrialRecord

BOARDS = ("tensorboard", "wandb")


class Board(Protocol):
    """Shows numbers along the steps of a run."""

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
    """Make boards.

    Args:
        names: any of BOARDS.
        folder: the run's folder, where TensorBoard writes.
        step: optimizer steps that the run has done; later points of an earlier process are purged.
        run: what W&B shows as the run's configuration (default none).

    Raises:
        ValueError: there is no board of that name.
        ImportError: the board's package is not installed.
    """
    made: list[Board] = []
    for name in names:
        if name == "tensorboard":
            made.append(TensorBoard(folder / "tensorboard", step=step))
        elif name == "wandb":
            made.append(WandB(folder, run=run))
        else:
            raise ValueError(f"no board called {name!r}: choose among {list(BOARDS)}")
    return made


def record_scalars(record: Record) -> dict[str, float]:
    """The finite numbers of a record, under the keys above."""
    if isinstance(record, RoundRecord):
        scalars = _round(record)
    elif isinstance(record, TrialRecord):
        at = f"hdet/trial{record.trial}"
        scalars = {f"{at}/{_short(name)}": rate for name, rate in record.rates.items()}
        scalars |= {f"{at}/loss": record.loss, f"{at}/error": record.error}
        scalars[f"{at}/translation"] = record.translation
    elif isinstance(record, SearchRecord):
        scalars = {_key("search/initial_", name): rate for name, rate in record.initial.items()}
        scalars |= {_key("search/taken_", name): rate for name, rate in record.taken.items()}
        scalars["hdet/search/trials"] = float(record.trials)
        scalars["hdet/search/completed"] = float(record.completed)
    else:
        scalars = {_key("base_", name): rate for name, rate in record.rates.items()}
        scalars |= {"hdet/held_out": record.loss, "hdet/scale": record.scale}
        scalars["hdet/restart"] = float(record.restart)
        scalars["hdet/evaluation_seconds"] = record.seconds
    return _finite(scalars)


def step_scalars(
    loss: float, bases: Mapping[str, float], numbers: Mapping[str, float]
) -> dict[str, float]:
    """The finite numbers of a sampled step, under the keys above."""
    scalars = {"hdet/loss": loss}
    scalars |= {_key("base_", name): value for name, value in bases.items()}
    scalars |= {f"hdet/{name}": value for name, value in numbers.items()}
    return _finite(scalars)


def _round(record: RoundRecord) -> dict[str, float]:
    scalars = {_key("base_", name): value for name, value in record.bases.items()}
    scalars |= {f"hdet/velocity/{_place(n)}": v for n, v in record.velocities.items()}
    for name, value in record.probe.evidence.items() if record.probe is not None else ():
        # The name of a factor stands for the slope along it, in standard errors.
        scalars[f"hdet/slope/{_place(name)}" if name in record.bases else f"hdet/{name}"] = value
    scalars |= _replicas(record.values, record.losses)
    return scalars | {
        "hdet/converge_seconds": record.seconds,
        "hdet/wire_bytes": float(record.wire_bytes),
        "hdet/quarantined": float(len(record.quarantined)),
    }


def _replicas(values: Mapping[str, Sequence[float]], losses: Sequence[float]) -> dict[str, float]:
    """What each replica used, and its loss."""
    scalars: dict[str, float] = {}
    for name, row in values.items():
        scalars |= {f"hdet/replica{r}/{_short(name)}": v for r, v in enumerate(row)}
    return scalars | {f"hdet/replica{r}/loss": v for r, v in enumerate(losses)}


def _finite(scalars: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in scalars.items() if math.isfinite(value)}


def _key(prefix: str, factor: str) -> str:
    kind, _, place = factor.partition("/")
    return f"hdet/{prefix}{kind}" + (f"/{place}" if place else "")


def _short(factor: str) -> str:
    """ "lr" of "lr/group0", "lr/group1" of "lr/group1"."""
    return factor.removesuffix("/group0")


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
