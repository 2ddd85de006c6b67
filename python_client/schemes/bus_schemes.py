"""The schemes over the bus: the same engine, with other settings.

ZMQWeightSyncScheme            an address that the user chooses; workers on any host
DistributedWeightSyncScheme    the same, made as TorchRL's of that name
MultiProcessWeightSyncScheme   a private address on this host, by whichever road works
SharedMemWeightSyncScheme      the same, by shared memory
"""

import json
from collections.abc import Iterable
from typing import Any, Protocol, cast

from ...bus.limits import Timing
from ..publisher import Publisher
from .bus_engine import BusEngine
from .bus_reception import BusReception
from .destination import Destination
from .engine import TIMEOUT, Engine, Reception
from .scheme import WeightSyncScheme
from .strategy import Format
from .subject import is_torchrl
from .transport import WorkerTransport

LOOPBACK = "tcp://127.0.0.1:0"


class Pipe(Protocol):
    """A worker's pipe, as `multiprocessing.Pipe()` makes them."""

    def send_bytes(self, buf: bytes, /) -> None:
        """Write one message."""
        ...

    def recv_bytes(self) -> bytes:
        """Read one message."""
        ...

    def poll(self, timeout: float, /) -> bool:
        """Tell whether a message is there, or comes in time."""
        ...


