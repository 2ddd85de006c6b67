"""What a publisher keeps of each model: memory, form and layout, and what patches build on."""

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..bus.chunks import Chunks
from ..bus.deadline import Deadline
from ..bus.errors import DeadlineError
from ..bus.limits import CHUNKS_MAX, WHOLE_BYTES_MAX
from ..bus.memory.snapshots import NEVER, MakeRoom, Pool, nobody
from ..bus.messages import DELTA, Running, Shared
from ..bus.net.publisher_loop import Promise, Reply
from ..bus.publisher.offers import hash_chunk
from ..bus.publisher.roster import PatchCandidate
from ..bus.publisher.version import Offer, OfferedPatch, Snapshot
from ..codecs.checksum import CHUNK_BYTES_DEFAULT, digest_of
from ..codecs.delta.encoding import encode
from ..codecs.delta.patch import Delta
from ..codecs.delta.worth import Way, chosen, estimate, may_pay, sample
from ..codecs.errors import PatchError, StateError
from ..codecs.layout import Layout
from ..codecs.numpy_tensors import Bytes
from ..codecs.overflow import Found
from ..codecs.precision import Precision, precision_of
from ..codecs.renaming import Rename, Renaming, renaming_of
from ..codecs.state import Form, State, state_of
from .overflow_log import OverflowLog
from .settings import BASES, Dtype, Encoding
from .state_folder import Saved, StateFolder, StateFolderError, StoredVersion

if TYPE_CHECKING:
    from ..codecs.device_copies import Arriving

log = logging.getLogger("weightbus.publisher")

ENCODE_PACE = 1e-8  # seconds a byte, until something was encoded here, or decoded
PACE_SHARE = 0.5  # of what was measured last in what is believed
PACE_EVERY = 32  # decisions, of which the first measures on a sample: what is believed may be wrong
BOTH = False, True  # patches without classes, and with them
OFFER_SHARE = 0.5  # of the time that is left, for patches: the version itself takes some, too


class Base(NamedTuple):
    """A version that patches may build on."""

    chunks: Chunks[object]  # the machine's by now: only their digest is read, which stays
    form: tuple[str, int]  # its layout, and the size of its chunks: its digest needs both
    data: Bytes
    snapshot: Snapshot  # which keeps them


