"""Resolves host names in helper threads, since a name server may answer late or never.

libzmq would resolve a name in its own thread, again for each attempt to connect, and a socket could
not be closed until the name server answers. So libzmq gets numeric addresses.
"""

import logging
import socket
import threading
from collections.abc import Callable

from ..event_log import RateLimitedWarning
from . import endpoints

log = logging.getLogger("weightbus.worker")

AGAIN_SECONDS = 1.0  # seconds between two lookups while unconnected: the address may change
PATIENCE_SECONDS = 2.0  # seconds without an address until an error is reported


def is_name(endpoint: str) -> bool:
    """True if an endpoint has a host name, which must be resolved."""
    if endpoints.ipc_path(endpoint) is not None:
        return False
    host, _ = endpoints.host_and_port(endpoint)
    return endpoints.ip_address(host.partition("%")[0]) is None


class Lookup:
    """Looks up the address of a host, repeatedly. One thread owns this object; no method blocks.

    Args:
        endpoint: A TCP endpoint with the host's name.
        wake: Wakes the owning thread; called by the helper thread.

    Attributes:
        found: The endpoint with the numeric address; empty until it is known.
    """

    def __init__(self, endpoint: str, wake: Callable[[], None]) -> None:
        self.found = ""
        self._endpoint, self._wake = endpoint, wake
        self._running: threading.Thread | None = None
        self._answer: str | OSError | None = None
        self._error: OSError | None = None
        self._due = float("-inf")  # when to start the next lookup
        self._since: float | None = None  # when the first lookup began
        self._unknown = RateLimitedWarning(log, "%s")

    def poll(self, now: float) -> bool:
        """Start or finish a lookup that is due; return whether the address has changed."""
        if self._since is None:
            self._since = now
        if self._running is None:
            if now >= self._due:
                self._answer = None
                self._running = threading.Thread(
                    target=self._resolve, name="weightbus-lookup", daemon=True
                )
                self._running.start()
            return False
        if self._answer is None:
            return False
        self._running, self._due = None, now + AGAIN_SECONDS
        if isinstance(self._answer, OSError):
            self._error = self._answer
            return False
        changed, self.found = self._answer != self.found, self._answer
        self._error = None
        return changed

    def failed(self, now: float) -> bool:
        """True if no address was ever found, and a lookup has failed or takes long."""
        slow = self._since is not None and now - self._since >= PATIENCE_SECONDS
        return not self.found and (self._error is not None or slow)

    def fault(self, now: float) -> str:
        """Return an error text, and log it, if no address was found for a while; else ""."""
        if self.found or self._since is None or now - self._since < PATIENCE_SECONDS:
            return ""
        host, _ = endpoints.host_and_port(self._endpoint)
        error = self._error
        why = "its name server does not answer" if error is None else error.strerror or str(error)
        text = (
            f"{self._endpoint} cannot be connected to: no address of host {host!r} is found "
            f"({why}); check the name, and the name service of this host or container. It is "
            "looked up again and again"
        )
        self._unknown.warn(text, now)
        return text

    def _resolve(self) -> None:
        """Resolve the name. (Runs in a helper thread.)"""
        host, port = endpoints.host_and_port(self._endpoint)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            # IPv4 first, as in libzmq.
            family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
            numeric = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
            self._answer = f"tcp://{numeric}:{port}"
        except OSError as error:
            self._answer = error
        except UnicodeError as error:
            self._answer = OSError(str(error))
        self._wake()
