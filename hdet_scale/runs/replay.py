"""Replay: the schedule of a run, run again without HDET.

    hdet replay runs/first -o schedule.json

    scheduler = ReplayLR(optimizer, "schedule.json")     # a plain torch scheduler, in a second run

Step k + 1 uses base[k], the exact value that the base of the first run had at that step: at spread
0, or on one device, the second run has the schedule of the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet_scale.runs.log import Log, read
from hdet_scale.runs.search_log import search_of, steps_of_search

SCHEDULE_SCHEMA = 1
RATE = "lr/group"


def discovered(log: Log) -> dict[str, Any]:
    """The schedule of a run: for every factor the base of every step.

    The steps of a search are left out: the schedule begins after them. It goes on where the watch
    lowers the rate, so that it has all steps since, also where the weights went back.

    Raises:
        ValueError: the run is still in its search, or its log has no sampled step.
    """
    before, search = steps_of_search(log), search_of(log)
    if search is not None and search["taken"] is None:
        raise ValueError(
            f"{log.path} is still in its search, at step {before}: replay it when the run has begun"
        )
    bases = {name: values[before:] for name, values in log.bases().items() if values[before:]}
    if not bases:
        raise ValueError(
            f"{log.path} has no sampled step{' after its search' if before else ''}: a schedule is "
            "in the step lines that hdet train, HDETCallback and RunLog.step write"
        )
    steps = max(len(values) for values in bases.values())
    return {
        "schema": SCHEDULE_SCHEMA,
        "run": log.name,
        "steps": steps,
        "steps_before": before,
        "bases": bases,
    }


class ReplayLR(LRScheduler):
    """A torch scheduler that plays the learning rates of a replayed run, for each param group.

    Args:
        optimizer: with as many param groups as the run had.
        schedule: the dict of `discovered`, or the path of the JSON file of `hdet replay`.
        last_epoch: as in torch's schedulers (default -1).

    Raises:
        ValueError: the schedule is of another schema or has other param groups; `step()` beyond
            its last step.

    Limitations:
        Other factors that the run explored are in `others`, by name; they are not written.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Mapping[str, Any] | str | Path,
        last_epoch: int = -1,
    ) -> None:
        values = _checked(schedule)
        self.rates = _rates(values["bases"], len(optimizer.param_groups))
        self.total_steps = len(self.rates[0])
        self.others = {k: v for k, v in values["bases"].items() if not k.startswith(RATE)}
        if last_epoch == -1:
            for group in optimizer.param_groups:
                # An earlier scheduler may have left its own initial_lr, which torch would keep.
                group.pop("initial_lr", None)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the next step; after the last step, the last rates once more."""
        if self.last_epoch > self.total_steps:
            raise ValueError(
                f"Tried to step {self.last_epoch} times and the schedule has {self.total_steps} "
                "steps: stop there, or replay a longer run"
            )
        at = min(self.last_epoch, self.total_steps - 1)
        return [rates[at] for rates in self.rates]

    def state_dict(self) -> dict[str, Any]:
        """torch's state, without the schedule itself, which is in its file."""
        mine = ("rates", "others")
        return {k: v for k, v in super().state_dict().items() if k not in mine}


def _checked(schedule: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    where = "the schedule"
    if not isinstance(schedule, Mapping):
        where = str(schedule)
        schedule = json.loads(Path(schedule).read_text(encoding="utf-8"))
    if not isinstance(schedule, Mapping) or "bases" not in schedule:
        raise ValueError(
            f'{where} has no "bases": give what `hdet replay RUN -o schedule.json` wrote'
        )
    if schedule.get("schema") != SCHEDULE_SCHEMA:
        raise ValueError(
            f"{where} has schema {schedule.get('schema')!r} and this version reads schema "
            f"{SCHEDULE_SCHEMA}: make it again with hdet replay"
        )
    return schedule


def _rates(bases: Mapping[str, Sequence[float]], groups: int) -> list[list[float]]:
    names = [name for name in bases if name.startswith(RATE)]
    wanted = [f"{RATE}{i}" for i in range(groups)]
    if sorted(names) != sorted(wanted):
        raise ValueError(
            f"the schedule has the learning rates {names} and the optimizer {groups} param groups: "
            "make the same param groups as the replayed run"
        )
    return [[float(v) for v in bases[name]] for name in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the schedule; the exit code."""
    parser = argparse.ArgumentParser(
        prog="hdet replay",
        description="The schedule of a run as a JSON file: "
        "hdet_scale.schedulers.ReplayLR(optimizer, file) and hdet train --replay FILE run it again "
        "without HDET.",
        epilog="example: hdet replay runs/first -o schedule.json",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--out", type=Path, help="the file; RUN/schedule.json if unset")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    options = parser.parse_args(argv)
    try:
        log = read(options.run)
        schedule = discovered(log)
        out = options.out or log.path.parent / "schedule.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(schedule, separators=(",", ":")) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"hdet replay: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"written": str(out), "steps": schedule["steps"], "run": log.name}))
    else:
        before = schedule["steps_before"]
        if before:
            print(f"{before} steps of a search are left out: the schedule began after them")
        for name, values in schedule["bases"].items():
            print(f"{name}: {len(values)} steps, {max(values):.3g} at most, {values[-1]:.3g} last")
        print(f"{out}   ReplayLR(optimizer, {str(out)!r})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
