"""The contenders of a comparison: a `Contender` moves a model to workers in separate processes.

Each file in `contenders/` is one contender and has both of its sides:

    NEEDS     packages without which it is left out
    PROGRAMS  programs without which it is left out, if it needs any
    LIMIT     the contender that it is compared with: the cost of its transport alone
    create()  returns the publisher's side
    work()    runs the worker's side: reports that it is ready, then applies versions to `model`
              (missing if the system starts its own workers)

A file imports its packages inside functions, so that the list of contenders can be read without
them.

To add another system, add a file there.
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
LIMITS = ("raw_tcp", "fill_copy")  # what other contenders are compared with: one for each transport

Kind = Literal["limit", "weightbus", "peer"]
KINDS: tuple[Kind, ...] = ("limit", "weightbus", "peer")
RIVALS = {"raw_tcp": "weightbus_receive", "fill_copy": "weightbus_shared"}  # over each transport
RESIDENT = {"raw_tcp": "weightbus_resident"}  # weightbus with resident workers, counted separately


class Contender(Protocol):
    """The publisher's side of a system that moves weights."""

    title: str
    kind: Kind

    def start(self, workers: int, model: Model) -> None:
        """Start worker processes, and wait until all are ready for versions."""
        ...

    def publish_once(self) -> float:
        """Publish the model; return the seconds until every worker has reported that it applied it.

        Steps that a user of the system does not need for each version are not timed.
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
    """Return the description of a contender."""
    return load(name).create().kind


def names(*kinds: Kind) -> list[str]:
    """Return the contenders of these kinds (default: all kinds) that can run here."""
    return [n for n in all_names() if not missing(n) and (not kinds or kind(n) in kinds)]
