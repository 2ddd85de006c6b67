"""Looking on from anywhere: an observer's connection to a publisher.

It asks, and puts the answers together (`view.py`). It is no worker: no version waits for it.
"""

import logging
import time
from collections.abc import Iterator

from msgspec.structs import replace

from ...bus.errors import ProtocolError, RefusedError
from ...bus.event_log import RateLimitedWarning
from ...bus.limits import DIFFERENCES_TOLD, PAGES_MAX
from ...bus.messages import Refuse, encode
from ...bus.net.control import Activity, WorkerSockets
from ...bus.observed import Observe, RosterPage, Verified, Verify, to_observer
from ...bus.token_bucket import Rate, TokenBucket
from ...bus.trust.keys import WorkerKeys
from ..closing import Closable
from .view import View

log = logging.getLogger("weightbus.observer")

ASKS = Rate(12, 6)  # below what a publisher puts up with (CONTROL_RATE, at the price of a stranger)
ANSWER_SECONDS = 1.0  # after which a question is asked again
CHECK_SECONDS = 10.0  # the same, where a worker has to look
LOOK_SECONDS = 0.25  # between two looks at the connection
BROKEN_SECONDS = 2.0  # for which handshakes break off before that is a matter of keys
TRIES = 5  # to verify a worker that goes from version to version meanwhile
REDIAL_SECONDS = 5.0  # without an answer, after which the connection is made anew


class Observer(Closable):
    """An observer of one publisher. It belongs to one thread.

    Args:
        address: The publisher's control socket, as workers are told it.
        keys: Those of an observer; None: there are none.

    Attributes:
        view: What is known so far.
        ahead: By how many seconds the publisher's clock is, give or take the way; None: not told.

    Raises:
        AddressError: The address makes no sense.
        KeysError: The keys cannot be read.
    """

    def __init__(self, address: str, keys: WorkerKeys | None = None) -> None:
        self.view = View()
        self.heard_at: float | None = None  # when the publisher answered last
        self.ahead: float | None = None
        self._sockets = WorkerSockets(address, lambda _frames, _size: None, keys)
        self._failures = RateLimitedWarning(
            log, "an answer of the publisher could not be taken: %s"
        )
        self._tried_at = time.monotonic()  # to connect, or heard
        self._allowance = TokenBucket(ASKS, self._tried_at)

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
        while self._ask(replace(self.view.question(), pages=PAGES_MAX), until):
            if self._answer(min(until, time.monotonic() + ANSWER_SECONDS)):
                goal = self.view.latest if goal is None else goal
                if self.view.whole or self.view.has(goal):
                    return True
        return False

    def verify(self, worker: str, model: str, timeout: float) -> Verified:
        """Hold a worker's weights against what was published.

        Returns:
            What all the publisher's answers come to. Of code `silent` where there was none in time.

        Raises:
            RefusedError: The publisher wants no observer more, or not this one.
        """
        until, tries = time.monotonic() + timeout, 0
        none = total = Verified(worker=worker, model=model)
        asked = Verify(worker=worker, model=model)
        while self._ask(asked, until):
            answer = self._verified(asked, min(until, time.monotonic() + CHECK_SECONDS))
            if answer is None or answer.code == "busy":
                continue
            changed = total.count and answer.version and _key(answer) != _key(total)
            if tries < TRIES and (changed or answer.code in ("changed", "gone")):
                tries, total, asked = tries + 1, none, replace(asked, first=0)
                continue  # from the beginning, of what runs now
            if changed:
                text = f"it went on to another version {TRIES + 1} times while it was looked at"
                named = {"epoch": answer.epoch, "version": answer.version, "names": answer.names}
                return replace(none, **named, code="changed", text=text)
            total = together(total, answer)
            if answer.code is not None or total.count >= total.names or not answer.count:
                return total
            asked = replace(asked, first=total.count)
        text = f"what it has could not be told within {timeout:g} s"
        return replace(total, code="silent", text=text)

    def _ask(self, question: Observe | Verify, until: float) -> bool:
        """Send a question as soon as that may be; return whether there was time for it."""
        while (now := time.monotonic()) < until:
            if now - self._tried_at > REDIAL_SECONDS:
                self._sockets.redial()
                self._tried_at = now
            if not self._wait(until, writable=True).writable:
                continue
            if self._allowance.take(1, now):
                self._sockets.send(encode(question))
                return True
            self._wait(min(until, now + 1 / ASKS.per_second))
        return False

    def _verified(self, asked: Verify, until: float) -> Verified | None:
        """Return the answer to a question, if it comes in time."""
        while time.monotonic() < until:
            for answer in self._answers(until):
                if isinstance(answer, Verified) and asked == replace(
                    asked, worker=answer.worker, model=answer.model, first=answer.first
                ):
                    return answer
        return None

    def _wait(self, until: float, *, writable: bool = False) -> Activity:
        """Wait for an answer; with `writable`, for a publisher as well."""
        _, refused = self._sockets.changed(BROKEN_SECONDS)
        if refused:
            raise RefusedError(f"observing is refused: {refused}", "keys")
        left = min(LOOK_SECONDS, until - time.monotonic())
        return self._sockets.poll(max(0.0, left), writable=writable)

    def _answer(self, until: float) -> bool:
        """Take an answer; return whether one came to what was asked last."""
        while time.monotonic() < until:
            for answer in self._answers(until):
                if not isinstance(answer, RosterPage):
                    continue
                if self._take(answer) and not answer.follows:
                    return True
        return False

    def _take(self, answer: RosterPage) -> bool:
        """Take what was answered; return whether it is news. What fails costs the view alone."""
        try:
            return self.view.take(answer, time.monotonic())
        except Exception as error:
            self._failures.warn(f"{type(error).__name__}: {error}", time.monotonic())
            self.view = View()  # it may be half changed: all is asked for again
            return False

    def _answers(self, until: float) -> Iterator[RosterPage | Verified]:
        """Wait for what the publisher says, and yield it.

        Raises:
            RefusedError: It wants no observer more, or not this one.
        """
        self._wait(until)
        while (frames := self._sockets.receive()) is not None:
            try:
                answer = to_observer(list(frames))
            except ProtocolError:  # another's, or of a later protocol
                continue
            if isinstance(answer, Refuse):
                raise RefusedError(f"observing is refused: {answer.text}", answer.code)
            self.heard_at = self._tried_at = time.monotonic()
            if isinstance(answer, RosterPage) and answer.time_ms:
                self.ahead = answer.time_ms / 1000 - time.time()
            yield answer


def together(total: Verified, answer: Verified) -> Verified:
    """Return what two answers about one version come to, of which the second goes on."""
    return replace(
        answer,
        first=0,
        count=total.count + answer.count,
        unlike=total.unlike + answer.unlike,
        differing=total.differing + answer.differing,
        differences=[*total.differences, *answer.differences][:DIFFERENCES_TOLD],
    )


def _key(answer: Verified) -> tuple[int, int]:
    return answer.epoch, answer.version
