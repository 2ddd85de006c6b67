"""A trainer's transfers to served models: staged while they generate, paused only for the load.

The bus decides and tells: a version is committed once every rank has staged it, and its receipt
says what each rank made of it. The server's calls only say when: they are made once all have it.

    publish together ... all ranks staged it           they generate; nobody has changed anything
    start, update ... each rank holds it, ready        or all are told to give it up
    pause, finish ... all ranks acknowledged           each loads it
    version, resume                                    resumed whatever happened
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...bus.deadline import ANSWER_SECONDS
from ...bus.errors import PublishError
from ...bus.receipt import Receipt
from ...codecs.errors import StateError
from ...codecs.layout import Signature
from ..publisher import Publisher
from .rank import Join, Version
from .server import PauseMode

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightbus.serving")

CANCEL_SECONDS = 5.0  # for a server that is to give a version up
RESUME_SECONDS = 10.0


class Client(Protocol):
    """vLLM's `VLLMWeightSyncClient`: what reaches all ranks of all servers."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@runtime_checkable
class Pausing(Protocol):
    """A client that can also have servers stand still."""

    def pause(self, mode: PauseMode) -> None: ...
    def resume(self) -> None: ...


@runtime_checkable
class Telling(Protocol):
    """A client that can also have servers say which weights they run."""

    def update_weight_version(self, new_version: str) -> None: ...


@runtime_checkable
class Bounded(Protocol):
    """A client whose calls end in time."""

    def within(self, seconds: float) -> AbstractContextManager[None]: ...


@runtime_checkable
class Counting(Protocol):
    """A client that knows its ranks."""

    def ranks(self, deployment: str) -> list[str]: ...


