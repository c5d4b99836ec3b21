"""Attribute: a number that a module, a loss or any other object holds as a factor.

Dropout rates, attention temperatures, label smoothing. `TensorDropout` and `hold_as_tensor` are for
compiled models, see the docstring of the package.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdet_scale.factors.pair import Pair, one_number
from hdet_scale.factors.space import Bounds


class Attribute(Pair):
    """One attribute of one or more objects: `attention.scale`, `loss.label_smoothing`.

    Args:
        owners: the object, or a list of objects that all hold the same value.
        path: the attribute, or a dotted path to it: "encoder.0.attention.scale".
        name: of the factor. Default: the path.
        space: "log" (default), "linear" or "logit".
        bounds: (low, high). Default: those of the space, see `Pair`.
        unit: in linear space, what an offset of 1 adds. Default 1.0.
        as_tensor: hold the value as a 0-dim float tensor from now on, so that a compiled model
            reads it in every step. In a module it becomes a buffer that is not saved. Default
            False.

    Raises:
        ValueError: if the path leads nowhere, or the objects hold different values.
        TypeError: if the attribute is a parameter, or not a number.
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
    """The attribute of every module whose name matches a pattern: "*.attention", "scale".

    Args:
        model: whose modules are searched.
        pattern: of module names, as in a shell.
        attribute: of the modules that match; those without it are skipped.
        space: "log" (default), "linear" or "logit".
        bounds: (low, high). Default: those of the space, see `Pair`.
        as_tensor: as in `Attribute`. Default False.

    Raises:
        ValueError: if no module that matches has the attribute.
    """
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
    """The rate of every dropout module whose name matches, in logit space.

    In eager mode `module.p` is read at each call. For a compiled model call `tensor_dropout`
    first.

    Args:
        model: whose dropout modules are meant.
        pattern: of module names, as in a shell. Default "*": all.
        bounds: default (0.001, 0.9).

    Raises:
        ValueError: if no dropout module matches, or their rates differ.

    Limitations:
        A rate that a module passes to a function (F.dropout, scaled_dot_product_attention) is an
        attribute of that module: use `module_attribute`.
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

    Args:
        loss: a module with a `label_smoothing` above 0.
        bounds: default (0.0001, 0.9).
        as_tensor: as in `Attribute`. Default False.

    Limitations:
        The probe must use another loss, without smoothing. Otherwise replicas with different
        smoothing are compared by different losses.
        torch's own CrossEntropyLoss passes the value to a function that needs a float: as_tensor
        is for losses that compute with it themselves.
    """
    return Attribute(loss, "label_smoothing", space="logit", bounds=bounds, as_tensor=as_tensor)


class TensorDropout(nn.Module):
    """Dropout whose rate is a 0-dim buffer, so that a compiled model reads it in every step.

    Keeps an element with probability 1 - p and divides it by 1 - p.

    Args:
        p: the initial rate.
        channels: drop whole channels, as Dropout1d to 3d do. Default False.

    Limitations:
        For the same seed it draws other random numbers than torch's own dropout.
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
    """Replace every Dropout and Dropout1d to 3d by a TensorDropout of the same rate, in place.

    Call it before the model is compiled. The random numbers of the model's dropout change.

    Returns:
        How many modules were replaced.

    Raises:
        TypeError: if the model has an AlphaDropout or a FeatureAlphaDropout.
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
    """Turn a float attribute into a 0-dim float tensor with the same value.

    Args:
        owner: the object. In a module the tensor becomes a buffer that is not saved, on the device
            of the module's first parameter.
        attribute: its name.

    Returns:
        The tensor; the one that is there, if the attribute is a tensor already.
    """
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


def _dropouts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    kinds = (nn.modules.dropout._DropoutNd, TensorDropout)
    return ((n, m) for n, m in model.named_modules() if isinstance(m, kinds))


def _follow(owner: Any, way: Sequence[str], path: str) -> object:
    """The object at the end of a dotted path. A number is an index, as in a module's name."""
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
    one_number(value, attribute)
