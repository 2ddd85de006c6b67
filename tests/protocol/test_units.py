"""Units that fit, and the same on terminals and on the page."""

import pytest

from weightbus.bus.units import span
from weightbus.tests.observing.test_page import in_the_page


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1.0, "0 s"), (0.0, "0 s"), (1e-9, "0 s"), (4e-5, "40 µs"), (0.0004, "0.4 ms"),
        (0.00096, "1.0 ms"), (0.0123, "12 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"),
        (1.25, "1.3 s"), (9.96, "10 s"), (45.0, "45 s"), (119.4, "119 s"), (119.6, "2 min"),
        (7100.0, "118 min"), (7200.0, "2 h"), (2 * 86400.0, "2 d"), (1e9, "11574 d"),
    ],
)  # fmt: skip
def test_a_time_is_said_in_the_unit_that_fits(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_the_page_says_times_as_terminals_do() -> None:
    times = [10**exponent * factor for exponent in range(-7, 8) for factor in (1, 1.5, 2.5, 9.949)]
    assert in_the_page("given.map(span)", times) == [span(each) for each in times]
