"""Patches through relays, over real sockets: each link carries a patch, not the version."""

import contextlib
import math
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.memory.segment import MappedSegment
from weightbus.bus.staged import Patching
from weightbus.bus.trust.keys import generate
from weightbus.bus.worker.events import Decoded
from weightbus.codecs.checksum import digest_of
from weightbus.codecs.sealing import GroupKey
from weightbus.python_client.relay import Relay
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.tests.net.tunnel import Tunnel
from weightbus.types import Receipt

SECONDS = 60.0  # far more than anything here takes
SIZE = 2**20  # numbers of a version of two chunks
NBYTES = 2 * SIZE
LARGE = 2**24  # of one whose patches dwarf all other messages
SHARE = 0.01  # of the numbers, which change from one version to the next
SOON: dict[str, Any] = {"ping": 0.1, "lost_after": 1.0}
RARELY: dict[str, Any] = {"ping": 2.0, "lost_after": 10.0}
TRIES = 3
NETWORK = Settings(**SOON, shared_memory=False)

Weights = dict[str, NDArray[np.float16]]


class Training:
    """Weights of which a few change at each step."""

    def __init__(self, size: int = SIZE) -> None:
        self._random = np.random.default_rng(0)
        self._bits = self._random.integers(0x2C00, 0x3C00, size, np.uint16)

    def step(self) -> Weights:
        """Change some of the weights by one place; return all."""
        changed = self._random.random(self._bits.size) < SHARE
        self._bits = self._bits + changed.astype(np.uint16)
        return {"w": self._bits.view(np.float16)}


class Link:
    """Tunnels to a publisher or relay, which count the bytes of both channels."""

    def __init__(self, stack: ExitStack) -> None:
        self._control, self.data = (
            stack.enter_context(contextlib.closing(Tunnel())) for _ in range(2)
        )
        self.address = self._control.address

    def lead_to(self, above: Publisher | Relay) -> None:
        self._control.lead_to(above.address)
        self.data.lead_to(above.data_address)

    @property
    def nbytes(self) -> int:
        """All bytes that have passed downwards."""
        return len(self._control.told) + len(self.data.told)


class Tree:
    """A publisher of patches, relays and workers, which are closed at the end."""

    def __init__(
        self,
        stack: ExitStack,
        size: int = SIZE,
        timing: dict[str, Any] = SOON,
        keys: Path | None = None,
    ) -> None:
        self._stack, self._keys, self.training = stack, keys, Training(size)
        self._timing = timing
        self.targets: dict[str, Weights] = {}
        self.links: list[Link] = []
        settings = self._settings(encoding="delta")
        self.publisher = stack.enter_context(Publisher(keys=keys, settings=settings))
        self.links[-1].lead_to(self.publisher)
        self.addresses = {"publisher": self.links[-1].address}

    def _settings(self, **options: Any) -> Settings:
        """Return settings whose data address is that of a new link."""
        self.links.append(Link(self._stack))
        options = {"shared_memory": False, "advertise": self.links[-1].data.address, **options}
        return Settings(**self._timing, **options)

    def relay(
        self,
        name: str = "r1",
        above: str = "publisher",
        address: str = "tcp://127.0.0.1:0",
        **options: Any,
    ) -> Relay:
        keys = None if self._keys is None else self._keys / "relays" / name
        where, settings = (self.addresses[above], address, ["m"]), self._settings(**options)
        relay = self._stack.enter_context(Relay(*where, name=name, keys=keys, settings=settings))
        self.links[-1].lead_to(relay)
        self.addresses[name] = self.links[-1].address
        assert relay.wait_joined(SECONDS)
        return relay

    def worker(self, *above: str, name: str = "w", settings: Settings = NETWORK) -> Subscriber:
        size = self.training.step()["w"].size
        target = self.targets[name] = {"w": np.zeros(size, np.float16)}
        keys = "" if self._keys is None else self._keys / "workers" / f"{name}@{above[0]}.json"
        addresses = [self.addresses[each] for each in above]
        made = Subscriber(addresses, {"m": target}, name=name, keys=keys, settings=settings)
        worker = self._stack.enter_context(made).start()
        assert worker.wait_joined(SECONDS)
        return worker

    def publish(self, *workers: Subscriber, **options: Any) -> Receipt:
        """Publish the next step, and wait until each of these workers runs it."""
        weights = self.training.step()
        expected = {} if "workers" in options else {"expect": len(workers)}
        options = {"timeout": SECONDS, **expected, **options}
        receipt = self.publisher.publish("m", weights, **options)
        for worker in workers:
            assert worker.wait_for_version("m", receipt.version, timeout=SECONDS) is not None
            assert (self.targets[worker.name]["w"] == weights["w"]).all()
        return receipt

    def wait_known(self, receipt: Receipt, *names: str) -> None:
        """Wait until the publisher knows that these run a version: the base of the next patch."""
        runs = {"m": (receipt.epoch, receipt.version)}

        def known() -> bool:
            workers = self.publisher.workers()
            return all(name in workers and workers[name].running == runs for name in names)

        wait_for(known, f"the publisher knows the version of {names}", SECONDS)


