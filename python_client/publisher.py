"""Publishing: `Publisher` snapshots a model, sends it, and says what became of it."""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from ..bus.complaints import Complaints
from ..bus.deadline import ANSWER_SECONDS, Deadline, result_of
from ..bus.errors import ClosedError, UnknownWorkerError, WorkersMissingError
from ..bus.limits import WORKERS_MAX
from ..bus.memory.segment import probe
from ..bus.messages import TOKEN_BYTES
from ..bus.net import endpoints
from ..bus.net.control import PublisherSockets
from ..bus.net.listeners import Listener, WorkerEvent
from ..bus.net.publisher_loop import PublisherLoop
from ..bus.publisher.machine import PublisherMachine
from ..bus.publisher.publication import CommitMode
from ..bus.publisher.status import WorkerStatus
from ..bus.receipt import Receipt
from ..bus.trust.grants import Grants
from ..bus.trust.keys import PublisherKeys
from . import checks
from .awaiting import in_thread
from .checks import check_name
from .dropped import end_with
from .keeper import Keeper
from .keys import (
    check_exposure,
    group_keys,
    new_sealer,
    publisher_keys,
    retire,
    watch_keys,
)
from .models import PublishedModel, restore
from .observing.access import Http
from .observing.shown import Shown
from .observing.traces import settle
from .options import TIMEOUT, Require, request
from .settings import Settings, had_more_keywords, of_bytes, settings_of
from .state_folder import StateFolder, StateFolderError, StoredVersion, age_from_now, new_epoch

log = logging.getLogger("weightbus.publisher")

CLOSE_SECONDS = 10.0  # that closing gives the disk for the last versions

_LATE = (
    "{model}: the weights were not copied within {timeout} s, so nothing was published; give it a "
    "longer timeout, or prepare() the model beforehand: memory for its first version takes longest"
)


