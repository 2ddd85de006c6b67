"""Patches at a worker, message by message: each is decoded completely or given up."""

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from weightbus.bus.effects import Decode, Effect, Notice, Ready, Send, Subscribe
from weightbus.bus.limits import BUFFERS_MAX, Timing
from weightbus.bus.messages import (
    DELTA,
    Announce,
    Applied,
    Fetch,
    PatchId,
    Progress,
    Refuse,
    Running,
)
from weightbus.bus.net.copier import decoded, patching
from weightbus.bus.protocol_limits import TRIES_MAX
from weightbus.bus.publisher.offers import announcement, chunk_of, end_of
from weightbus.bus.publisher.version import (
    Chunked,
    OfferedPatch,
    Version,
    VersionOffer,
    VersionPatch,
)
from weightbus.bus.staged import Base, Patching
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Report
from weightbus.bus.worker.follower import Follower
from weightbus.bus.worker.layouts import Expected
from weightbus.bus.worker.transfer import Transfer
from weightbus.codecs.delta.encoding import encode
from weightbus.codecs.layout import Layout
from weightbus.tests.simulation.performing import Takes, done, empty
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, hash_all

CHUNK = 64
LAYOUT = Layout.plan([("w", "BF16", (2000,))])
NO_PATCH = Refuse(code="no-patch", text="no", model="a", epoch=1, version=2)


def weights(number: int) -> NDArray[np.uint8]:
    """Return the bytes of a version, of which few differ from the version before."""
    data = np.resize(np.arange(251, dtype=np.uint8), LAYOUT.nbytes).copy()
    data[: 40 * number : 40] ^= 1
    return data


def version(number: int) -> Version:
    return version_like(LAYOUT, weights(number), number)


def version_like(
    layout: Layout, data: NDArray[np.uint8], number: int, *, keep: bool = True
) -> Version:
    offer = VersionOffer.of("a", layout, CHUNK, PlainSnapshot(data))
    hash_all(offer)
    offer.keep = keep
    return Version(offer, 1, number)


def running(v: Version) -> Running:
    return Running(v.epoch, v.version, v.digest)


def patch(base: Version, target: Version) -> VersionPatch:
    """Make a patch, offer it with the target, and return it."""
    old, new = weights(base.version), weights(target.version)
    digests = base.digest, target.digest
    data = encode(LAYOUT, old, new, digests=digests, chunk_bytes=CHUNK)
    found = VersionPatch(target, OfferedPatch(DELTA, running(base), data))
    target.patches += (found,)
    return found


class Bench:
    """A follower that accepts patches and runs version 1, whose bytes are kept."""

    def __init__(self, *, takes: bool = True) -> None:
        self.follower = Follower("a", lambda _m, _l: "", 2**20, Timing(), Expected(patches=takes))
        self.now, self.one = 0.0, version(1)
        self.takes: Takes = empty  # allocates memory
        self.arrive(self.one, self.one, header=True)
        self.apply(self.one)

    def done(self, effects: list[Effect]) -> list[Effect]:
        return done(self.follower, effects, self.now, takes=self.takes)

    def announce(self, v: Version, *, header: bool = False, **fields: Any) -> list[Effect]:
        told: Announce = msgspec.structs.replace(announcement(v), **fields)
        layout = v.layout.header if header else None
        return self.done(self.follower.announced(told, layout, self.now))

    def feed(self, chunked: Chunked, *indexes: int) -> list[Effect]:
        effects: list[Effect] = []
        for index in indexes or range(chunked.plan.count):
            chunk, payload = chunk_of(chunked, index)
            effects += self.follower.chunk(chunk, payload, self.now, pushed=True)
        return effects

    def end(self, chunked: Chunked, **fields: Any) -> list[Effect]:
        return self.follower.end(msgspec.structs.replace(end_of(chunked), **fields), self.now)

    def arrive(self, v: Version, by: Chunked, *, header: bool = False) -> list[Effect]:
        return self.announce(v, header=header) + self.feed(by) + self.end(by)

    def apply(self, v: Version) -> list[Effect]:
        ready = self.follower.versions.find(v.key, "ready")
        assert ready is not None
        self.follower.happened(Report("a", v.key, "taken"), self.now)
        applied = Report("a", v.key, "applied", bytes=ready.staged.private_bytes)
        return self.done(self.follower.happened(applied, self.now))

    def decoded(self, job: Patching) -> list[Effect]:
        return self.done(self.follower.happened(decoded(job), self.now))

    def patched(self, base: Version, v: Version) -> None:
        """Have a version arrive by a patch, and apply it."""
        [job] = jobs(self.arrive(v, patch(base, v)))
        self.decoded(job)
        self.apply(v)

    @property
    def base(self) -> Base:
        """The base of patches, which must exist."""
        assert self.follower.versions.base is not None
        return self.follower.versions.base

    @property
    def transfer(self) -> Transfer:
        held = self.follower.versions.in_phase["arriving"]
        assert held is not None
        return held.transfer


