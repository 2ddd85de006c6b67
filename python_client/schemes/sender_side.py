"""The sender's side of a scheme: what is sent, to whom, and by when."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

from ...bus.errors import PublishError
from ...codecs.errors import WeightBusError
from .engine import Engine, Prepared, Weights
from .roles import Roles
from .sending import SendCall, Sending
from .strategy import WeightStrategy, has_names
from .subject import POLICY, is_torchrl, model_in

# What init_on_sender takes itself; the rest is for the adapter.
SOURCES = (
    "model",
    "source_model",
    "weights",
    "cached_weights",
    "params_map",
    "devices",
    "device_map_fn",
)


class NothingToSendError(WeightBusError, LookupError):
    """Nobody said what to send."""

    def __str__(self) -> str:
        return str(self.args[0])


class SenderSide(Roles):
    """What a scheme does on the sender."""

    def _make_engine(self, **kwargs: Any) -> Engine:
        """Return what carries weights to the workers. Called by `init_on_sender`."""
        raise NotImplementedError

    def init_on_sender(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Become the sender.

        Args:
            model_id: The model's id; with a context, also the path to the model in it.
            context: An object that has the model, such as a collector.
            **kwargs: Alternatives to a context: `model` or `weights` (what to send if a send does
                not say), `num_workers` or `devices` or `params_map` (how many workers there are),
                and whatever the means of transport needs.
        """
        given = {name: kwargs.pop(name, None) for name in SOURCES}
        model = given["model"] if given["source_model"] is None else given["source_model"]
        if kwargs.get("num_workers") is None:
            kwargs["num_workers"] = _count(given, kwargs, context)
        session = self._begin("sender", model_id, context, model)
        session.weights = _given_weights(given, kwargs["num_workers"])
        try:
            session.sending = Sending(self._make_engine(context=context, **kwargs))
        except BaseException:
            self.shutdown()
            raise

    def _connect_sender(self, weights: Any, timeout: float) -> None:
        """Have the first weights reach every worker that has joined or joins later."""
        engine = self._session.engine
        if engine is not None:
            self._session.connected = True
            try:
                engine.greet(self._first_weights(weights), timeout=timeout)
            except PublishError:
                raise  # some worker was not reached; the others can be sent to
            except BaseException:
                self._session.connected = False
                raise

    def _first_weights(self, weights: Any) -> Prepared | None:
        try:
            return self._prepared(weights)
        except NothingToSendError:
            return None  # the first send brings them

    def send(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send weights, and return when the workers have applied them.

        Args:
            weights: An `nn.Module`, a TensorDict, a dict of tensors, the path of a model in the
                context, or `{worker id: weights}`; None: the model that this scheme is about.
            worker_ids: Which workers; None: all of them.
            timeout: Seconds for all of it; None: the scheme's own.

        What each worker did is in `receipt`, also after an error.

        Raises:
            PublishError: Some workers do not have the weights; it names them. The others do.
            RuntimeError: This is no connected sender, or a `send_async` was not waited for.
            ValueError: There is no worker of that id.
            StateError: The weights cannot travel; nothing was sent.
        """
        self.start_sending("send", self._connected(), weights, worker_ids, timeout).finish()

    def send_async(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send weights, and return as soon as they may be changed here; see `wait_async`."""
        self.start_sending("send_async", self._connected(), weights, worker_ids, timeout)

    def wait_async(self, timeout: float | None = None) -> None:
        """Wait until what `send_async` sent is applied; errors are those of `send`.

        Raises:
            RuntimeError: Nothing is on its way.
            TimeoutError: It still is after `timeout` seconds; wait again.
        """
        self._connected().wait(timeout)

    def _connected(self) -> Sending:
        sending = self._here().sending
        if sending is None:
            raise RuntimeError("Must be initialized on sender before sending weights")
        if not self._session.connected:
            raise RuntimeError("Must be synchronized on sender before sending weights")
        return sending

    def start_sending(
        self,
        call: SendCall,
        sending: Sending,
        weights: Any,
        worker_ids: int | Sequence[int] | None,
        timeout: float | None,
    ) -> Sending:
        """Prepare weights and start to send them over an engine: what all ways to send share."""
        sending.check_idle(call)
        prepared = self._prepared(weights)
        sending.start(prepared, _ids(worker_ids), self.timeout if timeout is None else timeout)
        return sending

    def own_sending(self) -> Sending:
        """Return what is being sent by this scheme, connecting it first if need be."""
        if self.initialized_on_sender and not self._session.connected:
            self._session.connected = (
                True  # senders of the older vintage send nothing by themselves
            )
        return self._connected()

    def _prepared(self, weights: Any) -> Prepared:
        """Prepare whatever a user gave for all workers, or for each."""
        given = self._session.weights if weights is None else weights
        if _is_per_worker(given):
            return {worker: self._weights_of(own, None) for worker, own in given.items()}
        return self._weights_of(weights, None)

    def _weights_of(self, weights: Any, model_id: str | None) -> Weights:
        """Prepare whatever a user gave.

        Raises:
            LookupError: There is nothing to send.
        """
        name = model_id or self.model_id or POLICY
        if type(self).prepare_weights is SenderSide.prepare_weights:
            source = self._source(weights, name, self.context)
        else:  # a user's own
            source = self.prepare_weights(weights, name, self._strategy, self.context)
        if source is None:
            raise NothingToSendError(
                f"there are no weights of {name!r} to send: give them to send(), or give "
                "init_on_sender() a model or a context that has one"
            )
        return Weights(name, self._strategy.tensors_of(source))

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None
    ) -> Any:
        """Return what a send will carry, for whatever a user gave; see `send`.

        Args:
            weights: None (the model's own), an `nn.Module`, a path in the context, or weights as
                they are.
            model_id: The model's id.
            strategy: How weights are taken out of a model.
            context: Where models are looked up.

        Returns:
            A TensorDict or a dict of tensors; None if there is nothing to send.

        Raises:
            ValueError: A path was given, but no context.
        """
        source = self._source(weights, model_id, context)
        if source is None or has_names(source):
            return strategy.formed(source)
        return strategy.extract_weights(source)

    def _source(self, weights: Any, model_id: str, context: Any) -> Any:
        """Return what weights are taken out of, which a send does once."""
        if not isinstance(weights, str):
            return self._own_weights(model_id, context) if weights is None else weights
        if context is None:
            raise ValueError(f"Cannot resolve string reference '{weights}' without context")
        return model_in(context, weights)

    def _own_weights(self, model_id: str, context: Any) -> Any:
        """Return the model that this scheme is about, or the weights that stand for it."""
        if self._session.weights is not None:
            return self._session.weights
        if self._subject.given is not None:
            return self._subject.given
        if context is None:
            return None
        cached = getattr(context, "get_cached_weights", None)
        if cached is not None and not is_torchrl(context):  # whose own may be of another device
            weights = cached(model_id)
            if weights is not None:
                return weights
        try:
            return model_in(context, model_id)
        except (AttributeError, KeyError):
            return getattr(context, "_fallback_policy", None) if model_id == POLICY else None


