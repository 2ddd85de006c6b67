"""Two threads meet: versions that are ready, and what else a user must learn."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from weightbus.bus.errors import ApplyError, ClosedError, RefusedError
from weightbus.bus.limits import MODELS_MAX
from weightbus.bus.net.handoff import Handoff, Turn
from weightbus.bus.staged import StagedVersion
from weightbus.codecs.layout import Layout

SECONDS = 10.0  # far more than anything here takes


def staged(model: str, version: int) -> StagedVersion:
    layout = Layout.plan([("w", "U8", (1,))])
    return StagedVersion(model, (1, version), layout, np.zeros(1, np.uint8), "0" * 64)


def rejected(version: int, model: str = "a") -> ApplyError:
    return ApplyError("no", model=model, epoch=1, version=version, code="layout-mismatch")


def test_a_newer_version_takes_the_place_of_an_older() -> None:
    handoff, one, two = Handoff(), staged("a", 1), staged("a", 2)
    assert handoff.put(one) is None
    assert handoff.put(two) is one
    assert handoff.take(0) is two
    assert handoff.take(0) is None


def test_models_take_turns() -> None:
    handoff = Handoff()
    handoff.put(staged("a", 1))
    handoff.put(staged("b", 1))
    handoff.put(staged("a", 2))
    taken = [handoff.take(0) for _ in range(2)]
    assert [(s.model, s.version) for s in taken if isinstance(s, StagedVersion)] == [
        ("b", 1),
        ("a", 2),
    ]


def test_whoever_waits_is_woken() -> None:
    handoff, version = Handoff(), staged("a", 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(handoff.take, SECONDS)
        handoff.put(version)
        assert waiting.result(SECONDS) is version


def test_whoever_waits_for_versions_sleeps_on_while_others_run() -> None:
    handoff, version, looks = Handoff(), staged("a", 1), threading.Semaphore(0)
    news = handoff._news  # noqa: SLF001 # pyright: ignore

    def look(models: frozenset[str] | None) -> bool:
        looks.release()
        return news(models)

    handoff._news = look  # type: ignore[method-assign] # noqa: SLF001 # pyright: ignore
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(handoff.take, SECONDS)
        assert looks.acquire(timeout=SECONDS)
        with handoff.changed:  # once it sleeps
            handoff.changed.notify_all()
        assert not looks.acquire(timeout=0.2)
        handoff.put(version)
        assert waiting.result(SECONDS) is version


def lent(handoff: Handoff, model: str = "a") -> Turn:
    """Return the turn of a thread that waits, or is about to."""
    turn: Turn | None = None
    while turn is None:
        turn = handoff.borrow(model)
    return turn


def test_a_turn_is_lent_to_one_other_thread_while_its_own_waits() -> None:
    handoff = Handoff()
    assert handoff.borrow("a") is None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(handoff.take, SECONDS, frozenset("a"))
        turn = lent(handoff)
        assert handoff.borrow("a") is None
        handoff.put(version := staged("a", 2))
        turn.end("applied")
        handoff.wake()
        assert waiting.result(SECONDS) is turn
    assert handoff.borrow("a") is None
    assert handoff.take(0) is version


def test_a_turn_is_lent_for_its_models_alone() -> None:
    handoff = Handoff()
    with ThreadPoolExecutor() as pool:
        some = pool.submit(handoff.take, SECONDS, frozenset("a"))
        turn = lent(handoff, "a")
        every = pool.submit(handoff.take, SECONDS)
        other = lent(handoff, "b")
        turn.end(1)
        other.end(2)
        handoff.wake()
        assert some.result(SECONDS) is turn
        assert every.result(SECONDS) is other


@pytest.mark.parametrize("why", ["its time is over", "it is to stop", "Ctrl-C"])
def test_a_thread_does_not_leave_while_another_has_its_turn(why: str) -> None:
    """The weights must not change once it is back; what came of the turn is not lost."""
    handoff, left = Handoff(), threading.Event()

    def stop() -> bool:
        if turns and why == "Ctrl-C":
            raise KeyboardInterrupt
        return bool(turns) and why == "it is to stop"

    def take() -> object:
        try:
            return handoff.take(SECONDS if why != "its time is over" else 0.5, stop=stop)
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            left.set()

    turns: list[Turn] = []
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take)
        turns.append(turn := lent(handoff))
        handoff.look()
        assert not left.wait(0.7)
        turn.end("applied")
        handoff.wake()
        assert waiting.result(SECONDS) is (turn if why != "Ctrl-C" else "interrupted")
    assert handoff.take(0) is (turn if why == "Ctrl-C" else None)


def test_whoever_waits_for_some_models_is_left_nothing_of_others() -> None:
    handoff, b = Handoff(), frozenset("b")
    handoff.put(staged("a", 1))
    handoff.reject(rejected(1))  # of another one
    assert handoff.take(0, b) is None
    handoff.put(version := staged("b", 1))
    assert handoff.take(0, b) is version
    assert handoff.take(0, frozenset("a")) is not None


def test_what_is_put_back_is_there_again_unless_a_newer_one_is() -> None:
    handoff, one, two = Handoff(), staged("a", 1), staged("a", 2)
    assert handoff.put_back(one)
    assert handoff.take(0) is one
    handoff.put(two)
    assert not handoff.put_back(one)
    assert handoff.take(0) is two


def test_a_rejection_is_raised_once_for_each_version() -> None:
    handoff = Handoff()
    handoff.reject(rejected(1))
    handoff.reject(rejected(1))
    handoff.reject(rejected(2))
    for version in (1, 2):
        with pytest.raises(ApplyError) as caught:
            handoff.take(0)
        assert caught.value.version == version
    assert handoff.take(0) is None


def test_that_a_version_is_gone_is_told_to_whoever_waits_for_it_and_to_nobody_later() -> None:
    handoff = Handoff()
    gone, other = (ApplyError("gone", model=m, epoch=1, version=2, code="gone") for m in "ab")
    handoff.reject(gone)
    assert handoff.take(0) is None
    with handoff.awaiting("a", (1, 2)):
        handoff.reject(gone)
        with pytest.raises(ApplyError, match="gone"):
            handoff.take_exact("a", (1, 2), 0, lambda: False)
    with handoff.awaiting("b", (1, 2)):  # another thread, which waits on
        with handoff.awaiting("a", (1, 2)):  # the time is over as it comes
            handoff.reject(gone)
            handoff.reject(rejected(3))
            handoff.reject(other)
        with pytest.raises(ApplyError, match="gone"):
            handoff.take_exact("b", (1, 2), 0, lambda: False)
    with pytest.raises(ApplyError) as caught:
        handoff.take(0)
    assert caught.value.version == 3
    assert handoff.take(0) is None


def test_a_version_goes_before_a_rejection() -> None:
    handoff = Handoff()
    handoff.reject(rejected(1))
    handoff.put(staged("a", 2))
    assert handoff.take(0) is not None


def test_rejections_do_not_pile_up() -> None:
    handoff = Handoff()
    for version in range(3 * MODELS_MAX):
        handoff.reject(rejected(version))
    with pytest.raises(ApplyError) as caught:
        handoff.take(0)
    assert caught.value.version == 2 * MODELS_MAX, "the oldest are forgotten"


def test_a_refusal_is_raised_until_the_worker_is_let_in() -> None:
    handoff = Handoff()
    handoff.refuse(RefusedError("taken", "name-taken"))
    for _ in range(2):
        with pytest.raises(RefusedError):
            handoff.take(0)
    with pytest.raises(RefusedError):
        handoff.wait_joined(0)
    handoff.join(7)
    assert handoff.take(0) is None
    assert handoff.wait_joined(0)


def test_what_was_ready_can_be_taken_after_the_end() -> None:
    handoff = Handoff()
    handoff.put(staged("a", 1))
    handoff.close(ClosedError("close() was called"))
    assert handoff.take(0) is not None
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"close\(\) was called"):
            handoff.take(SECONDS)


def test_the_end_wakes_everybody() -> None:
    handoff = Handoff()
    started = threading.Barrier(3)

    def wait(how: Callable[[float], object]) -> None:
        started.wait(SECONDS)
        with pytest.raises(ClosedError):
            how(SECONDS)

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(wait, how) for how in (handoff.take, handoff.wait_joined)]
        started.wait(SECONDS)
        handoff.close(RuntimeError("gone"))
        for future in waiting:
            future.result(SECONDS)
    assert handoff.wait_closed(0)


def test_nobody_waits_beyond_their_time() -> None:
    handoff = Handoff()
    assert handoff.take(0.01) is None
    assert not handoff.wait_joined(0.01)
    assert not handoff.wait_closed(0.01)
