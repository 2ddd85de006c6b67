"""Writes a publisher's latest versions to disk, in a thread, without delaying publishes.

Theory of operation: `offer` queues a version and returns. A newer version of the model replaces a
queued one, so a slow disk skips versions, as a slow worker does. The thread checks for queued
versions several times a second, and waits for a moment without a publish. It holds a version's
memory only while it writes the version; the publisher uses other memory meanwhile. After each
version the thread rests for a multiple of the time that the write took, since the kernel is still
writing, and the trainer needs the processors. An error is logged, and the next version is tried.
Only `close` waits for the disk. The publisher adopts a new epoch once it is on disk; until then the
publisher calls `recorded` again and again, which does not block.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...bus.publisher.version import Snapshot, Version
from ...codecs.checksum import digest_of
from ...codecs.layout import Layout
from ...codecs.protocol_limits import INTEGER_MAX
from ..files.state_folder import StateFolder, StoredVersion, newest, parts_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("weightbus.state")

CHECK_SECONDS = 0.05  # seconds between two checks for a version to write
REST_TIMES = 9  # rest for this multiple of a write's duration: the disk is busy a tenth of the time
REST_SECONDS = 5.0  # the longest rest, in seconds
CALM_SECONDS = 1.0  # seconds that one version waits, in total, until no publish is in progress
PAUSE_SECONDS = 0.005  # seconds between two checks whether a publish is over
RECORD_SECONDS = 1.0  # seconds that a new epoch waits for the disk: less than `lost_after`
AHEAD = 10_000  # record an epoch this much higher than requested: later requests need no write
STOP_SECONDS = 10.0  # seconds for writing the remaining versions after `stop`
WARN_SECONDS = 60.0  # least seconds between two warnings of failed writes


class _Latest(NamedTuple):
    """A version to be written, as it was when it was offered."""

    model: str
    key: tuple[int, int]  # epoch and number
    names: frozenset[tuple[int, int]]  # every (epoch, number) under which the bytes were offered
    layout: Layout
    chunk_bytes: int
    digest: str  # empty: not hashed yet
    metadata: dict[str, str]
    snapshot: Snapshot
    companions: dict[str, int]


class _OutOfTimeError(Exception):
    """The publisher is closing, and the deadline for writing has passed."""


class StateWriter:
    """Writes to a state folder in a separate thread, and finally closes the folder.

    Args:
        folder: The state folder.
    """

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._is_busy: Callable[[], bool] = lambda: False
        self._queued: dict[str, _Latest] = {}  # by model, the version to write
        self._unwritten: dict[str, str] = {}  # by model, why its latest version is not on disk
        self._epoch = self._epoch_on_disk = folder.epoch
        # when `recorded` was first called with an epoch that is not on disk
        self._requested_at: float | None = None
        self._wake = threading.Event()
        self._deadline: float | None = None  # set when the publisher closes
        self._pause_until = 0.0  # when the thread writes, although a publish is in progress
        self._warned_at = -WARN_SECONDS
        self._thread = threading.Thread(target=self._run, name="weightbus-state", daemon=True)
        self._thread.start()

    # For any thread.

    def offer(self, version: Version) -> None:
        """Queue a version, instead of an older one of its model, to be written; never block."""
        self._queued[version.model] = _Latest(
            version.model,
            version.key,
            version.names,
            version.layout,
            version.plan.chunk_bytes,
            version.digest,
            dict(version.metadata),
            version.snapshot,
            dict(version.companions),
        )

    def pause_while(self, is_busy: Callable[[], bool]) -> None:
        """Set a function that returns whether a publish is in progress: writes then pause."""
        self._is_busy = is_busy

    def recorded(self, epoch: int) -> bool:
        """Return whether an epoch may be adopted: it is on disk, or the disk is too slow.

        This never blocks: the publisher's thread calls it again until it returns True.
        """
        now = time.monotonic()
        if epoch > self._epoch_on_disk:
            if epoch > self._epoch:
                self._epoch = min(epoch + AHEAD, INTEGER_MAX)
            self._requested_at = now if self._requested_at is None else self._requested_at
            self._wake.set()
            if now - self._requested_at < RECORD_SECONDS:
                return False
            log.warning(
                "epoch %d is not in %s yet: if this publisher dies now and restarts with a clock "
                "that is behind, workers refuse it",
                epoch,
                self._folder.path,
            )
        self._requested_at = None
        return True

    def stop(self) -> None:
        """Make the thread write the queued versions and end; do not wait for it."""
        self._deadline = self._deadline or time.monotonic() + STOP_SECONDS
        self._wake.set()

    def close(self, timeout: float) -> bool:
        """Write the queued versions and end the thread; return whether all were written.

        Models whose version is not on disk after `timeout` seconds are logged.
        """
        self._deadline = time.monotonic() + timeout
        self._wake.set()
        self._thread.join(timeout)
        unwritten = self._unwritten | dict.fromkeys(self._queued, "it was never begun")
        if unwritten:
            log.warning(
                "closed without the latest version of %s in the state folder %s: after a restart "
                "the previous version is offered",
                "; ".join(f"{model} ({why})" for model, why in sorted(unwritten.items())),
                self._folder.path,
            )
        return not unwritten

    # For this object's thread.

    def _run(self) -> None:
        try:
            while self._deadline is None:
                self._wake.wait(CHECK_SECONDS)
                self._wake.clear()
                self._write_all()
            self._write_all()
        except _OutOfTimeError:
            log.debug("out of time")  # `close` logs the unwritten versions
        finally:
            if self._deadline is not None:
                self._folder.close()

    def _write_all(self) -> None:
        # Write the epoch, and every queued version.
        self._write_epoch()
        for model in list(self._queued):
            self._pause_until = time.monotonic() + CALM_SECONDS
            self._pause()
            models = self._as_one(model)
            for each in models:
                self._unwritten.setdefault(each, "there was no time for it")
            versions = [self._queued.pop(each) for each in models]
            started = time.monotonic()
            try:
                if versions:
                    self._write(versions)
                for each in models:
                    del self._unwritten[each]
            except _OutOfTimeError:
                raise
            except Exception as error:  # usually a full disk; publishing must go on
                self._unwritten |= dict.fromkeys(models, str(error))
                self._warn(versions[0], error)
            self._rest(started)

    def _as_one(self, model: str) -> list[str]:
        """Return the models whose versions must be written together with the model's version.

        The result is empty if that version is written already, or if a companion is not here yet.
        """
        queued = dict(self._queued)  # a copy, since the publisher's thread adds versions
        models = [model] if model in queued else []
        for each in models:
            for other, version in queued.items():
                tied = other in queued[each].companions or each in version.companions
                if tied and other not in models:
                    models.append(other)
        for each in models:
            for other, number in queued[each].companions.items():
                key = queued[each].key[0], number
                here = [s.key for s in self._folder.versions(other)[:1]]
                here += [queued[other].key] if other in models else []
                if all(found < key for found in here):
                    return []
        return models

    def _rest(self, started: float) -> None:
        """After a write that began at `started`, write nothing for a while but a new epoch."""
        now = time.monotonic()
        until = now + min(REST_TIMES * (now - started), REST_SECONDS)
        while self._deadline is None and now < until:
            self._wake.wait(until - now)
            self._wake.clear()
            self._write_epoch()
            now = time.monotonic()

    def _pause(self) -> None:
        """Pause while a publish is in progress, but write a requested epoch.

        Raises:
            _OutOfTimeError: The publisher is closing, and its deadline has passed.
        """
        self._write_epoch()
        while self._deadline is None and self._is_busy() and time.monotonic() < self._pause_until:
            self._wake.wait(PAUSE_SECONDS)
            self._write_epoch()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise _OutOfTimeError

    def _write_epoch(self) -> None:
        if self._epoch > self._folder.epoch:
            try:
                self._folder.begin(self._epoch)
            except Exception as error:  # versions can still be written
                self._warn(None, error)
            else:
                self._epoch_on_disk = self._folder.epoch

    def _write(self, versions: Sequence[_Latest]) -> None:
        # Write a version, or versions that are published as one.
        held, stored = list[_Latest](), dict[StoredVersion, "Iterable[Buffer]"]()
        try:
            for version in versions:
                data = version.snapshot.keep()
                if data is None:
                    return  # a newer version is in its memory, and will be queued soon
                held.append(version)
                chunk_bytes, layout, key = version.chunk_bytes, version.layout, version.key
                digest = version.digest or digest_of(layout.id, data, chunk_bytes)
                names = newest({key, *version.names})
                about = version.model, *key, layout.nbytes, chunk_bytes, digest, names
                entry = StoredVersion(*about, version.metadata, version.companions)
                stored[entry] = parts_of(layout, data)
            self._folder.write_as_one(stored, self._pause)
        finally:
            for version in held:
                version.snapshot.let_go()

    def _warn(self, version: _Latest | None, error: Exception) -> None:
        # Log that a version, or without one the epoch, was not written; at most once a minute.
        now = time.monotonic()
        if now - self._warned_at < WARN_SECONDS:
            return
        self._warned_at = now
        what = f"epoch {self._epoch}" if version is None else f"{version.model} {version.key}"
        log.warning(
            "%s could not be written to the state folder %s: %s. What it held before is still "
            "there; the next version is tried again",
            what,
            self._folder.path,
            error,
        )