class Transfers:
    """The transfers of one model to the servers of one client.

    Args:
        publisher: Who publishes it, and tells what became of it.
        client: What reaches the servers.
        model: The model's id on the bus.
        deployment: What the servers are called on the bus.
        ranks: How many there are, if the client cannot tell.
        timeout: Seconds until every rank has a version, while the servers generate.
        pause_timeout: Seconds that they may stand still then.
        pause: What becomes of running requests meanwhile; None: the caller pauses.

    Raises:
        ServerError: A server does not answer, or is no vLLM with the routes of a transfer.
    """

    def __init__(
        self,
        publisher: Publisher,
        client: Client,
        *,
        model: str,
        deployment: str,
        ranks: int | None = None,
        timeout: float = 300.0,
        pause_timeout: float = 60.0,
        pause: PauseMode | None = "keep",
    ) -> None:
        self._publisher, self._client = publisher, client
        self._model, self._deployment = model, deployment
        self._timeout, self._pause_timeout = timeout, pause_timeout
        self._pause: PauseMode | None = pause
        self._join: dict[str, Any] = {}
        self._gathered = False  # all ranks were there since they were told to join
        self._names = client.ranks(deployment) if isinstance(client, Counting) else None
        count = ranks if self._names is None else len(self._names)
        if count is None:
            raise ValueError(
                f"{type(client).__name__} cannot tell how many ranks its servers have: say it, "
                "world_size= of the TrainerInit"
            )
        self._count = count

    def join(self, tensors: Mapping[str, Signature]) -> None:
        """Have every rank join; each tries whether it can load such tensors."""
        said = Join(
            address=self._publisher.address,
            model=self._model,
            deployment=self._deployment,
            deadline=self._pause_timeout,
            tensors={name: (dtype, [*shape]) for name, (dtype, shape) in tensors.items()},
        )
        self._join, self._gathered = asdict(said), False
        self._client.init_weight_transfer_engine(self._join)

    def send(self, weights: object, metadata: Mapping[str, str] | None = None) -> Receipt:
        """Publish weights, and have every rank load them.

        Returns:
            The receipt, in which every rank has applied them.

        Raises:
            PublishError: A rank has not; it says which, and why. Unless it says that a model is
                broken, every rank runs the weights that it ran before.
            WorkersMissingError: A rank is not there.
            ServerError: A server does not answer.
        """
        self._gather()
        future = self._publisher.publish_async(
            self._model,
            weights,
            commit="together",
            require=self._count,
            timeout=self._timeout + self._pause_timeout,
            metadata=metadata,
        )
        version = self._publisher.wait_for_commit(future, self._timeout)
        if version is None:
            return future.result(self._pause_timeout + ANSWER_SECONDS)  # it says who has not
        return self._swap(version, future)

    def _gather(self) -> None:
        """Wait until all ranks are there; those of a server that was started again join again."""
        until = time.monotonic() + self._timeout
        if self._gathered and self._missing():
            self._client.init_weight_transfer_engine(self._join)
        while True:
            there = self._there()
            if len(there) >= self._count and not self._missing():
                self._gathered = True
                return
            left = max(0.0, until - time.monotonic())
            self._publisher.wait_for_workers(
                max(self._count, len(there) + 1), timeout=left, model=self._model
            )

    def _there(self) -> list[str]:
        known = self._publisher.workers().values()
        return [w.name for w in known if w.state != "lost" and self._model in w.models]

    def _missing(self) -> set[str]:
        return set(self._names or ()) - set(self._there())

    def _swap(self, version: tuple[int, int], future: Future[Receipt]) -> Receipt:
        """Have what is staged everywhere loaded."""
        until = time.monotonic() + self._pause_timeout
        said = asdict(Version(*version, deadline=self._pause_timeout))
        name = None if isinstance(self._client, Telling) else "{}.{}".format(*version)
        try:
            with ExitStack() as unless_loading:
                unless_loading.push(partial(self._give_up, said, until))
                self._call(self._start, until)
                self._call(partial(self._client.update_weights, said), until)
                if future.done():
                    future.result()
                with self._paused(until):
                    unless_loading.pop_all()
                    self._call(partial(self._client.finish_weight_update, name), until)
                    receipt = future.result(max(0.0, until - time.monotonic()))
                    self._tell(receipt)
        except Exception as error:
            if future.done() and error is future.exception():
                raise
            receipt = self._verdict(future, error)
            self._tell(receipt)
        return receipt

    def _give_up(
        self,
        said: dict[str, Any],
        until: float,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _where: TracebackType | None,
    ) -> None:
        """Have every rank give a version up, of which none has begun to load it."""
        if error is None:
            return
        why = " ".join(str(error).split())[:500]
        end = min(until, time.monotonic() + CANCEL_SECONDS)
        cancel = partial(self._client.update_weights, {**said, "cancel": why})
        for call in (cancel, self._client.finish_weight_update):
            with suppress(Exception):  # it may be what has failed
                self._call(call, end)

    def _tell(self, receipt: Receipt) -> None:
        if isinstance(self._client, Telling):
            self._client.update_weight_version(f"{receipt.epoch}.{receipt.version}")

    def _start(self) -> None:
        try:
            self._client.start_weight_update()
        except Exception as error:
            if "already" not in str(error):
                raise
            log.warning("a session was left open, and is ended without loading anything")
            with suppress(Exception):
                self._client.finish_weight_update()
            self._client.start_weight_update()

    def _call(self, call: Callable[[], None], until: float) -> None:
        left, client = until - time.monotonic(), self._client
        with client.within(left) if isinstance(client, Bounded) else nullcontext():
            call()

    @contextmanager
    def _paused(self, until: float) -> Generator[None]:
        client: Client = self._client
        mode = self._pause
        if mode is None or not isinstance(client, Pausing):
            yield
            return
        resume = partial(self._call, client.resume)
        try:
            self._call(partial(client.pause, mode), until)
            yield
        except BaseException as error:
            try:
                resume(time.monotonic() + RESUME_SECONDS)
            except Exception as stays:
                error.add_note(f"The server is still paused, POST /resume to it: {stays}")
            raise
        resume(time.monotonic() + RESUME_SECONDS)

    def _verdict(self, future: Future[Receipt], error: Exception) -> Receipt:
        """Return what the bus says of a version whose session failed: its word counts.

        Raises:
            PublishError: A rank does not run it; why that is, and why the session failed.
        """
        try:
            receipt = future.result(self._pause_timeout + ANSWER_SECONDS)
        except PublishError as verdict:
            said = str(error) or f"not all ranks have acknowledged in {self._pause_timeout:g} s"
            raised = PublishError(f"{said}; {verdict}", verdict.receipt)
            for note in getattr(error, "__notes__", ()):
                raised.add_note(note)
            raise raised from error
        log.warning(
            "all ranks run version %s, although a server failed: %s", receipt.version, error
        )
        return receipt


def checkpoint_name(name: str) -> str:
    """Return a name as checkpoints have it: wrappers put words of their own between."""
    return name.replace("_orig_mod.", "").removeprefix("module.")  # of compile(), of DDP


def named(pairs: "Iterable[tuple[str, torch.Tensor]]") -> "dict[str, torch.Tensor]":
    """Return tensors by the names that checkpoints have: wrappers put words of their own between.

    Raises:
        StateError: Two tensors have one name.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        short = checkpoint_name(name)
        if short in weights:
            raise StateError(f"{name}: there is another {short}: publish each tensor once")
        weights[short] = _held(tensor.detach())
    return weights


def _held(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a tensor that may be kept: the whole model may not fit on one device of several."""
    if tensor.device.type == "cpu":
        return tensor
    from torch import distributed

    gathered = distributed.is_available() and distributed.is_initialized()
    return tensor.cpu() if gathered and distributed.get_world_size() > 1 else tensor
