"""Connects to a publisher as an observer, and requests its roster and comparisons of weights.

The answers with the roster are merged in a `View` (`view.py`). An observer is not a worker:
publishes do not wait for it.
"""

import logging
import time
from collections.abc import Iterator

from msgspec.structs import replace

from ...bus.errors import ProtocolError, RefusedError
from ...bus.event_log import RateLimitedWarning
from ...bus.headers import encode
from ...bus.limits import PAGES_MAX
from ...bus.messages import Observe, Refuse, RosterPage, Verified, Verify
from ...bus.net.control import Activity, WorkerSockets
from ...bus.observed import to_observer
from ...bus.protocol_limits import DIFFERENCES_LISTED
from ...bus.token_bucket import Rate, TokenBucket
from ...bus.trust.keys import WorkerKeys
from ..closing import Closable
from .view import View

log = logging.getLogger("weightbus.observer")

REQUESTS = Rate(12, 6)  # rate of requests, below the publisher's CONTROL_RATE / COST_HIGH
ANSWER_SECONDS = 1.0  # seconds until a request without an answer is repeated
CHECK_SECONDS = 10.0  # the same for a request that a worker must answer
POLL_SECONDS = 0.25  # seconds between two checks of the connection
BROKEN_SECONDS = 2.0  # seconds of failing handshakes before the keys count as the cause
TRIES = 5  # how often `verify` restarts because the worker has applied a new version
REDIAL_SECONDS = 5.0  # seconds without an answer until the observer reconnects


