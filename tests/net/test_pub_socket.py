"""The publisher's data socket: each subscriber gets whole messages of its topics, or none."""

import contextlib
import gc
import os
import resource
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.errors import AddressError
from weightbus.bus.event_log import EVERY_SECONDS
from weightbus.bus.headers import Buffer
from weightbus.bus.limits import ACCEPT_SECONDS, SUBSCRIPTIONS, TOPIC_BYTES_MAX, TOPICS_MAX
from weightbus.bus.net import pub as pub_socket
from weightbus.bus.net.endpoints import host_and_port
from weightbus.bus.net.outgoing import HOLD_SECONDS
from weightbus.bus.net.pub import (
    PING_SECONDS,
    SILENCE_SECONDS,
    PubSocket,
)
from weightbus.bus.net.zmtp import GREETING, Stream, message_parts, rest_of
from weightbus.bus.token_bucket import Rate
from weightbus.tests.simulation.placing import Placed, frames_of

SECONDS = 30.0  # far more than any step here takes
QUEUE = 4
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
LARGE = 2**23  # bytes that no two buffers of the kernel hold


def subscription(topic: bytes, *, on: bool = True) -> bytes:
    """Return the frame that subscribes to a topic or, if not `on`, unsubscribes."""
    return b"".join(map(bytes, message_parts([bytes([on]) + topic])))


class Bench:
    """A PUB socket, and a clock that only the test advances."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", queue: int = QUEUE) -> None:
        self.now = 0.0
        self.selector = selectors.DefaultSelector()
        self.pub_socket = PubSocket(queue, self.selector)
        self.address = self.pub_socket.bind(endpoint, "data")
        self.heard: list[bytes] = []  # topics that were subscribed to
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        self._stack.close()
        self.pub_socket.close(0.0)
        self.selector.close()

    def process_events(self) -> None:
        self.pub_socket.process_events(self.selector.select(0.0), self.now)

    def send(self, frames: Sequence[Buffer]) -> None:
        self.pub_socket.send(frames, self.now)

    def wanted(self, topic: bytes) -> bool:
        """Return whether a topic has subscribers."""
        return bool(self.pub_socket.subscribers(topic))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            self.process_events()
            self.pub_socket.tick(self.now)
            while (found := self.pub_socket.receive_input()) is not None:
                self.heard.extend(found[1])

    def knock(self, *topics: bytes, read_buffer: int = 0) -> socket.socket:
        """Return a connection of plain sockets that has subscribed."""
        connection = self._stack.enter_context(socket.socket())
        if read_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_buffer)
        connection.connect(host_and_port(self.address))
        asked = b"".join(bytes([0, 1 + len(topic), 1]) + topic for topic in topics)
        connection.sendall(GREETING + READY + asked)
        heard = len(self.heard)
        self.until(lambda: len(self.heard) == heard + len(topics))
        connection.setblocking(False)
        return connection


def completed(stream: Stream, count: int) -> list[list[bytes]]:
    """Return the messages that `count` received bytes have completed."""
    messages = [*map(frames_of, stream.received(count))]
    return messages + completed(stream, 0) if stream.held else messages


class Reader:
    """The messages that a connection of plain sockets has received."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.closed = False
        self.messages: list[list[bytes]] = []
        self.bytes = bytearray()
        self._stream = Stream(Placed)

    def has(self, count: int) -> bool:
        """Read the bytes that are here; return whether `count` messages have arrived."""
        self._read()
        return len(self.messages) >= count

    def took(self, count: int) -> bool:
        self._read()
        return len(self.bytes) >= count

    def hung_up(self) -> bool:
        self._read()
        return self.closed

    def heard(self, word: bytes, count: int = 1) -> bool:
        self._read()
        return self.bytes.count(word) >= count

    def _read(self, most: int = 2**20) -> None:
        if self.closed:
            return
        try:
            got = self.connection.recv(most)
        except BlockingIOError:
            return
        except ConnectionResetError:
            got = b""
        self.closed = not got
        self.bytes += got
        while got:
            room = self._stream.room()
            count = min(len(room), len(got))
            room[:count], got = got[:count], got[count:]
            self.messages += completed(self._stream, count)


