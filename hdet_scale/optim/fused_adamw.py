"""FusedAdamW: AdamW that takes the replica's learning rate as two numbers."""

import math

import torch
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hdet_scale.kernels.adamw import ADAMW, adamw_scalars
from hdet_scale.kernels.scalars import Number
from hdet_scale.kernels.table import Combination
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
        state: "int8" keeps the moments as 8-bit codes with a scale for each 64 elements: 2.1 bytes
            a parameter instead of 8, 16.25 moved instead of 28. With master_weights a bf16
            parameter is the upper half of its master, whose lower half takes 2 bytes more. None
            is what moment_dtype says (default: None).
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
        state="int8": fp32 and bf16 parameters alone, without stochastic rounding. A moment of less
        than 1/254 of the largest of its run of 64 is kept as 0, a second moment of less than
        1/510^2 as the smallest code. `state_dict` decodes to fp32: 8 bytes a parameter while it is
        made. A converge averages the parameters and leaves each replica its own moments, also
        where the policy asks for them. On a CPU it is stepped tensor by tensor.
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
        state: str | None = None,
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
            "state": state,
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
        _check_state(group)
        if not group["decoupled_weight_decay"]:
            raise ValueError(
                "decoupled_weight_decay=False is Adam with L2 regularisation, and this is AdamW: "
                "load a state of torch.optim.AdamW"
            )

    def _combination(self, param: torch.Tensor, group: Group) -> Combination:
        if group["state"] is None:
            return super()._combination(param, group)
        if param.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is {param.dtype}: state='int8' takes "
                "fp32 and bf16 parameters. Leave state out for this group."
            )
        split = bool(group["master_weights"]) and param.dtype == torch.bfloat16
        return Combination(param=param.dtype, moment=torch.int8, master=split)

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


def _check_state(group: Group) -> None:
    if group["state"] not in (None, "int8"):
        raise ValueError(
            f"state={group['state']!r}: valid are None (what moment_dtype says) and 'int8'"
        )
    for name in ("moment_dtype", "stochastic_rounding"):
        if group["state"] and group[name]:
            raise ValueError(
                f"state='int8' with {name}={group[name]}: the moments are 8-bit codes, and "
                "parameters are rounded to nearest or kept with master_weights. Leave one out."
            )
