"""The latest version wins, no torn version is passed to the user, and two buffers are enough."""

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from weightbus.bus.effects import Effect, Open, Ready, Rejected, Reserve, Send, Subscribe
from weightbus.bus.headers import encode, from_worker
from weightbus.bus.limits import Timing
from weightbus.bus.messages import (
    Abort,
    Announce,
    Applied,
    Commit,
    Failed,
    Fetch,
    Progress,
    Rename,
    Shared,
    Staged,
)
from weightbus.bus.protocol_limits import TEXT_MAX
from weightbus.bus.publisher import offers
from weightbus.bus.publisher.version import Version
from weightbus.bus.staged import Copying, OverwrittenError, SharedMemory, StagedVersion, StaleError
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Granted, Opened, Outcome, Report
from weightbus.bus.worker.follower import Follower
from weightbus.bus.worker.layouts import LAYOUTS_KEPT
from weightbus.bus.worker.phases import OF_MODEL
from weightbus.bus.worker.tables import MODES, Event
from weightbus.bus.worker.transfer import Transfer
from weightbus.bus.worker.version_store import ArrivingEntry
from weightbus.codecs.layout import Layout
from weightbus.codecs.protocol_limits import CHUNKS_MAX
from weightbus.tests.simulation.performing import Takes, copied, copies, done, empty
from weightbus.tests.simulation.virtual_shell import version_of

CHUNK = 8
EPOCH = 3


class Bench:
    """A follower of model `a`, which receives a publisher's versions."""

    def __init__(self, bytes_max: int = 1000, objection: str = "") -> None:
        self.objection = objection
        self.asked: list[str] = []  # layouts that the user was asked about
        self.memory: SharedMemory | None = None  # the result of each `Open`
        self.takes: Takes = empty  # allocates memory
        self.follower = Follower("a", self.accepts, bytes_max, Timing())
        self.now = 0.0
        self.effects: list[Effect] = []

    def accepts(self, _model: str, layout: Layout) -> str:
        self.asked.append(layout.id)
        return self.objection

    def done(self, effects: list[Effect]) -> list[Effect]:
        return done(
            self.follower, effects, self.now, lambda _shared, _size: self.memory, self.takes
        )

    def announce(self, v: Version, *, header: bool = True, **fields: Any) -> list[Effect]:
        layout = v.layout.header if header else None
        return self.done(self.follower.announced(announcement(v, **fields), layout, self.now))

    def report(self, key: tuple[int, int], what: Outcome, text: str = "") -> list[Effect]:
        return self.done(self.follower.happened(Report("a", key, what, text), self.now))

    def abort(self, v: Version) -> list[Effect]:
        return self.done(self.follower.aborted(abort(v), self.now))

    def feed(self, v: Version, *indices: int, pushed: bool = True) -> list[Effect]:
        effects: list[Effect] = []
        for index in indices or range(v.plan.count):
            chunk, payload = offers.chunk_of(v, index)
            effects += self.follower.chunk(chunk, payload, self.now, pushed=pushed)
        return effects

    def end(self, v: Version, digest: str | None = None) -> list[Effect]:
        told = structs.replace(offers.end_of(v), digest=v.digest if digest is None else digest)
        return self.follower.end(told, self.now)

    def deliver(self, v: Version, **fields: Any) -> list[Effect]:
        return self.announce(v, **fields) + self.feed(v) + self.end(v)

    def apply(self, v: Version) -> list[Effect]:
        return self.report(v.key, "taken") + self.report(v.key, "applied")


def version(number: int, nbytes: int = 20, epoch: int = EPOCH) -> Version:
    data = np.full(nbytes, number, np.uint8)
    return version_of(number, data, CHUNK, epoch)


def announcement(v: Version, **fields: Any) -> Announce:
    return structs.replace(offers.announcement(v), **fields)


def commit(v: Version, **fields: Any) -> Commit:
    return structs.replace(offers.commit_of(v), **fields)


def abort(v: Version) -> Abort:
    return Abort(model="a", epoch=v.epoch, version=v.version)


def ready(effects: list[Effect]) -> list[StagedVersion]:
    return [e.staged for e in effects if isinstance(e, Ready)]


def sent(effects: list[Effect], *kinds: type[Message]) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kinds)]


def arriving(bench: Bench) -> ArrivingEntry:
    held = bench.follower.versions.in_phase["arriving"]
    assert held is not None
    return held


def memory_of(bench: Bench) -> object:
    return arriving(bench).chunks.memory


