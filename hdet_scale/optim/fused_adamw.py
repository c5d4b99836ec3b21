"""Optimizers that take the replica's learning rate as two numbers: FusedAdamW, FusedSGD, FusedLion.

`group["lr"]` is the shared base, which a scheduler writes on every replica alike;
`group["lr_multiplier"]` is this replica's factor. The step uses lr * lr_multiplier. With any other
torch optimizer there is no second number, and the product goes to `group["lr"]`: `write_lr` is the
one place that decides which.

On a GPU one Triton launch updates all tensors of all groups that share a dtype combination
(`hdet_scale.kernels`). On a CPU torch's own fused kernels do, through torch's functional
optimizers: they are near the memory limit, and the result is torch's to the last bit. A GPU
without Triton falls back to them as well, and says so once.

A checkpoint is torch's: the same state keys, loading from and into `torch.optim.AdamW` and `SGD`.
It does not carry `lr_multiplier`, which belongs to a replica and not to the run: a file written by
one replica and loaded by all must not make them all that replica. A multiplier found in a file is
ignored for the same reason.
"""

import math

import torch
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd as torch_sgd

from hdet_scale.kernels import scalars
from hdet_scale.kernels.adamw import adamw, adamw_reference
from hdet_scale.kernels.lion import lion, lion_foreach, lion_reference
from hdet_scale.kernels.sgd import sgd, sgd_reference
from hdet_scale.kernels.table import Combination
from hdet_scale.optim.batches import Batch, Group
from hdet_scale.optim.fused import FusedOptimizer, Number
from hdet_scale.optim.rates import effective_lr, write_lr

__all__ = ["FusedAdamW", "FusedLion", "FusedSGD", "effective_lr", "write_lr"]


def _check_betas(group: Group) -> None:
    for beta in group["betas"]:
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas={group['betas']}: each must be at least 0 and below 1")


def _check_unsupported(fused: bool | None, foreach: bool | None) -> None:
    if fused is False or foreach:
        raise ValueError(
            f"fused={fused}, foreach={foreach}: this optimizer is always fused. Leave both out, or "
            "use torch's optimizer."
        )


