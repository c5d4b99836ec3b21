"""A rank that dies in the middle of a converge: the others raise, and a checkpoint goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hdet_scale import Replicas
from hdet_scale.converge.pipeline import Converge
from hdet_scale.converge.transfers import Transfer
from tests.support.fleet import CaseFailed

TIMEOUT = 15.0


def _converge(rank: int, size: int, home: str, wire: str, dies: bool) -> list[torch.Tensor]:
    """Several rounds over many buckets; a checkpoint after each; rank 1 dies within the second."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    replicas = Replicas(rank=rank, size=size, group=group)
    saved = Path(home, f"{rank}.pt")
    state = torch.load(saved) if saved.exists() else {"round": 0, "tensors": _start()}
    tensors = state["tensors"]
    converge = Converge(tensors, replicas, 256, wire=wire)
    for k in range(state["round"], 3):
        for t in tensors:
            t.add_(float(rank + 1) * (k + 1))
        if dies and rank == 1 and k == 1:
            flights = converge._flights
            flights.flight = _fatal(flights.flight)  # type: ignore[method-assign]
        begin = time.monotonic()
        try:
            converge()
        except RuntimeError:
            Path(home, f"raised-{rank}").write_text(str(time.monotonic() - begin))
            os._exit(8)  # as a job would: whoever waits for this rank hears of it
        torch.save({"round": k + 1, "tensors": tensors}, saved)
    return tensors


def _start() -> list[torch.Tensor]:
    return [torch.arange(100.0) + i for i in range(10)]


def _fatal(flight: Any) -> Any:
    def dying(transfer: Transfer, *args: Any) -> Iterator[None]:
        if transfer.index == 5:
            os._exit(9)
        return flight(transfer, *args)

    return dying


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_death_within_a_converge_is_an_error_and_the_checkpoint_goes_on(
    fleets: Any, tmp_path: Path, size: int, wire: str
) -> None:
    unbroken = fleets(size).run(_converge, _folder(tmp_path / "unbroken"), wire, False)
    with pytest.raises(CaseFailed, match=r"died: exit [89]"):
        fleets(size).run(_converge, _folder(tmp_path / "home"), wire, True, grace=2 * TIMEOUT)
    survivors = [r for r in range(size) if r != 1]
    for r in survivors:
        assert float((tmp_path / "home" / f"raised-{r}").read_text()) < TIMEOUT + 5
    resumed = fleets(size).run(_converge, str(tmp_path / "home"), wire, False)
    for a, b in zip(unbroken, resumed, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _folder(path: Path) -> str:
    path.mkdir()
    return str(path)
