"""Factors: the scalars that are explored, and how a value is written to each.

A factor has a space in which its values are compared, and bounds. With the shared base b and this
replica's multiplier rho, the offset of the replica is ln rho, and

    value = space^-1(space(b) + ln rho), clipped to the bounds

    log      b rho                          learning rates, weight decays, temperatures
    linear   b + unit ln rho                whatever may be zero or negative
    logit    b rho / (1 - b + b rho)        rates between 0 and 1: the odds are multiplied by rho

rho = 1 gives b itself, bit for bit, in every space.

Compiled models: torch.compile takes a Python float that a module holds for a constant, and
compiles again when it changes. A 0-dim tensor is an input instead. So a tensor is filled in place
and never replaced, and `as_tensor=True` turns a float into one, once, before the model is compiled.
A dropout rate cannot be a tensor in torch's own modules: `tensor_dropout(model)` replaces them.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet_scale.optim.rates import check_multiplier as check_multiplier
from hdet_scale.optim.rates import effective_lr, write_lr
from hdet_scale.optim.rates import put as _put

SPACES = ("log", "linear", "logit")
Bounds = tuple[float, float]


class Factor(Protocol):
    """A scalar with a name that is the same on every rank."""

    @property
    def name(self) -> str:
        """Names the assignment's stream and the keys of the log."""
        ...

    def at(self, base: float, multiplier: float) -> float:
        """The value of a replica with this multiplier: the equation at the top of the file."""
        ...

    def offset(self, base: float, multiplier: float) -> float:
        """How far that value is from the base in the factor's space: ln multiplier, or less
        where a bound clipped it."""
        ...

    def write(self, base: float, multiplier: float) -> None:
        """Make `at(base, multiplier)` what the next step uses on this replica."""
        ...

    def read(self) -> float | Tensor:
        """What the next step uses on this replica."""
        ...

    def scheduled(self) -> float:
        """The base that stands there while nothing is explored."""
        ...


class Space:
    """One of the spaces with its bounds: the arithmetic of a factor, without what it writes to."""

    def __init__(self, kind: str, bounds: Bounds, unit: float = 1.0) -> None:
        if kind not in SPACES:
            raise ValueError(f"space must be one of {list(SPACES)}, got {kind!r}")
        low, high = (float(x) for x in bounds)
        if not low < high:
            raise ValueError(
                f"bounds must be (low, high) with low below high, got {tuple(bounds)}: swap them, "
                "or widen them"
            )
        if kind == "log" and low < 0:
            raise ValueError(f"bounds {tuple(bounds)} in log space: low must be 0 or more")
        if kind == "logit" and not (low >= 0 and high <= 1):
            raise ValueError(f"bounds {tuple(bounds)} in logit space: they must lie in [0, 1]")
        if not (math.isfinite(unit) and unit > 0):
            raise ValueError(f"unit must be above 0, got {unit}: it is what an offset of 1 adds")
        self.kind, self.low, self.high, self.unit = kind, low, high, float(unit)

    def check(self, base: float, name: str) -> float:
        """The base, or an error where the space cannot move it."""
        stuck = (self.kind == "log" and base <= 0) or (self.kind == "logit" and not 0 < base < 1)
        if stuck or not math.isfinite(base):
            raise ValueError(
                f"{name} is {base}, which a multiplier in {self.kind} space can never move: start "
                "with a small value inside the bounds, or pass space='linear' and a unit"
            )
        if not self.low <= base <= self.high:
            raise ValueError(
                f"{name} is {base}, outside its bounds [{self.low}, {self.high}]: start inside "
                "them, or pass wider bounds"
            )
        return base

    def at(self, base: float, multiplier: float) -> float:
        """The value of a replica."""
        if multiplier == 1.0:
            return base
        return min(max(self._free(base, multiplier), self.low), self.high)

    def offset(self, base: float, multiplier: float) -> float:
        """ln multiplier, or what the bounds left of it."""
        if multiplier <= 0:
            return -math.inf
        free, value = self._free(base, multiplier), self.at(base, multiplier)
        if value == free:
            return math.log(multiplier)
        return self._place(value) - self._place(base)

    def _free(self, base: float, multiplier: float) -> float:
        if self.kind == "log":
            return base * multiplier
        if self.kind == "linear":
            return base + self.unit * math.log(multiplier)
        return base * multiplier / (1.0 - base + base * multiplier)

    def _place(self, value: float) -> float:
        if self.kind == "linear":
            return value / self.unit
        if value <= 0 or (self.kind == "logit" and value >= 1):
            return -math.inf if value <= 0 else math.inf
        return math.log(value) if self.kind == "log" else math.log(value / (1.0 - value))


