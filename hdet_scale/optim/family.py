"""Whether the size of an optimizer's step grows with the gradient, found out by stepping a copy.

What a default is called says little: Muon has neither eps nor betas and divides all the same, and
an optimizer may take options that it does not use. So a tiny optimizer of the same class and
options is stepped with a gradient and with LARGER times the gradient.
"""

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_log = logging.getLogger(__name__)

LARGER = 8.0
# RAdam's first five steps are not yet divided.
_STEPS = 12
# A matrix if the class can step one: most elements of a model are in matrices, also where an engine
# has flattened them (DeepSpeed's Muon under ZeRO).
_SHAPES: tuple[tuple[int, ...], ...] = ((4, 3), (6,))
_WRITTEN_BY_SCHEDULERS = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
    "lr_multiplier",
}
# How a step is carried out, and not which: a tiny tensor takes the plain way.
_PLAIN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


def divides_by_the_gradient(optimizer: Optimizer) -> bool:
    """Whether a step's size does not grow with the gradient's: Adam and its kin, RMSprop, Adagrad,
    Lion, Muon, and not SGD.

    Args:
        optimizer: The user's; it is not stepped, and neither its state nor a random generator is
            touched. The options of the group with the most elements decide.

    Returns:
        What a copy does. Where no copy can be built or stepped (a constructor that needs more than
        parameters and the group's options, a step that needs the model), what the defaults
        suggest: True if there is an "eps" or "betas".
    """
    inner = _innermost(optimizer)
    group = max(inner.param_groups, key=lambda g: sum(p.numel() for p in g["params"]))
    for shape in _SHAPES:
        for make in _makers(type(inner), group):
            found = _ratio(make, shape, _device_of(group["params"]))
            if found is not None:
                return found < math.sqrt(LARGER)
    _log.debug("no copy of %s can be stepped: told by its defaults", type(inner).__name__)
    return not {"eps", "betas"}.isdisjoint(inner.defaults)


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that a wrapper (Accelerate's, DeepSpeed's) has in its attribute `optimizer`."""
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, Optimizer) else optimizer


def _device_of(params: list[torch.Tensor]) -> torch.device:
    """Where the optimizer's kernels run: a few know one kind of device."""
    device = params[0].device if params else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device


Maker = Callable[[nn.Parameter], Optimizer]


def _makers(kind: type[Optimizer], group: dict[str, Any]) -> Iterator[Maker]:
    """Ways to make a copy: with all options of the group, with those of the constructor alone, with
    the constructor's own defaults."""
    options = {k: v for k, v in group.items() if k not in {"params", *_WRITTEN_BY_SCHEDULERS}}
    options |= {k: v for k, v in _PLAIN.items() if k in options}
    options |= {k: v for k, v in (("lr", 1e-2), ("weight_decay", 0.0)) if k in options}
    takes = inspect.signature(kind).parameters
    known = {k: v for k, v in options.items() if k in takes}
    rest = {k: v for k, v in options.items() if k not in takes}
    build: Any = kind
    yield lambda p: build([{"params": [p], **rest}], **known)
    yield lambda p: build([p], **known)
    yield lambda p: build([p])


def _ratio(make: Maker, shape: tuple[int, ...], device: torch.device) -> float | None:
    """How much farther a copy moves when the gradient is LARGER times as large; None if it cannot
    be stepped."""
    try:
        with _untouched():
            once = _moved(make, shape, device, 1.0)
            larger = _moved(make, shape, device, LARGER)
    # The class is anybody's: whatever it raises says that a copy cannot be stepped.
    except Exception as error:
        _log.debug("a copy of the optimizer cannot be stepped: %s", error)
        return None
    ratio = larger / once if once > 0 else math.nan
    return ratio if math.isfinite(ratio) else None


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """Keeps the random generators, and compiles nothing for a tensor of a dozen elements."""
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        yield


def _moved(make: Maker, shape: tuple[int, ...], device: torch.device, scale: float) -> float:
    """How far the last of a few steps with one gradient moves a parameter."""
    numel = math.prod(shape)
    values = torch.linspace(0.3, 0.7, numel, device=device).reshape(shape)
    # Of full rank, and no element is zero.
    grad = 1e-2 * torch.cos(torch.arange(1, numel + 1, device=device) ** 1.5).reshape(shape)
    param = nn.Parameter(values.clone())
    copy = make(param)
    if callable(enter := getattr(copy, "train", None)):
        enter()  # Schedule-free optimizers step in train mode only.
    for _ in range(_STEPS):
        values = param.detach().clone()
        param.grad = scale * grad
        _step(copy)
    return float((param.detach() - values).norm())


def _step(copy: Optimizer) -> None:
    """A step without the hooks that a user has registered for all optimizers."""
    step: Any = type(copy).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        step(copy, lambda: torch.zeros(()))
    else:
        step(copy)
