"""Optimizers at one learning rate for all tasks: NadamW is torch's, SGD tasks are trained too."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from benchmarks.lr.calibrated import RATES, RECIPES, Nadam, at_rates
from benchmarks.lr.simulated import fixed, weights
from benchmarks.lr.tasks import TASKS
from tests.benchmarks.test_simulated import Copy


@pytest.mark.parametrize("name", ["gpt", "vit", "denoise"])
def test_stacked_nadamw_steps_as_torchs_does(name: str) -> None:
    """Three copies at three learning rates and a schedule, against three ordinary trainings."""
    task = dataclasses.replace(TASKS[name], weight_decay=0.1)
    rates, shares = (0.001, 0.004, 0.016), (0.5, 1.0, 1.0, 0.7, 0.2, 0.0)
    stacked = Nadam(task, weights(task, 0, 3))
    batches = task.draw(5, len(shares), 8)
    for batch, share in zip(batches, shares, strict=True):
        _, gradients = stacked.gradients(batch.expand(3, -1))
        stacked.step(torch.tensor(rates) * share, gradients)
    for i, rate in enumerate(rates):
        model = Copy(task, 0)
        optimizer = torch.optim.NAdam(
            model.parameters(), betas=(0.9, 0.99), weight_decay=0.1, decoupled_weight_decay=True
        )
        for batch, share in zip(batches, shares, strict=True):
            optimizer.param_groups[0]["lr"] = rate * share
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        for key, value in model.weights.items():
            torch.testing.assert_close(stacked.params[key][i], value[0], rtol=2e-3, atol=2e-4)


def test_nadamw_forgets_its_momenta() -> None:
    task = TASKS["denoise"]
    model = Nadam(task, weights(task, 0))
    _, gradients = model.gradients(task.draw(0, 1)[:1])
    model.step(torch.tensor([0.01]), gradients)
    assert 0 < model.product < 1
    model.reset()
    assert (model.product, model.count) == (1.0, 0)


def test_adamw_on_a_task_of_adamw_is_a_run_of_the_grid() -> None:
    """Bit for bit: the calibrated runs differ from the grid by their rates alone."""
    task, rates = TASKS["factor"], (0.002, 0.02)
    assert task.optimizer == "adamw"
    assert at_rates(RECIPES["adamw"], task, 1, 30, rates) == fixed(task, 1, 30, list(rates))


@pytest.mark.parametrize("name", RECIPES)
def test_a_task_of_sgd_is_trained_by_every_recipe(name: str) -> None:
    """By AdamW, not by SGD: the loss at a small rate falls by about as much as at other tasks."""
    task = TASKS["logit"]
    assert task.optimizer == "sgd"
    before = float(task.validate(weights(task, 0))[0])
    losses = at_rates(RECIPES[name], task, 0, 40, (0.0, 0.02))
    assert losses[0] == pytest.approx(before)
    assert losses[1] < 0.98 * before


def test_the_rates_are_powers_of_two() -> None:
    assert len(RATES) == 11
    assert all(b == 2 * a for a, b in itertools.pairwise(RATES))
