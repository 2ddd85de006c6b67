"""Where the worker's thread leaves versions that are ready, and the user's thread takes them.

At most one version of a model waits here: a newer one takes its place.
"""

import threading
from collections import deque

from .errors import ApplyError, ClosedError, RefusedError
from .limits import MODELS_MAX
from .staging import StagedVersion


class Handoff:
    """A meeting point of two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[str, StagedVersion] = {}
        self._errors: deque[ApplyError] = deque(maxlen=MODELS_MAX)
        self._refusal: RefusedError | None = None
        self._closed: BaseException | None = None
        self.joined_epoch = 0

    # For the worker's thread.

    def put(self, staged: StagedVersion) -> StagedVersion | None:
        """Leave a version; return the older one that it replaces, if any."""
        with self._changed:
            older = self._ready.pop(staged.model, None)
            self._ready[staged.model] = staged
            self._changed.notify_all()
            return older

    def put_back(self, staged: StagedVersion) -> bool:
        """Leave a version again that was taken; return False if a newer one has come meanwhile."""
        with self._changed:
            if staged.model in self._ready:
                return False
            self._ready[staged.model] = staged
            self._changed.notify_all()
            return True

    def reject(self, error: ApplyError) -> None:
        """Leave word that a version could not be taken; once for each version."""
        with self._changed:
            key = (error.model, error.epoch, error.version)
            if key not in [(e.model, e.epoch, e.version) for e in self._errors]:
                self._errors.append(error)
                self._changed.notify_all()

    def refuse(self, error: RefusedError) -> None:
        """Leave word that the publisher refuses this worker."""
        with self._changed:
            self._refusal = error
            self._changed.notify_all()

    def join(self, epoch: int) -> None:
        """The publisher has let this worker in."""
        with self._changed:
            self._refusal, self.joined_epoch = None, epoch
            self._changed.notify_all()

    def close(self, reason: BaseException) -> None:
        """Nothing more will come."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    # For the user's thread.

    def take(self, timeout: float | None) -> StagedVersion | None:
        """Return a version that is ready, oldest model first; None when the time is over.

        Raises:
            ApplyError: A version could not be taken.
            RefusedError: The publisher refuses this worker.
            ClosedError: Nothing will come any more.
        """
        with self._changed:
            self._changed.wait_for(self._news, timeout)
            if self._ready:
                return self._ready.pop(next(iter(self._ready)))
            if self._errors:
                raise self._errors.popleft()
            if self._refusal is not None:
                raise self._refusal
            if self._closed is not None:
                raise ClosedError(f"this subscriber is closed: {self._closed}")
            return None

    def _news(self) -> bool:
        told = self._refusal is not None or self._closed is not None
        return bool(self._ready or self._errors or told)

    def wait_joined(self, timeout: float) -> bool:
        """Wait until the publisher has let this worker in; return whether it has.

        Raises:
            RefusedError: The publisher refuses this worker.
            ClosedError: The subscriber was closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self.joined_epoch or self._refusal or self._closed), timeout
            )
            if self._refusal is not None:
                raise self._refusal
            if self._closed is not None:
                raise ClosedError(f"this subscriber is closed: {self._closed}")
            return self.joined_epoch > 0

    def wait_closed(self, timeout: float) -> bool:
        """Wait until the subscriber is closed; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed is not None, timeout)
