"""Applies ready versions to targets: calls the hooks, excludes readers, reports the outcome."""

import logging
import sys
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from ...bus.errors import ApplyError, not_applied, rejected, summary_of
from ...bus.event_log import RateLimitedWarning
from ...bus.net.ready_queue import ReadyQueue
from ...bus.protocol_limits import LABEL_MAX
from ...bus.staged import OverwrittenError, StagedVersion, StaleError
from ...bus.units import span
from ...bus.worker.events import LoopEvent, Outcome, Report, Waits, Wanted
from ...codecs.apply import as_arrays
from ...codecs.checksum import digest_of
from ...codecs.errors import StateError
from ...codecs.layout import Layout
from .. import checks
from ..observing.traces import SDK, on_apply
from .calls import Calls, OverdueError
from .loading import VersionInfo
from .reading import READING_SECONDS, InUseError, ReadingLock
from .target import Target

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightbus.subscriber")

# Seconds that an apply in the background waits for readers, while later readers queue behind it.
# Then the queued readers are admitted, well before their own timeout: one reader that never leaves
# the lock must not make all later readers fail.
PATIENCE_SECONDS = READING_SECONDS / 2
WARN_SECONDS = 1.0  # seconds that a version waits for readers before the log warns
PINNED_MAX = 4  # the largest number of pinned buffers: those of one model
Memory = NDArray[np.uint8]
NEVER: Callable[[], bool] = bool  # a function that always returns False


@dataclass(frozen=True, slots=True)
class Update:
    """A version that was just applied.

    Attributes:
        model, epoch, version: The version's model id, epoch and number.
        nbytes: Bytes of its tensors.
        digest: The digest of its bytes, as reported to the publisher; empty if the bytes were read
            from shared memory and the publish did not request digests.
        seconds: The duration of the copy into the target.
        metadata: The publisher's metadata, as text by name.
    """

    __module__ = "weightbus.types"

    model: str
    epoch: int
    version: int
    nbytes: int
    digest: str
    seconds: float
    metadata: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)


class Running:
    """The running version, which code in a `reading()` block reads.

    Attributes:
        model: The model id; None if the block reads several models, and `reading()` names none.
        update: The `Update` of the model; None if the model runs no version yet.
    """

    __module__ = "weightbus.types"

    __slots__ = ("model", "update")

    def __init__(self, running: Mapping[str, Update], model: str | None) -> None:
        self.model = model
        self.update = running.get(model) if model is not None else None

    @property
    def epoch(self) -> int:
        """The epoch of the publisher that published the version; 0 if no version runs yet."""
        return self._update.epoch if self._update is not None else 0

    @property
    def version(self) -> int:
        """The number of the version; 0 if no version runs yet."""
        return self._update.version if self._update is not None else 0

    @property
    def metadata(self) -> Mapping[str, str]:
        """The publisher's metadata, as text by name; empty if no version runs yet."""
        return self._update.metadata if self._update is not None else {}

    @property
    def _update(self) -> Update | None:
        if self.model is None:
            raise ValueError("several models are read here: name one, reading(model=...)")
        return self.update

    def __repr__(self) -> str:
        return f"<Running {self.model}: {self.update}>"


class Offer(VersionInfo):
    """A version that is about to be applied: the argument of `before_apply`.

    Args:
        staged: The version in the worker's memory.

    Attributes:
        model, epoch, version, nbytes, digest, metadata: As in `Pairs`.
    """

    __module__ = "weightbus.types"

    def __init__(self, staged: StagedVersion) -> None:
        super().__init__(staged)
        self._staged = staged

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the version's tensors by name: read-only arrays, valid until the hook returns."""
        return as_arrays(self._staged.layout, self._staged.data)


