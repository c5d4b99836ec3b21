"""A converge of two real processes: on NCCL where there are two GPUs, on gloo elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.acceptance.findings import WrongResultError
from hdet_scale.acceptance.guarded import TOLERANCE, Guarded, gap, sizes
from hdet_scale.converge import WIRES, Converge
from hdet_scale.topology import Replicas

LARGE = (1 << 18) + 3
"""Elements of an fp32 tensor that is averaged where it lies; smaller ones go through a bucket."""
OF_THE_WIRE = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 2.0**-7}
"""By wire: what it may lose, relative to the largest value; rounding to the tensor's dtype comes on
top. bf16 rounds what is sent and the mean; an int8 code is half a 127th off for each replica."""


def average_two(send: Callable[[Any], None], kind: str) -> None:
    """In a worker: average tensors of three dtypes over each wire, and send what was found.

    Args:
        send: receives for each wire its name, the largest difference from the mean over what is
            allowed, and the sum of the bytes of the result.
        kind: "cuda" or "cpu".
    """
    rank = dist.get_rank()
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    for wire in WIRES:
        both = [_tensors(device, seed) for seed in range(2)]
        wanted = [(a.double() + b.double()) / 2 for a, b in zip(*both, strict=True)]
        mine = both[rank]
        Converge(mine, Replicas.world(), bucket_bytes=1 << 16, wire=wire)()
        worst = max(_over_allowed(m, w, wire) for m, w in zip(mine, wanted, strict=True))
        bits = sum(int(t.view(torch.uint8).to(torch.int64).sum()) for t in mine)
        send((wire, worst, bits))


def _over_allowed(mine: Tensor, wanted: Tensor, wire: str) -> float:
    """The difference from the mean over what is allowed."""
    return gap(mine, wanted) / (OF_THE_WIRE[wire] + TOLERANCE[mine.dtype])


def _tensors(device: torch.device, seed: int) -> list[Tensor]:
    found = Guarded([(LARGE, 0)], torch.float32, device, seed=seed).tensors
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found += Guarded(sizes(torch.device("cpu")), dtype, device, seed=seed).tensors
    return found


def judge_average(told: list[tuple[str, float, int]]) -> str:
    """What two workers' messages say.

    Raises:
        WrongResultError: a mean is wrong, or the replicas differ after a converge.
    """
    for wire in WIRES:
        found = [(over, bits) for name, over, bits in told if name == wire]
        if len(found) != 2:
            raise WrongResultError(f"{len(found)} of 2 processes have averaged over {wire}")
        if not all(over <= 1.0 for over, _ in found):
            off = " and ".join(f"{over:.1e}" for over, _ in found)
            raise WrongResultError(f"the mean over {wire} is off by {off} of what is allowed")
        if found[0][1] != found[1][1]:
            raise WrongResultError(f"replicas differ after a converge over {wire}")
    return f"the mean over {', '.join(WIRES)}, the same bits on both ranks"