class Bases:
    """The versions of one model that patches may build on. Whoever calls anything has its lock.

    Args:
        model: Its name.
        count: How many versions are kept.
        check: Whether each patch is decoded, and compared, before it is offered.

    Attributes:
        kept: They, the newest last.
    """

    def __init__(self, model: str, count: int = BASES, *, check: bool = True) -> None:
        self._model, self._count, self._check = model, count, check
        self.kept: deque[Base] = deque()
        # Seconds that a byte takes, as of late, of patches without classes and with them.
        self._encode, self._decode = [ENCODE_PACE] * 2, [ENCODE_PACE] * 2
        self._decisions = 0  # on whether a patch pays

    def offer(
        self,
        offer: Offer,
        encoding: Encoding,
        patch_candidates: Collection[PatchCandidate],
        deadline: Deadline = NEVER,
        *,
        to_all: bool = True,
    ) -> None:
        """Have a version offered by patches too, and keep it for patches to come. (D1, D2)

        Args:
            offer: What was copied a moment ago, and nobody has been told of.
            encoding: Whether that is wanted.
            takers: Who takes patches.
            deadline: When it must be there, with patches or without: these may take a part of that.
            to_all: It is for all workers: where it is not patched, nothing is kept for anybody.
        """
        if encoding == "raw" or _is_small(offer) or not patch_candidates:
            if to_all:
                self.forget()
            return
        form, snapshot = (offer.layout.id, offer.chunks.plan.chunk_bytes), offer.snapshot
        data = snapshot.keep()
        if data is None:
            return
        try:
            while to_all and self.kept and self.kept[0].form != form:
                self._let_go()
            new = Base(offer.chunks, form, data, snapshot)
            self._patch(offer, new, encoding, patch_candidates, _part_of(deadline))
            offer.keep = True
            self.kept.append(new)
        finally:  # an interrupt comes at any time
            if not any(base.snapshot is snapshot for base in self.kept):
                snapshot.let_go()
        while len(self.kept) > self._count:
            self._let_go()

    def _patch(
        self,
        offer: Offer,
        new: Base,
        encoding: Encoding,
        patch_candidates: Collection[PatchCandidate],
        deadline: Deadline,
    ) -> None:
        """Make the patches: first that on what most of those run who take them."""
        data = new.data
        some = ((base.chunks.digest, base.data) for base in self.kept if base.form == new.form)
        bases = {digest: old for digest, old in some if digest}  # else it is on its way
        runs = Counter(taker.running for taker in patch_candidates if taker.running is not None)
        found = dict[tuple[int, int], tuple[Running, Bytes]]()
        for running, _ in runs.most_common():
            if running.digest in bases:  # a patch is named, and sealed, by number: one on each (E3)
                named = running.epoch, running.version
                found.setdefault(named, (running, bases[running.digest]))
        for running, old in itertools.islice(found.values(), self._count):
            on = [taker for taker in patch_candidates if taker.running == running]
            delta = encoding == "delta"
            way = Way(classes=True) if delta else self.chosen(offer.layout, old, data, on)
            made = None if way is None else self._made(way, running, old, offer, data, deadline)
            offer.patches += () if made is None else (made,)

    def forget(self) -> None:
        """Keep nothing for patches to build on."""
        while self.kept:
            self._let_go()

    def _let_go(self) -> None:
        self.kept.popleft().snapshot.let_go()

    def _made(
        self,
        way: Way,
        running: Running,
        old: Bytes,
        offer: Offer,
        new: Bytes,
        deadline: Deadline,
    ) -> OfferedPatch | None:
        """Return the patch from one version to another, if it is smaller than that.

        Whatever goes wrong, the version can still be sent as it is.
        """
        for index in offer.chunks.unhashed():
            hash_chunk(offer, index)
        layout, begun = offer.layout, time.perf_counter()
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
            taken = (time.perf_counter() - begun) / work
            self._encode[way.classes] += PACE_SHARE * (taken - self._encode[way.classes])
        if len(data) >= layout.nbytes:
            return None
        return OfferedPatch(DELTA, running, data, way.classes, work)

    def chosen(
        self, layout: Layout, old: Bytes, new: Bytes, patch_candidates: Collection[PatchCandidate]
    ) -> Way | None:
        """Return what patch is to be made; None: the version is there sooner without.

        There is one patch on a base, for all that run it. So it is the one that is best for the
        slowest of them that gains by any: it is the last that the publish waits for. Of whom no
        rate is known, it is fast enough; who has not decoded any yet does so as this does. So do
        all where it was measured anew: what a worker took once for a kind of patch that it was not
        sent again would be believed for ever.
        """
        slow = sorted((t for t in patch_candidates if not math.isinf(t.rate)), key=lambda t: t.rate)
        if not slow:
            return None
        anew = self._decisions % PACE_EVERY == 0
        if anew:
            self._measure(layout, old, new)
        self._decisions += 1
        links = [
            (
                taker.rate,
                self._encode,
                self._decode if anew else [taker.decode.get(c, self._decode[c]) for c in BOTH],
            )
            for taker in slow
        ]
        links = [link for link in links if may_pay(*link)]
        if not links:
            return None
        would = estimate(layout, old, new)
        ways = (chosen(layout.nbytes, would, *link) for link in links)
        return next((way for way in ways if way is not None), None)

    def _measure(self, layout: Layout, old: Bytes, new: Bytes) -> None:
        """Take the time that a sample takes; else nobody would know if none pays."""
        some, where = sample(layout)
        before, after = old[where], new[where]
        work = estimate(some, before, after).work * some.nbytes
        first, last = (digest_of(some.id, d, CHUNK_BYTES_DEFAULT) for d in (before, after))
        for classes in BOTH:
            begun = time.perf_counter()
            try:
                digests = first, last
                made = encode(
                    some, before, after, digests=digests, classes=classes, check=self._check
                )
                encoded = time.perf_counter()
                Delta(some, made).apply(before)
            except (PatchError, MemoryError):
                return
            self._encode[classes] = (encoded - begun) / work
            self._decode[classes] = (time.perf_counter() - encoded) / work


