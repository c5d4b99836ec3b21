"""find_lr: the rate that a run with rule="auto" takes, and everything as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from hdet_scale import AutoLR, FusedAdamW, HDETConfig, find_lr, fsdp
from hdet_scale.find import shape
from hdet_scale.search.decision import RateSearch
from hdet_scale.topology import local
from tests.support import sharded
from tests.support.fleet import Fleet
from tests.support.toy import bits

STEPS = 1000
LOW = 3e-5
KINDS: dict[str, Any] = {"adamw": AdamW, "sgd": SGD, "fused": FusedAdamW}


def network() -> nn.Module:
    """With statistics, random masks and a frozen layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
    )
    model[1].bias.requires_grad_(False)
    return model


def draw(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sin().sum(1, keepdim=True)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def held_out(model: nn.Module) -> Any:
    return lambda: (loss_of(model, draw(10_000 + i)) for i in range(16))


def everything(model: nn.Module, optimizer: Optimizer) -> Any:
    return bits(
        [
            model.state_dict(),
            [p.grad for p in model.parameters()],
            [m.training for m in model.modules()],
            optimizer.state_dict(),
            sorted(optimizer.__dict__),
            [sorted(group) for group in optimizer.param_groups],
            [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
            [len(m._forward_pre_hooks) for m in model.modules()],
            torch.get_rng_state(),
        ]
    )


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_as_it_was(kind: str, trained: bool) -> None:
    """Weights, statistics, moments, gradients, modes, options, hooks and all generators."""
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 1e-4}]
    optimizer = KINDS[kind](groups, lr=LOW)
    if trained:
        for step in range(3):
            loss_of(model, draw(step)).backward()
            optimizer.step()
    model[3].eval()
    python, array = random.getstate(), numpy.random.get_state()[1].tolist()
    before = everything(model, optimizer)
    tensors = [p.grad for p in model.parameters()]
    found = find_lr(
        model, optimizer, [draw(i) for i in range(50)], loss_of, total_steps=STEPS,
        probe=held_out(model),
    )  # fmt: skip
    assert everything(model, optimizer) == before
    assert all(p.grad is kept for p, kept in zip(model.parameters(), tensors, strict=True))
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == (python, array)
    assert found.lrs[1] / found.lrs[0] == pytest.approx(1e-4 / LOW)
    assert found.result.steps <= 0.12 * STEPS


def test_the_generators_of_a_loader_are_put_back() -> None:
    model, generator = network(), torch.Generator().manual_seed(5)
    data = TensorDataset(*draw(0))
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    optimizer = AdamW(model.parameters(), lr=LOW)
    wanted = [x.tolist() for x, _ in copy.deepcopy(loader)]
    find_lr(model, optimizer, loader, loss_of, total_steps=STEPS, probe=held_out(model))
    assert [x.tolist() for x, _ in loader] == wanted


def test_everything_is_as_it_was_after_an_error() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=LOW)
    before, calls = everything(model, optimizer), []

    def failing(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 20:
            raise ArithmeticError("of the user's")
        return loss_of(model, batch)

    with pytest.raises(ArithmeticError, match="of the user's"):
        find_lr(model, optimizer, [draw(0)], failing, total_steps=STEPS)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("lr", [LOW, 1e-2, 3.0])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_it_finds_what_auto_takes(kind: str, lr: float) -> None:
    """The same trials on the same batches."""
    model = network()
    optimizer = KINDS[kind](model.parameters(), lr=lr)
    found = find_lr(
        model, optimizer, [draw(i) for i in range(200)], loss_of, total_steps=STEPS,
        probe=held_out(model),
    )  # fmt: skip
    inner = LambdaLR(optimizer, lambda t: shape(t, STEPS))
    config = HDETConfig(total_steps=STEPS)
    scheduler = AutoLR(inner, config, model=model, probe=held_out(model))
    torch.manual_seed(0)
    network()  # the generator as it was when find_lr began
    step = 0
    while scheduler.searching:
        optimizer.zero_grad()
        loss = loss_of(model, draw(step))
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        step += 1
    assert scheduler.search_result == found.result
    assert found.lr == pytest.approx(lr * scheduler.get_base_lr()[0] / scheduler.get_schedule()[0])
    low, high = found.range
    assert low < found.lr < high


def test_the_result_is_applied_plotted_and_told(tmp_path: Any) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=LOW)
    found = find_lr(
        model, optimizer, [draw(i) for i in range(50)], loss_of, total_steps=STEPS,
        probe=held_out(model),
    )  # fmt: skip
    assert found.lr == pytest.approx(found.result.taken[0])
    assert found.lr > LOW
    assert optimizer.param_groups[0]["lr"] == LOW
    found.apply()
    assert optimizer.param_groups[0]["lr"] == found.lr
    found.plot(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 1000
    assert str(found).startswith(f"max_lr {LOW:.3g} -> {found.lr:.3g}, plausible ")
    assert f"{found.result.steps} steps" in str(found)
    assert {point.stage for point in found.curve} == {"first", "second"}


def test_the_users_schedule_is_not_stepped() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=LOW)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    before = copy.deepcopy(scheduler.state_dict()), optimizer.step
    find_lr(
        model, optimizer, [draw(0)], loss_of, total_steps=STEPS, scheduler=scheduler,
        probe=held_out(model),
    )  # fmt: skip
    assert (scheduler.state_dict(), optimizer.step) == before