@pytest.fixture
def stack() -> Generator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def follower_of(side: Subscriber | Relay) -> Any:
    """Return what a worker, or a relay as a worker, knows of the model."""
    loop: Any = side._above if isinstance(side, Relay) else side._loop  # noqa: SLF001 # pyright: ignore
    return loop._machine.followers["m"]  # noqa: SLF001


def patched(side: Subscriber | Relay, receipt: Receipt) -> bool:
    """Return whether a version that runs, or soon will, arrived by a patch."""
    versions = follower_of(side).versions

    def entry() -> Any:
        return versions.find((receipt.epoch, receipt.version), "running")

    running: Any = wait_for(entry, "the version runs", SECONDS)
    return running.staged.patch is not None


def arrived(receipt: Receipt) -> dict[str, tuple[str, int]]:
    """Return how the version came to each worker, and in how many bytes."""
    return {name: (its.encoding, its.nbytes) for name, its in receipt.workers.items()}


def offered(relay: Relay) -> list[int]:
    """Return the sizes of the patches that a relay offers to its latest version."""
    return [patch.plan.nbytes for patch in latest_of(relay).patches]


@pytest.mark.parametrize("relays", [1, 2])
def test_each_link_carries_the_patch_and_little_else(stack: ExitStack, relays: int) -> None:
    tree, names = Tree(stack, LARGE, RARELY), ["publisher"]
    made = list[Relay]()
    for number in range(1, relays + 1):
        made.append(tree.relay(f"r{number}", names[-1]))
        names.append(f"r{number}")
    worker = tree.worker(names[-1])
    tree.publish(worker)  # there is no base
    assert patched(worker, tree.publish(worker))  # the first patch, for which topics change
    least = math.inf
    for _ in range(TRIES):  # a worker that a busy host delays fetches what is pushed to it later
        before = [link.nbytes for link in tree.links]
        had = [relay.status().received["m"] for relay in made]
        receipt = tree.publish(worker)
        carried = [link.nbytes - was for link, was in zip(tree.links, before, strict=True)]
        (nbytes,) = {size for relay in made for size in offered(relay)}
        assert nbytes < SHARE * 2 * LARGE
        assert arrived(receipt) == {"w": ("delta-1", nbytes)}
        assert patched(worker, receipt)
        assert all(patched(relay, receipt) for relay in made)
        received = [relay.status().received["m"] for relay in made]
        assert received == [nbytes + was for was in had]
        assert min(carried) >= nbytes
        least = min(least, max(carried) / nbytes)
    assert least <= 1.05


def test_a_worker_without_the_base_gets_the_whole_version(stack: ExitStack) -> None:
    tree = Tree(stack)
    relay = tree.relay()
    worker = tree.worker("r1")
    tree.publish(worker)
    receipt = tree.publish(worker)
    assert patched(worker, receipt)
    late = tree.worker("r1", name="late")
    update = late.wait_for_version("m", receipt.version, timeout=SECONDS)
    assert update is not None
    assert update.digest == receipt.digest
    assert (tree.targets["late"]["w"] == tree.targets["w"]["w"]).all()
    assert not patched(late, receipt)
    assert patched(late, tree.publish(worker, late))
    assert patched(relay, tree.publish(worker, late))


def test_a_worker_that_cannot_use_the_patch_is_pushed_the_version(stack: ExitStack) -> None:
    tree = Tree(stack)
    relay = tree.relay()
    worker, other = tree.worker("r1"), tree.worker("r1", name="other")
    tree.publish(worker, other)
    with follower_forgets_its_base(other):
        receipt = tree.publish(worker, other)
    assert (patched(worker, receipt), patched(other, receipt)) == (True, False)
    (nbytes,) = offered(relay)
    assert arrived(receipt) == {"w": ("delta-1", nbytes), "other": ("raw", NBYTES)}


def test_a_worker_that_reads_the_memory_of_its_relay_gets_neither(stack: ExitStack) -> None:
    tree = Tree(stack)
    tree.relay(shared_memory=True)
    worker = tree.worker("r1", settings=Settings(**SOON))
    tree.publish(worker)
    assert arrived(tree.publish(worker)) == {"w": ("", 0)}


