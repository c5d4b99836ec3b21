"""Ranks of a benchmark: local gloo processes, or those that a launcher has started.

found = run(work, options)        # work(send, options) in each rank; what they sent, or None
                                  # in a launched rank that is not the first
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hdet_scale.train.workers import Send, messages

__all__ = ["Send", "device", "first", "parser", "run", "settle", "timed"]


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark of several ranks has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--ranks", type=int, default=2, help="processes, without a launcher")
    made.add_argument("--backend", default="gloo", choices=("gloo", "nccl"), help="with a launcher")
    made.add_argument("--no-rows", action="store_true", help="print only")
    return made


def run(work: Callable[..., None], options: argparse.Namespace) -> list[Any] | None:
    """What the ranks sent; None in a launched rank other than the first."""
    if "RANK" not in os.environ:
        return list(messages(work, options.ranks, options))
    if options.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(options.backend)
    options.ranks = dist.get_world_size()
    first, sent = dist.get_rank() == 0, list[Any]()
    work(sent.append, options)
    dist.destroy_process_group()
    return sent if first else None


def device() -> torch.device:
    """This rank's: the GPU under NCCL, else the CPU."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def settle() -> None:
    """Every rank here, and nothing left running."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def timed(work: Callable[[], object]) -> float:
    """Seconds until the slowest rank is done."""
    settle()
    begin = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - begin


def first() -> bool:
    """Whether this rank is the one that tells."""
    return dist.get_rank() == 0
