"""The worker's data connection: connects in the background, and receives payloads in place.

One thread owns the connection, and no method blocks: a helper thread resolves the host, connects,
and then wakes the owner. A connection that breaks, or on which nothing arrives, is replaced.
"""

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable

from ..errors import summary_of
from ..event_log import RateLimitedWarning
from ..lease import Lease
from ..limits import COMMANDS, UNREAD_BYTES_MAX
from ..token_bucket import TokenBucket
from . import endpoints
from .zmtp import TICKET, Arrived, Place, Stream, ZmtpError

log = logging.getLogger("weightbus.worker")

DIAL_SECONDS = 5.0  # the most seconds for lookup and connect, and again for the handshake
REDIAL_SECONDS, REDIAL_MAX_SECONDS = 0.05, 1.0  # seconds between two attempts; doubles
SILENCE_SECONDS = 30.0  # seconds without input until a reconnect; a publisher pings more often
LOW_WATER_BYTES = 2**19  # bytes of a payload that must have arrived before the kernel wakes us


class Subscription:
    """A SUB connection to one publisher.

    Args:
        place: Returns where to receive a payload; see `zmtp.Stream`.
        wake: Wakes the owning thread; called by the thread that connects.
    """

    def __init__(self, place: Place, wake: Callable[[], None]) -> None:
        self._place, self._wake = place, wake
        self._warning = RateLimitedWarning(log, "no pushed data from %s")
        self._endpoint = ""
        self._ticket = ""  # the ticket for the next connection
        self._ticketed = False  # whether each connection needs a ticket
        self._topics: set[bytes] = set()
        self._socket: socket.socket | None = None
        self._stream = Stream(place)
        self._arrived: deque[Arrived] = deque()
        # Connections of the helper threads that the owner has not taken yet; None: it failed.
        self._dialled: deque[tuple[str, socket.socket | None]] = deque()
        self._dialling = self._closed = False
        self._dial_at = 0.0
        self._pause = REDIAL_SECONDS
        self._heard_at = 0.0
        self._commands = TokenBucket(COMMANDS, 0.0)  # limits the commands of this connection
        self._low_water = 1  # bytes that must have arrived before the kernel wakes us
        self._drained = False  # whether nothing can be read before the descriptor is readable
        # Whether a message may be available although the descriptor is not readable.
        self.pending = False

    def connect(self, endpoint: str, ticket: str = "") -> None:
        """Receive messages from this endpoint instead of any earlier endpoint; "": from none.

        The endpoint must be valid (`endpoints.check`). If a ticket is given, each later connection
        needs a new ticket: a ticket is valid once.
        """
        self._ticket, self._ticketed = ticket, bool(ticket)
        if endpoint != self._endpoint:
            self._hang_up()
            self._endpoint, self._dial_at, self._pause = endpoint, 0.0, REDIAL_SECONDS

    def redial(self) -> None:
        """Connect again, immediately."""
        self._hang_up()
        self._dial_at, self._pause = 0.0, REDIAL_SECONDS

    def subscribe(self, topic: bytes, *, on: bool) -> None:
        """Subscribe to a topic or, if not `on`, unsubscribe; repeated calls have no effect."""
        if (topic in self._topics) != on:
            (self._topics.add if on else self._topics.discard)(topic)
            self._stream.subscribe(topic, on=on)

    def send(self, body: bytes) -> bool:
        """Send a message to the publisher; return False if that is not possible now."""
        connection = self._socket
        if connection is None or not self._stream.send_if_idle(body):
            return False
        return self._write(connection)

    def process_events(self, now: float) -> tuple[socket.socket, bool] | None:
        """Connect, time out and send; return (socket to watch, whether bytes are unsent).

        The result is None without a connection.
        """
        while self._dialled:
            self._use_connection(*self._dialled.popleft(), now)
        patience = SILENCE_SECONDS if self._stream.state == "open" else DIAL_SECONDS
        if self._socket is not None and now - self._heard_at >= patience:
            self._hang_up()
        if self._socket is None:
            dial = self._endpoint and not self._dialling and now >= self._dial_at
            if dial and not self.needs_ticket:
                self._dial_at, self._pause = (
                    now + self._pause,
                    min(2 * self._pause, REDIAL_MAX_SECONDS),
                )
                try:
                    threading.Thread(
                        target=self._dial,
                        args=(self._endpoint,),
                        name="weightbus-dial",
                        daemon=True,
                    ).start()
                except RuntimeError as error:  # the process cannot start another thread now
                    self._warning.warn(f"{self._endpoint}: {error}", now)
                else:
                    self._dialling = True
            return None
        connection, unsent = self._socket, self._stream.outgoing
        return (connection, bool(unsent)) if not unsent or self._write(connection) else None

    @property
    def needs_ticket(self) -> bool:
        """True if a new connection is needed, but there is no ticket for it."""
        return self._ticketed and not (self._ticket or self._socket or self._dialling)

    def receive(self, now: float) -> Arrived | None:
        """Return the next message; None if there is none.

        Afterwards, `pending` is True if more may be available.
        """
        while not self._arrived and (self._stream.held or not self._drained):
            connection, stream = self._socket, self._stream
            if connection is None:
                break
            try:
                if stream.held:
                    self._arrived.extend(stream.received(0))
                    continue
                room = stream.room()
                count = connection.recv_into(room)
                if not count:  # the publisher has closed the connection
                    self._hang_up()
                    continue
                commands = stream.commands
                self._arrived.extend(stream.received(count))
                self._drained = count < len(room)
                if stream.state == "open":  # bytes in a handshake are no sign of life
                    self._heard_at = now
                if self._arrived:  # commands alone do not justify a quick reconnect
                    self._pause = REDIAL_SECONDS
                if stream.outgoing and self._write(connection):
                    self._check_unread(stream)
                if stream.commands != commands:
                    self._check_commands(stream.commands - commands, now)
            except BlockingIOError:
                self._drained = True
            except ZmtpError as error:
                self._warning.warn(f"{self._endpoint}: {error}", now)
                self._hang_up()
            except OSError:
                self._hang_up()
            except Exception as error:  # a defect: the connection's state is unknown
                self._warning.warn(f"{self._endpoint}: {summary_of(error)}", now)
                self._hang_up()
        message = self._arrived.popleft() if self._arrived else None
        more = message is not None and not self._drained
        self.pending = more or bool(self._arrived) or self._stream.held
        if not self.pending:
            self._drained = False
            if self._stream.missing != self._low_water:
                self._set_low_water()
        return message

    def _check_unread(self, stream: Stream) -> None:
        """Raise ZmtpError if the peer sends PINGs and does not read the PONGs."""
        if len(stream.outgoing) > UNREAD_BYTES_MAX:
            raise ZmtpError(
                f"it has not read {len(stream.outgoing)} bytes of answers to its PINGs; at most "
                f"{UNREAD_BYTES_MAX} may be queued"
            )

    def _check_commands(self, count: int, now: float) -> None:
        """Raise ZmtpError if the peer's commands exceed the rate limit."""
        if not self._commands.take(count, now):
            raise ZmtpError(
                f"more than {COMMANDS.burst:g} commands at once, or {COMMANDS.per_second:g} a "
                "second: a publisher sends a PING every few seconds"
            )

    def _set_low_water(self) -> None:
        """Let the kernel wake us for a large part of the missing bytes, not for each packet."""
        count = min(self._stream.missing, LOW_WATER_BYTES)
        if count != self._low_water and self._socket is not None:
            self._low_water = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def close(self) -> None:
        """Close the connection, and never connect again."""
        self._closed = True
        self._endpoint = ""
        self._hang_up()
        self._forget_dialled()

    # Connecting.

    def _dial(self, endpoint: str) -> None:
        """Connect, in a helper thread, and wake the owner."""
        found: socket.socket | None = None
        with contextlib.suppress(OSError, UnicodeError):
            found = endpoints.dial(endpoint, DIAL_SECONDS)
        self._dialled.append((endpoint, found))
        self._wake()
        if self._closed:
            self._forget_dialled()

    def _forget_dialled(self) -> None:
        """Close connections that will not be used, after `close`. Called from any thread."""
        with contextlib.suppress(IndexError):
            while True:
                _, found = self._dialled.popleft()
                if found is not None:
                    found.close()

    def _use_connection(self, endpoint: str, found: socket.socket | None, now: float) -> None:
        # Use a connection that the helper thread has made; None: it failed.
        self._dialling = False
        if found is None:
            return
        if endpoint != self._endpoint or self._socket is not None:
            found.close()
            return
        found.setblocking(False)
        self._socket, self._heard_at, self._low_water = found, now, 1
        self._stream, self._commands = Stream(self._place), TokenBucket(COMMANDS, now)
        if self._ticket:
            self._stream.first, self._ticket = TICKET + self._ticket.encode(), ""  # K7
        for topic in self._topics:
            self._stream.subscribe(topic, on=True)

    def _write(self, connection: socket.socket) -> bool:
        """Send the queued bytes; return False if the connection is closed."""
        try:
            del self._stream.outgoing[: connection.send(self._stream.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()
            return False
        return True

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._stream.close()
        self._stream = Stream(self._place)
        for topic in self._topics:
            self._stream.subscribe(topic, on=True)
        while self._arrived:
            lost = self._arrived.popleft()
            if isinstance(lost, Lease):
                lost.cancel()
