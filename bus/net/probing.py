"""Finds out whether a publisher answers at an address, but does not join it. (W37)"""

import contextlib
import threading
import time
from collections.abc import Callable

from ..worker.events import Probed
from . import endpoints
from .zmtp import GREETING

PROBE_SECONDS = 1.0  # seconds to connect and to receive the first byte
SIGNATURE = GREETING[:10]  # a peer sends the rest of its greeting only once it has received this


def probe(endpoint: str, then: Callable[[Probed], None]) -> None:
    """Test in another thread whether ZMTP answers at an endpoint, and call `then` with the result.

    Raises:
        RuntimeError: The process cannot start another thread now.
    """

    def work() -> None:
        then(Probed(answers(endpoint, PROBE_SECONDS)))

    threading.Thread(target=work, name="weightbus-probe", daemon=True).start()


def answers(endpoint: str, seconds: float) -> bool:
    """Return whether the peer at an endpoint sends the start of a greeting within `seconds`."""
    until = time.monotonic() + seconds
    with contextlib.suppress(OSError, UnicodeError), endpoints.dial(endpoint, seconds) as peer:
        peer.sendall(SIGNATURE)
        peer.settimeout(max(0.001, until - time.monotonic()))
        return peer.recv(1) == SIGNATURE[:1]
    return False
