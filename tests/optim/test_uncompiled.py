"""A step that is called in a compiled function runs outside of its graphs."""

import contextlib
import functools
from typing import Any

import pytest
import torch

from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.fused_lion import FusedLion
from hdet_scale.optim.fused_sgd import FusedSGD
from hdet_scale.optim.uncompiled import uncompiled
from tests.support.stepping import LR


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler")
@pytest.mark.parametrize("make", [FusedAdamW, FusedSGD, FusedLion])
def test_a_compiled_step_is_the_plain_one_and_sees_a_new_rate(make: Any) -> None:
    """Traced, it would keep the LR of its first call."""
    graphs: list[list[str]] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([n.name for n in module.graph.nodes if n.op.startswith("call")])
        return module.forward

    moved = []
    with contextlib.ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        for compiled in (False, True):
            param = torch.nn.Parameter(torch.ones(4))
            optimizer = make([param], lr=LR)
            step = torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step
            for rate in (LR, 0.5 * LR, 0.0):
                optimizer.param_groups[0]["lr"] = rate
                param.grad = torch.full((4,), 0.5)
                step()
                moved.append(param.detach().clone())
    for plain, compiled_too in zip(moved[:3], moved[3:], strict=True):
        assert torch.equal(plain, compiled_too)
    assert torch.equal(moved[1], moved[2])
    assert graphs == []


def test_it_is_called_with_its_arguments_and_keeps_its_name() -> None:
    calls: list[tuple[int, int]] = []

    @uncompiled
    def noted(first: int, *, second: int) -> int:
        """Its docstring."""
        calls.append((first, second))
        return first + second

    assert noted(1, second=2) == 3
    assert functools.partial(noted, 3)(second=4) == 7
    assert calls == [(1, 2), (3, 4)]
    assert (noted.__name__, noted.__doc__) == ("noted", "Its docstring.")
