"""Copies a model's weights into memory to publish; keeps its layout and the bases of patches."""

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...bus.chunks import Chunks
from ...bus.deadline import Deadline
from ...bus.errors import DeadlineError
from ...bus.memory.snapshots import NEVER, MakeRoom, Pool, no_room
from ...bus.messages import DELTA, Running, Shared
from ...bus.net.publisher_loop import Promise, Reply
from ...bus.protocol_limits import WHOLE_BYTES_MAX
from ...bus.publisher.offers import hash_chunk
from ...bus.publisher.roster import PatchCandidate
from ...bus.publisher.version import OfferedPatch, Snapshot, VersionOffer
from ...codecs.checksum import CHUNK_BYTES_DEFAULT, digest_of
from ...codecs.delta.encoding import encode
from ...codecs.delta.format import Block
from ...codecs.delta.patch import Delta
from ...codecs.delta.worth import Estimate, Way, chosen, estimate, estimated, may_pay, sample
from ...codecs.errors import PatchError, StateError
from ...codecs.layout import Layout
from ...codecs.native import crc32c
from ...codecs.numpy_tensors import Bytes
from ...codecs.overflow import LostValues
from ...codecs.precision import Precision, precision_of
from ...codecs.protocol_limits import CHUNKS_MAX
from ...codecs.renaming import Rename, Renaming, renaming_of
from ...codecs.state import Form, State, Streamed, state_of
from ..applying.overflow_log import OverflowLog
from ..files.state_folder import Saved, StateFolder, StateFolderError, StoredVersion
from ..settings import BASES, Dtype, Encoding
from .parts import PartedSource
from .shard_patches import PatchTerms

if TYPE_CHECKING:
    from ...codecs.device_copies import Arriving
    from .as_one import AsOne

log = logging.getLogger("weightbus.publisher")

ENCODE_PACE = 1e-8  # seconds per byte: the first estimate of encoding and decoding
PACE_SHARE = 0.5  # weight of the last measurement in the estimate
PACE_EVERY = 32  # decisions between two measurements on a sample, since the estimate may be wrong
BOTH = False, True  # the kinds of patches: without classes, and with classes
OFFER_SHARE = 0.5  # fraction of the remaining time for making patches: sending takes time, too

ROLLBACK = "a rollback publishes the older version's bytes: leave out dtype= and rename="


class PatchBase(NamedTuple):
    """A version that patches may build on."""

    chunks: Chunks[object]  # owned by the publisher's thread: here, read only its digest
    form: tuple[str, int]  # layout id and chunk size, which the digest depends on
    data: Bytes
    snapshot: Snapshot  # keeps `data` valid


