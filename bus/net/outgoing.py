"""Messages on their way to one peer: a queue, and the message that is half sent.

A queued message refers weakly to the memory of its payload: when a version ends, its messages
vanish from each queue, so a peer that reads nothing keeps no version alive. A half-sent message
must be completed or its connection closed. If it does not move, the rest of it is copied, so that
the version's memory is free for the next one. These copies are bounded, of all connections of a
publisher together: beyond the bound the connection that has not moved for longest is closed.

Everything here belongs to one thread, and never waits.
"""

import socket
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ..messages import Buffer
from .zmtp import message_parts, rest_of

HOLD_SECONDS = 0.1  # that half a message may hold on to its memory while none of it is taken
STUCK_SECONDS = 1.5  # without a move, after which a copy makes way for those that wait for room
COPY_SECONDS = 30.0  # in which a copy has to be sent while others wait: 1 MiB at 40 kB/s
TURN_BYTES = 2**20  # sent to one peer before the next has its turn
NOT_READ = "it does not read, and too much is kept for connections that do not"


class QueuedMessage(Protocol):
    """A message that waits in a queue.

    Attributes:
        topic: The topic of a published message; empty for a message to one worker.
        copies: The bytes that are copied when the message begins to be sent: 0, or all of it.
    """

    @property
    def topic(self) -> bytes: ...

    @property
    def copies(self) -> int: ...

    def parts(self) -> Sequence[Buffer]:
        """Return the bytes to send; nothing if the memory of the payload has ended."""
        ...


class PlainMessage:
    """A message that goes out as it is, to any number of peers.

    Args:
        frames: The frames. If the last one is a view, the caller keeps it for as long as the
            message should go out.
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
    """What is on its way to one peer.

    Args:
        connection: The peer's socket.
        room: The number of messages that wait before more are dropped.
        commands: Encoded commands that go out before the queue; others append to it.
        copies: The copies of all connections.
        hang_up: Closes the connection, since the peer does not read.
        now: The time.

    Attributes:
        queue: The messages behind the one that is being sent.
        waits: Whether the next message waits until others need less for their copies.
        began_at: When the message that is being sent began to be.
        moved_at: When the kernel took bytes last.
        hang_up: As given.
        alive_at: When the peer showed last that it lives; readers of the connection move it, too.
    """

    def __init__(
        self,
        connection: socket.socket,
        room: int,
        commands: bytearray,
        copies: "Copies",
        hang_up: Callable[[], None],
        now: float,
    ) -> None:
        self._socket, self._room, self._commands, self._copies = connection, room, commands, copies
        self.hang_up = hang_up
        self.queue: deque[QueuedMessage] = deque()
        self._sending: Sequence[Buffer] = ()  # the rest of the message that is being sent
        self._left = 0  # bytes of it
        self._payload: weakref.ref[memoryview] | None = None  # of it, while its version lasts
        self._sent_topic = b""
        self._blocked = self._copied = self.waits = False
        self.began_at = self.moved_at = self.alive_at = now

    @property
    def unsent(self) -> bool:
        """Whether anything is to be sent as soon as the kernel takes it."""
        return bool(self._left or self._commands or (self.queue and not self.waits))

    def put(self, message: QueuedMessage, now: float) -> bool:
        """Send a message if nothing else waits; else queue it, or drop it if the queue is full.

        Returns:
            Whether anything waits to be sent.

        Raises:
            OSError: The connection is gone.
        """
        idle = not (self._left or self.queue or self._commands)
        waits = bool(message.copies) and idle and not self._copies.room
        if idle and not waits:
            self._begin(message, now)
            self.write(now)
            return self._left > 0
        if len(self.queue) < self._room:
            self.queue.append(message)
            self.waits = self.waits or waits
        return True

    def withdraw(self, topics: Collection[bytes]) -> None:
        """Drop queued messages of some topics; copy what is half sent, to free its memory."""
        if self.queue:
            self.queue = deque(m for m in self.queue if m.topic not in topics)
        if self._left and self._sent_topic in topics:
            self._copy_rest()

    def hold(self, now: float) -> None:
        """Copy what is half sent if its version has ended, or the peer takes nothing for a while.

        If too much is copied then, the slowest peers are hung up on, perhaps this one.
        """
        ended = self._payload is not None and self._payload() is None
        if self._left and (ended or now - self.moved_at >= HOLD_SECONDS):
            self._copy_rest()

    def _copy_rest(self) -> None:
        if any(isinstance(part, memoryview) for part in self._sending):
            self._note_copy()
            self._copies.make_room()  # first, or there would be too many of them for a moment
            if self._left:
                self._sending = [bytes(part) for part in self._sending]

    def _note_copy(self) -> None:
        self._copied = True
        self._copies.note(self, self._left)

    def _forget_copy(self) -> None:
        self._copied = False
        self._copies.forget(self)

    def write(self, now: float) -> None:
        """Send until the kernel takes no more, or others should have a turn.

        When a full buffer has room again the peer lives, though it may take long to come to our
        ping and to answer.

        Raises:
            OSError: The connection is gone.
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
        """Find something to send. (A command must not come between the frames of a message.)"""
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
            # A view of the view: its own end tells that its version has ended.
            self._payload, self._sending = weakref.ref(view), (*self._sending[:-1], view[:])
        self._left, self.began_at = sum(map(len, self._sending)), now
        if message.copies and self._left:
            self._note_copy()

    def close(self) -> None:
        """Forget everything."""
        self.queue.clear()
        self._commands.clear()
        self._sending, self._left = (), 0
        self._forget_copy()


class Copies:
    """The bytes that are copied for peers that do not take them, of all connections together.

    Args:
        most: How many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most, self._total = most, 0
        self._sizes: dict[Outgoing, int] = {}

    def note(self, outgoing: Outgoing, nbytes: int) -> None:
        """So many bytes are copied for a peer."""
        self._total += nbytes - self._sizes.get(outgoing, 0)
        self._sizes[outgoing] = nbytes

    def forget(self, outgoing: Outgoing) -> None:
        """Nothing is copied for a peer any more."""
        self._total -= self._sizes.pop(outgoing, 0)

    @property
    def room(self) -> bool:
        """Whether a message may be copied now. The last one may go beyond the bound."""
        return self._total < self._most

    def make_room(self) -> None:
        """Hang up on the peers that have not moved for longest, while there are too many bytes."""
        while self._total > self._most:
            min(self._sizes, key=lambda outgoing: outgoing.moved_at).hang_up()

    def make_way(self, now: float) -> None:
        """Hang up on the peers that take their copies too slowly: others wait for the room."""
        for outgoing in list(self._sizes):
            stuck = now - outgoing.moved_at >= STUCK_SECONDS
            if stuck or now - outgoing.began_at >= COPY_SECONDS:
                outgoing.hang_up()
