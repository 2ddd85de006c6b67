"""`Subscriber` receives versions and applies them in place, when no other code uses the weights."""

import itertools
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar
from weakref import WeakValueDictionary

from ..bus.effects import Renamed
from ..bus.errors import ApplyError, ClosedError
from ..bus.messages import CHECKING, COMPANIONS, DELTA, MAPPING, PARTS, RENAMING, UPSTREAM, Hello
from ..bus.net.control import WorkerSockets
from ..bus.net.endpoints import check_all
from ..bus.net.ready_queue import ReadyQueue
from ..bus.net.worker_loop import WorkerLoop
from ..bus.trust.keys import WorkerKeys
from ..bus.worker.events import Flush
from ..bus.worker.keyring import Keyring
from ..bus.worker.machine import WorkerMachine
from ..codecs.errors import WeightBusError
from ..codecs.protocol_limits import INTEGER_MAX
from ..codecs.renaming import Rename, renaming_of
from . import checks
from .applying.applier import NEVER, Applier, Running, Staged, Update
from .applying.awaiting import CancelToken, in_thread
from .applying.background import Background
from .applying.calls import Calls
from .applying.reading import READING_SECONDS, Reading, ReadingLock
from .applying.resident import ResidentTarget
from .applying.targets import by_id, fault_of, targets_of
from .checks import check_name
from .closing import InOneProcess, stop_with
from .keys import keys_for
from .observing.checking import Checker
from .observing.stall_hints import StallHints
from .observing.traces import settle
from .settings import Settings, settings_of

log = logging.getLogger("weightbus.subscriber")

T = TypeVar("T")

CLIENT = "weightbus-python/0.1.0"
HOOK_SECONDS = 1.0  # seconds that `close` waits for the user's code
ROUND_SECONDS = 30.0  # timeout of each wait in `async for`, for a version and for readers
COPY_SECONDS = 10.0  # seconds that `close` waits for a copy to end

# This process's open subscribers, by addresses and name.
_subscribers: "WeakValueDictionary[tuple[tuple[str, ...], str], Subscriber]" = WeakValueDictionary()


