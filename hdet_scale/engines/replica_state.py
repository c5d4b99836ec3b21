"""What a replica holds beside its gradients, and `adopt`, which gives it to all replicas.

Weights and optimizer state are written in place, tensor by tensor: no second copy is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.engines.protocol import Engine
from hdet_scale.topology import local


def weights_of(engine: Engine) -> list[Tensor]:
    """What this rank holds of the parameters and buffers. The parameters themselves: an fp32 master
    is part of the optimizer's state."""
    return [local(t) for t in (*engine.stepped(), *engine.restored_buffers())]


@torch.no_grad()
def adopt(engine: Engine) -> None:
    """Give every replica the weights and the optimizer state of the first; collective over them."""
    where = engine.replicas
    if where.size == 1:
        return
    group, optimizer = where.connected(), engine.optimizer
    root, params = dist.get_process_group_ranks(group)[0], engine.stepped()
    # Shapes and plain values first: a replica that skipped all its steps has no state yet.
    told: list[Any] = [
        [_described(optimizer.state.get(p) or {}) for p in params],
        [options_of(g) for g in optimizer.param_groups],
        engine.loss_scale(),
    ]
    dist.broadcast_object_list(told, src=root, group=group)
    described, options, scale = told
    for p, kept in zip(params, described, strict=True):
        _make_room(engine, p, kept)
    device = engine.device  # looked up once: it lists all parameters
    for tensor in (*weights_of(engine), *_state_tensors(engine)):
        # Adam's count of steps is on the host, a collective needs what is dense, and gloo does not
        # know every dtype.
        sent = tensor.to(device).contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), src=root, group=group)
        if sent is not tensor:
            tensor.copy_(sent)
    for param_group, chosen in zip(optimizer.param_groups, options, strict=True):
        put_options(param_group, chosen)
    engine.set_loss_scale(scale)
    engine.refresh()


class _Room(NamedTuple):
    """A tensor of an optimizer's state, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: _Room(tuple(local(v).shape), v.dtype, v.device.type) if isinstance(v, Tensor) else v
        for k, v in sorted(state.items())
    }


def _make_room(engine: Engine, param: Tensor, described: Mapping[str, Any]) -> None:
    """Plain values, and tensors to receive the others where there are none."""
    if not described:
        engine.optimizer.state.pop(param, None)
        return
    state = engine.optimizer.state[param]
    for name in [k for k in state if k not in described]:
        del state[name]
    for name, value in described.items():
        if not isinstance(value, _Room):
            state[name] = value
        elif not isinstance(state.get(name), Tensor):
            device = value.device if value.device == "cpu" else param.device
            own, dtype = local(param), value.dtype
            if value.shape == own.shape:
                # In the parameter's layout: fused steps go through both in the order of memory.
                room = torch.zeros_like(own, dtype=dtype, device=device)
                state[name] = engine.as_saved(param, room)
            else:
                state[name] = torch.zeros(value.shape, dtype=dtype, device=device)


def _state_tensors(engine: Engine) -> Iterator[Tensor]:
    for p in engine.stepped():
        kept = engine.optimizer.state.get(p) or {}
        yield from (local(v) for _, v in sorted(kept.items()) if isinstance(v, Tensor))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of what may change in a param group, without its parameters and its learning rate,
    which is the schedule's."""
    return {
        k: v.clone() if isinstance(v, Tensor) else v
        for k, v in group.items()
        if k not in ("params", "lr")
    }


def put_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Restore what `options_of` returned; other options are removed."""
    for name in [k for k in group if k not in options and k not in ("params", "lr")]:
        del group[name]
    for name, value in options.items():
        group[name] = value.clone() if isinstance(value, Tensor) else value
