"""What a worker receives is given out by a publisher from where it lies, while it is on its way.

There is no relay here, but what one is made of: a worker's machine, a publisher's, and the map of
chunks that both have. Further down, a second worker ends with the same bytes and the same digest.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.chunks import Chunks, Memory
from weightbus.bus.effects import Decode, Ready, Send
from weightbus.bus.effects import Effect as WorkerEffect
from weightbus.bus.headers import encode
from weightbus.bus.limits import SNAPSHOTS_MAX, Timing
from weightbus.bus.messages import (
    RELAY,
    Announce,
    Below,
    Bye,
    Chunk,
    Doing,
    End,
    Fetch,
    Hello,
    Ping,
    Pong,
    Refuse,
    Running,
    Shared,
    Welcome,
    Whole,
    WorkerRow,
)
from weightbus.bus.protocol_limits import FETCH_CHUNKS_MAX
from weightbus.bus.publisher import offers
from weightbus.bus.publisher.effects import (
    Broadcast,
    BroadcastChunk,
    Effect,
    Hash,
    SendChunk,
    Stamp,
)
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import NO_TERMS, AnnouncedTerms, Version, VersionOffer
from weightbus.bus.staged import Patching, StagedVersion
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Outcome, Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs.checksum import digest
from weightbus.tests.simulation.performing import done
from weightbus.tests.simulation.virtual_shell import perform, version_of

EPOCH, CHUNK, CHUNKS = 7, 16, 5
NBYTES = CHUNK * CHUNKS - 5
TIMING = Timing()
HELLO = Hello(name="x", instance="b" * 32, models={"a": None})


def data_of(number: int, nbytes: int = NBYTES) -> Memory:
    return (np.arange(nbytes) * 3 + number).astype(np.uint8)


def version(number: int, nbytes: int = NBYTES, chunk: int = CHUNK) -> Version:
    """Return a version as it was published far up."""
    return version_of(number, data_of(number, nbytes), chunk, EPOCH)


def fetch(first: int, count: int) -> Fetch:
    return Fetch(model="a", epoch=EPOCH, version=1, first=first, count=count)


def address_of(memory: object) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)  # type: ignore[call-overload]


class Worker:
    """A worker's machine, what it has ready for its user, and the patches that it decodes."""

    def __init__(self, name: str, *features: str) -> None:
        identity = Hello(
            name=name,
            instance="a" * 32,
            models={},
            client="client",
            host="host",
            pid=5,
            features=[*features],
        )
        self.machine = WorkerMachine(identity, ["a"], lambda _m, _l: "", 2**20, TIMING)
        self.versions = self.machine.followers["a"].versions
        self.ready: list[StagedVersion] = []
        self.jobs: list[Patching] = []
        self.said: list[Message] = []

    def does(self, effects: list[WorkerEffect], now: float) -> None:
        for effect in done(self.machine, effects, now):
            if isinstance(effect, Ready):
                self.ready.append(effect.staged)
            elif isinstance(effect, Decode):
                self.jobs.append(effect.patching)
            elif isinstance(effect, Send):
                self.said.append(effect.message)

    def hears(self, message: Message, now: float, *payload: object) -> None:
        frames = [encode(message), *payload]
        self.does(self.machine.receive(frames, now), now)  # type: ignore[arg-type]

    def ends(self, what: Outcome, now: float) -> None:
        """The user has applied what is ready, or has it let go of."""
        key, lies_in = self.ready[-1].key, self.ready[-1].private_bytes
        for each in ("taken", what):
            self.does(self.machine.happened(Report("a", key, each, bytes=lies_in), now), now)

    @property
    def arriving(self) -> Chunks[Memory]:
        """What arrives, as far as it has."""
        held = self.versions.in_phase["arriving"]
        assert held is not None
        return held.chunks


