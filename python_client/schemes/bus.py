"""Defines the schemes over the bus: the sender is a `Publisher`, each receiver a `Subscriber`.

    init_on_sender()           a publisher binds the address, and sends it through the pipes
    connect() of a sender      publishes the first weights, also for workers that join later
    send()                     publishes to the connected workers, and waits for acknowledgements
    connect() of a receiver    a subscriber joins; in the background it applies versions
    receive()                  waits until a version is applied, or applies a version in the call
    shutdown()                 closes the publisher or the subscriber

A worker's name on the bus is its number. If the number of workers is known, a send includes all of
them: `send` waits until every worker has joined once, but keeps a part of its timeout (`MARGIN`)
for publishing. It publishes to the connected workers, and the receipt names the others. If the
number of workers is unknown, a send includes the workers that have joined.

Some collectors number their workers from 0 on the sender and from 1 on the receivers. Receivers
are assumed to count from 1 once a worker joins whose number equals the number of workers.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

from ...bus.errors import ClosedError, PublishError
from ...bus.limits import APPLY_SECONDS, APPLY_SECONDS_MAX
from ...bus.receipt import Receipt, WorkerReceipt
from ...bus.trust.keys import WorkerKeys
from ...codecs.apply import summing
from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ..applying.applier import Update
from ..applying.reading import READING_SECONDS
from ..applying.target import Names, Sums
from ..applying.targets import MemoryTarget
from ..keys import generate_keys
from ..publisher import Publisher
from ..settings import Settings
from ..subscriber import Subscriber
from .legacy_api import WeightSyncScheme
from .model import is_torchrl
from .receiver import Destination
from .strategy import Format
from .transport import TIMEOUT, Prepared, Receiver, Transport, Weights
from .worker_transports import WorkerTransport

LOOPBACK = "tcp://127.0.0.1:0"
CHECK_SECONDS = 0.02  # seconds between two checks whether all workers have joined
# fraction of a send's timeout that is kept for publishing, after waiting for workers to join
MARGIN = 0.2


class ZMQWeightSyncScheme(WeightSyncScheme):
    """Sends weights over ZeroMQ to workers in any process, on any host.

    Args:
        address: The address that the sender binds. Port 0 selects a free port: after
            `init_on_sender`, the attribute `address` contains that port, also in pickled copies.
        strategy: The naming of the weights: "tensordict" or "state_dict".
        num_workers: The number of workers. If it is known, a send also waits for workers that are
            still starting. None: the context's number if it has one, otherwise unknown.
        shared_memory: Whether workers on the sender's host may read from its memory.
        keyed: Whether to encrypt, and to accept only the scheme's own workers. The sender makes the
            keys; workers get them in the pickled scheme or through a pipe. None: only if other
            hosts can reach the address.
        insecure: Allow an address that other hosts can reach, without keys.
        advertise: The data address that workers connect to. None: derived from `address`.
        liveness: A `Settings`, of which only `ping` and `lost_after` are used.
        timeout: Default seconds that a call waits.
        strict: Whether both sides must have the same names.
        cast: Whether values may be converted to the receiving model's dtypes.
        background: Whether receivers apply versions in the background; otherwise in `receive()`.
    """

    _one_host = False  # whether to reject the arguments that TorchRL's single-host schemes reject

    def __init__(
        self,
        address: str = LOOPBACK,
        strategy: Format = "tensordict",
        *,
        num_workers: int | None = None,
        shared_memory: bool = True,
        keyed: bool | None = None,
        insecure: bool = False,
        advertise: str | None = None,
        liveness: Settings | None = None,
        timeout: float = TIMEOUT,
        strict: bool = True,
        cast: bool = True,
        background: bool = True,
    ) -> None:
        super().__init__(strategy, timeout=timeout, strict=strict, cast=cast, background=background)
        self.bind, self.address, self.advertise = address, address, advertise
        self.num_workers, self.shared_memory, self.liveness = num_workers, shared_memory, liveness
        self.keyed, self.insecure = keyed, insecure
        # the keys that receivers need; None: no encryption, or not yet a sender
        self._keys: WorkerKeys | None = None

    def init_on_sender(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Become the sender, and bind the address. Arguments are those of `Scheme`'s method.

        Single-host schemes reject the combinations of arguments that TorchRL's schemes reject.
        """
        if self._one_host:
            _check_sources(model_id, context, kwargs, self.num_workers)
        super().init_on_sender(model_id, context, **kwargs)

    def _make_transport(
        self, *, num_workers: int | None = None, pipes: Any = None, context: Any = None, **_: Any
    ) -> Transport:
        if pipes is None and not is_torchrl(context):  # a TorchRL collector uses its own pipes
            pipes = getattr(context, "pipes", None)
        own, self._keys = generate_keys(self.bind, keyed=self.keyed, insecure=self.insecure)
        keys = "" if self.keyed is False else own  # "": ignore keys in the environment
        publisher = Publisher(
            self.bind,
            keys=keys,
            insecure=self.insecure,
            settings=replace(self._settings(), advertise=self.advertise),
        )
        self.address = publisher.address
        with ExitStack() as undo:
            undo.callback(publisher.close)
            _send_address(
                pipes or (), self.address, None if self._keys is None else asdict(self._keys)
            )
            undo.pop_all()
        return _BusSender(publisher, self.num_workers if num_workers is None else num_workers)

    def _make_receiver(
        self, destination: Destination, *, background: bool = True, pipe: Any = None, **_: Any
    ) -> Receiver:
        if pipe is not None:
            given = _read_address(pipe, self.timeout)
            self.address, handed = given["weightbus"], given.get("keys")
            self._keys = None if handed is None else WorkerKeys(**handed)
            if self._role.reference.worker_idx is None:
                self._role.reference.worker_idx = int(given["worker"])
        if self.address.endswith((":0", ":*")):
            raise ValueError(
                f"the sender's address is not known here ({self.address}): give this scheme the "
                "address of an initialised sender, a pipe from it, or a copy pickled after "
                "init_on_sender(). (pipe must be provided via context or kwargs)"
            )
        keys = "" if self.keyed is False and self._keys is None else self._keys
        join = partial(Subscriber, self.address, keys=keys)
        return _BusReceiver(destination, join, self._settings(), background=background)

    def _settings(self) -> Settings:
        """Return the settings that the publisher and the subscribers of this scheme use."""
        times = self.liveness or Settings()
        shared = self.shared_memory
        return Settings(ping=times.ping, lost_after=times.lost_after, shared_memory=shared)

    def transport_to(self, pipe_or_context: Any) -> Transport:
        if pipe_or_context is None:
            raise ValueError("pipe must be provided: the end of a pipe to the worker")
        if not hasattr(pipe_or_context, "send_bytes"):
            raise TypeError(
                f"a {type(pipe_or_context).__name__} is no way to a worker: give the end of a pipe "
                "to the worker, or let workers join at the scheme's address (init_on_sender)"
            )
        transport = self._make_transport(num_workers=1, pipes=[pipe_or_context])
        self._role.on_end(transport.close)
        return transport