def _is_small(offer: Offer) -> bool:
    """Return whether it goes along with its announcement, and nothing could be faster."""
    return offer.chunks.plan.count <= 1 and offer.layout.nbytes <= WHOLE_BYTES_MAX


def _part_of(deadline: Deadline) -> Deadline:
    """Return when patches must be made: all of the version must still be sent in time."""
    text = (
        f"it was not made in {OFFER_SHARE:.0%} of what was left of the timeout, so workers take "
        "all of the version: give a longer timeout, or publish it raw"
    )
    return Deadline(time.monotonic() + OFFER_SHARE * deadline.left(), text)


class PublishedModel:
    """One model of a publisher. Whoever calls anything here has the `lock`.

    Args:
        name: Its name.
        chunk_bytes: Bytes of a chunk.
        share: Whether workers on this host may read it.
        bases: How many versions are kept for patches to build on.
        check: Whether each patch is decoded, and compared, before it is offered.
        second: Whether weights on a device are copied by way of a second copy there.
        kept: Whether each version is written to disk.
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
        kept: bool = False,
    ) -> None:
        self.name, self.lock, self._kept = name, threading.Lock(), kept
        self.bases = Bases(name, bases, check=check)
        self.pool = Pool(name, share=share, second=second)
        self._chunk_bytes = chunk_bytes
        self._form: Form | None = None
        self._layout: Layout | None = None
        self._overflows = OverflowLog(log)
        # What became what, last: a form, in a precision and under other names.
        self._converted: tuple[Form, Precision | None, Renaming | None, Form] | None = None

    def wait_for_lock(self, deadline: Deadline) -> None:
        """Take the lock once nobody else copies this model.

        Raises:
            DeadlineError: Somebody copies it for too long.
        """
        while not self.lock.acquire(timeout=deadline.left()):
            deadline.check()

    def offer(
        self,
        offer: Offer,
        encoding: Encoding,
        patch_candidates: Callable[[], Collection[PatchCandidate]],
        deadline: Deadline,
        *,
        to_all: bool,
    ) -> None:
        """Have a version offered by patches too: see `Bases`. What ends this ends the version."""
        try:
            some = () if encoding == "raw" or _is_small(offer) else patch_candidates()
            before = len(self.bases.kept)
            self.bases.offer(offer, encoding, some, deadline, to_all=to_all)
            if before and not self.bases.kept:
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
        """Return the state of some weights and its layout, the ones before if nothing changed.

        Raises:
            StateError: They cannot travel, or not in this precision or under these names, or not in
                chunks of this size.
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
        """Take memory for weights like these; return where workers find it, and its size.

        None: they do not, or there was memory before.
        """
        state, layout = self.describe(weights, precision_of(dtype), renaming_of(rename))
        shared = self.pool.reserve(state, layout)
        return None if shared is None else (shared, layout.nbytes)

    def look(self, offer: Offer) -> None:
        """Say in an offer, once it is all there, which values its dtype cannot hold.

        The log has each tensor once.
        """
        lost, offer.lost = offer.lost, None  # which refers to the user's tensors
        try:
            found: Found = {} if lost is None else lost()
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
        make_room: MakeRoom = nobody,
        deadline: Deadline = NEVER,
    ) -> tuple[Offer, "Arriving | None"]:
        """Copy weights into memory to be published, or read them from disk.

        Args:
            weights: What to copy.
            replaces_latest: The version will be the latest for all at once.
            precision: What to convert while it is copied.
            renaming: What the tensors are called in the version.
            hashed: Whether to hash it while it is copied: it will be sent, or its digest asked for.
            make_room: Asks for memory where all of it is in use.
            deadline: When it must be there.

        Returns:
            What to offer. And, of weights on a device, what must arrive before: then it is to be
            hashed, if need be, or, if it came too late, released.

        Raises:
            StateError: They cannot travel.
            StateFolderError: The file is damaged.
            ValueError: What is on disk is not converted.
            WeightBusError: All memory stayed in use.
            DeadlineError: There was no time.
        """
        if isinstance(weights, Saved):
            if precision is not None or renaming is not None:
                raise ValueError(
                    "a rollback publishes the bytes that were: leave out dtype= and rename="
                )
            saved, state = weights, None
            layout, chunk_bytes = saved.layout, saved.stored.chunk_bytes
            _check_chunks(layout.nbytes, chunk_bytes)
        else:
            saved, chunk_bytes = None, self._chunk_bytes
            state, layout = self.describe(weights, precision, renaming)
        # A disk may be slow, and its file damaged: the latest stays until another is there.
        over = replaces_latest and saved is None
        snapshot = self.pool.take(layout.nbytes, make_room, replaces_latest=over, deadline=deadline)
        about = self.name, layout, chunk_bytes, snapshot, snapshot.shared
        crcs, lost = list[int](), None
        try:
            if saved is not None:
                saved.copy_to(snapshot.data)
            elif state is not None:
                nbytes = chunk_bytes if hashed() else 0
                late = self.pool.second and not self._kept and self.pool.late
                found = snapshot.write(state, layout, deadline.check, nbytes, late=late)
                lost = partial(snapshot.lost, state) if precision is not None else None
                if not isinstance(found, np.ndarray):
                    return Offer.of(*about, lost=lost), found
                crcs = found.tolist()
            deadline.check()
            offer = Offer.of(*about, crcs, lost)
        except BaseException:
            snapshot.release()
            raise
        if saved is not None:
            offer.chunks.fill(saved.stored.digest)
            offer.names, offer.metadata = frozenset(saved.stored.names), saved.stored.metadata
        return offer, None


