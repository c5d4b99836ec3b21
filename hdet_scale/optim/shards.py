"""The memory that this rank holds of a tensor: a DTensor's local shard, or the tensor itself.

The one file of the room that knows DTensor.
"""

import math

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor, whose local shard is a new object at every call."""
    return hasattr(tensor, "to_local")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The shard that this rank holds of a DTensor; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def shard_offset(param: torch.Tensor) -> int:
    """The index in the whole parameter of this rank's first element: what makes the rounding of an
    element the same however dimension 0 is sharded."""
    if not is_sharded(param):
        return 0
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(param, DTensor):
        return 0
    _, starts = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    inner = [math.prod(param.shape[d + 1 :]) for d in range(param.dim())]
    return sum(start * size for start, size in zip(starts, inner, strict=True))


def check_placements(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Refuse a gradient that is distributed in another way than its parameter.

    Raises:
        ValueError: The placements differ (a Partial gradient, or only one of them is a DTensor).
    """
    placed, received = getattr(param, "placements", None), getattr(grad, "placements", None)
    if placed != received:
        raise ValueError(
            f"a parameter is placed {placed} and its gradient {received}: redistribute the "
            "gradient to match"
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory, in whatever order (channels-last)."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
