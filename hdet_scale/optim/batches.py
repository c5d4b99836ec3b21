"""Batches: the tensors of a param group that have a gradient, their state, and what fits them.

Listed once and checked at every step by identity alone, since building the lists is most of the
host time of a step. A batch holds no gradient: after `zero_grad` none may be alive.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch

from hdet_scale.kernels.choice import capturing
from hdet_scale.kernels.table import Combination
from hdet_scale.optim.precision import (
    create_master,
    create_moment,
    is_coded,
    master_key,
    scales_key,
)
from hdet_scale.optim.shards import check_placements, is_dense, is_sharded, local_shard

Group = dict[str, Any]


Kept = tuple[str, Sequence[dict[str, Any]], Sequence[torch.Tensor | None]]
"""A key, the states that have it, and what each of them has under it."""


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
    scales: list[list[torch.Tensor]]
    """Of the moments' 8-bit codes, in the same order; empty where there are none."""
    steps: list[torch.Tensor]
    masters: list[torch.Tensor | None]
    """Or the lower halves of split ones."""
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
    kept: list[Kept]
    """Everything above that is of the state."""

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
        if self.sharded:
            return self._holds_shards()
        try:
            return all(
                all(map(is_, map(itemgetter(key), entries), tensors))
                for key, entries, tensors in self.kept
            )
        except KeyError:  # something was removed
            return False

    def _holds_shards(self) -> bool:
        """A shard is a new object each time it is asked for: compare addresses."""
        pairs: list[tuple[Any, Any]] = list(zip(self.params, self.locals, strict=True))
        for key, entries, tensors in self.kept:
            pairs += zip(map(methodcaller("get", key), entries), tensors, strict=True)
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


def list_batch(
    index: int,
    group: Group,
    params: list[torch.Tensor],
    chosen: list[Combination],
    state: MutableMapping[Any, dict[str, Any]],
    *,
    names: tuple[str, ...],
    keys: list[int],
    plain: bool,
    counted: bool,
) -> Batch:
    """List the tensors of a group, creating the state that is missing.

    Args:
        index: Of the group among the optimizer's.
        group: The param group.
        params: Those that have a gradient.
        chosen: Their dtypes.
        state: The optimizer's, filled in place.
        names: Of the moments that the group keeps.
        keys: Of their stochastic rounding.
        plain: Whether torch's functional step does it all.
        counted: Whether the state needs a step count.
    """
    pairs = list(zip(params, chosen, strict=True))
    fresh = [create_state(state[p], p, c, names, counted=counted) for p, c in pairs]
    entries = [state[p] for p in params]
    shards = [local_shard(p) for p in params]
    masters = [e.get(master_key(c)) for e, c in zip(entries, chosen, strict=True)]
    coded = names if is_coded(chosen[0]) else ()
    slots = [[local_shard(e[name]) for e in entries] for name in names]
    scales = [[e[scales_key(name)] for e in entries] for name in coded]
    steps = [e["step"] for e in entries] if counted else []
    locals_of_masters = [None if m is None else local_shard(m) for m in masters]
    kept: list[Kept] = [(n, entries, slot) for n, slot in zip(names, slots, strict=True)]
    kept += [(scales_key(n), entries, some) for n, some in zip(coded, scales, strict=True)]
    kept += [("step", entries, steps)] if counted else []
    mastered = [i for i, c in enumerate(chosen) if c.master]
    if mastered:
        own = [entries[i] for i in mastered], [locals_of_masters[i] for i in mastered]
        kept.append((master_key(chosen[0]), *own))
    return Batch(
        index=index,
        group=group,
        params=list(params),
        locals=shards,
        entries=entries,
        slots=slots,
        scales=scales,
        steps=steps,
        masters=locals_of_masters,
        combinations=chosen,
        keys=keys,
        fresh=fresh,
        sharded=any(map(is_sharded, params)),
        contiguous=all(shard.is_contiguous() for shard in shards),
        plain=plain,
        names=names,
        kept=kept,
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
    new = [name for name in names if not _has_moment(entry, name, combination)]
    if counted and "step" not in entry:
        # A torch state without a count but with a momentum has taken its first step.
        taken = 0.0 if new or not names else 1.0
        entry["step"] = torch.full((), taken, dtype=torch.float32, device=local_shard(param).device)
    for name in new:
        create_moment(entry, name, names.index(name), param, combination)
    if combination.master and master_key(combination) not in entry:
        create_master(entry, param, combination)
    return bool(new)


def _has_moment(entry: dict[str, Any], name: str, combination: Combination) -> bool:
    needed = [name, scales_key(name)] if is_coded(combination) else [name]
    return all(entry.get(key) is not None for key in needed)


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
