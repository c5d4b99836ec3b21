"""The learning rate of a param group as a factor."""

from __future__ import annotations

import math

import torch
from torch import nn

from hdet_scale.factors.learning_rate import LearningRate


def test_the_product_reaches_the_optimizer() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    factor = LearningRate(optimizer, 0)
    factor.write(0.1, 1.1)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 1.1 == factor.at(0.1, 1.1)
    assert factor.offset(0.1, 1.1) == math.log(1.1)
