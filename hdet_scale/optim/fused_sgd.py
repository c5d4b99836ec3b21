"""FusedSGD: SGD that takes the replica's learning rate as two numbers."""

import math

import torch
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd as torch_sgd
from typing_extensions import Unpack

from hdet_scale.kernels.scalars import Number
from hdet_scale.kernels.sgd import SGD, sgd_scalars
from hdet_scale.kernels.table import Combination
from hdet_scale.optim.batches import Batch, Group
from hdet_scale.optim.controls import Controls
from hdet_scale.optim.fused import FusedOptimizer
from hdet_scale.optim.rates import effective_lr
from hdet_scale.optim.shared_options import SharedOptions


class FusedSGD(FusedOptimizer):
    """SGD whose step uses lr * lr_multiplier: torch.optim.SGD's arguments, and ours.

    `group["lr"]` is the base that a scheduler writes on every replica alike; on a CPU the result of
    fp32 parameters is that of torch.optim.SGD(lr=lr * lr_multiplier, fused=True) to the last bit.
    Checkpoints load from and into torch.optim.SGD.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer.
        lr: The shared base LR, a number or a tensor of one (default: 1e-3).
        momentum: Of the momentum buffer, which `moment_dtype` is about; 0 for none (default: 0).
        dampening: Subtracted from the weight 1 of a new gradient in the buffer (default: 0).
        weight_decay: Added to the gradient: g + weight_decay * p (default: 0).
        nesterov: Nesterov's momentum; needs a momentum above 0 and no dampening (default: False).
        differentiable: For torch's signature; True is refused (default: False).
        **options: `SharedOptions`.

    Raises:
        TypeError: An argument is unknown or of a wrong type.
        ValueError: An argument is out of range or not supported; nothing is written.

    Limitations:
        No sparse gradients, no complex parameters. The kernels step fp32, bf16 and fp16
        parameters; fp64 needs backend="torch". On a CPU a group with 16-bit parameters and no
        masters is stepped in fp32 and rounded, tensor by tensor: torch 2.13's fused SGD leaves
        nearly all of their elements unchanged.
    """

    _update = SGD
    _counts_steps = False

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        differentiable: bool = False,
        **options: Unpack[SharedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "differentiable": differentiable,
        }
        super().__init__(params, defaults, options)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if not 0 <= group["momentum"] < math.inf:
            raise ValueError(f"momentum={group['momentum']}: give a number of at least 0")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov with momentum={group['momentum']}, dampening={group['dampening']}: "
                "it needs a momentum above 0 and no dampening"
            )

    def _is_plain(self, chosen: list[Combination], device: torch.device) -> bool:
        """Not 16-bit parameters on a CPU: torch 2.13's fused SGD writes only the elements behind
        the last whole vector, 8 of 1,000."""
        narrow = any(c.param.itemsize < 4 for c in chosen)
        return super()._is_plain(chosen, device) and not (narrow and device.type == "cpu")

    def _slots_of(self, group: Group) -> tuple[str, ...]:
        return self._update.moments if group["momentum"] else ()

    def _own_scalars(self, group: Group) -> list[float]:
        return sgd_scalars(group["momentum"], group["dampening"], group["nesterov"])

    def _step_plain(
        self,
        batch: Batch,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        controls: Controls,
    ) -> None:
        """torch starts a buffer with the gradient, undamped; a buffer of zeros does the same when
        the dampening is left out: mu 0 + (1 - 0) g = g."""
        buffers: list[torch.Tensor | None] = [None] * len(grads)
        if batch.slots:
            buffers = [*batch.slots[0]]
        dampening = batch.group["dampening"]
        if not dampening or not any(batch.fresh):
            self._step_part(batch.group, targets, grads, buffers, dampening, controls)
            return
        for new in (True, False):
            at = [i for i, fresh in enumerate(batch.fresh) if fresh == new]
            self._step_part(
                batch.group,
                [targets[i] for i in at],
                [grads[i] for i in at],
                [buffers[i] for i in at],
                0.0 if new else dampening,
                controls,
            )
        if not controls.skips:
            batch.fresh = [False] * len(batch.fresh)

    def _step_part(
        self,
        group: Group,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        buffers: list[torch.Tensor | None],
        dampening: float,
        controls: Controls,
    ) -> None:
        torch_sgd(
            targets,
            grads,
            buffers,
            has_sparse_grad=False,
            foreach=False,
            fused=True,
            grad_scale=controls.grad_scale,
            found_inf=controls.found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=effective_lr(group),  # type: ignore[arg-type]
            dampening=dampening,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
