"""A peer at the data address that sends commands gets few answers, or loses its connection."""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from weightbus.bus.headers import control_topic
from weightbus.bus.limits import COMMANDS, UNREAD_BYTES_MAX
from weightbus.bus.net import sub
from weightbus.bus.net.sub import REDIAL_MAX_SECONDS, REDIAL_SECONDS, SILENCE_SECONDS, Subscription
from weightbus.bus.net.zmtp import COMMAND, GREETING
from weightbus.bus.token_bucket import Rate
from weightbus.tests.net.hostile import frame, message
from weightbus.tests.net.test_zmtp import HELLO
from weightbus.tests.simulation.placing import frames_of

SECONDS = 30.0  # far more than any step here takes
PING = frame(b"\x04PING\0\0" + b"a" * 16, COMMAND)


class ControlConnection:
    """A publisher made of plain sockets, and a subscription that connects to it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(SECONDS)
        self.subscription = Subscription(lambda _frames, _size: None, lambda: None)
        self.subscription.subscribe(control_topic("m"), on=True)
        self.now = time.monotonic()
        port = self._listener.getsockname()[1]
        self.subscription.connect(f"tcp://127.0.0.1:{port}")

    def accept(self) -> socket.socket:
        """Return a connection whose handshake is complete, and whose subscription has arrived."""
        self.now += REDIAL_MAX_SECONDS
        deadline = time.monotonic() + SECONDS
        while self.connection is None:
            assert time.monotonic() < deadline, "it does not dial"
            self.turn()
        made, _ = self._listener.accept()
        made.sendall(HELLO)
        heard = b""
        while control_topic("m") not in heard:
            self.turn()
            made.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                heard += made.recv(4096)
        made.setblocking(True)
        assert heard.startswith(GREETING)
        return made

    @property
    def connection(self) -> socket.socket | None:
        found: socket.socket | None = vars(self.subscription)["_socket"]
        return found

    def turn(self) -> list[bytes]:
        """Do what the worker's thread does in a turn; return the message that has arrived."""
        self.subscription.process_events(self.now)
        arrived = self.subscription.receive(self.now)
        return [] if arrived is None else frames_of(arrived)

    def hears(self, what: list[bytes]) -> None:
        deadline = time.monotonic() + SECONDS
        while self.turn() != what:
            assert time.monotonic() < deadline

    def close(self) -> None:
        self.subscription.close()
        self._listener.close()


@pytest.fixture(name="peer")
def _peer() -> Iterator[ControlConnection]:
    peer = ControlConnection()
    yield peer
    peer.close()


def flood(peer: ControlConnection, made: socket.socket, data: bytes) -> int:
    """Send until the subscription hangs up; return the most bytes that it kept unsent."""
    most, made_at, deadline = 0, peer.connection, time.monotonic() + SECONDS
    made.setblocking(False)
    while peer.connection is made_at:
        assert time.monotonic() < deadline, "it was not hung up on"
        with contextlib.suppress(BlockingIOError, ConnectionError):
            made.send(data)
        peer.turn()
        if peer.connection is made_at:
            most = max(most, len(vars(peer.subscription)["_stream"].outgoing))
    return most


def test_a_flood_of_pings_is_hung_up_on(
    peer: ControlConnection, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), peer.accept() as made:
        flood(peer, made, PING * 1000)
    assert "commands at once" in caplog.text
    assert len(caplog.records) == 1


def test_after_a_flood_it_is_dialled_ever_more_seldom(peer: ControlConnection) -> None:
    pauses: list[float] = []
    for _ in range(6):
        with peer.accept() as made:
            flood(peer, made, PING * 1000)
        pauses.append(vars(peer.subscription)["_pause"])
    assert pauses == sorted(pauses)
    assert pauses[-1] == REDIAL_MAX_SECONDS > pauses[0]
    with peer.accept() as made:  # a message shows that this is a publisher
        made.sendall(message(control_topic("m"), b"{}"))
        peer.hears([control_topic("m"), b"{}"])
        assert vars(peer.subscription)["_pause"] == REDIAL_SECONDS


def test_what_a_peer_does_not_read_is_bounded(
    peer: ControlConnection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sub, "COMMANDS", Rate(10**9, 0.0))
    with caplog.at_level(logging.WARNING), peer.accept() as made:
        most = flood(peer, made, PING * 1000)
    assert "has not read" in caplog.text
    assert most <= UNREAD_BYTES_MAX


def test_pings_now_and_then_are_signs_of_life(peer: ControlConnection) -> None:
    with peer.accept() as made:
        connection, heard = peer.connection, b""
        for _ in range(int(4 * COMMANDS.burst)):
            peer.now += SILENCE_SECONDS / 6
            made.sendall(PING)
            deadline = time.monotonic() + SECONDS
            made.settimeout(0.01)
            while not heard.endswith(b"a" * 16):
                assert time.monotonic() < deadline
                peer.turn()
                with contextlib.suppress(TimeoutError):
                    heard += made.recv(4096)
            heard = b""
        assert peer.connection is connection


def test_a_defect_in_taking_a_message_costs_a_connection_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer = ControlConnection()

    def broken(_frames: object, _size: int) -> None:
        raise ZeroDivisionError("boom")

    with caplog.at_level(logging.WARNING), contextlib.closing(peer):
        with peer.accept() as made:
            vars(vars(peer.subscription)["_stream"])["_place"] = broken
            first, deadline = peer.connection, time.monotonic() + SECONDS
            made.sendall(message(control_topic("m"), b"{}", b"x" * 10_000))
            while peer.connection is first:
                assert time.monotonic() < deadline
                peer.turn()
        assert "ZeroDivisionError: boom" in caplog.text
        with peer.accept() as made:
            made.sendall(message(control_topic("m"), b"{}"))
            peer.hears([control_topic("m"), b"{}"])
