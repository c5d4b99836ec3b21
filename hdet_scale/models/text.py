"""Text: training data from the bytes of any files, or from a file of tokens mapped into memory.

A byte is a token, so that no tokenizer is needed. The bytes of all files are concatenated in one
uint8 tensor, whose end is held out for validation. A batch is a pure function of (seed, step,
rank): a resumed run draws what the unbroken run would have drawn, and no global random generator is
touched.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hdet_scale.method.spread import stream_seed

TOKEN_TYPES = {"uint8": torch.uint8, "uint16": torch.int16, "uint32": torch.int32}
"""How a token file is mapped. uint16 and uint32 are mapped as the signed type of the same width,
which torch can index; a negative number becomes the unsigned one when a batch is drawn."""
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders below the standard library that hold other people's code, or tests with long tables."""


def standard_library() -> list[Path]:
    """The .py files of this Python's standard library, sorted by their path in it."""
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
    """Tokens to train on and tokens held out: two views of the same memory."""

    train: Tensor
    """What batches are drawn from; uint8 if the tokens are bytes."""
    validation: Tensor
    """The end of the text, never trained on."""

    @classmethod
    def read(cls, paths: Iterable[str | Path], *, held_out: float = 0.05) -> Text:
        """Concatenate the bytes of files.

        Args:
            paths: of the files, in order.
            held_out: the share at the end that is for validation. Default 0.05.
        """
        if not 0 <= held_out < 1:
            raise ValueError(
                f"held_out must be a share in [0, 1), got {held_out}; the default is 0.05"
            )
        data = bytearray()
        for path in paths:
            data += Path(path).read_bytes()
        if not data:
            raise ValueError("the files given are empty or none: give text files with content")
        return cls._cut(torch.frombuffer(data, dtype=torch.uint8), held_out)

    @classmethod
    def mapped(
        cls, path: str | Path, token_type: str = "uint16", *, held_out: float = 0.05
    ) -> Text:
        """Map a file of raw little-endian tokens, which may be larger than memory.

        Args:
            path: of the file.
            token_type: "uint8", "uint16" (default) or "uint32".
            held_out: the share at the end that is for validation. Default 0.05.
        """
        if token_type not in TOKEN_TYPES:
            raise ValueError(f"token_type must be one of {list(TOKEN_TYPES)}, got {token_type!r}")
        if not Path(path).is_file():
            raise FileNotFoundError(f"no token file at {path}: give a file of raw {token_type}")
        dtype, size = TOKEN_TYPES[token_type], Path(path).stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise ValueError(
                f"{path} has {size} bytes, which is no whole number of {token_type} tokens: give a "
                "file of raw tokens, or the right token type"
            )
        return cls._cut(
            torch.from_file(str(path), shared=False, size=size // dtype.itemsize, dtype=dtype),
            held_out,
        )

    @classmethod
    def _cut(cls, whole: Tensor, held_out: float) -> Text:
        cut = len(whole) - int(len(whole) * held_out)
        return cls(whole[:cut], whole[cut:])


def batch(
    tokens: Tensor, *, size: int, context: int, seed: int, step: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Draw random windows: inputs and targets, int64 [size, context].

    Args:
        tokens: of a `Text`.
        size: windows of the batch.
        context: tokens of a window.
        seed, step, rank: the windows depend on these three alone.

    Raises:
        ValueError: if the text is shorter than a window and its target.
    """
    last = _last_start(tokens, context)
    generator = torch.Generator().manual_seed(stream_seed(seed, "batch", step, rank))
    starts = torch.randint(last + 1, (size,), generator=generator)
    return _windows(tokens, starts, context)


def evaluation(
    tokens: Tensor, *, size: int, context: int, batches: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same batches each time: windows at equal distances over the whole text.

    Args:
        tokens: of a `Text`.
        size: windows of a batch.
        context: tokens of a window.
        batches: how many to yield.
    """
    last = _last_start(tokens, context)
    starts = torch.linspace(0, last, size * batches, dtype=torch.float64).long()
    for some in starts.split(size):
        yield _windows(tokens, some, context)


def _last_start(tokens: Tensor, context: int) -> int:
    last = tokens.numel() - context - 1
    if last < 0:
        raise ValueError(
            f"a window of context={context} and its target need {context + 1} tokens and the text "
            f"has {tokens.numel()}: give more text, or a shorter context"
        )
    return last


def _windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(context + 1)
    window = tokens[index].long()
    if tokens.is_signed():
        window &= 256**tokens.itemsize - 1
    return window[:, :-1], window[:, 1:]
