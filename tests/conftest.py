"""Fixtures that several files need: the fleets, and a hypothesis profile that CI can repeat."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from hdet_scale.kernels.choice import on_kernels
from tests.support.fleet import Fleet

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("repeatable")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts worker processes as slow, by its fixtures. What is slow for another reason
    says so itself."""
    starting = {"fleets", "four", "device_pair", "browser"}
    for item in items:
        if starting & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def fleets() -> Iterator[Callable[[int], Fleet]]:
    """The fleet of a size; started by the first case it is given, kept to the end of the file:
    gloo polls for every group that was ever made, idle or not."""
    made: dict[int, Fleet] = {}

    def of(size: int) -> Fleet:
        return made.setdefault(size, Fleet(size))

    yield of
    for fleet in made.values():
        fleet.stop()


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda n: f"{n}ranks")
def fleet(request: pytest.FixtureRequest, fleets: Callable[[int], Fleet]) -> Fleet:
    """Each size in turn."""
    return fleets(request.param)


@pytest.fixture
def pair(fleets: Callable[[int], Fleet]) -> Fleet:
    """Two workers."""
    return fleets(2)


@pytest.fixture
def trio(fleets: Callable[[int], Fleet]) -> Fleet:
    """Three workers."""
    return fleets(3)


@pytest.fixture
def quartet(fleets: Callable[[int], Fleet]) -> Fleet:
    """Four workers."""
    return fleets(4)


def uses_kernels(rank: int, size: int) -> bool:
    """Whether a worker runs the kernels."""
    return on_kernels(torch.zeros(1))


@pytest.fixture(scope="module")
def device_pair() -> Iterator[Fleet]:
    """Two workers in whose processes Triton's interpreter runs the kernels."""
    fleet = Fleet(2)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        assert fleet.run(uses_kernels) == [True, True]
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
    yield fleet
    fleet.stop()
