"""The receiver's side of a scheme: where versions are applied, all or nothing, and announced.

What takes versions in hands them over in one of two ways. One that only has a layout and bytes
calls `deliver()`, which does everything. One whose own machinery decides when to apply (the bus)
calls `fault()`, then `write()`, then `commit()`, and keeps readers away itself.
"""

import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...bus.errors import ApplyError, TornError, not_applied
from ...codecs.apply import Reader
from ...codecs.layout import Layout, trimmed
from ...codecs.numpy_tensors import Memory
from ...codecs.state import is_module
from ..applying import Update
from ..reading import READING_SECONDS, ReadingLock
from .carrier import Receiver
from .model import POLICY, Subject, log
from .passes import ForwardPasses
from .strategy import DestinationError, WeightStrategy

if TYPE_CHECKING:
    from .scheme import Scheme
    from .vintage import WeightSyncScheme

LOOK_SECONDS = 0.05  # between two looks at whether the first weights have come


class Arrivals:
    """The newest version that was applied, and whether anybody has asked for it yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.newest: Update | None = None  # what the model runs
        self._fresh = False
        self._closed = False

    def put(self, update: Update) -> None:
        with self._changed:
            self.newest, self._fresh = update, True
            self._changed.notify_all()

    def take(self, timeout: float) -> Update | None:
        """Return the newest update if it was not taken before, waiting for one if need be."""
        with self._changed:
            self._changed.wait_for(lambda: self._fresh or self._closed, max(0.0, timeout))
            if not self._fresh:
                return None
            self._fresh = False
            return self.newest

    def close(self) -> None:
        """Let everybody go who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Destination:
    """The model of one receiver, with the settings of its scheme."""

    def __init__(
        self, subject: Subject, strategy: WeightStrategy, *, strict: bool, cast: bool
    ) -> None:
        self.subject, self.strategy = subject, strategy
        self.arrivals = Arrivals()
        self.refusal = ""  # why the version that was last looked at cannot be applied
        self._filling = False  # it has memory, in which there are no values yet
        self._strict, self._cast = strict, cast
        self.lock = ReadingLock()  # of `deliver`
        self.passes: ForwardPasses | None = None

    # For what receives layouts and bytes.

    def deliver(
        self, epoch: int, version: int, layout: Layout, data: Memory, *, timeout: float
    ) -> Update:
        """Validate a version, apply it in place, announce it; wait so long for readers to leave.

        Raises:
            ApplyError: It cannot be applied; the model is as it was. The text says why.
            TornError: It failed half-way; `reading()` raises this until another is applied.
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
                    torn = not_applied(model, epoch, version, error, intact=False)
                    if reader.begun:
                        self.lock.tear(model, torn)
                        raise torn from error
                    raise
                self.lock.mend(model)
        except TornError:
            raise
        except Exception as error:
            raise not_applied(model, epoch, version, error, intact=True) from error
        return update

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[object]:
        """Return a context in which `deliver` waits."""
        return self.lock.reading(timeout)

    # The forward passes of whoever runs the model.

    def guard(self, lock: ReadingLock, timeout: float) -> None:
        """From now on have forward passes of the model take a lock, which every apply takes alone.

        Args:
            lock: It.
            timeout: Seconds that a pass waits for an apply, if that is more than usual.
        """
        self.unguard()
        self.passes = ForwardPasses(lock, max(timeout, READING_SECONDS))
        self.look_again()

    def look_again(self) -> None:
        """Guard the model that is to be found now, if it is another."""
        if self.passes is not None:
            with suppress(AttributeError):  # the context has none yet
                self.passes.guard(self.subject.model())

    def unguard(self) -> None:
        """Leave forward passes alone."""
        if self.passes is not None:
            self.passes.release()

    # For what decides by itself when to apply.

    def fault(self, layout: Layout) -> str:
        """Say why a layout cannot be applied; nothing if it can. Changes nothing."""
        model, strict = self.model(), self._strict
        lines = self.strategy.faults(layout, model, strict=strict, cast=self._cast)
        self.refusal = "\n".join(trimmed(lines))
        return self.refusal

    def write(self, reader: Reader) -> None:
        """Copy a version into the model.

        Raises:
            StateError: It does not fit, and the model was not touched; the text says how.
            Exception: Whatever failed; `reader.begun` says whether half-way.
        """
        self._filling = self.unfilled()
        self.look_again()
        try:
            self.strategy.write(reader, self.model(), strict=self._strict, cast=self._cast)
        except Exception as error:
            self.refusal = str(error)
            raise
        finally:
            self._filling = False

    def commit(self, update: Update) -> None:
        """Tell the context, and whoever waits in `receive()`, that a version was written.

        Raises:
            Exception: The context could not take it. Its part decides, too: what it does with the
                weights may be to bring them to workers of its own, which then run others.
        """
        if update.nbytes:  # a policy without weights, a random one, is not told of any
            self.subject.cascade(lambda: self.strategy.tensors_as_td(self.model()))
        self.arrivals.put(update)

    # The model itself.

    def model(self) -> object:
        """Return the model; ValueError if there is none."""
        model = self._found()
        if model is None and self.subject.forsaken:
            raise ValueError("Context has been garbage collected")
        if model is None:
            raise ValueError("No model registered")
        return model

    def part_from_sender(self) -> None:
        """Give the model memory of its own, where torch's multiprocessing left it the sender's."""
        model = self._found()
        if is_module(model):
            from ...codecs.torch_modules import take_out_of_shared_memory

            take_out_of_shared_memory(model)

    def weights(self) -> object:
        """Return the model's present weights, which share its memory."""
        return self.strategy.extract_weights(self.model())

    def unfilled(self) -> bool:
        """Tell whether the model was on the meta device, and its first version is not in it yet."""
        if self._filling:
            return True
        return self._found() is not None and self.strategy.on_meta(self.model())

    def _found(self) -> object | None:
        """Return the model, of a collector that leaves it to its own workers to make one, too.

        That one only shows which versions fit, and is what the collector is told to pass on.
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
    """A scheme between `init_on_receiver` and its shutdown."""

    destination: Destination
    receiver: Receiver
    connected: bool = False

    def connect(self, timeout: float, *, fill: bool) -> None:
        """Take up work; with `fill`, wait for weights that the model has no memory without."""
        self.connected = True
        try:
            self.receiver.connect(self.destination.subject.worker_idx, timeout)
            if fill and self.destination.unfilled():
                self._await_first(timeout)
        except BaseException:
            self.connected = False
            raise

    def _await_first(self, timeout: float) -> None:
        destination, worker = self.destination, self.destination.subject.worker_idx
        deadline = time.monotonic() + timeout
        while destination.unfilled() and not destination.refusal and time.monotonic() < deadline:
            self.receiver.receive(min(LOOK_SECONDS, timeout))
        if destination.refusal:
            raise DestinationError(
                f"worker {worker}: the model is on the meta device, and the weights that came do "
                f"not fill it:\n{destination.refusal}"
            )
        if destination.unfilled():
            raise TimeoutError(
                f"worker {worker}: the model is on the meta device, and no weights came within "
                f"{timeout} s; connect() the sender, with weights that fit"
            )

    def receive(self, timeout: float) -> Any | None:
        """Return the newest weights that were applied since the last call; see the scheme's."""
        try:
            update = self.receiver.receive(timeout)
        except ApplyError as error:
            worker = self.destination.subject.worker_idx
            if self.destination.subject.context is None:
                raise
            log.error("worker %s goes on with the weights that it has: %s", worker, error)
            return None
        return None if update is None else self.destination.weights()

    def apply(self, weights: Any, inplace: bool, *, strict: bool, timeout: float) -> None:
        """Apply weights that came by another way, and keep versions out that arrive meanwhile."""
        destination = self.destination
        model = destination.model()
        with self._alone(timeout) if self.connected else nullcontext():
            destination.strategy.apply_weights(model, weights, inplace, strict=strict)

    def _alone(self, timeout: float) -> AbstractContextManager[object]:
        """Return a context in which no version is applied, and no other thread runs the model."""
        passes = self.destination.passes
        if passes is None or passes.lock.held:
            return self.receiver.reading(timeout)
        return passes.lock.writing(timeout, "apply_weights()")

    def close(self) -> None:
        """Let go of everything."""
        with suppress(Exception):
            self.receiver.close()
        self.destination.unguard()
        self.destination.arrivals.close()


