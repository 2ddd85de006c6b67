"""The receiver's side of a scheme: applies versions completely or not at all, and announces them.

A receiver passes versions to its `Destination` in one of two ways. A receiver that only has a
layout and bytes calls `deliver()`, which validates, locks, writes and announces. The bus's
receiver decides itself when to apply. It calls `fault()`, `write()` and `commit()`, in this order,
and acquires its own lock.
"""

import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from ...bus.errors import ApplyError, TornError, not_applied
from ...codecs.apply import Reader
from ...codecs.layout import Layout, trimmed
from ...codecs.numpy_tensors import Memory
from ...codecs.state import is_module
from ..applying.applier import Update
from ..applying.reading import READING_SECONDS, ReadingLock
from .forward_passes import ForwardPasses
from .model import POLICY, ModelReference, log
from .strategy import DestinationError, WeightStrategy
from .transport import Receiver

CHECK_SECONDS = 0.05  # seconds between two checks whether the first weights have arrived


class Arrivals:
    """The newest update that was applied, and whether `take` has returned it yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.newest: Update | None = None  # the update of the version that the model runs
        self._is_new = False  # whether `take` has not yet returned `newest`
        self._closed = False

    def put(self, update: Update) -> None:
        with self._changed:
            self.newest, self._is_new = update, True
            self._changed.notify_all()

    def take(self, timeout: float) -> Update | None:
        """Wait for an update that was not returned yet; return None after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_new or self._closed, max(0.0, timeout))
            if not self._is_new:
                return None
            self._is_new = False
            return self.newest

    def close(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Destination:
    """The model of one receiver, with the settings of its scheme."""

    def __init__(
        self, subject: ModelReference, strategy: WeightStrategy, *, strict: bool, cast: bool
    ) -> None:
        self.subject, self.strategy = subject, strategy
        self.arrivals = Arrivals()
        self.refusal = ""  # why the last version could not be applied; empty if it could
        self._filling = False  # True while `write` fills a model that was on the meta device
        self._strict, self._cast = strict, cast
        self.lock = ReadingLock()  # acquired by `deliver`
        self.passes: ForwardPasses | None = None

    # For receivers of layouts and bytes.

    def deliver(
        self, epoch: int, version: int, layout: Layout, data: Memory, *, timeout: float
    ) -> Update:
        """Validate a version, apply it in place, and announce it; return its update.

        Waits at most `timeout` seconds for readers of the model.

        Raises:
            ApplyError: The version cannot be applied, and the model is unchanged.
            TornError: The model was partly written. `reading()` raises this error until a version
                is applied.
        """
        started = time.perf_counter()
        model = self.subject.model_id or ""
        try:
            with self.lock.writing(timeout, f"applying {model} version {version}"):
                reader = Reader(layout, data)
                try:
                    self.write(reader)
                    seconds = time.perf_counter() - started
                    update = Update(model, epoch, version, layout.nbytes, "", seconds)
                    self.commit(update)
                except Exception as error:
                    torn_error = not_applied(model, epoch, version, error, intact=False)
                    if reader.begun:
                        self.lock.mark_invalid(model, torn_error)
                        raise torn_error from error
                    raise
                self.lock.mark_valid(model)
        except TornError:
            raise
        except Exception as error:
            raise not_applied(model, epoch, version, error, intact=True) from error
        return update

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[object]:
        """Return a context manager during which `deliver` does not write."""
        return self.lock.reading(timeout)

    # Forward passes of the model.

    def guard(self, lock: ReadingLock, timeout: float) -> None:
        """Make each forward pass of the model hold a lock as a reader.

        Args:
            lock: The lock, which an apply acquires exclusively.
            timeout: Seconds that a pass waits for an apply, but at least `READING_SECONDS`.
        """
        self.unguard()
        self.passes = ForwardPasses(lock, max(timeout, READING_SECONDS))
        self.update_hooks()

    def update_hooks(self) -> None:
        """If the model was replaced, register the hooks on the new model."""
        if self.passes is not None:
            with suppress(AttributeError):  # the context has no model yet
                self.passes.guard(self.subject.model())

    def unguard(self) -> None:
        """Remove the hooks from the model."""
        if self.passes is not None:
            self.passes.release()

    # For receivers that decide themselves when to apply.

    def fault(self, layout: Layout) -> str:
        """Return why a version with this layout cannot be applied, or "" if it can."""
        model, strict = self.model(), self._strict
        lines = self.strategy.faults(layout, model, strict=strict, cast=self._cast)
        self.refusal = "\n".join(trimmed(lines))
        return self.refusal

    def write(self, reader: Reader) -> None:
        """Copy a version into the model.

        Raises:
            StateError: The version does not fit, and the model is unchanged. The text says why.
            Exception: Any other failure. The model is partly written if `reader.begun` is true.
        """
        self._filling = self.unfilled()
        self.update_hooks()
        try:
            self.strategy.write(reader, self.model(), strict=self._strict, cast=self._cast)
        except Exception as error:
            self.refusal = str(error)
            raise
        finally:
            self._filling = False

    def commit(self, update: Update) -> None:
        """Announce a written version to the context and to `receive()`.

        Raises:
            Exception: The context rejected the version. The apply then fails, since a context may
                forward the weights to its own workers, and these still run the old weights.
        """
        if update.nbytes:  # a policy without weights, such as a random policy, needs no update
            self.subject.notify_context(lambda: self.strategy.tensors_as_td(self.model()))
        self.arrivals.put(update)

    # The model itself.

    def model(self) -> object:
        """Return the model; raise ValueError if there is none."""
        model = self._find()
        if model is None and self.subject.context_collected:
            raise ValueError("Context has been garbage collected")
        if model is None:
            raise ValueError("No model registered")
        return model

    def unshare(self) -> None:
        """Move the model out of memory that torch's multiprocessing shares with the sender."""
        model = self._find()
        if is_module(model):
            from ...codecs.torch_modules import take_out_of_shared_memory

            take_out_of_shared_memory(model)

    def weights(self) -> object:
        """Return the model's current weights, which share its memory."""
        return self.strategy.extract_weights(self.model())

    def unfilled(self) -> bool:
        """Return whether the model is on the meta device, without values, or is being filled."""
        if self._filling:
            return True
        return self._find() is not None and self.strategy.on_meta(self.model())

    def _find(self) -> object | None:
        """Return the model; None if there is none.

        If a collector only has factories of policies, build the model.

        A collector whose workers build their own policies has no policy itself. The policy that is
        built here checks whether versions fit, and has the weights that the collector forwards.
        """
        factories: Any = getattr(self.subject.context, "policy_factory", None)
        make = next((f for f in factories if f is not None), None) if factories else None
        if make is None or self.subject.model_id != POLICY:
            return self.subject.model()
        try:
            return self.subject.model()
        except AttributeError:
            self.subject.given = make()
            return self.subject.given


@dataclass(eq=False)
class ReceiverSide:
    """The state of a scheme that is a receiver, from `init_on_receiver` to `shutdown`."""

    destination: Destination
    receiver: Receiver
    connected: bool = False

    def connect(self, timeout: float, *, fill: bool) -> None:
        """Connect; with `fill`, wait until a model on the meta device has its first weights."""
        self.connected = True
        try:
            self.receiver.connect(self.destination.subject.worker_idx, timeout)
            if fill and self.destination.unfilled():
                self._await_first(timeout)
        except BaseException:
            self.connected = False
            raise

    def _await_first(self, timeout: float) -> None:
        # Wait until the model has its first weights, at most `timeout` seconds.
        destination, worker = self.destination, self.destination.subject.worker_idx
        deadline = time.monotonic() + timeout
        while destination.unfilled() and not destination.refusal and time.monotonic() < deadline:
            self.receiver.receive(min(CHECK_SECONDS, timeout))
        if destination.refusal:
            raise DestinationError(
                f"worker {worker}: the model is on the meta device, and the weights that arrived "
                f"do not fill it:\n{destination.refusal}"
            )
        if destination.unfilled():
            raise TimeoutError(
                f"worker {worker}: the model is on the meta device, and no weights arrived within "
                f"{timeout} s; connect() the sender, with weights that fit"
            )

    def receive(self, timeout: float) -> Any | None:
        """Return the newest weights that were applied since the last call; see `Scheme.receive`."""
        try:
            update = self.receiver.receive(timeout)
        except ApplyError as error:
            worker = self.destination.subject.worker_idx
            if self.destination.subject.context is None:
                raise
            log.error("worker %s keeps its previous weights: %s", worker, error)
            return None
        return None if update is None else self.destination.weights()

    def apply(self, weights: Any, inplace: bool, *, strict: bool, timeout: float) -> None:
        """Apply weights that the user passed, while no version is applied."""
        destination = self.destination
        model = destination.model()
        with self._excluding(timeout) if self.connected else nullcontext():
            destination.strategy.apply_weights(model, weights, inplace, strict=strict)

    def _excluding(self, timeout: float) -> AbstractContextManager[object]:
        """Return a context manager that excludes applies, and other threads' forward passes."""
        passes = self.destination.passes
        if passes is None or passes.lock.held:
            return self.receiver.reading(timeout)
        return passes.lock.writing(timeout, "apply_weights()")

    def close(self) -> None:
        """Close the receiver and wake waiting threads."""
        with suppress(Exception):
            self.receiver.close()
        self.destination.unguard()
        self.destination.arrivals.close()
