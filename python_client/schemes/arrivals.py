"""Arrivals: the versions that a receiver has applied, for whoever waits for one."""

import threading

from ..applying import Update


class Arrivals:
    """The newest update, and whether anybody has asked for it yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: Update | None = None
        self._fresh = False
        self._closed = False

    @property
    def newest(self) -> Update | None:
        """What the model runs; None before the first version."""
        return self._newest

    def put(self, update: Update) -> None:
        """Note an update."""
        with self._changed:
            self._newest, self._fresh = update, True
            self._changed.notify_all()

    def take(self, timeout: float) -> Update | None:
        """Return the newest update if it was not taken before, waiting for one if need be."""
        with self._changed:
            self._changed.wait_for(lambda: self._fresh or self._closed, max(0.0, timeout))
            if not self._fresh:
                return None
            self._fresh = False
            return self._newest

    def wait_first(self, timeout: float) -> bool:
        """Wait until there was any update at all; return whether there was."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._newest is not None or self._closed, max(0.0, timeout)
            )
            return self._newest is not None

    def close(self) -> None:
        """Let everybody go who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