# By the older vintage, and as a transport.


class WeightReceiver:
    """Receives the weights of a `scheme`. Its `get_receiver()` or `create_receiver()` makes one."""

    def __init__(self, scheme: "WeightSyncScheme") -> None:
        self._scheme = scheme

    def receive(self, timeout: float = 0.001) -> bool:
        """Apply the newest weights that come within `timeout` seconds; return whether any came.

        Raises:
            ApplyError: They do not fit; the model is unchanged, and the sender is informed.
        """
        scheme = self._scheme
        return scheme.initialized_on_receiver and scheme.receive(timeout) is not None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights that came by another transport.

        Arguments (`weights`, `inplace`) and errors are those of `WeightSyncScheme.apply_weights`.
        """
        if not self._scheme.initialized_on_receiver:
            raise ValueError("No model registered")
        self._scheme.apply_weights(weights, inplace)


class ReceiverTransport:
    """The way from the sender; if `named`, what is received is `(model_id, weights)`, as before."""

    def __init__(self, scheme: "Scheme", *, named: bool = False) -> None:
        self._scheme, self._named = scheme, named

    def send_weights(self, *weights: Any) -> None:
        """Nothing can be sent from a receiver: RuntimeError."""
        del weights
        raise RuntimeError("send_weights() called on a receiver side.")

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any | None:
        """Return what was applied since the last call; None if nothing came in time."""
        received = self._scheme.receive(timeout)
        if not self._named or received is None:
            return received
        return self._scheme.model_id, received

    def send_ack(self, message: str = "updated") -> None:
        """Nothing is left to do: a version is acknowledged when it is applied."""
        del message

    def check_connection(self) -> bool:
        """Tell whether the receiver is there."""
        return True
