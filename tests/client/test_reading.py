"""Readers share, a writer is alone, and neither keeps the other out for ever."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightbus.python_client.reading import ReadingLock

SECONDS = 10.0  # far more than anything here takes


def test_readers_share() -> None:
    lock, both = ReadingLock(), threading.Barrier(2)

    def read() -> None:
        with lock.reading(SECONDS):
            both.wait(SECONDS)  # passes only while the other reads, too

    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(read), pool.submit(read)]:
            future.result(SECONDS)


def test_a_writer_is_alone() -> None:
    lock, inside, most = ReadingLock(), [0], [0]

    def write() -> None:
        for _ in range(200):
            with lock.writing(SECONDS):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    def read() -> None:
        for _ in range(200):
            with lock.reading(SECONDS):
                assert inside[0] == 0

    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(work) for work in (write, write, read, read)]:
            future.result(3 * SECONDS)
    assert most[0] == 1


def test_a_writer_that_waits_goes_before_new_readers() -> None:
    lock, order = ReadingLock(), list[str]()
    leave = threading.Event()

    def first() -> None:
        with lock.reading(SECONDS):
            reading.set()
            leave.wait(SECONDS)

    def write() -> None:
        with lock.writing(SECONDS):
            order.append("writer")

    reading = threading.Event()
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(first)]
        assert reading.wait(SECONDS)
        futures.append(pool.submit(write))
        while True:  # until the writer waits, a new reader gets in
            try:
                with lock.reading(0):
                    pass
            except TimeoutError:
                break
        leave.set()
        with lock.reading(SECONDS):
            order.append("reader")
        for future in futures:
            future.result(SECONDS)
    assert order == ["writer", "reader"]


def test_a_reader_may_read_inside_though_a_writer_waits() -> None:
    lock = ReadingLock()
    with ThreadPoolExecutor() as pool, lock.reading(SECONDS):

        def write() -> None:
            with lock.writing(SECONDS):
                pass

        writing = pool.submit(write)
        refused = False
        while not refused:  # until the writer waits

            def peek() -> bool:
                try:
                    with lock.reading(0):
                        return False
                except TimeoutError:
                    return True

            refused = pool.submit(peek).result(SECONDS)
        with lock.reading(0):
            assert not writing.done()


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