class FusedAdamW(FusedOptimizer):
    """AdamW whose step uses lr * lr_multiplier. torch.optim.AdamW's arguments, and:

    lr_multiplier: this replica's factor of the LR.
    master_weights: keep an fp32 copy of 16-bit parameters, and round them from it.
    stochastic_rounding: round 16-bit arrays up or down at random, without bias, instead.
    moment_dtype: torch.float32 or torch.bfloat16; None is torch's choice, the dtype of what is
        stepped (the parameter, or the master).
    seed: of the stochastic rounding.
    backend: "triton", "torch", or None: Triton on a GPU and torch on a CPU.

    amsgrad and differentiable are refused. Step counts are kept on the device, so that the step
    can be captured in a CUDA graph whatever `capturable` says.
    """

    _slot_names = ("exp_avg", "exp_avg_sq")
    _kernel = staticmethod(adamw)
    _reference = staticmethod(adamw_reference)
    _reference_options = ("betas", "eps", "weight_decay", "maximize")

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        lr_multiplier: Number = 1.0,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        moment_dtype: torch.dtype | None = None,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        _check_unsupported(fused, foreach)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": None,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": True,
            "decoupled_weight_decay": True,
        }
        super().__init__(
            params,
            defaults,
            lr_multiplier=lr_multiplier,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            moment_dtype=moment_dtype,
            seed=seed,
            backend=backend,
        )

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        _check_betas(group)
        if not 0 <= group["eps"] < math.inf:
            raise ValueError(f"eps={group['eps']}: valid is a finite number of at least 0")
        if not group["decoupled_weight_decay"]:
            raise ValueError(
                "decoupled_weight_decay=False is Adam with L2 regularisation, and this is AdamW: "
                "load a state of torch.optim.AdamW"
            )

    def _scalar_row(self, group: Group) -> list[Number]:
        betas = (float(group["betas"][0]), float(group["betas"][1]))
        row = scalars.betas_row(
            group["lr"],
            group["lr_multiplier"],
            group["weight_decay"],
            group["maximize"],
            betas,
            group["eps"],
        )
        return [*row, *scalars.log_betas(betas)]

    def _step_plain(
        self,
        batch: Batch,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        found_inf: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
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
            grad_scale=grad_scale,
            found_inf=found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=effective_lr(group),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class FusedSGD(FusedOptimizer):
    """SGD with momentum, dampening and Nesterov, whose step uses lr * lr_multiplier.

    torch.optim.SGD's arguments, and those of FusedAdamW for multiplier, master, rounding, moments
    (the momentum buffer), seed and backend.
    """

    _slot_names = ("momentum_buffer",)
    _counts_steps = False
    _kernel = staticmethod(sgd)
    _reference = staticmethod(sgd_reference)
    _reference_options = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    _no_slots = (None,)

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        lr_multiplier: Number = 1.0,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        moment_dtype: torch.dtype | None = None,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        _check_unsupported(fused, foreach)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": None,
            "differentiable": differentiable,
            "fused": True,
        }
        super().__init__(
            params,
            defaults,
            lr_multiplier=lr_multiplier,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            moment_dtype=moment_dtype,
            seed=seed,
            backend=backend,
        )

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if not 0 <= group["momentum"] < math.inf:
            raise ValueError(f"momentum={group['momentum']}: give a number of at least 0")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov with momentum={group['momentum']}, dampening={group['dampening']}: "
                "it needs a momentum above 0 and no dampening"
            )

    def _slots_of(self, group: Group) -> tuple[str, ...]:
        return self._slot_names if group["momentum"] else ()

    def _scalar_row(self, group: Group) -> list[Number]:
        row = scalars.sgd_row(
            group["lr"],
            group["lr_multiplier"],
            group["weight_decay"],
            group["maximize"],
            group["momentum"],
            group["dampening"],
            group["nesterov"],
        )
        return [*row, 0.0, 0.0]

    def _step_plain(
        self,
        batch: Batch,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        found_inf: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
    ) -> None:
        """torch starts a buffer with the gradient, undamped; a buffer of zeros does the same when
        the dampening is left out: mu 0 + (1 - 0) g = g."""
        buffers: list[torch.Tensor | None] = [None] * len(grads)
        if batch.slots:
            buffers = [*batch.slots[0]]
        dampening = batch.group["dampening"]
        controls = (found_inf, grad_scale)
        if not dampening or not any(batch.fresh):
            self._step_part(batch, targets, grads, buffers, dampening, *controls)
            return
        for new in (True, False):
            at = [i for i, fresh in enumerate(batch.fresh) if fresh == new]
            self._step_part(
                batch,
                [targets[i] for i in at],
                [grads[i] for i in at],
                [buffers[i] for i in at],
                0.0 if new else dampening,
                *controls,
            )
        if found_inf is None or not bool(found_inf):
            batch.fresh = [False] * len(batch.fresh)

    def _step_part(
        self,
        batch: Batch,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        buffers: list[torch.Tensor | None],
        dampening: float,
        found_inf: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
    ) -> None:
        group = batch.group
        torch_sgd(
            targets,
            grads,
            buffers,
            has_sparse_grad=False,
            foreach=False,
            fused=True,
            grad_scale=grad_scale,
            found_inf=found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=effective_lr(group),  # type: ignore[arg-type]
            dampening=dampening,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )


class FusedLion(FusedOptimizer):
    """Lion whose step uses lr * lr_multiplier.

    p <- p - lr * lr_multiplier * (sgn(beta1 m + (1 - beta1) g) + weight_decay p), then
    m <- beta2 m + (1 - beta2) g. A good LR is three to ten times below AdamW's and the weight decay
    as much above. The other arguments are those of FusedAdamW.
    """

    _slot_names = ("exp_avg",)
    _kernel = staticmethod(lion)
    _reference = staticmethod(lion_reference)
    _reference_options = ("betas", "weight_decay", "maximize")

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        lr_multiplier: Number = 1.0,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        moment_dtype: torch.dtype | None = None,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": True,
            "maximize": maximize,
            "foreach": None,
            "capturable": capturable,
            "fused": True,
        }
        super().__init__(
            params,
            defaults,
            lr_multiplier=lr_multiplier,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            moment_dtype=moment_dtype,
            seed=seed,
            backend=backend,
        )

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        _check_betas(group)

    def _is_plain(self, chosen: list[Combination], device: torch.device) -> bool:
        """The foreach step computes in the arrays' dtype, which is too coarse below fp32."""
        return super()._is_plain(chosen, device) and all(c.param.itemsize >= 4 for c in chosen)

    def _scalar_row(self, group: Group) -> list[Number]:
        betas = (float(group["betas"][0]), float(group["betas"][1]))
        row = scalars.betas_row(
            group["lr"], group["lr_multiplier"], group["weight_decay"], group["maximize"], betas
        )
        return [*row, 0.0, 0.0]

    def _step_plain(
        self,
        batch: Batch,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        found_inf: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
    ) -> None:
        if found_inf is not None and bool(found_inf):
            return
        group = batch.group
        if grad_scale is not None:
            grads = list(torch._foreach_div(grads, grad_scale))
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
