"""The worker's data connection follows the endpoints that the publisher announces."""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from weightbus.bus.errors import AddressError
from weightbus.bus.headers import Buffer
from weightbus.bus.net import control as sockets
from weightbus.bus.net import listening
from weightbus.bus.net.control import WorkerSockets
from weightbus.bus.net.endpoints import host_and_port
from weightbus.bus.net.pub import PubSocket
from weightbus.bus.net.publisher_sockets import PublisherSockets
from weightbus.bus.net.sub import SILENCE_SECONDS
from weightbus.tests.net.dealers import received
from weightbus.tests.simulation.placing import Placed, frames_of

SECONDS = 30.0  # far more than any step here takes


@pytest.fixture(name="pair")
def _pair() -> Iterator[tuple[PublisherSockets, WorkerSockets]]:
    with contextlib.ExitStack() as stack:
        publisher = PublisherSockets("tcp://127.0.0.1:0", None)
        stack.callback(publisher.close)
        worker = WorkerSockets(publisher.address, lambda _frames, _size: None, any_data_host=True)
        stack.callback(worker.close)
        yield publisher, worker


def now() -> float:
    """Return the time of the sockets, which a test may set."""
    moment: float = vars(sockets)["time"].monotonic()
    return moment


def heard(publisher: PublisherSockets, worker: WorkerSockets) -> list[bytes]:
    """Let both sides run until the publisher receives a subscription; return its topics."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        worker.poll(0.01)
        assert worker.data.receive(now()) is None, "it speaks up only once it has greeted"
        if publisher.poll(0.0).data and (subscription := publisher.data.receive_input()):
            return list(subscription[1])
    raise TimeoutError("nobody has subscribed")


def published(publisher: PublisherSockets, worker: WorkerSockets) -> list[bytes]:
    """Let both sides run until a published message arrives; return its frames."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        publisher.poll(0.0)
        worker.poll(0.01)
        if frames := worker.data.receive(now()):
            return frames_of(frames)
    raise TimeoutError("nothing was published")


def test_an_address_that_failed_does_not_hide_the_one_before(
    pair: tuple[PublisherSockets, WorkerSockets],
) -> None:
    publisher, worker = pair
    worker.data.subscribe(b"a/ctl", on=True)
    worker.connect_data(publisher.data_address)
    assert heard(publisher, worker) == [b"a/ctl"]
    with pytest.raises(AddressError, match="a Unix socket's path has at most 107"):
        worker.connect_data("ipc:///" + "x" * 200)
    worker.connect_data(publisher.data_address)
    publisher.broadcast([b"a/ctl", b"again"], time.monotonic())
    assert published(publisher, worker) == [b"a/ctl", b"again"]


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name")
def test_where_any_port_does_a_port_that_is_taken_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    bind = PubSocket.bind

    def taken_at_first(
        pub_socket: PubSocket, endpoint: str, parameter: str, patience: float = 1.0
    ) -> str:
        asked.append(endpoint)
        if len(asked) == 1:
            assert not patience, "it waits for a port in place of which any other does"
            raise AddressError("it is in use")
        return bind(pub_socket, endpoint, parameter)

    monkeypatch.setattr(PubSocket, "bind", taken_at_first)
    publisher = PublisherSockets("tcp://lo:0", None)  # names of interfaces work as in ZeroMQ
    host, port = host_and_port(publisher.address)
    assert asked == [f"tcp://{host}:{port + 1}", f"tcp://{host}:0"]
    publisher.close()


def connect(publisher: PublisherSockets, worker: WorkerSockets) -> None:
    """Let both sides run until the worker is connected."""
    deadline = time.monotonic() + SECONDS
    while not worker.poll(0.01, writable=True).writable:
        assert time.monotonic() < deadline, "it is not connected"
        publisher.poll(0.01)
        assert publisher.receive() is None


def test_whoever_is_gone_is_reported_so(pair: tuple[PublisherSockets, WorkerSockets]) -> None:
    publisher, worker = pair
    connect(publisher, worker)
    worker.send(b"hello")
    identity, frames = received(publisher)
    assert frames == [b"hello"]
    assert publisher.send(identity, [b"welcome"])
    assert not publisher.send(b"nobody", [b"welcome"])