def restore(
    folder: StateFolder, epoch: int, model_of: Callable[[str], PublishedModel]
) -> list[Offer]:
    """Read the latest version of each model back, and record what is offered in this epoch."""
    found: dict[StoredVersion, Offer] = {}
    for model in folder.models():
        stored = folder.versions(model)[0]
        try:
            kept, saved = model_of(model), folder.open(stored)
            found[stored], _ = kept.snapshot(saved, replaces_latest=True)
            log.info("%s %s is offered again in epoch %d", model, stored.key, epoch)
        except StateFolderError as error:
            log.warning("version %s of %r is not offered: %s", stored.key, model, error)
    folder.begin(epoch, found)
    return list(found.values())


def _check_chunks(nbytes: int, chunk_bytes: int) -> None:
    if nbytes > CHUNKS_MAX * chunk_bytes:  # P2
        raise StateError(
            f"{nbytes} bytes in chunks of {chunk_bytes} are more than {CHUNKS_MAX} chunks; give "
            f"the Publisher Settings(chunk_bytes=) of at least {-(-nbytes // CHUNKS_MAX)}"
        )


def after(
    arriving: "Arriving",
    offer: Offer,
    hashed: Callable[[], bool],
    submit: Callable[[], None],
    future: Promise | Reply,
    deadline: Deadline,
    held: threading.Lock,
) -> None:
    """Go on with a publish once its weights are there, in a thread of its own.

    A device may be busy for any time, and nothing stops a copy that it has begun: if the deadline
    comes first, the publish has failed, and its memory serves nothing else until the copy is over.

    Args:
        arriving: What is waited for.
        offer: Of what.
        hashed: Whether to hash it then.
        submit: Publishes it.
        future: Fails if that is not to be.
        deadline: When it must be there.
        held: The lock of the model, which is taken, and let go in the end.
    """

    def wait() -> None:
        try:
            arriving.wait(deadline.check)
            for index in offer.chunks.unhashed() if hashed() else ():
                hash_chunk(offer, index)
                deadline.check()
            submit()
        except BaseException as error:
            with contextlib.suppress(Exception):  # it is cancelled
                future.set_exception(error)
            with contextlib.suppress(Exception):  # of a failed device, nothing arrives
                arriving.wait()
            offer.snapshot.release()
        finally:
            held.release()

    # Not waited for at the end of the process: a device that hangs would hang that, too.
    thread = threading.Thread(target=wait, name="weightbus-arrival", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are to be had
        wait()