def transfer(bench: Bench) -> Transfer:
    return arriving(bench).transfer


# Arriving.


def test_nothing_is_left_of_what_ran_before() -> None:
    bench = Bench()
    holds = bench.follower.versions
    for number in (1, 2, 3):
        bench.deliver(version(number))
        bench.apply(version(number))
        assert [held.key for held in holds.all(*holds.in_phase)] == [(EPOCH, number)]


def test_a_layout_is_remembered_and_judged_once() -> None:
    bench = Bench()
    one, two = version(1), version(2)
    bench.deliver(one)
    bench.apply(one)
    bench.announce(two, header=False)
    assert bench.follower.versions.in_phase["arriving"] is not None
    assert bench.asked == [one.layout.id]


def test_layouts_are_forgotten_in_the_order_they_came() -> None:
    bench = Bench()
    for number in range(1, LAYOUTS_KEPT + 2):
        v = version(number, nbytes=number)
        bench.deliver(v)
        bench.apply(v)
    again = version(100, nbytes=1)
    assert sent(bench.announce(again, header=False), Fetch)[0].layout
    assert not sent(bench.announce(version(101, nbytes=2), header=False), Fetch)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"nbytes": 1001}, "too-large"),
        ({"nbytes": CHUNKS_MAX + 1, "chunk_bytes": 1}, "too-many-chunks"),
        ({"nbytes": 21}, "layout-invalid"),
        ({"encoding": "delta"}, "unsupported"),
        ({"encryption": "aes-256-gcm"}, "unsupported"),
    ],
)
def test_what_cannot_be_taken_is_refused_before_memory_is(
    fields: dict[str, Any], code: str
) -> None:
    bench, v = Bench(bytes_max=1000 if code == "too-large" else CHUNKS_MAX + 1), version(1)
    bench.takes = lambda _nbytes: pytest.fail("memory was taken")
    effects = bench.announce(v, **fields)
    assert [f.code for f in sent(effects, Failed)] == [code]
    assert [e.code for e in effects if isinstance(e, Rejected)] == [code]


def test_the_largest_that_is_allowed_is_taken() -> None:
    bench, v = Bench(bytes_max=20), version(1)
    assert ready(bench.deliver(v))


def test_a_target_that_objects_is_quoted_in_so_many_words() -> None:
    bench, v = Bench(objection="x" * 10_000), version(1)
    [failed] = sent(bench.announce(v), Failed)
    assert failed.code == "layout-mismatch"
    assert len(failed.text) == TEXT_MAX
    assert not sent(bench.announce(v), Failed), "once; reports repeat it"
    assert sent(bench.follower.repeat(), Failed)


def test_a_version_that_did_not_fit_is_asked_for_once_the_target_fits() -> None:
    bench, v = Bench(objection="w: shape [3] published, [4] here"), version(1)
    ping = bench.follower.timing.ping
    bench.announce(v)
    assert not sent(bench.follower.tick(2 * ping), Fetch), "nothing has changed"
    bench.objection = ""
    assert not sent(bench.follower.tick(2 * ping), Fetch), "it has just looked"
    [asked] = sent(bench.follower.tick(3 * ping), Fetch)
    assert asked.version == 0
    assert ready(bench.deliver(v))
    assert not sent(bench.follower.tick(9 * ping), Fetch)


def test_a_version_that_did_not_fit_is_forgotten_for_a_newer_one() -> None:
    bench = Bench(objection="w: shape [3] published, [4] here")
    bench.announce(version(1))
    bench.objection = ""
    assert ready(bench.deliver(version(2)))
    assert not sent(bench.follower.tick(9 * bench.follower.timing.ping), Fetch)


def test_why_a_version_is_not_taken_is_said_whatever_letters_it_has() -> None:
    bench = Bench(objection="there is no file of the name x\udcff")
    [failed] = sent(bench.announce(version(1)), Failed)
    read, _ = from_worker([encode(failed)])
    assert isinstance(read, Failed)
    assert read.text == r"there is no file of the name x\udcff"


# The latest wins.


def test_a_newer_version_replaces_the_one_arriving() -> None:
    bench = Bench()
    bench.announce(version(1))
    bench.feed(version(1), 0)
    effects = bench.announce(version(2))
    assert arriving(bench).key == (EPOCH, 2)
    assert [(e.topic, e.on) for e in effects if isinstance(e, Subscribe)] == [(b"a/dat", False)]


# Two buffers.


