"""The deadline of a publish holds while its weights are copied; a late copy is not published."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from weightbus import DeadlineError, Publisher, Settings
from weightbus.bus import deadline
from weightbus.bus.memory import pages, segment
from weightbus.codecs import copies
from weightbus.codecs.state import Writer

SECONDS = 60.0
BIG = 2**18


class Clock:
    """A clock that advances with each reading."""

    def __init__(self) -> None:
        self.now, self.step = time.monotonic(), 0.0

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadline, "time", clock)
    for module in (segment, pages, copies):
        monkeypatch.setattr(module, "STEP_BYTES", BIG // 8)
    return clock


def weights(kind: str, size: int = BIG) -> dict[str, object]:
    made = [np.full(size // 8, i, np.uint8) for i in range(8)]
    # Strided, so that the arrays are not contiguous.
    return {
        str(i): torch.from_numpy(a).reshape(-1, 2).t() if kind == "torch" else a.reshape(-1, 2).T
        for i, a in enumerate(made)
    }


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_while_memory_is_taken(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    with Publisher(settings=Settings(shared_memory=shared)) as publisher:
        monkeypatch.setattr(Writer, "write", lambda *_: pytest.fail("it went on"))
        clock.step = 1.0
        with pytest.raises(DeadlineError, match=r"copied within 6\.5 s, so nothing was published"):
            publisher.publish("m", weights("numpy"), timeout=6.5)
        clock.step = 0.0
        monkeypatch.undo()
        assert publisher.publish("m", weights("numpy")).version == 1, "the other was none"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_while_tensors_are_copied(clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    steps = list[int]()
    copy = copies._some  # noqa: SLF001 # pyright: ignore

    def counted(leaves: Any, indexes: Any) -> Any:
        steps.append(1)
        return copy(leaves, indexes)

    with Publisher(settings=Settings(shared_memory=False)) as publisher:
        assert publisher.publish("m", weights(kind)).version == 1
        monkeypatch.setattr(copies, "_some", counted)
        clock.step = 1.0
        with pytest.raises(DeadlineError):
            publisher.publish("m", weights(kind), timeout=6.5)
        assert 0 < len(steps) < 16, "it was begun, and not copied to the end"
        clock.step = 0.0
        assert publisher.publish("m", weights(kind)).version == 2


def test_while_another_thread_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        ThreadPoolExecutor() as pool,
    ):
        held, go_on = threading.Event(), threading.Event()
        kept = publisher._model("m")  # noqa: SLF001 # pyright: ignore
        describe = kept.describe

        def slow(*given: Any) -> object:
            held.set()
            assert go_on.wait(SECONDS)
            return describe(*given)

        monkeypatch.setattr(kept, "describe", slow)
        first = pool.submit(publisher.publish, "m", weights("numpy"))
        assert held.wait(SECONDS)
        with pytest.raises(DeadlineError):
            publisher.publish("m", weights("numpy"), timeout=0.01)
        go_on.set()
        assert first.result(SECONDS).version == 1
