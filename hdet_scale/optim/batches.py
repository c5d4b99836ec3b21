"""Batches: the tensors of a param group that have a gradient, their state, and what fits them.

Listed once and checked at every step by identity alone, since building the lists is most of the
host time of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from hdet_scale.kernels.table import Combination
from hdet_scale.optim.shards import check_placements, is_dense, local_shard

Group = dict[str, Any]


@dataclass(slots=True)
class Batch:
    """The tensors of one group that have a gradient, and their state: built once, since building
    it is most of the host time of a step."""

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
    grads: list[torch.Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where its shards are: all on one device."""
        return self.locals[0].device

    def holds(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> bool:
        """Whether these are still the parameters, and the states those that were listed. Runs at
        every step: loops that stay inside `map` are several times faster than Python's own."""
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        if self.sharded:
            return self._holds_shards(params, names)
        return all(
            all(map(is_, map(itemgetter(name), self.entries), listed))
            for name, listed in zip(names, self.slots, strict=True)
        )

    def _holds_shards(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> bool:
        """A shard is a new object each time it is asked for: compare addresses."""
        pairs = list(zip(params, self.locals, strict=True))
        for name, listed in zip(names, self.slots, strict=True):
            pairs += zip(map(itemgetter(name), self.entries), listed, strict=True)
        return all(local_shard(whole).data_ptr() == shard.data_ptr() for whole, shard in pairs)


def check_one_device(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of one group that are on several devices."""
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise ValueError(
            f"a param group has tensors on {devices}: one launch works on one device. "
            "Make a group for each device."
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


def fit(params: list[torch.Tensor], grads: list[torch.Tensor]) -> bool:
    """Whether every gradient is dense and of its parameter's dtype; `map` keeps it cheap."""
    dtype = attrgetter("dtype")
    return all(map(is_, map(attrgetter("layout"), grads), repeat(torch.strided))) and all(
        map(is_, map(dtype, grads), map(dtype, params))
    )


def unfit_grads(params: list[torch.Tensor], grads: list[torch.Tensor]) -> TypeError:
    """The error for the first gradient that does not `fit`."""
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
