"""The shape of a schedule: its peaks and its warm-up, by stepping through it and going back."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from hdet_scale.search.schedule import ScheduleShape, shape_of
from tests.support.toy import toy


@pytest.mark.parametrize(
    ("make", "warm"),
    [
        (lambda o: CosineAnnealingLR(o, 100), 0),
        (lambda o: LambdaLR(o, lambda _: 1.0), 0),
        (lambda o: LambdaLR(o, lambda t: (t + 1) / 10 if t < 9 else 1 / (t - 8)), 9),
        (
            lambda o: SequentialLR(
                o, [LinearLR(o, 0.1, total_iters=10), CosineAnnealingLR(o, 90)], [10]
            ),
            10,
        ),
        (lambda o: LambdaLR(o, lambda t: 3.0 if t == 50 else 1.0), 50),
        (lambda o: LambdaLR(o, lambda t: float(t)), 100),
        (lambda o: CyclicLR(o, 0.1, 0.5, step_size_up=20), 20),
        (lambda o: OneCycleLR(o, 0.5, total_steps=120, pct_start=0.25), 29),
    ],
)
def test_the_shape_of_a_schedule_is_known_and_the_schedule_put_back(make: Any, warm: int) -> None:
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
            assert shape.warm == warm == seen.index(max(seen))
        return seen

    assert rates(True) == rates(False)


def test_the_warm_up_ends_where_the_groups_together_are_highest() -> None:
    """Each over its own peak; a group whose rate is zero has none."""
    rows = [(1.0, 0.01, 0.0), (2.0, 0.05, 0.0), (1.8, 0.1, 0.0), (0.1, 0.1, 0.0)]
    assert ScheduleShape.of(rows) == ScheduleShape(peaks=(2.0, 0.1, 0.0), warm=2)
    assert ScheduleShape.of([(0.0,), (0.0,)]) == ScheduleShape(peaks=(0.0,), warm=0)
