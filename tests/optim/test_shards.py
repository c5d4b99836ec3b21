"""The memory that this rank holds of a tensor, and what the optimizers do with DTensors."""

from pathlib import Path

import pytest
import torch

from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.shards import is_dense, is_sharded, local_shard, shard_offset
from tests.support.stepping import LR


def test_dtensor_parameters_step_their_local_shards(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        values = torch.randn(6, 5)
        mine = torch.nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(0)]))
        yours = torch.nn.Parameter(values.clone())
        ours, theirs = FusedAdamW([mine], lr=LR), torch.optim.AdamW([yours], lr=LR, fused=True)
        for _ in range(3):
            grad = torch.randn(6, 5)
            mine.grad = distribute_tensor(grad.clone(), mesh, [Shard(0)])
            yours.grad = grad.clone()
            ours.step()
            theirs.step()
        assert torch.equal(mine.full_tensor(), yours)
        state = ours.state_dict()["state"][0]
        assert state["exp_avg"].placements == (Shard(0),)
        assert torch.equal(state["exp_avg"].full_tensor(), theirs.state[yours]["exp_avg"])
        before = mine.full_tensor().clone()
        wrong = torch.distributed.tensor.DTensor.from_local(torch.ones(6, 5), mesh, [Partial()])
        mine.grad = wrong
        with pytest.raises(ValueError, match="redistribute"):
            ours.step()
        assert torch.equal(mine.full_tensor(), before)
    finally:
        torch.distributed.destroy_process_group()


def test_a_plain_tensor_is_its_own_shard() -> None:
    tensor = torch.ones(3)
    assert local_shard(tensor) is tensor
    assert shard_offset(tensor) == 0
    assert not is_sharded(tensor)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(2, 3).t(), True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(4, 1, 3).transpose(0, 2), True),
        (torch.ones(2, 6)[:, ::2], False),
        (torch.ones(1).expand(3), False),
    ],
)
def test_dense_memory_has_no_gaps_in_whatever_order(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense
