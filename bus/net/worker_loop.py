"""Runs the worker's thread, which connects the sockets with the state machine.

The thread owns the sockets. It passes messages and the time to the machine (`WorkerMachine`), and
performs the effects that the machine returns. Effects that do not block (allocating memory, opening
a segment) are performed immediately, before the next message. Slow effects run in the `Copier`.
Ready versions go to the `ReadyQueue`; the user's thread reports each version's outcome by a
`Report`.
"""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import ParamSpec

import numpy as np
from numpy.typing import NDArray

from ...codecs.words import printable
from ..effects import (
    Connect,
    Copy,
    Decode,
    Effect,
    Examine,
    FetchFromSources,
    Flushed,
    Joined,
    Notice,
    Open,
    Prefault,
    Probe,
    Ready,
    Redial,
    Refused,
    Rejected,
    Renamed,
    Reserve,
    Send,
    Subscribe,
    WholeStaged,
)
from ..errors import AddressError, ClosedError, RefusedError, on_one_line, rejected
from ..event_log import RateLimitedWarning
from ..headers import encode
from ..lease import Lease
from ..memory.pages import memory_ahead, memory_of
from ..memory.segment import MappedSegments
from ..messages import RELAY, Check
from ..staged import StagedVersion
from ..worker.events import (
    Copied,
    Decoded,
    Granted,
    LoopEvent,
    Opened,
    Probed,
    Report,
    SourceFetched,
)
from ..worker.machine import WorkerMachine
from .control import WorkerSockets
from .copier import AT_ONCE_BYTES, Copier, copied
from .probing import probe
from .ready_queue import ReadyQueue
from .sources import SourceFetcher
from .threads import IoThread

log = logging.getLogger("weightbus.worker")

P = ParamSpec("P")

TICK = 0.1  # seconds between two ticks, while idle
# Shared memory is allocated page by page. A larger allocation takes longer than a tick, so the
# copier's thread allocates.
ALLOCATED_AT_ONCE = 2**28
BATCH = 16  # messages taken from one socket before the other is served