class DistributedWeightSyncScheme(ZMQWeightSyncScheme):
    """Sends weights to other hosts; constructed like TorchRL's scheme over `torch.distributed`.

    Args:
        backend: Accepted for compatibility, "gloo" or "nccl"; no process group is needed.
        sync: As in `MultiProcessWeightSyncScheme`.
        timeout: Default seconds that a call waits.
        **settings: Those of `ZMQWeightSyncScheme`. Only this host can reach the default `address`;
            if workers run on other hosts, pass an address like "tcp://this-host:5555".
    """

    def __init__(
        self, backend: str = "gloo", sync: bool = True, timeout: float = 3600.0, **settings: Any
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend={backend!r}: give 'gloo' or 'nccl' (neither is used)")
        super().__init__(timeout=timeout, **settings)
        self.backend, self.sync = backend, sync


class MultiProcessWeightSyncScheme(ZMQWeightSyncScheme):
    """Sends weights to processes on this host, over a private address of the bus.

    Args:
        strategy: The naming of the weights: "tensordict" or "state_dict".
        sync: Whether `send` waits until the workers have applied the weights. If False, `send`
            returns as `send_async` does, and the next `send` first waits for the previous one.
        **settings: Those of `ZMQWeightSyncScheme`.
    """

    _one_host = True

    def __init__(self, strategy: Format = "tensordict", sync: bool = True, **settings: Any) -> None:
        super().__init__(strategy=strategy, **settings)
        self.sync = sync


class MPTransport(WorkerTransport):
    """The transport to the worker at the other end of `pipe`; `timeout`: seconds per call."""

    def __init__(self, pipe: Any, timeout: Any = TIMEOUT, *_: Any) -> None:
        if not hasattr(pipe, "send_bytes"):  # a queue, which TorchRL's later MPTransport takes
            raise TypeError(
                f"an MPTransport cannot send through a {type(pipe).__name__}: write "
                "MPTransport(pipe), or use sender_transports of an initialised scheme"
            )
        scheme = MultiProcessWeightSyncScheme(timeout=timeout)  # the transport keeps it alive
        super().__init__(scheme, scheme.transport_to(pipe))


class SharedMemWeightSyncScheme(ZMQWeightSyncScheme):
    """Sends weights to processes on this host, which read them from the sender's memory.

    Args:
        strategy: The naming of the weights: "tensordict" or "state_dict".
        sync: Whether `send` waits until the workers have applied the weights.
        per_worker_weights: Accepted for compatibility; `send({0: ..., 1: ...})` always works.
        policy_weights: Weights by model id, registered as `register_shared_weights` does. In the
            older API this is the first argument.
        auto_register: Whether models that were not registered may be sent.
        **settings: Those of `ZMQWeightSyncScheme`.

    The trainer's own tensors are never shared: workers read a snapshot, and copy it into their own
    models. If the host has no shared memory, weights are sent over the network.
    """

    _one_host = True

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
        if not isinstance(strategy, str):  # the first argument of the older API
            policy_weights, strategy = strategy, "tensordict"
        super().__init__(strategy=strategy, **settings)
        self.sync = sync
        self.per_worker_weights, self.auto_register = per_worker_weights, auto_register
        self.policy_weights: dict[str, Any] = dict(policy_weights or {})

    def register_shared_weights(self, model_id: str, weights: Any) -> None:
        """Register the `weights` of `model_id` that `send()` sends if it is called without weights.

        Raises:
            RuntimeError: Weights of this model are already registered.
        """
        if model_id in self.policy_weights:
            raise RuntimeError("Re-registering weights is not supported.")
        self.policy_weights[model_id] = weights

    def _source(self, weights: Any, model_id: str, context: Any) -> Any:
        """Return the model's registered weights if `weights` is None, else as `Scheme` does."""
        if weights is None and model_id in self.policy_weights:
            return self.policy_weights[model_id]
        if weights is None and not self.auto_register:
            raise KeyError(f"model {model_id!r} is not registered; register_shared_weights() first")
        return super()._source(weights, model_id, context)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"policy_weights": {}}  # workers do not send weights


