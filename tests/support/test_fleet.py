"""The fleet itself: a test bench that loses a failure would make every other test worthless."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.fleet import CaseFailed, CaseHung, Fleet


def _ranks(rank: int, size: int, offset: int) -> tuple[int, int]:
    return rank + offset, size


def _sum(rank: int, size: int) -> float:
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    return t.item()


def _fail_on_one(rank: int, size: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("only here")
    dist.barrier()


def _sleep(rank: int, size: int) -> None:
    time.sleep(600 if rank == 0 else 0)


def _die(rank: int, size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_in_rank_order(fleet: Fleet) -> None:
    assert fleet.run(_ranks, 10) == [(10 + r, fleet.size) for r in range(fleet.size)]


def test_workers_are_joined(fleet: Fleet) -> None:
    assert fleet.run(_sum) == [sum(range(fleet.size))] * fleet.size


def test_a_failure_is_raised_here_and_the_next_case_runs(pair: Fleet) -> None:
    with pytest.raises(CaseFailed, match="only here"):
        pair.run(_fail_on_one)
    assert pair.run(_sum) == [1.0, 1.0]


def test_a_hang_and_a_death_end_and_the_next_case_runs(pair: Fleet) -> None:
    pair.run(_sum)
    with pytest.raises(CaseHung, match=r"rank 0 of 2 gave no answer in 0\.5 s"):
        pair.run(_sleep, seconds=0.5)
    with pytest.raises(CaseHung, match=r"rank 1 of 2 died: exit -9"):
        pair.run(_die)
    assert pair.run(_sum) == [1.0, 1.0]
