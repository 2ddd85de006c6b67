"""Subscribing: `Subscriber` receives versions and applies them in place, at a safe point."""

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar
from weakref import WeakValueDictionary

from ..bus.effects import Renamed
from ..bus.errors import ApplyError, ClosedError
from ..bus.limits import INTEGER_MAX, MODELS_MAX
from ..bus.messages import DELTA, MAPPING, RENAMING, UPSTREAM
from ..bus.net.control import WorkerSockets
from ..bus.net.handoff import Handoff
from ..bus.net.worker_loop import WorkerLoop
from ..bus.observed import CHECKING
from ..bus.trust.keys import WorkerKeys
from ..bus.worker.keyring import Keyring
from ..bus.worker.machine import WorkerMachine
from ..bus.worker.reports import Identity
from ..codecs.errors import WeightBusError
from ..codecs.renaming import Rename, renaming_of
from . import checks
from .applying import Applier, Running, Update
from .awaiting import Cut, in_thread
from .background import Background
from .calls import Calls
from .checks import check_name
from .dropped import end_with
from .keys import worker_keys
from .observing.checking import Checker
from .observing.silence import Silence
from .observing.traces import settle
from .reading import READING_SECONDS, Reading, ReadingLock
from .resident import ResidentTarget
from .settings import Settings, had_more_keywords, settings_of
from .targets import by_id, fault_of, targets_of

log = logging.getLogger("weightbus.subscriber")

T = TypeVar("T")

CLIENT = "weightbus-python/0.1.0"
HOOK_SECONDS = 1.0  # that close() waits for the user's code
ROUND_SECONDS = 30.0  # that an `async for` waits at a time; readers of it wait for no longer
COPY_SECONDS = 10.0  # and for a copy into the model, which should not change any more afterwards

_here: "WeakValueDictionary[tuple[str, str], Subscriber]" = WeakValueDictionary()


