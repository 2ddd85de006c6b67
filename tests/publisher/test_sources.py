"""A publisher that lacks chunks names their sources, and a source gives what it has. (N4, N5)"""

from collections.abc import Collection

import numpy as np
import pytest

from weightbus.bus.chunks import Chunks, Memory, plan_of
from weightbus.bus.effects import Send
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Abort, Announce, Chunk, Fetch, Ping, Refuse, Source, Welcome
from weightbus.bus.publisher.effects import Broadcast, Effect, Obtain, Resolve
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.codecs.checksum import digest_of
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.tests.publisher.test_publisher_machine import (
    CHUNK,
    EPOCH,
    Bench,
    hello,
    sent,
)
from weightbus.tests.simulation.virtual_shell import perform

COUNT = 6
LAYOUT = Layout.plan([("w", "U8", (COUNT * CHUNK,))])
SOURCE = Source("tcp://rank-1:1", [1, 2, 4, 1])
ELSEWHERE = {1, 2, 4}


def offer_of(key: tuple[int, int], here: Collection[int], value: int = 1) -> VersionOffer:
    """Return an offer of a version of which only some chunks are here."""
    data, memory = np.full(LAYOUT.nbytes, value, np.uint8), np.zeros(LAYOUT.nbytes, np.uint8)
    plan = plan_of(LAYOUT.nbytes, CHUNK)
    crcs: list[int | None] = [None] * plan.count
    for index in here:
        begin, end = plan.span(index)
        memory[begin:end] = data[begin:end]
        crcs[index] = crc32c(data[begin:end])
    digest = digest_of(LAYOUT.id, data, CHUNK)
    chunks: Chunks[Memory] = Chunks(plan, memory, crcs, LAYOUT.id, len(here), False, digest)
    return VersionOffer.received("a", LAYOUT, chunks, key)


