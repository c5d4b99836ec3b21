"""SideStream: on CUDA, a stream that transfers run on beside the training step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """A CUDA stream of its own, made at its first use; on other devices nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    @property
    def enqueues(self) -> bool:
        """Whether work is only queued here, so that the thread that calls goes on at once."""
        return self.device.type == "cuda"

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Inside, work goes to the stream, after what the current stream has queued so far."""
        if self.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all work of this one; the host goes on."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Inside, work goes to the stream, after what is queued now and before what is queued
        next: by events, with no device-wide synchronisation."""
        with self.behind():
            yield
        self.join()
