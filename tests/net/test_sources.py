"""Workers take chunks from sources over real sockets, with keys and without. (N1 to N3)"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from weightbus import AddressError, Publisher, PublishError, Relay, Settings, Subscriber
from weightbus.bus.chunks import plan_of
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Announce, Chunk, Hello, Welcome
from weightbus.bus.net.control import WorkerSockets
from weightbus.bus.net.sources import _SourceSession  # pyright: ignore[reportPrivateUsage]
from weightbus.bus.publisher import serving
from weightbus.bus.staged import SourceFetch
from weightbus.bus.trust.grants import Role
from weightbus.bus.trust.keys import generate
from weightbus.codecs.native import crc32c
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.split import Split

SECONDS = 30.0
SIZE, CHUNK = 5000, 64
QUICK = Settings(ping=0.2, lost_after=1.0, shared_memory=False)
SMALL = Settings(chunk_bytes=CHUNK, ping=0.2, lost_after=1.0, shared_memory=False)


class Scene:
    """Some publishers that publish together, and workers."""

    def __init__(self, stack: ExitStack, count: int, keys: Path | None = None) -> None:
        self.stack, self.keys, self.targets = stack, keys, dict[str, dict[str, Any]]()
        self.publishers = [self.publisher() for _ in range(count)]

    def publisher(self) -> Publisher:
        made = Publisher("tcp://127.0.0.1:0", keys=self.keys, settings=SMALL)
        return self.stack.enter_context(made)

    @property
    def address(self) -> str:
        return self.publishers[0].address

    def worker(self, name: str, at: str | list[str] = "") -> Subscriber:
        keys = None if self.keys is None else self.keys / "workers" / f"{name}.json"
        target = self.targets[name] = {"w": np.zeros(SIZE, np.float32)}
        made = Subscriber(at or self.address, {"m": target}, name=name, keys=keys, settings=QUICK)
        return self.stack.enter_context(made).start()

    def publish(self, value: float, **options: Any) -> None:
        weights = {"w": np.full(SIZE, value, np.float32)}
        source = Split(self.publishers, weights, options.pop("addresses", None))
        self.publishers[0].publish("m", source, timeout=SECONDS, **options)

    def has(self, name: str, value: float) -> bool:
        return bool((self.targets[name]["w"] == value).all())


@pytest.fixture(name="scene")
def _scene() -> Generator[Callable[..., Scene]]:
    with ExitStack() as stack:
        yield lambda count=3, keys=None: Scene(stack, count, keys)


def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that gets (worker, chunks) of what comes from sources."""
    seen, chunk = list[tuple[str, int]](), vars(_SourceSession)["_chunk"]

    def notes(session: Any, *about: Any) -> str:
        name = msgspec.json.decode(vars(session)["_hello"])["name"]
        seen.append((name, 1))
        fault: str = chunk(session, *about)
        return fault

    monkeypatch.setattr(_SourceSession, "_chunk", notes)
    return seen


