"""The publisher's receipts and its roster have the workers behind relays, over real sockets."""

from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher, PublishError, Settings, Subscriber
from weightbus.python_client.cli.status import shortfall
from weightbus.python_client.observing.observer import Observer
from weightbus.python_client.relay import Relay
from weightbus.tests.compose.waiting import wait_for

SECONDS = 60.0  # far more than anything here takes
SOON = Settings(ping=0.1, lost_after=1.0, shared_memory=False)
SIZE = 3 * 2**18  # numbers of a version of three chunks


def arrays(value: float, size: int = SIZE) -> dict[str, Any]:
    return {"w": np.full(size, value, np.float32)}


class Tree:
    """A publisher, relays a and b, relay c behind b, and workers of which `applying` apply."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.publisher = stack.enter_context(Publisher(settings=SOON))
        self.relays = {"a": self.relay("a", self.publisher), "b": self.relay("b", self.publisher)}
        self.relays["c"] = self.relay("c", self.relays["b"])
        self.targets: dict[str, dict[str, Any]] = {}

    def relay(self, name: str, above: Publisher | Relay) -> Relay:
        relay = Relay(above.address, "tcp://127.0.0.1:0", ["m"], name=name, settings=SOON)
        return self._stack.enter_context(relay)

    def worker(self, name: str, at: str, *, size: int = SIZE) -> Subscriber:
        target = self.targets[name] = arrays(0, size)
        above = self.relays[at] if at else self.publisher
        worker = Subscriber(above.address, {"m": target}, name=name, settings=SOON)
        self._stack.enter_context(worker).start()
        return worker

    def values(self) -> dict[str, float]:
        return {name: float(target["w"][0]) for name, target in self.targets.items()}

    def here(self, *names: str) -> None:
        """Wait until the publisher knows workers of these names, and no others."""

        def known() -> bool:
            status = self.publisher.workers().values()
            live = {w.name for w in status if w.state == "live" and not w.relay}
            return live == {*names}

        wait_for(known, f"workers {names}", SECONDS)


@pytest.fixture
def tree() -> Generator[Tree]:
    with ExitStack() as stack:
        yield Tree(stack)


def test_a_receipt_names_every_worker_and_its_relays(tree: Tree) -> None:
    places = {"w": "", "x": "a", "y": "b", "z": "c"}
    for name, at in places.items():
        tree.worker(name, at)
    receipt = tree.publisher.publish("m", arrays(1), expect=4, timeout=SECONDS)
    assert receipt.in_state("applied") == [*places]
    assert tree.values() == dict.fromkeys(places, 1)
    through = {name: worker.through for name, worker in receipt.workers.items()}
    assert through == {"w": (), "x": ("a",), "y": ("b",), "z": ("b", "c")}
    assert "z applied" in str(receipt)
    assert "through b and c" in str(receipt)
    status = tree.publisher.workers()
    assert {n: status[n].through for n in status if status[n].relay} == {
        "a": (),
        "b": (),
        "c": ("b",),
    }


def test_a_commit_counts_the_workers_behind_relays(tree: Tree) -> None:
    for name, at in (("x", "a"), ("z", "c")):
        tree.worker(name, at)
    tree.here("x", "z")
    receipt = tree.publisher.publish("m", arrays(1), commit="together", timeout=SECONDS)
    assert receipt.in_state("applied") == ["x", "z"]
    tree.worker("y", "b", size=10)  # fails: it has another shape
    tree.here("x", "y", "z")
    with pytest.raises(PublishError, match="y failed"):
        tree.publisher.publish("m", arrays(2), commit="together", timeout=SECONDS)
    assert tree.values() == {"x": 1, "z": 1, "y": 0}


def test_named_workers_behind_relays_get_a_version_that_others_do_not(tree: Tree) -> None:
    for name, at in (("x", "a"), ("y", "b"), ("z", "c"), ("v", "c")):
        tree.worker(name, at)
    tree.here("v", "x", "y", "z")
    tree.publisher.publish("m", arrays(1), timeout=SECONDS)
    receipt = tree.publisher.publish("m", arrays(2), workers=["x", "z"], timeout=SECONDS)
    assert receipt.in_state("applied") == ["x", "z"]
    assert tree.values() == {"x": 2, "z": 2, "y": 1, "v": 1}
    receipt = tree.publisher.publish("m", arrays(3), timeout=SECONDS)
    assert receipt.in_state("applied") == ["v", "x", "y", "z"]


def test_a_worker_that_goes_to_another_relay_is_counted_once(tree: Tree) -> None:
    worker = tree.worker("x", "a")
    tree.here("x")
    worker.close()
    tree.here()
    tree.worker("x", "c")
    tree.here("x")
    receipt = tree.publisher.publish("m", arrays(1), expect=1, timeout=SECONDS)
    assert receipt.workers["x"].through == ("b", "c")


def test_the_workers_of_a_closed_relay_are_lost_and_named(tree: Tree) -> None:
    for name, at in (("x", "a"), ("z", "c")):
        tree.worker(name, at)
    tree.here("x", "z")
    tree.relays["b"].close()
    tree.here("x")
    lost = tree.publisher.workers()["z"]
    assert (lost.state, lost.through) == ("lost", ("b", "c"))
    receipt = tree.publisher.publish("m", arrays(1), timeout=SECONDS)
    assert receipt.in_state("applied") == ["x"]


def test_observers_see_the_relays_and_the_workers_behind_them(tree: Tree) -> None:
    tree.worker("x", "a")
    tree.worker("z", "c")
    tree.here("x", "z")
    tree.publisher.publish("m", arrays(1), timeout=SECONDS)
    with Observer(tree.publisher.address) as observer:

        def seen() -> dict[str, str]:
            assert observer.look(SECONDS)
            return {s.worker: s.way for s in observer.view.standings(0.0) if s.version == 1}

        ways = {
            "a": "pushed (relay)",
            "b": "pushed (relay)",
            "c": "pushed via b (relay)",
            "x": "pushed via a",
            "z": "pushed via b > c",
        }
        wait_for(lambda: seen() == ways, "all run it", SECONDS)
        standings = observer.view.standings(0.0)
        assert shortfall(observer.view, standings, expect=2) == ""
        assert "2 of 3 workers" in shortfall(observer.view, standings, expect=3)