def test_a_third_version_waits_for_a_buffer() -> None:
    bench = Bench()
    bench.deliver(version(1))
    bench.deliver(version(2))
    bench.announce(version(3))
    assert bench.follower.versions.in_phase["arriving"] is None
    bench.apply(version(1))
    assert arriving(bench).key == (EPOCH, 3)


def test_what_waits_for_a_buffer_is_the_newest() -> None:
    bench = Bench()
    bench.deliver(version(1))
    bench.deliver(version(2))
    bench.announce(version(3))
    bench.announce(version(4))
    bench.report((EPOCH, 1), "newer")
    assert arriving(bench).key == (EPOCH, 4)


def test_buffers_are_used_again() -> None:
    bench, taken = Bench(), list[int]()

    def take(nbytes: int) -> NDArray[np.uint8]:
        taken.append(nbytes)
        return np.empty(nbytes, np.uint8)

    bench.takes = take
    for number in range(1, 6):
        bench.deliver(version(number))
        bench.apply(version(number))
    assert taken == [20]
    bench.deliver(version(6, nbytes=21))
    bench.apply(version(6, nbytes=21))
    bench.deliver(version(7))
    assert taken == [20, 21, 20], "of another size there is nothing to keep"


# Together.


def test_an_abort_makes_room_for_what_waits_for_a_buffer() -> None:
    bench = Bench()
    one, two, three = version(1), version(2), version(3)
    bench.deliver(one)
    bench.deliver(two, commit="together")
    bench.announce(three)
    assert bench.follower.versions.in_phase["arriving"] is None
    bench.abort(two)
    assert bench.follower.versions.in_phase["arriving"] is not None
    assert ready(bench.feed(three) + bench.end(three))


# Reports.


def _no_room(bench: Bench) -> list[Effect]:
    bench.deliver(version(1))
    bench.report((EPOCH, 1), "taken")
    return bench.report((EPOCH, 1), "failed", "full")


def _no_memory(bench: Bench) -> list[Effect]:
    bench.takes = lambda _nbytes: None
    effects = bench.announce(version(1))
    bench.takes = empty
    return effects


FAILS: dict[str, Callable[[Bench], list[Effect]]] = {
    "no room": _no_room,
    "no-memory": _no_memory,
}


@pytest.mark.parametrize("fails", FAILS)
def test_what_fails_is_tried_again_after_ever_longer_pauses(fails: str) -> None:
    bench, tried = Bench(), list[float]()
    while bench.now < 10 * bench.follower.timing.patience_max:
        bench.now += bench.follower.timing.quiet
        assert not sent(bench.follower.tick(bench.now), Fetch)
        if sent(bench.follower.planner.hear_of(EPOCH, 1, bench.now), Fetch):
            tried.append(bench.now)
            [failed] = sent(FAILS[fails](bench), Failed)
            assert failed.code == ("no-memory" if fails == "no room" else fails)
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    patience, most = bench.follower.timing.patience, bench.follower.timing.patience_max
    assert pauses[:4] == [patience, 2 * patience, 4 * patience, 8 * patience]
    assert set(pauses[4:]) == {most}
    bench.deliver(version(2))
    assert sent(bench.apply(version(2)), Applied), "another one is not put off"
    bench.announce(version(3), encoding="another")
    bench.now += patience
    assert sent(bench.follower.planner.hear_of(EPOCH, 3, bench.now), Fetch), (
        "it begins with patience"
    )


@pytest.mark.parametrize("word", ["gone", "aborted"])
def test_what_is_before_a_version_that_is_put_off_waits_until_that_is_not_to_be_had(
    word: str,
) -> None:
    bench, v = Bench(), version(2)
    bench.announce(v, encoding="another")
    assert not sent(bench.follower.planner.hear_of(EPOCH, 1, bench.now), Fetch), (
        "it would come again"
    )
    assert not sent(bench.follower.planner.hear_of(EPOCH, 2, bench.now), Fetch)
    assert not sent(bench.follower.gone(EPOCH, 1, bench.now), Fetch), "that is another"
    assert not sent(bench.follower.planner.hear_of(EPOCH, 1, bench.now), Fetch)
    if word == "gone":
        bench.follower.gone(EPOCH, 2, bench.now)
    else:
        bench.abort(v)
    assert sent(bench.follower.planner.hear_of(EPOCH, 1, bench.now), Fetch)


