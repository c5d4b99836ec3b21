"""Workers with DeepSpeed, for all files of this folder: it stays out of the other tests'
processes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet
from tests.support.zero_runs import warm_up

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("deepspeed") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            if missing:
                item.add_marker(pytest.mark.skip(reason="DeepSpeed is not installed"))


@pytest.fixture(scope="package")
def compiled() -> Iterator[None]:
    """DeepSpeed compiles ops when they are first used: with this environment's ninja, and into
    the checkout, so that two environments never build over each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        patch.setenv("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / "torch_extensions"))
        yield


@pytest.fixture(scope="package")
def four(compiled: None) -> Iterator[Fleet]:
    """Four workers."""
    fleet = Fleet(4)
    fleet.run(warm_up, seconds=800)
    yield fleet
    fleet.stop()


@pytest.fixture(scope="module")
def two(compiled: None) -> Iterator[Fleet]:
    """Two workers."""
    fleet = Fleet(2)
    fleet.run(warm_up, seconds=800)
    yield fleet
    fleet.stop()
