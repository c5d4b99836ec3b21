"""LongRun: a training script as real processes, to be killed with SIGKILL and started again.

As a program it is one rank of a DDP job that saves checkpoints and, when it finds some in its
directory, goes on from the newest that every rank has. As a class it starts the ranks, kills
them when one has reached a step, and reads what a finished run has left.

    kind "shared", "local": rank 0 saves at converges alone, every rank loads that file
    kind "between":         every rank saves its own, three steps into each round
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import AdamW

from hdet_scale import OneCycleAutoLR
from hdet_scale.train.workers import leave
from tests.support.toy import learn, toy

STEPS, INTERVAL = 44, 5
LONG_RUN_SECONDS = 90.0
PACE = 0.02
"""Seconds between the steps of a run that is to be killed: it must not end before the kill."""


class LongRun:
    """`size` processes of this program in one directory."""

    def __init__(self, home: Path, kind: str, size: int) -> None:
        self.home, self.kind, self.size = home, kind, size
        home.mkdir(parents=True, exist_ok=True)
        self._starts = 0

    def finish(self) -> list[Any]:
        """Run to the end; what each rank ends with."""
        processes = self._start()
        try:
            for process in processes:
                code = process.wait(LONG_RUN_SECONDS)
                assert code == 0, f"exit {code}:\n{self._log(process)}"
        finally:
            self._kill(processes)
        return [torch.load(self.home / f"final-{r}.pt") for r in range(self.size)]

    def kill_at(self, step: int, first: int) -> None:
        """SIGKILL to rank `first` when it has done `step` steps, then to the others."""
        processes = self._start(pace=PACE)
        deadline = time.monotonic() + LONG_RUN_SECONDS
        progress = self.home / f"progress-{first}"
        try:
            while not (progress.exists() and progress.stat().st_size >= step):
                assert time.monotonic() < deadline, self._log(processes[first])
                assert processes[first].poll() is None, self._log(processes[first])
                time.sleep(0.001)
            processes[first].send_signal(signal.SIGKILL)
            assert processes[first].wait() == -signal.SIGKILL, "it had ended before the kill"
        finally:
            self._kill(processes)
        assert not list(self.home.glob("final-*.pt"))

    def _start(self, pace: float = 0.0) -> list[subprocess.Popen[bytes]]:
        self._starts += 1
        store = self.home / f"store-{self._starts}"
        processes = []
        for rank in range(self.size):
            (self.home / f"progress-{rank}").unlink(missing_ok=True)
            arguments = [str(self.home), str(store), self.kind]
            arguments += [str(pace), str(rank), str(self.size)]
            with open(self.home / f"log-{rank}", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __name__, *arguments],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=Path(__file__).parents[2],
                    )
                )
        return processes

    def _log(self, process: subprocess.Popen[bytes]) -> str:
        assert isinstance(process.args, list)
        return (self.home / f"log-{process.args[-2]}").read_text(errors="replace")

    @staticmethod
    def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def random_kill(kind: str) -> tuple[int, int]:
    """(step, rank): random, and the same in every run of the suite."""
    dice = random.Random(f"killing {kind}")
    return dice.randrange(INTERVAL + 4, STEPS - 14), dice.randrange(2)


# -- the program ------------------------------------------------------------------------------


def _save(path: Path, state: Any) -> None:
    """Whole or not at all: a kill in the middle of it leaves the older checkpoints."""
    torch.save(state, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


def _newest(home: Path, kind: str, size: int) -> int | None:
    owners = range(size) if kind == "between" else range(1)
    steps = [{int(p.stem.split("-")[2]) for p in home.glob(f"step-{r}-*.pt")} for r in owners]
    common = set.intersection(*steps)
    return max(common) if common else None


def train(rank: int, size: int, home: Path, kind: str, pace: float = 0.0) -> dict[str, Any]:
    """The script of a user: build, load what there is, train, save on the way."""
    home.mkdir(parents=True, exist_ok=True)
    model = toy(rank, norm=True)
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    scheduler = OneCycleAutoLR(
        optimizer,
        0.05,
        total_steps=STEPS,
        ensemble_lr_spread_ratio=0.4,
        model_sync_interval=INTERVAL,
        enable_auto_lr=True,
        auto_lr_warmup_steps=INTERVAL,
        model=model,
        gradients="shared" if kind == "between" else kind,
        seed=3,
    )

    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "replica": scheduler.replica_state_dict(),
            "lr": scheduler.get_last_lr(),
        }

    begin = 0
    newest = _newest(home, kind, size)
    if newest is not None:
        begin = newest
        owner = rank if kind == "between" else 0
        saved = torch.load(home / f"step-{owner}-{newest}.pt")
        model.load_state_dict(saved["model"])
        scheduler.load_state_dict(saved["scheduler"])
        optimizer.load_state_dict(saved["optimizer"])
        if kind == "between":
            scheduler.load_replica_state_dict(saved["replica"])
    with open(home / f"progress-{rank}", "ab", buffering=0) as progress:
        progress.write(b"." * begin)
        for step in range(begin, STEPS):
            torch.manual_seed(step)  # whatever the user draws is the user's to restore
            scheduler.step(learn(model, optimizer, step, rank))
            if kind == "between":
                due = (step + 1) % INTERVAL == 3
            else:
                due = scheduler.at_boundary and rank == 0
            if due:
                _save(home / f"step-{rank}-{step + 1}.pt", state())
            progress.write(b".")
            time.sleep(pace)
    scheduler.finalize()
    return state() | {"began": begin}


def main(home: Path, store: Path, kind: str, pace: float, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    _save(home / f"final-{rank}.pt", train(rank, size, home, kind, pace))
    dist.barrier()
    dist.destroy_process_group()
    # An interpreter that goes down while a thread of gloo is still alive may abort.
    leave(0)


if __name__ == "__main__":
    home, store, kind, pace, rank, size = sys.argv[1:]
    main(Path(home), Path(store), kind, float(pace), int(rank), int(size))
