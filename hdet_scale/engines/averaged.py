"""What a converge averages: parameters, float buffers, moments.

An engine that keeps its parameters elsewhere (a flat fp32 partition with 16-bit copies) gives the
schedulers an `Averaged` of its own: where the tensors are, and what to do once they have changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet_scale.optim.fused import FusedOptimizer
from hdet_scale.topology import local


class Averaged:
    """The trained parameters of an optimizer, their moments, and a model's float buffers.

    Listed each time they are asked for: an optimizer creates its moments late, and a user may add
    param groups.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        self.optimizer = optimizer
        self.model = model
        # A buffer that starts with an infinity (an attention mask) is a constant: the mean
        # would be the same, and it must not count as a replica gone bad.
        self.constants = {
            name
            for name, b in (model.named_buffers() if model is not None else ())
            if b.is_floating_point() and not b.is_meta and not bool(b.isfinite().all())
        }

    def parameters(self) -> list[Tensor]:
        """What the optimizer steps: a parameter, or its fp32 master."""
        return [self._master(p) for p in trained(self.optimizer)]

    def complete(self) -> None:
        """Make what a first step would have made of `parameters`, where this replica has skipped
        its steps: the others average their fp32 masters, and so must it."""
        if isinstance(self.optimizer, FusedOptimizer):
            self.optimizer.create_masters()

    def stepped(self) -> list[Tensor]:
        """What the optimizer keeps its state of."""
        return trained(self.optimizer)

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers."""
        return self.parameters() + self.buffers()

    def moments(self) -> list[Tensor]:
        """The optimizer's state of the shape of its parameter."""
        return moments_of(self.optimizer)

    def moments_drift(self, gradients: str) -> bool:
        """True when replicas' moments come apart within a round.

        With local gradients always. With shared ones when a weight decay is added to the
        gradient: the decay term is the replica's own. DeepSpeed's Adams say "adam_w_mode" once for
        all groups.
        """
        decoupled = bool(getattr(self.optimizer, "adam_w_mode", False))
        return gradients == "local" or any(
            g.get("weight_decay", 0) != 0 and not g.get("decoupled_weight_decay", decoupled)
            for g in self.optimizer.param_groups
        )

    def refresh(self) -> None:
        """Called by every rank after the tensors have changed: 16-bit parameters that have an
        fp32 master are rounded from it again."""
        for p in trained(self.optimizer):
            master = self._master(p)
            if master is not p:
                local(p).copy_(local(master))

    def scale_state(self) -> dict[str, float]:
        """What an engine keeps of a dynamic loss scale, which a replica's own overflows move."""
        return {}

    def load_scale_state(self, state: Mapping[str, float]) -> None:
        """As it was, where the engine has one."""

    def _master(self, param: Tensor) -> Tensor:
        master = self.optimizer.state.get(param, {}).get("master")
        return master if isinstance(master, Tensor) else param

    def buffers(self) -> list[Tensor]:
        """The float buffers that training moves."""
        if self.model is None:
            return []
        return [
            b
            for name, b in self.model.named_buffers()
            if b.is_floating_point() and name not in self.constants
        ]


def trained(optimizer: Optimizer) -> list[Tensor]:
    """Parameters that a step may have moved: frozen ones are equal everywhere."""
    params: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
    return [p for p in params if p.requires_grad or p in optimizer.state]


def moments_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's state of the shape of its parameter, in an order that all ranks share."""
    return [
        value
        for p in trained(optimizer)
        for name, value in sorted(optimizer.state.get(p, {}).items())
        if name not in ("master", "step")
        and isinstance(value, Tensor)
        and value.shape == p.shape
        and value.is_floating_point()
    ]
