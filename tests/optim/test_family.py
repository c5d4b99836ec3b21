"""Optimizers are told apart by what their step does, not by what their defaults are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hdet_scale import FusedAdamW, FusedLion, FusedSGD
from hdet_scale.optim.family import divides_by_the_gradient


class PlainMuon(Optimizer):
    """Muon as it was published (Jordan et al., 2024): momentum, then the nearest orthogonal matrix
    by Newton-Schulz iterations. Neither eps nor betas."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                g = p.grad + group["momentum"] * buffer if group["nesterov"] else buffer
                a, b, c = 3.4445, -4.7750, 2.0315
                x = g.bfloat16() / (g.norm() + 1e-7)
                for _ in range(group["ns_steps"]):
                    s = x @ x.T
                    x = a * x + (b * s + c * s @ s) @ x
                p.add_(x.to(p.dtype), alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


class Decorated(SGD):
    """SGD with options that it does not use."""

    def __init__(self, params: Any, lr: float, betas: Any = (0.9, 0.99), eps: float = 1e-8) -> None:
        super().__init__(params, lr)
        self.defaults.update(betas=betas, eps=eps)


class ByGroup(Optimizer):
    """Refuses groups that do not have exactly its keys, and steps each by a flag."""

    def __init__(self, param_groups: Any) -> None:
        for group in param_groups:
            assert set(group) == {"params", "lr", "signed"}, group
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad.sign() if group["signed"] else p.grad))


class NeedsTheModel(Optimizer):
    """Cannot be built from parameters and options."""

    def __init__(self, model: nn.Module, defaults: dict[str, Any]) -> None:
        super().__init__(model.parameters(), defaults)


EVERY: list[tuple[Any, bool]] = [
    (AdamW, True),
    (FusedAdamW, True),
    (FusedLion, True),
    (torch.optim.Adagrad, True),
    (torch.optim.RMSprop, True),
    (torch.optim.Rprop, True),
    (torch.optim.Adamax, True),
    (torch.optim.NAdam, True),
    (torch.optim.RAdam, True),
    (torch.optim.Adadelta, True),
    (torch.optim.Adafactor, True),
    (torch.optim.Muon, True),
    (PlainMuon, True),
    (SGD, False),
    (FusedSGD, False),
    (torch.optim.ASGD, False),
    (Decorated, False),
]
MATRICES_ALONE = {torch.optim.Muon, PlainMuon}


@pytest.mark.parametrize(
    ("make", "divides", "shape"),
    [
        (make, divides, shape)
        for make, divides in EVERY
        for shape in ((5, 4), (7,))
        if len(shape) == 2 or make not in MATRICES_ALONE
    ],
)
def test_the_family_is_told_by_what_a_step_does(
    make: Any, divides: bool, shape: tuple[int, ...]
) -> None:
    weight = nn.Parameter(torch.ones(shape))
    assert divides_by_the_gradient(make([weight], lr=0.1)) is divides


def test_deepspeeds_muon_whose_matrices_zero_has_flattened() -> None:
    kinds = pytest.importorskip("deepspeed.runtime.zero.muon.muon_optimizer")
    flat = nn.Parameter(torch.ones(12))
    options = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "use_muon": True}
    assert divides_by_the_gradient(kinds.MuonWithAuxAdam([{"params": [flat], **options}]))


def test_schedule_free_optimizers_and_prodigy() -> None:
    schedulefree, prodigy = pytest.importorskip("schedulefree"), pytest.importorskip("prodigyopt")
    weight = nn.Parameter(torch.ones(3, 2))
    assert divides_by_the_gradient(schedulefree.AdamWScheduleFree([weight], lr=0.1))
    assert not divides_by_the_gradient(schedulefree.SGDScheduleFree([weight], lr=0.1))
    assert divides_by_the_gradient(prodigy.Prodigy([weight]))


def test_the_options_of_the_largest_group_decide() -> None:
    large, small = nn.Parameter(torch.ones(9, 9)), nn.Parameter(torch.ones(2, 2))
    for signed in (True, False):
        optimizer = ByGroup(
            [
                {"params": [small], "lr": 0.1, "signed": not signed},
                {"params": [large], "lr": 0.1, "signed": signed},
            ]
        )
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10, cycle_momentum=False)
        assert divides_by_the_gradient(optimizer) is signed


def test_a_wrapper_is_asked_for_what_is_inside() -> None:
    class Wrapper(Optimizer):
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer
            self.defaults = {"betas": (0.9, 0.99)}

    assert not divides_by_the_gradient(Wrapper(SGD([nn.Parameter(torch.ones(3))], lr=0.1)))


def test_where_no_copy_can_be_made_the_defaults_tell() -> None:
    model = nn.Linear(3, 3)
    assert divides_by_the_gradient(NeedsTheModel(model, {"lr": 0.1, "eps": 1e-8}))
    assert not divides_by_the_gradient(NeedsTheModel(model, {"lr": 0.1}))


@pytest.mark.parametrize("options", [{}, {"lr": torch.tensor(0.0), "capturable": True}])
def test_the_users_optimizer_state_generator_and_hooks_are_left_alone(
    options: dict[str, Any],
) -> None:
    """In the first steps of a warm-up the LR is 0, and it may be a tensor."""
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = AdamW([weight], fused=True, **options)
    weight.grad = torch.ones(3, 2)
    seen: list[Optimizer] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(o))
    handle = register_optimizer_step_pre_hook(lambda o, *_: seen.append(o))
    generator = torch.get_rng_state()
    before = str(optimizer.state_dict())
    try:
        assert divides_by_the_gradient(optimizer)
    finally:
        handle.remove()
    assert seen == []
    assert torch.equal(torch.get_rng_state(), generator)
    assert str(optimizer.state_dict()) == before
    assert len(optimizer.state) == 0
    assert torch.equal(weight, torch.ones(3, 2))


def test_a_random_step_leaves_the_generator_alone() -> None:
    class Noisy(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            torch.rand(3)
            super().step(closure)

    generator = torch.get_rng_state()
    assert not divides_by_the_gradient(Noisy([nn.Parameter(torch.ones(3))], lr=0.1))
    assert torch.equal(torch.get_rng_state(), generator)


def test_matrices_that_lie_on_no_device() -> None:
    weight = nn.Parameter(torch.ones(3, 2, device="meta"))
    assert not divides_by_the_gradient(SGD([weight], lr=0.1, momentum=0.9, nesterov=True))