class Bases:
    """The versions of one model that patches may build on. Callers hold the model's lock.

    Args:
        model: The model's name.
        count: How many versions are kept.
        check: Whether each patch is decoded, and compared, before it is offered.

    Attributes:
        versions: The versions, the newest last.
    """

    def __init__(self, model: str, count: int = BASES, *, check: bool = True) -> None:
        self._model, self._count, self._check = model, count, check
        self.versions: deque[PatchBase] = deque()
        # Recent seconds per byte, by kind of patch.
        self._encode, self._decode = [ENCODE_PACE] * 2, [ENCODE_PACE] * 2
        self._decisions = 0  # how often a kind of patch was chosen for workers with known rates

    def offer(
        self,
        offer: VersionOffer,
        encoding: Encoding,
        patch_candidates: Collection[PatchCandidate],
        deadline: Deadline = NEVER,
        *,
        to_all: bool = True,
    ) -> None:
        """Add patches to a version, and keep the version as a base of later patches. (D1, D2)

        Args:
            offer: The version, copied and not announced yet.
            encoding: "delta" or "auto"; "raw": no patches.
            patch_candidates: The workers that may receive a patch.
            deadline: The deadline of the publish; making patches may take a part of the time left.
            to_all: Whether the version is for all workers: if it gets no patch, bases are dropped.
        """
        form = offer.layout.id, offer.chunks.plan.chunk_bytes
        if encoding == "raw" or _is_small(offer.layout, form[1]) or not patch_candidates:
            if to_all:
                self.forget()
            return
        snapshot = offer.snapshot
        data = snapshot.keep()
        if data is None:
            return
        try:
            while to_all and self.versions and self.versions[0].form != form:
                self._drop_oldest()
            new = PatchBase(offer.chunks, form, data, snapshot)
            self._patch(offer, new, encoding, patch_candidates, _part_of(deadline))
            offer.keep = True
            self.versions.append(new)
        finally:  # a KeyboardInterrupt can be raised at any point
            if not any(base.snapshot is snapshot for base in self.versions):
                snapshot.let_go()
        while len(self.versions) > self._count:
            self._drop_oldest()

    def _patch(
        self,
        offer: VersionOffer,
        new: PatchBase,
        encoding: Encoding,
        patch_candidates: Collection[PatchCandidate],
        deadline: Deadline,
    ) -> None:
        """Add patches to the offer, beginning with the base that most candidates run."""
        data = new.data
        some = ((base.chunks.digest, base.data) for base in self.versions if base.form == new.form)
        # a base with an unhashed chunk has no digest
        bases = {digest: old for digest, old in some if digest}
        counts = Counter(each.running for each in patch_candidates if each.running is not None)
        by_key = dict[tuple[int, int], tuple[Running, Bytes]]()
        for running, _ in counts.most_common():
            if running.digest in bases:  # a patch is named and encrypted by its base's number (E3)
                key = running.epoch, running.version
                by_key.setdefault(key, (running, bases[running.digest]))
        for running, old in itertools.islice(by_key.values(), self._count):
            candidates = [each for each in patch_candidates if each.running == running]
            delta = encoding == "delta"
            way = Way(classes=True) if delta else self.choose(offer.layout, old, data, candidates)
            patch = None if way is None else self._encoded(way, running, old, offer, data, deadline)
            offer.patches += () if patch is None else (patch,)

    def forget(self) -> None:
        """Drop all bases."""
        while self.versions:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.versions.popleft().snapshot.let_go()

    def _encoded(
        self,
        way: Way,
        running: Running,
        old: Bytes,
        offer: VersionOffer,
        new: Bytes,
        deadline: Deadline,
    ) -> OfferedPatch | None:
        """Return the patch from `old` to `new`; None if it is no shorter, or encoding fails.

        A failure is logged and not raised: the version can still be sent whole.
        """
        for index in offer.chunks.unhashed():
            hash_chunk(offer, index)
        layout, started = offer.layout, time.perf_counter()
        try:
            deadline.check()
            data = encode(
                layout,
                old,
                new,
                digests=(running.digest, offer.chunks.digest),
                chunk_bytes=offer.chunks.plan.chunk_bytes,
                classes=way.classes,
                check=self._check,
                step=deadline.check,
            )
        except (PatchError, MemoryError, DeadlineError) as error:
            log.warning("%s: no patch on version %d: %s", self._model, running.version, error)
            return None
        work = way.work * layout.nbytes
        if work:
            pace = (time.perf_counter() - started) / work
            self._encode[way.classes] += PACE_SHARE * (pace - self._encode[way.classes])
        if len(data) >= layout.nbytes:
            return None
        return OfferedPatch(DELTA, running, data, way.classes, work)

    def choose(
        self, layout: Layout, old: Bytes, new: Bytes, patch_candidates: Collection[PatchCandidate]
    ) -> Way | None:
        """Return the kind of patch to make; None if the whole version arrives sooner.

        All workers that run a base get the same patch. Its kind is the best one for the slowest
        worker to which a patch arrives sooner, since the publish waits longest for this worker. A
        worker with an unknown rate counts as fast enough to need no patch. A worker that has not
        decoded a kind of patch is assumed to decode it as fast as this process. After a new
        measurement, all workers are assumed to do so: otherwise a worker's old rate for a kind of
        patch that it no longer receives would never be corrected.
        """
        measure = partial(self._measure, layout, old, new)
        return self._soonest(
            layout.nbytes, patch_candidates, measure, partial(estimate, layout, old, new)
        )

    def choose_in_parts(
        self,
        layout: Layout,
        old: Bytes,
        new: Bytes,
        patch_candidates: Collection[PatchCandidate],
        blocks: Sequence[Block],
        sums: Sequence[Sequence[float]],
    ) -> Way | None:
        """Return the same as `choose`, for a patch that several processes encode in parallel.

        Args:
            layout: The layout of both data sections.
            old, new: The data sections, with only this process's blocks.
            patch_candidates: The workers that run the base.
            blocks: This process's blocks.
            sums: The result of `worth.sums` in each process.
        """

        def measure() -> None:
            if blocks:
                self._measure(layout, old, new, [[block] for block in blocks])

        costs = partial(estimated, layout.nbytes, sums)
        return self._soonest(layout.nbytes, patch_candidates, measure, costs, len(sums))

    def _soonest(
        self,
        nbytes: int,
        patch_candidates: Collection[PatchCandidate],
        measure: Callable[[], None],
        estimate_costs: Callable[[], Estimate],
        encoders: int = 1,
    ) -> Way | None:
        slow = sorted((c for c in patch_candidates if not math.isinf(c.rate)), key=lambda c: c.rate)
        if not slow:
            return None
        measured = self._decisions % PACE_EVERY == 0
        if measured:
            measure()
        self._decisions += 1
        encode = [pace / encoders for pace in self._encode]
        links = [
            (
                each.rate,
                encode,
                self._decode if measured else [each.decode.get(k, self._decode[k]) for k in BOTH],
            )
            for each in slow
        ]
        links = [link for link in links if may_pay(*link)]
        if not links:
            return None
        costs = estimate_costs()
        ways = (chosen(nbytes, costs, *link) for link in links)
        return next((way for way in ways if way is not None), None)

    def _measure(
        self,
        layout: Layout,
        old: Bytes,
        new: Bytes,
        among: Sequence[Sequence[Block]] | None = None,
    ) -> None:
        """Measure encoding and decoding on a sample of the blocks in `among`; None: of all."""
        some, where = sample(layout, among)
        before, after = old[where], new[where]
        work = estimate(some, before, after).work * some.nbytes
        first, last = (digest_of(some.id, d, CHUNK_BYTES_DEFAULT) for d in (before, after))
        for classes in BOTH:
            started = time.perf_counter()
            try:
                digests = first, last
                patch = encode(
                    some, before, after, digests=digests, classes=classes, check=self._check
                )
                encoded = time.perf_counter()
                Delta(some, patch).apply(before)
            except (PatchError, MemoryError):
                return
            self._encode[classes] = (encoded - started) / work
            self._decode[classes] = (time.perf_counter() - encoded) / work


