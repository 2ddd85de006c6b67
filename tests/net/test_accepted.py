"""What comes on control connections is counted, whatever libzmq makes of it."""

import collections
import contextlib
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from weightbus.bus.allowance import Rate
from weightbus.bus.limits import HOSTS_MAX, NEWCOMERS, UNSEEN, UNSEEN_ALL, UNSEEN_SMALL
from weightbus.bus.net import accepted
from weightbus.bus.net.accepted import (
    FLOODED_SECONDS,
    LOOKS,
    PROOF_SECONDS,
    QUIET_SECONDS,
    Accepted,
)
from weightbus.bus.net.control import UNREAD, UNREAD_BYTES, PublisherSockets
from weightbus.bus.net.descriptors import Crowd
from weightbus.bus.net.endpoints import host_and_port, ipc_path
from weightbus.bus.net.zmtp import COMMAND, GREETING, MORE, message_parts
from weightbus.tests.cli.starting import python

SECONDS = 30.0
BATCH_BYTES = 8192  # that libzmq reads at once


def frame(body: bytes, flags: int = 0) -> bytes:
    small, last = message_parts([body])
    return bytes([bytes(small)[0] | flags]) + bytes(small)[1:] + bytes(last)


PING = frame(b"\x04PING\0\0" + b"a" * 16, COMMAND)
FLOODS = {
    "pings": PING * 1000,
    "endless": frame(b"x" * 30_000, MORE),
    "many parts": frame(b"", MORE) * 10_000,
}


def dialled(endpoint: str) -> socket.socket:
    """Return a connection that is through its handshake."""
    path = ipc_path(endpoint)
    found = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
    found.connect(host_and_port(endpoint) if path is None else path)
    found.settimeout(SECONDS)
    kind = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    found.sendall(GREETING + frame(b"\x05READY" + kind, COMMAND))
    heard = b""
    while b"READY" not in heard:
        heard += found.recv(4096)
    return found


@pytest.fixture(name="sockets")
def _sockets() -> Iterator[PublisherSockets]:
    sockets = PublisherSockets("tcp://127.0.0.1:0", None)
    yield sockets
    sockets.close()


def received(sockets: PublisherSockets) -> list[bytes]:
    deadline = time.monotonic() + SECONDS
    while (found := sockets.receive()) is None:
        assert time.monotonic() < deadline, "nothing came"
        sockets.poll(0.01)
    return [bytes(each) for each in found[1]]


def is_closed(connection: socket.socket, send: bytes = b"") -> bool:
    """Send and read what can be; return whether the other side has hung up."""
    connection.setblocking(False)
    try:
        with contextlib.suppress(BlockingIOError):
            connection.send(send)
        with contextlib.suppress(BlockingIOError):
            return not connection.recv(2**16)
    except OSError:
        return True
    return False


def wait_until_closed(
    sockets: PublisherSockets, connection: socket.socket, send: bytes = b""
) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_closed(connection, send):
        assert time.monotonic() < deadline, "it was not hung up on"
        sockets.poll(0.001)
        assert sockets.receive() is None, "nothing of it is of use"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell")
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_whoever_sends_much_that_is_no_message_is_hung_up_on(
    sockets: PublisherSockets, flood: bytes
) -> None:
    with dialled(sockets.address) as honest, dialled(sockets.address) as bad:
        wait_until_closed(sockets, bad, flood)
        honest.sendall(frame(b"still"))
        assert received(sockets) == [b"still"]
        assert not is_closed(honest)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell")
