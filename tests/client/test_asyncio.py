"""asyncio: what waits can be awaited, and cancelled, which applies nothing and loses nothing."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from weightbus import ApplyError, ClosedError, Publisher, Settings, Subscriber, WorkersMissingError
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays
from weightbus.tests.client.test_reading import may_read
from weightbus.types import Update


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def cancelled(task: "asyncio.Task[Update | None]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def waiting() -> bool:
    """Whether any thread waits for somebody."""
    names = ("weightbus-receive", "weightbus-wait", "weightbus-close")
    return any(t.name in names for t in threading.enumerate())


def test_everything_is_awaited() -> None:
    async def main() -> None:
        async with Publisher() as publisher:
            target = arrays(0)
            async with Subscriber(publisher.address, {"m": target}, name="w") as worker:
                await publisher.wait_for_workers_awaitable(1, SECONDS)
                with pytest.raises(WorkersMissingError, match="1 of 2 workers"):
                    await publisher.wait_for_workers_awaitable(2, 0.01)
                receipt, update = await asyncio.gather(
                    publisher.publish_awaitable("m", arrays(1), timeout=SECONDS),
                    worker.receive_awaitable(SECONDS),
                )
                assert receipt.in_state("applied") == ["w"]
                assert await worker.wait_for_version_awaitable("m", 1, timeout=SECONDS) == update
                assert await worker.wait_for_version_awaitable("m", 2, timeout=0.01) is None
            with pytest.raises(ClosedError):
                await worker.receive_awaitable(0)
        with pytest.raises(ClosedError):
            await publisher.publish_awaitable("m", arrays(1))

    asyncio.run(main())
    asyncio.run(until(lambda: not waiting()))


def test_receiving_that_is_cancelled_applies_nothing(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target, name="w")

    async def main() -> None:
        for waits in (
            worker.receive_awaitable(SECONDS),
            worker.receive_awaitable(SECONDS, version=(publisher.epoch, 1)),
            worker.wait_for_version_awaitable("m", timeout=SECONDS),
        ):
            task = asyncio.create_task(waits)
            await until(waiting)
            await cancelled(task)
            await until(lambda: not waiting())
        joining = asyncio.create_task(publisher.wait_for_workers_awaitable(2, SECONDS))
        await until(waiting)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        await until(lambda: not waiting())
        done = publisher.publish_async(
            "m", arrays(1), timeout=SECONDS, settings=Settings(wait="staged")
        )
        assert (await asyncio.wrap_future(done)).in_state("staged") == ["w"]
        assert target["w"][0] == 0
        update = await worker.receive_awaitable(SECONDS)
        assert update is not None
        assert (update.version, target["w"][0]) == (1, 1)

    asyncio.run(main())


def test_one_that_waits_for_readers_is_cancelled_and_the_version_is_kept(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target, name="w")

    async def main() -> None:
        publishing = asyncio.create_task(
            publisher.publish_awaitable("m", arrays(1), timeout=SECONDS)
        )
        leave = asyncio.Event()
        inside = asyncio.create_task(read(leave))
        await until(lambda: bool(worker.lock.blocked_by))
        task = asyncio.create_task(worker.receive_awaitable(SECONDS))
        await until_refused()
        await cancelled(task)
        assert await asyncio.to_thread(may_read, worker), "nobody waits to write any more"
        leave.set()
        await inside
        assert target["w"][0] == 0
        assert (await worker.receive_awaitable(SECONDS)) is not None
        assert (await publishing).in_state("applied") == ["w"]

    async def until_refused() -> None:
        deadline = time.monotonic() + SECONDS
        while await asyncio.to_thread(may_read, worker):
            assert time.monotonic() < deadline

    async def read(leave: asyncio.Event) -> None:
        async with worker.reading():
            await leave.wait()

    asyncio.run(main())
    assert target["w"][0] == 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_cancelled_one_had_applied_is_told_by_the_next(bus: Bus, fails: bool) -> None:
    publisher, target = bus.publisher(), arrays(0)
    begun, go = threading.Event(), threading.Event()

    def hook(_: object) -> None:
        begun.set()
        assert go.wait(SECONDS)
        if fails:
            raise KeyError("mine")

    worker = bus.subscriber(publisher, target, name="w", before_apply=hook)

    async def main() -> None:
        publisher.publish_async("m", arrays(1), require=0, timeout=SECONDS)
        task = asyncio.create_task(worker.receive_awaitable(SECONDS))
        await until(begun.is_set)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # whoever insists waits for the copy all the same
        asyncio.get_running_loop().call_later(0.01, go.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        if fails:
            with pytest.raises(ApplyError, match="mine"):
                await worker.receive_awaitable(0)
            assert target["w"][0] == 0
            return
        update = await worker.receive_awaitable(SECONDS)
        assert update is not None
        assert (update.version, target["w"][0]) == (1, 1)

    asyncio.run(main())


@pytest.mark.parametrize("started", [False, True])
def test_each_update_in_turn_until_it_is_closed(bus: Bus, started: bool) -> None:
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target, name="w")
    if started:
        worker.start()
    seen = list[tuple[int, float]]()

    async def follow() -> None:
        async for update in worker:
            seen.append((update.version, float(target["w"][0])))

    def has_seen(count: int) -> bool:
        return len(seen) == count

    async def main() -> None:
        following = asyncio.create_task(follow())
        for version in (1, 2, 3):
            await publisher.publish_awaitable("m", arrays(version), timeout=SECONDS)
            await until(partial(has_seen, version))
        await worker.close_awaitable()
        await following

    asyncio.run(main())
    assert seen == [(1, 1), (2, 2), (3, 3)]