@pytest.fixture(name="bench")
def _bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def subscriber(bench: Bench, stack: contextlib.ExitStack, *topics: bytes) -> "zmq.Socket[bytes]":
    context = stack.enter_context(zmq.Context())
    sub = stack.enter_context(context.socket(zmq.SUB))
    sub.setsockopt(zmq.LINGER, 0)
    for topic in topics:
        sub.setsockopt(zmq.SUBSCRIBE, topic)
    sub.connect(bench.address)
    return sub


def received(bench: Bench, sub: "zmq.Socket[bytes]") -> list[bytes]:
    bench.until(lambda: bool(sub.poll(0)))
    return sub.recv_multipart()


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_subscriber_of_libzmq_gets_what_it_asked_for(scheme: str, tmp_path: Path) -> None:
    bench = Bench("tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/data")
    with contextlib.ExitStack() as stack:
        stack.callback(bench.close)
        sub = subscriber(bench, stack, b"a/", b"b/ctl")
        bench.until(lambda: len(bench.heard) == 2)
        assert sorted(bench.heard) == [b"a/", b"b/ctl"]
        large = os.urandom(LARGE)
        bench.send([b"b/dat", b"{}", b"not asked for"])
        bench.send([b"a/dat", b"h" * 300, large])
        bench.send([b"b/ctl", b"{}"])
        assert received(bench, sub) == [b"a/dat", b"h" * 300, large]
        assert received(bench, sub) == [b"b/ctl", b"{}"]
        sub.setsockopt(zmq.UNSUBSCRIBE, b"a/")
        bench.until(lambda: not bench.wanted(b"a/dat"))
        bench.send([b"a/dat", b"{}", b"no longer"])
        bench.send([b"b/ctl", b"last"])
        assert received(bench, sub) == [b"b/ctl", b"last"]
        sub.close()
        bench.until(lambda: not bench.wanted(b"b/ctl"))


frames = st.lists(st.binary(max_size=700), min_size=1, max_size=4)


@given(sent=st.lists(frames, max_size=6), steps=st.lists(st.integers(1, 900), max_size=30))
def test_what_is_sent_in_any_pieces_is_what_was_meant(
    sent: list[list[bytes]], steps: list[int]
) -> None:
    parts: list[Buffer] = [p for message in sent for p in message_parts(message)]
    wire = b"".join(bytes(part) for part in parts)
    stream = Stream(Placed)
    out = bytearray()
    for step in steps:
        before = b"".join(bytes(part) for part in parts)
        parts = rest_of(parts, min(step, len(before)))
        out += before[: min(step, len(before))]
    out += b"".join(bytes(part) for part in parts)
    assert bytes(out) == wire
    got: list[list[bytes]] = []
    data = GREETING + READY + wire
    while data:
        room = stream.room()
        count = min(len(room), len(data))
        room[:count], data = data[:count], data[count:]
        got += completed(stream, count)
    assert got == sent


def test_a_slow_subscriber_loses_whole_messages_and_nobody_else_does(bench: Bench) -> None:
    slow = Reader(bench.knock(b"a/", read_buffer=4096))
    fast = Reader(bench.knock(b"a/"))
    sent = [[b"a/dat", b"%d" % i, bytes([i]) * LARGE] for i in range(QUEUE + 4)]
    for number, message in enumerate(sent):
        bench.send(message)
        bench.until(partial(fast.has, number + 1))
    assert fast.messages == sent
    bench.send([b"a/ctl", b"end"])  # is lost, too: the queue is full
    bench.until(lambda: slow.has(QUEUE + 1))
    assert slow.messages == sent[: QUEUE + 1]
    bench.send([b"a/ctl", b"end"])
    bench.until(lambda: slow.has(QUEUE + 2))
    assert slow.messages[-1] == [b"a/ctl", b"end"]


def test_a_topic_keeps_up_while_some_subscriber_of_it_does(bench: Bench) -> None:
    keeps_up, message = bench.pub_socket.has_room, [b"a/dat", b"", bytes(LARGE)]
    assert keeps_up(b"a/dat"), "there is nobody to wait for"
    slow = Reader(bench.knock(b"a/", read_buffer=4096))
    bench.knock(b"b/")
    bench.send(message)
    assert keeps_up(b"a/dat"), "it is being sent"
    bench.send(message)
    assert not keeps_up(b"a/dat"), "one waits, and who asked for something else does not count"
    assert keeps_up(b"b/dat")
    fast = bench.knock(b"a/")
    assert keeps_up(b"a/dat")
    fast.close()
    bench.until(lambda: not keeps_up(b"a/dat"))
    bench.until(lambda: slow.has(1))
    assert keeps_up(b"a/dat")


