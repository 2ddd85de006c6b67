"""Judges how a worker played a sequence of the golden vectors."""

from typing import Any

Case = dict[str, Any]


def fault_of_sequence(case: Case, answer: Case) -> str:
    """Return what is wrong with what a worker did."""
    raise NotImplementedError
