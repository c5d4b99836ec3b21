"""Progress of a run: a bar on a terminal, plain lines elsewhere, JSON lines for scripts."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Show = Callable[[dict[str, Any]], None]

LINE_SECONDS = 2.0
"""Least time between two plain lines of steps."""


@contextmanager
def shown(as_json: bool) -> Iterator[Show]:
    """Yield the function to call with each message of a run.

    A message is a dict whose `kind` is "step", "event", "end" or that of a record.

    Args:
        as_json: print each message as a line of JSON. Otherwise: a bar if the output is a terminal
            and rich is installed, plain lines if not.
    """
    if as_json:
        yield lambda message: print(json.dumps(message), flush=True)
    elif sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        with _bar() as show:
            yield show
    else:
        yield _lines()


def describe(step: dict[str, Any]) -> str:
    """A message of kind "step" as one line of text."""
    parts = [
        f"loss {step['loss']:.4f}" if step["loss"] is not None else "loss not finite",
        f"base LR {step['base']:.3e} ({step['change']:+.1%} on the schedule)",
        f"{step['tokens_per_second']:,.0f} tokens/s",
    ]
    if step["converge_in"] is not None:
        parts.append(f"converge in {_clock(step['converge_in'])}")
    return "  ".join([*parts, f"left {_clock(step['left'])}"])


def _clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def _lines() -> Show:
    last = 0.0

    def show(message: dict[str, Any]) -> None:
        nonlocal last
        if message["kind"] == "step":
            now = time.monotonic()
            if now - last < LINE_SECONDS and message["step"] != message["steps"]:
                return
            last = now
            print(f"step {message['step']}/{message['steps']}  {describe(message)}", flush=True)
        elif message["kind"] in ("event", "end"):
            print(message["text"], flush=True)

    return show


@contextmanager
def _bar() -> Iterator[Show]:
    from rich import progress

    columns = (
        progress.TextColumn("step"),
        progress.MofNCompleteColumn(),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("{task.fields[state]}"),
    )
    with progress.Progress(*columns) as bar:
        task = bar.add_task("train", total=None, state="starting")

        def show(message: dict[str, Any]) -> None:
            if message["kind"] == "step":
                state = describe(message)
                bar.update(task, completed=message["step"], total=message["steps"], state=state)
            elif message["kind"] in ("event", "end"):
                bar.console.print(message["text"], highlight=False)

        yield show
