"""The thread that keeps a publisher's latest versions on disk, out of everybody's way.

Theory of operation: `offer` leaves a version and returns; a newer one of the model takes its place,
so a slow disk skips versions as a slow worker does. The thread looks for what was left a few times
a second, waits a while for a moment without a publish, and keeps the version's memory only while it
writes: the publisher takes other memory meanwhile. After a version it rests for a multiple of what
that took, since the system is still busy with what was written, and the processors are the
trainer's. What goes wrong is a warning, and is tried again with the next version. Nobody waits for
the disk but `close`: a new epoch is not taken before it is on disk, but the publisher goes on, and
whoever made it necessary asks again.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ..bus.limits import INTEGER_MAX
from ..bus.publisher.version import Snapshot, Version
from ..codecs.checksum import digest_of
from ..codecs.layout import Layout
from .state_folder import StateFolder, StoredVersion, newest, parts_of

log = logging.getLogger("weightbus.state")

LOOK_SECONDS = 0.05  # between two looks for a version to write
REST_TIMES = 9  # the disk is left alone for so many times what a version took: a tenth is ours,
REST_SECONDS = 5.0  # but for no longer: so much later a version is safe, beside its own time
CALM_SECONDS = 1.0  # how long one version waits, in all, for moments without a publish
PAUSE_SECONDS = 0.005  # between two looks whether a publish is over
RECORD_SECONDS = 1.0  # how long a new epoch waits for the disk: less than workers wait for a sign
AHEAD = 10_000  # so far above an epoch is what is recorded: who asks again may ask for a later one
STOP_SECONDS = 10.0  # to write what is left when nobody waits for it
WARN_SECONDS = 60.0  # between two warnings that the disk fails


class _Latest(NamedTuple):
    """What is to be written: a version as it was when it was left."""

    model: str
    key: tuple[int, int]
    names: frozenset[tuple[int, int]]
    layout: Layout
    chunk_bytes: int
    digest: str  # empty: nobody has hashed it by then
    metadata: dict[str, str]
    snapshot: Snapshot


class _OutOfTimeError(Exception):
    """The publisher is closing, and its deadline has passed."""


class Keeper:
    """Writes into a state folder, in a thread of its own; closes the folder in the end.

    Args:
        folder: Where to.
    """

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._is_busy: Callable[[], bool] = lambda: False
        self._offered: dict[str, _Latest] = {}  # by model, what waits to be written
        self._lacking: dict[str, str] = {}  # by model, why its latest is not on disk
        self._epoch = self._on_disk = folder.epoch
        self._asked_at: float | None = None  # for an epoch that is not on disk yet
        self._wake = threading.Event()
        self._deadline: float | None = None  # to be done by then, since the publisher is closing
        self._calm_by = 0.0
        self._warned_at = -WARN_SECONDS
        self._thread = threading.Thread(target=self._run, name="weightbus-state", daemon=True)
        self._thread.start()

    # For any thread.

    def offer(self, version: Version) -> None:
        """Have a version written, unless a newer one comes before its turn. Never waits."""
        self._offered[version.model] = _Latest(
            version.model,
            version.key,
            version.names,
            version.layout,
            version.plan.chunk_bytes,
            version.digest,
            dict(version.metadata),
            version.snapshot,
        )

    def heed(self, is_busy: Callable[[], bool]) -> None:
        """Wait for moments without a publish, as far as this tells of one that is under way."""
        self._is_busy = is_busy

    def recorded(self, epoch: int) -> bool:
        """Return whether an epoch may be taken: it is on disk, or was waited for for long enough.

        Never waits: whoever needs it asks again. Only the publisher's thread asks.
        """
        now = time.monotonic()
        if epoch > self._on_disk:
            if epoch > self._epoch:
                self._epoch = min(epoch + AHEAD, INTEGER_MAX)
            self._asked_at = now if self._asked_at is None else self._asked_at
            self._wake.set()
            if now - self._asked_at < RECORD_SECONDS:
                return False
            log.warning(
                "epoch %d is not in %s yet: if this publisher dies now and restarts with a clock "
                "that is behind, workers refuse it",
                epoch,
                self._folder.path,
            )
        self._asked_at = None
        return True

    def stop(self) -> None:
        """Write what is left and end, without anybody waiting for it."""
        self._deadline = self._deadline or time.monotonic() + STOP_SECONDS
        self._wake.set()

    def close(self, timeout: float) -> bool:
        """Write what is left and end; return whether all is on disk. It warns of what is not."""
        self._deadline = time.monotonic() + timeout
        self._wake.set()
        self._thread.join(timeout)
        lacking = self._lacking | dict.fromkeys(self._offered, "it was never begun")
        if lacking:
            log.warning(
                "closed without the latest version of %s in the state folder %s: after a restart "
                "the previous version is offered",
                "; ".join(f"{model} ({why})" for model, why in sorted(lacking.items())),
                self._folder.path,
            )
        return not lacking

    # For the thread itself.

    def _run(self) -> None:
        try:
            while self._deadline is None:
                self._wake.wait(LOOK_SECONDS)
                self._wake.clear()
                self._write_all()
            self._write_all()
        except _OutOfTimeError:
            log.debug("out of time")  # `close` says what is lacking
        finally:
            if self._deadline is not None:
                self._folder.close()

    def _write_all(self) -> None:
        self._write_epoch()
        for model in list(self._offered):
            self._calm_by = time.monotonic() + CALM_SECONDS
            self._breathe()
            self._lacking.setdefault(model, "there was no time for it")
            version = self._offered.pop(model)
            begun = time.monotonic()
            try:
                self._write(version)
                del self._lacking[model]
            except _OutOfTimeError:
                raise
            except Exception as error:  # a full disk, mostly; whatever it is, publishing goes on
                self._lacking[model] = str(error)
                self._warn(version, error)
            self._rest(begun)

    def _rest(self, begun: float) -> None:
        """Leave the disk alone, but for an epoch that somebody waits for."""
        now = time.monotonic()
        until = now + min(REST_TIMES * (now - begun), REST_SECONDS)
        while self._deadline is None and now < until:
            self._wake.wait(until - now)
            self._wake.clear()
            self._write_epoch()
            now = time.monotonic()

    def _breathe(self) -> None:
        """Let a publish go first, and write an epoch if somebody waits for that."""
        self._write_epoch()
        while self._deadline is None and self._is_busy() and time.monotonic() < self._calm_by:
            self._wake.wait(PAUSE_SECONDS)
            self._write_epoch()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise _OutOfTimeError

    def _write_epoch(self) -> None:
        if self._epoch > self._folder.epoch:
            try:
                self._folder.begin(self._epoch)
            except Exception as error:  # whatever it is, the versions can be written
                self._warn(None, error)
            else:
                self._on_disk = self._folder.epoch

    def _write(self, version: _Latest) -> None:
        data = version.snapshot.keep()
        if data is None:
            return  # its memory has the next version already, which will be offered in a moment
        try:
            chunk_bytes, layout, key = version.chunk_bytes, version.layout, version.key
            digest = version.digest or digest_of(layout.id, data, chunk_bytes)
            names = newest({key, *version.names})
            about = version.model, *key, layout.nbytes, chunk_bytes, digest, names
            stored = StoredVersion(*about, version.metadata)
            self._folder.write(stored, parts_of(layout, data), self._breathe)
        finally:
            version.snapshot.let_go()

    def _warn(self, version: _Latest | None, error: Exception) -> None:
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