def _is_per_worker(weights: Any) -> bool:
    """Tell `{worker id: weights}` from the weights of one model."""
    if not isinstance(weights, Mapping):
        return False
    # By `keys()`, since a TensorDict is a mapping that iterates over its batch.
    keys = [*cast("Mapping[object, Any]", weights).keys()]
    return bool(keys) and all(type(key) is int for key in keys)


def _ids(worker_ids: int | Sequence[int] | None) -> list[int] | None:
    if worker_ids is None:
        return None
    return list(dict.fromkeys([worker_ids] if isinstance(worker_ids, int) else worker_ids))


def _count(given: Mapping[str, Any], kwargs: Mapping[str, Any], context: Any) -> int | None:
    """Return how many workers there are, as far as anybody said."""
    for listed in (given["params_map"], given["devices"], kwargs.get("pipes")):
        if isinstance(listed, Sized):
            return len(listed)
    count = getattr(context, "num_workers", None)
    return count if isinstance(count, int) else None


def _given_weights(given: Mapping[str, Any], workers: int | None) -> Any:
    """Return the weights to send if a send does not say, where they were given without a model."""
    listed = (given[name] for name in ("params_map", "weights", "cached_weights"))
    weights = next((w for w in listed if w is not None), None)
    mapped = given["device_map_fn"]
    if mapped is None or weights is None:
        return weights
    return {worker: mapped(worker, weights) for worker in range(workers or 0)}
