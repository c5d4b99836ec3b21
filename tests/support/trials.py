"""Searches that are short enough for a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def short_trials(steps: int = 4) -> Iterator[None]:
    """Trials may have so few steps, so that a search fits into a short run.

    With four replicas or more that is a run of `steps / SECOND_SHARE` steps, and with one or two of
    three times as many. Build the scheduler and run its search inside.
    """
    with mock.patch("hdet_scale.search.decision.LEAST_STEPS", steps):
        yield