def test_a_version_that_the_user_puts_back_can_be_applied_later() -> None:
    bench, v = Bench(), version(1)
    bench.deliver(v)
    bench.report(v.key, "taken")
    bench.report(v.key, "put-back")
    assert bench.follower.versions.find(v.key, "ready") is not None
    assert sent(bench.apply(v), Applied)


@pytest.mark.parametrize(("taken", "what"), [(True, "stale"), (True, "newer"), (False, "newer")])
def test_a_version_that_the_user_has_no_use_for_is_dropped(*, taken: bool, what: Outcome) -> None:
    bench, v = Bench(), version(1)
    bench.deliver(v)
    if taken:
        bench.report(v.key, "taken")
    bench.report(v.key, what)
    versions = bench.follower.versions
    assert not [*versions.all(*versions.in_phase)]
    assert v.key not in versions.rejected


def test_what_was_not_ready_cannot_have_been_applied() -> None:
    bench = Bench()
    for what in ("applied", "declined", "failed", "torn", "stale", "newer"):
        assert not bench.report((EPOCH, 1), what)
    assert bench.follower.running is None


# Coming back.


@pytest.mark.parametrize("end", ["newer", "abort"])
def test_memory_that_is_lent_is_taken_back_with_the_version_it_was_for(end: str) -> None:
    """Another version may use the buffer at once, so the lease must not write into it any more."""
    bench, v = Bench(), version(1)
    bench.announce(v)
    chunk, payload = offers.chunk_of(v, 0)
    lease = bench.follower.place(chunk, len(payload))
    assert lease is not None
    if end == "newer":
        bench.announce(version(2))
    else:
        bench.abort(v)
    assert not lease.live
    assert bench.follower.place(chunk, len(payload)) is None


@pytest.mark.parametrize("granted", [True, False])
def test_memory_that_comes_late_is_waited_for_and_of_use_only_to_who_lacks_it(
    granted: bool,
) -> None:
    bench, v, newer = Bench(), version(1), version(2)
    [reserve] = bench.follower.announced(announcement(v), v.layout.header, 0.0)
    assert reserve == Reserve("a", v.key, 20)
    assert not bench.follower.tick(99.0), "it is not asked for twice"
    bench.announce(newer)
    late = Granted("a", v.key, np.empty(20, np.uint8) if granted else None)
    assert bench.follower.happened(late, 99.0) == []
    assert arriving(bench).key == newer.key
    assert ready(bench.feed(newer) + bench.end(newer))


def test_a_segment_that_is_open_late_is_of_no_use_to_who_lacks_a_layout_by_now() -> None:
    bench, v = Bench(), version(1)
    bench.announce(v)
    [opens] = bench.follower.announced(announcement(version(2), shared=SHARED), None, 0.0)
    assert isinstance(opens, Open)
    other = structs.replace(announcement(version(2)), layout="f" * 64)
    assert sent(bench.follower.announced(other, None, 0.0), Fetch)[0].layout
    assert bench.follower.happened(Opened("a", opens.key, None), 0.0) == []
    assert arriving(bench).key == v.key


@pytest.mark.parametrize("event", OF_MODEL)
def test_the_next_complete_version_ends_catching_up(event: Event) -> None:
    bench, one, four = Bench(), version(1), version(4)
    bench.deliver(one)
    bench.apply(one)
    for number in (2, 3):
        bench.announce(version(number))
    bench.abort(version(3))
    versions = bench.follower.versions
    assert versions.mode == "catching-up"
    match event:
        case "mapped":
            bench.memory = Memory()
            bench.announce(four, shared=SHARED)
        case "renamed":
            was = bench.follower.running
            assert was is not None
            bench.follower.renamed(Rename(model="a", epoch=EPOCH, version=4, was=was), 0.0)
        case _:
            bench.deliver(four)
    assert versions.find((EPOCH, 4), "ready", "running") is not None
    assert versions.mode == MODES["catching-up"][OF_MODEL[event]]


# Copying from shared memory.

SHARED = Shared(path="/proc/1/fd/1", token="0" * 32)


class Memory:
    """A segment on this host."""

    def __init__(self, stale: type[StaleError] | None = None) -> None:
        self.data, self.note = np.full(20, 1, np.uint8), b""
        self.stale = stale  # the error that a copy raises, if any

    @contextmanager
    def reading(self, model: str, epoch: int, version: int, **_: bool) -> Generator[None]:
        assert (model, epoch, version) == ("a", EPOCH, 1)
        if self.stale is StaleError:
            raise StaleError
        yield
        if self.stale is OverwrittenError:
            raise OverwrittenError


