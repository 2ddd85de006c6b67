"""Decides when a worker requests the latest version of a model. (W4)

After a temporary failure, a version is requested again after ever longer pauses. If the user wants
only one particular version, the planner requests that version by its number, once it exists.
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
    gone: bool = False  # the publisher no longer has the version
    requested_at: float = -math.inf  # when the version was requested last


class _Backoff(Struct, frozen=True):
    """A pause in the requests for a version that failed."""

    key: Key
    until: float  # when the pause ends
    pause: float  # how long the pause is, in seconds


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
        # State of `only`. It outlives `only`, since the user may wait for the same version again.
        self._exact = _Exact((0, 0))
        self._latest_requested_at = -math.inf  # when an announcement or a layout was requested last
        self._answered_ping_at = -math.inf  # when the last answered ping was sent
        self._backoff = _Backoff((0, 0), 0.0, 0.0)

    def reconnected(self) -> None:
        """Begin a session: the latest version may be requested at once."""
        self._latest_requested_at = -math.inf

    def hear_of(self, epoch: int, version: int, now: float) -> list[Effect]:
        """Process a version number from a beacon, welcome, pong or chunk; request it if it is new.

        If the user wants only one version, that version is requested instead.
        """
        arriving, key = self._versions.in_phase["arriving"], (epoch, version)
        is_new = self._versions.hear(key)
        if self.only is not None:
            return self.request_only(now)
        if version == 0 or not is_new:
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
        """Request the latest version, or the only version that the user wants.

        If a request was sent a moment ago, no other is sent, unless `at_once` is true.
        """
        if self.only is not None:
            return self.request_only(now)
        if now - self._latest_requested_at < self._timing.quiet and not at_once:
            return []
        self._latest_requested_at = now
        waiting = self._versions.in_phase["announced"]
        layout = waiting is not None and waiting.lacks == "layout"
        return [Send(Fetch(model=self._model, epoch=epoch, version=0, layout=layout))]

    def request_layout(self, key: Key, now: float) -> list[Effect]:
        """Request the layout of an announced version. (W7)"""
        self._latest_requested_at = now
        epoch, version = key
        return [Send(Fetch(model=self._model, epoch=epoch, version=version, layout=True))]

    def answered(self, sent_at: float) -> None:
        """Record that the ping sent at `sent_at`, and every earlier request, was answered. (W12)"""
        self._answered_ping_at = sent_at
        arriving = self._versions.in_phase["arriving"]
        if arriving is not None:
            arriving.transfer.answered(sent_at)

    def layout_overdue(self, now: float) -> bool:
        """True if a requested layout is overdue, so that it should be requested again. (W7)"""
        ping_answered = self._answered_ping_at > self._latest_requested_at
        patience = self._timing.patience if ping_answered else self._timing.patience_max
        return now - self._latest_requested_at >= patience

    # Exactly one version, where the user wants no other. (W8)

    def want(self, key: Key | None, now: float) -> list[Effect]:
        """Set the only version to fetch. None: from now on, fetch the latest version again."""
        self.only = key
        if key is None:
            for entry in self._versions.all("announced", "arriving"):
                if self.outdated(entry.key):  # fetched for the user although a newer one is here
                    self._versions.move(entry, "newer")
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
        staged = self._versions.find(key, "staged")
        if staged is not None:
            return [WholeStaged(staged.staged)]
        return self.request_only(now)

    def request_only(self, now: float) -> list[Effect]:
        """Request the only version that the user wants, if it exists and is not here yet.

        If that version can no longer be applied, report this to the user instead.
        """
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
        if now - self._exact.requested_at < self._timing.quiet:
            return []
        self._exact = replace(self._exact, requested_at=now)
        return [Send(Fetch(model=self._model, epoch=only[0], version=only[1], layout=True))]

    def gone(self, epoch: int, version: int) -> list[Effect]:
        """Record that the publisher no longer has a version, if it is the only one wanted.

        Later `want` calls for the same version then fail at once. Epoch 0: the wanted one's epoch.
        """
        key = (epoch or self._exact.key[0], version)
        if key != self._exact.key or self._versions.has(key):
            return []
        self._exact = replace(self._exact, gone=True)
        return self.forgo("the publisher no longer has it")

    def overtaken(self, key: Key) -> list[Effect]:
        """Give up the only version wanted if it is older than `key`, which was committed."""
        overtaken = self.only is not None and self.only < key
        return self.forgo("all workers go on to a newer one") if overtaken else []

    def forgo(self, why: str) -> list[Effect]:
        """Give up the only version wanted, and report to the user why it is unavailable."""
        only, self.only = self.only, None
        if only is None:
            return []
        text = f"this one version was requested, but is unavailable: {why}; request a newer one"
        return [Rejected(self._model, *only, "gone", text)]

    def is_wanted(self, key: Key) -> bool:
        """True if a version is the only version wanted, and is still needed."""
        return key == self.only and key not in self._versions.rejected and not self.outdated(key)

    def outdated(self, key: Key) -> bool:
        """True if a version is no longer needed, since this version or a newer one is here.

        For the only version wanted, a newer version counts only if its apply has begun.
        """
        if key != self.only:
            return key <= self._versions.newest
        waiting = [entry.key for entry in self._versions.all("staged", "ready")]
        begun = [entry.key for entry in self._versions.all("applying", "running")]
        return key in waiting or key <= max(begun, default=(0, 0))

    # Versions that are tried again after a failure. (W36)

    def back_off(self, key: Key, now: float) -> None:
        """Pause the requests for a version. The second and each later pause is twice as long."""
        longer = min(2 * self._backoff.pause, self._timing.patience_max)
        pause = longer if key == self._backoff.key else self._timing.patience
        self._backoff = _Backoff(key, now + pause, pause)

    def end_backoff(self, key: Key) -> None:
        """End the pause for a version that is unavailable: an older version may be the latest."""
        if key == self._backoff.key:
            self._backoff = replace(self._backoff, until=-math.inf)
