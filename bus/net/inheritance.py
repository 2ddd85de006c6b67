"""Closes our sockets and locks in forked children, while their parent continues to use them.

A connection ends, and an address or a lock becomes free, when the last process has closed it. So a
child that lives on (a DataLoader's worker) would keep the address or the lock of a trainer that is
killed and restarted.

libzmq does not reveal its descriptors. But a context always opens the same kinds with its first
socket: for each of its two threads an epoll and an eventfd that wakes the thread, another eventfd,
and an eventfd for each socket (a monitored socket adds two, for the sender and the receiver of its
events). All later descriptors are registered in these epolls, whose content the kernel lists. If
the kernel does not list it, or if another thread opened a descriptor meanwhile, libzmq's
descriptors stay open.
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
    """An object whose descriptors a forked child closes."""

    def close_in_child(self) -> None:
        """Close every descriptor, and do nothing else: the parent still uses the connections."""
        ...


_living: "weakref.WeakSet[ForkHandle]" = weakref.WeakSet()
_opening = threading.Lock()
_registered: list[None] = []  # not empty once the fork handler is registered


def close_in_children(handle: ForkHandle) -> None:
    """From now on, make forked children close an object's descriptors, as long as it exists."""
    if not _registered:
        _registered.append(None)
        os.register_at_fork(after_in_child=_abandon_all)
    _living.add(handle)


def keep_in_children(handle: ForkHandle) -> None:
    """Undo `close_in_children`. Needed when an object is closed: its numbers may be reused."""
    _living.discard(handle)


def _abandon_all() -> None:
    global _opening
    _opening = threading.Lock()  # its holder is not in this process
    for handle in list(_living):
        handle.close_in_child()
    _living.clear()


@contextlib.contextmanager
def descriptors_of_libzmq(sockets: int) -> Generator[list[int]]:
    """Yield a list. At the block's end it has the descriptors of a context with so many sockets."""
    found: list[int] = []
    with _opening:
        before = _descriptors()
        yield found
        # Compare the kind as well: the number may have been another thread's file before.
        opened = dict(_descriptors().items() - before.items())
        if sorted(opened.values()) == [_EVENTS] * (3 + sockets) + [_POLL] * 2:
            found.extend(opened)


def close_libzmqs(found: Iterable[int]) -> None:
    """Close descriptors of libzmq: those in `found`, and those that it has opened since."""
    known = _descriptors()
    ours = {number for number in found if known.get(number) in (_EVENTS, _POLL)}
    for poll in [number for number in ours if known[number] == _POLL]:
        ours.update(_waited_for(poll))
    for number in ours:
        os.close(number)


def _waited_for(poll: int) -> Generator[int]:
    """Yield the descriptors that an epoll waits for, if they are open in this process."""
    with contextlib.suppress(OSError):
        for number, inode in _WAITED_FOR.findall(Path(f"/proc/self/fdinfo/{poll}").read_text()):
            with contextlib.suppress(OSError):
                if os.fstat(int(number)).st_ino == int(inode, 16):
                    yield int(number)


def _descriptors() -> dict[int, str]:
    """Return this process's open descriptors; empty if the system does not list them."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found
