"""Checks of arguments: names, times, counts, choices.

Each function returns the value, or raises a ValueError with the value and what is allowed.
"""

import inspect
import math
import numbers
import re
from collections.abc import Callable
from typing import Any, TypeVar

from ..bus.messages import NAME_PATTERN

T = TypeVar("T")

SECONDS_MAX = 1_000_000  # eleven days, within the range of timers
_NAME = re.compile(NAME_PATTERN)


def check_name(name: str, what: str) -> str:
    """Return the name of a model or worker.

    Args:
        name: The name.
        what: What the name is for, for the error text, such as `model`.

    Raises:
        ValueError: The name is invalid.
    """
    if not isinstance(name, str) or _NAME.match(name) is None:  # pyright: ignore
        raise ValueError(
            f"{what} {name!r}: a name is 1 to 128 of the characters A-Z a-z 0-9 . _ - so that it "
            "fits topics, files and addresses in every language"
        )
    return name


def seconds(
    value: object, name: str, *, positive: bool = False, most: float = SECONDS_MAX
) -> float:
    """Return `value` as seconds to wait; 0 if it is negative, as for a deadline that has passed.

    Args:
        value: The value.
        name: The argument's name, for the error text.
        positive: Whether the value must be above 0.
        most: The largest allowed value.

    Raises:
        ValueError: The value is not a number of seconds within bounds.
    """
    given = math.nan if isinstance(value, bool) else value  # a bool is an int in Python
    number = float(given) if isinstance(given, numbers.Real) else math.nan
    if not -math.inf < number <= most or (positive and number <= 0):
        least = "above 0" if positive else "from 0"
        raise ValueError(f"{name}={value!r}: choose a number of seconds {least} to {most:g}")
    return max(0.0, number)


def whole(value: object, name: str, least: int, most: int) -> int:
    """Return `value`, which must be a whole number from `least` to `most`."""
    given = math.nan if isinstance(value, bool) else value
    number = int(given) if isinstance(given, numbers.Integral) else least - 1
    if not least <= number <= most:
        raise ValueError(f"{name}={value!r}: choose a whole number from {least} to {most}")
    return number


def choice(value: T, name: str, allowed: tuple[T, ...]) -> T:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: choose {' or '.join(map(repr, allowed))}")
    return value


def instance(value: object, name: str, kind: type[T]) -> T | None:
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name}={value!r}: give a {kind.__name__}, or leave it out")
    return value


def hook(value: object, name: str) -> Callable[..., Any] | None:
    """Return `value`, which must be None or a callable.

    Raises:
        TypeError: The value is a coroutine function, whose result would never be awaited.
        ValueError: The value is not callable.
    """
    if value is not None and not callable(value):
        raise ValueError(f"{name}={value!r}: give a function, or leave it out")
    called = getattr(value, "__call__", None)  # noqa: B004 - of an object, its method
    if any(map(inspect.iscoroutinefunction, (value, called))):
        raise TypeError(
            f"{name}={value!r} is a coroutine function, and it is called in a thread that has no "
            "event loop: give a plain function, which can hand work to your loop with "
            "asyncio.run_coroutine_threadsafe()"
        )
    return value
