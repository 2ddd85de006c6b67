"""The publisher's data socket: a PUB of our own, which sends straight from a version's memory.

To libzmq every message is an object, which it hands to a thread of its own. Here a message is sent
by the thread that has it: a small one is on its way when `send` returns, and of a large one the
kernel takes as much as it has room for whenever it has room. Each subscriber has a queue; what does
not fit is dropped for that subscriber alone, as ZeroMQ's PUB has it.

A subscriber that takes nothing (a stopped process, say) costs the publisher no memory that the next
version is to be written to (`outgoing.py`).

It belongs to one thread, which never waits here.
"""

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ..event_log import RateLimitedWarning
from ..lease import Lease
from ..limits import (
    ACCEPTS,
    COPIES_BYTES_MAX,
    STRANGER_SECONDS,
    SUBSCRIPTIONS,
    TOPIC_BYTES_MAX,
    TOPICS_MAX,
)
from ..messages import TOKEN_BYTES, Buffer
from ..token_bucket import TokenBucket
from ..trust.grants import Grants
from .descriptors import Crowd, spent
from .listening import Listener, bound
from .outgoing import HOLD_SECONDS, NOT_READ, Copies, Outgoing, PlainMessage
from .zmtp import (
    FRAME_HEAD_MAX,
    OFF,
    ON,
    SCRATCH_BYTES,
    TICKET,
    WORD,
    Stream,
    ZmtpError,
)

log = logging.getLogger("weightbus.publisher")

PING_SECONDS = 5.0  # between two pings: whoever is gone frees its queue
SILENCE_SECONDS = 30.0  # without an answer, and without taking anything of what waits for it
ACCEPT_SECONDS = 1.0  # before another attempt when there is no descriptor left for a connection
# Within a host, more than this is out of the cache before the other side reads it, and there is
# nothing to pace, as some congestion control does. Farther away the kernel's choice is the best.
NEAR_SEND_BUFFER = 2**20
NEAR_CONGESTION = b"reno"
READ_BYTES = 1024  # taken from one subscriber before the next has its turn: some 100 frames
UNREAD_BYTES_MAX = 2**16  # of answers to its pings, which a subscriber does not read


class SubscriberConnection:
    """One subscriber's connection, and what is on its way to it.

    Args:
        connection: Its socket.
        queue: Messages that wait before more are dropped.
        copies: See `Outgoing`.
        hang_up: Closes the connection, since the subscriber does not read.
        ticketed: It is served only once it has shown a ticket.

    Attributes:
        outgoing: What is on its way to it.
    """

    def __init__(
        self,
        connection: socket.socket,
        queue: int,
        copies: Copies,
        hang_up: Callable[["SubscriberConnection"], None],
        now: float,
        *,
        ticketed: bool = False,
    ) -> None:
        self._socket = connection
        # What a subscriber says fits the scratch: no memory is taken for it.
        self._stream = Stream(_nowhere, b"XPUB", SCRATCH_BYTES - FRAME_HEAD_MAX, frames_max=1)
        self._bucket = TokenBucket(SUBSCRIPTIONS, now)
        self.outgoing = Outgoing(
            connection, queue, self._stream.outgoing, copies, lambda: hang_up(self), now
        )
        self.topics: set[bytes] = set()
        self.changed = False  # they were, since somebody looked
        self.asked: dict[bytes, None] = {}  # of these, what nobody was told of yet
        self.owner: tuple[str, str] | None = None  # name and key of its worker, if it has shown one
        self.admitted, self.since = not ticketed, now
        self.ticket = ""  # that it has shown, of which nobody was told yet
        self.said: list[bytes] = []  # words that nobody was told of yet
        self.invalid_frames = (
            0  # of those before: words that were nobody's, and cost as anything else
        )
        self.watched = selectors.EVENT_READ | selectors.EVENT_WRITE

    def fileno(self) -> int:
        """Return the connection's descriptor."""
        return self._socket.fileno()

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._stream.ping()

    def read(self, now: float) -> bool:
        """Take note of what it says; return whether it has subscribed to something.

        Raises:
            OSError: The connection is gone.
            ZmtpError: It does not speak as a subscriber does, or not that often.
        """
        try:
            count = self._socket.recv_into(self._stream.room()[:READ_BYTES])
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("the subscriber has closed the connection")
        self.outgoing.alive_at = now
        before = self._stream.frames
        for message in self._stream.received(count):
            if not isinstance(message, Lease):  # no place is lent here
                self._take(bytes(message[0]))
        if len(self.topics) > TOPICS_MAX or len(self._stream.outgoing) > UNREAD_BYTES_MAX:
            raise ZmtpError("it asks for more than anybody needs")
        others, self.invalid_frames = (
            self._stream.frames - before - len(self.said) + self.invalid_frames,
            0,
        )
        if others and not self._bucket.take(others, now):
            raise ZmtpError("it asks more often than anybody needs to")
        return bool(self.asked or self.said or self.ticket)

    def _take(self, body: bytes) -> None:
        on, topic = body[:1], body[1:]
        if not (self.admitted or self.ticket):  # K6
            if on != TICKET or len(topic) != TOKEN_BYTES:
                raise ZmtpError("it has shown no ticket; only workers with a key get one")
            self.ticket = topic.decode("latin1")
            return
        if on == WORD:
            self.said.append(topic)
            return
        if on not in (OFF, ON) or len(topic) > TOPIC_BYTES_MAX:
            raise ZmtpError("it sent something else than subscriptions to topics of ours")
        self.changed = True
        if on == ON:
            self.topics.add(topic)
            self.asked[topic] = None
        else:
            self.topics.discard(topic)
            self.asked.pop(topic, None)

    def close(self) -> None:
        """Hang up."""
        self.outgoing.close()
        self._socket.close()