class Chain:
    """A worker that hears of what was published, a publisher beside it, and workers below that."""

    features: ClassVar[tuple[str, ...]] = ()  # of all workers

    def __init__(self, *below: str) -> None:
        self.now = 0.0
        self.above = Worker("above", *self.features)
        welcome = Welcome(epoch=EPOCH, data="tcp://d:1", ping_ms=1000, lost_ms=5000, models={})
        self.above.does(self.above.machine.connected(0.0), 0.0)
        self.above.hears(welcome, 0.0)
        self.publisher = PublisherMachine(PublisherState(EPOCH, "tcp://d:2", TIMING, origin=False))
        self.below = {name: Worker(name, *self.features) for name in below}
        self.hashes: list[Version] = []  # which somebody wanted hashed
        self.places: list[int] = []  # of the bytes that were given out
        self.drops: Callable[[], bool] = lambda: False

    def arrives(self, made: Version, indexes: Iterable[int]) -> None:
        """Chunks come from far up."""
        for index in indexes:
            message, payload = offers.chunk_of(made, index)
            self.above.hears(message, self.now, bytes(payload))

    def begins(self, made: Version) -> Chunks[Memory]:
        """A version is announced from far up."""
        announce = offers.announcement(made)
        self.above.hears(announce, self.now, made.layout.header)
        return self.above.arriving

    def ends(self, made: Version) -> None:
        self.above.hears(offers.end_of(made), self.now)

    def does(self, effects: list[Effect]) -> None:
        """Do what the publisher beside it wants, and whatever follows from that."""
        self.hashes += [e.version for e in effects if isinstance(e, Hash)]
        for effect in perform(self.publisher, effects, self.now):
            if isinstance(effect, Send):
                payload = [] if effect.payload is None else [effect.payload]
                if isinstance(effect.message, Chunk):
                    self.places.append(address_of(payload[0]))
                    if self.drops():
                        continue
                self.below[effect.to.decode()].hears(effect.message, self.now, *payload)
            elif isinstance(effect, Broadcast):
                payload = [] if effect.payload is None else [effect.payload]
                layout = isinstance(effect.message, Announce) and effect.message.whole is None
                self.places += [address_of(p) for p in payload if not layout]
                frames = [effect.topic, encode(effect.message), *payload]
                for worker in self.below.values():
                    worker.does(worker.machine.receive_published(frames, self.now), self.now)
        self.talk()

    def talk(self) -> None:
        """Have the publisher hear whatever the workers below have said."""
        for name, worker in self.below.items():
            while worker.said:
                said = [encode(worker.said.pop(0))]
                self.does(self.publisher.receive(name.encode(), said, self.now))

    def joins(self, name: str, *, listens: bool = False) -> None:
        worker = self.below[name]
        worker.does(worker.machine.connected(self.now), self.now)
        if listens:
            worker.said.append(Ping(token=1, subscribed=True))
        self.talk()

    def hears(self, *messages: Message) -> None:
        """Have the publisher hear a worker that is not among those below."""
        for message in messages:
            self.publisher.receive(b"x", [encode(message)], 0.0)

    def passes(self, seconds: float) -> None:
        """Time passes for everybody below."""
        self.now += seconds
        for worker in self.below.values():
            worker.does(worker.machine.tick(self.now), self.now)
        self.does(self.publisher.tick(self.now))

    def offers(
        self, made: Version, chunks: Chunks[Memory], terms: AnnouncedTerms = NO_TERMS
    ) -> Version:
        """Pass a version on, as far as it is here."""
        offer = VersionOffer.received("a", made.layout, chunks, made.key, terms)
        passed, effects = self.publisher.pass_on(offer, self.now)
        self.does(effects)
        return passed

    def more(self, passed: Version) -> None:
        """Say that more is here, and push it."""
        self.does(self.publisher.arrived(passed, self.now))
        while self.publisher.ready:
            self.does(self.publisher.push(self.now))


def test_what_is_here_is_given_out_and_the_rest_as_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, chain, hashed = version(1), Chain("below"), list[str]()
    chunks = chain.begins(made)
    place = address_of(chunks.memory)
    chain.arrives(made, (0, 2))
    passed = chain.offers(made, chunks)

    def counted(layout: str, size: int, crcs: list[int]) -> str:
        hashed.append(digest(layout, size, crcs))
        return hashed[-1]

    monkeypatch.setattr("weightbus.bus.chunks.digest", counted)
    monkeypatch.setattr(offers, "crc32c", None)  # nothing is hashed anew

    chain.joins("below")
    below = chain.below["below"]
    assert [i for i in range(CHUNKS) if below.arriving.has(i)] == [0, 2]
    chain.arrives(made, (4,))
    chain.more(passed)
    assert [i for i in range(CHUNKS) if below.arriving.has(i)] == [0, 2, 4]
    chain.arrives(made, (1, 3))
    chain.more(passed)
    assert below.arriving.here == CHUNKS
    assert (passed.digest, below.ready, hashed) == ("", [], []), "nobody has said what it hashes to"
    chain.ends(made)
    chain.more(passed)
    assert passed.key == made.key
    assert hashed == [made.digest] * 2, "each worker proves it, and the publisher takes it"
    (above,), (there,) = chain.above.ready, below.ready
    assert bytes(above.data) == bytes(there.data) == bytes(data_of(1))
    assert above.digest == there.digest == passed.digest == made.digest
    assert address_of(chunks.memory) == address_of(above.data) == place
    assert sorted(chain.places) == [place + CHUNK * i for i in range(CHUNKS)], "not a copy"
    assert chain.hashes == []


