"""The receiver of one model, in the older vintage of the API: a view of its scheme."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .older import Older


class WeightReceiver:
    """Receives weights for one model. Made by `scheme.get_receiver()` or `create_receiver()`."""

    def __init__(self, scheme: "Older") -> None:
        self._scheme = scheme

    def receive(self, timeout: float = 0.001) -> bool:
        """Apply the newest weights, if any have come within `timeout` seconds; tell whether.

        Raises:
            ApplyError: They do not fit; the model is as it was. The sender is told.
        """
        scheme = self._scheme
        return scheme.initialized_on_receiver and scheme.receive(timeout) is not None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights that came by another way.

        Raises:
            ValueError: There is no model.
            DestinationError: They do not fit; the model is as it was.
        """
        if not self._scheme.initialized_on_receiver:
            raise ValueError("No model registered")
        self._scheme.apply_weights(weights, inplace)
