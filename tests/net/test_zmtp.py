"""A subscriber's side of ZMTP: the cut of the stream does not matter, and nonsense is rejected."""

import contextlib
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus.bus.headers import Buffer
from weightbus.bus.net.zmtp import (
    COMMAND,
    FRAMES_MAX,
    GREETING,
    LONG,
    SCRATCH_BYTES,
    SINK,
    Stream,
    ZmtpError,
)
from weightbus.bus.protocol_limits import HEADER_BYTES_MAX, MESSAGE_BYTES_MAX
from weightbus.tests.net.hostile import frame, message
from weightbus.tests.simulation.placing import Placed, frames_of

HELLO = GREETING + b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04XPUB"


class Side:
    """A subscriber that gives each payload a place, unless `places` is false."""

    def __init__(self, *, places: bool = True) -> None:
        self.places = places
        self.leases: list[Placed] = []
        self.asked: list[tuple[list[bytes], int]] = []
        self.stream = Stream(self._place)
        self.messages: list[list[bytes]] = []

    def _place(self, frames: Sequence[Buffer], size: int) -> Placed | None:
        self.asked.append(([bytes(f) for f in frames], size))
        if not self.places:
            return None
        self.leases.append(Placed(frames, size))
        return self.leases[-1]

    def feed(self, data: bytes, step: int = 1 << 20) -> None:
        while data:
            room = self.stream.room()
            count = min(len(room), step, len(data))
            assert count > 0
            room[:count] = data[:count]
            data = data[count:]
            self._take(count)
            while self.stream.held:
                self._take(0)

    def _take(self, count: int) -> None:
        self.messages += map(frames_of, self.stream.received(count))


@settings(max_examples=40)
@given(
    sent=st.lists(
        st.tuples(
            st.binary(max_size=20),
            st.binary(max_size=300),
            st.sampled_from([0, 1, 255, 256, SCRATCH_BYTES - 9, SCRATCH_BYTES, 3 * SCRATCH_BYTES]),
        ),
        max_size=5,
    ),
    step=st.integers(1, 20_000),
    places=st.booleans(),
)
def test_any_cut_of_the_stream_gives_the_same_messages(
    sent: list[tuple[bytes, bytes, int]], step: int, places: bool
) -> None:
    side = Side(places=places)
    wanted = [[topic, head, bytes(range(256)) * (size // 256)] for topic, head, size in sent]
    side.feed(HELLO + b"".join(message(*frames) for frames in wanted), step)
    assert len(side.messages) == len(wanted)
    for got, frames in zip(side.messages, wanted, strict=True):
        assert got[:2] == frames[:2]
        assert got[2] == frames[2] or (not places and got[2] == b"")
    for lease in side.leases:
        assert lease.count == len(lease.view)


@given(st.binary(max_size=300), st.integers(1, 300))
def test_any_bytes_are_taken_or_refused(data: bytes, step: int) -> None:
    for beginning in (b"", GREETING, HELLO):
        with contextlib.suppress(ZmtpError):
            Side().feed(beginning + data, step)


def test_topics_are_asked_for_once_the_publisher_is_ready() -> None:
    side = Side()
    side.stream.subscribe(b"b", on=True)
    side.stream.subscribe(b"a", on=True)
    assert side.stream.outgoing == GREETING
    side.feed(HELLO)
    assert side.stream.outgoing.endswith(b"\x00\x02\x01a\x00\x02\x01b")
    side.stream.subscribe(b"a", on=False)
    assert side.stream.outgoing.endswith(b"\x00\x02\x00a")


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x09short", b"\x07UNKNOWN"])
def test_a_command_that_says_nothing_is_passed_over(body: bytes) -> None:
    side = Side()
    side.feed(HELLO + frame(body, COMMAND) + message(b"a", b"b"))
    assert side.messages == [[b"a", b"b"]]


def test_a_ping_is_answered_with_its_context() -> None:
    side = Side()
    side.feed(HELLO)
    side.stream.outgoing.clear()
    side.feed(frame(b"\x04PING\x00\x10context", COMMAND))
    assert bytes(side.stream.outgoing) == frame(b"\x04PONGcontext", COMMAND)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53), "does not speak"),
        (bytes(64), "does not speak"),
        (GREETING.replace(b"NULL", b"CURV"), "CURV security"),
        (GREETING + message(b"a/ctl", b"{}"), "before READY"),
        (HELLO + b"\x10\x00", "flags"),
        (HELLO + frame(b"\x05ERROR\x03why", COMMAND), "why"),
        (HELLO + bytes([LONG]) + struct.pack(">Q", HEADER_BYTES_MAX + 1), "a frame of"),
        (HELLO + b"\x01\x01a\x01\x01b" + b"\x02" + struct.pack(">Q", MESSAGE_BYTES_MAX + 1), "of"),
        (HELLO + b"\x01\x00" * (FRAMES_MAX + 1), "more than"),
    ],
)
def test_whoever_breaks_the_rules_is_left(data: bytes, why: str) -> None:
    with pytest.raises(ZmtpError, match=why):
        Side().feed(data)


