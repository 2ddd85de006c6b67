"""Speaks the server's side of ZMTP 3 (ZeroMQ RFC 23) on one control connection of a publisher.

    greeting (64 bytes) ──> handshake ──> open: messages and commands
                            NULL: READY   CURVE: HELLO, INITIATE (`trust/curve_server.py`)

Bytes are parsed one message at a time. Once all complete messages are taken, the remaining bytes
belong to one incomplete message, whose size is limited.
"""

import contextlib
import socket
import weakref
from collections.abc import Callable, Sequence

from ..headers import Buffer
from ..limits import COMMANDS, UNREAD_BYTES_MAX
from ..protocol_limits import CONTROL_BYTES_MAX
from ..token_bucket import TokenBucket
from ..trust.curve_server import CurveConnection, CurveServer
from .outgoing import Outgoing, PlainMessage, QueuedMessage, UnreadCopies
from .processes import Process, SocketSearch
from .zmtp import COMMAND, FRAMES_MAX, GREETING, LONG, MORE, ZmtpError, greeting_fault, head_of

QUEUE = 128  # messages queued for one worker; a window of chunks in flight is smaller
LARGE_BYTES = 2**16  # an encrypted payload of at least this size counts as a copy
PEER_TYPES = (b"DEALER", b"REQ", b"ROUTER")  # the socket types that may connect to a ROUTER
_METADATA = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"ROUTER" + b"\x08Identity" + bytes(4)


class SecretMessage:
    """A message to one worker, which is encrypted when its sending begins.

    Args:
        curve: Encrypts the message.
        frames: The frames. If the last one is a view, the message refers to it weakly: the caller
            keeps the view for as long as the message should be sent.
    """

    __slots__ = ("_curve", "_first", "_last", "copies")
    topic = b""

    def __init__(self, curve: CurveConnection, frames: Sequence[Buffer]) -> None:
        self._curve, self._first, last = curve, frames[:-1], frames[-1]
        self.copies = len(last) if len(last) >= LARGE_BYTES else 0
        self._last: Callable[[], Buffer | None]
        self._last = weakref.ref(last) if isinstance(last, memoryview) else lambda: last

    def parts(self) -> Sequence[Buffer]:
        """Return the bytes to send; empty if the memory of the payload was released."""
        last = self._last()
        if last is None:
            return ()
        parts = list[Buffer]()
        for index, frame in enumerate((*self._first, last)):
            body = self._curve.frame(frame, more=index < len(self._first))
            parts += (head_of(len(body), 0), body)
        return parts