class Publisher:
    """Publishes versions of models to every worker that connects.

    Args:
        address: Where the control socket is bound: the one address that workers need. Port 0 takes
            a free one; `publisher.address` is what was taken.
        keys: A folder that `weightbus keygen` has made, or what is in it: only workers with a key
            in it get in. None: what WEIGHTBUS_KEYS says, else there are none.
        insecure: Without keys, listen where other hosts can connect all the same.
        state: A folder that outlives this publisher: the epoch, and the latest version of each
            model, which a publisher that is started with it later offers again.
        history: How many older versions of each model to keep there, for `rollback`.
        expect: How many workers "all" are at least in `publish`, unless it is told otherwise.
        dashboard, metrics: Where a page for people, and metrics for Prometheus, are served
            (`docs/guides/operating.md`): `HOST:PORT`, or an `Http` that says who else may look.
        settings: What few need to set: times, sockets, memory, patches. What is in it of a publish
            holds for each publish that is given no settings of its own.

    Raises:
        AddressError: An address makes no sense, is in use, or can be reached by other hosts.
        KeysError: The keys cannot be read.
        OSError: Too few descriptors are left for sockets; it names `ulimit -n`.
        StateFolderError: Another publisher has the folder, or it cannot be written.

    Any thread may call any method. One that is dropped without `close()` is closed, with a
    `ResourceWarning`, when Python collects it. In a process that was forked, make a new Publisher.
    """

    @had_more_keywords("Publisher")
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
        few = self._settings = settings_of("Publisher", settings)
        keys = publisher_keys(keys)
        check_exposure(keys, insecure, address, few.data)
        self._expect = checks.whole(expect, "expect", 0, WORKERS_MAX)
        age = None if few.epoch is not None else age_from_now()
        self._models: dict[str, PublishedModel] = {}
        self._ids = itertools.count(1)
        self._crowded = Complaints(log, "workers may be missing here: %s")
        self._pid = os.getpid()
        self._probe = probe() if few.shared_memory else None  # kept: it goes with its last user
        shared = self._probe.shared if self._probe is not None else None
        with contextlib.ExitStack() as undo:
            self._folder = None if state is None else StateFolder(Path(state), history)
            if self._folder is not None:
                undo.enter_context(self._folder)
            epoch = new_epoch(few.epoch, self._folder)
            restored = restore(self._folder, epoch, self._model) if self._folder else []
            grants = None if keys is None else Grants(keys.grants)
            secret = keys.secret if keys else ""
            own = PublisherSockets(address, few.data, few.queue, secret, grants)
            sockets = undo.enter_context(contextlib.closing(own))
            self.address = sockets.address
            self.data_address = sockets.data_address
            told = few.advertise or endpoints.advertised(self.address, self.data_address)
            sealer = None if keys is None else new_sealer(few.rekey)
            draw = partial(secrets.token_hex, TOKEN_BYTES // 2)
            trust = group_keys(sealer), grants
            keeper = self._keeper = _keeper_of(self._folder, undo)
            recorded = None if keeper is None else keeper.recorded
            self._machine = PublisherMachine(
                epoch, told, few.timing, shared, age, draw, *trust, time.time, recorded
            )
            if keeper is not None:
                keeper.heed(_busy(self._machine))
            self._loop = PublisherLoop(self._machine, sockets, self._keeper, restored, sealer)
            end_with(self, self._loop)
            undo.pop_all()
        self._loop.start()
        if keys is not None:
            revoked = partial(retire, self._models)  # not us: we may be dropped meanwhile
            watch_keys(keys, self._machine.timing, self._loop, revoked)
        self.shown = Shown(self, self._loop, self._machine)
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
        """This publisher's incarnation."""
        return self._machine.epoch

    @had_more_keywords("publish")
    def prepare(self, model: str, weights: object, *, settings: Settings | None = None) -> None:
        """Do now what the first publish of a model would have to do once; publish nothing.

        It describes the weights and takes memory for a copy of them, which workers on this host
        then map ahead. The first publish is then about as fast as those after it.

        Args:
            model: The model's id.
            weights: What will be published, or anything of the same names, shapes and dtypes.
            settings: As they will be given to `publish`.

        Raises:
            StateError: The weights cannot travel.
        """
        self._check_usable()
        few = self._of_publish(settings)
        kept = self._model(model)
        with kept.lock:
            reserved = kept.reserve(weights, few.dtype, few.rename)
            if reserved is not None:
                self._loop.decide(lambda machine, _now: machine.prepare(model, *reserved))

    @had_more_keywords("publish")
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
            weights: An `nn.Module`, a `TensorDict`, or a mapping of names to torch tensors or numpy
                arrays. It is copied before this waits for anybody.
            workers: Names of the workers it is for; None: all that want the model. Workers that
                join later get the latest version that was meant for all.
            require: How many of them must get there: "all"; "alive", which is all but those that
                are lost meanwhile, of which the receipt tells; or a number (0: no matter).
            expect: How many "all" are at least: those that are missing are waited for, until they
                join and get there. None: as many as the Publisher was told to expect.
            commit: "auto": each worker applies as soon as it can. "together": none applies before
                `require` workers have staged; if too few do in time, none applies at all.
            timeout: Seconds for all of this.
            metadata: What to say of the version, as text by name, such as `{"step": "12000"}`: at
                most 32 entries and 4 KiB. It is in each worker's `Update`, in the receipt, in files
                that workers write, and in what operators see.
            settings: What few need to set of a publish: `wait`, `verify`, `grace`, `dtype`,
                `encoding`, `rename`. None: those of the Publisher.

        Returns:
            What each worker did, and when. With no worker there, and none expected, `workers` in
            it is empty: the version waits for those that join. A warning in the log says so once,
            and why: who is lost, has left or is refused, or what the workers want that are there.

        Raises:
            PublishError: Less was achieved than required. It carries the receipt, and says who is
                missing of those that were expected.
            UnknownWorkerError: A worker of that name has never joined; nothing was published.
            StateError: The weights cannot travel, or not under these names; nothing was published.
            DeadlineError: They were not copied in time; nothing was published. (One tensor is
                copied in one go.)
            ClosedError: The publisher is closed.
        """
        started = time.monotonic()
        future = self.publish_async(
            model,
            weights,
            workers=workers,
            require=require,
            expect=expect,
            commit=commit,
            timeout=timeout,
            metadata=metadata,
            settings=settings,
        )
        left = started + float(timeout) - time.monotonic()
        return result_of(future, max(0.0, left) + ANSWER_SECONDS)

    @had_more_keywords("publish")
    def publish_async(
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
    ) -> "Future[Receipt]":
        """Publish, and return a future of the receipt as soon as the weights are copied.

        The weights may be changed at once. Arguments, and the errors that the future or this call
        raises, are those of `publish`. A newer version overtakes an older one that is still on its
        way: a worker that goes straight to the newer one counts as `skipped`, which is success. If
        it fails, and the future is dropped with nobody having asked for its result, a warning in
        the log says so.
        """
        started = time.monotonic()
        self._check_usable()
        asked = request(
            started,
            self._of_publish(settings),
            workers=workers,
            require=require,
            expect=expect,
            commit=commit,
            timeout=timeout,
            metadata=metadata,
            expected=self._expect,
            lost_after=self._machine.timing.lost_after,
        )
        if asked.workers:
            self._check_known(asked.workers)
        kept = self._model(model)
        sent = partial(self._machine.sends, model, asked.workers, shared=self._probe is not None)
        until = Deadline(asked.deadline, _LATE.format(model=model, timeout=asked.timeout))
        with kept.locked(until):
            version = kept.snapshot(
                weights,
                replaces_latest=asked.replaces_latest,
                precision=asked.precision,
                renaming=asked.renaming,
                hashed=(lambda: True) if asked.asks_for_digests else sent,
                make_room=partial(self._loop.make_room, model),
                deadline=until,
            )
            if asked.metadata is not None:
                version.metadata = asked.metadata
            shared = version.shared is not None
            takers = partial(self._machine.roster.takers, model, asked.workers, shared=shared)
            kept.offer(version, asked.encoding, takers, until, to_all=not asked.workers)
            future = self._loop.submit(asked.publication(next(self._ids), version))
        return self.shown.count(future, started)

    @had_more_keywords("publish")
    async def publish_awaitable(
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
        """Publish from a coroutine. Arguments, result and errors are those of `publish`.

        Cancelled, it is published all the same: nobody waits for the receipt then.

        The weights are copied before the first suspension, so that they may be changed by whatever
        runs next: the event loop stands still meanwhile, for about a second for each GB. Where that
        is too long, `await asyncio.to_thread(publisher.publish, ...)`, and change no weights before
        it returns.
        """
        future = self.publish_async(
            model,
            weights,
            workers=workers,
            require=require,
            expect=expect,
            commit=commit,
            timeout=timeout,
            metadata=metadata,
            settings=settings,
        )
        return await asyncio.wrap_future(future)

    @had_more_keywords("publish")
    def rollback(
        self,
        model: str,
        to: tuple[int, int],
        *,
        workers: Iterable[str] | None = None,
        require: Require = "all",
        expect: int | None = None,
        commit: CommitMode = "auto",
        timeout: float = TIMEOUT,
        metadata: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> Receipt:
        """Publish an older version's bytes again, as a new version, and wait for the workers.

        Args:
            model: The model's id.
            to: Epoch and version of one that `history` names.
            workers, require, expect, commit, timeout, settings: As in `publish`; without `dtype`
                and `rename`.
            metadata: What to say of it; None: what was said of that version.

        Returns:
            What `publish` returns. The version has a new number; the bytes, and so the digest, are
            the old ones.

        Raises:
            StateFolderError: There is no such version on disk, or its file is damaged.
            PublishError, UnknownWorkerError, ClosedError: As of `publish`.
        """
        folder = self._need_folder()
        settings = of_bytes(self._settings) if settings is None else settings
        return self.publish(
            model,
            folder.open(folder.find(model, to)),
            workers=workers,
            require=require,
            expect=expect,
            commit=commit,
            timeout=timeout,
            metadata=metadata,
            settings=settings,
        )

    def history(self, model: str) -> list[StoredVersion]:
        """Return the versions of a `model` that are on disk, the newest first.

        A version is there a moment after it was published, once it is written; the latest is
        followed by at most `history` older ones.
        """
        return self._need_folder().versions(check_name(model, "model"))

    def workers(self) -> dict[str, WorkerStatus]:
        """Return who is there, lost workers included, and which version each of them runs.

        If connections are turned away for want of descriptors, a warning in the log says so.
        """
        self._check_usable()
        if away := self._machine.turned_away:
            self._crowded.warn(away, time.monotonic())
        return self._known()

    def _known(self) -> dict[str, WorkerStatus]:
        return {w.name: w for w in result_of(self._loop.status(), ANSWER_SECONDS)}

    def wait_for_workers(self, count: int, timeout: float, model: str | None = None) -> None:
        """Wait until `count` workers are there (that want the `model`, if one is given).

        Raises:
            WorkersMissingError: They did not come within `timeout` seconds; it says who did.
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
        """Return what is done once so many workers are there."""
        self._check_usable()
        checks.whole(count, "count", 0, WORKERS_MAX)
        checks.seconds(timeout, "timeout")
        if model is not None:
            check_name(model, "model")
        return self._loop.watch(lambda machine, _: machine.present(model) >= count)

    def _await_workers(
        self, future: "Future[None]", count: int, timeout: float, model: str | None
    ) -> None:
        try:
            future.result(checks.seconds(timeout, "timeout"))
        except FutureTimeout:
            future.cancel()
            names = _there(tuple(self._known().values()), model)
            wanted = f" that want {model!r}" if model is not None else ""
            away = self._machine.turned_away
            raise WorkersMissingError(
                f"{len(names)} of {count} workers{wanted} joined within {timeout} s "
                f"({', '.join(names) or 'none'}): start the others, and check that they connect to "
                f"{self.address}" + (f"; {away}" if away else "")
            ) from None

    def on_worker(self, callback: Callable[[WorkerEvent], object]) -> Callable[[], None]:
        """Have a callback told what becomes of workers; first, of those that are there already.

        It is called in a thread of its own, with one event after another: it may take its time,
        and may call anything of this publisher. If it raises, that is logged. One that falls
        10,000 events behind misses the oldest, which `event.missed` says.

        Args:
            callback: Takes a `WorkerEvent`.

        Returns:
            What ends it, when called.

        Raises:
            ClosedError: The publisher is closed.
            TypeError: The callback is a coroutine function.
        """
        self._check_usable()
        checks.hook(callback, "callback")
        listener = Listener(callback)
        try:
            result_of(self._loop.listen(listener), ANSWER_SECONDS)
        except BaseException:
            listener.end()
            raise
        return lambda: self._loop.unlisten(listener)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Resolve open publishes as they stand and close the sockets. Calling it twice is fine.

        Args:
            timeout: Seconds for writing the latest versions to the state folder, if there is one.
                What could not be written by then is said in a warning.
        """
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout
        self.shown.close()
        self._loop.close()
        settle()
        if self._keeper is not None:
            self._keeper.close(max(0.0, deadline - time.monotonic()))

    async def close_awaitable(self, timeout: float = CLOSE_SECONDS) -> None:
        """Close from a coroutine, in a thread, so that its event loop goes on.

        Args:
            timeout: As of `close`.
        """
        await in_thread(partial(self.close, timeout), "weightbus-close")

    async def __aenter__(self) -> "Publisher":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close_awaitable()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _model(self, name: str) -> PublishedModel:
        check_name(name, "model")
        if name in self._models:
            return self._models[name]
        few, share = self._settings, self._probe is not None
        made = PublishedModel(
            name, few.chunk_bytes, share=share, bases=few.bases, check=few.check_patches
        )
        return self._models.setdefault(name, made)

    def _of_publish(self, settings: Settings | None) -> Settings:
        """Return the settings of a publish that was given these."""
        return self._settings if settings is None else settings_of("publish", settings)

    def _need_folder(self) -> StateFolder:
        self._check_usable()
        if self._folder is None:
            raise StateFolderError(
                "this publisher keeps nothing on disk: give it a folder, Publisher(state=...), "
                "and with history= as many older versions as you may want back"
            )
        return self._folder

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this publisher was made in process {self._pid}, this is process {os.getpid()}: "
                "sockets do not survive a fork; make a new Publisher here"
            )
        self._loop.check()

    def _check_known(self, names: tuple[str, ...]) -> None:
        known = self._known()
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UnknownWorkerError(
                f"no worker named {', '.join(sorted(unknown))} has joined; known are "
                f"{', '.join(sorted(known)) or 'none'}: check the name, or wait_for_workers() first"
            )


def _there(status: tuple[WorkerStatus, ...], model: str | None) -> list[str]:
    """Return the names of the workers that are there, and want a model, if one is given."""
    live = [w for w in status if w.state != "lost"]
    return sorted(w.name for w in live if model is None or model in w.models)


def _keeper_of(folder: StateFolder | None, undo: contextlib.ExitStack) -> Keeper | None:
    """Return what writes into a folder, if there is one; it ends if the rest cannot be made."""
    if folder is None:
        return None
    keeper = Keeper(folder)
    undo.callback(keeper.close, 0.0)
    return keeper


def _busy(machine: PublisherMachine) -> Callable[[], bool]:
    """Return what tells whether a publish is under way. It keeps no publisher alive."""
    return lambda: machine.busy
