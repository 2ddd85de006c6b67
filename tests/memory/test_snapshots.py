"""Memory is reused, but never while it is held, and the machine's versions are not overwritten."""

import gc
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from weightbus.bus.errors import DeadlineError
from weightbus.bus.limits import SNAPSHOTS_MAX
from weightbus.bus.memory.segment import MappedSegment
from weightbus.bus.memory.snapshots import (
    PHASES,
    Event,
    MemoryBlock,
    Phase,
    Pool,
    SealedMemory,
    Snapshot,
)
from weightbus.bus.publisher.effects import Effect, MakeReclaimable, Release
from weightbus.bus.publisher.phases import SNAPSHOTS
from weightbus.bus.publisher.store import DIGESTS_KEPT, Versions
from weightbus.bus.publisher.tables import VERSIONS, VersionEvent, VersionPhase
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.codecs.checksum import digest_of
from weightbus.codecs.errors import WeightBusError
from weightbus.codecs.layout import Layout
from weightbus.tests.simulation.virtual_shell import hash_all

CHUNK = 8
SECONDS = 60.0  # far more than any step here takes


class Bench:
    """Memory and versions, used as a publisher uses them, all in one thread."""

    def __init__(self, *, share: bool = False, patience: float = 0.01) -> None:
        self.pool, self.store = Pool("a", patience, share=share), {"a": Versions("a")}
        self.versions, self.taken = self.store["a"], 0

    def take(self, nbytes: int = 20, *, replaces_latest: bool = True) -> VersionOffer:
        snapshot = self.pool.take(nbytes, self.make_room, replaces_latest=replaces_latest)
        self.taken += 1
        snapshot.data[:] = self.taken % 256
        layout = Layout.plan([("w", "U8", (nbytes,))])
        return VersionOffer.of("a", layout, CHUNK, snapshot, snapshot.shared)

    def publish(self, nbytes: int = 20, *receivers: str, together: bool = False) -> Version:
        version = self.versions.add(self.take(nbytes, replaces_latest=not together), 1)
        version.snapshot.stamp("a", *version.key)
        version.receivers = set(receivers)
        if together:
            self.versions.await_commit(version, 0.0)
        else:
            self.versions.settle(version, None)
        self.free()
        return version

    def free(self) -> list[Effect]:
        found = [effect for each in self.store.values() for effect in each.freed()]
        for effect in found:
            if isinstance(effect, MakeReclaimable):
                effect.version.snapshot.make_reclaimable()
            elif isinstance(effect, Release):
                effect.version.snapshot.release()
        return found

    def make_room(self, among: Collection[Snapshot], replaces_latest: bool, _left: float) -> bool:
        self.versions.give_up(among, replaces_latest=replaces_latest)
        return bool(self.free())


def data_of(version: Version, index: int = 0) -> bytes:
    return bytes(version.snapshot.bytes(*version.plan.span(index)))


def chunk(version: Version) -> memoryview:
    payload = version.snapshot.chunk(0, CHUNK)
    assert isinstance(payload, memoryview)
    return payload


def test_a_steady_state_needs_one_block() -> None:
    bench = Bench()
    first = bench.publish()
    others = [bench.publish() for _ in range(5)]
    assert len(bench.pool) == 1
    assert [version.snapshot.exists for version in (first, *others)] == [False] * 5 + [True]


def test_a_version_that_is_kept_keeps_its_memory_and_nobody_waits_for_that() -> None:
    bench = Bench(patience=60.0)  # a `take` that waited would wait this long
    kept = bench.publish()
    data = kept.snapshot.keep()
    assert data is not None
    bench.take().snapshot.release()
    assert bench.versions.find(1) is kept, "other memory was taken"
    for _ in range(3):
        bench.publish()
    assert len(bench.pool) == 2
    for slow in "xyz":
        bench.publish(20, slow)
    assert len(bench.pool) == SNAPSHOTS_MAX + 1, "it does not count"
    assert bytes(data) == b"\1" * 20
    kept.snapshot.let_go()
    del data
    assert kept.snapshot.keep() is None, "it is superseded"
    for _ in range(5):
        bench.publish()
    assert len(bench.pool) == SNAPSHOTS_MAX + 1


