"""How a kernel is started: sizes and dtypes by rule, and what happens without Triton."""

import subprocess
import sys
import textwrap

import pytest
import torch

from hdet_scale.kernels.launch import block_size, check_device, tl_dtype


def test_without_triton_the_references_work_and_the_kernels_name_the_extra() -> None:
    program = """
        import sys
        sys.modules["triton"] = None  # import triton raises ModuleNotFoundError
        import torch
        from hdet_scale.kernels import inspect, pieces
        from hdet_scale import FusedAdamW, FusedLion, FusedSGD
        for make in (FusedAdamW, FusedSGD, FusedLion):
            p = torch.nn.Parameter(torch.ones(8))
            optimizer = make([p], lr=0.1)
            p.grad = torch.ones(8)
            optimizer.step()
            assert p[0] < 1
        bucket = torch.empty(8)
        assert int(pieces.Pieces([torch.ones(8)]).gather(bucket)) == 0
        try:
            FusedAdamW([p], backend="triton").step()
        except ModuleNotFoundError as error:
            print(error)
        try:
            next(inspect.reports(jobs=1))
        except ModuleNotFoundError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install hdet_scale[triton]") == 2


def test_block_sizes_and_dtypes_by_rule() -> None:
    assert (block_size(32), block_size(64)) == (1024, 2048)
    with pytest.raises(ValueError, match="warp_size=16"):
        block_size(16)
    with pytest.raises(ValueError, match="float64"):
        tl_dtype(torch.float64)
    with pytest.raises(ValueError, match="backend='torch'"):
        check_device(torch.device("cpu"))
