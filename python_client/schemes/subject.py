"""The subject of a scheme: which model it is about, and where that model is found.

A model is given as it is, or found in a context (a collector, for example) each time it is needed.
The context is held weakly, since it usually holds the scheme.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

from .engine import TIMEOUT
from .handing import keep
from .resolve import resolve

log = logging.getLogger("weightbus.schemes")

POLICY = "policy"


class Subject:
    """A model id, and the context or the model behind it."""

    def __init__(self) -> None:
        self.model_id: str | None = None
        self._model: object | None = None
        self._context: Callable[[], object | None] = _nothing

    @property
    def context(self) -> object | None:
        """The context, while it lives."""
        return self._context()

    @context.setter
    def context(self, context: object | None) -> None:
        self._context = _nothing if context is None else weakref.ref(context)

    @property
    def forsaken(self) -> bool:
        """Whether there was a context, which is gone."""
        return self._context is not _nothing and self._context() is None

    @property
    def given(self) -> object | None:
        """The model, if it was given as it is."""
        return self._model

    @given.setter
    def given(self, model: object | None) -> None:
        self._model = model

    def model(self) -> object | None:
        """Return the model; None where neither it nor a context was given.

        Raises:
            AttributeError: The context has no such model.
        """
        if self._model is not None:
            return self._model
        context = self.context
        if context is None or self.model_id is None:
            return None
        return model_in(context, self.model_id)

    def cascade(self, weights: Callable[[], object]) -> None:
        """Tell the context that its model has new weights, as TorchRL's collectors expect.

        A collector counts versions and passes weights on to collectors inside it. It can do so for
        its policy and for models that it has schemes for; of another it only counts the version.
        A context that counts no versions, like an inference server, is told of every model.

        Raises:
            Exception: What the context raises, at once or later.
        """
        context, model_id = self.context, self.model_id or POLICY
        update = getattr(context, "update_policy_weights_", None)
        if update is None:
            return
        schemes: object = getattr(context, "_weight_sync_schemes", None)
        increment = getattr(context, "increment_version", None)
        knows = model_id == POLICY or (isinstance(schemes, dict) and model_id in schemes)
        told: Any = (
            update(model_id=model_id, policy_or_weights=weights())
            if knows or increment is None
            else increment()
        )
        keep(told, TIMEOUT)


def model_in(context: object, model_id: str) -> object:
    """Return a context's model: an attribute path, or whatever its `get_model()` knows.

    Raises:
        AttributeError: There is none.
    """
    try:
        model = resolve(context, model_id)
    except AttributeError as nowhere:
        get_model = getattr(context, "get_model", None)
        if get_model is None:
            raise
        try:
            model = get_model(model_id)
        except KeyError:
            raise nowhere from None
    if model is None:
        raise AttributeError(f"Model {model_id} was `None` in context {context}")
    return model


def is_torchrl(context: object) -> bool:
    """Tell whether a context is a collector of TorchRL's, with pipes and caches of its own use."""
    return hasattr(context, "policy_device")


def _nothing() -> None:
    return None
