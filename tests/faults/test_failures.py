"""What breaks stays where it is: real processes that are killed, stopped, late, or strangers."""

import contextlib
import json
import math
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import zmq

from weightbus import (
    ClosedError,
    Publisher,
    PublishError,
    RefusedError,
    Settings,
    Subscriber,
    UnknownWorkerError,
)
from weightbus.bus.headers import encode, from_publisher
from weightbus.bus.messages import Hello, Ping, Refuse, Welcome
from weightbus.bus.net import publisher_loop
from weightbus.bus.net.control import UNSENT_MS
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.python_client.files.state_folder import TABLE
from weightbus.tests.client.settling import settled
from weightbus.tests.compose.waiting import stop
from weightbus.tests.faults.bus_process import checksum, model
from weightbus.tests.net.ports import lasting_address
from weightbus.tests.net.tunnel import Tunnel

SECONDS = 60.0  # far more than anything here takes
QUICK = Settings(ping=0.2, lost_after=2.0)
QUICK_FACTS = {"ping": QUICK.ping, "lost_after": QUICK.lost_after}
SMALL, LARGE = 10_000, 2**23
SCRIPT = Path(__file__).with_name("bus_process.py")


class Process:
    """A process of `bus_process.py`, and what it tells."""

    def __init__(self, **facts: Any) -> None:
        self.popen = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, str(SCRIPT), json.dumps(facts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def wait(self, event: str, **facts: Any) -> dict[str, Any]:
        """Return the next line that says this; others are passed over."""
        deadline = time.monotonic() + SECONDS
        while True:
            told = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            assert told is not None, f"the process ended before it told {event} {facts}"
            if {"event": event, **facts}.items() <= told.items():
                return told

    def say(self, line: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait(SECONDS)
        self._reader.join(SECONDS)
        for stream in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr] # pyright: ignore


class Scene:
    """Starts processes, publishers and subscribers, and ends them all."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def worker(self, publisher: Publisher | str, name: str, **facts: Any) -> Process:
        """Start a worker; it has its address, but need not have joined."""
        address = publisher if isinstance(publisher, str) else publisher.address
        told: dict[str, Any] = {"role": "worker", "nbytes": SMALL, **QUICK_FACTS}
        process = Process(**told | {"address": address, "name": name} | facts)
        self._stack.callback(process.end)
        return process

    def leader(self, **facts: Any) -> Process:
        told: dict[str, Any] = {"role": "publisher", "nbytes": SMALL, **QUICK_FACTS}
        process = Process(**told | facts)
        self._stack.callback(process.end)
        return process

    def publisher(self, **options: Any) -> Publisher:
        told: dict[str, Any] = {"settings": QUICK} | options
        return self._stack.enter_context(Publisher(**settled(told)))

    def subscriber(self, publisher: Publisher | str, target: object, **options: Any) -> Subscriber:
        address = publisher if isinstance(publisher, str) else publisher.address
        told: dict[str, Any] = {"settings": QUICK} | options
        return self._stack.enter_context(Subscriber(address, {"m": target}, **settled(told)))

    def dealer(self, publisher: Publisher) -> "zmq.Socket[bytes]":
        """Return a bare socket that is connected to a publisher."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.term)
        bare = context.socket(zmq.DEALER)
        self._stack.callback(bare.close, 0)
        bare.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        bare.setsockopt(zmq.SNDTIMEO, int(SECONDS * 1000))
        bare.connect(publisher.address)
        return bare

    def tunnel(self, bytes_per_second: float = math.inf) -> Tunnel:
        tunnel = Tunnel(bytes_per_second)
        self._stack.callback(tunnel.close)
        return tunnel

    def end(self) -> None:
        self._stack.close()


@pytest.fixture(name="scene")
def _scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.end()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until something that another process does has come true."""
    deadline = time.monotonic() + SECONDS
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"it never came true that {what}"
        tick.wait(0.005)


# Workers that die, stop and come back.


def test_a_worker_killed_in_the_middle_costs_nobody_else(scene: Scene) -> None:
    nbytes = 8_000_000
    # Over the network, and in so many chunks that it takes a while.
    publisher = scene.publisher(chunk_bytes=1000, shared_memory=False)
    workers = {n: scene.worker(publisher, n, nbytes=nbytes) for n in ("w0", "w1", "w2")}
    publisher.wait_for_workers(3, SECONDS)
    publisher.publish("m", model(nbytes, 1), timeout=SECONDS)
    future = publisher.publish_async(
        "m", model(nbytes, 2), timeout=SECONDS, settings=Settings(grace=0.5)
    )

    def in_the_middle() -> bool:
        phase = publisher.workers()["w1"].phase.get("m", "")
        return "receiving version 2" in phase and ", 0 of" not in phase

    until(in_the_middle, "w1 receives")
    workers["w1"].signal(signal.SIGKILL)
    for name in ("w0", "w2"):
        assert workers[name].wait("applied", version=2)["checksum"] == checksum(model(nbytes, 2))
    with pytest.raises(PublishError, match="applied by 2 of 3 workers") as caught:
        future.result(SECONDS)
    receipt = caught.value.receipt
    assert receipt.in_state("applied") == ["w0", "w2"]
    assert receipt.workers["w1"].state == "lost"
    assert re.search(
        r"process, \d+, has ended while receiving version 2, \d+ of 8000 chunks",
        receipt.workers["w1"].detail,
    )
    assert receipt.seconds < SECONDS / 2, "long before the deadline"
    assert publisher.workers()["w1"].state == "lost"
    receipt = publisher.publish("m", model(nbytes, 3), timeout=SECONDS)
    assert receipt.in_state("applied") == sorted(receipt.workers) == ["w0", "w2"]


PATIENT = Settings(ping=SECONDS, lost_after=2 * SECONDS)  # so that silence is not a reason


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc"])
def test_a_worker_of_this_host_that_is_killed_is_known_to_be_dead_at_once(
    scene: Scene, address: str, tmp_path: Path
) -> None:
    address = address if address != "ipc" else f"ipc://{tmp_path}/bus"
    publisher = scene.publisher(address=address, settings=PATIENT)
    names = [f"w{number}" for number in range(3)]
    workers = {name: scene.worker(publisher, name) for name in names}
    publisher.wait_for_workers(len(names), SECONDS)
    publisher.publish("m", model(SMALL, 1), timeout=SECONDS)
    told: queue.SimpleQueue[tuple[str, str, float]] = queue.SimpleQueue()
    publisher.on_worker(lambda event: told.put((event.kind, event.text, time.monotonic())))
    assert {told.get(timeout=SECONDS)[0] for _ in names} == {"joined"}
    waits: list[float] = []
    for name in names:
        stop(workers[name].popen.pid)  # so that the version is on its way to it
        future = publisher.publish_async("m", model(SMALL, 2), timeout=SECONDS)
        assert publisher.workers(), "answered after the publish was taken in"
        killed = time.monotonic()
        workers[name].signal(signal.SIGKILL)
        with pytest.raises(PublishError) as caught:
            future.result(SECONDS)
        raised = time.monotonic()
        ended = f"its process, {workers[name].popen.pid}, has ended"
        assert caught.value.receipt.workers[name].detail.startswith(ended)
        kind, text, at = told.get(timeout=SECONDS)
        assert (kind, text.startswith(f"worker {name} is lost: {ended}")) == ("lost", True)
        waits.append(max(raised, at) - killed)
    # Some 0.02 s where nothing else runs; silence, and the want of a connection, take minutes here.
    assert min(waits) < 2.0, f"it took {waits} s"


def test_a_learner_that_requires_the_living_goes_on(scene: Scene) -> None:
    publisher = scene.publisher(settings=PATIENT)
    workers = {name: scene.worker(publisher, name) for name in ("w0", "w1")}
    publisher.wait_for_workers(2, SECONDS)
    stop(workers["w1"].popen.pid)  # so that the next version is on its way to it
    future = publisher.publish_async("m", model(SMALL, 1), require="alive", timeout=SECONDS)
    workers["w0"].wait("applied", version=1)
    workers["w1"].signal(signal.SIGKILL)
    receipt = future.result(SECONDS)
    assert receipt.in_state("applied") == ["w0"]
    assert receipt.in_state("lost") == ["w1"]
    receipt = publisher.publish("m", model(SMALL, 2), require="alive", timeout=SECONDS)
    assert receipt.in_state("applied") == sorted(receipt.workers) == ["w0"]


def test_a_worker_of_elsewhere_that_is_killed_is_lost_as_it_makes_no_other_connection(
    scene: Scene,
) -> None:
    """Behind a tunnel, whose process has the connection: nobody can see the worker's."""
    publisher = scene.publisher(settings=Settings(ping=0.2, lost_after=SECONDS))
    tunnel = scene.tunnel()
    tunnel.lead_to(publisher.address)
    worker = scene.worker(tunnel.address, "far")
    publisher.wait_for_workers(1, SECONDS)
    worker.signal(signal.SIGKILL)
    with pytest.raises(PublishError, match="its connection is closed, and it opened no other in"):
        publisher.publish("m", model(SMALL, 1), timeout=SECONDS)


@pytest.mark.parametrize("far", [True, False])
def test_a_worker_whose_connection_breaks_is_not_lost(scene: Scene, *, far: bool) -> None:
    """It dials again; whether or not anybody can see that its process lives."""
    timing = Settings(ping=1.0, lost_after=SECONDS)
    publisher, tunnel = scene.publisher(settings=timing), scene.tunnel()
    tunnel.lead_to(publisher.address)
    address = tunnel.address if far else publisher.address
    worker = scene.worker(address, "w", ping=1.0, lost_after=SECONDS)
    publisher.wait_for_workers(1, SECONDS)
    publisher.publish("m", model(SMALL, 1), timeout=SECONDS)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    publisher.on_worker(lambda event: told.put(event.kind))
    assert told.get(timeout=SECONDS) == "joined"
    loop = vars(publisher)["_loop"]
    router = vars(vars(loop)["_sockets"])["_router"]
    before = [*publisher_identities(publisher)]

    def hang_up(_machine: PublisherMachine, _now: float) -> list[PublisherEffect]:
        (peer,) = vars(router)["_peers"].values()
        router._close(peer)  # noqa: SLF001
        return []

    tunnel.sever() if far else loop.decide(hang_up)
    until(lambda: [*publisher_identities(publisher)] != before, "it has come again")
    receipt = publisher.publish("m", model(SMALL, 2), timeout=SECONDS)
    assert receipt.in_state("applied") == ["w"]
    assert worker.wait("applied", version=2)["checksum"] == checksum(model(SMALL, 2))
    assert told.empty(), "nobody was told that it was lost"


def publisher_identities(publisher: Publisher) -> Iterator[bytes]:
    """Yield what its ROUTER calls each worker."""
    machine: PublisherMachine = vars(vars(publisher)["_loop"])["_machine"]
    for peer in [*machine.state.roster]:
        yield peer.identity


def test_a_worker_may_come_back_with_its_name(scene: Scene) -> None:
    publisher = scene.publisher()
    first = scene.worker(publisher, "w")
    publisher.wait_for_workers(1, SECONDS)
    publisher.publish("m", model(SMALL, 1), timeout=SECONDS)
    first.signal(signal.SIGKILL)
    second = scene.worker(publisher, "w")
    assert second.wait("applied")["checksum"] == checksum(model(SMALL, 1))
    until(lambda: publisher.workers()["w"].pid == second.popen.pid, "the name passed on")
    receipt = publisher.publish("m", model(SMALL, 2), timeout=SECONDS)
    assert receipt.in_state("applied") == ["w"]


@pytest.mark.parametrize(("nbytes", "shared"), [(SMALL, True), (LARGE, False)])
def test_a_stopped_worker_slows_nobody_and_catches_up(
    scene: Scene, nbytes: int, *, shared: bool
) -> None:
    timing = Settings(ping=0.2, lost_after=SECONDS)
    publisher = scene.publisher(settings=timing, shared_memory=shared)
    quick, stopped = (scene.worker(publisher, n, nbytes=nbytes) for n in ("quick", "stopped"))
    publisher.wait_for_workers(2, SECONDS)
    publisher.publish("m", model(nbytes, 1), timeout=SECONDS)
    stopped.wait("applied", version=1)
    stop(stopped.popen.pid)
    try:
        futures = [publisher.publish_async("m", model(nbytes, v)) for v in range(2, 12)]
        quick.wait("applied", version=11)
        assert not any(future.done() for future in futures), "the stopped one is waited for"
        receipt = publisher.publish("m", model(nbytes, 12), require=1, timeout=SECONDS)
        assert receipt.in_state("applied") == ["quick"]
    finally:
        stopped.signal(signal.SIGCONT)
    assert stopped.wait("applied", version=12)["checksum"] == checksum(model(nbytes, 12))
    assert futures[-1].result(SECONDS).in_state("applied", "skipped") == ["quick", "stopped"]


def test_a_worker_that_answers_without_progress_is_stuck(scene: Scene) -> None:
    publisher = scene.publisher(settings=Settings(ping=0.1, lost_after=0.5))
    idle = scene.subscriber(publisher, model(SMALL, 0), name="idle", settings=Settings(ping=0.1))
    publisher.wait_for_workers(1, SECONDS)
    future = publisher.publish_async("m", model(SMALL, 1), timeout=SECONDS)
    until(lambda: publisher.workers()["idle"].state == "stuck", "it is stuck")
    assert "staged version 1" in publisher.workers()["idle"].phase["m"]
    assert idle.receive(SECONDS) is not None
    assert future.result(SECONDS).in_state("applied") == ["idle"]
    until(lambda: publisher.workers()["idle"].state == "live", "it is live again")


def test_a_worker_that_leaves_in_the_middle_fails_nothing(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = scene.publisher(settings=Settings(ping=1.0, lost_after=SECONDS))
    leaving = scene.subscriber(publisher, model(SMALL, 0), name="leaving")
    publisher.wait_for_workers(1, SECONDS)
    future = publisher.publish_async("m", model(SMALL, 1), timeout=SECONDS)
    assert publisher.workers(), "answered after the publish was taken in, or the goodbye may win"
    leaving.close()
    assert future.result(SECONDS).in_state("left") == ["leaving"]
    assert "published to no worker: worker leaving has left: it sent goodbye" in caplog.text
    with pytest.raises(PublishError, match=r"1 of 1 workers are missing \(worker leaving has left"):
        publisher.publish("m", model(SMALL, 2), expect=1, timeout=1.0)


def test_nobody_is_lost_where_the_whole_host_stood_still(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a laptop that sleeps, or a virtual machine that is moved: the clock has gone on."""
    clock, asleep = time.monotonic, [0.0]
    later = SimpleNamespace(monotonic=lambda: clock() + asleep[0])
    monkeypatch.setattr(publisher_loop, "time", later)
    publisher = scene.publisher(settings=Settings(ping=1.0, lost_after=2.0))
    scene.worker(publisher, "w")
    publisher.wait_for_workers(1, SECONDS)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    publisher.on_worker(lambda event: told.put(event.kind))
    asleep[0] = 2.5  # longer than the silence after which a worker is lost
    receipt = publisher.publish("m", model(SMALL, 1), timeout=SECONDS)
    assert receipt.in_state("applied") == ["w"]
    publisher.wait_for_workers(1, SECONDS)
    assert told.get(timeout=SECONDS) == "joined"
    assert told.empty()


# Publishers that die and come back.


def test_workers_outlive_their_publisher_and_follow_the_next(scene: Scene) -> None:
    first = scene.leader(workers=2)
    told = first.wait("ready")
    workers = [scene.worker(told["address"], name) for name in ("w0", "w1")]
    first.say(1)
    epoch = first.wait("published", applied=["w0", "w1"])["epoch"]
    first.signal(signal.SIGKILL)
    first.popen.wait(SECONDS)
    second = scene.leader(workers=2, address=told["address"], data=told["data"])
    second.wait("ready")
    second.say(2)
    published = second.wait("published", applied=["w0", "w1"])
    assert published["epoch"] > epoch
    assert published["version"] == 1
    for worker in workers:
        assert worker.wait("applied", epoch=epoch)["checksum"] == checksum(model(SMALL, 1))
        later = worker.wait("applied", epoch=published["epoch"])
        assert later["checksum"] == checksum(model(SMALL, 2))


def test_the_weights_stay_while_nobody_publishes(scene: Scene) -> None:
    target = model(SMALL, 0)
    first = Publisher(lasting_address(), settings=QUICK)
    subscriber = scene.subscriber(first, target).start()
    first.wait_for_workers(1, SECONDS)
    first.publish("m", model(SMALL, 1), timeout=SECONDS)
    first.close()
    assert checksum(target) == checksum(model(SMALL, 1))
    assert subscriber.version("m") == 1
    second = scene.publisher(address=first.address)
    second.wait_for_workers(1, SECONDS)
    assert second.workers()[subscriber.name].running == {"m": (first.epoch, 1)}
    second.publish("m", model(SMALL, 2), timeout=SECONDS)
    assert checksum(target) == checksum(model(SMALL, 2))


def test_a_publisher_whose_clock_is_behind_finds_its_workers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, late = model(SMALL, 0), model(SMALL, 0)
    first = Publisher(lasting_address(), settings=QUICK)
    subscriber = scene.subscriber(first, target).start()
    first.publish("m", model(SMALL, 1), expect=1, timeout=SECONDS)
    first.close()
    hour_ago = time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: hour_ago)
    second = scene.publisher(address=first.address, settings=QUICK)
    assert second.epoch < first.epoch
    receipt = second.publish("m", model(SMALL, 2), expect=1, timeout=SECONDS)
    assert receipt.in_state("applied") == [subscriber.name]
    assert receipt.epoch == second.epoch > first.epoch
    assert checksum(target) == checksum(model(SMALL, 2))
    assert "one of two clocks is wrong" in caplog.text
    joined = scene.subscriber(second, late)
    assert joined.receive(SECONDS) is not None
    assert checksum(late) == checksum(model(SMALL, 2))


def test_an_older_epoch_is_refused_and_says_so(scene: Scene) -> None:
    target = model(SMALL, 0)
    first = Publisher(lasting_address(), settings=replace(QUICK, epoch=50))
    subscriber = scene.subscriber(first, target)
    first.wait_for_workers(1, SECONDS)
    first.publish_async("m", model(SMALL, 1))
    assert subscriber.receive(SECONDS) is not None
    first.close()
    older = scene.publisher(address=first.address, epoch=49, settings=QUICK)
    older.publish("m", model(SMALL, 9))
    with pytest.raises(RefusedError, match="of epoch 50, from another publisher") as caught:
        subscriber.receive(SECONDS)
    assert caught.value.code == "stale-epoch"
    assert checksum(target) == checksum(model(SMALL, 1))
    older.close()
    newer = scene.publisher(address=first.address, epoch=51)
    newer.publish("m", model(SMALL, 2))

    def follows() -> bool:
        with contextlib.suppress(RefusedError):  # it takes a moment until it is let in
            return subscriber.receive(0.1) is not None
        return False

    until(follows, "it follows the newer publisher")
    assert checksum(target) == checksum(model(SMALL, 2))


# Names and strangers.


def test_two_workers_with_one_name(scene: Scene) -> None:
    publisher = scene.publisher(settings=Settings(ping=0.2, lost_after=SECONDS))
    target = model(SMALL, 0)
    first = scene.subscriber(publisher, target, name="w").start()
    publisher.wait_for_workers(1, SECONDS)
    # By another name of the host: as from another process, whose workers are none of ours.
    elsewhere = publisher.address.replace("127.0.0.1", "localhost")
    second = scene.subscriber(elsewhere, model(SMALL, 0), name="w")
    with pytest.raises(RefusedError, match="give this one another name") as caught:
        second.receive(SECONDS)
    assert caught.value.code == "name-taken"
    with pytest.raises(RefusedError):
        second.wait_joined(SECONDS)
    assert publisher.publish("m", model(SMALL, 1), timeout=SECONDS).in_state("applied") == ["w"]
    assert checksum(target) == checksum(model(SMALL, 1))
    first.close()

    def let_in() -> bool:
        with contextlib.suppress(RefusedError):  # until the name is free
            return second.wait_joined(SECONDS)
        return False

    until(let_in, "the second has the name")


def test_a_stranger_that_speaks_garbage_is_refused_and_harms_nobody(scene: Scene) -> None:
    publisher = scene.publisher()
    scene.subscriber(publisher, model(SMALL, 0), name="w").start()
    publisher.wait_for_workers(1, SECONDS)
    stranger = scene.dealer(publisher)
    garbage = [[b""], [b"{}"], [b"\xff" * 100], [b'{"wbp":2,"type":"bye"}'], [b"x"] * 7]
    garbage += [[b'{"wbp":1,"type":"hello"}'], [b" " * 70_000], [encode(Ping()), b"payload"]]
    for frames in garbage:
        stranger.send_multipart(frames)
        message, _ = from_publisher(stranger.recv_multipart())
        assert isinstance(message, Refuse)
        assert message.code in ("malformed", "protocol-version")
    stranger.send(encode(Ping()))
    refusal, _ = from_publisher(stranger.recv_multipart())
    assert isinstance(refusal, Refuse)
    assert refusal.code == "unknown-worker"
    assert publisher.publish("m", model(SMALL, 1), timeout=SECONDS).in_state("applied") == ["w"]


def test_bytes_that_are_not_even_zeromq_harm_nobody(scene: Scene) -> None:
    publisher = scene.publisher()
    scene.subscriber(publisher, model(SMALL, 0), name="w").start()
    publisher.wait_for_workers(1, SECONDS)
    for endpoint in (publisher.address, publisher.data_address):
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        for junk in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 10_000,
            b"",
            b"\xff\0\0\0\0\0\0\0\1\x7f\3",
        ):
            with socket.create_connection((host, int(port)), SECONDS) as stream:
                stream.sendall(junk)
    assert publisher.publish("m", model(SMALL, 1), timeout=SECONDS).in_state("applied") == ["w"]


def test_a_message_beyond_every_limit_ends_its_connection_only(scene: Scene) -> None:
    publisher = scene.publisher()
    scene.subscriber(publisher, model(SMALL, 0), name="w").start()
    publisher.wait_for_workers(1, SECONDS)
    stranger = scene.dealer(publisher)
    stranger.send(bytes(1_000_000))
    stranger.send(encode(Hello(name="s", instance="0" * 32, models={"m": None})))
    assert publisher.publish("m", model(SMALL, 1), workers=["w"], timeout=SECONDS).in_state(
        "applied"
    ) == ["w"]


def test_a_publisher_that_speaks_garbage_harms_no_worker(scene: Scene) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, target = context.socket(zmq.ROUTER), model(SMALL, 3)
    router.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
    port = router.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    try:
        subscriber = scene.subscriber(address, target)
        identity, hello = router.recv_multipart()
        assert b'"hello"' in hello
        for frames in ([b""], [b"{}"], [b"\xff" * 99], [b"[" * 9999], [b"x"] * 9):
            router.send_multipart([identity, *frames])
        welcome = Welcome(epoch=1, data="nowhere", ping_ms=1, lost_ms=2, models={"m": 1})
        router.send_multipart([identity, encode(welcome)])
        assert subscriber.wait_joined(SECONDS)
        router.send_multipart([identity, encode(Ping(token=7))])
        while b'"pong"' not in router.recv_multipart()[1]:
            pass
        assert subscriber.receive(0) is None
    finally:
        router.close(0)
        context.term()
    assert checksum(target) == checksum(model(SMALL, 3))


# Bytes that get lost.


def test_what_is_dropped_on_the_way_is_fetched(scene: Scene) -> None:
    nbytes = 64 * 2**20 + 1
    publisher = scene.publisher(
        queue=1, chunk_bytes=2**18, settings=Settings(), shared_memory=False
    )
    workers = [
        scene.worker(publisher, f"w{i}", nbytes=nbytes, ping=1.0, lost_after=5.0) for i in (0, 1)
    ]
    publisher.wait_for_workers(2, SECONDS)
    for value in (1, 2):
        receipt = publisher.publish("m", model(nbytes, value), timeout=SECONDS)
        assert receipt.in_state("applied") == ["w0", "w1"]
        assert receipt.nbytes == nbytes
        for worker in workers:
            told = worker.wait("applied", version=value)
            assert told["checksum"] == checksum(model(nbytes, value))


def test_a_connection_that_leads_nowhere_any_more_is_made_anew(scene: Scene) -> None:
    """As when a network is cut: neither side is told, and TCP would need half a minute."""
    control, data = scene.tunnel(), scene.tunnel()
    publisher = scene.publisher(advertise=data.address, shared_memory=False)
    control.lead_to(publisher.address)
    data.lead_to(publisher.data_address)
    target = model(SMALL, 0)
    subscriber = scene.subscriber(control.address, target, name="w")
    publisher.wait_for_workers(1, SECONDS)
    publisher.publish_async("m", model(SMALL, 1))
    assert subscriber.receive(SECONDS)
    control.cut()
    data.cut()
    publisher.publish_async("m", model(SMALL, 2))
    update = subscriber.receive(UNSENT_MS / 1000 * 2 / 3)
    assert update is not None, "it has waited for ZeroMQ to find out"
    assert update.version == 2
    assert checksum(target) == checksum(model(SMALL, 2))


def test_what_comes_slowly_is_not_asked_for_meanwhile(scene: Scene) -> None:
    """A chunk takes a second here. Whoever fetched it, too, would have it sent twice."""
    control, data = scene.tunnel(), scene.tunnel(bytes_per_second=2**20)
    # No sign of life tells of a version before its announcement has come the slow way.
    rarely = Settings(ping=SECONDS, lost_after=2 * SECONDS)
    publisher = scene.publisher(advertise=data.address, shared_memory=False, settings=rarely)
    control.lead_to(publisher.address)
    data.lead_to(publisher.data_address)
    nbytes = 2**21
    subscriber = scene.subscriber(control.address, model(nbytes, 0), settings=rarely)
    until(lambda: b'"subscribed":true' in control.heard, "it is subscribed")
    for value in (1, 2):  # the first one's acknowledgement comes after that word of it
        control.heard.clear()
        published = publisher.publish_async("m", model(nbytes, value))
        assert subscriber.receive(SECONDS)
        assert published.result(SECONDS).in_state("applied")
    assert b'"progress"' in control.heard
    assert b'"fetch"' not in control.heard, control.heard


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["network", "shared memory"])
def test_a_large_model_needs_no_more_than_two_copies_on_either_side(
    scene: Scene, shared: bool
) -> None:
    nbytes = 512 * 2**20
    leader = scene.leader(nbytes=nbytes, ping=1.0, lost_after=20.0, shared_memory=shared)
    worker = scene.worker(leader.wait("ready")["address"], "w", nbytes=nbytes, lost_after=20.0)
    before = worker.wait("ready")["memory"]
    leader.say(1)
    assert leader.wait("published")["applied"] == ["w"]
    told = worker.wait("applied")
    # The target itself is one copy, untouched before; the staging area is the other.
    assert told["memory"] - before < 2.1 * nbytes
    with open(f"/proc/{leader.popen.pid}/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    assert peak < 2.1 * nbytes + 200 * 2**20, "the trainer's own copy, and one snapshot"


# Closing.


def test_closing_answers_what_is_open(scene: Scene) -> None:
    publisher = scene.publisher()
    scene.subscriber(publisher, model(SMALL, 0), name="idle")
    publisher.wait_for_workers(1, SECONDS)
    futures = [
        publisher.publish_async("m", model(SMALL, 1), timeout=SECONDS),
        publisher.publish_async("m", model(SMALL, 2), commit="together", timeout=SECONDS),
    ]
    publisher.close()
    for future in futures:
        with pytest.raises(PublishError):
            future.result(SECONDS)
    publisher.close()


def test_nothing_can_be_asked_of_a_closed_publisher(scene: Scene) -> None:
    publisher = scene.publisher()
    publisher.close()
    for call in (
        lambda: publisher.publish("m", model(SMALL, 1)),
        lambda: publisher.publish("m", model(SMALL, 1), workers=["w"]),
        publisher.workers,
        lambda: publisher.wait_for_workers(1, SECONDS),
    ):
        with pytest.raises(ClosedError, match="this publisher is closed"):
            call()


def test_nothing_comes_to_a_closed_subscriber(scene: Scene) -> None:
    publisher = scene.publisher()
    subscriber = scene.subscriber(publisher, model(SMALL, 0))
    waiting = threading.Thread(target=subscriber.close)
    waiting.start()
    with pytest.raises(ClosedError, match=r"close\(\) was called"):
        subscriber.receive(SECONDS)
    waiting.join(SECONDS)
    subscriber.close()


def test_a_call_cancelled_at_any_moment(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = scene.publisher()
    started, cancelled = threading.Event(), threading.Event()

    def publish(_machine: PublisherMachine, *_asked: object) -> NoReturn:
        started.set()
        cancelled.wait(SECONDS)
        raise UnknownWorkerError("it left a moment ago")

    with monkeypatch.context() as patch:
        patch.setattr(PublisherMachine, "publish", publish)
        future = publisher.publish_async("m", model(SMALL, 1))
        assert started.wait(SECONDS)
        assert future.cancel()
        cancelled.set()
    with pytest.raises(CancelledError):
        future.result(0)
    assert publisher.publish("m", model(SMALL, 1)).workers == {}, "the thread lives"


def test_a_version_survives_a_publisher_that_is_killed(scene: Scene, tmp_path: Path) -> None:
    facts = {"data": "tcp://127.0.0.1:0", "state": str(tmp_path), "workers": 0}
    first = scene.leader(address="tcp://127.0.0.1:0", **facts)
    address = first.wait("ready")["address"]
    runs = scene.worker(address, "runs")
    runs.wait("ready")
    epoch = 0
    for value in (1, 2, 3):  # the last one may be on its way to the disk when the end comes
        first.say(value)
        epoch = first.wait("published", version=value)["epoch"]
        deadline = time.monotonic() + SECONDS
        while value < 3 and b'"version":%d' % value not in (tmp_path / TABLE).read_bytes():
            assert time.monotonic() < deadline
    first.end()
    second = scene.leader(address=address, **facts)
    second.wait("ready")
    late = scene.worker(address, "late").wait("applied")
    assert late["version"] == 1
    assert late["epoch"] > epoch
    assert late["checksum"] in [checksum(model(SMALL, value)) for value in (2, 3)]
    second.say(4)
    assert second.wait("published")["version"] == 2
    told = runs.wait("applied", epoch=late["epoch"], version=2)
    assert told["checksum"] == checksum(model(SMALL, 4))


def test_names_drawn_for_workers_differ(scene: Scene) -> None:
    publisher = scene.publisher()
    subscribers = [scene.subscriber(publisher, model(SMALL, 0)) for _ in range(3)]
    publisher.wait_for_workers(3, SECONDS)
    assert set(publisher.workers()) == {s.name for s in subscribers}
