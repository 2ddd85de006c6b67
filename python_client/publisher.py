"""`Publisher` copies a model's weights, sends them to workers, and reports each worker's result."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any, NoReturn, Unpack

from ..bus.deadline import ANSWER_SECONDS, Deadline, result_of
from ..bus.errors import UnknownWorkerError, WorkersMissingError
from ..bus.event_log import RateLimitedWarning
from ..bus.limits import WORKERS_MAX
from ..bus.memory.segment import probe
from ..bus.net.callbacks import WorkerEvent
from ..bus.net.publisher_loop import Promise, Reply
from ..bus.publisher.effects import Effect
from ..bus.publisher.machine import PublisherMachine
from ..bus.publisher.roster import PatchCandidate
from ..bus.publisher.status import WorkerStatus
from ..bus.publisher.version import CommitMode, VersionOffer
from ..bus.receipt import Receipt, Receipts
from ..bus.trust.keys import PublisherKeys
from ..codecs.layout import Layout, Signature
from ..codecs.precision import precision_of
from ..codecs.renaming import renaming_of
from ..codecs.state import State
from . import checks
from .applying.awaiting import in_thread
from .checks import check_name
from .closing import InOneProcess, stop_with
from .files.state_folder import (
    StateFolder,
    StateFolderError,
    StoredVersion,
    age_from_now,
    new_epoch,
)
from .keys import (
    check_exposure,
    publisher_keys,
    retire,
    watch_keys,
)
from .observing.access import Http
from .observing.http_endpoints import HttpEndpoints
from .observing.traces import settle
from .publishing.as_one import AsOne, CopiedModel, by_model, drop_all, receipts_of
from .publishing.events import call_for_events
from .publishing.models import PublishedModel, after, restore
from .publishing.opening import open_loop
from .publishing.options import (
    TIMEOUT,
    PublishOptions,
    Request,
    Require,
    check_keywords,
    keywords_of,
    request_of,
    shows_keywords_of,
)
from .publishing.parts import Parts
from .publishing.state_writer import StateWriter
from .settings import Settings, of_bytes, settings_of

log = logging.getLogger("weightbus.publisher")

CLOSE_SECONDS = 10.0  # seconds that `close` waits until the last versions are on disk

_LATE = (
    "{model}: the weights were not copied within {timeout} s, so nothing was published; give it a "
    "longer timeout, or prepare() the model beforehand: memory for its first version takes longest"
)


class Publisher(InOneProcess):
    """Publishes versions of models to every worker that connects.

    Args:
        address: The address of the control socket, the only one that workers need. Port 0 selects a
            free port, which `publisher.address` then contains. If you bind 0.0.0.0,
            `publisher.address` is 0.0.0.0 too, to which other hosts cannot connect: give workers
            this host's name.
        keys: A folder made by `weightbus keygen`, or its contents: only workers with a key in it
            can join. None: use the folder in WEIGHTBUS_KEYS; if that is not set, use no keys.
        insecure: Without keys, allow an address that other hosts can reach.
        state: A folder for the epoch and the latest version of each model. A publisher that starts
            later with this folder offers these versions again.
        history: How many older versions of each model the folder keeps, for `rollback`.
        expect: The least number of workers that `require="all"` waits for, unless a `publish` sets
            another number.
        dashboard, metrics: Where to serve a live page, and metrics for Prometheus
            (`docs/guides/operating.md`): `HOST:PORT`, or an `Http` that also sets who has access.
        settings: Rarely needed options: times, sockets, memory, patches. The options for a publish
            apply to each publish that gets no `settings`.

    Raises:
        AddressError: An address is invalid or in use, or other hosts can reach it without keys.
        KeysError: The keys cannot be read.
        OSError: Too few file descriptors are left for sockets; the text names `ulimit -n`.
        StateFolderError: Another publisher uses the folder, or the folder is not writable.

    Any thread may call any method. If a Publisher is dropped without `close()`, the garbage
    collector closes it, with a `ResourceWarning`. In a forked process, make a new Publisher.
    """

    __module__ = "weightbus"

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        keys: PublisherKeys | str | Path | None = None,
        insecure: bool = False,
        state: str | Path | None = None,
        history: int = 0,
        expect: int = 0,
        dashboard: str | Http | None = None,
        metrics: str | Http | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Bind the sockets and start. `help(weightbus.Publisher)` describes the parameters."""
        chosen = self._settings = settings_of("Publisher", settings)
        keys = publisher_keys(keys)
        check_exposure(keys, insecure, address, chosen.data)
        expected = checks.whole(expect, "expect", 0, WORKERS_MAX)
        usual: Any = {keyword.name: keyword.default for keyword in keywords_of(self.publish)}
        usual |= {"defaults": chosen, "expected": expected, "lost_after": chosen.lost_after}
        self._request_of: Callable[..., Request] = partial(request_of, **usual)
        # the last request and the keywords of `publish` that it was made from
        self._last_request: tuple[Request, tuple[object, ...]] = self._request_of(), (object(),)
        age = None if chosen.epoch is not None else age_from_now()
        self._models: dict[str, PublishedModel] = {}
        self._exhausted = RateLimitedWarning(log, "workers may be missing here: %s")
        # a small shared segment; freed with its last reference
        self._probe = probe() if chosen.shared_memory else None
        shared = self._probe.shared if self._probe is not None else None
        with contextlib.ExitStack() as undo:
            self._folder = None if state is None else StateFolder(Path(state), history)
            if self._folder is not None:
                undo.enter_context(self._folder)
            epoch = new_epoch(chosen.epoch, self._folder)
            restored = restore(self._folder, epoch, self._model) if self._folder else []
            writer = self._state_writer = _state_writer_of(self._folder, undo)
            stored = writer, restored
            self._loop = open_loop(address, chosen, keys, epoch, *stored, age=age, shared=shared)
            self.address, self.data_address = self._loop.address, self._loop.data_address
            stop_with(self, self._loop)
            undo.pop_all()
        self._loop.start()
        if keys is not None:
            # no reference to `self`, which could then not be garbage-collected
            revoked = partial(retire, self._models)
            watch_keys(keys, chosen.timing, self._loop, revoked)
        self.parts = Parts(
            *(self._loop, keys, chosen.timing, chosen.chunk_bytes, self._describe),
            keeps=self._folder is not None,
            check=chosen.check_patches,
        )
        self.shown = HttpEndpoints(self, self._loop)
        self.shown.serve(dashboard, metrics, self.close)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Publisher stays in its process, with its sockets and threads: hand over its address "
            f"({self.address!r}) for a Subscriber there, or make the Publisher there"
        )

    def __repr__(self) -> str:
        return f"<Publisher at {self.address}, epoch {self.epoch}>"

    @property
    def epoch(self) -> int:
        """The epoch of this publisher; a publisher that starts later has a higher epoch."""
        return self._loop.known.epoch

    @property
    def models(self) -> tuple[str, ...]:
        """The ids of the models that were published or prepared, or read from the state folder."""
        return tuple(self._models)

    def prepare(self, model: str, weights: object, *, settings: Settings | None = None) -> None:
        """Do the one-time work of a model's first publish now, and publish nothing.

        This computes the layout and allocates memory for a copy; workers on this host map that
        memory in advance. Then the first publish is about as fast as later ones.

        Args:
            model: The model's id.
            weights: The weights to publish, or other weights with the same names, shapes and
                dtypes.
            settings: The settings that `publish` will get.

        Raises:
            StateError: The weights cannot be published.
            RuntimeError: As in `publish`.
        """
        self._check_usable()
        chosen = self._settings if settings is None else settings_of("publish", settings)
        record = self._model(model)
        _check_not_interrupted(record)
        with record.lock:
            reserved = record.reserve(weights, chosen.dtype, chosen.rename)
            if reserved is not None:
                self._loop.decide(lambda machine, _now: machine.prepare(model, *reserved))

    def publish(
        self,
        model: str,
        weights: object,
        *,
        workers: Iterable[str] | None = None,
        require: Require = "all",
        expect: int | None = None,
        commit: CommitMode = "auto",
        timeout: float = TIMEOUT,
        metadata: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> Receipt:
        """Publish a new version of a model and wait until the workers have it.

        Args:
            model: The model's id, 1 to 128 characters of A-Z a-z 0-9 . _ -
            weights: An `nn.Module`, a `TensorDict`, or a mapping of names to torch tensors, numpy
                arrays, or objects that numpy can view (arrays of JAX, TensorFlow, Keras and Flax).
                The weights are copied before this call waits for workers.
            workers: Names of the workers that get the version; None: all workers that want the
                model. A worker that joins later gets the latest version that was published to all.
            require: How many of these workers must succeed: "all"; "alive" (all except workers that
                are lost meanwhile, which the receipt names); a number (0: none); or the names of
                workers, which need not have joined yet. Other workers get the version too, but the
                call does not wait for them.
            expect: The least number of workers that "all" means: the call waits until missing
                workers join and succeed. None: the Publisher's `expect`.
            commit: "auto": each worker applies the version as soon as it can. "together": no worker
                applies it before `require` workers have staged it; if too few stage it in time, no
                worker applies it at all.
            timeout: Seconds for the whole call.
            metadata: Text by name that travels with the version, such as `{"step": "12000"}`: at
                most 32 entries and 4 KiB. The metadata is in each worker's `Update`, in the
                receipt, in files that workers write, and in operators' views.
            settings: Rarely needed options of a publish: `wait`, `verify`, `grace`, `dtype`,
                `encoding`, `rename`. None: the Publisher's settings.

        Returns:
            A receipt, which says what each worker did and when. If no worker is connected and none
            is expected, the receipt's `workers` is empty, and workers that join later get the
            version. The log then warns once and gives the reason: which workers are lost, have left
            or are refused, or which models the workers want.

        Raises:
            PublishError: Fewer workers succeeded than required. The error has the receipt, and
                names the missing workers.
            UnknownWorkerError: A worker in `workers` has never joined; nothing was published.
            StateError: The weights cannot be published, or not under these names; nothing was
                published.
            DeadlineError: The weights were not copied in time, or another thread's `publish_many`
                with this model was not decided in time; nothing was published. (A copy of one
                tensor is never interrupted.)
            ClosedError: The publisher is closed.
            RuntimeError: A signal handler (or a `__del__`) made this call while the thread that it
                interrupted was copying this model for a publish.
        """
        started = time.monotonic()
        given = workers, require, expect, commit, timeout, metadata, settings
        request, before = self._last_request
        if not all(map(is_, given, before)):
            request = self._check(given)
        future = self._loop.promise() if self.shown.counting else Reply()
        self._begin(model, weights, request, started, future)
        if isinstance(future, Promise):
            self.shown.count(future, started)
        left = started + request.terms.timeout - time.monotonic()
        return result_of(future, max(0.0, left) + ANSWER_SECONDS)

    def publish_many(
        self,
        models: Mapping[str, object],
        *,
        workers: Iterable[str] | None = None,
        require: Require = "all",
        expect: int | None = None,
        timeout: float = TIMEOUT,
        metadata: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> Receipts:
        """Publish new versions of several models as one, and wait until the workers have them.

        No worker applies any of the versions before `require` workers have staged all versions that
        they receive; if too few do so in time, no worker applies any. A worker that receives
        several of the models applies their versions at once: no reader there sees the new version
        of one beside the old version of another. A worker waits for no model that it does not have.

        Until these versions are committed or aborted, another thread's publish of one of the models
        waits, within its own `timeout`.

        Args:
            models: The weights of each model, by its id: as in `publish`.
            workers, timeout, metadata, settings: As in `publish`, for all models.
            require, expect: As in `publish`. They count workers that receive at least one of the
                models. A worker has succeeded once it has with all models that it receives.

        Returns:
            The receipt of each model, by its id; and each worker's state for all its models.

        Raises:
            PublishError: Fewer workers succeeded than required. The error has the `receipts`.
            ValueError: `models` does not map ids to weights, or is empty; nothing was published.
            UnknownWorkerError, StateError, DeadlineError, ClosedError, RuntimeError: As in
                `publish`; no version was published.
        """
        started, named = time.monotonic(), by_model(models)
        request = self._request_of(
            workers=workers,
            require=require,
            expect=expect,
            commit="together",
            timeout=timeout,
            metadata=metadata,
            settings=settings,
        )
        self._check_usable()
        if request.terms.workers:
            self._check_known(request.terms.workers)
        until = Deadline(started + timeout, _LATE, model=" and ".join(named), timeout=timeout)
        futures, copied = {model: self._loop.promise() for model in named}, list[CopiedModel]()
        as_one = AsOne(futures)
        try:
            published = self._publish_each(
                sorted(named), named, request, started, until, copied, futures, as_one
            )
        except BaseException:
            drop_all(copied)
            as_one.end()
            raise
        try:
            result_of(published, until.left() + ANSWER_SECONDS)
            for future in futures.values() if self.shown.counting else ():
                self.shown.count(future, started)
            return receipts_of(futures, lambda: until.left() + ANSWER_SECONDS)
        finally:
            as_one.end()

    def _publish_each(
        self,
        remaining: Sequence[str],
        models: Mapping[str, object],
        request: Request,
        started: float,
        until: Deadline,
        copied: list[CopiedModel],
        futures: Mapping[str, Promise],
        as_one: AsOne,
    ) -> "Future[None]":
        """Copy the weights of the `remaining` models, one by one, then publish all copied models.

        Each model stays locked until then. All threads lock models in the order of their ids.
        """
        if not remaining:
            return self._publish_copied(request, started, until, copied, futures, as_one)
        record = self._model(remaining[0])
        if not record.lock.acquire(blocking=False):
            _check_not_interrupted(record)
            record.wait_for_lock(until)
        if record.as_one is not None:
            self._wait_for_decision(record, until)
        try:
            offer, arriving = record.snapshot(
                models[record.name],
                replaces_latest=False,
                precision=request.precision,
                renaming=request.renaming,
                hashed=lambda: True,  # workers report digests
                make_room=partial(self._loop.make_room, record.name),
                deadline=until,
            )
            copied.append(CopiedModel(record, offer, arriving))
            return self._publish_each(
                remaining[1:], models, request, started, until, copied, futures, as_one
            )
        finally:
            record.lock.release()

    def _publish_copied(
        self,
        request: Request,
        started: float,
        until: Deadline,
        copied: list[CopiedModel],
        futures: Mapping[str, Promise],
        as_one: AsOne,
    ) -> "Future[None]":
        # Publish copies of several models, whose locks are held.
        for each in copied:
            each.wait(until)
        for record, offer, _ in copied:
            if request.metadata is not None:
                offer.metadata = request.metadata
            self._offer_patches(request, record, offer, until)
        offers, answers = [c.offer for c in copied], [futures[c.record.name] for c in copied]
        for record, _, _ in copied:
            record.join(as_one)
        copied.clear()  # the publisher's thread owns their memory now
        return self._loop.submit_as_one(offers, request.terms, started, answers)

    def _wait_for_decision(self, record: PublishedModel, until: Deadline) -> None:
        """Release the model's lock until its versions in `publish_many` are committed or aborted.

        Raises:
            DeadlineError: They were not decided in time; the lock is released.
        """
        while (as_one := record.as_one) is not None:
            record.lock.release()
            as_one.wait(record.name, self._loop, until)
            record.wait_for_lock(until)
            if record.as_one is as_one:
                record.join(None)

    @shows_keywords_of(publish)
    def publish_async(
        self, model: str, weights: object, **options: Unpack[PublishOptions]
    ) -> "Future[Receipt]":
        """Publish, and return a future of the receipt as soon as the weights are copied.

        You may change the weights as soon as this call returns. Arguments and errors are those of
        `publish`; this call or the future raises the errors. A newer version replaces an older one
        that is still being sent: the older version's receipt has `skipped` for each worker that
        goes directly to the newer version, which counts as success. If the publish fails and you
        drop the future without reading its result, the log warns.
        """
        check_keywords("publish_async", options)
        started, future = time.monotonic(), self._loop.promise()
        self._begin(model, weights, self._request_of(**options), started, future)
        return self.shown.count(future, started) if self.shown.counting else future

    def _check(self, given: tuple[Any, ...]) -> Request:
        """Check the values of the keywords of `publish`; return them as a request, and cache it."""
        named = dict(zip(PublishOptions.__annotations__, given, strict=True))
        request = self._request_of(**named)
        # Mutable arguments are not cached: the caller may change them.
        fixed = isinstance(named["require"], str | int)
        if fixed and named["workers"] is None and named["metadata"] is None:
            self._last_request = request, given
        return request

    def _begin(
        self,
        model: str,
        weights: object,
        request: Request,
        started: float,
        future: Promise | Reply,
    ) -> None:
        """Copy the weights and submit them; `future` gets the receipt or the error."""
        if self._loop.leaving or self._is_forked_copy:
            self._check_usable()
        terms = request.terms
        if terms.workers:
            self._check_known(terms.workers)
        record = self._models.get(model) if isinstance(model, str) else None  # pyright: ignore
        if record is None:
            record = self._model(model)
        until = Deadline(started + terms.timeout, _LATE, model=model, timeout=terms.timeout)
        if not record.lock.acquire(blocking=False):
            _check_not_interrupted(record)
            record.wait_for_lock(until)
        if record.as_one is not None:
            self._wait_for_decision(record, until)
        lock_passed_on = False
        try:
            shared, sends = self._probe is not None, self._loop.known.sends
            sent = partial(sends, model, terms.workers, shared=shared)
            hashed = (lambda: True) if request.needs_digest else sent
            offer, arriving = record.snapshot(
                weights,
                replaces_latest=request.replaces_latest,
                precision=request.precision,
                renaming=request.renaming,
                hashed=hashed,
                make_room=partial(self._loop.make_room, model),
                deadline=until,
                encoding=request.encoding,
                candidates=partial(self._candidates, request, model, shared=False),
            )
            if request.metadata is not None:
                offer.metadata = request.metadata
            if arriving is None:
                self._submit(request, record, offer, started, until, future)
            else:
                submit = partial(self._submit, request, record, offer, started, until, future)
                lock_passed_on = True
                after(arriving, offer, hashed, submit, future, until, record.lock)
        finally:
            if not lock_passed_on:
                record.lock.release()

    def _submit(
        self,
        request: Request,
        record: PublishedModel,
        offer: VersionOffer,
        started: float,
        until: Deadline,
        future: Promise | Reply,
    ) -> None:
        """Submit copied weights to the publisher's thread, with patches if requested."""
        if offer.count_lost is not None:
            record.check_overflow(offer)
        if offer.key is None and (request.encoding != "raw" or record.bases.versions):
            self._offer_patches(request, record, offer, until)
        self._loop.submit(offer, request.terms, started, future)

    def _offer_patches(
        self, request: Request, record: PublishedModel, offer: VersionOffer, until: Deadline
    ) -> None:
        """Add patches to copied weights, if requested."""
        find = partial(self._candidates, request, record.name, shared=offer.shared is not None)
        record.offer(offer, request.encoding, find, until, to_all=not request.terms.workers)

    def _candidates(self, request: Request, model: str, *, shared: bool) -> list[PatchCandidate]:
        """Return the workers that may receive a patch."""
        candidates = self._loop.patch_candidates(model, request.terms.workers, shared=shared)
        return result_of(candidates, ANSWER_SECONDS)

    def wait_for_commit(
        self, publishing: "Future[Receipt]", timeout: float
    ) -> tuple[int, int] | None:
        """Wait until a `together` publish is committed or aborted; return the committed version.

        Before the commit, workers receive and verify the version, but change no weights. So a
        server that pauses requests while weights change need not pause before this call returns.

        Args:
            publishing: The future from `publish_async(..., commit="together")`.
            timeout: Seconds to wait. The publish has its own deadline, which this does not change.

        Returns:
            (epoch, version) of the publish, if enough workers have staged it. None if the publish
            was aborted, for which the future has the reason, or if it is not decided yet.

        Raises:
            TypeError: `publishing` is not a future of `publish_async`.
            ClosedError: The publisher is closed, or belongs to the parent of this forked process.
        """
        self._check_process()
        promise = _promise(publishing, "wait_for_commit")

        def decided(_machine: PublisherMachine, _now: float) -> bool:
            return promise.done() or promise.committed is not None

        decision = self._loop.watch(decided)
        try:
            decision.result(checks.seconds(timeout, "timeout"))
        except FutureTimeout:
            decision.cancel()
        return result_of(self._loop.committed(promise), ANSWER_SECONDS)

    def give_up(self, publishing: "Future[Receipt]", why: str) -> None:
        """End a `together` publish before its deadline; its future gets the result.

        If the publish is not committed yet, no worker applies it. If it is committed, workers may
        still apply it, and the future raises `PublishError`, whose receipt has the state of each
        worker. If the publish has ended already, this does nothing.

        Args:
            publishing: The future from `publish_async(..., commit="together")`.
            why: The reason, for the text of the error.

        Raises:
            TypeError: `publishing` is not a future of `publish_async`.
            ClosedError: The publisher is closed, or belongs to the parent of this forked process.
        """
        self._check_usable()
        promise = _promise(publishing, "give_up")

        def ended(machine: PublisherMachine, now: float) -> list[Effect]:
            publication = promise.publication
            return [] if publication is None else machine.end(publication, why, now)

        self._loop.decide(ended)

    def described(self, tensors: Mapping[str, Signature]) -> dict[str, Signature]:
        """Return the dtypes and shapes with which tensors would be published, by published name.

        Args:
            tensors: Dtype and shape of each tensor, by name. No two of them are tied.

        Returns:
            Dtype and shape by name, after `rename` and `dtype` of the publisher's settings.

        Raises:
            StateError: The publisher's settings name a tensor that is not in `tensors`.
            ClosedError: The publisher is closed, or belongs to the parent of this forked process.
        """
        self._check_usable()
        chosen = self._settings
        precision, renaming = precision_of(chosen.dtype), renaming_of(chosen.rename)
        names = {n: n for n in tensors} if renaming is None else renaming.of(tensors)
        return {
            names[name]: (dtype if precision is None else precision.of(names[name], dtype), shape)
            for name, (dtype, shape) in tensors.items()
        }

    @shows_keywords_of(publish)
    async def publish_awaitable(
        self, model: str, weights: object, **options: Unpack[PublishOptions]
    ) -> Receipt:
        """Publish from a coroutine. Arguments, result and errors are those of `publish`.

        If you cancel the coroutine, the version is still published; only the receipt is lost.

        The coroutine copies the weights before it first suspends, so other tasks may change them.
        The copy blocks the event loop for about a second per GB. If that is too long, use
        `await asyncio.to_thread(publisher.publish, ...)`, and do not change the weights before
        `publish` returns.
        """
        check_keywords("publish_awaitable", options)
        return await asyncio.wrap_future(self.publish_async(model, weights, **options))

    @shows_keywords_of(publish)
    def rollback(
        self, model: str, to: tuple[int, int], **options: Unpack[PublishOptions]
    ) -> Receipt:
        """Publish an older version again, under a new number, and wait for the workers.

        Args:
            model: The model's id.
            to: Epoch and version of an entry of `history`.
            workers, require, expect, commit, timeout, settings: As in `publish`, but the settings
                must have no `dtype` and no `rename`.
            metadata: New metadata; None: that of the older version.

        Returns:
            A receipt, as from `publish`. The version has a new number; its bytes and digest are
            those of the older version.

        Raises:
            StateFolderError: That version is not on disk, or its file is damaged.
            PublishError, UnknownWorkerError, ClosedError: As in `publish`.
        """
        check_keywords("rollback", options)
        folder = self._need_folder()
        if options.get("settings") is None:
            options["settings"] = of_bytes(self._settings)
        return self.publish(model, folder.open(folder.find(model, to)), **options)

    def history(self, model: str) -> list[StoredVersion]:
        """Return the versions of a `model` that are on disk, the newest first.

        A version appears shortly after its publish, once it is written. The list has the latest
        version and at most as many older ones as the Publisher's `history`.

        Raises:
            StateFolderError: The publisher has no state folder.
        """
        return self._need_folder().versions(check_name(model, "model"))

    def workers(self) -> dict[str, WorkerStatus]:
        """Return the status of every worker by name, lost workers included.

        If the publisher has too few descriptors and rejects new connections, the method logs a
        warning.
        """
        self._check_usable()
        if rejected := self._loop.known.turned_away:
            self._exhausted.warn(rejected, time.monotonic())
        return self._status_by_name()

    def _status_by_name(self) -> dict[str, WorkerStatus]:
        return {w.name: w for w in result_of(self._loop.status(), ANSWER_SECONDS)}

    def wait_for_workers(self, count: int, timeout: float, model: str | None = None) -> None:
        """Wait until `count` workers that want `model` are connected; None: that want any model.

        Raises:
            WorkersMissingError: Fewer workers joined within `timeout` seconds; the error names the
                workers that did.
        """
        self._await_workers(self._watch(count, timeout, model), count, timeout, model)

    async def wait_for_workers_awaitable(
        self, count: int, timeout: float, model: str | None = None
    ) -> None:
        """Wait in a coroutine. Arguments and errors are those of `wait_for_workers`."""
        future = self._watch(count, timeout, model)
        work = partial(self._await_workers, future, count, timeout, model)
        await in_thread(work, "weightbus-wait", future.cancel)

    def _watch(self, count: int, timeout: float, model: str | None) -> "Future[None]":
        """Return a future that is done once `count` workers are connected."""
        self._check_usable()
        checks.whole(count, "count", 0, WORKERS_MAX)
        checks.seconds(timeout, "timeout")
        if model is not None:
            check_name(model, "model")
        return self._loop.watch(lambda machine, _: machine.count_workers(model) >= count)

    def _await_workers(
        self, future: "Future[None]", count: int, timeout: float, model: str | None
    ) -> None:
        # Wait for the future that `_watch` returned; raise the errors of `wait_for_workers`.
        try:
            future.result(timeout)
        except FutureTimeout:
            future.cancel()
            workers = (status for status in self._status_by_name().values() if not status.relay)
            names = _connected(tuple(workers), model)
            wanted = f" that want {model!r}" if model is not None else ""
            rejected = self._loop.known.turned_away
            raise WorkersMissingError(
                f"{len(names)} of {count} workers{wanted} joined within {timeout} s "
                f"({', '.join(names) or 'none'}): start the others, and check that they connect to "
                f"{self.address}" + (f"; {rejected}" if rejected else "")
            ) from None

    def on_worker(self, callback: Callable[[WorkerEvent], object]) -> Callable[[], None]:
        """Call `callback` for each worker already connected, then for each change of a worker.

        The callback runs in its own thread and gets one event at a time. It may be slow, and may
        call any method of this publisher. Its exceptions are logged. If more than 10,000 events
        wait for the callback, the oldest are dropped; `event.missed` counts them.

        Args:
            callback: A function that takes a `WorkerEvent`.

        Returns:
            A function that ends the calls.

        Raises:
            ClosedError: The publisher is closed.
            TypeError: The callback is a coroutine function.
        """
        self._check_usable()
        return call_for_events(self._loop, callback)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End publishes in progress with the results so far, and close the sockets; idempotent.

        Args:
            timeout: Seconds to write the latest versions to the state folder, if there is one. A
                warning names versions that were not written by then.
        """
        if self._is_forked_copy:  # a forked child must not close the parent's sockets
            return
        deadline = time.monotonic() + timeout
        self.shown.close()
        self._loop.close()
        settle()
        if self._state_writer is not None:
            self._state_writer.close(max(0.0, deadline - time.monotonic()))

    async def close_awaitable(self, timeout: float = CLOSE_SECONDS) -> None:
        """Close from a coroutine: a thread does the work, so the event loop is not blocked.

        Args:
            timeout: As in `close`.
        """
        await in_thread(partial(self.close, timeout), "weightbus-close")

    def _model(self, name: str) -> PublishedModel:
        # Return the record of a model; make one at the first call.
        known = self._models.get(name) if isinstance(name, str) else None  # pyright: ignore
        if known is not None:
            return known
        check_name(name, "model")
        chosen, share = self._settings, self._probe is not None
        made = PublishedModel(
            name,
            chosen.chunk_bytes,
            share=share,
            bases=chosen.bases,
            check=chosen.check_patches,
            second=chosen.device_copy,
            stored=self._folder is not None,
        )
        return self._models.setdefault(name, made)

    def _describe(
        self, model: str, weights: object, settings: Settings | None
    ) -> tuple[State, Layout]:
        # Return the state and layout of weights, for a rank that publishes a part of them.
        chosen = self._settings if settings is None else settings_of("publish", settings)
        record = self._model(model)
        with record.lock:
            return record.describe(weights, precision_of(chosen.dtype), renaming_of(chosen.rename))

    def _need_folder(self) -> StateFolder:
        self._check_usable()
        if self._folder is None:
            raise StateFolderError(
                "this publisher stores nothing on disk: give it a folder, Publisher(state=...), "
                "and the number of older versions to keep, history="
            )
        return self._folder

    def _check_usable(self) -> None:
        self._check_process()
        self._loop.check()

    def _check_known(self, names: tuple[str, ...]) -> None:
        text = result_of(self._loop.unknown(names), ANSWER_SECONDS)
        if text:
            raise UnknownWorkerError(text)


def _check_not_interrupted(record: PublishedModel) -> None:
    """Check that this thread may wait for the model's lock.

    Raises:
        RuntimeError: This thread holds the lock already: a signal handler has interrupted its copy.
    """
    caller = sys._getframe(1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    frame = caller.f_back
    while frame is not None:
        if frame.f_globals is caller.f_globals and frame.f_locals.get("record") is record:
            raise RuntimeError(
                f"{record.name!r} is being copied for a publish by this very thread, which a "
                "signal handler (or a __del__) has interrupted: the copy cannot end before that "
                "returns. Set a flag in the handler, and publish after the step "
                "(docs/guides/restarting.md, Preemption)"
            )
        frame = frame.f_back


def _connected(status: tuple[WorkerStatus, ...], model: str | None) -> list[str]:
    """Return the names of the workers that are not lost and, if `model` is given, want `model`."""
    live = [w for w in status if w.state != "lost"]
    return sorted(w.name for w in live if model is None or model in w.models)


def _state_writer_of(folder: StateFolder | None, undo: contextlib.ExitStack) -> StateWriter | None:
    """Return a thread that writes to the state folder; None if there is no folder.

    `undo` closes the writer if the publisher's constructor fails.
    """
    if folder is None:
        return None
    writer = StateWriter(folder)
    undo.callback(writer.close, 0.0)
    return writer


def _promise(publishing: "Future[Receipt]", call: str) -> Promise:
    """Return `publishing`, if it is a future of `publish_async`; otherwise raise TypeError."""
    if not isinstance(publishing, Promise):
        raise TypeError(f"{call} takes a future of publish_async, not {publishing!r}")
    return publishing
