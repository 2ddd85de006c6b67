"""One model of a worker: what comes of it, and what becomes of the versions here (`phases.py`).

The latest version wins: an older one that is on its way makes room for it. But a worker that had to
drop one finishes the next, by fetching, before it looks at anything newer. Of those that were
applied here, or could not be, it remembers what the next ones need. (W15, W24)
"""

import math
from typing import cast

import numpy as np

from ...codecs.checksum import digest
from ...codecs.native import crc32c
from ..chunks import Chunks, Memory
from ..effects import (
    Copy,
    Effect,
    Open,
    Ready,
    Rejected,
    Renamed,
    Reserve,
    Send,
    Subscribe,
    Whole,
)
from ..lease import Lease
from ..limits import APPLIES_MAX, WINDOW_CHUNKS, Timing
from ..messages import (
    Abort,
    Announce,
    AnyChunk,
    Applied,
    Buffer,
    Commit,
    End,
    Failed,
    PatchId,
    Rename,
    Running,
)
from ..messages import Whole as WholeData
from ..staged import SharedMemory, StagedVersion
from . import reports
from .events import Copied, Decoded, Granted, OfSlot, Opened, Report, Waits, Wanted
from .fetch_planner import FetchPlanner
from .layouts import Acceptance, Accepts, Expected, about
from .patches import Patches
from .phases import ARROWS, AT_ONCE, MODES, Event, ModeEvent
from .transfer import Transfer
from .version_store import Key, VersionEntry, VersionStore

# What may be otherwise next time, since bytes were damaged or memory was short: it is tried again,
# after a while.
TRANSIENT = {"digest-mismatch", "layout-invalid", "no-memory", "unsupported"}
RESTARTS_MAX = 3  # transfers of one version whose digest did not match, before it is given up
NOTHING_FITS = "nothing comes that fits what was announced"