class Subscriber(InOneProcess):
    """Receives the versions of some models and applies them.

    Args:
        address: The publisher's address. The publisher may start later. Or a list of addresses, the
            preferred one first: if the publisher or relay at one is gone, the worker connects to
            the next address, and returns to the first one when that answers again.
        models: A target for each model id: an `nn.Module`, a `TensorDict`, a mapping of names to
            torch tensors or numpy arrays (all copied in place), a path (a safetensors file,
            replaced atomically), or a function. For a target that has `DTensor`s, or is a `Part`,
            only this rank's slices are received. A function gets (name, tensor) pairs in the bus's
            memory, and loads them itself: see `Pairs`. If the function raises, the exception
            decides which version runs afterwards: see `UnchangedError`.
        name: This worker's name, unique among the publisher's workers. None: make a name from
            host, process id and random digits.
        keys: A worker's file from `weightbus keygen`, its folder (then `name` selects the file), or
            the file's contents: the worker connects only to the publisher whose keys were made with
            them. Or a list of these, one for each address. None: use the path in WEIGHTBUS_KEYS; if
            that is not set, use no keys.
        strict: Whether version and target must have the same tensor names. With False, a version
            may have more tensors than the target; the worker skips them, but still verifies and
            reports the whole version. A version that lacks a tensor of the target is always
            refused.
        cast: Whether to convert values to the target's dtypes.
        rename: Maps published names to the targets' names, for all `models`, in the form that
            `Settings` describes for a publish. `before_apply` gets the published names. If `rename`
            is a function, it must be fast, as the thread that serves the connection calls it.
        settings: Rarely needed options: times, hooks, memory.

    Raises:
        AddressError: The address is invalid.
        KeysError: The keys cannot be read.
        OSError: Too few file descriptors are left for sockets (the text names `ulimit -n`); or a
            path exists and is not a file, or its folder is not writable.
        ValueError: A name or a renaming is invalid; or `models` is not a mapping of ids to targets.
        TypeError: A hook is a coroutine function.

    The subscriber always receives versions in the background. It applies them when you call
    `receive()`, or, after `start()`, in the background. In a forked process, make a new Subscriber.

    Keep the Subscriber in a variable: if it is dropped without `close()`, the garbage collector
    closes it with a warning, even after `start()`. If a hook or a target function refers to the
    Subscriber (a closure, a bound method of its owner), the collector never frees it: call
    `close()`, or use a `weakref` there. A new Subscriber with the same `address` and `name` in this
    process closes the old one and takes its place, so you may run a notebook cell again.
    """

    __module__ = "weightbus"

    def __init__(
        self,
        address: str | Sequence[str],
        models: Mapping[str, object],
        *,
        name: str | None = None,
        keys: WorkerKeys | str | Path | Sequence[WorkerKeys | str | Path] | None = None,
        strict: bool = True,
        cast: bool = False,
        rename: Rename = None,
        settings: Settings | None = None,
    ) -> None:
        """Start to receive. `help(weightbus.Subscriber)` describes the parameters."""
        chosen = settings_of("Subscriber", settings)
        at = self.addresses = check_all(address)
        own = keys_for(keys, name, at)
        self.name = check_name(default_name(own) if name is None else name, "worker")
        self._targets = targets_of(
            by_id(models),
            strict=strict,
            cast=cast,
            sole_writer=chosen.sole_writer,
            renaming=renaming_of(rename),
            keep=ResidentTarget if chosen.resident else None,
        )
        self._ready_queue = ReadyQueue()
        self._applied = self._ready_queue.changed
        self._calls = Calls(chosen.apply_timeout)
        self._running: dict[str, Update] = {}
        self._flush_numbers = itertools.count(1)
        shared = [MAPPING] if chosen.shared_memory else []
        sliced = any(target.boxes is not None for target in self._targets.values())
        more = [PARTS] if sliced else [CHECKING, DELTA]  # patches and checks are of whole versions
        identity = identity_of(self.name, RENAMING, UPSTREAM, COMPANIONS, *more, *shared)
        expected = {
            model: target.expected()._replace(boxes=target.boxes)
            for model, target in self._targets.items()
        }
        # No object that the subscriber's thread uses may refer to `self`: see `closing`.
        keyring = None if own is None else Keyring()
        fault = partial(fault_of, self._targets)
        machine = WorkerMachine(
            identity, self._targets, fault, chosen.bytes_max, chosen.timing, expected, keyring, at
        )
        with ExitStack() as undo:
            sockets = self._sockets = WorkerSockets(
                at, machine.place, own, machine.in_flight_max, any_data_host=chosen.any_data_host
            )
            undo.enter_context(closing(sockets))
            stall_hints = StallHints(at, machine, self._ready_queue, keyed=own is not None)
            self._loop = WorkerLoop(
                machine,
                sockets,
                self._ready_queue,
                partial(_look, self._calls, stall_hints),
                partial(_rename, self._running, self._applied),
                shared_memory=chosen.shared_memory,
            )
            about = self._targets, self._ready_queue, self._running, self._loop.tell, self._calls
            self._applier = Applier(*about, chosen.before_apply, chosen.on_commit)
            self._loop.apply_by(self._applier.apply_for_waiter)
            files = frozenset(m for m, target in self._targets.items() if target.on_disk)
            work = self._applier, self._ready_queue, self._loop.stop
            others = frozenset(self._targets) - files
            self._background = Background(self.name, *work, others, files)
            self._loop.examine_by(Checker(self._targets, self._applier, self._loop.tell).ask)
            stop_with(self, self._loop)
            undo.pop_all()
        self._take_over()
        self._loop.start()

    def _take_over(self) -> None:
        """Close this process's earlier subscriber of the same addresses and name, if any."""
        before = _subscribers.get((self.addresses, self.name))
        _subscribers[self.addresses, self.name] = self
        if before is not None:
            before._close_as_replaced()  # noqa: SLF001 - a Subscriber, too

    def _close_as_replaced(self) -> None:
        if self._is_forked_copy or self._ready_queue.closed:
            return
        text = f"another Subscriber named {self.name!r} of this process has taken its place"
        log.warning("%s is closed: %s", self, text)
        self._ready_queue.close(ClosedError(text))
        self.close()

    def _mark_as_copy(self) -> None:
        super()._mark_as_copy()
        # without this, `Staged.apply` would wait forever
        self._ready_queue.close_in_child(self._fork_error())

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Subscriber stays in its process, with its sockets and threads: hand over its "
            f"publisher's address ({self._address_list!r}), and make a Subscriber there"
        )

    def __repr__(self) -> str:
        return f"<Subscriber {self.name} of {self._address_list}: {', '.join(self._targets)}>"

    @property
    def _address_list(self) -> str:
        return ", ".join(self.addresses)

    @property
    def address(self) -> str:
        """The address that the worker is connected to, or is trying to connect to."""
        return self._sockets.address

    # Applying in the caller's thread.

    def receive(
        self,
        timeout: float,
        *,
        version: int | tuple[int, int] | None = None,
        model: str | None = None,
    ) -> Update | None:
        """Apply the newest version that has arrived; if none has, wait for one.

        The weights change during this call: call it where no code uses them. With `timeout=0`, the
        call does not wait.

        Args:
            timeout: Seconds to wait.
            version: Apply only this version: a number in the publisher's epoch, or (epoch, version)
                as in a receipt. Until it is applied or this call returns, no newer version of its
                model replaces it. If this version already runs, the call returns at once.
            model: The model of that version; needed if this subscriber has several.

        Returns:
            The applied version; None if no version came within `timeout` seconds.

        Raises:
            ApplyError: A version cannot be applied; the weights are unchanged. With code `gone`:
                the requested version is no longer available.
            TornError: An apply failed half-way; see `reading`.
            RefusedError: The publisher refuses this worker.
            AddressError: The publisher's host name has no address; the worker tries again.
            ClosedError: The subscriber is closed, or applies in the background.
            KeyError: The subscriber does not have that model.
            ValueError: The subscriber has several models, and `model` is missing.
            RuntimeError: Another call waits for a `version` of the model, or has staged one; or
                this thread or task is inside `reading()`.
        """
        return self._receive(timeout, version, model, NEVER)

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
            return self._applier.receive(timeout, stop=stop)
        name, epoch, number = self._exact(version, model)
        return self._applier.receive_exact(name, number, epoch, timeout, stop)

    def _exact(
        self, version: int | tuple[int, int] | None, model: str | None
    ) -> tuple[str, int | None, int]:
        if model is None and len(self._targets) > 1:
            names = ", ".join(self._targets)
            raise ValueError(f"version={version!r}: name its model with model=, one of {names}")
        name = next(iter(self._targets)) if model is None else model
        self._targets[name]
        epoch, number = version if isinstance(version, tuple) else (None, version)
        if epoch is not None:
            checks.whole(epoch, "epoch", 1, INTEGER_MAX)
        return name, epoch, checks.whole(number, "version", 1, INTEGER_MAX)

    def stage(
        self, timeout: float, *, version: int | tuple[int, int], model: str | None = None
    ) -> Staged:
        """Wait until one version is received and verified; `apply()` of the result applies it.

        While the version is staged, the weights do not change and no newer version of the model
        replaces it. If the version was published with `commit="together"`, the worker reports it as
        staged, and the publisher then decides whether to commit it. Other versions need no commit.

            with worker.stage(30, version=(epoch, number)) as staged:
                update = staged.apply(10)

        Args:
            timeout: Seconds to wait.
            version: The version: a number in the publisher's epoch, or (epoch, version).
            model: The model of that version; needed if this subscriber has several.

        Raises:
            TimeoutError: The version did not arrive in time.
            ApplyError: The version does not fit its target, or is not available any more (`gone`).
            RefusedError, AddressError, ClosedError, KeyError, ValueError: As in `receive`.
            RuntimeError: Another version of the model is staged.
        """
        self._check_usable()
        name, epoch, number = self._exact(version, model)
        return self._applier.stage(name, number, epoch, checks.seconds(timeout, "timeout"))

    def flush(self, timeout: float) -> bool:
        """Wait until the publisher has received every report that this worker has sent so far.

        Call this before you answer on another channel, such as a server's API: when that answer
        arrives, the publisher's receipt already includes this worker's failure.

        Args:
            timeout: Seconds to wait.

        Returns:
            Whether the publisher has received all of these reports in time.

        Raises:
            ClosedError: The subscriber belongs to the parent of this forked process.
        """
        self._check_process()
        timeout, number = checks.seconds(timeout, "timeout"), next(self._flush_numbers)
        self._loop.tell(Flush(number))
        return self._ready_queue.wait_flushed(number, timeout)

    async def receive_awaitable(
        self,
        timeout: float,
        *,
        version: int | tuple[int, int] | None = None,
        model: str | None = None,
    ) -> Update | None:
        """Receive from a coroutine: wait and apply in a separate thread.

        Arguments, result and errors are those of `receive`. A cancelled call applies nothing,
        unless its copy has begun: then the thread completes the copy, and the next call without
        `version` returns the `Update`.
        """
        token = CancelToken(self._applier.look)
        work = partial(self._receive, timeout, version, model, token)
        return await in_thread(work, "weightbus-receive", token.cancel, self._keep_result)

    def _keep_result(self, received: "Future[Update | None]") -> None:
        """Keep the result of a cancelled call, for the next call to return."""
        error = received.exception()
        if isinstance(error, ApplyError) or (error is None and received.result() is not None):
            self._ready_queue.keep(received)

    # Applying in the background.

    def start(self) -> "Subscriber":
        """Apply versions in the background from now on, outside every `reading()` block.

        Separate threads write files, so a slow disk delays no model in memory. Still, only one
        thread at a time calls the user's code. An error is logged and kept in `error`. The weights
        are then unchanged, unless the error is a `TornError`.

        Returns:
            This subscriber.

        Raises:
            ClosedError: The subscriber was started before, one of its threads has failed, or it
                belongs to the parent of this forked process.
        """
        self._check_usable()
        self._loop.apply_by(self._background.apply_at_once)
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

        New weights that have arrived have priority: readers that come later queue until these
        weights are applied. In a coroutine, use `async with`: it queues without blocking the event
        loop, and the block may await. A plain `with` block in a coroutine must not await; `with`
        raises if it would wait for another task of its own loop. You may nest blocks, also in tasks
        and threads that inherit the context (`asyncio.gather`, `asyncio.to_thread`).

        Args:
            timeout: Seconds to wait for an apply, or for a first version.
            model: The model to read; None: all. A file target may be replaced during the block,
                unless you name its model; a program that has opened the file keeps the old content.
            needs_version: Wait until each model that is read runs a version.

        Returns:
            A context manager for `with` and `async with`, for one block. It yields a `Running`,
            whose `version` and `epoch` are those of the model that you name, or of the only model;
            both are 0 if it runs no version yet.

        Raises:
            TimeoutError: An apply, with its hooks, took longer than `timeout` seconds; the text
                names the version, the thread and the time. Or `needs_version` is set, and a model
                ran no version in that time.
            TornError: An apply failed half-way, so the weights are a mix of two versions. The next
                successful apply repairs them: the worker retries this version a few times, and
                applies any newly published one.
            RuntimeError: A plain `with` in a coroutine would wait for its own event loop.
            ClosedError: One of the subscriber's threads has failed, or the subscriber belongs to
                the parent of this forked process.
            KeyError: The subscriber does not have that model.
        """
        if self._is_forked_copy:
            raise self._fork_error()
        self._ready_queue.check_alive()  # a failed thread would leave outdated weights, unnoticed
        timeout, missing = checks.seconds(timeout, "timeout"), None
        if model is not None:
            self._targets[model]
        only = next(iter(self._targets)) if len(self._targets) == 1 else model
        if needs_version:
            read = (*self._targets,) if model is None else (model,)
            missing = partial(_missing_text, self._running, read, self._address_list)
        lock = self._applier.lock if model is None else self._applier.lock_of(model)
        return Reading(lock, timeout, partial(Running, self._running, only), model, missing=missing)

    @property
    def lock(self) -> ReadingLock:
        """The lock that `reading` takes, for code that cannot use `with`, such as hooks."""
        self._check_process()
        return self._applier.lock

    def wait_for_version(
        self, model: str, version: int = 1, *, epoch: int = 0, timeout: float
    ) -> Update | None:
        """Wait until a model runs this version or a newer one; return the running version.

        Return None if that takes longer than `timeout` seconds.

        A restarted publisher numbers versions from 1 again, in a later epoch. If you give the
        `epoch`, such as that of a receipt, versions of earlier epochs do not count.

        Raises:
            KeyError: This subscriber does not have that model.
            ClosedError: The subscriber is closed; or one of its threads has failed, and the error's
                cause says why; or it belongs to the parent of this forked process.
        """
        return self._wait_for_version(model, version, epoch, timeout, lambda: False)

    async def wait_for_version_awaitable(
        self, model: str, version: int = 1, *, epoch: int = 0, timeout: float
    ) -> Update | None:
        """Wait in a coroutine. Arguments, result and errors are those of `wait_for_version`."""
        token = CancelToken(self._ready_queue.wake_all)
        work = partial(self._wait_for_version, model, version, epoch, timeout, token)
        return await in_thread(work, "weightbus-wait", token.cancel)

    def _wait_for_version(
        self, model: str, version: int, epoch: int, timeout: float, stop: Callable[[], bool]
    ) -> Update | None:
        # Wait as `wait_for_version` does; also end the wait when `stop` returns True.
        self._check_process()
        self._targets[model]
        checks.whole(version, "version", 0, INTEGER_MAX)
        checks.whole(epoch, "epoch", 0, INTEGER_MAX)
        timeout = checks.seconds(timeout, "timeout")

        def is_running() -> bool:
            running = self._running.get(model)
            if running is None or not epoch:
                return running is not None and running.version >= version
            return (running.epoch, running.version) >= (epoch, version)

        with self._applied:
            self._applied.wait_for(
                lambda: is_running() or self._ready_queue.closed or stop(), timeout
            )
            if not is_running():
                self._ready_queue.check_open()
            return self._running[model] if is_running() else None

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Yield each version as it is applied, until the subscriber is closed.

        Without `start()`, the loop itself applies versions, between two iterations, as
        `receive_awaitable` does. After `start()`, it first yields the version that already runs;
        your loop's body then delays no apply.

        Raises:
            ApplyError, TornError, RefusedError, AddressError: As in `receive`, without `start()`.
            ClosedError: One of the subscriber's threads has failed, or the subscriber belongs to
                the parent of this forked process.
        """
        seen: dict[str, Update] = {}
        while True:
            self._check_process()
            try:
                if self._background.threads:
                    update = await self._next(seen)
                else:
                    update = await self.receive_awaitable(ROUND_SECONDS)
            except ClosedError:
                self._ready_queue.check_alive()
                return
            if update is not None:
                yield update

    async def _next(self, seen: dict[str, Update]) -> Update | None:
        """Return a running version that is not in `seen`; None if none comes in `ROUND_SECONDS`."""
        token = CancelToken(self._ready_queue.wake_all)

        def unseen() -> Update | None:
            return next((u for m, u in self._running.items() if seen.get(m) is not u), None)

        def work() -> Update | None:
            with self._applied:
                self._applied.wait_for(
                    lambda: unseen() or self._ready_queue.closed or token(), ROUND_SECONDS
                )
                if (update := unseen()) is None:
                    self._ready_queue.check_open()
                return update

        update = await in_thread(work, "weightbus-wait", token.cancel)
        if update is not None:
            seen[update.model] = update
        return update

    # Status.

    @property
    def error(self) -> WeightBusError | None:
        """The last error of a background apply; None if there was none.

        In a forked child, a `ClosedError`.
        """
        if self._is_forked_copy:
            return self._fork_error()
        failure = self._ready_queue.failure
        return self._background.error if failure is None else ClosedError.of("subscriber", failure)

    @property
    def cut_off_s(self) -> float | None:
        """Seconds since this worker's relay, or a relay above that, lost its publisher, so that no
        new versions arrive. None: the relay has a publisher, or this worker has no relay.
        """
        return None if self._is_forked_copy else self._loop.cut_off_s

    def update(self, model: str) -> Update | None:
        """Return the version that a `model` runs; None before the first, or if an apply failed
        half-way.

        Raises:
            KeyError: This subscriber does not have that model.
            ClosedError: The subscriber belongs to the parent of this forked process.
        """
        if self._is_forked_copy:
            raise self._fork_error()
        self._targets[model]
        with self._applied:
            return self._running.get(model)

    def version(self, model: str) -> int:
        """Return the number of the version that a model runs; 0 if it runs none."""
        update = self.update(model)
        return update.version if update is not None else 0

    def wait_joined(self, timeout: float) -> bool:
        """Wait until the publisher accepts this worker; return whether it did in `timeout` seconds.

        Raises:
            RefusedError: The publisher refuses this worker.
            AddressError: The publisher's host name has no address; the worker tries again.
            ClosedError: The subscriber is closed, or belongs to the parent of this forked process.
        """
        self._check_process()
        return self._ready_queue.wait_joined(checks.seconds(timeout, "timeout"))

    def close(self) -> None:
        """Leave the publisher and close the sockets; idempotent.

        Afterwards the weights do not change any more, unless user code has not returned: `close`
        waits only a short time for it, and then warns. In a forked child, this call does nothing.
        """
        if self._is_forked_copy:
            return
        self._loop.close()
        self._applier.look()
        settle()
        if threading.current_thread() in self._background.threads:
            return
        end = time.monotonic() + HOOK_SECONDS
        any_alive = partial(_any_alive, self._background.threads)
        if any_alive(end) and not self._calls.under_way:
            any_alive(end + COPY_SECONDS)
        if any_alive(0.0):
            log.warning(
                "%s: closed, but a hook or a disk has not returned; its thread goes on", self
            )

    async def close_awaitable(self) -> None:
        """Close from a coroutine: a thread does the work, so the event loop is not blocked."""
        await in_thread(self.close, "weightbus-close")

    def _check_usable(self) -> None:
        self._check_process()
        self._ready_queue.check_alive()
        if self._background.threads:
            raise ClosedError("this subscriber applies in the background since start()")