def test_what_came_in_one_message_is_given_out_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    first, made = version(1, 12), version(2, 12)
    chain = Chain("below")
    for each in (first, made):
        whole = Whole(crc=each.chunks.crcs[0] or 0, digest=each.digest)
        announce = offers.announcement(each)
        chain.above.hears(announce, chain.now, each.layout.header)
        payload = bytes(data_of(each.version, 12))
        told = {f: getattr(announce, f) for f in announce.__struct_fields__} | {"whole": whole}
        chain.above.hears(Announce(**told), chain.now, payload)
        if each is first:
            chain.above.ends("applied", chain.now)
    held = chain.above.versions.in_phase["ready"]
    assert held is not None
    assert held.chunks is not None
    assert held.chunks.crcs == made.chunks.crcs
    assert held.chunks.memory is held.staged.data
    chain.offers(made, held.chunks)
    monkeypatch.setattr(offers, "crc32c", None)
    chain.joins("below")
    (there,) = chain.below["below"].ready
    assert (there.key, there.digest) == (made.key, made.digest)
    assert bytes(there.data) == bytes(data_of(2, 12))
    assert chain.places == [address_of(held.chunks.memory)]


def test_memory_that_is_given_out_is_not_used_for_another_version() -> None:
    chain, one = Chain("soon", "late"), version(1)
    chunks = chain.begins(one)
    passed = chain.offers(one, chunks)
    chain.joins("soon")
    chain.arrives(one, range(CHUNKS))
    chain.ends(one)
    chain.more(passed)
    chain.above.ends("applied", chain.now)
    assert chunks.in_use, "the worker above has applied it, and needs the memory no more"
    for number in (2, 3, 4):
        made = version(number)
        other = chain.begins(made)
        assert not np.shares_memory(other.memory, chunks.memory)
        chain.arrives(made, range(CHUNKS))
        chain.ends(made)
        chain.above.ends("applied", chain.now)
    chain.joins("late")
    for worker in chain.below.values():
        (there,) = worker.ready
        assert bytes(there.data) == bytes(data_of(1))
    assert (passed.digest, chunks.digest) == (one.digest, one.digest)


def test_memory_serves_the_next_version_once_nobody_gives_it_out() -> None:
    chain, one, two = Chain("below"), version(1), version(2)
    chunks = chain.begins(one)
    chain.arrives(one, range(CHUNKS))
    chain.ends(one)
    passed = chain.offers(one, chunks)
    sending = passed.snapshot.chunk(0, CHUNK)  # as a socket does
    chain.offers(two, chain.begins(two))
    assert passed.gone, "another one takes its place, and nobody is at it"
    gc.collect()
    assert chunks.in_use
    del sending
    gc.collect()
    assert not chunks.in_use
    chain.above.ends("applied", chain.now)
    chain.arrives(two, range(CHUNKS))
    chain.ends(two)
    assert chain.begins(version(3)).memory is chunks.memory


def relayed(chain: Chain, made: Version) -> tuple[Version, Chunks[Memory]]:
    """Receive, pass on and apply a version."""
    chunks = chain.begins(made)
    passed = chain.offers(made, chunks)
    chain.arrives(made, range(CHUNKS))
    chain.ends(made)
    chain.more(passed)
    chain.above.ends("applied", chain.now)
    return passed, chunks


def test_a_stream_of_versions_that_are_given_out_uses_two_buffers_in_turn() -> None:
    chain = Chain()
    places = [address_of(relayed(chain, version(n))[1].memory) for n in range(1, 9)]
    assert places == [places[0], places[1]] * 4