class Follower:
    """One model of one worker.

    Args:
        model: Its name.
        accepts: Says why a layout cannot be applied here; nothing if it can.
        bytes_max: The largest version to stage, in bytes.
        timing: How long to wait.
        expected: What versions are like, where that is known.
    """

    def __init__(
        self,
        model: str,
        accepts: Accepts,
        bytes_max: int,
        timing: Timing,
        expected: Expected = Expected(),  # noqa: B008 - it cannot change
    ) -> None:
        self.model = model
        self.timing = timing
        self.shared = False  # versions are read from shared memory: nothing needs to be pushed
        self.versions = VersionStore()
        self._expected = expected
        self._acceptance = Acceptance(model, accepts, bytes_max, expected)
        self.planner = FetchPlanner(model, self.versions, timing)
        self.patches = Patches(model, self.versions, timing, expected)
        self.torn = 0  # applies in a row that failed half-way: while there is one, nothing runs
        self.epoch = 0  # the greatest of which bytes were written into the model
        self.stale: Key = (0, 0)  # was not to be had from shared memory: it is to be fetched
        self.failed: Failed | None = None  # the last one, until another version is begun
        self._misfit: Announce | None = None  # was refused for its names or shapes, and may fit yet
        self._look_at = math.inf  # when to see whether it does
        self._window = 0  # bytes of one, the largest of the versions that were begun in the session

    @property
    def awaits(self) -> int:
        """How many bytes may come at once, since they were asked for: a window, and a layout."""
        return self._window + self._acceptance.layout_bytes_max

    @property
    def running(self) -> Running | None:
        """What runs."""
        entry = self.versions.at["running"]
        return entry.running if entry is not None else None

    # What the publisher says.

    def announced(
        self, announce: Announce, payload: Buffer | None, now: float, *, pushed: bool = True
    ) -> list[Effect]:
        """A version exists; its chunks may follow if the announcement itself was pushed.

        `payload` is its layout, or the whole of its data if the announcement says so.
        """
        key = (announce.epoch, announce.version)
        data, layout = (None, payload) if announce.whole is None else (payload, None)
        fault = self._acceptance.learn(announce, layout) if layout is not None else None
        if fault is not None and fault[0] in TRANSIENT:
            self.versions.move(self.versions.find(key, "announced"), "failed")  # it waited for this
            return self.fail(key, *fault, now)
        if fault is not None:
            if not self.versions.hear(key):
                return []
            waiting = self.versions.find(key, "announced")
            return self._decline(
                waiting or self.versions.expect(announce, pushed=False), *fault, now
            )
        staged, arriving = self.versions.at["staged"], self.versions.at["arriving"]
        if staged is not None and key == staged.key and announce.commit == "auto":  # W5
            return self.planner.overtaken(key) + self._commit(staged)
        news = self.versions.hear(key)
        if not (news if self.planner.only is None else self.planner.is_wanted(key)):
            return []
        if arriving is not None:
            if key == arriving.key and arriving.update_announcement(announce):  # W5
                return self._take_whole(arriving, data, now)
            if key < arriving.key or (self.versions.mode == "catching-up" and key != arriving.key):
                return []  # W26
        if data is not None and (straight := self._straight(announce, data)) is not None:
            return [Ready(straight)]
        follows = announce.whole is not None or (pushed and not self.shared)  # W31, S8
        return self._begin(self.versions.expect(announce, pushed=follows), now, data)

    def _straight(self, announce: Announce, data: Buffer) -> StagedVersion | None:
        """Take a version that came whole, and is in nobody's way, at once; None: that is not so.

        So come nearly all small ones. What becomes of it is the same as without this, step by step.
        """
        at, layout = self.versions.at, self._acceptance.usual.get(about(announce))
        if layout is None or self.versions.mode != "following" or self.failed is not None:
            return None
        if at["announced"] is not None or at["arriving"] is not None or at["staged"] is not None:
            return None
        if announce.commit != "auto" or announce.acknowledge != "applied":
            return None
        whole = announce.whole
        if announce.shared is not None or whole is None or not is_whole(announce, whole, data):
            return None
        return self.versions.accept_whole(announce, whole, data, layout)

    def renamed(self, rename: Rename, now: float) -> list[Effect]:
        """What runs here is a newer version, byte for byte: nothing is to be fetched or applied.

        That has no effect if another version is at the user's, who may be writing it into the
        model.
        """  # W25
        versions, key = self.versions, (rename.epoch, rename.version)
        entry = versions.at["running"]
        if entry is None or entry.running != rename.was or versions.all("ready", "applying"):
            return []
        if self.planner.only not in (None, key):  # W8
            return []
        begun = max((h.key for h in versions.all("arriving")), default=(0, 0))
        if key <= versions.newest or key < begun:
            return []
        for older in versions.all("announced", "arriving", "staged"):
            versions.move(older, "newer")
        running = Running(*key, rename.was.digest)
        versions.rename(entry, running)
        said = self.runs(entry, running)
        self._forget_failure()
        return [
            Renamed(self.model, *key, rename.metadata),
            said,
            *self._change_mode("completed", now),
        ]

    def _begin(self, entry: VersionEntry, now: float, data: Buffer | None = None) -> list[Effect]:
        """Start to receive a version, if its layout is known. (W6, W7)"""
        announce = entry.announce
        layout = self._acceptance.usual.get(about(announce))
        if layout is None:
            fault = self._acceptance.fault(announce)
            if fault is not None:
                return self._decline(entry, *fault, now)
            layout = self._acceptance.layout(announce)
        if layout is None:
            return self.planner.layout(entry.key, now)
        if announce.shared is not None and entry.key != self.stale:
            entry.resolve("located", layout, data)
            return [Open(self.model, entry.key, announce.shared, announce.nbytes)]
        entry.resolve("known", layout, data)
        return self._reserve(entry, now)

    def _opened(self, opened: Opened, now: float) -> list[Effect]:
        """The memory in which a version lies is open, or is of another host. (S6)"""
        entry, memory = self.versions.at["announced"], opened.memory
        if entry is None or entry.lacks != "segment" or entry.key != opened.key:
            return []
        at_once = entry.announce.acknowledge == "applied" and entry.announce.commit == "auto"
        if memory is not None and at_once:
            return self._map(entry, memory, now)
        entry.resolve("opened", memory=memory)
        return self._reserve(entry, now)

    def _reserve(self, entry: VersionEntry, now: float) -> list[Effect]:
        """Find memory for a version; if there is no more, `_resume` goes on when some is free."""
        effects: list[Effect] = []
        older = self.versions.at["arriving"]
        if older is not None:  # the newer version takes its place
            self.versions.move(older, "newer")  # W8
            effects = self._change_mode("replaced")
        if self.versions.reuse(entry):
            return effects + self._receive(entry, now)
        if entry.lacks == "buffer":
            return effects
        return [*effects, Reserve(self.model, entry.key, entry.announce.nbytes)]

    def _granted(self, granted: Granted, now: float) -> list[Effect]:
        """There is memory for a version, or for one that will come; or there is none."""
        entry, buffer = self.versions.at["announced"], granted.buffer
        if entry is None or entry.lacks != "memory" or entry.key != granted.key:
            if buffer is not None:
                self.versions.keep(buffer)
            return []
        if buffer is None and self.versions.base is not None and self.versions.base.chunks:
            entry.resolve(
                "full"
            )  # the next version matters more; `_decoded` goes on with what waits
            return (
                self._reserve(entry, now) if self.versions.set_patch_base(None, None, None) else []
            )
        if buffer is None:
            nbytes = entry.announce.nbytes
            text = f"there is no memory for {nbytes} bytes: lower bytes_max, or make room"
            return self._decline(entry, "no-memory", text, now)
        self.versions.give(entry, buffer)
        return self._receive(entry, now)

    def _receive(self, entry: VersionEntry, now: float) -> list[Effect]:
        """There is a buffer: take what came along, or copy what lies in shared memory; else wait.

        What is not pushed is fetched at once. (W31)
        """
        announce, chunks = entry.announce, entry.chunks
        assert chunks is not None  # noqa: S101 - it was given a moment ago
        self._window = max(self._window, chunks.plan.of(WINDOW_CHUNKS))
        data = entry.payload
        whole = data is not None and take_whole(announce, data, chunks)
        transfer: Transfer | None = None
        if not whole and announce.patches:
            transfer = self.patches.transfer(entry, now)
        elif not whole:
            transfer = Transfer(announce, chunks, now, self.timing, self._expected.keyring)
        self.versions.move(entry, "begun", transfer)
        if self.failed is not None:
            self._forget_failure()
        if transfer is None:
            return self._arrived(entry, now)
        if data is not None:
            return self._take_whole(entry, data, now)
        effects: list[Effect] = []
        if entry.memory is not None and announce.nbytes:
            effects.append(Copy(transfer.copy(entry.memory)))
        patched, listening = transfer.patch is not None, list[Effect]()
        if patched != self.patches.listens:
            listening = self.patches.listen(on=patched, shared=self.shared)
        if not entry.pushed or listening:
            transfer.pull()
        wanted = transfer.wants(now)
        return effects + listening + (reports.fetches(transfer, wanted) if wanted else [])

    def _take_whole(self, entry: VersionEntry, data: Buffer | None, now: float) -> list[Effect]:
        """Take what came with an announcement: the only chunk, and the digest."""
        whole = entry.announce.whole
        if whole is None or data is None:
            return []
        entry.transfer.add(0, whole.crc, data, now, pushed=True)
        entry.transfer.end(whole.digest)
        return self._advance(entry, now)

    def _copied(self, copied: Copied, now: float) -> list[Effect]:
        """A copy has ended: with all chunks; or without, then they are fetched. (S5, S6)"""
        if not copied.copying.live:  # something newer took its place, or it was aborted
            self.versions.give_back(copied.copying.buffer)
            return self._resume(now)
        entry = self.versions.at["arriving"]
        assert entry is not None  # noqa: S101 - nothing else lends its buffer
        entry.transfer.copied(copied.crcs, now)
        return self._advance(entry, now)

    def _decoded(self, decoded: Decoded, now: float) -> list[Effect]:
        """A patch was decoded, and its version is whole; or all of it is to be fetched."""
        done, entry = decoded.patching, self.versions.at["arriving"]
        if not done.live:  # something newer took its place, or it was aborted
            self.versions.give_back(done.buffer)
            self.versions.release(done.base)
            return self._resume(now)
        assert entry is not None  # noqa: S101 - nothing else lends its buffer
        if decoded.fault:
            return self.patches.give_up(entry, decoded.fault, now)
        entry.transfer.decoded()
        self.versions.release(done.base)
        if entry.chunks is not None:
            entry.chunks.fill(done.digest)
        return self._arrived(entry, now, entry.transfer.patch, decoded.seconds)

    def _map(self, entry: VersionEntry, memory: SharedMemory, now: float) -> list[Effect]:
        """The version is whole in shared memory: it can be applied from there."""
        announce = entry.announce
        for older in (self.versions.at["arriving"], self.versions.at["staged"]):
            if older is not None:
                self.versions.move(older, "newer")
        chunks = announce.chunk_bytes if announce.hash else 0  # S7
        named = self.model, entry.key, entry.layout, memory.data, ""
        staged = StagedVersion(
            *named, shared=memory, hash_chunks=chunks, metadata=announce.metadata
        )
        self.versions.move(entry, "mapped", staged)
        self._forget_failure()
        return [*self._change_mode("completed", now), Ready(staged)]

    def _change_mode(self, event: ModeEvent, now: float = -math.inf) -> list[Effect]:
        """Take pushed chunks again, and look for what came meanwhile; or no longer."""
        if event not in MODES[self.versions.mode] or not self.versions.change_mode(event):
            return []
        on = self.versions.mode == "following"
        subscribe = Subscribe(self.patches.topic, on=on and not self.shared)
        newest = self.versions.newest[0]
        return [subscribe, *(self.planner.latest(newest, now) if on else [])]

    def _decline(self, entry: VersionEntry, code: str, text: str, now: float) -> list[Effect]:
        self.versions.move(entry, "failed" if code in TRANSIENT else "declined")
        return self._refuse(entry, code, text, now)

    def _refuse(self, entry: VersionEntry, code: str, text: str, now: float) -> list[Effect]:
        if code == "layout-mismatch":
            self._acceptance.doubt(entry.announce.layout)
            self._misfit, self._look_at = entry.announce, now + self.timing.ping
        return self.fail(entry.key, code, text, now)

    def _look_again(self, now: float) -> list[Effect]:
        """Ask again for a version that did not fit and does now: the user has changed the model."""
        misfit, self._look_at = self._misfit, now + self.timing.ping
        if misfit is None or misfit.epoch != self.versions.heard[0]:
            self._misfit, self._look_at = None, math.inf
            return []
        if self._acceptance.fault(misfit) is not None:
            return []
        self._misfit, self._look_at = None, math.inf
        self.versions.forgive((misfit.epoch, misfit.version))
        return self.planner.latest(misfit.epoch, now, at_once=True)

    # What arrives of it.

    def reads(self, announce: Announce) -> bool:
        """Return whether the layout that comes with an announcement is to be received."""
        return self._acceptance.oversize(announce) is None

    def place(self, chunk: AnyChunk, size: int) -> Lease | None:
        """Say where a chunk's payload belongs that is about to be received; None: nowhere."""
        entry = self.versions.at["arriving"]
        if entry is None or entry.key != (chunk.epoch, chunk.version):
            return None
        return entry.transfer.lend(chunk, size)

    def chunk(
        self, chunk: AnyChunk, payload: Buffer | Lease, now: float, *, pushed: bool
    ) -> list[Effect]:
        """A piece of a version."""
        entry = self.versions.at["arriving"]
        if entry is None or entry.key != (chunk.epoch, chunk.version):
            return self._stray(chunk.epoch, chunk.version, now)
        transfer = entry.transfer
        due = transfer.take(chunk, payload, now, pushed=pushed)
        said = [reports.progress(entry)] if due else []
        if transfer.chunks.here == transfer.chunks.plan.count:
            return said + self._advance(entry, now)
        wanted = transfer.wants(now)
        return said + reports.fetches(transfer, wanted) if wanted else said

    def end(self, end: End, now: float) -> list[Effect]:
        """All chunks of a version are out."""
        entry = self.versions.at["arriving"]
        if entry is None or entry.key != (end.epoch, end.version):
            return self._stray(end.epoch, end.version, now)
        if end.patch != entry.transfer.patch:
            return []
        entry.transfer.end(end.digest)
        return self._advance(entry, now)

    def _stray(self, epoch: int, version: int, now: float) -> list[Effect]:
        waiting = self.versions.at["announced"]
        return self.planner.hear_of(epoch, version, now) if waiting is None else []

    def _advance(self, entry: VersionEntry, now: float) -> list[Effect]:
        """Fetch what is due; if the version is whole: verify it, then stage it."""
        transfer = entry.transfer
        if transfer.chunks.here < transfer.chunks.plan.count or transfer.digest is None:
            wanted = transfer.wants(now)
            return reports.fetches(transfer, wanted) if wanted else []
        if transfer.patch is not None:
            return self.patches.decode(entry)
        if transfer.chunks.proves(transfer.digest):  # W13
            return self._arrived(entry, now)
        transfer.start_over()
        if transfer.restarts < RESTARTS_MAX:
            return []  # the next tick fetches it anew
        text = f"the whole did not match its digest, {transfer.restarts} times"
        return self._decline(entry, "digest-mismatch", text, now)

    def _arrived(
        self, entry: VersionEntry, now: float, patch: PatchId | None = None, took: float = 0.0
    ) -> list[Effect]:
        """A version is whole and sound: stage it, and commit it unless that waits for others."""
        announce, chunks = entry.announce, entry.chunks
        assert chunks is not None  # noqa: S101 - or it were not begun
        say = announce.acknowledge == "staged" or announce.commit == "together"
        older = self.versions.at["staged"]
        if older is not None:
            self.versions.move(older, "newer")
        named = self.model, entry.key, entry.layout, chunks.memory, chunks.digest
        us = round(took * 1e6)
        staged = StagedVersion(
            *named, say_staged=say, patch=patch, decode_us=us, metadata=announce.metadata
        )
        self.versions.move(entry, "whole", staged)
        effects = reports.staged([entry]) if say else []
        if announce.commit != "together":
            effects += self._commit(entry)
        elif self.planner.only == entry.key:
            effects.append(Whole(staged))
        return effects + self._change_mode("completed", now)

    def _commit(self, entry: VersionEntry) -> list[Effect]:
        self.versions.move(entry, "committed")
        return [Ready(entry.staged)]

    def committed(self, commit: Commit) -> list[Effect]:
        """The version that is staged here may be applied."""
        entry, key = self.versions.at["staged"], (commit.epoch, commit.version)
        if entry is None or entry.key != key:
            return []
        same = entry.staged.digest == commit.digest
        return self.planner.overtaken(key) + self._commit(entry) if same else []  # W14

    def aborted(self, abort: Abort, now: float) -> list[Effect]:
        """The version must not be applied; drop what there is of it."""
        key = (abort.epoch, abort.version)
        for entry in self.versions.all("announced", "arriving", "staged"):
            if entry.key == key:
                self.versions.move(entry, "aborted")  # W14
        self.planner.put_off_no_longer(key)
        if key == self.planner.only and not self.versions.has(key):
            return self.planner.forgo("it was aborted")
        return self._go_on(abort.epoch, now)

    def gone(self, epoch: int, version: int, now: float) -> list[Effect]:
        """The publisher no longer has a version; 0: it has none."""
        only = self.planner.only
        self.planner.put_off_no_longer((epoch, version))
        for entry in self.versions.all("announced", "arriving"):
            named = version == entry.key[1] or (version == 0 and entry.phase == "announced")  # W27
            late = epoch not in (0, entry.key[0])  # a word of an older publisher
            arrived = entry.phase == "arriving"
            gone = named and not late and self.versions.move(entry, "gone")
            if gone and arrived and only is None:
                return self._resume(now) or self.planner.latest(entry.key[0], now)
        return self.planner.gone(epoch, version)

    def _go_on(self, epoch: int, now: float) -> list[Effect]:
        """There may be room now for what waited; who is catching up must find something to do."""
        effects = self._resume(now)
        idle = (
            not effects
            and self.versions.mode == "catching-up"
            and self.versions.at["arriving"] is None
        )
        return self.planner.latest(epoch, now) if idle else effects

    # The session.

    def reconnected(self, epoch: int, version: int, now: float, *, shared: bool) -> list[Effect]:
        """The publisher has let this worker in (again), and has this version for it.

        If versions will come over the network, have a buffer of their probable size.
        """
        self.shared = shared
        self.versions.reconnected(epoch, now)
        arriving = self.versions.at["arriving"]
        plan = arriving.chunks.plan if arriving is not None and arriving.chunks else None
        self._window = plan.of(WINDOW_CHUNKS) if plan is not None else 0
        self.planner.reconnected()
        self.torn = min(self.torn, 1)  # what failed before counts as one
        effects: list[Effect] = []
        nbytes = self._expected.nbytes
        if not self.shared and self.versions.bare and 0 < nbytes <= self._acceptance.bytes_max:
            effects.append(Reserve(self.model, None, nbytes))
        effects += reports.staged(self.versions.all("ready", "applying", "staged"))
        return effects + self.planner.hear_of(epoch, version, now)

    # What is told that is no message.

    def happened(self, event: OfSlot, now: float) -> list[Effect]:
        """Take how an effect has ended, or what became of a version that was ready."""
        match event:
            case Report():
                return self._became(event, now)
            case Granted():
                return self._granted(event, now)
            case Opened():
                return self._opened(event, now)
            case Copied():
                return self._copied(event, now)
            case Decoded():
                return self._decoded(event, now)
            case Wanted():
                said = self.planner.want(event.key, now)
                return said if event.key else said + self._go_on(self.versions.heard[0], now)
            case Waits():
                return self._waits(self.versions.find(event.key, "ready", "applying"), event.text)

    def _waits(self, entry: VersionEntry | None, text: str) -> list[Effect]:
        """Somebody is in the way of a version: say so at once, and then with every ping."""
        return [reports.progress(entry)] if entry is not None and entry.blocked(text) else []

    def _became(self, report: Report, now: float) -> list[Effect]:
        """The user has begun, has put it back, is done with it, or has dropped it."""
        versions, what = self.versions, report.what
        entry = versions.find(report.key, "ready", "applying")
        if entry is None:
            return []
        if what not in ARROWS[entry.phase]:
            if entry.phase != "ready" or what not in AT_ONCE:
                return []
            versions.move(entry, "taken")
        if report.kept:
            versions.let_go(entry)
        said: list[Effect] = []
        if entry.time == "overdue":
            versions.move(entry, entry.deferred_outcome)
        elif what == "applied":
            said.append(self._applied(entry, report))
        elif what == "torn":
            said = self._torn(entry, report, now)
        elif what == "declined":
            said = self._failed(entry, report, "declined", now)
        else:
            versions.move(entry, what)
            if what == "failed":
                said = self.fail(entry.key, "no-memory", report.text, now)[:1]
            elif what == "stale":
                self.stale = entry.key
        if what in ("taken", "put-back"):
            return said
        if what == "stale":
            return said + self.planner.latest(entry.key[0], now, at_once=True)
        if versions.at["announced"] is not None:  # its buffer may be free
            return said + self._resume(now)
        return said

    def _applied(self, entry: VersionEntry, report: Report) -> Effect:
        versions, staged = self.versions, entry.staged
        older = versions.at["running"]
        running = Running(*entry.key, report.digest or staged.digest)
        sent = entry.memory is None and staged.shared is None
        kept = report.bytes if entry.announce.keep and self._expected.patches and sent else None
        if kept is not None or versions.base is not None:
            versions.set_patch_base(entry, running, kept)  # D3
        if report.text:
            entry.remark(report.text)
        versions.move(entry, "applied", running)
        if older is not None:
            versions.move(older, "newer")
        return self.runs(entry, running)

    def _torn(self, entry: VersionEntry, report: Report, now: float) -> list[Effect]:
        """The model holds parts of two: what is tried next comes verified."""
        self.versions.move(self.versions.at["running"], "torn")
        self.versions.set_patch_base(None, None, None)
        self.stale, self.torn = entry.key, self.torn + 1
        self.epoch = max(self.epoch, entry.key[0])
        return self._failed(entry, report, "torn" if self.torn < APPLIES_MAX else "declined", now)

    def _failed(
        self, entry: VersionEntry, report: Report, deferred_outcome: Event, now: float
    ) -> list[Effect]:
        """The user's part has failed; a version that it still holds stays where it is."""
        if report.still:
            entry.late(deferred_outcome)
        else:
            self.versions.move(entry, deferred_outcome)
        if report.misfit:
            return self._refuse(entry, "layout-mismatch", report.text, now)[:1]
        return self.fail(entry.key, "apply", report.text, now)[:1]

    def runs(self, entry: VersionEntry, running: Running) -> Effect:
        """A version runs by this name; say so."""
        self.torn, self.epoch = 0, max(self.epoch, running.epoch)
        known = self.failed
        if known is not None and (known.epoch, known.version) <= entry.key:
            self.failed = None
        return applied(self.model, running, entry.staged, entry.text, at_once=True)

    def _forget_failure(self) -> None:
        """A version is on its way: forget why another was not. (That nothing runs is said on.)"""
        self._misfit, self._look_at = None, math.inf
        if not self.torn:
            self.failed = None

    def fail(self, key: Key, code: str, text: str, now: float) -> list[Effect]:
        """Tell the publisher and the user that a version is not taken; not now, or not ever."""
        epoch, version = key
        if code in TRANSIENT:
            self.planner.put_off(key, now)
        self.failed = Failed(model=self.model, epoch=epoch, version=version, code=code, text=text)
        return [self._failure(self.failed), Rejected(self.model, epoch, version, code, text)]

    def _failure(self, failed: Failed) -> Effect:
        """Say what was not taken last."""
        return reports.failed(failed, torn=bool(self.torn))

    def _resume(self, now: float) -> list[Effect]:
        """A buffer is free: begin what waited for it."""
        waiting = self.versions.at["announced"]
        if waiting is None or self.versions.at["arriving"] is not None:
            return []
        if self.planner.outdated(waiting.key):
            self.versions.move(waiting, "newer")
            return []
        return self._reserve(waiting, now) if waiting.lacks == "buffer" else []

    def broken(self, why: str, now: float, report: Report | None = None) -> list[Effect]:
        """Something failed in the middle: keep what is whole, and drop what may be half changed.

        If that was a report of a version that the user is done with, nobody knows what runs: it is
        to come anew.
        """
        versions, effects = self.versions, list[Effect]()
        for entry in versions.all("announced", "arriving"):
            if versions.move(entry, "failed"):
                effects += self.fail(entry.key, "no-memory", why, now)
        done = report is not None and not report.still and report.what not in ("taken", "put-back")
        users = (
            versions.find(report.key, "ready", "applying") if report is not None and done else None
        )
        if users is not None and report is not None:
            if report.kept:
                versions.let_go(users)
            versions.move(users, "taken")
            versions.move(users, "torn")
            versions.move(versions.at["running"], "torn")
            versions.set_patch_base(None, None, None)
        if (running := self.running) is not None:  # or a hello would contradict itself (P3)
            self.epoch = max(self.epoch, running.epoch)
        for entry in versions.all("staged"):
            if entry.announce.commit == "auto":
                versions.move(entry, "committed")
        return [*effects, *(Ready(entry.staged) for entry in versions.all("ready"))]

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Fetch what is due."""
        if now >= self._look_at and (asked := self._look_again(now)):
            return asked
        entry = self.versions.at["arriving"]
        if entry is not None and entry.transfer.hopeless:  # W12
            if entry.transfer.patch is not None:
                return self.patches.give_up(entry, "nothing more of it comes", now)
            return self._decline(entry, "digest-mismatch", NOTHING_FITS, now)
        if entry is not None:
            return self._advance(entry, now)
        waiting = self.versions.at["announced"]
        if waiting is not None and waiting.lacks == "layout":
            return self._begin(waiting, now) if self.planner.due(now) else []
        return self._resume(now)

    def repeat(self) -> list[Effect]:
        """Say again how things stand, in case it got lost; the last failure if it still counts."""
        versions, effects = self.versions, list[Effect]()
        arriving, applying, running = (versions.at[p] for p in ("arriving", "applying", "running"))
        if arriving is not None and applying is None:
            effects.append(reports.progress(arriving))
        effects += reports.staged(versions.all("ready", "applying", "staged"))
        if running is not None:
            effects.append(applied(self.model, running.running, running.staged, running.text))
        if self.failed is not None:
            effects.append(self._failure(self.failed))
        ready = [applying] if applying is not None else versions.all("ready")
        if ready and (applying is not None or arriving is None):
            effects.append(reports.progress(max(ready, key=lambda entry: entry.key)))
        return effects


def applied(
    model: str,
    running: Running,
    came: StagedVersion | None = None,
    text: str = "",
    *,
    at_once: bool = False,
) -> Effect:
    """Say what runs, by which patch it came (D11), and what there is to say of it. (W16)

    `at_once`: for the first time.
    """
    patch, took = (came.patch, came.decode_us) if came is not None else (None, 0)
    said = Applied(
        model=model,
        epoch=running.epoch,
        version=running.version,
        digest=running.digest,
        patch=patch,
        decode_us=took,
        note=text,
    )
    return Send(said, upstream=at_once)


def is_whole(announce: Announce, whole: WholeData, payload: Buffer) -> bool:
    """Return whether a version came with its announcement, and undamaged."""
    if len(payload) != announce.nbytes or crc32c(payload) != whole.crc:
        return False
    return digest(announce.layout, announce.chunk_bytes, [whole.crc]) == whole.digest


def take_whole(announce: Announce, payload: Buffer, chunks: Chunks[Memory]) -> bool:
    """Take a version that came with its announcement; return whether it is undamaged.

    It was received in its place already, or is copied there.
    """
    whole = announce.whole
    if whole is None or not is_whole(announce, whole, payload):
        return False
    where = payload.obj if isinstance(payload, memoryview) else None
    if cast("object", where) is not chunks.memory:
        np.copyto(chunks.memory, np.frombuffer(payload, np.uint8))
    chunks.put(0, whole.crc)
    return chunks.proves(whole.digest)
