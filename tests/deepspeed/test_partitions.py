"""The mean of shared gradients over awkward lists, and the layout file of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdet_scale import Replicas
from hdet_scale.deepspeed.checkpoints import Layout
from hdet_scale.deepspeed.partitions import partitions_of
from hdet_scale.engines.gradient_mean import GradientMean


def _gradients(rank: int) -> list[Tensor]:
    """Small and large, mixed types, an empty one, a scalar, views of one buffer, channels last."""
    g = torch.Generator().manual_seed(rank)
    flat = torch.randn(40, generator=g)
    return [
        torch.randn(7, generator=g),
        torch.randn(300_000, generator=g),
        torch.randn(33, generator=g).bfloat16(),
        torch.full((50,), 60_000.0).half(),
        torch.empty(0),
        torch.randn((), generator=g),
        flat[:10],
        flat[10:40],
        torch.randn(2, 3, 4, 4, generator=g).to(memory_format=torch.channels_last),
        torch.randn(5, generator=g).double(),
    ]


def _averaged(rank: int, size: int, bucket_bytes: int) -> list[Any]:
    mean = GradientMean(bucket_bytes)
    results = []
    for _ in range(2):  # the second time with staging that is kept
        mine = _gradients(rank)
        mean(mine, Replicas.world())
        results.append(mine)
    return results


@pytest.mark.parametrize("bucket_bytes", [16, 1000, 2**25])
def test_every_gradient_is_averaged_and_fp16_does_not_overflow(
    fleet: Any, bucket_bytes: int
) -> None:
    everyone = [_gradients(rank) for rank in range(fleet.size)]
    for results in fleet.run(_averaged, bucket_bytes):
        for mine in results:
            for i, found in enumerate(mine):
                wanted = torch.stack([g[i].double() for g in everyone]).mean(0).to(found.dtype)
                assert found.shape == wanted.shape
                torch.testing.assert_close(found, wanted, rtol=2**-7 if i == 2 else 1e-6, atol=1e-6)


def _overflowed(rank: int, size: int) -> list[bool]:
    gradients = [torch.ones(3), torch.ones(3).half()]
    if rank == 1:
        gradients[1][2] = float("inf")
    GradientMean(8)(gradients, Replicas.world())
    return [bool(g.isfinite().all()) for g in gradients]


def test_an_infinity_of_one_replica_reaches_all(trio: Any) -> None:
    assert trio.run(_overflowed) == [[True, False]] * 3


def _unused(rank: int, size: int) -> list[Tensor]:
    """A parameter that the loss of one replica did not reach."""
    model = nn.ParameterList([torch.ones(2), torch.ones(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (model[0].sum() + (model[1].sum() if rank == 0 else 0)).backward()
    GradientMean(8)(partitions_of(optimizer, None).gradients(), Replicas.world())
    dist.barrier()
    return [p.grad.clone() for p in model if p.grad is not None]


def test_a_gradient_that_one_replica_lacks_counts_as_0(pair: Any) -> None:
    for used, sometimes in pair.run(_unused):
        assert used.tolist() == [1.0, 1.0]
        assert sometimes.tolist() == [0.5, 0.5]


def test_an_unknown_optimizer_of_deepspeed_is_refused() -> None:
    class Strange:
        pass

    with pytest.raises(ValueError, match="made a Strange of the optimizer"):
        partitions_of(Strange(), None)


def test_the_layout_file_is_read_back(tmp_path: Path) -> None:
    layout = Layout(replicas=2, shards=2, stage=3, apart=True, step=7)
    layout.write(tmp_path / "tag")
    assert Layout.read(tmp_path / "tag") == layout
    assert Layout.read(tmp_path) is None
