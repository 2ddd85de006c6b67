"""Provides the thread of a publisher or worker, which owns its sockets, and wakes such a thread.

Once the thread runs, only the thread closes its sockets. The caller of `start` may be interrupted
while the thread begins to run (by Ctrl-C, for instance), and must then clean up without knowing
whether the thread will run. So a lock decides: if the thread acquires the lock first, it closes the
sockets; if the caller acquires the lock first, by `give_up`, the caller closes them.
"""

import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

DRAIN_BYTES = 4096  # bytes read at once; if fewer arrive, the socket is empty


class IoThread(threading.Thread):
    """A thread that owns its sockets; it does not keep the process alive.

    Args:
        work: The thread's function, which closes the thread's sockets at its end.
        name: The thread's name.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self._owner_lock = threading.Lock()  # acquired once, never released

    def run(self) -> None:
        """Run the function, unless `give_up` was called before."""
        if self._owner_lock.acquire(blocking=False):
            super().run()

    def give_up(self, timeout: float) -> bool:
        """Prevent the thread from running, and return True, if it has not begun to run.

        Otherwise wait for its end, at most `timeout` seconds, and return False.
        """
        if self._owner_lock.acquire(blocking=False):
            return True
        if self.is_alive():
            self.join(timeout)
        return False


def new_selector() -> selectors.DefaultSelector:
    """Return a selector for one of our threads.

    After `gevent.monkey.patch_all(thread=False)`, selectors are gevent's but threads are the
    system's. A gevent selector that is created in one thread and used in another ends the process
    by SIGSEGV. So this returns the original selector, which gevent saves. If threads are patched as
    well, they are greenlets of the thread that creates the selector, and gevent's selector works.
    """
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("selectors"):
        return selectors.DefaultSelector()
    if not monkey.is_module_patched("threading"):
        original: selectors.DefaultSelector = monkey.get_original("selectors", "DefaultSelector")()
        return original
    return selectors.DefaultSelector()


class Waker:
    """Wakes a thread that waits in its selector. Repeated wakes have the effect of one wake."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on `wake`."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Wake the waiting thread; may be called from any thread."""
        try:
            self._sender.send(b"!")
        except OSError:  # a wake is pending, or the other end is closed
            return

    def drain(self) -> None:
        """Clear pending wakes."""
        try:
            while len(self._receiver.recv(DRAIN_BYTES)) == DRAIN_BYTES:
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        self._receiver.close()
        self._sender.close()
