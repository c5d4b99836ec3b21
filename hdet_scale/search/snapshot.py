"""Snapshot: weights and optimizer state of one moment, kept to go back to.

A search goes back after each trial, a watch when the run degrades.

Memory: one copy of what this rank holds of the parameters, the buffers and the optimizer's state,
which at the start of a run is empty, on the device or on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hdet_scale.engines.protocol import Engine
from hdet_scale.engines.replica_state import options_of, put_options, weights_of
from hdet_scale.topology import local


class Snapshot:
    """Parameters, buffers, optimizer state and options, and loss scale on this rank.

    Args:
        engine: whose tensors are kept.
        host: keep them in the host's memory: for a snapshot that is kept while the run goes on.
        state: what another snapshot of the same model returned from `state_dict`. Where that was
            of whole replicas and these are sharded, this rank's part of it is taken.
    """

    def __init__(
        self, engine: Engine, state: Mapping[str, Any] | None = None, *, host: bool = False
    ) -> None:
        self.engine, self.params = engine, engine.stepped()
        if state is not None:
            self.tensors = [self._part(t, i) for i, t in enumerate(state["tensors"])]
            self.state = [self._parts(kept, i) for i, kept in enumerate(state["state"])]
            self.options, self.scale = list(state["options"]), dict(state["scale"])
            return
        self.tensors = [_copy(t, host) for t in self._targets()]
        kept = engine.optimizer.state
        # Reading `optimizer.state[p]` leaves an empty entry there: still a fresh start.
        self.state = [_copied(kept[p], host) if kept.get(p) else None for p in self.params]
        self.options = [options_of(g) for g in engine.optimizer.param_groups]
        self.scale = engine.loss_scale()

    def _targets(self) -> list[Tensor]:
        return weights_of(self.engine)

    def _part(self, value: Tensor, index: int) -> Tensor:
        """`value` as this rank holds it, of the parameter or buffer with this index."""
        if index >= len(self.params) or value.dim() == 0:
            return value
        param = self.params[index]
        whole = value.shape == param.shape != local(param).shape
        return self.engine.part_of(param, value) if whole else value

    def _parts(self, kept: Mapping[str, Any] | None, index: int) -> dict[str, Any] | None:
        if kept is None:
            return None
        return {k: self._part(v, index) if isinstance(v, Tensor) else v for k, v in kept.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Go back, to the bit; engines round their 16-bit copies again."""
        for target, kept in zip(self._targets(), self.tensors, strict=True):
            target.copy_(kept)
        optimizer = self.engine.optimizer
        for p, kept_state in zip(self.params, self.state, strict=True):
            if not kept_state:
                # A fresh start is not a state of zeros: SGD's first step copies the gradient.
                optimizer.state.pop(p, None)
            else:
                _put_back(optimizer.state[p], kept_state, p.device)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            # Some optimizers count there: steps, Schedule-Free the weights of its average.
            put_options(group, options)
        # Replicas with loss scales of their own would share gradients of different sizes.
        self.engine.set_loss_scale(self.scale)
        self.engine.refresh()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for a checkpoint; the tensors are not copied."""
        return {
            "tensors": self.tensors,
            "state": self.state,
            "options": self.options,
            "scale": self.scale,
        }


def _copy(tensor: Tensor, host: bool) -> Tensor:
    kept = local(tensor).detach()
    return kept.to("cpu", copy=True) if host else kept.clone()


def _copied(state: Mapping[str, Any], host: bool) -> dict[str, Any]:
    return {k: _copy(v, host) if isinstance(v, Tensor) else v for k, v in state.items()}


def _put_back(state: dict[str, Any], kept: Mapping[str, Any], device: torch.device) -> None:
    for name in [k for k in state if k not in kept]:
        del state[name]
    for name, value in kept.items():
        if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
            local(state[name]).copy_(value)
        else:  # a copy: the steps to come must not change the snapshot
            state[name] = value.to(device, copy=True) if isinstance(value, Tensor) else value
