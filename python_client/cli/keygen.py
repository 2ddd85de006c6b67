"""`weightbus keygen`: makes the keys of a publisher, its relays, workers and observers."""

from collections.abc import Iterable
from pathlib import Path

from ...bus.trust.grants import Role
from ...bus.trust.keys import ALLOWED, PUBLISHER, RELAYS, WORKERS, generate
from .outcome import DONE, UsageError
from .screen import DIM, Screen


def keygen(
    screen: Screen,
    folder: Path,
    workers: Iterable[str] | None,
    observers: Iterable[str] | None,
    relays: Iterable[str] | None = None,
    at: Iterable[str] | None = None,
    above: Iterable[str] | None = None,
) -> int:
    """Make the publisher's key pair if there is none, and key pairs for each name.

    Return the exit code.
    """
    names: dict[str, Role] = dict.fromkeys(workers or (), "worker")
    others: tuple[tuple[Role, Iterable[str]], ...]
    others = ("observer", observers or ()), ("relay", relays or ())
    for role, given in others:
        for name in given:
            if name in names:
                raise UsageError(
                    f"{name!r} cannot be {_a(names[name])} and {_a(role)}: give each one name"
                )
            names[name] = role
    if above and not relays:
        raise UsageError("--above says to which relay a relay connects: name one, with --relay")
    if at and not (workers or observers):
        raise UsageError("--at says to which relay a worker connects: name a worker")
    files = generate(folder, names, at=at or (), above=above or ())
    for file in files:
        screen.say(str(file))
    screen.say(
        f"{PUBLISHER} and {ALLOWED}/ are the publisher's (keys={folder}); move each file of "
        f"{WORKERS}/ to its worker, whose keys= it is. Removing a file from {ALLOWED}/ revokes it",
        DIM,
    )
    if relays:
        screen.say(
            f"move each folder of {RELAYS}/ to its relay, whose keys= it is. Its {ALLOWED} is a "
            f"link: on another host, put a copy of {ALLOWED}/ there, and keep it in step",
            DIM,
        )
    screen.emit("keys", files=[str(file) for file in files])
    return DONE


def _a(role: Role) -> str:
    return f"an {role}" if role == "observer" else f"a {role}"
