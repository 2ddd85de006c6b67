"""The server that the tests of a file share."""

from collections.abc import Iterator

import pytest

from weightbus.tests.serving.real.served import Served, saved, trained


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A `vllm serve` of the small model of seed 1."""
    folder = tmp_path_factory.mktemp("served")
    made = Served(saved(folder / "model", trained(1)), folder / "log")
    try:
        made.start()
        yield made
    finally:
        made.close()