# Pipes that carry the sender's address to workers.


def _send_address(pipes: Iterable[Any], address: str, keys: Mapping[str, str] | None) -> None:
    """Send each worker the sender's address, the worker's id and the keys, through its pipe."""
    for worker, pipe in enumerate(pipes):
        given = {"weightbus": address, "worker": worker, "keys": keys}
        pipe.send_bytes(json.dumps(given).encode())


def _read_address(pipe: Any, timeout: float) -> dict[str, Any]:
    """Return the message of `_send_address`: address, worker's id, and keys (or None)."""
    if not pipe.poll(timeout):
        raise TimeoutError(
            f"no address arrived through the pipe within {timeout} s; was init_on_sender() called "
            "with the other end of the pipe?"
        )
    given: Any = json.loads(pipe.recv_bytes())
    if not isinstance(given, dict) or not {"weightbus", "worker"} <= given.keys():
        raise ValueError("the first message of the pipe is not the sender's address")
    return cast("dict[str, Any]", given)


# On the sender.


def _check_sources(
    model_id: str | None, context: Any, kwargs: Mapping[str, Any], count: int | None
) -> None:
    """Raise ValueError for combinations of arguments that TorchRL's local schemes reject."""
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
                " (In the legacy API: pipes must be provided via context or kwargs)"
            )
        return
    for name in excluded:
        if name in given:
            raise ValueError(f"{name} cannot be provided if {other} is provided")