def test_only_so_many_buffers_are_on_loan() -> None:
    chain, most = Chain(), SNAPSHOTS_MAX + 1
    sending = [relayed(chain, version(n))[0].snapshot.chunk(0, CHUNK) for n in range(1, most + 1)]
    made = version(most + 1)
    chain.above.hears(offers.announcement(made), chain.now, made.layout.header)
    waiting = chain.above.versions.in_phase["announced"]
    assert waiting is not None
    assert (waiting.key, waiting.lacks) == (made.key, "buffer")
    place = address_of(sending.pop(1))
    gc.collect()
    chain.above.does(chain.above.machine.tick(chain.now), chain.now)
    assert address_of(chain.above.arriving.memory) == place


def test_memory_of_another_size_is_not_kept() -> None:
    chain = Chain()
    old = weakref.ref(relayed(chain, version(1))[1].memory)
    chain.above.ready.clear()
    for number in (2, 3):
        relayed(chain, version(number, 2 * NBYTES, 2 * CHUNK))
    gc.collect()
    assert old() is None


def test_a_relay_keeps_no_more_versions_than_a_publisher_for_those_that_receive_them() -> None:
    chain, store = Chain(), list[Version]()
    for number in range(1, SNAPSHOTS_MAX + 3):
        passed, _ = chain.publisher.pass_on(received(number)[1], chain.now)
        name, store = f"w{number}", [*chain.publisher.state.store["a"]]
        hello = Hello(name=name, instance="b" * 32, models={"a": None})
        asks = Fetch(model="a", epoch=EPOCH, version=number, first=0, count=1)
        told(chain, hello, asks, name=name.encode())
        assert len(store) == min(number, SNAPSHOTS_MAX), "each but the last is received by one"
        assert passed in store


def test_who_asks_for_what_is_not_here_waits_no_longer_than_it_takes_to_ask_again() -> None:
    for late in (False, True):
        chain, made = Chain(), version(1)
        passed = chain.offers(made, chain.begins(made))
        chain.hears(HELLO, fetch(1, 3))
        chain.arrives(made, range(CHUNKS))
        now = TIMING.patience_max - 0.1 + late
        given = chain.publisher.arrived(passed, now)
        assert len(given) == 3 * (not late)
        assert chain.publisher.arrived(passed, now) == [], "once"


def test_what_a_worker_waits_for_is_bounded() -> None:
    count = 4 * FETCH_CHUNKS_MAX
    chain, made = Chain(), version(1, count, 1)
    passed = chain.offers(made, chain.begins(made))
    chain.hears(HELLO)
    for first in range(0, count, FETCH_CHUNKS_MAX):
        chain.hears(fetch(first, FETCH_CHUNKS_MAX))
    (waits,) = passed.waits.values()
    assert [*waits] == [*range(count - FETCH_CHUNKS_MAX, count)], "the newest"
    chain.hears(Bye())
    assert passed.waits == {}


def test_who_waits_for_a_version_that_is_gone_is_given_nothing() -> None:
    chain, made = Chain(), version(1)
    passed = chain.offers(made, chain.begins(made))
    chain.hears(HELLO, fetch(1, 3))
    among = [passed.snapshot]
    chain.does(chain.publisher.make_room("a", among, replaces_latest=True))
    assert passed.gone
    chain.arrives(made, range(CHUNKS))
    assert chain.publisher.arrived(passed, 0.0) == []


def test_a_push_goes_as_far_as_what_is_here() -> None:
    chain, made = Chain("below"), version(1)
    chain.joins("below", listens=True)
    chunks = chain.begins(made)
    chain.arrives(made, (0, 1, 3))
    passed = chain.offers(made, chunks, AnnouncedTerms(hash=True))
    below = chain.below["below"]
    told = made.layout.header
    below.hears(offers.announcement(made), chain.now, told)
    chain.more(passed)
    assert [i for i in range(CHUNKS) if below.arriving.has(i)] == [0, 1]
    for _ in range(4):
        chain.passes(TIMING.quiet)
    (push,) = chain.publisher.state.pushes.values()
    assert (push.next, push.stalled) == (2, False), "nobody can follow what is not here"
    chain.arrives(made, (2,))
    chain.more(passed)
    assert push.next == 4
    chain.arrives(made, (4,))
    chain.ends(made)
    chain.more(passed)
    assert [(s.key, s.digest) for s in below.ready] == [(made.key, made.digest)]
    assert chain.publisher.state.pushes == {}
    assert chain.hashes == [], "what is on its way is hashed by whoever receives it"


