"""Messages of a run as text, as JSON lines and as a bar."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from hdet_scale.train import progress


def a_step(step: int, **changes: Any) -> dict[str, Any]:
    told = {"kind": "step", "step": step, "steps": 20, "loss": 2.5, "base": 1e-3, "change": 0.021}
    told |= {"tokens_per_second": 41_234.5, "converge_in": 5.0, "left": 7200.0}
    return told | changes


def test_a_step_in_words() -> None:
    assert progress.describe(a_step(10)) == (
        "loss 2.5000  base LR 1.000e-03 (+2.1% on the schedule)  41,234 tokens/s  "
        "converge in 5 s  left 2.0 h"
    )
    assert "not finite" in progress.describe(a_step(10, loss=None))
    assert "converge" not in progress.describe(a_step(10, converge_in=None))


def test_plain_lines_are_few_and_the_last_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown(False) as show:
        for step in (5, 10, 15, 20):
            show(a_step(step))
        show({"kind": "round", "step": 20})
        show({"kind": "event", "text": "checkpoint at step 20"})
    out = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in out] == [
        "step 5/20",
        "step 20/20",
        "checkpoint at step 20",
    ]
    with progress.shown(True) as show:
        show({"kind": "round", "step": 20})
    assert json.loads(capsys.readouterr().out) == {"kind": "round", "step": 20}


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown(False) as show:
        show(a_step(20))
        show({"kind": "end", "text": "done: 20 steps"})
    assert "20/20" in screen.getvalue()
    assert "loss 2.5000" in screen.getvalue()
    assert "done: 20 steps" in screen.getvalue()