def begun(bench: Bench, v: Version, memory: Memory | None = None) -> Copying:
    """Announce a version in shared memory that must be staged; return the job that copies it."""
    bench.follower.shared, bench.memory = True, memory or Memory()
    effects = bench.announce(v, commit="together", shared=SHARED)
    assert [(f.version, f.count) for f in sent(effects, Fetch)] == [(1, 0)], "the `end` alone"
    [copy] = copies(effects)
    return copy


def end_copy(bench: Bench, copy: Copying) -> list[Effect]:
    return bench.done(bench.follower.happened(copied(copy), bench.now))


@pytest.mark.parametrize("end_first", [False, True])
def test_what_is_copied_is_staged_with_the_digest_of_the_copy(end_first: bool) -> None:
    bench, v = Bench(), version(1)
    copy = begun(bench, v)
    effects = bench.end(v) if end_first else []
    assert not effects
    assert not sent(bench.follower.tick(bench.now + 5.0), Fetch) or not end_first
    effects = end_copy(bench, copy)
    effects += [] if end_first else bench.end(v)
    assert sent(effects, Staged)[0].digest == v.digest
    [staged] = ready(bench.follower.committed(commit(v)))
    assert staged.data.tobytes() == b"\1" * 20


@pytest.mark.parametrize("how", [StaleError, OverwrittenError])
def test_what_is_stale_or_was_overwritten_is_fetched(how: type[StaleError]) -> None:
    bench, v = Bench(), version(1)
    copy = begun(bench, v, Memory(how))
    bench.end(v)
    for bench.now in range(0, 600, 10):
        assert not bench.follower.tick(bench.now), "it takes long"
    effects = end_copy(bench, copy)
    assert not bench.follower.tick(bench.now), "nothing that was asked for has failed to come"
    assert not sent(effects, Staged)
    assert [(f.version, f.first, f.count) for f in sent(effects, Fetch)] == [(1, 0, 3)]
    assert sent(bench.feed(v, pushed=False), Staged)


def test_nothing_is_asked_for_or_lent_while_it_is_copied_and_progress_tells_of_it() -> None:
    bench, v = Bench(), version(1)
    copy = begun(bench, v)
    bench.end(v)
    chunk, payload = offers.chunk_of(v, 0)
    assert bench.follower.place(chunk, len(payload)) is None
    assert not bench.feed(v, 0)
    assert transfer(bench).chunks.here == 0, "nobody writes there twice"
    for _ in range(40):
        bench.now += 0.5
        assert not bench.follower.tick(bench.now)
    copy.count = 2
    [said] = sent(bench.follower.repeat(), Progress)
    assert (said.chunks, said.phase) == (2, "receiving")


@pytest.mark.parametrize("how", ["aborted", "newer", "fenced"])
def test_a_copy_that_is_overtaken_keeps_its_buffer_until_it_has_ended(how: str) -> None:
    """The copy still writes into the buffer, so no other version may use the buffer."""
    bench, v = Bench(), version(1)
    taken: list[NDArray[np.uint8]] = []

    def take(nbytes: int) -> NDArray[np.uint8]:
        taken.append(np.zeros(nbytes, np.uint8))
        return taken[-1]

    bench.takes = take
    copy = begun(bench, v)
    bench.follower.shared, bench.memory = False, None
    if how == "aborted":
        bench.abort(v)
    elif how == "fenced":
        bench.follower.reconnected(EPOCH + 1, 0, bench.now, shared=False)
    epoch = EPOCH + (how == "fenced")
    bench.announce(version(2, epoch=epoch))
    assert not copy.live
    assert memory_of(bench) is not copy.buffer
    bench.feed(version(2, epoch=epoch))
    bench.end(version(2, epoch=epoch))
    bench.announce(version(3, epoch=epoch))
    assert bench.follower.versions.in_phase["arriving"] is None, "both buffers are in use"
    effects = end_copy(bench, copy)
    assert not sent(effects, Staged)
    assert arriving(bench).key == (epoch, 3)
    assert memory_of(bench) is copy.buffer, "now it is free"
    assert len(taken) == 2


def test_a_copy_that_was_done_when_it_was_overtaken_is_of_no_use() -> None:
    bench, v = Bench(), version(1)
    copy = begun(bench, v)
    late = copied(copy)
    bench.abort(v)
    effects = bench.follower.happened(late, bench.now) + bench.end(v)
    assert not sent(effects, Staged)
    assert not ready(bench.follower.committed(commit(v)))
