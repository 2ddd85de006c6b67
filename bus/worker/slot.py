"""One model of a worker: what comes of it, and what becomes of the versions here (`phases.py`).

The latest version wins: an older one that is on its way makes room for it. But a worker that had to
drop one finishes the next, by fetching, before it looks at anything newer.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import msgspec

from ...codecs.layout import Layout
from ..effects import Effect, Ready, Rejected, Renamed, Send, Subscribe
from ..lease import Lease
from ..limits import APPLIES_MAX, PROGRESS_CHUNKS, TEXT_MAX, Timing
from ..messages import (
    Abort,
    Announce,
    Applied,
    Beacon,
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
from ..staged import SharedMemory, StagedVersion, StaleError
from .holdings import Held, Holdings, Key
from .later import Later
from .layouts import Acceptance, Accepts, Expected
from .phases import MODES, Event, Mode, Phase, Turn
from .transfer import Transfer, take_whole


def another_host(_shared: Shared, _nbytes: int) -> SharedMemory | None:
    """Open no shared memory: the publisher's is not of this host."""
    return None


OfModel = Abort | Announce | Beacon | Chunk | Commit | End | Rename  # what speaks of one
Opens = Callable[[Shared, int], SharedMemory | None]

RESTARTS_MAX = 3  # transfers of one version whose digest did not match, before it is given up
# What may be otherwise next time, since bytes were damaged or memory was short: the next beacon
# tries again.
TRANSIENT = {"digest-mismatch", "layout-invalid", "no-memory", "unsupported"}


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
        self.holds = Holdings()
        self.mode: Mode = "following"
        self.shared = False  # versions are read from shared memory: nothing needs to be pushed
        self.torn = 0  # applies in a row that failed half-way: while there is one, nothing runs
        self.epoch = 0  # the greatest of which bytes were written into the model
        self._acceptance = Acceptance(model, accepts, bytes_max, expected.layout_bytes)
        self._expected = expected
        self._opens = opens
        self._later = Later(timing)
        self._failure: Failed | None = None  # the last one, until another version is begun
        self._stale: Key = (
            0,
            0,
        )  # was not to be had from shared memory: fetch it, if it is offered
        self._asked_at = -math.inf  # when the latest announcement was asked for

    @property
    def running(self) -> Running | None:
        """What runs."""
        held = self.holds.at("running")
        return held.running if held is not None else None

    # What the publisher says.

    def take(
        self, message: OfModel, payload: Buffer | Lease | None, now: float, *, pushed: bool
    ) -> list[Effect]:
        """Take a message that speaks of this model."""
        match message:
            case Chunk():
                return self.chunk(message, payload or b"", now, pushed=pushed)
            case Announce():
                data = payload.payload if isinstance(payload, Lease) else payload
                if message.whole is None or data is None:
                    return self.announced(message, data, now, pushed=pushed)
                return self.announced_whole(message, message.whole, data, now)
            case End():
                return self.end(message, now)
            case Commit():
                return self.committed(message)
            case Abort():
                return self.aborted(message, now)
            case Beacon():
                return self.hear_of(message.epoch, message.version, now)
            case Rename():
                return self.renamed(message, now)

    def hear_of(self, epoch: int, version: int, now: float) -> list[Effect]:
        """A beacon, a welcome or a stray chunk speaks of a version: ask if it is news."""
        arriving, key = self.holds.at("arriving"), (epoch, version)
        if version == 0 or key <= self.holds.newest or key in self.holds.rejected:
            return []
        if arriving is not None and (key <= arriving.key or self.mode == "catching-up"):
            return []
        if self._later.is_early(epoch, version, now):
            return []
        return self._ask_latest(epoch, now)

    def _ask_latest(self, epoch: int, now: float) -> list[Effect]:
        if now - self._asked_at < self.timing.quiet:
            return []
        self._asked_at = now
        waiting = self.holds.at("announced")
        layout = waiting is not None and self._acceptance.layout(waiting.announce) is None
        return [Send(Fetch(model=self.model, epoch=epoch, version=0, layout=layout))]

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
            return self._fail(key, *fault)
        staged, arriving = self.holds.at("staged"), self.holds.at("arriving")
        if staged is not None and key == staged.key and announce.commit == "auto":
            return self._commit(staged)
        if key <= self.holds.newest or key in self.holds.rejected:
            return []
        if arriving is not None and arriving.transfer is not None:
            if key == arriving.key and same_bytes(announce, arriving.announce):
                arriving.announce = announce  # it may have been committed meanwhile
                return []
            if key < arriving.key or (self.mode == "catching-up" and key != arriving.key):
                return []
        held = self.holds.expect(announce)
        effects = self._begin(held, now, data)
        follows = announce.whole is not None or (pushed and not self.shared)
        if held.phase == "arriving" and held.transfer is not None and not follows:
            held.transfer.pull()
            effects += self._pull(held, held.transfer, now)
        return effects

    def announced_whole(
        self, announce: Announce, whole: Whole, payload: Buffer, now: float
    ) -> list[Effect]:
        """A version exists, and this is all of it: announcement, chunk and end in one."""
        effects = self.announced(announce, None, now, data=payload)
        model, epoch, version = self.model, announce.epoch, announce.version
        if self._arriving(epoch, version) is None:
            return effects  # it was taken at once, or is not wanted
        chunk = Chunk(model=model, epoch=epoch, version=version, index=0, crc=whole.crc)
        end = End(model=model, epoch=epoch, version=version, digest=whole.digest)
        effects += self.chunk(chunk, payload, now, pushed=True)
        return effects + self.end(end, now)

    def renamed(self, rename: Rename, now: float) -> list[Effect]:
        """What runs here is a newer version, byte for byte: nothing is to be fetched or applied.

        Not if another version is at the user's, who may be writing it into the model.
        """
        key, held = (rename.epoch, rename.version), self.holds.at("running")
        if held is None or held.running != rename.was or self.holds.all("ready", "applying"):
            return []
        begun = max((h.key for h in self.holds.all("arriving")), default=(0, 0))
        if key <= self.holds.newest or key < begun:
            return []
        for older in self.holds.all("announced", "arriving", "staged"):
            self.holds.move(older, "newer")
        self.holds.rename(held, key)
        held.running, self.epoch = Running(*key, rename.was.digest), max(self.epoch, key[0])
        self._failure = None
        said = [Renamed(self.model, *key), self._say_applied(held.running)]
        return [*said, *self._turn("completed", now)]

    def _begin(self, held: Held, now: float, data: Buffer | None = None) -> list[Effect]:
        """Start to receive a version, if everything is there for it."""
        announce = held.announce
        fault = self._acceptance.fault(announce)
        if fault is not None:
            return self._decline(held, *fault)
        layout = self._acceptance.layout(announce)
        if layout is None:
            self._asked_at = now
            epoch, version = held.key
            return [Send(Fetch(model=self.model, epoch=epoch, version=version, layout=True))]
        shared = None if held.key == self._stale else announce.shared
        memory = self._opens(shared, announce.nbytes) if shared is not None else None
        at_once = announce.acknowledge == "applied" and announce.commit == "auto"
        if memory is not None and at_once:
            return self._map(held, layout, memory, now)
        effects = self._replace_arriving()
        try:
            if not self.holds.take_memory(held):
                return effects  # `_resume` begins when one is given back
        except MemoryError:
            text = f"there is no memory for {announce.nbytes} bytes: lower bytes_max, or make room"
            return effects + self._decline(held, "no-memory", text)
        return effects + self._receive(held, layout, data, memory, now)

    def _receive(
        self,
        held: Held,
        layout: Layout,
        data: Buffer | None,
        memory: SharedMemory | None,
        now: float,
    ) -> list[Effect]:
        """There is a buffer: take what came along, or what lies in shared memory; else wait."""
        announce, buffer = held.announce, held.buffer
        assert buffer is not None  # noqa: S101 - it was taken a moment ago
        self._move_on(held, "begun")
        digest = take_whole(announce, data, buffer) if data is not None else None
        if digest is not None:
            return self._arrived(held, layout, digest, now)
        held.transfer = Transfer(announce, layout, buffer, now, self.timing)
        if memory is not None:
            with suppress(StaleError), memory.reading(self.model, *held.key):
                held.transfer.read(memory.data)
        return []

    def _map(self, held: Held, layout: Layout, memory: SharedMemory, now: float) -> list[Effect]:
        """The version is whole in shared memory: it can be applied from there."""
        announce = held.announce
        for older in self.holds.all("arriving", "staged"):
            self.holds.move(older, "newer")
        chunks = announce.chunk_bytes if announce.hash else 0
        epoch, version = held.key
        held.staged = StagedVersion(
            self.model, epoch, version, layout, memory.data, "", shared=memory, hash_chunks=chunks
        )
        self._move_on(held, "mapped")
        return [*self._turn("completed", now), Ready(held.staged)]

    def _move_on(self, held: Held, event: Event) -> None:
        """A version is on its way: forget why another was not. (That nothing runs is said on.)"""
        self.holds.move(held, event)
        if not self.torn:
            self._failure = None

    def _replace_arriving(self) -> list[Effect]:
        """A newer version takes the place of the one that is arriving."""
        if not self.holds.move(self.holds.at("arriving"), "newer"):
            return []
        return self._turn("replaced")

    def _turn(self, turn: Turn, now: float = -math.inf) -> list[Effect]:
        """Take pushed chunks again, and look for what came meanwhile; or no longer."""
        mode = MODES[self.mode].get(turn)
        if mode is None:
            return []
        self.mode = mode
        on = mode == "following"
        subscribe = Subscribe(data_topic(self.model), on=on and not self.shared)
        newest = self.holds.newest[0]
        return [subscribe, *(self._ask_latest(newest, now) if on else [])]

    def _decline(self, held: Held, code: str, text: str) -> list[Effect]:
        self.holds.move(held, "failed" if code in TRANSIENT else "declined")
        return self._fail(held.key, code, text)

    def _fail(self, key: Key, code: str, text: str) -> list[Effect]:
        epoch, version = key
        self._failure = Failed(
            model=self.model, epoch=epoch, version=version, code=code, text=text[:TEXT_MAX]
        )
        return [self._say_failed(self._failure), Rejected(self.model, epoch, version, code, text)]

    # What arrives of it.

    def _arriving(self, epoch: int, version: int) -> Held | None:
        held = self.holds.at("arriving")
        return held if held is not None and held.key == (epoch, version) else None

    def place(self, chunk: Chunk, size: int) -> Lease | None:
        """Say where a chunk's payload belongs that is about to be received; None: nowhere."""
        held = self._arriving(chunk.epoch, chunk.version)
        if held is None or held.transfer is None:
            return None
        return held.transfer.lend(chunk, size)

    def chunk(
        self, chunk: Chunk, payload: Buffer | Lease, now: float, *, pushed: bool
    ) -> list[Effect]:
        """A piece of a version."""
        held = self._arriving(chunk.epoch, chunk.version)
        if held is None or held.transfer is None:
            return self._stray(chunk.epoch, chunk.version, now)
        transfer = held.transfer
        fresh = transfer.add(chunk.index, chunk.crc, payload, now, pushed=pushed)
        effects = self._pull(held, transfer, now)
        slow = now - transfer.reported_at >= self.timing.report
        if fresh and pushed and (slow or transfer.here % PROGRESS_CHUNKS == 0):
            transfer.reported_at = now
            effects.append(self._say_progress(held, transfer))
        return effects + self._completed(held, transfer, now)

    def end(self, end: End, now: float) -> list[Effect]:
        """All chunks of a version are out."""
        held = self._arriving(end.epoch, end.version)
        if held is None or held.transfer is None:
            return self._stray(end.epoch, end.version, now)
        held.transfer.end(end.digest)
        pulled = self._pull(held, held.transfer, now)
        return pulled + self._completed(held, held.transfer, now)

    def _stray(self, epoch: int, version: int, now: float) -> list[Effect]:
        waiting = self.holds.at("announced")
        return self.hear_of(epoch, version, now) if waiting is None else []

    def _pull(self, held: Held, transfer: Transfer, now: float) -> list[Effect]:
        epoch, version = held.key
        return [
            Send(Fetch(model=self.model, epoch=epoch, version=version, first=first, count=count))
            for first, count in transfer.wants(now)
        ]

    def _completed(self, held: Held, transfer: Transfer, now: float) -> list[Effect]:
        """If the version is whole: verify it, then stage it."""
        if not transfer.complete:
            return []
        if transfer.verify():
            return self._arrived(held, transfer.layout, transfer.digest or "", now)
        if transfer.restarts < RESTARTS_MAX:
            return []  # the next tick fetches it anew
        text = f"the whole did not match its digest, {transfer.restarts} times"
        return self._decline(held, "digest-mismatch", text)

    def _arrived(self, held: Held, layout: Layout, digest: str, now: float) -> list[Effect]:
        """A version is whole and sound: stage it, and commit it unless that waits for others."""
        announce, buffer = held.announce, held.buffer
        assert buffer is not None  # noqa: S101 - it arrived there
        say = announce.acknowledge == "staged" or announce.commit == "together"
        epoch, version = held.key
        self.holds.move(self.holds.at("staged"), "newer")
        held.staged = StagedVersion(
            self.model, epoch, version, layout, buffer, digest, say_staged=say
        )
        self.holds.move(held, "whole")
        effects = self._say_staged([held])
        if announce.commit != "together":
            effects += self._commit(held)
        return effects + self._turn("completed", now)

    def _commit(self, held: Held) -> list[Effect]:
        self.holds.move(held, "committed")
        return [Ready(held.staged)] if held.staged is not None else []

    def committed(self, commit: Commit) -> list[Effect]:
        """The version that is staged here may be applied."""
        held, key = self.holds.at("staged"), (commit.epoch, commit.version)
        if held is None or held.staged is None or held.key != key:
            return []
        return self._commit(held) if held.staged.digest == commit.digest else []

    def aborted(self, abort: Abort, now: float) -> list[Effect]:
        """The version must not be applied; drop what there is of it."""
        key = (abort.epoch, abort.version)
        for held in self.holds.all("announced", "arriving", "staged"):
            if held.key == key:
                self.holds.move(held, "aborted")
        return self._go_on(abort.epoch, now)

    def gone(self, epoch: int, version: int, now: float) -> list[Effect]:
        """The publisher no longer has a version; 0: it has none."""
        for held in self.holds.all("announced", "arriving"):
            named = version == held.key[1] or (version == 0 and held.phase == "announced")
            late = epoch not in (0, held.key[0])  # a word of an older publisher
            if named and not late and self.holds.move(held, "gone") and held.transfer is not None:
                return self._resume(now) or self._ask_latest(held.key[0], now)
        return []

    def _go_on(self, epoch: int, now: float) -> list[Effect]:
        """There may be room now for what waited; who is catching up must find something to do."""
        effects = self._resume(now)
        idle = not effects and self.mode == "catching-up" and self.holds.at("arriving") is None
        return self._ask_latest(epoch, now) if idle else effects

    # The session.

    def expect(self) -> None:
        """Versions will come over the network, probably of this size: have a buffer for them."""
        nbytes = self._expected.nbytes
        if not self.shared and nbytes <= self._acceptance.bytes_max:
            self.holds.buffers.reserve(nbytes)

    def reconnected(self, epoch: int, version: int, now: float) -> list[Effect]:
        """The publisher has let this worker in (again), and has this version for it."""
        for held in self.holds.all("announced", "arriving", "staged"):
            if held.phase == "announced" or held.key[0] != epoch:
                self.holds.move(held, "fenced")
            elif held.phase == "arriving" and held.transfer is not None:
                held.transfer.reconnected(now)
        self.holds.rejected.clear()
        self.torn = min(self.torn, 1)  # it may be tried as often as at first
        self._asked_at = -math.inf
        held_back = self.holds.all("ready", "applying", "staged")
        return self._say_staged(held_back) + self.hear_of(epoch, version, now)

    # What the user does with a version that is ready.

    def taken(self, key: Key) -> list[Effect]:
        """Somebody has begun to apply a version."""
        self.holds.move(self._given(key, "ready"), "taken")
        return []

    def put_back(self, key: Key) -> list[Effect]:
        """Somebody could not apply a version just now."""
        self.holds.move(self._given(key, "applying"), "put-back")
        return []

    def applied(self, key: Key, now: float, digest: str = "") -> list[Effect]:
        """A version was applied: it runs here. `digest`, if it was hashed only then."""
        held, older = self._given(key, "applying"), self.holds.at("running")
        if held is None or held.staged is None:
            return []
        self.holds.move(held, "applied")
        self.holds.move(older, "newer")
        held.running = Running(*key, digest or held.staged.digest)
        self.torn, self.epoch = 0, max(self.epoch, key[0])
        if self._failure is not None and (self._failure.epoch, self._failure.version) <= key:
            self._failure = None
        return [self._say_applied(held.running), *self._resume(now)]

    def failed(
        self, key: Key, text: str, now: float, *, intact: bool = True, full: bool = False
    ) -> list[Effect]:
        """A version could not be applied. If the model is `intact`, what ran before still runs.

        `full`: there was no room for it, which there may be later.
        """
        held = self._given(key, "applying")
        if held is None:
            return []
        if not intact:  # it holds parts of two versions; what is tried next comes verified
            self.holds.move(self.holds.at("running"), "torn")
            self._stale, self.torn, self.epoch = key, self.torn + 1, max(self.epoch, key[0])
        if full and intact:
            self._later.put_off(key, now)
            self.holds.move(held, "failed")
            said, *_ = self._fail(key, "no-memory", text)
        else:
            again = not intact and self.torn < APPLIES_MAX
            self.holds.move(held, "torn" if again else "declined")
            said, *_ = self._fail(key, "apply", text)
        return [said, *self._resume(now)]

    def stale(self, key: Key, now: float) -> list[Effect]:
        """A version was gone from shared memory before it could be copied: ask for the latest."""
        if not self.holds.move(self._given(key, "applying"), "stale"):
            return []
        self._stale, self._asked_at = key, -math.inf
        return self._ask_latest(key[0], now)

    def dropped(self, key: Key, now: float) -> list[Effect]:
        """A version was replaced by a newer one before anybody applied it."""
        held = self._given(key, "ready", "applying")
        return self._resume(now) if self.holds.move(held, "newer") else []

    def _given(self, key: Key, *phases: Phase) -> Held | None:
        return next((held for held in self.holds.all(*phases) if held.key == key), None)

    def _resume(self, now: float) -> list[Effect]:
        """A buffer is free: begin what waited for it."""
        waiting = self.holds.at("announced")
        if waiting is None or self.holds.at("arriving") is not None:
            return []
        if waiting.key <= self.holds.newest:
            self.holds.move(waiting, "newer")
            return []
        return self._begin(waiting, now)

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Fetch what is due."""
        held = self.holds.at("arriving")
        if held is not None and held.transfer is not None:
            return self._pull(held, held.transfer, now) + self._completed(held, held.transfer, now)
        waiting = self.holds.at("announced")
        if waiting is not None and now - self._asked_at >= self.timing.patience:
            return self._begin(waiting, now)
        return []

    def repeat(self) -> list[Effect]:
        """Say again how things stand, in case it got lost."""
        effects: list[Effect] = []
        arriving, applying = self.holds.at("arriving"), self.holds.at("applying")
        if arriving is not None and arriving.transfer is not None and applying is None:
            effects.append(self._say_progress(arriving, arriving.transfer))
        effects += self._say_staged(self.holds.all("ready", "applying", "staged"))
        if self.running is not None:
            effects.append(self._say_applied(self.running))
        if self._failure is not None:
            effects.append(self._say_failed(self._failure))
        ready = [applying] if applying is not None else self.holds.all("ready")
        if ready and (applying is not None or arriving is None):
            effects.append(self._say_progress(max(ready, key=lambda held: held.key)))
        return effects

    def _say_progress(self, held: Held, transfer: Transfer | None = None) -> Effect:
        epoch, version = held.key
        phase: Literal["receiving", "applying", "staged"] = "receiving"
        if transfer is None:  # it may hang in an apply, and others become ready behind it
            phase = "applying" if held.phase == "applying" else "staged"
        chunks = transfer.here if transfer is not None else 0
        progress = Progress(
            model=self.model, epoch=epoch, version=version, chunks=chunks, phase=phase
        )
        return Send(progress)

    def _say_staged(self, some: list[Held]) -> list[Effect]:
        due = [held.staged for held in some if held.staged is not None and held.staged.say_staged]
        return [
            Send(Staged(model=self.model, epoch=s.epoch, version=s.version, digest=s.digest))
            for s in due
        ]

    def _say_applied(self, running: Running) -> Effect:
        epoch, version = running.epoch, running.version
        return Send(Applied(model=self.model, epoch=epoch, version=version, digest=running.digest))

    def _say_failed(self, failure: Failed) -> Effect:
        return Send(msgspec.structs.replace(failure, intact=not self.torn))


def same_bytes(one: Announce, other: Announce) -> bool:
    """Return whether two announcements of a version agree on what arrives."""
    return (one.layout, one.nbytes, one.chunk_bytes) == (
        other.layout,
        other.nbytes,
        other.chunk_bytes,
    )
