"""Applying decides the acknowledgement, the user's part of it included.

What fails before a byte has changed leaves the old version running. What fails later does, too,
where the old bytes can be put back. Where they cannot, no version runs, everybody is told so, and
the next version that is applied mends it, the same one included.
"""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from weightbus import ApplyError, Publisher, Settings, Subscriber, TornError
from weightbus.bus.protocol_limits import APPLIES_MAX
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays, both
from weightbus.types import Offer, Receipt, Update

QUICK = Settings(ping=0.05, lost_after=SECONDS)


class Hook:
    """A hook that fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.seen = failures, list[int]()

    def __call__(self, version: Update | Offer) -> None:
        self.seen.append(version.version)
        if self.failures:
            self.failures -= 1
            raise KeyError("mine")


def refused(publisher: Publisher, subscriber: Subscriber, value: float) -> tuple[Receipt, str]:
    """Publish what this subscriber fails to apply; return the receipt and what it raises."""
    future = publisher.publish_async("m", arrays(value), require=0, timeout=SECONDS)
    with pytest.raises(ApplyError, match="mine") as caught:
        subscriber.receive(SECONDS)
    assert isinstance(caught.value.__cause__, KeyError)
    receipt = future.result(SECONDS)
    assert receipt.in_state("failed") == ["w"]
    assert "apply: KeyError" in receipt.workers["w"].detail
    return receipt, type(caught.value).__name__


def runs(publisher: Publisher) -> tuple[int, int] | None:
    """Return what the publisher believes that the worker runs."""
    return publisher.workers()["w"].running.get("m")


def test_a_veto_leaves_the_old_version_running(bus: Bus) -> None:
    publisher, target, veto = bus.publisher(), arrays(0), Hook()
    subscriber = bus.subscriber(publisher, target, name="w", before_apply=veto)
    first, _ = both(publisher, subscriber, arrays(1))
    veto.failures = 1
    receipt, raised = refused(publisher, subscriber, 2)
    assert raised == "ApplyError"
    assert "runs no version" not in receipt.workers["w"].detail
    with subscriber.reading(0):
        assert target["w"][0] == 1
    assert subscriber.version("m") == 1
    assert runs(publisher) == (first.epoch, 1)
    both(publisher, subscriber, arrays(3))
    assert veto.seen == [1, 2, 3], "what was refused is not offered again"


def test_a_veto_sees_the_new_bytes_while_readers_go_on_with_the_old(bus: Bus) -> None:
    publisher, target, seen = bus.publisher(), arrays(0), list[float]()

    def look(offer: Offer) -> None:
        new = offer.arrays()["w"]
        assert not new.flags.writeable
        assert (offer.nbytes, offer.model) == (new.nbytes, "m")
        with ThreadPoolExecutor() as pool:
            seen.extend((float(new[0]), float(pool.submit(read).result(SECONDS))))

    def read() -> float:
        with subscriber.reading(0):
            return float(target["w"][0])

    subscriber = bus.subscriber(publisher, target, before_apply=look)
    both(publisher, subscriber, arrays(1))
    assert seen == [1.0, 0.0]


def test_a_hook_that_raises_leaves_no_version_until_the_next(bus: Bus) -> None:
    publisher, target, hook = bus.publisher(), arrays(0), Hook()
    subscriber = bus.subscriber(publisher, target, name="w", on_commit=hook)
    both(publisher, subscriber, arrays(1))
    hook.failures = 1
    receipt, raised = refused(publisher, subscriber, 2)
    assert raised == "TornError"
    assert "runs no version" in receipt.workers["w"].detail
    with pytest.raises(TornError, match="version 2 could not be applied, and no version runs"):
        subscriber.reading(0).__enter__()
    assert (subscriber.update("m"), subscriber.version("m"), runs(publisher)) == (None, 0, None)
    assert subscriber.wait_for_version("m", timeout=0) is None
    future = publisher.publish_async("m", arrays(3), timeout=SECONDS)
    while (update := subscriber.receive(SECONDS)) is not None and update.version < 3:
        assert update.version == 2, "it has come again, by the network"
    done = future.result(SECONDS)
    with subscriber.reading(0):
        assert target["w"][0] == 3
    assert runs(publisher) == (done.epoch, 3)


def test_the_same_version_mends_it(bus: Bus) -> None:
    """It is tried again by itself: what failed may have passed."""
    publisher, target, hook = bus.publisher(settings=QUICK), arrays(0), Hook(failures=2)
    subscriber = bus.subscriber(publisher, target, name="w", on_commit=hook, settings=QUICK)
    subscriber.start()
    publisher.publish_async("m", arrays(1), require=0, timeout=SECONDS)
    assert subscriber.wait_for_version("m", 1, timeout=SECONDS)
    assert hook.seen == [1, 1, 1]
    with subscriber.reading(SECONDS):
        assert target["w"][0] == 1


def test_it_is_not_tried_for_ever(bus: Bus) -> None:
    publisher, hook = bus.publisher(settings=QUICK), Hook(failures=100)
    subscriber = bus.subscriber(publisher, arrays(0), on_commit=hook, settings=QUICK)
    publisher.publish("m", arrays(1), require=0, settings=Settings(wait="none"))
    for _ in range(APPLIES_MAX):
        with pytest.raises(TornError):
            subscriber.receive(SECONDS)
    assert subscriber.receive(5 * QUICK.ping) is None
    assert hook.seen == [1] * APPLIES_MAX


class Fragile(nn.Module):
    """A module whose user state fails to be set, once the weights of others may be in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.state, self.fails = torch.zeros(1), False

    def get_extra_state(self) -> torch.Tensor:
        return self.state

    def set_extra_state(self, state: torch.Tensor) -> None:
        if self.fails:
            raise KeyError("mine")
        self.state = state


