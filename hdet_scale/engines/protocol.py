"""Engine: what the method, the search, the converge and checkpoints ask of a training engine.

    which local tensors make the replica          parameters, buffers, moments
    what to do after they were written            refresh
    whose gradients are averaged with whose       share_within, sharers
    how the held-out loss is computed             evaluating
    what a snapshot holds and how it is saved     stepped, loss_scale, as_saved, part_of

The class below is also the plainest engine: each process is a replica, a torch optimizer steps
whole parameters, and nothing wraps the model. DDP (`hdet_scale.ddp`), FSDP2 (`hdet_scale.fsdp`)
and ZeRO (`hdet_scale.deepspeed.partitions`) override what differs. A new engine is one new file
with a subclass; nothing else asks which engine it runs on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet_scale.engines.gradient_mean import average_after_backward
from hdet_scale.optim.fused import FusedOptimizer
from hdet_scale.optim.precision import LOW
from hdet_scale.topology import Replicas, is_distributed, local


class Engine:
    """Whole replicas, one process each, stepped by a torch optimizer.

    Args:
        optimizer: the optimizer that steps the parameters.
        model: the model, plain or wrapped; its float buffers are averaged too, and it goes to
            eval mode for an evaluation. None: parameters only.
        replicas: this rank's place among the replicas.
        buffers: whether the model's float buffers are averaged.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        replicas: Replicas | None = None,
        *,
        buffers: bool = True,
    ) -> None:
        self.optimizer, self.model = optimizer, model
        self.replicas = Replicas() if replicas is None else replicas
        self._buffered = model if buffers else None
        # A buffer that starts with an infinity (an attention mask) is a constant: the mean
        # would be the same, and it must not count as a replica gone bad.
        self._constants = {
            name
            for name, b in (model.named_buffers() if model is not None else ())
            if b.is_floating_point() and not b.is_meta and not bool(b.isfinite().all())
        }
        self._team = self.replicas.size
        self._teams: dict[int, Replicas] = {}
        self._undo: list[Callable[[], None]] = []

    # -- the tensors of a replica ---------------------------------------------------------------
    # Listed each time: an optimizer creates its moments late, and a user may add param groups.

    @property
    def device(self) -> torch.device:
        """Where small exchanges between ranks take place."""
        return self.parameters()[0].device

    def parameters(self) -> list[Tensor]:
        """What a converge averages: each trained parameter, or its fp32 master."""
        return [self._master(p) for p in self.stepped()]

    def stepped(self) -> list[Tensor]:
        """The tensors that the optimizer keeps state for."""
        return trained(self.optimizer)

    def buffers(self) -> list[Tensor]:
        """The float buffers that training changes."""
        if self._buffered is None:
            return []
        return [
            b
            for name, b in self._buffered.named_buffers()
            if b.is_floating_point() and name not in self._constants
        ]

    def restored_buffers(self) -> list[Tensor]:
        """The buffers that a snapshot keeps: those that are averaged or could be, and counts, which
        BatchNorm without a momentum divides by."""
        if self.model is None:
            return []
        return [
            b
            for name, b in self.model.named_buffers()
            if not (b.is_meta or b.dtype == torch.bool or name in self._constants)
        ]

    def moments(self) -> list[Tensor]:
        """The optimizer's state of its parameters' shapes, in an order that all ranks share."""
        return [
            value
            for p in self.stepped()
            for name, value in sorted(self.optimizer.state.get(p, {}).items())
            if name not in ("master", "step")
            and isinstance(value, Tensor)
            and value.shape == p.shape
            and value.is_floating_point()
        ]

    def moments_drift(self, gradients: str) -> bool:
        """True when replicas' moments diverge within a round.

        With local gradients they always do. With shared gradients they do when a weight decay is
        added to the gradient, since the decay term is the replica's own.
        """
        return gradients == "local" or any(
            g.get("weight_decay", 0) != 0 and not g.get("decoupled_weight_decay", self._decoupled)
            for g in self.optimizer.param_groups
        )

    @property
    def _decoupled(self) -> bool:
        """Whether a group that does not say so decouples its weight decay from the gradient."""
        return False

    def create_masters(self) -> None:
        """Create the fp32 masters that a first step would create, on a replica that skipped its
        steps: the other replicas average theirs."""
        if isinstance(self.optimizer, FusedOptimizer):
            self.optimizer.create_masters()

    def refresh(self) -> None:
        """Make training use tensors that were written; every rank calls it.

        Here: parameters of 16 bits are rounded from their fp32 masters again. What a parameter is
        short of a split master belongs to what it was before.
        """
        for p in self.stepped():
            master = self._master(p)
            if master is not p:
                local(p).copy_(local(master))
            low = self.optimizer.state.get(p, {}).get(LOW)
            if isinstance(low, Tensor):
                local(low).zero_()

    def _master(self, param: Tensor) -> Tensor:
        master = self.optimizer.state.get(param, {}).get("master")
        return master if isinstance(master, Tensor) else param

    # -- gradients ------------------------------------------------------------------------------

    separable = False
    """Whether this engine can keep gradients from crossing replicas, which a search needs."""

    def share_within(self, size: int | None, bucket_bytes: int) -> None:
        """Average gradients over teams of `size` consecutive replicas from the next backward on.

        Args:
            size: None for the gradients of all replicas, as the engine shares them by itself; 1
                for local gradients, which also stops what it sends where there is one replica.
            bucket_bytes: cap of a staging bucket where the mean is taken here.
        """
        self.stop_sharing()
        self._set_team(size)
        if size is not None and self._team > 1:
            # The engine has no collective of a team: the mean is taken behind the backward.
            undo = average_after_backward(self.stepped(), lambda: self.sharers, bucket_bytes)
            self._undo.append(undo)

    def _set_team(self, size: int | None) -> None:
        """What `sharers` answers from now on."""
        self._team = self.replicas.size if size is None else min(size, self.replicas.size)

    def stop_sharing(self) -> None:
        """Undo `share_within`."""
        while self._undo:
            self._undo.pop()()

    @property
    def sharers(self) -> Replicas:
        """The replicas whose gradients are averaged with this one's at the next step.

        The first use for a team size is collective among the team. The group is kept: torch would
        give the group of a second search the same name after the first one is destroyed.
        """
        if self._team >= self.replicas.size:
            return self.replicas
        if self._team not in self._teams:
            self.connect()
            self._teams[self._team] = self.replicas.team(self._team)
        return self._teams[self._team]

    def connect(self) -> None:
        """Find the process group of replicas that were declared before init_process_group."""
        if self.replicas.group is not None or not is_distributed():
            return
        world = Replicas.world()
        if world.size == 1 and self.replicas.size == 1:
            return
        if (world.rank, world.size) != (self.replicas.rank, self.replicas.size):
            raise RuntimeError(
                f"the scheduler was made for replica {self.replicas.rank} of {self.replicas.size} "
                f"before the process group existed, and this is rank {world.rank} of "
                f"{world.size}: make the scheduler after init_process_group, or pass rank= and "
                "world_size="
            )
        self.replicas = world

    # -- evaluations and snapshots --------------------------------------------------------------

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is in eval mode; afterwards every module has its own mode again."""
        modes = [(m, m.training) for m in self.model.modules()] if self.model is not None else []
        if self.model is not None:
            self.model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def loss_scale(self) -> dict[str, float]:
        """The state of a dynamic loss scale, which each replica's own overflows change."""
        return {}

    def set_loss_scale(self, state: Mapping[str, float]) -> None:
        """Restore what `loss_scale` returned."""

    def as_saved(self, param: Tensor, value: Tensor) -> Tensor:
        """This rank's part `value` of a tensor shaped like `param`, as a checkpoint stores it.

        Where the whole tensor can be described (a DTensor), a checkpoint can be loaded in another
        layout; `resharded` says so.
        """
        return value

    def part_of(self, param: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of `whole`, a whole tensor shaped like `param`."""
        return whole

    resharded = True
    """Whether a sharded snapshot can be loaded by another number of shards."""


def trained(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that a step may change: frozen ones are equal on all replicas."""
    params: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
    return [p for p in params if p.requires_grad or p in optimizer.state]