class _BusSender(Transport):
    """Sends with a publisher: to `num_workers` workers; None: to all that have joined."""

    def __init__(self, publisher: Publisher, num_workers: int | None = None) -> None:
        self._publisher, self._count = publisher, num_workers
        self._closed = threading.Event()
        self._model: str | None = None
        self._seen: set[str] = set()  # names of all workers that ever joined
        self._first = 0  # the number of the first receiver: 0 or 1
        self._firsts: dict[int, Weights] = {}  # first weights of workers that have not joined yet
        self._order = threading.Lock()  # held while publishing: later weights get a later version
        # Record a worker when it joins: it may leave again before the next call of `workers()`.
        publisher.on_worker(lambda event: self._record_joined([event.worker]))

    def workers(self) -> Sequence[int]:
        if self._count is not None:
            return range(self._count)
        status = self._publisher.workers().values()
        return sorted(int(s.name) for s in status if s.state != "lost" and s.name.isdigit())

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        deadline = time.monotonic() + timeout
        self._model = model = _bus_name(weights.model_id)
        ids = [*self.workers()] if workers is None else [*workers]
        connected = self._await_joined(ids, deadline - timeout * MARGIN)
        names = self._names(ids)
        reached = None if workers is None else [n for n in names.values() if n in connected]
        with self._order:
            for worker, name in names.items():
                if reached is None or name in reached:
                    self._firsts.pop(worker, None)  # this send has newer weights
            published = self._publisher.publish_async(
                model,
                weights.tensors,
                workers=reached,
                timeout=deadline - time.monotonic(),
                # Without grace, the receipt reports a lost worker at once, without waiting for its
                # restart.
                settings=Settings(grace=0.0),
            )
        answer: Future[Receipt] = Future()

        def is_published(done: "Future[Receipt]") -> None:
            try:
                answer.set_result(self._renamed(_receipt_of(done), weights.model_id, names))
            except BaseException as error:
                answer.set_exception(error)

        published.add_done_callback(is_published)
        return answer

    def _await_joined(self, ids: Sequence[int], deadline: float) -> frozenset[str]:
        """Wait until each worker has joined once; return the names of all connected workers."""
        while True:
            # read before `connected`, which lacks workers that join and leave
            before = frozenset(self._seen)
            connected = frozenset(self._publisher.workers())
            self._record_joined(connected)
            all_joined = (before | connected).issuperset(self._names(ids).values())
            if all_joined or time.monotonic() >= deadline or self._closed.wait(CHECK_SECONDS):
                return connected

    def _record_joined(self, connected: Iterable[str]) -> None:
        self._seen.update(connected)
        if self._count is not None and str(self._count) in self._seen:
            self._first = 1

    def _names(self, ids: Iterable[int]) -> dict[int, str]:
        """Return each worker's name on the bus, by worker id."""
        return {worker: str(worker + self._first) for worker in ids}

    def _renamed(self, receipt: Receipt, model_id: str, names: Mapping[int, str]) -> Receipt:
        """Return a copy of `receipt` with a row for each worker id, also for missing workers."""
        workers: dict[str, WorkerReceipt] = {}
        for worker, name in names.items():
            row = receipt.workers.get(name)
            if row is None and name not in self._seen:
                text = f"it has not joined at {self._publisher.address}"
                row = WorkerReceipt(name, "behind", None, text)
            elif row is None or (row.state == "left" and self._count is not None):
                row = WorkerReceipt(name, "lost", 0.0, "it has left")
            workers[str(worker)] = replace(row, name=str(worker))
        return replace(receipt, model=model_id, workers=workers)

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        if isinstance(weights, Weights):
            self._model = _bus_name(weights.model_id)
            self._publisher.publish_async(
                self._model,
                weights.tensors,
                require=0,
                timeout=timeout,
                settings=Settings(wait="none"),
            )
        elif weights:
            self._firsts = {worker: own.copied() for worker, own in weights.items()}
            greet = threading.Thread(target=self._greet_each, args=(timeout / len(weights),))
            greet.name, greet.daemon = "weightbus-greet", True
            greet.start()

    def _greet_each(self, share: float) -> None:
        """Publish each worker's first weights when it joins, if no send replaced them."""
        while self._firsts and not self._closed.wait(CHECK_SECONDS):
            connected = self._publisher.workers().keys()
            for worker, name in self._names([*self._firsts]).items():
                with self._order:
                    own = self._firsts.pop(worker, None) if name in connected else None
                    if own is None:
                        continue
                    self._model = model = _bus_name(own.model_id)
                    receipt = self._publisher.publish_async(
                        model, own.tensors, workers=[name], timeout=share
                    )
                with suppress(WeightBusError):  # the next send reports a worker that failed
                    receipt.result()

    def versions(self) -> Mapping[int, int]:
        if self._model is None or self._closed.is_set():
            return {}
        status = self._publisher.workers()
        self._record_joined(status)
        numbers = sorted(int(name) for name in status if name.isdigit())
        return {
            number - self._first: status[str(number)].running[self._model][1]
            for number in numbers
            if self._model in status[str(number)].running
        }

    def close(self) -> None:
        self._closed.set()
        self._publisher.close()


