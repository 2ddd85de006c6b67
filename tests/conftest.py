"""What all tests share: properties are judged by what they find, not by how fast a busy host is."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from weightbus import Publisher
    from weightbus.tests.client.test_bus import Bus

settings.register_profile("weightbus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weightbus")

os.environ.setdefault("RAY_worker_niceness", "0")  # else Ray's actors wait for all else


@pytest.fixture(name="bus", params=[False, True], ids=["network", "shared memory"])
def _bus(request: pytest.FixtureRequest) -> Iterator[Bus]:
    from weightbus.tests.client.test_bus import (
        Bus,
    )  # not at import: it needs torch, and most do not

    bus = Bus(shared_memory=request.param)
    yield bus
    bus.close()


@pytest.fixture(name="publisher")
def _publisher() -> Iterator[Publisher]:
    """One that soon takes a silent worker for lost."""
    from weightbus import Publisher, Settings

    with Publisher(settings=Settings(ping=0.1, lost_after=0.5)) as publisher:
        yield publisher


@pytest.fixture(name="uncollected")
def _uncollected() -> Iterator[None]:
    """No garbage collection: memory goes when its last user does, or it stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
