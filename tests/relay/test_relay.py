"""Relays between a publisher and workers over real sockets."""

from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import AddressError, Publisher, PublishError, Settings, Subscriber
from weightbus.bus.publisher.version import VersionOffer
from weightbus.python_client.relay import Relay
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.types import Update

SECONDS = 60.0  # far more than anything here takes
SOON = Settings(ping=0.1, lost_after=1.0, shared_memory=False)
CHUNKED = 3 * 2**18  # numbers of a version of three chunks
LARGE = 2**23  # of one that takes longer to arrive than the next one to be published
WHOLE = 10  # numbers of a version that comes with its announcement


def arrays(value: float, size: int) -> dict[str, Any]:
    return {"w": np.full(size, value, np.float32)}


def whole(relay: Relay) -> bool:
    versions = relay._below._machine.state.store.get("m")  # noqa: SLF001 # pyright: ignore
    return any(version.chunks.whole for version in versions or ())


class Tree:
    """Makes publishers, relays and workers, and closes them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._count = stack, 0
        self.targets: dict[Subscriber, dict[str, Any]] = {}

    def publisher(self, **options: Any) -> Publisher:
        return self._stack.enter_context(Publisher(settings=SOON, **options))

    def relay(self, above: Publisher | Relay, address: str = "tcp://127.0.0.1:0") -> Relay:
        self._count += 1
        relay = Relay(above.address, address, ["m"], name=f"relay-{self._count}", settings=SOON)
        return self._stack.enter_context(relay)

    def chain(self, above: Publisher | Relay, relays: int) -> Publisher | Relay:
        for _ in range(relays):
            above = self.relay(above)
        return above

    def worker(self, above: Publisher | Relay, size: int, name: str = "worker") -> Subscriber:
        target = arrays(0, size)
        worker = Subscriber(above.address, {"m": target}, name=name, settings=SOON)
        self.targets[self._stack.enter_context(worker)] = target
        return worker

    def publishes(self, publisher: Publisher, number: int) -> tuple[int, int]:
        """Publish the version of this number without waiting; return its epoch and number."""
        publisher.publish_async("m", arrays(number, CHUNKED), timeout=SECONDS)
        return publisher.epoch, number

    def receives(self, worker: Subscriber, key: tuple[int, int]) -> Update:
        """Apply what comes until the version of this epoch and number runs."""

        def running() -> Update | None:
            update = worker.receive(0.1)
            return update if update and (update.epoch, update.version) == key else None

        update = wait_for(running, f"version {key}", SECONDS)
        assert update is not None
        return update


@pytest.fixture
def tree() -> Generator[Tree]:
    with ExitStack() as stack:
        yield Tree(stack)


@pytest.mark.parametrize("size", [WHOLE, CHUNKED])
@pytest.mark.parametrize("relays", [1, 3])
def test_a_version_keeps_name_bytes_and_metadata_behind_relays(
    tree: Tree, relays: int, size: int
) -> None:
    publisher = tree.publisher()
    last = tree.chain(publisher, relays)
    workers = [tree.worker(last, size, name) for name in "ab"]
    assert all(worker.wait_joined(SECONDS) for worker in workers)
    for value in (1, 2, 3):
        metadata = {"step": str(value)}
        coming = publisher.publish_async("m", arrays(value, size), metadata=metadata, expect=2)
        updates = [tree.receives(worker, (publisher.epoch, value)) for worker in workers]
        receipt = coming.result(SECONDS)
        for worker, update in zip(workers, updates, strict=True):
            assert (update.digest, update.metadata) == (receipt.digest, metadata)
            assert (tree.targets[worker]["w"] == value).all()


def test_named_workers_behind_a_relay_get_versions_that_follow_at_once(tree: Tree) -> None:
    publisher = tree.publisher()
    relay = tree.relay(publisher)
    names = "abc"
    workers = [tree.worker(relay, LARGE, name).start() for name in names]
    assert all(worker.wait_joined(SECONDS) for worker in workers)
    wait_for(lambda: publisher.workers().keys() >= {*names}, "they are known", SECONDS)
    coming = [
        publisher.publish_async("m", arrays(value, LARGE), workers=[name], timeout=SECONDS)
        for value, name in enumerate(names, 1)
    ]
    for name, each in zip(names, coming, strict=True):
        assert each.result(SECONDS).in_state("applied") == [name]
    for value, worker in enumerate(workers, 1):
        assert (tree.targets[worker]["w"] == value).all()


def test_a_relay_serves_what_it_has_when_the_publisher_is_gone(tree: Tree) -> None:
    publisher = tree.publisher()
    relay = tree.relay(publisher)
    receipt = tree.publishes(publisher, 1)
    wait_for(lambda: whole(relay), "the relay has it", SECONDS)
    publisher.close()
    late = tree.worker(relay, CHUNKED)
    tree.receives(late, receipt)
    assert (tree.targets[late]["w"] == 1).all()


def test_workers_behind_a_relay_apply_when_the_publisher_commits(tree: Tree) -> None:
    publisher = tree.publisher()
    worker = tree.worker(tree.relay(publisher), CHUNKED)
    assert worker.wait_joined(SECONDS)
    promise = publisher.publish_async("m", arrays(1, CHUNKED), expect=1, commit="together")
    tree.receives(worker, (publisher.epoch, 1))
    assert promise.result(SECONDS).workers["worker"].state == "applied"


def test_workers_behind_a_relay_drop_what_the_publisher_aborts(tree: Tree) -> None:
    publisher = tree.publisher()
    relay = tree.relay(publisher)
    worker = tree.worker(relay, CHUNKED)
    assert worker.wait_joined(SECONDS)
    first = tree.publishes(publisher, 1)
    tree.receives(worker, first)
    with pytest.raises(PublishError):
        publisher.publish("m", arrays(2, CHUNKED), require=5, commit="together", timeout=0.5)
    versions = relay._below._machine.state.store["m"]  # noqa: SLF001 # pyright: ignore
    wait_for(lambda: versions.pending is None, "the relay hears of the abort", SECONDS)
    assert [version.key for version in versions] == [first]
    third = tree.publishes(publisher, 3)
    update = worker.receive(SECONDS)
    assert update is not None
    assert (update.epoch, update.version) == third


def test_a_relay_follows_a_publisher_that_is_restarted(tree: Tree, tmp_path: Path) -> None:
    address = lasting_address()
    publisher = tree.publisher(address=address, state=tmp_path)
    worker = tree.worker(tree.relay(publisher), CHUNKED)
    applied = tree.receives(worker, tree.publishes(publisher, 1))
    wait_for(lambda: publisher.history("m"), "it is on disk", SECONDS)
    publisher.close()
    again = tree.publisher(address=address, state=tmp_path)
    assert again.epoch > applied.epoch

    def renamed() -> Update | None:
        update = worker.update("m")
        return update if update and update.epoch == again.epoch else None

    update = wait_for(renamed, "its new name", SECONDS)
    assert update is not None
    assert (update.digest, worker.receive(0)) == (applied.digest, None), "it is not applied again"
    second = tree.publishes(again, 2)
    tree.receives(worker, second)


def test_a_worker_keeps_its_version_while_its_relay_restarts_empty(tree: Tree) -> None:
    publisher, address = tree.publisher(), lasting_address()
    relay = tree.relay(publisher, address)
    worker = tree.worker(relay, CHUNKED)
    first = tree.publishes(publisher, 1)
    tree.receives(worker, first)
    relay.close()
    tree.relay(publisher, address)
    second = tree.publishes(publisher, 2)
    tree.receives(worker, second)
    assert worker.receive(0) is None


def test_an_error_while_passing_on_does_not_end_the_relay(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = tree.publisher()
    relay = tree.relay(publisher)
    worker = tree.worker(relay, CHUNKED)
    assert worker.wait_joined(SECONDS)
    received, raised = VersionOffer.received, list[str]()

    def failing(*args: Any) -> VersionOffer:
        if not raised:
            raised.append("once")
            raise MemoryError("no memory")
        return received(*args)

    monkeypatch.setattr(VersionOffer, "received", failing)
    tree.receives(worker, tree.publishes(publisher, 1))
    assert raised


def test_a_relay_without_keys_is_not_for_other_hosts() -> None:
    with pytest.raises(AddressError, match="other hosts can reach"):
        Relay("tcp://127.0.0.1:1", "tcp://0.0.0.0:0", ["m"], name="relay")


def test_who_starts_first_does_not_matter(tree: Tree) -> None:
    places = [lasting_address() for _ in range(2)]

    class Above:
        def __init__(self, address: str) -> None:
            self.address = address

    relay: Any = Above(places[1])
    publisher: Any = Above(places[0])
    worker = tree.worker(relay, CHUNKED)
    tree.relay(publisher, places[1])
    publisher = tree.publisher(address=places[0])
    receipt = tree.publishes(publisher, 1)
    tree.receives(worker, receipt)


def test_a_version_has_the_metadata_of_its_new_name_behind_a_relay(
    tree: Tree, tmp_path: Path
) -> None:
    address, words = lasting_address(), {"step": "1"}
    publisher = tree.publisher(address=address, state=tmp_path)
    worker = tree.worker(tree.relay(publisher), CHUNKED).start()
    weights = arrays(1, CHUNKED)
    first = publisher.publish("m", weights, expect=1, timeout=SECONDS, metadata=words)
    publisher.publish("m", weights, workers=["worker"], timeout=SECONDS, metadata={"step": "2"})
    wait_for(lambda: publisher.history("m"), "it is on disk", SECONDS)
    publisher.close()
    again = tree.publisher(address=address, state=tmp_path)

    def renamed() -> Update | None:
        update = worker.update("m")
        return update if update and update.epoch == again.epoch else None

    update = wait_for(renamed, "its new name", SECONDS)
    assert update is not None
    assert (update.version, update.metadata) == (first.version, words), "of what was for all"