def test_messages_count_with_all_that_they_took_on_the_wire(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, size = 3000, 300
    monkeypatch.setattr(accepted, "UNSEEN", Rate(2 * count, 0.0))
    with dialled(sockets.address) as worker:
        for _ in range(count):
            worker.sendall(frame(b"x" * size))
            received(sockets)
        assert not is_closed(worker)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell")
def test_a_message_counts_that_comes_with_the_word_of_its_connection(
    sockets: PublisherSockets,
) -> None:
    with dialled(sockets.address) as worker:
        worker.sendall(frame(b"x" * 60_000))
        assert vars(sockets)["_control"].poll(round(1000 * SECONDS))
        assert sockets.receive() is not None
        held: Accepted = vars(sockets)["_accepted"]
        held.look(time.monotonic() + 1.0, drained=True)
        [connection] = vars(held)["_each"].values()
        assert 0 < connection.unseen.spent < 1000


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_hanging_up_does_not_abort_the_process(scheme: str, tmp_path: Path) -> None:
    """libzmq does so where it reads on after the end, and a ping is in what it had read."""
    address = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/control"
    script = f"""if True:
        from weightbus.bus.net.control import PublisherSockets
        from weightbus.tests.net.test_accepted import *
        sockets = PublisherSockets({address!r}, None)
        bad = dialled(sockets.address)
        bad.sendall(frame(b"{{}}") * {2 * UNREAD} + PING)
        received(sockets)
        sockets.hang_up()
        bad.settimeout(0.05)
        with pytest.raises(TimeoutError):  # before libzmq has come to the end nobody hears of one
            bad.recv(1)
        wait_until_closed(sockets, bad)
        sockets.close()
    """
    assert python("-c", script, timeout=SECONDS).stderr == ""


def test_what_is_left_of_a_connection_that_was_hung_up_on_is_dropped(
    sockets: PublisherSockets,
) -> None:
    with dialled(sockets.address) as bad, dialled(sockets.address) as honest:
        bad.sendall(frame(b"bad") * 100)
        assert received(sockets) == [b"bad"]
        sockets.hang_up()
        wait_until_closed(sockets, bad)
        honest.sendall(frame(b"good"))
        assert received(sockets) == [b"good"]


@pytest.mark.skipif(sys.platform != "linux", reason="there are no filters")
def test_nothing_passes_once_a_connection_is_hung_up_on(sockets: PublisherSockets) -> None:
    """Not even its end: libzmq would abort where it does not read for now."""
    bad = dialled(sockets.address)
    bad.sendall(frame(b"bad") * 2 * UNREAD)
    received(sockets)
    with socket.socket(fileno=os.dup(vars(sockets)["_last"][0])) as ours:
        sockets.hang_up()
        bad.sendall(frame(b"more"))
        bad.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        bad.close()
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\1", "established"
        assert ours.recv(1) == b"", "all that there is is the end"


def test_what_libzmq_has_not_read_of_it_is_never_a_message(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, dropped = vars(sockets)["_accepted"], collections.Counter[bool]()
    is_dropped = held.dropped

    def noting(identity: bytes, source: int) -> bool:
        over: bool = is_dropped(identity, source)
        dropped[over] += 1
        return over

    monkeypatch.setattr(held, "dropped", noting)
    with dialled(sockets.address) as bad:
        bad.sendall(frame(b"") * 20_000)
        received(sockets)
        sockets.hang_up()
        wait_until_closed(sockets, bad)
    assert dropped[False] == 1, "the others are dropped at one look at whose they are"
    assert dropped[True] <= UNREAD + 2 * BATCH_BYTES / len(frame(b""))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell")
def test_all_together_are_held_against_their_bound_once_all_messages_are_taken(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "UNSEEN_ALL", 10_000)
    with dialled(sockets.address) as bad:
        bad.sendall(frame(b"x" * 20_000, MORE))
        wait_until_closed(sockets, bad)


def test_where_a_filter_is_not_to_be_had_they_are_hung_up_on_all_the_same(
    sockets: PublisherSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "_FILTER", b"")
    with dialled(sockets.address) as bad:
        bad.sendall(frame(b"bad"))
        received(sockets)
        sockets.hang_up()
        wait_until_closed(sockets, bad)


def test_what_belongs_to_others_is_left_alone(sockets: PublisherSockets) -> None:
    """libzmq has closed a connection, and its descriptor is somebody else's by now."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        here = stack.enter_context(socket.create_connection(server.getsockname()))
        there = stack.enter_context(server.accept()[0])
        vars(sockets)["_accepted"].hang_up(here.fileno(), time.monotonic())
        there.sendall(b"still")
        here.settimeout(SECONDS)
        assert here.recv(10) == b"still"


class Kernel:
    """Counts for connections that are not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: collections.Counter[int] = collections.Counter()
        self.trimmed = 0
        self.host = ""  # of all; else each has its own
        self.accepted = Accepted(Crowd(), counts=True)
        monkeypatch.setattr(self.accepted, "_came", self.came.__getitem__)
        monkeypatch.setattr(self.accepted, "_host", lambda number: self.host or str(number))
        monkeypatch.setattr(accepted, "give_memory_back", self._trim)
        monkeypatch.setattr(accepted, "spent", lambda _: False)

    def _trim(self) -> None:
        self.trimmed += 1

    def over(self) -> list[int]:
        each: dict[int, Any] = vars(self.accepted)["_each"]
        return [descriptor for descriptor, connection in each.items() if connection.over]


@pytest.fixture(name="kernel")
def _kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel(monkeypatch)
    yield kernel
    kernel.accepted.close()


FAR = 10**6  # descriptors that are nobody's


@pytest.mark.parametrize("seed", range(2))
def test_a_worker_is_never_taken_for_a_flood(kernel: Kernel, seed: int) -> None:
    """However fast it acknowledges and fetches, and however late the publisher comes to read.

    TCP lets as much wait as the kernel's buffer takes, and libzmq a batch and a few messages.
    """
    rng, now = random.Random(seed), 100.0
    workers = range(FAR, FAR + 16)
    waiting: dict[int, list[int]] = {}
    for worker in workers:
        kernel.accepted.accept(worker, now)
        kernel.came[worker] += 200  # its handshake
        waiting[worker] = [rng.randrange(300, 65_000 if rng.random() < 0.1 else 2_000)]  # hello
        kernel.came[worker] += sum(waiting[worker])
    for _ in range(100):
        now += rng.choice([FLOODED_SECONDS, 0.05, 1.0])
        for worker in workers:
            for _ in range(rng.randrange(100)):  # pings, progress, fetches, acknowledgements
                size = rng.randrange(40, 600)
                room = 2 * UNREAD_BYTES + BATCH_BYTES + sum(waiting[worker][:UNREAD])
                if sum(waiting[worker]) + size > room:
                    break
                waiting[worker].append(size)
                kernel.came[worker] += size
        if stalled := rng.random() < 0.5:
            kernel.accepted.look(now, drained=False)
        for worker in workers:
            few = rng.randrange(1 + len(waiting[worker])) if stalled else len(waiting[worker])
            assert all(kernel.accepted.saw(worker, b"", size) for size in waiting[worker][:few])
            del waiting[worker][:few]
        kernel.accepted.look(now, drained=not any(waiting.values()))
    assert kernel.over() == []


def test_a_thousand_workers_may_come_back_at_once(kernel: Kernel) -> None:
    for worker in range(FAR, FAR + 1000):
        kernel.accepted.accept(worker, 1.0)
        kernel.came[worker] = 200 + 2_000  # a hello that is on its way
    kernel.accepted.look(10.0, drained=True)
    assert UNSEEN_ALL < 1000 * 2_000
    assert kernel.over() == []


def test_pings_of_zeromqs_own_now_and_then_are_no_flood(kernel: Kernel) -> None:
    kernel.accepted.accept(FAR, 0.0)
    for second in range(20_000):
        kernel.came[FAR] += len(PING)
        kernel.accepted.look(float(second), drained=True)
    assert kernel.over() == []


def test_a_flood_is_over_at_the_first_look_that_finds_it(kernel: Kernel) -> None:
    kernel.accepted.accept(FAR, 0.0)
    kernel.came[FAR] = int(UNSEEN.burst)
    kernel.accepted.look(1.0, drained=False)
    assert kernel.over() == []
    kernel.came[FAR] += 200
    kernel.accepted.look(1.0 + 2 * FLOODED_SECONDS, drained=False)
    assert kernel.over() == [FAR]
    assert not kernel.accepted.saw(FAR, b"", 100)


def test_of_all_together_those_with_most_are_hung_up_on(kernel: Kernel) -> None:
    sizes = [UNSEEN_SMALL, *range(40_000, 40_000 + 40)]
    for number, size in enumerate(sizes):
        kernel.accepted.accept(FAR + number, 0.0)
        kernel.came[FAR + number] = size
    kernel.accepted.look(1.0, drained=False)
    assert kernel.over() == [], "they may be waiting for us"
    kernel.accepted.look(2.0, drained=True)
    kept = 1 + UNSEEN_ALL // 40_000
    assert kernel.over() == [*range(FAR + kept, FAR + len(sizes))]


class Door:
    """Who comes to a publisher, from where, and is let in."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._next = kernel, FAR

    def come(self, host: str, count: int, now: float) -> list[int]:
        self._kernel.host = host
        new = range(self._next, self._next + count)
        self._next += count
        for descriptor in new:
            self._kernel.accepted.accept(descriptor, now)
        over = self._kernel.over()
        return [descriptor for descriptor in new if descriptor not in over]

    def say(self, who: list[int], nbytes: int, unseen: int = 0) -> None:
        for descriptor in who:
            self._kernel.came[descriptor] += nbytes + unseen
            assert self._kernel.accepted.saw(descriptor, b"", nbytes)


@pytest.fixture(name="door")
def _door(kernel: Kernel) -> Door:
    return Door(kernel)


BURST, PER_SECOND = (int(each) for each in NEWCOMERS)


def test_of_each_host_a_few_may_come_at_once_and_others_now_and_then(door: Door) -> None:
    """Else everybody would wait for all of them, if they are a flood, and again as they return."""
    assert len(door.come("attacker", 200, 1.0)) == BURST
    assert len(door.come("worker", 1, 1.0)) == 1, "it is another host"
    later = [len(door.come("attacker", 1, 1.0 + ms / 1000)) for ms in range(1, 2001)]
    assert sum(later) == 2 * PER_SECOND, "however often they try"


def test_who_has_shown_to_be_no_flood_makes_room_for_others(kernel: Kernel, door: Door) -> None:
    """All workers of a host may come at once: they dial again, and each has its turn soon."""
    now, left = 1.0, 64
    while left:
        new = door.come("workers", left, now)
        door.say(new, 300)
        left -= len(new)
        now += 2 * PROOF_SECONDS
        kernel.accepted.look(now, drained=True)
        assert now < 1.0 + 64 / BURST


@pytest.mark.parametrize("what", ["silent", "early", "flooding", "gone", "hung up on"])
def test_who_has_not_makes_no_room(kernel: Kernel, door: Door, what: str) -> None:
    for other in range(LOOKS):  # whose turn it will be, and nobody else's
        door.come(f"{other}", 1, 1.0)
    new = door.come("host", BURST, 1.0)
    kernel.accepted.look(1.0, drained=False)
    if what != "silent":
        door.say(new, 300, unseen=UNSEEN_SMALL + 1000 if what == "flooding" else 0)
    for descriptor in new:
        if what == "gone":
            kernel.came[descriptor] = -1
        elif what == "hung up on":
            kernel.accepted.hang_up(descriptor, 1.0)
    now = 1.0 + (PROOF_SECONDS / 2 if what == "early" else 2 * PROOF_SECONDS)
    kernel.accepted.look(now, drained=False)
    assert len(door.come("host", 10, now)) == 0


def test_hosts_are_counted_only_so_far(door: Door) -> None:
    assert sum(len(door.come(f"{n}", 1, 1.0)) for n in range(HOSTS_MAX + 10)) == HOSTS_MAX
    later = 1.0 + 1 / PER_SECOND
    assert sum(len(door.come(f"{n} more", 1, later)) for n in range(10)) == 10


def test_whoever_is_dropped_is_kept_in_mind_for_a_while(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "DROPPED_KEPT", 3)
    kernel.accepted.accept(FAR, 0.0)
    kernel.accepted.hang_up(FAR, 0.0)
    assert not kernel.accepted.saw(FAR, b"said more", 10)
    for identity in (b"1", b"2"):
        kernel.accepted.drop(identity, FAR)
    assert kernel.accepted.dropped(b"said more", FAR)
    kernel.accepted.drop(b"3", FAR)
    assert not kernel.accepted.dropped(b"said more", FAR), "libzmq has closed it long ago"
    kernel.accepted.drop(b"chosen", 7)
    assert not kernel.accepted.dropped(b"chosen", 8), "another connection has it now"
    assert not kernel.accepted.dropped(b"chosen", 7), "and that is remembered"


def test_nobody_can_guess_the_next_identity_and_nobody_is_disturbed_who_draws_by_chance() -> None:
    script = """if True:
        import ctypes
        from weightbus.bus.net.control import PublisherSockets
        from weightbus.tests.net.test_accepted import *
        libc = ctypes.CDLL(None)
        libc.srand(7)
        drawn = [libc.rand() for _ in range(2)]
        libc.srand(7)
        again = [libc.rand()]
        sockets = PublisherSockets("tcp://127.0.0.1:0", None)
        assert [*again, libc.rand()] == drawn
        connection = dialled(sockets.address)
        connection.sendall(frame(b"x"))
        while (found := sockets.receive()) is None:
            sockets.poll(1.0)
        print(found[0].hex())
    """
    first, second = (python("-c", script, timeout=SECONDS).stdout.strip() for _ in range(2))
    assert "" != first != second != ""


def test_who_has_said_much_has_no_more_to_spend(kernel: Kernel) -> None:
    kernel.accepted.accept(FAR, 0.0)
    for second in range(1, 20):
        kernel.came[FAR] += 100_000
        assert kernel.accepted.saw(FAR, b"", 100_000)
        kernel.accepted.look(float(second), drained=True)
    kernel.came[FAR] += int(UNSEEN.burst) + 1
    kernel.accepted.look(20.0, drained=True)
    assert kernel.over() == [FAR]


def test_who_is_gone_is_forgotten(kernel: Kernel) -> None:
    kernel.accepted.accept(FAR, 0.0)
    kernel.came[FAR] = -1  # there is no such descriptor
    kernel.accepted.look(1.0, drained=True)
    assert not vars(kernel.accepted)["_each"]


def test_a_descriptor_that_is_anothers_by_now_begins_anew(kernel: Kernel) -> None:
    kernel.accepted.accept(FAR, 0.0)
    kernel.came[FAR] = int(UNSEEN.burst)
    kernel.accepted.look(1.0, drained=True)
    kernel.came[FAR] = 300  # of one of which no word has come yet
    kernel.accepted.look(2.0, drained=True)
    kernel.accepted.accept(FAR, 2.5)
    kernel.came[FAR] = int(UNSEEN.burst)
    kernel.accepted.look(3.0, drained=True)
    assert kernel.over() == []


def test_memory_goes_back_once_a_flood_is_over(kernel: Kernel) -> None:
    kernel.accepted.look(0.0, drained=True)
    for second in range(3):
        kernel.accepted.hang_up(FAR, float(second))
        kernel.accepted.look(second + QUIET_SECONDS - 0.1, drained=True)
    assert kernel.trimmed == 0
    for second in range(10, 20):
        kernel.accepted.look(float(second), drained=True)
    assert kernel.trimmed == 1


def test_a_look_takes_only_so_many_and_all_have_their_turn(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "LOOKS", 3)
    for worker in range(FAR, FAR + 8):
        kernel.accepted.accept(worker, 0.0)
    kernel.accepted.look(1.0, drained=True)
    for worker in range(FAR, FAR + 8):
        kernel.came[worker] = 2 * int(UNSEEN.burst)
    found = []
    for second in range(2, 6):
        kernel.accepted.look(float(second), drained=True)
        found.append(len(kernel.over()))
    assert found == [3, 6, 8, 8]


def test_the_socket_is_told_how_much_may_wait(sockets: PublisherSockets) -> None:
    control = vars(sockets)["_control"]
    assert control.get(zmq.RCVHWM) == UNREAD
    assert control.get(zmq.RCVBUF) == UNREAD_BYTES
