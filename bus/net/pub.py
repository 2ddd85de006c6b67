"""The publisher's data socket: our own PUB socket, which sends directly from a version's memory.

libzmq makes an object of each message and passes it to a thread of its own. Here the calling thread
sends. A small message is in the kernel when `send` returns; the parts of a large message follow
whenever the kernel has room. Each subscriber has a queue. A message that does not fit into the
queue of a subscriber is dropped for that subscriber alone, as with ZeroMQ's PUB.

A subscriber that does not read (a stopped process, for instance) does not keep the publisher from
reusing the memory of a version for the next one (`outgoing.py`).

One thread owns all of these objects; no method blocks.
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
from ..headers import TOKEN_BYTES, Buffer
from ..lease import Lease
from ..limits import (
    ACCEPTS,
    COPIES_BYTES_MAX,
    STRANGER_SECONDS,
    SUBSCRIPTIONS,
    TOPIC_BYTES_MAX,
    TOPICS_MAX,
    UNREAD_BYTES_MAX,
)
from ..token_bucket import TokenBucket
from ..trust.grants import Grants
from .descriptors import RejectedConnections, nearly_exhausted
from .listening import WatchedListener, bound
from .outgoing import HOLD_SECONDS, NOT_READ, Outgoing, PlainMessage, UnreadCopies
from .zmtp import (
    FRAME_HEAD_MAX,
    OFF,
    ON,
    REPORT,
    SCRATCH_BYTES,
    TICKET,
    Stream,
    ZmtpError,
)

log = logging.getLogger("weightbus.publisher")

PING_SECONDS = 5.0  # seconds between two pings, which detect dead subscribers
# Seconds until a connection is closed whose subscriber neither sends bytes nor reads queued ones.
SILENCE_SECONDS = 30.0
# Within a host, bytes beyond this size leave the cache before the receiver reads them, and pacing
# (by some congestion controls) is useless. Between hosts the kernel's defaults are best.
LOCAL_SEND_BUFFER = 2**20
LOCAL_CONGESTION = b"reno"
READ_BYTES = 1024  # bytes read from one subscriber before the next is served: some 100 frames


class SubscriberConnection:
    """One subscriber's connection, with its outgoing messages.

    Args:
        connection: The connection's socket.
        queue: The number of messages that may be queued; further messages are dropped.
        copies: See `Outgoing`.
        hang_up: Closes the connection, since the subscriber does not read.
        now: The time, on the monotonic clock.
        ticketed: Whether the subscriber must send a ticket before it gets messages.

    Attributes:
        outgoing: The outgoing messages.
    """

    def __init__(
        self,
        connection: socket.socket,
        queue: int,
        copies: UnreadCopies,
        hang_up: Callable[["SubscriberConnection"], None],
        now: float,
        *,
        ticketed: bool = False,
    ) -> None:
        self._socket = connection
        # A subscriber's frames fit into the scratch memory, so no memory is allocated for them.
        self._stream = Stream(_no_lease, b"XPUB", SCRATCH_BYTES - FRAME_HEAD_MAX, frames_max=1)
        self._bucket = TokenBucket(SUBSCRIPTIONS, now)
        self.outgoing = Outgoing(
            connection, queue, self._stream.outgoing, copies, lambda: hang_up(self), now
        )
        self.topics: set[bytes] = set()
        self.changed = False  # whether `topics` changed since the last check
        self.new_topics: dict[bytes, None] = {}  # those that `receive_input` has not returned yet
        self.owner: tuple[str, str] | None = None  # (name, key) of the worker that owns the ticket
        self.admitted, self.since = not ticketed, now
        self.ticket = ""  # the ticket that the subscriber sent, until `admit`
        self.reports: list[bytes] = []  # reports that `receive_input` has not returned yet
        self.invalid_frames = 0  # invalid reports that the rate limit has not counted yet
        self.watched = selectors.EVENT_READ | selectors.EVENT_WRITE

    def fileno(self) -> int:
        """Return the connection's descriptor."""
        return self._socket.fileno()

    def ping(self) -> None:
        """Send a ping."""
        self._stream.ping()

    def read(self, now: float) -> bool:
        """Read and parse input; return whether a subscription, report or ticket has arrived.

        Raises:
            OSError: The connection is closed.
            ZmtpError: The subscriber violates the protocol, or exceeds its rate limit.
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
            if not isinstance(message, Lease):  # always true: subscribers send no payloads
                self._process_frame(bytes(message[0]))
        if len(self.topics) > TOPICS_MAX or len(self._stream.outgoing) > UNREAD_BYTES_MAX:
            raise ZmtpError("it has too many subscriptions, or reads no answers")
        others, self.invalid_frames = (
            self._stream.frames - before - len(self.reports) + self.invalid_frames,
            0,
        )
        if others and not self._bucket.take(others, now):
            raise ZmtpError("it sends more frames than the rate limit allows")
        return bool(self.new_topics or self.reports or self.ticket)

    def _process_frame(self, frame: bytes) -> None:
        # Process a frame: a subscription, a report, or a ticket.
        kind, body = frame[:1], frame[1:]
        if not (self.admitted or self.ticket):  # K6
            if kind != TICKET or len(body) != TOKEN_BYTES:
                raise ZmtpError("it has shown no ticket; only workers with a key get one")
            self.ticket = body.decode("latin1")
            return
        if kind == REPORT:
            self.reports.append(body)
            return
        if kind not in (OFF, ON) or len(body) > TOPIC_BYTES_MAX:
            raise ZmtpError("it sent a frame that is no report and no valid subscription")
        self.changed = True
        if kind == ON:
            self.topics.add(body)
            self.new_topics[body] = None
        else:
            self.topics.discard(body)
            self.new_topics.pop(body, None)

    def close(self) -> None:
        """Close the connection."""
        self.outgoing.close()
        self._socket.close()


def _no_lease(_frames: Iterable[Buffer], _size: int) -> None:
    """Return no memory for a payload, since subscribers send no payloads."""


class SubscriberInput(NamedTuple):
    """The input of one subscriber since the last `receive_input`."""

    subscriber: SubscriberConnection
    topics: Collection[bytes]  # the topics that it has subscribed to
    reports: Sequence[bytes]
    ticket: str = ""  # the ticket, which was sent before these topics and reports


class PubSocket:
    """A bound PUB socket, and the connections of its subscribers.

    Args:
        queue: The number of messages that may be queued per subscriber; further ones are dropped.
        selector: Where the sockets are registered; pass the events it finds to `process_events`.
        grants: The keys that may connect; None: no key is needed.
        rejected: Counts connections that are rejected for lack of descriptors.
        copies: Counts the bytes that are copied for all connections of the publisher.

    Attributes:
        with_input: The subscribers with input that `receive_input` has not returned yet.
        due: The time at which `tick` must be called.
    """

    def __init__(
        self,
        queue: int,
        selector: selectors.BaseSelector,
        grants: Grants | None = None,
        rejected: RejectedConnections | None = None,
        copies: UnreadCopies | None = None,
    ) -> None:
        self._grants, self._rejected = grants, rejected or RejectedConnections()
        self._copies = copies or UnreadCopies(COPIES_BYTES_MAX)
        self._queue = queue
        self._selector = selector
        self._closed_warning = RateLimitedWarning(log, "a subscriber is turned away: %s")
        self._listener: WatchedListener | None = None
        self._connections: dict[int, SubscriberConnection] = {}
        self._subscribers: dict[
            bytes, list[SubscriberConnection]
        ] = {}  # by topic, until a subscription changes
        self.with_input: dict[SubscriberConnection, None] = {}
        self._accepts = TokenBucket(ACCEPTS, 0.0)
        self._ping_at = self._hold_at = self.due = 0.0

    def bind(self, endpoint: str, parameter: str, patience: float | None = None) -> str:
        """Listen at an endpoint; return the endpoint with the actual port.

        Args:
            endpoint, parameter, patience: See `bound`.

        Raises:
            AddressError: The endpoint is in use, or invalid.
        """
        listen = partial(WatchedListener, endpoint, self._selector, "a subscriber")
        self._listener = bound(listen, endpoint, parameter, patience)
        return self._listener.endpoint

    def process_events(
        self, found: Iterable[tuple[selectors.SelectorKey, int]], now: float
    ) -> None:
        """Accept, read and send on the sockets that the selector has found ready."""
        for key, events in found:
            subscriber = key.data
            if not isinstance(subscriber, SubscriberConnection):
                if self._listener is not None and key.fileobj is self._listener.socket:
                    self._accept(self._listener, now)
                    self.due = min(self.due, self._listener.resume_at)
                continue
            try:
                # Read only after `receive_input` has returned earlier reports: this limits the
                # memory for input.
                if (
                    events & selectors.EVENT_READ
                    and not subscriber.reports
                    and subscriber.read(now)
                ):
                    self.with_input[subscriber] = None
                if subscriber.changed:
                    subscriber.changed = False
                    self._subscribers.clear()
                if subscriber.outgoing.unsent or events & selectors.EVENT_WRITE:
                    self._write(subscriber, now)
            except ZmtpError as error:
                self._closed_warning.warn(error, now)
                self._hang_up(subscriber)
            except OSError:
                self._hang_up(subscriber)

    def tick(self, now: float) -> None:
        """Do what is due: accept, ping, close. Call this at the time `due`."""
        listener = self._listener
        if listener is not None and now >= listener.resume_at:
            listener.resume()
        if now >= self._hold_at:
            self._hold_at = now + HOLD_SECONDS
            for subscriber in list(self._connections.values()):
                subscriber.outgoing.hold(now)
            for subscriber in list(self._connections.values()):
                if not subscriber.admitted and now - subscriber.since >= STRANGER_SECONDS:  # K6
                    self._hang_up(subscriber)
        if now >= self._ping_at:
            self._ping_at = now + PING_SECONDS
            self._ping_all(now)
        self.due = min(self._hold_at, self._ping_at)
        if listener is not None:
            self.due = min(self.due, listener.resume_at)

    def receive_input(self) -> SubscriberInput | None:
        """Return the new input of one subscriber, each topic once; None if there is no input."""
        if not self.with_input:
            return None
        subscriber = next(iter(self.with_input))
        del self.with_input[subscriber]
        topics, reports = subscriber.new_topics, subscriber.reports
        subscriber.new_topics, subscriber.reports = {}, []
        return SubscriberInput(subscriber, topics, reports, subscriber.ticket)

    def admit(self, subscriber: SubscriberConnection, owner: tuple[str, str] | None) -> bool:
        """Admit a subscriber, and close other connections of its worker.

        Return False if the subscriber is not connected any more, or is not admitted.

        Args:
            subscriber: A connection that has sent a ticket.
            owner: Name and key of the ticket's owner. None: the ticket is unknown, so the
                connection is closed.
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

    def close_revoked(self) -> None:
        """Close the connections of workers whose keys are no longer allowed."""  # K8
        for subscriber in list(self._connections.values()):
            owner, grants = subscriber.owner, self._grants
            if owner is not None and grants is not None and not grants.may_read(*owner):
                self._hang_up(subscriber)

    def send(self, frames: Sequence[Buffer], now: float) -> None:
        """Send a message to the subscribers of its topic, which is the first frame.

        A subscriber whose queue is full loses the message. If the last frame is a view, the caller
        keeps the view for as long as the message should be sent.
        """
        topic = frames[0]
        known = self._subscribers.get(topic) if isinstance(topic, bytes) else None
        self._put(self.subscribers(bytes(topic)) if known is None else known, frames, now)

    def answer(
        self, subscriber: SubscriberConnection, frames: Sequence[Buffer], now: float
    ) -> None:
        """Send a message to one subscriber, if it is still connected."""
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

    def has_room(self, topic: bytes) -> bool:
        """True if a subscriber of a topic has an empty queue, or if the topic has no subscriber."""
        subscribers = self.subscribers(topic)
        for subscriber in subscribers:
            if not subscriber.outgoing.queue:
                return True
        return not subscribers

    def subscribers(self, topic: bytes) -> list[SubscriberConnection]:
        """Return the subscribers of a topic or of any prefix of the topic."""
        found = self._subscribers.get(topic)
        if found is None:
            prefixes = {topic[:size] for size in range(len(topic) + 1)}
            found = self._subscribers[topic] = [
                subscriber
                for subscriber in self._connections.values()
                if subscriber.admitted and not prefixes.isdisjoint(subscriber.topics)
            ]
        return found

    def withdraw(self, topics: Collection[bytes]) -> None:
        """Drop queued messages of these topics, since newer messages replace them."""
        for subscriber in list(self._connections.values()):
            if subscriber.watched != selectors.EVENT_READ:  # otherwise its queue is empty
                subscriber.outgoing.withdraw(topics)

    def close(self, linger: float) -> None:
        """Close all connections; queued messages get `linger` seconds to be sent."""
        if self._listener is not None:
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
        """Close the descriptors that a forked child has inherited; the parent is not affected."""
        if self._listener is not None:
            self._listener.socket.close()
        for subscriber in self._connections.values():
            subscriber.close()

    # Connections.

    def _accept(self, listener: WatchedListener, now: float) -> None:
        # Accept a connection, as far as rate and descriptors allow.
        if not self._accepts.take(1, now):
            listener.pause(now)
            return
        accepted = listener.accept(now)
        if accepted is None:
            return
        connection, _ = accepted
        if nearly_exhausted(connection.fileno()):
            self._rejected.note(connection.fileno(), _host_of(connection), now)
            connection.close()
            listener.pause(now)
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # the peer has closed it, as the first read will show
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

    def _write(self, subscriber: SubscriberConnection, now: float) -> None:
        subscriber.outgoing.write(now)
        self._watch(subscriber)

    def _watch(self, subscriber: SubscriberConnection) -> None:
        """Let the selector wait for input and, if bytes are unsent, for room to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if subscriber.outgoing.unsent else 0)
        if subscriber.watched != events:
            subscriber.watched = events
            self._selector.modify(subscriber, events, subscriber)

    def _ping_all(self, now: float) -> None:
        """Ping all subscribers; close the connections that are silent for too long."""
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
        """Close a connection that does not read: too many bytes are copied for such connections."""
        self._closed_warning.warn(NOT_READ, time.monotonic())
        self._hang_up(subscriber)

    def _hang_up(self, subscriber: SubscriberConnection) -> None:
        self.with_input.pop(subscriber, None)
        self._subscribers.clear()
        del self._connections[subscriber.fileno()]
        self._selector.unregister(subscriber)
        subscriber.close()


def _host_of(connection: socket.socket) -> str:
    """Return the peer's host; empty over ipc, or if the connection is closed already."""
    try:
        peer: tuple[str, int] | str | bytes = connection.getpeername()
    except OSError:
        return ""
    return peer[0] if isinstance(peer, tuple) else ""


def _tune(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BUFFER)
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if connection.getsockname()[0] == connection.getpeername()[0]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BUFFER)
        if hasattr(socket, "TCP_CONGESTION"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOCAL_CONGESTION)
