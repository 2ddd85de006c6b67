"""Speaks ZMTP 3 (ZeroMQ RFC 23, NULL security) for either side of a data connection.

It uses no sockets: the caller receives into the memory that `room()` returns, and then calls
`received()`. The caller sends the bytes in `outgoing`, but never between the frames of a message.

libzmq receives each message into newly allocated memory: page faults, a hand-over between threads,
and a copy to the version's memory together cost more than the network does. So the worker reads
published messages itself, and most of a payload goes from the kernel directly into the version's
memory. (`pub.py` says why the publisher sends messages itself.)

    greeting (64 bytes) ──> READY ──> messages and commands

    a frame:  ┌───────┬──────────────┬──── ··· ────┐   flags: 1 more follow, 2 long size, 4 command
              │ flags │ size, 1 or 8 │    body     │
              └───────┴──────────────┴──── ··· ────┘
    a message: topic, header, at most one payload
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Literal

from ..headers import PAYLOAD_INDEX, Buffer
from ..lease import Lease
from ..protocol_limits import HEADER_BYTES_MAX, MESSAGE_BYTES_MAX

MORE, LONG, COMMAND = 1, 2, 4
# The first byte of a subscriber's message: unsubscribe, subscribe, report, or ticket.
OFF, ON, REPORT, TICKET = b"\0", b"\1", b"\2", b"\3"
SCRATCH_BYTES: Final = 8192  # bytes read ahead: at most so many of a payload are copied once more
PIECE_BYTES: Final = 2**18  # bytes of a payload received at once: few enough to hash in the cache
FRAME_HEAD_MAX: Final = 9  # flags, and a size of 8 bytes
FRAMES_MAX: Final = 8  # frames of a message; a later protocol may have several payloads
GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

SINK: Final = memoryview(bytearray(2**16))  # for unwanted bytes; never read

Arrived = Sequence[Buffer] | Lease  # a message: its frames, or the lease of its payload
Place = Callable[[Sequence[Buffer], int], Lease | None]
State = Literal["greeting", "ready", "open"]


class ZmtpError(Exception):
    """The peer does not speak ZMTP 3, or violates it: close the connection."""


class Stream:
    """The protocol state of one connection, without the socket.

    Args:
        place: Called with the topic and header of a message, and the size of its payload. Returns a
            lease of the memory for the payload; `received` then returns the lease instead of the
            message. If the result is None, the payload is read and discarded, and the message has
            an empty payload.
        kind: This side's socket type. (The greeting is of ZMTP 3.0, where subscriptions are
            messages.)
        frame_max: The most bytes of a frame that is not a payload.
        frames_max: The most frames of a message.
    """

    def __init__(
        self,
        place: Place,
        kind: bytes = b"SUB",
        frame_max: int = HEADER_BYTES_MAX,
        frames_max: int = FRAMES_MAX,
    ) -> None:
        self.outgoing = bytearray(GREETING)
        self.frames = 0  # frames that have arrived, commands included
        self.commands = 0  # commands that have arrived
        self._kind = kind
        self._frame_max, self._frames_max = frame_max, frames_max
        self.state: State = "greeting"
        self._place = place
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._have = 0  # number of received bytes in the scratch memory
        self.missing = 1  # bytes that must arrive before anything can be processed
        self.held = False  # whether a payload waits until earlier messages are processed
        self._frames: list[Buffer] = []  # frames of the message that is arriving
        # The frame that is being received, if it is longer than the scratch memory. Without a
        # lease, its bytes are discarded.
        self._body: tuple[int, Lease | None] | None = None
        self._topics: set[bytes] = set()
        self.first = b""  # a message to send before all others

    def subscribe(self, topic: bytes, *, on: bool) -> None:
        """Subscribe to a topic or, if not `on`, unsubscribe."""
        (self._topics.add if on else self._topics.discard)(topic)
        if self.state == "open":
            self._send(bytes([on]) + topic)

    def send_if_idle(self, body: bytes) -> bool:
        """Queue a message of one frame if `outgoing` is empty; return whether it was queued."""
        if self.state != "open" or self.outgoing:
            return False
        self.outgoing += head_of(len(body), 0) + body
        return True

    def ping(self) -> None:
        """Send a ping."""
        if self.state == "open":
            self._send(b"\x04PING\0\0", COMMAND)

    def room(self) -> memoryview:
        """Return the memory into which to receive the next bytes."""
        if self._body is None:
            return self._scratch[self._have :]
        _, lease = self._body
        if lease is not None and lease.live:
            return lease.view[lease.count : lease.count + PIECE_BYTES]
        return SINK[: self.missing]

    def received(self, count: int) -> Sequence[Arrived]:
        """Process bytes that were received into `room()`; return the messages that they complete.

        If `held` is True afterwards, more input is buffered: process these messages, and then call
        this method with 0 before `room()`.

        Raises:
            ZmtpError: The peer violates the protocol: close the connection.
        """
        messages: list[Arrived] = []
        if self._body is None:
            self._have += count
            self._parse(messages)
            return messages
        flags, lease = self._body
        if lease is not None and lease.live:
            lease.received(count)
        self.missing -= count
        if not self.missing:
            self._body, self.missing = None, 1
            self._long_frame(flags, lease, messages)
        return messages

    def close(self) -> None:
        """Cancel a payload that was being received: the connection is closed."""
        if self._body is not None and self._body[1] is not None:
            self._body[1].cancel()

    # Parsing.

    def _parse(self, messages: list[Arrived]) -> None:
        """Process complete frames in the scratch memory; begin a frame that does not fit."""
        scratch, have, at = self._scratch, self._have, 0
        self.held = False
        if self.state == "greeting" and have >= len(GREETING):
            at = self._greet(scratch)
        while self.state != "greeting" and have - at >= 2:
            flags = scratch[at]
            body = at + (9 if flags & LONG else 2)
            if flags > MORE | LONG | COMMAND:
                raise ZmtpError(f"a frame with flags {flags:#x}")
            if have < body:
                break
            size = int.from_bytes(scratch[at + 1 : body], "big")
            end = body + size
            if end <= have:
                self._frame(flags, bytes(scratch[body:end]), messages)
                at = end
                continue
            payload = not flags & COMMAND and len(self._frames) >= PAYLOAD_INDEX
            if not payload and size > self._frame_max:
                raise ZmtpError(f"a frame of {size} bytes; at most {self._frame_max} are allowed")
            if not payload and end - at <= SCRATCH_BYTES:
                break
            # The effects of earlier messages may decide where the payload goes.
            self.held = payload and bool(messages)
            if not self.held:
                self._begin(flags, size, scratch[body:have], payload=payload)
                at = have
            break
        if at:
            scratch[: have - at] = bytes(scratch[at:have])
        self._have = have - at

    def _greet(self, greeting: memoryview) -> int:
        if fault := greeting_fault(greeting, b"NULL"):
            raise ZmtpError(fault)
        self.state = "ready"
        kind = b"\x0bSocket-Type" + len(self._kind).to_bytes(4, "big") + self._kind
        self._send(b"\x05READY" + kind, COMMAND)
        return len(GREETING)

    def _begin(self, flags: int, size: int, first_bytes: memoryview, *, payload: bool) -> None:
        """Get memory for a frame that is longer than the scratch; copy its first bytes there."""
        if payload and size > MESSAGE_BYTES_MAX:
            raise ZmtpError(f"a frame of {size} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
        lease: Lease | None = None
        if not payload:
            lease = Lease(memoryview(bytearray(size)), hashed=False)
        elif len(self._frames) == PAYLOAD_INDEX:
            lease = self._place(self._frames, size)
        self._body, self.missing = (flags, lease), size - len(first_bytes)
        if lease is not None:
            lease.view[: len(first_bytes)] = first_bytes
            lease.received(len(first_bytes))

    def _long_frame(self, flags: int, lease: Lease | None, messages: list[Arrived]) -> None:
        """Process a complete frame that was longer than the scratch."""
        if lease is not None and lease.message is None:
            self._frame(flags, lease.view, messages)
            return
        before = len(messages)
        self._frame(flags, b"", messages)
        if lease is not None and len(messages) > before:
            messages[-1] = lease
        elif lease is not None:
            lease.cancel()  # more frames follow, which this protocol does not have

    def _frame(self, flags: int, body: Buffer, messages: list[Arrived]) -> None:
        # Process a complete frame: a command, or a part of a message.
        self.frames += 1
        if flags & COMMAND:
            self._command(bytes(body))
            return
        if self.state != "open":
            raise ZmtpError("a message before READY")
        if len(self._frames) + bool(flags & MORE) >= self._frames_max:
            raise ZmtpError(f"a message of more than {self._frames_max} frames")
        self._frames.append(body)
        if not flags & MORE:
            messages.append(self._frames)
            self._frames = []

    def _command(self, body: bytes) -> None:
        # Process a command.
        self.commands += 1
        size = 1 + body[0] if body else 0
        name, rest = body[1:size], body[size:]
        if name == b"READY" and self.state == "ready":
            self.state = "open"
            if self.first:
                self._send(self.first)
            for topic in sorted(self._topics):
                self._send(b"\1" + topic)
        elif name == b"PING":
            self._send(b"\x04PONG" + rest[2:18], COMMAND)
        elif name == b"ERROR":
            raise ZmtpError(f"the other side says: {rest[1:].decode('latin1')}")

    def _send(self, body: bytes, flags: int = 0) -> None:
        self.outgoing += bytes([flags, len(body)]) + body


def greeting_fault(greeting: Buffer, mechanism: bytes) -> str:
    """Return an error text for a greeting, which may be incomplete; "" if it is valid so far."""
    head = bytes(greeting[:32])
    signature, version, theirs = head[:10], head[10:11], head[12:32]
    valid = signature[:1] in (b"", b"\xff") and signature[9:10] in (b"", b"\x7f")
    if not valid or (version and version < b"\x03"):
        return "the other side does not speak ZMTP 3"
    name = mechanism.ljust(20, b"\0")
    if not name.startswith(theirs):
        wanted = theirs.rstrip(b"\0").decode("latin1")
        return f"the other side asks for {wanted} security, not for {mechanism.decode()}"
    return ""


def message_parts(frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return a message as buffers to send in order; the last frame is not copied."""
    heads, last = b"", frames[-1]
    for frame in frames[:-1]:
        heads += head_of(len(frame), MORE) + frame
    return heads + head_of(len(last), 0), last


@lru_cache  # few different sizes occur
def head_of(size: int, flags: int) -> bytes:
    """Return the head of a frame, which precedes its body."""
    if size < 256:
        return bytes([flags, size])
    return bytes([flags | LONG]) + size.to_bytes(8, "big")


def rest_of(parts: Sequence[Buffer], sent: int) -> list[Buffer]:
    """Return the parts of these buffers that remain after the first `sent` bytes were sent."""
    rest: list[Buffer] = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
            continue
        rest.append(memoryview(part)[sent:] if sent else part)
        sent = 0
    return rest
