"""The probe: it leaves no trace, replicas have its batches in common and may split them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from hdet_scale.engines.protocol import Engine
from hdet_scale.search.probe import Probe, common_batches
from tests.support.fleet import Fleet
from tests.support.toy import bits


def test_the_probe_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    model[2].eval()
    seen = []

    def losses() -> Any:
        while True:
            seen.append((model.training, torch.is_grad_enabled()))
            yield model(torch.randn(3, 4)).sum() + random.random()

    before = torch.get_rng_state(), random.getstate(), bits(model.state_dict())
    engine = Engine(AdamW(model.parameters()), model)
    assert len(Probe(losses, engine, 3)()) == 3
    assert seen == [(False, False)] * 3
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert bits(model.state_dict()) == before[2]
    assert [m.training for m in model] == [True, True, False]


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (lambda: iter(()), "yielded no loss"),
        (lambda: iter([torch.ones(2)]), "shape \\[2\\]"),
    ],
)
def test_a_probe_that_is_no_probe(losses: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Probe(losses)()


def _loaders(rank: int, size: int) -> list[float]:
    """Every rank's loader gives other batches; the probe's are replica 0's."""
    drawn = ([float(10 * rank + i)] for i in range(5))
    losses = common_batches(drawn, lambda b: b[0], count=3)
    return Probe(losses)() + Probe(losses)()


def test_common_batches_are_those_of_replica_0(pair: Fleet) -> None:
    assert pair.run(_loaders) == [[0.0, 1.0, 2.0] * 2] * 2


def test_replicas_of_equal_weights_split_a_probe() -> None:
    seen: list[int] = []

    def loss(batch: int) -> float:
        seen.append(batch)
        return float(batch)

    probe = Probe(common_batches(iter(range(8)), loss, count=8), limit=8)
    drawn = [probe.parts(part, 4) for part in range(4)]
    assert drawn == [{k: float(k), k + 4: k + 4.0} for k in range(4)]
    assert len(seen) == 8
    assert probe() == [float(i) for i in range(8)]
    assert probe.parts(9, 64) == {1: 1.0}, "never less than a batch each"
    few = Probe(common_batches(iter(range(3)), loss, count=3), limit=16)
    assert [few.parts(part, 9) for part in (2, 3)] == [{2: 2.0}, {}], "never one twice"
    assert [probe.parts(part, 4) for part in (1, 5)] == [{1: 1.0, 5: 5.0}] * 2
    whole = Probe(lambda: iter([1.0, 2.0]))
    assert whole.parts(1, 2) == {0: 1.0, 1: 2.0}, "a callable that cannot split"