def _is_small(layout: Layout, chunk_bytes: int) -> bool:
    """Return whether a version is sent inside its announcement, so that no patch is faster."""
    return layout.nbytes <= min(chunk_bytes, WHOLE_BYTES_MAX)


def _part_of(deadline: Deadline) -> Deadline:
    """Return the deadline for making patches, which leaves time to send the whole version."""
    text = (
        f"it was not made in {OFFER_SHARE:.0%} of the time left, so workers get the whole version: "
        'give a longer timeout, or publish with encoding="raw"'
    )
    return Deadline(time.monotonic() + OFFER_SHARE * deadline.left(), text)


class PublishedModel:
    """One model of a publisher. Callers of its methods hold `lock`.

    Args:
        name: The model's name.
        chunk_bytes: Bytes per chunk.
        share: Whether workers on this host may read the memory of its versions.
        bases: How many versions are kept as bases of patches.
        check: Whether each patch is decoded, and compared, before it is offered.
        second: Whether weights on a GPU are first copied within the GPU's memory.
        stored: Whether each version is written to disk.

    Attributes:
        as_one: The versions of this and other models that `publish_many` published last, if they
            may be undecided; else None.
    """

    def __init__(
        self,
        name: str,
        chunk_bytes: int,
        *,
        share: bool,
        bases: int = BASES,
        check: bool = True,
        second: bool = False,
        stored: bool = False,
    ) -> None:
        self.name, self.lock, self._stored = name, threading.Lock(), stored
        self.bases = Bases(name, bases, check=check)
        self.pool = Pool(name, share=share, second=second)
        self._chunk_bytes = chunk_bytes
        self._form: Form | None = None
        self._layout: Layout | None = None
        self.as_one: AsOne | None = None
        self._overflows = OverflowLog(log)
        # The last conversion of a form: its arguments form, precision, renaming; and its result.
        self._converted: tuple[Form, Precision | None, Renaming | None, Form] | None = None

    def join(self, as_one: "AsOne | None") -> None:
        """Set `as_one`, for later publishes of this model; None: they need not wait."""
        self.as_one = as_one

    def wait_for_lock(self, deadline: Deadline) -> None:
        """Acquire the lock, which another thread holds while it copies this model.

        Raises:
            DeadlineError: That thread holds it for too long.
        """
        while not self.lock.acquire(timeout=deadline.left()):
            deadline.check()

    def offer(
        self,
        offer: VersionOffer,
        encoding: Encoding,
        patch_candidates: Callable[[], Collection[PatchCandidate]],
        deadline: Deadline,
        *,
        to_all: bool,
    ) -> None:
        """Add patches to a version: see `Bases.offer`. If this raises, release the snapshot."""
        try:
            small = _is_small(offer.layout, offer.chunks.plan.chunk_bytes)
            some = () if encoding == "raw" or small else patch_candidates()
            before = len(self.bases.versions)
            self.bases.offer(offer, encoding, some, deadline, to_all=to_all)
            if before and not self.bases.versions:
                self.pool.shrink()
        except BaseException:
            offer.snapshot.release()
            raise

    def describe(
        self,
        weights: object,
        precision: Precision | None = None,
        renaming: Renaming | None = None,
    ) -> tuple[State, Layout]:
        """Return the state and the layout of weights; reuse the last layout if nothing changed.

        Raises:
            StateError: The weights cannot be published at all, in this precision, under these names
                or in chunks of this size.
        """
        state = state_of(weights, self._form)
        self._form = state.form
        if precision is not None or renaming is not None:
            state = State(self._form_in(precision, renaming, state, weights), state.leaves)
        if self._layout is None or self._layout is not state.form.known:
            layout = state.layout(self._layout)
            _check_chunks(layout.nbytes, self._chunk_bytes)
            self._layout = layout
        return state, self._layout

    def _form_in(
        self,
        precision: Precision | None,
        renaming: Renaming | None,
        state: State,
        weights: object,
    ) -> Form:
        known = self._converted
        if known is not None and known[0] is state.form and known[1:3] == (precision, renaming):
            return known[3]
        form = state.form if renaming is None else renaming.form_of(state.form)
        if precision is not None:
            form = precision.form_of(State(form, state.leaves), weights)
        self._converted = state.form, precision, renaming, form
        return form

    def reserve(
        self, weights: object, dtype: Dtype = None, rename: Rename = None
    ) -> tuple[Shared, int] | None:
        """Reserve memory for weights like these; return its shared segment, and the version's size.

        Return None if workers cannot read the memory, or if it was already reserved.
        """
        state, layout = self.describe(weights, precision_of(dtype), renaming_of(rename))
        shared = self.pool.reserve(state, layout)
        return None if shared is None else (shared, layout.nbytes)

    def check_overflow(self, offer: VersionOffer) -> None:
        """Count the values that did not fit the dtype, for `offer.detail`; log each tensor once.

        Call this once the offer is copied completely. Afterwards the offer no longer refers to the
        user's tensors. If the values cannot be counted, the offer is released.
        """
        # Drop the function, which refers to the user's tensors.
        count_lost, offer.count_lost = offer.count_lost, None
        try:
            found: LostValues = {} if count_lost is None else count_lost()
        except BaseException:
            offer.snapshot.release()
            raise
        if not found:
            return
        offer.detail = self._overflows.note(self.name, found)

    def snapshot(
        self,
        weights: object,
        *,
        replaces_latest: bool,
        precision: Precision | None = None,
        renaming: Renaming | None = None,
        hashed: Callable[[], bool] = lambda: False,
        make_room: MakeRoom = no_room,
        deadline: Deadline = NEVER,
        encoding: Encoding = "raw",
        candidates: Callable[[], Collection[PatchCandidate]] = tuple,
    ) -> tuple[VersionOffer, "Arriving | None"]:
        """Copy weights into memory to be published, or read them from disk.

        Args:
            weights: The weights, a `Streamed` source, or a `Saved` version.
            replaces_latest: Whether the version becomes the latest one for all workers at once.
            precision: The dtypes to convert to while copying.
            renaming: The tensors' names in the version.
            hashed: Returns whether to hash while copying, as sending and digests need hashes.
            make_room: A function that frees memory; called when all memory is in use.
            deadline: The time by which the copy must be complete.
            encoding, candidates: For a version in parts: see `_patch_terms`.

        Returns:
            The offer; and the copy in progress, if the weights are on a device, else None.

        Raises:
            StateError: The weights cannot be published.
            StateFolderError: The file is damaged.
            ValueError: `precision` or `renaming` is given for a `Saved` version.
            WeightBusError: All memory remained in use.
            DeadlineError: The copy was not complete in time.
        """
        saved, state, chunk_bytes = None, None, self._chunk_bytes
        if isinstance(weights, Saved):
            saved, (layout, chunk_bytes) = weights, _form_of(weights, precision, renaming)
        else:
            state, layout = self.describe(weights, precision, renaming)
        if state is not None and isinstance(weights, PartedSource):
            terms = self._patch_terms(layout, encoding, candidates)
            return weights.offer(self.name, state, layout, chunk_bytes, deadline, terms), None
        # A disk may be slow, and a file damaged: keep the latest version until the new one is read.
        over = replaces_latest and saved is None
        snapshot = self.pool.take(layout.nbytes, make_room, replaces_latest=over, deadline=deadline)
        about = self.name, layout, chunk_bytes, snapshot, snapshot.shared
        crcs, count_lost = list[int](), None
        try:
            nbytes = chunk_bytes if saved is None and hashed() else 0
            if saved is not None:
                saved.copy_to(snapshot.data)
            elif state is not None and isinstance(weights, Streamed):
                crcs, count_lost = _stream(weights, state, layout, snapshot.data, nbytes, deadline)
            elif state is not None:
                late = self.pool.second and not self._stored and self.pool.second_suffices
                found = snapshot.write(state, layout, deadline.check, nbytes, late=late)
                count_lost = partial(snapshot.count_lost, state) if precision is not None else None
                if not isinstance(found, np.ndarray):
                    return VersionOffer.of(*about, count_lost=count_lost), found
                crcs = found.tolist()
            deadline.check()
            offer = VersionOffer.of(*about, crcs, count_lost)
        except BaseException:
            snapshot.release()
            raise
        if saved is not None:
            offer.chunks.fill(saved.stored.digest)
            offer.names, offer.metadata = frozenset(saved.stored.names), saved.stored.metadata
        return offer, None

    def _patch_terms(
        self,
        layout: Layout,
        encoding: Encoding,
        candidates: Callable[[], Collection[PatchCandidate]],
    ) -> PatchTerms:
        """Return the terms for patches to a version in parts.

        Args:
            layout: The layout of the version.
            encoding: How the version is sent to workers that accept patches.
            candidates: Returns these workers.
        """
        if self.bases.versions:  # not needed: the ranks keep the bases of patches in parts
            self.bases.forget()
            self.pool.shrink()
        whole = encoding == "raw" or _is_small(layout, self._chunk_bytes)
        return PatchTerms(() if whole else candidates(), encoding, self.bases)


