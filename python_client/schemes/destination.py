"""The destination of a receiver: where versions are applied, all of one or nothing, and announced.

An adapter hands over what it received, in one of two ways. One that only has a layout and bytes
calls `deliver()`, which does everything. One whose own machinery decides when to apply (the bus)
calls `fault()`, then `write()`, then `commit()`, and keeps readers away itself.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...bus.errors import TornError, not_applied
from ...codecs.apply import Reader
from ...codecs.layout import Layout, trimmed
from ...codecs.numpy_tensors import Memory
from ...codecs.state import is_module
from ..applying import Update
from ..reading import READING_SECONDS, ReadingLock
from .arrivals import Arrivals
from .strategy import WeightStrategy
from .subject import POLICY, Subject


class Destination:
    """The model of one receiver.

    Args:
        subject: The model.
        strategy: Which names it goes by.
        strict: Whether both sides must have the same names.
        cast: Whether values may be converted to the model's dtypes.
    """

    def __init__(
        self, subject: Subject, strategy: WeightStrategy, *, strict: bool, cast: bool
    ) -> None:
        self.subject, self.strategy = subject, strategy
        self.arrivals = Arrivals()
        self.refusal = ""  # why the version that was last looked at cannot be applied
        self._strict, self._cast = strict, cast
        self._lock = ReadingLock()

    # For an adapter that receives layouts and bytes.

    def deliver(
        self, epoch: int, version: int, layout: Layout, data: Memory, *, timeout: float
    ) -> Update:
        """Validate a version, apply it in place, announce it.

        Args:
            epoch, version: Its number.
            layout: Where each tensor lies.
            data: The data section, `layout.nbytes` bytes.
            timeout: Seconds to wait for readers (`reading()`) to leave.

        Raises:
            ApplyError: It cannot be applied; the model is as it was. The text says why.
            TornError: It failed half-way; `reading()` raises this until another is applied.
        """
        started = time.perf_counter()
        model = self.subject.model_id or ""
        try:
            with self._lock.writing(timeout, f"applying {model} version {version}"):
                reader = Reader(layout, data)
                try:
                    self.write(reader)
                    seconds = time.perf_counter() - started
                    update = Update(model, epoch, version, layout.nbytes, "", seconds)
                    self.commit(update)
                except Exception as error:
                    torn = not_applied(model, epoch, version, error, intact=False)
                    if reader.begun:
                        self._lock.tear(model, torn)
                        raise torn from error
                    raise
                self._lock.mend(model)
        except TornError:
            raise
        except Exception as error:
            raise not_applied(model, epoch, version, error, intact=True) from error
        return update

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[None]:
        """Return a context in which `deliver` waits."""
        return self._lock.reading(timeout)

    # For an adapter that decides by itself when to apply.

    def fault(self, layout: Layout) -> str:
        """Say why a layout cannot be applied; nothing if it can. Changes nothing."""
        self.refusal = "\n".join(trimmed(list(self._faults(layout))))
        return self.refusal

    def write(self, reader: Reader) -> None:
        """Copy a version into the model.

        Raises:
            StateError: It does not fit, and the model was not touched; the text says how.
            Exception: Whatever failed; `reader.begun` says whether half-way.
        """
        try:
            self.strategy.write(reader, self.model(), strict=self._strict, cast=self._cast)
        except Exception as error:
            self.refusal = str(error)
            raise

    def commit(self, update: Update) -> None:
        """Tell the context, and whoever waits in `receive()`, that a version was written.

        Raises:
            Exception: The context could not take it. Its part decides, too: what it does with the
                weights may be to bring them to workers of its own, which then run others.
        """
        if update.nbytes:  # a policy without weights, a random one, is not told of any
            self.subject.cascade(lambda: self.strategy.tensors_as_td(self.model()))
        self.arrivals.put(update)

    def _faults(self, layout: Layout) -> Sequence[str]:
        return self.strategy.faults(layout, self.model(), strict=self._strict, cast=self._cast)

    # The model itself.

    def model(self) -> object:
        """Return the model.

        Raises:
            ValueError: There is none.
        """
        model = self._found()
        if model is None and self.subject.forsaken:
            raise ValueError("Context has been garbage collected")
        if model is None:
            raise ValueError("No model registered")
        return model

    def part_from_sender(self) -> None:
        """Give the model memory of its own, where it has the sender's.

        Tensors that are handed to a process of torch's multiprocessing stay in the memory of the
        process that hands them over.
        """
        model = self._found()
        if is_module(model):
            from ...codecs.torch_modules import take_out_of_shared_memory

            take_out_of_shared_memory(model)

    def weights(self) -> object:
        """Return the model's present weights, which share its memory."""
        return self.strategy.extract_weights(self.model())

    def unfilled(self) -> bool:
        """Tell whether the model is on the meta device: without values before its first version."""
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
