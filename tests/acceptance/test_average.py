"""A converge of two processes, with gloo in NCCL's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hdet_scale import doctor
from hdet_scale.acceptance import ABSENT, BAD, NO_DEVICE, OK, average
from hdet_scale.acceptance.average import average_two, judge_average
from hdet_scale.acceptance.findings import WrongResultError
from hdet_scale.converge import WIRES, Converge
from hdet_scale.topology import Replicas


@pytest.mark.slow
def test_two_processes_agree_on_the_mean() -> None:
    finding = doctor._average("cpu", "gloo")
    assert (finding.name, finding.state) == ("converge on gloo", OK)
    assert finding.found == "the mean over fp32, bf16, int8, the same bits on both ranks"


def converges_not(tensors: list[torch.Tensor], *args: Any, **options: Any) -> Callable[[], None]:
    """A converge that does nothing."""
    return lambda: None


def converges_apart(
    tensors: list[torch.Tensor], replicas: Replicas, **options: Any
) -> Callable[[], None]:
    """A converge whose result differs by one unit in the last place on one rank."""
    inner = Converge(tensors, replicas, **options)

    def run() -> None:
        inner()
        if dist.get_rank() == 1:
            tensors[0].view(torch.int32)[5] ^= 1

    return run


def idle_average(send: Callable[[Any], None], kind: str) -> None:
    average.Converge = converges_not  # type: ignore[assignment, misc]
    average_two(send, kind)


def apart_average(send: Callable[[Any], None], kind: str) -> None:
    average.Converge = converges_apart  # type: ignore[assignment, misc]
    average_two(send, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "said"),
    [(idle_average, "the mean over fp32 is off by"), (apart_average, "replicas differ after")],
)
def test_a_wrong_mean_and_different_replicas_are_caught(
    worker: Callable[..., None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(average, "average_two", worker)
    finding = doctor._average("cpu", "gloo")
    assert (finding.state, finding.found.startswith(said)) == (BAD, True)


def test_what_the_messages_say() -> None:
    good = [(wire, 0.5, 7) for wire in WIRES] * 2
    assert judge_average(good).startswith("the mean over fp32")
    with pytest.raises(WrongResultError, match="1 of 2 processes have averaged over fp32"):
        judge_average(good[1:])
    with pytest.raises(WrongResultError, match=r"off by 5\.0e-01 and nan"):
        judge_average([("fp32", float("nan"), 7), *good[1:]][::-1])


@pytest.mark.parametrize(
    ("count", "said"), [(0, NO_DEVICE), (1, "not checked: one CUDA device, two are needed")]
)
def test_nccl_needs_two_gpus(count: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    finding = doctor._average()
    assert (finding.name, finding.state, finding.found) == ("converge on nccl", ABSENT, said)
