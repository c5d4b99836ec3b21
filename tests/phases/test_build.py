"""How a run is put together: the family of its optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from hdet_scale import FusedAdamW, FusedLion, FusedSGD
from hdet_scale.phases.build import divides_by_the_gradient


@pytest.mark.parametrize(
    ("make", "divides"),
    [
        (AdamW, True),
        (FusedAdamW, True),
        (FusedLion, True),
        (torch.optim.Adagrad, True),
        (torch.optim.RMSprop, True),
        (torch.optim.Muon, True),
        (torch.optim.Adafactor, True),
        (SGD, False),
        (FusedSGD, False),
    ],
)
def test_the_family_of_an_optimizer_is_told_by_what_it_divides_by(make: Any, divides: bool) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert divides_by_the_gradient(make([weight], lr=0.1)) is divides