@contextlib.contextmanager
def follower_forgets_its_base(worker: Subscriber) -> Generator[None]:
    follower_of(worker).versions.set_patch_base(None, None, None)
    yield


def test_patches_are_sealed_anew_at_each_relay(stack: ExitStack, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    generate(keys, {"r1": "relay"})
    generate(keys, {"r2": "relay"}, above=["r1"])
    generate(keys, {"w": "worker"}, at=["r2"])
    tree = Tree(stack, keys=keys)
    first, second = tree.relay("r1"), tree.relay("r2", "r1")
    worker = tree.worker("r2")
    tree.publish(worker)
    receipt = tree.publish(worker)
    assert all(patched(side, receipt) for side in (first, second, worker))
    ids = {ids_of(relay) for relay in (first, second)}
    assert len(ids) == 2
    sealed = [latest_of(relay).patches[0].sealed for relay in (first, second)]
    assert [patch.group.id for patch in sealed] == [ids_of(first), ids_of(second)]


def ids_of(relay: Relay) -> str:
    """Return the id of the group key that seals what a relay publishes."""
    sealer: Any = relay._below._sealer  # noqa: SLF001 # pyright: ignore
    (key,) = sealer.keys
    return GroupKey(bytes.fromhex(key)).id


def latest_of(relay: Relay) -> Any:
    """Return the latest version that a relay offers."""
    return relay._below._machine.state.store["m"].latest  # noqa: SLF001 # pyright: ignore


def test_named_workers_behind_a_relay_get_a_patch(stack: ExitStack) -> None:
    tree = Tree(stack)
    relay = tree.relay()
    worker, other = tree.worker("r1"), tree.worker("r1", name="other")
    first = tree.publish(worker, other)
    receipt = tree.publish(worker, workers=["w"])
    assert (patched(relay, receipt), patched(worker, receipt)) == (True, True)
    assert follower_of(other).running.version == first.version


def test_a_relay_that_restarts_receives_the_whole_version_and_then_patches(
    stack: ExitStack,
) -> None:
    tree, address = Tree(stack), lasting_address()
    relay = tree.relay(address=address)
    worker = tree.worker("r1")
    tree.publish(worker)
    receipt = tree.publish(worker)
    assert patched(worker, receipt)
    relay.close()
    again = tree.relay(address=address)
    assert not patched(again, receipt)
    tree.wait_known(receipt, "r1", "w")
    receipt = tree.publish(worker)
    assert (patched(again, receipt), patched(worker, receipt)) == (True, True)


def test_a_worker_that_goes_to_another_relay_gets_its_patch_there(stack: ExitStack) -> None:
    tree = Tree(stack)
    first, second = tree.relay("r1"), tree.relay("r2")
    worker = tree.worker("r1", "r2")
    tree.wait_known(tree.publish(worker), "r1", "r2", "w")
    first.close()
    receipt = tree.publish(worker)
    assert (patched(second, receipt), patched(worker, receipt)) == (True, True)
    assert worker.address == tree.addresses["r2"]


def test_a_patch_that_fails_at_the_relay_costs_workers_nothing_but_time(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(stack)
    relay = tree.relay()
    worker = tree.worker("r1")
    tree.publish(worker)
    copier: Any = relay._above._copier  # noqa: SLF001 # pyright: ignore
    failed = list[Patching]()

    def fails(job: Patching) -> None:
        failed.append(job)
        copier._done(Decoded(job, "there is no memory to decode it", 0.0))  # noqa: SLF001

    monkeypatch.setattr(copier, "queue", fails)
    receipt = tree.publish(worker)
    assert len(failed) == 1
    assert not patched(relay, receipt)
    assert offered(relay) == []
    monkeypatch.undo()
    receipt = tree.publish(worker)
    assert (patched(relay, receipt), patched(worker, receipt)) == (True, True)


def test_a_relay_decodes_into_no_memory_that_a_worker_reads(stack: ExitStack) -> None:
    tree = Tree(stack)
    relay = tree.relay(shared_memory=True)
    near = tree.worker("r1", name="near", settings=Settings(**SOON))
    worker = tree.worker("r1")
    first = tree.publish(near, worker)
    assert relay.workers()["near"].road == "shared"
    base = latest_of(relay)
    assert follower_of(relay).versions.base.running.digest == base.digest
    mapped = MappedSegment(base.shared, NBYTES)
    with mapped.reading("m", first.epoch, first.version):
        for _ in range(4):
            receipt = tree.publish(near, worker)
            assert (patched(relay, receipt), patched(worker, receipt)) == (True, True)
            assert latest_of(relay).shared != base.shared
        digest = digest_of(base.layout.id, mapped.data, base.plan.chunk_bytes)
        assert digest == first.digest
