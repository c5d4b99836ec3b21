"""An optimizer on our kernels, and the torch reference beside them, stepped in lockstep.

The reference is that of the kernel's own file and not torch's fused step: torch 2.13's fused SGD
leaves most elements of a 16-bit parameter on a CPU as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdet_scale.acceptance.findings import WrongResultError
from hdet_scale.acceptance.guarded import Guarded, compare, sizes
from hdet_scale.kernels.random_words import tensor_key
from hdet_scale.kernels.table import Combination
from hdet_scale.kernels.update import Update

FP32 = Combination(param=torch.float32, moment=torch.float32)


class Twins:
    """Equal parameters, stepped by an optimizer and by its reference.

    Args:
        update: the optimizer's rule, with its reference.
        make: the optimizer's class.
        device: of the parameters.
        combination: the dtypes (default: all fp32).
        options: of the optimizer, beside those that lead to the combination.
    """

    SEED = 11

    def __init__(
        self,
        update: Update,
        make: Any,
        device: torch.device,
        combination: Combination = FP32,
        **options: Any,
    ) -> None:
        self._update, self._combination = update, combination
        self._arena = Guarded(sizes(device), combination.param, device)
        self.params = [torch.nn.Parameter(tensor) for tensor in self._arena.tensors]
        self.optimizer = make(
            self.params,
            backend="triton",
            seed=self.SEED,
            master_weights=combination.master,
            stochastic_rounding=combination.stochastic,
            # fp16 moments are those of fp16 parameters, and are not asked for.
            moment_dtype=None if combination.moment == torch.float16 else combination.moment,
            **options,
        )
        self._reference = [self._entry(param) for param in self.params]

    def _entry(self, param: Tensor) -> dict[str, Any]:
        """What the reference keeps of a parameter."""
        start, kept = param.detach().clone(), self._combination
        moments = self._update.moments if kept.moment is not None else ()
        found = {name: torch.zeros_like(start, dtype=kept.moment) for name in moments}
        if kept.master:
            found["master"] = start.float()
        return {"param": start, "step": 0, **found}

    def draw(self, seed: int) -> list[Tensor]:
        """A gradient for each parameter, aligned as the parameter is."""
        first = self.params[0]
        return Guarded(sizes(first.device), first.dtype, first.device, seed=seed).tensors

    def give(self, grads: list[Tensor], *, without: int | None = None) -> None:
        """Set the gradients.

        Args:
            grads: one for each parameter.
            without: the index of a parameter that gets none (default None).
        """
        for i, grad in enumerate(grads):
            self.params[i].grad = None if i == without else grad

    def step_reference(self, factor: float = 1.0) -> None:
        """One step of the reference, with the optimizer's gradients times `factor`."""
        group = self.optimizer.param_groups[0]
        options = {name: group[name] for name in self._update.options}
        for i, (param, entry) in enumerate(zip(self.params, self._reference, strict=True)):
            if param.grad is None:
                continue
            entry["step"] += 1
            moments = [entry.get(name) for name in self._update.moments]
            self._update.reference(
                entry["param"],
                param.grad,
                *moments,
                master=entry.get("master"),
                step=entry["step"],
                lr=group["lr"],
                lr_multiplier=group["lr_multiplier"],
                factor=factor,
                key=tensor_key(self.SEED, i) if self._combination.stochastic else None,
                **options,
            )

    def check(self, what: str) -> float:
        """Compare parameters and state; the largest difference over what is allowed.

        Raises:
            WrongResultError: one differs, or memory outside of a parameter was written.
        """
        worst = 0.0
        for param, entry in zip(self.params, self._reference, strict=True):
            state = self.optimizer.state[param]
            steps = int(state.get("step", 0))
            if steps != entry["step"]:
                raise WrongResultError(f"{what}: {steps} steps, not {entry['step']}")
            for name in entry:
                if name != "step":
                    ours = param.detach() if name == "param" else state.get(name)
                    worst = max(worst, compare(f"{what}: {name}", ours, entry[name]))
        self._arena.check(what)
        return worst