def test_a_version_of_one_chunk_goes_along_with_its_announcement_only_if_it_is_here() -> None:
    chain, one, two = Chain("below"), version(1, 12), version(2, 12)
    chain.joins("below", listens=True)
    for made in (one, two):
        chunks, before = chain.begins(made), len(chain.places)
        passed = chain.offers(made, chunks)
        assert len(chain.places) == before, "nothing of it is here"
        assert passed.chunks.here == 0
        chain.passes(2 * TIMING.quiet)
        chain.arrives(made, (0,))
        chain.ends(made)
        chain.more(passed)
        chain.passes(2 * TIMING.quiet)
        assert [s.key for s in chain.below["below"].ready] == [made.key]
        chain.below["below"].ends("applied", chain.now)
        chain.below["below"].ready.clear()
        chain.talk()


def test_what_came_as_a_patch_is_hashed_when_it_is_given_out() -> None:
    chain, made = Chain("below"), version(1)
    chunks: Chunks[Memory] = Chunks(made.plan, data_of(1), [None] * CHUNKS, made.layout.id)
    chunks.fill(made.digest)
    chain.offers(made, chunks)
    chain.joins("below")
    (there,) = chain.below["below"].ready
    assert (bytes(there.data), there.digest) == (bytes(data_of(1)), made.digest)
    assert chunks.crcs == made.chunks.crcs


def test_a_copy_to_keep_is_made_of_all_or_nothing() -> None:
    chain, made = Chain(), version(1)
    chunks = chain.begins(made)
    passed = VersionOffer.received("a", made.layout, chunks)
    assert passed.snapshot.keep() is None
    chain.arrives(made, range(CHUNKS))
    assert passed.snapshot.keep() is None, "it may be another version's"
    chain.ends(made)
    kept = passed.snapshot.keep()
    assert kept is not None
    assert bytes(kept) == bytes(data_of(1))


@given(st.permutations(range(CHUNKS)), st.data())
def test_in_any_order_and_with_any_loss_the_same_arrives_below(
    order: list[int], data: st.DataObject
) -> None:
    chain, made = Chain("below"), version(1)
    chunks = chain.begins(made)
    passed = chain.offers(made, chunks)
    chain.drops = lambda: data.draw(st.booleans(), "lost")
    joins, wrong = data.draw(st.integers(0, CHUNKS)), data.draw(st.booleans(), "wrong end")
    for count, index in enumerate(order):
        if count == joins:
            chain.joins("below")
        chain.arrives(made, [index])
        chain.more(passed)
    if joins == CHUNKS:
        chain.joins("below")
    if wrong:  # all is received anew; what was given out stays
        chain.above.hears(End(model="a", epoch=EPOCH, version=1, digest="0" * 64), chain.now)
        assert chunks.here == 0
        chain.more(passed)
        assert passed.digest == ""
        chain.arrives(made, order)
    chain.ends(made)
    chain.more(passed)
    chain.drops = lambda: False
    for _ in range(40):
        chain.passes(1.0)
    (there,) = chain.below["below"].ready
    assert (bytes(there.data), there.digest) == (bytes(data_of(1)), made.digest)


def told(chain: Chain, *messages: Message, name: bytes = b"x") -> list[Message]:
    """Return what the publisher answers to a worker that is not among those below."""
    effects = [e for m in messages for e in chain.publisher.receive(name, [encode(m)], chain.now)]
    return [effect.message for effect in effects if isinstance(effect, Send)]


def received(number: int, epoch: int = EPOCH) -> tuple[Version, VersionOffer]:
    """Return a version that is whole above, and an offer of it."""
    made = version_of(number, data_of(number), CHUNK, epoch)
    chunks: Chunks[Memory] = Chunks(made.plan, data_of(number), [None] * CHUNKS, made.layout.id)
    chunks.fill(made.digest)
    return made, VersionOffer.received("a", made.layout, chunks, made.key)


