"""A lock that many readers share and one writer takes alone: forward passes, and an apply.

A writer that waits goes before readers that come later, so that steady forward passes cannot keep
new weights out; and when it is done, all readers that queue are let in before the next writer, so
that steady publishing cannot keep them out either. Who reads or writes may read inside, and so may
whatever has its context: a task that it starts, a thread of `asyncio.to_thread`. So it is blocks
that are counted, not threads, and a block may end in another thread than it began in.

Nobody waits without a deadline, and who gave up is told who was in the way. After a write that
failed half-way there is nothing to read until one has succeeded.
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

from ..bus.units import span

if TYPE_CHECKING:
    import torch

    from ..codecs.device_copies import Readers

log = logging.getLogger("weightbus.subscriber")

READING_SECONDS = 60.0  # that a reader waits for an apply unless told otherwise
LOST_SECONDS = 0.5  # between two looks of a waiting writer at whether readers are still there

T = TypeVar("T")

_CONTEXTLIB = contextlib.__file__  # whose frames are between a block and an ExitStack's user

Alive = Callable[[int], bool]  # tells whether a thread still does what it began


class InUseError(TimeoutError):
    """Readers did not leave in time."""


class Holder:
    """Who reads or writes, and since when.

    Attributes:
        lock: What it holds.
        doing: What is done, for those who wait for its end.
        thread: The one in which it began.
        loop, task: The event loop that ran there, and its task at that moment, if there were any.
        since: When, in seconds on the monotonic clock.
    """

    __slots__ = ("__weakref__", "doing", "lock", "loop", "since", "task", "thread")

    def __init__(self, lock: "ReadingLock", doing: str) -> None:
        """It begins here and now."""
        self.lock, self.doing = lock, doing
        self.thread, self.since = threading.get_ident(), time.monotonic()
        self.loop: AbstractEventLoop | None = asyncio._get_running_loop()  # noqa: SLF001
        self.task: weakref.ref[Task[Any]] | None = None  # one that is dropped meanwhile leaves
        if self.loop is not None and (task := asyncio.current_task()) is not None:
            self.task = weakref.ref(task)

    def hold(self) -> None:
        """From now on it is known to this thread or task, and to those that inherit from it."""
        held = _held.get()
        _held.set((*(h for h in held if h.lock.has(h)), self) if held else (self,))

    def let_go(self) -> None:
        """It is known here no longer."""
        held = _held.get()
        if held and held[-1] is self:  # else it began elsewhere: the lock tells
            _held.set(held[:-1])

    def __str__(self) -> str:
        seconds = span(time.monotonic() - self.since)
        return f"{self.doing}{self._where()} in {self._who()} for {seconds}"

    def _where(self) -> str:
        """Say where in the user's code it began, if that is known."""
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


# What this thread or task holds, or has inherited; some may have been let go meanwhile.
_held: ContextVar[tuple[Holder, ...]] = ContextVar("weightbus_held", default=())


