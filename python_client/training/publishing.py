"""Publishing out of the training loop of another library, every so many of its steps.

The callbacks beside this module are how their loops call it. The copy of the weights is taken where
it is called, between two steps; everything else happens while training goes on. What became of each
version is logged, and nothing that goes wrong with a worker ends the training.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, Unpack

from ...bus.errors import ClosedError
from ...bus.receipt import Receipt
from ...codecs.errors import StateError, WeightBusError
from .. import checks
from ..options import TIMEOUT, PublishOptions
from ..publisher import Publisher

log = logging.getLogger("weightbus.training")


class StepPublisher:
    """Publishes a model before the first step, at every Nth, and after the last.

    Steps may be of any size: a counter that goes up by 2,048 at once passes many multiples of
    `every`, and one version is published for all of them.

    Args:
        publisher: A publisher, which stays open; or an address to bind one to, until the training
            is over.
        model: What the model is called on the bus.
        every: Steps between two versions.
        **options: Keywords of `Publisher.publish`. Its `metadata` gets a "step" beside what is
            given, unless that has one. `timeout` is for each version, in seconds; the
            last one is waited for as long, and so is room for another copy if workers are slow.

    Attributes:
        publisher: The publisher, once the training has begun.
    """

    def __init__(
        self,
        publisher: "Publisher | str",
        model: str,
        *,
        every: int,
        **options: Unpack[PublishOptions],
    ) -> None:
        self._given, self._model = publisher, model
        self._every = checks.whole(every, "every", 1, 2**53)
        self._options = options
        self._timeout = checks.seconds(options.get("timeout", TIMEOUT), "timeout", positive=True)
        self.publisher = publisher if isinstance(publisher, Publisher) else None
        self._published: int | None = None  # the step of the last version
        self._last: Future[Receipt] | None = None

    def begin(self, step: int, weights: object) -> None:
        """Publish what training starts from.

        Raises:
            AddressError: The publisher cannot be bound.
            StateError: These weights cannot travel; the text names the tensor.
        """
        if self.publisher is None:
            self.publisher = Publisher(str(self._given))
            log.info("publishing %s at %s", self._model, self.publisher.address)
        self._publish(step, weights)

    @property
    def begun(self) -> bool:
        """Whether the training has begun, and has not ended."""
        return self._published is not None

    def step(self, step: int, weights: object) -> None:
        """A step is done: publish if the counter has passed a multiple of `every` since the last.

        A counter that goes back, as it does after a checkpoint was loaded, passes one as well.
        """
        if self._published is None or step // self._every != self._published // self._every:
            self._publish(step, weights)

    def end(self, step: int, weights: object) -> None:
        """Publish what training ended with, and wait until it has arrived.

        It is published whatever the last version was: loops load the best weights, or put averages
        into the model, after the last step and without another number.
        """
        self._publish(step, weights)
        if self._last is not None:
            self._last.exception(self._timeout)  # `_tell` has said what it was
        self.close()

    def close(self) -> None:
        """Publish nothing more; close the publisher, unless it was given."""
        self._published = None
        if self.publisher is not None and self.publisher is not self._given:
            self.publisher.close()
            self.publisher = None

    def _publish(self, step: int, weights: object) -> None:
        if self.publisher is None:
            raise ClosedError(f"{self._model} is published between begin() and end() alone")
        self._published = step
        said = {"step": str(step), **(self._options.get("metadata") or {})}
        options: PublishOptions = {**self._options, "metadata": said}
        try:
            self._last = self.publisher.publish_async(self._model, weights, **options)
        except StateError:
            raise  # it would be the same at every step
        except WeightBusError as error:
            log.warning("step %d: %s was not published: %s", step, self._model, error)
        else:
            self._last.add_done_callback(_tell(step))


class StepCallback:
    """What the callbacks of all loops have: a `StepPublisher`, with its arguments."""

    def __init__(
        self,
        publisher: Publisher | str,
        model: str = "policy",
        *,
        every: int = 1,
        **options: Unpack[PublishOptions],
    ) -> None:
        super().__init__()
        self._steps = StepPublisher(publisher, model, every=every, **options)

    @property
    def publisher(self) -> Publisher | None:
        """The publisher, once the training has begun."""
        return self._steps.publisher


def refuse_shards(how: str) -> NoReturn:
    """Refuse a model of which no process has all: to ask one for it would wait for the others.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"{how} leaves no process with all of the weights: in a loop of your own, gather them on "
        "every rank, since that waits for all ranks, and give them to a StepPublisher on rank 0"
    )


def _tell(step: int) -> "Callable[[Future[Receipt]], None]":
    def tell(done: "Future[Receipt]") -> None:
        error = done.exception()
        if error is None:
            log.info("step %d: %s", step, done.result())
        else:
            log.warning("step %d: %s", step, error)

    return tell
