"""The thread of either side, which owns its sockets, and the bell by which others wake it.

Once it runs, nobody else closes what it owns. Whoever starts it may be interrupted as it begins to
run (by Ctrl-C, say), and has to clean up without knowing whether it will. So the first to come has
all of it: the thread, or whoever gives it up before.
"""

import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

WAKES = 4096  # read at once: whatever comes when there were fewer, the descriptor tells again


class IoThread(threading.Thread):
    """Such a thread; it does not keep the process alive.

    Args:
        work: What it does; in the end it closes what it owns.
        name: What it is called.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self._taken = threading.Lock()  # by whoever came first, for good

    def run(self) -> None:
        """Work, unless it was given up before."""
        if self._taken.acquire(blocking=False):
            super().run()

    def give_up(self, timeout: float) -> bool:
        """Wait for its end; return True, at once, if it has not run and now never will."""
        if self._taken.acquire(blocking=False):
            return True
        if self.is_alive():
            self.join(timeout)
        return False


def new_selector() -> selectors.DefaultSelector:
    """Return what a thread of ours waits with.

    After `gevent.monkey.patch_all(thread=False)` the selectors are gevent's and the threads are the
    system's. One of gevent's that is made in one thread and used in another ends the process by
    SIGSEGV; so the one that gevent has put aside is taken. Where threads are patched as well, they
    are greenlets of the thread that makes it, and gevent's is right.
    """
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("selectors"):
        return selectors.DefaultSelector()
    if not monkey.is_module_patched("threading"):
        made: selectors.DefaultSelector = monkey.get_original("selectors", "DefaultSelector")()
        return made
    return selectors.DefaultSelector()


class Waker:
    """What its selector watches; anybody may ring it, and ringing twice is ringing once."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that is readable once it was rung."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Wake whoever waits, from any thread."""
        try:
            self._sender.send(b"!")
        except OSError:  # it was rung before, or nobody is left to wake
            return

    def drain(self) -> None:
        """Have it rest until it is rung again."""
        try:
            while len(self._receiver.recv(WAKES)) == WAKES:
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        self._receiver.close()
        self._sender.close()
