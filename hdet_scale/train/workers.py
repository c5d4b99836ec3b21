"""Local workers: processes of this machine that form one process group, started from one call.

    for message in messages(function, 4, *args):      # function(send, *args) runs in each worker
        ...

The group is up while the function runs. What a worker sends arrives here in its order. When one
worker fails the others are ended and its error is raised; leaving the loop early, by an exception
or Ctrl-C, ends them all.
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
"""What a worker has to end after SIGTERM before it is killed."""
POLL_SECONDS = 0.05


class WorkerError(RuntimeError):
    """A worker failed; the text says which and holds its traceback."""


class Refused(Exception):  # noqa: N818 - an answer to the user, not a fault of the program
    """What the user gave cannot be done; the text is all there is to say."""


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
    hand_on_term: bool = False,
) -> Iterator[Any]:
    """Run `function(send, *args)` in `count` workers and yield what they send, until all end.

    hand_on_term: SIGTERM is handed on to the workers, which end when they are ready. They start
    with it held back, and `function` is to unblock it once it has a handler.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be at least 1 worker, got {count!r}")
    queue: SimpleQueue[Any] = get_context("spawn").SimpleQueue()
    # A file for the rendezvous and not a port: nothing can be taken by somebody else.
    with tempfile.TemporaryDirectory(prefix="hdet-") as folder:
        store = (Path(folder) / "rendezvous").as_uri()
        processes: list[Any] = []
        try:
            with _signals_held():
                work = (function, count, store, queue, args, backend, hand_on_term)
                processes += spawn(_work, work, count, join=False).processes
            with _handed_on(processes) if hand_on_term else nullcontext():
                yield from _until_ended(processes, queue)
        finally:
            _end(processes)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Workers start with SIGINT and SIGTERM held, as their parent has them: in the seconds of
    their imports a Ctrl-C would otherwise print a traceback of each, and SIGTERM end some."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _handed_on(processes: list[Any]) -> Iterator[None]:
    def hand_on(number: int, _: object) -> None:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _until_ended(processes: list[Any], queue: SimpleQueue[Any]) -> Iterator[Any]:
    while True:
        # Asked before the queue is emptied: what a worker sent before it ended is in there.
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
    """A worker that died without a word is the cause; its peers only lost the connection."""
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
) -> None:
    # From here Ctrl-C ends a worker without a word; the parent has one for all.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    freed = {signal.SIGINT} if hold_term else {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, freed)
    # What a launcher would say: engines look for it.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    # The workers share the cores: more threads than cores would only wait for each other.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=count)
    try:
        function(queue.put, *args)
    except Exception as error:
        refused = str(error) if isinstance(error, Refused) else None
        # Said before the group goes: the peers' errors, that we are gone, come after it.
        queue.put(_Failure(rank, traceback.format_exc(), refused))
        leave(1)
    dist.destroy_process_group()
    leave(0)


def leave(code: int) -> NoReturn:
    """End a rank that has told all it has to, without taking the interpreter down.

    Engines keep their process groups, and the groups their threads, past `destroy_process_group`.
    Finished runs on a busy machine were seen to abort then, rarely, in native code: most likely a
    thread that lets go of a collective's tensors, and wants an interpreter that is going down. A
    run that is done would end as a failure, and one that failed without its reason.
    """
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()  # DeepSpeed's monitor leaves it to the end of the interpreter
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
