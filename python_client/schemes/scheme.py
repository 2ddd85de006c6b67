"""The scheme: one model, kept the same on a sender and its workers, whatever carries the weights.

A scheme has one side and takes two steps on it:

    new ── init_on_sender() ───> sender ──── connect() ──> connected: send(), send_async()
     └──── init_on_receiver() ─> receiver ── connect() ──> connected: receive(), reading()

The older vintage of the API (`init_on_worker`, `get_sender`, `create_transport`, ...) is a view of
the same machinery (older.py): its senders and receivers connect when they are made.

To carry weights by another means, derive from `WeightSyncScheme` and override:

    _make_engine(**kwargs)                 the sender's side (engine.Engine)
    _make_reception(destination, **kwargs) the receiver's side (engine.Reception)
    _engine_of(pipe_or_context)            an engine with one worker, 0, for `create_transport`
    _await_first(timeout)                  if a receiver's connect() must not wait for weights

`kwargs` are those of `init_on_sender` and `init_on_receiver` that the base does not use itself,
with `num_workers` on the sender, and `worker_idx` and `background` on the receiver: an adapter
takes those it knows and ignores the others, since collectors pass more than any needs. Whatever it
stores on the scheme is pickled with it, so it must be plain; sockets belong into its engine.
"""

from typing import Any, cast

from . import backends
from .older import Older


class WeightSyncScheme(Older):
    """One model on a sender and its workers.

    Construct one of its subclasses; `from_backend` finds the one for a means of transport.
    """

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> "WeightSyncScheme":
        """Return a scheme for a way of deployment: none, shared, process, rpc, ray, zmq, ...

        Raises:
            ValueError: There is none of that name; the text lists them.
        """
        return cast("type[WeightSyncScheme]", backends.scheme_class(backend))(**kwargs)

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Take up work. Neither side waits for the other, but for a model on the meta device.

        On the sender, its weights (`weights`, or the model's) become the first version, which
        every worker gets that has joined or joins later. A receiver whose model is on the meta
        device waits for them, at most `timeout` seconds.

        Raises:
            RuntimeError: It is not initialised, or connected already, or got what is meant for the
                other side.
            TimeoutError: No weights came for a model on the meta device.
        """
        limit = self.timeout if timeout is None else timeout
        session = self._here()
        if session.side is None:
            raise RuntimeError("Neither init_on_sender nor init_on_receiver have been called.")
        if session.connected:
            raise RuntimeError("Cannot synchronize weights on sender twice.")
        if session.side == "sender" and worker_idx is not None:
            raise RuntimeError("Cannot specify worker_idx on sender side during synchronization.")
        if session.side == "receiver" and weights is not None:
            raise RuntimeError("Cannot specify weights on receiver side during synchronization.")
        if session.side == "sender":
            self._connect_sender(weights, limit)
        else:
            self._connect_receiver(worker_idx, limit)
            try:
                self._await_first(limit)
            except BaseException:
                session.connected = False
                raise
