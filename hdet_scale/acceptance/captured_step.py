"""A captured step of FusedAdamW that is replayed at a learning rate that changes.

A graph replays the launches that it recorded. A rate that was an argument of a launch would stay
what it was; ours is read from device memory, where `write_scalars` puts it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hdet_scale.acceptance.findings import NotCheckedError
from hdet_scale.acceptance.optimizers import twins_of
from hdet_scale.acceptance.twins import Twins

RATES = (1e-2, 3e-2, 1e-3)
WARM_UP = 2
"""Steps before the capture, which create state and tables."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph: what the result does at each call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def check_graph(device: torch.device) -> str:
    """Capture one step and replay it at three rates."""
    if device.type != "cuda":
        raise NotCheckedError("no CUDA device")
    found = replayed_at_rates(device, captured)
    torch.cuda.synchronize(device)
    return found


def replayed_at_rates(device: torch.device, capture: Capture) -> str:
    """Replay a step of FusedAdamW at three rates, in lockstep with its reference.

    Args:
        device: of the parameters.
        capture: makes a replay of a step. Where it returns the step itself, the same way is taken
            without a graph.
    """
    twins = twins_of("adamw", device)
    # A graph reads the addresses that it was captured with: the gradients stay where they are.
    grads = twins.draw(1)
    twins.give(grads)
    _warm_up(twins, device)
    twins.check("the steps before the capture")
    replay = capture(twins.optimizer.step)
    for turn, rate in enumerate(RATES):
        twins.optimizer.param_groups[0]["lr"] = rate
        for grad, new in zip(grads, twins.draw(2 + turn), strict=True):
            grad.copy_(new)
        twins.optimizer.write_scalars()
        replay()
        twins.step_reference()
        twins.check(f"replay {turn + 1} at rate {rate:g}")
    return f"one capture, replayed like torch at {len(RATES)} rates"


def _warm_up(twins: Twins, device: torch.device) -> None:
    """On a side stream, as PyTorch asks for before a capture."""
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # no stream: nothing changes
        for _ in range(WARM_UP):
            twins.optimizer.step()
    for _ in range(WARM_UP):
        twins.step_reference()
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
