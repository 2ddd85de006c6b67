"""A partly sent message holds its version's memory only for a moment, and is still sent whole."""

import socket
import time
from collections.abc import Iterator

import pytest

from weightbus.bus.memory.snapshots import Pool, Snapshot
from weightbus.bus.net import outgoing
from weightbus.bus.net.outgoing import HOLD_SECONDS, Outgoing, PlainMessage, UnreadCopies
from weightbus.bus.net.zmtp import message_parts

NBYTES = 2**22  # more than a socket accepts at once


class Peer:
    """A peer that reads as much as a test says, and its outgoing messages."""

    def __init__(self, most: int = 2**26) -> None:
        self.here, self.there = socket.socketpair()
        self.here.setblocking(False)
        self.hung_up = False
        self.copies = UnreadCopies(most)
        self.outgoing = Outgoing(self.here, 8, bytearray(), self.copies, self.hang_up, 0.0)
        self.got = bytearray()

    def hang_up(self) -> None:
        self.hung_up = True
        self.outgoing.close()

    def read(self, nbytes: int) -> None:
        self.got += self.there.recv(nbytes)

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def half_sent(peer: Peer) -> tuple[Pool, Snapshot, bytes]:
    """Send a message partly; return its pool, its snapshot, and all bytes of the message."""
    pool = Pool("a")
    snapshot = pool.take(NBYTES, replaces_latest=True)
    snapshot.data[:] = 7
    frames = [b"header", snapshot.chunk(0, NBYTES)]
    heads, payload = message_parts(frames)
    expected = bytes(heads) + bytes(payload)
    assert peer.outgoing.put(PlainMessage(frames), 0.0)
    return pool, snapshot, expected


def test_it_is_copied_once_its_version_has_ended_though_it_moves(peer: Peer) -> None:
    _, snapshot, expected = half_sent(peer)
    data = snapshot.data
    now = HOLD_SECONDS / 2
    for step in range(5):  # the peer reads a little in each step
        peer.read(2**16)
        peer.outgoing.write(now + step * HOLD_SECONDS / 2)
        peer.outgoing.hold(now + step * HOLD_SECONDS / 2)
    assert not peer.copies._total, "it moves, and its version is there"  # noqa: SLF001 # pyright: ignore
    snapshot.release()
    before = snapshot.state  # a type checker takes a property that was compared for constant
    assert before == "draining"
    peer.read(2**16)
    peer.outgoing.write(now)
    peer.outgoing.hold(now)
    assert snapshot.state == "free", "the next version may be written there"
    data[:] = 9
    deadline = time.monotonic() + 30.0
    while len(peer.got) < len(expected) and time.monotonic() < deadline:
        peer.outgoing.write(now)
        peer.read(2**20)
    assert bytes(peer.got) == expected, "of the version that it was, to the last byte"


def test_it_is_not_copied_where_there_is_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, copied = Peer(most=NBYTES // 4), list[int]()

    def copy(part: memoryview) -> bytes:
        copied.append(len(part))
        return bytes(part)

    _, snapshot, _ = half_sent(peer)
    snapshot.release()
    monkeypatch.setattr(outgoing, "bytes", copy, raising=False)
    peer.outgoing.hold(0.0)
    assert peer.hung_up
    assert not copied, "not even for a moment"
    assert snapshot.state == "free"
    assert not peer.copies._total  # noqa: SLF001 # pyright: ignore
    peer.close()
