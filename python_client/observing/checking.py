"""Computes checksums of a worker's current weights, between two applies. (W35)

The checksums are computed step by step, in a separate thread that exists only while there are
requests. An apply that begins meanwhile waits for at most one step, of some MiB. If another version
runs at the end, the checksums are discarded.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from ...bus.limits import CHECK_BYTES, CHECKS
from ...bus.messages import Check, Checked
from ...bus.observed import unchecked
from ...bus.protocol_limits import CHECK_NAMES_MAX
from ...bus.worker.events import Examined
from ...codecs.errors import WeightBusError
from ..applying.applier import Applier
from ..applying.loading import UnreadableTargetError
from ..applying.target import Target
from .background_queue import BackgroundQueue

log = logging.getLogger("weightbus.subscriber")

BUSY_SECONDS = 1.0  # seconds that a request waits for an apply


class Checker:
    """Answers requests for checksums of a worker's current weights.

    Args:
        targets: The targets, by model id.
        applier: Provides the applied version and the lock of each model.
        tell: Called with the answer to each request, from any thread.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        applier: Applier,
        tell: Callable[[Examined], None],
    ) -> None:
        self._targets, self._applier, self._tell = targets, applier, tell
        # The capacity is the number of requests that the rate limit allows at once.
        self._queue = BackgroundQueue("weightbus-check", int(CHECKS.burst))

    def ask(self, check: Check) -> None:
        """Queue a request; `tell` gets the answer later.

        If the queue is full or has no thread, `tell` gets the answer "busy" at once.
        """
        if not self._queue.put(partial(self._examine, check)):
            text = "this worker has too many requests to check its weights: ask again in a moment"
            self._tell(Examined(unchecked(check, "busy", text)))

    def _examine(self, check: Check) -> None:
        self._tell(Examined(self._answer(check)))

    def _answer(self, check: Check) -> Checked:
        try:
            return self._checksums(check)
        except TimeoutError as error:
            return unchecked(check, "busy", str(error))
        except UnreadableTargetError as error:
            return unchecked(check, "unsupported", str(error))
        except (WeightBusError, OSError) as error:  # no version runs, or the target's file changed
            return unchecked(check, "unreadable", str(error))
        except Exception as error:
            log.exception("the current weights of %s cannot be checked", check.model)
            return unchecked(check, "unreadable", repr(error))

    def _checksums(self, check: Check) -> Checked:
        # Compute the checksums, in steps between which a version may be applied.
        key, sums, nbytes = (check.epoch, check.version), list[int | None](), 0
        lock, runs = self._applier.lock_of(check.model), self._applier.layout_of
        with lock.reading(BUSY_SECONDS, check.model):
            layout = runs(check.model, key)
        if layout is None:
            return unchecked(check, "changed", f"it now runs another version of {check.model}")
        names = layout.sorted_names[check.first : check.first + CHECK_NAMES_MAX]
        steps = self._targets[check.model].summing(layout, names, sums)
        while nbytes < CHECK_BYTES or not sums:
            with lock.reading(BUSY_SECONDS, check.model):
                if runs(check.model, key) is None:
                    text = f"another version of {check.model} was applied meanwhile"
                    return unchecked(check, "changed", text)
                step = next(steps, None)
            if step is None:
                break
            nbytes += step
        return Checked(
            model=check.model,
            epoch=check.epoch,
            version=check.version,
            first=check.first,
            sums=sums,
        )