def restore(
    folder: StateFolder, epoch: int, model_of: Callable[[str], PublishedModel]
) -> list[VersionOffer]:
    """Return an offer of each model's latest version on disk; record the offers for this epoch.

    Of versions that were published as one, all are offered, or none.
    """
    offers: dict[StoredVersion, VersionOffer] = {}
    for model in folder.models():
        stored = folder.versions(model)[0]
        try:
            record, saved = model_of(model), folder.open(stored)
            offers[stored], _ = record.snapshot(saved, replaces_latest=True)
            log.info("%s %s is offered again in epoch %d", model, stored.key, epoch)
        except StateFolderError as error:
            log.warning("version %s of %r is not offered: %s", stored.key, model, error)
    for stored, offer in [*offers.items()]:
        latest = {m: folder.versions(m)[:1] for m in stored.companions}
        as_one = {m: each[0] for m, each in latest.items() if each and each[0].companions}
        if all(each in offers for each in as_one.values()):
            offer.join(dict.fromkeys(as_one, 1))
            continue
        log.warning("version %s of %r lacks a companion: not offered", stored.key, stored.model)
        del offers[stored]
        offer.snapshot.release()
    folder.begin(epoch, offers)
    return list(offers.values())


def _stream(
    weights: Streamed,
    state: State,
    layout: Layout,
    data: Bytes,
    chunk_bytes: int,
    deadline: Deadline,
) -> tuple[list[int], Callable[[], LostValues] | None]:
    """Make a source write its weights; return chunks' CRCs (if any bytes each), and lost values."""
    lost = weights.write(state, layout, data, deadline.left)
    crcs: list[int] = []
    for begin in range(0, layout.nbytes, chunk_bytes) if chunk_bytes else ():
        crcs.append(crc32c(data[begin : begin + chunk_bytes]))
        deadline.check()
    return crcs, lost.copy if lost else None