class LearningRate:
    """The learning rate of one param group: log space, no bounds but zero."""

    space = Space("log", (0.0, math.inf))
    in_step = True

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        if not 0 <= index < len(optimizer.param_groups):
            raise ValueError(
                f"the optimizer has {len(optimizer.param_groups)} param groups, got index {index}"
            )
        self.optimizer = optimizer
        self.index = index

    @property
    def name(self) -> str:
        return f"lr/group{self.index}"

    @property
    def group(self) -> dict[str, Any]:
        """Looked up each time: loading an optimizer's state replaces its groups."""
        return self.optimizer.param_groups[self.index]

    def at(self, base: float, multiplier: float) -> float:
        return base * multiplier

    def offset(self, base: float, multiplier: float) -> float:
        return self.space.offset(base, multiplier)

    def write(self, base: float, multiplier: float) -> None:
        write_lr(self.group, base, multiplier)

    def read(self) -> float | Tensor:
        """A tensor learning rate is answered with a copy, as torch does: nobody waits for it."""
        rate = effective_lr(self.group)
        return rate.clone() if isinstance(rate, Tensor) else float(rate)

    def scheduled(self) -> float:
        return float(self.group["lr"])


class Pair:
    """Any scalar that can be read with `get()` and written with `set(value)`.

    The other factors of this file are pairs whose get and set are known. `scheduled` answers with
    the base of the last write, so that nothing waits for a device.

    in_step: whether it acts in the optimizer's step. What acts in forward or backward makes no
    difference between replicas that all step with the mean gradient: it needs local gradients.
    """

    in_step = False

    def __init__(
        self,
        name: str,
        get: Callable[[], float | Tensor],
        set: Callable[[float], None],
        *,
        space: str = "log",
        bounds: Bounds | None = None,
        unit: float = 1.0,
    ) -> None:
        if bounds is None:
            bounds = {
                "log": (0.0, math.inf),
                "linear": (-math.inf, math.inf),
                "logit": (0.0, 1.0),
            }.get(space, (0.0, 1.0))
        self.name = name
        self.space = Space(space, bounds, unit)
        self._get, self._set = get, set
        self._base = self.space.check(_scalar(get(), name), name)

    def at(self, base: float, multiplier: float) -> float:
        return self.space.at(base, multiplier)

    def offset(self, base: float, multiplier: float) -> float:
        return self.space.offset(base, multiplier)

    def write(self, base: float, multiplier: float) -> None:
        self._base = base
        self._set(self.at(base, multiplier))

    def read(self) -> float | Tensor:
        value = self._get()
        return value.clone() if isinstance(value, Tensor) else float(value)

    def scheduled(self) -> float:
        return self._base


class GroupOption(Pair):
    """A number of one param group: weight decay, momentum, eps; `position` for one of a tuple.

    moves_moments: replicas with their own value keep their own moments, which a converge must
    average then.
    """

    in_step = True

    def __init__(
        self,
        optimizer: Optimizer,
        option: str,
        index: int = 0,
        *,
        position: int | None = None,
        space: str = "log",
        bounds: Bounds | None = None,
    ) -> None:
        groups = optimizer.param_groups
        if not 0 <= index < len(groups):
            raise ValueError(f"the optimizer has {len(groups)} param groups, got index {index}")
        if option not in groups[index]:
            have = sorted(k for k in groups[index] if k != "params")
            raise ValueError(
                f"{type(optimizer).__name__} has no option {option!r}: choose one of {have}"
            )
        self.optimizer, self.option, self.index, self.position = optimizer, option, index, position
        self.moves_moments = option not in ("weight_decay", "eps")
        which = option if position is None else f"{option}[{position}]"
        super().__init__(
            f"{which}/group{index}", self._fetch, self._store, space=space, bounds=bounds
        )

    def _fetch(self) -> float | Tensor:
        value = self.optimizer.param_groups[self.index][self.option]
        if self.position is None:
            return _number(value, self.option)
        if not isinstance(value, list | tuple) or not 0 <= self.position < len(value):
            raise ValueError(f"{self.option}={value!r} has no position {self.position}")
        return _number(value[self.position], self.option)

    def _store(self, value: float) -> None:
        group = self.optimizer.param_groups[self.index]
        if self.position is None:
            _put(group, self.option, value)
            return
        held = group[self.option]
        if isinstance(held[self.position], Tensor):
            held[self.position].fill_(value)
        else:
            group[self.option] = type(held)(
                value if i == self.position else x for i, x in enumerate(held)
            )


