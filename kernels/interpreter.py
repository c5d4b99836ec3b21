"""Run a function in a process in which Triton's interpreter runs the kernels.

Triton decides between compiler and interpreter when a kernel is defined, from the environment: one
process cannot do both. A checker decorated with `interpreted` runs in a child process whose
environment says TRITON_INTERPRET=1, so that the parent can still compile. It must be a function at
the top level of an importable module; arguments and result are pickled.
"""

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count
from typing import Any, Generic, ParamSpec, TypeVar

from hdet_scale.kernels.launch import interpreting

P = ParamSpec("P")
R = TypeVar("R")

_VARIABLE = "TRITON_INTERPRET"
_turn = count()


def _call(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


@functools.cache
def _child(at: int) -> ProcessPoolExecutor:
    """One of the children, which serve all functions: starting one costs seconds. They end with
    this process.

    The variable has to be there when a child starts, before anything there imports Triton: the
    child inherits it, and here it is put back.
    """
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        pool.submit(os.getpid).result()
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
    return pool


class interpreted(Generic[P, R]):  # noqa: N801 - used as a decorator
    """Make calls of a function run where kernels are interpreted; here, if this is such a place.

    `submit` returns a future, so that several calls can share the cores.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if interpreting():
            return self._function(*args, **kwargs)
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Start the call in the next child; there are as many as cores, and at most four."""
        at = next(_turn) % min(os.cpu_count() or 1, 4)
        function = self._function
        place = (function.__module__, function.__qualname__)
        return _child(at).submit(_call, *place, args, kwargs)
