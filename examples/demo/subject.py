"""What a demo is about: who learns, from what, and which program plays. CartPole is the first."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .episode import from_line
from .policy import RETURN_MAX
from .tally import Played, Tally


class Learner(Protocol):
    """What learns."""

    @property
    def policy(self) -> Any:
        """What is published."""

    def improve(self, played: Sequence[Any], progress: float, /) -> None:
        """Take one update from what was played; `progress` is the part of the run that is over."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a demo is about.

    Attributes:
        title: What learns, for people.
        plural: What workers play: of each a line.
        highest: The best return.
        update_steps: New steps for the next update.
        window_steps: The newest ones, which an update learns from; never more, however late it is.
        needs: Packages.
        learner: Makes what learns, of a seed.
        read: Makes of a worker's line what was played.
        program: The program of a worker, by its name; it takes an address, `--name`, `--seed`.
        tally: Makes what counts, of the workers' names.
    """

    title: str
    plural: str
    highest: float
    update_steps: int
    window_steps: int
    needs: tuple[str, ...]
    learner: Callable[[int], Learner]
    read: Callable[[bytes], Played]
    program: Callable[[str], list[str]]
    tally: Callable[[Sequence[str]], Tally] = Tally


def _learner(seed: int) -> Learner:
    from .learner import Learner as CartPole  # takes seconds, in which the workers start

    return CartPole(seed)


def _program(name: str) -> list[str]:
    del name  # all alike
    return [sys.executable, "-m", f"{__package__}.worker"]


CARTPOLE = Subject(
    title="CartPole",
    plural="episodes",
    highest=RETURN_MAX,
    update_steps=300,
    window_steps=1_500,
    needs=("gymnasium", "torch"),
    learner=_learner,
    read=from_line,
    program=_program,
)
