"""All checks of one device, and on which device they run here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from hdet_scale.acceptance.captured_step import check_graph
from hdet_scale.acceptance.driver import check_driver
from hdet_scale.acceptance.findings import ABSENT, NO_DEVICE, Finding, tried
from hdet_scale.acceptance.optimizers import (
    OPTIMIZERS,
    check_moving_gradients,
    check_skipped,
    check_update,
)
from hdet_scale.acceptance.transports import (
    check_gather,
    check_pack,
    check_row_mean,
    check_scale,
    check_scatter,
    check_unpack,
)
from hdet_scale.kernels.choice import interpreting

Check = Callable[[torch.device], str]

KERNELS: dict[str, Check] = {
    **{name: functools.partial(check_update, name) for name in OPTIMIZERS},
    "advance": check_skipped,
    "gather": check_gather,
    "scatter": check_scatter,
    "scale": check_scale,
    "row_mean": check_row_mean,
    "pack": check_pack,
    "unpack": check_unpack,
}
"""Name of a kernel in `kernels/cases.py`: the check that launches all of its variants."""

OTHERS: dict[str, Check] = {
    "moving gradients": check_moving_gradients,
    "CUDA graph": check_graph,
    "driver": check_driver,
}

_WRONG = "use torch's own optimizers or backend='torch', and send us this block"
TODO = {
    **dict.fromkeys((*OPTIMIZERS, "advance", "moving gradients"), _WRONG),
    "CUDA graph": "do not capture steps of the fused optimizers, and send us this block",
    "driver": "install a newer NVIDIA driver, or a torch that is built for this one's CUDA",
}
_WRONG_AVERAGE = "do not average on this GPU, and send us this block"


def device_here() -> torch.device | None:
    """The GPU; the CPU where Triton's interpreter runs the kernels; else None."""
    if interpreting():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def accept(device: torch.device | None = None) -> Iterator[Finding]:
    """Run every check, in the order in which they are shown.

    Args:
        device: where to run them (default: `device_here()`). Where there is none, one finding says
            that nothing was launched.
    """
    device = device or device_here()
    if device is None:
        todo = "on a GPU every kernel is launched; TRITON_INTERPRET=1 hdet doctor: on this CPU"
        yield Finding("kernels run", ABSENT, NO_DEVICE, todo)
        yield from (Finding(name, ABSENT, NO_DEVICE) for name in OTHERS)
        return
    for name, check in {**{f"kernel {n}": check for n, check in KERNELS.items()}, **OTHERS}.items():
        todo = TODO.get(name.removeprefix("kernel "), _WRONG_AVERAGE)
        yield tried(name, functools.partial(check, device), todo)
