"""FusedLion: Lion that takes the replica's learning rate as two numbers."""

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hdet_scale.kernels.lion import LION, lion_foreach, lion_scalars
from hdet_scale.kernels.scalars import Number
from hdet_scale.kernels.table import Combination
from hdet_scale.optim.batches import Batch, Group
from hdet_scale.optim.controls import Controls
from hdet_scale.optim.fused import FusedOptimizer
from hdet_scale.optim.rates import effective_lr
from hdet_scale.optim.shared_options import SharedOptions, check_betas


class FusedLion(FusedOptimizer):
    """Lion whose step uses lr * lr_multiplier.

    p <- p - lr * lr_multiplier * (sgn(beta1 m + (1 - beta1) g) + weight_decay p), then
    m <- beta2 m + (1 - beta2) g. A good LR is three to ten times below AdamW's and the weight decay
    as much above.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer.
        lr: The shared base LR, a number or a tensor of one (default: 1e-4).
        betas: Of the direction and of the momentum (default: (0.9, 0.99)).
        weight_decay: Decoupled, as in the equation above (default: 0.0).
        capturable: For torch's signature (default: False). Step counts are kept on the device, so
            that the step can be captured in a CUDA graph whatever it says.
        **options: `SharedOptions`.

    Raises:
        TypeError: An argument is unknown or of a wrong type.
        ValueError: An argument is out of range or not supported; nothing is written.

    Limitations:
        No sparse gradients, no complex parameters. The kernels step fp32, bf16 and fp16
        parameters; fp64 needs backend="torch". On a CPU 16-bit parameters without a master are
        stepped tensor by tensor, since torch has no fused Lion.
    """

    _update = LION

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        capturable: bool = False,
        **options: Unpack[SharedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": True,
            "capturable": capturable,
        }
        super().__init__(params, defaults, options)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_betas(group)

    def _is_plain(self, chosen: list[Combination], device: torch.device) -> bool:
        """The foreach step computes in the arrays' dtype, which is too coarse below fp32."""
        return super()._is_plain(chosen, device) and all(c.param.itemsize >= 4 for c in chosen)

    def _own_scalars(self, group: Group) -> list[float]:
        first, second = group["betas"]
        return lion_scalars((float(first), float(second)))

    def _step_plain(
        self,
        batch: Batch,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        controls: Controls,
    ) -> None:
        if controls.skips:
            return
        group = batch.group
        if controls.grad_scale is not None:
            grads = list(torch._foreach_div(grads, controls.grad_scale))
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        torch._foreach_add_(batch.steps, 1)
        lion_foreach(
            targets,
            grads,
            batch.slots[0],
            lr=effective_lr(group),
            betas=group["betas"],
            weight_decay=group["weight_decay"],
        )
