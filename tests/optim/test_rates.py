"""How a base and a multiplier reach a param group."""

import operator
from typing import Any

import pytest
import torch

from hdet_scale import AutoLR, HDETConfig, OneCycleAutoLR
from hdet_scale.kernels import advance, scalars, update
from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.launch import launch
from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.fused_sgd import FusedSGD
from hdet_scale.optim.rates import effective_lr, put, write_lr
from tests.support.stepping import params


def test_one_place_decides_where_the_multiplier_goes() -> None:
    ours = FusedAdamW(params(), lr=1.0).param_groups[0]
    theirs = torch.optim.AdamW(params(), lr=1.0).param_groups[0]
    tensor = torch.optim.AdamW(params(), lr=torch.tensor(1.0)).param_groups[0]
    kept = tensor["lr"]
    for group in (ours, theirs, tensor):
        write_lr(group, 0.2, 1.5)
        assert float(effective_lr(group)) == pytest.approx(0.3)
    assert (ours["lr"], ours["lr_multiplier"]) == (0.2, 1.5)
    assert "lr_multiplier" not in theirs
    assert tensor["lr"] is kept
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="lr_multiplier"):
            write_lr(ours, 0.1, bad)
    assert ours["lr"] == 0.2


def test_schedulers_write_the_base() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    ours = FusedAdamW([param], lr=1.0, lr_multiplier=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.1)
    param.grad = torch.ones(3)
    ours.step()
    scheduler.step()
    assert ours.param_groups[0]["lr"] == pytest.approx(0.1)
    assert ours.param_groups[0]["lr_multiplier"] == 0.5
    assert effective_lr(ours.param_groups[0]) == pytest.approx(0.05)


# --- CUDA graphs ------------------------------------------------------------------------------


class Recorded:
    """Keeps every launch with its arguments, as a captured graph does, and starts them again."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        for module in (advance, update):
            patch.setattr(module, "launch", self._launch)

    def _launch(self, *args: Any, **constants: Any) -> None:
        self.launches.append((args, constants))
        launch(*args, **constants)

    def replay(self) -> None:
        for args, constants in self.launches:
            launch(*args, **constants)


@interpreted
def replays_after_scheduler_steps(kind: str) -> list[tuple[float, float]]:
    """(lr of the schedule, lr of a replay) for steps that are replayed and never called."""
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.9, backend="triton")
    scheduler: Any
    if kind == "one cycle":
        scheduler = OneCycleAutoLR(optimizer, 0.5, total_steps=20, rule="none")
    else:
        inner = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        scheduler = AutoLR(inner, HDETConfig(rule="none", spread=0.0))
    param.grad = torch.ones(3)
    with pytest.MonkeyPatch.context() as patch:
        recorded = Recorded(patch)
        optimizer.step()
    (listing,) = optimizer._listings._kept.values()
    (launches,) = listing.launches.values()
    before, chunks = launches.table.tensors.clone(), list(launches.table.chunks.values())
    seen = []
    for _ in range(4):
        scheduler.step()
        buffer, at = optimizer.state[param]["momentum_buffer"][0].item(), param[0].item()
        recorded.replay()
        direction = optimizer.param_groups[0]["momentum"] * buffer + 1
        seen.append((optimizer.param_groups[0]["lr"], (at - param[0].item()) / direction))
    assert torch.equal(launches.table.tensors, before)
    assert all(map(operator.is_, launches.table.chunks.values(), chunks))
    return seen


@pytest.mark.parametrize("kind", ["one cycle", "around another"])
def test_a_replayed_launch_reads_what_the_scheduler_wrote(kind: str) -> None:
    """A graph that is replayed never calls `step`: the scheduler brings the LR and the momentum to
    the memory that the launch was given."""
    seen = replays_after_scheduler_steps(kind)
    assert len({lr for lr, _ in seen}) == 4
    for lr, moved in seen:
        assert moved == pytest.approx(lr, rel=1e-5)


@interpreted
def scalars_of(lr: Any) -> tuple[bool, list[float]]:
    """Whether the table stays where it is while groups and sets of tensors change; its LRs."""
    first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = FusedSGD([{"params": [first]}, {"params": [second], "lr": 3.0}], lr=lr,
                         backend="triton")  # fmt: skip
    first.grad = torch.ones(3)
    optimizer.step()
    (table,) = optimizer._scalars.values()
    place = table.values.data_ptr()
    second.grad = torch.ones(3)
    optimizer.step()
    put(optimizer.param_groups[0], "lr", 0.25)
    optimizer.write_scalars()
    (after,) = optimizer._scalars.values()
    return after.values.data_ptr() == place, after.values[:, scalars.LR].tolist()


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)])
def test_the_table_of_numbers_is_one_for_all_sets_of_tensors(lr: Any) -> None:
    assert scalars_of(lr) == (True, [0.25, 3.0])
