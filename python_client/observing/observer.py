"""Looking on from anywhere: an observer's connection to a publisher.

It asks, and puts the answers together (`view.py`). It is no worker: no version waits for it.
"""

import contextlib
import time
from types import TracebackType

from ...bus.allowance import Allowance, Rate
from ...bus.errors import ProtocolError, RefusedError
from ...bus.messages import Refuse, encode
from ...bus.net.control import Activity, WorkerSockets
from ...bus.observed import printable, to_observer
from ...bus.trust.keys import WorkerKeys
from .view import View

ASKS = Rate(12, 6)  # below what a publisher puts up with (TALK, at the price of a stranger)
ANSWER_SECONDS = 1.0  # after which a question is asked again
LOOK_SECONDS = 0.25  # between two looks at the connection
BROKEN_SECONDS = 2.0  # for which handshakes break off before that is a matter of keys
REDIAL_SECONDS = 5.0  # without an answer, after which the connection is made anew


class Observer:
    """An observer of one publisher. It belongs to one thread.

    Args:
        address: The publisher's control socket, as workers are told it.
        keys: Those of an observer; None: there are none.

    Attributes:
        view: What is known so far.

    Raises:
        AddressError: The address makes no sense.
        KeysError: The keys cannot be read.
    """

    def __init__(self, address: str, keys: WorkerKeys | None = None) -> None:
        self.view = View()
        self.heard_at: float | None = None  # when the publisher answered last
        self._sockets = WorkerSockets(address, lambda _frames, _size: None, keys)
        self._tried_at = time.monotonic()  # to connect, or heard
        self._allowance = Allowance(ASKS, self._tried_at)

    def __enter__(self) -> "Observer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._sockets.close()

    def look(self, timeout: float) -> bool:
        """Bring the view up to what there is now; return whether that was possible in time.

        Raises:
            RefusedError: The publisher wants no observer more, or not this one.
        """
        until, goal = time.monotonic() + timeout, None
        self.view.whole = False
        while (now := time.monotonic()) < until:
            if now - self._tried_at > REDIAL_SECONDS:
                self._sockets.redial()
                self._tried_at = now
            if not self._wait(until, writable=True).writable:
                continue
            if not self._allowance.take(1, now):
                self._wait(min(until, now + 1 / ASKS.per_second))
                continue
            self._sockets.send(encode(self.view.question()))
            if self._answer(min(until, now + ANSWER_SECONDS)):
                goal = self.view.latest if goal is None else goal
                if self.view.whole or self.view.has(goal):
                    return True
        return False

    def _wait(self, until: float, *, writable: bool = False) -> Activity:
        """Wait for an answer; with `writable`, for a publisher as well."""
        _, refused = self._sockets.changed(BROKEN_SECONDS)
        if refused:
            raise RefusedError(f"observing is refused: {refused}", "keys")
        left = min(LOOK_SECONDS, until - time.monotonic())
        return self._sockets.poll(max(0.0, left), writable=writable)

    def _answer(self, until: float) -> bool:
        """Take an answer; return whether one came to what was asked last."""
        while (now := time.monotonic()) < until:
            self._wait(until)
            while (frames := self._sockets.receive()) is not None:
                with contextlib.suppress(ProtocolError):  # another's, or of a later protocol
                    answer = to_observer(list(frames))
                    if isinstance(answer, Refuse):
                        raise RefusedError(
                            f"observing is refused: {printable(answer.text)}", answer.code
                        )
                    self.heard_at = self._tried_at = now
                    if self.view.take(answer, now):
                        return True
        return False
