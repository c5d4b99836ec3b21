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

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, work goes to the stream, in no order with what other streams do."""
        if self.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """The same, after what is queued now and before what is queued next: by events, with no
        device-wide synchronisation."""
        if self.device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(self.device)
        with self.alone():
            torch.cuda.current_stream(self.device).wait_stream(current)
            yield
        if self._stream is not None:
            current.wait_stream(self._stream)
