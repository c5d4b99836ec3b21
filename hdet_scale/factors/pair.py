"""Pair: any scalar with a getter and a setter as a factor."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from hdet_scale.factors.space import Bounds, Space


class Pair:
    """A scalar that is read with `get()` and written with `set(value)`.

    Every factor but the learning rate is a subclass whose get and set are known. `scheduled`
    returns the base of the last write, so that no device is read.

    Args:
        name: the same on every rank, and different from that of every other factor.
        get: returns the value, as a number or a tensor of one element.
        set: makes the next step use a value.
        space: "log" (default), "linear" or "logit".
        bounds: (low, high). Default: (0, inf) in log space, (-inf, inf) in linear, (0, 1) in logit.
        unit: in linear space, what an offset of 1 adds. Default 1.0.

    Raises:
        TypeError: if `get` returns anything but one number.
        ValueError: if the value is out of bounds, or no multiplier can move it in this space.
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
        self._base = self.space.check(float(one_number(get(), name)), name)

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


def one_number(value: object, name: str) -> float | Tensor:
    """Return the value, or raise TypeError unless it is a number or a float tensor of one element.

    Args:
        value: what was found where a factor is to read and write.
        name: what the error calls it.
    """
    one = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not (one or plain):
        raise TypeError(f"{name} holds {value!r}: a factor is one number, or a tensor of one")
    return value  # type: ignore[return-value]
