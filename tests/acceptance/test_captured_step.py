"""A replayed step at another learning rate. A CPU has no CUDA graph: here the launches of a step
are recorded and run again with the same arguments, which is what a graph does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hdet_scale.acceptance.captured_step import RATES, check_graph, replayed_at_rates
from hdet_scale.acceptance.findings import NotCheckedError, WrongResultError
from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.optim.fused_adamw import FusedAdamW
from tests.support import launches

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@interpreted
def replayed() -> str:
    return replayed_at_rates(CPU, launches.recorded)


def test_recorded_launches_follow_the_rate() -> None:
    assert replayed() == f"one capture, replayed like torch at {len(RATES)} rates"


@interpreted
def replayed_without_writing() -> str:
    before = FusedAdamW.write_scalars
    FusedAdamW.write_scalars = lambda self: None  # type: ignore[method-assign]
    try:
        replayed_at_rates(CPU, launches.recorded)
    except WrongResultError as error:
        return str(error)
    finally:
        FusedAdamW.write_scalars = before  # type: ignore[method-assign]
    return "nothing was found"


def test_a_rate_that_does_not_reach_the_device_is_caught() -> None:
    """The first replay is at the rate of the capture, and right."""
    assert RATES[0] == 1e-2
    assert replayed_without_writing().startswith("replay 2 at rate 0.03: param differs")


def frozen(step: Callable[[], None]) -> Callable[[], None]:
    """A capture that does nothing when it is replayed."""
    return lambda: None


@interpreted
def replayed_frozen() -> str:
    try:
        replayed_at_rates(CPU, frozen)
    except WrongResultError as error:
        return str(error)
    return "nothing was found"


def test_a_replay_that_does_nothing_is_caught() -> None:
    assert replayed_frozen() == "replay 1 at rate 0.01: 2 steps, not 3"


def test_a_cpu_has_no_graph() -> None:
    with pytest.raises(NotCheckedError, match="no CUDA device"):
        check_graph(CPU)
