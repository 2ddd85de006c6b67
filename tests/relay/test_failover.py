"""A worker of several addresses over real sockets: it goes on with another one, and returns."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import (
    AddressError,
    KeysError,
    Publisher,
    RefusedError,
    Settings,
    Subscriber,
)
from weightbus.bus.net.control import WorkerSockets
from weightbus.bus.net.endpoints import host_and_port
from weightbus.bus.trust.keys import generate
from weightbus.python_client.cli.subscribe import SubscribeOptions
from weightbus.python_client.relay import Relay
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.tests.net.tunnel import Tunnel

SECONDS = 60.0  # far more than anything here takes
SOON = Settings(ping=0.1, lost_after=1.0, shared_memory=False)
CHUNKS = 16
SIZE = CHUNKS * 2**18  # numbers of a version of so many chunks
SPEED = 2 * 2**20  # bytes a second of each connection, so that it takes some seconds
BOUND = 2.0  # seconds from the end of a relay to the version
RELAY = """
import sys
from weightbus import Settings
from weightbus.python_client.relay import Relay
soon = Settings(ping=0.1, lost_after=1.0, shared_memory=False, advertise=sys.argv[2])
with Relay(sys.argv[1], "tcp://127.0.0.1:0", ["m"], name="killed", settings=soon) as relay:
    assert relay.wait_joined(60)
    print(relay.address, relay.data_address, flush=True)
    sys.stdin.read()
"""


def arrays(value: float, size: int = 10) -> dict[str, Any]:
    return {"w": np.full(size, value, np.float32)}


@pytest.fixture
def stack() -> Generator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def at(stack: ExitStack, *addresses: str, size: int = 10, **options: Any) -> Subscriber:
    """Return a worker of these addresses that applies by itself."""
    options = {"name": "w", "settings": SOON, **options}
    worker = Subscriber([*addresses], {"m": arrays(0, size)}, **options)
    return stack.enter_context(worker).start()


class Fetches:
    """The chunks that workers have fetched, by version."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks: list[tuple[int, int]] = []  # version, index
        send = WorkerSockets.send

        def recorded(sockets: WorkerSockets, header: bytes, token: str = "") -> None:
            message = json.loads(header)
            if message["type"] == "fetch":
                first, count = message.get("first", 0), message.get("count", 0)
                self.chunks += [(message["version"], first + i) for i in range(count)]
            send(sockets, header, token)

        monkeypatch.setattr(WorkerSockets, "send", recorded)


def arrived(worker: Subscriber) -> set[int]:
    """Return the indices of the chunks that a worker has of the arriving version."""
    follower = worker._loop._machine.followers["m"]  # noqa: SLF001 # pyright: ignore
    entry = follower.versions.in_phase["arriving"]
    if entry is None:
        return set()
    return {i for i, crc in enumerate(entry.chunks.crcs) if crc is not None}


def publish(publisher: Publisher, value: float, size: int = 10) -> int:
    """Publish; return the number."""
    return publisher.publish("m", arrays(value, size), require=0, timeout=SECONDS).version


def runs(worker: Subscriber, number: int) -> bool:
    return worker.wait_for_version("m", number, timeout=SECONDS) is not None


class Slow:
    """Tunnels to a relay, from which a worker then receives slowly, be it pushed or fetched."""

    def __init__(self, stack: ExitStack) -> None:
        self._control, self.data = (
            stack.enter_context(contextlib.closing(Tunnel(SPEED))) for _ in range(2)
        )
        self.address = self._control.address

    def lead_to(self, control: str, data: str) -> None:
        self._control.lead_to(control)
        self.data.lead_to(data)


