"""Publishes from the training loops of other libraries, at every Nth step.

Other modules in this folder have the callbacks for these libraries. A callback copies the weights
between two steps; the copy is sent while training continues. The result of each version is logged,
and the failure of a worker does not end the training.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, Unpack

from ...bus.errors import ClosedError
from ...bus.receipt import Receipt
from ...codecs.errors import StateError, WeightBusError
from .. import checks
from ..publisher import Publisher
from ..publishing.options import TIMEOUT, PublishOptions

log = logging.getLogger("weightbus.training")


class StepPublisher:
    """Publishes a model before the first step, at every Nth step, and after the last.

    A step counter may increase by any number: if it passes several multiples of `every` at once,
    one version is published for all of them.

    Args:
        publisher: A publisher, which stays open, or the address of a new publisher, which closes
            when the training is over.
        model: The model's id on the bus.
        every: Steps between two versions.
        **options: Keywords of `Publisher.publish`. An entry "step" is added to `metadata`, unless
            it has one. `timeout`, in seconds, applies to each version. It also limits how long to
            wait for the last version, and for memory for another copy while workers are slow.

    Attributes:
        publisher: The publisher; None until the training begins if an address was given.
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
        """Publish the initial weights.

        Raises:
            AddressError: The publisher cannot be bound.
            StateError: These weights cannot be sent; the message names the tensor.
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
        """Publish if the counter has passed a multiple of `every` since the last version.

        A counter that decreases, for example after loading a checkpoint, may pass one, too.
        """
        if self._published is None or step // self._every != self._published // self._every:
            self._publish(step, weights)

    def end(self, step: int, weights: object) -> None:
        """Publish the final weights, and wait until the workers have them.

        The weights are published even if the last version has the same step, because after the last
        step a loop may load the best weights, or put averages into the model.
        """
        self._publish(step, weights)
        if self._last is not None:
            self._last.exception(self._timeout)  # only wait: `_log_result` logs the error
        self.close()

    def close(self) -> None:
        """Stop publishing; close the publisher, unless it was given."""
        self._published = None
        if self.publisher is not None and self.publisher is not self._given:
            self.publisher.close()
            self.publisher = None

    def _publish(self, step: int, weights: object) -> None:

        if self.publisher is None:
            raise ClosedError(f"{self._model} can be published only between begin() and end()")
        self._published = step
        metadata = {"step": str(step), **(self._options.get("metadata") or {})}
        options: PublishOptions = {**self._options, "metadata": metadata}
        try:
            self._last = self.publisher.publish_async(self._model, weights, **options)
        except StateError:
            raise  # the same error would occur at every step
        except WeightBusError as error:
            log.warning("step %d: %s was not published: %s", step, self._model, error)
        else:
            self._last.add_done_callback(_log_result(step))


class StepCallback:
    """The base class of all callbacks; makes a `StepPublisher`, whose arguments these are."""

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
        """The publisher; None until the training begins if an address was given."""
        return self._steps.publisher


def refuse_shards(how: str) -> NoReturn:
    """Reject a sharded model, since no single process has all of its weights.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"{how} leaves no process with all of the weights: in a loop of your own, call "
        "weightbus.gather(model).publish(publisher, ...) on every rank (with ZeRO 3 gather them by "
        "deepspeed.zero.GatheredParameters, and publish in that block on rank 0)"
    )


def _log_result(step: int) -> "Callable[[Future[Receipt]], None]":
    def log_result(done: "Future[Receipt]") -> None:
        error = done.exception()
        if error is None:
            log.info("step %d: %s", step, done.result())
        else:
            log.warning("step %d: %s", step, error)

    return log_result
