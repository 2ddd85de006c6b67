"""One model of a worker: what it runs, what is arriving, and what waits to be applied.

    idle ──announce──> arriving ──all chunks, digest──> staged ──commit──> ready ──applied──> idle
                          │                               │                  │
                          └── newer announced ────────────┴── abort, newer   └── failed

A version that fails before a byte of the model has changed leaves the one before running. After one
that fails half-way none runs, and any may be applied, that one included.

`auto` versions are ready as soon as they are staged. The latest version wins: a newer announcement
replaces the transfer under way. But a worker that was replaced once finishes the next one, by
fetching, before it looks at anything newer; otherwise one that is slower than the trainer would
never complete any.
"""

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..codecs.layout import Layout
from .acceptance import Acceptance, Accepts, Expected
from .effects import Effect, Ready, Rejected, Renamed, Send, Subscribe
from .later import Later
from .limits import APPLIES_MAX, PROGRESS_CHUNKS, TEXT_MAX, Timing
from .messages import (
    Abort,
    Announce,
    Applied,
    Buffer,
    Chunk,
    Commit,
    End,
    Failed,
    Fetch,
    Progress,
    Rename,
    Running,
    Shared,
    Staged,
    Whole,
    data_topic,
)
from .staging import Buffers, SharedMemory, StagedVersion, StaleError
from .transfer import Lease, Transfer, take_whole


def another_host(_shared: Shared, _nbytes: int) -> SharedMemory | None:
    """Open no shared memory: the publisher's is not of this host."""
    return None


Key = tuple[int, int]
Phase = Literal["staged", "applying"]
Opens = Callable[[Shared, int], SharedMemory | None]

RESTARTS_MAX = 3  # transfers of one version whose digest did not match, before it is given up
# What may be otherwise next time, since bytes were damaged or memory was short: the next beacon
# tries again.
TRANSIENT = {"digest-mismatch", "layout-invalid", "no-memory", "unsupported"}
REJECTED_KEPT = 8  # versions remembered that could not be taken here