def test_what_is_out_of_date_is_withdrawn_and_its_memory_let_go(bench: Bench) -> None:
    slow = Reader(bench.knock(b"a/", b"b/", read_buffer=4096))
    memory = np.full(3 * LARGE, 7, np.uint8)
    holder = memory.view()
    gone = weakref.ref(holder)
    for index in range(3):
        bench.send([b"a/dat", b"%d" % index, holder.data[index * LARGE : (index + 1) * LARGE]])
    del holder
    bench.send([b"b/dat", b"0", b"of another"])
    bench.process_events()
    assert gone() is not None, "the test needs something half sent"
    bench.pub_socket.withdraw((b"a/ctl", b"a/dat"))
    gc.collect()
    assert gone() is None
    memory[:] = 0  # as the next version does
    bench.until(lambda: slow.has(2))
    assert slow.messages == [
        [b"a/dat", b"0", b"\7" * LARGE],
        [b"b/dat", b"0", b"of another"],
    ]


def test_what_waits_for_a_connection_that_takes_nothing_holds_no_memory(bench: Bench) -> None:
    """A released version's queued messages are dropped; a partly sent message is copied."""
    stuck, fast = Reader(bench.knock(b"a/", read_buffer=4096)), Reader(bench.knock(b"a/"))
    memory = np.full(3 * LARGE, 7, np.uint8)
    owner = memory.view()
    gone = weakref.ref(owner)
    version = [owner.data[i * LARGE : (i + 1) * LARGE] for i in range(3)]
    bench.now += HOLD_SECONDS  # a message with progress is not copied at the next check
    for index, chunk in enumerate(version):
        bench.send([b"a/dat", b"%d" % index, chunk])
        bench.until(partial(fast.has, index + 1))
        del chunk
    version.clear()
    del owner
    bench.send([b"a/ctl", b"of the next"])
    gc.collect()
    assert gone() is not None, "the test needs something half sent"
    bench.now += HOLD_SECONDS
    bench.process_events()
    bench.pub_socket.tick(bench.now)
    gc.collect()
    assert gone() is None
    memory[:] = 0  # as the next version does
    bench.until(lambda: stuck.has(2))
    assert stuck.messages == [[b"a/dat", b"0", b"\7" * LARGE], [b"a/ctl", b"of the next"]]
    assert [len(message[-1]) for message in fast.messages[:3]] == [LARGE] * 3


def test_what_waits_for_a_slow_connection_is_sent_while_its_version_lasts(bench: Bench) -> None:
    slow = Reader(bench.knock(b"a/", read_buffer=4096))
    version = [memoryview(bytes([i]) * LARGE) for i in range(3)]
    for index, chunk in enumerate(version):
        bench.send([b"a/dat", b"%d" % index, chunk])
    for _ in range(3):
        bench.now += HOLD_SECONDS
        bench.pub_socket.tick(bench.now)
    bench.until(lambda: slow.has(3))
    assert slow.messages == [[b"a/dat", b"%d" % i, bytes([i]) * LARGE] for i in range(3)]


def test_who_gives_no_sign_of_life_is_let_go_and_who_does_is_kept(bench: Bench) -> None:
    silent, alive = Reader(bench.knock(b"a/")), Reader(bench.knock(b"a/"))
    pings = 0
    while bench.now < SILENCE_SECONDS + PING_SECONDS:
        bench.now += PING_SECONDS
        pings += 1
        bench.until(partial(alive.heard, b"PING", pings))
        alive.connection.send(b"\x04\x05\x04PONG")
        bench.process_events()
    bench.until(lambda: silent.hung_up())
    bench.send([b"a/ctl", b"still"])
    bench.until(lambda: alive.has(1))
    assert alive.messages == [[b"a/ctl", b"still"]]


