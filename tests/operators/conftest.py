"""The publisher that operators look at, in a browser and by Prometheus."""

from collections.abc import Iterator

import pytest

from weightbus import Publisher
from weightbus.tests.operators.served import served


@pytest.fixture(name="publisher")
def _publisher() -> Iterator[Publisher]:
    with served() as publisher:
        yield publisher