def test_no_memory_is_taken_for_what_nobody_wants() -> None:
    side = Side(places=False)
    side.feed(HELLO + b"\x01\x01a\x01\x01b" + b"\x02" + struct.pack(">Q", 2**26))
    assert side.asked == [([b"a", b"b"], 2**26)]
    assert side.stream.room().obj is SINK.obj


def test_a_payload_gets_its_place_after_what_came_before_it_was_dealt_with() -> None:
    """An announcement and the first chunk of its version can arrive in one read."""
    side = Side()
    payload = bytes(2 * SCRATCH_BYTES)
    data = HELLO + message(b"a", b"announce") + message(b"b", b"chunk", payload)
    side.stream.room()[:SCRATCH_BYTES] = data[:SCRATCH_BYTES]
    assert [*map(frames_of, side.stream.received(SCRATCH_BYTES))] == [[b"a", b"announce"]]
    assert side.stream.held
    assert not side.asked
    assert not side.stream.received(0)
    assert side.asked == [([b"b", b"chunk"], len(payload))]
    side.feed(data[SCRATCH_BYTES:])
    assert side.messages == [[b"b", b"chunk", payload]]


def test_a_place_that_is_taken_away_is_not_written_to() -> None:
    side = Side()
    payload = bytes(3 * SCRATCH_BYTES)
    whole = message(b"a", b"b", payload)
    side.feed(HELLO + whole[: 2 * SCRATCH_BYTES])
    (lease,) = side.leases
    lease.live = False
    lease.view[:] = b"x" * len(lease.view)
    side.feed(whole[2 * SCRATCH_BYTES :])
    assert side.messages == [[b"a", b"b", b""]]
    assert bytes(lease.view) == b"x" * len(payload)


def test_a_connection_that_breaks_gives_the_place_back() -> None:
    leases: list[Placed] = []

    def place(frames: Sequence[Buffer], size: int) -> Placed:
        leases.append(Placed(frames, size))
        return leases[-1]

    stream = Stream(place)
    data = HELLO + message(b"a", b"b", bytes(2 * SCRATCH_BYTES))[:SCRATCH_BYTES]
    while data:
        room = stream.room()[: len(data)]
        room[:] = data[: len(room)]
        data = data[len(room) :]
        assert not stream.received(len(room))
    stream.close()
    assert [lease.cancelled for lease in leases] == [True]


def test_a_place_of_a_message_that_has_more_than_a_payload_is_given_back() -> None:
    side = Side()
    payload = bytes(3 * SCRATCH_BYTES)
    side.feed(HELLO + message(b"a", b"b", payload, b"what is this?"))
    assert side.messages == [[b"a", b"b", b"", b"what is this?"]], "it will be malformed"
    assert [lease.cancelled for lease in side.leases] == [True]
