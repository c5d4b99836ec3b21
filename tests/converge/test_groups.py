"""Process groups: the backend behind a device, and the options of a group for the background."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hdet_scale import Replicas
from hdet_scale.converge.full_precision import AllReduce, Exact, FullPrecision
from hdet_scale.converge.groups import MAX_CTAS, backends_of, background_options
from hdet_scale.converge.overlap import with_own_group

UNNAMED = """
    import torch.distributed as dist
    from hdet_scale.converge.groups import backends_of
    dist.init_process_group(init_method="file://{store}", rank=0, world_size=1)
    print(dist.get_backend(), backends_of(dist.group.WORLD))
    print(backends_of(dist.new_group([0])))
"""


def test_a_backend_that_was_not_named_is_known(tmp_path: Any) -> None:
    script = textwrap.dedent(UNNAMED.format(store=tmp_path / "store"))
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.splitlines() == ["undefined {'cpu': 'gloo'}", "{'cpu': 'gloo'}"]


@pytest.mark.parametrize(
    ("said", "backends"),
    [
        ("cuda:nccl", {"cuda": "nccl"}),
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("cpu:gloo,cuda:gloo", {"cpu": "gloo", "cuda": "gloo"}),
    ],
)
def test_the_full_precision_wire_is_nccl_s_own_where_cuda_has_nccl(
    monkeypatch: pytest.MonkeyPatch, said: str, backends: dict[str, str]
) -> None:
    """What torch says of a group is all that is needed: nothing is sent."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: said)
    group: Any = SimpleNamespace()
    assert backends_of(group) == backends
    wire = FullPrecision.build(Replicas(size=4, group=group), torch.device("cuda"))
    if backends["cuda"] == "nccl":
        assert isinstance(wire, AllReduce)
        assert wire.native_average
    else:
        assert isinstance(wire, Exact)


class Options:
    """The fields of ProcessGroupNCCL.Options that are set: a build for CPUs has no NCCL."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=-1)


def test_nccl_in_the_background_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    assert background_options({"cpu": "gloo", "cuda": "nccl"}).config.max_ctas == MAX_CTAS
    assert background_options({"cpu": "gloo"}) is None


def _own_group(rank: int, size: int) -> tuple[bool, list[float]]:
    own = with_own_group(Replicas.world())
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=own.connected())
    return own.group is not dist.group.WORLD, total.tolist()


def test_the_background_has_a_group_of_its_own(fleets: Any) -> None:
    assert fleets(3).run(_own_group) == [(True, [3.0])] * 3