def _nowhere(_frames: Iterable[Buffer], _size: int) -> None:
    """Have no place for a payload: subscribers send none."""


class SubscriberInput(NamedTuple):
    """What a subscriber has asked for, and said."""

    subscriber: SubscriberConnection
    topics: Collection[bytes]
    words: Sequence[bytes]
    ticket: str = ""  # before all of that


class PubSocket:
    """A bound socket and its subscribers.

    Args:
        queue: Messages held for a subscriber before more are dropped.
        selector: Where its sockets are registered; what that finds goes to `process_events`.
        grants: Whose keys may have connections; None: anybody may have one.
        crowd: Is told of those that there is no descriptor for.
        copies: Of all connections of the publisher.

    Attributes:
        asking: Who has subscribed since `receive_input` was asked, or said a word.
        due: When `tick` has something to do.
    """

    def __init__(
        self,
        queue: int,
        selector: selectors.BaseSelector,
        grants: Grants | None = None,
        crowd: Crowd | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._grants, self._crowd = grants, crowd or Crowd()
        self._copies = copies or Copies(COPIES_BYTES_MAX)
        self._queue = queue
        self._selector = selector
        self._turned_away = RateLimitedWarning(log, "a subscriber is turned away: %s")
        self._not_accepted = RateLimitedWarning(
            log, "cannot accept a subscriber, will try again: %s"
        )
        self._listener: Listener | None = None
        self._connections: dict[int, SubscriberConnection] = {}
        self._subscribers: dict[
            bytes, list[SubscriberConnection]
        ] = {}  # by topic, until any changes its mind
        self.asking: dict[SubscriberConnection, None] = {}
        self._accepts = TokenBucket(ACCEPTS, 0.0)
        self._ping_at = self._hold_at = self.due = 0.0
        self._accept_at = 0.0  # 0: it accepts

    def bind(self, endpoint: str, parameter: str, patience: float | None = None) -> str:
        """Listen at an endpoint; return it with the port that was taken.

        Args:
            endpoint, parameter, patience: As of `bound`.

        Raises:
            AddressError: It is taken, or makes no sense.
        """
        self._listener = bound(partial(Listener, endpoint), endpoint, parameter, patience)
        self._selector.register(self._listener.socket, selectors.EVENT_READ)
        return self._listener.endpoint

    def process_events(
        self, found: Iterable[tuple[selectors.SelectorKey, int]], now: float
    ) -> None:
        """Accept, read and send what can be, as the selector has found."""
        for key, events in found:
            subscriber = key.data
            if not isinstance(subscriber, SubscriberConnection):
                if self._listener is not None and key.fileobj is self._listener.socket:
                    self._accept(self._listener, now)
                continue
            try:
                # What it said before is to be dealt with first, so that it takes no more memory.
                if events & selectors.EVENT_READ and not subscriber.said and subscriber.read(now):
                    self.asking[subscriber] = None
                if subscriber.changed:
                    subscriber.changed = False
                    self._subscribers.clear()
                if subscriber.outgoing.unsent or events & selectors.EVENT_WRITE:
                    self._write(subscriber, now)
            except ZmtpError as error:
                self._turned_away.warn(error, now)
                self._hang_up(subscriber)
            except OSError:
                self._hang_up(subscriber)

    def tick(self, now: float) -> None:
        """Do what is due, a few times a second; `due` says when."""
        if self._listener is not None and self._accept_at and now >= self._accept_at:
            self._accept_at = 0.0
            self._selector.register(self._listener.socket, selectors.EVENT_READ)
        if now >= self._hold_at:
            self._hold_at = now + HOLD_SECONDS
            for subscriber in list(self._connections.values()):
                subscriber.outgoing.hold(now)
            for subscriber in list(self._connections.values()):
                if not subscriber.admitted and now - subscriber.since >= STRANGER_SECONDS:  # K6
                    self._hang_up(subscriber)
        if now >= self._ping_at:
            self._ping_at = now + PING_SECONDS
            self._look_after(now)
        self.due = min(self._hold_at, self._ping_at, self._accept_at or self._ping_at)

    def receive_input(self) -> SubscriberInput | None:
        """Return who has subscribed since, and to which topics; each once. And what it said."""
        if not self.asking:
            return None
        subscriber = next(iter(self.asking))
        del self.asking[subscriber]
        heard = SubscriberInput(subscriber, subscriber.asked, subscriber.said, subscriber.ticket)
        subscriber.asked, subscriber.said = {}, []
        return heard

    def admit(self, subscriber: SubscriberConnection, owner: tuple[str, str] | None) -> bool:
        """Serve a connection of this worker, in place of any before; None: hang up.

        Args:
            outlet: One that has shown a ticket.
            owner: Name and key of whose ticket that was.
        """
        if self._connections.get(subscriber.fileno()) is not subscriber:
            return False
        if owner is None:
            self._hang_up(subscriber)
            return False
        for other in [each for each in self._connections.values() if each.owner == owner]:
            self._hang_up(other)
        subscriber.owner, subscriber.admitted, subscriber.ticket = owner, True, ""
        self._subscribers.clear()
        return True

    def screen(self) -> None:
        """Hang up on those whose keys may not have connections any more."""  # K8
        for subscriber in list(self._connections.values()):
            owner, grants = subscriber.owner, self._grants
            if owner is not None and grants is not None and not grants.may_read(*owner):
                self._hang_up(subscriber)

    def send(self, frames: Sequence[Buffer], now: float) -> None:
        """Send to everybody who subscribed to the first frame; whoever lags behind loses it.

        A last frame that is a view must be kept for as long as anybody is to get it.
        """
        topic = frames[0]
        known = self._subscribers.get(topic) if isinstance(topic, bytes) else None
        self._put(self.subscribers(bytes(topic)) if known is None else known, frames, now)

    def answer(
        self, subscriber: SubscriberConnection, frames: Sequence[Buffer], now: float
    ) -> None:
        """Send to one who has subscribed, if it is still there."""
        if self._connections.get(subscriber.fileno()) is subscriber:
            self._put([subscriber], frames, now)

    def _put(
        self, connections: list[SubscriberConnection], frames: Sequence[Buffer], now: float
    ) -> None:
        message = PlainMessage(frames, bytes(frames[0]))
        for subscriber in connections:
            try:
                if (
                    subscriber.outgoing.put(message, now)
                    or subscriber.watched != selectors.EVENT_READ
                ):
                    self._watch(subscriber)
            except OSError:
                self._hang_up(subscriber)

    def keep_up(self, topic: bytes) -> bool:
        """Return whether some subscriber of a topic keeps up, or there is none."""
        subscribers = self.subscribers(topic)
        for subscriber in subscribers:
            if not subscriber.outgoing.queue:
                return True
        return not subscribers

    def subscribers(self, topic: bytes) -> list[SubscriberConnection]:
        """Return those who subscribed to a topic, or to the beginning of it."""
        found = self._subscribers.get(topic)
        if found is None:
            beginnings = {topic[:size] for size in range(len(topic) + 1)}
            found = self._subscribers[topic] = [
                subscriber
                for subscriber in self._connections.values()
                if subscriber.admitted and not beginnings.isdisjoint(subscriber.topics)
            ]
        return found

    def withdraw(self, topics: Collection[bytes]) -> None:
        """Forget what is not on its way yet of some topics: something newer takes its place."""
        for subscriber in list(self._connections.values()):
            if subscriber.watched != selectors.EVENT_READ:  # else nothing waits there
                subscriber.outgoing.withdraw(topics)

    def close(self, linger: float) -> None:
        """Hang up; what is on its way gets so many seconds."""
        if self._listener is not None:
            if not self._accept_at:
                self._selector.unregister(self._listener.socket)
            self._listener.close()
            self._listener = None
        end = time.monotonic() + linger
        while (
            any(o.outgoing.unsent for o in self._connections.values())
            and (now := time.monotonic()) < end
        ):
            self.process_events(self._selector.select(end - now), now)
        for subscriber in list(self._connections.values()):
            self._hang_up(subscriber)

    def close_in_child(self) -> None:
        """Close what a forked child has inherited; the parent goes on."""
        if self._listener is not None:
            self._listener.socket.close()
        for subscriber in self._connections.values():
            subscriber.close()

    # Connections.

    def _accept(self, listener: Listener, now: float) -> None:
        if not self._accepts.take(1, now):
            self._pause(listener.socket, now)
            return
        try:
            connection, _ = listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._not_accepted.warn(error, now)
            self._pause(listener.socket, now)
            return
        if spent(connection.fileno()):
            self._crowd.note(connection.fileno(), _host_of(connection), now)
            connection.close()
            self._pause(listener.socket, now)
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it is gone already, which the first look will tell
            _tune(connection)
        subscriber = SubscriberConnection(
            connection,
            self._queue,
            self._copies,
            self._drop,
            now,
            ticketed=self._grants is not None,
        )
        self._connections[subscriber.fileno()] = subscriber
        self._selector.register(connection, subscriber.watched, subscriber)

    def _pause(self, listener: socket.socket, now: float) -> None:
        """Have the kernel keep who comes next for a while."""
        self._accept_at = now + ACCEPT_SECONDS
        self.due = min(self.due, self._accept_at)
        self._selector.unregister(listener)

    def _write(self, subscriber: SubscriberConnection, now: float) -> None:
        subscriber.outgoing.write(now)
        self._watch(subscriber)

    def _watch(self, subscriber: SubscriberConnection) -> None:
        """Have the selector wait until the rest can be sent, if there is any."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if subscriber.outgoing.unsent else 0)
        if subscriber.watched != events:
            subscriber.watched = events
            self._selector.modify(subscriber, events, subscriber)

    def _look_after(self, now: float) -> None:
        """Ask everybody for a sign of life; hang up on whoever gave none for long."""
        for subscriber in list(self._connections.values()):
            if now - subscriber.outgoing.alive_at >= SILENCE_SECONDS:
                self._hang_up(subscriber)
                continue
            if not subscriber.admitted:
                continue
            subscriber.ping()
            try:
                self._write(subscriber, now)
            except OSError:
                self._hang_up(subscriber)

    def _drop(self, subscriber: SubscriberConnection) -> None:
        """A subscriber does not read, and too much is kept for those that do not."""
        self._turned_away.warn(NOT_READ, time.monotonic())
        self._hang_up(subscriber)

    def _hang_up(self, subscriber: SubscriberConnection) -> None:
        self.asking.pop(subscriber, None)
        self._subscribers.clear()
        del self._connections[subscriber.fileno()]
        self._selector.unregister(subscriber)
        subscriber.close()


def _host_of(connection: socket.socket) -> str:
    """Return where a connection comes from; empty over ipc, or if it is gone already."""
    try:
        peer: tuple[str, int] | str | bytes = connection.getpeername()
    except OSError:
        return ""
    return peer[0] if isinstance(peer, tuple) else ""


def _tune(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_SEND_BUFFER)
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if connection.getsockname()[0] == connection.getpeername()[0]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_SEND_BUFFER)
        if hasattr(socket, "TCP_CONGESTION"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NEAR_CONGESTION)