class Segment:
    """A segment of a publisher on this host."""

    data = np.zeros(LAYOUT.nbytes, np.uint8)
    note = b""

    def reading(
        self, model: str, epoch: int, version: int, **_: bool
    ) -> AbstractContextManager[None]:
        """Hold the segment, to which nothing writes."""
        del model, epoch, version
        return nullcontext()


def jobs(effects: list[Effect]) -> list[Patching]:
    return [e.patching for e in effects if isinstance(e, Decode)]


def sent(effects: list[Effect], kind: type[Message]) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def ready(effects: list[Effect]) -> list[bytes]:
    return [e.staged.data.tobytes() for e in effects if isinstance(e, Ready)]


def whole(bench: Bench, v: Version) -> None:
    """Check that a version is fetched as a whole, and can be applied then."""
    assert bench.transfer.patch is None
    assert bench.transfer.chunks.plan.count == v.plan.count
    assert ready(bench.feed(v) + bench.end(v)) == [weights(v.version).tobytes()]
    bench.apply(v)
    assert bench.follower.running == running(v)


def test_a_patch_leads_to_the_version_and_says_so() -> None:
    bench, two = Bench(), version(2)
    made = patch(bench.one, two)
    assert made.plan.count < two.plan.count / 10
    [fetch] = [f for f in sent(bench.announce(two), Fetch) if f.count]
    assert fetch.patch == PatchId(DELTA, 1, 1), "its chunks are fetched, the first time"
    assert (fetch.first, fetch.count) == (0, made.plan.count)
    arrived = weakref.ref(bench.transfer)
    [job] = jobs(bench.feed(made) + bench.end(made))
    assert not bench.follower.tick(0.2), "it is decoded once, and nothing more is asked for"
    assert ready(bench.decoded(job)) == [weights(2).tobytes()]
    [applied] = sent(bench.apply(two), Applied)
    assert (applied.digest, applied.patch) == (two.digest, PatchId(DELTA, 1, 1))
    assert 0 < applied.decode_us < 1e9, "and how long it took"
    [again] = sent(bench.follower.repeat(), Applied)
    assert again == applied
    assert arrived() is None, "the patch takes no memory any more"


def test_after_the_first_the_next_are_pushed() -> None:
    bench, versions = Bench(), [version(n) for n in (2, 3, 4)]
    two, three, four = versions
    made = patch(bench.one, two)
    effects = bench.announce(two)
    assert Subscribe(b"a/dat", on=False) in effects
    assert Subscribe(b"a/dlt", on=True) in effects
    [job] = jobs(bench.feed(made) + bench.end(made))
    bench.decoded(job)
    bench.apply(two)
    made = patch(two, three)
    assert not bench.announce(three), "it listens, and waits"
    [job] = jobs(bench.feed(made) + bench.end(made))
    bench.decoded(job)
    bench.apply(three)
    effects = bench.announce(four)
    assert Subscribe(b"a/dat", on=True) in effects
    assert sent(effects, Fetch), "what comes in the other way is fetched"
    whole(bench, four)