def test_a_version_keeps_its_name_and_numbers_may_be_missing() -> None:
    chain = Chain("below")
    chain.joins("below", listens=True)
    for number in (3, 7):
        made = version(number)
        chunks = chain.begins(made)
        chain.arrives(made, range(CHUNKS))
        chain.ends(made)
        chain.above.ends("applied", chain.now)
        passed = chain.offers(made, chunks)
        chain.more(passed)
        assert passed.key == made.key == (EPOCH, number)
        below = chain.below["below"]
        assert [staged.key for staged in below.ready] == [made.key]
        below.ends("applied", chain.now)
        below.ready.clear()
        chain.talk()
        assert chain.publisher.status(chain.now)[0].running == {"a": made.key}
    (kept,) = chain.publisher.state.store["a"]
    assert kept is passed


@pytest.mark.parametrize("key", [None, (EPOCH, 4), (EPOCH, 5), (EPOCH - 1, 9)])
def test_a_version_that_is_not_newer_is_not_passed_on(key: tuple[int, int] | None) -> None:
    chain = Chain()
    chain.publisher.pass_on(received(5)[1], chain.now)
    _, offer = received(6)
    offer.key = key
    with pytest.raises(ValueError, match=r"cannot offer|comes after"):
        chain.publisher.pass_on(offer, chain.now)
    assert [each.key for each in chain.publisher.state.store["a"]] == [(EPOCH, 5)]


def test_a_worker_may_run_what_it_has_from_another_relay() -> None:
    chain = Chain()
    chain.publisher.pass_on(received(5)[1], chain.now)
    elsewhere, _ = received(8)
    running = Running(*elsewhere.key, elsewhere.digest)
    hello = Hello(name="x", instance="b" * 32, models={"a": running}, epoch=EPOCH)
    (welcome,) = told(chain, hello)
    assert isinstance(welcome, Welcome)
    assert chain.publisher.status(0.0)[0].running == {"a": elsewhere.key}
    wrong = Running(EPOCH, 5, "0" * 64)
    told(chain, Hello(name="y", instance="c" * 32, models={"a": wrong}, epoch=EPOCH), name=b"y")
    by_name = {status.name: status.running for status in chain.publisher.status(0.0)}
    assert by_name == {"x": {"a": elsewhere.key}, "y": {}}, "its own it checks"


def test_a_relay_takes_the_epoch_of_what_it_passes_on() -> None:
    chain, later = Chain(), EPOCH + 10
    old, effects = chain.publisher.pass_on(received(5)[1], chain.now)
    (welcome,) = told(chain, HELLO)
    assert isinstance(welcome, Welcome)
    ahead = Running(later, 1, received(1, later)[0].digest)
    hello = Hello(name="y", instance="c" * 32, models={"a": ahead}, epoch=later)
    (refusal,) = told(chain, hello, name=b"y")
    assert isinstance(refusal, Refuse)
    assert (refusal.code, "this relay" in refusal.text) == ("stale-epoch", True)
    made, offer = received(1, later)
    passed, effects = chain.publisher.pass_on(offer, chain.now)
    assert passed.key == made.key
    assert old.gone
    pongs = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Pong)]
    assert [pong.epoch for pong in pongs] == [later], "so that the worker says hello"
    (welcome,) = told(chain, HELLO)
    assert isinstance(welcome, Welcome)
    assert (welcome.epoch, welcome.models) == (later, {"a": 1})
    (welcome,) = told(chain, hello, name=b"y")
    assert isinstance(welcome, Welcome)


@pytest.mark.parametrize("commit", [True, False])
def test_the_origin_decides_for_a_relay_as_well(commit: bool) -> None:
    chain = Chain("soon", "late")
    chain.joins("soon", listens=True)
    made, offer = received(5)
    offer.terms = AnnouncedTerms("together", "staged")
    passed, effects = chain.publisher.pass_on(offer, chain.now)
    chain.does(effects)
    chain.more(passed)
    chain.passes(TIMING.ping)
    chain.joins("late")
    chain.passes(TIMING.ping)
    for worker in chain.below.values():
        assert worker.versions.in_phase["staged"] is not None, "announced to who joins as well"
        assert worker.ready == []
    assert passed.phase == "pending"
    chain.does(chain.publisher.decide(passed, commit=commit, why="too few"))
    chain.passes(TIMING.ping)
    for worker in chain.below.values():
        assert [staged.key for staged in worker.ready] == ([made.key] if commit else [])
        assert worker.versions.in_phase["staged"] is None
    assert (passed.gone, passed.terms == NO_TERMS) == (not commit, commit)
    assert chain.publisher.decide(passed, commit=not commit) == [], "once"