def test_what_was_kept_is_given_up_like_others_once_it_is_let_go() -> None:
    bench = Bench()
    kept = [bench.publish(20, "slow") for _ in range(2)]
    assert all(version.snapshot.keep() is not None for version in kept)
    for _ in range(SNAPSHOTS_MAX):
        bench.publish(20, "slow")
    assert len(bench.pool) == SNAPSHOTS_MAX + 2
    for version in kept:
        version.snapshot.let_go()
    bench.publish(30)
    assert len(bench.pool) == SNAPSHOTS_MAX, "of another size: none of them could be used again"


def test_any_number_may_keep_a_version() -> None:
    bench = Bench()
    kept = bench.publish()
    assert kept.snapshot.keep() is kept.snapshot.keep()
    kept.snapshot.let_go()
    bench.publish()
    assert bench.versions.latest is not None
    assert len(bench.pool) == 2, "somebody keeps it"
    kept.snapshot.let_go()
    for _ in range(3):
        bench.publish()
    assert len(bench.pool) == 2


def test_a_version_that_is_being_received_keeps_its_memory() -> None:
    bench = Bench()
    old = bench.publish(20, "slow")
    new = bench.publish()
    assert old.phase == "old"
    assert (data_of(old), new.snapshot.exists) == (b"\1" * CHUNK, True)
    bench.versions.end_receiving("slow", older_than=2)
    assert bench.free() == [Release(old)]
    bench.publish()
    assert len(bench.pool) == 2, "and then it is used again"


def test_what_is_received_is_given_up_last_but_is_given_up() -> None:
    bench = Bench()
    held = [bench.publish(20, "slow") for _ in range(SNAPSHOTS_MAX)]
    assert not any(version.gone for version in held)
    latest = bench.publish(20, "slow")
    assert len(bench.pool) == SNAPSHOTS_MAX
    assert [version.gone for version in held].count(True) == 1
    assert bench.versions.latest is latest


def test_bytes_in_somebodys_hands_are_not_overwritten() -> None:
    """A socket holds a memoryview while it sends."""
    bench = Bench()
    first = bench.publish(20, "w")
    sending = chunk(first)
    bench.versions.end_receiving("w", older_than=2)
    bench.free()
    bench.publish()
    assert not first.snapshot.exists
    assert bytes(sending) == b"\1" * CHUNK
    assert len(bench.pool) == 2
    del sending
    gc.collect()
    bench.publish()
    assert len(bench.pool) == 2, "let go, the memory is used again"


def test_what_waits_in_a_socket_does_not_outlive_a_version() -> None:
    """A queue refers to a chunk's view weakly; the snapshot keeps the view until its release."""
    bench = Bench()
    version = bench.publish(20, "w")
    waiting = weakref.ref(chunk(version))
    assert waiting() is chunk(version)
    bench.versions.end_receiving("w", older_than=2)
    bench.free()
    assert waiting() is not None, "it may still be sent, until somebody needs the memory"
    bench.publish()
    assert waiting() is None
    assert len(bench.pool) == 1


def test_what_is_lent_is_nobodys_to_read() -> None:
    bench = Bench()
    version = bench.publish()
    with pytest.raises(AssertionError, match="is reclaimable"):
        data_of(version)
    assert bench.versions.get(1) is version
    assert data_of(version) == b"\1" * CHUNK
    bench.free()
    taken = bench.take()
    assert bench.versions.find(1) is None
    assert bench.versions.get(1) is None
    assert version.gone
    assert taken.snapshot.exists


def test_a_version_that_is_taken_back_is_not_written_over() -> None:
    bench = Bench()
    version = bench.publish()
    assert bench.versions.hold(version)
    other = bench.take()
    assert len(bench.pool) == 2
    assert data_of(version) == b"\1" * CHUNK
    assert other.snapshot.exists


