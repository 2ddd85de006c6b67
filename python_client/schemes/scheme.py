"""The scheme: one model, kept the same on a sender and its workers, whatever carries the weights.

A scheme has one side and takes two steps on it:

    new ── init_on_sender() ───> sender ──── connect() ──> connected: send(), send_async()
     └──── init_on_receiver() ─> receiver ── connect() ──> connected: receive(), reading()

The older vintage of the API (`init_on_worker`, `get_sender`, `create_transport`, ...) is a view of
the same machinery: its senders and receivers connect by themselves when they are first used.

To carry weights by another means, derive from `WeightSyncScheme` and override:

    _make_engine(**kwargs)                 the sender's side (engine.Engine)
    _make_reception(destination, **kwargs) the receiver's side (engine.Reception)
    _engine_of(pipe_or_context)            an engine with one worker, for `create_transport`
    _await_first(timeout)                  if a receiver's connect() must not wait for weights

`kwargs` are those of `init_on_sender` and `init_on_receiver` that the base does not use itself
(`num_workers` and `worker_idx` included): an adapter takes those it knows and ignores the others,
since collectors pass more than any needs. What an adapter stores on itself is pickled with it, so
it must be plain values; sockets and handles belong into its engine or reception.
"""

from typing import Any

from .destination import Destination
from .engine import Engine, Reception
from .roles import Roles
from .transport import TransportBackend


class WeightSyncScheme(Roles):
    """One model on a sender and its workers."""

    def _make_engine(self, **kwargs: Any) -> Engine:
        """Return what carries weights to the workers. Called by `init_on_sender`."""
        raise NotImplementedError

    def _make_reception(self, destination: Destination, **kwargs: Any) -> Reception:
        """Return what takes weights in. Called by `init_on_receiver`."""
        raise NotImplementedError

    def _engine_of(self, pipe_or_context: Any) -> Engine:
        """Return an engine with one worker, known as 0: whoever `pipe_or_context` leads to."""
        raise NotImplementedError

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> TransportBackend:
        """Return the transport of one worker, over `_engine_of`."""
        raise NotImplementedError