class Subscriber:
    """Receives the versions of some models and applies them.

    Args:
        address: The publisher's address. It need not be there yet.
        models: By model id, where its versions go: an `nn.Module`, a `TensorDict`, a mapping of
            names to torch tensors or numpy arrays (all copied in place), a path (a safetensors
            file, replaced atomically), or a function, which loads each version by itself from
            (name, tensor) pairs that lie in the bus's memory: see `Pairs`. What it raises decides
            what runs then: see `UnchangedError`.
        name: What this worker is called, unique among the publisher's workers; None: host, process
            and a random suffix.
        keys: A file of `weightbus keygen`, its folder (then `name` says whose file), or what is in
            it: this worker then speaks to that publisher alone. None: what WEIGHTBUS_KEYS says,
            else there are none.
        strict: Whether publisher and target must have the same tensor names. With False a version
            may have more tensors than the target, which are passed over; what is verified and
            reported is the whole version all the same. One that lacks a tensor of the target is
            refused either way.
        cast: Whether values may be converted to the target's dtypes.
        rename: What published names become here, for all `models`, where their targets have others:
            as of a publish (`Settings`). `before_apply` is told those that are published. A
            function is called in a thread that serves the connection: it must not take its time.
        settings: What few need to set: times, hooks, memory.

    Raises:
        AddressError: The address makes no sense.
        KeysError: The keys cannot be read.
        OSError: Too few descriptors are left for sockets; it names `ulimit -n`.
        ValueError: A name may not be one, or cannot be renamed so; or `models` is no mapping of
            ids to targets.
        TypeError: A hook is a coroutine function.
        OSError: A path leads to what is no file, or into a folder where nothing can be made.

    Versions are received in the background at all times. They are applied either where `receive()`
    is called, or, after `start()`, in the background. In a process that was forked, make a new one.

    One that is dropped without `close()` leaves, with a warning, when Python collects it, even if
    it was started: keep it in a variable. A hook, or a function that is a target, which refers to
    it (a closure, a bound method of what holds it) keeps it for as long as the process: close it,
    or have that hold a `weakref`. A new one of the same `address` and `name` in this process takes
    its place, which is closed: a notebook's cell may run again.
    """

    @had_more_keywords("Subscriber")
    def __init__(
        self,
        address: str,
        models: Mapping[str, object],
        *,
        name: str | None = None,
        keys: WorkerKeys | str | Path | None = None,
        strict: bool = True,
        cast: bool = False,
        rename: Rename = None,
        settings: Settings | None = None,
    ) -> None:
        few = settings_of("Subscriber", settings)
        keys = worker_keys(keys, name)
        self.name = check_name(_default_name(keys) if name is None else name, "worker")
        self._targets = targets_of(
            by_id(models),
            strict=strict,
            cast=cast,
            sole_writer=few.sole_writer,
            renaming=renaming_of(rename),
            keep=ResidentTarget if few.resident else None,
        )
        self.address, self._handoff = address, Handoff()
        self._applied = self._handoff.changed
        self._calls = Calls(few.apply_timeout)
        self._running: dict[str, Update] = {}
        self._kept: deque[Future[Update | None]] = deque(maxlen=MODELS_MAX)
        self._pid = os.getpid()
        who = _identity(self.name, shared_memory=few.shared_memory)
        like = {model: target.expected() for model, target in self._targets.items()}
        # What the thread holds must not hold us: see `dropped`.
        ring = None if keys is None else Keyring()
        fault = partial(fault_of, self._targets)
        machine = WorkerMachine(
            who, self._targets, fault, few.bytes_max, few.timing, like, keyring=ring
        )
        with ExitStack() as undo:
            sockets = undo.enter_context(closing(WorkerSockets(address, machine.place, keys)))
            silence = Silence(address, machine, self._handoff, keyed=keys is not None)
            self._loop = WorkerLoop(
                machine,
                sockets,
                self._handoff,
                partial(_look, self._calls, silence),
                partial(_rename, self._running, self._applied),
                shared_memory=few.shared_memory,
            )
            about = self._targets, self._handoff, self._running, self._loop.tell, self._calls
            self._applier = Applier(*about, few.before_apply, few.on_commit)
            files = frozenset(m for m, target in self._targets.items() if target.on_disk)
            work = self._applier, self._handoff, self._loop.stop
            others = frozenset(self._targets) - files
            self._background = Background(self.name, *work, others, files)
            self._loop.examine_by(Checker(self._targets, self._applier, self._loop.tell).ask)
            end_with(self, self._loop)
            undo.pop_all()
        self._take_over()
        self._loop.start()

    def _take_over(self) -> None:
        """Close the one of this process that has the name: its user may have forgotten it."""
        before = _here.get((self.address, self.name))
        _here[self.address, self.name] = self
        if before is not None:
            before._give_way()  # noqa: SLF001 - one of ours

    def _give_way(self) -> None:
        if os.getpid() != self._pid or self._handoff.closed:
            return
        text = f"another Subscriber named {self.name!r} of this process has taken its place"
        log.warning("%s is closed: %s", self, text)
        self._handoff.close(ClosedError(text))
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Subscriber stays in its process, with its sockets and threads: hand over its "
            f"publisher's address ({self.address!r}), and make a Subscriber there"
        )

    def __repr__(self) -> str:
        return f"<Subscriber {self.name} of {self.address}: {', '.join(self._targets)}>"

    # Applying where the caller is.

    def receive(
        self,
        timeout: float,
        *,
        version: int | tuple[int, int] | None = None,
        model: str | None = None,
    ) -> Update | None:
        """Apply the newest version that has arrived, waiting for one if need be.

        The version is applied here, in this thread: call it where nobody uses the weights. With
        `timeout=0` it takes what is there.

        Args:
            timeout: Seconds to wait.
            version: Apply this one and no other: of the publisher's epoch, or (epoch, version), as
                in a receipt. Until it is applied or this returns, nothing newer of its model takes
                its place. That it runs already is fine, too.
            model: Of which model it is, where this subscriber has several.

        Returns:
            What was applied; None if nothing came within `timeout` seconds.

        Raises:
            ApplyError: A version cannot be applied; the weights are as they were. Of code `gone`:
                the version that was asked for is not to be had any more.
            TornError: A version could not be applied and has spoiled the weights; see `reading`.
            RefusedError: The publisher refuses this worker.
            AddressError: No address of the publisher's host is found, which is tried on.
            ClosedError: The subscriber is closed, or applies in the background.
            KeyError: There is no such model.
            ValueError: It is not said of which model the version is.
        """
        return self._receive(timeout, version, model, lambda: False)

    def _receive(
        self,
        timeout: float,
        version: int | tuple[int, int] | None,
        model: str | None,
        stop: Callable[[], bool],
    ) -> Update | None:
        self._check_usable()
        timeout = checks.seconds(timeout, "timeout")
        if version is None and model is None:
            with suppress(IndexError):
                return self._kept.popleft().result()
            return self._applier.receive(timeout, stop=stop)
        name, epoch, number = self._exact(version, model)
        return self._applier.receive_exact(name, number, epoch, timeout, stop)

    def _exact(
        self, version: int | tuple[int, int] | None, model: str | None
    ) -> tuple[str, int | None, int]:
        """Return which version of what is meant."""
        if model is None and len(self._targets) > 1:
            names = ", ".join(self._targets)
            raise ValueError(f"version={version!r}: say of which model, of {names}, with model=")
        name = next(iter(self._targets)) if model is None else model
        self._targets[name]
        epoch, number = version if isinstance(version, tuple) else (None, version)
        if epoch is not None:
            checks.whole(epoch, "epoch", 1, INTEGER_MAX)
        return name, epoch, checks.whole(number, "version", 1, INTEGER_MAX)

    async def receive_awaitable(
        self,
        timeout: float,
        *,
        version: int | tuple[int, int] | None = None,
        model: str | None = None,
    ) -> Update | None:
        """Receive from a coroutine: waits and applies in a thread of its own.

        Arguments, result and errors are those of `receive`. Cancelled, it applies nothing. A copy
        that has begun by then ends first, and the next call that asks for no certain version
        returns its `Update`.
        """
        cut = Cut(self._applier.look)
        work = partial(self._receive, timeout, version, model, cut)
        return await in_thread(work, "weightbus-receive", cut.make, self._keep)

    def _keep(self, received: "Future[Update | None]") -> None:
        """Keep for the next call what one that was cancelled had applied already, or failed to."""
        error = received.exception()
        if isinstance(error, ApplyError) or (error is None and received.result() is not None):
            self._kept.append(received)

    # Applying in the background.

    def start(self) -> "Subscriber":
        """Apply versions in the background from now on, outside every `reading()` block.

        Files are written by threads of their own, so that a slow disk delays no other model; the
        user's code is called by one thread at a time all the same. What goes wrong is logged and
        kept in `error`; the weights then stay as they were, unless that is a `TornError`.
        """
        self._check_usable()
        self._loop.apply_by(self._background.at_once)
        self._background.start()
        return self

    def reading(
        self,
        timeout: float = READING_SECONDS,
        *,
        model: str | None = None,
        needs_version: bool = False,
    ) -> Reading[Running]:
        """Return a block in which weights in memory do not change, for a forward pass.

            with worker.reading() as running:  # in a coroutine, async with
                answer = model(question), running.version

        New weights that have arrived go first: who comes after them queues until they are applied,
        and in a coroutine `async with` does so without stopping the event loop. It may await
        inside. A plain `with` in a coroutine must not: then it is refused where it would have to
        wait for another task of its own loop. Blocks may be nested, also in tasks and threads that
        have inherited the context (`asyncio.gather`, `asyncio.to_thread`).

        Args:
            timeout: Seconds to wait for an apply, or for a first version.
            model: Which model is read; None: all. A file may be replaced meanwhile, unless it is
                named: whoever has opened it keeps what it opened.
            needs_version: Wait until a version runs, of each model that is read.

        Returns:
            A context manager of both kinds, for one block. What it yields says which version runs
            (`version`, `epoch`; 0 if none does yet), where the model is named, or the only one.

        Raises:
            TimeoutError: An apply, a hook included, took longer than `timeout` seconds; the text
                says of which version, in which thread, and for how long. Or no version came.
            TornError: A version failed after it had begun to change the weights, which now are
                parts of two. Any version that is applied mends them: that one is tried a few times
                more by itself, and publishing a new one does.
            RuntimeError: A plain `with` in a coroutine would wait for its own event loop.
            KeyError: There is no such model.
        """
        self._handoff.check_alive()  # else weights would stay as they are for ever, in silence
        timeout, lacks = checks.seconds(timeout, "timeout"), None
        if model is not None:
            self._targets[model]
        only = next(iter(self._targets)) if len(self._targets) == 1 else model
        if needs_version:
            of = (*self._targets,) if model is None else (model,)
            lacks = partial(_lacks, self._running, of, self.address)
        lock = self._applier.lock if model is None else self._applier.lock_of(model)
        return Reading(lock, timeout, partial(Running, self._running, only), model, lacks=lacks)

    @property
    def lock(self) -> ReadingLock:
        """What `reading` takes, for whom a `with` does not do: hooks, for example."""
        return self._applier.lock

    def wait_for_version(
        self, model: str, version: int = 1, *, epoch: int = 0, timeout: float
    ) -> Update | None:
        """Wait until a model runs this version or a newer one; None after `timeout` seconds.

        A publisher that restarts counts from 1 again, in a later epoch: with `epoch` (that of a
        receipt, say) versions of earlier ones do not count.

        Raises:
            KeyError: This subscriber does not have that model.
            ClosedError: It is closed, or a thread of it has failed; see the cause.
        """
        return self._wait_for_version(model, version, epoch, timeout, lambda: False)

    async def wait_for_version_awaitable(
        self, model: str, version: int = 1, *, epoch: int = 0, timeout: float
    ) -> Update | None:
        """Wait in a coroutine. Arguments, result and errors are those of `wait_for_version`."""
        cut = Cut(self._handoff.look)
        work = partial(self._wait_for_version, model, version, epoch, timeout, cut)
        return await in_thread(work, "weightbus-wait", cut.make)

    def _wait_for_version(
        self, model: str, version: int, epoch: int, timeout: float, stop: Callable[[], bool]
    ) -> Update | None:
        self._targets[model]
        checks.whole(version, "version", 0, INTEGER_MAX)
        checks.whole(epoch, "epoch", 0, INTEGER_MAX)
        timeout = checks.seconds(timeout, "timeout")

        def there() -> bool:
            running = self._running.get(model)
            if running is None or not epoch:
                return running is not None and running.version >= version
            return (running.epoch, running.version) >= (epoch, version)

        with self._applied:
            self._applied.wait_for(lambda: there() or self._handoff.closed or stop(), timeout)
            if not there():
                self._handoff.check_open()
            return self._running[model] if there() else None

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Yield each version as it is applied, until the subscriber is closed.

        Without `start()` it is applied by this loop, as by `receive_awaitable`, between two turns.
        After `start()` the first that is told of is what runs already, and none is waited for.

        Raises:
            ApplyError, TornError, RefusedError, AddressError: As of `receive`, without `start()`.
            ClosedError: A thread of the subscriber has failed.
        """
        seen: dict[str, Update] = {}
        while True:
            try:
                if self._background.threads:
                    update = await self._next(seen)
                else:
                    update = await self.receive_awaitable(ROUND_SECONDS)
            except ClosedError:
                self._handoff.check_alive()
                return
            if update is not None:
                yield update

    async def _next(self, seen: dict[str, Update]) -> Update | None:
        """Return a version that runs and was not seen yet."""
        cut = Cut(self._handoff.look)

        def news() -> Update | None:
            return next((u for m, u in self._running.items() if seen.get(m) is not u), None)

        def work() -> Update | None:
            with self._applied:
                self._applied.wait_for(
                    lambda: news() or self._handoff.closed or cut(), ROUND_SECONDS
                )
                if (update := news()) is None:
                    self._handoff.check_open()
                return update

        update = await in_thread(work, "weightbus-wait", cut.make)
        if update is not None:
            seen[update.model] = update
        return update

    # How things stand.

    @property
    def error(self) -> WeightBusError | None:
        """What went wrong last in the background, if anything has."""
        failure = self._handoff.failure
        return self._background.error if failure is None else ClosedError.of("subscriber", failure)

    def update(self, model: str) -> Update | None:
        """Return what a `model` runs; None before its first version, or if one failed half-way."""
        self._targets[model]
        with self._applied:
            return self._running.get(model)

    def version(self, model: str) -> int:
        """Return the version that a `model` runs; 0 if it runs none."""
        update = self.update(model)
        return update.version if update is not None else 0

    def wait_joined(self, timeout: float) -> bool:
        """Wait until the publisher has let this worker in; return whether it did in `timeout` s.

        Raises:
            RefusedError: The publisher refuses this worker.
            AddressError: No address of the publisher's host is found, which is tried on.
        """
        return self._handoff.wait_joined(checks.seconds(timeout, "timeout"))

    def close(self) -> None:
        """Say goodbye and close the sockets. Calling it twice is fine.

        Weights do not change any more afterwards. The user's code is left behind where it does not
        return.
        """
        if os.getpid() != self._pid:
            return
        self._loop.close()
        self._applier.look()
        settle()
        if threading.current_thread() in self._background.threads:
            return
        end = time.monotonic() + HOOK_SECONDS
        left = partial(_left_of, self._background.threads)
        if left(end) and not self._calls.under_way:
            left(end + COPY_SECONDS)
        if left(0.0):
            log.warning("%s: closed while a hook or a disk was waited for; left behind", self)

    async def close_awaitable(self) -> None:
        """Close from a coroutine, in a thread, so that others of its event loop may leave."""
        await in_thread(self.close, "weightbus-close")

    async def __aenter__(self) -> "Subscriber":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close_awaitable()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this subscriber was made in process {self._pid}, this is process {os.getpid()}: "
                "sockets do not survive a fork; make a new Subscriber here"
            )
        self._handoff.check_alive()
        if self._background.threads:
            raise ClosedError("this subscriber applies in the background since start()")


def _lacks(runs: Mapping[str, Update], models: tuple[str, ...], address: str) -> str:
    """Say which models run no version yet; nothing if all do."""
    missing = ", ".join(model for model in models if model not in runs)
    return missing and f"no version of {missing} runs here yet: does {address} publish it?"


def _left_of(threads: list[threading.Thread], end: float) -> bool:
    """Wait for threads until this moment; return whether some are still there."""
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


def _look(calls: Calls, silence: Silence) -> None:
    calls.look()
    silence.look()


def _identity(name: str, *, shared_memory: bool) -> Identity:
    return Identity(
        name=name,
        instance=secrets.token_hex(16),
        client=CLIENT,
        host=socket.gethostname(),
        pid=os.getpid(),
        features=(CHECKING, RENAMING, UPSTREAM, DELTA, *([MAPPING] if shared_memory else [])),
    )


def _rename(runs: dict[str, Update], changed: threading.Condition, renamed: Renamed) -> None:
    """A restarted publisher has what runs here as a version of its own: no bytes change."""
    with changed:
        known = runs[renamed.model]
        runs[renamed.model] = replace(
            known,
            epoch=renamed.epoch,
            version=renamed.version,
            metadata=dict(renamed.metadata),
        )
        changed.notify_all()


def _default_name(keys: WorkerKeys | None) -> str:
    form = "*" if keys is None else keys.name
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:80]
    return form.replace("*", f"{host}-{os.getpid()}-{secrets.token_hex(2)}")
