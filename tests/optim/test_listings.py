"""What is kept between steps: no gradient; a listing for each set of tensors, while it is valid."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.optim import batches, fused
from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.fused_lion import FusedLion
from hdet_scale.optim.fused_sgd import FusedSGD
from hdet_scale.optim.listings import LIMIT, Listing, Listings
from tests.support.stepping import LR, drive, params, same

KINDS = {"adamw": FusedAdamW, "sgd": FusedSGD, "lion": FusedLion}


def alive_after_zero_grad(kind: str, backend: str, options: dict[str, Any]) -> int:
    """How many gradients outlive `zero_grad`; some of them are laid out anew for the step."""
    dtype = torch.bfloat16 if options else torch.float32
    mine = [torch.nn.Parameter(torch.ones(4, 6, dtype=dtype)) for _ in range(8)]
    optimizer: Any = KINDS[kind](mine, lr=LR, backend=backend, **options)
    for _ in range(2):
        for i, p in enumerate(mine):
            p.grad = torch.ones(6, 4, dtype=dtype).t() if i % 2 else torch.ones_like(p)
        grads = [weakref.ref(p.grad) for p in mine]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return sum(ref() is not None for ref in grads)


@interpreted
def alive_after_kernels(kind: str, options: dict[str, Any]) -> int:
    return alive_after_zero_grad(kind, "triton", options)


@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"stochastic_rounding": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_outlives_zero_grad(kind: str, options: dict[str, Any]) -> None:
    """Gradients that are kept cannot be reused: the next ones come at other addresses, and a second
    copy of all of them is in memory."""
    assert alive_after_zero_grad(kind, "torch", options) == 0
    assert alive_after_kernels(kind, options) == 0


def count_listings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The index of each group that is listed from now on."""
    listed: list[int] = []
    build = fused.FusedOptimizer._build

    def noted(self: Any, index: int, *rest: Any) -> Any:
        listed.append(index)
        return build(self, index, *rest)

    monkeypatch.setattr(fused.FusedOptimizer, "_build", noted)
    return listed


def test_sets_that_take_turns_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that take turns, and ZeRO-3's sub-groups: the same group with other parameters."""
    listed = count_listings(monkeypatch)
    mine = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = FusedAdamW(mine, lr=LR)
    for turn in range(6):
        for i, p in enumerate(mine):
            p.grad = torch.ones(3) if i % 2 == turn % 2 else None
        optimizer.step()
    assert listed == [0, 0]
    for turn in range(6):
        optimizer.param_groups[0]["params"] = part = mine[:2] if turn % 2 else mine[2:]
        for p in part:
            p.grad = torch.ones(3)
        optimizer.step()
    assert listed == [0, 0, 0, 0]
    assert [optimizer.state[p]["step"].item() for p in mine] == [6, 6, 6, 6]


def test_the_number_of_plans_is_bounded_and_captured_ones_stay() -> None:
    listings = Listings()

    class Captured:
        captured = True

    captured = Listing([], {torch.device("cpu"): Captured()})  # type: ignore[dict-item]
    listings.keep("captured", captured)
    for at in range(2 * LIMIT):
        listings.keep(at, Listing([]))
    assert len(listings) == LIMIT
    assert listings.get("captured") is captured
    assert listings.get(0) is None
    assert listings.get(2 * LIMIT - 1) is not None


def popped(optimizer: Any, p: torch.nn.Parameter) -> None:
    optimizer.state.pop(p)


def removed(optimizer: Any, p: torch.nn.Parameter) -> None:
    del optimizer.state[p]["exp_avg_sq"]


def replaced(name: str) -> Callable[[Any, torch.nn.Parameter], None]:
    def change(optimizer: Any, p: torch.nn.Parameter) -> None:
        optimizer.state[p][name] = torch.full_like(optimizer.state[p][name], 0.5)

    return change


CHANGES: dict[str, Callable[[Any, torch.nn.Parameter], None]] = {
    "popped": popped,
    "removed": removed,
    **{name: replaced(name) for name in ("step", "master", "exp_avg", "exp_avg_sq")},
}


def after_a_change(change: str, backend: str) -> list[torch.Tensor]:
    """The state of a parameter whose state was changed between two steps; and after one more step,
    whether it is what is stepped."""
    mine = params(torch.bfloat16)
    optimizer = FusedAdamW(mine, lr=LR, master_weights=True, backend=backend)

    def step(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in mine:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()

    step(0)
    step(1)
    CHANGES[change](optimizer, mine[2])
    # The counterpart has never listed anything.
    other = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    fresh = FusedAdamW(other, lr=LR, master_weights=True, backend=backend)
    for a, b in zip(mine, other, strict=True):
        if a in optimizer.state:
            fresh.state[b] = {k: v.clone() for k, v in optimizer.state[a].items()}
    step(2)
    generator = torch.Generator().manual_seed(2)
    for p in other:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    fresh.step()
    found = []
    for a, b in zip(mine, other, strict=True):
        found += [a.detach(), b.detach()]
        for name in ("step", "master", "exp_avg", "exp_avg_sq"):
            found += [optimizer.state[a][name], fresh.state[b][name]]
    return found


@interpreted
def after_a_change_on_kernels(change: str) -> list[torch.Tensor]:
    return after_a_change(change, "triton")


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_was_changed_between_steps_is_what_is_stepped(change: str) -> None:
    """An optimizer that had listed the old tensors would go on with orphaned moments."""
    for found in (after_a_change(change, "torch"), after_a_change_on_kernels(change)):
        for ours, theirs in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(ours, theirs)


def test_a_first_step_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = params()
    optimizer = FusedAdamW(mine, lr=LR)
    for p in mine:
        p.grad = torch.ones_like(p)
    monkeypatch.setattr(batches, "capturing", lambda _: True)
    with pytest.raises(RuntimeError, match="Take one step with the same gradients before"):
        optimizer.step()
    assert len(optimizer.state) == 0
    monkeypatch.setattr(batches, "capturing", lambda _: False)
    optimizer.step()
    monkeypatch.setattr(batches, "capturing", lambda _: True)
    optimizer.step()


def test_a_group_that_was_added_is_stepped() -> None:
    first, second = params(), params()
    optimizer, other = FusedAdamW(first, lr=LR), FusedAdamW([*params(), *params()], lr=LR)
    yours = other.param_groups[0]["params"]
    optimizer.add_param_group({"params": second})
    drive(3, optimizer, [*first, *second], other, yours)
    assert same([*first, *second], yours)
