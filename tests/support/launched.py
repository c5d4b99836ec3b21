"""What a launcher tells a process, for tests of trainers that ask the environment."""

from __future__ import annotations

import os


def as_launched(rank: int, size: int) -> None:
    """What torchrun tells a process; the process group is up already."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1"}
