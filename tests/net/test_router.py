"""The publisher's control socket: which peers are served, and what each peer may cost."""

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from weightbus.bus.limits import COMMANDS
from weightbus.bus.net import outgoing, peer, router
from weightbus.bus.net.processes import SocketSearch
from weightbus.bus.net.publisher_sockets import PublisherSockets
from weightbus.bus.net.zmtp import COMMAND, FRAMES_MAX, GREETING, MORE
from weightbus.bus.protocol_limits import CONTROL_BYTES_MAX, HEADER_BYTES_MAX
from weightbus.bus.token_bucket import Rate
from weightbus.bus.trust import curve
from weightbus.bus.trust.grants import Grant, Grants
from weightbus.tests.net.dealers import (
    CURVE_GREETING,
    METADATA,
    PING,
    READY,
    CurveDealer,
    dialled,
    frame,
    is_closed,
    joined,
    read_until,
    received,
    wait_until_closed,
)

SCHEMES = pytest.mark.parametrize("sockets", ["tcp", "ipc"], indirect=True)


@pytest.fixture(name="sockets")
def _sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PublisherSockets]:
    over_ipc = getattr(request, "param", "tcp") == "ipc"
    address = f"ipc://{tmp_path}/control" if over_ipc else "tcp://127.0.0.1:0"
    with contextlib.closing(PublisherSockets(address, None)) as sockets:
        yield sockets


def held_by(sockets: PublisherSockets) -> peer.ControlConnection:
    """Return the only connection."""
    [held] = vars(vars(sockets)["_router"])["_peers"].values()
    assert isinstance(held, peer.ControlConnection)
    return held


# Others.

