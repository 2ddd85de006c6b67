"""Receiving by calls: the receivers of this process, and the versions that are brought to them.

A receiver registers here, weakly, from `init_on_receiver()` on. A version that comes before its
`connect()` is kept for it; so is a greeting that comes before there is a receiver at all.
"""

import threading
import weakref
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from ...bus.errors import ApplyError
from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes
from ..reading import READING_SECONDS
from ..subscriber import Update
from .destination import Destination
from .gathering import Answer

MARGIN = 0.8  # of the sender's deadline: what a worker spends waiting, so that it can still answer

# What goes with every call, as plain values: the scheme's key, the model id, the worker, epoch and
# version, the seconds that the worker may take, whether it is a greeting, and the strategy's name.
Letter: TypeAlias = tuple[str, str, int, int, int, float, bool, str]


@dataclass(eq=False)
class Delivery:
    """One version, on the doorstep of one worker.

    Attributes:
        key, model_id, worker: Which scheme of the sender sent it, of which model, to which worker.
        number: Its epoch and version, its place among all versions.
        timeout: Seconds to wait until the weights may be written.
        greeting: Whether it is the first of its sender, kept for a receiver that is yet to come.
        strategy: "tensordict" or "state_dict".
        header, data: Its layout and its data section.
        patience: Seconds to wait for a receiver to come; 0 where that would keep it from coming.
        answer: What became of it; None while that is open.
    """

    key: str
    model_id: str
    worker: int
    number: tuple[int, int]
    timeout: float
    greeting: bool
    strategy: str
    header: bytes
    data: Bytes
    patience: float
    answer: Answer | None = field(default=None)

    @property
    def address(self) -> tuple[str, str, int]:
        """Whose it is."""
        return self.key, self.model_id, self.worker

    @classmethod
    def of(cls, letter: Letter, header: bytes, data: Bytes, *, waits: bool) -> "Delivery":
        """Return what a call brought; `waits` if its thread may wait for a receiver."""
        key, model_id, worker, epoch, version, seconds, greeting, strategy = letter
        patience = seconds if waits and not greeting else 0.0
        return cls(
            key=key,
            model_id=model_id,
            worker=worker,
            number=(epoch, version),
            timeout=seconds,
            greeting=greeting,
            strategy=strategy,
            header=header,
            data=data,
            patience=patience,
        )


class CallReception:
    """A receiver that is called: a version is applied in the thread of the call, or at a poll.

    Args:
        destination: Where versions are applied.
        key: The scheme's key: a copy of the sender's scheme has the sender's.
        copied: Whether it is such a copy. One that was made here takes any sender's greeting.
        model_id: The model.
        worker: This worker's index, if it has one.
        background: Whether calls apply; else only `receive()` does.
    """

    def __init__(
        self,
        destination: Destination,
        *,
        key: str,
        copied: bool,
        model_id: str,
        worker: int | None,
        background: bool,
    ) -> None:
        self.key, self.copied, self.model_id, self.worker = key, copied, model_id, worker
        self._destination, self._background = destination, background
        self._turn = threading.Lock()  # one version at a time
        self._changed = threading.Condition()
        self._connected = False
        self._waiting: Delivery | None = None
        self._number = (0, 0)
        self._poller = 0  # the thread that polls
        self._layout: Layout | None = None
        home.register(self)

    # The scheme's side.

    def connect(self, worker_idx: int | None, timeout: float) -> None:
        """Apply what came before, and from now on whatever comes.

        Raises:
            ApplyError: What came before does not fit; the model is as it was.
        """
        self.worker = worker_idx
        kept = home.claim(self)
        with self._changed:
            self._connected, self._poller = True, threading.get_ident()
            early, self._waiting = self._waiting or kept, None
        if early is not None:
            early.timeout = timeout
            self._apply(early)

    def receive(self, timeout: float) -> Update | None:
        """Apply the newest version that waits, here and now; in the background, wait for one.

        Raises:
            ApplyError: It cannot be applied; the model is as it was.
        """
        if self._background:
            return self._destination.arrivals.take(timeout)
        with self._changed:
            self._poller = threading.get_ident()
            self._changed.wait_for(lambda: self._waiting is not None, max(0.0, timeout))
            delivery, self._waiting = self._waiting, None
        if delivery is not None:
            self._apply(delivery)
        return self._destination.arrivals.take(0.0)

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[None]:
        """Return a context in which no version is applied."""
        return self._destination.reading(timeout)

    def close(self) -> None:
        """Be at home no more."""
        home.leave(self)
        with self._changed:
            delivery, self._waiting = self._waiting, None
        if delivery is not None:
            self._settle(delivery, ("failed", "the receiver was shut down"))

    # The sender's side.

    def accept(self, delivery: Delivery) -> Answer:
        """Take a version in, and say what became of it."""
        with self._changed:
            if delivery.number <= self._number:
                return _stale(delivery, self._number)
            if not self._connected:
                return self._put_down(delivery, delivery.patience, "connect")
            # In the thread that polls there is nobody to wait for: it is between two uses.
            if not self._background and self._poller != threading.get_ident():
                if fault := self._destination.fault(self._parsed(delivery)):
                    return "failed", fault
                return self._put_down(delivery, delivery.timeout, "receive")
        return self._settled(delivery)

    def _put_down(self, delivery: Delivery, patience: float, until: str) -> Answer:
        """Leave a version for the receiver to take up, and wait for that."""
        if self._waiting is not None:
            if delivery.number <= self._waiting.number:
                return _stale(delivery, self._waiting.number)
            self._waiting.answer = _stale(self._waiting, delivery.number)
        self._waiting = delivery
        self._changed.notify_all()
        self._changed.wait_for(lambda: delivery.answer is not None, patience)
        return delivery.answer or ("staged", f"it will be applied when the worker calls {until}()")

    def _settled(self, delivery: Delivery) -> Answer:
        with suppress(ApplyError):  # the answer says so
            self._apply(delivery)
        return delivery.answer or ("failed", "it was not applied")

    def _apply(self, delivery: Delivery) -> None:
        with self._turn:
            if delivery.number <= self._number:
                answer: Answer = _stale(delivery, self._number)
            else:
                try:
                    self._destination.deliver(
                        *delivery.number,
                        self._parsed(delivery),
                        delivery.data,
                        timeout=delivery.timeout,
                    )
                    self._number = delivery.number
                    answer = ("applied", "")
                except ApplyError as error:
                    self._settle(delivery, ("failed", str(error)))
                    raise
        self._settle(delivery, answer)

    def _settle(self, delivery: Delivery, answer: Answer) -> None:
        with self._changed:
            delivery.answer = answer
            self._changed.notify_all()

    def _parsed(self, delivery: Delivery) -> Layout:
        if self._layout is None or self._layout.header != delivery.header:
            self._layout = Layout.parse(delivery.header)
        return self._layout