def test_a_users_apply_that_fails_half_way(bus: Bus) -> None:
    publisher, target = bus.publisher(), Fragile()
    subscriber = bus.subscriber(publisher, target, name="w")
    both(publisher, subscriber, Fragile())
    target.fails = True
    publisher.publish("m", Fragile(), require=0, settings=Settings(wait="none"))
    with pytest.raises(TornError, match="mine"):
        subscriber.receive(SECONDS)
    assert subscriber.version("m") == 0


def test_what_fails_before_anything_is_written_leaves_the_version(bus: Bus) -> None:
    """The target has changed its shape since it was looked at."""
    publisher, target = bus.publisher(), arrays(0)
    whole = target["w"]

    def change(offer: Offer) -> None:
        if offer.version == 2:
            target["w"] = np.zeros(3, np.float32)

    subscriber = bus.subscriber(publisher, target, name="w", before_apply=change)
    both(publisher, subscriber, arrays(1))
    future = publisher.publish_async("m", arrays(2), require=0, timeout=SECONDS)
    with pytest.raises(ApplyError, match="shape") as caught:
        subscriber.receive(SECONDS)
    assert not isinstance(caught.value, TornError)
    assert future.result(SECONDS).in_state("failed") == ["w"]
    assert (whole.min(), whole.max(), subscriber.version("m")) == (1, 1, 1)
    target["w"] = whole
    both(publisher, subscriber, arrays(3))
    assert whole[0] == 3


def test_a_file_gets_its_old_content_back(bus: Bus, tmp_path: Path) -> None:
    path, hook = tmp_path / "m.safetensors", Hook(failures=1)
    publisher = bus.publisher()
    subscriber = bus.subscriber(publisher, path, name="w", on_commit=hook)
    assert refused(publisher, subscriber, 1)[1] == "ApplyError"
    assert not path.exists(), "there was none before"
    first, _ = both(publisher, subscriber, arrays(2))
    hook.failures = 1
    assert refused(publisher, subscriber, 3)[1] == "ApplyError"
    assert load_file(path)["w"][0] == 2
    assert runs(publisher) == (first.epoch, 2)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_put_back(bus: Bus, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def remove(_update: Update) -> None:
        shutil.rmtree(folder)
        raise KeyError("mine")

    publisher, fails = bus.publisher(), list[Any]()
    subscriber = bus.subscriber(
        publisher, folder / "m", name="w", on_commit=lambda u: [f(u) for f in fails]
    )
    both(publisher, subscriber, arrays(1))
    fails.append(remove)
    assert refused(publisher, subscriber, 2)[1] == "TornError"
    assert (subscriber.version("m"), runs(publisher)) == (0, None)


def test_a_copy_that_was_overwritten_is_torn() -> None:
    """Somebody has written into the segment while it was locked: no version runs, and a new one
    comes over the network."""
    bus = Bus(shared_memory=True)
    publisher, hook = bus.publisher(), Hook()
    target = arrays(0)
    subscriber = bus.subscriber(publisher, target, name="w", on_commit=hook, settings=QUICK)
    both(publisher, subscriber, arrays(1))
    [block] = publisher._models["m"].pool._blocks  # noqa: SLF001 # pyright: ignore
    kept: Any = block._segment  # noqa: SLF001 # pyright: ignore
    copy = subscriber._targets["m"].apply  # noqa: SLF001 # pyright: ignore
    breaks = [True]

    def apply(staged: Any) -> None:
        copy(staged)
        if breaks.pop():
            breaks.append(False)
            kept._memory[24:32] = bytes(8)  # noqa: SLF001 # pyright: ignore
        else:
            breaks.append(False)

    subscriber._targets["m"].apply = apply  # type: ignore[method-assign] # noqa: SLF001 # pyright: ignore
    publisher.publish("m", arrays(2), settings=Settings(wait="none"))
    with pytest.raises(TornError, match="written to while it was copied"):
        subscriber.receive(SECONDS)
    assert subscriber.version("m") == 0
    update = subscriber.receive(SECONDS)
    assert update is not None
    assert update.digest, "it came over the network"
    assert (target["w"][0], update.version) == (2, 2)
    bus.close()


def test_a_hung_hook_is_named_by_both_sides(bus: Bus) -> None:
    publisher, go_on, hangs = bus.publisher(settings=QUICK), threading.Event(), threading.Event()

    def hang(_update: Update) -> None:
        hangs.set()
        go_on.wait(SECONDS)

    subscriber = bus.subscriber(publisher, arrays(0), name="w", on_commit=hang, settings=QUICK)
    subscriber.start()
    publisher.publish("m", arrays(1), settings=Settings(wait="none"))
    assert hangs.wait(SECONDS)
    text = r"applying m version 1 in thread weightbus-apply for \d"
    with pytest.raises(TimeoutError, match=text):
        subscriber.reading(0.01).__enter__()
    publisher.publish(
        "m", arrays(2), settings=Settings(wait="none")
    )  # what becomes ready behind it hides nothing
    future = publisher._loop.watch(  # noqa: SLF001 # pyright: ignore
        lambda machine, now: any(
            "applying version 1" in w.phase.get("m", "") for w in machine.status(now)
        )
    )
    future.result(SECONDS)
    go_on.set()
    assert subscriber.wait_for_version("m", 2, timeout=SECONDS)