def test_memory_that_a_worker_copies_from_is_used_again_when_it_is_done() -> None:
    bench = Bench(share=True)
    first = bench.publish()
    assert first.shared is not None
    view = MappedSegment(first.shared, 20)
    with view.reading("a", 1, 1):
        others = [bench.publish() for _ in range(3)]
        assert len(bench.pool) == 2
        assert first.shared not in [version.shared for version in others]
    assert bench.publish().shared == first.shared
    assert len(bench.pool) == 2


def test_who_copies_for_ever_keeps_the_memory_when_all_others_are_in_use() -> None:
    bench = Bench(share=True)
    first = bench.publish()
    assert first.shared is not None
    with MappedSegment(first.shared, 20).reading("a", 1, 1):
        for _ in range(SNAPSHOTS_MAX - 1):
            bench.publish(20, "slow")
        kept = [bench.publish(20, "slow") for _ in range(3)]
        assert len(bench.pool) == SNAPSHOTS_MAX
        assert first.shared not in [version.shared for version in kept]


def test_a_worker_that_copies_by_an_old_number_is_left_alone_by_a_new_one() -> None:
    bench = Bench(share=True)
    version = bench.publish(20, "w")
    assert version.shared is not None
    with MappedSegment(version.shared, 20).reading("a", 1, 1):
        assert not version.snapshot.stamp("a", 2, 1)
    assert version.snapshot.stamp("a", 2, 1)
    with MappedSegment(version.shared, 20).reading("a", 2, 1):
        pass


def new_snapshot(block: MemoryBlock | None = None) -> Snapshot:
    lock = threading.RLock()
    return Snapshot(block or MemoryBlock(8, share=False), lock, threading.Condition(lock))


