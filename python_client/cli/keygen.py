"""`weightbus keygen`: creates the keys of a publisher, and of its relays, workers and observers."""

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
    """Create the publisher's key pair if there is none, and a key pair for each name.

    Args:
        screen: Shows the files.
        folder: The publisher's key folder.
        workers, observers, relays: The names of each role.
        at: The relays to which the workers connect; see `generate`.
        above: The relays to which the relays connect; see `generate`.

    Returns:
        The exit code.
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
        raise UsageError("--above sets to which relay a relay connects: name a relay with --relay")
    if at and not (workers or observers):
        raise UsageError("--at sets to which relay a worker connects: name a worker")
    files = generate(folder, names, at=at or (), above=above or ())
    for file in files:
        screen.say(str(file))
    screen.say(
        f"{PUBLISHER} and {ALLOWED}/ stay with the publisher (keys={folder}); move each file of "
        f"{WORKERS}/ to its worker (keys=FILE). Removing a file from {ALLOWED}/ revokes the key",
        DIM,
    )
    if relays:
        screen.say(
            f"move each folder of {RELAYS}/ to its relay (keys=FOLDER). Its {ALLOWED} is a link: "
            f"on another host, replace the link by a copy of {ALLOWED}/, and update the copy",
            DIM,
        )
    screen.emit("keys", files=[str(file) for file in files])
    return DONE


def _a(role: Role) -> str:
    return f"an {role}" if role == "observer" else f"a {role}"
