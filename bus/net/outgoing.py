"""Sends the messages of one peer: holds a queue, and the message that is partly sent.

A queued message has only a weak reference to the memory of its payload: once the version is
released, its messages are skipped. So a peer that reads nothing keeps no version alive. A partly
sent message must be completed, or its connection closed. If such a message makes no progress, its
unsent bytes are copied, so that the version's memory is free for the next version. All connections
of a publisher share one limit for copied bytes. Beyond the limit, the connection that has made no
progress for the longest time is closed.

One thread owns all of these objects; no method blocks.
"""

import socket
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ..headers import Buffer
from .zmtp import message_parts, rest_of

HOLD_SECONDS = 0.1  # seconds that a partly sent message may use its memory without progress
# While other connections wait for copies: seconds without progress until a connection with a copy
# is closed, and seconds in which the whole copy must be sent.
STUCK_SECONDS, COPY_SECONDS = 1.5, 30.0
TURN_BYTES = 2**20  # bytes sent to one peer before the next peer is served
NOT_READ = "it does not read, and too many bytes are queued for connections that do not read"


class QueuedMessage(Protocol):
    """A message that waits in a queue.

    Attributes:
        topic: The topic of a published message; empty for a message to one worker.
        copies: How many bytes are copied when the sending begins: none (0), or all.
    """

    @property
    def topic(self) -> bytes: ...

    @property
    def copies(self) -> int: ...

    def parts(self) -> Sequence[Buffer]:
        """Return the bytes to send; empty if the memory of the payload was released."""
        ...


class PlainMessage:
    """A message that is sent unchanged, to any number of peers.

    Args:
        frames: The frames. If the last one is a view, the message refers to it weakly: the caller
            keeps the view for as long as the message should be sent.
        topic: See `QueuedMessage`.
    """

    __slots__ = ("_heads", "_last", "topic")
    copies = 0

    def __init__(self, frames: Sequence[Buffer], topic: bytes = b"") -> None:
        self.topic = topic
        self._heads, last = message_parts(frames)
        self._last: Callable[[], Buffer | None]
        self._last = weakref.ref(last) if isinstance(last, memoryview) else lambda: last

    def parts(self) -> Sequence[Buffer]:
        """See `QueuedMessage`."""
        last = self._last()
        return () if last is None else (self._heads, last)


