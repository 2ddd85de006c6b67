"""Servers that stream: clients that are slow, or gone, keep no new weights out."""

import asyncio
import inspect
import logging
import os
import re
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher, PublishError, Settings, Subscriber
from weightbus.bus.limits import Timing
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays
from weightbus.tests.docs.test_docs import GUIDES, blocks

if not os.environ.get("CI"):
    pytest.importorskip("fastapi")

BLOCKS = blocks(GUIDES / "servers.md", "python")
CODE = "".join(b for b in BLOCKS if "async def answer(" in b or "async def stream(" in b)

Message = dict[str, Any]


def line(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"slope": np.full(3, value, np.float32), "offset": np.array(0, np.float32)}


@asynccontextmanager
async def served() -> AsyncGenerator[tuple[Publisher, Subscriber, ModuleType]]:
    """The guide's stream, and version 1."""
    module = ModuleType("served")
    exec(compile(CODE, "served.py", "exec"), vars(module))  # noqa: S102 - the guide's
    async with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"line": module.weights}) as worker,
    ):
        worker.start()
        await publisher.publish_awaitable("line", line(1), expect=1, timeout=SECONDS)
        yield publisher, worker, module


class Client:
    """A client of Starlette, as its server shows it: what is sent to it, and when it goes."""

    def __init__(self, *, reads: bool) -> None:
        self._reads, self._gone = reads, asyncio.Event()
        self.body, self.begun = "", asyncio.Event()

    async def receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.body += message.get("body", b"").decode()
        if self.body:
            self.begun.set()
            if not self._reads:
                await asyncio.Event().wait()

    def go(self) -> None:
        self._gone.set()


def response(module: ModuleType, worker: Subscriber, client: Client) -> asyncio.Task[None]:
    """Answer a client with the stream, in a task."""
    made = module.StreamingResponse(module.stream(worker, [1.0, 2.0, 4.0]))
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "headers": []}
    return asyncio.create_task(made(scope, client.receive, client.send))


@pytest.mark.parametrize("goes", [False, True])
def test_a_client_that_reads_no_more_or_goes_keeps_no_weights_out(*, goes: bool) -> None:
    async def main() -> None:
        async with served() as (publisher, worker, module):
            client = Client(reads=False)
            answering = response(module, worker, client)
            await asyncio.wait_for(client.begun.wait(), SECONDS)
            if goes:
                client.go()
            receipt = await publisher.publish_awaitable("line", line(2), timeout=SECONDS)
            assert len(receipt.in_state("applied")) == 1
            assert answering.done() == goes
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    asyncio.run(main())


def test_each_stream_is_of_one_version_while_others_are_published() -> None:
    async def main() -> None:
        async with served() as (publisher, worker, module):
            clients = [Client(reads=True) for _ in range(6)]
            answering: list[asyncio.Task[None]] = []
            for version, client in enumerate(clients, 2):
                answering.append(response(module, worker, client))
                await publisher.publish_awaitable("line", line(version), timeout=SECONDS)
            await asyncio.gather(*answering)
        for client in clients:
            told = [text.split() for text in client.body.splitlines()]
            assert [int(number) for _, number, _ in told] == [*range(100)]
            assert len({version for version, _, _ in told}) == 1
            assert all(float(y) == 7 * int(version) for version, _, y in told)

    asyncio.run(main())


def test_what_fails_in_a_stream_is_raised_where_it_is_sent() -> None:
    async def main() -> None:
        async with served() as (_, worker, module):
            with pytest.raises(ValueError, match="shapes"):
                [token async for token in module.stream(worker, [1.0])]

    asyncio.run(main())


# Where the block began that a version waits for.


def suspended(worker: Subscriber) -> Generator[int]:
    with worker.reading():
        yield 1
        yield 2


def stacked(worker: Subscriber) -> Iterator[int]:
    with ExitStack() as stack:
        stack.enter_context(worker.reading())
        yield 1


GENERATOR = ", a generator, which leaves when it is read to its end or closed"


@pytest.mark.parametrize("reader", [suspended, stacked])
def test_a_reader_that_holds_new_weights_up_is_named_by_where_it_began(
    bus: Bus, reader: Callable[[Subscriber], Iterator[int]], caplog: pytest.LogCaptureFixture
) -> None:
    quick = Timing(ping=0.1)
    publisher = bus.publisher(timing=quick)
    worker = bus.subscriber(publisher, arrays(0), name="w", timing=quick).start()
    tokens = reader(worker)
    assert next(tokens) == 1
    with caplog.at_level(logging.WARNING, "weightbus"), pytest.raises(PublishError) as caught:
        publisher.publish("m", arrays(1), timeout=2.5)
    lines, first = inspect.getsourcelines(reader)
    at = first + next(n for n, text in enumerate(lines) if "worker.reading()" in text)
    place = f"at client/test_streams.py:{at} ({reader.__name__}{GENERATOR}) in thread MainThread"
    assert place in caught.value.receipt.workers["w"].detail
    assert any(place in record.getMessage() for record in caplog.records)
    del tokens  # which closes it
    assert worker.wait_for_version("m", 1, timeout=SECONDS)


def test_a_coroutine_is_named_by_where_its_block_began(bus: Bus) -> None:
    publisher = bus.publisher()
    worker = bus.subscriber(publisher, arrays(0), name="w").start()

    async def answer() -> str:
        async with worker.reading():
            publisher.publish("m", arrays(1), settings=Settings(wait="none"))
            return worker.lock.blocked_by

    text = asyncio.run(answer())
    assert re.search(r"at client/test_streams\.py:\d+ \(answer\) in task Task-\d+ \(answer\)", text)
