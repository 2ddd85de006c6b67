"""The thread of a publisher or worker, which owns its sockets, and the waker for other threads.

Once the thread runs, only the thread closes its sockets. The caller of `start` may be interrupted
while the thread begins to run (by Ctrl-C, for instance), and must then clean up without knowing
whether the thread will run. So a lock decides: the thread closes the sockets if it acquires the
lock first; the caller closes them if `give_up` acquires it first.
"""

import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

WAKES = 4096  # bytes read at once; fewer bytes mean that the socket is empty


class IoThread(threading.Thread):
    """A thread that owns its sockets; it does not keep the process alive.

    Args:
        work: The thread's function, which closes the thread's sockets at its end.
        name: The thread's name.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self._taken = threading.Lock()  # acquired once, never released

    def run(self) -> None:
        """Run the function, unless the thread was given up before."""
        if self._taken.acquire(blocking=False):
            super().run()

    def give_up(self, timeout: float) -> bool:
        """Return True if the thread never began to run, and now cannot; else wait for its end."""
        if self._taken.acquire(blocking=False):
            return True
        if self.is_alive():
            self.join(timeout)
        return False


def new_selector() -> selectors.DefaultSelector:
    """Return a selector for one of our threads.

    After `gevent.monkey.patch_all(thread=False)` the selectors are gevent's and the threads are the
    system's. A gevent selector that is made in one thread and used in another ends the process by
    SIGSEGV; so the original selector, which gevent saves, is used. If threads are patched as well,
    they are greenlets of the thread that makes the selector, and gevent's selector is right.
    """
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("selectors"):
        return selectors.DefaultSelector()
    if not monkey.is_module_patched("threading"):
        made: selectors.DefaultSelector = monkey.get_original("selectors", "DefaultSelector")()
        return made
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
            while len(self._receiver.recv(WAKES)) == WAKES:
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        self._receiver.close()
        self._sender.close()
