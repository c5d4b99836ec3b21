"""ZeRO's partitions: where each kind of DeepSpeed optimizer keeps its fp32 parameters, its
16-bit copies and its reduced gradients.

    stage 0          fp32: the parameters; fp16/bf16: fp32 masters beside them, whole or flat
    stage 1, 2       a flat fp32 partition for each param group, flat 16-bit copies all-gathered
    stage 3          a flat fp32 partition for each sub-group; 16-bit slices; small parameters
                     ("persistent") kept gathered

A converge averages the fp32 tensors in place and then calls `refresh`, which makes the forward
read them. Shared gradients are averaged after DeepSpeed has reduced them within a replica and
before it takes the norm; where DeepSpeed has already read a gradient (offload), `gradients_changed`
makes it read again.

DeepSpeed has no public name for most of this. `engine_of` checks that every attribute is
there, so that another version fails at once and with words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet_scale.engines.gradient_mean import gradient_of
from hdet_scale.engines.protocol import Engine, trained
from hdet_scale.topology import Replicas

SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What moves in a dynamic loss scale, by DeepSpeed's names; not every kind has the last."""
WORKS_WITH = "deepspeed>=0.19.8,<0.20"


class ZeroEngine(Engine):
    """Replicas that DeepSpeed trains in fp32 without ZeRO; the other kinds are below.

    Args:
        wrapper: what DeepSpeed made of the user's optimizer.
        optimizer: the torch optimizer inside it.
        model, replicas, buffers: as for every engine.
    """

    separable = True
    resharded = False
    needs: tuple[str, ...] = ()
    """The attributes of DeepSpeed's optimizer that are used."""
    scaler: str | None = None
    """The one that holds the loss scale of fp16."""

    def __init__(
        self,
        wrapper: Any,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        replicas: Replicas | None = None,
        *,
        buffers: bool = True,
    ) -> None:
        super().__init__(optimizer, model, replicas, buffers=buffers)
        self.wrapper = wrapper

    def masters(self) -> list[Tensor]:
        """The fp32 tensors that the optimizer steps."""
        return trained(self.optimizer)

    def parameters(self) -> list[Tensor]:
        return self.masters()

    def stepped(self) -> list[Tensor]:
        return self.masters()

    def refresh(self) -> None:
        """The forward reads the fp32 parameters themselves."""

    @property
    def _decoupled(self) -> bool:
        """DeepSpeed's Adam says so once for all groups."""
        return bool(getattr(self.optimizer, "adam_w_mode", False))

    def share_within(self, size: int | None, bucket_bytes: int) -> None:
        """DeepSpeed's engine asks `sharers` at each step and takes the mean itself."""
        self._set_team(size)

    def gradients(self) -> list[Tensor]:
        """The gradients as DeepSpeed's step will read them, reduced within the replica."""
        return [gradient_of(p) for p in trained(self.optimizer)]

    def gradients_changed(self) -> None:
        """Make DeepSpeed's step use gradients that were averaged across replicas."""

    def loss_scale(self) -> dict[str, float]:
        scaler = getattr(self.wrapper, self.scaler) if self.scaler else None
        return {name: getattr(scaler, name) for name in SCALE if hasattr(scaler, name)}

    def set_loss_scale(self, state: Mapping[str, float]) -> None:
        for name, value in state.items():
            setattr(getattr(self.wrapper, str(self.scaler)), name, value)


class Halves(ZeroEngine):
    """Stage 0 in fp16 or bf16: an fp32 master for each parameter."""

    needs = ("fp16_groups", "fp32_groups", "loss_scale_config")
    scaler = "loss_scale_config"

    def masters(self) -> list[Tensor]:
        return [p for group in self.wrapper.fp32_groups for p in group]

    def gradients(self) -> list[Tensor]:
        return [gradient_of(p) for group in self.wrapper.fp16_groups for p in group]

    @torch.no_grad()
    def refresh(self) -> None:
        for wide, narrow in zip(self.wrapper.fp32_groups, self.wrapper.fp16_groups, strict=True):
            for master, p in zip(wide, narrow, strict=True):
                p.copy_(master)


class FlatHalves(ZeroEngine):
    """Stage 0 in fp16 or bf16 with a fused optimizer: one flat fp32 master a param group."""

    needs = ("fp16_groups", "fp32_groups_flat", "loss_scale_config")
    scaler = "loss_scale_config"

    def masters(self) -> list[Tensor]:
        return list(self.wrapper.fp32_groups_flat)

    def gradients(self) -> list[Tensor]:
        return [gradient_of(p) for group in self.wrapper.fp16_groups for p in group]

    @torch.no_grad()
    def refresh(self) -> None:
        groups = zip(self.wrapper.fp32_groups_flat, self.wrapper.fp16_groups, strict=True)
        for flat, narrow in groups:
            parts = flat.split([p.numel() for p in narrow])
            for p, part in zip(narrow, parts, strict=True):
                p.copy_(part.view_as(p))


class AccumulatedWide(ZeroEngine):
    """Stage 1 in bf16 with gradients accumulated in fp32: DeepSpeed's BF16_Optimizer."""

    needs = ("fp32_groups_flat_partition", "fp32_groups_gradients_flat", "update_lp_params")

    def masters(self) -> list[Tensor]:
        return list(self.wrapper.fp32_groups_flat_partition)

    def gradients(self) -> list[Tensor]:
        # The whole gradient and not this rank's part of it: the norm is taken over all of it.
        return list(self.wrapper.fp32_groups_gradients_flat)

    def refresh(self) -> None:
        self.wrapper.update_lp_params()


