"""An optimizer on our kernels, and the torch reference beside them, stepped in lockstep.

The reference is that of the kernel's own file and not torch's fused step: torch 2.13's fused SGD
leaves nearly all elements of a 16-bit parameter on a CPU unchanged.

A moment that is kept as 8-bit codes may take either code next to a tie, and from then on the two
sides are two runs. Such codes may differ by one at each check, and the reference goes on with ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdet_scale.acceptance.findings import WrongResultError
from hdet_scale.acceptance.guarded import Guarded, compare, expect_codes, expect_like, sizes
from hdet_scale.kernels import int8_state
from hdet_scale.kernels.random_words import tensor_key
from hdet_scale.kernels.table import Combination
from hdet_scale.kernels.update import Update
from hdet_scale.optim.precision import LOW, is_coded, scales_key

FP32 = Combination(param=torch.float32, moment=torch.float32)
_ASKED = (torch.float32, torch.bfloat16)


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
            moment_dtype=combination.moment if combination.moment in _ASKED else None,
            **({"state": "int8"} if is_coded(combination) else {}),
            **options,
        )
        self._reference = [self._entry(param) for param in self.params]

    def _entry(self, param: Tensor) -> dict[str, Any]:
        """What the reference keeps of a parameter."""
        start, kept = param.detach().clone(), self._combination
        found: dict[str, Any] = {"param": start, "step": 0}
        for name, dtype in zip(self._moments, self._moment_dtypes, strict=True):
            found[name] = torch.zeros_like(start, dtype=dtype)
            if is_coded(kept):
                count = int8_state.scales_of(start.numel())
                found[scales_key(name)] = torch.zeros(count, device=start.device)
        if kept.master and is_coded(kept):
            found[LOW] = torch.zeros_like(start, dtype=torch.int16)
        elif kept.master:
            found["master"] = start.float()
        return found

    @property
    def _moments(self) -> tuple[str, ...]:
        return self._update.moments if self._combination.moment is not None else ()

    @property
    def _moment_dtypes(self) -> tuple[torch.dtype | None, ...]:
        coded = is_coded(self._combination)
        return int8_state.CODES if coded else (self._combination.moment,) * len(self._moments)

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
            numbers = {
                "step": entry["step"],
                "lr": group["lr"],
                "lr_multiplier": group["lr_multiplier"],
                "factor": factor,
                "key": tensor_key(self.SEED, i) if self._combination.stochastic else None,
                **options,
            }
            self._step_entry(entry, param.grad, numbers)

    def _step_entry(self, entry: dict[str, Any], grad: Tensor, numbers: dict[str, Any]) -> None:
        reference = self._update.reference
        moments = [entry[name] for name in self._moments]
        if is_coded(self._combination):
            scales = [entry[scales_key(name)] for name in self._moments]
            int8_state.step_reference(
                reference, entry["param"], grad, moments, scales, low=entry.get(LOW), **numbers
            )
        else:
            reference(entry["param"], grad, *moments, master=entry.get("master"), **numbers)

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
            ours = {name: state.get(name) for name in entry} | {"param": param.detach()}
            compared = self._compare_coded if is_coded(self._combination) else self._compare
            worst = max(worst, compared(what, ours, entry))
        self._arena.check(what)
        return worst

    def _compare(self, what: str, ours: dict[str, Any], entry: dict[str, Any]) -> float:
        names = [name for name in entry if name != "step"]
        return max(compare(f"{what}: {name}", ours[name], entry[name]) for name in names)

    def _compare_coded(self, what: str, ours: dict[str, Any], entry: dict[str, Any]) -> float:
        """Codes at most one off, the rest within the tolerance; then the reference takes ours."""
        worst = compare(f"{what}: param", ours["param"], entry["param"])
        for name in self._moments:
            made_of = self._combination.param
            expect_codes(f"{what}: {name}", ours[name], entry[name], made_of)
            key = scales_key(name)
            worst = max(worst, compare(f"{what}: {key}", ours[key], entry[key]))
        if LOW in entry:
            expect_like(f"{what}: {LOW}", ours[LOW], entry[LOW])
            masters = [int8_state.join(kept["param"], kept[LOW]) for kept in (ours, entry)]
            worst = max(worst, compare(f"{what}: master", *masters))
        for name in entry:
            if name != "step":
                entry[name].copy_(ours[name])
        return worst