def test_a_payload_arrives_in_its_place_and_survives_a_restart_of_the_publisher() -> None:
    payload = bytes(range(256)) * 4096
    places: list[Placed] = []

    def place(frames: Sequence[Buffer], size: int) -> Placed:
        places.append(Placed(frames, size))
        return places[-1]

    with contextlib.ExitStack() as stack:
        publisher = PublisherSockets("tcp://127.0.0.1:0", None)
        worker = WorkerSockets(publisher.address, place)
        stack.callback(worker.close)
        worker.data.subscribe(b"a/dat", on=True)
        worker.connect_data(publisher.data_address)
        assert heard(publisher, worker) == [b"a/dat"]
        publisher.broadcast([b"a/dat", b"{}", payload], time.monotonic())
        assert published(publisher, worker) == [b"a/dat", b"{}", payload]
        assert bytes(places[0].view) == payload
        address, data = publisher.address, publisher.data_address
        publisher.close()
        again = PublisherSockets(address, data)
        stack.callback(again.close)
        assert heard(again, worker) == [b"a/dat"], "it has dialled again"
        again.broadcast([b"a/dat", b"{}", b"short"], time.monotonic())
        assert published(again, worker) == [b"a/dat", b"{}", b"short"]


def test_a_connection_that_speaks_now_and_then_stays(
    pair: tuple[PublisherSockets, WorkerSockets], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, worker = pair
    clock = [time.monotonic()]
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    worker.data.subscribe(b"a/ctl", on=True)
    worker.connect_data(publisher.data_address)
    assert heard(publisher, worker) == [b"a/ctl"]
    for number in range(3):
        clock[0] += 0.7 * SILENCE_SECONDS
        publisher.broadcast([b"a/ctl", b"%d" % number], time.monotonic())
        assert published(publisher, worker) == [b"a/ctl", b"%d" % number]
    assert publisher.data.receive_input() is None, "it has dialled again"


@pytest.mark.parametrize("is_stale_socket", [False, True])
def test_of_two_publishers_at_one_path_the_first_is_undisturbed(
    tmp_path: Path, is_stale_socket: bool
) -> None:
    path = tmp_path / "bus"
    if is_stale_socket:
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))
    with contextlib.ExitStack() as stack:
        first = PublisherSockets(f"ipc://{path}", None)
        with pytest.raises(AddressError, match="in use by a publisher of this process: close"):
            PublisherSockets(f"ipc://{path}", f"ipc://{path}.elsewhere")
        worker = WorkerSockets(first.address, lambda _frames, _size: None)
        stack.callback(worker.close)
        connect(first, worker)  # it still answers
        first.close()
        assert not path.exists()
        PublisherSockets(f"ipc://{path}", None).close()


def test_of_two_publishers_that_find_a_path_left_behind_one_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second publisher starts after the first has checked and before it has bound."""
    path, look = tmp_path / "bus", listening.is_stale_socket
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    seconds: list[Future[listening.Listener]] = []

    def look_and_be_slow(path: str) -> bool:
        found = look(path)
        if not seconds:
            seconds.append(pool.submit(listening.Listener, f"ipc://{path}"))
            wait(seconds, listening.LOCK_SECONDS / 4)
        return found

    monkeypatch.setattr(listening, "is_stale_socket", look_and_be_slow)
    with ThreadPoolExecutor() as pool:
        first = listening.Listener(f"ipc://{path}")
        with pytest.raises(OSError, match="in use"):
            seconds[0].result(SECONDS)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
    first.close()


def test_a_name_outside_of_the_file_system_and_any_path(tmp_path: Path) -> None:
    for address in (f"ipc://@{tmp_path}", "ipc://*"):
        with contextlib.ExitStack() as stack:
            publisher = PublisherSockets(address, None)
            stack.callback(publisher.close)
            worker = WorkerSockets(publisher.address, lambda _frames, _size: None)
            stack.callback(worker.close)
            connect(publisher, worker)


def test_messages_that_came_together_are_not_waited_for(
    pair: tuple[PublisherSockets, WorkerSockets],
) -> None:
    publisher, worker = pair  # which is not polled below, so that it sends no ping
    worker.data.subscribe(b"a/ctl", on=True)
    worker.connect_data(publisher.data_address)
    assert heard(publisher, worker) == [b"a/ctl"]
    sent = [[b"a/ctl", b"%d" % number] for number in range(40)]
    for message in sent:
        publisher.broadcast(message, time.monotonic())
    received: list[list[bytes]] = []
    while len(received) < len(sent):
        assert worker.poll(SECONDS).data, "what is here already rings no bell"
        if frames := worker.data.receive(now()):
            received.append(frames_of(frames))
    assert received == sent