class WorkerLoop:
    """A worker's thread, sockets and state machine.

    Args:
        machine: Makes the decisions.
        sockets: Carry the messages; the loop closes them.
        ready_queue: Gets the versions that are ready to be applied.
        on_tick: Called at each tick, many times a second; must not block.
        on_renamed: Called when the running version is renamed and the user has no version.
        shared_memory: Whether to read the publisher's memory if it is on this host.
        allocate: Allocates the memory for a version, or raises MemoryError; None: private memory.
        after_turn: Called after each turn of the loop's thread, which may have received chunks;
            returns effects, and must not block. None: nothing is called.
    """

    def __init__(
        self,
        machine: WorkerMachine,
        sockets: WorkerSockets,
        ready_queue: ReadyQueue,
        on_tick: Callable[[], None],
        on_renamed: Callable[[Renamed], None] | None = None,
        *,
        shared_memory: bool = True,
        allocate: Callable[[int], NDArray[np.uint8]] | None = None,
        after_turn: Callable[[], list[Effect]] | None = None,
    ) -> None:
        self._machine, self._sockets, self._ready_queue = machine, sockets, ready_queue
        self._kind = "relay" if RELAY in machine.identity.features else "worker"  # for texts
        self._after_turn, self._allocate = after_turn, allocate
        self._on_tick, self._on_renamed = on_tick, on_renamed
        self._segments = MappedSegments() if shared_memory else None
        self._work: deque[LoopEvent] = deque()
        # Not `tell`: its reference to this loop would keep the loop alive.
        enqueue = partial(_enqueue, self._work, sockets)
        self._copier = Copier(enqueue)
        self._sources = SourceFetcher(sockets.source, enqueue, machine.timing)
        self._stopping, self._refused = False, ""
        self._data_warning = RateLimitedWarning(log, "no pushed data: %s")
        self._source_warning = RateLimitedWarning(log, "%s")
        self._failures = RateLimitedWarning(log, "%s")
        self._apply_here: Callable[[StagedVersion], bool] | None = None
        self._examine: Callable[[Check], None] | None = None
        self._thread = IoThread(self._run, "weightbus-worker")
        self._ident = 0  # the id of the thread, once the thread runs

    # For any thread.

    def start(self) -> None:
        """Start the thread; if this raises, the loop has ended and the sockets are closed."""
        try:
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def apply_by(self, apply: Callable[[StagedVersion], bool]) -> None:
        """Set a function that applies small versions in the worker's thread.

        The function must not block. It returns False for a version that another thread must apply.
        """
        self._apply_here = apply

    def examine_by(self, examine: Callable[[Check], None]) -> None:
        """Set the function that performs `Examine`.

        It must not block, and later passes the result to `tell` in an `Examined`.
        """
        self._examine = examine

    def tell(self, event: LoopEvent) -> None:
        """Queue an event for the machine; wake the thread, unless the event can wait for a tick."""
        self._work.append(event)
        can_wait = isinstance(event, Report) and event.what in ("taken", "put-back")
        if not can_wait and threading.get_ident() != self._ident:
            self._sockets.wake()

    def close(self, timeout: float = 10.0) -> None:
        """Send a goodbye and end the thread; wait for that at most `timeout` seconds."""
        self.stop()
        if self._thread.give_up(timeout):
            self._end(ClosedError("it was never started"))

    def stop(self) -> bool:
        """End the thread as soon as possible; return False if it was stopped before."""
        before, self._stopping = self._stopping, True
        self._sockets.wake()
        return not before

    # For the thread itself.

    def happened(self, event: LoopEvent) -> None:
        """Make the machine process an event now, and perform the effects."""
        self._process_event(event)

    def _run(self) -> None:
        # Run turns until `stop`, or until the thread fails.
        ended: BaseException = ClosedError("close() was called")
        self._ident = threading.get_ident()
        try:
            next_tick = time.monotonic()
            while not self._stopping:
                next_tick = self._run_once(next_tick)
                if self._after_turn is not None:
                    self._perform(self._after_turn)
            self._do_work(time.monotonic())
            if self._after_turn is not None:
                self._perform(self._after_turn)
            self._perform(self._machine.close)
        except BaseException as error:
            log.exception("the worker's thread failed")
            ended = error
        finally:
            self._end(ended)

    def _end(self, reason: BaseException) -> None:
        self._ready_queue.close(reason)
        self._copier.close()
        self._sources.close()
        self._sockets.close()
        # These functions may refer to the owner of this loop, and would keep it alive.
        self._apply_here = self._examine = self._after_turn = None

    def _run_once(self, next_tick: float) -> float:
        """Run one turn: process what is ready, tick if due; return when to tick next."""
        session = self._machine.session
        may_hello = session.phase == "outside" and session.may_say_hello(time.monotonic())
        wait = 0.0 if self._work else next_tick - time.monotonic()
        activity = self._sockets.poll(wait, writable=may_hello)
        now = time.monotonic()
        if self._work:
            self._do_work(now)
        if activity.writable:
            self._perform(self._machine.connected, now)
        if activity.control:
            for _ in range(BATCH):
                if (frames := self._sockets.receive()) is None:
                    break
                self._perform(self._machine.receive, frames, time.monotonic())
        if activity.data or now >= next_tick:  # a tick also reads incomplete chunks
            data = self._sockets.data
            for _ in range(BATCH):
                if (arrived := data.receive(time.monotonic())) is None:
                    break
                self._perform(self._machine.receive_published, arrived, time.monotonic())
                if not data.pending:
                    break
        now = time.monotonic()
        if now >= next_tick:
            changes = self._sockets.changed(self._machine.timing.lost_after)
            if changes.changed:
                self._machine.changed(now)
            if changes.refused:
                self._perform(self._machine.handshake_refused, changes.refused, now)
            elif changes.closed:
                self._perform(self._machine.disconnected, now)
            self._ready_queue.set_lookup_error(self._sockets.lookup_error(now))
            if self._sockets.data.needs_ticket:
                self._perform(self._machine.without_ticket, now)
            self._perform(self._machine.tick, now)
            self._perform(self._call_on_tick)
            return now + TICK
        return next_tick

    def _call_on_tick(self) -> list[Effect]:
        self._on_tick()
        return []

    def _do_work(self, now: float) -> None:
        while self._work:
            self._perform(self._machine.happened, self._work.popleft(), now)

    def _perform(
        self, decide: Callable[P, list[Effect]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call `decide` and perform the effects that it returns; if it raises, warn and recover.

        An exception from one message, event or effect does not end the thread; only an exception
        from this loop does. If an effect fails, the machine gets an event for the failure.
        """
        try:
            effects = decide(*args, **kwargs)
        except Exception as error:
            effects = self._recover(error, args[0] if args else None)
        for effect in effects:
            try:
                self._do(effect)
            except Exception as error:
                text = f"{type(effect).__name__.lower()} has failed: {_cause(error)}"
                self._failures.warn(text, time.monotonic())
                event = _failure_event(effect, text)
                if event is not None:
                    self._process_event(event)

    def _recover(self, error: Exception, argument: object) -> list[Effect]:
        """Return the effects by which the machine recovers from an exception.

        `argument` is the message or event at which the machine raised.
        """
        why, now = f"an exception in this worker: {_cause(error)}", time.monotonic()
        self._failures.warn(f"{why}. It drops incomplete versions, and joins again", now)
        try:
            if isinstance(argument, Lease):
                argument.cancel()
            event = argument if isinstance(argument, Report) else None
            return self._machine.broken(why, now, event)
        except Exception as second:
            text = f"the worker could not drop its incomplete versions: {_cause(second)}"
            self._failures.warn(text, now)
            return []

    def _do(self, effect: Effect) -> None:
        # Perform one effect.
        match effect:
            case Send(message):
                token = self._machine.session.terms.upstream if effect.upstream else ""
                self._sockets.send(encode(message), token)
            case Ready():
                self._deliver(effect.staged, effect.others)
            case WholeStaged(staged):
                self._ready_queue.add_staged(staged)
            case Reserve(nbytes=nbytes) if self._allocate and nbytes > ALLOCATED_AT_ONCE:
                self._copier.run_when_idle(self._allocating(effect))
            case Reserve():
                self._process_event(Granted(effect.model, effect.key, self._memory(effect)))
            case Open(model, key, shared, nbytes):
                segments = self._segments
                memory = segments.open(shared, nbytes) if segments is not None else None
                self._process_event(Opened(model, key, memory))
            case Copy(copy) if copy.buffer.nbytes > AT_ONCE_BYTES:
                self._copier.queue(copy)
            case Copy(copy):
                self._process_event(copied(copy))
            case Decode(job):
                self._copier.queue(job)
            case FetchFromSources(job):
                self._sources.fetch(job, self._machine.hello_for(job))
            case Prefault(shared, nbytes):
                segments = self._segments
                view = segments.open(shared, nbytes) if segments is not None else None
                if view is not None and not view.touched:
                    self._copier.run_when_idle(view.touching())
            case Subscribe():
                self._sockets.data.subscribe(effect.topic, on=effect.on)
            case Connect():
                self._connect(effect.endpoint, effect.ticket)
            case Redial(same=True):
                self._sockets.redial()
            case Redial(at, pause):
                self._sockets.change_over(at, pause)
            case Probe(at):
                probe(self._sockets.addresses[at], partial(_enqueue, self._work, self._sockets))
            case Flushed(mark):
                self._ready_queue.flush(mark)
            case Joined():
                self._join(effect.epoch)
            case Rejected(model, epoch, version, code, text):
                error = rejected(model, epoch, version, code, text)
                if not self._ready_queue.asked:  # otherwise a call of the user raises the error
                    log.warning("%s", on_one_line(error))
                self._ready_queue.reject(error)
            case Refused(code, text):
                self._refuse(code, text)
            case Renamed():
                if self._on_renamed is not None:
                    self._on_renamed(effect)
            case Examine(check):
                if self._examine is not None:
                    self._examine(check)
            case Notice("source", text):
                self._source_warning.warn(text, time.monotonic())
            case Notice(kind, text):
                self._log(kind, f"{kind}: {text}", warning=effect.warning)
            case _:
                raise AssertionError(f"a worker does not {effect}")

    @property
    def cut_off_s(self) -> float | None:
        """Seconds for which this session's relay has had no publisher; None: it has one."""
        at = self._machine.session.terms.cut_off_at if self._machine.in_session else None
        return None if at is None else time.monotonic() - at

    def _log(self, kind: str, text: str, *, warning: bool = False) -> None:
        """Log a text on one line, whatever characters it contains."""
        name, level = self._machine.identity.name, logging.WARNING if warning else logging.INFO
        line = printable(f"{self._kind} {name} of {self._sockets.address}: {text}")
        log.log(level, "%s", line, extra={"weightbus": {"kind": kind, "worker": name}})

    def _join(self, epoch: int) -> None:
        self._log("joined", f"joined, epoch {epoch}")
        self._refused = ""
        self._ready_queue.join(epoch)

    def _refuse(self, code: str, text: str) -> None:
        """Report a refusal to the user; log it once, though the worker repeats its hello."""
        sockets, name = self._sockets, self._machine.identity.name
        several = len(sockets.addresses) > 1
        who = "no publisher takes" if several else f"the publisher at {sockets.address} refuses"
        reason = f"{who} {self._kind} {name!r} ({code}): {text}"
        if reason != self._refused:
            self._refused = reason
            self._log("refused", f"refused ({code}): {text}", warning=True)
        self._ready_queue.refuse(RefusedError(reason, code))

    def _deliver(self, staged: StagedVersion, others: tuple[StagedVersion, ...]) -> None:
        small = staged.data.nbytes <= AT_ONCE_BYTES and not (others or staged.companions)
        if small and self._apply_here is not None and self._apply_here(staged):
            self._do_work(time.monotonic())  # send the report now: the publisher waits for it
            self._ready_queue.wake()
            return
        for older in self._ready_queue.put(staged, *others):
            self._process_event(Report(older.model, older.key, "newer"))

    def _process_event(self, event: LoopEvent) -> None:
        self._perform(self._machine.happened, event, time.monotonic())

    def _memory(self, effect: Reserve) -> NDArray[np.uint8] | None:
        """Return memory of the size that the effect requires; None if there is not enough memory.

        If the memory is for a later version, the copier prefaults it when idle.
        """
        try:
            if effect.key is not None:
                return (self._allocate or memory_of)(effect.nbytes)
            memory, touching = memory_ahead(effect.nbytes)
        except MemoryError:
            return None
        self._copier.run_when_idle(touching)
        return memory

    def _allocating(self, effect: Reserve) -> Generator[None]:
        """Allocate memory in the copier's thread, and pass it to the machine."""
        memory: NDArray[np.uint8] | None = None
        try:
            memory = self._memory(effect)
        finally:
            self.tell(Granted(effect.model, effect.key, memory))
        yield

    def _connect(self, endpoint: str, ticket: str) -> None:
        try:
            self._sockets.connect_data(endpoint, ticket)
        except AddressError as error:  # all versions can still be fetched
            self._data_warning.warn(error, time.monotonic())


def _cause(error: Exception) -> str:
    """Return an exception's type and text, and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{line}"


def _failure_event(effect: Effect, why: str) -> LoopEvent | None:
    """Return the event of a failed effect; None if the machine expects no event of the effect."""
    match effect:
        case Ready(staged):
            return Report(staged.model, staged.key, "failed", why)
        case Reserve():
            return Granted(effect.model, effect.key, None)
        case Open():
            return Opened(effect.model, effect.key, None)
        case Copy(copy):
            return Copied(copy, None)
        case Decode(job):
            return Decoded(job, why)
        case FetchFromSources(job):
            return SourceFetched(job, (), over=True, faults=(why,))
        case Probe():
            return Probed(reached=False)
        case _:
            return None


def _enqueue(work: deque[LoopEvent], sockets: WorkerSockets, event: LoopEvent) -> None:
    """Pass an event to the worker's thread from another thread."""
    work.append(event)
    sockets.wake()