def test_a_patch_that_is_not_the_first_is_fetched() -> None:
    bench, two, three = Bench(), version(2), version(3)
    bench.follower.patches.subscribed = True  # pyright: ignore
    patch(two, three)
    made = patch(bench.one, three)
    [end, fetch] = sent(bench.announce(three), Fetch)
    assert (end.count, end.patch, fetch.patch) == (0, made.id, made.id)


@pytest.mark.parametrize(
    "fields",
    [{"epoch": 2}, {"version": 2}, {"digest": "0" * 64}, {"encoding": "x"}, {"nbytes": 10**9}],
)
def test_what_does_not_fit_what_runs_is_not_taken(fields: dict[str, Any]) -> None:
    bench, two = Bench(), version(2)
    offered = msgspec.structs.replace(patch(bench.one, two).offered, **fields)
    bench.announce(two, patches=[offered])
    whole(bench, two)


def test_no_patch_leads_from_one_layout_to_another() -> None:
    bench, other = Bench(), Layout.plan([("other", "BF16", (LAYOUT.nbytes // 2,))])
    two = version_like(other, weights(2), 2)
    bench.announce(two, header=True, patches=[patch(bench.one, version(2)).offered])
    whole(bench, two)


def test_no_patch_builds_on_what_is_kept_and_runs_no_more() -> None:
    bench, two, three, four = Bench(), version(2), version(3), version(4)
    bench.arrive(two, two)
    made = patch(bench.one, three)
    bench.announce(three)
    bench.apply(two)
    [job] = jobs(bench.feed(made) + bench.end(made))
    patch(bench.one, four)
    bench.announce(four)
    base = bench.base
    assert base.running == running(bench.one), "somebody decodes"
    assert bench.transfer.patch is None
    assert not ready(bench.decoded(job))
    whole(bench, four)


def test_who_does_not_take_patches_keeps_nothing_and_says_nothing() -> None:
    bench, two = Bench(takes=False), version(2)
    patch(bench.one, two)
    assert not bench.announce(two)
    assert bench.transfer.patch is None
    assert not bench.transfer.why
    assert bench.follower.versions.base is None
    whole(bench, two)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("base", "is for the base"), ("digest", "it leads to"), ("bytes", "is fetched as a whole")],
)
def test_a_patch_that_turns_out_to_be_of_no_use_is_given_up(wrong: str, said: str) -> None:
    bench, two = Bench(), version(2)
    made = patch(bench.one, two)
    if wrong == "base":
        bench.base.data[7] ^= 1
    elif wrong == "bytes":
        data = bytes(made.snapshot.bytes(0, 130)) + b"x"
        made = VersionPatch(two, OfferedPatch(DELTA, running(bench.one), data))
        two.patches = (made,)
    bench.announce(two)
    told = {"digest": "0" * 64} if wrong == "digest" else {}
    [job] = jobs(bench.feed(made) + bench.end(made, **told))
    effects = bench.decoded(job)
    [why] = [e.text for e in effects if isinstance(e, Notice)]
    assert said in why
    [fetch] = [f for f in sent(effects, Fetch) if not f.count]
    assert fetch.unpatched in why
    assert bench.follower.running == running(bench.one), "what ran runs on"
    whole(bench, two)


def test_why_a_version_is_not_patched_is_said_where_only_its_gaps_are_fetched() -> None:
    bench, two = Bench(), version(2)
    patch(version(3), two)  # on a version that does not run here
    bench.announce(two)
    effects = bench.feed(two, 0, 2) + bench.end(two)
    fetched = sent(effects, Fetch)
    assert fetched[0].count == 1, "it was pushed, all but one chunk"
    assert all("there are patches on 3" in fetch.unpatched for fetch in fetched)


def test_a_patch_of_which_nothing_comes_is_given_up() -> None:
    bench, two = Bench(), version(2)
    patch(bench.one, two)
    bench.announce(two)
    bench.follower.reconnected(1, 2, bench.now, shared=False)
    for _ in range(400):
        if bench.transfer.patch is None:
            break
        bench.now += 0.1
        bench.follower.planner.answered(bench.now)  # each ping is answered
        bench.follower.tick(bench.now)
    assert 31 < bench.now < 34, f"{TRIES_MAX} times, ever more patiently: 1, 2, 4, 8 and 16 s"
    whole(bench, two)


def test_a_patch_that_the_publisher_has_no_more_is_given_up() -> None:
    bench, two = Bench(), version(2)
    made = patch(bench.one, two)
    bench.announce(two)
    chunk, payload = chunk_of(made, 0)
    lease = bench.follower.place(chunk, len(payload))
    assert lease is not None
    assert lease.live
    effects = bench.follower.patches.refused(NO_PATCH, 0.0)
    assert sent(effects, Fetch)[0].patch is None
    assert not lease.live, "what still comes of it goes nowhere"
    whole(bench, two)


def test_a_patch_that_is_here_is_decoded_though_the_publisher_has_it_no_more() -> None:
    bench, two = Bench(), version(2)
    [job] = jobs(bench.arrive(two, patch(bench.one, two)))
    assert not bench.follower.patches.refused(NO_PATCH, 0.0)
    assert ready(bench.decoded(job)) == [weights(2).tobytes()]


def test_chunks_of_the_version_are_none_of_the_patch_and_the_other_way_round() -> None:
    bench, two, three = Bench(), version(2), version(3)
    made = patch(bench.one, two)
    bench.announce(two)
    bench.feed(two, 0, 1)
    bench.end(two)
    assert (bench.transfer.chunks.here, bench.transfer.digest) == (0, None)
    bench.feed(made)
    [job] = jobs(bench.end(made))
    bench.decoded(job)
    bench.apply(two)
    made = patch(two, three)
    bench.announce(three, patches=[])
    bench.feed(made)
    bench.end(made)
    assert (bench.transfer.chunks.here, bench.transfer.digest) == (0, None)


def test_progress_names_the_patch() -> None:
    bench, two = Bench(), version(2)
    made = patch(bench.one, two)
    bench.announce(two)
    bench.feed(made, 0)
    [progress] = sent(bench.follower.repeat(), Progress)
    assert (progress.chunks, progress.patch) == (1, made.id)


def test_what_nobody_wants_any_more_is_not_even_begun() -> None:
    bench, two = Bench(), version(2)
    [job] = jobs(bench.arrive(two, patch(bench.one, two)))
    job.live = False
    with pytest.raises(StopIteration) as end:
        next(patching(job))
    assert end.value.value == "it is no longer needed"


def test_a_step_of_decoding_is_a_chunk_or_a_block() -> None:
    bench, two = Bench(), version(2)
    [job] = jobs(bench.arrive(two, patch(bench.one, two)))
    of_each, of_blocks = bench.one.plan.count + two.plan.count, 3  # read, copied, written
    assert sum(1 for _ in patching(job)) == of_each + of_blocks


def test_a_newer_version_overtakes_one_that_is_being_decoded() -> None:
    bench, two, three = Bench(), version(2), version(3)
    [job] = jobs(bench.arrive(two, patch(bench.one, two)))
    made = patch(bench.one, three)
    bench.announce(three)
    assert not job.live
    base = bench.base
    assert base.users == 2, "one that nobody wants, and one that has begun"
    taken = bench.follower.versions._in_use  # noqa: SLF001 # pyright: ignore
    assert not ready(bench.decoded(job))
    assert base.users == 1
    assert bench.follower.versions._in_use == taken - 1, "its buffer is free"  # noqa: SLF001 # pyright: ignore
    [job] = jobs(bench.feed(made) + bench.end(made))
    assert ready(bench.decoded(job)) == [weights(3).tobytes()]
    assert not base.users
    assert bench.follower.versions._in_use <= BUFFERS_MAX  # noqa: SLF001 # pyright: ignore


def test_what_a_patch_builds_on_stays_though_another_version_runs_meanwhile() -> None:
    bench, two, three = Bench(), version(2), version(3)
    bench.announce(two, patches=[])
    bench.feed(two)
    bench.end(two)
    made = patch(bench.one, three)
    bench.announce(three)
    bench.apply(two)
    base = bench.base
    assert base.running == running(bench.one)
    [job] = jobs(bench.feed(made) + bench.end(made))
    assert ready(bench.decoded(job)) == [weights(3).tobytes()]
    assert bench.follower.versions.base is None, "it runs no more, and nobody needs it"
    bench.apply(three)
    base = bench.base
    assert base.running == running(three)
    buffers = [*bench.follower.versions._free, base.data]  # noqa: SLF001 # pyright: ignore
    assert len({b.ctypes.data for b in buffers}) == len(buffers) <= BUFFERS_MAX + 1


@pytest.mark.parametrize("keep", [True, False])
def test_where_memory_is_short_a_base_gives_way_to_what_comes(keep: bool) -> None:
    bench = Bench()
    bench.takes = lambda _nbytes: None
    for number in (2, 3):
        next_one = version_like(LAYOUT, weights(number), number, keep=keep)
        bench.announce(next_one)
        whole(bench, next_one)


def test_where_memory_is_short_what_is_decoded_is_waited_for() -> None:
    bench, two, three = Bench(), version(2), version(3)
    [job] = jobs(bench.arrive(two, patch(bench.one, two)))
    bench.takes = lambda _nbytes: None
    bench.announce(three)
    assert not job.live
    waiting = bench.follower.versions.in_phase["announced"]
    assert waiting is not None
    assert waiting.key == three.key, "its memory comes when the decoding has ended"
    bench.decoded(job)
    whole(bench, three)


@pytest.mark.parametrize("late", [False, True])
def test_where_no_patches_come_any_more_only_what_is_needed_then_is_kept(late: bool) -> None:
    bench, two, three = Bench(), version(2), version_like(LAYOUT, weights(3), 3, keep=False)
    job = None
    if late:
        made = patch(bench.one, two)
        [job] = jobs(bench.arrive(two, made))
    bench.announce(three)
    whole(bench, three)
    if job is not None:
        bench.decoded(job)
    holds = bench.follower.versions
    assert (holds.base, holds._in_use) == (None, 0)  # noqa: SLF001 # pyright: ignore
    assert len(holds._free) == 1 + late  # noqa: SLF001 # pyright: ignore


def test_memory_of_an_old_size_is_not_kept_for_versions_of_another() -> None:
    bench, nbytes = Bench(), 3 * LAYOUT.nbytes
    layout = Layout.plan([("w", "BF16", (nbytes // 2,))])
    for number in (2, 3):
        next_one = version_like(layout, np.full(nbytes, number, np.uint8), number)
        bench.arrive(next_one, next_one, header=True)
        bench.apply(next_one)
        holds = bench.follower.versions
        assert holds.base is not None
        assert holds.base.data.nbytes == nbytes
        free = [buffer.nbytes for buffer in holds._free]  # noqa: SLF001 # pyright: ignore
        assert free == [nbytes] * (number - 2)


def test_what_was_copied_from_a_segment_is_not_kept() -> None:
    bench, two = Bench(), version(2)
    bench.announce(two)
    held = bench.follower.versions.in_phase["arriving"]
    assert held is not None
    held.memory = Segment()
    bench.feed(two)
    bench.end(two)
    bench.apply(two)
    assert bench.follower.running == running(two)
    assert bench.follower.versions.base is None


def test_an_apply_that_tears_the_model_leaves_nothing_to_build_on() -> None:
    bench, two, three = Bench(), version(2), version(3)
    [job] = jobs(bench.arrive(two, patch(bench.one, two)))
    bench.decoded(job)
    bench.follower.happened(Report("a", two.key, "taken"), 0.0)
    bench.follower.happened(Report("a", two.key, "torn", "no"), 0.0)
    assert bench.follower.versions.base is None
    patch(two, three)
    bench.announce(three)
    whole(bench, three)
