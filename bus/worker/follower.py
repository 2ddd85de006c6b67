"""Follows the versions of one model at a worker: receives them, and tracks their phases.

The latest version wins: an older version that is arriving is dropped. But after such a drop the
worker fetches the next version completely, before it considers a newer one. (W15, W24; `phases.py`)
"""

import math
from typing import cast

import numpy as np

from ...codecs.checksum import digest
from ...codecs.layout import Layout
from ...codecs.native import crc32c
from ...codecs.parts import PartLayout
from ..chunks import Chunks, Memory, plan_of
from ..cut import Cut
from ..effects import (
    Copy,
    Effect,
    FetchFromSources,
    Notice,
    Open,
    Ready,
    Rejected,
    Renamed,
    Reserve,
    Send,
    Subscribe,
    WholeStaged,
)
from ..headers import Buffer
from ..lease import Lease
from ..limits import Timing
from ..messages import (
    Abort,
    Announce,
    AnyChunk,
    Applied,
    Checksums,
    Commit,
    End,
    Failed,
    PatchId,
    Rename,
    Running,
    Whole,
)
from ..protocol_limits import APPLIES_MAX, WINDOW_CHUNKS
from ..staged import SharedMemory, StagedVersion
from . import reports
from .companions import Companions
from .events import Copied, Decoded, Granted, OfModel, Opened, Report, SourceFetched, Waits, Wanted
from .fetch_planner import FetchPlanner
from .layouts import Acceptance, Accepts, Boxes, Expected, about
from .patches import Patches
from .phases import AT_ONCE
from .tables import MODES, TRANSIENT, TRANSITIONS, Event, ModeEvent
from .transfer import Transfer
from .version_store import (
    AnnouncedEntry,
    ArrivingEntry,
    Key,
    RunningEntry,
    VersionEntry,
    VersionStore,
    WholeEntry,
)

RESTARTS_MAX = 3  # a version whose digest did not match after so many transfers is given up
NOTHING_FITS = "no chunks arrive that fit the announcement"