def test_each_chunk_comes_from_the_publisher_that_has_it(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, bus = fetched(monkeypatch), scene()
    bus.worker("w")
    bus.publishers[0].wait_for_workers(1, SECONDS)
    for value in (1.0, 2.0, 3.0):
        bus.publish(value)
        assert bus.has("w", value)
    count = plan_of(4 * SIZE, CHUNK).count
    assert {name for name, _ in seen} == {"w"}
    assert sum(chunks for _, chunks in seen) == 3 * (count - len(range(0, count, 3)))
    for source in bus.publishers[1:]:  # the sessions with sources end
        wait_for(partial(_no_workers, source), "the end of the sessions", SECONDS)


def _no_workers(source: Publisher) -> bool:
    return not source.workers()


@pytest.mark.parametrize("direct", [True, False])
def test_with_keys_chunks_are_encrypted_also_those_that_rank_0_takes(
    scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, direct: bool
) -> None:
    names: dict[str, Role] = {"w": "worker"}
    generate(tmp_path, names)
    if not direct:
        monkeypatch.setattr(WorkerSockets, "source", not_allowed)
    seen, bus = fetched(monkeypatch), scene(3, tmp_path)
    bus.worker("w")
    bus.publishers[0].wait_for_workers(1, SECONDS)
    bus.publish(1.0)
    assert bus.has("w", 1.0)
    assert {name for name, _ in seen} == {"w" if direct else "publisher"}


def not_allowed(_sockets: WorkerSockets, _address: str) -> Any:
    raise AddressError("not allowed here")


def test_a_worker_that_may_not_connect_to_sources_gets_all_from_the_publisher(
    scene: Callable[..., Scene],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen, bus = fetched(monkeypatch), scene()
    bus.worker("w")
    bus.publishers[0].wait_for_workers(1, SECONDS)
    # Another host, which is not asked: an address of a network for documentation.
    addresses = ["", *(f"tcp://192.0.2.{rank}:1" for rank in (1, 2))]
    with caplog.at_level(logging.WARNING), pytest.raises(PublishError) as failed:
        bus.publish(1.0, addresses=addresses)
    assert "it is not on the host of the publisher" in caplog.text
    assert "Settings(any_data_host=True)" in caplog.text
    assert "chunks of rank 1 at tcp://192.0.2.1:1 are lacking" in str(failed.value)
    assert bus.has("w", 0.0)
    assert not [name for name, chunks in seen if chunks]
    bus.publish(2.0)
    assert bus.has("w", 2.0)


def test_a_relay_takes_chunks_from_sources_and_passes_them_on(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, bus = fetched(monkeypatch), scene()
    relay = Relay(bus.address, "tcp://127.0.0.1:0", ["m"], name="r", settings=QUICK)
    bus.stack.enter_context(relay)
    bus.worker("w", relay.address)
    bus.publish(1.0, expect=1)
    assert bus.has("w", 1.0)
    assert {name for name, chunks in seen if chunks} == {"r"}


def test_a_rank_and_a_relay_that_are_lost_in_one_publish_leave_the_version_before(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, begun, gone = scene(), threading.Event(), threading.Event()
    relay = Relay(bus.address, "tcp://127.0.0.1:0", ["m"], name="r", settings=QUICK)
    bus.stack.enter_context(relay)
    bus.worker("w", [relay.address, bus.address])
    bus.publish(1.0, expect=1)
    take = vars(_SourceSession)["_chunk"]

    def waits(session: Any, *about: Any) -> str:
        begun.set()
        assert gone.wait(SECONDS)
        fault: str = take(session, *about)
        return fault

    monkeypatch.setattr(_SourceSession, "_chunk", waits)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(bus.publish, 2.0, expect=1)
        assert begun.wait(SECONDS)
        bus.publishers[1].close()
        gone.set()
        relay.close()
        error = call.exception(SECONDS / 2)
    assert isinstance(error, PublishError)
    assert f"chunks of rank 1 at {bus.publishers[1].address} are lacking" in str(error)
    assert error.receipt.workers["w"].state != "applied"
    assert bus.has("w", 1.0)
    bus.publishers[1] = bus.publisher()
    bus.publish(3.0, expect=1)
    assert bus.has("w", 3.0)


def test_a_silent_source_is_given_up_and_the_version_with_it(scene: Callable[..., Scene]) -> None:
    bus = scene(2)
    bus.worker("w")
    bus.publishers[0].wait_for_workers(1, SECONDS)
    bus.publish(1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(PublishError, match=r"chunks of rank 1 at .* are lacking") as failed:
            bus.publish(2.0, addresses=["", f"tcp://127.0.0.1:{silent.getsockname()[1]}"])
    assert time.monotonic() - begun < SECONDS / 2
    assert failed.value.receipt.workers["w"].state != "applied"
    assert bus.has("w", 1.0)
    bus.publish(3.0)
    assert bus.has("w", 3.0)


def test_a_source_that_only_answers_pings_is_given_up(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = vars(serving)["_send_chunks"]

    def send_unless_source(state: Any, peer: Any, chunked: Any, *about: Any) -> Any:
        is_source = state.store[chunked.target.model].part is chunked
        return [] if is_source else send(state, peer, chunked, *about)

    monkeypatch.setattr(serving, "_send_chunks", send_unless_source)
    bus = scene(2)
    bus.worker("w")
    bus.publishers[0].wait_for_workers(1, SECONDS)
    begun = time.monotonic()
    with pytest.raises(PublishError, match=r"chunks of rank 1 at .* are lacking"):
        bus.publish(1.0)
    assert time.monotonic() - begun < SECONDS / 2


def test_a_damaged_chunk_of_a_source_is_requested_again(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightbus.bus.publisher import offers

    bus, damaged, chunk_of = scene(2), set[int](), offers.chunk_of

    def damage(chunked: Any, index: int) -> Any:
        chunk, payload = chunk_of(chunked, index)
        if index % 2 and index not in damaged and len(damaged) < 3:
            damaged.add(index)
            payload = bytes(len(payload))
        return chunk, payload

    monkeypatch.setattr(offers, "chunk_of", damage)
    bus.worker("w")
    bus.publishers[0].wait_for_workers(1, SECONDS)
    bus.publish(1.0)
    assert len(damaged) == 3
    assert bus.has("w", 1.0)


class _Fetching:
    """A fetching of which nothing is told."""

    def __init__(self, job: SourceFetch) -> None:
        self.job = job


def _session() -> tuple[Any, Callable[..., Chunk], SourceFetch]:
    """Return a session that has requested a chunk, how the chunk is sent, and what is fetched."""
    plan = plan_of(CHUNK, CHUNK)
    data = np.full(CHUNK, 7, np.uint8)
    key: Any = {"model": "m", "epoch": 5, "version": 2}
    form: Any = {"layout": "0" * 64, "layout_bytes": 10, "nbytes": CHUNK, "chunk_bytes": CHUNK}
    terms: Any = {"commit": "auto", "acknowledge": "applied", "encoding": "raw"}
    announce = Announce(**key, **form, **terms)
    job = SourceFetch(announce, [("tcp://127.0.0.1:1", [0])], np.zeros(CHUNK, np.uint8), plan)
    hello = Hello(name="w", instance="0" * 32, models={"m": None})
    running: Any = _Fetching(job)
    session = _SourceSession(running, [0], hello, Timing(), keyed=False)
    sent = _Sent()
    vars(_SourceSession)["_request"](session, sent)
    assert sent.count == 1
    chunk = Chunk(**key, index=0, crc=crc32c(data))
    return session, lambda **other: replace(chunk, **other), job


class _Sent:
    """A socket that counts what is sent."""

    def __init__(self) -> None:
        self.count = 0

    def send(self, _message: object) -> None:
        self.count += 1


@pytest.mark.parametrize("other", [{"model": "n"}, {"epoch": 4}, {"version": 1}, {"index": 1}])
def test_a_chunk_of_another_version_is_not_taken(other: dict[str, Any]) -> None:
    session, chunk, job = _session()
    take, payload = vars(_SourceSession)["_chunk"], memoryview(bytes([7]) * CHUNK)
    assert take(session, chunk(**other), payload) == ""
    assert not job.buffer.any()
    assert take(session, chunk(), payload) == ""
    assert (job.buffer == 7).all()


def test_a_source_of_another_epoch_is_left() -> None:
    (session, _, _), take = _session(), vars(_SourceSession)["_process"]
    for epoch, fault in ((5, ""), (4, "it is of epoch 4")):
        welcome = Welcome(epoch=epoch, data="", ping_ms=1, lost_ms=2, models={})
        assert take(session, welcome, [], _Sent()) == fault
