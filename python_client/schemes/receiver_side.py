"""The receiver's side of a scheme: where weights go, and when."""

import time
from typing import Any

from ...bus.errors import ApplyError
from .. import checks
from .destination import Destination
from .engine import Reception
from .roles import Roles
from .strategy import DestinationError
from .subject import log

LOOK_SECONDS = 0.05  # between two looks at whether the first weights have come


class ReceiverSide(Roles):
    """What a scheme does on a receiver."""

    def _make_reception(self, destination: Destination, **kwargs: Any) -> Reception:
        """Return what takes weights in. Called by `init_on_receiver`."""
        raise NotImplementedError

    def _await_first(self, timeout: float) -> None:
        """Wait for the first weights, without which a model on the meta device is no model."""
        destination, reception = self._session.destination, self._session.reception
        if destination is None or reception is None or not destination.unfilled():
            return
        deadline = time.monotonic() + timeout
        while destination.unfilled() and not destination.refusal and time.monotonic() < deadline:
            reception.receive(min(LOOK_SECONDS, timeout))
        if destination.refusal:
            raise DestinationError(
                f"worker {self.worker_idx}: the model is on the meta device, and the weights that "
                f"came do not fill it:\n{destination.refusal}"
            )
        if destination.unfilled():
            raise TimeoutError(
                f"worker {self.worker_idx}: the model is on the meta device, and no weights came "
                f"within {timeout} s; connect() the sender, with weights that fit"
            )

    def _connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        session = self._session
        if session.reception is not None:
            session.worker_idx = session.worker_idx if worker_idx is None else worker_idx
            session.connected = True
            try:
                session.reception.connect(session.worker_idx, timeout)
            except BaseException:
                session.connected = False
                raise

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Become a receiver. On a copy that a fork has left as a sender, this starts anew.

        Args:
            model_id: The model's id; with a context, also the path to the model in it.
            context: An object that has the model, such as the worker's collector.
            **kwargs: `model` (instead of a context), `worker_idx` (which worker this is),
                `background` (instead of the scheme's own), and whatever the means of transport
                needs.
        """
        if context is None and self._here().side is None:
            context = self.context  # servers set it first
        session = self._begin("receiver", model_id, context, kwargs.pop("model", None))
        session.worker_idx = kwargs.pop("worker_idx", None)
        background = kwargs.pop("background", None)
        session.destination = Destination(
            self._subject, self._strategy, strict=self.strict, cast=self.cast
        )
        try:
            if context is not None and self._is_child_of_sender:
                session.destination.part_from_sender()
            session.reception = self._make_reception(
                session.destination,
                context=context,
                worker_idx=session.worker_idx,
                background=self.background if background is None else background,
                **kwargs,
            )
        except BaseException:
            self.shutdown()
            raise

    def receive(self, timeout: float | None = None) -> Any | None:
        """Return the newest weights that were applied since the last call.

        By default versions are applied in the background, and this only waits for one. With
        `background=False` they are applied here, in the thread that calls.

        Args:
            timeout: Seconds to wait for one; 0: take what is there; None: the scheme's own.

        Returns:
            The model's weights; None if nothing new came.

        Raises:
            RuntimeError: This is no connected receiver.
            ApplyError: A version does not fit; the weights are as they were (background=False).
                With a context this is logged instead, so that a server that polls goes on serving.
        """
        session = self._here()
        if session.reception is None or session.destination is None:
            raise RuntimeError("Must be initialized on receiver before receiving weights")
        if not session.connected:
            raise RuntimeError("Must be synchronized on receiver before receiving weights")
        limit = self.timeout if timeout is None else checks.seconds(timeout, "timeout")
        try:
            update = session.reception.receive(limit)
        except ApplyError as error:
            if self.context is None:
                raise
            log.error("worker %s goes on with the weights that it has: %s", self.worker_idx, error)
            return None
        return None if update is None else session.destination.weights()

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the receiver's model: all of them, or none and an exception.

        Args:
            weights: A TensorDict, a dict of tensors, or a module.
            inplace: Write into the model's own tensors; else it is given new ones.

        Raises:
            RuntimeError: This is no receiver.
            ValueError: There is no model.
            DestinationError: The weights do not fit; the text says how.
        """
        session = self._here()
        if session.destination is None:
            if session.side == "sender":
                raise RuntimeError("apply_weights() called on a sender side.")
            raise RuntimeError("apply_weights() called before init_on_receiver has been called.")
        model = session.destination.model()
        if session.reception is None or not session.connected:
            self._strategy.apply_weights(model, weights, inplace, strict=self.strict)
            return
        with session.reception.reading(self.timeout):  # keeps versions out that arrive meanwhile
            self._strategy.apply_weights(model, weights, inplace, strict=self.strict)