class Observer(Closable):
    """An observer of one publisher. Only one thread may use it.

    Args:
        address: The address of the publisher's control socket, as workers use it.
        keys: The keys of an observer; None: no keys.

    Attributes:
        view: The roster as received so far.
        heard_at: The monotonic time of the last answer; None: no answer yet.
        ahead: Seconds that the publisher's clock is ahead of the local one, less the latency;
            None: unknown.

    Raises:
        AddressError: The address is invalid.
        KeysError: The keys cannot be read.
    """

    def __init__(self, address: str, keys: WorkerKeys | None = None) -> None:
        self.view = View()
        self.heard_at: float | None = None
        self.ahead: float | None = None
        self._sockets = WorkerSockets(address, lambda _frames, _size: None, keys)
        self._failures = RateLimitedWarning(
            log, "an answer of the publisher could not be processed: %s"
        )
        self._tried_at = time.monotonic()  # when the last answer arrived or last connect began
        self._bucket = TokenBucket(REQUESTS, self._tried_at)

    def close(self) -> None:
        """Close the connection."""
        self._sockets.close()

    def look(self, timeout: float) -> bool:
        """Update the view to the present state; return False if that takes over `timeout` seconds.

        Raises:
            RefusedError: The publisher refuses observers, or this observer.
        """
        until, goal = time.monotonic() + timeout, None
        self.view.whole = False
        while self._ask(replace(self.view.question(), pages=PAGES_MAX), until):
            if self._answer(min(until, time.monotonic() + ANSWER_SECONDS)):
                goal = self.view.latest if goal is None else goal
                if self.view.whole or self.view.has(goal):
                    return True
        return False

    def verify(self, worker: str, model: str, timeout: float) -> Verified:
        """Compare the weights of a worker's model with the published weights.

        Returns:
            The publisher's answers, merged. The code is `silent` if they are not complete within
            `timeout` seconds, and `changed` if the worker keeps applying new versions.

        Raises:
            RefusedError: The publisher refuses observers, or this observer.
        """
        until, tries = time.monotonic() + timeout, 0
        none = total = Verified(worker=worker, model=model)
        request = Verify(worker=worker, model=model)
        while self._ask(request, until):
            answer = self._verified(request, min(until, time.monotonic() + CHECK_SECONDS))
            if answer is None or answer.code == "busy":
                continue
            changed = total.count and answer.version and _key(answer) != _key(total)
            if tries < TRIES and (changed or answer.code in ("changed", "gone")):
                tries, total, request = tries + 1, none, replace(request, first=0)
                continue  # restart from the first tensor, with the version that runs now
            if changed:
                text = f"it applied another version {TRIES + 1} times during the comparison"
                fields = {"epoch": answer.epoch, "version": answer.version, "names": answer.names}
                return replace(none, **fields, code="changed", text=text)
            total = together(total, answer)
            if answer.code is not None or total.count >= total.names or not answer.count:
                return total
            request = replace(request, first=total.count)
        text = f"it did not report its checksums within {timeout:g} s"
        return replace(total, code="silent", text=text)

    def _ask(self, question: Observe | Verify, until: float) -> bool:
        """Send a request once connection and rate limit allow; return False at the time `until`."""
        while (now := time.monotonic()) < until:
            if now - self._tried_at > REDIAL_SECONDS:
                self._sockets.redial()
                self._tried_at = now
            if not self._wait(until, writable=True).writable:
                continue
            if self._bucket.take(1, now):
                self._sockets.send(encode(question))
                return True
            self._wait(min(until, now + 1 / REQUESTS.per_second))
        return False

    def _verified(self, request: Verify, until: float) -> Verified | None:
        """Return the answer to a request; None if none arrives before `until`."""
        while time.monotonic() < until:
            for answer in self._answers(until):
                if isinstance(answer, Verified) and request == replace(
                    request, worker=answer.worker, model=answer.model, first=answer.first
                ):
                    return answer
        return None

    def _wait(self, until: float, *, writable: bool = False) -> Activity:
        """Wait briefly for an answer; with `writable`, also until a request can be sent."""
        refused = self._sockets.changed(BROKEN_SECONDS).refused
        if refused:
            raise RefusedError(f"observing is refused: {refused}", "keys")
        left = min(POLL_SECONDS, until - time.monotonic())
        return self._sockets.poll(max(0.0, left), writable=writable)

    def _answer(self, until: float) -> bool:
        """Receive all pages of the answer to the last request; return False at the time `until`."""
        while time.monotonic() < until:
            for answer in self._answers(until):
                if not isinstance(answer, RosterPage):
                    continue
                if self._take(answer) and not answer.follows:
                    return True
        return False

    def _take(self, answer: RosterPage) -> bool:
        """Add a page to the view; return whether it was the next page.

        After an exception, the view is empty, and the whole roster is requested again.
        """
        try:
            return self.view.take(answer, time.monotonic())
        except Exception as error:
            self._failures.warn(f"{type(error).__name__}: {error}", time.monotonic())
            self.view = View()  # the old view may be partly changed
            return False

    def _answers(self, until: float) -> Iterator[RosterPage | Verified]:
        """Wait briefly, and yield the publisher's answers that have arrived.

        Raises:
            RefusedError: The publisher refuses observers, or this observer.
        """
        self._wait(until)
        while (frames := self._sockets.receive()) is not None:
            try:
                answer = to_observer(list(frames))
            except ProtocolError:  # the message is not for observers, or of a later protocol
                continue
            if isinstance(answer, Refuse):
                raise RefusedError(f"observing is refused: {answer.text}", answer.code)
            self.heard_at = self._tried_at = time.monotonic()
            if isinstance(answer, RosterPage) and answer.time_ms:
                self.ahead = answer.time_ms / 1000 - time.time()
            yield answer


def together(total: Verified, answer: Verified) -> Verified:
    """Merge `total`, the answers so far about one version, with the next answer."""
    return replace(
        answer,
        first=0,
        count=total.count + answer.count,
        unlike=total.unlike + answer.unlike,
        differing=total.differing + answer.differing,
        differences=[*total.differences, *answer.differences][:DIFFERENCES_LISTED],
    )


def _key(answer: Verified) -> tuple[int, int]:
    return answer.epoch, answer.version