OTHERS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost:5555\r\n\r\n",
    "POST": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n" + b'\x00\x07{"wbp":1',
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "ZMTP 1.0": b"\x01\x00" + b"\x06\x00hello" * 3,
    "ZMTP 2.0": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + b"\x00\x05hello",
    "PLAIN": GREETING[:12] + b"PLAIN".ljust(20, b"\0") + bytes(32),
    "CURVE": CURVE_GREETING,
    "flags": GREETING + READY + b"\x08\x00",
    "size": GREETING + READY + b"\x02" + (2**63).to_bytes(8, "big"),
    "before READY": GREETING + frame(b"{}"),
    "PING before READY": GREETING + PING,
    "ERROR": GREETING + READY + frame(b"\x05ERROR\x04\x1b[2J", COMMAND),
    "properties": GREETING + frame(b"\x05READY\xffSocket-Type\0", COMMAND),
    "no type": GREETING + frame(b"\x05READY", COMMAND),
    "SUB": GREETING + frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB", COMMAND),
    "frames": GREETING + READY + frame(b"x", MORE) * (FRAMES_MAX + 1),
    "bytes": GREETING + READY + 2 * frame(b"x" * (CONTROL_BYTES_MAX // 2 + 1), MORE),
    "empty": GREETING + READY + frame(b"") * 1000,
    "pings": GREETING + READY + PING * 1000,
}


@SCHEMES
@pytest.mark.parametrize("said", OTHERS.values(), ids=OTHERS)
def test_others_are_hung_up_on_and_nobody_else(sockets: PublisherSockets, said: bytes) -> None:
    with joined(sockets) as honest, dialled(sockets.address) as other:
        with contextlib.suppress(OSError):
            other.sendall(said)
        deadline = time.monotonic() + 30.0
        empty: list[bytes] = []
        while not is_closed(other):
            assert time.monotonic() < deadline, "it was not hung up on"
            sockets.poll(0.01)
            if found := sockets.receive():
                empty += map(bytes, found[1])
        assert not any(empty), "and none of it is a message with anything in it"
        honest.sendall(frame(b"still"))
        assert received(sockets)[1] == [b"still"]
        assert not is_closed(honest)


@pytest.mark.parametrize("first", [byte for byte in range(256) if byte != 0xFF])
def test_the_first_byte_is_enough(sockets: PublisherSockets, first: int) -> None:
    with dialled(sockets.address) as other:
        other.sendall(bytes([first]))
        wait_until_closed(sockets, other)


def test_a_ping_on_a_connection_that_breaks_ends_nothing(sockets: PublisherSockets) -> None:
    """libzmq 4.3.5 aborts the process then."""
    for number in range(30):
        stranger = dialled(sockets.address, f"127.0.0.{2 + number}")
        stranger.sendall(GREETING + READY + PING + 20 * frame(b"x") + PING)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
        for _ in range(5):
            sockets.poll(0.0)
            sockets.receive()
    with joined(sockets) as honest:
        honest.sendall(frame(b"still"))
        deadline = time.monotonic() + 30.0
        while received(sockets)[1] != [b"still"]:
            assert time.monotonic() < deadline


# Messages.


@SCHEMES
def test_messages_come_as_they_were_sent_however_they_are_cut(sockets: PublisherSockets) -> None:
    rng = random.Random(7)
    bodies = [rng.randbytes(rng.choice([1, 255, 256, 9_000, HEADER_BYTES_MAX])) for _ in range(40)]
    wire = b"".join(frame(body) for body in bodies)
    with joined(sockets) as worker:
        found: list[bytes] = []
        while len(found) < len(bodies):
            count = rng.choice([1, 100, 20_000])
            if wire:
                worker.sendall(wire[:count])
                wire = wire[count:]
            sockets.poll(0.0 if wire else 1.0)
            while message := sockets.receive():
                found += map(bytes, message[1])
        assert found == bodies


def test_peers_have_their_turns_one_message_each(sockets: PublisherSockets) -> None:
    with joined(sockets) as one, joined(sockets) as other:
        one.sendall(frame(b"one") * 100)
        while not sockets.poll(1.0).control:
            pass
        other.sendall(frame(b"other"))
        found = [received(sockets)[1] for _ in range(2)]
        sockets.poll(1.0)
        found += [received(sockets)[1] for _ in range(2)]
    assert [b"other"] in found


def test_a_peer_has_no_say_in_what_it_is_called(sockets: PublisherSockets) -> None:
    named = METADATA + b"\x08Identity" + (4).to_bytes(4, "big") + b"same"
    with joined(sockets, metadata=named) as one, joined(sockets, metadata=named) as other:
        one.sendall(frame(b"one"))
        first = received(sockets)
        other.sendall(frame(b"other"))
        second = received(sockets)
        assert first[0] != second[0]
        assert sockets.send(first[0], [b"for one", b"and more"])
        assert read_until(sockets, one, b"more") == frame(b"for one", MORE) + frame(b"and more")


@SCHEMES
def test_what_came_before_the_end_is_taken(sockets: PublisherSockets) -> None:
    worker = joined(sockets)
    worker.sendall(frame(b"hello"))
    identity, _ = received(sockets)
    worker.sendall(frame(b"on its way") * 100 + frame(b"bye"))
    while not held_by(sockets).unparsed:
        sockets.poll(1.0)
    worker.close()
    for _ in range(3):  # so that a send notices it first
        sockets.send(identity, [b"x" * 2**20])
    found = [received(sockets)[1] for _ in range(101)]
    assert found[-1] == [b"bye"]
    deadline = time.monotonic() + 30.0
    while not sockets.poll(0.1).closed:
        assert time.monotonic() < deadline
        assert sockets.receive() is None
    assert sockets.take_closed(time.monotonic()) == [(identity, "")]
    assert not sockets.send(identity, [b"late"])


def test_the_rest_of_a_connection_that_was_hung_up_on_is_dropped(sockets: PublisherSockets) -> None:
    with joined(sockets) as bad, joined(sockets) as honest:
        bad.sendall(frame(b"bad") * 100)
        assert received(sockets)[1] == [b"bad"]
        sockets.hang_up()
        sockets.hang_up()
        wait_until_closed(sockets, bad)
        honest.sendall(frame(b"good"))
        assert received(sockets)[1] == [b"good"]


def test_a_ping_is_answered_with_its_context(sockets: PublisherSockets) -> None:
    with joined(sockets) as worker:
        worker.sendall(PING)
        assert read_until(sockets, worker, b"PONG").endswith(b"\x04PONG" + b"a" * 16)
        for _ in range(int(COMMANDS.burst) - 10):
            worker.sendall(PING)
            read_until(sockets, worker, b"PONG")
        assert not is_closed(worker)


def test_unfinished_messages_are_bounded_together(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "PARTIAL_BYTES_MAX", 150_000)
    with joined(sockets) as small, joined(sockets) as large, joined(sockets) as more:
        small.sendall(b"\x02" + (100_000).to_bytes(8, "big") + b"x" * 40_000)
        large.sendall(b"\x02" + (100_000).to_bytes(8, "big") + b"x" * 90_000)
        for _ in range(20):
            sockets.poll(0.01)
            assert sockets.receive() is None
        assert not is_closed(large)
        more.sendall(b"\x02" + (100_000).to_bytes(8, "big") + b"x" * 30_000)
        wait_until_closed(sockets, large)
        small.sendall(b"x" * 60_000)
        assert received(sockets)[1] == [b"x" * 100_000]


# Newcomers.


def test_a_newcomer_takes_the_place_of_the_oldest_of_the_host_that_has_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "UNPROVEN_MAX", 4)
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(
            contextlib.closing(PublisherSockets("tcp://127.0.0.1:0", None))
        )
        proven = stack.enter_context(joined(sockets, "127.0.0.9"))
        proven.sendall(frame(b"hi"))
        received(sockets)
        lone = stack.enter_context(dialled(sockets.address, "127.0.0.3"))
        read_until(sockets, lone, b"NULL")
        many = [stack.enter_context(joined(sockets, "127.0.0.2")) for _ in range(3)]
        for expected in range(6):
            worker = stack.enter_context(dialled(sockets.address, f"127.0.1.{expected}"))
            worker.sendall(GREETING + READY)
            read_until(sockets, worker, b"READY")
            worker.sendall(frame(b"hi"))
            assert received(sockets)[1] == [b"hi"], "each worker gets through"
        assert [is_closed(each) for each in many] == [True, False, False]
        assert not is_closed(lone)
        assert not is_closed(proven)