# On a receiver.


class _BusTarget(MemoryTarget):
    """The target of a subscriber that writes versions into a `Destination`."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination, strict=True, cast=True, write=destination.write)
        self._destination = destination

    def fault(self, layout: Layout) -> str:
        return self._destination.fault(layout)

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        return summing(layout, self._destination.model(), names, sums)


class _BusReceiver(Receiver):
    """Receives with a subscriber, which `connect()` makes by calling `join`."""

    def __init__(
        self,
        destination: Destination,
        join: Callable[..., Subscriber],
        settings: Settings,
        *,
        background: bool,
    ) -> None:
        self._destination, self._join, self._background = destination, join, background
        self._settings = settings
        self._joined: Subscriber | None = None

    def connect(self, worker_idx: int | None, timeout: float) -> None:
        if worker_idx is None:
            raise ValueError("worker_idx must be provided via context or kwargs")
        destination = self._destination
        self._joined = self._join(
            {_bus_name(destination.subject.model_id or ""): _BusTarget(destination)},
            name=str(worker_idx),
            settings=replace(
                self._settings,
                on_commit=destination.commit,  # the context may forward the version to its workers
                apply_timeout=min(max(timeout, APPLY_SECONDS), APPLY_SECONDS_MAX),
            ),
        )
        if self._background:
            destination.guard(self._joined.lock, timeout)
            self._joined.start()

    def receive(self, timeout: float) -> Update | None:
        subscriber = self._subscriber()
        if self._background:
            return self._destination.arrivals.take(timeout)
        update = subscriber.receive(timeout)
        return None if update is None else self._destination.arrivals.take(0.0)

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[object]:
        return self._subscriber().reading(timeout)

    def close(self) -> None:
        if self._joined is not None:
            self._joined.close()

    def _subscriber(self) -> Subscriber:
        if self._joined is None:
            raise ClosedError("this receiver has not joined the bus; connect() it first")
        return self._joined


def _bus_name(model_id: str) -> str:
    """Return a model id in which "-" replaces characters that the bus forbids, such as "["."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", model_id)[:128] or "model"


def _receipt_of(done: "Future[Receipt]") -> Receipt:
    """Return the receipt of a finished publish: its result, or that of its PublishError."""
    try:
        return done.result()
    except PublishError as error:
        return error.receipt
