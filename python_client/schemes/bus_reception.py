"""The reception over the bus: one subscriber, which applies to a destination."""

import re
from contextlib import AbstractContextManager

from ...bus.errors import ClosedError
from ...bus.limits import Timing
from ...codecs.apply import Reader
from ...codecs.layout import Layout
from ..applying import Update
from ..reading import READING_SECONDS
from ..subscriber import Subscriber
from ..targets import MemoryTarget
from .destination import Destination


class BusReception:
    """Receives by a subscriber, which is made when it connects.

    Args:
        destination: Where versions go.
        address: The publisher's address.
        background: Apply in the background; else where `receive` is called.
        shared_memory: Read versions from memory where the publisher is on this host.
        timing: How long to wait for signs of life.
    """

    def __init__(
        self,
        destination: Destination,
        address: str,
        *,
        background: bool,
        shared_memory: bool = True,
        timing: Timing | None = None,
    ) -> None:
        self._destination, self._address, self._background = destination, address, background
        self._shared_memory, self._timing = shared_memory, timing
        self._subscriber: Subscriber | None = None

    def connect(self, worker_idx: int | None, timeout: float) -> None:
        """Join the bus, without waiting for the publisher.

        Raises:
            ValueError: Nobody has said which worker this is.
        """
        del timeout
        if worker_idx is None:
            raise ValueError("worker_idx must be provided via context or kwargs")
        model = bus_name(self._destination.subject.model_id or "")
        self._subscriber = Subscriber(
            self._address,
            {model: _BusTarget(self._destination)},
            name=str(worker_idx),
            on_commit=self._destination.commit,
            shared_memory=self._shared_memory,
            timing=self._timing,
        )
        if self._background:
            self._subscriber.start()

    def receive(self, timeout: float) -> Update | None:
        """Return what was applied since the last call; see `engine.Reception`."""
        subscriber = self._open_subscriber()
        if self._background:
            return self._destination.arrivals.take(timeout)
        update = subscriber.receive(timeout)
        return None if update is None else self._destination.arrivals.take(0.0)

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[None]:
        """Return a context in which no version is applied."""
        return self._open_subscriber().reading(timeout)

    def close(self) -> None:
        """Leave the bus."""
        if self._subscriber is not None:
            self._subscriber.close()

    def _open_subscriber(self) -> Subscriber:
        if self._subscriber is None:
            raise ClosedError("this receiver has not joined the bus; connect() it first")
        return self._subscriber


class _BusTarget(MemoryTarget):
    """A destination as a subscriber sees it."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination, strict=True, cast=True)  # the destination has its own mind
        self._destination = destination

    def fault(self, layout: Layout) -> str:
        """Say why a layout cannot be applied."""
        return self._destination.fault(layout)

    def _copy(self, reader: Reader) -> None:
        self._destination.write(reader)


def bus_name(model_id: str) -> str:
    """Return a model id as the bus allows it: "env.transform[0]" is one of ours, not of the bus."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", model_id)[:128] or "model"
