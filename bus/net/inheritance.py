"""Closes our sockets and locks in forked children, while their parent continues to use them.

A connection ends, and an address or a lock becomes free, only when every process has closed it. So
if a trainer is killed and restarted, a forked child that still runs (a DataLoader's worker) would
hold the trainer's address or lock.

libzmq does not reveal its descriptors. But with its first socket, a context always opens
descriptors of the same kinds: an epoll and an eventfd for each of its two threads, one more
eventfd, and an eventfd for each socket. (A monitored socket adds two: for the sender and for the
receiver of its events.) All later descriptors are registered in these epolls, and the kernel lists
the descriptors of an epoll. If the kernel does not list them, or if another thread opened a
descriptor meanwhile, libzmq's descriptors stay open in the child.
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
_IN_EPOLL = re.compile(r"^tfd:\s*(\d+) .* ino:([0-9a-f]+) ", re.MULTILINE)


class ForkHandle(Protocol):
    """An object whose descriptors a forked child closes."""

    def close_in_child(self) -> None:
        """Close every descriptor, and do nothing else: the parent still uses the connections."""
        ...


_handles: "weakref.WeakSet[ForkHandle]" = weakref.WeakSet()
_opening_lock = threading.Lock()  # held while a context of libzmq is opened
_registered: list[None] = []  # not empty once the fork handler is registered


def close_in_children(handle: ForkHandle) -> None:
    """From now on, make forked children close an object's descriptors, as long as it exists."""
    if not _registered:
        _registered.append(None)
        os.register_at_fork(after_in_child=_close_all)
    _handles.add(handle)


def keep_in_children(handle: ForkHandle) -> None:
    """Undo `close_in_children`. Call this when the object is closed.

    The numbers of its descriptors may then be reused for other files, which children must not
    close.
    """
    _handles.discard(handle)


def _close_all() -> None:
    global _opening_lock
    _opening_lock = threading.Lock()  # the thread that holds the old lock is not in this process
    for handle in list(_handles):
        handle.close_in_child()
    _handles.clear()


@contextlib.contextmanager
def descriptors_of_libzmq(sockets: int) -> Generator[list[int]]:
    """Yield a list, to which the end of the block adds the descriptors opened by libzmq.

    The block must open one context with `sockets` sockets. If other descriptors were opened or
    closed meanwhile, the list stays empty.
    """
    found: list[int] = []
    with _opening_lock:
        before = _descriptors()
        yield found
        # Compare kinds, too: the number may have belonged to a file that was closed meanwhile.
        opened = dict(_descriptors().items() - before.items())
        if sorted(opened.values()) == [_EVENTS] * (3 + sockets) + [_POLL] * 2:
            found.extend(opened)


def close_libzmqs(found: Iterable[int]) -> None:
    """Close the descriptors in `found` and those that libzmq has opened since."""
    known = _descriptors()
    ours = {number for number in found if known.get(number) in (_EVENTS, _POLL)}
    for poll in [number for number in ours if known[number] == _POLL]:
        ours.update(_in_epoll(poll))
    for number in ours:
        os.close(number)


def _in_epoll(poll: int) -> Generator[int]:
    """Yield the descriptors that are registered in an epoll, if they are open in this process."""
    with contextlib.suppress(OSError):
        for number, inode in _IN_EPOLL.findall(Path(f"/proc/self/fdinfo/{poll}").read_text()):
            with contextlib.suppress(OSError):
                if os.fstat(int(number)).st_ino == int(inode, 16):
                    yield int(number)


def _descriptors() -> dict[int, str]:
    """Return the file of each open descriptor of this process; empty if they are not listed."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found
