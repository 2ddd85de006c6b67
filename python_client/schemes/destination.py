"""The destination of a receiver: where versions are applied, all of one or nothing, and announced.

An adapter hands over what it received, in one of two ways. One that only has a layout and bytes
calls `deliver()`, which does everything. One whose own machinery decides when to apply (the bus)
calls `fault()`, then `write()`, then `commit()`, and keeps readers away itself.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ...bus.errors import TornError, not_applied
from ...codecs.apply import Reader
from ...codecs.layout import Layout, trimmed
from ...codecs.numpy_tensors import Memory
from ...codecs.state import is_module
from ..reading import READING_SECONDS, ReadingLock
from ..subscriber import Update
from .arrivals import Arrivals
from .strategy import WeightStrategy
from .subject import Subject, log


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
                self._write(Reader(layout, data), epoch, version)
                seconds = time.perf_counter() - started
                update = Update(model, epoch, version, layout.nbytes, "", seconds)
                self.commit(update)
        except TornError:
            raise
        except Exception as error:
            raise not_applied(model, epoch, version, error, intact=True) from error
        return update

    def _write(self, reader: Reader, epoch: int, version: int) -> None:
        model = self.subject.model_id or ""
        try:
            self.write(reader)
        except Exception as error:
            if not reader.begun:
                raise
            torn = not_applied(model, epoch, version, error, intact=False)
            self._lock.tear(model, torn)
            raise torn from error
        self._lock.mend(model)

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
        """Tell the context, and whoever waits in `receive()`, that a version was applied."""
        try:
            self.subject.cascade(lambda: self.strategy.tensors_as_td(self.model()))
        except Exception:  # the weights are in; what the context makes of them is its own affair
            log.exception(
                "%s version %d is applied, but the collector could not be told",
                update.model,
                update.version,
            )
        self.arrivals.put(update)

    def _faults(self, layout: Layout) -> Sequence[str]:
        return self.strategy.faults(layout, self.model(), strict=self._strict, cast=self._cast)

    # The model itself.

    def model(self) -> object:
        """Return the model.

        Raises:
            ValueError: There is none.
        """
        model = self.subject.model()
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
        model = self.subject.model()
        if is_module(model):
            from .module_state import take_out_of_shared_memory

            take_out_of_shared_memory(model)

    def weights(self) -> object:
        """Return the model's present weights, which share its memory."""
        return self.strategy.extract_weights(self.model())

    def unfilled(self) -> bool:
        """Tell whether the model is on the meta device: without values before its first version."""
        return self.subject.model() is not None and self.strategy.on_meta(self.model())
