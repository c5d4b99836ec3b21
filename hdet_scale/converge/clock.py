"""Clock: the seconds of averagings, without waiting for a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Times averagings by the host's clock, or by events of a device.

    The host does not wait for an event. `end` returns the seconds of all averagings whose events
    have passed and that it has not returned before: as a rule those of the round before.

    Args:
        mark: records an event, which can be queried and timed; None for the host's clock.
    """

    def __init__(self, mark: Callable[[], Any] | None = None) -> None:
        self._mark = mark
        self._timed: deque[tuple[Any, Any]] = deque()

    @classmethod
    def of(cls, device: torch.device) -> Clock:
        """Events on CUDA; elsewhere an averaging is over when its call returns."""
        if device.type != "cuda":
            return cls()

        def mark() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            return event

        return cls(mark)

    def begin(self) -> Any:
        """What `end` needs to know of the beginning."""
        return time.perf_counter() if self._mark is None else self._mark()

    def end(self, begin: Any) -> float:
        """The averaging that began with `begin` has been done, or queued: seconds."""
        if self._mark is None:
            return float(time.perf_counter() - begin)
        self._timed.append((begin, self._mark()))
        milliseconds = 0.0
        while self._timed and self._timed[0][1].query():
            first, last = self._timed.popleft()
            milliseconds += first.elapsed_time(last)
        return milliseconds / 1e3
