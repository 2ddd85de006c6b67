"""The user's part of applying has a deadline: what has not returned by then has failed.

The publisher and readers are told at once, though nobody can end the call; what it returns later
counts for nothing, and the next version is applied then.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from weightbus import ApplyError, Settings, Subscriber, TornError
from weightbus.python_client.applying.calls import Calls, OverdueError
from weightbus.tests.client.test_apply import runs
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays
from weightbus.types import Offer, Pairs, Update

QUICK = Settings(ping=0.05, lost_after=SECONDS)
DEADLINE = 0.2


class Hang:
    """The user's code, which hangs at version 2 until it may go on."""

    def __init__(self) -> None:
        self.hangs, self.go_on = threading.Event(), threading.Event()
        self.seen: list[int] = []

    def __call__(self, version: Update | Offer | Pairs) -> None:
        self.seen.append(version.version)
        if version.version == 2:
            self.hangs.set()
            self.go_on.wait(SECONDS)


Read = Callable[[], float]


def scene(kind: str, hang: Hang, folder: Path) -> tuple[object, dict[str, object], Read]:
    """Return a target, hooks, and what reads the value that runs."""
    file, array, loaded = folder / "m", arrays(0), arrays(0)

    def load(pairs: Pairs) -> None:
        hang(pairs)
        loaded.update((name, array.copy()) for name, array in pairs.arrays())

    match kind:
        case "hook in place":
            return array, {"on_commit": hang}, lambda: float(array["w"][0])
        case "hook of a file":
            return file, {"on_commit": hang}, lambda: float(load_file(file)["w"][0])
        case "veto":
            return array, {"before_apply": hang}, lambda: float(array["w"][0])
        case _:
            return load, {}, lambda: float(loaded["w"][0])


@pytest.mark.parametrize("kind", ["hook in place", "hook of a file", "veto", "function"])
def test_what_does_not_return_has_failed(bus: Bus, kind: str, tmp_path: Path) -> None:
    hang = Hang()
    publisher = bus.publisher(settings=QUICK)
    target, hooks, value = scene(kind, hang, tmp_path)
    subscriber = bus.subscriber(
        publisher, target, name="w", settings=QUICK, apply_timeout=DEADLINE, **hooks
    )
    subscriber.start()
    first = publisher.publish("m", arrays(1), timeout=SECONDS)
    receipt = publisher.publish_async("m", arrays(2), require=0, timeout=SECONDS).result(SECONDS)
    assert receipt.in_state("failed") == ["w"]
    detail = receipt.workers["w"].detail
    assert f"did not return within {DEADLINE} s" in detail
    assert (receipt.workers["w"].seconds or 0.0) >= DEADLINE
    intact = kind in ("hook of a file", "veto")
    assert ("runs no version" in detail) != intact
    assert runs(publisher) == ((first.epoch, 1) if intact else None)
    assert subscriber.version("m") == (1 if intact else 0)
    if intact:  # nobody writes to what is in memory
        with subscriber.reading(0):
            assert value() == 1
    else:
        with pytest.raises(TornError, match="did not return within"):
            subscriber.reading(SECONDS).__enter__()
    third = publisher.publish_async("m", arrays(3), timeout=SECONDS)
    assert publisher.workers()["w"].state == "live"
    assert hang.seen == [1, 2], "no other version meanwhile"
    hang.go_on.set()
    assert third.result(SECONDS).in_state("applied") == ["w"]
    assert value() == 3
    with subscriber.reading(SECONDS):
        assert runs(publisher) == (first.epoch, 3)
    assert "did not return within" in str(subscriber.error)


def test_what_returns_too_late_raises_where_it_was_called(bus: Bus) -> None:
    """Also if it raises: what was told stands."""
    publisher, told = bus.publisher(settings=QUICK), threading.Event()

    def hang(_update: Update) -> None:
        assert told.wait(SECONDS)
        raise KeyError("mine")

    subscriber = bus.subscriber(
        publisher, arrays(0), name="w", settings=QUICK, on_commit=hang, apply_timeout=DEADLINE
    )
    future = publisher.publish_async("m", arrays(1), require=0, timeout=SECONDS)
    future.add_done_callback(lambda _: told.set())
    with pytest.raises(TornError, match="did not return within"):
        subscriber.receive(SECONDS)
    assert future.result(0).in_state("failed") == ["w"]


def test_closing_does_not_wait_for_it(bus: Bus) -> None:
    publisher, hang = bus.publisher(), Hang()
    subscriber = bus.subscriber(publisher, arrays(0), on_commit=hang, apply_timeout=SECONDS)
    subscriber.start()
    publisher.publish("m", arrays(1), timeout=SECONDS)
    publisher.publish("m", arrays(2), require=0, settings=Settings(wait="none"))
    assert hang.hangs.wait(SECONDS)
    closing = threading.Thread(target=subscriber.close)
    closing.start()
    closing.join(SECONDS / 2)
    assert not closing.is_alive()
    hang.go_on.set()


class Stateful(nn.Module):
    """A small module with the user's code in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.threads: list[str] = []

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        del state
        self.threads.append(threading.current_thread().name)


def test_the_users_code_never_runs_where_pings_are_answered(bus: Bus) -> None:
    publisher, module = bus.publisher(), Stateful()
    subscriber = bus.subscriber(publisher, module)
    subscriber.start()
    publisher.publish("m", Stateful(), timeout=SECONDS)
    assert module.threads == ["weightbus-apply"]


@pytest.mark.parametrize("seconds", [0, -1, None, float("inf"), float("nan"), 86_401, True])
def test_a_deadline_is_a_day_at_most(seconds: object) -> None:
    with pytest.raises(ValueError, match=r"apply_timeout=.* above 0 to 86400"):
        Subscriber("tcp://127.0.0.1:1", {"m": arrays(0)}, settings=Settings(apply_timeout=seconds))  # type: ignore[arg-type] # pyright: ignore


def error_of(told: str) -> ApplyError:
    return ApplyError(told, model="m", epoch=1, version=1, code="apply")


def test_a_call_in_time_is_left_alone() -> None:
    calls, seen = Calls(SECONDS), list[bool]()

    def work() -> None:
        calls.look()
        seen.append(calls.under_way)

    calls.make(work, lambda: error_of("no"))
    assert (seen, calls.under_way) == ([True], False)


def test_what_is_raised_in_time_goes_its_way() -> None:
    calls = Calls(SECONDS)

    def work() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        calls.make(work, lambda: error_of("no"))
    assert not calls.under_way


def test_a_call_is_given_up_once_and_whatever_it_does_is_late() -> None:
    calls, given_up = Calls(1e-9), list[str]()

    def give_up() -> ApplyError:
        given_up.append(threading.current_thread().name)
        return error_of("late")

    def work() -> None:
        for _ in range(3):
            calls.look()
        raise KeyError

    with pytest.raises(OverdueError) as caught:
        calls.make(work, give_up)
    assert (str(caught.value.failure), given_up) == ("late", ["weightbus-overdue"])
    assert isinstance(caught.value.__cause__, KeyError)


def test_where_no_thread_can_be_started_it_is_given_up_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(1e-9)

    def work() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", _full)
            calls.look()
        calls.look()

    with pytest.raises(OverdueError):
        calls.make(work, lambda: error_of("late"))


def _full(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_interrupt_goes_its_way_however_late() -> None:
    calls = Calls(1e-9)

    def work() -> None:
        calls.look()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calls.make(work, lambda: error_of("late"))
    assert not calls.under_way
