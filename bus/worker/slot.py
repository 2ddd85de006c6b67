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
from .asking import Asking
from .events import Copied, Decoded, Granted, OfSlot, Opened, Report, Waits, Wanted
from .holdings import Held, Holdings, Key
from .layouts import Acceptance, Accepts, Expected, about
from .patches import Patches
from .phases import ARROWS, AT_ONCE, MODES, Event, Turn
from .transfer import Transfer

# What may be otherwise next time, since bytes were damaged or memory was short: it is tried again,
# after a while.
TRANSIENT = {"digest-mismatch", "layout-invalid", "no-memory", "unsupported"}
RESTARTS_MAX = 3  # transfers of one version whose digest did not match, before it is given up
NOTHING_FITS = "nothing comes that fits what was announced"


class Slot:
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
        self.holds = Holdings()
        self._expected = expected
        self._acceptance = Acceptance(model, accepts, bytes_max, expected)
        self.asking = Asking(model, self.holds, timing)
        self.patches = Patches(model, self.holds, timing, expected)
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
        held = self.holds.at["running"]
        return held.running if held is not None else None

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
            self.holds.move(self.holds.find(key, "announced"), "failed")  # it waited for this
            return self.fail(key, *fault, now)
        if fault is not None:
            if not self.holds.hear(key):
                return []
            waiting = self.holds.find(key, "announced")
            return self._decline(waiting or self.holds.expect(announce, pushed=False), *fault, now)
        staged, arriving = self.holds.at["staged"], self.holds.at["arriving"]
        if staged is not None and key == staged.key and announce.commit == "auto":  # W5
            return self.asking.overtaken(key) + self._commit(staged)
        news = self.holds.hear(key)
        if not (news if self.asking.only is None else self.asking.is_wanted(key)):
            return []
        if arriving is not None:
            if key == arriving.key and arriving.retold(announce):  # W5
                return self._take_whole(arriving, data, now)
            if key < arriving.key or (self.holds.mode == "catching-up" and key != arriving.key):
                return []  # W26
        if data is not None and (straight := self._straight(announce, data)) is not None:
            return [Ready(straight)]
        follows = announce.whole is not None or (pushed and not self.shared)  # W31, S8
        return self._begin(self.holds.expect(announce, pushed=follows), now, data)

    def _straight(self, announce: Announce, data: Buffer) -> StagedVersion | None:
        """Take a version that came whole, and is in nobody's way, at once; None: that is not so.

        So come nearly all small ones. What becomes of it is the same as without this, step by step.
        """
        at, layout = self.holds.at, self._acceptance.usual.get(about(announce))
        if layout is None or self.holds.mode != "following" or self.failed is not None:
            return None
        if at["announced"] is not None or at["arriving"] is not None or at["staged"] is not None:
            return None
        if announce.commit != "auto" or announce.acknowledge != "applied":
            return None
        whole = announce.whole
        if announce.shared is not None or whole is None or not is_whole(announce, whole, data):
            return None
        return self.holds.bring(announce, whole, data, layout)

    def renamed(self, rename: Rename, now: float) -> list[Effect]:
        """What runs here is a newer version, byte for byte: nothing is to be fetched or applied.

        That has no effect if another version is at the user's, who may be writing it into the
        model.
        """  # W25
        holds, key = self.holds, (rename.epoch, rename.version)
        held = holds.at["running"]
        if held is None or held.running != rename.was or holds.all("ready", "applying"):
            return []
        if self.asking.only not in (None, key):  # W8
            return []
        begun = max((h.key for h in holds.all("arriving")), default=(0, 0))
        if key <= holds.newest or key < begun:
            return []
        for older in holds.all("announced", "arriving", "staged"):
            holds.move(older, "newer")
        running = Running(*key, rename.was.digest)
        holds.rename(held, running)
        said = self.runs(held, running)
        self._forget_failure()
        return [Renamed(self.model, *key, rename.metadata), said, *self._turn("completed", now)]

    def _begin(self, held: Held, now: float, data: Buffer | None = None) -> list[Effect]:
        """Start to receive a version, if its layout is known. (W6, W7)"""
        announce = held.announce
        layout = self._acceptance.usual.get(about(announce))
        if layout is None:
            fault = self._acceptance.fault(announce)
            if fault is not None:
                return self._decline(held, *fault, now)
            layout = self._acceptance.layout(announce)
        if layout is None:
            return self.asking.layout(held.key, now)
        if announce.shared is not None and held.key != self.stale:
            held.gain("located", layout, data)
            return [Open(self.model, held.key, announce.shared, announce.nbytes)]
        held.gain("known", layout, data)
        return self._reserve(held, now)

    def _opened(self, opened: Opened, now: float) -> list[Effect]:
        """The memory in which a version lies is open, or is of another host. (S6)"""
        held, memory = self.holds.at["announced"], opened.memory
        if held is None or held.lacks != "segment" or held.key != opened.key:
            return []
        at_once = held.announce.acknowledge == "applied" and held.announce.commit == "auto"
        if memory is not None and at_once:
            return self._map(held, memory, now)
        held.gain("opened", memory=memory)
        return self._reserve(held, now)

    def _reserve(self, held: Held, now: float) -> list[Effect]:
        """Find memory for a version; if there is no more, `_resume` goes on when some is free."""
        effects: list[Effect] = []
        older = self.holds.at["arriving"]
        if older is not None:  # the newer version takes its place
            self.holds.move(older, "newer")  # W8
            effects = self._turn("replaced")
        if self.holds.reuse(held):
            return effects + self._receive(held, now)
        if held.lacks == "buffer":
            return effects
        return [*effects, Reserve(self.model, held.key, held.announce.nbytes)]

    def _granted(self, granted: Granted, now: float) -> list[Effect]:
        """There is memory for a version, or for one that will come; or there is none."""
        held, buffer = self.holds.at["announced"], granted.buffer
        if held is None or held.lacks != "memory" or held.key != granted.key:
            if buffer is not None:
                self.holds.keep(buffer)
            return []
        if buffer is None and self.holds.base is not None and self.holds.base.chunks:
            held.gain("full")  # the next version matters more; `_decoded` goes on with what waits
            return self._reserve(held, now) if self.holds.rebase(None, None, None) else []
        if buffer is None:
            nbytes = held.announce.nbytes
            text = f"there is no memory for {nbytes} bytes: lower bytes_max, or make room"
            return self._decline(held, "no-memory", text, now)
        self.holds.give(held, buffer)
        return self._receive(held, now)

    def _receive(self, held: Held, now: float) -> list[Effect]:
        """There is a buffer: take what came along, or copy what lies in shared memory; else wait.

        What is not pushed is fetched at once. (W31)
        """
        announce, chunks = held.announce, held.chunks
        assert chunks is not None  # noqa: S101 - it was given a moment ago
        self._window = max(self._window, chunks.plan.of(WINDOW_CHUNKS))
        data = held.payload
        whole = data is not None and take_whole(announce, data, chunks)
        transfer: Transfer | None = None
        if not whole and announce.patches:
            transfer = self.patches.transfer(held, now)
        elif not whole:
            transfer = Transfer(announce, chunks, now, self.timing, self._expected.keyring)
        self.holds.move(held, "begun", transfer)
        if self.failed is not None:
            self._forget_failure()
        if transfer is None:
            return self._arrived(held, now)
        if data is not None:
            return self._take_whole(held, data, now)
        effects: list[Effect] = []
        if held.memory is not None and announce.nbytes:
            effects.append(Copy(transfer.copy(held.memory)))
        patched, listening = transfer.patch is not None, list[Effect]()
        if patched != self.patches.listens:
            listening = self.patches.listen(on=patched, shared=self.shared)
        if not held.pushed or listening:
            transfer.pull()
        wanted = transfer.wants(now)
        return effects + listening + (reports.fetches(transfer, wanted) if wanted else [])

    def _take_whole(self, held: Held, data: Buffer | None, now: float) -> list[Effect]:
        """Take what came with an announcement: the only chunk, and the digest."""
        whole = held.announce.whole
        if whole is None or data is None:
            return []
        held.transfer.add(0, whole.crc, data, now, pushed=True)
        held.transfer.end(whole.digest)
        return self._advance(held, now)

    def _copied(self, copied: Copied, now: float) -> list[Effect]:
        """A copy has ended: with all chunks; or without, then they are fetched. (S5, S6)"""
        if not copied.copying.live:  # something newer took its place, or it was aborted
            self.holds.give_back(copied.copying.buffer)
            return self._resume(now)
        held = self.holds.at["arriving"]
        assert held is not None  # noqa: S101 - nothing else lends its buffer
        held.transfer.copied(copied.crcs, now)
        return self._advance(held, now)

    def _decoded(self, decoded: Decoded, now: float) -> list[Effect]:
        """A patch was decoded, and its version is whole; or all of it is to be fetched."""
        done, held = decoded.patching, self.holds.at["arriving"]
        if not done.live:  # something newer took its place, or it was aborted
            self.holds.give_back(done.buffer)
            self.holds.release(done.base)
            return self._resume(now)
        assert held is not None  # noqa: S101 - nothing else lends its buffer
        if decoded.fault:
            return self.patches.give_up(held, decoded.fault, now)
        held.transfer.decoded()
        self.holds.release(done.base)
        if held.chunks is not None:
            held.chunks.fill(done.digest)
        return self._arrived(held, now, held.transfer.patch, decoded.seconds)

    def _map(self, held: Held, memory: SharedMemory, now: float) -> list[Effect]:
        """The version is whole in shared memory: it can be applied from there."""
        announce = held.announce
        for older in (self.holds.at["arriving"], self.holds.at["staged"]):
            if older is not None:
                self.holds.move(older, "newer")
        chunks = announce.chunk_bytes if announce.hash else 0  # S7
        named = self.model, held.key, held.layout, memory.data, ""
        staged = StagedVersion(
            *named, shared=memory, hash_chunks=chunks, metadata=announce.metadata
        )
        self.holds.move(held, "mapped", staged)
        self._forget_failure()
        return [*self._turn("completed", now), Ready(staged)]

    def _turn(self, turn: Turn, now: float = -math.inf) -> list[Effect]:
        """Take pushed chunks again, and look for what came meanwhile; or no longer."""
        if turn not in MODES[self.holds.mode] or not self.holds.turn(turn):
            return []
        on = self.holds.mode == "following"
        subscribe = Subscribe(self.patches.topic, on=on and not self.shared)
        newest = self.holds.newest[0]
        return [subscribe, *(self.asking.latest(newest, now) if on else [])]

    def _decline(self, held: Held, code: str, text: str, now: float) -> list[Effect]:
        self.holds.move(held, "failed" if code in TRANSIENT else "declined")
        return self._refuse(held, code, text, now)

    def _refuse(self, held: Held, code: str, text: str, now: float) -> list[Effect]:
        if code == "layout-mismatch":
            self._acceptance.doubt(held.announce.layout)
            self._misfit, self._look_at = held.announce, now + self.timing.ping
        return self.fail(held.key, code, text, now)

    def _look_again(self, now: float) -> list[Effect]:
        """Ask again for a version that did not fit and does now: the user has changed the model."""
        misfit, self._look_at = self._misfit, now + self.timing.ping
        if misfit is None or misfit.epoch != self.holds.heard[0]:
            self._misfit, self._look_at = None, math.inf
            return []
        if self._acceptance.fault(misfit) is not None:
            return []
        self._misfit, self._look_at = None, math.inf
        self.holds.forgive((misfit.epoch, misfit.version))
        return self.asking.latest(misfit.epoch, now, at_once=True)

    # What arrives of it.

    def reads(self, announce: Announce) -> bool:
        """Return whether the layout that comes with an announcement is to be received."""
        return self._acceptance.oversize(announce) is None

    def place(self, chunk: AnyChunk, size: int) -> Lease | None:
        """Say where a chunk's payload belongs that is about to be received; None: nowhere."""
        held = self.holds.at["arriving"]
        if held is None or held.key != (chunk.epoch, chunk.version):
            return None
        return held.transfer.lend(chunk, size)

    def chunk(
        self, chunk: AnyChunk, payload: Buffer | Lease, now: float, *, pushed: bool
    ) -> list[Effect]:
        """A piece of a version."""
        held = self.holds.at["arriving"]
        if held is None or held.key != (chunk.epoch, chunk.version):
            return self._stray(chunk.epoch, chunk.version, now)
        transfer = held.transfer
        due = transfer.take(chunk, payload, now, pushed=pushed)
        said = [reports.progress(held)] if due else []
        if transfer.chunks.here == transfer.chunks.plan.count:
            return said + self._advance(held, now)
        wanted = transfer.wants(now)
        return said + reports.fetches(transfer, wanted) if wanted else said

    def end(self, end: End, now: float) -> list[Effect]:
        """All chunks of a version are out."""
        held = self.holds.at["arriving"]
        if held is None or held.key != (end.epoch, end.version):
            return self._stray(end.epoch, end.version, now)
        if end.patch != held.transfer.patch:
            return []
        held.transfer.end(end.digest)
        return self._advance(held, now)

    def _stray(self, epoch: int, version: int, now: float) -> list[Effect]:
        waiting = self.holds.at["announced"]
        return self.asking.hear_of(epoch, version, now) if waiting is None else []

    def _advance(self, held: Held, now: float) -> list[Effect]:
        """Fetch what is due; if the version is whole: verify it, then stage it."""
        transfer = held.transfer
        if transfer.chunks.here < transfer.chunks.plan.count or transfer.digest is None:
            wanted = transfer.wants(now)
            return reports.fetches(transfer, wanted) if wanted else []
        if transfer.patch is not None:
            return self.patches.decode(held)
        if transfer.chunks.proves(transfer.digest):  # W13
            return self._arrived(held, now)
        transfer.start_over()
        if transfer.restarts < RESTARTS_MAX:
            return []  # the next tick fetches it anew
        text = f"the whole did not match its digest, {transfer.restarts} times"
        return self._decline(held, "digest-mismatch", text, now)

    def _arrived(
        self, held: Held, now: float, patch: PatchId | None = None, took: float = 0.0
    ) -> list[Effect]:
        """A version is whole and sound: stage it, and commit it unless that waits for others."""
        announce, chunks = held.announce, held.chunks
        assert chunks is not None  # noqa: S101 - or it were not begun
        say = announce.acknowledge == "staged" or announce.commit == "together"
        older = self.holds.at["staged"]
        if older is not None:
            self.holds.move(older, "newer")
        named = self.model, held.key, held.layout, chunks.memory, chunks.digest
        us = round(took * 1e6)
        staged = StagedVersion(
            *named, say_staged=say, patch=patch, decode_us=us, metadata=announce.metadata
        )
        self.holds.move(held, "whole", staged)
        effects = reports.staged([held]) if say else []
        if announce.commit != "together":
            effects += self._commit(held)
        elif self.asking.only == held.key:
            effects.append(Whole(staged))
        return effects + self._turn("completed", now)

    def _commit(self, held: Held) -> list[Effect]:
        self.holds.move(held, "committed")
        return [Ready(held.staged)]

    def committed(self, commit: Commit) -> list[Effect]:
        """The version that is staged here may be applied."""
        held, key = self.holds.at["staged"], (commit.epoch, commit.version)
        if held is None or held.key != key:
            return []
        same = held.staged.digest == commit.digest
        return self.asking.overtaken(key) + self._commit(held) if same else []  # W14

    def aborted(self, abort: Abort, now: float) -> list[Effect]:
        """The version must not be applied; drop what there is of it."""
        key = (abort.epoch, abort.version)
        for held in self.holds.all("announced", "arriving", "staged"):
            if held.key == key:
                self.holds.move(held, "aborted")  # W14
        self.asking.put_off_no_longer(key)
        if key == self.asking.only and not self.holds.has(key):
            return self.asking.forgo("it was aborted")
        return self._go_on(abort.epoch, now)

    def gone(self, epoch: int, version: int, now: float) -> list[Effect]:
        """The publisher no longer has a version; 0: it has none."""
        only = self.asking.only
        self.asking.put_off_no_longer((epoch, version))
        for held in self.holds.all("announced", "arriving"):
            named = version == held.key[1] or (version == 0 and held.phase == "announced")  # W27
            late = epoch not in (0, held.key[0])  # a word of an older publisher
            arrived = held.phase == "arriving"
            gone = named and not late and self.holds.move(held, "gone")
            if gone and arrived and only is None:
                return self._resume(now) or self.asking.latest(held.key[0], now)
        return self.asking.gone(epoch, version)

    def _go_on(self, epoch: int, now: float) -> list[Effect]:
        """There may be room now for what waited; who is catching up must find something to do."""
        effects = self._resume(now)
        idle = (
            not effects and self.holds.mode == "catching-up" and self.holds.at["arriving"] is None
        )
        return self.asking.latest(epoch, now) if idle else effects

    # The session.

    def reconnected(self, epoch: int, version: int, now: float, *, shared: bool) -> list[Effect]:
        """The publisher has let this worker in (again), and has this version for it.

        If versions will come over the network, have a buffer of their probable size.
        """
        self.shared = shared
        self.holds.reconnected(epoch, now)
        arriving = self.holds.at["arriving"]
        plan = arriving.chunks.plan if arriving is not None and arriving.chunks else None
        self._window = plan.of(WINDOW_CHUNKS) if plan is not None else 0
        self.asking.reconnected()
        self.torn = min(self.torn, 1)  # what failed before counts as one
        effects: list[Effect] = []
        nbytes = self._expected.nbytes
        if not self.shared and self.holds.bare and 0 < nbytes <= self._acceptance.bytes_max:
            effects.append(Reserve(self.model, None, nbytes))
        effects += reports.staged(self.holds.all("ready", "applying", "staged"))
        return effects + self.asking.hear_of(epoch, version, now)

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
                said = self.asking.want(event.key, now)
                return said if event.key else said + self._go_on(self.holds.heard[0], now)
            case Waits():
                return self._waits(self.holds.find(event.key, "ready", "applying"), event.text)

    def _waits(self, held: Held | None, text: str) -> list[Effect]:
        """Somebody is in the way of a version: say so at once, and then with every ping."""
        return [reports.progress(held)] if held is not None and held.blocked(text) else []

    def _became(self, report: Report, now: float) -> list[Effect]:
        """The user has begun, has put it back, is done with it, or has dropped it."""
        holds, what = self.holds, report.what
        held = holds.find(report.key, "ready", "applying")
        if held is None:
            return []
        if what not in ARROWS[held.phase]:
            if held.phase != "ready" or what not in AT_ONCE:
                return []
            holds.move(held, "taken")
        if report.kept:
            holds.let_go(held)
        said: list[Effect] = []
        if held.time == "overdue":
            holds.move(held, held.fate)
        elif what == "applied":
            said.append(self._applied(held, report))
        elif what == "torn":
            said = self._torn(held, report, now)
        elif what == "declined":
            said = self._failed(held, report, "declined", now)
        else:
            holds.move(held, what)
            if what == "failed":
                said = self.fail(held.key, "no-memory", report.text, now)[:1]
            elif what == "stale":
                self.stale = held.key
        if what in ("taken", "put-back"):
            return said
        if what == "stale":
            return said + self.asking.latest(held.key[0], now, at_once=True)
        if holds.at["announced"] is not None:  # its buffer may be free
            return said + self._resume(now)
        return said

    def _applied(self, held: Held, report: Report) -> Effect:
        holds, staged = self.holds, held.staged
        older = holds.at["running"]
        running = Running(*held.key, report.digest or staged.digest)
        sent = held.memory is None and staged.shared is None
        kept = report.bytes if held.announce.keep and self._expected.patches and sent else None
        if kept is not None or holds.base is not None:
            holds.rebase(held, running, kept)  # D3
        if report.text:
            held.remark(report.text)
        holds.move(held, "applied", running)
        if older is not None:
            holds.move(older, "newer")
        return self.runs(held, running)

    def _torn(self, held: Held, report: Report, now: float) -> list[Effect]:
        """The model holds parts of two: what is tried next comes verified."""
        self.holds.move(self.holds.at["running"], "torn")
        self.holds.rebase(None, None, None)
        self.stale, self.torn = held.key, self.torn + 1
        self.epoch = max(self.epoch, held.key[0])
        return self._failed(held, report, "torn" if self.torn < APPLIES_MAX else "declined", now)

    def _failed(self, held: Held, report: Report, fate: Event, now: float) -> list[Effect]:
        """The user's part has failed; a version that it still holds stays where it is."""
        if report.still:
            held.late(fate)
        else:
            self.holds.move(held, fate)
        if report.misfit:
            return self._refuse(held, "layout-mismatch", report.text, now)[:1]
        return self.fail(held.key, "apply", report.text, now)[:1]

    def runs(self, held: Held, running: Running) -> Effect:
        """A version runs by this name; say so."""
        self.torn, self.epoch = 0, max(self.epoch, running.epoch)
        known = self.failed
        if known is not None and (known.epoch, known.version) <= held.key:
            self.failed = None
        return applied(self.model, running, held.staged, held.text, at_once=True)

    def _forget_failure(self) -> None:
        """A version is on its way: forget why another was not. (That nothing runs is said on.)"""
        self._misfit, self._look_at = None, math.inf
        if not self.torn:
            self.failed = None

    def fail(self, key: Key, code: str, text: str, now: float) -> list[Effect]:
        """Tell the publisher and the user that a version is not taken; not now, or not ever."""
        epoch, version = key
        if code in TRANSIENT:
            self.asking.put_off(key, now)
        self.failed = Failed(model=self.model, epoch=epoch, version=version, code=code, text=text)
        return [self._failure(self.failed), Rejected(self.model, epoch, version, code, text)]

    def _failure(self, failed: Failed) -> Effect:
        """Say what was not taken last."""
        return reports.failed(failed, torn=bool(self.torn))

    def _resume(self, now: float) -> list[Effect]:
        """A buffer is free: begin what waited for it."""
        waiting = self.holds.at["announced"]
        if waiting is None or self.holds.at["arriving"] is not None:
            return []
        if self.asking.outdated(waiting.key):
            self.holds.move(waiting, "newer")
            return []
        return self._reserve(waiting, now) if waiting.lacks == "buffer" else []

    def broken(self, why: str, now: float, report: Report | None = None) -> list[Effect]:
        """Something failed in the middle: keep what is whole, and drop what may be half changed.

        If that was a report of a version that the user is done with, nobody knows what runs: it is
        to come anew.
        """
        holds, effects = self.holds, list[Effect]()
        for held in holds.all("announced", "arriving"):
            if holds.move(held, "failed"):
                effects += self.fail(held.key, "no-memory", why, now)
        done = report is not None and not report.still and report.what not in ("taken", "put-back")
        users = holds.find(report.key, "ready", "applying") if report is not None and done else None
        if users is not None and report is not None:
            if report.kept:
                holds.let_go(users)
            holds.move(users, "taken")
            holds.move(users, "torn")
            holds.move(holds.at["running"], "torn")
            holds.rebase(None, None, None)
        if (running := self.running) is not None:  # or a hello would contradict itself (P3)
            self.epoch = max(self.epoch, running.epoch)
        for held in holds.all("staged"):
            if held.announce.commit == "auto":
                holds.move(held, "committed")
        return [*effects, *(Ready(held.staged) for held in holds.all("ready"))]

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Fetch what is due."""
        if now >= self._look_at and (asked := self._look_again(now)):
            return asked
        held = self.holds.at["arriving"]
        if held is not None and held.transfer.hopeless:  # W12
            if held.transfer.patch is not None:
                return self.patches.give_up(held, "nothing more of it comes", now)
            return self._decline(held, "digest-mismatch", NOTHING_FITS, now)
        if held is not None:
            return self._advance(held, now)
        waiting = self.holds.at["announced"]
        if waiting is not None and waiting.lacks == "layout":
            return self._begin(waiting, now) if self.asking.due(now) else []
        return self._resume(now)

    def repeat(self) -> list[Effect]:
        """Say again how things stand, in case it got lost; the last failure if it still counts."""
        holds, effects = self.holds, list[Effect]()
        arriving, applying, running = (holds.at[p] for p in ("arriving", "applying", "running"))
        if arriving is not None and applying is None:
            effects.append(reports.progress(arriving))
        effects += reports.staged(holds.all("ready", "applying", "staged"))
        if running is not None:
            effects.append(applied(self.model, running.running, running.staged, running.text))
        if self.failed is not None:
            effects.append(self._failure(self.failed))
        ready = [applying] if applying is not None else holds.all("ready")
        if ready and (applying is not None or arriving is None):
            effects.append(reports.progress(max(ready, key=lambda held: held.key)))
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
