"""Every state of some small worlds is as it must be; `explore.py` tells what that means."""

import pytest

from weightbus.tests.exploring.explore import SMALL, Exploration


@pytest.mark.parametrize("name", SMALL)
def test_every_state(name: str) -> None:
    found = Exploration(SMALL[name]).run()
    assert not found.wrong
    assert found.states > 1000, "the world is hardly one"