class Outgoing:
    """The outgoing messages of one peer.

    Args:
        connection: The peer's socket.
        capacity: The number of messages that may be queued; further messages are dropped.
        commands: Encoded commands, which are sent before the queue; the caller appends commands.
        copies: Counts the bytes that are copied for all connections.
        hang_up: Closes the connection, since the peer does not read.
        now: The time, on the monotonic clock.

    Attributes:
        queue: The messages behind the message that is being sent.
        waits: Whether the next message waits until fewer bytes are copied for other connections.
        began_at: When the sending of the current message began.
        moved_at: When the kernel last accepted bytes.
        hang_up: The argument `hang_up`.
        alive_at: When the peer last received or sent bytes; the connection's reader sets this, too.
    """

    def __init__(
        self,
        connection: socket.socket,
        capacity: int,
        commands: bytearray,
        copies: "UnreadCopies",
        hang_up: Callable[[], None],
        now: float,
    ) -> None:
        self._socket, self._capacity = connection, capacity
        self._commands, self._copies = commands, copies
        self.hang_up = hang_up
        self.queue: deque[QueuedMessage] = deque()
        self._sending: Sequence[Buffer] = ()  # the unsent bytes of the message that is being sent
        self._left = 0  # the number of these bytes
        # The payload of the message that is being sent; it dies when the version is released.
        self._payload: weakref.ref[memoryview] | None = None
        self._sent_topic = b""
        self._blocked = self._copied = self.waits = False
        self.began_at = self.moved_at = self.alive_at = now

    @property
    def unsent(self) -> bool:
        """True if bytes can be sent as soon as the kernel accepts them."""
        return bool(self._left or self._commands or (self.queue and not self.waits))

    def put(self, message: QueuedMessage, now: float) -> bool:
        """Send a message if nothing else waits, else queue it; if the queue is full, drop it.

        Returns:
            Whether bytes wait to be sent.

        Raises:
            OSError: The connection is closed.
        """
        idle = not (self._left or self.queue or self._commands)
        waits = bool(message.copies) and idle and not self._copies.room
        if idle and not waits:
            self._begin(message, now)
            self.write(now)
            return self._left > 0
        if len(self.queue) < self._capacity:
            self.queue.append(message)
            self.waits = self.waits or waits
        return True

    def withdraw(self, topics: Collection[bytes]) -> None:
        """Drop queued messages of these topics; copy a partly sent message, to free its memory."""
        if self.queue:
            self.queue = deque(m for m in self.queue if m.topic not in topics)
        if self._left and self._sent_topic in topics:
            self._copy_rest()

    def hold(self, now: float) -> None:
        """Copy a partly sent message if its version was released or it makes no progress.

        If too many bytes are copied then, the slowest connections are closed, perhaps this one.
        """
        released = self._payload is not None and self._payload() is None
        if self._left and (released or now - self.moved_at >= HOLD_SECONDS):
            self._copy_rest()

    def _copy_rest(self) -> None:
        if any(isinstance(part, memoryview) for part in self._sending):
            self._note_copy()
            self._copies.make_room()  # before the copy, so that the limit is never exceeded
            if self._left:
                self._sending = [bytes(part) for part in self._sending]

    def _note_copy(self) -> None:
        self._copied = True
        self._copies.note(self, self._left)

    def _forget_copy(self) -> None:
        self._copied = False
        self._copies.forget(self)

    def write(self, now: float) -> None:
        """Send until the kernel accepts no more, or until `TURN_BYTES` are sent.

        If a full send buffer has room again, the peer is alive, even if it has not read our ping
        yet.

        Raises:
            OSError: The connection is closed.
        """
        turn = TURN_BYTES
        while turn > 0 and (self._left or ((self.queue or self._commands) and self._refill(now))):
            try:
                sent = self._socket.sendmsg(self._sending)
            except BlockingIOError:
                self._blocked = True
                return
            self.moved_at = now
            if self._blocked:
                self._blocked, self.alive_at = False, now
            turn -= sent
            self._left -= sent
            self._sending = rest_of(self._sending, sent) if self._left else ()
            if not self._left and self._copied:
                self._forget_copy()

    def _refill(self, now: float) -> bool:
        """Select the commands or message to send next; return whether there is anything.

        Call this only between messages: a command must not come between the frames of a message.
        """
        if self._commands:
            command = bytes(self._commands)
            self._commands.clear()
            self._sending, self._left, self._sent_topic = (command,), len(command), b""
        self.waits = False
        while self.queue and not self._left:
            self.waits = bool(self.queue[0].copies) and not self._copies.room
            if self.waits:
                break
            self._begin(self.queue.popleft(), now)
        return self._left > 0

    def _begin(self, message: QueuedMessage, now: float) -> None:
        self._sending, self._sent_topic = message.parts(), message.topic
        self._payload = None
        if self._sending and isinstance(view := self._sending[-1], memoryview):
            # Hold a view of the view: the original is collected when its version is released.
            self._payload, self._sending = weakref.ref(view), (*self._sending[:-1], view[:])
        self._left, self.began_at = sum(map(len, self._sending)), now
        if message.copies and self._left:
            self._note_copy()

    def close(self) -> None:
        """Drop all messages."""
        self.queue.clear()
        self._commands.clear()
        self._sending, self._left = (), 0
        self._forget_copy()


class UnreadCopies:
    """Counts the bytes copied for peers that do not read, for all connections of a publisher.

    Args:
        limit: The most bytes that may be copied at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._total = limit, 0
        self._sizes: dict[Outgoing, int] = {}

    def note(self, outgoing: Outgoing, nbytes: int) -> None:
        """Set the number of bytes that are copied for a peer."""
        self._total += nbytes - self._sizes.get(outgoing, 0)
        self._sizes[outgoing] = nbytes

    def forget(self, outgoing: Outgoing) -> None:
        """Remove the copy of a peer."""
        self._total -= self._sizes.pop(outgoing, 0)

    @property
    def room(self) -> bool:
        """Whether another message may be copied; that message may exceed the limit."""
        return self._total < self._limit

    def make_room(self) -> None:
        """Close connections, longest without progress first, until the total is in the limit."""
        while self._total > self._limit:
            min(self._sizes, key=lambda outgoing: outgoing.moved_at).hang_up()

    def close_slow(self, now: float) -> None:
        """Close the connections that read their copies too slowly. Call this if others wait."""
        for outgoing in list(self._sizes):
            stuck = now - outgoing.moved_at >= STUCK_SECONDS
            if stuck or now - outgoing.began_at >= COPY_SECONDS:
                outgoing.hang_up()