class ZMQWeightSyncScheme(WeightSyncScheme):
    """Weights over ZeroMQ: to workers in any process, on any host.

    Args:
        address: Where the sender binds. Port 0 takes a free one; what was taken is in `address`
            after `init_on_sender`, and travels with the scheme when it is pickled.
        strategy: By which names weights travel: "tensordict" or "state_dict".
        num_workers: How many workers there are. A send is then for all of them, also for those
            that are still starting. None: as many as the context says, else those that have joined.
        shared_memory: Let workers on the sender's host read from its memory.
        advertise: What workers are told to connect to for data; None: it follows from `address`.
        liveness: How long to wait for signs of life.
        timeout: Seconds that a call waits unless it is told otherwise.
        strict: Whether both sides must have the same names.
        cast: Whether values may be converted to the receiving model's dtypes.
        background: Receivers apply in the background; else where `receive()` is called.
    """

    sync = True  # whether `send` waits until the workers have applied the weights

    def __init__(
        self,
        address: str = LOOPBACK,
        strategy: Format = "tensordict",
        *,
        num_workers: int | None = None,
        shared_memory: bool = True,
        advertise: str | None = None,
        liveness: Timing | None = None,
        timeout: float = TIMEOUT,
        strict: bool = True,
        cast: bool = True,
        background: bool = True,
    ) -> None:
        super().__init__(strategy, timeout=timeout, strict=strict, cast=cast, background=background)
        self.bind, self.address, self.advertise = address, address, advertise
        self.num_workers, self.shared_memory, self.liveness = num_workers, shared_memory, liveness

    def _make_engine(
        self,
        *,
        num_workers: int | None = None,
        pipes: Iterable[Pipe] | None = None,
        context: Any = None,
        **others: Any,
    ) -> Engine:
        del others
        pipes = _pipes_of(context) if pipes is None else pipes
        publisher = Publisher(
            self.bind,
            advertise=self.advertise,
            shared_memory=self.shared_memory,
            timing=self.liveness,
        )
        self.address = publisher.address
        try:
            for worker, pipe in enumerate(pipes or ()):
                pipe.send_bytes(json.dumps({"weightbus": self.address, "worker": worker}).encode())
        except BaseException:
            publisher.close()
            raise
        return BusEngine(publisher, self.num_workers if num_workers is None else num_workers)

    def _make_reception(
        self,
        destination: Destination,
        *,
        background: bool = True,
        pipe: Pipe | None = None,
        **others: Any,
    ) -> Reception:
        del others
        if pipe is not None:
            told = _read(pipe, self.timeout)
            self.address = told["weightbus"]
            if self._session.worker_idx is None:
                self._session.worker_idx = int(told["worker"])
        if self.address.endswith((":0", ":*")):
            raise ValueError(
                f"the sender's address is not known here ({self.address}): give this scheme the "
                "address of an initialised sender, a pipe from it, or a copy pickled after "
                "init_on_sender(). (pipe must be provided via context or kwargs)"
            )
        return BusReception(
            destination,
            self.address,
            background=background,
            shared_memory=self.shared_memory,
            timing=self.liveness,
        )

    def _engine_of(self, pipe_or_context: Any) -> Engine:
        """Return an engine with one worker, which learns of it by its pipe."""
        if pipe_or_context is None:
            raise ValueError("pipe must be provided: the end of a pipe to the worker")
        if not hasattr(pipe_or_context, "send_bytes"):
            raise TypeError(
                f"a {type(pipe_or_context).__name__} leads to no worker: give the end of a pipe to "
                "the worker, or let workers join at the scheme's address (init_on_sender)"
            )
        engine = self._make_engine(num_workers=1, pipes=[pipe_or_context])
        self._session.at_close.append(engine.close)
        return engine

    def send(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send weights; see `WeightSyncScheme.send`, or `send_async` if not `sync`."""
        if self.sync:
            super().send(weights, worker_ids, timeout=timeout)
            return
        sending = self._session.sending
        if sending is not None and sending.pending:
            self.wait_async()
        self.send_async(weights, worker_ids, timeout=timeout)


class DistributedWeightSyncScheme(ZMQWeightSyncScheme):
    """Weights to other hosts, made as TorchRL's scheme over `torch.distributed` is.

    Args:
        backend: Taken for compatibility, "gloo" or "nccl": no process group is needed.
        sync: As in `MultiProcessWeightSyncScheme`.
        timeout: Seconds that a call waits unless it is told otherwise.
        **settings: Those of `ZMQWeightSyncScheme`. Workers on other hosts need an `address` that
            they can reach, "tcp://this-host:5555"; by default those of this host can.
    """

    def __init__(
        self, backend: str = "gloo", sync: bool = True, timeout: float = 3600.0, **settings: Any
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend={backend!r}: it is 'gloo' or 'nccl', and neither is used")
        super().__init__(timeout=timeout, **settings)
        self.backend, self.sync = backend, sync


class MultiProcessWeightSyncScheme(ZMQWeightSyncScheme):
    """Weights to processes of this host, over a private address of the bus.

    Args:
        strategy: By which names weights travel: "tensordict" or "state_dict".
        sync: Whether `send` waits until the workers have applied the weights. If not, it is
            `send_async`, and the next send first waits for the one before.
        **settings: Those of `ZMQWeightSyncScheme`.
    """

    def __init__(self, strategy: Format = "tensordict", sync: bool = True, **settings: Any) -> None:
        super().__init__(strategy=strategy, **settings)
        self.sync = sync

    def init_on_sender(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Become the sender; see `WeightSyncScheme.init_on_sender`.

        Raises:
            ValueError: The arguments do not go together, or do not say how many workers there are.
        """
        _check_sources(model_id, context, kwargs, self.num_workers)
        super().init_on_sender(model_id, context, **kwargs)


class MPTransport(WorkerTransport):
    """The way to the worker at the other end of a pipe, of a scheme of its own.

    Args:
        pipe: This end. Its worker calls `init_on_worker(..., pipe=...)` with the other.
        timeout: Seconds that a send may take.
    """

    def __init__(self, pipe: Any, timeout: Any = TIMEOUT, *_: Any) -> None:
        if not hasattr(pipe, "send_bytes"):  # queues, as TorchRL's later ones take them
            raise TypeError(
                f"an MPTransport of a {type(pipe).__name__} leads nowhere: write MPTransport(pipe) "
                "or take those of an initialised scheme, sender_transports"
            )
        self._scheme = MultiProcessWeightSyncScheme(timeout=timeout)  # ends with the transport
        super().__init__(*self._scheme.way_to(pipe))


class SharedMemWeightSyncScheme(MultiProcessWeightSyncScheme):
    """Weights to processes of this host, which read them from the sender's memory.

    Args:
        strategy: By which names weights travel: "tensordict" or "state_dict".
        sync: Whether `send` waits until the workers have applied the weights.
        per_worker_weights: Accepted for compatibility; `send({0: ..., 1: ...})` always works.
        policy_weights: Weights to send, by model id, as `register_shared_weights` takes them. The
            older vintage has them first.
        auto_register: Whether models that were not registered may be sent.
        **settings: Those of `ZMQWeightSyncScheme`.

    The trainer's own tensors are never shared: workers read a snapshot, and copy it into models
    of their own. Where the host gives no shared memory, weights take the network's road.
    """

    def __init__(
        self,
        strategy: Format | dict[str, Any] | None = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        policy_weights: dict[str, Any] | None = None,
        auto_register: bool = True,
        **settings: Any,
    ) -> None:
        if not isinstance(strategy, str):  # where the older vintage has its policy_weights
            policy_weights, strategy = strategy, "tensordict"
        super().__init__(strategy, sync, **settings)
        self.per_worker_weights, self.auto_register = per_worker_weights, auto_register
        self.policy_weights: dict[str, Any] = dict(policy_weights or {})

    def register_shared_weights(self, model_id: str, weights: Any) -> None:
        """Register the weights that are sent for a model if a send does not say.

        Raises:
            RuntimeError: The model has some.
        """
        if model_id in self.policy_weights:
            raise RuntimeError("Re-registering weights is not supported.")
        self.policy_weights[model_id] = weights

    def _own_weights(self, model_id: str, context: Any) -> Any:
        """Return the registered weights of a model, else what the base knows."""
        if model_id in self.policy_weights:
            return self.policy_weights[model_id]
        if not self.auto_register:
            raise KeyError(f"model {model_id!r} is not registered; register_shared_weights() first")
        return super()._own_weights(model_id, context)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"policy_weights": {}}  # a worker has no use for them


