"""The clock of averagings: the host's, and events that are read when they have passed."""

from __future__ import annotations

import time

import torch

from hdet_scale.converge.clock import Clock


class Event:
    """Behaves as a CUDA event on a device whose time the test sets."""

    now = 0.0
    done = 0.0

    def __init__(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.done

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "CUDA raises for an event that has not passed"
        return end.at - self.at


def timed(clock: Clock, first: float, last: float, done: float) -> float:
    """An averaging from `first` to `last` milliseconds, ended when the device is at `done`."""
    Event.now = first
    begin = clock.begin()
    Event.now, Event.done = last, done
    return clock.end(begin)


def test_events_are_read_when_they_have_passed_and_once() -> None:
    clock = Clock(Event)
    assert timed(clock, 100.0, 104.0, done=90.0) == 0.0
    assert timed(clock, 200.0, 207.0, done=150.0) == 0.004
    # A device that is far behind: nothing is lost, and nothing is said twice.
    assert timed(clock, 300.0, 301.0, done=202.0) == 0.0
    assert timed(clock, 400.0, 402.0, done=402.0) == (7.0 + 1.0 + 2.0) / 1e3
    assert timed(clock, 500.0, 503.0, done=410.0) == 0.0


def test_on_a_cpu_the_seconds_are_those_of_the_call() -> None:
    clock = Clock.of(torch.device("cpu"))
    before = time.perf_counter()
    begin = clock.begin()
    seconds = clock.end(begin)
    assert 0.0 <= seconds <= time.perf_counter() - before
