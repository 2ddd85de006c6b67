"""A bell by which one thread wakes another that waits in a selector."""

import contextlib
import socket


class Bell:
    """What a selector watches; anybody may ring it, and ringing twice is ringing once."""

    def __init__(self) -> None:
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that is readable once it was rung."""
        return self._bell.fileno()

    def ring(self) -> None:
        """Wake whoever waits, from any thread."""
        with contextlib.suppress(OSError):  # it was rung before, or nobody is left to wake
            self._rope.send(b"!")

    def silence(self) -> None:
        """Have it rest until it is rung again."""
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass

    def close(self) -> None:
        """Close both ends."""
        self._bell.close()
        self._rope.close()