def test_who_takes_long_to_take_what_waits_for_it_is_kept(bench: Bench) -> None:
    slow = Reader(bench.knock(b"a/", read_buffer=4096))
    stuck = Reader(bench.knock(b"a/", read_buffer=4096))
    bench.send([b"a/dat", b"{}", bytes(LARGE)])
    for step in range(1, 13):
        bench.now += PING_SECONDS
        bench.until(partial(slow.took, step * LARGE // 16))
    bench.until(lambda: slow.has(1))
    bench.until(stuck.hung_up)
    assert not stuck.messages


def test_a_ping_is_answered_but_not_in_the_middle_of_a_message(bench: Bench) -> None:
    reader = Reader(bench.knock(b"a/", read_buffer=4096))
    bench.send([b"a/dat", b"{}", bytes(LARGE)])
    reader.connection.send(b"\x04\x0b\x04PING\0\0tick")
    bench.until(lambda: reader.has(1))
    bench.until(lambda: reader.heard(b"\x04PONGtick"))
    assert reader.messages == [[b"a/dat", b"{}", bytes(LARGE)]], "the message came first, whole"


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(60),
        GREETING + READY + b"\x00\x05hello",
        GREETING + READY + b"\x01\x02\x01a\x00\x01b",
        GREETING + READY + b"".join(b"\0\4\1%03x" % i for i in range(TOPICS_MAX + 1)),
        GREETING + READY + b"\x02" + (2**40).to_bytes(8, "big"),
        GREETING + READY + subscription(b"t" * (TOPIC_BYTES_MAX + 1)),
        GREETING + READY + subscription(b"t" * 60_000)[:20_000],
        GREETING + READY + b"\x01\x01\x01",
        GREETING + READY + subscription(b"a/") * round(SUBSCRIPTIONS.burst),
        GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
    ],
)
def test_whoever_does_not_speak_as_a_subscriber_is_turned_away(
    bench: Bench, nonsense: bytes
) -> None:
    good = Reader(bench.knock(b"a/"))
    with socket.create_connection(host_and_port(bench.address)) as connection:
        connection.sendall(nonsense)
        connection.setblocking(False)
        bad = Reader(connection)
        bench.until(lambda: bad.hung_up())
    bench.send([b"a/ctl", b"{}"])
    bench.until(lambda: good.has(1))
    assert good.messages == [[b"a/ctl", b"{}"]]


def test_who_asks_for_ever_more_topics_is_turned_away_however_slowly(bench: Bench) -> None:
    topics = [b"%03x" % i for i in range(TOPICS_MAX + 1)]
    half = TOPICS_MAX // 2
    with socket.create_connection(host_and_port(bench.address)) as connection:
        connection.sendall(GREETING + READY)
        connection.setblocking(False)
        reader = Reader(connection)
        for some in (topics[:half], topics[half:TOPICS_MAX]):
            connection.sendall(b"".join(map(subscription, some)))
            bench.until(partial(bench.wanted, some[-1]))
            bench.now += 10.0
        assert not reader.hung_up()
        connection.sendall(subscription(topics[-1]))
        bench.until(reader.hung_up)


def test_a_flood_of_subscriptions_costs_nothing_that_stays(bench: Bench) -> None:
    """Only current subscriptions are kept, each topic once, however often it was requested."""
    flood = b"".join(
        subscription(b"a/ctl", on=on) + subscription(b"%d/ctl" % i, on=on)
        for i in range(50)
        for on in (True, False)
    )
    with socket.create_connection(host_and_port(bench.address)) as connection:
        connection.sendall(GREETING + READY + flood + subscription(b"a/ctl") * 3)
        while not bench.wanted(b"a/ctl") or bench.selector.select(0.0):
            bench.process_events()
        found = bench.pub_socket.receive_input()
        assert found is not None
        subscriber, topics, *_ = found
        assert list(topics) == [b"a/ctl"]
        assert subscriber.topics == {b"a/ctl"}
        assert bench.pub_socket.receive_input() is None
        bench.pub_socket.answer(subscriber, [b"a/ctl", b"welcome"], bench.now)
        connection.setblocking(False)
        reader = Reader(connection)
        bench.until(lambda: reader.has(1))
    bench.until(lambda: not bench.wanted(b"a/ctl"))
    bench.pub_socket.answer(subscriber, [b"a/ctl", b"too late"], bench.now)


def test_connections_beyond_what_anybody_needs_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pub_socket, "ACCEPTS", Rate(4, 1))
    bench = Bench()
    with contextlib.ExitStack() as stack:
        stack.callback(bench.close)
        for _ in range(4):
            stack.enter_context(socket.create_connection(host_and_port(bench.address)))
            bench.process_events()
        late = stack.enter_context(socket.create_connection(host_and_port(bench.address)))
        late.sendall(GREETING + READY + subscription(b"late"))
        bench.process_events()
        bench.process_events()
        assert not bench.wanted(b"late")
        bench.now += ACCEPT_SECONDS
        bench.until(lambda: bench.wanted(b"late"))


