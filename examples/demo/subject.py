"""The subjects of the demo: what is learned, and which programs learn and play. Here: CartPole."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .episode import from_line
from .policy import RETURN_MAX
from .tally import Played, Tally


class Learner(Protocol):
    """Improves a policy in the trainer."""

    @property
    def policy(self) -> Any:
        """The policy, which is published."""

    def improve(self, played: Sequence[Any], progress: float, /) -> None:
        """Update the policy from episodes; `progress` is the part of the run that is over."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject of the demo.

    Attributes:
        title: Its name, for people.
        plural: What workers play; each is one line of a worker's output.
        highest: The best possible return.
        update_steps: How many new steps must arrive before the next update.
        window_steps: How many of the newest steps an update learns from, at most.
        needs: The packages that it needs.
        learner: Returns a learner, given a seed.
        read: Parses a line of a worker.
        program: Returns a worker's command, given the worker's name; the command's arguments are an
            address, `--name` and `--seed`.
        tally: Returns a tally, given the workers' names.
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
    from .learner import Learner as CartPole  # takes seconds, while the workers start

    return CartPole(seed)


def _program(name: str) -> list[str]:
    del name  # all workers run the same program
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
