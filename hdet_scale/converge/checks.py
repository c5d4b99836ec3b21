"""Checks of what a config is given: each error names the value received and what is valid.

They lie here since ConvergePolicy is the lowest config; HDETConfig uses them too.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def read(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Make a config from a mapping.

    Args:
        kind: the dataclass to make.
        values: its fields by name.
        where: the name of the block in errors.

    Raises:
        TypeError: `values` is not a mapping.
        ValueError: a key is unknown; the error names the nearest valid one.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{where} must be a mapping of options, got {values!r}")
    valid = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in valid:
            raise ValueError(f"unknown key {key!r} in {where}{near_keys(kind, key)}")
    return kind(**values)


def near_keys(kind: type, key: object) -> str:
    """The rest of an error about a key that is not a field: the nearest, and all of them."""
    valid = sorted(f.name for f in dataclasses.fields(kind))
    near = difflib.get_close_matches(str(key), valid, n=1)
    return (f"; did you mean {near[0]!r}?" if near else ".") + f" Valid keys: {valid}"


def read_nested(config: object, name: str, kind: type) -> None:
    """Replace the field `name` of a frozen config by a `kind` where it was given as a mapping, as
    JSON has it."""
    value = getattr(config, name)
    if isinstance(value, Mapping):
        object.__setattr__(config, name, read(kind, value, name))


def check_type(name: str, value: object, kind: type) -> None:
    """Refuse what is not a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")


def check_int(name: str, value: object, *, at_least: int, other: str = "") -> None:
    """Refuse what is not an int of at least `at_least`; `other` names what is valid beside it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int {other}".rstrip() + f", got {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least} {other}".rstrip() + f", got {value}")


def check_choice(name: str, value: object, valid: Iterable[str]) -> None:
    """Refuse what is not one of `valid`."""
    names = list(valid)
    if value not in names:
        raise ValueError(f"{name} must be one of {names}, got {value!r}")