class Stages12(ZeroEngine):
    """Stages 1 and 2."""

    needs = (
        "single_partition_of_fp32_groups",
        "averaged_gradients",
        "update_lp_params",
        "cpu_offload",
        "params_in_partition",
        "get_param_id",
        "dtype",
        "loss_scaler",
    )
    needs_offloaded = ("norm_for_param_grads", "local_overflow", "grad_position")
    scaler = "loss_scaler"

    def masters(self) -> list[Tensor]:
        return list(self.wrapper.single_partition_of_fp32_groups)

    def gradients(self) -> list[Tensor]:
        if self.wrapper.cpu_offload:
            return [p.grad for p in self.masters() if p.grad is not None]
        lists = self.wrapper.averaged_gradients
        return [g for i in sorted(lists) for g in lists[i] or () if g is not None]

    def gradients_changed(self) -> None:
        """Offload takes norms and checks for overflow in the backward: both again."""
        z = self.wrapper
        if not z.cpu_offload:
            return
        for i, params in enumerate(z.params_in_partition):
            gradient = z.single_partition_of_fp32_groups[i].grad.view(-1)
            for p in params:
                _, _, start, length = z.grad_position[z.get_param_id(p)]
                norm = gradient.narrow(0, start, length).double().norm()
                z.norm_for_param_grads[z.get_param_id(p)] = norm
        if z.dtype == torch.float16:
            z.local_overflow = z.local_overflow or not _finite(self.gradients())

    def refresh(self) -> None:
        self.wrapper.update_lp_params()


class Stage3(ZeroEngine):
    """Stage 3."""

    needs = (
        "fp32_partitioned_groups_flat",
        "fp16_groups",
        "averaged_gradients",
        "persistent_parameters",
        "dp_process_group",
        "offload_optimizer",
        "inf_or_nan_tracker",
        "get_param_id",
        "dtype",
        "_partition_all_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
        "loss_scaler",
    )
    needs_offloaded = ("norm_for_param_grads", "grad_position")
    scaler = "loss_scaler"

    def masters(self) -> list[Tensor]:
        self._clear_padding()
        return list(self.wrapper.fp32_partitioned_groups_flat)

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """A parameter that does not divide among the ranks is padded, and DeepSpeed leaves that
        memory as it finds it: a NaN there would pass for a replica gone bad."""
        z = self.wrapper
        rank = dist.get_rank(z.dp_process_group)
        for params, flat in zip(z.fp16_groups, z.fp32_partitioned_groups_flat, strict=True):
            state = self.optimizer.state.get(flat, {}).values()
            own = [flat, *(v for v in state if isinstance(v, Tensor) and v.shape == flat.shape)]
            start = 0
            for p in params:
                length = p.partition_numel()
                real = min(max(p.ds_numel - rank * length, 0), length)
                for t in own:
                    t.narrow(0, start + real, length - real).zero_()
                start += length

    def gradients(self) -> list[Tensor]:
        if self.wrapper.offload_optimizer:
            return [p.grad for p in self.masters() if p.grad is not None]
        lists = self.wrapper.averaged_gradients
        return [g for i in sorted(lists) for g in lists[i] or ()]

    def gradients_changed(self) -> None:
        """As for stages 1 and 2."""
        z = self.wrapper
        if not z.offload_optimizer:
            return
        for params in z.fp16_groups:
            for p in params:
                group, start, length = z.grad_position[z.get_param_id(p)]
                gradient = z.fp32_partitioned_groups_flat[group].grad.narrow(0, start, length)
                z.norm_for_param_grads[z.get_param_id(p)] = gradient.double().norm()
        if z.dtype == torch.float16 and not _finite(self.gradients()):
            z.inf_or_nan_tracker.fill_(True)

    def refresh(self) -> None:
        # As DeepSpeed's own step does it: a gathered parameter would keep the old values, so
        # all are partitioned first, and the persistent ones gathered again.
        z = self.wrapper
        z._partition_all_parameters()
        for i in range(len(z.fp32_partitioned_groups_flat)):
            z._reassign_or_swap_out_partitioned_parameters(i)
        if z.persistent_parameters:
            z.persistent_parameters[0].all_gather(z.persistent_parameters)


KINDS: dict[str, type[ZeroEngine]] = {
    "FP16_UnfusedOptimizer": Halves,
    "FP16_Optimizer": FlatHalves,
    "BF16_Optimizer": AccumulatedWide,
    "DeepSpeedZeroOptimizer": Stages12,
    "DeepSpeedZeroOptimizer_Stage3": Stage3,
}


def engine_of(
    wrapper: Any,
    model: nn.Module | None = None,
    replicas: Replicas | None = None,
    *,
    buffers: bool = True,
) -> ZeroEngine:
    """The engine of what DeepSpeed made of the user's optimizer, with its attributes checked.

    Args:
        wrapper: DeepSpeed's optimizer.
        model, replicas, buffers: as for every engine.
    """
    if isinstance(wrapper, Optimizer):
        return ZeroEngine(wrapper, wrapper, model, replicas, buffers=buffers)
    kind = KINDS.get(type(wrapper).__name__)
    if kind is None:
        raise ValueError(
            f"DeepSpeed made a {type(wrapper).__name__} of the optimizer, whose partitions are not "
            f"known here: use ZeRO stage 0 to 3 without special optimizers; known are {list(KINDS)}"
        )
    needs = (*kind.needs, "optimizer")
    if getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False):
        needs += getattr(kind, "needs_offloaded", ())
    check_attributes(wrapper, needs)
    return kind(wrapper, cast(Optimizer, wrapper.optimizer), model, replicas, buffers=buffers)


def check_attributes(thing: object, names: tuple[str, ...]) -> None:
    """An error that names the versions which work when one of `names` is not there."""
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        import deepspeed

        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)} on "
            f"{type(thing).__name__}, which replicas are built on: pip install '{WORKS_WITH}'"
        )


def _finite(tensors: list[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)
