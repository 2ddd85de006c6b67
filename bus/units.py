"""Formats durations for people. The dashboard's page has the same function in JavaScript."""


def span(seconds: float) -> str:
    """Return a duration as text: 40 µs, 0.4 ms, 12 ms, 1.2 s, 45 s, 3 min, 5 h, 2 d.

    Args:
        seconds: The duration; a negative value (two clocks may differ) counts as 0.
    """
    for limit, unit, length, digits in (
        (95e-6, "µs", 1e-6, 0),
        (9.95e-3, "ms", 1e-3, 1),
        (0.9995, "ms", 1e-3, 0),
        (9.95, "s", 1, 1),
        (119.5, "s", 1, 0),
        (119.5 * 60, "min", 60, 0),
        (47.5 * 3600, "h", 3600, 0),
    ):
        if seconds < limit:
            return _count(seconds, unit, length, digits)
    return _count(seconds, "d", 86400, 0)


def _count(seconds: float, unit: str, length: float, digits: int) -> str:
    """Return a text with a number of units, rounded half up, as JavaScript does."""
    scale = 10**digits
    count = int(max(0.0, seconds) / length * scale + 0.5) / scale
    return f"{count:.{digits}f} {unit}" if count else "0 s"
