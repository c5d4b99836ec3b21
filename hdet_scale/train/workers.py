"""Local workers: processes on this machine that form one process group, started by one call.

    for message in messages(function, 4, *args):      # function(send, *args) runs in each worker
        ...

The process group exists while the function runs. Messages of one worker arrive in the order in
which it sent them. When a worker fails, the others are ended and its error is raised. Leaving the
loop early, by an exception or Ctrl-C, ends all workers.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

Send = Callable[[Any], None]

GRACE_SECONDS = 3.0
"""How long a worker may take to end after SIGTERM before it is killed."""
POLL_SECONDS = 0.05


class WorkerError(RuntimeError):
    """A worker failed. The text names it and holds its traceback."""


class Refused(Exception):  # noqa: N818 - an answer to the user, not a fault of the program
    """The user's options cannot be used. The text says why, in one line for the screen."""


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    traceback: str
    refused: str | None = None


def messages(
    function: Callable[..., None],
    count: int,
    *args: object,
    backend: str = "gloo",
    forward_sigterm: bool = False,
) -> Iterator[Any]:
    """Run `function(send, *args)` in `count` workers and yield what they send, until all end.

    Args:
        function: importable in a new process; it runs in each worker.
        count: of workers.
        args: further arguments of the function; they are pickled.
        backend: of the process group. Default "gloo".
        forward_sigterm: send SIGTERM on to the workers instead of dying from it, so that they can
            save and end. They start with the signal blocked, and `function` must unblock it after
            it has installed a handler. Default False.

    Raises:
        Refused: if a worker raised it.
        WorkerError: if a worker failed or was killed.
        KeyboardInterrupt: if a worker was ended by SIGINT.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be at least 1 worker, got {count!r}")
    queue: SimpleQueue[Any] = get_context("spawn").SimpleQueue()
    # The rendezvous is a file: a port could be taken by another process.
    with tempfile.TemporaryDirectory(prefix="hdet-") as folder:
        store = (Path(folder) / "rendezvous").as_uri()
        processes: list[Any] = []
        try:
            with _signals_held():
                parent = os.getpid()
                work = (function, count, store, queue, args, backend, forward_sigterm, parent)
                processes += spawn(_work, work, count, join=False).processes
            with _forwarded(processes) if forward_sigterm else nullcontext():
                yield from _until_ended(processes, queue)
        finally:
            _end(processes)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block SIGINT and SIGTERM, and let workers inherit that. Otherwise, during the seconds of
    their imports, Ctrl-C would print a traceback for each, and SIGTERM would end some of them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _forwarded(processes: list[Any]) -> Iterator[None]:
    def forward(number: int, _: object) -> None:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, number)

    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _until_ended(processes: list[Any], queue: SimpleQueue[Any]) -> Iterator[Any]:
    while True:
        # Before the queue is emptied: then it holds all that an ended worker has sent.
        alive = [p.sentinel for p in processes if p.is_alive()]
        while not queue.empty():
            message = queue.get()
            if isinstance(message, _Failure):
                if message.refused is not None:
                    raise Refused(message.refused)
                _raise_killed(processes)
                raise WorkerError(f"worker {message.rank} failed:\n{message.traceback}")
            yield message
        _raise_killed(processes)
        if not alive:
            return
        connection.wait(alive, timeout=POLL_SECONDS)


def _raise_killed(processes: list[Any]) -> None:
    """Name the worker that a signal has ended: it is the cause, and the errors of its peers, which
    lost the connection to it, are not."""
    for rank, process in enumerate(processes):
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            if name == "SIGINT":
                raise KeyboardInterrupt
            hint = ": the machine may be out of memory" if name == "SIGKILL" else ""
            raise WorkerError(f"worker {rank} was ended by {name}{hint}")


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _work(
    rank: int,
    function: Callable[..., None],
    count: int,
    store: str,
    queue: SimpleQueue[Any],
    args: tuple[object, ...],
    backend: str,
    hold_term: bool,
    parent: int,
) -> None:
    # torch lets a worker die with its parent, but one that is still importing is not told.
    if os.getppid() != parent:
        leave(1)
    # Ctrl-C ends a worker silently; the parent prints one message for all.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    freed = {signal.SIGINT} if hold_term else {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, freed)
    # Engines read these variables, which a launcher sets.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    # The workers share the cores: more threads than cores would only wait for each other.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    try:
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=count)
        function(queue.put, *args)
    except Exception as error:
        refused = str(error) if isinstance(error, Refused) else None
        # Sent before the group ends, so that it arrives before the peers' connection errors.
        queue.put(_Failure(rank, traceback.format_exc(), refused))
        leave(1)
    dist.destroy_process_group()
    leave(0)


def leave(code: int) -> NoReturn:
    """End this process at once, without the shutdown of the interpreter.

    Engines keep their process groups, and the groups their threads, past `destroy_process_group`.
    On a busy machine, finished runs aborted rarely in native code during the shutdown: most likely
    a thread released a collective's tensors and needed an interpreter that was already gone. A
    finished run would then end as a failure, and a failed one without its error.
    """
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()  # DeepSpeed's monitor leaves this to the shutdown of the interpreter
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
