"""The shape of a schedule: its peaks and its mean, by stepping through it and going back."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    SequentialLR,
)

from hdet_scale.search.schedule import shape_of
from tests.support.toy import toy


@pytest.mark.parametrize(
    "make",
    [
        lambda o: CosineAnnealingLR(o, 100),
        lambda o: LambdaLR(o, lambda t: (t + 1) / 10 if t < 9 else 1 / (t - 8)),
        lambda o: SequentialLR(
            o, [LinearLR(o, 0.1, total_iters=10), CosineAnnealingLR(o, 90)], [10]
        ),
        lambda o: LambdaLR(o, lambda t: 3.0 if t == 50 else 1.0),
        lambda o: CyclicLR(o, 0.1, 0.5, step_size_up=20),
    ],
)
def test_the_shape_of_a_schedule_is_known_and_the_schedule_put_back(make: Any) -> None:
    def rates(peek: bool) -> list[float]:
        optimizer = AdamW(toy(wrap=False).parameters(), lr=0.5)
        scheduler = make(optimizer)
        before = dict(optimizer.param_groups[0])
        shape = shape_of(scheduler, 100) if peek else None
        assert optimizer.param_groups[0] == before, "a cycled momentum too"
        seen = [optimizer.param_groups[0]["lr"]]
        for _ in range(100):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        if shape is not None:
            assert shape.peaks == (max(seen),)
            assert shape.mean == pytest.approx(sum(seen) / len(seen) / max(seen))
            assert shape.share([max(seen) / 4]) == 0.25
        return seen

    assert rates(True) == rates(False)
