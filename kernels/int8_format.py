"""The int8 format of a bucket: a code for each element, an fp32 scale for each run of QUANTUM.

Numbers and checks alone, without Triton: the torch code that packs on a CPU reads them too.
"""

import torch

QUANTUM = 256
"""Elements that share one scale."""

FAINT = 1e-30
"""A scale below this says nothing that a parameter could show, and its inverse may overflow: the
run is sent as zeros and stays in the error."""


def packed_blocks(numel: int) -> int:
    """How many scales a bucket of `numel` elements has."""
    return -(-numel // QUANTUM)


def check_packed(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Refuse codes and scales that do not fit the flat bucket x.

    Raises:
        ValueError: A dtype or shape is wrong, or one of the three is not contiguous.
    """
    wanted = (torch.int8, (x.numel(),), torch.float32, (packed_blocks(x.numel()),))
    received = (codes.dtype, tuple(codes.shape), scales.dtype, tuple(scales.shape))
    if x.dim() != 1 or received != wanted:
        raise ValueError(f"codes and scales are {received}; for x {tuple(x.shape)}: {wanted}")
    if not (x.is_contiguous() and codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("x, codes and scales must be contiguous: pass .contiguous() buffers")