def weight_decay(
    optimizer: Optimizer, index: int = 0, *, bounds: Bounds = (1e-8, 10.0)
) -> GroupOption:
    """The weight decay of one param group, in log space."""
    return GroupOption(optimizer, "weight_decay", index, bounds=bounds)


def beta(
    optimizer: Optimizer, position: int, index: int = 0, *, bounds: Bounds = (0.01, 0.99999)
) -> GroupOption:
    """betas[position] of one param group, in logit space: near 1 that multiplies 1 - beta."""
    return GroupOption(optimizer, "betas", index, position=position, space="logit", bounds=bounds)


class Attribute(Pair):
    """One attribute of one or more objects: `attention.scale`, `loss.label_smoothing`.

    All of the objects hold the same value. `path` may have dots: "encoder.0.attention.scale".
    as_tensor: hold it as a 0-dim float tensor from now on (a buffer that is not saved, where the
    object is a module), so that a compiled model reads it anew in every step.
    """

    def __init__(
        self,
        owners: object | Sequence[object],
        path: str,
        *,
        name: str | None = None,
        space: str = "log",
        bounds: Bounds | None = None,
        unit: float = 1.0,
        as_tensor: bool = False,
    ) -> None:
        listed = list(owners) if isinstance(owners, list | tuple) else [owners]
        if not listed:
            raise ValueError(f"no object to write {path!r} to: got an empty list of owners")
        *way, self.attribute = path.split(".")
        self.owners = [_follow(owner, way, path) for owner in listed]
        for owner in self.owners:
            _check_attribute(owner, self.attribute)
            if as_tensor:
                hold_as_tensor(owner, self.attribute)
        super().__init__(
            name or path, self._fetch, self._store, space=space, bounds=bounds, unit=unit
        )
        found = [float(getattr(owner, self.attribute)) for owner in self.owners]
        if len(set(found)) > 1:
            raise ValueError(
                f"{self.name} is {found} in its {len(found)} places, and a factor is one number: "
                "give them the same value, or make a factor for each"
            )

    def _fetch(self) -> float | Tensor:
        value: float | Tensor = getattr(self.owners[0], self.attribute)
        return value

    def _store(self, value: float) -> None:
        for owner in self.owners:
            held = getattr(owner, self.attribute)
            if isinstance(held, Tensor):
                with torch.no_grad():
                    held.fill_(value)
            else:
                setattr(owner, self.attribute, value)


def module_attribute(
    model: nn.Module,
    pattern: str,
    attribute: str,
    *,
    space: str = "log",
    bounds: Bounds | None = None,
    as_tensor: bool = False,
) -> Attribute:
    """The attribute of every module whose name matches a pattern: "*.attention", "scale"."""
    found = [m for n, m in model.named_modules() if fnmatch.fnmatchcase(n, pattern)]
    having = [m for m in found if hasattr(m, attribute)]
    if not having:
        names = [n for n, m in model.named_modules() if hasattr(m, attribute)]
        raise ValueError(
            f"{len(found)} modules match {pattern!r} and none has {attribute!r}; modules that have "
            f"it: {names or 'none'}. Patterns are those of a shell: '*.attention'"
        )
    return Attribute(
        having,
        attribute,
        name=f"{attribute}/{pattern}",
        space=space,
        bounds=bounds,
        as_tensor=as_tensor,
    )


def dropout(model: nn.Module, pattern: str = "*", *, bounds: Bounds = (1e-3, 0.9)) -> Attribute:
    """The rate of every dropout module, or of those whose name matches; in logit space.

    In eager mode `module.p` is read at each call. For a compiled model call `tensor_dropout`
    first. A dropout given to a function by its caller (F.dropout, scaled_dot_product_attention)
    is an attribute of the caller: use `module_attribute`.
    """
    found = [m for n, m in _dropouts(model) if fnmatch.fnmatchcase(n, pattern)]
    if not found:
        names = [n for n, _ in _dropouts(model)]
        raise ValueError(
            f"no dropout module matches {pattern!r}; the model has {names or 'none'}: give another "
            "pattern, or module_attribute for a rate that a module passes on itself"
        )
    return Attribute(found, "p", name=f"dropout/{pattern}", space="logit", bounds=bounds)


def label_smoothing(
    loss: nn.Module, *, bounds: Bounds = (1e-4, 0.9), as_tensor: bool = False
) -> Attribute:
    """The label smoothing of a loss, in logit space.

    A probe must then use another loss, without smoothing: replicas would else be compared by what
    they are measured with.

    torch's own CrossEntropyLoss passes it to a function that wants a float: as_tensor is for
    losses that compute with it themselves.
    """
    return Attribute(loss, "label_smoothing", space="logit", bounds=bounds, as_tensor=as_tensor)


