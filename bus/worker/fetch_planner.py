"""Decides when a worker requests the latest version of a model. (W4)

A failed version that is to be tried again is requested after ever longer pauses. If the user wants
only one particular version, that version is requested by its number, once it exists.
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from ..effects import Effect, Rejected, Send, WholeStaged
from ..limits import Timing
from ..messages import Fetch
from .version_store import Key, VersionStore


class _Exact(Struct, frozen=True):
    """The only version that the user wants."""

    key: Key
    gone: bool = False  # the publisher no longer has it
    asked_at: float = -math.inf  # when it was requested last


class _Backoff(Struct, frozen=True):
    """A pause in the requests for a version that failed."""

    key: Key
    until: float  # the end of the pause
    pause: float  # its length in seconds


class FetchPlanner:
    """Decides which versions of one model to request, and when.

    Args:
        model: The model's name.
        versions: The versions of the model that this worker has.
        timing: The timeouts and intervals.
    """

    def __init__(self, model: str, versions: VersionStore, timing: Timing) -> None:
        self._model, self._versions, self._timing = model, versions, timing
        self.only: Key | None = None  # the only version that the user wants, if any
        self._exact = _Exact((0, 0))  # `only`, or its last value: the user may poll for it again
        self._latest_at = -math.inf  # when an announcement or a layout was requested last
        self._answered = -math.inf  # when the last answered ping was sent
        self._backoff = _Backoff((0, 0), 0.0, 0.0)

    def reconnected(self) -> None:
        """Begin a session, in which the latest version may be requested at once."""
        self._latest_at = -math.inf

    def hear_of(self, epoch: int, version: int, now: float) -> list[Effect]:
        """Request a new version, whose number is in a beacon, a welcome or a stray chunk."""
        arriving, key = self._versions.in_phase["arriving"], (epoch, version)
        news = self._versions.hear(key)
        if self.only is not None:
            return self.exact(now)
        if version == 0 or not news:
            return []
        if arriving is not None and (key <= arriving.key or self._versions.mode == "catching-up"):
            return []
        if key <= self._backoff.key and now < self._backoff.until:  # W36
            return []
        waiting = self._versions.in_phase["announced"]
        if waiting is not None and key <= waiting.key and waiting.lacks == "layout":
            return []  # W7
        return self.request_latest(epoch, now)

    def request_latest(self, epoch: int, now: float, *, at_once: bool = False) -> list[Effect]:
        """Request the latest version, unless a request was sent a moment ago."""
        if self.only is not None:
            return self.exact(now)
        if now - self._latest_at < self._timing.quiet and not at_once:
            return []
        self._latest_at = now
        waiting = self._versions.in_phase["announced"]
        layout = waiting is not None and waiting.lacks == "layout"
        return [Send(Fetch(model=self._model, epoch=epoch, version=0, layout=layout))]

    def layout(self, key: Key, now: float) -> list[Effect]:
        """Request the layout of an announced version. (W7)"""
        self._latest_at = now
        epoch, version = key
        return [Send(Fetch(model=self._model, epoch=epoch, version=version, layout=True))]

    def answered(self, sent_at: float) -> None:
        """Record that the ping sent at `sent_at`, and every earlier request, was answered. (W12)"""
        self._answered = sent_at
        arriving = self._versions.in_phase["arriving"]
        if arriving is not None:
            arriving.transfer.answered(sent_at)

    def due(self, now: float) -> bool:
        """True if a requested layout is overdue, so that it should be requested again. (W7)"""
        passed = self._answered > self._latest_at
        patience = self._timing.patience if passed else self._timing.patience_max
        return now - self._latest_at >= patience

    # Exactly one version, where the user wants no other. (W8)

    def want(self, key: Key | None, now: float) -> list[Effect]:
        """Set the only version to fetch. None: from now on, fetch the latest version again."""
        self.only = key
        if key is None:
            for late in self._versions.all("announced", "arriving"):
                if self.outdated(late.key):  # it was fetched although a newer version is here
                    self._versions.move(late, "newer")
            return self.hear_of(*self._versions.newest_known, now)
        if key != self._exact.key:
            self._exact = _Exact(key)
        if self._exact.gone:
            return self.gone(*key)
        if key in self._versions.rejected:
            return self.forgo("it could not be applied before")
        for other in self._versions.all("announced", "arriving"):
            if other.key != key:
                self._versions.move(other, "newer")
        here = self._versions.find(key, "staged")
        if here is not None:
            return [WholeStaged(here.staged)]
        return self.exact(now)

    def exact(self, now: float) -> list[Effect]:
        """Request the only version that the user wants, if it exists and is not here yet."""
        only, versions, running = self.only, self._versions, self._versions.in_phase["running"]
        if only is None:
            return []
        if running is not None and running.key > only:
            return self.forgo(f"version {running.key[1]} of epoch {running.key[0]} runs here")
        if versions.newest_known[0] > only[0]:
            return self.forgo(f"the publisher is of epoch {versions.newest_known[0]} now")
        if versions.newest_known < only or only in versions.rejected or versions.has(only):
            return []
        if only == self._backoff.key and now < self._backoff.until:  # W36
            return []
        if now - self._exact.asked_at < self._timing.quiet:
            return []
        self._exact = replace(self._exact, asked_at=now)
        return [Send(Fetch(model=self._model, epoch=only[0], version=only[1], layout=True))]

    def gone(self, epoch: int, version: int) -> list[Effect]:
        """Record that the publisher no longer has a version, so that later polls for it fail."""
        key = (epoch or self._exact.key[0], version)
        if key != self._exact.key or self._versions.has(key):
            return []
        self._exact = replace(self._exact, gone=True)
        return self.forgo("the publisher has it no more")

    def overtaken(self, key: Key) -> list[Effect]:
        """Give up the only version wanted if it is older than `key`, which all workers apply."""
        overtaken = self.only is not None and self.only < key
        return self.forgo("all workers go on to a newer one") if overtaken else []

    def forgo(self, why: str) -> list[Effect]:
        """Abandon the only version wanted, and report to the user why it is unavailable."""
        only, self.only = self.only, None
        if only is None:
            return []
        text = f"it was asked for alone, and is not to be had any more: {why}; ask for a newer one"
        return [Rejected(self._model, *only, "gone", text)]

    def is_wanted(self, key: Key) -> bool:
        """True if a version is the only version wanted, and may still arrive."""
        return key == self.only and key not in self._versions.rejected and not self.outdated(key)

    def outdated(self, key: Key) -> bool:
        """True if a version is no longer needed, since that or a newer version is here.

        For the only version wanted, a newer version counts only if its apply has begun.
        """
        if key != self.only:
            return key <= self._versions.newest
        given = [entry.key for entry in self._versions.all("staged", "ready")]
        begun = [entry.key for entry in self._versions.all("applying", "running")]
        return key in given or key <= max(begun, default=(0, 0))

    # Failed versions that are tried again. (W36)

    def back_off(self, key: Key, now: float) -> None:
        """Pause the requests for a version: for twice as long as the last time."""
        longer = min(2 * self._backoff.pause, self._timing.patience_max)
        pause = longer if key == self._backoff.key else self._timing.patience
        self._backoff = _Backoff(key, now + pause, pause)

    def end_backoff(self, key: Key) -> None:
        """End the pause of a version that is unavailable: an older version may be the latest."""
        if key == self._backoff.key:
            self._backoff = replace(self._backoff, until=-math.inf)