class Follower:
    """The state of one model in one worker.

    Args:
        model: The model's name.
        accepts: Returns why a layout cannot be applied here, or an empty string if it can.
        bytes_max: The largest version to stage, in bytes.
        timing: The timeouts and intervals.
        expected: The expected size and layout of versions, where known.
        companions: Makes versions of several models ready together; None: there is one model.
        versions: The store of the model's versions, which `companions` uses; None: a new store.
    """

    def __init__(
        self,
        model: str,
        accepts: Accepts,
        bytes_max: int,
        timing: Timing,
        expected: Expected = Expected(),  # noqa: B008 - it cannot change
        companions: Companions | None = None,
        versions: VersionStore | None = None,
    ) -> None:
        self.model = model
        self.timing = timing
        self.shared = False  # versions are read from shared memory: nothing is pushed
        self.takes_part = expected.boxes is not None  # this worker takes a part of each version
        self.pieces = False  # the publisher sends parts to this worker: nothing is pushed
        # The last cut, with the layout and the chunk size that it is for.
        self._cut: tuple[tuple[str, int], Cut] | None = None
        self.versions = versions or VersionStore()
        self._companions = companions or Companions({model: self.versions})
        self._expected = expected
        self._acceptance = Acceptance(model, accepts, bytes_max, expected)
        self.planner = FetchPlanner(model, self.versions, timing)
        self.patches = Patches(model, self.versions, timing, expected)
        # Consecutive applies that failed half-way; if not 0, no version is running.
        self.torn_applies = 0
        self.epoch = 0  # the greatest epoch whose bytes were written into the model
        self.network_only: Key = (0, 0)  # the version to fetch although its segment is announced
        self.failed: Failed | None = None  # the last failure, until another version is begun
        # A version that was rejected for its names, dtypes or shapes, and may fit later.
        self._misfit: Announce | None = None
        self._recheck_at = math.inf  # when to check whether `_misfit` fits now
        self._window_bytes = 0  # size of a window of the largest version begun in this session

    def _cut_of(self, announce: Announce, layout: Layout, boxes: Boxes) -> Cut:
        """Return how to cut a version's chunks to the slices that `boxes` selects."""
        key = layout.id, announce.chunk_bytes
        if self._cut is None or self._cut[0] != key:
            part = PartLayout(layout, boxes(layout))
            self._cut = key, Cut(part, plan_of(announce.nbytes, announce.chunk_bytes))
        return self._cut[1]

    @property
    def in_flight_max(self) -> int:
        """The most requested bytes that may be in flight: a window of chunks, and a layout."""
        return self._window_bytes + self._acceptance.layout_bytes_max

    @property
    def running(self) -> Running | None:
        """The running version; None if no version runs."""
        entry = self.versions.in_phase["running"]
        return entry.running if entry is not None else None

    # Messages of the publisher.

    def announced(
        self, announce: Announce, payload: Buffer | None, now: float, *, pushed: bool = True
    ) -> list[Effect]:
        """Process an announcement. If it was `pushed`, chunks may follow without a request.

        `payload` is the layout or, if `announce.whole` is set, all data of the version.
        """
        key = (announce.epoch, announce.version)
        data, layout = (None, payload) if announce.whole is None else (payload, None)
        staged, arriving = self.versions.in_phase["staged"], self.versions.in_phase["arriving"]
        if staged is not None and key == staged.key and announce.commit == "auto":  # W5
            return self.planner.overtaken(key) + self._commit(staged)
        is_new = self.versions.hear(key, named=bool(announce.workers))
        if not (is_new if self.planner.only is None else self.planner.is_wanted(key)):
            return []
        if arriving is not None:
            if key == arriving.key and arriving.update_announcement(announce):  # W5
                return self._take_whole(arriving, data, now)
            if key < arriving.key or (self.versions.mode == "catching-up" and key != arriving.key):
                return []  # W26
        waiting = self.versions.in_phase["announced"]
        if waiting is not None and key < waiting.key:
            return []  # W5
        fault = self._acceptance.learn(announce, layout) if layout is not None else None
        if fault is not None:
            same = self.versions.find(key, "announced")  # a version that waited for this layout
            if fault[0] in TRANSIENT:
                self.versions.move(same, "failed")
                return self.fail(key, *fault, now)
            return self._decline(same or self.versions.expect(announce, pushed=False), *fault, now)
        if data is not None and (staged_whole := self._stage_whole(announce, data)) is not None:
            return [Ready(staged_whole)]
        # W31, S8, T1
        pushed = announce.whole is not None or (pushed and not (self.shared or self.pieces))
        return self._begin(self.versions.expect(announce, pushed=pushed), now, data)

    def _stage_whole(self, announce: Announce, data: Buffer) -> StagedVersion | None:
        """Make a version ready whose data came with its announcement.

        This is a shortcut for the usual case of small versions; the separate steps would have the
        same result. None: the shortcut does not apply, and the separate steps must be taken.
        """
        phases, layout = self.versions.in_phase, self._acceptance.usual.get(about(announce))
        if layout is None or self.versions.mode != "following" or self.failed is not None:
            return None
        if phases["announced"] is not None or phases["arriving"] is not None:
            return None
        if phases["staged"] is not None or self.takes_part:
            return None
        if announce.commit != "auto" or announce.acknowledge != "applied" or announce.companions:
            return None
        whole = announce.whole
        if announce.shared is not None or whole is None or not is_whole(announce, whole, data):
            return None
        return self.versions.accept_whole(announce, whole, data, layout)

    def renamed(self, rename: Rename, now: float) -> list[Effect]:
        """Rename the running version to a newer version that has the same bytes.

        This has no effect while another version is ready or being applied.
        """  # W25
        versions, key = self.versions, (rename.epoch, rename.version)
        entry = versions.in_phase["running"]
        if entry is None or entry.running != rename.was or versions.all("ready", "applying"):
            return []
        if self.planner.only not in (None, key):  # W8
            return []
        arriving = max((entry.key for entry in versions.all("arriving")), default=(0, 0))
        if key <= versions.newest or key < arriving:
            return []
        running = Running(*key, rename.was.digest)
        versions.rename(entry, running)
        report = self.report_running(entry, running)
        self._forget_failure()
        return [
            Renamed(self.model, *key, rename.metadata),
            report,
            *self._change_mode("completed", now),
            *(self._companions.complete() if self._companions.any_waiting else ()),
        ]

    def _begin(self, entry: AnnouncedEntry, now: float, data: Buffer | None = None) -> list[Effect]:
        """Start to receive a version; if its layout is unknown, request the layout. (W6, W7)"""
        announce = entry.announce
        layout = self._acceptance.usual.get(about(announce))
        if layout is None:
            fault = self._acceptance.fault(announce)
            if fault is not None:
                return self._decline(entry, *fault, now)
            layout = self._acceptance.layout(announce)
        if layout is None:
            return self.planner.request_layout(entry.key, now)
        boxes = self._expected.boxes
        cut = None if boxes is None else self._cut_of(announce, layout, boxes)
        if cut is not None:
            layout, limit = cut.layout, self._acceptance.bytes_max
            if cut.nbytes > limit:
                text = f"a part of {cut.nbytes} bytes; this worker accepts at most {limit}"
                return self._decline(entry, "too-large", f"{text}: raise its bytes_max", now)
        if announce.shared is not None and entry.key != self.network_only:
            entry.resolve("located", layout, data, cut=cut)
            return [Open(self.model, entry.key, announce.shared, announce.nbytes)]
        entry.resolve("known", layout, data, cut=cut)
        return self._reserve(entry, now)

    def _opened(self, opened: Opened, now: float) -> list[Effect]:
        """Process the result of `Open`: map the version, or find a buffer to copy it to. (S6)"""
        entry, memory = self.versions.in_phase["announced"], opened.memory
        if entry is None or entry.lacks != "segment" or entry.key != opened.key:
            return []
        at_once = entry.announce.acknowledge == "applied" and entry.announce.commit == "auto"
        if memory is not None and at_once and not (entry.announce.companions or entry.cut):
            return self._map(entry, memory, now)
        entry.resolve("opened", memory=memory)
        return self._reserve(entry, now)

    def _reserve(self, entry: AnnouncedEntry, now: float) -> list[Effect]:
        """Find a buffer for a version; if all buffers are in use, `_resume` continues later.

        A version that is arriving is dropped.
        """
        effects: list[Effect] = []
        older = self.versions.in_phase["arriving"]
        if older is not None:
            self.versions.move(older, "newer")  # W8
            effects = self._change_mode("replaced")
        if self.versions.reuse(entry):
            return effects + self._receive(entry, now)
        if entry.lacks == "buffer":
            return effects
        return [*effects, Reserve(self.model, entry.key, entry.nbytes)]

    def _granted(self, granted: Granted, now: float) -> list[Effect]:
        """Process the result of `Reserve`: memory for a version, or None if there is not enough."""
        entry, buffer = self.versions.in_phase["announced"], granted.buffer
        if entry is None or entry.lacks != "memory" or entry.key != granted.key:
            if buffer is not None:
                self.versions.keep(buffer)
            return []
        if buffer is None and self.versions.base is not None and self.versions.base.chunks:
            # Drop the base of patches to free its buffer. If it is in use, `_decoded` resumes.
            entry.resolve("full")
            return (
                self._reserve(entry, now) if self.versions.set_patch_base(None, None, None) else []
            )
        if buffer is None:
            text = f"there is no memory for {entry.nbytes} bytes: lower bytes_max, or make room"
            return self._decline(entry, "no-memory", text, now)
        self.versions.give(entry, buffer)
        return self._receive(entry, now)

    def _receive(self, entry: AnnouncedEntry, now: float) -> list[Effect]:
        """Begin to fill a version's buffer: from its payload, shared memory, sources or chunks.

        If the version is not pushed, its chunks are fetched immediately. (W31)
        """
        announce, layout, chunks, memory = entry.announce, entry.layout, entry.chunks, entry.memory
        assert layout is not None and chunks is not None  # noqa: S101, PT018 - `lacks` is "memory"
        self._window_bytes = max(self._window_bytes, chunks.plan.approximate_bytes(WINDOW_CHUNKS))
        data = entry.payload
        if self.failed is not None:
            self._forget_failure()
        if data is not None and take_whole(announce, data, chunks, entry.cut):
            return self._arrived(entry, layout, chunks, now)
        if announce.patches and entry.cut is None:  # T1
            transfer = self.patches.transfer(entry, chunks, now)
        else:
            transfer = Transfer(
                announce,
                chunks,
                now,
                self.timing,
                self._expected.keyring,
                cut=entry.cut,
                pieces=self.pieces,
            )
        arriving = ArrivingEntry(entry.key, announce, layout, transfer, chunks, memory)
        self.versions.move(entry, "begun", arriving)
        if data is not None:
            return self._take_whole(arriving, data, now)
        effects: list[Effect] = []
        if memory is not None and announce.nbytes:
            effects.append(Copy(transfer.copy(memory)))
        elif announce.sources and transfer.patch is None:
            job = transfer.fetch_from_sources()
            effects += [] if job is None else [FetchFromSources(job)]
        patched, subscribing = transfer.patch is not None, list[Effect]()
        if patched != self.patches.subscribed:
            subscribing = self.patches.subscribe(on=patched, shared=self.shared)
        if not entry.pushed or subscribing:
            transfer.pull()
        wanted = transfer.wants(now)
        return effects + subscribing + (reports.fetches(transfer, wanted) if wanted else [])

    def _take_whole(self, entry: ArrivingEntry, data: Buffer | None, now: float) -> list[Effect]:
        """Store the data that came with an announcement: the version's only chunk, and digest.

        This has no effect if the announcement came without data.
        """
        whole = entry.announce.whole
        if whole is None or data is None:
            return []
        entry.transfer.store(0, whole.crc, data, now, pushed=True)
        entry.transfer.end(whole.digest)
        return self._advance(entry, now)

    def _copied(self, copied: Copied, now: float) -> list[Effect]:
        """Process the end of a copy; if the copy has failed, fetch the version. (S5, S6)"""
        if not copied.copying.live:  # the version was dropped meanwhile
            self.versions.give_back(copied.copying.buffer)
            return self._resume(now)
        entry = self.versions.in_phase["arriving"]
        assert entry is not None  # noqa: S101 - a live job belongs to the arriving version
        entry.transfer.copied(copied.crcs, now)
        return self._advance(entry, now)

    def _source_fetched(self, fetched: SourceFetched, now: float) -> list[Effect]:
        """Record chunks that came from sources; once the job ends, fetch the others. (N3)"""
        job = fetched.job
        if job.complete:  # the version may be in use already
            return []
        if not job.live:  # the version was dropped meanwhile
            if not fetched.over:
                return []
            self.versions.give_back(job.buffer)
            return self._resume(now)
        entry = self.versions.in_phase["arriving"]
        assert entry is not None  # noqa: S101 - a live job belongs to the arriving version
        entry.transfer.fetched(fetched.chunks, now, over=fetched.over)
        faults = [Notice("source", text, warning=True) for text in fetched.faults]
        return [*faults, *self._advance(entry, now)]

    def _decoded(self, decoded: Decoded, now: float) -> list[Effect]:
        """Stage a version decoded from a patch; if decoding failed, fetch the whole version."""
        done, entry = decoded.patching, self.versions.in_phase["arriving"]
        if not done.live:  # the version was dropped meanwhile
            self.versions.give_back(done.buffer)
            self.versions.release(done.base)
            return self._resume(now)
        assert entry is not None  # noqa: S101 - a live job belongs to the arriving version
        if decoded.fault:
            return self.patches.give_up(entry, decoded.fault, now)
        entry.transfer.decoded()
        self.versions.release(done.base)
        entry.chunks.fill(done.digest)
        patch = entry.transfer.patch
        return self._arrived(entry, entry.layout, entry.chunks, now, patch, decoded.seconds)

    def _map(self, entry: AnnouncedEntry, memory: SharedMemory, now: float) -> list[Effect]:
        """Make a version ready that will be applied directly from shared memory."""
        announce, layout = entry.announce, entry.layout
        assert layout is not None  # noqa: S101 - only its segment was missing
        hash_chunks = announce.chunk_bytes if announce.hash else 0  # S7
        fields = self.model, entry.key, layout, memory.data, ""
        staged = StagedVersion(
            *fields, shared=memory, hash_chunks=hash_chunks, metadata=announce.metadata
        )
        mapped = WholeEntry(entry.key, announce, staged, entry.memory)
        self.versions.move(entry, "mapped", mapped)
        self._forget_failure()
        return [*self._change_mode("completed", now), Ready(staged)]

    def _change_mode(self, event: ModeEvent, now: float = -math.inf) -> list[Effect]:
        """Apply an event to the model's mode, if the mode has a transition for it.

        To follow, the worker subscribes and fetches the latest version. To catch up, it
        unsubscribes.
        """
        if event not in MODES[self.versions.mode] or not self.versions.change_mode(event):
            return []
        following = self.versions.mode == "following"
        pushed = following and not (self.shared or self.pieces)
        subscribe = Subscribe(self.patches.topic, on=pushed)
        epoch = self.versions.newest[0]
        return [subscribe, *(self.planner.request_latest(epoch, now) if following else [])]

    def _decline(self, entry: VersionEntry, code: str, text: str, now: float) -> list[Effect]:
        self.versions.move(entry, "failed" if code in TRANSIENT else "declined")
        return self._refuse(entry, code, text, now)

    def _refuse(self, entry: VersionEntry, code: str, text: str, now: float) -> list[Effect]:
        if code == "layout-mismatch":
            self._acceptance.doubt(entry.announce.layout)
            self._misfit, self._recheck_at = entry.announce, now + self.timing.ping
        return self.fail(entry.key, code, text, now)

    def _recheck_misfit(self, now: float) -> list[Effect]:
        """Fetch the rejected version again if it fits now, since the user has changed the model."""
        misfit, self._recheck_at = self._misfit, now + self.timing.ping
        if misfit is None or misfit.epoch != self.versions.newest_known[0]:
            self._misfit, self._recheck_at = None, math.inf
            return []
        if self._acceptance.fault(misfit) is not None:
            return []
        self._misfit, self._recheck_at = None, math.inf
        self.versions.forgive((misfit.epoch, misfit.version))
        return self.planner.request_latest(misfit.epoch, now, at_once=True)

    # Arriving data.

    def wants_layout(self, announce: Announce) -> bool:
        """Return whether to receive the layout with an announcement: it must not be too large."""
        return self._acceptance.size_fault(announce) is None

    def place(self, chunk: AnyChunk, size: int) -> Lease | None:
        """Return a lease of the memory for a chunk's payload; None if it goes elsewhere."""
        entry = self.versions.in_phase["arriving"]
        if entry is None or entry.key != (chunk.epoch, chunk.version):
            return None
        return entry.transfer.lend(chunk, size)

    def chunk(
        self, chunk: AnyChunk, payload: Buffer | Lease, now: float, *, pushed: bool
    ) -> list[Effect]:
        """Process a chunk of a version."""
        entry = self.versions.in_phase["arriving"]
        if entry is None or entry.key != (chunk.epoch, chunk.version):
            return self._stray(chunk.epoch, chunk.version, now)
        transfer = entry.transfer
        due = transfer.take(chunk, payload, now, pushed=pushed)
        effects = [reports.progress(entry)] if due else []
        if transfer.chunks.here == transfer.chunks.plan.count:
            return effects + self._advance(entry, now)
        wanted = transfer.wants(now)
        return effects + reports.fetches(transfer, wanted) if wanted else effects

    def end(self, end: End, now: float) -> list[Effect]:
        """Process the end of a version: its digest, which is sent after all of its chunks."""
        entry = self.versions.in_phase["arriving"]
        if entry is None or entry.key != (end.epoch, end.version):
            return self._stray(end.epoch, end.version, now)
        if end.patch != entry.transfer.patch:
            return []
        entry.transfer.end(end.digest)
        return self._advance(entry, now)

    def checksums(self, sums: Checksums, payload: Buffer, now: float) -> list[Effect]:
        """Process the checksums of all chunks of a version. (T4)"""
        entry = self.versions.in_phase["arriving"]
        if entry is None or entry.key != (sums.epoch, sums.version):
            return []
        entry.transfer.take_checksums(payload, now)
        return self._advance(entry, now)

    def _stray(self, epoch: int, version: int, now: float) -> list[Effect]:
        # A chunk or `end` of a version that is not arriving: it shows that the version exists.
        waiting = self.versions.in_phase["announced"]
        return self.planner.hear_of(epoch, version, now) if waiting is None else []

    def _advance(self, entry: ArrivingEntry, now: float) -> list[Effect]:
        """Fetch missing chunks; once the version is complete, verify and stage it.

        A complete patch is decoded first.
        """
        transfer = entry.transfer
        if transfer.chunks.here < transfer.chunks.plan.count or transfer.digest is None:
            wanted = transfer.wants(now)
            return reports.fetches(transfer, wanted) if wanted else []
        if transfer.patch is not None:
            return self.patches.decode(entry)
        if transfer.chunks.proves(transfer.digest):  # W13
            return self._arrived(entry, entry.layout, entry.chunks, now)
        transfer.restart()
        if transfer.restarts < RESTARTS_MAX:
            return []  # the next tick fetches the version again
        text = f"the version did not match its digest, {transfer.restarts} times"
        return self._decline(entry, "digest-mismatch", text, now)

    def _arrived(
        self,
        entry: AnnouncedEntry | ArrivingEntry,
        layout: Layout,
        chunks: Chunks[Memory],
        now: float,
        patch: PatchId | None = None,
        decode_seconds: float = 0.0,
    ) -> list[Effect]:
        """Stage a verified version; make it ready, unless the publisher must commit it first."""
        announce = entry.announce
        report = announce.acknowledge == "staged" or announce.commit == "together"
        fields = self.model, entry.key, layout, chunks.memory, chunks.digest
        staged = StagedVersion(
            *fields,
            report_staged=report,
            patch=patch,
            decode_us=round(decode_seconds * 1e6),
            metadata=announce.metadata,
            companions=announce.companions,
        )
        if isinstance(entry, AnnouncedEntry):  # the data came with the announcement
            self.versions.move(entry, "begun")
        whole = WholeEntry(entry.key, announce, staged, entry.memory, chunks)
        self.versions.move(entry, "whole", whole)
        effects = reports.staged([whole]) if report else []
        if announce.commit != "together":
            effects += self._commit(whole)
        elif self.planner.only == entry.key:
            effects.append(WholeStaged(staged))
        return effects + self._change_mode("completed", now)

    def _commit(self, entry: WholeEntry) -> list[Effect]:
        """Make a staged version ready, once its companions are here. (C2)"""
        if entry.announce.companions:
            entry.commit()
            return self._companions.complete()
        self.versions.move(entry, "committed")
        return [Ready(entry.staged)]

    def committed(self, commit: Commit) -> list[Effect]:
        """Handle a commit: make the staged version ready, if it is the committed version."""
        entry, key = self.versions.in_phase["staged"], (commit.epoch, commit.version)
        if entry is None or entry.key != key:
            return []
        same = entry.staged.digest == commit.digest
        return self.planner.overtaken(key) + self._commit(entry) if same else []  # W14

    def aborted(self, abort: Abort, now: float) -> list[Effect]:
        """Handle an abort: drop the version, unless it is ready already."""
        key = (abort.epoch, abort.version)
        was_arriving = self.versions.find(key, "arriving") is not None
        for entry in self.versions.all("announced", "arriving", "staged"):
            if entry.key == key:
                self.versions.move(entry, "aborted")  # W14
        self.planner.end_backoff(key)
        if key == self.planner.only and not self.versions.has(key):
            return self.planner.forgo("it was aborted")
        return self._go_on(abort.epoch, now) if was_arriving else self._resume(now)  # W26

    def gone(self, epoch: int, version: int, now: float) -> list[Effect]:
        """Handle a refusal: drop a version that the publisher no longer has (0: it has none)."""
        only = self.planner.only
        self.planner.end_backoff((epoch, version))
        for entry in self.versions.all("announced", "arriving"):
            named = version == entry.key[1] or (version == 0 and entry.phase == "announced")  # W27
            other_epoch = epoch not in (0, entry.key[0])
            was_arriving = isinstance(entry, ArrivingEntry)
            dropped = named and not other_epoch and self.versions.move(entry, "gone")
            if dropped and was_arriving and only is None:
                return self._resume(now) or self.planner.request_latest(entry.key[0], now)
        return self.planner.gone(epoch, version)

    def _go_on(self, epoch: int, now: float) -> list[Effect]:
        """Begin a version that waits for a buffer; if idle while catching up, fetch the latest."""
        effects = self._resume(now)
        idle = (
            not effects
            and self.versions.mode == "catching-up"
            and self.versions.in_phase["arriving"] is None
        )
        return self.planner.request_latest(epoch, now) if idle else effects

    # The session.

    def reconnected(
        self, epoch: int, version: int, now: float, *, shared: bool, pieces: bool = False
    ) -> list[Effect]:
        """Begin a session with a publisher whose latest version is `version` of `epoch`.

        If versions will come over the network, the effects reserve a buffer of the expected size.

        Args:
            epoch, version: The publisher's epoch and the number of its latest version.
            now: The time.
            shared: Whether versions are read from shared memory.
            pieces: Whether the publisher sends the part that the worker takes.
        """
        self.shared, self.pieces = shared, pieces
        self.versions.reconnected(epoch, now, pieces=pieces)
        arriving = self.versions.in_phase["arriving"]
        self._window_bytes = (
            arriving.chunks.plan.approximate_bytes(WINDOW_CHUNKS) if arriving is not None else 0
        )
        self.planner.reconnected()
        self.torn_applies = min(self.torn_applies, 1)  # earlier failures count as one
        effects: list[Effect] = []
        nbytes, has_none = self._expected.nbytes, self.versions.has_no_buffer
        if not self.shared and has_none and 0 < nbytes <= self._acceptance.bytes_max:
            effects.append(Reserve(self.model, None, nbytes))
        effects += reports.staged(self.versions.all("ready", "applying", "staged"))
        return effects + self.planner.hear_of(epoch, version, now)

    # Events that are not messages.

    def happened(self, event: OfModel, now: float) -> list[Effect]:
        """Process the result of an effect, or the outcome of a version that was ready."""
        match event:
            case Report():
                return self._outcome(event, now)
            case Granted():
                return self._granted(event, now)
            case Opened():
                return self._opened(event, now)
            case Copied():
                return self._copied(event, now)
            case Decoded():
                return self._decoded(event, now)
            case SourceFetched():
                return self._source_fetched(event, now)
            case Wanted():
                sent = self.planner.want(event.key, now)
                return sent if event.key else sent + self._go_on(self.versions.newest_known[0], now)
            case Waits():
                return self._waits(self.versions.find(event.key, "ready", "applying"), event.text)

    def _waits(self, entry: WholeEntry | None, text: str) -> list[Effect]:
        """Report at once what delays the apply of a version; `repeat` reports it with each ping."""
        return [reports.progress(entry)] if entry is not None and entry.set_blocked(text) else []

    def _outcome(self, report: Report, now: float) -> list[Effect]:
        """Process a report that the user began, put back, applied or failed to apply a version."""
        versions, what = self.versions, report.what
        entry = versions.find(report.key, "ready", "applying")
        if entry is None:
            return []
        if what not in TRANSITIONS[entry.phase]:
            if entry.phase != "ready" or what not in AT_ONCE:
                return []
            versions.move(entry, "taken")
        if report.kept:
            versions.detach_buffer(entry)
        effects: list[Effect] = []
        if entry.deferred_outcome is not None:
            versions.move(entry, entry.deferred_outcome)
        elif what == "applied":
            effects.append(self._applied(entry, report))
        elif what == "torn":
            effects = self._torn(entry, report, now)
        elif what == "declined":
            effects = self._failed(entry, report, "declined", now)
        else:
            versions.move(entry, what)
            if what == "failed":
                effects = self.fail(entry.key, "no-memory", report.text, now)[:1]
            elif what == "stale":
                self.network_only = entry.key
        if what == "taken":
            return effects
        if self._companions.any_waiting:
            effects += self._companions.complete()
        if what == "put-back":
            return effects
        if what == "stale":
            return effects + self.planner.request_latest(entry.key[0], now, at_once=True)
        if versions.in_phase["announced"] is not None:  # a buffer for this version may be free now
            return effects + self._resume(now)
        return effects

    def _applied(self, entry: WholeEntry, report: Report) -> Effect:
        # Record that a version was applied; return the `applied` report.
        versions, staged = self.versions, entry.staged
        running = Running(*entry.key, report.digest or staged.digest)
        by_network = entry.memory is None and staged.shared is None
        keep = entry.announce.keep and self._expected.patches and by_network
        base = report.bytes if keep else None
        if base is not None or versions.base is not None:
            versions.set_patch_base(entry, running, base)  # D3
        if report.text:
            entry.remark(report.text)
        after = RunningEntry(entry.key, entry.announce, staged, text=entry.text, running=running)
        versions.move(entry, "applied", after)
        return self.report_running(after, running)

    def _torn(self, entry: WholeEntry, report: Report, now: float) -> list[Effect]:
        """Record that the model has parts of two versions, since `entry` failed half-way.

        At the next attempt, the worker fetches `entry` over the network, and does not copy it from
        shared memory.
        """
        self.versions.move(self.versions.in_phase["running"], "torn")
        self.versions.set_patch_base(None, None, None)
        self.network_only, self.torn_applies = entry.key, self.torn_applies + 1
        self.epoch = max(self.epoch, entry.key[0])
        return self._failed(
            entry, report, "torn" if self.torn_applies < APPLIES_MAX else "declined", now
        )

    def _failed(
        self, entry: WholeEntry, report: Report, deferred_outcome: Event, now: float
    ) -> list[Effect]:
        """Report a failed apply; a version that the user still holds keeps its phase."""
        if report.still:
            entry.set_overdue(deferred_outcome)
        else:
            self.versions.move(entry, deferred_outcome)
        if report.misfit:
            return self._refuse(entry, "layout-mismatch", report.text, now)[:1]
        return self.fail(entry.key, "apply", report.text, now)[:1]

    def report_running(self, entry: WholeEntry, running: Running) -> Effect:
        """Record that a version runs; `running` is what the returned `applied` report says of it.

        A failure of this version or of an older one is forgotten.
        """
        self.torn_applies, self.epoch = 0, max(self.epoch, running.epoch)
        failed = self.failed
        if failed is not None and (failed.epoch, failed.version) <= entry.key:
            self.failed = None
        return applied(self.model, running, entry.staged, entry.text, at_once=True)

    def _forget_failure(self) -> None:
        """Forget the last failure, since a version arrives; keep it if no version is running."""
        self._misfit, self._recheck_at = None, math.inf
        if not self.torn_applies:
            self.failed = None

    def fail(self, key: Key, code: str, text: str, now: float) -> list[Effect]:
        """Return reports to publisher and user that a version has failed.

        If the code is in `TRANSIENT`, the version will be tried again after a pause.
        """
        epoch, version = key
        if code in TRANSIENT:
            self.planner.back_off(key, now)
        self.failed = Failed(model=self.model, epoch=epoch, version=version, code=code, text=text)
        return [self._failure(self.failed), Rejected(self.model, epoch, version, code, text)]

    def _failure(self, failed: Failed) -> Effect:
        """Return the report of the last failure."""
        return reports.failed(failed, torn=bool(self.torn_applies))

    def _resume(self, now: float) -> list[Effect]:
        """Begin the version that waits for a buffer, if a buffer is free."""
        waiting = self.versions.in_phase["announced"]
        if waiting is None or self.versions.in_phase["arriving"] is not None:
            return []
        if self.planner.outdated(waiting.key):
            self.versions.move(waiting, "newer")
            return []
        return self._reserve(waiting, now) if waiting.lacks == "buffer" else []

    def broken(self, why: str, now: float, report: Report | None = None) -> list[Effect]:
        """Recover from an exception: keep complete versions, and drop incomplete ones.

        If the exception interrupted the processing of a `report` that the user had finished with a
        version, it is unknown which version runs, so none counts as running.
        """
        versions, effects = self.versions, list[Effect]()
        for entry in versions.all("announced", "arriving"):
            if versions.move(entry, "failed"):
                effects += self.fail(entry.key, "no-memory", why, now)
        done = report is not None and not report.still and report.what not in ("taken", "put-back")
        applied = (
            versions.find(report.key, "ready", "applying") if report is not None and done else None
        )
        if applied is not None and report is not None:
            if report.kept:
                versions.detach_buffer(applied)
            versions.move(applied, "taken")
            versions.move(applied, "torn")
            versions.move(versions.in_phase["running"], "torn")
            versions.set_patch_base(None, None, None)
        if (running := self.running) is not None:  # otherwise a hello would contradict itself (P3)
            self.epoch = max(self.epoch, running.epoch)
        for entry in versions.all("staged"):
            if entry.announce.commit == "auto":
                entry.commit()
        return effects

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Perform what is due at `now`: request missing data, or give up a version."""
        if now >= self._recheck_at and (requests := self._recheck_misfit(now)):
            return requests
        entry = self.versions.in_phase["arriving"]
        if entry is not None and entry.transfer.exhausted:  # W12
            if entry.transfer.patch is not None:
                return self.patches.give_up(entry, "no more of its chunks arrive", now)
            return self._decline(entry, "digest-mismatch", NOTHING_FITS, now)
        if entry is not None:
            return self._advance(entry, now)
        waiting = self.versions.in_phase["announced"]
        if waiting is not None and waiting.lacks == "layout":
            return self._begin(waiting, now) if self.planner.layout_overdue(now) else []
        return self._resume(now)

    def repeat(self) -> list[Effect]:
        """Return all current reports again, in case an earlier one was lost."""
        versions, effects = self.versions, list[Effect]()
        phases = versions.in_phase
        arriving, applying, running = phases["arriving"], phases["applying"], phases["running"]
        if arriving is not None and applying is None:
            effects.append(reports.progress(arriving))
        effects += reports.staged(versions.all("ready", "applying", "staged"))
        if running is not None:
            effects.append(applied(self.model, running.running, running.staged, running.text))
        if self.failed is not None:
            effects.append(self._failure(self.failed))
        waiting = [entry for entry in versions.all("staged") if entry.committed]
        ready = [applying] if applying is not None else [*versions.all("ready"), *waiting]
        if ready and (applying is not None or arriving is None):
            effects.append(reports.progress(max(ready, key=lambda entry: entry.key)))
        return effects


def applied(
    model: str,
    running: Running,
    staged: StagedVersion | None = None,
    text: str = "",
    *,
    at_once: bool = False,
) -> Effect:
    """Return the `applied` report of the running version, with a remark. (W16)

    `staged`: the version before its apply, to report the patch that it was decoded from (D11).
    `at_once` is true for the first report, which may be sent on the data connection.
    """
    patch, decode_us = (staged.patch, staged.decode_us) if staged is not None else (None, 0)
    message = Applied(
        model=model,
        epoch=running.epoch,
        version=running.version,
        digest=running.digest,
        patch=patch,
        decode_us=decode_us,
        note=text,
    )
    return Send(message, upstream=at_once)


def is_whole(announce: Announce, whole: Whole, payload: Buffer) -> bool:
    """True if the payload of an announcement is the whole version, undamaged."""
    if len(payload) != announce.nbytes or crc32c(payload) != whole.crc:
        return False
    return digest(announce.layout, announce.chunk_bytes, [whole.crc]) == whole.digest


def take_whole(
    announce: Announce, payload: Buffer, chunks: Chunks[Memory], cut: Cut | None = None
) -> bool:
    """Store a version that came with its announcement; return whether it is undamaged.

    The payload, or with `cut` a part of it, is copied into the buffer, unless it was received
    there.
    """
    whole = announce.whole
    if whole is None or not is_whole(announce, whole, payload):
        return False
    owner = payload.obj if isinstance(payload, memoryview) else None
    if cut is not None:
        cut.put(chunks.memory, 0, np.frombuffer(payload, np.uint8))
    elif cast("object", owner) is not chunks.memory:
        np.copyto(chunks.memory, np.frombuffer(payload, np.uint8))
    chunks.put(0, whole.crc)
    return chunks.proves(whole.digest)