def _form_of(
    saved: Saved, precision: Precision | None, renaming: Renaming | None
) -> tuple[Layout, int]:
    """Return the layout and chunk size of a saved version, which cannot be changed."""
    if precision is not None or renaming is not None:
        raise ValueError(ROLLBACK)
    _check_chunks(saved.layout.nbytes, saved.stored.chunk_bytes)
    return saved.layout, saved.stored.chunk_bytes


def _check_chunks(nbytes: int, chunk_bytes: int) -> None:
    if nbytes > CHUNKS_MAX * chunk_bytes:  # P2
        raise StateError(
            f"{nbytes} bytes in chunks of {chunk_bytes} are more than {CHUNKS_MAX} chunks; give "
            f"the Publisher Settings(chunk_bytes=...) of at least {-(-nbytes // CHUNKS_MAX)}"
        )


def after(
    arriving: "Arriving",
    offer: VersionOffer,
    hashed: Callable[[], bool],
    submit: Callable[[], None],
    future: Promise | Reply,
    deadline: Deadline,
    held: threading.Lock,
) -> None:
    """Continue a publish in a separate thread, once its copy from a device is complete.

    A device may be busy for long, and a copy that has begun cannot be stopped. If the deadline
    passes first, the publish fails, and the memory is not reused until the copy ends.

    Args:
        arriving: The copy in progress.
        offer: The offer that the copy belongs to.
        hashed: Returns whether to hash the offer afterwards.
        submit: Publishes the offer.
        future: Gets the exception if the publish fails.
        deadline: The time by which the copy must be complete.
        held: The model's lock, already acquired; it is released at the end.
    """

    def wait() -> None:
        try:
            arriving.wait(deadline.check)
            for index in offer.chunks.unhashed() if hashed() else ():
                hash_chunk(offer, index)
                deadline.check()
            submit()
        except BaseException as error:
            with contextlib.suppress(Exception):  # the future is cancelled
                future.set_exception(error)
            with contextlib.suppress(Exception):  # the device has failed
                arriving.wait()
            offer.snapshot.release()
        finally:
            held.release()

    # A daemon thread: a device that hangs must not block the end of the process.
    thread = threading.Thread(target=wait, name="weightbus-arrival", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started
        wait()