class SharingBench(Bench):
    """A publisher that publishes versions of which a source has some chunks."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.asked: list[Version] = []

    def share(self, commit: str = "auto") -> tuple[Version, list[Effect]]:
        offer = offer_of((EPOCH, 1), {*range(COUNT)} - ELSEWHERE)
        offer.sources, offer.obtain = (SOURCE,), self.asked.append
        terms = PublishTerms(commit="together" if commit == "together" else "auto", timeout=10.0)
        call, effects = self.machine.publish(1, offer, terms, self.now, self.now)
        return call.version, perform(self.machine, effects, self.now)

    def pushed(self) -> list[int]:
        """Return the chunks that are pushed."""
        effects = list[Effect]()
        while self.machine.ready:
            effects += perform(self.machine, self.machine.push(self.now), self.now)
        shown = [e.message for e in effects if isinstance(e, Broadcast)]
        return [message.index for message in shown if isinstance(message, Chunk)]

    def arrive(self, version: Version, *indexes: int, fault: str = "") -> list[Effect]:
        told = [(index, crc32c(b"\1" * CHUNK)) for index in indexes]
        effects = self.machine.obtained(version, told, fault, self.now)
        return perform(self.machine, effects, self.now)


def fetch(first: int, count: int, version: int = 1) -> Fetch:
    return Fetch(model="a", epoch=EPOCH, version=version, first=first, count=count)


def chunks(effects: list[Effect]) -> list[int]:
    return [message.index for message in sent(effects, Chunk)]


def test_the_announcement_names_the_sources_and_only_what_is_here_is_pushed() -> None:
    bench = SharingBench("w")
    _, effects = bench.share()
    (shown,) = [e.message for e in effects if isinstance(e, Broadcast)]
    assert isinstance(shown, Announce)
    assert shown.sources == [SOURCE]
    assert bench.pushed() == [0, 3, 5]
    assert bench.asked == [], "no worker needs the other chunks from here"


def test_chunks_that_are_fetched_here_are_obtained_once_and_sent_as_they_arrive() -> None:
    bench = SharingBench("w", "v")
    version, _ = bench.share()
    first = bench.say("w", fetch(0, COUNT))
    assert chunks(first) == [0, 3, 5]
    assert [e for e in first if isinstance(e, Obtain)] == [Obtain(version)]
    obtain = version.begin_obtaining()
    assert obtain is not None
    again = bench.say("v", fetch(1, 1))
    assert not [e for e in again if isinstance(e, Obtain)]
    assert sorted(chunks(bench.arrive(version, 1))) == [1, 1]
    assert chunks(bench.arrive(version, 2, 4)) == [2, 4]
    assert version.chunks.whole
    assert bench.arrive(version, fault="late: all is here") == []
    assert not version.gone


@pytest.mark.parametrize("commit", ["auto", "together"])
def test_if_a_source_does_not_give_its_chunks_the_version_is_gone_everywhere(commit: str) -> None:
    bench = SharingBench("w")
    version, _ = bench.share(commit)
    bench.say("w", fetch(0, COUNT))
    effects = bench.arrive(version, 1, fault="rank 1 has ended")
    assert version.gone
    told = sent(effects, Abort) if commit == "together" else sent(effects, Refuse)
    assert len(told) >= 1
    (resolved,) = [e for e in effects if isinstance(e, Resolve)]
    assert not resolved.achieved
    assert "rank 1 has ended" in resolved.shortfall
    assert bench.arrive(version, 2) == []


def test_a_later_epoch_is_announced_without_sources() -> None:
    bench = SharingBench("w")
    version, _ = bench.share()
    version.renew(EPOCH + 1)
    assert version.sources == ()


class TestSource:
    """The publisher of a rank that is a source."""

    @pytest.fixture(name="bench")
    def _bench(self) -> Bench:
        return Bench()

    def test_it_gives_its_chunks_of_a_version_that_it_announces_to_no_worker(
        self, bench: Bench
    ) -> None:
        bench.say("w", hello("w"))
        bench.say("w", Ping(subscribed=True))
        effects = bench.machine.keep_part(offer_of((EPOCH, 1), ELSEWHERE))
        assert [e for e in effects if isinstance(e, Send | Broadcast)] == []
        (welcome,) = sent(bench.say("v", hello("v")), Welcome)
        assert welcome.models.get("a", 0) == 0
        assert chunks(bench.say("w", fetch(1, 2))) == [1, 2]

    def test_it_keeps_a_version_until_the_next_and_a_worker_can_finish_the_older_one(
        self, bench: Bench
    ) -> None:
        bench.say("w", hello("w"))
        bench.machine.keep_part(offer_of((EPOCH, 1), ELSEWHERE))
        bench.say("w", fetch(1, 1))
        bench.machine.keep_part(offer_of((EPOCH, 2), ELSEWHERE))
        assert chunks(bench.say("w", fetch(2, 1))) == [2]
        bench.machine.keep_part(offer_of((EPOCH, 3), ELSEWHERE))
        assert len([*bench.machine.state.store["a"]]) == 2
        assert len(sent(bench.say("v", hello("v")), Welcome)) == 1
        assert sent(bench.say("v", fetch(2, 1, version=2)), Refuse)[0].code == "gone"
        assert chunks(bench.say("v", fetch(2, 1, version=3))) == [2]

    @pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
    def test_it_takes_the_epoch_of_rank_0_be_it_earlier(self, epoch: int) -> None:
        machine = PublisherMachine(PublisherState(EPOCH, "tcp://d:1", Timing()))
        machine.keep_part(offer_of((epoch, 4), ELSEWHERE))
        assert machine.state.epoch == epoch

    def test_a_publisher_of_the_model_is_no_source_of_it(self, bench: Bench) -> None:
        bench.publish()
        with pytest.raises(ValueError, match="this publisher has published a by itself"):
            bench.machine.keep_part(offer_of((EPOCH, 9), ELSEWHERE))
