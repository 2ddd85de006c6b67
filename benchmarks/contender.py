"""What is compared: a `Contender` moves a model to workers in processes of their own.

Each file in `contenders/` is one contender and holds both of its sides:

    NEEDS     packages without which it is left out (they need not be weightbus's own)
    LIMIT     the contender that it is held against: nobody can do better on the same road
    create()  returns the publisher's side
    work()    is the worker's side: applies versions to `model` for ever, says "ready" once

Another system is added by adding a file there.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, cast

from .fleet import Worker
from .model import Model

FOLDER = Path(__file__).with_name("contenders")
LIMITS = ("raw_tcp", "shared_memory")  # what others are held against: one for each road

Kind = Literal["limit", "weightbus", "peer"]


class Contender(Protocol):
    """A system that moves weights, seen from the publisher."""

    title: str
    kind: Kind

    def start(self, workers: int, model: Model) -> None:
        """Start so many worker processes and wait until all could be published to."""
        ...

    def publish_once(self) -> float:
        """Publish the model; return the seconds until every worker had applied it and said so.

        What a user of the system would not have to do for each version is not timed.
        """
        ...

    def check(self) -> None:
        """Compare every worker's bytes with the model's; raise `WrongBytes` if they differ."""
        ...

    def stop(self) -> None:
        """End the worker processes."""
        ...


class Module(Protocol):
    """A file in `contenders/`."""

    NEEDS: tuple[str, ...]
    LIMIT: str
    create: Callable[[], Contender]
    work: Callable[[Worker], None]


def load(name: str) -> Module:
    """Return a contender's module."""
    return cast("Module", importlib.import_module(f"weightbus.benchmarks.contenders.{name}"))


def names() -> list[str]:
    """Return the contenders that can run here, road by road, the limit of each road first."""
    found = sorted(path.stem for path in FOLDER.glob("*.py"))
    there = [n for n in found if all(importlib.util.find_spec(need) for need in load(n).NEEDS)]
    there.sort(key=lambda name: (LIMITS.index(load(name).LIMIT), name not in LIMITS))
    return there