class ControlConnection:
    """One connection of a control socket.

    Args:
        connection: The connection's socket.
        identity: The bytes by which the machine identifies the connection.
        host: The peer's host.
        copies: See `Outgoing`.
        hang_up: Closes the connection, since the peer does not read.
        curve: The publisher's keys; None: no keys are used.
        now: The time.

    Attributes:
        socket, identity, host: The arguments.
        since: When the connection was accepted.
        open: Whether the handshake is complete.
        proven: Whether a complete message has arrived.
        unparsed: Bytes that were read and not parsed yet.
        ready: Whether `unparsed` may contain a complete message.
        commands: Encoded commands (handshake and answers), which are sent before messages.
        broken: Whether the peer has ended the connection; messages that arrived before are still
            taken.
        closed: Whether `close` was called.
        process: The worker's process at the other end, if known.
        search: The search for that process.
        watched: The events for which the selector waits.
    """

    def __init__(
        self,
        connection: socket.socket,
        identity: bytes,
        host: str,
        copies: UnreadCopies,
        hang_up: Callable[["ControlConnection"], None],
        curve: CurveServer | None,
        now: float,
    ) -> None:
        self.socket, self.identity, self.host, self.since = connection, identity, host, now
        mechanism, as_server = (b"NULL", 0) if curve is None else (b"CURVE", 1)
        self._mechanism = mechanism
        greeting = GREETING[:12] + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)
        self.commands = bytearray(greeting)
        self.outgoing = Outgoing(
            connection, QUEUE, self.commands, copies, lambda: hang_up(self), now
        )
        self._curve = None if curve is None else CurveConnection(curve)
        self._greeted = self.open = self.proven = False
        self.ready = self.broken = self.closed = False
        self.unparsed = bytearray()
        self._frames: list[bytes] = []  # frames of the message that is arriving
        self._nbytes = 0  # bytes of these frames
        self._bucket = TokenBucket(COMMANDS, now)
        self.process: Process | None = None
        self.search: SocketSearch | None = None
        self.watched = 0

    @property
    def key(self) -> str:
        """The peer's public key; empty if no keys are used."""
        return "" if self._curve is None else self._curve.key

    @property
    def partial(self) -> int:
        """The number of received bytes that belong to unfinished messages."""
        return len(self.unparsed) + self._nbytes

    def fileno(self) -> int:
        """Return the connection's descriptor."""
        return self.socket.fileno()

    def read(self, scratch: memoryview, now: float) -> bool:
        """Read once, at most the size of `scratch`; return whether bytes have arrived.

        Raises:
            OSError: The connection is closed.
        """
        try:
            count = self.socket.recv_into(scratch)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("the peer has closed the connection")
        self.outgoing.alive_at = now
        self.unparsed += scratch[:count]
        return True

    def message(self, now: float) -> list[bytes] | None:
        """Return the next message of the bytes that were read; None if no message is complete.

        This also takes part in the handshake, and answers commands.

        Raises:
            ZmtpError, CurveError: The peer violates the protocol: close the connection.
        """
        if not self._greeted:
            fault = greeting_fault(self.unparsed, self._mechanism)
            if fault:
                raise ZmtpError(fault)
            if len(self.unparsed) < len(GREETING):
                return None
            del self.unparsed[: len(GREETING)]
            self._greeted = True
            if self._curve is None:
                self._send_command(b"\x05READY" + _METADATA)
        while (frame := self._frame()) is not None:
            more, command, body = frame
            if command or not (body or more):
                if not self._bucket.take(1, now):
                    raise ZmtpError("it sends more commands and empty messages than any peer needs")
                if command:
                    self._command(body)
                    continue
            if not self.open:
                raise ZmtpError("it sends a message before the end of the handshake")
            self._nbytes += len(body)
            if len(self._frames) + more >= FRAMES_MAX or self._nbytes > CONTROL_BYTES_MAX:
                raise ZmtpError(
                    f"a message of more than {FRAMES_MAX} frames or {CONTROL_BYTES_MAX} bytes"
                )
            self._frames.append(body)
            if not more:
                message, self._frames, self._nbytes = self._frames, [], 0
                return message
        return None

    def _frame(self) -> tuple[bool, bool, bytes] | None:
        """Parse the next frame; return (more frames follow, is a command, body).

        Returns None if the frame is incomplete.
        """
        unparsed = self.unparsed
        if len(unparsed) < 2:
            return None
        flags = unparsed[0]
        head = 9 if flags & LONG else 2
        if flags > MORE | LONG | COMMAND:
            raise ZmtpError(f"a frame with flags {flags:#x}")
        if len(unparsed) < head:
            return None
        size = int.from_bytes(unparsed[1:head], "big")
        if size > CONTROL_BYTES_MAX:
            raise ZmtpError(f"a frame of {size} bytes; at most {CONTROL_BYTES_MAX} are allowed")
        if len(unparsed) < head + size:
            return None
        body = bytes(memoryview(unparsed)[head : head + size])
        del unparsed[: head + size]
        if self._curve is not None and self.open:
            if flags & COMMAND:
                raise ZmtpError("a command that is not encrypted")
            return self._curve.decrypt(body)
        return bool(flags & MORE), bool(flags & COMMAND), body

    def _command(self, body: bytes) -> None:
        if not self.open:
            self._shake_hands(body)
        elif body.startswith(b"\x04PING"):
            self._send_command(b"\x04PONG" + body[7:23])
            if len(self.commands) > UNREAD_BYTES_MAX:
                raise ZmtpError("it does not read the answers to its pings")
        elif body.startswith(b"\x05ERROR"):
            raise ZmtpError(f"the other side reports {body[7:263].decode('latin1')!r}")

    def _shake_hands(self, command: bytes) -> None:
        # Handle a command of the handshake.
        if self._curve is None:
            if not command.startswith(b"\x05READY"):
                raise ZmtpError("it sends a command other than READY in the handshake")
            metadata: bytes | None = command[6:]
        else:
            reply, metadata = self._curve.answer(command, _METADATA)
            self._send_plainly(reply)
        if metadata is None:
            return
        kind = _properties(metadata).get(b"socket-type")
        if kind not in PEER_TYPES:
            raise ZmtpError(f"it is a socket of type {kind!r}, which cannot connect to a ROUTER")
        self.open = True

    def _send_plainly(self, command: bytes) -> None:
        self.commands += head_of(len(command), COMMAND) + command

    def _send_command(self, command: bytes) -> None:
        if self._curve is None or not self.open:
            self._send_plainly(command)
            return
        frame = self._curve.frame(command, command=True)
        self.commands += head_of(len(frame), 0) + frame

    def encode_effect(self, frames: Sequence[Buffer]) -> QueuedMessage:
        """Return a message to this peer for the queue of `outgoing`."""
        return PlainMessage(frames) if self._curve is None else SecretMessage(self._curve, frames)

    def send_last(self, command: bytes) -> None:
        """Send a last handshake command, as far as the kernel accepts it immediately.

        This has no effect if the handshake is complete or the command is empty.
        """
        if self.open or not command:
            return
        self._send_plainly(command)
        with contextlib.suppress(OSError):
            self.socket.send(self.commands)
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self.unparsed.clear()
        self._frames.clear()
        self.outgoing.close()
        self.socket.close()


def _properties(metadata: bytes) -> dict[bytes, bytes]:
    """Return the properties of a READY command, by name in lower case.

    Raises:
        ZmtpError: The properties are truncated.
    """
    found, at = dict[bytes, bytes](), 0
    while at < len(metadata):
        name_end = at + 1 + metadata[at]
        value_begin = name_end + 4
        end = value_begin + int.from_bytes(metadata[name_end:value_begin], "big")
        if value_begin > len(metadata) or end > len(metadata):
            raise ZmtpError("it sends truncated properties in the handshake")
        found[metadata[at + 1 : name_end].lower()] = metadata[value_begin:end]
        at = end
    return found
