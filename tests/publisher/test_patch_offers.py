"""Which patches a publisher makes, for whom, and what it answers to those who ask for them."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightbus.bus.deadline import Deadline
from weightbus.bus.effects import Effect, Notice, Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import Timing
from weightbus.bus.memory.snapshots import NEVER
from weightbus.bus.messages import (
    DELTA,
    Announce,
    Applied,
    Beacon,
    Chunk,
    End,
    Fetch,
    Hello,
    PatchId,
    Ping,
    Progress,
    Refuse,
    Running,
)
from weightbus.bus.protocol_limits import PUSH_CHUNKS
from weightbus.bus.publisher.effects import Broadcast, Resolve
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.roster import LINK_BYTES, RATE_RATIO, Link, PatchCandidate
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import OfferedPatch, Version, VersionOffer, VersionPatch
from weightbus.bus.sealer import Sealer
from weightbus.bus.structs import Message
from weightbus.codecs.delta.encoding import encode as encode_patch
from weightbus.codecs.delta.patch import Delta
from weightbus.codecs.delta.worth import (
    CHANGED,
    WORTH,
    Estimate,
    Way,
    chosen,
    estimate,
    may_pay,
    sample,
)
from weightbus.codecs.layout import Layout
from weightbus.codecs.sealing import GroupKey, Opening, Subject, nonce_of
from weightbus.python_client.publishing import models
from weightbus.python_client.publishing.models import Bases, PublishedModel
from weightbus.python_client.settings import Encoding
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, hash_all, perform

CHUNK = 256
COUNT = 40_000  # elements
LAYOUT = Layout.plan([("w", "BF16", (COUNT,))])
ids = itertools.count()


def weights(number: int, share: float = 0.01) -> NDArray[np.uint8]:
    """Return the bytes of a version, of which a share differs from one to the next."""
    values = np.random.default_rng(0).normal(0, 0.05, COUNT).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    every = max(1, round(1 / share))
    for step in range(number):
        bits[step % every :: every] ^= 1
    return bits.view(np.uint8)


def offer(number: int, share: float = 0.01, chunk_bytes: int = CHUNK) -> VersionOffer:
    made = VersionOffer.of("a", LAYOUT, chunk_bytes, PlainSnapshot(weights(number, share)))
    hash_all(made)
    return made


def told(effects: Sequence[Effect], kind: type[Message]) -> list[Any]:
    return [
        e.message
        for e in effects
        if isinstance(e, Send | Broadcast) and isinstance(e.message, kind)
    ]


def topics(effects: Sequence[Any]) -> set[bytes]:
    return {e.topic for e in effects if isinstance(e, Broadcast)}


def pushed(effects: Sequence[Any]) -> Counter[bytes]:
    """Return how many chunks go out, by topic."""
    broadcasts = [e for e in effects if isinstance(e, Broadcast)]
    return Counter(e.topic for e in broadcasts if isinstance(e.message, Chunk))


class Bench:
    """A publisher, workers that take patches (`p0`...) and others (`w0`...), and a trainer.

    Those with a `d` in their name hear nothing that is published.
    """

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.machine = PublisherMachine(PublisherState(7, "tcp://d:1", Timing()))
        self.bases = Bases("a")
        self.number = 0
        for name in names:
            features = [DELTA] if name.startswith("p") else []
            self.say(
                name, Hello(name=name, instance="0" * 32, models={"a": None}, features=features)
            )
            self.say(name, Ping(subscribed="d" not in name))

    def say(self, name: str, message: Message) -> list[Any]:
        effects = self.machine.receive(name.encode(), [encode(message)], self.now)
        return perform(self.machine, effects, self.now)

    def publish(self, *names: str, **shape: Any) -> tuple[Version, list[Any]]:
        self.number += 1
        made, workers = offer(self.number, **shape), names or None
        patch_candidates = self.machine.state.roster.patch_candidates("a", workers, shared=False)
        self.bases.offer(made, "delta", patch_candidates)
        about = next(ids), made, PublishTerms(workers=workers), self.now, self.now
        call, effects = self.machine.publish(*about)
        effects = perform(self.machine, effects, self.now)
        return call.version, effects + self.push()

    def push(self) -> list[Any]:
        effects: list[Any] = []
        while self.machine.ready:
            effects += perform(self.machine, self.machine.push(self.now), self.now)
        return effects

    def progress(
        self, name: str, version: int, chunks: int, patch: PatchId | None = None
    ) -> Counter[bytes]:
        """Say that so many chunks are here; return how many more go out, by topic."""
        about: dict[str, Any] = {"epoch": 7, "version": version, "chunks": chunks, "patch": patch}
        self.say(name, Progress(model="a", **about))
        return pushed(self.push())

    def applied(
        self, name: str, made: Version, patch: PatchId | None = None, decode_us: int = 0
    ) -> list[Any]:
        epoch, number = made.key
        about: dict[str, Any] = {"digest": made.digest, "patch": patch, "decode_us": decode_us}
        return self.say(name, Applied(model="a", epoch=epoch, version=number, **about))


def on(base: Version) -> PatchId:
    return PatchId(DELTA, base.epoch, base.version)


def test_each_gets_one_of_the_two() -> None:
    bench = Bench("p0", "w0")
    one, effects = bench.publish()
    assert topics(effects) == {b"a/ctl", b"a/dat"}
    [announce] = told(effects, Announce)
    assert (announce.encoding, announce.keep, announce.patches) == ("raw", True, [])
    for name in ("p0", "w0"):
        bench.applied(name, one)
    two, effects = bench.publish()
    assert topics(effects) == {b"a/ctl", b"a/dat", b"a/dlt"}
    [announce] = told(effects, Announce)
    [patch] = announce.patches
    assert (announce.encoding, patch.digest) == ("raw", one.digest)
    assert patch.nbytes < LAYOUT.nbytes / 20
    [end] = [m for m in told(effects, End) if m.patch]
    assert (end.digest, end.patch) == (two.digest, on(one))


@pytest.mark.parametrize(
    ("workers", "on", "topics"),
    [
        pytest.param("p:2 p:2", [2], {b"a/dlt"}, id="it fits all"),
        pytest.param("p:2 w:2", [2], {b"a/dat", b"a/dlt"}, id="one takes none"),
        pytest.param("w:2 p:2", [2], {b"a/dat", b"a/dlt"}, id="in whatever order they came"),
        pytest.param("p:2 p:0", [2], {b"a/dat", b"a/dlt"}, id="one runs nothing"),
        pytest.param("p:2 p:2 p:1", [2, 1], {b"a/dlt"}, id="the second is fetched"),
        pytest.param("pd:2 pd:2 p:1", [2, 1], set(), id="nobody hears the first"),
        pytest.param("p:2 wd:2", [2], {b"a/dlt"}, id="who needs all does not hear it"),
    ],
)
def test_each_is_pushed_what_fits_it(workers: str, on: list[int], topics: set[bytes]) -> None:
    runs = {f"{each[:-2]}{i}": int(each[-1]) for i, each in enumerate(workers.split())}
    bench = Bench(*runs)
    for number in (1, 2):
        made, _ = bench.publish()
        for name in (name for name, last in runs.items() if last >= number):
            bench.applied(name, made)
    _, effects = bench.publish()
    assert [patch.version for patch in told(effects, Announce)[0].patches] == on
    assert pushed(effects).keys() == topics


def test_what_is_reported_moves_that_alone_of_which_it_is() -> None:
    bench, shape = Bench("p0", "w0"), {"share": 0.3, "chunk_bytes": 16}
    one, _ = bench.publish(**shape)
    for name in ("p0", "w0"):
        bench.applied(name, one)
    _, effects = bench.publish(**shape)
    assert pushed(effects) == {b"a/dat": PUSH_CHUNKS, b"a/dlt": PUSH_CHUNKS}
    assert bench.progress("w0", 2, 16) == {b"a/dat": 16}
    assert bench.progress("p0", 2, 10, on(one)) == {b"a/dlt": 10}
    assert not bench.progress("p0", 2, 30, PatchId(DELTA, 7, 2)), "of another patch"
    assert not bench.progress("p0", 1, 30, on(one)), "of another version"
    assert not bench.progress("w0", 1, 30), "of another version"
    assert bench.progress("w0", 2, 20) == {b"a/dat": 4}
    assert bench.progress("p0", 2, 30, on(one)) == {b"a/dlt": 20}


def test_where_nobody_takes_patches_there_is_not_a_trace_of_them() -> None:
    bench = Bench("w0")
    for _ in range(3):
        made, effects = bench.publish()
        assert topics(effects) == {b"a/ctl", b"a/dat"}
        said = [encode(m) for m in told(effects, Message) if not isinstance(m, Beacon)]
        assert not any(b"patch" in header or b"keep" in header for header in said)
        bench.applied("w0", made)
    assert not bench.bases.versions


def test_the_one_that_most_run_comes_first_and_no_more_than_are_kept() -> None:
    bench = Bench("p0", "p1", "p2")
    made: list[Version] = []
    for number in range(3):
        one, _ = bench.publish()
        made.append(one)
        for name in ("p0", "p1", "p2")[number:]:
            bench.applied(name, one)
    last, effects = bench.publish()
    [announce] = told(effects, Announce)
    assert [(p.version, p.digest) for p in announce.patches] == [
        (v.version, v.digest) for v in (made[1], made[2])
    ], "p0 runs the first, which is no longer kept"
    assert len(last.patches) == 2
    bench.applied("p1", made[2])
    _, effects = bench.publish()
    [announce] = told(effects, Announce)
    assert [p.version for p in announce.patches] == [made[2].version]


def test_there_is_one_patch_on_each_name_whatever_workers_say_that_they_run() -> None:
    bases = Bases("a")
    one, two, three = (offer(number) for number in range(3))
    for made in (one, two):
        bases.offer(made, "delta", [PatchCandidate(None)])
    wrong = PatchCandidate(Running(7, 2, one.chunks.digest))
    bases.offer(three, "delta", [wrong, *runs(two, 2), *runs(two, 2)])
    assert [patch.base.digest for patch in three.patches] == [two.chunks.digest]


def test_a_patch_is_fetched_like_a_version_and_refused_if_there_is_none() -> None:
    bench = Bench("p0")
    one, _ = bench.publish()
    bench.applied("p0", one)
    two, _ = bench.publish()
    [patch] = two.patches
    ask: dict[str, Any] = {"model": "a", "epoch": 7, "version": 2}
    effects = bench.say("p0", Fetch(**ask, first=1, count=2, patch=on(one)))
    assert [(c.index, c.patch) for c in told(effects, Chunk)] == [(1, on(one)), (2, on(one))]
    payload = [e.payload for e in effects if isinstance(e, Send)]
    assert bytes(payload[0] or b"") == bytes(patch.snapshot.bytes(CHUNK, 2 * CHUNK))
    effects = bench.say("p0", Fetch(**ask, patch=on(one)))
    assert [m.digest for m in told(effects, End)] == [two.digest]
    for wrong in (
        Fetch(**ask, count=1, patch=on(two)),
        Fetch(**ask, first=patch.plan.count, count=1, patch=on(one)),
        Fetch(model="a", epoch=7, version=0, patch=on(one)),
    ):
        assert [m.code for m in told(bench.say("p0", wrong), Refuse)] == ["no-patch"]
    gone = bench.say("p0", Fetch(model="a", epoch=7, version=9, count=1, patch=on(one)))
    assert told(gone, Refuse)[0].code == "gone"


def test_receipts_say_how_it_came() -> None:
    bench = Bench("p0", "w0")
    one, _ = bench.publish()
    bench.applied("p0", one)
    bench.applied("w0", one)
    two, _ = bench.publish()
    bench.applied("p0", two, on(one))
    [resolve] = [e for e in bench.applied("w0", two) if isinstance(e, Resolve)]
    told_ = {n: (w.encoding, w.nbytes) for n, w in resolve.receipt.workers.items()}
    assert told_ == {"p0": (DELTA, two.patches[0].plan.nbytes), "w0": ("raw", LAYOUT.nbytes)}


def test_a_worker_that_gives_a_patch_up_is_heard() -> None:
    bench = Bench("p0")
    one, _ = bench.publish()
    effects = bench.say("p0", Fetch(model="a", epoch=7, version=1, unpatched="no reason"))
    assert told(effects, End)
    assert not [e for e in effects if isinstance(e, Notice)], "there was none"
    bench.applied("p0", one)
    bench.publish()
    fetch = Fetch(model="a", epoch=7, version=2, unpatched="the dog has eaten it")
    effects = bench.say("p0", fetch)
    assert told(effects, End)
    [notice] = [e for e in effects if isinstance(e, Notice)]
    assert (notice.kind, notice.worker) == ("unpatched", "p0")
    assert "the dog has eaten it" in notice.text
    again = bench.say("p0", fetch)
    assert told(again, End)
    assert not [e for e in again if isinstance(e, Notice)], "it is told once"


def test_patches_go_when_their_version_does_or_gets_another_name() -> None:
    bench = Bench("p0")
    one, _ = bench.publish()
    bench.applied("p0", one)
    two, _ = bench.publish()
    bench.applied("p0", two)
    three, _ = bench.publish()
    assert (two.gone, two.patches) == (True, ())
    assert three.patches
    bench.machine.state.versions("a").renew(8)
    assert (three.epoch, three.patches) == (8, ())


def test_a_link_is_learned_from_what_is_reported() -> None:
    bench = Bench("p0", "w0")
    bench.publish()
    assert bench.machine.state.roster.patch_candidates("a", None, shared=False) == [
        PatchCandidate(None)
    ]
    for chunks in (0, 10, 20):
        bench.now += 0.5
        bench.say("p0", Progress(model="a", epoch=7, version=1, chunks=chunks))
    rate = 10 * CHUNK / 0.5
    assert bench.machine.state.roster.patch_candidates("a", None, shared=False) == [
        PatchCandidate(None, rate)
    ]


def test_a_link_is_learned_from_versions_that_are_too_small_for_words_on_their_way() -> None:
    bench = Bench("p0", "w0")

    def rate() -> float:
        [taker] = bench.machine.state.roster.patch_candidates("a", None, shared=False)
        return taker.rate

    for seconds, took in [(2.0, 2.0), (0.5, 0.5), (8.0, 1.0), (8.0, 2.0)]:  # busy, it says so late
        made, _ = bench.publish()
        bench.now += seconds
        bench.applied("p0", made)
        assert rate() == RATE_RATIO * made.layout.nbytes / took
    base = made
    made, _ = bench.publish()
    bench.now += 1e-3
    bench.applied("p0", made, on(base))
    assert rate() < 10 * made.layout.nbytes, "a patch is not a version"
    known = rate()
    made, _ = bench.publish(chunk_bytes=2**20)
    bench.now += 10.0
    bench.applied("p0", made)
    assert made.plan.count == 1
    assert rate() == known, "one of a chunk says nothing"


@given(
    rate=st.floats(1e6, 1e10),
    words=st.lists(st.tuples(st.integers(1, 16), st.floats(0, 1)), min_size=1, max_size=50),
)
def test_words_that_come_in_pairs_do_not_make_a_link_faster(
    rate: float, words: list[tuple[int, float]]
) -> None:
    """The second is said a moment after the first, of a chunk that has arrived in between."""
    link, nbytes = Link(), 0
    for chunks, share in words:
        took = (chunks + 1) * CHUNK / rate
        link.learn(chunks * CHUNK, took * (1 - 0.01 * share))
        link.learn(CHUNK, took * 0.01 * share or 1e-9)
        nbytes += (chunks + 1) * CHUNK
    assert nbytes < LINK_BYTES
    assert link.rate == pytest.approx(rate, rel=0.1)


def test_that_a_link_became_slow_is_learned_soon() -> None:
    link = Link()
    for rate in (1e9, 1e7):
        for _ in range(4):
            link.learn(LINK_BYTES, LINK_BYTES / rate)
        assert link.rate == pytest.approx(rate, rel=0.1)


def test_how_fast_a_worker_decodes_is_learned_from_what_it_says_once() -> None:
    bench = Bench("p0", "w0")
    one, _ = bench.publish()
    bench.applied("p0", one, decode_us=5000)
    assert not next(iter(bench.machine.state.roster)).decode, "no patch was decoded"
    first, _ = bench.publish()
    first.patches[0].work = 10.0
    bench.applied("p0", first, on(one), decode_us=5000)
    assert not next(iter(bench.machine.state.roster)).decode, "its memory was new"
    two, _ = bench.publish()
    two.patches[0].classes = False
    two.patches[0].work = 10.0
    for _ in range(3):  # it says so with every ping
        bench.applied("p0", two, on(first), decode_us=4000)
    three, _ = bench.publish()
    three.patches[0].work = 20.0
    bench.applied("p0", three, on(two), decode_us=8000)
    four, _ = bench.publish()
    four.patches[0].work = 5.0
    bench.applied("p0", four, on(three), decode_us=4000)
    bench.applied("w0", four, decode_us=1)
    five, _ = bench.publish()
    bench.applied("p0", five, on(four), decode_us=7)
    assert not five.patches[0].work, "nobody knows"
    [taker] = bench.machine.state.roster.patch_candidates("a", None, shared=False)
    assert taker.decode == pytest.approx({False: 4e-4, True: 6e-4})


def test_a_patch_is_sealed_under_a_key_of_its_own() -> None:
    one, two = Version(offer(1), 7, 1), Version(offer(2), 7, 2)
    data = weights(2).tobytes()[:400]
    made = VersionPatch(two, OfferedPatch(DELTA, Running(7, 1, one.digest), data))
    group = GroupKey(b"g" * 32)
    sealer = Sealer(lambda: group.key, lambda _model, nbytes: np.zeros(nbytes, np.uint8))
    chunk, sealed = sealer.chunk(made, 1)
    assert (chunk.index, chunk.patch) == (1, on(one))
    subject = Subject("a", 7, 2, 400, CHUNK, DELTA, (7, 1))
    key, plain = group.version_key(subject), bytearray(400 - CHUNK)
    about = subject.associated(purpose := 1, 1, len(plain))
    opening = Opening(key, nonce_of(purpose, 1), about, bytes.fromhex(chunk.tag))
    assert opening.decrypt(sealed, plain) is not None
    assert plain == data[CHUNK:]


class CountedSnapshot(PlainSnapshot):
    """Bytes of which it is known how many keep them."""

    keepers = 0

    def keep(self) -> NDArray[np.uint8] | None:
        self.keepers += 1
        return super().keep()

    def let_go(self) -> None:
        self.keepers -= 1


def counted(
    number: int, chunk: int = CHUNK, *, hashed: bool = True
) -> tuple[VersionOffer, CountedSnapshot]:
    snapshot = CountedSnapshot(weights(number))
    made = VersionOffer.of("a", LAYOUT, chunk, snapshot)
    if hashed:
        hash_all(made)
    return made, snapshot


def runs(made: VersionOffer, number: int = 1, rate: float = math.inf) -> list[PatchCandidate]:
    return [PatchCandidate(Running(7, number, made.chunks.digest), rate)]


def test_nothing_builds_on_what_was_not_hashed_and_nothing_is_hashed_in_vain() -> None:
    bases, (one, kept), (two, _) = Bases("a"), counted(1, hashed=False), counted(2, hashed=False)
    bases.offer(one, "delta", [PatchCandidate(None)])
    bases.offer(two, "delta", [PatchCandidate(Running(7, 1, ""))])  # it was read in shared memory
    assert (two.patches, kept.keepers) == ((), 1)
    assert not one.chunks.digest
    assert not two.chunks.digest
    three, _ = counted(3, hashed=False)
    hash_all(two)
    bases.offer(three, "delta", runs(two))
    assert len(three.patches) == 1
    assert three.chunks.digest


def test_whatever_ends_an_offer_in_the_middle_keeps_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = PublishedModel("a", CHUNK, share=False)
    (one, kept), (two, snapshot) = counted(1), counted(2)
    model.bases.offer(one, "delta", [PatchCandidate(None)])
    monkeypatch.setattr(models, "encode", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.offer(two, "delta", lambda: runs(one), NEVER, to_all=True)
    assert (snapshot.keepers, snapshot.phase) == (0, "over")
    assert kept.keepers == 1, "what was kept before still is"


def raising(kind: type[BaseException]) -> Callable[..., bytes]:
    def encode_nothing(*_arguments: object, **_options: object) -> bytes:
        raise kind

    return encode_nothing


def test_patches_leave_some_of_the_timeout_to_the_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (one, _), (two, _), now = counted(1), counted(2), [0.0]
    monkeypatch.setattr("weightbus.bus.deadline.time.monotonic", lambda: now[0])
    bases, deadline = Bases("a"), Deadline(100.0, "too late")

    def slow(*arguments: Any, step: Callable[[], object], **options: Any) -> bytes:
        now[0] = 51.0
        step()
        return encode_patch(*arguments, step=step, **options)

    bases.offer(one, "delta", [PatchCandidate(None)], deadline)
    monkeypatch.setattr(models, "encode", slow)
    bases.offer(two, "delta", runs(one), deadline)
    assert (two.patches, two.keep) == ((), True)
    assert "50% of the time left" in caplog.text
    deadline.check()


def test_a_check_of_a_patch_can_be_ended_between_two_blocks() -> None:
    layout = Layout.plan([("a", "F32", (100,)), ("b", "BF16", (100,))])
    old = np.zeros(layout.nbytes, np.uint8)
    new, steps = old + np.uint8(1), [0]

    def step() -> None:
        steps[0] += 1

    digests = "0" * 64, "1" * 64
    data = encode_patch(layout, old, new, digests=digests, check=False)
    Delta(layout, data).compare(old, new, step)
    assert steps == [2]


def test_there_are_no_patches_between_versions_of_other_chunks() -> None:
    bases, (one, kept), (two, _) = Bases("a"), counted(1), counted(2, 2 * CHUNK)
    bases.offer(one, "delta", [PatchCandidate(None)])
    bases.offer(two, "delta", runs(one), to_all=False)
    assert (two.patches, kept.keepers) == ((), 1)
    three, _ = counted(3, 2 * CHUNK)
    bases.offer(three, "delta", [*runs(one), *runs(two, 2)])
    assert not kept.keepers
    assert [patch.base for patch in three.patches] == [runs(two, 2)[0].running]


@pytest.mark.parametrize("to_all", [True, False])
def test_a_publish_to_some_takes_nothing_from_the_others(to_all: bool) -> None:
    bases, (one, kept), (two, _) = Bases("a"), counted(1), counted(2)
    bases.offer(one, "delta", [PatchCandidate(None)])
    bases.offer(two, "raw", [], to_all=to_all)
    assert kept.keepers == (0 if to_all else 1)


def test_memory_that_was_kept_for_patches_alone_is_given_back() -> None:
    model, last = PublishedModel("a", CHUNK, share=False), None
    ways: list[Encoding] = ["delta", "delta", "delta", "raw", "raw", "raw"]
    held: list[int] = []
    for number, encoding in enumerate(ways):
        made, _ = model.snapshot({"w": weights(number)}, replaces_latest=True)
        model.offer(made, encoding, lambda: [PatchCandidate(None)], NEVER, to_all=True)
        if last is not None:
            last.snapshot.release()
        made.snapshot.make_reclaimable()
        last = made
        held.append(len(model.pool))
    assert held == [1, 2, 3, 2, 1, 1]


# What pays.


def offered(encoding: Any, rate: float, share: float = 0.01) -> int:
    """Return how many patches are offered to a worker that runs the version before."""
    bases, one, two = Bases("a"), offer(0), offer(1, share)
    bases.offer(one, encoding, [PatchCandidate(None, rate)])
    bases.offer(two, encoding, runs(one, rate=rate))
    assert one.keep == two.keep == (encoding != "raw")
    return len(two.patches)


@pytest.mark.parametrize(
    ("encoding", "rate", "share", "count"),
    [
        ("raw", 1e4, 0.01, 0),
        ("delta", math.inf, 0.01, 1),
        ("auto", math.inf, 0.01, 0),
        ("auto", 1e12, 0.01, 0),
        ("auto", 1e4, 0.01, 1),
    ],
)
def test_a_patch_is_offered_where_it_pays(
    encoding: str, rate: float, share: float, count: int
) -> None:
    assert offered(encoding, rate, share) == count


def test_auto_learns_how_fast_it_encodes_though_nothing_seemed_to_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "ENCODE_PACE", 1.0)
    assert offered("auto", 1e4) == 1


def test_one_slow_encode_does_not_end_patches_for_ever() -> None:
    bases, (one, _) = Bases("a"), counted(1)
    bases.offer(one, "auto", [PatchCandidate(None)])
    made: list[int] = []
    for number in range(2, 4 + models.PACE_EVERY):
        two, _ = counted(number)
        bases.offer(two, "auto", runs(one, rate=1e4))
        made.append(len(two.patches))
        if number == 2:
            bases._encode[:] = 1.0, 1.0  # noqa: SLF001 # pyright: ignore
        one = two
    assert (made[0], made[1], made[-1]) == (1, 0, 1)


def test_a_sample_is_the_largest_group_and_a_layout_of_its_own() -> None:
    layout = Layout.plan([("a", "F4", (10,)), ("b", "BF16", (3, 1000)), ("c", "F32", (5,))])
    some, where = sample(layout)
    spec = next(s for s in layout.tensors if s.name == "b")
    assert where == slice(spec.begin, spec.end)
    assert (some.tensors[0].dtype, some.nbytes) == ("BF16", 6000)
    some, where = sample(Layout.plan([("a", "F4", (10,))]))
    assert some.nbytes == where.stop == 5


def test_where_everything_changed_auto_does_not_try() -> None:
    old, rng = weights(0), np.random.default_rng(1)
    new = rng.integers(0, 256, old.size, np.uint8)
    would = estimate(LAYOUT, old, new)
    assert min(would.sizes) > 0.9 * old.size
    assert would.work > 0.9 * CHANGED


@pytest.mark.parametrize("share", [0.002, 0.2])
def test_an_estimate_is_about_right(share: float) -> None:
    rng = np.random.default_rng(3)
    old = weights(0)
    bits = old.view(np.uint16).copy()
    bits[rng.random(COUNT) < share] ^= 1
    new = bits.view(np.uint8)
    (flat, classes), work = estimate(LAYOUT, old, new)
    assert work == pytest.approx(1 + CHANGED * share, rel=0.2)
    size = len(encode_patch(LAYOUT, old, new))
    assert 0.5 * size < classes < 1.5 * size
    size = len(encode_patch(LAYOUT, old, new, classes=False))
    assert 0.5 * size < flat < 1.5 * size


WOULD = Estimate((20_000, 14_000), 1.0)  # of patches to a version of a megabyte
paces = st.tuples(*[st.floats(1e-11, 1e-6)] * 2)


@given(
    sizes=st.tuples(*[st.floats(1, 2e6)] * 2),
    rate=st.floats(1e3, 1e11),
    encode=paces,
    decode=paces,
    work=st.floats(1, 41),
)
def test_what_is_chosen_is_there_soonest(
    sizes: tuple[float, float],
    rate: float,
    encode: tuple[float, float],
    decode: tuple[float, float],
    work: float,
) -> None:
    whole, nbytes = 1e6 / rate, 10**6
    ways = [work * (encode[c] + decode[c]) * nbytes + sizes[c] / rate for c in (False, True)]
    way = chosen(nbytes, Estimate(sizes, work), rate, encode, decode)
    took = whole if way is None else ways[way.classes]
    assert took <= WORTH * min(whole, *ways) * (1 + 1e-9)
    assert may_pay(rate, encode, decode) or way is None


def way(
    patch_candidates: list[PatchCandidate], monkeypatch: pytest.MonkeyPatch, *, anew: bool = False
) -> bool | None:
    """Return what is chosen for workers that decode as fast as the publisher, unless they say."""
    monkeypatch.setattr(models, "estimate", lambda *_: WOULD)
    bases = Bases("a")
    monkeypatch.setattr(bases, "_measure", lambda *_: None)
    bases._encode[:] = 1e-10, 2e-10  # noqa: SLF001 # pyright: ignore
    bases._decode[:] = 1e-10, 2e-10  # noqa: SLF001 # pyright: ignore
    bases._decisions = 0 if anew else 1  # noqa: SLF001 # pyright: ignore
    layout = Layout.plan([("w", "BF16", (500_000,))])
    found = bases.choose(layout, weights(0), weights(1), patch_candidates)
    return None if found is None else found.classes


def test_one_patch_is_for_the_slowest_that_gains_by_any(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick, there = (
        PatchCandidate(None, 1e6),
        PatchCandidate(None, 1e8),
        PatchCandidate(None, 5e9),
    )
    busy = PatchCandidate(
        None, 2e5, {False: 1e-4, True: 1e-4}
    )  # it decodes for longer than it waits
    for patch_candidates, classes in (
        ([slow], True),
        ([quick], False),
        ([there], None),
        ([PatchCandidate(None, math.inf)], None),
        ([there, quick, slow], True),
        ([quick, there], False),
        ([busy, there], None),
        ([quick, busy], False),
        ([PatchCandidate(None, 1e6, {True: 1e-7})], False),
    ):
        assert way(patch_candidates, monkeypatch) is classes, patch_candidates


def test_a_kind_of_patch_that_once_took_long_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taker = PatchCandidate(None, 1e8, {False: 1e-8})
    assert way([taker], monkeypatch) is True
    assert way([taker], monkeypatch, anew=True) is False


def test_a_patch_is_made_as_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    bits = weights(0).view(np.uint16).copy()
    bits[np.argsort(bits >> 7 & 255)[:400]] ^= 1  # small ones alone, as in training
    for classes in (True, False):
        bases, one = Bases("a"), offer(0)
        two = VersionOffer.of("a", LAYOUT, CHUNK, PlainSnapshot(bits.view(np.uint8)))
        hash_all(two)
        monkeypatch.setattr(bases, "choose", lambda *_, classes=classes: Way(classes, 2.0))
        bases.offer(one, "auto", [PatchCandidate(None)])
        bases.offer(two, "auto", runs(one))
        [patch] = two.patches
        assert (patch.classes, patch.work) == (classes, 2.0 * LAYOUT.nbytes)
        sizes.append(len(patch.data))
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(("gain", "pays"), [(WORTH + 0.02, True), (WORTH - 0.02, False)])
def test_a_patch_must_save_a_little_more_than_it_takes(gain: float, pays: bool) -> None:
    """So much is not known of links, and no more is given away."""
    cost = 1e-9, 1e-9
    found = chosen(10**6, Estimate((0.0, 0.0), 1.0), 1e9 / gain, cost, (0.0, 0.0))
    assert (found is not None) == pays
    assert WORTH <= 1.1