class Reading(Holder, Generic[T]):
    """A block in which nothing is written: for `with`, and in coroutines for `async with`.

    Args:
        lock: What is taken.
        timeout: Seconds to wait for a writer.
        running: Says what is read, for the block.
        model: What alone is read: that another holds no version is no matter. None: all.
        lacks: Says what there is to be read first, and is not; empty: nothing. It is waited for.
        doing: What is done, for writers that wait for its end.
        alive: Where the end may be left out, tells a waiting writer whether it was.

    Raises:
        TimeoutError: A writer was at it for longer than `timeout` seconds; it says who. Or what
            `lacks` says did not come.
        RuntimeError: A block of `with` would have to wait for another task of its own event loop,
            which cannot go on meanwhile.
        Exception: What was handed to `tear`, or, if nobody waits any more, to `despair`.
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
        self.lock, self.doing = lock, doing  # the rest on entering
        self.timeout, self._running, self.model = timeout, running, model
        self.lacks, self.alive, self.asynchronous = lacks, alive, False
        self._awaited: list[None] | None = None
        # Where it began: not the frame, which would keep a generator and its block for ever.
        self._code: CodeType | None = None
        self._at = 0

    def __enter__(self) -> T:
        self._begin(asynchronous=False)
        self.lock.enter(self)
        self.hold()
        if self.loop is not None and self.task is not None and self.alive is None:
            self._awaited = []
            self.loop.call_soon(self._awaited.append, None)  # comes to it only if there is an await
        return self._running()

    def __exit__(self, *error: object) -> None:
        self.let_go()
        self.lock.leave(self)
        if self._awaited:
            self.lock.warn_of_await(self)
        self._awaited = None

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
        if self.alive is None:  # else it is a hook that begins
            frame = sys._getframe(2)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            while frame.f_code.co_filename == _CONTEXTLIB and frame.f_back is not None:
                frame = frame.f_back
            self._code, self._at = frame.f_code, frame.f_lasti

    def _where(self) -> str:
        """Say where it began: threads of a pool, and tasks, lead nowhere."""
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
        """Whether its end was left out, or will never come."""
        if self.loop is not None and self.loop.is_closed():
            return True
        return self.alive is not None and not self.alive(self.thread)


class ReadingLock:
    """A readers-writer lock that prefers the writer, and then the readers that have queued.

    A reader that meets no writer takes no lock of the system's: it notes itself, and only then
    looks whether somebody writes or waits to; a writer says that it waits, and only then looks for
    readers. So one of the two sees the other.

    Attributes:
        torn: By model, what has left it without a version. (For the writer.)
        streams: Of those who read on devices; None: nobody does. (For the writer.)
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._left = threading.Condition(self._lock)  # somebody has, for writers
        self._readers: dict[Reading[Any], None] = {}
        self._queue: dict[Reading[Any], Callable[[], object]] = {}  # and what wakes each
        self._writer: Holder | None = None
        self._waiting_writers = 0
        self.torn: dict[str, Exception] = {}
        # The writer of this model has no time left, and goes on all the same.
        self._late: tuple[str, Exception] | None = None
        self._warned = False
        self.streams: Readers | None = None

    def reads_on(self, devices: "frozenset[torch.device]") -> None:
        """Have writers wait, from now on, for what readers have begun on these CUDA devices, too.

        To leave a block does not end that. It waits there, not here: a writer that copies in this
        thread's current streams need not be told.
        """
        if devices and self.streams is None:
            from ..codecs.device_copies import Readers

            self.streams = Readers()
        if self.streams is not None:
            self.streams.devices |= devices

    def ordered(self) -> None:
        """Have what is begun in this thread's current streams wait for readers that have left."""
        if self.streams is not None:
            self.streams.ordered()

    def reading(self, timeout: float = READING_SECONDS, model: str | None = None) -> Reading[None]:
        """Return a block in which nothing is written; see `Reading`."""
        return Reading(self, timeout, lambda: None, model)

    # For blocks.

    def enter(self, reading: Reading[Any]) -> None:
        """Begin to read, waiting in this thread; `leave` must follow."""
        if self._entered_at_once(reading):
            return
        woken = threading.Event()
        with self._in_line(reading, woken.set) as waits:
            if waits:
                woken.wait(reading.timeout)

    async def enter_async(self, reading: Reading[Any]) -> None:
        """Begin to read, waiting in this task; `leave` must follow."""
        if self._entered_at_once(reading):
            return
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        with self._in_line(reading, partial(_call_in, loop, woken.set)) as waits:
            if waits:
                with suppress(TimeoutError):
                    async with asyncio.timeout(reading.timeout):
                        await woken.wait()

    def leave(self, reading: Reading[Any]) -> None:
        """End what was begun; nothing if a writer took it for one that would not leave any more."""
        try:
            if self.streams is not None:
                self.streams.left()
        finally:
            self._readers.pop(reading, None)
            if self._waiting_writers:
                with self._lock:
                    self._left.notify_all()

    def _entered_at_once(self, reading: Reading[Any]) -> bool:
        self._readers[reading] = None
        if self._waiting_writers or self._writer or self.torn or reading.lacks is not None:
            del self._readers[reading]
            return False
        return True

    @contextmanager
    def _in_line(self, reading: Reading[Any], wake: Callable[[], object]) -> Generator[bool]:
        """Enter; yield whether that has to be waited for, in as much time as the block has."""
        with self._lock:
            inside = self.held  # and nobody writes then, nor will before this is in, too
            self._left.notify_all()  # a writer may have seen this reader, which is none yet
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
        """Tell whether a reader that comes now is let in, if only to be told what is wrong."""
        if inside or self._late is not None:
            return True
        free = not (self._writer or self._waiting_writers) or self._passes(reading)
        return free and self._has_all_for(reading)

    def _has_all_for(self, reading: Reading[Any]) -> bool:
        torn = any(reading.model in (None, model) for model in self.torn)
        return reading.lacks is None or torn or not reading.lacks()

    def _passes(self, reading: Reading[Any]) -> bool:
        """Tell whether a `with` goes before a waiting writer: it would wait for its own thread.

        Without an `await` inside it is over before those of its event loop leave that the writer
        waits for, and delays nobody. With one it might be in the writer's way for ever.
        """
        loop = None if reading.asynchronous else reading.loop
        beside = [r for r in self._readers if r.loop is loop] if loop is not None else []
        if beside and not any(r.asynchronous for r in beside):
            raise RuntimeError(
                "new weights wait for this event loop, which would stand still if this waited for "
                f"them: {_all(beside)}. Use `async with` in coroutines: async with worker.reading()"
            )
        return bool(beside)

    def _check_in(self, reading: Reading[Any], *, inside: bool) -> None:
        """Check that a reader has got in, and that there is something to read."""
        waits = reading in self._queue
        if waits and (self._writer or self._waiting_writers):
            raise TimeoutError(
                f"weights were being applied for more than {reading.timeout} s: {self.blocked_by}"
            )
        late = None if inside else self._late
        for torn, error in (*self.torn.items(), *([late] if late else [])):
            if reading.model in (None, torn):
                raise error.with_traceback(None)
        lack = "" if reading.lacks is None else reading.lacks()
        if waits or lack:
            raise TimeoutError(f"{lack} (waited {reading.timeout:g} s)")

    @property
    def blocked_by(self) -> str:
        """Who is in the way: whoever writes, or those whom a writer waits for."""
        return _all([self._writer] if self._writer else self._readers)

    def has(self, holder: Holder) -> bool:
        """Tell whether somebody reads or writes."""
        return holder in self._readers or holder in self._queue or holder is self._writer

    @property
    def held(self) -> bool:
        """Whether this very thread or task reads or writes, or what it has inherited from."""
        return any(h is self._writer or h in self._readers for h in _held.get())

    def warn_of_await(self, reading: Reading[Any]) -> None:
        """Say, once, that a `with` has awaited inside."""
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
        """Check that this thread or task may write, before what cannot be undone is done.

        Raises:
            RuntimeError: It is reading: it would wait for itself.
        """
        if any(h in self._readers for h in _held.get()):
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
        """Write: nobody reads or writes meanwhile.

        Args:
            timeout: Seconds to wait for others to leave.
            doing: What is done, for those who wait for its end.
            stop: Tells whether to give up, though nobody were in the way; see `look`.
            waiting: Told again and again who is in the way, while that is waited for.

        Raises:
            InUseError: Readers were at it for longer; it says who.
            RuntimeError: This very thread or task is reading, or tasks of an event loop that would
                stand still meanwhile.
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
                self._writer = writer  # before it is none that waits any more
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
        """Begin to write if nobody is in the way, and return whether that is so.

        Then `written` must follow, and nothing of the user's be called before: this thread does not
        know that it may read.
        """
        writer = Holder(self, doing)
        with self._lock:
            self._waiting_writers += 1  # readers see that, or are seen here
            if not (self._writer or self._readers):
                self._writer = writer
            self._waiting_writers -= 1
            if self._writer is not writer:
                if not (self._writer or self._waiting_writers):
                    self._let_in()
                return False
        return True

    def written(self) -> None:
        """Whoever began to write is done."""
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
        """Wait until nobody else reads or writes; readers that are gone do not count."""
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
        beside = [r for r in self._readers if r.loop is writer.loop is not None]
        if beside:
            raise RuntimeError(
                "new weights wait for this event loop, which stands still meanwhile: "
                f"{_all(beside)}. In coroutines, await worker.receive_awaitable()"
            )

    def look(self) -> None:
        """Have those who wait to write see whether they are to stop."""
        with self._lock:
            self._left.notify_all()

    def _let_in(self) -> None:
        """Let those in who have queued; who lacks something waits on."""
        for reading, wake in [*self._queue.items()]:
            if self._late is not None or self._has_all_for(reading):
                del self._queue[reading]
                reading.since = time.monotonic()
                self._readers[reading] = None
                wake()

    def tear(self, model: str, error: Exception) -> None:
        """A model holds no version: have readers told, from now on. (For the writer.)"""
        self.torn[model] = error

    def release_readers(self, model: str, error: Exception) -> None:
        """Who writes has no time left: have readers told, and not wait any more until it is out."""
        with self._lock:
            self._late = model, error
            self._let_in()

    def mend(self, model: str) -> bool:
        """A model holds a version again; return whether it did not before. (For the writer.)"""
        return self.torn.pop(model, None) is not None


def _all(holders: Iterable[Holder]) -> str:
    return "; ".join(map(str, [*holders]))


def _call_in(loop: AbstractEventLoop, call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed, with whoever waited in it
        loop.call_soon_threadsafe(call)
