"""One subscriber's connection at the publisher, and what is on its way to it (`pub.py`)."""

import selectors
import socket
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache

from ..allowance import Allowance
from ..lease import Lease
from ..limits import MODELS_MAX, SUBSCRIPTIONS, TOPIC_BYTES_MAX, TOPICS_MAX
from ..messages import TOKEN_BYTES, Buffer
from .zmtp import (
    FRAME_HEAD_MAX,
    OFF,
    ON,
    SCRATCH_BYTES,
    TICKET,
    WORD,
    Stream,
    ZmtpError,
    message_parts,
    rest_of,
)

HOLD_SECONDS = 0.1  # that half a message may hold on to its memory while none of it is taken
TURN_BYTES = 2**20  # sent to one subscriber before the next has its turn
READ_BYTES = 1024  # taken from one subscriber before the next has its turn: some 100 frames
UNREAD_BYTES_MAX = 2**16  # of answers to its pings, which a subscriber does not read


class QueuedMessage:
    """A message that waits. If its last frame is a view, whoever sent it must keep that."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self.topic = bytes(frames[0])
        self._heads, last = message_parts(frames)
        self._last: Callable[[], Buffer | None]
        self._last = weakref.ref(last) if isinstance(last, memoryview) else lambda: last

    def parts(self) -> Sequence[Buffer]:
        """Return what is to be sent; nothing if the memory has been given up."""
        last = self._last()
        return () if last is None else (self._heads, last)


class Outlet:
    """One subscriber's connection, and what is on its way to it.

    Args:
        connection: Its socket.
        queue: Messages that wait before more are dropped.
        ticketed: It is served only once it has shown a ticket.
    """

    def __init__(
        self, connection: socket.socket, queue: int, now: float, *, ticketed: bool = False
    ) -> None:
        self._socket, self._room = connection, queue
        # What a subscriber says fits the scratch: no memory is taken for it.
        self._stream = Stream(_nowhere, b"XPUB", SCRATCH_BYTES - FRAME_HEAD_MAX, frames_max=1)
        self._allowance = Allowance(SUBSCRIPTIONS, now)
        self._queue: deque[QueuedMessage] = deque()
        self._sending: Sequence[Buffer] = ()  # what is left of the message that is being sent
        self._left = 0  # bytes of that
        self._sent_topic = b""
        self._blocked = False
        self._moved_at = now  # when the kernel took something last
        self.topics: set[bytes] = set()
        self.asked: dict[bytes, None] = {}  # of these, what nobody was told of yet
        self.owner: tuple[str, str] | None = None  # name and key of its worker, if it has shown one
        self.admitted, self.since = not ticketed, now
        self.ticket = ""  # that it has shown, of which nobody was told yet
        self.said: list[bytes] = []  # words that nobody was told of yet
        self.forged = 0  # of those before: words that were nobody's, and cost as anything else
        self.alive_at = now
        self.watched = selectors.EVENT_READ | selectors.EVENT_WRITE

    def fileno(self) -> int:
        """Return the connection's descriptor."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._left or self._queue or self._stream.outgoing)

    def wants(self, topic: bytes) -> bool:
        """Whether it subscribed to a topic, or to the beginning of it."""
        return self.admitted and not self.topics.isdisjoint(_beginnings(topic))

    @property
    def keeps_up(self) -> bool:
        """Whether no message waits behind the one that is being sent."""
        return not self._queue

    def put(self, message: QueuedMessage, now: float) -> None:
        """Send a message if nothing else waits; else keep it, unless too many wait already.

        Raises:
            OSError: The connection is gone.
        """
        if not self.unsent:
            self._begin(message)
            self.write(now)
        elif len(self._queue) < self._room:
            self._queue.append(message)

    def withdraw(self, topics: Collection[bytes]) -> None:
        """Forget what waits of some topics; what is half sent is copied, to let its memory go."""
        if self._queue:
            self._queue = deque(m for m in self._queue if m.topic not in topics)
        if self._left and self._sent_topic in topics:
            self._let_go()

    def hold(self, now: float) -> None:
        """Hold on to no memory for a connection that takes nothing."""
        if now - self._moved_at >= HOLD_SECONDS:
            self._let_go()

    def _let_go(self) -> None:
        self._sending = [bytes(part) for part in self._sending]

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._stream.ping()

    def write(self, now: float) -> None:
        """Send until the kernel takes no more, or others should have a turn.

        Its buffer was full and has room again: the other side lives, though it may take long to
        come to our ping and to answer.

        Raises:
            OSError: The connection is gone.
        """
        turn = TURN_BYTES
        while turn > 0 and (self._left or self._refill()):
            try:
                sent = self._socket.sendmsg(self._sending)
            except BlockingIOError:
                self._blocked = True
                return
            self._moved_at = now
            if self._blocked:
                self._blocked, self.alive_at = False, now
            turn -= sent
            self._left -= sent
            self._sending = rest_of(self._sending, sent) if self._left else ()

    def _begin(self, message: QueuedMessage) -> None:
        self._sending, self._sent_topic = message.parts(), message.topic
        self._left = sum(map(len, self._sending))

    def _refill(self) -> bool:
        """Find something to send. (A command must not come between the frames of a message.)"""
        if self._stream.outgoing:
            command = bytes(self._stream.outgoing)
            self._stream.outgoing.clear()
            self._sending, self._left, self._sent_topic = (command,), len(command), b""
        while self._queue and not self._left:
            self._begin(self._queue.popleft())
        return self._left > 0

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
        self.alive_at = now
        before = self._stream.frames
        for message in self._stream.received(count):
            if not isinstance(message, Lease):  # no place is lent here
                self._take(bytes(message[0]))
        if len(self.topics) > TOPICS_MAX or len(self._stream.outgoing) > UNREAD_BYTES_MAX:
            raise ZmtpError("it asks for more than anybody needs")
        others, self.forged = self._stream.frames - before - len(self.said) + self.forged, 0
        if others and not self._allowance.take(others, now):
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
        if on == ON:
            self.topics.add(topic)
            self.asked[topic] = None
        else:
            self.topics.discard(topic)
            self.asked.pop(topic, None)

    def close(self) -> None:
        """Hang up."""
        self._queue.clear()
        self._sending, self._left = (), 0
        self._socket.close()


def _nowhere(_frames: Iterable[Buffer], _size: int) -> None:
    """Have no place for a payload: subscribers send none."""


@lru_cache(maxsize=2 * MODELS_MAX)
def _beginnings(topic: bytes) -> frozenset[bytes]:
    """Return what one may have subscribed to who is to hear of a topic."""
    return frozenset(topic[:size] for size in range(len(topic) + 1))
