"""What a relay passes on of a patch that arrives, is decoded or is given up, without sockets."""

from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from weightbus.bus.messages import (
    DELTA,
    Chunk,
    End,
    Fetch,
    Refuse,
    Running,
)
from weightbus.bus.net.copier import decoded
from weightbus.bus.publisher.offers import announcement, chunk_of, end_of
from weightbus.bus.publisher.version import OfferedPatch, Version, VersionPatch
from weightbus.bus.staged import Patching
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Decoded
from weightbus.codecs.delta.encoding import encode as encode_patch
from weightbus.tests.protocol.test_passed_on import EPOCH, TIMING, Worker
from weightbus.tests.relay.test_passing_on import Passing
from weightbus.tests.simulation.virtual_shell import version_of

NBYTES, CHUNK = 4096, 64


def data_of(number: int) -> NDArray[np.uint8]:
    data = np.random.default_rng(0).integers(0, 255, NBYTES, np.uint8)
    data[:: NBYTES // 32] += np.uint8(number)
    return data


def version(number: int) -> Version:
    """Return a version as it was published far up; from the second on, with a patch."""
    made = version_of(number, data_of(number), CHUNK, EPOCH)
    made.keep = True
    return made


def patched(number: int) -> tuple[Version, VersionPatch]:
    """Return a version, and the patch to it from the one before."""
    made, base = version(number), version(number - 1)
    old, new = data_of(number - 1), data_of(number)
    digests = base.digest, made.digest
    data = encode_patch(made.layout, old, new, digests=digests, chunk_bytes=CHUNK)
    assert len(data) < NBYTES
    patch = VersionPatch(made, OfferedPatch(DELTA, Running(EPOCH, base.version, base.digest), data))
    made.patches = (patch,)
    return made, patch


class Relay(Passing):
    """A relay and the workers below, all of which run version 1, whose bytes they have kept."""

    features: ClassVar[tuple[str, ...]] = (DELTA,)

    def __init__(self, *below: str) -> None:
        super().__init__(*below)
        self.told: list[Message] = []
        for name, worker in self.below.items():
            self.record(worker)
            self.joins(name, listens=True)
        one = version(1)
        self.begins(one)
        self.pass_on()
        self.arrives(one, range(one.plan.count))
        self.ends(one)
        self.pass_on()
        self.runs(self.above)
        self.pass_on()
        for worker in self.below.values():
            self.runs(worker)
        self.talk()
        self.told.clear()

    def record(self, worker: Worker) -> None:
        """Record what a worker hears."""
        hears = worker.hears

        def recorded(message: Message, now: float, *payload: object) -> None:
            self.told.append(message)
            hears(message, now, *payload)

        worker.hears = recorded  # type: ignore[method-assign]

    def runs(self, worker: Worker) -> None:
        worker.ends("applied", self.now)

    def of_patch(self, patch: VersionPatch, *indexes: int) -> None:
        """Chunks of a patch come from far up."""
        for index in indexes:
            message, payload = chunk_of(patch, index)
            self.above.hears(message, self.now, bytes(payload))
        self.pass_on()

    def decode(self, worker: Worker, fault: str = "") -> Patching:
        """Decode the patch that a worker has whole; with a fault, fail."""
        (job,) = worker.jobs
        worker.jobs.clear()
        result = Decoded(job, fault, 0.1) if fault else decoded(job)
        worker.does(worker.machine.happened(result, self.now), self.now)
        return job

    def runs_by(self, target: Version, patch: VersionPatch) -> None:
        """Have the relay and all workers run a version that arrives by a patch."""
        hear(self, target)
        self.of_patch(patch, *range(patch.plan.count))
        self.above.hears(end_of(patch), self.now)
        self.pass_on()
        for worker in (self.above, *self.below.values()):
            self.decode(worker)
            self.pass_on()
            self.runs(worker)
        self.talk()
        self.told.clear()

    def refusals(self) -> list[str]:
        return [each.code for each in self.told if isinstance(each, Refuse)]


def hear(relay: Relay, made: Version) -> None:
    """The relay hears of a version."""
    relay.above.hears(announcement(made), relay.now)
    relay.pass_on()


def here(worker: Worker) -> list[int]:
    """Return the chunks that have arrived of what a worker receives."""
    entry = worker.versions.in_phase["arriving"]
    assert entry is not None
    chunks = entry.transfer.chunks
    return [index for index, crc in enumerate(chunks.crcs) if crc is not None]


def test_a_patch_is_passed_on_as_it_arrives_and_before_it_is_decoded() -> None:
    relay, (two, patch) = Relay("w"), patched(2)
    below, count = relay.below["w"], patch.plan.count
    hear(relay, two)
    relay.of_patch(patch, 0, 2)
    assert here(below) == [0, 2]
    relay.of_patch(patch, 1, *range(3, count))
    assert here(below) == [*range(count)]
    assert below.jobs == [], "the end is not known"
    relay.above.hears(end_of(patch), relay.now)
    relay.pass_on()
    job, above = relay.decode(below), relay.above.jobs[0]
    assert (
        bytes(job.patch) == bytes(above.patch) == bytes(patch.snapshot.bytes(0, patch.plan.nbytes))
    )
    (staged,) = below.ready[1:]
    assert bytes(staged.data) == bytes(data_of(2))
    relay.runs(below)
    relay.talk()
    peer = relay.publisher.state.roster.by_name("w")
    assert peer is not None
    assert peer.runs("a") == (EPOCH, 1), "the relay cannot compare the digest yet"
    relay.decode(relay.above)
    relay.pass_on()
    assert peer.runs("a") == (EPOCH, 2)


def test_what_a_worker_fetches_of_a_patch_is_sent_when_it_arrives() -> None:
    relay, (two, patch) = Relay("w"), patched(2)
    below, last = relay.below["w"], patch.plan.count - 1
    hear(relay, two)
    relay.passes(TIMING.quiet)  # from now on the worker fetches
    relay.of_patch(patch, *range(last))
    chunks = [each.index for each in relay.told if isinstance(each, Chunk)]
    assert sorted(chunks) == [*range(last)]
    relay.above.hears(end_of(patch), relay.now)
    relay.pass_on()
    assert [each.digest for each in relay.told if isinstance(each, End)] == [two.digest]
    relay.of_patch(patch, last)
    relay.decode(below)
    assert [bytes(staged.data) for staged in below.ready[1:]] == [bytes(data_of(2))]


@pytest.mark.parametrize("pushed", [True, False])
def test_a_patch_that_is_given_up_is_refused_and_the_version_fetched(pushed: bool) -> None:
    relay = Relay("w")
    below, last = relay.below["w"], 2
    if pushed:  # the worker subscribes to patches from the first one on
        relay.runs_by(*patched(2))
        last = 3
    target, patch = patched(last)
    hear(relay, target)
    relay.of_patch(patch, 0)
    assert here(below) == [0]
    no = Refuse(code="no-patch", text="", model="a", epoch=EPOCH, version=last)
    relay.above.hears(no, relay.now)
    relay.pass_on()
    at_once = relay.refusals()
    assert at_once == ([] if pushed else ["no-patch"]), "a worker that has fetched chunks waits"
    relay.passes(TIMING.quiet)
    assert "no-patch" in relay.refusals()
    base = relay.above.versions.base
    assert base is not None
    assert base.users == 0
    relay.arrives(target, range(target.plan.count))
    relay.ends(target)
    relay.pass_on()
    relay.passes(TIMING.quiet)
    assert bytes(below.ready[-1].data) == bytes(data_of(last))
    assert below.ready[-1].patch is None


def test_a_patch_that_fails_at_the_relay_is_offered_no_more() -> None:
    relay, (two, patch) = Relay("w"), patched(2)
    hear(relay, two)
    relay.of_patch(patch, *range(patch.plan.count))
    relay.above.hears(end_of(patch), relay.now)
    relay.pass_on()
    relay.decode(relay.above, "there is no memory")
    relay.pass_on()
    assert relay.refusals() == []
    (passed,) = relay.publisher.state.store["a"]
    assert passed.patches == ()
    relay.decode(relay.below["w"])  # its patch is whole
    assert [staged.key for staged in relay.below["w"].ready] == [(EPOCH, 1), (EPOCH, 2)]
    late = Fetch(model="a", epoch=EPOCH, version=2, count=1, patch=patch.id)
    relay.below["w"].said.append(late)
    relay.talk()
    assert relay.refusals() == ["no-patch"]


def test_a_worker_without_the_base_gets_the_version_once_it_is_decoded() -> None:
    relay, (two, patch) = Relay("w", "other"), patched(2)
    other = relay.below["other"]
    other.versions.set_patch_base(None, None, None)
    hear(relay, two)
    relay.of_patch(patch, *range(patch.plan.count))
    relay.above.hears(end_of(patch), relay.now)
    relay.pass_on()
    relay.passes(TIMING.quiet)
    assert here(other) == []
    relay.decode(relay.above)
    relay.pass_on()
    relay.passes(TIMING.quiet)
    assert [bytes(staged.data) for staged in other.ready[1:]] == [bytes(data_of(2))]
    (staged,), running = relay.above.ready[1:], relay.above.versions.base
    assert running is not None
    assert not np.shares_memory(staged.data, running.data)
