"""A host's link without the kernel's help: a proxy before its servers, which limits what they send.

For machines that permit no network namespaces. All connections of a host share one token bucket, as
they share a link; what comes from the other side is passed on at once.
"""

import socket
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Self

PIECE = 2**16  # bytes that are forwarded at a time
WAITING = 2**19  # bytes of a connection that wait for the link in the kernel


class Link:
    """Forwards connections to the servers of a host, and limits the bytes that these send.

    Args:
        own: The IP address of the servers.
        outside: The IP address at which the ports are reached over this link.
        ports: The servers' ports.
        rate: Bytes per second of all connections together.
        burst: Bytes that an idle link carries at once.
    """

    def __init__(
        self, own: str, outside: str, ports: Iterable[int], rate: float, burst: float
    ) -> None:
        self._own, self._rate, self._burst = own, rate, burst
        self._free_at, self._sent, self._lock = 0.0, 0, threading.Lock()
        with ExitStack() as undo:
            self._listeners = {
                port: undo.enter_context(socket.create_server((outside, port))) for port in ports
            }
            self._undo = undo.pop_all()
        for port in self._listeners:
            threading.Thread(target=self._accept, args=(port,), daemon=True).start()

    @property
    def sent(self) -> int:
        """The bytes that the servers have sent."""
        return self._sent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _accept(self, port: int) -> None:
        with suppress(OSError):  # closed
            while True:
                outer, _ = self._listeners[port].accept()
                inner = socket.socket()
                inner.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WAITING)
                try:
                    inner.connect((self._own, port))
                except OSError:  # that server is not there (yet)
                    inner.close()
                    outer.close()
                    continue
                for source, to, paced in ((outer, inner, False), (inner, outer, True)):
                    to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    forward = partial(self._forward, source, to, paced=paced)
                    threading.Thread(target=forward, daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket, *, paced: bool) -> None:
        """Forward what one side sends, until either side ends the connection."""
        with suppress(OSError):
            while piece := source.recv(PIECE):
                if paced:
                    time.sleep(self._wait_of(len(piece)))
                to.sendall(piece)
        for end in (source, to):  # so the other direction ends, too
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait_of(self, nbytes: int) -> float:
        """Take bytes from the token bucket; return the seconds until there are as many."""
        with self._lock:
            now = time.monotonic()
            idle_since = max(self._free_at, now - self._burst / self._rate)
            self._free_at, self._sent = idle_since + nbytes / self._rate, self._sent + nbytes
            return max(0.0, self._free_at - now)
