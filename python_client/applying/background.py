"""Applies versions in the background: in separate threads, or small ones in the worker's thread.

No object here refers to the subscriber, so a started subscriber that is dropped can be collected.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from traceback import clear_frames

from ...bus.errors import AddressError, ApplyError, ClosedError, RefusedError, on_one_line
from ...bus.net.ready_queue import ReadyQueue
from ...bus.staged import StagedVersion
from ...codecs.errors import WeightBusError
from .applier import PATIENCE_SECONDS, Applier

log = logging.getLogger("weightbus.subscriber")

FILE_THREADS_MAX = 8  # threads that write files in parallel


class Background:
    """The threads that apply one subscriber's versions after `start`.

    Args:
        name: The worker's name.
        applier: Applies the versions.
        ready_queue: The queue of versions that are ready to be applied.
        stop: A function that ends the worker.
        others: The ids of models whose targets are not files.
        files: The ids of models whose targets are files.

    Attributes:
        threads: The threads that were started.
        error: The last error of an apply; None: no error yet.
    """

    def __init__(
        self,
        name: str,
        applier: Applier,
        ready_queue: ReadyQueue,
        stop: Callable[[], object],
        others: frozenset[str],
        files: frozenset[str],
    ) -> None:
        self._name, self._applier, self._ready_queue, self._stop = name, applier, ready_queue, stop
        self._others, self._files = others, sorted(files)
        self.threads: list[threading.Thread] = []
        self.error: WeightBusError | None = None

    def start(self) -> None:
        for models in self._models_by_thread():
            first = not self.threads
            name = "weightbus-apply" if first else f"weightbus-apply-{min(models)}"
            apply = partial(self._run, models, first=first)
            thread = threading.Thread(target=apply, name=name, daemon=True)
            thread.start()
            self.threads.append(thread)  # after its start: `close` joins all of these

    def _models_by_thread(self) -> list[frozenset[str]]:
        """Return the model ids of each thread. Files have separate threads: disks may be slow."""
        found = [self._others]
        found += [frozenset(self._files[n::FILE_THREADS_MAX]) for n in range(FILE_THREADS_MAX)]
        return [models for models in found if models]

    def apply_at_once(self, staged: StagedVersion) -> bool:
        """Do as `Applier.apply_at_once`, but keep an error and return True."""
        try:
            return self._applier.apply_at_once(staged)
        except BaseException as error:  # an error must not end the worker's thread
            self._log_and_keep(error)
        return True

    def _run(self, models: frozenset[str], *, first: bool) -> None:
        try:
            self._apply_until_closed(models, first=first)
        except BaseException as error:  # no thread would apply these models: end the worker
            log.exception("%s: the thread that applies has failed", self._name)
            self._ready_queue.close(error)
            self._stop()

    def _apply_until_closed(self, models: frozenset[str], *, first: bool) -> None:
        # Apply versions of these models until the subscriber is closed.
        while True:
            try:
                self._applier.receive(1.0, models, patience=PATIENCE_SECONDS)
            except ClosedError:
                return
            except (RefusedError, AddressError) as error:
                if first:  # all threads get this error: only the first one keeps it
                    self._keep(error)
                if self._ready_queue.wait_closed(1.0):
                    return
            except BaseException as error:  # for instance a hook's sys.exit()
                self._log_and_keep(error)

    def _log_and_keep(self, error: BaseException) -> None:
        ours = error if isinstance(error, WeightBusError) else WeightBusError(repr(error))
        cause = ours.__cause__ if isinstance(ours, ApplyError) and ours.code == "apply" else None
        log.error("%s: %s", self._name, on_one_line(ours), exc_info=cause)
        self._keep(ours)

    def _keep(self, error: WeightBusError) -> None:
        for each in (error, error.__cause__):  # keep the errors without their frames' locals
            clear_frames(each.__traceback__ if each is not None else None)
        with self._ready_queue.changed:
            self.error = error
            self._ready_queue.changed.notify_all()