class LateBlock(MemoryBlock):
    """A block whose bytes arrive once the test allows it, or never."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(8, share=False)
        self.asked_for, self.allowed, self._fails = threading.Event(), threading.Event(), fails

    def arrive(self) -> None:
        self.asked_for.set()
        assert self.allowed.wait(SECONDS)
        if self._fails:
            raise DeadlineError("the device is stopped")


def test_the_machine_takes_memory_back_while_a_device_hands_over_its_bytes() -> None:
    block = LateBlock()
    snapshot = new_snapshot(block)
    with ThreadPoolExecutor(1) as threads:
        keeping = threads.submit(snapshot.keep)
        assert block.asked_for.wait(SECONDS)
        snapshot.make_reclaimable()
        assert not snapshot.reclaim(), "it is kept already"
        assert snapshot.take_back()
        assert snapshot.take_back(), "it is the machine's already"
        assert not keeping.done()
        block.allowed.set()
        assert keeping.result(SECONDS) is block.data


def test_bytes_that_do_not_arrive_from_a_device_are_not_kept() -> None:
    block = LateBlock(fails=True)
    snapshot = new_snapshot(block)
    block.allowed.set()
    with pytest.raises(DeadlineError):
        snapshot.keep()
    assert snapshot.state == "held"


DEEDS: dict[Event, Callable[[Snapshot], object]] = {
    "no-readers": Snapshot.make_reclaimable,
    "taken-back": Snapshot.take_back,
    "reclaimed": Snapshot.reclaim,
    "released": Snapshot.release,
}
WAYS: dict[Phase, tuple[Event, ...]] = {
    "held": (),
    "reclaimable": ("no-readers",),
    "released": ("released",),
}
IN_PHASE = [(phase, event) for phase in PHASES for event in DEEDS]


def test_a_version_has_its_bytes_in_every_phase_but_the_last() -> None:
    assert set(WAYS) == set(PHASES)
    assert {event for arrows in PHASES.values() for event in arrows} == set(DEEDS)
    assert [phase for phase, arrows in PHASES.items() if not arrows] == ["released"]


@pytest.mark.parametrize("user", ["nobody", "socket", "keeper"])
@pytest.mark.parametrize(("phase", "event"), IN_PHASE)
def test_a_block_is_free_as_the_table_of_its_snapshot_and_its_users_say(
    phase: Phase, event: Event, user: str
) -> None:
    snapshot = new_snapshot()
    sent = snapshot.chunk(0, 8) if user == "socket" else None
    kept = snapshot.keep() if user == "keeper" else None
    for before in WAYS[phase]:
        DEEDS[before](snapshot)
    DEEDS[event](snapshot)
    refused = user == "keeper" and event == "reclaimed"  # a keeper keeps it from the next publish
    after = phase if refused else PHASES[phase].get(event, phase)
    without_keeper = "free" if after == "released" and user != "socket" else after
    expected = "draining" if without_keeper == "released" else without_keeper
    assert snapshot.exists == (after != "released")
    if kept is not None:
        assert snapshot.state == "kept"
        snapshot.let_go()
    assert snapshot.state == expected
    del sent
    assert snapshot.state == ("free" if after == "released" else after)


def test_what_is_lent_is_had_by_one_alone() -> None:
    pool, start = Pool("m"), threading.Barrier(2)

    def race(way: Callable[[], bool]) -> bool:
        start.wait(SECONDS)
        return way()

    with ThreadPoolExecutor(2) as threads:
        for _ in range(300):
            snapshot = pool.take(8, replaces_latest=True)
            snapshot.make_reclaimable()
            taken, back = threads.map(race, [snapshot.reclaim, snapshot.take_back])
            assert taken != back
            if back:
                snapshot.release()


def version_in(bench: Bench, phase: VersionPhase) -> Version:
    """Return a version in a phase. One that is not reclaimable has a receiver."""
    version = bench.versions.add(bench.take(replaces_latest=False), 1)
    if phase == "pending":
        bench.versions.await_commit(version, 0.0)
        return version
    version.receivers = set() if phase == "reclaimable" else {"w"}
    bench.versions.settle(version, frozenset({"w"}) if phase == "targeted" else None)
    bench.free()
    if phase == "old":
        newer(bench)
    assert version.phase == phase
    return version


def newer(bench: Bench) -> None:
    bench.publish(20, "other", together=True)
    pending = bench.versions.pending
    assert pending is not None
    bench.versions.settle(pending, None)
    bench.free()


def cause(bench: Bench, version: Version, event: VersionEvent) -> None:
    """Make an event of a version happen by the calls that cause it."""
    versions = bench.versions
    match event:
        case "for-all":
            version.receivers = {"w"}  # otherwise it becomes reclaimable immediately
            versions.settle(version, None)
        case "for-some":
            versions.settle(version, frozenset({"w"}))
        case "no-readers":
            versions.end_receiving("w", older_than=version.version + 1)
        case "requested":
            version.receivers = {"w"}
            versions.hold(version)
        case "overwritten":
            bench.take()
            versions.hold(version)
        case "newer":
            newer(bench)
        case "aborted":
            versions.drop(version)
        case "evicted":
            assert isinstance(version.snapshot, Snapshot)
            versions.give_up([version.snapshot], replaces_latest=True)
    bench.free()


TRANSITIONS = [(phase, event, to) for phase in VERSIONS for event, to in VERSIONS[phase].items()]


@pytest.mark.parametrize(("phase", "event", "after"), TRANSITIONS)
def test_a_version_that_moves_moves_its_snapshot_as_the_coupling_says(
    phase: VersionPhase, event: VersionEvent, after: VersionPhase
) -> None:
    bench = Bench()
    version = version_in(bench, phase)
    snapshot = version.snapshot
    assert isinstance(snapshot, Snapshot)

    def now() -> str:
        return snapshot.state if snapshot.exists else "released"

    assert now() == SNAPSHOTS[phase][0]
    cause(bench, version, event)
    assert (version.phase, now()) == (after, SNAPSHOTS[after][0])


def test_a_reclaimable_version_alone_may_have_lost_its_memory() -> None:
    bench = Bench()
    version = version_in(bench, "reclaimable")
    bench.take()
    assert (version.phase, version.snapshot.exists) == ("reclaimable", False)
    either = [phase for phase, snapshots in SNAPSHOTS.items() if len(snapshots) > 1]
    assert either == ["reclaimable"]


def test_messages_that_wait_keep_no_version_of_any_block() -> None:
    bench = Bench()
    waiting = list[weakref.ref[memoryview]]()
    for number in range(3 * SNAPSHOTS_MAX):
        payload = chunk(bench.publish(20, "slow"))
        assert bytes(payload[:1]) == bytes([number + 1])
        waiting.append(weakref.ref(payload))
        del payload
    there = [payload is not None for payload in (each() for each in waiting)]
    assert sum(there) <= SNAPSHOTS_MAX
    assert there[-1], "the latest is kept"
    assert len(bench.pool) <= SNAPSHOTS_MAX


def test_sockets_that_never_let_go_cost_so_much_memory_and_no_more() -> None:
    bench = Bench()
    sending = [chunk(bench.publish(20, "slow")) for _ in range(SNAPSHOTS_MAX)]
    for _ in range(3):
        with pytest.raises(WeightBusError, match="all 3 copies of 'a' are in use"):
            bench.publish(20, "slow")
    assert [bytes(each[:1]) for each in sending] == [b"\1", b"\2", b"\3"], "none was torn"
    assert len(bench.pool) == SNAPSHOTS_MAX
    sending.pop(0)
    bench.publish(20, "slow")


def test_neither_the_latest_nor_an_open_commit_is_given_up() -> None:
    bench = Bench()
    latest, pending = bench.publish(), bench.publish(together=True)
    taken = bench.take(replaces_latest=False)  # not published yet
    with pytest.raises(WeightBusError, match="all 3 copies of 'a' are in use"):
        bench.take(replaces_latest=False)
    assert [v.snapshot.exists for v in (latest, pending, taken)] == [True] * 3


def test_a_trainer_that_is_faster_than_the_machine_waits_for_it() -> None:
    """Versions that the machine has not yet received cannot be given up; soon they can."""
    bench = Bench(patience=SECONDS)
    given = [bench.take() for _ in range(SNAPSHOTS_MAX)]
    asked = threading.Event()

    def too_early(_among: object, _replaces_latest: bool, _left: float) -> bool:
        asked.set()
        return False

    with ThreadPoolExecutor() as pool:
        taking = pool.submit(bench.pool.take, 20, too_early, replaces_latest=True)
        assert asked.wait(SECONDS)
        for offer in given:
            bench.versions.settle(bench.versions.add(offer, 1), None)
        bench.free()
        assert taking.result(SECONDS).exists


def test_another_size_takes_the_place_of_memory_that_is_free() -> None:
    bench = Bench()
    for nbytes in (20, 40, 60):
        bench.publish(nbytes)
    assert len(bench.pool) <= 2
    assert bench.versions.latest is not None
    assert bench.versions.latest.layout.nbytes == 60


def test_nothing_is_written_to_memory_that_is_retired() -> None:
    bench = Bench()
    bench.publish(20, "slow")
    bench.publish()
    blocks = list(vars(bench.pool)["_blocks"])
    bench.pool.retire()
    before = [bytes(block.data) for block in blocks]
    for _ in range(4):
        bench.publish()
    assert [bytes(block.data) for block in blocks] == before
    assert len(bench.pool) == 2, "of what was there, only what is still being received"


def test_a_snapshot_that_is_over_holds_no_memory() -> None:
    """A caller that waits for the version's receipt still refers to the snapshot."""
    pool = Pool("a")
    snapshot = pool.take(20, replaces_latest=True)
    memory = weakref.ref(snapshot.data)
    snapshot.release()
    del pool
    assert memory() is None


