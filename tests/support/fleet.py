"""Fleet: a few worker processes joined by gloo, started once, that run many cases.

A case is a module-level function `case(rank, size, *args)`; every worker calls it, and the
results come back in rank order. Starting processes costs seconds and a case milliseconds, so a
fleet is kept between tests. A fleet that may be out of step, because a case failed, hung or
killed a worker, is thrown away and started afresh for the next case: no test can hang another.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CASE_SECONDS = 180.0
GRACE_SECONDS = 3.0
"""How long the others may take once one worker has failed: they may wait for it in vain."""
START_SECONDS = 240.0
"""A busy machine takes its time to import torch in several processes; no case pays for it."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed.fsdp"])
"""Workers are forked from a process that has imported torch once, and done nothing with it."""


class CaseFailed(AssertionError):  # noqa: N818 - what a test reports, not an error of the fleet
    """A case raised in a worker; the text is the worker's traceback."""


class CaseHung(CaseFailed):
    """A case did not end in time, or its process was gone."""


class Fleet:
    """`size` workers with a process group between them; `run` gives them a case."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._home: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        seconds: float = CASE_SECONDS,
        grace: float = GRACE_SECONDS,
    ) -> list[Any]:
        """Every rank's result. The first failing rank's exception is raised here."""
        if not self._workers:
            self._start()
        order = pickle.dumps((case, args))
        for _, pipe in self._workers:
            pipe.send_bytes(order)
        replies = self._collect(seconds, grace)
        failed = [r for r in replies if not r[0]]
        if not failed:
            return [result for _, result in replies]
        self.stop()
        # Whoever waited for the rank that failed, failed because of it.
        first = min(failed, key=lambda r: isinstance(r[1], CaseHung))
        raise first[1]

    def stop(self) -> None:
        """End the workers that this fleet started."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []
        if self._home is not None:
            self._home.cleanup()

    def _start(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="fleet")
        for rank in range(self.size):
            ours, theirs = FORKS.Pipe()
            store = str(Path(self._home.name, "store"))
            args = (rank, self.size, store, theirs, dict(os.environ))
            process = FORKS.Process(target=_work, args=args, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        failed = [reason for ready, reason in self._collect(START_SECONDS) if not ready]
        if failed:
            self.stop()
            raise failed[0]

    def _collect(self, seconds: float, grace: float = GRACE_SECONDS) -> list[tuple[bool, Any]]:
        replies: dict[int, tuple[bool, Any]] = {}
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        deadline = time.monotonic() + seconds
        while len(replies) < self.size:
            waiting = [p for p, rank in ranks.items() if rank not in replies]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                replies[ranks[pipe]] = self._receive(pipe, ranks[pipe])
                if not replies[ranks[pipe]][0]:
                    deadline = min(deadline, time.monotonic() + grace)
        return [replies.get(rank) or self._hung(rank, seconds) for rank in range(self.size)]

    def _receive(self, pipe: Connection, rank: int) -> tuple[bool, Any]:
        try:
            ok, result = pickle.loads(pipe.recv_bytes())
        except EOFError:
            process = self._workers[rank][0]
            process.join()
            return False, CaseHung(f"rank {rank} of {self.size} died: exit {process.exitcode}")
        if ok:
            return True, result
        return False, CaseFailed(f"rank {rank} of {self.size} failed:\n{result}")

    def _hung(self, rank: int, seconds: float) -> tuple[bool, Any]:
        """Its stack goes to stderr, which the test's report shows."""
        process = self._workers[rank][0]
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return False, CaseHung(f"rank {rank} of {self.size} gave no answer in {seconds} s")


def _work(rank: int, size: int, store: str, pipe: Connection, environment: dict[str, str]) -> None:
    # Whatever the fork server started with: a variable that is gone since must not come back.
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=START_SECONDS),
    )
    pipe.send_bytes(pickle.dumps((True, "ready")))
    while True:
        try:
            case, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except Exception:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue
        try:
            reply = pickle.dumps((True, case(rank, size, *args)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(reply)
