"""What a forked child inherits of our sockets and locks: it closes them, and its parent goes on.

A connection ends, and an address or a lock becomes free, when the last process has closed it. So a
child that lives on (a DataLoader's worker) would keep them from a trainer that is killed and
started again.

libzmq names none of its descriptors. But a context opens the same ones whenever its first socket is
made: for each of its two threads an epoll and an eventfd that wakes it, and another eventfd; and
one for each socket (for one that is watched two more: who tells, and who is told). All that it
opens later is waited for in these epolls, and the kernel tells what is in one. Where it does not,
or another thread opened something meanwhile, the child keeps what is libzmq's.
"""

import contextlib
import os
import re
import threading
import weakref
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Protocol

_EVENTS, _POLL = "anon_inode:[eventfd]", "anon_inode:[eventpoll]"
_WAITED_FOR = re.compile(r"^tfd:\s*(\d+) .* ino:([0-9a-f]+) ", re.MULTILINE)


class ForkHandle(Protocol):
    """What a child closes."""

    def close_in_child(self) -> None:
        """Close every descriptor, and do nothing else: the parent goes on using its own."""
        ...


_living: "weakref.WeakSet[ForkHandle]" = weakref.WeakSet()
_opening = threading.Lock()
_told: list[None] = []  # whether the interpreter knows what to do in a child


def close_in_children(handle: ForkHandle) -> None:
    """Have forked children abandon something, for as long as it lives."""
    if not _told:
        _told.append(None)
        os.register_at_fork(after_in_child=_abandon_all)
    _living.add(handle)


def keep_in_children(handle: ForkHandle) -> None:
    """Leave it alone from now on: it is about to be closed, and its numbers may become others'."""
    _living.discard(handle)


def _abandon_all() -> None:
    global _opening
    _opening = threading.Lock()  # whoever held it is not in this process
    for handle in list(_living):
        handle.close_in_child()
    _living.clear()


@contextlib.contextmanager
def descriptors_of_libzmq(sockets: int) -> Generator[list[int]]:
    """Find out what libzmq opens for a context and its first sockets, which the block makes."""
    found: list[int] = []
    with _opening:
        before = _descriptors()
        yield found
        # By kind as well: a number may have been that of another thread's file a moment before.
        opened = dict(_descriptors().items() - before.items())
        if sorted(opened.values()) == [_EVENTS] * (3 + sockets) + [_POLL] * 2:
            found.extend(opened)


def close_libzmqs(found: Iterable[int]) -> None:
    """Close what libzmq has opened, and what it has opened since."""
    known = _descriptors()
    ours = {number for number in found if known.get(number) in (_EVENTS, _POLL)}
    for poll in [number for number in ours if known[number] == _POLL]:
        ours.update(_waited_for(poll))
    for number in ours:
        os.close(number)


def _waited_for(poll: int) -> Generator[int]:
    """Yield what an epoll waits for, of what is here: the parent has gone on to use it."""
    with contextlib.suppress(OSError):
        for number, inode in _WAITED_FOR.findall(Path(f"/proc/self/fdinfo/{poll}").read_text()):
            with contextlib.suppress(OSError):
                if os.fstat(int(number)).st_ino == int(inode, 16):
                    yield int(number)


def _descriptors() -> dict[int, str]:
    """Return what this process has open; nothing where the system does not tell."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself
                found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found