def test_a_newer_version_ends_one_that_is_undecided() -> None:
    chain = Chain("below")
    chain.joins("below", listens=True)
    _, first = received(5)
    first.terms = AnnouncedTerms("together", "staged")
    pending, effects = chain.publisher.pass_on(first, chain.now)
    chain.does(effects)
    made, offer = received(6)
    passed, effects = chain.publisher.pass_on(offer, chain.now)
    chain.does(effects)
    chain.more(passed)
    chain.passes(TIMING.ping)
    assert (pending.phase, passed.phase) == ("gone", "reclaimable")
    assert [staged.key for staged in chain.below["below"].ready] == [made.key]


class FakeSegment:
    """A segment that notes its stamps."""

    shared = Shared(path="/proc/1/fd/9", token="0" * 32)

    def __init__(self) -> None:
        self.stamp: tuple[str, int, int] | None = None
        self.locked = True  # as the buffer of a version that arrives
        self.copied = False  # whether a worker copies from it

    def claim(self) -> bool:
        self.locked, self.stamp = not self.copied, self.stamp if self.copied else None
        return not self.copied

    def release(self, model: str, epoch: int, version: int) -> None:
        self.locked, self.stamp = False, (model, epoch, version)


def announced(effects: list[Effect], to: bytes) -> list[Announce]:
    """Return the announcements to one worker, or on one topic."""
    found: list[Announce] = []
    for effect in effects:
        if not isinstance(effect, Send | Broadcast) or not isinstance(effect.message, Announce):
            continue
        if to == (effect.to if isinstance(effect, Send) else effect.topic):
            found.append(effect.message)
    return found


def shared_worker(chain: Chain, name: bytes, *, subscribed: bool) -> None:
    """Have a worker join that reads shared memory."""
    hello = Hello(name=name.decode(), instance="c" * 32, models={"a": None})
    told(chain, hello, Ping(token=1, subscribed=subscribed, shared=True), name=name)


def carry_out(chain: Chain, effects: list[Effect]) -> list[Effect]:
    for effect in effects:
        if isinstance(effect, Stamp):
            version = effect.version
            if not version.snapshot.stamp(version.model, *version.key):
                chain.publisher.unshared(version)
    return effects


@pytest.mark.parametrize("subscribed", [True, False])
def test_workers_that_read_a_segment_are_told_of_a_version_once_it_is_whole(
    subscribed: bool,
) -> None:
    chain, made, segment = Chain(), version(1), FakeSegment()
    shared_worker(chain, b"near", subscribed=subscribed)
    to_near = b"a/ctl" if subscribed else b"near"
    far = Hello(name="far", instance="b" * 32, models={"a": None})
    told(chain, far, Ping(token=1, subscribed=True), name=b"far")
    chunks = chain.begins(made)
    offer = VersionOffer.received("a", made.layout, chunks, made.key, segment=segment)
    passed, effects = chain.publisher.pass_on(offer, chain.now)
    carry_out(chain, effects)
    assert (announced(effects, b"a/ctl"), announced(effects, b"near")) == ([], [])
    (early,) = announced(effects, b"a/dat")
    assert (early.version, early.shared) == (1, None)
    assert not passed.snapshot.stamp("a", *made.key), "it is not whole"
    for index in range(CHUNKS):
        for asks in (
            Fetch(model="a", epoch=EPOCH, version=0),
            Fetch(model="a", epoch=EPOCH, version=1, layout=True),
        ):
            assert told(chain, asks, name=b"near") == [], "it is answered once the version is whole"
        chain.arrives(made, (index,))
        effects = carry_out(chain, chain.publisher.arrived(passed, chain.now))
        assert (announced(effects, to_near), segment.stamp, segment.locked) == ([], None, True)
        pushed = chain.publisher.push(chain.now)
        assert [each.index for each in pushed if isinstance(each, BroadcastChunk)] == [index]
    chain.ends(made)
    effects = carry_out(chain, chain.publisher.arrived(passed, chain.now))
    assert (segment.stamp, segment.locked) == (("a", *made.key), False)
    (late,) = announced(effects, to_near)
    assert (late.version, late.shared) == (1, segment.shared)
    assert chain.publisher.arrived(passed, chain.now) == [], "once"
    asks = Fetch(model="a", epoch=EPOCH, version=0)
    (again,) = told(chain, asks, name=b"near")
    assert isinstance(again, Announce)
    assert again.shared == segment.shared


