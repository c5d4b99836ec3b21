"""Batches: the tensors of a param group that have a gradient, their state, and what fits them.

Listed once and checked at every step by identity alone, since building the lists is most of the
host time of a step. A batch holds no gradient: after `zero_grad` none may be alive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

from hdet_scale.kernels.choice import capturing
from hdet_scale.kernels.table import Combination
from hdet_scale.optim.shards import check_placements, is_dense, local_shard

Group = dict[str, Any]


@dataclass(slots=True)
class Batch:
    """The tensors of one group that have a gradient, and their state: built once, since building
    it is most of the host time of a step."""

    index: int
    """Of the group among the optimizer's."""
    group: Group
    params: list[torch.Tensor]
    """As the model has them; `locals` are the shards that are stepped."""
    locals: list[torch.Tensor]
    entries: list[dict[str, Any]]
    slots: list[list[torch.Tensor]]
    """One list for each moment, in the optimizer's order."""
    steps: list[torch.Tensor]
    masters: list[torch.Tensor | None]
    combinations: list[Combination]
    keys: list[int]
    fresh: list[bool]
    """Which moments were created for the coming step."""
    sharded: bool
    contiguous: bool
    """Whether every shard is in row-major order; else gradients are compared with it."""
    plain: bool
    """Whether torch's functional step does it all."""
    names: tuple[str, ...]
    """Of the moments, in the order of `slots`."""

    @property
    def device(self) -> torch.device:
        """Where its shards are: all on one device."""
        return self.locals[0].device

    def holds(self, group: Group, names: tuple[str, ...], state: Mapping[Any, Any]) -> bool:
        """Whether the state of its parameters is still what was listed: no entry, moment, master
        or step count was removed or replaced. Runs at every step: loops that stay inside `map` are
        several times faster than Python's own.

        Args:
            group: The param group now.
            names: Of the moments that it keeps now.
            state: The optimizer's.
        """
        if group is not self.group or names != self.names:
            return False
        if not all(map(is_, map(state.get, self.params), self.entries)):
            return False
        listed: list[tuple[str, Sequence[torch.Tensor | None]]]
        listed = [*zip(names, self.slots, strict=True), ("master", self.masters)]
        if self.sharded:
            return self._holds_shards(listed)
        if self.steps:
            listed.append(("step", self.steps))
        return all(
            all(map(is_, map(methodcaller("get", name), self.entries), tensors))
            for name, tensors in listed
        )

    def _holds_shards(self, listed: Sequence[tuple[str, Sequence[torch.Tensor | None]]]) -> bool:
        """A shard is a new object each time it is asked for: compare addresses."""
        steps = map(methodcaller("get", "step"), self.entries)
        if self.steps and not all(map(is_, steps, self.steps)):
            return False
        pairs: list[tuple[Any, Any]] = list(zip(self.params, self.locals, strict=True))
        for name, tensors in listed:
            pairs += zip(map(methodcaller("get", name), self.entries), tensors, strict=True)
        return all(_address(whole) == _address(shard) for whole, shard in pairs)


Graded = tuple[Batch, list[torch.Tensor]]
"""A batch and the gradients of its tensors, for the length of a step."""


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else local_shard(tensor).data_ptr()


def check_one_device(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of one group that are on several devices."""
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise ValueError(
            f"a param group has tensors on {devices}: one launch works on one device. "
            "Make a group for each device."
        )


def check_capture(device: torch.device) -> None:
    """Refuse to list tensors inside a CUDA graph capture: what is created there is created again at
    each replay, moments of zeros too.

    Raises:
        RuntimeError: A capture is under way.
    """
    if capturing(device):
        raise RuntimeError(
            "the first step with these tensors is inside a CUDA graph capture, which would create "
            "their state anew at each replay. Take one step with the same gradients before it."
        )


def check_param(param: torch.Tensor, shard: torch.Tensor) -> None:
    """Refuse a parameter that no step can update, given with its local shard.

    Raises:
        TypeError: It is not of a real floating point dtype.
        ValueError: Its elements do not fill one run of memory.
    """
    if not param.is_floating_point():
        raise TypeError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}: valid are real "
            "floating point dtypes. View a complex parameter as real (torch.view_as_real)."
        )
    if not is_dense(shard):
        raise ValueError(
            f"a parameter of shape {tuple(shard.shape)} has strides {shard.stride()}, with "
            "gaps between its elements: make it contiguous before the optimizer sees it"
        )


def create_state(
    entry: dict[str, Any],
    param: torch.Tensor,
    combination: Combination,
    names: tuple[str, ...],
    *,
    counted: bool,
) -> bool:
    """Create what is missing in a parameter's state.

    Args:
        entry: The state, filled in place.
        param: The parameter.
        combination: Its dtypes.
        names: Of the moments that its group keeps.
        counted: Whether the state needs a step count.

    Returns:
        True if a moment was missing.
    """
    new = [name for name in names if entry.get(name) is None]
    if counted and "step" not in entry:
        # A torch state without a count but with a momentum has taken its first step.
        taken = 0.0 if new or not names else 1.0
        entry["step"] = torch.full((), taken, dtype=torch.float32, device=local_shard(param).device)
    for name in new:
        entry[name] = torch.zeros_like(param, dtype=combination.moment).detach()
    if combination.master and "master" not in entry:
        entry["master"] = master_of(param)
    return bool(new)


def master_of(param: torch.Tensor) -> torch.Tensor:
    """The fp32 copy that a 16-bit parameter is rounded from."""
    return param.detach().to(torch.float32, copy=True)


def with_gradients(
    params: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters that have a gradient, and their gradients.

    Raises:
        TypeError: A gradient is sparse, or of another dtype than its parameter.
    """
    grads = [param.grad for param in params]
    present = [grad for grad in grads if grad is not None]
    if len(present) < len(grads):
        params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
    if not _fit(params, present):
        raise _unfit_grads(params, present)
    return params, present


def _fit(params: list[torch.Tensor], grads: list[torch.Tensor]) -> bool:
    """Whether every gradient is dense and of its parameter's dtype; `map` keeps it cheap."""
    dtype = attrgetter("dtype")
    return all(map(is_, map(attrgetter("layout"), grads), repeat(torch.strided))) and all(
        map(is_, map(dtype, grads), map(dtype, params))
    )


def _unfit_grads(params: list[torch.Tensor], grads: list[torch.Tensor]) -> TypeError:
    """The error for the first gradient that does not `_fit`."""
    for param, grad in zip(params, grads, strict=True):
        where = f"the gradient of a parameter of shape {tuple(param.shape)}"
        if grad.layout is not torch.strided:
            return TypeError(
                f"{where} has layout {grad.layout}: valid is torch.strided. Use sparse=False in "
                "the embedding, or torch.optim.SparseAdam for it."
            )
        if grad.dtype is not param.dtype:
            break
    return TypeError(
        f"{where} is {grad.dtype} and the parameter {param.dtype}: they must be the same. Leave "
        "grad_dtype alone, or keep fp32 parameters."
    )


def matching(grads: list[torch.Tensor], batch: Batch) -> list[torch.Tensor]:
    """Local gradients in the memory order of their parameters, copied only where it differs."""
    if batch.sharded:
        for param, grad in zip(batch.params, grads, strict=True):
            check_placements(param, grad)
        grads = [local_shard(grad) for grad in grads]
    if batch.contiguous and all(map(torch.Tensor.is_contiguous, grads)):
        return grads
    return [_as_laid_out(g, p) for g, p in zip(grads, batch.locals, strict=True)]


def _as_laid_out(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
