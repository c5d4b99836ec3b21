"""A mark: where the replicas were, so that they can go back there.

A race goes back after each heat, a climb on its way down, a watch when what was found overfits.

Memory: one copy of what a converge averages on this rank (its shards of the parameters, the float
buffers), and of the optimizer's state, which at the start of a run is empty. `to_host` moves it off
the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hdet_scale.averaged import Averaged
from hdet_scale.converge import local


class Mark:
    """Parameters, buffers, optimizer state and loss scale of one moment on this rank."""

    def __init__(self, averaged: Averaged) -> None:
        self.averaged = averaged
        self.tensors = [_copy(t) for t in self._targets()]
        state = averaged.optimizer.state
        self.state = [_copied(state[p]) if p in state else None for p in self._params()]
        self.options = [_options(g) for g in averaged.optimizer.param_groups]
        self.scale = averaged.scale_state()

    def _params(self) -> list[Tensor]:
        return self.averaged.stepped()

    def _targets(self) -> list[Tensor]:
        """The parameters themselves: an fp32 master is part of the optimizer's state."""
        return [local(p) for p in self._params()] + [local(b) for b in self.averaged.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Go back, to the bit; engines round their 16-bit copies again."""
        for target, kept in zip(self._targets(), self.tensors, strict=True):
            target.copy_(kept)
        optimizer = self.averaged.optimizer
        for p, kept_state in zip(self._params(), self.state, strict=True):
            if kept_state is None:
                # A fresh start is not a state of zeros: SGD's first step copies the gradient.
                optimizer.state.pop(p, None)
            else:
                _put_back(optimizer.state[p], kept_state, p.device)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            # Some optimizers count there: steps, Schedule-Free the weights of its average.
            for name in [k for k in _options(group) if k not in options]:
                del group[name]
            group.update(options)
        # Replicas with loss scales of their own would share gradients of different sizes.
        self.averaged.load_scale_state(self.scale)
        self.averaged.refresh()

    def to_host(self) -> None:
        """For a mark that is kept while the run goes on, and hardly ever used."""
        self.tensors = [t.cpu() for t in self.tensors]
        self.state = [
            None if kept is None else {k: _on_host(v) for k, v in kept.items()}
            for kept in self.state
        ]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of this rank in the middle of a race or a climb."""
        return {
            "tensors": self.tensors,
            "state": self.state,
            "options": self.options,
            "scale": self.scale,
        }

    @classmethod
    def of_state(cls, averaged: Averaged, state: Mapping[str, Any]) -> Mark:
        """What another mark of the same model was."""
        mark = cls(averaged)
        mark.load_state_dict(state)
        return mark

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become another mark of the same model."""
        for mine, kept in zip(self.tensors, state["tensors"], strict=True):
            mine.copy_(kept)
        self.state, self.options = list(state["state"]), list(state["options"])
        self.scale = dict(state["scale"])


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer may change of a param group by itself: no tensors, not the learning rate,
    which is the schedule's."""
    return {
        k: v
        for k, v in group.items()
        if k not in ("params", "lr") and not isinstance(v, Tensor | list)
    }


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor).detach().clone()


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Tensor) else v for k, v in state.items()}


def _put_back(state: dict[str, Any], kept: Mapping[str, Any], device: torch.device) -> None:
    for name in [k for k in state if k not in kept]:
        del state[name]
    for name, value in kept.items():
        if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
            local(state[name]).copy_(value)
        else:  # a copy: the steps to come must not move the mark
            state[name] = value.to(device, copy=True) if isinstance(value, Tensor) else value