@pytest.mark.parametrize("subscribed", [True, False])
@pytest.mark.parametrize("commit", ["auto", "together"])
def test_a_version_for_named_workers_is_announced_to_them_alone_once_it_is_whole(
    subscribed: bool, commit: Literal["auto", "together"]
) -> None:
    chain, made, segment = Chain(), version(1), FakeSegment()
    for name in (b"near", b"other"):
        shared_worker(chain, name, subscribed=subscribed)
    relay = Hello(name="r", instance="d" * 32, models={"a": None}, features=[RELAY])
    far = WorkerRow(name="far", state="live", road="shared", heard_ms=0, models={"a": Doing()})
    told(chain, relay, Below(epoch=EPOCH, rows=[far]), name=b"r")
    chunks = chain.begins(made)
    terms = NO_TERMS._replace(commit=commit)
    offer = VersionOffer.received("a", made.layout, chunks, made.key, terms, segment)
    offer.only = frozenset({"near"})
    passed, effects = chain.publisher.pass_on(offer, chain.now)
    chain.arrives(made, range(CHUNKS))
    chain.ends(made)
    assert announced(carry_out(chain, effects), b"near") == []
    effects = carry_out(chain, chain.publisher.arrived(passed, chain.now))
    (late,) = announced(effects, b"near")
    assert (late.version, late.shared) == (1, segment.shared)
    assert [announced(effects, to) for to in (b"other", b"a/ctl", b"")] == [[], [], []]
    hello = Hello(name="other", instance="c" * 32, models={"a": None})
    assert not [m for m in told(chain, hello, name=b"other") if isinstance(m, Announce)]


def test_a_version_in_a_segment_is_announced_to_no_worker_behind_another_relay() -> None:
    chain, made = Chain(), version(1)
    shared_worker(chain, b"near", subscribed=False)
    relay = Hello(name="r", instance="d" * 32, models={"a": None}, features=[RELAY])
    far = WorkerRow(name="far", state="live", road="shared", heard_ms=0, models={"a": Doing()})
    told(chain, relay, Below(epoch=EPOCH, rows=[far]), name=b"r")
    chunks = chain.begins(made)
    offer = VersionOffer.received("a", made.layout, chunks, made.key, segment=FakeSegment())
    passed, effects = chain.publisher.pass_on(offer, chain.now)
    carry_out(chain, effects)
    chain.arrives(made, range(CHUNKS))
    chain.ends(made)
    effects = carry_out(chain, chain.publisher.arrived(passed, chain.now))
    assert [effect.to for effect in effects if isinstance(effect, Send)].count(b"") == 0
    assert len(announced(effects, b"near")) == 1


def test_a_worker_that_began_to_fetch_a_version_gets_it_though_it_reads_segments_now() -> None:
    chain, made = Chain(), version(1)
    told(chain, HELLO)
    chunks = chain.begins(made)
    offer = VersionOffer.received("a", made.layout, chunks, made.key, segment=FakeSegment())
    _, effects = chain.publisher.pass_on(offer, chain.now)
    assert [each.shared for each in announced(effects, b"x")] == [None]
    told(chain, Ping(token=1, shared=True))
    chain.arrives(made, range(CHUNKS))
    asks = Fetch(model="a", epoch=EPOCH, version=1, first=0, count=CHUNKS)
    effects = chain.publisher.receive(b"x", [encode(asks)], chain.now)
    assert [each.index for each in effects if isinstance(each, SendChunk)] == [*range(CHUNKS)]


def test_a_version_whose_segment_cannot_be_stamped_is_fetched() -> None:
    chain, made, segment = Chain(), version(1), FakeSegment()
    shared_worker(chain, b"near", subscribed=False)
    chunks = chain.begins(made)
    chain.arrives(made, range(CHUNKS))
    chain.ends(made)
    segment.copied = True  # as of a version that gets another name while a worker copies it
    offer = VersionOffer.received("a", made.layout, chunks, made.key, segment=segment)
    passed, effects = chain.publisher.pass_on(offer, chain.now)
    carry_out(chain, effects)
    assert passed.shared is None
    asks = Fetch(model="a", epoch=EPOCH, version=0)
    again, end = told(chain, asks, name=b"near")
    assert isinstance(again, Announce)
    assert (again.shared, isinstance(end, End)) == (None, True)
