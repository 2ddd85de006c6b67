"""When a thread of ours fails, every call that waits and every later one does, at once and why."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from weightbus import ClosedError, Publisher, Settings, Subscriber

SECONDS = 60.0
WEIGHTS = {"w": np.ones(3, np.float32)}


class BoomError(BaseException):
    """What no part of the code expects."""


def boom(*_arguments: object, **_options: object) -> Any:
    raise BoomError("boom")


def is_told(call: Callable[[], object]) -> None:
    with pytest.raises(ClosedError, match="its thread failed: BoomError") as caught:
        call()
    assert isinstance(caught.value.__cause__, BoomError)


def all_told(waiting: list[Callable[[], object]], break_: Callable[[], object]) -> None:
    """Have calls wait, break a thread, and see each of them end."""
    begun = [threading.Event() for _ in waiting]

    def run(number: int) -> object:
        begun[number].set()
        return waiting[number]()

    with ThreadPoolExecutor(len(waiting)) as pool:
        futures = [pool.submit(run, number) for number in range(len(waiting))]
        for event in begun:
            assert event.wait(SECONDS)
        break_()
        for future in futures:
            is_told(partial(future.result, SECONDS))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_of_a_publisher() -> None:
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(publisher.address, {"m": {"w": np.zeros(3, np.float32)}}) as subscriber,
    ):
        publisher.wait_for_workers(1, SECONDS)
        future: Future[Any] = publisher.publish_async("m", WEIGHTS, timeout=SECONDS)

        def break_() -> None:
            publisher._loop._machine.steps = boom  # type: ignore[method-assign] # noqa: SLF001 # pyright: ignore

        all_told(
            [lambda: publisher.wait_for_workers(2, SECONDS), lambda: future.result(SECONDS)], break_
        )
        for call in (
            lambda: publisher.publish("m", WEIGHTS),
            lambda: publisher.publish_async("m", WEIGHTS),
            lambda: publisher.prepare("m", WEIGHTS),
            lambda: publisher.workers(),
            lambda: publisher.wait_for_workers(1, SECONDS),
        ):
            is_told(call)
        del subscriber


def test_work_that_fails_in_the_publishers_thread_fails_whoever_waits_for_it() -> None:
    with Publisher(settings=Settings(shared_memory=False)) as publisher:
        publisher._loop._machine.status = boom  # type: ignore[method-assign] # noqa: SLF001 # pyright: ignore
        is_told(publisher.workers)


def test_a_condition_that_fails_ends_no_thread() -> None:
    with Publisher(settings=Settings(shared_memory=False)) as publisher:
        future = publisher._loop.watch(lambda *_: 1 // 0 > 0)  # noqa: SLF001 # pyright: ignore
        with pytest.raises(ZeroDivisionError):
            future.result(SECONDS)
        assert publisher.workers() == {}


def later(subscriber: Subscriber) -> None:
    for call in (
        lambda: subscriber.receive(SECONDS),
        lambda: subscriber.wait_joined(SECONDS),
        lambda: subscriber.wait_for_version("m", timeout=SECONDS),
        lambda: subscriber.reading().__enter__(),
        subscriber.start,
    ):
        is_told(call)
    assert "BoomError" in str(subscriber.error)


def test_of_a_subscriber() -> None:
    with Subscriber("tcp://127.0.0.1:1", {"m": {"w": np.zeros(3, np.float32)}}) as subscriber:

        def break_() -> None:
            subscriber._loop._machine.tick = boom  # type: ignore[method-assign] # noqa: SLF001 # pyright: ignore

        all_told(
            [
                lambda: subscriber.receive(SECONDS),
                lambda: subscriber.wait_joined(SECONDS),
                lambda: subscriber.wait_for_version("m", timeout=SECONDS),
            ],
            break_,
        )
        later(subscriber)


def test_of_the_thread_that_applies() -> None:
    with Subscriber("tcp://127.0.0.1:1", {"m": {"w": np.zeros(3, np.float32)}}) as subscriber:
        subscriber._applier.receive = boom  # type: ignore[method-assign] # noqa: SLF001 # pyright: ignore
        subscriber._background._log_and_keep = boom  # type: ignore[method-assign] # noqa: SLF001 # pyright: ignore
        waiting = lambda: subscriber.wait_for_version("m", timeout=SECONDS)  # noqa: E731
        all_told([waiting], lambda: subscriber.start())
        later(subscriber)


def test_closing_ends_waits_too() -> None:
    with Subscriber("tcp://127.0.0.1:1", {"m": WEIGHTS}) as subscriber:
        with ThreadPoolExecutor() as pool:
            future = pool.submit(lambda: subscriber.wait_for_version("m", timeout=SECONDS))
            subscriber.close()
            with pytest.raises(ClosedError, match="this subscriber is closed"):
                future.result(SECONDS)
        with subscriber.reading():
            pass  # the weights are still there
