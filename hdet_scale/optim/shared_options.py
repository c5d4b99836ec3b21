"""The options that every fused optimizer takes, beside those of its torch counterpart.

Their meaning, types, defaults and checks stand here once. A fused optimizer's constructor takes
them as `**options: Unpack[SharedOptions]`, which type checkers read; `describe` writes them into
its signature and docstring, which `help` reads.
"""

import inspect
import math
import textwrap
from typing import Any, TypedDict

import torch

from hdet_scale.kernels.scalars import Number
from hdet_scale.optim.batches import Group
from hdet_scale.optim.rates import check_multiplier


class SharedOptions(TypedDict, total=False):
    """Keyword arguments of every fused optimizer:

    lr_multiplier: This replica's factor of the LR, a number or a tensor of one (default: 1.0).
    master_weights: Keep an fp32 copy of 16-bit parameters, step it, and round the parameters
        from it: 4 bytes a parameter (default: False).
    stochastic_rounding: Round 16-bit arrays up or down at random, without bias, instead; not
        together with master_weights (default: False).
    moment_dtype: torch.float32 or torch.bfloat16. None is torch's choice: the dtype of what is
        stepped, the parameter or its master (default: None).
    seed: Of the stochastic rounding (default: 0).
    backend: "triton" or "torch". None is Triton on a GPU and torch on a CPU (default: None).
    maximize: Step up the gradient instead of down (default: False).
    foreach: For torch's signature; True is refused (default: None).
    fused: For torch's signature; False is refused (default: None).
    """

    lr_multiplier: Number
    master_weights: bool
    stochastic_rounding: bool
    moment_dtype: torch.dtype | None
    seed: int
    backend: str | None
    maximize: bool
    foreach: bool | None
    fused: bool | None


DEFAULTS: SharedOptions = {
    "lr_multiplier": 1.0,
    "master_weights": False,
    "stochastic_rounding": False,
    "moment_dtype": None,
    "seed": 0,
    "backend": None,
    "maximize": False,
    "foreach": None,
    "fused": None,
}

KEPT_ON_LOAD = (
    "lr_multiplier",
    "master_weights",
    "stochastic_rounding",
    "moment_dtype",
    "state",
    "seed",
)
"""What says how this optimizer runs, and not what it has learned: kept when a state is loaded."""


def complete(owner: type, given: SharedOptions) -> dict[str, Any]:
    """The given options with the defaults of the others.

    Args:
        owner: The optimizer's class, for the error message.
        given: What its constructor received beyond its own arguments.

    Raises:
        TypeError: An option is unknown.
        ValueError: `backend`, `fused` or `foreach` is not valid.
    """
    unknown = [name for name in given if name not in DEFAULTS]
    if unknown:
        valid = list(inspect.signature(owner).parameters)
        raise TypeError(
            f"{owner.__name__} got an unexpected keyword argument {unknown[0]!r}: valid are {valid}"
        )
    options = {**DEFAULTS, **given}
    if options["fused"] is False or options["foreach"]:
        raise ValueError(
            f"fused={options['fused']}, foreach={options['foreach']}: this optimizer is always "
            "fused. Leave both out, or use torch's optimizer."
        )
    if options["backend"] not in (None, "triton", "torch"):
        raise ValueError(
            f"backend={options['backend']!r}: valid are None (choose), 'triton', 'torch'"
        )
    return {**options, "fused": True, "foreach": None}


def check_group(group: Group) -> None:
    """Refuse a param group that no kernel steps; `group` has every key.

    Raises:
        TypeError: The multiplier is no number.
        ValueError: A number is out of range, or an option is not supported.
    """
    check_multiplier(group["lr_multiplier"])
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr of shape {tuple(lr.shape)}: give a number or a tensor of one")
    if not isinstance(lr, torch.Tensor) and not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr={lr}: valid is a finite number of at least 0")
    if not 0 <= group["weight_decay"] < math.inf:
        raise ValueError(f"weight_decay={group['weight_decay']}: give a number of at least 0")
    _check_precision(group)
    for name, why in (
        ("amsgrad", "it would be one more array to read and write"),
        ("differentiable", "the step is made in place by one kernel"),
    ):
        if group.get(name):
            raise ValueError(f"{name}=True is not supported: {why}. Use torch's optimizer.")


def _check_precision(group: Group) -> None:
    if group["master_weights"] and group["stochastic_rounding"]:
        raise ValueError(
            "master_weights and stochastic_rounding are two ways to keep small updates of "
            "16-bit parameters: choose one (a master costs 4 bytes a parameter)"
        )
    if group["moment_dtype"] not in (None, torch.float32, torch.bfloat16):
        raise ValueError(
            f"moment_dtype={group['moment_dtype']}: valid are None (torch's choice, the dtype "
            "of what is stepped), torch.float32, torch.bfloat16"
        )


def check_betas(group: Group) -> None:
    """Refuse betas outside [0, 1).

    Raises:
        ValueError: One of them is.
    """
    for beta in group["betas"]:
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas={group['betas']}: each must be at least 0 and below 1")


def describe(owner: type) -> None:
    """Write the shared options into the signature and the docstring of an optimizer's class, where
    they have `**options` and the line "**options: `SharedOptions`."."""
    init = owner.__dict__.get("__init__")
    if init is None:
        return
    signature = inspect.signature(init)
    own = [p for p in signature.parameters.values() if "SharedOptions" not in str(p.annotation)]
    if len(own) == len(signature.parameters):
        return
    kinds = SharedOptions.__annotations__
    shared = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=kinds[n])
        for n, d in DEFAULTS.items()
    ]
    init.__signature__ = signature.replace(parameters=[*own, *shared])
    if owner.__doc__ and SharedOptions.__doc__:
        _, _, listed = inspect.cleandoc(SharedOptions.__doc__).partition("\n\n")
        owner.__doc__ = owner.__doc__.replace(
            "**options: `SharedOptions`.", textwrap.indent(listed, " " * 8).lstrip()
        )
