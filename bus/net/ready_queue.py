"""Passes ready versions from the worker's thread to the user's thread.

The queue holds at most one version per model: a newer version replaces an older one. A thread that
waits for a version adds a `Waiter`. The worker's thread may claim the waiter, apply the version
instead of the waiting thread, and then wake that thread with the result. Versions that are
published as one are added and taken together.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from msgspec import structs

from ..errors import AddressError, ApplyError, ClosedError, RefusedError
from ..protocol_limits import MODELS_MAX
from ..staged import StagedVersion


class Waiter:
    """A thread that waits for a version, and the result if another thread applies the version.

    Each waiter has its own lock, which wakes the thread. A condition variable would wake the thread
    twice, since the notifying thread still holds the condition's lock.

    Attributes:
        models: The models that the thread waits for; None: any.
        claimed: Whether another thread is applying the version, or has applied it.
        over: Whether the apply in the other thread has ended.
        update: The update that was applied, if any.
        error: The exception to raise.
    """

    __slots__ = ("_wake_lock", "claimed", "error", "models", "over", "update")

    def __init__(self, models: frozenset[str] | None) -> None:
        self.models, self.claimed, self.over = models, False, False
        self._wake_lock = threading.Lock()  # locked while the thread sleeps
        self._wake_lock.acquire()
        self.update: Any = None
        self.error: BaseException | None = None

    def end(self, update: object, error: BaseException | None = None) -> None:
        """Set the result, which the waiting thread returns after it is woken."""
        self.update, self.error = update, error
        self.over = True

    def concerns(self, models: frozenset[str] | None) -> bool:
        """True if the result is about one of these models (None: any), or about no single model."""
        model = getattr(self.update or self.error, "model", None)
        return models is None or model is None or model in models

    def wake(self) -> None:
        """Wake the waiting thread, which then checks whether to wait again."""
        try:
            self._wake_lock.release()
        except RuntimeError:  # the thread is awake
            return

    def wait(self, seconds: float = threading.TIMEOUT_MAX) -> bool:
        """Wait for `wake`, at most `seconds`; return False if `wake` was not called in time."""
        return self._wake_lock.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))


class ReadyQueue:
    """A queue of ready versions between two threads.

    Args:
        owner: The name of its owner in error texts: `subscriber` or `relay`.

    Attributes:
        lock: Protects all attributes.
        changed: A condition, notified of every change, and when the running version changes.
        joined_epoch: The epoch of the last session that has begun; 0: none has begun.
        asked: Whether any thread ever waited for a version.
    """

    def __init__(self, owner: str = "subscriber") -> None:
        self._owner, self.lock = owner, threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._ready: dict[str, StagedVersion] = {}
        self._waiters: list[Waiter] = []  # waiters that are not claimed
        self._claimed: list[Waiter] = []  # claimed waiters that must be woken
        # Results that the next `take` returns, since the thread that waited for them has stopped.
        self._leftover: deque[Waiter] = deque(maxlen=MODELS_MAX)
        self._errors: deque[ApplyError] = deque(maxlen=MODELS_MAX)
        self._refusal: RefusedError | AddressError | None = None
        self._closed: BaseException | None = None  # why no version will come any more
        self.joined_epoch = 0
        self.asked = False
        # (model, epoch, number) of the versions for which threads wait by `awaiting`.
        self._awaited: set[tuple[str, int, int]] = set()
        # Those of these versions that are staged and wait for a commit.
        self._staged: dict[tuple[str, int, int], StagedVersion] = {}
        self._flushed = 0  # the highest mark of `flush`

    # For the worker's thread.

    def put(self, *ready: StagedVersion) -> list[StagedVersion]:
        """Add versions to be applied together; return the older versions that they replace."""
        with self.lock:
            replaced: list[StagedVersion] = []
            for staged in ready:
                older = self._ready.pop(staged.model, None)
                if older is not None and older.key != staged.key:
                    replaced.append(older)
                self._ready[staged.model] = staged
            self._notify_all()
            return replaced

    def claim(self, model: str) -> Waiter | None:
        """Claim and return a waiter for this model; None if there is none or the queue is closed.

        The caller must call the waiter's `end`, then `wake`.
        """
        with self.lock:
            for waiter in self._waiters if self._closed is None else ():
                if waiter.models is None or model in waiter.models:
                    self._waiters.remove(waiter)
                    self._claimed.append(waiter)
                    waiter.claimed = True
                    return waiter
            return None

    def wake(self) -> None:
        """Wake the threads whose waiters were claimed, so that they see their results."""
        while self._claimed:
            self._claimed.pop().wake()

    def put_back(self, staged: StagedVersion) -> list[StagedVersion]:
        """Put back a taken version and its `others`; return those that a newer version replaces."""
        with self.lock:
            alone = structs.replace(staged, others=()) if staged.others else staged
            versions = alone, *staged.others
            replaced = [each for each in versions if each.model in self._ready]
            self._ready |= {each.model: each for each in versions if each.model not in self._ready}
            self._notify_all()
            return replaced

    def add_staged(self, staged: StagedVersion) -> None:
        """Add a staged version that its publisher has not committed, if a thread waits for it."""
        with self.lock:
            awaited = (staged.model, *staged.key)
            if awaited in self._awaited:
                self._staged[awaited] = staged
                self._notify_all()

    def flush(self, mark: int) -> None:
        """Record that the publisher has received all messages before this mark."""
        with self.lock:
            self._flushed = max(self._flushed, mark)
            self._notify_all()

    def reject(self, error: ApplyError) -> None:
        """Queue the error of a version that could not be applied, once for each version."""
        with self.lock:
            key = (error.model, error.epoch, error.version)
            if error.code == "gone" and key not in self._awaited:
                return  # no thread waits for this version any more
            if key not in [(e.model, e.epoch, e.version) for e in self._errors]:
                self._errors.append(error)
                self._notify_all()

    def refuse(self, error: RefusedError) -> None:
        """Set the error of a refusal by the publisher; waiting threads raise the error."""
        with self.lock:
            self._refusal = error
            self._notify_all()

    @property
    def refused(self) -> bool:
        """Whether the publisher refuses this worker, or the publisher's host has no address."""
        return self._refusal is not None

    @property
    def filled(self) -> bool:
        """Whether `take` for any model returns a version, or raises, without waiting."""
        return bool(self._ready or self._errors or self._refusal or self._closed)

    @property
    def unasked(self) -> StagedVersion | None:
        """A version that is ready, if no thread ever waited for a version; else None."""
        return None if self.asked else next(iter(self._ready.values()), None)

    def set_lookup_error(self, text: str) -> None:
        """Set the error that no address of the publisher is found; "": clear this error."""
        before = self._refusal if isinstance(self._refusal, AddressError) else None
        if text == (str(before) if before is not None else ""):
            return
        with self.lock:
            if text:
                self._refusal = self._refusal or AddressError(text)
                self._notify_all()
            elif before is not None:
                self._refusal = None

    def join(self, epoch: int) -> None:
        """Record that a session of this epoch has begun."""
        with self.lock:
            self._refusal, self.joined_epoch = None, epoch
            self._notify_all()

    def close(self, reason: BaseException) -> None:
        """Record that no version will come any more. Later calls have no effect on the reason."""
        with self.lock:
            self._closed = self._closed or reason
            self._notify_all()

    def close_in_child(self, reason: ClosedError) -> None:
        """Close the queue in a forked child.

        The locks are replaced, since a thread that does not exist in the child may hold them.
        """
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._closed = reason

    # For the user's thread.

    def wake_all(self) -> None:
        """Wake the waiting threads, which then check whether to stop."""
        with self.lock:
            self._notify_all()

    def take(
        self,
        timeout: float | None,
        models: frozenset[str] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> StagedVersion | Waiter | None:
        """Wait for a version; return the version that has been ready for the longest time.

        Returns None after the timeout. If another thread applied a version for this call, returns
        the waiter with the result; the result may be that of an earlier, interrupted call.

        Args:
            timeout: Seconds to wait; None: until there is a version.
            models: The models to wait for; None: any.
            stop: Returns True to end the wait, with the result None; see `wake_all`.

        Raises:
            ApplyError: A version could not be applied.
            RefusedError: The publisher refuses this worker.
            AddressError: The publisher's host has no address.
            ClosedError: No version will come any more.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        waiter = Waiter(models)
        try:
            with self.lock:
                self.asked = True
                for earlier in self._leftover:
                    if earlier.concerns(models):
                        self._leftover.remove(earlier)
                        return earlier
                self._waiters.append(waiter)
                stopped = stop()
                waits = not stopped and not self._has_news(models)
            while waits and waiter.wait(until - time.monotonic()) and not waiter.over:
                with self.lock:
                    stopped = stop()
                    waits = not (waiter.claimed or stopped or self._has_news(models))
        except BaseException:  # Ctrl-C, for instance
            with self.lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            if waiter.claimed:
                self._await_end(waiter)
                self._leftover.append(waiter)
            raise
        if not waiter.claimed:
            with self.lock:
                if not waiter.claimed:
                    return self._take_now(waiter, stopped=stopped)
        self._await_end(waiter)
        return waiter

    def _take_now(self, waiter: Waiter, *, stopped: bool) -> StagedVersion | None:
        """Remove an unclaimed waiter; return a ready version or None, or raise an error."""
        models = waiter.models
        self._waiters.remove(waiter)
        if stopped:
            return None
        if self._closed is not None:
            self.check_alive()
        for model in self._ready:
            if models is None or model in models:
                staged = self._ready.pop(model)
                return self._with_others(staged) if self._ready else staged
        for error in self._errors:
            if models is None or error.model in models:
                self._errors.remove(error)
                raise error
        if self._refusal is not None:
            raise self._refusal
        self.check_open()
        return None

    def _with_others(self, staged: StagedVersion) -> StagedVersion:
        """Take the companions of a version from the queue; return the version with them."""
        pending, others = [staged], list[StagedVersion]()
        while pending:  # companions, and their companions
            one = pending.pop()
            for model, other in tuple(self._ready.items()):
                if model in one.companions or one.model in other.companions:
                    pending.append(self._ready.pop(model))
                    others.append(other)
        return structs.replace(staged, others=tuple(others)) if others else staged

    def _await_end(self, waiter: Waiter) -> None:
        """Wait until the apply in another thread has ended; `take` must not return before."""
        while not waiter.over:
            waiter.wait()

    def keep_update(self, model: str, update: object) -> None:
        """Store the update of a companion, for a later `take`; drop an earlier one of its model."""
        waiter = Waiter(None)
        waiter.end(update)
        with self.lock:
            for older in tuple(self._leftover):
                if getattr(older.update, "model", None) == model:
                    self._leftover.remove(older)
            self._leftover.append(waiter)

    def keep(self, received: "Future[Any]") -> None:
        """Store the result of a call whose caller has stopped waiting, for a later `take`."""
        error, waiter = received.exception(), Waiter(None)
        waiter.end(received.result() if error is None else None, error)
        with self.lock:
            self._leftover.append(waiter)

    @contextmanager
    def awaiting(self, model: str, key: tuple[int, int]) -> Generator[None]:
        """Mark a version as awaited during the block: the queue then keeps its state and errors."""
        awaited = (model, *key)
        self._awaited.add(awaited)
        try:
            yield
        finally:
            with self.lock:
                self._awaited.discard(awaited)
                self._staged.pop(awaited, None)
                for error in tuple(self._errors):
                    failed = (error.model, error.epoch, error.version)
                    if failed == awaited and error.code == "gone":
                        self._errors.remove(error)

    def wait_staged(
        self, model: str, key: tuple[int, int], timeout: float, done: Callable[[], bool]
    ) -> tuple[bool, StagedVersion | None]:
        """Wait until an awaited version is staged or ready, or until `done()`.

        Return (in time, version): (False, None) after the timeout, and None for the version if
        only `done()` is true.

        Raises:
            ApplyError: The version could not be applied.
            RefusedError: The publisher refuses this worker.
            AddressError: The publisher's host has no address.
            ClosedError: No version will come any more.
        """

        def found() -> StagedVersion | None:
            ready = self._ready.get(model)
            return ready if ready and ready.key == key else self._staged.get((model, *key))

        def failed() -> bool:
            return any((e.model, e.epoch, e.version) == (model, *key) for e in self._errors)

        def news() -> bool:
            return bool(found() or done() or failed() or self._refusal or self._closed)

        with self.lock:
            self.asked = True
            self.changed.wait_for(news, timeout)
            if (staged := found()) is not None or done():
                return True, staged
            self._raise_error(model, key)
            return False, None

    def wait_flushed(self, mark: int, timeout: float) -> bool:
        """Wait until the publisher has received all messages before a mark.

        Return False after the timeout, or if the queue was closed before.
        """
        with self.lock:
            self.changed.wait_for(lambda: self._flushed >= mark or self.closed, timeout)
            return self._flushed >= mark

    def take_exact(
        self,
        model: str,
        key: tuple[int, int],
        timeout: float,
        done: Callable[[], bool],
        stop: Callable[[], bool] = lambda: False,
    ) -> StagedVersion | None:
        """Wait until this version is ready, and return it.

        Return None after the timeout, and if `done()` or `stop()` is true before.

        Raises:
            ApplyError: The version could not be applied.
            RefusedError: The publisher refuses this worker.
            AddressError: The publisher's host has no address.
            ClosedError: No version will come any more.
        """

        def is_it(each: StagedVersion | ApplyError) -> bool:
            return (each.model, each.epoch, each.version) == (model, *key)

        def news() -> bool:
            ready, failed = map(is_it, self._ready.values()), map(is_it, self._errors)
            ended = self._refusal is not None or self._closed is not None
            return done() or ended or any(ready) or any(failed) or stop()

        with self.lock:
            self.asked = True
            self.changed.wait_for(news, timeout)
            if stop():
                return None
            self.check_alive()
            if any(map(is_it, self._ready.values())):
                return self._with_others(self._ready.pop(model))
            self._raise_error(model, key, done=done())
            return None

    def _raise_error(self, model: str, key: tuple[int, int], *, done: bool = False) -> None:
        """Raise the error of this version, if any; unless `done`, also of a refusal or close."""
        for error in tuple(self._errors):
            if (error.model, error.epoch, error.version) == (model, *key):
                self._errors.remove(error)
                raise error
        if self._refusal is not None and not done:
            raise self._refusal
        if not done:
            self.check_open()

    def check_open(self) -> None:
        """Raise ClosedError if no version can come any more.

        Raises:
            ClosedError: The subscriber was closed, or one of its threads failed (see the cause).
        """
        if self._closed is not None:
            raise ClosedError.of(self._owner, self._closed)

    def check_alive(self) -> None:
        """Raise ClosedError if a thread has failed. After a normal close, this has no effect.

        Raises:
            ClosedError: A thread has failed; its exception is the cause.
        """
        if self.failure is not None:
            self.check_open()

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a thread of the subscriber; None if no thread has failed."""
        return None if isinstance(self._closed, ClosedError) else self._closed

    @property
    def closed(self) -> bool:
        """Whether no version will come any more."""
        return self._closed is not None

    def _notify_all(self) -> None:
        self.changed.notify_all()
        for waiter in self._waiters + self._claimed:
            waiter.wake()

    def _has_news(self, models: frozenset[str] | None) -> bool:
        # True if a thread that waits for one of these models must wait no longer.
        if self._refusal is not None or self._closed is not None:
            return True
        if models is None:
            return bool(self._ready or self._errors)
        if not models.isdisjoint(self._ready):
            return True
        return bool(self._errors) and any(error.model in models for error in self._errors)

    def wait_joined(self, timeout: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a session has begun; return False after `timeout`, or once `stop()` is true.

        Raises:
            RefusedError: The publisher refuses this worker.
            AddressError: The publisher's host has no address.
            ClosedError: The subscriber was closed.
        """
        with self.lock:
            self.changed.wait_for(
                lambda: bool(self.joined_epoch or self._refusal or self._closed) or stop(), timeout
            )
            self.check_open()
            if self._refusal is not None:
                raise self._refusal
            return self.joined_epoch > 0

    def wait_closed(self, timeout: float) -> bool:
        """Wait until the subscriber is closed; return False after `timeout`."""
        with self.lock:
            return self.changed.wait_for(lambda: self._closed is not None, timeout)
