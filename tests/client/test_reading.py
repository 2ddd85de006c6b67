"""Readers share, a writer is alone; each gets its turn, in threads and in tasks."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus import Subscriber
from weightbus.python_client.applying.reading import InUseError, Reading, ReadingLock

SECONDS = 30.0  # far more than anything here takes
ROUNDS = 12  # of each reader and writer


@pytest.fixture
def pool() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def may_read(lock: ReadingLock | Subscriber) -> bool:
    try:
        with lock.reading(0):
            return True
    except TimeoutError:
        return False


def writing(lock: ReadingLock, pool: ThreadPoolExecutor) -> "Future[str]":
    """Have somebody write in a thread, who waits for readers by now; return its future."""

    def write() -> str:
        with lock.writing(SECONDS):
            return "written"

    written, deadline = pool.submit(write), time.monotonic() + SECONDS
    while pool.submit(may_read, lock).result(SECONDS):  # a new one gets in until it waits
        assert time.monotonic() < deadline
    return written


async def result(future: "Future[str]") -> str:
    return await asyncio.wait_for(asyncio.wrap_future(future), SECONDS)


def test_readers_share() -> None:
    lock, both = ReadingLock(), threading.Barrier(2)

    def read() -> None:
        with lock.reading(SECONDS):
            both.wait(SECONDS)  # passes only while the other reads, too

    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(read), pool.submit(read)]:
            future.result(SECONDS)


def test_a_writer_may_read_inside() -> None:
    """A hook that runs after an apply may call what reads."""
    lock = ReadingLock()
    with lock.writing(0), lock.reading(0), lock.reading(0):
        pass
    with lock.writing(0):
        pass
    with lock.reading(0):
        pass


def test_waiting_ends_in_time_and_leaves_no_trace() -> None:
    lock = ReadingLock()
    with ThreadPoolExecutor() as pool, lock.reading(0):
        with pytest.raises(TimeoutError, match="in use"):
            pool.submit(lambda: lock.writing(0.01).__enter__()).result(SECONDS)
        with lock.reading(0):
            pass
    with lock.writing(0), pytest.raises(TimeoutError, match="being applied"):
        ThreadPoolExecutor().submit(lambda: lock.reading(0.01).__enter__()).result(SECONDS)
    with lock.writing(0):
        pass


def test_readers_may_leave_while_a_writer_looks_at_them() -> None:
    lock = ReadingLock()

    class Beside(Reading[None]):
        """A reader that all readers leave with, when the writer looks at it."""

        @property
        def loop(self) -> None:
            if threading.get_ident() != self.thread:
                vars(lock)["_readers"].clear()

        @loop.setter
        def loop(self, _: object) -> None: ...

    def write() -> bool:
        with lock.writing(SECONDS):
            return True

    with Beside(lock, SECONDS, lambda: None), Beside(lock, SECONDS, lambda: None):
        assert ThreadPoolExecutor(1).submit(write).result()


def test_a_reader_that_writes_is_told_so() -> None:
    lock = ReadingLock()
    with lock.reading(0), pytest.raises(RuntimeError, match="leave the reading block first"):
        lock.writing(0).__enter__()


def test_an_exception_inside_lets_go() -> None:
    lock = ReadingLock()
    for context in (lock.reading, lock.writing):
        with pytest.raises(KeyError), context(0):
            raise KeyError
    with lock.writing(0):
        pass


def test_a_writer_goes_before_tasks_that_come_later(pool: ThreadPoolExecutor) -> None:
    lock, order = ReadingLock(), list[str]()

    async def read(name: str, leave: asyncio.Event) -> None:
        async with lock.reading(SECONDS):
            order.append(name)
            await leave.wait()

    async def main() -> None:
        leave = asyncio.Event()
        first = [asyncio.create_task(read("first", leave)) for _ in range(2)]
        while len(order) < 2:  # both are inside at once
            await asyncio.sleep(0)
        written = writing(lock, pool)
        written.add_done_callback(lambda _: order.append("writer"))
        later = asyncio.create_task(read("later", leave))
        for _ in range(100):  # it has every chance, and the event loop goes on
            await asyncio.sleep(0)
        assert order == ["first", "first"]
        leave.set()
        await asyncio.gather(*first, later)
        assert order[:2] == ["first", "first"]
        assert sorted(order[2:]) == ["later", "writer"]
        assert await result(written) == "written"

    asyncio.run(main())


def test_readers_that_have_queued_go_before_the_next_writer(pool: ThreadPoolExecutor) -> None:
    """One version after the other is applied, and readers get in all the same."""
    lock, stop = ReadingLock(), threading.Event()
    waits = [threading.Event(), threading.Event()]

    def write(me: int) -> None:
        def waiting() -> bool:
            waits[me].set()
            return False

        while not stop.is_set():
            with lock.writing(SECONDS, stop=waiting):
                waits[me].clear()
                assert waits[1 - me].wait(SECONDS), "the other one waits, or has ended"
        waits[me].set()

    async def read() -> None:
        for _ in range(20):
            async with lock.reading(SECONDS / 4):
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(read() for _ in range(4)))

    writers = [pool.submit(write, me) for me in range(2)]
    try:
        asyncio.run(main())
    finally:
        stop.set()
    for writer in writers:
        writer.result(SECONDS)


def test_what_has_the_context_of_a_reader_reads_inside(pool: ThreadPoolExecutor) -> None:
    """Tasks of a gather and of wait_for, threads of to_thread: the reader waits for them."""
    lock, read = ReadingLock(), list[str]()

    async def task() -> None:
        async with lock.reading(0):
            read.append("task")

    def thread() -> None:
        with lock.reading(0):
            read.append("thread")

    async def main() -> None:
        async with lock.reading(0):
            written = writing(lock, pool)
            await asyncio.gather(task(), task(), asyncio.to_thread(thread))
            await asyncio.wait_for(task(), SECONDS)
            thread()
            assert not written.done()
        assert await result(written) == "written"

    asyncio.run(main())
    assert sorted(read) == ["task"] * 3 + ["thread"] * 2


def test_a_block_that_is_over_lets_nobody_in(pool: ThreadPoolExecutor) -> None:
    """A task that was started inside has outlived it: it is a stranger by now."""
    lock = ReadingLock()

    async def stranger(begin: asyncio.Event) -> None:
        await begin.wait()
        with pytest.raises(TimeoutError, match=r"reading .* in thread"):
            async with lock.reading(0):
                pass

    async def main() -> None:
        begin = asyncio.Event()
        async with lock.reading(0):
            started = asyncio.create_task(stranger(begin))
        leave = threading.Event()
        inside = pool.submit(hold, lock, leave)
        while not lock.blocked_by:
            await asyncio.sleep(0)
        written = writing(lock, pool)
        begin.set()
        await started
        leave.set()
        inside.result(SECONDS)
        assert await result(written) == "written"

    asyncio.run(main())


def hold(lock: ReadingLock, leave: threading.Event) -> None:
    with lock.reading(SECONDS):
        assert leave.wait(SECONDS)


@pytest.mark.parametrize("queued", [False, True])
def test_a_task_that_is_cancelled_is_not_in_the_way(queued: bool, pool: ThreadPoolExecutor) -> None:
    lock = ReadingLock()

    async def read(inside: list[int]) -> None:
        async with lock.reading(SECONDS):
            inside.append(1)
            await asyncio.Event().wait()

    async def main() -> None:
        first, second = list[int](), list[int]()
        tasks = [asyncio.create_task(read(first))]
        while not first:
            await asyncio.sleep(0)
        written = writing(lock, pool)
        if queued:
            tasks.append(asyncio.create_task(read(second)))
            await asyncio.sleep(0)
        for task in reversed(tasks):
            task.cancel()
        assert await result(written) == "written"
        assert not second
        with lock.writing(0):
            pass

    asyncio.run(main())


def test_a_task_that_nobody_runs_any_more_is_not_in_the_way() -> None:
    """Its event loop was closed, and it is kept from being collected."""
    lock, loop = ReadingLock(), asyncio.new_event_loop()

    async def read() -> None:
        async with lock.reading(0):
            await asyncio.Event().wait()

    task = loop.create_task(read())
    while not lock.blocked_by:
        loop.run_until_complete(asyncio.sleep(0))
    with pytest.raises(InUseError, match=r"task Task-\d+ \(.*read\) of thread MainThread for \d"):
        lock.writing(0).__enter__()
    loop.close()
    with lock.writing(SECONDS):
        pass
    vars_of: Any = task
    vars_of._log_destroy_pending = False  # noqa: SLF001 - so it is


def test_a_block_may_end_in_another_thread(pool: ThreadPoolExecutor) -> None:
    """Servers run the two halves of a dependency in any threads that are free."""
    lock = ReadingLock()
    block = lock.reading(0)
    pool.submit(block.__enter__).result(SECONDS)
    with pytest.raises(InUseError):
        lock.writing(0).__enter__()
    block.__exit__()
    with lock.writing(0):
        pass
    assert not pool.submit(lambda: lock.held).result(SECONDS), "it began in this thread"


def test_a_block_is_for_one_at_a_time() -> None:
    block = ReadingLock().reading(0)
    with block, pytest.raises(RuntimeError, match=r"begun already .* call reading\(\) again"):
        block.__enter__()
    with block:
        pass


# A plain `with` in coroutines.


def test_it_waits_for_threads_and_goes_before_a_writer_that_waits_for_its_own_loop(
    pool: ThreadPoolExecutor,
) -> None:
    lock = ReadingLock()

    async def main() -> None:
        async def answer(leave: asyncio.Event) -> None:
            async with lock.reading(0):
                await leave.wait()

        leave, away = asyncio.Event(), threading.Event()
        answering = asyncio.create_task(answer(leave))
        while not lock.blocked_by:
            await asyncio.sleep(0)
        written = writing(lock, pool)
        with lock.reading(0):  # to wait here would be to wait for `answering`, which could not end
            assert not written.done()
        leave.set()
        await answering
        assert await result(written) == "written"

        inside = pool.submit(hold, lock, away)
        while not lock.blocked_by:
            await asyncio.sleep(0)
        written = writing(lock, pool)
        threading.Timer(0.01, away.set).start()
        with lock.reading(SECONDS):
            assert written.done() or lock.blocked_by
        assert await result(written) == "written"
        inside.result(SECONDS)

    asyncio.run(main())


def test_one_that_awaits_is_told_and_refused_where_it_would_stop_its_loop(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    lock = ReadingLock()

    async def answer(leave: asyncio.Event) -> None:
        with lock.reading(SECONDS):
            await leave.wait()

    async def main() -> None:
        leave = asyncio.Event()
        answering = asyncio.create_task(answer(leave))
        while not lock.blocked_by:
            await asyncio.sleep(0)
        with lock.reading(0):  # nobody wants to write: that there are two is fine
            pass
        written = writing(lock, pool)
        with pytest.raises(RuntimeError, match=r"would block .*answer.*async with worker.reading"):
            lock.reading(SECONDS).__enter__()
        leave.set()
        await answering
        assert await result(written) == "written"

    with caplog.at_level(logging.WARNING, "weightbus.subscriber"):
        asyncio.run(main())
        asyncio.run(main())
    assert [r.levelname for r in caplog.records] == ["WARNING"], "once is enough"
    assert "with an await inside" in caplog.text
    assert "answer" in caplog.text


def test_one_that_does_not_await_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    lock = ReadingLock()

    async def main() -> None:
        with lock.reading(0), lock.reading(0):
            pass
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not caplog.records


def test_who_would_write_in_a_coroutine_does_not_stop_its_loop() -> None:
    lock = ReadingLock()

    async def read(leave: asyncio.Event) -> None:
        async with lock.reading(0):
            await leave.wait()

    async def main() -> None:
        leave = asyncio.Event()
        reading = asyncio.create_task(read(leave))
        while not lock.blocked_by:
            await asyncio.sleep(0)
        with pytest.raises(InUseError):
            lock.writing(0).__enter__()
        with pytest.raises(RuntimeError, match=r"would block.*read.*await worker.receive_await"):
            lock.writing(SECONDS).__enter__()
        leave.set()
        await reading

    asyncio.run(main())


# All of it at once.


def forward_pass() -> int:
    return sum(range(20_000))  # takes a while, in which others run


@settings(max_examples=15, deadline=None)
@given(
    loops=st.lists(
        st.lists(st.sampled_from(("with", "task", "children")), min_size=1, max_size=6), max_size=2
    ),
    threads=st.lists(st.sampled_from(("thread", "halves")), max_size=3),
    writers=st.integers(1, 2),
)
def test_readers_and_writers_of_all_kinds(
    loops: list[list[str]], threads: list[str], writers: int
) -> None:
    """Writers are alone; everybody has its turn, over and over, and in time."""
    lock, inside, most = ReadingLock(), set[object](), list[int]()
    writes = [0]

    @contextlib.contextmanager
    def seen(writes_too: bool = False) -> Generator[None]:
        me, before = object(), writes[0]
        inside.add(me)
        if writes_too:
            most.append(len(inside))
            writes[0] += 1
        yield
        inside.discard(me)
        assert writes_too or writes[0] == before

    async def task(block: "Reading[None]") -> None:
        async with block:
            with seen():
                await asyncio.sleep(0.001)

    async def reader(kind: str) -> None:
        for _ in range(ROUNDS):
            if kind == "with":
                with lock.reading(SECONDS), seen():
                    pass
                await asyncio.sleep(0)
                continue
            block = lock.reading(SECONDS)
            if kind == "task":
                await task(block)
                continue
            async with block:
                with seen():
                    await asyncio.gather(task(lock.reading(SECONDS)), asyncio.sleep(0.001))

    async def all_of(kinds: list[str]) -> None:
        await asyncio.gather(*(reader(kind) for kind in kinds))

    def thread(kind: str) -> None:
        for _ in range(ROUNDS):
            if kind == "thread":
                with lock.reading(SECONDS), seen(), lock.reading(SECONDS):
                    forward_pass()
            else:
                block = lock.reading(SECONDS)
                block.__enter__()
                with seen():
                    forward_pass()
                other = threading.Thread(target=block.__exit__)
                other.start()
                other.join()

    def write() -> None:
        for _ in range(ROUNDS):
            with lock.writing(SECONDS), seen(writes_too=True), lock.reading(0):
                pass

    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(asyncio.run, all_of(kinds)) for kinds in loops]
        work += [pool.submit(thread, kind) for kind in threads]
        work += [pool.submit(write) for _ in range(writers)]
        for each in work:
            each.result(2 * SECONDS)
    assert most == [1] * (ROUNDS * writers)
    with lock.writing(0):
        pass
