"""Inference servers: answers that await while they read, and who is in the way of a version."""

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher, PublishError, Settings, Subscriber, TornError
from weightbus.bus.limits import Timing
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays, both
from weightbus.tests.client.test_reading import may_read
from weightbus.tests.client.uvicorn_server import uvicorn_server

VERSIONS = 30  # while the example answers


@pytest.mark.parametrize("nbytes", [1024, 4 * 2**20])  # applied in either thread
def test_coroutines_that_await_inside_do_not_keep_new_weights_out(bus: Bus, nbytes: int) -> None:
    publisher, target = bus.publisher(), {"w": np.zeros(nbytes // 4, np.float32)}
    worker = bus.subscriber(publisher, target, name="w").start()
    readers, mixed = list[float](), list[int]()

    async def answer(over: asyncio.Event) -> None:
        while not over.is_set():
            async with worker.reading() as running:
                before, began = float(target["w"][0]), time.monotonic()
                await asyncio.sleep(0.02)
                readers.append(time.monotonic() - began)
                if not before == target["w"][-1] == running.version:
                    mixed.append(running.version)

    async def main() -> None:
        over = asyncio.Event()
        clients = [asyncio.create_task(answer(over)) for _ in range(8)]
        for version in range(1, 11):
            weights = {"w": np.full(nbytes // 4, version, np.float32)}
            receipt = await publisher.publish_awaitable("m", weights, timeout=SECONDS)
            assert receipt.in_state("applied") == ["w"]
        over.set()
        await asyncio.gather(*clients)

    asyncio.run(main())
    assert not mixed
    assert len(readers) > 8


def test_long_readers_that_take_turns_do_not_keep_new_weights_out() -> None:
    """Somebody reads at all times, longer than a round of applying in the background takes."""
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": arrays(0)}, name="w").start() as worker,
    ):

        async def answer(over: asyncio.Event, first: float) -> None:
            await asyncio.sleep(first)
            while not over.is_set():
                async with worker.reading():
                    await asyncio.sleep(1.6)

        async def main() -> None:
            over = asyncio.Event()
            clients = [asyncio.create_task(answer(over, 0.4 * n)) for n in range(4)]
            publisher.wait_for_workers(1, SECONDS)
            while worker.lock.blocked_by.count(";") < 3:
                await asyncio.sleep(0.01)
            try:
                await publisher.publish_awaitable("m", arrays(1), timeout=6.0)
            finally:
                over.set()
            await asyncio.gather(*clients)

        asyncio.run(main())


def test_a_receipt_says_who_is_in_the_way(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """And so does the worker's log, once readers have been in the way for a second."""
    quick, told = Timing(ping=0.1), list[str]()
    publisher = bus.publisher(timing=quick)
    worker = bus.subscriber(publisher, arrays(0), name="w", timing=quick).start()

    async def generate() -> None:
        async with worker.reading():
            with pytest.raises(PublishError) as caught:
                await publisher.publish_awaitable("m", arrays(1), timeout=1.5)
            told.append(caught.value.receipt.workers["w"].detail)
            told.append(publisher.workers()["w"].phase["m"])
            deadline = time.monotonic() + SECONDS
            while not caplog.records and time.monotonic() < deadline:
                await asyncio.sleep(0.01)

    async def main() -> None:
        await asyncio.create_task(generate(), name="request 7")

    with caplog.at_level(logging.WARNING, "weightbus"):
        asyncio.run(main())
    (record,) = caplog.records
    assert "m version 1 has waited 1." in record.getMessage()
    for text in told:
        assert "staged version 1, which waits for users of the old weights: reading" in text
    for text in (*told, record.getMessage()):
        assert re.search(
            r"in task request 7 \(.*generate\) of thread MainThread for \d\.\d s", text
        )
    assert worker.wait_for_version("m", 1, timeout=SECONDS)
    assert publisher.publish("m", arrays(2), timeout=SECONDS).in_state("applied") == ["w"]


def test_closing_does_not_wait_for_who_waits_for_readers(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target).start()
    with worker.reading(0):
        publisher.publish("m", arrays(1), settings=Settings(wait="none"))
        deadline = time.monotonic() + SECONDS
        with ThreadPoolExecutor(1) as other:
            while other.submit(may_read, worker).result(SECONDS):
                assert time.monotonic() < deadline
            before = time.monotonic()
            other.submit(worker.close).result(SECONDS)
    assert time.monotonic() - before < 1.0
    assert not caplog.records
    assert target["w"][0] == 0


# What is read.


def test_the_version_that_is_read(bus: Bus) -> None:
    publisher = bus.publisher()
    worker = bus.subscriber(publisher, arrays(0))
    with worker.reading() as running:
        assert (running.model, running.epoch, running.version) == ("m", 0, 0)
        assert running.update is None
    receipt, update = both(publisher, worker, arrays(1))
    with worker.reading() as running:
        assert (running.epoch, running.version) == (receipt.epoch, receipt.version)
        assert running.update == update
    with worker.reading(model="m") as named:
        assert named.version == 1

    async def read() -> tuple[int, int]:
        async with worker.reading() as running:
            return running.epoch, running.version

    assert asyncio.run(read()) == (receipt.epoch, 1)
    with pytest.raises(KeyError, match="other"):
        worker.reading(model="other")


def test_of_several_models_one_is_named(bus: Bus) -> None:
    publisher = bus.publisher()
    worker = Subscriber(publisher.address, {"m": arrays(0), "n": arrays(0)})
    with worker, worker.reading() as running:
        with pytest.raises(ValueError, match=r"several models .* reading\(model=...\)"):
            running.version  # noqa: B018
        worker.close()


def test_a_first_version_can_be_insisted_on(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target).start()
    lacking = rf"no version of m runs here yet: does {publisher.address} publish it\? \(waited 0 s"
    with pytest.raises(TimeoutError, match=lacking):
        worker.reading(0, needs_version=True).__enter__()

    async def read() -> int:
        async with worker.reading(SECONDS, needs_version=True) as running:
            assert target["w"][0] == 1
            return running.version

    async def main() -> None:
        first = asyncio.create_task(read())
        await asyncio.sleep(0)
        await publisher.publish_awaitable("m", arrays(1), timeout=SECONDS)
        assert await first == 1
        assert await read() == 1

    asyncio.run(main())
    with worker.reading(0, needs_version=True) as running:
        assert running.version == 1


def test_insisting_ends_where_a_version_has_failed_half_way(bus: Bus) -> None:
    publisher = bus.publisher()

    def fail(_: object) -> None:
        raise KeyError("mine")

    worker = bus.subscriber(publisher, arrays(0), on_commit=fail).start()
    with ThreadPoolExecutor(1) as other:
        reads = other.submit(worker.reading(SECONDS, needs_version=True).__enter__)
        publisher.publish("m", arrays(1), require=0, settings=Settings(wait="none"))
        with pytest.raises(TornError, match="mine"):
            reads.result(SECONDS)


# The example.


def test_the_example_mixes_no_versions_under_load() -> None:
    """Each answer is the version's that it names, while new ones are published without a break."""
    if not os.environ.get("CI"):
        pytest.importorskip("fastapi")
        pytest.importorskip("uvicorn")
        pytest.importorskip("aiohttp")
    question, answers = {"x": [1.0, 2.0, 4.0]}, list[dict[str, float]]()

    async def client(session: Any, url: str, over: asyncio.Event) -> None:
        last = 0
        while not over.is_set():
            async with session.post(f"{url}/predict", json=question) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
            answers.append(answer)
            assert answer["version"] >= last, "a client never goes back"
            last = answer["version"]

    async def main() -> None:
        from aiohttp import ClientSession

        async with Publisher() as publisher, ClientSession() as session:
            with server_of(publisher.address) as url:
                await publisher.wait_for_workers_awaitable(1, SECONDS)
                async with session.get(f"{url}/health") as response:
                    assert await response.json() == {"version": 0}
                over = asyncio.Event()
                clients = [asyncio.create_task(client(session, url, over)) for _ in range(8)]
                for value in range(1, VERSIONS + 1):
                    weights = {
                        "slope": np.full(3, value, np.float32),
                        "offset": np.array(value, np.float32),
                    }
                    receipt = await publisher.publish_awaitable("line", weights, timeout=SECONDS)
                    assert len(receipt.in_state("applied")) == 1
                    deadline = time.monotonic() + SECONDS
                    while len(answers) < 8 * value:  # it is under load all the time
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.001)
                over.set()
                await asyncio.gather(*clients)

    asyncio.run(main())
    assert len({answer["version"] for answer in answers}) > VERSIONS / 2
    mixed = [answer for answer in answers if answer["y"] != 8 * answer["version"]]
    assert not mixed, f"{len(mixed)} of {len(answers)}"


@contextmanager
def server_of(address: str) -> Generator[str]:
    """Run the example on a free port; yield where it serves."""
    example = Path(__file__).parents[2] / "examples" / "fastapi_server.py"
    command = [sys.executable, str(example), address, "--port", "0"]
    with uvicorn_server(command) as where:
        yield where
