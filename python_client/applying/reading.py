"""A readers-writer lock: many forward passes share it, and an apply takes it exclusively.

A waiting writer goes before readers that arrive later, so steady forward passes cannot block new
weights. After a write, all queued readers enter before the next writer, so steady publishing cannot
block readers. A reader or writer may read inside its own block, and so may code that inherits its
context: a task that it starts, a thread of `asyncio.to_thread`. So the lock counts blocks, not
threads, and a block may end in another thread than it began in.

Every wait has a deadline, and the error after it names the holders of the lock. After a write that
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
LOST_SECONDS = 0.5  # seconds between two checks of a waiting writer for lost readers

T = TypeVar("T")

_CONTEXTLIB = contextlib.__file__  # frames of this file are skipped, to find the user's code

Alive = Callable[[int], bool]  # takes a thread's id; True if the thread is still in its block


class InUseError(TimeoutError):
    """A writer could not write, since readers did not leave in time."""


class Holder:
    """A reader or writer of a lock.

    Attributes:
        lock: The lock.
        doing: What the holder does, for error texts.
        thread: The id of the thread in which the holder began.
        loop, task: The event loop that ran in that thread, and its current task, if any.
        since: When the holder began, in seconds on the monotonic clock.
    """

    __slots__ = ("__weakref__", "doing", "lock", "loop", "since", "task", "thread")

    def __init__(self, lock: "ReadingLock", doing: str) -> None:
        """Record this thread, task and time."""
        self.lock, self.doing = lock, doing
        self.thread, self.since = threading.get_ident(), time.monotonic()
        self.loop: AbstractEventLoop | None = asyncio._get_running_loop()  # noqa: SLF001
        self.task: weakref.ref[Task[Any]] | None = None  # weak: a task may be dropped
        if self.loop is not None and (task := asyncio.current_task()) is not None:
            self.task = weakref.ref(task)

    def hold(self) -> None:
        """Add this holder to this context, and so to contexts copied from it later."""
        held = _held.get()
        _held.set((*(h for h in held if h.lock.has(h)), self) if held else (self,))

    def let_go(self) -> None:
        """Remove this holder from this context."""
        held = _held.get()
        if held and held[-1] is self:  # in another context, `hold` drops it later
            _held.set(held[:-1])

    def __str__(self) -> str:
        seconds = span(time.monotonic() - self.since)
        return f"{self.doing}{self._where()} in {self._who()} for {seconds}"

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
_held: ContextVar[tuple[Holder, ...]] = ContextVar("weightbus_held", default=())


class Reading(Holder, Generic[T]):
    """A block in which nothing is written: a context manager for `with` and `async with`.

    Args:
        lock: The lock to take.
        timeout: Seconds to wait for a writer.
        running: Returns the value that the block yields.
        model: The id of the only model that is read: errors of other models do not matter. None:
            all models are read.
        lacks: Returns an error text while a needed version is missing, else an empty text. The
            reader waits until the text is empty.
        doing: What the block does, for error texts of waiting writers.
        alive: Returns whether a thread is still in the block. For blocks that hooks begin and end,
            since torch may not call the ending hook.

    Raises:
        TimeoutError: A writer took longer than `timeout` seconds; the text names it. Or a version
            was still missing.
        RuntimeError: A plain `with` would wait for another task of its own event loop, which cannot
            continue meanwhile.
        Exception: The error that a writer passed to `mark_invalid` or `release_readers`.
    """

    __slots__ = (
        "_at",
        "_awaited",
        "_code",
        "_running",
        "alive",
        "asynchronous",
        "lacks",
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
        lacks: Callable[[], str] | None = None,
        doing: str = "reading (`reading()`)",
        alive: Alive | None = None,
    ) -> None:
        self.lock, self.doing = lock, doing  # `_begin` sets the other attributes of a Holder
        self.timeout, self._running, self.model = timeout, running, model
        self.lacks, self.alive, self.asynchronous = lacks, alive, False
        self._awaited: list[None] | None = None
        # Where the block began. A reference to the frame would keep a generator's block alive.
        self._code: CodeType | None = None
        self._at = 0

    def __enter__(self) -> T:
        self._begin(asynchronous=False)
        self.lock.enter(self)
        self.hold()
        if self.loop is not None and self.task is not None and self.alive is None:
            self._awaited = []
            self.loop.call_soon(self._awaited.append, None)  # runs only if the block awaits
        return self._running()

    def __exit__(self, *error: object) -> None:
        self.let_go()
        self.lock.leave(self)
        if self._awaited:
            self.lock.warn_of_await(self)
        self._awaited = None

    def again(self) -> bool:
        """Begin again in the same thread, if that needs no wait; return whether it began.

        `ReadingLock.leave` ends the block. The reader stays in its context between two blocks, and
        counts only while it reads: setting a context variable costs more than the lock.
        """
        if not self.lock.enter_at_once(self):
            return False
        self.since = time.monotonic()
        if self not in _held.get()[-1:]:
            self.hold()
        return True

    async def __aenter__(self) -> T:
        self._begin(asynchronous=True)
        await self.lock.enter_async(self)
        self.hold()
        return self._running()

    async def __aexit__(self, *error: object) -> None:
        self.let_go()
        self.lock.leave(self)

    def _begin(self, *, asynchronous: bool) -> None:
        if self.lock.has(self):
            raise RuntimeError(f"this block has begun already ({self}): call reading() for each")
        self.asynchronous = asynchronous
        super().__init__(self.lock, self.doing)
        if self.alive is None:  # otherwise a hook begins the block, not the user's code
            frame = sys._getframe(2)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            while frame.f_code.co_filename == _CONTEXTLIB and frame.f_back is not None:
                frame = frame.f_back
            self._code, self._at = frame.f_code, frame.f_lasti

    def _where(self) -> str:
        """Return the file, line and function in which the block begins, for error texts."""
        if self._code is None:
            return ""
        *_, folder, file = ("", *Path(self._code.co_filename).parts)
        spans = [*self._code.co_positions()]
        line = next((n for n, *_ in spans[self._at // 2 :] if n is not None), "?")
        of = self._code.co_qualname.rpartition("<locals>.")[2]
        generator = ", a generator, which leaves when it is read to its end or closed"
        held = generator * bool(self._code.co_flags & inspect.CO_GENERATOR)
        return f" at {folder}/{file}:{line} ({of}{held})"

    @property
    def lost(self) -> bool:
        """Whether the reader ended without leaving the lock, or can never leave it."""
        if self.loop is not None and self.loop.is_closed():
            return True
        return self.alive is not None and not self.alive(self.thread)


class ReadingLock:
    """A readers-writer lock that prefers the writer, and then the readers that have queued.

    Without a writer, a reader takes no system lock: it registers itself, then checks for an active
    or waiting writer. A writer registers as waiting, then checks for readers. So at least one of
    the two sees the other.

    Attributes:
        invalid: By model id, the error that left the model without a version. Only a writer changes
            it.
        streams: The CUDA streams of readers; None: no target is on a device. Only a writer changes
            it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._left = threading.Condition(self._lock)  # wakes waiting writers
        self._readers: dict[Reading[Any], None] = {}
        # The queued readers, each with the function that wakes its thread or task.
        self._queue: dict[Reading[Any], Callable[[], object]] = {}
        self._writer: Holder | None = None
        self._waiting_writers = 0
        self.invalid: dict[str, Exception] = {}
        # Model id and error of a writer that has missed its deadline and still runs.
        self._late: tuple[str, Exception] | None = None
        self._warned = False
        self.streams: Readers | None = None

    def reads_on(self, devices: "frozenset[torch.device]") -> None:
        """Make later writers also wait for work that readers started on these CUDA devices.

        Such work may go on after the reader's block. The devices wait for this work, not the host:
        copies in the writer's current streams are ordered after it; see `wait_for_readers`.
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
        with self._in_line(reading, woken.set) as waits:
            if waits:
                woken.wait(reading.timeout)

    def enter_at_once(self, reading: Reading[Any]) -> bool:
        """Enter if this needs no wait; return whether it entered. If so, call `leave` later."""
        self._readers[reading] = None
        if self._waiting_writers or self._writer or self.invalid or reading.lacks is not None:
            del self._readers[reading]
            return False
        return True

    async def enter_async(self, reading: Reading[Any]) -> None:
        """Wait, in a task, until it may read. The caller must call `leave` later."""
        if self.enter_at_once(reading):
            return
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        with self._in_line(reading, partial(_call_in, loop, woken.set)) as waits:
            if waits:
                with suppress(TimeoutError):
                    async with asyncio.timeout(reading.timeout):
                        await woken.wait()

    def leave(self, reading: Reading[Any]) -> None:
        """Remove a reader; do nothing if a writer has removed it already, as lost."""
        try:
            if self.streams is not None:
                self.streams.record_end()
        finally:
            self._readers.pop(reading, None)
            if self._waiting_writers:
                with self._lock:
                    self._left.notify_all()

    @contextmanager
    def _in_line(self, reading: Reading[Any], wake: Callable[[], object]) -> Generator[bool]:
        """Enter or queue; yield whether the reader is queued, so its thread must wait."""
        with self._lock:
            inside = self.held  # if True, no other writer can begin before this reader
            self._left.notify_all()  # a writer may have seen the reader in `enter_at_once`
            waits = not self._is_due(reading, inside=inside)
            if waits:
                self._queue[reading] = wake
            else:
                self._readers[reading] = None
        try:
            yield waits
            with self._lock:
                self._check_in(reading, inside=inside)
        except BaseException:
            with self._lock:
                self._queue.pop(reading, None)
                self.leave(reading)
            raise

    def _is_due(self, reading: Reading[Any], *, inside: bool) -> bool:
        """Return whether a reader need not wait: it can read now, or gets an error now."""
        if inside or self._late is not None:
            return True
        free = not (self._writer or self._waiting_writers) or self._passes(reading)
        return free and self._has_all_for(reading)

    def _has_all_for(self, reading: Reading[Any]) -> bool:
        invalid = any(reading.model in (None, model) for model in self.invalid)
        return reading.lacks is None or invalid or not reading.lacks()

    def _passes(self, reading: Reading[Any]) -> bool:
        """Return whether a `with` block goes before a waiting writer, not to block its thread.

        A `with` block does so if the writer waits for an `async with` block of the same event loop.
        A `with` block without an `await` ends before that block can, so the writer is not delayed.

        Raises:
            RuntimeError: The writer waits only for `with` blocks of this event loop. These blocks
                await, and more of them could block the writer forever.
        """
        loop = None if reading.asynchronous else reading.loop
        beside = [r for r in [*self._readers] if r.loop is loop] if loop is not None else []
        if beside and not any(r.asynchronous for r in beside):
            raise RuntimeError(
                "new weights wait for this event loop, which would stand still if this waited for "
                f"them: {_all(beside)}. Use `async with` in coroutines: async with worker.reading()"
            )
        return bool(beside)

    def _check_in(self, reading: Reading[Any], *, inside: bool) -> None:
        """Check that a reader has entered, and that each model that it reads runs a version."""
        waits = reading in self._queue
        if waits and (self._writer or self._waiting_writers):
            raise TimeoutError(
                f"weights were being applied for more than {reading.timeout} s: {self.blocked_by}"
            )
        late = None if inside else self._late
        for invalid, error in (*self.invalid.items(), *([late] if late else [])):
            if reading.model in (None, invalid):
                raise error.with_traceback(None)
        lack = "" if reading.lacks is None else reading.lacks()
        if waits or lack:
            raise TimeoutError(f"{lack} (waited {reading.timeout:g} s)")

    @property
    def blocked_by(self) -> str:
        """A text that names the holders of the lock: the writer, or else the readers."""
        return _all([self._writer] if self._writer else self._readers)

    def has(self, holder: Holder) -> bool:
        """Return whether `holder` reads, writes, or is queued to read."""
        return holder in self._readers or holder in self._queue or holder is self._writer

    @property
    def held(self) -> bool:
        """Whether this context reads or writes: this thread or task, or one that started it."""
        return any(h is self._writer or h in self._readers for h in _held.get())

    def warn_of_await(self, reading: Reading[Any]) -> None:
        """Log once that a plain `with` has awaited inside."""
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
        """Raise an error if this thread or task reads, so that it must not wait to write.

        Raises:
            RuntimeError: It is inside a reading block, and would wait for itself.
        """
        me = threading.get_ident()
        held = _held.get()
        reads = [reading for reading in [*self._readers] if reading in held]
        # The reader of a forward pass may be in a context that another thread inherited.
        if any(reading.alive is None or reading.thread == me for reading in reads):
            raise RuntimeError("receive() inside reading(): leave the reading block first")

    @contextmanager
    def writing(
        self,
        timeout: float,
        doing: str = "applying a version",
        *,
        stop: Callable[[], bool] = lambda: False,
        waiting: Callable[[str], object] | None = None,
    ) -> Generator[None]:
        """Hold the lock exclusively during the `with` block.

        Args:
            timeout: Seconds to wait for other holders to leave.
            doing: What the block does, for error texts.
            stop: Returns whether to stop waiting; see `look`.
            waiting: Called repeatedly during the wait, with a text that names the holders.

        Raises:
            InUseError: The lock was not free in time; the text names its holders.
            RuntimeError: This thread or task is reading; or tasks of this thread's event loop are
                reading, and the wait would block them.
        """
        writer = Holder(self, doing)
        with self._lock:
            if self._readers:
                self.check_not_reading()
            self._waiting_writers += 1
            try:
                alone = not (self._writer or self._readers or stop())
                if not (alone or self._wait_alone(timeout, writer, stop, waiting)):
                    raise InUseError(
                        f"the weights were in use for more than {timeout} s: {self.blocked_by}"
                    )
                self._writer = writer  # readers must see the writer before `_waiting_writers` falls
                writer.since = time.monotonic()
            finally:
                self._waiting_writers -= 1
                if not (self._writer or self._waiting_writers):
                    self._let_in()
        writer.hold()
        try:
            yield
        finally:
            self.written()
            writer.let_go()

    def write_at_once(self, doing: str) -> bool:
        """Begin to write if the lock is free; return whether it was free.

        If so, `written` must follow. Until then, call no user code: the context does not have this
        writer, so a read in that code would wait for the writer, which is its own thread.
        """
        writer = Holder(self, doing)
        with self._lock:
            self._waiting_writers += 1  # a reader either sees this, or is seen below
            if not (self._writer or self._readers):
                self._writer = writer
            self._waiting_writers -= 1
            if self._writer is not writer:
                if not (self._writer or self._waiting_writers):
                    self._let_in()
                return False
        return True

    def written(self) -> None:
        """End the write."""
        with self._lock:
            self._writer = self._late = None
            if self._queue:
                self._let_in()
            if self._waiting_writers:
                self._left.notify_all()

    def _wait_alone(
        self,
        timeout: float,
        writer: Holder,
        stop: Callable[[], bool],
        waiting: Callable[[str], object] | None,
    ) -> bool:
        """Wait until the lock is free; remove lost readers. Return False after `timeout`."""
        deadline = time.monotonic() + timeout
        while True:
            look = min(LOST_SECONDS, deadline - time.monotonic())
            if timeout > 0:
                self._check_may_wait(writer)
            if self._left.wait_for(lambda: not (self._writer or self._readers) or stop(), look):
                return not (self._writer or self._readers or stop())
            if time.monotonic() >= deadline:
                return False
            for reader in [*self._readers]:
                if reader.lost:
                    self._readers.pop(reader, None)
            if waiting is not None and (others := self.blocked_by):
                waiting(others)

    def _check_may_wait(self, writer: Holder) -> None:
        # Readers enter and leave without the system lock, so iterate over a copy.
        beside = [r for r in [*self._readers] if r.loop is writer.loop is not None]
        if beside:
            raise RuntimeError(
                "new weights wait for this event loop, which stands still meanwhile: "
                f"{_all(beside)}. In coroutines, await worker.receive_awaitable()"
            )

    def look(self) -> None:
        """Make waiting writers call `stop` again."""
        with self._lock:
            self._left.notify_all()

    def _let_in(self) -> None:
        """Admit queued readers, except those whose needed version is still missing."""
        for reading, wake in [*self._queue.items()]:
            if self._late is not None or self._has_all_for(reading):
                del self._queue[reading]
                reading.since = time.monotonic()
                self._readers[reading] = None
                wake()

    def mark_invalid(self, model: str, error: Exception) -> None:
        """Mark a model as running no version: readers get `error`. For the writer only."""
        self.invalid[model] = error

    def release_readers(self, model: str, error: Exception) -> None:
        """Make all readers get `error` at once, until the late writer has ended."""
        with self._lock:
            self._late = model, error
            self._let_in()

    def mark_valid(self, model: str) -> bool:
        """Undo `mark_invalid` for a model; return whether there was one. For the writer only."""
        return self.invalid.pop(model, None) is not None


def _all(holders: Iterable[Holder]) -> str:
    return "; ".join(map(str, [*holders]))


def _call_in(loop: AbstractEventLoop, call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and its tasks with it
        loop.call_soon_threadsafe(call)
