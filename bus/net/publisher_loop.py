"""Runs the publisher's thread, which connects the sockets with the state machine.

The thread owns the sockets. It passes messages and the time to the machine (`PublisherMachine`),
and performs the effects that the machine returns. Other threads pass work to this thread through
`submit` and the other methods below, and wait for a future or a reply. If the thread ends, for any
reason, every open future fails with that reason.

An exception from one message, effect or call does not end the thread: it is logged as a warning
with its cause, and only the affected item fails (`publisher/faults.py`). An exception from a
caller's function is raised to that caller. The thread ends only if many turns of its loop fail in a
row, since it then makes no progress.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from ..effects import Notice, Send
from ..errors import ClosedError, PublishError
from ..event_log import EventLog, RateLimitedWarning
from ..headers import encode, topics_of
from ..messages import Observe, RosterPage
from ..publisher import absent
from ..publisher.effects import (
    Broadcast,
    BroadcastChunk,
    BroadcastWhole,
    Compare,
    DropRevoked,
    Effect,
    Follow,
    HangUp,
    Hash,
    MakeReclaimable,
    Obtain,
    Release,
    Resolve,
    SendChunk,
    Settled,
    Stamp,
    VersionKeeper,
    Withdraw,
)
from ..publisher.machine import PublisherMachine
from ..publisher.offers import BackgroundHasher, Continuation, encode_effect, hash_all
from ..publisher.publication import Publication, PublishTerms
from ..publisher.roster import PatchCandidate
from ..publisher.status import HeldVersion, WorkerStatus
from ..publisher.version import Snapshot, VersionOffer
from ..receipt import Receipt
from ..sealer import Sealer
from .callbacks import CLOSE_SECONDS, EVENT_KINDS, EventCallback, EventKind, WorkerEvent
from .pub import SubscriberConnection
from .publisher_sockets import PublisherSockets
from .threads import IoThread

log = logging.getLogger("weightbus.publisher")

TICK = 0.1  # seconds between two ticks, while idle
# A tick that is this late (or a ping interval, if that is less) lets messages go first.
LATE_TICK_SECONDS = 1.0
BATCH = 64  # messages taken from one socket before the other is served
FAILED_TURNS_MAX = 16  # turns that fail in a row until the thread ends, as the failure is permanent
PUSHING = "pushing a version, which workers fetch instead,"
UNREADABLE = "the publisher cannot read the version's bytes: see its log"
DEFECT = "this is a defect of weightbus, please report it"

T = TypeVar("T")
Condition = Callable[[PublisherMachine, float], bool]  # its arguments: the machine and the time


class PublisherLoop:
    """A publisher's thread, sockets and state machine.

    Args:
        machine: Makes the decisions.
        sockets: Carry the messages; the loop closes them.
        keeper: Stores versions beyond the publisher's lifetime; None: versions are not stored.
        restored: Versions of an earlier publisher, which are offered first.
        sealer: Encrypts outgoing messages; None: they are not encrypted.

    Attributes:
        over: An event, set once the thread has ended.
        leaving: Whether the thread has ended, or will end soon.
        known: A view of the machine's state that any thread may read. Only the loop's thread reads
            the machine itself.
    """

    def __init__(
        self,
        machine: PublisherMachine,
        sockets: PublisherSockets,
        keeper: VersionKeeper | None = None,
        restored: Collection[VersionOffer] = (),
        sealer: Sealer | None = None,
    ) -> None:
        self._machine, self._sockets, self.known = machine, sockets, machine.view()
        self._keeper, self._restored, self._sealer = keeper, restored, sealer
        self._work: deque[tuple[Callable[[float], None], Future[Any] | Reply]] = deque()
        self._open: dict[int, Promise | Reply] = {}  # results of open publishes, by their number
        self._count = 0  # number of publishes so far
        self._hash_queue = BackgroundHasher()
        self._full, self._events = RateLimitedWarning(log, "%s"), EventLog(log)
        self._unclaimed_failures = RateLimitedWarning(
            log, "a publish failed, and its result was not requested: %s"
        )
        self._faults: dict[str, RateLimitedWarning] = {}  # warnings, by the step that failed
        # What follows from failed steps, to be done after the turn.
        self._failure_actions: deque[Continuation] = deque()
        self._faulty = False  # whether a step failed in this turn
        self._after_turn: Callable[[PublisherMachine, float], None] | None = None
        self._watchers: list[tuple[Condition, Future[None]]] = []
        self._listeners: list[EventCallback] = []
        self.leaving = False
        self._delayed = False  # whether the last tick was put off, since it was late
        self._ended: BaseException | None = None
        self.over = threading.Event()
        # Held to enqueue work and to end; reentrant, since a signal handler may enqueue work.
        self._lock = threading.RLock()
        self._thread = IoThread(self._run, "weightbus-publisher")

    # For any thread.

    @property
    def address(self) -> str:
        """The address of the control socket."""
        return self._sockets.address

    @property
    def data_address(self) -> str:
        """The address of the data socket."""
        return self._sockets.data_address

    def start(self) -> None:
        """Start the thread; if this raises, the loop has ended and the sockets are closed."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._thread.start()
            undo.pop_all()

    def promise(self) -> "Promise":
        """Return a new future to pass to `submit`."""
        return Promise(self._unclaimed_failures)

    def submit(
        self, offer: VersionOffer, terms: PublishTerms, started: float, answer: "Promise | Reply"
    ) -> None:
        """Publish a version. `answer` gets the receipt, or a PublishError with the receipt."""

        def work(now: float) -> None:
            number = self._count = self._count + 1
            self._open[number] = answer
            try:
                if self._sealer is not None and self.known.sends(
                    offer.model, terms.workers, shared=offer.shared is not None
                ):
                    self._sealer.reserve(offer.model, offer.layout.nbytes)
                call, effects = self._machine.publish(number, offer, terms, started, now)
            except Exception as error:
                del self._open[number]
                if self._machine.unpublish(number, offer):
                    self._perform(self._machine.freed(), now)
                else:
                    offer.snapshot.release()
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error)
            else:
                if terms.commit == "together" and isinstance(answer, Promise):
                    answer.publication = call
                self._perform(effects, now)

        self._hand_over(work, answer)

    def submit_as_one(
        self,
        offers: Sequence[VersionOffer],
        terms: PublishTerms,
        started: float,
        answers: "Sequence[Promise]",
    ) -> Future[None]:
        """Publish versions of several models as one; `answers` get their receipts, or errors.

        Return a future that is done once all versions are published. If publishing fails, none is
        published, and the future has the error.
        """
        published: Future[None] = Future()

        def work(now: float) -> None:
            numbers = range(self._count + 1, self._count + 1 + len(offers))
            self._count += len(offers)
            self._open |= dict(zip(numbers, answers, strict=True))
            try:
                for offer in offers:
                    shared = offer.shared is not None
                    sends = self.known.sends(offer.model, terms.workers, shared=shared)
                    if self._sealer is not None and sends:
                        self._sealer.reserve(offer.model, offer.layout.nbytes)
                named = dict(zip(numbers, offers, strict=True))
                parts, effects = self._machine.publish_as_one(named, terms, started, now)
            except Exception as error:
                for number, offer in zip(numbers, offers, strict=True):
                    del self._open[number]
                    if not self._machine.unpublish(number, offer):
                        offer.snapshot.release()
                self._perform(self._machine.freed(), now)
                published.set_exception(error)
            else:
                for part, answer in zip(parts, answers, strict=True):
                    answer.publication = part
                published.set_result(None)
                self._perform(effects, now)

        self._hand_over(work, published)
        return published

    def after_turns(self, call: Callable[[PublisherMachine, float], None]) -> None:
        """Set a function that the thread calls after each turn with (machine, time).

        Call this before `start`. The function must not block.
        """
        self._after_turn = call

    @property
    def busy(self) -> bool:
        """True while a publish is in progress."""
        return bool(self._open)

    def check(self) -> None:
        """Raise ClosedError if the thread has ended.

        Raises:
            ClosedError: The thread has ended; the cause says why.
        """
        if self.leaving:
            raise self._closed()

    def decide(self, call: Callable[[PublisherMachine, float], list[Effect]]) -> None:
        """Make the thread call `call(machine, time)` soon, and perform the returned effects."""

        self._call_soon(lambda now: self._perform(call(self._machine, now), now))

    def make_room(
        self, model: str, among: Collection[Snapshot], replaces_latest: bool, timeout: float
    ) -> bool:
        """Make the machine release one of the snapshots `among`.

        Return False if it has released none within `timeout` seconds.

        Raises:
            ClosedError: The publisher is closed.
        """

        def work(now: float) -> bool:
            effects = self._machine.make_room(model, among, replaces_latest=replaces_latest)
            self._perform(effects, now)
            return any(isinstance(effect, Release) for effect in effects)

        try:
            return self._call_soon(work).result(timeout)
        except FutureTimeout:
            return False

    def keep_part(self, offer: VersionOffer) -> "Future[None]":
        """Keep some chunks of another publisher's version; see `PublisherMachine.keep_part`."""
        return self._call_soon(lambda now: self._perform(self._machine.keep_part(offer), now))

    def next_key(self, model: str) -> "Future[tuple[int, int]]":
        """Request the epoch and number that the next version of a model will have."""

        def answer(_now: float) -> tuple[int, int]:
            state = self._machine.state
            versions = state.store.get(model)
            return state.epoch, 1 if versions is None else versions.next_number

        return self._call_soon(answer)

    def rekey(self) -> None:
        """Rotate the group key; workers with a session receive the new key."""
        self._call_soon(self._rekey)

    def status(self) -> "Future[tuple[WorkerStatus, ...]]":
        """Request the status of all workers."""
        return self._call_soon(lambda now: self._machine.status(now))

    def held(self) -> "Future[dict[str, tuple[HeldVersion, ...]]]":
        """Request the versions that this relay's publisher has, by model."""
        return self._call_soon(lambda _now: self._machine.held())

    def unknown(self, names: Collection[str]) -> "Future[str]":
        """Request an error text with the names that no worker has ever had."""
        return self._call_soon(lambda _: absent.unknown_names_text(self._machine.state, names))

    def observe(self, asked: Observe) -> "Future[RosterPage]":
        """Request the page of the roster that answers an observer's request."""
        return self._call_soon(lambda now: self._machine.observers.pages(asked, now)[0])

    def patch_candidates(
        self, model: str, workers: Collection[str] | None, *, shared: bool
    ) -> "Future[list[PatchCandidate]]":
        """Request the workers that accept patches; see `Roster.patch_candidates`."""
        return self._call_soon(
            lambda _: self._machine.state.roster.patch_candidates(model, workers, shared=shared)
        )

    def committed(self, promise: "Promise") -> "Future[tuple[int, int] | None]":
        """Request (epoch, number) of a `together` publish; None if it is not committed."""
        return self._call_soon(lambda _now: promise.committed)

    def watch(self, condition: Condition) -> "Future[None]":
        """Return a future that is done once a condition is true.

        The thread checks the condition at each tick, and when work or a worker's event was
        processed.
        """
        future: Future[None] = Future()
        self._hand_over(lambda _now: self._watchers.append((condition, future)), future)
        return future

    def listen(self, listener: EventCallback) -> "Future[None]":
        """Send events of workers to a listener, beginning with one for each known worker."""

        def work(now: float) -> None:
            for status in self._machine.status(now):
                kind: EventKind = "joined" if status.state == "live" else status.state
                is_ = "has joined" if kind == "joined" else f"is {status.state}"
                text = f"worker {status.name} {is_}, since before this callback was added"
                listener.tell(WorkerEvent(kind, status.name, text, status))
            self._listeners.append(listener)

        return self._call_soon(work)

    def unlisten(self, listener: EventCallback) -> None:
        """Send no more events to a listener."""

        def work(_now: float) -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        listener.end()
        self._call_soon(work)

    def close(self, timeout: float = 10.0) -> None:
        """End the thread, and wait for its end; open publishes get receipts with their state."""
        self.stop()
        if self._thread.give_up(timeout):
            self._end(ClosedError("it was never started"))
        for listener in self._listeners:
            listener.join(CLOSE_SECONDS)

    def stop(self) -> bool:
        """End the thread as soon as possible; return False if it was stopped before."""
        before, self.leaving = self.leaving, True
        self._sockets.leaving = True
        self._sockets.wake()
        return not before

    def _call_soon(self, call: Callable[[float], T]) -> "Future[T]":
        """Make the thread call a function soon, with the time; return the future of its result."""
        future: Future[T] = Future()

        def work(now: float) -> None:
            result = call(now)
            if future.set_running_or_notify_cancel():
                future.set_result(result)

        self._hand_over(work, future)
        return future

    def _hand_over(self, work: Callable[[float], None], future: "Future[T] | Reply") -> None:
        with self._lock:
            if self.leaving:
                future.set_exception(self._closed())
                return
            self._work.append((work, future))
        self._sockets.wake()

    def _closed(self) -> ClosedError:
        return ClosedError.of("publisher", self._ended)

    # For the thread itself.

    def _run(self) -> None:
        # Run turns until `stop`, or until too many fail in a row.
        ended: BaseException = ClosedError("close() was called")
        try:
            next_tick = time.monotonic()
            for offer in self._restored:
                step = partial(self._machine.offer, offer)
                offered = self._try("offering a version of an earlier publisher", step, next_tick)
                self._perform(offered[1] if offered is not None else [], next_tick)
            self._restored = ()
            failed = 0
            while not self.leaving:
                try:
                    next_tick = self._run_once(next_tick)
                    failed = 0
                except Exception as error:
                    failed += 1
                    if failed >= FAILED_TURNS_MAX:
                        raise
                    self._warn("a turn of the publisher's thread", error, time.monotonic())
                if self._after_turn is not None:
                    call = partial(self._after_turn, self._machine, time.monotonic())
                    self._try("the function called after a turn", call, time.monotonic())
                if self._faulty:
                    self._run_failure_actions(time.monotonic())
            now = time.monotonic()
            self._do_work(now)
            close = partial(self._machine.close, now)
            self._perform(self._try("resolving the open publishes", close, now) or [], now)
        except BaseException as error:
            log.exception("the publisher's thread failed")
            ended = error
        finally:
            self._end(ended)

    def _end(self, reason: BaseException) -> None:
        # Close the sockets, and fail all open futures with the reason.
        self.over.set()
        with self._lock:
            self._ended, self.leaving = reason, True
            work, self._work = self._work, deque()
        waiting: list[Future[Any] | Reply] = [
            *self._open.values(),
            *(w for _, w in self._watchers),
            *(f for _, f in work),
        ]
        for future in waiting:
            with contextlib.suppress(InvalidStateError):  # the future is done, or cancelled
                future.set_exception(self._closed())
        for listener in self._listeners:
            listener.end()
        self._after_turn = None  # may refer to the owner of this loop
        if self._keeper is not None:
            self._keeper.stop()
        self._sockets.close()

    def _run_once(self, next_tick: float) -> float:
        """Run one turn: process and push what is ready, tick if due; return when to tick next."""
        if self._work:  # done first, since callers wait for it
            self._do_work(time.monotonic())
        pushes = self._machine.state.pushes
        busy = self._work or self._hash_queue.waiting or (pushes and self._topics_with_room())
        wait = 0.0 if busy else next_tick - time.monotonic()
        activity = self._sockets.poll(wait)
        now = time.monotonic()
        if activity.control:
            self._process_messages(now)
        if activity.closed and self._process_messages(now):
            self._take_closed(now)
        if activity.data:
            self._process_input(now)
        if pushes:
            self._push(now)
        if self._hash_queue.waiting:
            self._hash_more(now)
        if now >= next_tick:
            grace = min(self._machine.state.timing.ping, LATE_TICK_SECONDS)
            self._delayed = now - next_tick >= grace and not self._delayed
            if self._delayed:  # the host may have been suspended: check for silent peers later
                return now + grace
            self._tick(now)
            return now + TICK
        return next_tick

    def _tick(self, now: float) -> None:
        # Do what is due at this time: pings, timeouts, repeated messages.
        if self._machine.state.malformed != self.known.malformed:
            self._update_view(now)  # only here, as there may be a flood of malformed messages
        for number, step in self._steps(now):
            try:
                self._perform(step(), now)
            except Exception as error:
                self._warn("a periodic step", error, now)
                if number is not None:
                    self._fail(number, error, now)
        if self._sealer is not None and self._sealer.due(now):
            self._try("the rotation of the group key", partial(self._rekey, now), now)
        self._check_watchers(now)

    def _steps(self, now: float) -> Iterator[tuple[int | None, Callable[[], list[Effect]]]]:
        """Yield (number of its publish or None, step) for each step that is due.

        If a step fails, its publish fails, and the other steps are still performed.
        """
        yield None, lambda: self._machine.report_rejections(self._sockets.turned_away(now), now)
        yield from self._machine.steps(now)
        yield None, self._machine.freed

    def _push(self, now: float) -> None:
        """Push a burst of chunks, if connections have room and no work waits."""
        topics = [] if self._work else self._topics_with_room()
        if topics:
            try:
                effects = self._machine.push(now, topics)
            except Exception as error:
                self._warn(PUSHING, error, now)
                self._machine.stop_pushing(topics)
            else:
                self._perform(effects, now)

    def _hash_more(self, now: float) -> None:
        """Hash or compare one more piece of a version."""
        try:
            effects = self._hash_queue.go_on(now)
        except Exception as error:
            self._warn("reading a version, whose publish fails,", error, now)
            self._failure_actions.append(self._hash_queue.give_up())
        else:
            self._perform(effects, now)

    def _topics_with_room(self) -> list[bytes]:
        """Return the topics being pushed for which some connection has room."""
        has_room = self._sockets.data.has_room
        try:
            return [topic for topic in self._machine.ready if has_room(topic)]
        except Exception as error:
            self._warn(PUSHING, error, time.monotonic())
            self._machine.stop_pushing([*self._machine.state.pushes])
            return []

    def _do_work(self, now: float) -> None:
        # Do the work that other threads have queued.
        while self._work:
            # It stays in the queue until it is done: if the thread ends here, its future fails.
            work, future = self._work[0]
            try:
                work(now)
            except Exception as error:
                self._warn("the work of a call", error, now)
                with contextlib.suppress(InvalidStateError):  # the future is cancelled, or done
                    future.set_exception(error)
            self._work.popleft()
            if self._watchers:
                self._check_watchers(now)

    def _process_messages(self, now: float) -> bool:
        """Process up to `BATCH` control messages; return True if no more are waiting."""
        for _ in range(BATCH):
            identity = b""
            try:
                message = self._sockets.receive()
                if message is None:
                    return True
                identity = message[0]
                effects = self._machine.receive(*message, now, self._sockets.key)
            except Exception as error:
                self._warn("processing a message of a worker, whose session ends,", error, now)
                if not identity:
                    return False  # the sender is unknown; there may be more messages
                self._failure_actions.append(partial(self._machine.drop, identity, _why(error)))
                continue
            if effects:
                self._perform(effects, now)
        return False

    def _take_closed(self, now: float) -> None:
        closed = partial(self._sockets.take_closed, now)
        found = self._try("the search for closed connections", closed, now)
        for identity, ended in found or ():
            step = partial(self._machine.unreachable, identity, now, ended)
            effects = self._try("processing a closed connection", step, now)
            self._perform(effects or [], now)

    def _process_input(self, now: float) -> None:
        """Process subscribers' input: their tickets, their new topics and their reports."""
        data = self._sockets.data
        for _ in range(BATCH):
            found = None
            try:
                found = data.receive_input() if data.with_input else None
                if found is None:
                    break
                if found.ticket:  # K6
                    owner = self._machine.redeem(found.ticket, now)
                    if not data.admit(found.subscriber, owner):
                        continue
                for topic in found.topics:
                    self._send_beacon(found.subscriber, topic, now)
                for report in found.reports:
                    effects = self._machine.receive_report(report, now)
                    found.subscriber.invalid_frames += effects is None
                    if effects:
                        self._perform(effects, now)
            except Exception as error:
                self._warn("processing a subscriber's input, which is dropped,", error, now)
                if found is None:
                    break

    def _send_beacon(self, subscriber: SubscriberConnection, topic: bytes, now: float) -> None:
        """Send the beacon of a topic, if the topic has one, to a new subscriber."""
        beacon = self._machine.subscribed(topic)
        if beacon is not None:
            sealed = beacon if self._sealer is None else self._sealer.seal_for_all(beacon, None)[0]
            self._sockets.data.answer(subscriber, [topic, encode(sealed)], now)

    def _perform(self, effects: list[Effect], now: float) -> None:
        # Perform the effects that the machine returned.
        if self._machine.state.view_outdated:
            self._update_view(now)
        changed, sealer = False, self._sealer
        for each in effects:
            try:
                sends = isinstance(each, SendChunk | BroadcastChunk | BroadcastWhole)
                effect = encode_effect(each, sealer) if sends or sealer is not None else each
                match effect:
                    case Send():
                        self._send(effect, now)
                    case Broadcast(topic, message, payload):
                        header = encode(message)
                        frames = (topic, header) if payload is None else (topic, header, payload)
                        self._sockets.broadcast(frames, now)
                    case Withdraw(model):
                        self._sockets.data.withdraw(topics_of(model))
                    case HangUp():
                        self._sockets.hang_up()
                    case Follow(pid):
                        self._sockets.follow(pid)
                    case DropRevoked():
                        self._sockets.data.close_revoked()
                        self._rekey(now)
                    case Resolve():
                        self._resolve(effect)
                    case Settled(version):
                        if self._keeper is not None:
                            self._keeper.offer(version)
                    case Stamp(version):
                        if not version.snapshot.stamp(version.model, *version.key):
                            self._machine.unshared(version)
                    case Hash(version):
                        done = partial(self._machine.hashed, version)
                        failed = partial(self._machine.give_up, version, UNREADABLE)
                        self._hash_queue.add(version, hash_all(version), done, failed)
                    case Compare(comparison):
                        done = partial(self._machine.compared, comparison)
                        self._hash_queue.add(comparison.version, comparison.steps(), done, done)
                    case Obtain(version):
                        obtain = version.begin_obtaining()
                        if obtain is not None:
                            obtain(version)
                    case MakeReclaimable(version):
                        version.snapshot.make_reclaimable()
                    case Release(version):
                        version.snapshot.release()
                    case Notice("full"):
                        self._full.warn(effect.text, now)
                    case Notice():
                        changed = True
                        if effect.kind == "nobody":
                            text = f"{effect.text}; they connect to {self._sockets.address}"
                            effect = msgspec.structs.replace(effect, text=text)
                        self._events.write(effect, now)
                        self._send_event(effect, now)
                        self._machine.observers.happened(effect, now)
            except Exception as error:
                self._effect_failed(each, error, now)
        if changed and self._watchers:
            self._check_watchers(now)

    def _update_view(self, now: float) -> None:
        """Update the view that other threads read."""
        known = self._try("updating the view of the workers", self._machine.view, now)
        self.known = known if known is not None else self.known

    # Failures.

    def _warn(self, what: str, error: Exception, now: float) -> None:
        """Log as a warning that `what` has failed; `_run_failure_actions` runs after this turn."""
        self._faulty = True
        warning = self._faults.get(what)
        if warning is None:
            text = f"the publisher goes on, but {what} has failed: %s; {DEFECT}"
            warning = self._faults[what] = RateLimitedWarning(log, text)
        warning.warn(repr(error), now, error)

    def _try(self, what: str, step: Callable[[], T], now: float) -> T | None:
        """Return a step's result; if the step raises, log that `what` has failed; return None."""
        try:
            return step()
        except Exception as error:
            self._warn(what, error, now)
            return None

    def _effect_failed(self, effect: Effect, error: Exception, now: float) -> None:
        """Handle a failed effect: the publish or session that needed it fails after this turn."""
        kind = type(effect).__name__
        self._warn(f"the effect {kind}", error, now)
        match effect:
            case SendChunk(version) | BroadcastChunk(version) | BroadcastWhole(version):
                give_up = partial(self._machine.give_up, version.target, _why(error))
                self._failure_actions.append(give_up)
            case Send(to=identity):
                self._failure_actions.append(partial(self._machine.drop, identity, _why(error)))
            case Stamp(version):
                self._machine.unshared(version)
            case _:
                # `_run_failure_actions` detects a lost `Resolve`. Other effects are repeated, or
                # are rare.
                pass

    def _run_failure_actions(self, now: float) -> None:
        """Run the actions queued by failed steps; fail each open publish that the machine lost."""
        while self._failure_actions:
            effects = self._try(
                "ending a publish or session", partial(self._failure_actions.popleft(), now), now
            )
            self._perform(effects or [], now)
        for number in [n for n in self._open if not self._machine.awaits(n)]:
            self._fail(number, RuntimeError(f"the outcome of this publish was lost: {DEFECT}"), now)
        self._faulty = False

    def _fail(self, number: int, error: Exception, now: float) -> None:
        """Fail a publish whose result is unknown."""
        self._try("forgetting a publish", partial(self._machine.forget, number), now)
        answer = self._open.pop(number, None)
        with contextlib.suppress(InvalidStateError):  # the future is cancelled
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_exception(error)

    def _rekey(self, now: float) -> None:
        """Rotate the group key: only workers that receive the new key can read later messages."""
        if self._sealer is not None:
            self._sealer.rekey(now)
            self._perform(self._machine.rekeyed(), now)

    def _send(self, send: Send, now: float) -> None:
        header, payload = encode(send.message), send.payload
        if not self._sockets.send(send.to, [header] if payload is None else [header, payload]):
            self._perform(self._machine.unreachable(send.to, now), now)

    def _send_event(self, notice: Notice, now: float) -> None:
        """Send an event of a worker to all listeners."""
        if self._listeners and notice.kind in EVENT_KINDS:
            status = self._machine.status_of(notice.worker, now)
            kind = cast("EventKind", notice.kind)
            event = WorkerEvent(kind, notice.worker, notice.text, status)
            for listener in self._listeners:
                listener.tell(event)

    def _resolve(self, effect: Resolve) -> None:
        future = self._open.pop(effect.publication, None)
        if future is None:
            return  # the publish has failed already
        if isinstance(future, Promise) and future.publication is not None:
            future.drop_publication()
        if not future.set_running_or_notify_cancel():
            return
        if effect.achieved:
            future.set_result(effect.receipt)
        else:
            future.set_exception(PublishError(effect.shortfall, effect.receipt))

    def _check_watchers(self, now: float) -> None:
        """Set the result of each future whose condition is true; see `watch`."""
        for watcher in list(self._watchers):
            condition, future = watcher
            try:
                met = future.done() or condition(self._machine, now)
            except Exception as error:  # from the caller's function
                self._watchers.remove(watcher)
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
                continue
            if met:
                self._watchers.remove(watcher)
                # The waiting thread may cancel now, and a cancelled future accepts no result.
                if future.set_running_or_notify_cancel():
                    future.set_result(None)


