"""Workers on a relay's host copy versions from its memory: one copy is sent to a host."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher, RefusedError, Settings, Subscriber
from weightbus.bus.memory import shared_buffers
from weightbus.bus.memory.segment import MappedSegment, Segment
from weightbus.bus.memory.shared_buffers import SharedBuffers
from weightbus.bus.net import worker_loop
from weightbus.bus.publisher import offers
from weightbus.bus.publisher.version import Chunked, Received, Version
from weightbus.python_client.relay import Relay
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.types import Update

SECONDS = 60.0  # far more than anything here takes
NETWORK = Settings(ping=0.1, lost_after=1.0, shared_memory=False)
SHARED = Settings(ping=0.1, lost_after=1.0)
SIZE = 3 * 2**18  # numbers of a version of three chunks
NBYTES, CHUNKS = 4 * SIZE, 3
RELAY = """
import sys, threading
from weightbus import Settings
from weightbus.python_client.relay import Relay
with Relay(*sys.argv[1:], ["m"], name="relay", settings=Settings(ping=0.1, lost_after=1.0)):
    print("ready", flush=True)
    threading.Event().wait()
"""


def arrays(value: float) -> dict[str, Any]:
    return {"w": np.full(SIZE, value, np.float32)}


class Host:
    """A publisher elsewhere, a relay, and workers on the relay's host."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._weights: dict[Subscriber, Any] = {}
        self._count = 0  # versions so far
        self.publisher = stack.enter_context(Publisher(settings=NETWORK))

    def relay(self, settings: Settings = SHARED, address: str = "tcp://127.0.0.1:0") -> Relay:
        made = Relay(self.publisher.address, address, ["m"], name="relay", settings=settings)
        return self._stack.enter_context(made)

    def process(self, address: str) -> "subprocess.Popen[str]":
        """Start a relay in a process of its own."""
        words = [sys.executable, "-c", RELAY, self.publisher.address, address]
        made = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
        self._stack.enter_context(made)
        self._stack.callback(made.kill)
        assert made.stdout is not None
        assert made.stdout.readline() == "ready\n"
        return made

    def worker(self, relay: Relay | str, name: str, settings: Settings = SHARED) -> Subscriber:
        target = arrays(0)
        address = relay if isinstance(relay, str) else relay.address
        made = Subscriber(address, {"m": target}, name=name, settings=settings)
        worker = self._stack.enter_context(made)
        self._weights[worker] = target["w"]
        assert worker.wait_joined(SECONDS)
        return worker

    def values(self, worker: Subscriber) -> set[float]:
        """Return the least and the greatest of a worker's weights."""
        weights = self._weights[worker]
        return {float(weights.min()), float(weights.max())}

    def publish(self, value: float) -> int:
        """Publish a version, and return its number once the relay has it."""
        self.publisher.publish_async("m", arrays(value), timeout=SECONDS)
        self._count += 1
        key = self.publisher.epoch, self._count

        def has() -> bool:
            relay = self.publisher.workers().get("relay")
            return relay is not None and relay.running.get("m") == key

        wait_for(has, "the relay has it", SECONDS)
        return self._count


@pytest.fixture
def host() -> Generator[Host]:
    with ExitStack() as stack:
        yield Host(stack)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many chunks the publisher has sent, and the relay."""
    counts, chunk_of = Counter[str](), offers.chunk_of

    def counted(chunked: Chunked, index: int) -> Any:
        counts["relay" if isinstance(chunked.snapshot, Received) else "publisher"] += 1
        return chunk_of(chunked, index)

    monkeypatch.setattr(offers, "chunk_of", counted)
    return counts


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the segments that relays have allocated."""
    sizes = list[int]()

    class Counted(Segment):
        def __init__(self, nbytes: int) -> None:
            sizes.append(nbytes)
            super().__init__(nbytes)

    monkeypatch.setattr(shared_buffers, "Segment", Counted)
    return sizes


def latest(relay: Relay) -> Version:
    """Return the latest version that a relay offers, once it offers one."""

    def found() -> Version | None:
        versions = relay._below._machine.state.store.get("m")  # noqa: SLF001 # pyright: ignore
        return None if versions is None else versions.latest

    version = wait_for(found, "the relay offers a version", SECONDS)
    assert version is not None
    return version


def receive(worker: Subscriber, version: int) -> Update:
    """Apply what comes until this version runs."""

    def running() -> Update | None:
        with suppress(RefusedError):  # by a relay that has just started, and has no version yet
            update = worker.receive(0.1)
            return update if update and update.version == version else None
        return None

    update = wait_for(running, f"version {version}", SECONDS)
    assert update is not None
    return update


