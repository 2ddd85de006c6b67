"""A thread that owns what it works with, such as sockets: once it runs, nobody else closes that.

Whoever starts it may be interrupted as it begins to run (by Ctrl-C, say), and has to clean up
without knowing whether it will. So the first to come has all of it: the thread, or whoever gives it
up before.
"""

import threading
from collections.abc import Callable


class Owner(threading.Thread):
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
