"""Memory is used again, never while somebody holds it, and the latest version is never given up."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from weightbus.bus.limits import ARENAS_MAX
from weightbus.bus.memory.segment import View
from weightbus.bus.memory.snapshots import Arenas
from weightbus.bus.memory.version import Retired, Version
from weightbus.bus.publisher.shelf import DIGESTS_KEPT, Shelf
from weightbus.codecs.errors import WeightBusError
from weightbus.codecs.layout import Layout

CHUNK = 8


class Bench:
    """Arenas and a shelf, used as a publisher uses them."""

    def __init__(self, *, share: bool = False) -> None:
        self.arenas, self.shelf = Arenas("a", CHUNK, patience=0.01, share=share), Shelf("a")

    def publish(self, nbytes: int = 20, *receivers: str, together: bool = False) -> Version:
        layout = Layout.plan([("w", "U8", (nbytes,))])
        version, arena = self.arenas.take(layout, replaces_latest=not together)
        arena.data[:] = self.shelf_count() + 1
        self.shelf.number(version, epoch=1)
        version.receivers = set(receivers)
        if together:
            self.shelf.pending = version
            self.shelf.prune()
        else:
            self.shelf.settle(version, None)
        return version

    def shelf_count(self) -> int:
        return max((n for n in range(1, 100) if self.shelf.known_digest(n) is not None), default=0)


def test_a_steady_state_needs_one_arena() -> None:
    bench = Bench()
    first = bench.publish()
    others = [bench.publish() for _ in range(5)]
    assert len(bench.arenas) == 1
    assert [version.alive for version in (first, *others)] == [False] * 5 + [True]


def test_a_version_that_is_held_keeps_its_memory_and_nobody_waits_for_that() -> None:
    bench = Bench()
    bench.arenas = Arenas("a", CHUNK, patience=60.0)  # whoever waited for it would wait so long
    held = bench.publish()
    data = held.hold()
    assert data is not None
    for _ in range(3):
        bench.publish()
    assert len(bench.arenas) == 2
    for slow in "xyz":
        bench.publish(20, slow)
    assert len(bench.arenas) == ARENAS_MAX + 1, "it does not count"
    assert bytes(data) == b"\1" * 20
    held.let_go()
    del data
    assert held.hold() is None, "it is superseded"
    for _ in range(5):
        bench.publish()
    assert len(bench.arenas) == ARENAS_MAX + 1


def test_a_version_that_is_being_received_keeps_its_memory() -> None:
    bench = Bench()
    old = bench.publish(20, "slow")
    new = bench.publish()
    assert old.alive
    assert old.role == "old"
    assert bytes(old.chunk(0)[1]) == b"\1" * CHUNK
    assert bytes(new.chunk(0)[1]) == b"\2" * CHUNK
    bench.shelf.left("slow", older_than=2)
    bench.shelf.prune()
    assert not old.alive
    bench.publish()
    assert len(bench.arenas) == 2, "and then it is used again"


def test_what_is_received_is_given_up_last_but_is_given_up() -> None:
    bench = Bench()
    held = [bench.publish(20, "slow") for _ in range(ARENAS_MAX)]
    assert all(version.alive for version in held)
    latest = bench.publish(20, "slow")
    assert len(bench.arenas) == ARENAS_MAX
    assert [version.alive for version in held].count(False) == 1
    assert latest.alive
    assert bench.shelf.latest is latest


def test_bytes_in_somebodys_hands_are_not_overwritten() -> None:
    """A memoryview is what ZeroMQ holds while it sends."""
    bench = Bench()
    first = bench.publish()
    _, sending = first.chunk(0)
    second = bench.publish()
    assert first.in_hands
    assert not first.alive
    assert bytes(sending) == b"\1" * CHUNK
    with pytest.raises(Retired):
        first.chunk(1)
    assert len(bench.arenas) == 2
    del sending
    gc.collect()
    assert not first.in_hands
    third = bench.publish()
    assert len(bench.arenas) == 2, "let go, the memory is used again"
    assert third.alive
    assert not second.alive


def test_what_waits_in_a_socket_does_not_outlive_a_version() -> None:
    """A queue refers to a chunk weakly, and the version keeps the chunk for as long as it lives."""
    bench = Bench()
    version = bench.publish()
    waiting = weakref.ref(version.chunk(0)[1])
    assert waiting() is version.chunk(0)[1]
    bench.publish()
    assert waiting() is None
    assert len(bench.arenas) == 1


def test_memory_that_a_worker_copies_from_is_used_again_when_it_is_done() -> None:
    bench = Bench(share=True)
    first = bench.publish()
    assert first.shared is not None
    view = View(first.shared, 20)
    with view.reading("a", 1, 1):
        others = [bench.publish() for _ in range(3)]
        assert len(bench.arenas) == 2
        assert first.shared not in [version.shared for version in others]
    assert bench.publish().shared == first.shared
    assert len(bench.arenas) == 2


def test_who_copies_for_ever_keeps_the_memory_when_all_others_are_in_use() -> None:
    bench = Bench(share=True)
    first = bench.publish()
    assert first.shared is not None
    with View(first.shared, 20).reading("a", 1, 1):
        for _ in range(ARENAS_MAX - 1):
            bench.publish(20, "slow")
        kept = [bench.publish(20, "slow") for _ in range(3)]
        assert len(bench.arenas) == ARENAS_MAX
        assert first.shared not in [version.shared for version in kept]


def test_the_last_arena_can_always_be_taken_back() -> None:
    bench = Bench()
    sending = [bench.publish(20, "slow").chunk(0)[1] for _ in range(ARENAS_MAX)]
    for _ in range(3):
        bench.publish(20, "slow")
    assert [bytes(chunk[:1]) for chunk in sending] == [b"\1", b"\2", b"\3"], "none was torn"
    assert len(bench.arenas) == ARENAS_MAX


def test_neither_the_latest_nor_an_open_commit_is_given_up() -> None:
    bench = Bench()
    latest = bench.publish()
    pending = [bench.publish(together=True)]
    layout = Layout.plan([("w", "U8", (20,))])
    taken = bench.arenas.take(layout, replaces_latest=False)  # not on the shelf yet
    with pytest.raises(WeightBusError, match="all 3 copies of 'a' are in use"):
        bench.arenas.take(layout, replaces_latest=False)
    assert latest.alive
    assert all(version.alive for version in [*pending, taken[0]])


def test_a_trainer_that_is_faster_than_the_machine_waits_for_it() -> None:
    """Versions that were handed over but not taken in yet cannot be given up; soon they can."""
    bench = Bench()
    bench.arenas = Arenas("a", CHUNK, patience=10.0)
    layout = Layout.plan([("w", "U8", (20,))])
    given = [bench.arenas.take(layout, replaces_latest=True)[0] for _ in range(ARENAS_MAX)]

    def machine() -> None:
        for version in given:
            bench.shelf.number(version, 1)
            bench.shelf.settle(version, None)

    with ThreadPoolExecutor() as pool:
        taking = pool.submit(bench.arenas.take, layout, replaces_latest=True)
        pool.submit(machine).result(10.0)
        assert taking.result(10.0)[0].alive


def test_another_size_takes_the_place_of_memory_that_is_free() -> None:
    bench = Bench()
    bench.publish(20)
    bench.publish(40)
    bench.publish(60)
    assert len(bench.arenas) <= 2
    assert bench.shelf.latest is not None
    assert bench.shelf.latest.layout.nbytes == 60


def test_a_version_let_go_wakes_whoever_waits_for_its_memory() -> None:
    released: list[bool] = []
    data = np.zeros(CHUNK, np.uint8)
    layout = Layout.plan([("w", "U8", (CHUNK,))])
    version = Version("a", layout, data, CHUNK, on_release=lambda: released.append(True))
    _, sending = version.chunk(0)
    version.retire()
    assert not released
    del sending
    gc.collect()
    assert released == [True]


def test_copied_chunks_hold_nothing() -> None:
    data = np.zeros(CHUNK, np.uint8)
    layout = Layout.plan([("w", "U8", (CHUNK,))])
    version = Version("a", layout, data, CHUNK, copied=True)
    _, chunk = version.chunk(0)
    assert isinstance(chunk, bytes), "a view would end while it waits in a queue"
    version.retire()
    assert not version.in_hands
    data[:] = 9
    assert bytes(chunk) == bytes(CHUNK)


# The shelf.


def test_targeted_versions_are_for_their_workers_and_end_with_a_newer_one_for_all() -> None:
    bench = Bench()
    everybody = bench.publish()
    layout = Layout.plan([("w", "U8", (20,))])
    mine, _ = bench.arenas.take(layout, replaces_latest=False)
    bench.shelf.number(mine, 1)
    bench.shelf.settle(mine, frozenset({"w0"}))
    assert mine.role == "targeted"
    assert bench.shelf.latest_for("w0") is mine
    assert bench.shelf.latest_for("w1") is everybody
    newer = bench.publish()
    assert bench.shelf.latest_for("w0") is newer
    assert not mine.alive


def test_an_older_commit_does_not_replace_a_newer_latest() -> None:
    bench = Bench()
    old = bench.publish(together=True)
    new = bench.publish()
    bench.shelf.settle(old, None)
    assert bench.shelf.latest is new


def test_a_dropped_version_is_forgotten() -> None:
    bench = Bench()
    version = bench.publish(together=True)
    version.receivers.add("w0")
    bench.shelf.drop(version)
    assert bench.shelf.pending is None
    assert not version.alive
    assert bench.shelf.get(1) is None


def test_digests_of_versions_that_are_gone_are_kept_for_a_while() -> None:
    bench = Bench()
    told = [bench.publish().digest() for _ in range(2)]
    assert bench.shelf.known_digest(1) == told[0]
    assert bench.shelf.known_digest(2) == told[1]
    assert bench.shelf.known_digest(3) is None
    assert bench.shelf.known_digest(0) is None
    for _ in range(DIGESTS_KEPT + 1):
        bench.publish()
    assert bench.shelf.known_digest(1) == "", "too long ago to say"


def test_nobody_can_have_a_version_whose_digest_was_never_told() -> None:
    bench = Bench()
    bench.publish()
    bench.publish()
    assert bench.shelf.known_digest(1) is None