@SCHEMES
def test_a_handshake_has_its_time(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "HANDSHAKE_SECONDS", 0.2)
    with joined(sockets) as silent, dialled(sockets.address) as slow:
        slow.sendall(GREETING)
        wait_until_closed(sockets, slow)
        assert not is_closed(silent), "only its first message is missing"


def test_of_each_host_a_few_may_come_at_once(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "CONNECT_RATE", Rate(2, 0.0))
    with contextlib.ExitStack() as stack:
        first, _ = (stack.enter_context(joined(sockets, "127.0.0.2")) for _ in range(2))
        wait_until_closed(sockets, stack.enter_context(dialled(sockets.address, "127.0.0.2")))
        stack.enter_context(joined(sockets, "127.0.0.3"))
        first.sendall(frame(b"hi"))
        received(sockets)
        stack.enter_context(joined(sockets, "127.0.0.2"))  # a proven connection has freed its place


def test_hosts_are_remembered_only_so_far(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "HOSTS_MAX", 3)
    held = vars(sockets)["_router"]
    with contextlib.ExitStack() as stack:
        for host in range(2, 10):
            stack.enter_context(joined(sockets, f"127.0.0.{host}"))
            assert len(vars(held)["_hosts"]) <= 3


def test_addresses_of_one_network_are_one_host() -> None:
    host_of = router._host_of  # noqa: SLF001 # pyright: ignore
    assert host_of(("2001:db8::1", 5)) == host_of(("2001:db8::ffff:1", 6)) == "2001:db8::/64"
    assert host_of(("2001:db8:0:1::1", 5)) != host_of(("2001:db8::1", 5))
    assert host_of(("::ffff:10.0.0.1", 5)) == host_of(("10.0.0.1", 5)) == "10.0.0.1"
    assert host_of("") == ""


# What a peer makes the publisher hold.


class Memory:
    """A payload that its owner keeps until `end`."""

    def __init__(self, nbytes: int) -> None:
        self.view: memoryview | None = memoryview(bytes(nbytes))

    def end(self) -> None:
        self.view = None


def test_a_queue_keeps_no_payload(sockets: PublisherSockets) -> None:
    with joined(sockets) as worker:
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        worker.sendall(frame(b"hi"))
        identity, _ = received(sockets)
        full, waits = Memory(2**24), Memory(1000)
        assert full.view is not None
        assert waits.view is not None
        assert sockets.send(identity, [b"first", full.view])
        assert sockets.send(identity, [b"second", waits.view])
        assert sockets.send(identity, [b"third"])
        waits.end()
        said = read_until(sockets, worker, b"third")
        assert b"second" not in said
        assert len(said) > 2**24