@pytest.mark.parametrize(("pings", "seconds"), [(4000, 0.0), (200, 0.25)])
def test_whoever_asks_and_never_reads_the_answers_is_turned_away(
    bench: Bench, pings: int, seconds: float
) -> None:
    """At any speed: its waiting answers are limited in size, not only its requests in rate."""
    connection = bench.knock(b"a/", read_buffer=4096)
    flood = b"\x04\x17\x04PING\0\0aaaaaaaaaaaaaaaa" * pings
    left = bytearray()

    def gone() -> bool:
        left.extend(b"" if left else flood)
        bench.now += seconds
        with contextlib.suppress(OSError):
            del left[: connection.send(left)]
        return not bench.wanted(b"a/dat")

    bench.until(gone)


def test_a_flood_of_bad_connections_does_not_fill_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def misbehave() -> None:
        with socket.create_connection(host_and_port(bench.address)) as connection:
            connection.sendall(b"GET / HTTP/1.1" + bytes(64))
            connection.setblocking(False)
            bench.until(Reader(connection).hung_up)

    for _ in range(20):
        misbehave()
    assert len(caplog.records) == 1
    bench.now += EVERY_SECONDS
    misbehave()
    assert "(19 times more since the last warning)" in caplog.records[-1].getMessage()


def test_a_path_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("mine")
    bench = Bench()
    other = PubSocket(QUEUE, bench.selector)
    with pytest.raises(
        AddressError, match="in use by a file, and no process is seen to listen there"
    ):
        other.bind(f"ipc://{tmp_path}/data", "data")
    assert (tmp_path / "data").read_text() == "mine"
    other.close(0.0)
    bench.pub_socket.close(0.0)


def test_a_path_that_somebody_else_has_bound_since_is_left_alone(tmp_path: Path) -> None:
    bench = Bench(f"ipc://{tmp_path}/data")
    (tmp_path / "data").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "data"))
        bench.pub_socket.close(0.0)
        assert (tmp_path / "data").exists()


def test_an_address_that_cannot_be_bound_is_refused_in_words() -> None:
    bench = Bench()
    other = PubSocket(QUEUE, bench.selector)
    with pytest.raises(AddressError, match="in use by this process itself"):
        other.bind(bench.address, "data")
    with pytest.raises(AddressError, match="cannot bind data"):
        other.bind("tcp://no-such-host.invalid:0", "data")
    with pytest.raises(AddressError, match="cannot bind data"):
        other.bind("ipc:///no/such/folder/data", "data")
    other.close(0.0)
    bench.pub_socket.close(0.0)


def test_any_host_and_ipv6_can_be_bound() -> None:
    for endpoint in ("tcp://*:*", "tcp://*:0", "tcp://0.0.0.0:0", "tcp://[::1]:0", "tcp://[::]:0"):
        bench = Bench(endpoint)
        host, port = host_and_port(bench.address)
        assert port > 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as connection:
            connection.connect(("::1" if ":" in host else "127.0.0.1", port))
        bench.pub_socket.close(0.0)


def test_what_is_on_its_way_when_it_closes_gets_a_moment() -> None:
    bench = Bench()
    reader = Reader(bench.knock(b"a/"))
    sent = [b"a/ctl", b"goodbye"]
    bench.send(sent)
    bench.pub_socket.close(SECONDS)
    while not reader.hung_up():
        pass
    assert reader.messages == [sent]
    bench.close()


def test_a_lack_of_descriptors_is_waited_out(bench: Bench) -> None:
    """The kernel keeps the connection, and the publisher's thread does not spin."""
    first = Reader(bench.knock(b"a/"))
    late = socket.socket()  # takes the place of no other descriptor later
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        taken.append(os.dup(late.fileno()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, usual[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(late.fileno()))
        late.connect(host_and_port(bench.address))
        bench.process_events()
        assert not bench.selector.select(0.0), "it would be asked again"
        bench.send([b"a/ctl", b"{}"])
        bench.until(lambda: first.has(1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for descriptor in taken:
            os.close(descriptor)
    late.sendall(GREETING + READY + b"\x00\x03\x01a/")
    late.setblocking(False)
    heard = len(bench.heard)
    bench.now += ACCEPT_SECONDS
    bench.until(lambda: len(bench.heard) > heard)
    late.close()
