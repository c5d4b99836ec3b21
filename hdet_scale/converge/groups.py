"""Process groups: which backend moves the tensors of a device, and what the background may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

MAX_CTAS = 4
"""Thread blocks, each on a multiprocessor of its own, that NCCL may use for a transfer in the
background: the training step runs on the others. Chosen, not measured: 3 % of an H100."""


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend for each type of device, such as {"cpu": "gloo", "cuda": "nccl"}.

    `dist.get_backend` does not know them: after an init_process_group without a backend it says
    "undefined" for every device.
    """
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def background_options(backends: Mapping[str, str]) -> Any:
    """Options of a group for transfers in the background; None where NCCL is not among them."""
    if "nccl" not in backends.values():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_CTAS
    return options
