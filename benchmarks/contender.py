"""What is compared: a `Contender` moves a model to workers in processes of their own.

Each file in `contenders/` is one contender and holds both of its sides:

    NEEDS     packages without which it is left out (they need not be weightbus's own)
    PROGRAMS  programs without which it is left out, if it needs any
    LIMIT     the contender that it is held against: the cost of its transport alone
    create()  returns the publisher's side
    work()    is the worker's side: applies versions to `model` for ever, says "ready" once
              (unless the system starts workers of its own)

It imports what it needs where it needs it, so that this list can be read without it.

Another system is added by adding a file there.
"""

import importlib
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, cast

from .fleet import Worker
from .model import Model

FOLDER = Path(__file__).with_name("contenders")
LIMITS = ("raw_tcp", "fill_copy")  # what others are held against: one for each transport

Kind = Literal["limit", "weightbus", "peer"]
KINDS: tuple[Kind, ...] = ("limit", "weightbus", "peer")
RIVALS = {"raw_tcp": "weightbus_receive", "fill_copy": "weightbus_shared"}  # over each transport
RESIDENT = {"raw_tcp": "weightbus_resident"}  # the same with resident workers, counted apart


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


def missing(name: str) -> list[str]:
    """Return the packages and programs that a contender lacks here."""
    module = load(name)
    programs: tuple[str, ...] = getattr(module, "PROGRAMS", ())
    return [
        *(f"package {need}" for need in module.NEEDS if importlib.util.find_spec(need) is None),
        *(f"program {need}" for need in programs if shutil.which(need) is None),
    ]


def all_names() -> list[str]:
    """Return all contenders, by transport: its limit, weightbus, the peers."""
    found = sorted(path.stem for path in FOLDER.glob("*.py"))
    found.sort(key=lambda n: (KINDS.index(kind(n)), LIMITS.index(load(n).LIMIT), n not in LIMITS))
    return found


def kind(name: str) -> Kind:
    """Return what a contender is."""
    return load(name).create().kind


def names(*kinds: Kind) -> list[str]:
    """Return the contenders of these kinds (all, if none is named) that can run here."""
    return [n for n in all_names() if not missing(n) and (not kinds or kind(n) in kinds)]
