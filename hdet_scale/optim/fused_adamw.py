"""FusedAdamW: AdamW that takes the replica's learning rate as two numbers."""

import math

import torch
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hdet_scale.kernels.adamw import ADAMW, adamw_scalars
from hdet_scale.kernels.scalars import Number
from hdet_scale.optim.batches import Batch, Group
from hdet_scale.optim.controls import Controls
from hdet_scale.optim.fused import FusedOptimizer
from hdet_scale.optim.rates import effective_lr
from hdet_scale.optim.shared_options import SharedOptions, check_betas


class FusedAdamW(FusedOptimizer):
    """AdamW whose step uses lr * lr_multiplier: torch.optim.AdamW's arguments, and ours.

    `group["lr"]` is the base that a scheduler writes on every replica alike; on a CPU the result is
    that of torch.optim.AdamW(lr=lr * lr_multiplier, fused=True) to the last bit. Checkpoints load
    from and into torch.optim.AdamW.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer.
        lr: The shared base LR, a number or a tensor of one (default: 1e-3).
        betas: Of the running means of the gradient and its square (default: (0.9, 0.999)).
        eps: Added to the denominator (default: 1e-8).
        weight_decay: Decoupled: p <- p - lr * lr_multiplier * weight_decay * p (default: 1e-2).
        amsgrad: For torch's signature; True is refused (default: False).
        capturable: For torch's signature (default: False). Step counts are kept on the device, so
            that the step can be captured in a CUDA graph whatever it says.
        differentiable: For torch's signature; True is refused (default: False).
        **options: `SharedOptions`.

    Raises:
        TypeError: An argument is unknown or of a wrong type.
        ValueError: An argument is out of range or not supported; nothing is written.

    Limitations:
        No amsgrad, no sparse gradients, no complex parameters. The kernels step fp32, bf16 and
        fp16 parameters; fp64 needs backend="torch".
    """

    _update = ADAMW
    _corrects_bias = True

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Unpack[SharedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "capturable": capturable,
            "differentiable": differentiable,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults, options)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_betas(group)
        if not 0 <= group["eps"] < math.inf:
            raise ValueError(f"eps={group['eps']}: valid is a finite number of at least 0")
        if not group["decoupled_weight_decay"]:
            raise ValueError(
                "decoupled_weight_decay=False is Adam with L2 regularisation, and this is AdamW: "
                "load a state of torch.optim.AdamW"
            )

    def _own_scalars(self, group: Group) -> list[float]:
        first, second = group["betas"]
        return adamw_scalars((float(first), float(second)), group["eps"])

    def _step_plain(
        self,
        batch: Batch,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        controls: Controls,
    ) -> None:
        group = batch.group
        torch_adamw(
            targets,
            grads,
            batch.slots[0],
            batch.slots[1],
            [],
            batch.steps,
            foreach=False,
            capturable=group["capturable"],
            differentiable=False,
            fused=True,
            grad_scale=controls.grad_scale,
            found_inf=controls.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=effective_lr(group),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
