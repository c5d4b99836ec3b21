"""Probe: losses of this replica's weights on held-out batches that all replicas have in common.

Common batches remove most of the noise that replicas' own batches have. Module modes and random
generators are restored afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hdet_scale.engines.protocol import Engine
from hdet_scale.topology import Replicas

Losses = Callable[..., Iterable["Tensor | float"]]
NO_LOSS = (
    "the probe yielded no loss: it is called again at each evaluation, so give a function that "
    "starts again, not a generator that is used up"
)


class Probe:
    """A callable that yields losses, run in eval mode, without gradients, and timed.

    Args:
        losses: yields one number a batch. Every replica must be given the same batches in the same
            order; where a replica is sharded, its ranks call it together. If it takes `part` and
            `parts`, replicas with equal weights split the batches: part, part + parts, ...
        engine: puts the model into eval mode; None where the callable does so itself.
        limit: at most so many losses are taken.
    """

    def __init__(self, losses: Losses, engine: Engine | None = None, limit: int = 16) -> None:
        if not callable(losses):
            raise TypeError(
                f"probe must be a callable that yields losses, got {losses!r}: e.g. "
                "lambda: (loss_of(model, batch) for batch in held_out), or "
                "hdet_scale.search.common_batches(...)"
            )
        if limit < 1:
            raise ValueError(f"probe batches must be at least 1, got {limit}")
        self.losses, self.engine, self.limit = losses, engine, limit
        self._splits = "parts" in inspect.signature(losses).parameters
        self.seconds = 0.0
        """Time of all calls so far on this rank."""

    def __call__(self) -> list[float]:
        """All losses, at most `limit` of them."""
        drawn = self.parts()
        if not drawn:
            raise ValueError(NO_LOSS)
        return list(drawn.values())

    def parts(self, part: int = 0, parts: int = 1) -> dict[int, float]:
        """The losses of a part by the number of their batch; none where there are more parts than
        batches."""
        parts = min(parts, self.limit) if self._splits else 1
        start = time.perf_counter()
        mode = contextlib.nullcontext() if self.engine is None else self.engine.evaluating()
        with torch.no_grad(), same_randomness(), mode:
            source = self.losses(part=part % parts, parts=parts) if parts > 1 else self.losses()
            drawn = [_number(x) for x in islice(source, self.limit // parts)]
        self.seconds += time.perf_counter() - start
        return {part % parts + k * parts: loss for k, loss in enumerate(drawn)}


def common_batches(
    batches: Iterable[Any],
    loss: Callable[[Any], Tensor | float],
    *,
    count: int = 8,
    replicas: Replicas | None = None,
) -> Losses:
    """A probe's callable over the first `count` batches of replica 0's loader; collective once.

    The batches are drawn at the first call and sent to all replicas, so that a loader which gives
    each rank its own part of the data will do.
    """
    kept: list[Any] = []

    def losses(part: int = 0, parts: int = 1) -> Iterator[Tensor | float]:
        if not kept:
            where = replicas or Replicas.world()
            drawn = list(islice(batches, count)) if where.rank == 0 else [None] * count
            if where.rank == 0 and len(drawn) < count:
                raise ValueError(f"the loader has {len(drawn)} batches, the probe needs {count}")
            if where.size > 1:
                group = where.connected()
                source = torch.distributed.get_process_group_ranks(group)[0]
                torch.distributed.broadcast_object_list(drawn, src=source, group=group)
            kept.extend(drawn)
        return (loss(batch) for batch in kept[part::parts])

    return losses


def _number(loss: Tensor | float) -> float:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(
            f"the probe yielded a tensor of shape {list(loss.shape)}: yield one number a batch"
        )
    return float(loss)


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """Python's, numpy's and torch's generators afterwards as before."""
    numpy = sys.modules.get("numpy")
    python, array = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)
