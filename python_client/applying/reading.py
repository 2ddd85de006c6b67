"""A readers-writer lock: many forward passes share it, and an apply acquires it exclusively.

A waiting writer goes before readers that arrive later, so steady forward passes cannot block new
weights. After a write, all queued readers enter before the next writer, so steady publishing cannot
block readers. A reader or writer may read again inside its own block. So may code that inherits its
context: a task that it starts, or a thread of `asyncio.to_thread`. Therefore the lock counts
blocks, not threads, and a block may end in another thread than the one in which it began.

Every wait has a deadline; the error that follows names the holders of the lock. After a write that
failed half-way, readers get an error until a write succeeds.
"""

import asyncio
import contextlib
import inspect
import logging
import sys
import threading
import time
import weakref
from asyncio import AbstractEventLoop, Task
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...bus.units import span

if TYPE_CHECKING:
    import torch

    from ...codecs.device_copies import Readers

log = logging.getLogger("weightbus.subscriber")

READING_SECONDS = 60.0  # default timeout of a reader that waits for an apply
LOST_SECONDS = 0.5  # a waiting writer checks for lost readers this often, in seconds

T = TypeVar("T")

_CONTEXTLIB = contextlib.__file__  # frames of this file are skipped, to find the user's code

Alive = Callable[[int], bool]  # takes a thread's id; True if the thread is still in its block


class InUseError(TimeoutError):
    """A writer could not begin, since the holders of the lock did not leave in time."""


class Holder:
    """A reader or writer of a lock.

    Attributes:
        lock: The lock.
        activity: What the holder does, for error texts.
        thread: The id of the thread in which the holder began.
        loop, task: The event loop that ran in that thread, and its current task, if any.
        since: When the holder began, in seconds on the monotonic clock.
    """

    __slots__ = ("__weakref__", "activity", "lock", "loop", "since", "task", "thread")

    def __init__(self, lock: "ReadingLock", activity: str) -> None:
        """Record this thread, task and time."""
        self.lock, self.activity = lock, activity
        self.thread, self.since = threading.get_ident(), time.monotonic()
        self.loop: AbstractEventLoop | None = asyncio._get_running_loop()  # noqa: SLF001
        self.task: weakref.ref[Task[Any]] | None = None  # weak: a task may be dropped
        if self.loop is not None and (task := asyncio.current_task()) is not None:
            self.task = weakref.ref(task)

    def add_to_context(self) -> None:
        """Add this holder to this context, and so to contexts copied from it later."""
        holders = _holders.get()
        _holders.set((*(h for h in holders if h.lock.has(h)), self) if holders else (self,))

    def remove_from_context(self) -> None:
        """Remove this holder from this context."""
        holders = _holders.get()
        if holders and holders[-1] is self:  # elsewhere, the next `add_to_context` removes it
            _holders.set(holders[:-1])

    def __str__(self) -> str:
        seconds = span(time.monotonic() - self.since)
        return f"{self.activity}{self._where()} in {self._who()} for {seconds}"

    def _where(self) -> str:
        """Return where in the user's code the holder began; an empty text if unknown."""
        return ""

    def _who(self) -> str:
        names = {t.ident: t.name for t in threading.enumerate()}
        thread = f"thread {names.get(self.thread, f'{self.thread} (ended)')}"
        if self.task is None:
            return thread
        task = self.task()
        if task is None:
            return f"a task (ended) of {thread}"
        code = getattr(task.get_coro(), "__qualname__", "?").removeprefix("<locals>.")
        return f"task {task.get_name()} ({code.rpartition('<locals>.')[2]}) of {thread}"


# The holders that this context began or inherited. Some of them may have left the lock.
_holders: ContextVar[tuple[Holder, ...]] = ContextVar("weightbus_held", default=())


