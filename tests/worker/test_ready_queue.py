"""The queue between two threads: ready versions, errors and other news for the user."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from weightbus.bus.errors import ApplyError, ClosedError, RefusedError
from weightbus.bus.net.ready_queue import ReadyQueue, Waiter
from weightbus.bus.protocol_limits import MODELS_MAX
from weightbus.bus.staged import StagedVersion
from weightbus.codecs.layout import Layout

SECONDS = 10.0  # far more than any step here takes


def staged(model: str, version: int) -> StagedVersion:
    layout = Layout.plan([("w", "U8", (1,))])
    return StagedVersion(model, (1, version), layout, np.zeros(1, np.uint8), "0" * 64)


def rejected(version: int, model: str = "a") -> ApplyError:
    return ApplyError("no", model=model, epoch=1, version=version, code="layout-mismatch")


def test_a_newer_version_takes_the_place_of_an_older() -> None:
    ready_queue, one, two = ReadyQueue(), staged("a", 1), staged("a", 2)
    assert ready_queue.put(one) == []
    assert ready_queue.put(two) == [one]
    assert ready_queue.take(0) is two
    assert ready_queue.take(0) is None


def test_models_take_turns() -> None:
    ready_queue = ReadyQueue()
    ready_queue.put(staged("a", 1))
    ready_queue.put(staged("b", 1))
    ready_queue.put(staged("a", 2))
    taken = [ready_queue.take(0) for _ in range(2)]
    assert [(s.model, s.version) for s in taken if isinstance(s, StagedVersion)] == [
        ("b", 1),
        ("a", 2),
    ]


def test_whoever_waits_is_woken() -> None:
    ready_queue, version = ReadyQueue(), staged("a", 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ready_queue.take, SECONDS)
        ready_queue.put(version)
        assert waiting.result(SECONDS) is version


def test_whoever_waits_for_versions_sleeps_on_while_others_run() -> None:
    ready_queue, version, looks = ReadyQueue(), staged("a", 1), threading.Semaphore(0)
    news = ready_queue._has_news  # noqa: SLF001 # pyright: ignore

    def look(models: frozenset[str] | None) -> bool:
        looks.release()
        return news(models)

    ready_queue._has_news = look  # type: ignore[method-assign] # noqa: SLF001 # pyright: ignore
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ready_queue.take, SECONDS)
        assert looks.acquire(timeout=SECONDS)
        with ready_queue.changed:  # once the thread sleeps
            ready_queue.changed.notify_all()
        assert not looks.acquire(timeout=0.2)
        ready_queue.put(version)
        assert waiting.result(SECONDS) is version


def claimed(ready_queue: ReadyQueue, model: str = "a") -> Waiter:
    """Return the waiter of a thread that waits, or is about to wait."""
    waiter: Waiter | None = None
    while waiter is None:
        waiter = ready_queue.claim(model)
    return waiter


def test_a_turn_is_lent_to_one_other_thread_while_its_own_waits() -> None:
    ready_queue = ReadyQueue()
    assert ready_queue.claim("a") is None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ready_queue.take, SECONDS, frozenset("a"))
        waiter = claimed(ready_queue)
        assert ready_queue.claim("a") is None
        ready_queue.put(version := staged("a", 2))
        waiter.end("applied")
        ready_queue.wake()
        assert waiting.result(SECONDS) is waiter
    assert ready_queue.claim("a") is None
    assert ready_queue.take(0) is version


def test_a_turn_is_lent_for_its_models_alone() -> None:
    ready_queue = ReadyQueue()
    with ThreadPoolExecutor() as pool:
        some = pool.submit(ready_queue.take, SECONDS, frozenset("a"))
        waiter = claimed(ready_queue, "a")
        every = pool.submit(ready_queue.take, SECONDS)
        other = claimed(ready_queue, "b")
        waiter.end(1)
        other.end(2)
        ready_queue.wake()
        assert some.result(SECONDS) is waiter
        assert every.result(SECONDS) is other


@pytest.mark.parametrize("why", ["its time is over", "it is to stop", "Ctrl-C"])
def test_a_thread_does_not_leave_while_another_has_its_turn(why: str) -> None:
    """The weights must not change after `take` has ended; the result of the apply is not lost."""
    ready_queue, left = ReadyQueue(), threading.Event()

    def stop() -> bool:
        if waiters and why == "Ctrl-C":
            raise KeyboardInterrupt
        return bool(waiters) and why == "it is to stop"

    def take() -> object:
        try:
            return ready_queue.take(SECONDS if why != "its time is over" else 0.5, stop=stop)
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            left.set()

    waiters: list[Waiter] = []
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take)
        waiters.append(waiter := claimed(ready_queue))
        ready_queue.wake_all()
        assert not left.wait(0.7)
        waiter.end("applied")
        ready_queue.wake()
        assert waiting.result(SECONDS) is (waiter if why != "Ctrl-C" else "interrupted")
    assert ready_queue.take(0) is (waiter if why == "Ctrl-C" else None)


def test_the_result_of_an_interrupted_call_is_for_a_call_of_its_model() -> None:
    ready_queue, a = ReadyQueue(), frozenset("a")
    results: list[Future[StagedVersion]] = [Future() for _ in range(3)]
    results[0].set_result(staged("b", 1))
    results[1].set_result(staged("a", 1))
    results[2].set_exception(rejected(2))
    for result in results:
        ready_queue.keep(result)
    first, second = (ready_queue.take(0, a) for _ in range(2))
    assert isinstance(first, Waiter)
    assert first.update is results[1].result()
    assert isinstance(second, Waiter)
    assert second.error is results[2].exception()
    assert ready_queue.take(0, a) is None
    other = ready_queue.take(0)
    assert isinstance(other, Waiter)
    assert other.update is results[0].result()


def test_whoever_waits_for_some_models_is_left_nothing_of_others() -> None:
    ready_queue, b = ReadyQueue(), frozenset("b")
    ready_queue.put(staged("a", 1))
    ready_queue.reject(rejected(1))  # the error of another version
    assert ready_queue.take(0, b) is None
    ready_queue.put(version := staged("b", 1))
    assert ready_queue.take(0, b) is version
    assert ready_queue.take(0, frozenset("a")) is not None


def test_what_is_put_back_is_there_again_unless_a_newer_one_is() -> None:
    ready_queue, one, two = ReadyQueue(), staged("a", 1), staged("a", 2)
    assert ready_queue.put_back(one) == []
    assert ready_queue.take(0) is one
    ready_queue.put(two)
    assert ready_queue.put_back(one) == [one]
    assert ready_queue.take(0) is two


def test_a_rejection_is_raised_once_for_each_version() -> None:
    ready_queue = ReadyQueue()
    ready_queue.reject(rejected(1))
    ready_queue.reject(rejected(1))
    ready_queue.reject(rejected(2))
    for version in (1, 2):
        with pytest.raises(ApplyError) as caught:
            ready_queue.take(0)
        assert caught.value.version == version
    assert ready_queue.take(0) is None


def test_that_a_version_is_gone_is_told_to_whoever_waits_for_it_and_to_nobody_later() -> None:
    ready_queue = ReadyQueue()
    gone, other = (ApplyError("gone", model=m, epoch=1, version=2, code="gone") for m in "ab")
    ready_queue.reject(gone)
    assert ready_queue.take(0) is None
    with ready_queue.awaiting("a", (1, 2)):
        ready_queue.reject(gone)
        with pytest.raises(ApplyError, match="gone"):
            ready_queue.take_exact("a", (1, 2), 0, lambda: False)
    with ready_queue.awaiting("b", (1, 2)):  # another thread, which continues to wait
        with ready_queue.awaiting("a", (1, 2)):  # the error comes as the time is over
            ready_queue.reject(gone)
            ready_queue.reject(rejected(3))
            ready_queue.reject(other)
        with pytest.raises(ApplyError, match="gone"):
            ready_queue.take_exact("b", (1, 2), 0, lambda: False)
    with pytest.raises(ApplyError) as caught:
        ready_queue.take(0)
    assert caught.value.version == 3
    assert ready_queue.take(0) is None


def test_a_version_goes_before_a_rejection() -> None:
    ready_queue = ReadyQueue()
    ready_queue.reject(rejected(1))
    ready_queue.put(staged("a", 2))
    assert ready_queue.take(0) is not None


def test_rejections_do_not_pile_up() -> None:
    ready_queue = ReadyQueue()
    for version in range(3 * MODELS_MAX):
        ready_queue.reject(rejected(version))
    with pytest.raises(ApplyError) as caught:
        ready_queue.take(0)
    assert caught.value.version == 2 * MODELS_MAX, "the oldest are forgotten"


def test_a_refusal_is_raised_until_the_worker_is_let_in() -> None:
    ready_queue = ReadyQueue()
    ready_queue.refuse(RefusedError("taken", "name-taken"))
    for _ in range(2):
        with pytest.raises(RefusedError):
            ready_queue.take(0)
    with pytest.raises(RefusedError):
        ready_queue.wait_joined(0)
    ready_queue.join(7)
    assert ready_queue.take(0) is None
    assert ready_queue.wait_joined(0)


def test_what_was_ready_can_be_taken_after_the_end() -> None:
    ready_queue = ReadyQueue()
    ready_queue.put(staged("a", 1))
    ready_queue.close(ClosedError("close() was called"))
    assert ready_queue.take(0) is not None
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"close\(\) was called"):
            ready_queue.take(SECONDS)


def test_the_end_wakes_everybody() -> None:
    ready_queue = ReadyQueue()
    started = threading.Barrier(3)

    def wait(how: Callable[[float], object]) -> None:
        started.wait(SECONDS)
        with pytest.raises(ClosedError):
            how(SECONDS)

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(wait, how) for how in (ready_queue.take, ready_queue.wait_joined)]
        started.wait(SECONDS)
        ready_queue.close(RuntimeError("gone"))
        for future in waiting:
            future.result(SECONDS)
    assert ready_queue.wait_closed(0)


def test_nobody_waits_beyond_their_time() -> None:
    ready_queue = ReadyQueue()
    assert ready_queue.take(0.01) is None
    assert not ready_queue.wait_joined(0.01)
    assert not ready_queue.wait_closed(0.01)
