"""Text as bytes: a token is a byte, so that any file is training data without a tokenizer.

The bytes of all files lie one behind the other in one uint8 tensor, one byte a token; the last
part is held out for validation. A batch is a pure function of (seed, step, rank): a resumed run
draws what the first run would have drawn, and no global random generator is touched.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hdet_scale.spread import stream_seed

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders below the standard library that hold other people's code, or tests with long tables."""


def standard_library() -> list[Path]:
    """The .py files of this Python's standard library, in the order of their path in it."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY]
        here = Path(folder).relative_to(root)
        found += [(here / name).as_posix() for name in names if name.endswith(".py")]
    if not found:
        raise FileNotFoundError(
            f"no .py files in {root}, where this Python's standard library should be: give text "
            "files of your own"
        )
    return [root / name for name in sorted(found)]


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes held out; two views of the same memory."""

    train: Tensor
    """uint8, what batches are drawn from."""
    validation: Tensor
    """uint8, the end of the text, never trained on."""

    @classmethod
    def read(cls, paths: Iterable[str | Path], *, held_out: float = 0.05) -> Text:
        """The files' bytes in the order given; the last `held_out` share is for validation."""
        if not 0 <= held_out < 1:
            raise ValueError(
                f"held_out must be a share in [0, 1), got {held_out}; the default is 0.05"
            )
        data = bytearray()
        for path in paths:
            data += Path(path).read_bytes()
        if not data:
            raise ValueError("the files given are empty or none: give text files with content")
        whole = torch.frombuffer(data, dtype=torch.uint8)
        cut = len(data) - int(len(data) * held_out)
        return cls(whole[:cut], whole[cut:])


def batch(
    tokens: Tensor, *, size: int, context: int, seed: int, step: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [size, context]: random windows of (seed, step, rank) alone."""
    last = _last_start(tokens, context)
    generator = torch.Generator().manual_seed(stream_seed(seed, "batch", step, rank))
    starts = torch.randint(last + 1, (size,), generator=generator)
    return _windows(tokens, starts, context)


def evaluation(
    tokens: Tensor, *, size: int, context: int, batches: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same `batches` batches each time: windows at equal distances over the whole text."""
    last = _last_start(tokens, context)
    starts = torch.linspace(0, last, size * batches, dtype=torch.float64).long()
    for some in starts.split(size):
        yield _windows(tokens, some, context)


def _last_start(tokens: Tensor, context: int) -> int:
    last = tokens.numel() - context - 1
    if last < 0:
        raise ValueError(
            f"a window of context={context} and its target need {context + 1} bytes and the text "
            f"has {tokens.numel()}: give more text, or a shorter context"
        )
    return last


def _windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(context + 1)
    window = tokens[index].long()
    return window[:, :-1], window[:, 1:]