def test_copies_for_those_that_do_not_read_are_bounded_together(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vars(vars(sockets)["_router"])["_copies"], "_limit", 3 * 2**24)
    payload = Memory(2**24)
    with contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(joined(sockets)) for _ in range(5)]
        identities = []
        for each in deaf:
            each.sendall(frame(b"hi"))
            identities.append(received(sockets)[0])
        assert payload.view is not None
        for identity in identities:
            assert sockets.send(identity, [b"for you", payload.view])
        deadline = time.monotonic() + 30.0
        while sum(sockets.send(identity, [b"more"]) for identity in identities) > 3:
            assert time.monotonic() < deadline, "none was hung up on"
            sockets.poll(outgoing.HOLD_SECONDS)
        assert sum(sockets.send(identity, [b"more"]) for identity in identities) == 3
        with joined(sockets) as honest:
            honest.sendall(frame(b"hi"))
            identity, _ = received(sockets)
            assert sockets.send(identity, [b"for you", payload.view])
            read_until(sockets, honest, b"for you")


# Processes.


@contextlib.contextmanager
def followed(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> Generator[tuple[peer.ControlConnection, int]]:
    """Yield the connection of a worker that has reported this process's pid, and that pid."""
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: 0)  # otherwise no search would be needed
    with joined(sockets) as worker:
        worker.sendall(frame(b"hi"))
        received(sockets)
        sockets.follow(pid)
        yield held_by(sockets), pid


@SCHEMES
def test_the_process_of_a_worker_is_found_a_few_files_at_a_time(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "SEARCH_FILES", 2)
    with followed(sockets, monkeypatch) as (held, pid):
        deadline = time.monotonic() + 30.0
        while held.process is None:
            assert time.monotonic() < deadline, "it was not found"
            sockets.poll(0.1)
        assert held.process.pid == pid


