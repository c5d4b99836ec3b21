"""Local workers: messages, failures, signals, and how a worker ends."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hdet_scale.train.workers import Send, WorkerError, messages

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def greet(send: Send, word: str) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    send((word, dist.get_rank(), int(total)))


def abort_at_exit(send: Send) -> None:
    """As native threads may that outlive the work, when the interpreter is taken down."""
    atexit.register(os.abort)
    dist.barrier()  # a rank that left before its peer has connected would fail the peer
    send(dist.get_rank())


def die_on_rank_1(send: Send) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ever(send: Send) -> None:
    send(os.getpid())
    time.sleep(600)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_workers_form_a_group_and_what_they_send_arrives() -> None:
    assert sorted(messages(greet, 2, "hello")) == [("hello", 0, 2), ("hello", 1, 2)]


def test_a_worker_that_is_done_has_ended_well_whatever_an_interpreter_leaves_behind() -> None:
    assert sorted(messages(abort_at_exit, 2)) == [0, 1]


@pytest.mark.parametrize("run", ["object()", "None"])
def test_who_leaves_says_all_it_has_to_and_ends_a_run_that_was_left_open(run: str) -> None:
    """DeepSpeed's monitor never finishes what it began; `wandb` is a stand-in here."""
    script = (
        "import sys, types; from hdet_scale.train.workers import leave\n"
        f"board = types.SimpleNamespace(run={run}, finish=lambda: print('finished'))\n"
        "sys.modules['wandb'] = board; print('said', end=' '); leave(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert done.returncode == 3
    assert done.stdout.split() == (["said", "finished"] if run != "None" else ["said"])


def test_a_killed_worker_is_named_and_not_its_peers() -> None:
    with pytest.raises(WorkerError, match="worker 1 was ended by SIGKILL"):
        list(messages(die_on_rank_1, 2))


def test_leaving_the_loop_ends_the_workers() -> None:
    loop = messages(wait_for_ever, 2)
    pids = [next(loop), next(loop)]
    loop.close()  # type: ignore[attr-defined]
    assert all(gone(pid) for pid in pids)


def fail_to_connect(send: Send) -> None:
    raise AssertionError("no worker gets here")


def test_a_worker_that_cannot_connect_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(WorkerError, match=r"worker [01] failed"):
        list(messages(fail_to_connect, 2))


def test_workers_do_not_outlive_a_parent_that_is_killed_while_they_start() -> None:
    """They used to train on, unseen, until the pipe to the parent was full."""
    script = (
        "from hdet_scale.train.workers import messages\n"
        "from tests.train.test_workers import wait_for_ever\n"
        "if __name__ == '__main__': list(messages(wait_for_ever, 2))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env=ENVIRONMENT, start_new_session=True
    )
    try:
        while len(children(parent.pid)) < 3:  # the workers, and multiprocessing's tracker
            assert parent.poll() is None
            time.sleep(0.01)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 60
        while not group_gone(parent.pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


def group_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
