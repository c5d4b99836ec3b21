"""What the optimizers do with DTensors."""

from pathlib import Path

import pytest
import torch

from hdet_scale.optim.fused_adamw import FusedAdamW
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
