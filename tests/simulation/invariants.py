"""What must hold in every simulated run, whatever the network does.

What is applied is what was published, byte for byte; versions never go back; a receipt and the
roster claim only what happened; what a worker says it runs lies in its memory, and it says that it
runs nothing while parts of two versions lie there; an aborted version is never applied, one that
commits together never before its commit; every publish is over by its deadline; nobody holds more
memory than the limits allow. No publisher takes an epoch above that of one which started later, no
worker goes to and fro between two, and what listeners are told of workers is how things stand.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weightbus.bus.limits import BUFFERS_MAX
from weightbus.bus.messages import Applied, Failed, Hello, Staged
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import Publication
from weightbus.bus.publisher.version import Version
from weightbus.bus.receipt import Receipt
from weightbus.bus.staged import Copying, StagedVersion
from weightbus.bus.structs import Message
from weightbus.bus.worker.follower import Follower
from weightbus.bus.worker.version_store import IN_MEMORY
from weightbus.codecs.checksum import digest
from weightbus.codecs.native import crc32c

Key = tuple[str, int, int]  # model, epoch, version


@dataclass(frozen=True)
class Published:
    """What a trainer gave away."""

    data: bytes
    digest: str
    publication: Publication


def slices(shape: Sequence[int]) -> tuple[tuple[int, int]]:
    """The slice of a vector that workers of a part take: neither its begin nor its end."""
    (size,) = shape
    return ((size // 4, size - size // 4),)


@dataclass
class Invariants:
    """What has happened, and what may not."""

    published: dict[Key, Published] = field(default_factory=dict[Key, Published])
    applied: dict[str, set[Key]] = field(default_factory=dict[str, set[Key]])  # by worker
    staged: dict[str, set[Key]] = field(default_factory=dict[str, set[Key]])
    failed: dict[str, set[Key]] = field(default_factory=dict[str, set[Key]])
    aborted: set[Key] = field(default_factory=set[Key])
    cut: set[str] = field(default_factory=set[str])  # workers and processes that take a part
    started: dict[int, float] = field(default_factory=dict[int, float])  # by epoch, its publisher
    backward: set[tuple[str, float, float]] = field(  # by worker, from a later publisher to which
        default_factory=set[tuple[str, float, float]]
    )
    receipts: list[tuple[Publication, Receipt, bool]] = field(
        default_factory=list[tuple[Publication, Receipt, bool]]
    )

    def data_for(self, worker: str, key: Key) -> bytes:
        """The bytes of a version that a worker takes: all of them, or a part."""
        published = self.published[key]
        if worker.partition("#")[0] not in self.cut:
            return published.data
        (spec,) = published.publication.version.layout.tensors
        ((begin, end),) = slices(spec.shape)
        size = spec.nbytes // spec.shape[0] if spec.shape[0] else 0
        return published.data[begin * size : end * size]

    def on_epoch(self, epoch: int, started: float) -> None:
        """A publisher that started then has an epoch."""
        assert epoch not in self.started, f"two publishers are of epoch {epoch}"
        self.started[epoch] = started

    def on_outbid(self, theirs: int, ours: int, started: float) -> None:
        """A publisher that started then takes an epoch above another's."""
        assert self.started[theirs] < started, f"{ours} outbids {theirs}, which started later"
        self.on_epoch(ours, started)

    def on_follow(self, process: str, before: int, epoch: int) -> None:
        """A worker that runs weights of one epoch applies a version of another."""
        old, new = self.started.get(before), self.started[epoch]
        if old is not None and new < old:  # by a clock that is ahead; once it is known, never again
            step = (process, old, new)
            assert step not in self.backward, f"{process} goes to and fro between two publishers"
            self.backward.add(step)

    def on_renewal(self, version: Version) -> None:
        """A version that was published has another number."""
        key = (version.model, version.epoch, version.version)
        known = [p for p in self.published.values() if p.publication.version is version]
        self.published[key] = known[0]

    def on_publish(self, publication: Publication, data: bytes) -> None:
        """A trainer publishes."""
        version = publication.version
        spans = [version.plan.span(i) for i in range(version.plan.count)]
        crcs = [crc32c(data[begin:end]) for begin, end in spans]
        whole = digest(version.layout.id, version.plan.chunk_bytes, crcs)
        key = (version.model, version.epoch, version.version)
        assert key not in self.published, f"{key} was published before"
        self.published[key] = Published(data, whole, publication)

    def on_copy(self, name: str, copy: Copying, crcs: NDArray[np.uint32] | None) -> None:
        """A worker has copied a version from shared memory, or says that it came too late."""
        if crcs is not None:
            data = self.data_for(name, (copy.model, *copy.key))
            assert copy.buffer.tobytes() == data, f"{name} copied other bytes"

    def on_arriving(self, name: str, followers: Iterable[Follower]) -> None:
        """What counts as here is what was published. (A damaged number of a chunk aside.)"""
        for held in [h for follower in followers for h in follower.versions.all("arriving")]:
            transfer = held.transfer
            if transfer.patch is not None or transfer.cut is not None:
                continue  # it is of use only if it leads to what was published
            data = self.published[held.announce.model, *held.key].data
            chunks = transfer.chunks
            for index, crc in enumerate(chunks.crcs):
                begin, end = chunks.plan.span(index)
                right = chunks.memory[begin:end].tobytes() == data[begin:end]
                assert right or crc is None, f"{name} takes other bytes for chunk {index}"

    def on_apply(
        self, name: str, running: tuple[int, int], staged: StagedVersion, whole: bytes
    ) -> None:
        """A worker that runs one version has written another into its model."""
        key = (staged.model, staged.epoch, staged.version)
        published = self.published[key]
        assert whole == self.data_for(name, key), f"{name} applied other bytes as {key}"
        assert staged.key > running, f"{name} went back from {running} to {staged.key}"
        assert key not in self.aborted, f"{name} applied {key}, which was aborted"
        publication = published.publication
        if publication.terms.commit == "together":
            assert publication.decision == "commit", f"{name} applied {key} before its commit"
        self.applied.setdefault(name, set()).add(key)

    def on_as_one(
        self,
        name: str,
        names: Mapping[str, Key],
        contents: Mapping[str, bytes],
        renamed: Collection[Key],
    ) -> None:
        """A worker has applied something: it runs nothing without its companions."""
        for model, key in names.items():
            version = self.published[key].publication.version
            if contents[model].startswith(b"torn") or key in renamed:
                continue
            for other, number in version.companions.items():
                if other not in names or contents[other].startswith(b"torn"):
                    continue
                needed = (other, key[1], number)
                # a later epoch may lack it, since it has newer
                known = needed in self.published
                same = known and contents[other] == self.data_for(name, needed)
                assert names[other] >= needed or same, f"{name} runs {key} with {names[other]}"

    def on_rename(self, name: str, key: Key, was: Key, contents: Mapping[str, bytes]) -> None:
        """A worker calls what it runs otherwise: it must be those very bytes."""
        assert contents.get(key[0]) == self.data_for(name, key), f"{name} has no {key}"
        assert key > was, f"{name} went back from {was} to {key}"
        self.applied.setdefault(name, set()).add(key)

    def on_claim(self, name: str, message: Message, contents: Mapping[str, bytes]) -> None:
        """A worker says what it runs: that must be what its memory holds."""
        said: list[Key] = []
        if isinstance(message, Applied):
            said = [(message.model, message.epoch, message.version)]
        if isinstance(message, Hello):
            said = [(m, r.epoch, r.version) for m, r in message.models.items() if r is not None]
        for key in said:
            assert contents.get(key[0]) == self.data_for(name, key), f"{name} has no {key}"

    def on_report(self, name: str, message: Message) -> None:
        """A worker says something of a version."""
        if isinstance(message, Staged | Applied | Failed):
            key = (message.model, message.epoch, message.version)
            assert key in self.published, f"{name} speaks of {key}, which was never published"
            if isinstance(message, Failed):
                self.failed.setdefault(name, set()).add(key)
                return
            known = self.published[key].digest
            hashed = isinstance(message, Staged) or bool(message.digest)
            assert message.digest == known or not hashed, f"{name} reports other bytes"
            if isinstance(message, Applied):
                assert key in self.applied.get(name, set()), f"{name} did not apply {key}"
            else:
                self.staged.setdefault(name, set()).add(key)

    def on_receipt(self, publication: Publication, receipt: Receipt, achieved: bool) -> None:
        """A call of publish is over."""
        self.receipts.append((publication, receipt, achieved))
        key = (receipt.model, receipt.epoch, receipt.version)
        for worker in receipt.workers.values():
            self._check_claim(worker.name, worker.state, key)
        if publication.decision == "abort":
            self.aborted.add(key)
            assert not achieved
            assert not any(key in keys for keys in self.applied.values()), f"{key} was applied"
        terms = publication.terms
        if achieved and terms.wait != "none":
            done = ["applied", "skipped"] + (["staged"] if terms.wait == "staged" else [])
            group = publication.group
            workers = receipt.workers if group is None else group.targets
            there = sum(w.state in done for w in workers.values())
            gone = ("left", "lost") if terms.alive else ("left",)
            present = sum(w.state not in gone for w in workers.values())
            needed = max(present, terms.expect)
            needed = needed if terms.require is None else terms.require
            assert there >= needed, f"achieved with {there} of {needed}: {receipt}"

    def _check_claim(self, name: str, state: str, key: Key) -> None:
        applied = self.applied.get(name, set())
        newest = max((k for k in applied if k[0] == key[0]), default=("", 0, 0))
        if state == "applied":
            assert key in applied, f"{name} never applied {key}"
        if state == "staged":
            assert key in self.staged.get(name, set()), f"{name} never staged {key}"
        if state == "failed":
            assert key in self.failed.get(name, set()), f"{name} never failed {key}"
        if state == "skipped":
            assert newest > key, f"{name} runs {newest}, nothing newer than {key}"

    def on_roster(self, machine: PublisherMachine, told: Mapping[str, str], now: float) -> None:
        """Time passes at a publisher."""
        for peer in machine.state.roster:
            for model, running in peer.running.items():
                key = (model, running.epoch, running.version)
                assert key in self.applied.get(peer.name, set()), f"{peer.name} does not run {key}"
                hashed = ("", self.published[key].digest)
                assert running.digest in hashed, f"{peer.name} has other bytes"
            for model, doing in peer.incoming.items():
                at = (machine.state.epoch, doing.version)
                assert peer.runs(model) < at, f"{peer.name} is not {doing.phase} what it runs"
        for version in (
            version for versions in machine.state.store.values() for version in versions
        ):
            for peer in filter(None, map(machine.state.roster.by_name, version.receivers)):
                assert peer.runs(version.model) < version.key, f"it is kept for {peer.name}"
        known = {w.name: w.state for w in machine.status(now)}
        assert told == known, f"listeners know {told}, and it is {known}"
        for status in machine.status(now):
            assert status.silent_s >= 0
            assert (status.state == "lost") <= (not status.phase), "the lost do nothing"

    def on_contents(
        self, name: str, followers: Iterable[Follower], contents: Mapping[str, bytes]
    ) -> None:
        """Time passes at a worker: what it runs is in its memory, and nothing else is."""
        for follower in followers:
            found, runs = contents.get(follower.model), follower.running
            if runs is None:
                whole = found is not None and not found.startswith(b"torn")
                assert not whole, f"{name} has forgotten what it runs"
            else:
                key = (follower.model, runs.epoch, runs.version)
                assert found == self.data_for(name, key), f"{name} has other bytes than {key}"

    def on_bases(self, name: str, followers: Iterable[Follower]) -> None:
        """Time passes at a worker: what patches build on is what it says it runs."""
        for follower in followers:
            base = follower.versions.base
            if base is None:
                continue
            runs = base.running
            found = self.published[follower.model, runs.epoch, runs.version]
            assert base.data.tobytes() == found.data, f"{name} has other bytes than {runs}"
            assert runs.digest == found.digest
            assert base.users or runs == follower.running, f"{name} keeps {runs} for nothing"
            arriving = [h.transfer for h in follower.versions.all("arriving")]
            assert base.users >= sum(t.base is base for t in arriving)

    def on_followers(self, name: str, followers: Iterable[Follower]) -> None:
        """Time passes at a worker."""
        for follower in followers:
            held = sum(h.chunks is not None for h in follower.versions.all(*IN_MEMORY))
            assert held <= BUFFERS_MAX, f"{name} holds {held} copies of {follower.model}"
