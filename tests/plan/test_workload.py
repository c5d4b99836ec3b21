"""A workload checks what it is given."""

from __future__ import annotations

from typing import Any

import pytest

from hdet_scale.plan.shapes import Shapes
from hdet_scale.plan.workload import Workload

SMALL = Shapes("small", ((70, 50), (3,)), 3500)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpus": 1}, "at least 2, got 1"),
        ({"dtype": "fp8"}, "one of .*, got 'fp8'"),
        ({"optimizer": "adam"}, "one of .*, got 'adam'"),
        ({"tokens": 0}, "at least 1, got 0"),
        ({"step_seconds": 0.0}, "above 0, got 0.0"),
    ],
)
def test_a_workload_refuses(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload(**({"model": SMALL, "gpus": 8} | values))