def _missing_text(running: Mapping[str, Update], models: tuple[str, ...], address: str) -> str:
    """Return an error text that names the models without a version; empty if all run one."""
    missing = ", ".join(model for model in models if model not in running)
    return missing and f"no version of {missing} runs here yet: does {address} publish it?"


def _any_alive(threads: list[threading.Thread], end: float) -> bool:
    """Join threads until `end`, on the monotonic clock; return whether some are still alive."""
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


def _look(calls: Calls, stall_hints: StallHints) -> None:
    calls.look()
    stall_hints.look()


def identity_of(name: str, *features: str) -> Hello:
    """Return the `Hello` of a new worker in this process, with these features and no models."""
    return Hello(
        name=name,
        instance=secrets.token_hex(16),
        client=CLIENT,
        host=socket.gethostname(),
        pid=os.getpid(),
        features=[*features],
        models={},
    )


def _rename(running: dict[str, Update], changed: threading.Condition, renamed: Renamed) -> None:
    """Record the new epoch and number that a restarted publisher gives the running version."""
    with changed:
        running[renamed.model] = replace(
            running[renamed.model],
            epoch=renamed.epoch,
            version=renamed.version,
            metadata=dict(renamed.metadata),
        )
        changed.notify_all()


def default_name(keys: WorkerKeys | tuple[WorkerKeys, ...] | None) -> str:
    """Return the key's name, or for `*` (also without keys) host, process id and random digits."""
    first = keys[0] if isinstance(keys, tuple) else keys
    pattern = "*" if first is None else first.name
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:80]
    return pattern.replace("*", f"{host}-{os.getpid()}-{secrets.token_hex(2)}")
