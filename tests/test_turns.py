"""Who turns a loop: its own thread, or a guest that waits for it. And what Ctrl-C does then."""

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

import numpy as np
import pytest

import weightbus
from weightbus.bus.net import turns
from weightbus.bus.net.turns import Turns
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than anything here takes
MODEL = "a"


class Loop:
    """A loop that waits for a bell, and notes in which threads it was turned."""

    def __init__(self) -> None:
        self.rung, self.left = threading.Event(), False
        self.threads: list[str] = []
        self.work: Callable[[], None] = lambda: None
        self.turns = Turns(self.turn, self.rung.set, lambda: self.left)
        self.thread = threading.Thread(target=self._run, name="own", daemon=True)
        self.raised: BaseException | None = None

    def turn(self, until: float) -> None:
        self.rung.wait(min(0.1, max(0.0, until - time.monotonic())))
        self.rung.clear()
        self.threads.append(threading.current_thread().name)
        self.work()

    def _run(self) -> None:
        try:
            self.turns.run()
        except BaseException as error:
            self.raised = error


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    loop.thread.start()
    yield loop
    loop.turns.stop()
    loop.thread.join(SECONDS)
    assert not loop.thread.is_alive()


def until(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


def after(count: int, loop: Loop) -> Callable[[], bool]:
    """Return what says when a loop was turned so often from now on."""
    end = len(loop.threads) + count

    def there() -> bool:
        loop.rung.set()
        return len(loop.threads) >= end

    return there


def guest(loop: Loop, done: Callable[[], bool] = lambda: False, end: float = math.inf) -> bool:
    return loop.turns.wait(done, end)


def test_whoever_waits_turns_the_loop_and_its_own_thread_rests(loop: Loop) -> None:
    assert guest(loop, after(5, loop), until())
    assert loop.threads[-4:] == 4 * ["MainThread"]
    before = len(loop.threads)
    assert loop.turns.do(lambda: None), "who comes back soon finds nobody there"
    assert loop.threads[before:] == []
    wait_for(lambda: loop.threads[-1] == "own", "a turn", SECONDS)


def test_the_own_thread_goes_on_after_a_long_visit_too(loop: Loop) -> None:
    assert guest(loop, end=until(0.3))
    wait_for(lambda: loop.threads[-1] == "own", "a turn", SECONDS)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own thread waits for ever for a guest that may come back."""
    monkeypatch.setattr(turns, "PAUSE", threading.TIMEOUT_MAX)


@pytest.mark.usefixtures("patient")
def test_what_a_guest_leaves_undone_is_taken_up_at_once(loop: Loop) -> None:
    loop.left = True
    for _ in range(3):
        assert guest(loop, after(1, loop), until())
        wait_for(lambda: loop.threads[-1] == "own", "a turn", SECONDS)


def test_there_is_no_guest_before_the_own_thread_has_begun() -> None:
    loop = Loop()
    assert not guest(loop, end=until(0.02))
    assert loop.threads == []


def test_a_guest_is_gone_in_time(loop: Loop) -> None:
    before = time.monotonic()
    assert guest(loop, end=before + 0.02)
    assert time.monotonic() - before < 5


def test_a_second_guest_is_none(loop: Loop) -> None:
    with ThreadPoolExecutor(1, "first") as pool:
        leave = threading.Event()
        first = pool.submit(guest, loop, leave.is_set, until())
        wait_for(lambda: loop.threads[-1:] == ["first_0"], "a turn", SECONDS)
        assert not guest(loop, end=until())
        assert not loop.turns.do(lambda: None)
        leave.set()
        loop.turns.call()  # which a guest hears, too
        assert first.result(SECONDS)


@pytest.mark.usefixtures("patient")
def test_work_that_is_left_while_nobody_is_there_is_done(loop: Loop) -> None:
    for _ in range(20):
        assert guest(loop, after(1, loop), until())
        done = threading.Event()
        loop.work = done.set
        loop.turns.call()
        assert done.wait(SECONDS)
        loop.work = lambda: None


def test_a_turn_that_fails_at_a_guest_ends_the_loop(loop: Loop) -> None:
    failure = RuntimeError("at a guest")

    def fail() -> None:
        if threading.current_thread() is threading.main_thread():
            raise failure

    loop.work = fail
    assert guest(loop, end=until())
    loop.thread.join(SECONDS)
    assert loop.raised is failure
    assert not guest(loop, end=until()), "nobody turns a loop that has ended"


def test_a_loop_that_is_to_stop_has_its_guest_leave(loop: Loop) -> None:
    with ThreadPoolExecutor(1, "first") as pool:
        first = pool.submit(guest, loop, lambda: False, until())
        wait_for(lambda: loop.threads[-1:] == ["first_0"], "a turn", SECONDS)
        assert loop.turns.stop()
        assert not loop.turns.stop()
        assert first.result(SECONDS)


@contextmanager
def handler(number: int, of: Callable[[int, FrameType | None], object]) -> Generator[None]:
    before = signal.signal(number, of)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_ctrl_c_waits_for_the_end_of_a_turn(loop: Loop) -> None:
    steps: list[str] = []

    def work() -> None:
        if threading.current_thread() is threading.main_thread():
            steps.append("began")
            signal.raise_signal(signal.SIGINT)
            steps.append("ended")

    loop.work = work
    with handler(signal.SIGINT, signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt):
            guest(loop, end=until())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert steps == ["began", "ended"]
    assert loop.raised is None
    assert loop.thread.is_alive()
    wait_for(lambda: loop.threads[-1] == "own", "a turn", SECONDS)


def test_ctrl_c_ends_the_wait_of_a_guest(loop: Loop) -> None:
    told = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    told.start()
    with handler(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        guest(loop)  # which has no end
    told.join()


def test_every_handler_is_called_once_and_back_in_its_place(loop: Loop) -> None:
    called: list[int] = []

    def alarm(number: int, _frame: FrameType | None) -> None:
        called.append(number)
        raise TimeoutError("alarm")

    def work() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            assert called == []

    loop.work = work
    with handler(signal.SIGUSR1, alarm), handler(signal.SIGUSR2, lambda n, _: called.append(n)):
        with pytest.raises(TimeoutError, match="alarm"):
            guest(loop, end=until())
        assert called == [signal.SIGUSR1, signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR1) is alarm
        with pytest.raises(TimeoutError):
            signal.raise_signal(signal.SIGUSR1)
    assert loop.raised is None


# With real publishers and workers.


def test_ctrl_c_during_a_publish_leaves_a_publisher_that_goes_on() -> None:
    source, copy = {"w": np.ones(3)}, {"w": np.zeros(3)}
    with (
        weightbus.Publisher() as publisher,
        weightbus.Subscriber(publisher.address, {MODEL: copy}) as subscriber,
        handler(signal.SIGINT, signal.default_int_handler),
    ):
        publisher.wait_for_workers(1, SECONDS)
        told = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        told.start()
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(MODEL, source, timeout=SECONDS)  # nobody calls receive()
        told.join()
        assert subscriber.receive(SECONDS) is not None
        subscriber.start()
        source["w"] += 1
        receipt = publisher.publish(MODEL, source, timeout=SECONDS)
        assert [w.state for w in receipt.workers.values()] == ["applied"]
    assert copy["w"].tolist() == [2, 2, 2]


def test_publishes_of_many_threads_at_once() -> None:
    models = [f"m{i}" for i in range(4)]
    copies = {model: {"w": np.zeros(3)} for model in models}
    with (
        weightbus.Publisher() as publisher,
        weightbus.Subscriber(publisher.address, copies) as subscriber,
        ThreadPoolExecutor(len(models)) as pool,
    ):
        subscriber.start()
        publisher.wait_for_workers(1, SECONDS)

        def publish(model: str) -> bool:
            said = [publisher.publish(model, {"w": np.full(3, float(i))}) for i in range(1, 11)]
            return all(each.in_state("applied", "skipped") for each in said)

        assert all(pool.map(publish, models))
    assert all(copy["w"].tolist() == [10, 10, 10] for copy in copies.values())


def test_a_worker_between_two_calls_is_there_and_gets_what_comes() -> None:
    timing = weightbus.Timing(ping=0.1, lost_after=0.6)
    source, copy = {"w": np.ones(3)}, {"w": np.zeros(3)}
    with (
        weightbus.Publisher(timing=timing) as publisher,
        weightbus.Subscriber(publisher.address, {MODEL: copy}, timing=timing) as subscriber,
    ):
        publisher.wait_for_workers(1, SECONDS)
        first = publisher.publish_async(MODEL, source)
        assert subscriber.receive(SECONDS) is not None
        assert first.result(SECONDS).in_state("applied"), "it is said before receive() returns"
        subscriber.receive(0.2)  # a long visit, and nothing comes
        lost = threading.Event()
        publisher.on_worker(lambda event: lost.set() if event.kind == "lost" else None)
        assert not lost.wait(1.0), "its thread answers pings meanwhile"
        publisher.publish(MODEL, source, wait="staged", timeout=SECONDS)
        assert wait_for(lambda: subscriber.receive(0), "the version", SECONDS)
