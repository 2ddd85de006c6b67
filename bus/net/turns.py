"""Who turns a loop that waits in a selector, and the bell that wakes it there.

A loop has a thread of its own. To wake that and to be woken by it takes longer than a small version
does. So a thread that waits for what a loop does turns it meanwhile, as a guest, and the loop's own
thread rests. It goes on once a guest has been away for a moment (most come back sooner), or at once
if work is left.

A guest in the main thread must not be interrupted in the middle of a turn: Ctrl-C, and all else
that Python has a handler for, waits for its end, which is then soon.
"""

import contextlib
import importlib
import math
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_signal: Any = importlib.import_module("_signal")  # what `signal` wraps takes ten times as long

PAUSE = 0.005  # seconds that a guest may be away
SETTLED = 0.01  # seconds after which a guest is not expected to leave soon: it wakes who sleeps
TURN_SECONDS = 1.0  # that a turn takes at most, once nobody waits in it; else there is no guest
NUMBERS = range(1, _signal.NSIG)


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


class Turns:
    """Who turns a loop: one thread at a time.

    Args:
        turn: Waits for something to do, until this moment at most, and does it.
        ring: Has a turn in another thread wait no longer.
        busy: Whether more is to be done, soon; asked between two turns.
    """

    def __init__(
        self, turn: Callable[[float], object], ring: Callable[[], None], busy: Callable[[], bool]
    ) -> None:
        self._turn, self._ring, self._busy = turn, ring, busy
        # It may be taken again by who has it: whoever is collected meanwhile stops its loop.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.stopping = False
        self._own = True  # the loop's own thread is in a turn, or has not begun
        self._guest = False  # another one is there, or about to be
        self._came_at = self._back_at = 0.0  # when a guest came; until when one may come back
        self._interrupted = False  # the guest is to leave
        self._asleep = False  # the loop's own thread is, until a guest leaves
        self._failure: BaseException | None = None

    # For the loop's own thread.

    def run(self) -> None:
        """Turn the loop whenever no guest does, until it is to stop.

        Raises:
            BaseException: What a turn has raised, in whatever thread.
        """
        while self._mine():
            self._turn(math.inf)
        self._turn = self._busy = _nothing  # which may hold us: nobody should have to collect that
        if self._failure is not None:
            raise self._failure

    def _mine(self) -> bool:
        """Have guests go first, if there are any; return False if the loop is to stop."""
        with self._lock:
            self._own = False
            if self._guest:
                self._changed.notify_all()
            while (rest := self._rest()) != 0:
                self._changed.wait(rest)
            self._own = True  # for good, if it is to stop
            return not self.stopping

    def _rest(self) -> float | None:
        """Return for how long to leave the loop to guests."""
        now = time.monotonic()
        self._asleep = self._guest and now - self._came_at >= SETTLED
        if self._guest:
            return None if self._asleep else PAUSE
        return 0.0 if self.stopping else max(0.0, self._back_at - now)

    # For any thread.

    def call(self) -> None:
        """Something was left for the loop: have it done soon."""
        with self._lock:
            turning, self._back_at = self._own or self._guest, 0.0
            if not turning:
                self._changed.notify_all()
        if turning:
            self._ring()

    def stop(self) -> bool:
        """Have the loop end as soon as it can; return False if somebody has done so before."""
        before, self.stopping = self.stopping, True
        with self._lock:
            self._changed.notify_all()
        self._ring()
        return not before

    def wait(self, done: Callable[[], bool], until: float) -> bool:
        """Turn the loop until something is so, or it is too late; return False if others turn it.

        Raises:
            BaseException: What the handler of a signal raises, between two turns.
        """

        def work() -> None:
            while not (done() or self.stopping or self._interrupted):
                if time.monotonic() >= until:
                    return
                self._turn(until)

        return self._visit(work, until)

    def do(self, work: Callable[[], None]) -> bool:
        """Do something in the loop's place; return False if others turn it this moment."""
        return self._visit(work, None)

    def _visit(self, work: Callable[[], None], until: float | None) -> bool:
        with _Undisturbed(self._interrupt):
            if not self._enter(until):
                return False
            try:
                work()
            except BaseException as error:  # which ends the loop, as it would in its own thread
                self._failure = error
                self.stop()
            finally:
                self._leave()
        return True

    def _enter(self, until: float | None) -> bool:
        """Be the guest; without `until`, only if nobody is in a turn."""
        with self._lock:
            if self._guest or self.stopping or (self._own and until is None):
                return False
            self._guest, self._interrupted, self._came_at = True, False, time.monotonic()
            while self._own and not (self.stopping or self._interrupted):
                self._ring()
                left = 0.0 if until is None else until - time.monotonic()
                if not self._changed.wait(max(0.0, min(left, TURN_SECONDS))):
                    break
            self._guest = not (self._own or self.stopping)
            return self._guest

    def _leave(self) -> None:
        with self._lock:
            self._guest = False
            go_on = self.stopping or self._busy()
            self._back_at = 0.0 if go_on else time.monotonic() + PAUSE
            if go_on or self._asleep:
                self._changed.notify_all()

    def _interrupt(self) -> None:
        self._interrupted = True
        self._ring()


def _nothing(_until: float = 0.0) -> bool:
    """Turn a loop that has ended."""
    return False


class _Undisturbed:
    """A block in which no handler of a signal raises: those of Python's are called at its end.

    Python calls them between any two steps of the main thread, and of no other.

    Args:
        note: Called when one is held back.
    """

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._inside = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        found: list[Any] = [_signal.getsignal(number) for number in NUMBERS]
        self._handlers = {n: found[n - 1] for n in NUMBERS if callable(found[n - 1])}
        for number in self._handlers:
            with contextlib.suppress(ValueError):  # not in the main interpreter: none is called
                _signal.signal(number, self._hold)
        self._inside = True

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._inside:
            self._came.append((number, frame))
            self._note()
        else:  # it raises perhaps, before others are put back: so be it, they do the same as before
            self._handlers[number](number, frame)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside = False
        for number, handler in self._handlers.items():
            with contextlib.suppress(ValueError):
                _signal.signal(number, handler)
        self._call()

    def _call(self) -> None:
        if self._came:
            number, frame = self._came.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._call()