def test_sealed_bytes_have_as_many_rooms_as_there_may_be_snapshots() -> None:
    sealed, sending = SealedMemory(), list[NDArray[np.uint8]]()
    for number in range(SNAPSHOTS_MAX):
        sending.append(sealed.take("a", CHUNK))
        sending[-1][:] = number
    for _ in range(3):
        with pytest.raises(MemoryError, match="sealed bytes of 3 versions of 'a' are being sent"):
            sealed.take("a", CHUNK)
    assert [int(room[0]) for room in sending] == [0, 1, 2], "none was given twice"
    assert len(sealed.take("b", CHUNK)) == CHUNK, "of another model there are others"
    half_sent = sending.pop(0).data[:1]
    with pytest.raises(MemoryError):
        sealed.take("a", CHUNK)
    assert bytes(half_sent) == b"\0"
    del half_sent
    sending.append(sealed.take("a", CHUNK))


def test_rooms_for_sealed_bytes_are_used_again_and_given_back() -> None:
    sealed = SealedMemory()
    rooms = [sealed.take("a", CHUNK) for _ in range(SNAPSHOTS_MAX)]
    ends = [weakref.ref(room.base) for room in rooms]
    del rooms
    used = set[int]()
    for _ in range(2):
        room = sealed.take("a", CHUNK)
        used.add(room.__array_interface__["data"][0])
        del room
    assert len(used) == 1, "it is the same one"
    gc.collect()
    assert sum(end() is not None for end in ends) == 1, "nobody needed the others"
    sealed.take("a", 2 * CHUNK)
    gc.collect()
    assert [end() for end in ends] == [None] * SNAPSHOTS_MAX, "of another size"