class Slot:
    """One model of one worker.

    Args:
        model: Its name.
        accepts: Says why a layout cannot be applied here; nothing if it can.
        bytes_max: The largest version to stage, in bytes.
        timing: How long to wait.
        expected: What versions are like, where that is known.
        opens: Opens a segment of shared memory; None if it is not of this host.
    """

    def __init__(
        self,
        model: str,
        accepts: Accepts,
        bytes_max: int,
        timing: Timing,
        opens: Opens = another_host,
        expected: Expected = Expected(),  # noqa: B008 - it cannot change
    ) -> None:
        self.model = model
        self.timing = timing
        self.running: Running | None = None
        self.arriving: Transfer | None = None
        self.undecided: StagedVersion | None = None  # staged together, waiting for the commit
        self.ready: dict[Key, StagedVersion] = {}  # given out to be applied
        self._acceptance = Acceptance(model, accepts, bytes_max, expected.layout_bytes)
        self._expected = expected
        self._opens = opens
        self.shared = False  # versions are read from shared memory: nothing needs to be pushed
        self._buffers = Buffers()
        self._waiting: Announce | None = None  # newer, but its layout or a buffer is missing
        # Could not be taken; not tried again. An older one still may be: what was rejected may
        # have been aborted, or meant for few, and the latest for all be one that was missed.
        self._rejected: deque[Key] = deque(maxlen=REJECTED_KEPT)
        self._later = Later(timing)
        self.catching_up = False  # finishing one version, whatever is announced
        self._failure: Failed | None = None  # the last one, until another version is begun
        self._taken: Key = (0, 0)  # is being applied
        self.torn = 0  # applies in a row that failed half-way: while there is one, nothing runs
        self._torn_epoch = 0  # the greatest of which one did
        self._stale: Key = (
            0,
            0,
        )  # was not to be had from shared memory: fetch it, if it is offered
        self._asked_at = -math.inf  # when the latest announcement was asked for

    @property
    def epoch(self) -> int:
        """The greatest of which bytes were written into the model."""
        return max(self._torn_epoch, self.running.epoch if self.running else 0)

    @property
    def _newest(self) -> Key:
        """The newest version that needs no announcement any more."""
        keys = [(0, 0), *self.ready]
        keys += [(self.running.epoch, self.running.version)] if self.running else []
        keys += [self.undecided.key] if self.undecided else []
        return max(keys)

    # What the publisher says.

    def hear_of(self, epoch: int, version: int, now: float) -> list[Effect]:
        """A beacon, a welcome or a stray chunk speaks of a version: ask if it is news."""
        known = self._newest
        if self.arriving is not None:
            known = max(known, self.arriving.key)
        if version == 0 or (epoch, version) <= known or self.catching_up:
            return []
        if (epoch, version) in self._rejected or self._later.is_early(epoch, version, now):
            return []
        return self._ask_latest(epoch, now)

    def _ask_latest(self, epoch: int, now: float) -> list[Effect]:
        if now - self._asked_at < self.timing.quiet:
            return []
        self._asked_at = now
        waiting = self._waiting
        layout = waiting is not None and self._acceptance.layout(waiting) is None
        fetch = Fetch(model=self.model, epoch=epoch, version=0, layout=layout)
        return [Send(fetch)]

    def announced(
        self,
        announce: Announce,
        layout: Buffer | None,
        now: float,
        *,
        pushed: bool = True,
        data: Buffer | None = None,
    ) -> list[Effect]:
        """A version exists; its chunks may follow if the announcement itself was pushed.

        `data` is what came with an announcement that says so.
        """
        key = (announce.epoch, announce.version)
        fault = self._acceptance.learn(announce, layout) if layout is not None else None
        if fault is not None:
            return self._reject(announce, *fault)
        if self.undecided is not None and key == self.undecided.key and announce.commit == "auto":
            return self._commit()
        if key <= self._newest or key in self._rejected:
            return []
        if self.arriving is not None:
            if key < self.arriving.key:
                return []
            if key == self.arriving.key and same_bytes(announce, self.arriving.announce):
                self.arriving.announce = announce  # it may have been committed meanwhile
                return []
            if self.catching_up and key != self.arriving.key:
                return []
        effects = self._begin(announce, now, data)
        follows = announce.whole is not None or (pushed and not self.shared)
        if self.arriving is not None and not follows:
            self.arriving.pull()
            effects += self._pull(self.arriving, now)
        return effects

    def announced_whole(
        self, announce: Announce, whole: Whole, payload: Buffer, now: float
    ) -> list[Effect]:
        """A version exists, and this is all of it: announcement, chunk and end in one."""
        effects = self.announced(announce, None, now, data=payload)
        model, epoch, version = self.model, announce.epoch, announce.version
        if self.arriving is None or self.arriving.key != (epoch, version):
            return effects  # it was taken at once, or is not wanted
        chunk = Chunk(model=model, epoch=epoch, version=version, index=0, crc=whole.crc)
        end = End(model=model, epoch=epoch, version=version, digest=whole.digest)
        effects += self.chunk(chunk, payload, now, pushed=True)
        return effects + self.end(end, now)

    def renamed(self, rename: Rename, now: float) -> list[Effect]:
        """What runs here is a newer version, byte for byte: nothing is to be fetched or applied.

        Not if another version is at the user's, who may be writing it into the model.
        """
        key = (rename.epoch, rename.version)
        if self.running is None or self.running != rename.was or self.ready or key <= self._newest:
            return []
        if self.arriving is not None and self.arriving.key > key:
            return []
        epoch, version = key
        self.running = Running(epoch, version, self.running.digest)
        self._begun()
        self._forget_undecided()
        over = self._drop_arriving(now) if self.arriving else self._caught_up(epoch, now)
        return [Renamed(self.model, epoch, version), self._say_applied(self.running), *over]

    def _begin(self, announce: Announce, now: float, data: Buffer | None = None) -> list[Effect]:
        """Start to receive a version, replacing an older one that is still arriving."""
        self._waiting = announce
        fault = self._acceptance.fault(announce)
        if fault is not None:
            return self._reject(announce, *fault)
        layout = self._acceptance.layout(announce)
        if layout is None:
            fetch = Fetch(
                model=self.model, epoch=announce.epoch, version=announce.version, layout=True
            )
            self._asked_at = now
            return [Send(fetch)]
        stale = (announce.epoch, announce.version) == self._stale
        shared = None if stale else announce.shared
        memory = self._opens(shared, announce.nbytes) if shared is not None else None
        at_once = announce.acknowledge == "applied" and announce.commit == "auto"
        if memory is not None and at_once:
            return self._drop_arriving(now) + self._point(announce, layout, memory)
        effects = self._abandon()
        try:
            buffer = self._buffers.take(announce.nbytes)
        except MemoryError:
            text = f"there is no memory for {announce.nbytes} bytes: lower bytes_max, or make room"
            rejected = self._reject(announce, "no-memory", text)
            return effects + rejected + self._caught_up(announce.epoch, now)
        if buffer is None:
            return effects  # `_resume` begins when one is given back
        self._begun()
        digest = take_whole(announce, data, buffer) if data is not None else None
        if digest is not None:
            return effects + self._arrived(announce, layout, buffer, digest, now)
        self.arriving = Transfer(announce, layout, buffer, now, self.timing)
        if memory is not None:
            stamp = (self.model, announce.epoch, announce.version)
            with suppress(StaleError), memory.reading(*stamp):
                self.arriving.read(memory.data)
        return effects

    def _point(self, announce: Announce, layout: Layout, memory: SharedMemory) -> list[Effect]:
        """The version is whole in shared memory: it can be applied from there."""
        self._begun()
        self._forget_undecided()
        staged = StagedVersion(
            self.model,
            announce.epoch,
            announce.version,
            layout,
            memory.data,
            digest="",
            shared=memory,
            hash_chunks=announce.chunk_bytes if announce.hash else 0,
        )
        self.ready[staged.key] = staged
        return [Ready(staged)]

    def _begun(self) -> None:
        """A version is on its way: forget why another was not. (That nothing runs is said on.)"""
        self._waiting = None
        if not self.torn:
            self._failure = None

    def _abandon(self) -> list[Effect]:
        """A newer version replaces the one arriving; the next is finished, whatever comes."""
        if self.arriving is None:
            return []
        self._release(self.arriving)
        self.arriving = None
        if self.catching_up:
            return []
        self.catching_up = True
        return [] if self.shared else [Subscribe(data_topic(self.model), on=False)]

    def _reject(self, announce: Announce, code: str, text: str) -> list[Effect]:
        if code not in TRANSIENT:
            self._rejected.append((announce.epoch, announce.version))
        self._waiting = None
        rejected = Rejected(self.model, announce.epoch, announce.version, code, text)
        return [self._fail((announce.epoch, announce.version), code, text), rejected]

    def _fail(self, key: Key, code: str, text: str) -> Effect:
        epoch, version = key
        self._failure = Failed(
            model=self.model, epoch=epoch, version=version, code=code, text=text[:TEXT_MAX]
        )
        return self._say_failed(self._failure)

    def place(self, chunk: Chunk, size: int) -> Lease | None:
        """Say where a chunk's payload belongs that is about to be received; None: nowhere."""
        transfer = self.arriving
        if transfer is None or transfer.key != (chunk.epoch, chunk.version):
            return None
        return transfer.lend(chunk.index, size)

    def chunk(self, chunk: Chunk, payload: Buffer, now: float, *, pushed: bool) -> list[Effect]:
        """A piece of a version."""
        transfer = self.arriving
        if transfer is None or transfer.key != (chunk.epoch, chunk.version):
            return self.hear_of(chunk.epoch, chunk.version, now) if self._waiting is None else []
        fresh = transfer.add(chunk.index, chunk.crc, payload, now, pushed=pushed)
        effects = self._pull(transfer, now)
        slow = now - transfer.reported_at >= self.timing.report
        if fresh and pushed and (slow or transfer.here % PROGRESS_CHUNKS == 0):
            transfer.reported_at = now
            effects.append(Send(self._progress(transfer)))
        return effects + self._completed(now)

    def end(self, end: End, now: float) -> list[Effect]:
        """All chunks of a version are out."""
        transfer = self.arriving
        if transfer is None or transfer.key != (end.epoch, end.version):
            return self.hear_of(end.epoch, end.version, now) if self._waiting is None else []
        transfer.end(end.digest)
        return self._pull(transfer, now) + self._completed(now)

    def _pull(self, transfer: Transfer, now: float) -> list[Effect]:
        epoch, version = transfer.key
        return [
            Send(Fetch(model=self.model, epoch=epoch, version=version, first=first, count=count))
            for first, count in transfer.wants(now)
        ]

    def _progress(self, transfer: Transfer) -> Progress:
        epoch, version = transfer.key
        return Progress(model=self.model, epoch=epoch, version=version, chunks=transfer.here)

    def _completed(self, now: float) -> list[Effect]:
        """If the version is whole: verify it, then stage it."""
        transfer = self.arriving
        if transfer is None or not transfer.complete:
            return []
        if not transfer.verify():
            if transfer.restarts < RESTARTS_MAX:
                return []  # the next tick fetches it anew
            self._release(transfer)
            self.arriving = None
            text = f"the whole did not match its digest, {transfer.restarts} times"
            rejected = self._reject(transfer.announce, "digest-mismatch", text)
            return rejected + self._caught_up(transfer.key[0], now)
        self.arriving = None
        digest = transfer.digest or ""
        return self._arrived(transfer.announce, transfer.layout, transfer.buffer, digest, now)

    def _arrived(
        self, announce: Announce, layout: Layout, data: NDArray[np.uint8], digest: str, now: float
    ) -> list[Effect]:
        """A version is whole and sound: stage it, and commit it unless that waits for others."""
        epoch, version = announce.epoch, announce.version
        say = announce.acknowledge == "staged" or announce.commit == "together"
        staged = StagedVersion(self.model, epoch, version, layout, data, digest, say_staged=say)
        effects = [self._say_staged(staged)] if say else list[Effect]()
        self._forget_undecided()
        self.undecided = staged
        if announce.commit != "together":
            effects += self._commit()
        return effects + self._caught_up(epoch, now)

    def _forget_undecided(self) -> None:
        """A newer version is whole, or this one will not be committed."""
        if self.undecided is not None:
            self._buffers.give_back(self.undecided.data)
            self.undecided = None

    def _commit(self) -> list[Effect]:
        staged, self.undecided = self.undecided, None
        if staged is None:
            return []
        self.ready[staged.key] = staged
        return [Ready(staged)]

    def _caught_up(self, epoch: int, now: float) -> list[Effect]:
        """A transfer is over: take pushed chunks again, and look for what came meanwhile."""
        if not self.catching_up:
            return []
        self.catching_up = False
        return [
            Subscribe(data_topic(self.model), on=not self.shared),
            *self._ask_latest(epoch, now),
        ]

    def committed(self, commit: Commit) -> list[Effect]:
        """The version that is staged here may be applied."""
        staged = self.undecided
        same = staged is not None and staged.key == (commit.epoch, commit.version)
        if staged is None or not same or staged.digest != commit.digest:
            return []
        return self._commit()

    def aborted(self, abort: Abort, now: float) -> list[Effect]:
        """The version must not be applied; drop what there is of it."""
        key = (abort.epoch, abort.version)
        if self.undecided is not None and self.undecided.key == key:
            self._forget_undecided()
        if self.arriving is not None and self.arriving.key == key:
            return self._drop_arriving(now)
        return self._resume(now)

    def gone(self, epoch: int, version: int, now: float) -> list[Effect]:
        """The publisher no longer has a version."""
        if self.arriving is not None and epoch not in (0, self.arriving.key[0]):
            return []  # a late word of an older publisher
        if self._waiting is not None and version in (0, self._waiting.version):
            self._waiting = None
        if self.arriving is not None and self.arriving.key[1] == version:
            asked = self.arriving.key[0]
            return self._drop_arriving(now) + self._ask_latest(asked, now)
        return []

    def _drop_arriving(self, now: float) -> list[Effect]:
        if self.arriving is None:
            return []
        epoch = self.arriving.key[0]
        self._release(self.arriving)
        self.arriving = self._waiting = None
        return self._caught_up(epoch, now)

    def expect(self) -> None:
        """Versions will come over the network, probably of this size: have a buffer for them."""
        nbytes = self._expected.nbytes
        if not self.shared and nbytes <= self._acceptance.bytes_max:
            self._buffers.reserve(nbytes)

    def _release(self, transfer: Transfer) -> None:
        """A transfer is over before it is whole: its buffer may serve another."""
        transfer.revoke()
        self._buffers.give_back(transfer.buffer)

    def reconnected(self, epoch: int, version: int, now: float) -> list[Effect]:
        """The publisher has let this worker in (again), and has this version for it."""
        effects: list[Effect] = []
        if self.undecided is not None and self.undecided.epoch != epoch:
            self._forget_undecided()
        self._waiting = None
        self._rejected.clear()
        self.torn = min(self.torn, 1)  # it may be tried as often as at first
        if self.arriving is not None and self.arriving.key[0] != epoch:
            effects += self._drop_arriving(now)
        elif self.arriving is not None:
            self.arriving.reconnected(now)
        self._asked_at = -math.inf
        held = [*self.ready.values(), *([self.undecided] if self.undecided is not None else [])]
        effects += [self._say_staged(staged) for staged in held if staged.say_staged]
        return effects + self.hear_of(epoch, version, now)

    def _say_staged(self, staged: StagedVersion) -> Effect:
        epoch, version = staged.key
        return Send(Staged(model=self.model, epoch=epoch, version=version, digest=staged.digest))

    def _say_applied(self, running: Running) -> Effect:
        epoch, version = running.epoch, running.version
        return Send(Applied(model=self.model, epoch=epoch, version=version, digest=running.digest))

    def _say_failed(self, failure: Failed) -> Effect:
        return Send(msgspec.structs.replace(failure, intact=not self.torn))

    # What the user does with a version that is ready.

    def taken(self, key: Key) -> list[Effect]:
        """Somebody has begun to apply a version."""
        self._taken = key
        return []

    def applied(self, key: Key, now: float, digest: str = "") -> list[Effect]:
        """A version was applied: it runs here. `digest`, if it was hashed only then."""
        staged = self._returned(key)
        if staged is None:
            return []
        self.running = Running(staged.epoch, staged.version, digest or staged.digest)
        self.torn = 0
        if self._failure is not None and (self._failure.epoch, self._failure.version) <= key:
            self._failure = None
        return [self._say_applied(self.running), *self._resume(now)]

    def failed(
        self, key: Key, text: str, now: float, *, intact: bool = True, full: bool = False
    ) -> list[Effect]:
        """A version could not be applied. If the model is `intact`, what ran before still runs.

        `full`: there was no room for it, which there may be later.
        """
        staged = self._returned(key)
        if staged is None:
            return []
        if not intact:
            self._tear(key)
        if full and intact:
            self._later.put_off(key, now)
            return [self._fail(key, "no-memory", text), *self._resume(now)]
        if intact or self.torn >= APPLIES_MAX:
            self._rejected.append(key)
        return [self._fail(key, "apply", text), *self._resume(now)]

    def _tear(self, key: Key) -> None:
        """The model holds parts of two versions. What is tried next comes whole and verified."""
        self.running, self._stale = None, key
        self.torn, self._torn_epoch = self.torn + 1, max(self._torn_epoch, key[0])

    def stale(self, key: Key, now: float) -> list[Effect]:
        """A version was gone from shared memory before it could be copied: ask for the latest."""
        staged = self._returned(key)
        if staged is None:
            return []
        self._stale, self._asked_at = key, -math.inf
        return self._ask_latest(staged.epoch, now)

    def dropped(self, key: Key, now: float) -> list[Effect]:
        """A version was replaced by a newer one before anybody applied it."""
        return self._resume(now) if self._returned(key) is not None else []

    def _returned(self, key: Key) -> StagedVersion | None:
        staged = self.ready.pop(key, None)
        if staged is not None and staged.shared is None:
            self._buffers.give_back(staged.data)
        return staged

    def _resume(self, now: float) -> list[Effect]:
        """A buffer is free: begin what waited for it."""
        waiting = self._waiting
        if waiting is None or self.arriving is not None:
            return []
        if (waiting.epoch, waiting.version) <= self._newest:
            self._waiting = None
            return []
        return self._begin(waiting, now)

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Fetch what is due."""
        if self.arriving is not None:
            return self._pull(self.arriving, now) + self._completed(now)
        waiting = self._waiting
        if waiting is not None and now - self._asked_at >= self.timing.patience:
            return self._begin(waiting, now)
        return []

    def repeat(self) -> list[Effect]:
        """Say again how things stand, in case it got lost."""
        effects: list[Effect] = []
        if self.arriving is not None and self._taken not in self.ready:
            effects.append(Send(self._progress(self.arriving)))
        held = [*self.ready.values(), *([self.undecided] if self.undecided is not None else [])]
        effects += [self._say_staged(staged) for staged in held if staged.say_staged]
        if self.running is not None:
            effects.append(self._say_applied(self.running))
        if self._failure is not None:
            effects.append(self._say_failed(self._failure))
        applying = self._taken in self.ready  # it may hang, and others become ready behind it
        if applying or (self.ready and self.arriving is None):
            epoch, version = self._taken if applying else max(self.ready)
            phase: Phase = "applying" if applying else "staged"
            progress = Progress(
                model=self.model, epoch=epoch, version=version, chunks=0, phase=phase
            )
            effects.append(Send(progress))
        return effects


def same_bytes(one: Announce, other: Announce) -> bool:
    """Return whether two announcements of a version agree on what arrives."""
    return (one.layout, one.nbytes, one.chunk_bytes) == (
        other.layout,
        other.nbytes,
        other.chunk_bytes,
    )