def test_what_cannot_be_searched_is_refused() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=LOW)

    def find(batches: Any = ((),), total_steps: int = STEPS, **options: Any) -> None:
        chosen = {"optimizer": optimizer} | options
        find_lr(model, batches=batches, loss_fn=loss_of, total_steps=total_steps, **chosen)

    with pytest.raises(TypeError, match=r"got the iterator list_iterator: give the DataLoader"):
        find(iter([draw(0)]))
    with pytest.raises(TypeError, match=r"got Module: with DeepSpeed use hdet_scale.deepspeed"):
        find(optimizer=nn.Module())
    with pytest.raises(ValueError, match=r"initial rates are \[0.0\]"):
        find(optimizer=AdamW(model.parameters(), lr=0.0))
    with pytest.raises(ValueError, match="batches are empty: give the training batches"):
        find([])
    least = RateSearch.least_steps(1)
    with pytest.raises(ValueError, match=f"total_steps={least - 1} is too short .* 1 replicas"):
        find([draw(0)], total_steps=least - 1)


# -- on several processes -------------------------------------------------------------------------


def _on_ddp(rank: int, size: int) -> Any:
    model = DistributedDataParallel(network())
    optimizer = AdamW(model.parameters(), lr=LOW)
    before = everything(model, optimizer)
    found = find_lr(
        model, optimizer, [draw(100 * rank + i) for i in range(50)], loss_of, total_steps=STEPS,
        probe=held_out(model),
    )  # fmt: skip
    same = everything(model, optimizer) == before
    loss_of(model, draw(rank)).backward()  # shared again
    return found.result, same, bits([p.grad for p in model.parameters()])


def test_replicas_find_one_rate_and_share_gradients_afterwards(pair: Fleet) -> None:
    out = pair.run(_on_ddp)
    for result, same, gradients in out:
        assert result == out[0][0]
        assert same
        assert gradients == out[0][2]
    assert out[0][0].taken[0] > LOW


def _on_shards(rank: int, size: int) -> Any:
    mesh = fsdp.build_mesh(shards=2, device="cpu")
    model = sharded.build_model()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = AdamW(model.parameters(), lr=1e-5)

    def held() -> Iterator[Tensor]:
        return (sharded.loss_of(model, sharded.batch(9_000 + i, 0)) for i in range(16))

    def own() -> Any:
        return bits([local(p).detach() for p in model.parameters()]), len(optimizer.state)

    before = own()
    found = find_lr(
        model, optimizer, [sharded.batch(i, rank) for i in range(50)], sharded.loss_of,
        total_steps=STEPS, mesh=mesh, probe=held,
    )  # fmt: skip
    return found.result, own() == before


def test_sharded_replicas_find_one_rate(quartet: Fleet) -> None:
    out = quartet.run(_on_shards)
    assert all((result, same) == (out[0][0], True) for result, same in out)
    assert out[0][0].taken[0] > 1e-5