def _check_sources(
    model_id: str | None, context: Any, kwargs: dict[str, Any], count: int | None
) -> None:
    """Check what may be given together, as callers of the original know it."""
    given = {name for name, value in kwargs.items() if value is not None}
    given |= {"model_id"} if model_id is not None else set()
    if "params_map" in given:
        if not isinstance(kwargs["params_map"], dict):
            raise ValueError("params_map must be a dict[int, TensorDictBase]")
        if given & {"weights", "model"}:
            raise ValueError(
                "model_id, weights, and model cannot be provided if params_map is provided"
            )
        other, excluded = "params_map", ["devices", "device_map_fn", "num_workers"]
        if context is not None:
            raise ValueError("context cannot be provided if params_map is provided")
    elif context is not None:
        if model_id is None:
            raise ValueError("model_id must be provided if context is provided")
        other = "context"
        excluded = ["devices", "model", "weights", "device_map_fn", "num_workers"]
    else:
        if not given & {"model", "weights", "devices", "num_workers", "pipes"} and count is None:
            raise ValueError(
                "Either params_map, model_id + context or model/weights + devices must be provided."
                " (In the older vintage: pipes must be provided via context or kwargs)"
            )
        return
    for name in excluded:
        if name in given:
            raise ValueError(f"{name} cannot be provided if {other} is provided")


def _pipes_of(context: Any) -> Iterable[Pipe] | None:
    """Return the pipes of a context of the older vintage; TorchRL's own are not ours to use."""
    return None if is_torchrl(context) else getattr(context, "pipes", None)


def _read(pipe: Pipe, timeout: float) -> dict[str, Any]:
    """Read where the sender is, and which worker this is."""
    if not pipe.poll(timeout):
        raise TimeoutError(
            f"no address came down the pipe within {timeout} s; is init_on_sender() called with "
            "the other end of it?"
        )
    told: Any = json.loads(pipe.recv_bytes())
    if not isinstance(told, dict) or not {"weightbus", "worker"} <= told.keys():
        raise ValueError("something else than the sender's address came down the pipe first")
    return cast("dict[str, Any]", told)