# Threads.


class Machine(threading.Thread):
    """A machine whose workers have versions only after a while, or report them late."""

    def __init__(self, pools: dict[str, Pool], seed: int) -> None:
        super().__init__(daemon=True)
        self.pools, self.rng = pools, random.Random(seed)
        self.store = {model: Versions(model) for model in pools}
        self.work: deque[tuple[VersionOffer, str]] = (
            deque()
        )  # each with the digest of its bytes when they were copied
        self.rooms: deque[tuple[str, Collection[Snapshot], bool, list[bool], threading.Event]]
        self.rooms = deque()
        self.expected: dict[Version, str] = {}
        self.sending: list[tuple[bytes, memoryview | bytes]] = []  # held by sockets
        self.checked = self.missed = 0
        self.ended, self.error = False, ""

    def make_room(self, model: str, among: Collection[Snapshot], replaces: bool) -> bool:
        answer, done = list[bool](), threading.Event()
        self.rooms.append((model, among, replaces, answer, done))
        return done.wait(SECONDS) and answer[0]

    def run(self) -> None:
        try:
            while not self.ended:
                self.turn()
        except BaseException as error:
            self.error = repr(error)
            raise

    def turn(self) -> None:
        while self.work:
            offer, digest = self.work.popleft()
            versions = self.store[offer.model]
            version = versions.add(offer, 1)
            self.expected[version] = digest
            version.receivers = {"w"} if self.rng.random() < 0.5 else set()
            versions.settle(version, None)
            self.free()
        while self.rooms:
            model, among, replaces, answer, done = self.rooms.popleft()
            self.store[model].give_up(among, replaces_latest=replaces)
            answer.append(self.free())
            done.set()
        for versions in self.store.values():
            self.use(versions.latest)
            for version in list(versions):
                if self.rng.random() < 0.3:
                    self.use(version)
                    versions.end_receiving("w", older_than=version.version + 1)
        self.free()

    def use(self, version: Version | None) -> None:
        """Send a version if its bytes are here: they are intact, whatever trainers do meanwhile."""
        if version is None or not self.store[version.model].hold(version):
            self.missed += version is not None
            return
        assert hash_all(version) == self.expected[version], "torn"
        sent = version.snapshot.chunk(0, CHUNK)
        assert isinstance(sent, memoryview | bytes)
        self.sending = [(bytes(sent), sent), *self.sending[:2]]
        assert all(bytes(view) == was for was, view in self.sending), "overwritten on its way"
        offer = VersionOffer.of(version.model, version.layout, CHUNK, version.snapshot)
        assert hash_all(offer), "its bytes are there to be hashed again"
        self.checked += 1

    def free(self) -> bool:
        found = [effect for each in self.store.values() for effect in each.freed()]
        for effect in found:
            match effect:
                case MakeReclaimable(version):
                    version.snapshot.make_reclaimable()
                case Release(version):
                    version.snapshot.release()
                    del self.expected[version]
                case _:
                    pass
        return any(isinstance(effect, Release) for effect in found)