def _why(error: Exception) -> str:
    return f"an exception in the publisher has ended this ({error!r}): see its log"


class Reply:
    """A minimal future for the receipt of one publish, for which one thread waits."""

    def __init__(self) -> None:
        self._open = threading.Lock()  # locked until the result is set
        self._open.acquire()
        self._receipt: Receipt
        self._error: BaseException | None = None

    def set_running_or_notify_cancel(self) -> bool:
        """Return True, since this future cannot be cancelled."""
        return True

    def set_result(self, receipt: Receipt) -> None:
        """Set the receipt."""
        self._receipt = receipt
        self._open.release()

    def set_exception(self, error: BaseException) -> None:
        """Set the error, unless there is a result already."""
        if self._open.locked():
            self._error = error
            self._open.release()

    def done(self) -> bool:
        """True once there is a receipt or an error."""
        return not self._open.locked()

    def result(self, timeout: float) -> Receipt:
        """Wait for the receipt.

        Raises:
            TimeoutError: No result was set within `timeout` seconds.
            BaseException: The error that was set.
        """
        if not self._open.acquire(timeout=timeout):
            raise FutureTimeout
        self._open.release()
        if self._error is not None:
            raise self._error
        return self._receipt


class Promise(Future[Receipt]):
    """The future of `publish_async`, which logs a failure that its caller never reads.

    A caller may publish and drop the future. A failed publish would then go unnoticed, so it is
    logged as a rate-limited warning.

    Args:
        unclaimed: The warning for a failed publish whose result was never read.

    Attributes:
        publication: The open call of a `together` publish; None before it is submitted, and after
            its end.
    """

    def __init__(self, unclaimed: RateLimitedWarning) -> None:
        super().__init__()
        self._unclaimed, self._process = unclaimed, os.getpid()
        self._read = False  # whether the caller has read the result, or will get it
        self.publication: Publication | None = None
        self._committed: tuple[int, int] | None = None

    @property
    def committed(self) -> tuple[int, int] | None:
        """The (epoch, number) of a `together` publish that is committed; else None.

        Only the publisher's thread may read this property.
        """
        publication = self.publication
        if publication is None:
            return self._committed
        return publication.version.key if publication.decision == "commit" else None

    def drop_publication(self) -> None:
        """Drop a decided publish and its version, since the caller may long keep this future."""
        if self.publication is not None and self.publication.decision != "open":
            self._committed, self.publication = self.committed, None

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait for the receipt; see `Future`.

        Raises:
            ClosedError: There is no receipt yet, and this process is a forked child, which gets
                none.
        """
        self._check_process()
        self._read = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error of a failed publish; see `Future` and `result`."""
        self._check_process()
        self._read = True
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Receipt]], Any]) -> None:
        """Call a function once the result is set; see `Future`."""
        self._read = True
        super().add_done_callback(fn)

    def _check_process(self) -> None:
        if os.getpid() != self._process and not self.done():
            raise ClosedError(
                f"process {self._process} publishes this version, and this forked process "
                f"{os.getpid()} gets no receipt: wait for the receipt there"
            )

    def __del__(self) -> None:
        if self._read or not self.done() or self.cancelled():
            return
        error = super().exception()
        if isinstance(error, PublishError):
            self._unclaimed.warn(error, time.monotonic())
