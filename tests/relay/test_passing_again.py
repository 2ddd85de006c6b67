"""What a relay passes on of the versions that its worker receives, drops, and receives again."""

from collections.abc import Callable
from typing import cast

import numpy as np

from weightbus.bus.effects import Effect
from weightbus.bus.headers import encode
from weightbus.bus.messages import Chunk, Hello, Welcome
from weightbus.bus.net.publisher_loop import PublisherLoop
from weightbus.bus.net.ready_queue import ReadyQueue
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.offers import abort_of, announcement
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import AnnouncedTerms, Version
from weightbus.bus.structs import Message
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.python_client.relay import (
    FIRST_EPOCH,
    _PassesOn,  # pyright: ignore[reportPrivateUsage]
)
from weightbus.tests.simulation.performing import done
from weightbus.tests.simulation.virtual_shell import chunk, perform, version_of

EPOCH, CHUNK = 7, 16
TOGETHER = AnnouncedTerms("together", "staged")


def version(number: int) -> Version:
    return version_of(number, np.full(3 * CHUNK, number, np.uint8), CHUNK, EPOCH)


class Relay:
    """A relay without threads."""

    def __init__(self) -> None:
        identity = Hello(name="r", instance="a" * 32, models={})
        self.above = WorkerMachine(identity, ["a"], lambda _m, _l: "", 2**20)
        self.below = PublisherMachine(PublisherState(FIRST_EPOCH, "tcp://r:1", origin=False))
        self.passes_on = _PassesOn(self.above, ReadyQueue(), cast("PublisherLoop", self), str)
        self.hears(Welcome(epoch=EPOCH, data="tcp://p:1", ping_ms=1000, lost_ms=5000, models={}))

    def decide(self, how: Callable[[PublisherMachine, float], list[PublisherEffect]]) -> None:
        perform(self.below, how(self.below, 1.0), 1.0)

    def hears(self, message: Message, payload: bytes | None = None) -> list[Effect]:
        frames = [encode(message)] if payload is None else [encode(message), payload]
        effects = done(self.above, self.above.receive(frames, 1.0), 1.0)
        self.passes_on()
        return effects

    def announced(self, number: int, *, together: bool = False) -> None:
        """Hear of a version, and get one of its chunks."""
        one = version(number)
        terms = TOGETHER if together else AnnouncedTerms()
        self.hears(announcement(one, terms), one.layout.header)
        self.chunks_arrive(number, 1)

    def chunks_arrive(self, number: int, count: int) -> None:
        one = version(number)
        for index in range(count):
            crc, data = chunk(one, index)
            message = chunk_message(number, index, crc)
            self.hears(message, bytes(data))

    @property
    def offers(self) -> dict[int, tuple[str, int]]:
        """The versions that are offered below: phase, and the number of chunks."""
        versions = self.below.state.store.get("a") or ()
        return {v.version: (v.phase, v.chunks.here) for v in versions}


def chunk_message(number: int, index: int, crc: int) -> Message:
    return Chunk(model="a", epoch=EPOCH, version=number, index=index, crc=crc)


def test_an_older_version_is_passed_on_once_a_newer_one_is_aborted() -> None:
    relay = Relay()
    relay.announced(2, together=True)
    assert relay.offers == {2: ("pending", 1)}
    relay.hears(abort_of("a", EPOCH, 2, "too few"))
    assert relay.offers == {}
    relay.announced(1)
    assert relay.offers == {1: ("reclaimable", 1)}


def test_a_version_that_is_received_again_is_passed_on_again() -> None:
    relay = Relay()
    relay.announced(1)
    relay.announced(2, together=True)
    assert relay.offers == {2: ("pending", 1)}, "the first one will never be whole"
    relay.hears(abort_of("a", EPOCH, 2, "too few"))
    relay.announced(1)
    relay.chunks_arrive(1, 2)
    assert relay.offers == {1: ("reclaimable", 2)}
