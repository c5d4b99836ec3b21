"""What becomes of a check: ok, absent or bad."""

from __future__ import annotations

from collections.abc import Callable

from hdet_scale.acceptance.findings import (
    ABSENT,
    BAD,
    OK,
    Finding,
    NotCheckedError,
    WrongResultError,
    tried,
)


def raising(error: Exception) -> Callable[[], str]:
    def check() -> str:
        raise error

    return check


def test_each_end_of_a_check_is_a_finding() -> None:
    assert tried("a", lambda: "all of it", "do this") == Finding("a", OK, "all of it")
    absent = tried("a", raising(NotCheckedError("no GPU")), "do this")
    assert absent == Finding("a", ABSENT, "not checked: no GPU")
    wrong = tried("a", raising(WrongResultError("off by 1")), "do this")
    assert wrong == Finding("a", BAD, "off by 1", "do this")


def test_an_error_is_told_in_one_line() -> None:
    failed = tried("a", raising(RuntimeError("at 1:2:\n  x = y\n\nno y  \n")), "do this")
    assert failed == Finding("a", BAD, "RuntimeError: at 1:2: ... no y", "do this")
    assert tried("a", raising(KeyError()), "b").found == "KeyError: "
