"""What a relay passes on of the versions that its worker receives, drops, and receives again."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from msgspec.structs import replace

from weightbus.bus.effects import Effect, Notice, Ready, Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import Timing
from weightbus.bus.messages import (
    RELAY,
    Beacon,
    Chunk,
    Commit,
    End,
    Fetch,
    Hello,
    Refuse,
    Rename,
    Running,
    Welcome,
)
from weightbus.bus.net.publisher_loop import PublisherLoop
from weightbus.bus.net.ready_queue import ReadyQueue
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.offers import abort_of, announcement
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import AnnouncedTerms, Version
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.python_client.observing.diagnosis import CUT_OFF
from weightbus.python_client.relay import (
    FIRST_EPOCH,
    _Forwarder,  # pyright: ignore[reportPrivateUsage]
)
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.simulation.performing import done
from weightbus.tests.simulation.virtual_shell import chunk, perform, version_of

EPOCH, CHUNK, SECONDS = 7, 16, 10.0
QUICK = Timing(ping=0.001)  # without a publisher, a relay waits two pings before it falls back
TOGETHER = AnnouncedTerms("together", "staged")


def version(number: int) -> Version:
    return version_of(number, np.full(3 * CHUNK, number, np.uint8), CHUNK, EPOCH)


class Relay:
    """A relay without threads."""

    def __init__(self, *features: str) -> None:
        identity = Hello(name="r", instance="a" * 32, models={}, features=[*features])
        self.above = WorkerMachine(identity, ["a", "b"], lambda _m, _l: "", 2**20, QUICK)
        self.below = PublisherMachine(PublisherState(FIRST_EPOCH, "tcp://r:1", origin=False))
        self.noticed = set[str]()
        self.ready, self.reports = ReadyQueue(), list[Report]()
        self.passes_on = _Forwarder(self.above, self.ready, cast("PublisherLoop", self), str)
        self.passes_on.report_by(self.reports.append)
        self.joins()

    def joins(self, epoch: int = EPOCH) -> None:
        welcome = Welcome(epoch=epoch, data="tcp://p:1", ping_ms=1000, lost_ms=5000, models={})
        self.hears(welcome)

    def loses_its_publisher(self) -> None:
        self.above.tick(1e6)

        def cut_off() -> bool:
            self.passes_on()
            return CUT_OFF in self.noticed

        wait_for(cut_off, "the relay says that it has no publisher", SECONDS)
        self.passes_on()

    def decide(self, how: Callable[[PublisherMachine, float], list[PublisherEffect]]) -> None:
        done_below = perform(self.below, how(self.below, 1.0), 1.0)
        self.noticed |= {each.kind for each in done_below if isinstance(each, Notice)}

    def hears(self, message: Message, payload: bytes | None = None) -> list[Effect]:
        frames = [encode(message)] if payload is None else [encode(message), payload]
        effects = done(self.above, self.above.receive(frames, 1.0), 1.0)
        for effect in effects:
            if isinstance(effect, Ready):
                self.ready.put(effect.staged)
        self.passes_on()
        while self.reports:
            done(self.above, self.above.happened(self.reports.pop(0), 1.0), 1.0)
        return effects

    def announced(
        self,
        number: int,
        model: str = "a",
        epoch: int = EPOCH,
        *,
        together: bool = False,
        workers: Sequence[str] = (),
    ) -> None:
        """Hear of a version, and get one of its chunks."""
        one = version(number)
        announce = announcement(one, TOGETHER if together else AnnouncedTerms())
        about = {"model": model, "epoch": epoch, "workers": [*workers]}
        self.hears(replace(announce, **about), one.layout.header)
        self.chunks_arrive(number, 1, model, epoch)

    def chunks_arrive(self, number: int, count: int, model: str = "a", epoch: int = EPOCH) -> None:
        one = version(number)
        for index in range(count):
            crc, data = chunk(one, index)
            message = Chunk(model=model, epoch=epoch, version=number, index=index, crc=crc)
            self.hears(message, bytes(data))

    def gets(self, number: int, model: str = "a", workers: Sequence[str] = ()) -> str:
        """Get all of a version; return its digest."""
        self.announced(number, model, workers=workers)
        self.chunks_arrive(number, 3, model)
        digest = version(number).chunks.digest
        self.hears(End(model=model, epoch=EPOCH, version=number, digest=digest))
        return digest

    def fetches(self, number: int) -> bool:
        """Return whether a beacon of this version makes the relay fetch it."""
        sent = self.hears(Beacon(model="a", epoch=EPOCH, version=number))
        return any(isinstance(s, Send) and isinstance(s.message, Fetch) for s in sent)

    @property
    def received(self) -> int:
        return self.passes_on._received["a"]  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    @property
    def offers(self) -> dict[int, tuple[str, int]]:
        """The versions of model a that are offered below: phase, and the number of chunks."""
        return self.offers_of("a")

    def offers_of(self, model: str) -> dict[int, tuple[str, int]]:
        versions = self.below.state.store.get(model) or ()
        return {v.version: (v.phase, v.chunks.here) for v in versions}


def test_an_older_version_is_passed_on_once_a_newer_one_is_aborted() -> None:
    relay = Relay(RELAY)
    relay.announced(2, together=True)
    assert relay.offers == {2: ("pending", 1)}
    relay.hears(abort_of("a", EPOCH, 2, "too few"))
    assert relay.offers == {}
    relay.announced(1)
    assert relay.offers == {1: ("reclaimable", 1)}


def test_a_version_that_is_received_again_is_passed_on_again() -> None:
    relay = Relay(RELAY)
    relay.announced(1)
    relay.announced(2, together=True)
    assert relay.offers == {2: ("pending", 1)}, "the first one will never be whole"
    relay.hears(abort_of("a", EPOCH, 2, "too few"))
    relay.announced(1)
    relay.chunks_arrive(1, 2)
    assert relay.offers == {1: ("reclaimable", 2)}


def test_a_version_that_another_models_epoch_drops_is_offered_under_its_next_name() -> None:
    relay = Relay(RELAY)
    digest = relay.gets(3, "b")
    relay.joins(EPOCH + 1)
    relay.announced(1, "a", EPOCH + 1)
    assert (relay.below.state.epoch, relay.offers_of("b")) == (EPOCH + 1, {})
    was = Running(EPOCH, 3, digest)
    relay.hears(Rename(model="b", epoch=EPOCH + 1, version=2, was=was))
    assert relay.offers_of("b") == {2: ("reclaimable", 3)}


def test_the_last_whole_version_is_offered_again_while_the_next_one_has_no_publisher() -> None:
    relay = Relay(RELAY)
    relay.gets(1)
    relay.announced(2)
    assert relay.offers == {2: ("reclaimable", 1)}
    relay.loses_its_publisher()
    assert relay.offers == {1: ("reclaimable", 3)}
    relay.joins()
    relay.chunks_arrive(2, 2)
    assert relay.offers == {2: ("reclaimable", 2)}, "it goes on where it was"
    assert relay.received == 3 * CHUNK + 2 * CHUNK


def test_an_arriving_version_stays_if_there_is_no_older_one() -> None:
    relay = Relay(RELAY)
    relay.announced(1)
    relay.loses_its_publisher()
    assert relay.offers == {1: ("reclaimable", 1)}


def test_the_last_whole_version_is_offered_again_if_the_next_one_is_gone() -> None:
    relay = Relay(RELAY)
    relay.gets(1)
    relay.announced(2)
    relay.hears(Refuse(code="gone", text="", model="a", epoch=EPOCH, version=2))
    assert relay.offers == {1: ("reclaimable", 3)}


def test_a_version_that_falls_back_ends_no_newer_one_that_waits_for_its_commit() -> None:
    relay = Relay(RELAY)
    relay.gets(1)
    relay.announced(2)
    relay.announced(3, together=True)
    assert relay.offers == {1: ("reclaimable", 3), 3: ("pending", 1)}


def test_a_relay_takes_the_latest_version_also_if_a_newer_one_for_named_workers_is_here() -> None:
    relay = Relay(RELAY)
    relay.gets(1)
    relay.gets(3, workers=["w0"])
    assert not relay.fetches(1), "it has that"
    assert relay.fetches(2)
    relay.gets(2)
    assert relay.offers == {2: ("reclaimable", 3), 3: ("targeted", 3)}
    versions = relay.below.state.store["a"]
    assert [versions.latest_for(name).version for name in ("w0", "w1")] == [3, 2]  # type: ignore[union-attr]
    assert relay.above.followers["a"].running == Running(EPOCH, 3, version(3).chunks.digest)
    assert not relay.fetches(2)
    assert not relay.fetches(3)


def test_the_latest_version_does_not_end_one_for_named_workers_that_waits_for_its_commit() -> None:
    relay = Relay(RELAY)
    relay.announced(3, together=True, workers=["w0"])
    relay.chunks_arrive(3, 3)
    digest = version(3).chunks.digest
    relay.hears(End(model="a", epoch=EPOCH, version=3, digest=digest))
    relay.gets(2)
    assert relay.offers == {2: ("reclaimable", 3), 3: ("pending", 3)}
    relay.hears(Commit(model="a", epoch=EPOCH, version=3, digest=digest))
    assert relay.offers == {2: ("reclaimable", 3), 3: ("targeted", 3)}


def test_a_version_of_a_lower_epoch_than_that_below_is_not_passed_on() -> None:
    relay = Relay(RELAY)
    relay.joins(EPOCH + 1)
    assert relay.below.state.epoch == EPOCH + 1
    relay.joins(EPOCH)
    relay.announced(1)
    assert relay.offers == {}
    relay.joins(EPOCH + 1)
    relay.announced(1, epoch=EPOCH + 1)
    assert relay.offers == {1: ("reclaimable", 1)}


def test_only_a_relay_regards_whom_a_version_is_for() -> None:
    worker = Relay()
    worker.gets(3, workers=["w0"])
    assert not worker.fetches(2)