class Staged:
    """A received and verified version that is not applied until you call `apply()`.

    Until `release()`, or the end of a `with` block, no newer version of its model replaces it.

    Args:
        model: The version's model id.
        key: The version's epoch and number.
        apply: A function that applies the version. Its arguments: model, key, timeout in seconds.
        pin: A function that pins the version's memory for copies to a device.
        hold: A stack that lets newer versions replace this one when it is closed.

    Attributes:
        model, epoch, version: The version's model id, epoch and number.
    """

    __module__ = "weightbus.types"

    def __init__(
        self,
        model: str,
        key: tuple[int, int],
        apply: Callable[[str, tuple[int, int], float], Update | None],
        pin: "Callable[[torch.device | str], None]",
        hold: ExitStack,
    ) -> None:
        self.model, (self.epoch, self.version) = model, key
        self._apply, self._pin = apply, pin
        # without this, newer versions would wait forever
        self._release = weakref.finalize(self, hold.close)

    def pin(self, device: "torch.device | str") -> None:
        """Pin the version's memory, so that a CUDA device can copy directly from that memory.

        If a target function loads versions to a device, call this before you pause work on the old
        weights: copies then take a fraction of the time. Pinning is slow, but happens only once for
        each of the two buffers in which versions arrive. If pinning fails, the log warns, and the
        copies take longer.

        Args:
            device: The CUDA device; any other device is ignored.

        Raises:
            RuntimeError: The version was released.
        """
        if not self._release.alive:
            raise RuntimeError(f"{self} was released: stage it again")
        self._pin(device)

    def apply(self, timeout: float) -> Update | None:
        """Apply the version in this thread.

        If it was published with `commit="together"`, this waits for the publisher's decision.

        Args:
            timeout: Seconds to wait for the decision, and for readers to leave.

        Returns:
            The version that the model runs afterwards, also if an earlier call applied it. None if
            it could not be applied in time; you may then call this again.

        Raises:
            ApplyError: The version cannot be applied; the weights are unchanged. With code `gone`:
                the publisher has aborted the version.
            TornError: The apply failed half-way; see `Subscriber.reading`.
            ClosedError: The subscriber is closed.
            RuntimeError: The version was released.
        """
        if not self._release.alive:
            raise RuntimeError(f"{self} was released: stage it again")
        timeout = checks.seconds(timeout, "timeout")
        return self._apply(self.model, (self.epoch, self.version), timeout)

    def release(self) -> None:
        """Allow newer versions to replace this one; idempotent."""
        self._release()

    def __repr__(self) -> str:
        return f"<Staged {self.model} version {self.version} of epoch {self.epoch}>"

    def __enter__(self) -> "Staged":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Applier:
    """Applies versions that are ready, in the calling thread.

    Args:
        targets: The target of each model.
        ready_queue: The queue of versions that are ready to be applied.
        running: The running version of each model; changed under `ready_queue.changed`.
        tell: A function that queues an event for the worker's thread.
        calls: Calls the user's code with a deadline.
        before_apply, on_commit: The user's hooks, or None.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        ready_queue: ReadyQueue,
        running: dict[str, Update],
        tell: Callable[[LoopEvent], None],
        calls: Calls,
        before_apply: Callable[[Offer], object] | None,
        on_commit: Callable[[Update], object] | None,
    ) -> None:
        self._targets, self._ready_queue = targets, ready_queue
        self._running, self._tell = running, tell
        self._calls, self._before_apply, self._on_commit = calls, before_apply, on_commit
        self._layouts: dict[str, Layout] = {}  # by model, the layout of the running version
        # by model, (epoch, version) of the last version that `before_apply` accepted
        self._approved: dict[str, tuple[int, int]] = {}
        # by model, (epoch, version) of the only version to apply
        self._wanted: dict[str, tuple[int, int]] = {}
        # pinned buffers, each with its pinned pages
        self._pinned: list[tuple[NDArray[np.uint8], object]] = []
        self._delayed = RateLimitedWarning(log, "new weights wait for readers of the old ones: %s")
        # Models that the worker's thread may apply versions to: no disk, no user code.
        self._quick = frozenset[str]()
        if before_apply is None and on_commit is None:
            quick = (m for m, t in targets.items() if not (t.calls_user or t.on_disk))
            self._quick = frozenset(quick)
        self.lock = ReadingLock()  # one lock for all models in memory
        for target in targets.values():
            self.lock.reads_on(target.devices)
        self._files = {model: ReadingLock() for model, target in targets.items() if target.on_disk}

    def lock_of(self, model: str) -> ReadingLock:
        """Return the lock of a model. Each file has its own lock; models in memory share one."""
        return self._files.get(model, self.lock)

    def look(self) -> None:
        """Wake waiting threads, which then check whether to stop, or whether all is closed."""
        self._ready_queue.wake_all()
        for lock in (self.lock, *self._files.values()):
            lock.look()

    def receive(
        self,
        timeout: float,
        models: frozenset[str] | None = None,
        *,
        patience: float = 0.0,
        stop: Callable[[], bool] = NEVER,
    ) -> Update | None:
        """Wait until a version is ready, and apply the newest one; see `Subscriber.receive`.

        Args:
            timeout: Seconds to wait.
            models: The ids of the models whose versions may be applied; None: all.
            patience: Once a version is ready, wait at least so many seconds for readers to leave.
            stop: Returns whether to stop waiting; nothing is applied then.
        """
        self.lock.check_not_reading()
        deadline = time.monotonic() + timeout
        while True:
            taken = self._ready_queue.take(max(0.0, deadline - time.monotonic()), models, stop)
            if taken is None:
                return None
            if isinstance(taken, StagedVersion):
                until = max(deadline, time.monotonic() + patience)
                done, update = self._attempt(taken, until, stop)
                if done:
                    return update
            elif taken.error is not None:
                try:
                    raise taken.error
                finally:  # the error's traceback refers to this frame
                    del taken
            elif taken.update is not None:
                return cast("Update", taken.update)

    def receive_exact(
        self,
        model: str,
        version: int,
        epoch: int | None,
        timeout: float,
        stop: Callable[[], bool] = NEVER,
    ) -> Update | None:
        """Wait for one version and apply only this one; see `Subscriber.receive`."""
        self.lock.check_not_reading()
        deadline = time.monotonic() + timeout
        if epoch is None and not self._ready_queue.wait_joined(timeout, stop):
            return None
        key = (self._ready_queue.joined_epoch if epoch is None else epoch, version)
        with self._restricted(model, key):
            return self._apply_exact(model, key, deadline, stop)

    def stage(self, model: str, version: int, epoch: int | None, timeout: float) -> Staged:
        """Wait for one version; return it, and keep newer versions from replacing it."""
        deadline = time.monotonic() + timeout
        if epoch is None and not self._ready_queue.wait_joined(timeout):
            raise TimeoutError(f"{model} version {version}: no publisher after {timeout:g} s")
        key = (self._ready_queue.joined_epoch if epoch is None else epoch, version)
        with ExitStack() as hold:
            hold.enter_context(self._restricted(model, key))
            left = max(0.0, deadline - time.monotonic())
            done = lambda: self._key_of(model) == key  # noqa: E731
            is_here, staged = self._ready_queue.wait_staged(model, key, left, done)
            if is_here:
                pin = partial(self._pin, staged)
                return Staged(model, key, self._apply_staged, pin, hold.pop_all())
        update = self._running.get(model)
        which = "none" if update is None else f"version {update.version} of epoch {update.epoch}"
        raise TimeoutError(
            f"{model} version {version} of epoch {key[0]} has not arrived after {timeout:g} s; "
            f"{which} runs"
        )

    def _pin(self, staged: StagedVersion | None, device: "torch.device | str") -> None:
        """Pin a version's buffer for copies to a device; the buffer stays pinned afterwards."""
        import torch

        from ...codecs import device_memory

        to = torch.device(device)
        pinned = staged is None or any(data is staged.data for data, _ in self._pinned)
        if staged is None or pinned or to.type != "cuda":
            return
        pages = device_memory.pinned(staged.data, to, whole=True)
        self._pinned = [*self._pinned, (staged.data, pages)][-PINNED_MAX:]

    def _apply_staged(self, model: str, key: tuple[int, int], timeout: float) -> Update | None:
        self.lock.check_not_reading()
        return self._apply_exact(model, key, time.monotonic() + timeout, NEVER)

    @contextmanager
    def _restricted(self, model: str, key: tuple[int, int]) -> Generator[None]:
        """Apply no other version to a model during the `with` block.

        Raises:
            RuntimeError: The model is already restricted to a version.
        """
        with self._ready_queue.changed:
            wanted = self._wanted.setdefault(model, key)
            if wanted is not key:
                raise RuntimeError(
                    f"{model}: another call waits for version {wanted[1]} of epoch {wanted[0]}, or "
                    "has staged it; release that version first"
                )
        try:
            with self._ready_queue.awaiting(model, key):
                self._tell(Wanted(model, key))
                yield
        finally:
            self._tell(Wanted(model, None))  # before another call can restrict the model
            del self._wanted[model]

    def _apply_exact(
        self, model: str, key: tuple[int, int], deadline: float, stop: Callable[[], bool]
    ) -> Update | None:
        def is_running() -> bool:
            return self._key_of(model) == key

        while True:
            left = max(0.0, deadline - time.monotonic())
            staged = self._ready_queue.take_exact(model, key, left, is_running, stop)
            done, update = (True, None) if staged is None else self._attempt(staged, deadline, stop)
            if done:
                return self._running[model] if self._key_of(model) == key else update

    def layout_of(self, model: str, key: tuple[int, int]) -> Layout | None:
        """Return the layout of version `key` if the model runs it, else None. Needs its lock."""
        return self._layouts[model] if self._key_of(model) == key else None

    def _key_of(self, model: str) -> tuple[int, int] | None:
        """Return epoch and number of the version that a model runs; None if it runs none."""
        update = self._running.get(model)
        return None if update is None else (update.epoch, update.version)

    def _attempt(
        self, staged: StagedVersion, deadline: float, stop: Callable[[], bool]
    ) -> tuple[bool, Update | None]:
        """Apply a version that is ready; put it back if readers do not leave in time.

        Returns:
            Whether the caller's wait has ended, and the applied version (None: none was applied).
        """
        if staged.others:
            return self._attempt_as_one(staged, deadline, stop)
        waits, lock = False, self.lock_of(staged.model)
        try:
            if self._before_apply is not None:
                self._approve(staged, self._before_apply)
            waits = True
            self._targets[staged.model].prepare(staged)
            left = max(0.0, deadline - time.monotonic())
            with self._writing(lock, staged, left, lambda: self._ready_queue.closed or stop()):
                waits = False
                update = self._apply(lock, staged)
        except InUseError:  # readers did not leave: apply the version later
            self._put_back(staged)
            self._ready_queue.check_open()
            return True, None
        except StaleError:  # its shared memory has a newer version now: wait for that version
            self._report(staged, "stale")
            return False, None
        except BaseException:
            if waits:  # for instance Ctrl-C while waiting for readers
                self._put_back(staged)
            raise
        return update is not None, update

    def _attempt_as_one(
        self, staged: StagedVersion, deadline: float, stop: Callable[[], bool]
    ) -> tuple[bool, Update | None]:
        # Do the same as `_attempt` for versions that are applied at once.
        waits, each = True, self._in_order(staged)
        try:
            if self._before_apply is not None:
                waits = False
                self._approve_as_one(each, self._before_apply)
                waits = True
            for one in each:
                self._targets[one.model].prepare(one)
            with ExitStack() as locks:
                for lock in self._locks_of(each):
                    left = max(0.0, deadline - time.monotonic())
                    ended = lambda: self._ready_queue.closed or stop()  # noqa: E731
                    locks.enter_context(self._writing(lock, staged, left, ended))
                waits = False
                update = self._apply_as_one(each)
        except InUseError:
            self._put_back(staged)
            self._ready_queue.check_open()
            return True, None
        except StaleError:
            return False, None
        except BaseException:
            if waits:
                self._put_back(staged)
            raise
        return update is not None, update

    def _in_order(self, staged: StagedVersion) -> Sequence[StagedVersion]:
        """Return the versions to apply at once; the first are those that are likelier to fail.

        Versions in shared memory may be overwritten. User code may refuse a version, and it may be
        impossible to undo the targets that were written before.
        """

        def order(one: StagedVersion) -> tuple[bool, bool, str]:
            return one.shared is None, not self._targets[one.model].calls_user, one.model

        return sorted((staged, *staged.others), key=order)

    def _locks_of(self, each: Sequence[StagedVersion]) -> list[ReadingLock]:
        """Return the locks of the versions' models, in the order in which threads acquire them."""
        files = sorted(one.model for one in each if one.model in self._files)
        in_memory = [self.lock] if len(files) < len(each) else []
        return in_memory + [self._files[model] for model in files]

    def _put_back(self, staged: StagedVersion) -> None:
        for one in (staged, *staged.others):
            self._report(one, "put-back")
        for replaced in self._ready_queue.put_back(staged):  # a newer version is ready
            self._report(replaced, "newer")

    def apply_at_once(self, staged: StagedVersion) -> bool:
        """Apply a small version in the worker's thread, unless the lock is in use.

        This saves the time to wake another thread.

        Returns:
            Whether this call has handled the version; if not, another thread must apply it.
        """
        if staged.model not in self._quick or self._ready_queue.closed:
            return False
        if not self.lock.begin_write(_activity(staged)):  # the lock is in use
            return False
        update: Update | None = None
        try:
            update = self._apply(self.lock, staged, at_once=True)
        except StaleError:
            self._report(staged, "stale")
        finally:
            self.lock.end_write()
        if update is not None and SDK in sys.modules:
            on_apply(update)
        return True

    def apply_for_waiter(self, staged: StagedVersion) -> bool:
        """Apply a small version in the worker's thread, for a thread that waits in `receive`.

        The waiting thread itself applies versions to targets on a device, since copies belong on
        that thread's CUDA stream. With OpenTelemetry, the waiting thread applies all versions,
        since the span belongs in that thread's context.

        Returns:
            Whether this call has handled the version; if not, the waiting thread must apply it.
        """
        if staged.model not in self._quick or SDK in sys.modules:
            return False
        if self._targets[staged.model].devices:
            return False
        if not self.lock.begin_write(_activity(staged)):  # the lock is in use
            return False
        try:
            turn = self._ready_queue.claim(staged.model)
            if turn is None:
                return False
            try:
                turn.end(self._apply(self.lock, staged, at_once=True))
            except StaleError:
                self._report(staged, "stale")
                turn.end(None)
            except BaseException as error:  # the waiting thread will raise it
                turn.end(None, error)
        finally:
            self.lock.end_write()
        return True

    def _report(self, staged: StagedVersion, outcome: Outcome) -> None:
        self._tell(Report(staged.model, staged.key, outcome))

    def _approve(self, staged: StagedVersion, before_apply: Callable[[Offer], object]) -> None:
        """Call `before_apply` once for a version, while readers still read the previous one."""
        if self._outdated(staged.model, staged.key):
            return
        if self._approved.get(staged.model) == staged.key:
            return  # accepted earlier, then put back, since readers did not leave
        self._report(staged, "taken")
        call = partial(before_apply, Offer(staged))
        overdue = partial(self._report_overdue, staged, "before_apply", lambda: True)
        try:
            with staged.reading():
                self._calls.make(call, overdue)
        except StaleError:
            raise
        except OverdueError as error:
            self._report_returned(staged, error)
        except BaseException as error:
            self._raise_failure(staged, error, intact=True)
        self._approved[staged.model] = staged.key

    def _approve_as_one(
        self, each: Sequence[StagedVersion], before_apply: Callable[[Offer], object]
    ) -> None:
        """Call `before_apply` for versions applied at once; if it refuses one, all fail."""
        for one in each:
            try:
                self._approve(one, before_apply)
            except StaleError as error:
                self._drop_others(each, one, error, "failed", {})
                self._report(one, "stale")
                raise
            except BaseException as error:
                self._drop_others(each, one, error, "declined", {})
                raise

    def _outdated(self, model: str, key: tuple[int, int]) -> bool:
        running = self._running.get(model)
        return running is not None and (running.epoch, running.version) >= key

    def _writing(
        self, lock: ReadingLock, staged: StagedVersion, timeout: float, stop: Callable[[], bool]
    ) -> AbstractContextManager[None]:
        since = time.monotonic()

        def waits(holders: str) -> None:
            now, name = time.monotonic(), f"{staged.model} version {staged.version}"
            self._tell(Waits(staged.model, staged.key, _shortened(holders)))
            if now - since >= WARN_SECONDS:
                self._delayed.warn(f"{name} has waited {span(now - since)}: {holders}", now)

        return lock.writing(timeout, _activity(staged), stop=stop, waiting=waits)

    def _apply(
        self, lock: ReadingLock, staged: StagedVersion, *, at_once: bool = False
    ) -> Update | None:
        """Apply a version. After a failure that cannot be undone, the model runs no version.

        With `at_once`, the worker's thread makes this call. That thread cannot handle events
        meanwhile, so only the result is reported.

        Returns:
            The applied version; None if a newer one already runs.
        """
        key = staged.key
        if self._outdated(staged.model, key):
            self._report(staged, "newer")  # another thread has applied this or a newer version
            return None
        if not at_once:
            self._tell(Report(staged.model, key, "taken"))
        target, was_invalid = self._targets[staged.model], False
        try:
            update = self._copy(lock, staged, target)
            was_invalid = bool(lock.invalid) and lock.mark_valid(staged.model)
            if self._on_commit is not None:
                undo = partial(_undo, target, was_invalid=was_invalid)
                overdue = partial(self._report_overdue, staged, "on_commit", undo, writes=True)
                self._calls.make(partial(self._on_commit, update), overdue)
            applied_bytes = target.applied_bytes(staged)
            target.settle()
        except OverdueError as error:
            self._report_returned(staged, error)
        except BaseException as error:
            if isinstance(error, StaleError) and not isinstance(error, OverwrittenError):
                raise  # nothing was copied
            self._raise_failure(staged, error, intact=_undo(target, was_invalid=was_invalid))
        # Record the version before the report: code that waits for the receipt must find it here.
        with self._ready_queue.lock:
            self._running[staged.model], self._layouts[staged.model] = update, staged.layout
            self._ready_queue.changed.notify_all()
        kept, digest = target.calls_user and target.has_kept(key), update.digest
        about = staged.model, key
        outcome = target.detail, digest
        self._tell(Report(*about, "applied", *outcome, bytes=applied_bytes, kept=kept))
        if not at_once and SDK in sys.modules:
            on_apply(update)
        return update

    def _apply_as_one(self, each: Sequence[StagedVersion]) -> Update | None:
        """Apply versions at once, while all of their models are locked; return the last update.

        If one version fails, the others are undone. A model whose target cannot undo runs no
        version then, so no reader sees a new version of one model beside an old version of another.
        """
        for one in each:
            outcome: Outcome = "newer" if self._outdated(one.model, one.key) else "taken"
            self._report(one, outcome)
        each = [one for one in each if not self._outdated(one.model, one.key)]
        if not each:
            return None
        updates, memory = dict[str, Update](), dict[str, Memory | None]()
        was_invalid = dict[str, bool]()  # by model that was written, whether it ran no version
        one = each[0]
        try:
            for one in each:
                self._check_fits(one)
            for one in each:
                lock = self.lock_of(one.model)
                was_invalid[one.model] = one.model in lock.invalid
                updates[one.model] = self._copy(lock, one, self._targets[one.model])
            for one in each:
                self.lock_of(one.model).mark_valid(one.model)
            for one in each:
                if self._on_commit is not None:
                    overdue = partial(self._report_overdue, one, "on_commit", NEVER, writes=True)
                    self._calls.make(partial(self._on_commit, updates[one.model]), overdue)
            for one in each:
                memory[one.model] = self._targets[one.model].applied_bytes(one)
                self._targets[one.model].settle()
        except BaseException as error:
            self._fail_as_one(each, one, error, was_invalid)
        with self._ready_queue.lock:
            self._running |= updates
            self._layouts |= {one.model: one.layout for one in each}
            self._ready_queue.changed.notify_all()
        for one in each:
            target, update = self._targets[one.model], updates[one.model]
            kept = target.calls_user and target.has_kept(one.key)
            text, digest, bytes_ = target.detail, update.digest, memory[one.model]
            about = one.model, one.key
            self._tell(Report(*about, "applied", text, digest, bytes=bytes_, kept=kept))
            if SDK in sys.modules:
                on_apply(update)
        *others, last = updates.values()
        for update in others:
            self._ready_queue.keep_update(update.model, update)
        return last

    def _check_fits(self, staged: StagedVersion) -> None:
        """Raise StateError if a version does not fit its target; write nothing."""
        if misfit := self._targets[staged.model].fault(staged.layout):
            raise StateError(misfit)

    def _fail_as_one(
        self,
        each: Sequence[StagedVersion],
        culprit: StagedVersion,
        error: BaseException,
        was_invalid: Mapping[str, bool],
    ) -> NoReturn:
        """Undo versions that were to be applied at once, report them, and raise the error.

        Args:
            each: The versions.
            culprit: The version that has failed.
            error: The error.
            was_invalid: By model whose target was written to, whether the model ran no version.
        """
        written = [*was_invalid.items()]
        undone = {m: _undo(self._targets[m], was_invalid=was) for m, was in reversed(written)}
        torn = not all(undone.values())
        intact = undone.get(culprit.model, True)
        if isinstance(error, OverdueError):
            self._drop_others(each, culprit, error, "failed", undone)
            self._report_returned(culprit, error)
        stale = isinstance(error, StaleError) and intact
        retry = torn or stale or not_applied("", 0, 0, error, intact=True).code == "no-memory"
        self._drop_others(each, culprit, error, "failed" if retry else "declined", undone)
        if stale:
            self._report(culprit, "stale")
            raise error
        outcome: Outcome | None = "failed" if torn and intact else None
        self._raise_failure(culprit, error, intact=intact, outcome=outcome)

    def _drop_others(
        self,
        each: Sequence[StagedVersion],
        culprit: StagedVersion,
        error: BaseException,
        outcome: Outcome,
        undone: Mapping[str, bool],
    ) -> None:
        """Report that the versions other than `culprit` are not applied, since it has failed.

        `outcome`: that of versions whose models are unchanged; `undone`: by model, whether it is.
        """
        version = f"version {culprit.version} of {culprit.model}"
        text = f"{version} has failed, which is published as one: {summary_of(error)}"
        cause = RuntimeError(text)
        for one in each:
            if one is not culprit:
                intact = undone.get(one.model, True)
                self._report_failure(one, cause, intact=intact, outcome=outcome if intact else None)

    def _copy(self, lock: ReadingLock, staged: StagedVersion, target: Target) -> Update:
        # Copy a version into its target; return its `Update`.
        before, digest, devices = time.perf_counter(), staged.digest, target.devices
        if devices:
            lock.reads_on(devices)
        if lock.streams is not None:
            lock.wait_for_readers()
        second = bool(devices) and target.from_second(staged)
        apply: Callable[[], object] = partial(target.apply, staged)
        if target.calls_user:  # no undo: only the user's code knows what it has changed
            overdue = partial(self._report_overdue, staged, "its target", NEVER, writes=True)
            apply = partial(self._calls.make, apply, overdue)
        if staged.shared is None:
            apply()
        else:
            with staged.reading(second=second):
                apply()
                if staged.hash_chunks:
                    digest = digest_of(staged.layout.id, staged.data, staged.hash_chunks)
        nbytes, seconds = staged.layout.nbytes, time.perf_counter() - before
        about = staged.model, *staged.key, nbytes, digest, seconds
        return Update(*about, dict(staged.metadata))

    def _report_overdue(
        self,
        staged: StagedVersion,
        what: str,
        undo: Callable[[], bool],
        *,
        writes: bool = False,
    ) -> ApplyError:
        """Report that user code in another thread has passed its deadline; return the error."""
        error = TimeoutError(
            f"{what} did not return within {self._calls.seconds:g} s: make it faster, or raise "
            "apply_timeout="
        )
        failure = self._report_failure(staged, error, intact=undo(), still=True)
        log.error("%s", failure)
        if writes:
            self.lock_of(staged.model).release_readers(staged.model, failure)
        return failure

    def _report_returned(self, staged: StagedVersion, overdue: OverdueError) -> NoReturn:
        """Report that overdue user code has returned, so that the next version can be applied.

        Raises:
            ApplyError: The error that was reported at the deadline.
        """
        kept = self._targets[staged.model].has_kept(staged.key)
        # The publisher counts the outcome that was reported at the deadline, not this one.
        self._tell(Report(staged.model, staged.key, "declined", kept=kept))
        raise overdue.failure

    def _raise_failure(
        self,
        staged: StagedVersion,
        error: BaseException,
        *,
        intact: bool,
        outcome: Outcome | None = None,
    ) -> NoReturn:
        """Report a failed apply to readers and to the publisher; raise the error."""
        failure = self._report_failure(staged, error, intact=intact, outcome=outcome)
        try:
            raise failure if isinstance(error, Exception) else error
        finally:  # break the cycle of errors and this frame, which refers to the version's memory
            del failure, error

    def _report_failure(
        self,
        staged: StagedVersion,
        error: BaseException,
        *,
        intact: bool,
        still: bool = False,
        outcome: Outcome | None = None,
    ) -> ApplyError:
        # Report a failed apply; return the error. `intact`: the old version still runs. `still`:
        # the user's code has not returned. `outcome`: None if it follows from the error.
        target, misfit = self._targets[staged.model], ""
        if intact and isinstance(error, StateError):  # the user may have changed the target
            misfit = target.fault(staged.layout)
        if misfit:
            failure = rejected(staged.model, *staged.key, "layout-mismatch", misfit)
        else:
            failure = not_applied(staged.model, *staged.key, error, intact=intact)
        if not intact:
            self.lock_of(staged.model).mark_invalid(staged.model, failure)
            with self._ready_queue.changed:
                self._running.pop(staged.model, None)
                self._ready_queue.changed.notify_all()
        if_intact: Outcome = "failed" if failure.code == "no-memory" else "declined"
        outcome = outcome or (if_intact if intact else "torn")
        kept, text = target.has_kept(staged.key), misfit or summary_of(error)
        report = Report(
            staged.model, staged.key, outcome, text, still=still, kept=kept, misfit=bool(misfit)
        )
        self._tell(report)
        return failure


def _activity(staged: StagedVersion) -> str:
    return f"applying {staged.model} version {staged.key[1]}"


def _shortened(text: str) -> str:
    """Return a text, shortened to the longest label that a message may have."""
    return text if len(text) <= LABEL_MAX else f"{text[: LABEL_MAX - 1]}…"


def _undo(target: Target, *, was_invalid: bool) -> bool:
    """Undo a target's last apply; return whether the model runs its previous version again."""
    try:
        return target.undo() and not was_invalid
    except Exception:
        log.exception("the old content could not be restored")
        return False
