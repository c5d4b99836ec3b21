"""The update kernels through the optimizers, in lockstep with their torch references.

`advance`, which counts the steps and corrects the bias, is launched by each of these steps; the
check of its name skips a step and scales the gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from hdet_scale.acceptance.twins import FP32, Twins
from hdet_scale.kernels.cases import updates
from hdet_scale.kernels.table import Combination
from hdet_scale.kernels.update import Update
from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.fused_lion import FusedLion
from hdet_scale.optim.fused_sgd import FusedSGD

STEPS = 3
_SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "8-bit",
    None: "no",
}

# Each number is large enough to be seen in the result: an eps of 1e-8 would not be.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (FusedAdamW, {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}),
    "sgd": (FusedSGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "lion": (FusedLion, {"lr": 1e-3, "weight_decay": 0.1}),
}
"""Name of the update: the optimizer that launches it, and its options here."""


def twins_of(name: str, device: torch.device, combination: Combination = FP32) -> Twins:
    """An optimizer and its reference, at a rate of base times multiplier."""
    make, options = OPTIMIZERS[name]
    momentless = {"momentum": 0.0, "nesterov": False} if combination.moment is None else {}
    wanted = {**options, "lr_multiplier": 1.1, **momentless}
    return Twins(update_of(name), make, device, combination, **wanted)


def update_of(name: str) -> Update:
    """The update of a name, whose combinations are each a case of `kernels/cases.py`."""
    return next(update for update in updates() if update.name == name)


def check_update(name: str, device: torch.device) -> str:
    """Three steps of one optimizer in each of its dtype combinations."""
    worst = 0.0
    combinations = update_of(name).combinations
    for combination in combinations:
        twins = twins_of(name, device, combination)
        for step in range(STEPS):
            twins.give(twins.draw(1 + step))
            twins.optimizer.step()
            twins.step_reference()
            worst = max(worst, twins.check(_named(combination)))
    return f"{len(combinations)} variants like torch, at most {worst:.2f} of what is allowed"


def _named(combination: Combination) -> str:
    mode = " and master" * combination.master + " rounded at random" * combination.stochastic
    return f"{_SHORT[combination.param]} with {_SHORT[combination.moment]} moments{mode}"


def check_skipped(device: torch.device) -> str:
    """A GradScaler's found_inf and scale, and a clip factor: read by the kernels, not the host."""
    twins = twins_of("adamw", device)
    clip = torch.full((1,), 0.5, device=device)
    for step, skipped in enumerate((False, True, False)):
        twins.optimizer.found_inf = torch.full((), float(skipped), device=device)
        twins.optimizer.grad_scale = torch.full((), 8.0, device=device)
        twins.give(twins.draw(1 + step))
        twins.optimizer.step(clip_factor=clip)
        if not skipped:
            twins.step_reference(factor=0.5 / 8.0)
        twins.check(f"step {step + 1}{', to be skipped' * skipped}")
    return "a skipped step writes nothing, loss scale and clip factor are read on the device"


def check_moving_gradients(device: torch.device) -> str:
    """zero_grad(set_to_none=True), and gradients at new addresses at every step; one step has no
    gradient for one parameter."""
    twins = twins_of("adamw", device)
    kept = []  # so that the allocator cannot give the same addresses again
    for step in range(4):
        twins.optimizer.zero_grad(set_to_none=True)
        kept.append(twins.draw(1 + step))
        twins.give(kept[-1], without=0 if step == 2 else None)
        twins.optimizer.step()
        twins.step_reference()
        twins.check(f"step {step + 1} of moving gradients")
    addresses = {grads[-1].data_ptr() for grads in kept}
    return f"{len(kept)} steps, gradients at {len(addresses)} addresses"
