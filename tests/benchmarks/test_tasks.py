"""What every task of the arbiter must do: start finite, learn, keep its copies apart, and give the
same evaluation twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.lr.points import full_batch
from benchmarks.lr.problem import Params, Stacked, Task
from benchmarks.lr.simulated import REPLICAS, held_out, scheduled, weights
from benchmarks.lr.tasks import DEVELOPED, FIRST, JUDGED, TASKS

STEPS, LENGTH = 20, 800
"""Steps that a test takes of a run of this length: the first half of its warm-up."""


def gradients_of(task: Task, params: Params, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Losses and gradients with the same dropout at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Stacked(task, params).gradients(batch)


def train(task: Task, batches: Tensor, rate: float) -> Params:
    """The weights after a step on each batch in the warm-up to this rate; all losses are finite."""
    model = Stacked(task, weights(task, 0))
    for t, batch in enumerate(batches):
        losses, gradients = model.gradients(batch[None])
        assert losses.shape == (1,)
        assert losses.isfinite().all()
        model.step(torch.tensor([rate]) * scheduled(t, LENGTH), gradients)
    return model.copies()


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_finite_at_its_middle_rate_and_learns(name: str) -> None:
    """Losses are finite at the start, with the part of a batch that a replica has, and through the
    first steps at `around`. Steps at half of it on one batch lower the loss of that batch."""
    task = TASKS[name]
    assert name == task.name
    start = weights(task, 0)
    assert task.losses(start, task.draw(1, 1, max(1, task.batch // REPLICAS))).isfinite().all()
    assert task.evaluated(start, held_out(task, 0)[:1]).isfinite().all()
    assert task.validate(train(task, task.draw(0, STEPS), task.around), 64).isfinite().all()
    batch = task.draw(0, 1)
    after = train(task, batch.expand(STEPS, -1), task.around / 2)
    assert float(task.evaluated(after, batch)) < float(task.evaluated(start, batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_copy_does_not_depend_on_the_parameters_of_the_others(name: str) -> None:
    """Nor on their examples: both are changed for two of three copies."""
    task = TASKS[name]
    params = {k: v.clone() for k, v in weights(task, 0, 3).items()}
    batch = task.draw(0, 3, 8)
    losses, gradients = gradients_of(task, params, batch)
    others = torch.tensor([0, 2])
    for value in params.values():
        value[others] = value[others] * 0.5 + 0.1
    moved = batch.clone()
    moved[others] = task.draw(1, 2, 8)
    again, changed = gradients_of(task, params, moved)
    torch.testing.assert_close(again[1], losses[1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(again[others], losses[others])
    for one, two in zip(gradients, changed, strict=True):
        torch.testing.assert_close(two[1], one[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", TASKS)
def test_an_evaluation_is_the_same_twice_and_draws_nothing(name: str) -> None:
    task = TASKS[name]
    params = weights(task, 0, 2)
    state = torch.get_rng_state()
    first, second = (task.validate(params, 64) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(first[0], first[1])


def test_a_full_batch_is_the_training_set_and_a_part_of_it_is_what_was_drawn() -> None:
    task = full_batch()
    assert task.batch == task.train
    params = weights(task, 0)
    one, two = (task.losses(params, task.draw(seed, 1)) for seed in (0, 1))
    whole = task.losses(params, torch.arange(task.train)[None])
    assert torch.equal(one, two)
    assert torch.equal(one, whole)
    parts = task.draw(0, 2, task.batch // REPLICAS)
    assert not torch.equal(task.losses(params, parts[:1]), task.losses(params, parts[1:]))
    held = torch.arange(task.train, 2 * task.train)[None]
    assert not torch.equal(task.losses(params, held), whole)


def test_no_task_is_both_developed_and_judged() -> None:
    assert not set(DEVELOPED) & set(JUDGED)
    assert len(TASKS) == len(DEVELOPED) + len(JUDGED)
    assert FIRST == ["gpt", "gpt-small-batch", "conv", "lstm", "tab", "digits", "over"]