class TensorDropout(nn.Module):
    """Dropout whose rate is a 0-dim buffer, so that a compiled model reads it in every step.

    Keeps an element (or, as Dropout1d to 3d do, a channel) with probability 1 - p and divides by
    it. Draws other random numbers than torch's own for the same seed.
    """

    p: Tensor

    def __init__(self, p: float, *, channels: bool = False) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("p", torch.tensor(float(p)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.channels else x.shape
        kept = torch.rand(shape, device=x.device, dtype=torch.float32) >= self.p
        return x * (kept / (1.0 - self.p)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"channels={self.channels}"


def tensor_dropout(model: nn.Module) -> int:
    """Replace every Dropout and Dropout1d to 3d by a TensorDropout of the same rate; how many.

    Before the model is compiled, and only when asked: the model's random numbers change.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
                raise TypeError(
                    f"{type(child).__name__} keeps its own statistics: a tensor rate is offered "
                    "for Dropout and Dropout1d to 3d; leave the model in eager mode, or replace it"
                )
            if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
                fresh = TensorDropout(child.p, channels=not isinstance(child, nn.Dropout))
                setattr(parent, name, fresh.train(child.training))
                count += 1
    return count


def hold_as_tensor(owner: object, attribute: str) -> Tensor:
    """Turn a float attribute into a 0-dim float tensor with the same value, and answer with it."""
    value = getattr(owner, attribute)
    if isinstance(value, Tensor):
        return value
    tensor = torch.tensor(float(value))
    if isinstance(owner, nn.Module):
        near = next((p for p in owner.parameters()), None)
        tensor = tensor if near is None else tensor.to(near.device)
        delattr(owner, attribute)
        owner.register_buffer(attribute, tensor, persistent=False)
    else:
        setattr(owner, attribute, tensor)
    return tensor


def learning_rates(optimizer: Optimizer) -> list[LearningRate]:
    """One factor for each param group."""
    return [LearningRate(optimizer, i) for i in range(len(optimizer.param_groups))]


def check_factors(factors: Sequence[Factor], gradients: str = "local") -> list[Factor]:
    """The factors as a list, or an error: each has the protocol, names differ, and each can make
    a difference between replicas with these gradients."""
    needed = ("name", "at", "offset", "write", "read", "scheduled")
    for factor in factors:
        missing = [n for n in needed if not hasattr(factor, n)]
        if missing:
            raise TypeError(
                f"{factor!r} is no factor, it lacks {missing}: use hdet_scale.factors, for any "
                "other scalar Pair(name, get, set)"
            )
    names = [f.name for f in factors]
    if len(set(names)) != len(names):
        raise ValueError(f"factors need different names, got {names}: pass name= to tell them")
    idle = [f.name for f in factors if not getattr(f, "in_step", True)]
    if gradients == "shared" and idle:
        raise ValueError(
            f"{idle} act in forward or backward, and with shared gradients every replica steps "
            "with the same mean gradient, so that they show no effect: use gradients='local'"
        )
    return list(factors)


def _dropouts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    kinds = (nn.modules.dropout._DropoutNd, TensorDropout)
    return ((n, m) for n, m in model.named_modules() if isinstance(m, kinds))


def _follow(owner: Any, way: Sequence[str], path: str) -> object:
    """Along a dotted path; a number is an index, as in the name of a module."""
    for step in way:
        if hasattr(owner, step):
            owner = getattr(owner, step)
        elif step.isdigit() and isinstance(owner, list | tuple) and int(step) < len(owner):
            owner = owner[int(step)]
        else:
            raise ValueError(
                f"{path!r}: {type(owner).__name__} has no {step!r}; check the path from the "
                "object that was given"
            )
    found: object = owner
    return found


def _check_attribute(owner: object, attribute: str) -> None:
    if not hasattr(owner, attribute):
        raise ValueError(
            f"{type(owner).__name__} has no attribute {attribute!r}: give the name of a number "
            "that it holds"
        )
    value = getattr(owner, attribute)
    if isinstance(value, nn.Parameter):
        raise TypeError(
            f"{attribute!r} of {type(owner).__name__} is a parameter, which training moves: a "
            "factor is a number that training leaves alone"
        )
    _scalar(value, attribute)


def _scalar(value: object, name: str) -> float:
    return float(_number(value, name))


def _number(value: object, name: str) -> float | Tensor:
    one = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not (one or plain):
        raise TypeError(f"{name} holds {value!r}: a factor is one number, or a tensor of one")
    return value  # type: ignore[return-value]
