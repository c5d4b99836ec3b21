"""What a check leaves: a name, a state, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OK, ABSENT, BAD = "ok", "absent", "bad"
NO_DEVICE = "not checked: no CUDA device"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    state: str
    """"ok", "absent" (not installed or not checked, nothing wrong) or "bad"."""
    found: str
    todo: str = ""
    """What to do, if the state is not "ok"."""


class WrongResultError(Exception):
    """A check ran and its result is not the expected one. The text is one line."""


class NotCheckedError(Exception):
    """A check cannot run here, and nothing is wrong. The text says what is missing."""


def tried(name: str, check: Callable[[], str], todo: str) -> Finding:
    """Run a check; whatever it raises becomes a finding, so that the next ones still run."""
    try:
        return Finding(name, OK, check())
    except NotCheckedError as error:
        return Finding(name, ABSENT, f"not checked: {error}")
    except WrongResultError as error:
        return Finding(name, BAD, str(error), todo)
    except Exception as error:  # a kernel that cannot be compiled, launched or finished
        return Finding(name, BAD, in_one_line(error), todo)


def in_one_line(error: Exception) -> str:
    """The first line of an error and, of a traceback or a compiler's message, the last one too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join([f"{type(error).__name__}: {''.join(lines[:1])}", *lines[1:][-1:]])