@pytest.fixture(name="restless")
def _restless() -> Iterator[None]:
    """Switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("share", [False, True], ids=["private", "shared"])
def test_trainers_and_the_machine_never_meet_in_memory(share: bool) -> None:
    """Trainers publish as fast as possible, each its own model; the machine checks each digest."""
    pools = {model: Pool(model, share=share) for model in "abc"}
    machine = Machine(pools, seed=1)
    machine.start()

    def train(model: str) -> int:
        layout = Layout.plan([("w", "U8", (64,))])
        most = 0
        for number in range(1000):
            snapshot = pools[model].take(
                64,
                lambda among, replaces, _left: machine.make_room(model, among, replaces),
                replaces_latest=number % 5 > 0,
            )
            for begin in range(0, 64, CHUNK):  # so slowly that other threads run in between
                snapshot.data[begin : begin + CHUNK] = number % 251
            offer = VersionOffer.of(model, layout, CHUNK, snapshot)
            machine.work.append((offer, digest_of(layout.id, snapshot.data, CHUNK)))
            most = max(most, len(pools[model]))
        return most

    with ThreadPoolExecutor() as trainers:
        most = list(trainers.map(train, pools))
    machine.ended = True
    machine.join(SECONDS)
    assert machine.error == ""
    assert max(most) <= SNAPSHOTS_MAX
    assert machine.checked > 1000
    assert machine.missed > 0, "some were taken before they could be taken back"


# What is kept.


def test_targeted_versions_are_for_their_workers_and_end_with_a_newer_one_for_all() -> None:
    bench = Bench()
    everybody = bench.publish()
    mine = bench.versions.add(bench.take(replaces_latest=False), 1)
    bench.versions.settle(mine, frozenset({"w0"}))
    bench.free()
    assert mine.phase == "targeted"
    assert bench.versions.latest_for("w0") is mine
    assert bench.versions.latest_for("w1") is everybody
    newer = bench.publish()
    assert bench.versions.latest_for("w0") is newer
    assert mine.gone


def test_an_older_commit_does_not_replace_a_newer_latest() -> None:
    bench = Bench()
    old = bench.publish(together=True)
    new = bench.publish()
    bench.versions.settle(old, None)
    assert bench.versions.latest is new


def test_a_dropped_version_is_forgotten() -> None:
    bench = Bench()
    version = bench.publish(together=True)
    version.receivers.add("w0")
    bench.versions.drop(version)
    assert bench.versions.pending is None
    assert bench.free() == [Release(version)]
    assert bench.versions.get(1) is None


def test_digests_of_versions_that_are_gone_are_kept_for_a_while() -> None:
    bench = Bench()
    told = list[str]()
    for number in (1, 2):
        bench.publish(20, "w")
        version = bench.versions.get(number)
        assert version is not None
        told.append(hash_all(version))
        bench.versions.end_receiving("w", older_than=number + 1)
        bench.free()
    assert bench.versions.known_digest(1) == told[0]
    assert bench.versions.known_digest(2) == told[1]
    assert bench.versions.known_digest(3) is None
    assert bench.versions.known_digest(0) is None
    for _ in range(DIGESTS_KEPT + 1):
        bench.publish()
    assert bench.versions.known_digest(1) == "", "too long ago to say"


def test_nobody_can_have_a_version_whose_digest_was_never_told() -> None:
    bench = Bench()
    bench.publish()
    bench.publish()
    assert bench.versions.known_digest(1) is None
