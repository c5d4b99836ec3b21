"""ConvergePolicy: what a user decides about the averaging of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from hdet_scale.converge.checks import check_choice, check_int, check_type, read_nested
from hdet_scale.converge.outer import OuterStep
from hdet_scale.converge.wires import WIRES

BUCKET_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergePolicy:
    """How parameters are averaged; the `"converge"` block of a JSON config."""

    bucket_bytes: int = BUCKET_BYTES
    """Cap of one flat bucket; the staging memory of a converge is at most two of them."""
    wire: str = "fp32"
    """What goes over the wire: a name of hdet_scale.converge.wires ("fp32", "bf16", "int8")."""
    overlap: bool = False
    """Average in the background while training goes on, and fold the result in later."""
    overlap_steps: int = 1
    """Steps between the start of an overlapped averaging and its folding in."""
    fragments: int = 1
    """P: average 1/P of the buckets every T/P steps instead of all of them every T."""
    outer: OuterStep | None = None
    """An outer Nesterov step instead of the plain mean: {"lr": 0.7, "momentum": 0.9}."""
    buffers: bool = True
    """Average the model's float buffers too (BatchNorm statistics), when the model is known."""
    moments: bool | None = None
    """Average the optimizer's moments. None: where replicas' moments diverge, that is with
    local gradients, or with a weight decay that is added to the gradient."""

    def __post_init__(self) -> None:
        check_int("bucket_bytes", self.bucket_bytes, at_least=1)
        check_int("overlap_steps", self.overlap_steps, at_least=1)
        check_int("fragments", self.fragments, at_least=1)
        check_choice("wire", self.wire, WIRES)
        check_type("overlap", self.overlap, bool)
        check_type("buffers", self.buffers, bool)
        read_nested(self, "outer", OuterStep)
        if self.outer is not None:
            check_type("outer", self.outer, OuterStep)
        if self.moments is not None:
            check_type("moments", self.moments, bool)

    @property
    def remembers(self) -> bool:
        """True when a converge builds on the last one, so that a checkpoint must keep what it
        remembers: a wire that sends differences, or an outer step."""
        return WIRES[self.wire].remembers or self.outer is not None