class Reading(Holder, Generic[T]):
    """A block in which nothing is written: a context manager for `with` and `async with`.

    Args:
        lock: The lock to acquire.
        timeout: Seconds to wait for a writer.
        running: Returns the value that the block yields.
        model: The id of the only model that is read: errors of other models do not matter. None:
            all models are read.
        missing: Returns an error text while a needed version is missing, else an empty text. The
            reader waits until the text is empty.
        activity: What the block does, for error texts of waiting writers.
        alive: Returns whether a thread is still in the block. For blocks that hooks begin and end,
            since torch may not call the hook that ends the block.

    Raises:
        TimeoutError: A writer took longer than `timeout` seconds; the text names the writer. Or a
            needed version was still missing.
        RuntimeError: A plain `with` would wait for another task of its own event loop, which cannot
            continue meanwhile. Or the block has begun already.
        Exception: The error that a writer passed to `mark_invalid` or `release_readers`.
    """

    __slots__ = (
        "_at",
        "_awaited",
        "_code",
        "_running",
        "alive",
        "asynchronous",
        "missing",
        "model",
        "timeout",
    )

    def __init__(
        self,
        lock: "ReadingLock",
        timeout: float,
        running: Callable[[], T],
        model: str | None = None,
        *,
        missing: Callable[[], str] | None = None,
        activity: str = "reading (`reading()`)",
        alive: Alive | None = None,
    ) -> None:
        self.lock, self.activity = lock, activity  # `_begin` sets the other attributes of a Holder
        self.timeout, self._running, self.model = timeout, running, model
        self.missing, self.alive, self.asynchronous = missing, alive, False
        self._awaited: list[None] | None = None
        # Where the block began. A reference to the frame would keep a generator's block alive.
        self._code: CodeType | None = None
        self._at = 0

    def __enter__(self) -> T:
        self._begin(asynchronous=False)
        self.lock.enter(self)
        self.add_to_context()
        if self.loop is not None and self.task is not None and self.alive is None:
            self._awaited = []
            self.loop.call_soon(self._awaited.append, None)  # runs only if the block awaits
        return self._running()

    def __exit__(self, *error: object) -> None:
        self.remove_from_context()
        self.lock.leave(self)
        if self._awaited:
            self.lock.warn_of_await(self)
        self._awaited = None

    def begin_again(self) -> bool:
        """Begin another block in the same thread, if that needs no wait; return whether it began.

        `ReadingLock.leave` ends the block. The reader stays in its context between two blocks, and
        counts only while it reads: setting a context variable costs more than the lock.
        """
        if not self.lock.enter_at_once(self):
            return False
        self.since = time.monotonic()
        if self not in _holders.get()[-1:]:
            self.add_to_context()
        return True

    async def __aenter__(self) -> T:
        self._begin(asynchronous=True)
        await self.lock.enter_async(self)
        self.add_to_context()
        return self._running()

    async def __aexit__(self, *error: object) -> None:
        self.remove_from_context()
        self.lock.leave(self)

    def _begin(self, *, asynchronous: bool) -> None:
        if self.lock.has(self):
            raise RuntimeError(f"this block has begun already ({self}): call reading() again")
        self.asynchronous = asynchronous
        super().__init__(self.lock, self.activity)
        if self.alive is None:  # otherwise a hook begins the block, not the user's code
            frame = sys._getframe(2)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            while frame.f_code.co_filename == _CONTEXTLIB and frame.f_back is not None:
                frame = frame.f_back
            self._code, self._at = frame.f_code, frame.f_lasti

    def _where(self) -> str:
        """Return the file, line and function in which the block began, for error texts."""
        if self._code is None:
            return ""
        *_, folder, file = ("", *Path(self._code.co_filename).parts)
        spans = [*self._code.co_positions()]
        line = next((n for n, *_ in spans[self._at // 2 :] if n is not None), "?")
        function = self._code.co_qualname.rpartition("<locals>.")[2]
        generator = ", a generator, which leaves when it is read to its end or closed"
        function += generator * bool(self._code.co_flags & inspect.CO_GENERATOR)
        return f" at {folder}/{file}:{line} ({function})"

    @property
    def lost(self) -> bool:
        """Whether the reader ended without leaving the lock, or can never leave it."""
        if self.loop is not None and self.loop.is_closed():
            return True
        return self.alive is not None and not self.alive(self.thread)


class ReadingLock:
    """A readers-writer lock that prefers a waiting writer, and after a write the queued readers.

    Without a writer, a reader acquires no system lock: it registers itself, then checks for an
    active or waiting writer. A writer registers as waiting, then checks for readers. So at least
    one of the two sees the other.

    Attributes:
        invalid: By model id, the error that left the model without a version. Only a writer changes
            this.
        streams: The CUDA streams of readers; None: no target is on a device. Only a writer changes
            this.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)  # wakes waiting writers
        self._readers: dict[Reading[Any], None] = {}
        # The queued readers, each with the function that wakes its thread or task.
        self._queue: dict[Reading[Any], Callable[[], object]] = {}
        self._writer: Holder | None = None
        self._waiting_writers = 0
        self.invalid: dict[str, Exception] = {}
        # Model id and error of a writer whose deadline has passed, and that still runs.
        self._overdue: tuple[str, Exception] | None = None
        self._warned = False
        self.streams: Readers | None = None

    def reads_on(self, devices: "frozenset[torch.device]") -> None:
        """Make later writers also wait for work that readers started on these CUDA devices.

        The work may continue after the reader's block. The devices wait for it, not the host:
        copies in the writer's current streams are ordered after the work; see `wait_for_readers`.
        """
        if devices and self.streams is None:
            from ...codecs.device_copies import Readers

            self.streams = Readers()
        if self.streams is not None:
            self.streams.devices |= devices

    def wait_for_readers(self) -> None:
        """Make this thread's CUDA streams wait for work from `reading` blocks that have ended."""
        if self.streams is not None:
            self.streams.wait_for_readers()

    def reading(self, timeout: float = READING_SECONDS, model: str | None = None) -> Reading[None]:
        """Return a context manager within which no version is written; see `Reading`."""
        return Reading(self, timeout, lambda: None, model)

    # For readers.

    def enter(self, reading: Reading[Any]) -> None:
        """Wait until this thread may read. The caller must call `leave` later."""
        if self.enter_at_once(reading):
            return
        woken = threading.Event()
        with self._entering(reading, woken.set) as is_queued:
            if is_queued:
                woken.wait(reading.timeout)

    def enter_at_once(self, reading: Reading[Any]) -> bool:
        """Enter if that needs no wait; return whether the reader entered, so must `leave` later."""
        self._readers[reading] = None
        if self._waiting_writers or self._writer or self.invalid or reading.missing is not None:
            del self._readers[reading]
            return False
        return True

    async def enter_async(self, reading: Reading[Any]) -> None:
        """Wait until this task may read. The caller must call `leave` later."""
        if self.enter_at_once(reading):
            return
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        with self._entering(reading, partial(_call_in, loop, woken.set)) as is_queued:
            if is_queued:
                with suppress(TimeoutError):
                    async with asyncio.timeout(reading.timeout):
                        await woken.wait()

    def leave(self, reading: Reading[Any]) -> None:
        """Remove a reader, unless a writer has already removed it as lost."""
        try:
            if self.streams is not None:
                self.streams.record_end()
        finally:
            self._readers.pop(reading, None)
            if self._waiting_writers:
                with self._lock:
                    self._free.notify_all()

    @contextmanager
    def _entering(self, reading: Reading[Any], wake: Callable[[], object]) -> Generator[bool]:
        """Enter or queue; yield whether the reader is queued, so that the caller must wait."""
        with self._lock:
            inside = self.held  # if True, no other writer can begin before this reader
            self._free.notify_all()  # a writer may have seen the reader in `enter_at_once`
            is_queued = not self._need_not_wait(reading, inside=inside)
            if is_queued:
                self._queue[reading] = wake
            else:
                self._readers[reading] = None
        try:
            yield is_queued
            with self._lock:
                self._check_entered(reading, inside=inside)
        except BaseException:
            with self._lock:
                self._queue.pop(reading, None)
                self.leave(reading)
            raise

    def _need_not_wait(self, reading: Reading[Any], *, inside: bool) -> bool:
        """Return whether a reader can read now, or gets an error now."""
        if inside or self._overdue is not None:
            return True
        free = not (self._writer or self._waiting_writers) or self._goes_first(reading)
        return free and self._misses_nothing(reading)

    def _misses_nothing(self, reading: Reading[Any]) -> bool:
        invalid = any(reading.model in (None, model) for model in self.invalid)
        return reading.missing is None or invalid or not reading.missing()

    def _goes_first(self, reading: Reading[Any]) -> bool:
        """Return whether a `with` block goes before a waiting writer, not to block its event loop.

        It does so if the writer waits for an `async with` block of the same event loop. A `with`
        block without an `await` ends before that block can, so the writer is not delayed.

        Raises:
            RuntimeError: The writer waits only for `with` blocks of this event loop. These blocks
                await, and more of them could block the writer forever.
        """
        loop = None if reading.asynchronous else reading.loop
        same_loop = [r for r in [*self._readers] if r.loop is loop] if loop is not None else []
        if same_loop and not any(r.asynchronous for r in same_loop):
            raise RuntimeError(
                "new weights wait for this event loop, which would block if this waited for them: "
                f"{_all(same_loop)}. Use `async with` in coroutines: async with worker.reading()"
            )
        return bool(same_loop)

    def _check_entered(self, reading: Reading[Any], *, inside: bool) -> None:
        """Check that a reader has entered, and that each model that it reads runs a version."""
        is_queued = reading in self._queue
        if is_queued and (self._writer or self._waiting_writers):
            raise TimeoutError(
                f"weights were being applied for more than {reading.timeout} s: {self.blocked_by}"
            )
        overdue = None if inside else self._overdue
        for invalid, error in (*self.invalid.items(), *([overdue] if overdue else [])):
            if reading.model in (None, invalid):
                raise error.with_traceback(None)
        missing = "" if reading.missing is None else reading.missing()
        if is_queued or missing:
            raise TimeoutError(f"{missing} (waited {reading.timeout:g} s)")

    @property
    def blocked_by(self) -> str:
        """A text that names the holders of the lock: the writer, or, without one, the readers."""
        return _all([self._writer] if self._writer else self._readers)

    def has(self, holder: Holder) -> bool:
        """Return whether `holder` reads, writes, or is queued to read."""
        return holder in self._readers or holder in self._queue or holder is self._writer

    @property
    def held(self) -> bool:
        """Whether this context, or the one from which it was copied, holds the lock."""
        return any(h is self._writer or h in self._readers for h in _holders.get())

    def warn_of_await(self, reading: Reading[Any]) -> None:
        """Log, once for this lock, that a plain `with` block has awaited."""
        if not self._warned:
            self._warned = True
            log.warning(
                "%s, with an await inside: other tasks of its event loop cannot queue there while "
                "new weights are waiting to be applied. Use `async with` in coroutines: "
                "async with worker.reading()",
                reading,
            )

    # For writers.

    def check_not_reading(self) -> None:
        """Check that this thread or task reads nothing: otherwise a write waits for it for ever.

        Raises:
            RuntimeError: It is inside a reading block.
        """
        me = threading.get_ident()
        holders = _holders.get()
        own = [reading for reading in [*self._readers] if reading in holders]
        # A context may inherit the reader of a forward pass that runs in another thread.
        if any(reading.alive is None or reading.thread == me for reading in own):
            raise RuntimeError("receive() inside reading(): leave the reading block first")

    @contextmanager
    def writing(
        self,
        timeout: float,
        activity: str = "applying a version",
        *,
        stop: Callable[[], bool] = lambda: False,
        waiting: Callable[[str], object] | None = None,
    ) -> Generator[None]:
        """Hold the lock exclusively during the `with` block.

        Args:
            timeout: Seconds to wait for other holders to leave.
            activity: What the block does, for error texts.
            stop: Returns whether to stop waiting; see `look`.
            waiting: Called repeatedly during the wait, with a text that names the holders.

        Raises:
            InUseError: The lock was not free in time, or `stop` returned True; names the holders.
            RuntimeError: This thread or task is reading; or tasks of this thread's event loop are
                reading, and the wait would block them.
        """
        writer = Holder(self, activity)
        with self._lock:
            if self._readers:
                self.check_not_reading()
            self._waiting_writers += 1
            try:
                is_free = not (self._writer or self._readers or stop())
                if not (is_free or self._wait_until_free(timeout, writer, stop, waiting)):
                    raise InUseError(
                        f"the weights were in use for more than {timeout} s: {self.blocked_by}"
                    )
                self._writer = writer  # before `_waiting_writers` falls: readers must see either
                writer.since = time.monotonic()
            finally:
                self._waiting_writers -= 1
                if not (self._writer or self._waiting_writers):
                    self._admit_queued()
        writer.add_to_context()
        try:
            yield
        finally:
            self.end_write()
            writer.remove_from_context()

    def begin_write(self, activity: str) -> bool:
        """Begin to write if the lock is free; return whether it was free.

        If so, the caller must call `end_write`. Until then, call no user code: the context does not
        have this writer, so a read in that code would wait for its own thread.
        """
        writer = Holder(self, activity)
        with self._lock:
            self._waiting_writers += 1  # a reader either sees this, or is seen below
            if not (self._writer or self._readers):
                self._writer = writer
            self._waiting_writers -= 1
            if self._writer is not writer:
                if not (self._writer or self._waiting_writers):
                    self._admit_queued()
                return False
        return True

    def end_write(self) -> None:
        """End the write: admit queued readers, and wake waiting writers."""
        with self._lock:
            self._writer = self._overdue = None
            if self._queue:
                self._admit_queued()
            if self._waiting_writers:
                self._free.notify_all()

    def _wait_until_free(
        self,
        timeout: float,
        writer: Holder,
        stop: Callable[[], bool],
        waiting: Callable[[str], object] | None,
    ) -> bool:
        """Wait until the lock is free; remove lost readers. Return False on timeout or `stop`."""
        deadline = time.monotonic() + timeout
        while True:
            seconds = min(LOST_SECONDS, deadline - time.monotonic())
            if timeout > 0:
                self._check_may_wait(writer)
            if self._free.wait_for(lambda: not (self._writer or self._readers) or stop(), seconds):
                return not (self._writer or self._readers or stop())
            if time.monotonic() >= deadline:
                return False
            for reader in [*self._readers]:
                if reader.lost:
                    self._readers.pop(reader, None)
            if waiting is not None and (holders := self.blocked_by):
                waiting(holders)

    def _check_may_wait(self, writer: Holder) -> None:
        # Readers enter and leave without the system lock, so iterate over a copy.
        same_loop = [r for r in [*self._readers] if r.loop is writer.loop is not None]
        if same_loop:
            raise RuntimeError(
                "new weights wait for this event loop, which this call would block: "
                f"{_all(same_loop)}. In coroutines, await worker.receive_awaitable()"
            )

    def look(self) -> None:
        """Make waiting writers call `stop` again."""
        with self._lock:
            self._free.notify_all()

    def _admit_queued(self) -> None:
        """Admit the queued readers, except those that still miss a needed version."""
        for reading, wake in [*self._queue.items()]:
            if self._overdue is not None or self._misses_nothing(reading):
                del self._queue[reading]
                reading.since = time.monotonic()
                self._readers[reading] = None
                wake()

    def mark_invalid(self, model: str, error: Exception) -> None:
        """Record that a model runs no version: its readers get `error`. For the writer only."""
        self.invalid[model] = error

    def release_readers(self, model: str, error: Exception) -> None:
        """Make readers of a model get `error` at once, until the overdue writer has ended."""
        with self._lock:
            self._overdue = model, error
            self._admit_queued()

    def mark_valid(self, model: str) -> bool:
        """Undo `mark_invalid`; return whether the model was invalid. For the writer only."""
        return self.invalid.pop(model, None) is not None


def _all(holders: Iterable[Holder]) -> str:
    return "; ".join(map(str, [*holders]))


def _call_in(loop: AbstractEventLoop, call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed, so the task has ended
        loop.call_soon_threadsafe(call)
