"""What a converge averages: parameters, float buffers, moments.

An engine that keeps its parameters elsewhere (a flat fp32 partition with 16-bit copies) gives the
schedulers an `Averaged` of its own: where the tensors are, and what to do once they have changed.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer


class Averaged:
    """The trained parameters of an optimizer and the float buffers of a model, when asked."""

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

    def __call__(self) -> list[Tensor]:
        return trained(self.optimizer) + self.buffers()

    def moments(self) -> list[Tensor]:
        """The optimizer's moments, as far as they exist by now."""
        return moments_of(self.optimizer)

    def refresh(self) -> None:
        """Called by every rank after the tensors have changed. Here they are what the forward
        reads: there are no copies to bring up to date."""

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
        for _, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
    ]


def moments_drift(optimizer: Optimizer, gradients: str) -> bool:
    """True when replicas' moments come apart within a round.

    With local gradients always. With shared ones when a weight decay is added to the gradient:
    the decay term is the replica's own. DeepSpeed's Adams say "adam_w_mode" once for all groups.
    """
    decoupled = bool(getattr(optimizer, "adam_w_mode", False))
    return gradients == "local" or any(
        g.get("weight_decay", 0) != 0 and not g.get("decoupled_weight_decay", decoupled)
        for g in optimizer.param_groups
    )
