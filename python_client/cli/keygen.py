"""`weightbus keygen`: makes the keys of a publisher, and of its workers and observers."""

from collections.abc import Iterable
from pathlib import Path

from ...bus.trust.grants import Role
from ...bus.trust.keys import ALLOWED, PUBLISHER, WORKERS, generate
from .outcome import DONE, UsageError
from .screen import DIM, Screen


def keygen(
    screen: Screen, folder: Path, workers: Iterable[str] | None, observers: Iterable[str] | None
) -> int:
    """Make the publisher's key pair if there is none, and a key pair for each name.

    Return the exit code.
    """
    names: dict[str, Role] = dict.fromkeys(workers or (), "worker")
    for name in observers or ():
        if name in names:
            raise UsageError(f"{name!r} cannot be a worker and an observer: give each one name")
        names[name] = "observer"
    files = generate(folder, names)
    for file in files:
        screen.say(str(file))
    screen.say(
        f"{PUBLISHER} and {ALLOWED}/ are the publisher's (keys={folder}); move each file of "
        f"{WORKERS}/ to its worker, whose keys= it is. Removing a file from {ALLOWED}/ revokes it",
        DIM,
    )
    screen.emit("keys", files=[str(file) for file in files])
    return DONE
