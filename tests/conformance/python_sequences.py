"""How the Python worker plays the sequences of the golden vectors."""

from collections.abc import Callable
from typing import Any

Case = dict[str, Any]


def play(case: Case, blob: Callable[[dict[str, str]], bytes]) -> list[Case]:
    """Return what the worker sent at each step, and what it runs then."""
    raise NotImplementedError