class Killed(Slow):
    """A relay that is a process."""

    def __init__(self, stack: ExitStack, above: str) -> None:
        super().__init__(stack)
        code = [sys.executable, "-c", RELAY, above, self.data.address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        popen = subprocess.Popen(code, **pipes)  # type: ignore[call-overload] # noqa: S603
        self.process: Any = stack.enter_context(popen)
        stack.callback(self.process.kill)
        self.lead_to(*self.process.stdout.readline().split())

    def end(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)


class Closed(Slow):
    """A relay of this process."""

    def __init__(self, stack: ExitStack, above: str) -> None:
        super().__init__(stack)
        settings = replace(SOON, advertise=self.data.address)
        made = Relay(above, "tcp://127.0.0.1:0", ["m"], name="closed", settings=settings)
        self.relay = stack.enter_context(made)
        assert made.wait_joined(SECONDS)
        self.lead_to(made.address, made.data_address)

    def end(self) -> None:
        self.relay.close()


@pytest.mark.parametrize("kind", [Killed, Closed])
def test_a_version_continues_to_arrive_through_another_relay(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, kind: type[Killed] | type[Closed]
) -> None:
    fetches = Fetches(monkeypatch)
    publisher = stack.enter_context(Publisher(settings=SOON))
    first = kind(stack, publisher.address)
    other = Relay(publisher.address, "tcp://127.0.0.1:0", ["m"], name="other", settings=SOON)
    stack.enter_context(other)
    wait_for(lambda: len(publisher.workers()) == 2, "both relays are here", SECONDS)
    worker = at(stack, first.address, other.address, size=SIZE)
    assert worker.wait_joined(SECONDS)
    publisher.publish_async("m", arrays(1, SIZE), timeout=SECONDS)
    number = 1
    relays = lambda: [w for w in publisher.workers().values() if w.relay]  # noqa: E731
    wait_for(lambda: all(relay.running for relay in relays()), "both relays have it", SECONDS)
    wait_for(lambda: len(arrived(worker)) >= 3, "a part has arrived", SECONDS)
    assert (worker.address, worker.version("m")) == (first.address, 0)
    began = time.monotonic()
    had = arrived(worker)
    fetches.chunks.clear()
    first.end()
    assert runs(worker, number)
    seconds = time.monotonic() - began
    print(f"{kind.__name__}: {len(had)} of {CHUNKS} chunks, then the rest after {seconds:.3f} s")
    assert (worker.address, seconds < BOUND) == (other.address, True)
    again = [index for version, index in fetches.chunks if version == number and index in had]
    assert not again, "they were here"


def test_it_returns_to_the_first_relay_when_that_is_back(stack: ExitStack) -> None:
    publisher = stack.enter_context(Publisher(settings=SOON))
    place = lasting_address()
    first = Relay(publisher.address, place, ["m"], name="first", settings=SOON)
    other = Relay(publisher.address, "tcp://127.0.0.1:0", ["m"], name="other", settings=SOON)
    stack.enter_context(other)
    stack.enter_context(first)
    worker = at(stack, place, other.address)
    assert worker.wait_joined(SECONDS)
    assert runs(worker, publish(publisher, 1))
    first.close()
    wait_for(lambda: worker.address == other.address, "it changes over", SECONDS)
    assert runs(worker, publish(publisher, 2))
    again = Relay(publisher.address, place, ["m"], name="first", settings=SOON)
    stack.enter_context(again)
    wait_for(lambda: worker.address == place, "it returns", SECONDS)
    assert runs(worker, publish(publisher, 3))


def test_a_relay_of_several_addresses_goes_on_with_another_one(stack: ExitStack) -> None:
    publisher = stack.enter_context(Publisher(settings=SOON))
    above = [
        Relay(publisher.address, "tcp://127.0.0.1:0", ["m"], name=name, settings=SOON)
        for name in ("first", "other")
    ]
    for relay in above:
        stack.enter_context(relay)
    addresses = [relay.address for relay in above]
    below = Relay(addresses, "tcp://127.0.0.1:0", ["m"], name="below", settings=SOON)
    worker = at(stack, stack.enter_context(below).address)
    assert worker.wait_joined(SECONDS)
    assert runs(worker, publish(publisher, 1))
    assert below.upstream == addresses[0]
    above[0].close()
    assert runs(worker, publish(publisher, 2))
    assert below.upstream == addresses[1]


class Mute:
    """Accepts connections, and says nothing."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://{}:{}".format(*self._server.getsockname())
        self.accepted: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self.accepted.append(self._server.accept()[0])

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(SECONDS)
        for each in self.accepted:
            each.close()


def test_a_first_address_that_is_mute_is_probed_and_not_returned_to(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weightbus.worker")
    mute = stack.enter_context(contextlib.closing(Mute()))
    publisher = stack.enter_context(Publisher(settings=SOON))
    worker = at(stack, mute.address, publisher.address)
    assert worker.wait_joined(SECONDS)
    assert worker.address == publisher.address
    before = len(mute.accepted)
    wait_for(lambda: len(mute.accepted) >= before + 3, "it is probed", SECONDS)
    assert worker.address == publisher.address
    assert caplog.text.count("joined, epoch") == 1, "one session"
    probe = mute.accepted[-2]
    probe.settimeout(SECONDS)
    said = b""
    while data := probe.recv(64):
        said += data
    assert said == b"\xff" + bytes(8) + b"\x7f", "and no more"


def test_a_change_over_ends_the_data_connection_of_the_address_that_is_left(
    stack: ExitStack,
) -> None:
    left, mute = (stack.enter_context(contextlib.closing(Mute())) for _ in range(2))
    data = stack.enter_context(contextlib.closing(Mute()))
    sockets = WorkerSockets([left.address, mute.address], lambda _frames, _size: None)
    stack.callback(sockets.close)
    sockets.connect_data(data.address)

    def connected() -> object:
        sockets.poll(0.01)
        return sockets.data.process_events(time.monotonic())

    wait_for(connected, "the data connection is there", SECONDS)
    sockets.change_over(1, 0.0)
    assert sockets.address == mute.address
    assert not connected(), "it has ended"
    wait_for(lambda: mute.accepted, "the other address is dialled", SECONDS)


def test_a_worker_that_is_refused_by_name_joins_another_publisher(stack: ExitStack) -> None:
    first, other = (stack.enter_context(Publisher(settings=SOON)) for _ in range(2))
    taken = at(stack, first.address)
    assert taken.wait_joined(SECONDS)
    worker = at(stack, first.address, other.address)
    assert worker.wait_joined(SECONDS), "one refusal is no error"
    assert worker.address == other.address


def test_an_error_names_all_addresses(stack: ExitStack) -> None:
    first = stack.enter_context(Publisher(settings=SOON))
    nobody = lasting_address()
    taken = at(stack, first.address)
    assert taken.wait_joined(SECONDS)
    worker = at(stack, nobody, first.address)
    with pytest.raises(RefusedError) as caught:
        worker.wait_joined(SECONDS)
    assert caught.value.code == "name-taken"
    assert all(f"{each}: " in str(caught.value) for each in (nobody, first.address))


@pytest.mark.parametrize("own", [True, False], ids=["of each", "of the second"])
def test_keys_of_each_address(stack: ExitStack, tmp_path: Path, *, own: bool) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        generate(folder, {"w": "worker"})
    places = [stack.enter_context(Publisher(settings=SOON, keys=each)) for each in folders]
    keys: Any = folders if own else folders[1]
    worker = at(stack, *(each.address for each in places), keys=keys)
    if own:
        assert worker.wait_joined(SECONDS)
        assert worker.address == places[0].address
        assert runs(worker, publish(places[0], 1))
        places[0].close()
    wait_for(lambda: worker.address == places[1].address, "it changes over", SECONDS)
    places[1].wait_for_workers(1, timeout=SECONDS)
    receipt = places[1].publish("m", arrays(2), timeout=SECONDS)
    assert worker.wait_for_version("m", receipt.version, epoch=receipt.epoch, timeout=SECONDS)


def test_a_list_of_addresses_or_keys_that_cannot_be_right_is_an_error(tmp_path: Path) -> None:
    for wrong in ([], ["tcp://127.0.0.1:1"] * 2, ["tcp://127.0.0.1:1", "nowhere"]):
        with pytest.raises(AddressError):
            Subscriber(wrong, {"m": arrays(0)})
    two = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    for keys in ([], [tmp_path], [tmp_path, None]):
        with pytest.raises(KeysError):
            Subscriber(two, {"m": arrays(0)}, keys=keys)  # type: ignore[arg-type] # pyright: ignore


def test_a_name_that_is_unknown_leads_to_the_next_address(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = socket.getaddrinfo

    def looked_up(host: Any, *about: Any, **more: Any) -> Any:
        if host == "trainer.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look(host, *about, **more)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    publisher = stack.enter_context(Publisher(settings=SOON))
    worker = at(stack, "tcp://trainer.invalid:5555", publisher.address)
    assert worker.wait_joined(SECONDS)
    assert host_and_port(worker.address) == host_and_port(publisher.address)


def test_a_command_line_separates_addresses_and_keys_by_commas() -> None:
    given = "tcp://a:1,ipc://x,y,tcp://b:2"
    wanted = SubscribeOptions.of(given, "m", True, None, None, Path("k1,k2,k3"))
    assert wanted.addresses == ("tcp://a:1", "ipc://x,y", "tcp://b:2")
    assert wanted.address == given
    assert wanted.keys == (Path("k1"), Path("k2"), Path("k3"))
    one = SubscribeOptions.of("tcp://a:1", "m", True, None, None, Path("k,1"))
    assert (one.addresses, one.keys) == (("tcp://a:1",), Path("k,1"))