def test_one_copy_is_sent_to_a_host_with_eight_workers(
    host: Host, sent: Counter[str], segments: list[int]
) -> None:
    relay = host.relay()
    workers = [host.worker(relay, f"worker-{index}") for index in range(8)]
    for value in range(1, 9):
        version = host.publish(value)
        for worker in workers:
            update = receive(worker, version)
            assert update.digest == "", "it was not hashed, so it was copied from shared memory"
            assert host.values(worker) == {value}
    assert sent["relay"] == 0
    assert sent["publisher"] < 2 * 8 * CHUNKS, "on a busy host, some chunks are requested again"
    assert len(segments) <= 3, "the arriving version's, the latest's, and one being copied from"


def test_other_workers_get_the_version_as_it_arrives(host: Host, sent: Counter[str]) -> None:
    relay = host.relay()
    near, far = host.worker(relay, "near"), host.worker(relay, "far", NETWORK)
    for value in (1, 2):
        version = host.publish(value)
        assert receive(far, version).digest != ""
        assert receive(near, version).digest == ""
        assert host.values(near) == host.values(far) == {value}
    assert 2 * CHUNKS <= sent["relay"] < 2 * 2 * CHUNKS, "to one of two workers"


def test_a_worker_that_joins_later_copies_what_the_relay_has(
    host: Host, sent: Counter[str]
) -> None:
    relay = host.relay()
    version = host.publish(1)
    worker = host.worker(relay, "late")
    assert receive(worker, version).digest == ""
    assert host.values(worker) == {1}
    assert sent["relay"] == 0


def test_workers_stage_from_the_segment_what_is_committed_together(host: Host) -> None:
    relay = host.relay()
    worker = host.worker(relay, "near")
    publishing = host.publisher.publish_async(
        "m", arrays(1), expect=1, commit="together", timeout=SECONDS
    )
    receive(worker, 1)
    assert publishing.result(SECONDS).in_state("applied") == ["near"]
    assert host.values(worker) == {1}


def test_a_buffer_that_a_worker_copies_from_is_not_overwritten(host: Host) -> None:
    relay = host.relay()
    first = host.publish(1)
    found = latest(relay)
    wait_for(lambda: found.shared, "it is whole below", SECONDS)
    assert found.shared is not None
    assert found.version == first
    segment = MappedSegment(found.shared, NBYTES)
    with segment.reading("m", *found.key):
        for value in range(2, 9):
            host.publish(value)
        copied = segment.data.copy().view(np.float32)
    assert (copied == 1).all()
    for value in range(9, 13):
        host.publish(value)
    assert (segment.data.view(np.float32) != 1).all(), "it is used again afterwards"


def test_a_large_buffer_is_allocated_beside_the_relays_other_work(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_loop, "ALLOCATED_AT_ONCE", 0)
    threads, allocate = set[str](), SharedBuffers.allocate

    def noting(self: SharedBuffers, nbytes: int) -> shared_buffers.Memory:
        threads.add(threading.current_thread().name)
        return allocate(self, nbytes)

    monkeypatch.setattr(SharedBuffers, "allocate", noting)
    relay = host.relay()
    worker = host.worker(relay, "near")
    for value in range(1, 7):
        receive(worker, host.publish(value))
        assert host.values(worker) == {value}
    assert threads == {"weightbus-copy"}


def test_without_shared_memory_the_relay_sends_to_workers_on_its_host(
    host: Host, segments: list[int]
) -> None:
    relay = host.relay(NETWORK)
    worker = host.worker(relay, "near")
    assert receive(worker, host.publish(1)).digest != ""
    assert latest(relay).shared is None
    assert segments == []


def test_workers_copy_from_another_relay_after_theirs_was_killed(host: Host) -> None:
    address = lasting_address()
    process = host.process(address)
    worker = host.worker(address, "near")
    assert receive(worker, host.publish(1)).digest == ""
    process.kill()
    process.wait(SECONDS)
    assert host.values(worker) == {1}
    host.relay(address=address)
    receive(worker, host.publish(2))  # it may have joined in the middle, and have fetched the rest
    assert receive(worker, host.publish(3)).digest == ""
    assert host.values(worker) == {3}


def test_retired_buffers_are_not_written_to(host: Host) -> None:
    relay = host.relay()
    worker = host.worker(relay, "near")
    receive(worker, host.publish(1))
    first = latest(relay).shared
    assert first is not None
    mapped = MappedSegment(first, NBYTES)
    buffers = relay._buffers  # noqa: SLF001 # pyright: ignore
    assert buffers is not None
    buffers.retire()
    for value in range(2, 8):
        receive(worker, host.publish(value))
        assert host.values(worker) == {value}
    assert (mapped.data.view(np.float32) == 1).all()