class Home:
    """Who is at home in this process, and what is kept for those who are not yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._receptions: list[weakref.ref[CallReception]] = []
        self._kept: list[Delivery] = []

    def register(self, reception: CallReception) -> None:
        """Let a receiver be found."""
        with self._changed:
            alive = [known for known in self._receptions if known() is not None]
            self._receptions = [*alive, weakref.ref(reception)]
            self._changed.notify_all()

    def leave(self, reception: CallReception) -> None:
        """Let a receiver be found no more."""
        with self._changed:
            self._receptions = [r for r in self._receptions if r() not in (None, reception)]

    def find(self, delivery: Delivery, timeout: float) -> CallReception | None:
        """Return who a delivery is for, waiting for a receiver to register if need be."""
        with self._changed:
            self._changed.wait_for(lambda: self._search(delivery) is not None, timeout)
            return self._search(delivery)

    def find_or_keep(self, delivery: Delivery) -> CallReception | None:
        """Return who a delivery is for; if there is nobody, keep it, and drop what it replaces."""
        with self._changed:
            found = self._search(delivery)
            if found is None:
                others = [d for d in self._kept if d.address != delivery.address]
                self._kept = [*others, delivery]
            return found

    def claim(self, reception: CallReception) -> Delivery | None:
        """Return the newest version that was kept for a reception."""
        with self._changed:
            kept = [d for d in self._kept if d.key == reception.key or not reception.copied]
            mine = [d for d in kept if self._search(d) is reception]
            exact = [d for d in mine if d.worker == reception.worker]
            self._kept = [d for d in self._kept if d not in (exact or mine)]
        return max(exact or mine, key=lambda delivery: delivery.number, default=None)

    def _search(self, delivery: Delivery) -> CallReception | None:
        """Return the receiver that a delivery is for: by its key, and its index if there are more.

        One of another key is meant if it is the only one of its model.
        """
        known = [r for r in (ref() for ref in self._receptions) if r is not None]
        of_model = [r for r in known if r.model_id == delivery.model_id]
        keyed = [r for r in of_model if r.key == delivery.key]
        for group in (keyed, of_model):
            indexed = [r for r in group if r.worker == delivery.worker]
            if len(indexed or group) == 1:
                return (indexed or group)[0]
        return None


home = Home()


def _stale(delivery: Delivery, newer: tuple[int, int]) -> Answer:
    epoch, _ = delivery.number
    if epoch < newer[0]:
        return "failed", (
            f"the worker follows a newer sender, of epoch {newer[0]}; this one has epoch {epoch}: "
            "let one sender serve a model"
        )
    return "skipped", f"it has version {newer[1]}"