@SCHEMES
def test_the_process_of_a_worker_is_known_before_it_can_end(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    with followed(sockets, monkeypatch) as (held, pid):  # and no turn of the loop
        assert held.process is not None
        assert held.process.pid == pid


def test_a_worker_that_names_processes_costs_a_few_looks_at_most(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def look(_search: object, most: int) -> bool:
        looked.append(most)
        return False

    monkeypatch.setattr(os, "getpid", lambda: 0)
    monkeypatch.setattr(SocketSearch, "step", look)
    with joined(sockets) as worker:
        for pid in range(1, 101):
            worker.sendall(frame(b"hello"))
            received(sockets)
            sockets.follow(pid)
            sockets.poll(0.0)
    assert 1 <= len(looked) <= 200
    assert sum(looked) <= 200 * router.SEARCH_FILES


# Keys.


class Keyed:
    """A publisher with keys, and the keys of one worker."""

    def __init__(self) -> None:
        self.server, secret = curve.keypair()
        self.public, self.secret = curve.keypair()
        self.allowed = {self.public: Grant("w")}
        self.sockets = PublisherSockets(
            "tcp://127.0.0.1:0", None, secret=secret, grants=self.grants
        )

    @property
    def grants(self) -> Grants:
        return Grants(self.allowed)

    def dealer(self) -> CurveDealer:
        return CurveDealer(self.public, self.secret, self.server)

    def welcomed(self, dealer: CurveDealer) -> tuple[socket.socket, bytes]:
        """Return a connection that has sent HELLO, and the WELCOME that it got."""
        found = dialled(self.sockets.address)
        found.sendall(CURVE_GREETING + frame(dealer.hello(), COMMAND))
        said = read_until(self.sockets, found, b"WELCOME")
        return found, said[said.index(b"\x07WELCOME") :]

    def joined(self, dealer: CurveDealer) -> socket.socket:
        found, welcome = self.welcomed(dealer)
        found.sendall(frame(dealer.initiate(welcome), COMMAND))
        read_until(self.sockets, found, b"READY")
        return found


@pytest.fixture(name="keyed")
def _keyed() -> Iterator[Keyed]:
    keyed = Keyed()
    yield keyed
    keyed.sockets.close()


def test_messages_of_a_key_have_it_with_them(keyed: Keyed) -> None:
    dealer = keyed.dealer()
    with keyed.joined(dealer) as worker:
        worker.sendall(frame(dealer.message(b"one", 1)) + frame(dealer.message(b"two")))
        identity, frames = received(keyed.sockets)
        assert (frames, keyed.sockets.key) == ([b"one", b"two"], keyed.public)
        assert keyed.sockets.send(identity, [b"secret"])
        assert b"secret" not in read_until(keyed.sockets, worker, b"MESSAGE")
        worker.sendall(frame(dealer.message(b"\x04PING\0\0", 2)))
        assert b"PONG" not in read_until(keyed.sockets, worker, b"MESSAGE")


def test_a_key_that_is_not_allowed_is_answered_with_the_status(keyed: Keyed) -> None:
    public, secret = curve.keypair()
    dealer = CurveDealer(public, secret, keyed.server)
    stranger, welcome = keyed.welcomed(dealer)
    with stranger:
        stranger.sendall(frame(dealer.initiate(welcome), COMMAND))
        said = read_until(keyed.sockets, stranger, b"ERROR")
        assert said.endswith(b"\x05ERROR\x03400")
        wait_until_closed(keyed.sockets, stranger)


def test_a_connection_that_has_to_make_room_is_answered_so(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vars(keyed.sockets)["_router"], "_unproven_max", 1)
    first, _ = keyed.welcomed(keyed.dealer())
    with first, dialled(keyed.sockets.address):
        said = read_until(keyed.sockets, first, b"ERROR")
        assert said.endswith(b"\x05ERROR\x03300")


@pytest.mark.parametrize(
    "wrong",
    ["another server", "hello cut", "cookie", "vouch", "key", "repeated", "plain", "damaged"],
)
def test_a_handshake_that_proves_nothing_is_hung_up_on(keyed: Keyed, wrong: str) -> None:
    dealer = keyed.dealer()
    if wrong in ("another server", "hello cut"):
        other = CurveDealer(keyed.public, keyed.secret, curve.keypair()[0])
        hello = other.hello() if wrong == "another server" else dealer.hello()[:-1]
        with dialled(keyed.sockets.address) as stranger:
            stranger.sendall(CURVE_GREETING + frame(hello, COMMAND))
            wait_until_closed(keyed.sockets, stranger)
        return
    if wrong == "key":  # its owner's secret is not known
        dealer = CurveDealer(keyed.public, curve.keypair()[1], keyed.server)
    stranger, welcome = keyed.welcomed(dealer)
    with stranger:
        initiate = dealer.initiate(welcome, b"v" * 32 if wrong == "vouch" else b"")
        if wrong == "cookie":
            initiate = initiate[:9] + b"c" * 96 + initiate[105:]
        said = frame(initiate, COMMAND)
        if wrong in ("repeated", "plain", "damaged"):
            stranger.sendall(said)
            read_until(keyed.sockets, stranger, b"READY")
            message = dealer.message(b"hi")
            stranger.sendall(frame(message))
            received(keyed.sockets)
            fresh = dealer.message(b"hi")
            said = {
                "repeated": frame(message),
                "plain": frame(b"hi"),
                "damaged": frame(fresh[:-1] + bytes([fresh[-1] ^ 1])),
            }[wrong]
        stranger.sendall(said)
        wait_until_closed(keyed.sockets, stranger)


def test_what_is_encrypted_waits_for_room(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vars(vars(keyed.sockets)["_router"])["_copies"], "_limit", 1)
    monkeypatch.setattr(outgoing, "STUCK_SECONDS", 0.5)
    payload, one, other = Memory(2**23), keyed.dealer(), keyed.dealer()
    with keyed.joined(one) as deaf, keyed.joined(other) as honest:
        identities = []
        for dealer, connection in ((one, deaf), (other, honest)):
            connection.sendall(frame(dealer.message(b"hi")))
            identities.append(received(keyed.sockets)[0])
        assert payload.view is not None
        assert keyed.sockets.send(identities[0], [b"for you", payload.view])
        assert keyed.sockets.send(identities[1], [b"for you", payload.view])
        assert keyed.sockets.send(identities[1], [b"behind it"])
        honest.setblocking(False)
        with pytest.raises(BlockingIOError):
            honest.recv(1)
        assert len(read_until(keyed.sockets, honest, b"MESSAGE")) > 0
        wait_until_closed(keyed.sockets, deaf)


def test_the_bounds_belong_together() -> None:
    assert peer.LARGE_BYTES <= HEADER_BYTES_MAX <= CONTROL_BYTES_MAX
