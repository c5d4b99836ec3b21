"""Searches that are short enough for a test, or that need their long stage."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hdet_scale.search.trials import LONG


@contextlib.contextmanager
def short_trials(steps: int = 4) -> Iterator[None]:
    """A search is run with trials of so few steps: a test has no time for more."""
    with mock.patch("hdet_scale.phases.build.LEAST_STEPS", steps):
        yield


@contextlib.contextmanager
def long_stage(parts: int) -> Iterator[None]:
    """Every search has a long stage, of so many teams."""
    before = LONG.parts
    object.__setattr__(LONG, "parts", parts)
    try:
        with mock.patch("hdet_scale.search.decision.LEARNT", 2.0):
            yield
    finally:
        object.__setattr__(LONG, "parts", before)


def without_long_stage(work: Any) -> Any:
    """No search inside `work` has a long stage, though trials of a few steps learn little."""

    @functools.wraps(work)
    def patched(*args: Any, **options: Any) -> Any:
        with mock.patch("hdet_scale.search.decision.LEARNT", -1.0):
            return work(*args, **options)

    return patched
