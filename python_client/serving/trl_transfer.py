"""Publishes the weights of TRL's asynchronous trainers, as their argument `weight_transfer=`.

TRL calls `pause`, `send_weights` and `resume`, in this order, in the training thread. If `pause`
paused the servers, they would be paused while weights are in transit, and after an error TRL does
not call `resume`. So `pause` does nothing, and `send_weights` has three steps:

    publish    the weights are copied, sent and verified while all workers generate
    commit     all workers have the weights; the user's own workers apply them before the next batch
    servers    are paused, load the weights, and are resumed even after an error (`transfers`)

After the commit, `send_weights` does not wait until the user's own workers apply the weights. These
workers may be busy with a long batch. Or they may wait until the trainer fetches samples, but the
trainer does so only after `send_weights` returns. If such a worker fails to load a version, the
next `send_weights` raises the error.
"""

import inspect
import logging
import queue
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Unpack, cast

from ...bus.deadline import ANSWER_SECONDS
from ...bus.errors import ClosedError, PublishError
from ...bus.receipt import Receipt
from ...codecs.dtypes import name_of_torch
from .. import checks
from ..publisher import Publisher
from ..publishing.options import PublishOptions
from .server import PauseMode, VllmServers
from .transfers import RESUME_SECONDS, Transfers, named

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightbus.trl")

Tensors = dict[str, "torch.Tensor"]
STAGE_SECONDS = 300.0
PAUSE_SECONDS = 60.0
# Seconds to wait until workers apply the last update of a training; most batches take less.
LINGER_SECONDS = 60.0


class WeightTransfer:
    """Publishes the weights of TRL's `AsyncGRPOTrainer` or `AsyncDistillationTrainer`.

        trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer("tcp://127.0.0.1:5555"))

    Each update is a version that no worker applies before all workers have it. The trainer's log
    shows, as `weightbus/...`, how long updates take and how far workers are behind.

    Args:
        publisher: A publisher, which stays open, or the address of a new publisher, which closes
            when the training is over.
        model: The model's id on the bus.
        server: URLs of vLLM servers that run weightbus's engine. A server is paused only while it
            loads a version that it has received. If empty, your own workers subscribe.
        pause: What happens to a server's requests during the pause: `keep`, `wait` or `abort`, as
            in `VllmServer.pause`.
        pause_timeout: The longest pause, in seconds.
        deployment: The name of the servers on the bus.
        timeout: Seconds within which all workers must receive a version.
        linger: Seconds that `destroy()` waits for your own workers to apply the last update.
        **options: Further keywords of `Publisher.publish`. Each version must reach all of your own
            workers that are alive. `expect=2` ends the training if fewer than two workers are
            alive.

    Attributes:
        publisher: The publisher; None until the training begins if an address was given.
        receipt: The receipt of the last finished update, with the result of each worker.
        metrics: The values that the last update added to the trainer's log.

    Raises:
        ModuleNotFoundError, ValueError: httpx is not installed, or a `server` is not a URL.
        TypeError: One of the options cannot be combined with servers.
    """

    __module__ = "weightbus.trl"

    def __init__(
        self,
        publisher: Publisher | str,
        model: str = "policy",
        *,
        server: str | Iterable[str] = (),
        pause: PauseMode = "keep",
        pause_timeout: float = PAUSE_SECONDS,
        deployment: str = "vllm",
        linger: float = LINGER_SECONDS,
        **options: Unpack[PublishOptions],
    ) -> None:
        self._given, self._model = publisher, model
        self._timeout = options.setdefault("timeout", STAGE_SECONDS)
        checks.seconds(self._timeout, "timeout", positive=True)
        self._options: PublishOptions = {"commit": "together", "require": "alive", **options}
        self._pause: PauseMode = pause
        self._linger = checks.seconds(linger, "linger")
        self._deployment = deployment
        self._pause_timeout = checks.seconds(pause_timeout, "pause_timeout", positive=True)
        urls = [server] if isinstance(server, str) else [*server]
        unknown = options.keys() - {"timeout", "metadata"} if urls else set[str]()
        if unknown:
            raise TypeError(
                f"with servers, all of their ranks get each version: leave out {', '.join(unknown)}"
            )
        self._servers = VllmServers(urls) if urls else None
        self._transfers: Transfers | None = None
        self._pending: list[Future[Receipt]] = []  # publishes that workers may not have applied
        self._version = 0  # number of the last version that all workers have received
        self.publisher = publisher if isinstance(publisher, Publisher) else None
        self.receipt: Receipt | None = None
        self.metrics: dict[str, float] = {}

    # Called by TRL.

    def init_weight_transfer(self) -> None:
        """Bind the publisher, and ask the servers for the names of their ranks.

        Raises:
            AddressError: The publisher cannot be bound.
            ServerError: A server does not answer, or lacks the routes of a transfer.
        """
        if self.publisher is None:
            self.publisher = Publisher(str(self._given))
            log.info("publishing %s at %s", self._model, self.publisher.address)
        if self._servers is not None:
            self._transfers = Transfers(
                self.publisher,
                self._servers,
                model=self._model,
                deployment=self._deployment,
                timeout=self._timeout,
                pause_timeout=self._pause_timeout,
                pause=self._pause,
            )

    def pause(self) -> None:
        """Do nothing: servers must generate until they have received the weights."""

    def send_weights(self, iterator: "Iterator[tuple[str, torch.Tensor]]") -> None:
        """Publish weights; return when all workers have received and all servers have loaded them.

        Args:
            iterator: Pairs of a tensor's name and the tensor.

        Raises:
            PublishError: Some workers did not get the weights, or failed to load these or earlier
                weights; the message names the workers with the reasons.
            StateError: Two tensors have the same name, or the weights cannot be sent.
            ServerError: A server does not answer.
            DeadlineError: The weights were not copied in time.
        """
        if self.publisher is None:
            raise ClosedError("send_weights() was called before init_weight_transfer()")
        trainer = _trainer_of(iterator)  # before the iterator is exhausted
        weights, began = named(iterator), time.monotonic()
        behind, metadata = self._behind(self.publisher), self._metadata_of(trainer)
        if self._transfers is None:
            lags = self._publish(self.publisher, weights, metadata)
        else:
            lags = self._serve(self._transfers, weights, metadata)
        self.metrics = {
            "weightbus/version_max": float(self._version),
            "weightbus/update_s": time.monotonic() - began,
            "weightbus/workers": float(len(behind)),
            "weightbus/lag_versions_max": float(max(behind, default=0)),
            **({"weightbus/lag_s_max": max(lags)} if lags else {}),
            **({} if self._servers is None else {"weightbus/paused_s": self._servers.paused_s}),
        }
        log_queue = getattr(getattr(trainer, "rollout_worker", None), "metrics_queue", None)
        if log_queue is not None:
            with suppress(queue.Full):
                log_queue.put_nowait(self.metrics)

    def resume(self) -> None:
        """Resume servers that are still paused, because they could not be resumed after the load.

        Raises:
            ServerError: A server does not resume.
        """
        if self._servers is not None:
            with self._servers.within(RESUME_SECONDS):
                self._servers.resume_late()

    def destroy(self) -> None:
        """Finish pending updates, resume servers, and close. Errors are logged and not raised.

        A busy worker applies the last update after its batch. So this waits, at most `linger`
        seconds, until each live worker has applied the update; the log names workers that have not.
        """
        for end in (self._drain, self._settle, self.resume):
            try:
                end()
            except Exception as error:
                log.warning("%s", error)
        if self._servers is not None:
            self._servers.close()
        if self.publisher is not None and self.publisher is not self._given:
            self.publisher.close()
            self.publisher = None

    # Sending.

    def _serve(
        self, transfers: Transfers, weights: Tensors, metadata: Mapping[str, str]
    ) -> list[float]:
        """Load weights with this metadata on the servers; return each rank's seconds for it."""
        if self._version == 0:
            transfers.join({n: (name_of_torch(t.dtype), (*t.shape,)) for n, t in weights.items()})
        self.receipt = transfers.send(weights, metadata)
        self._version = self.receipt.version
        log.info("%s", self.receipt)
        return _lags(self.receipt)

    def _publish(
        self, publisher: Publisher, weights: Tensors, metadata: Mapping[str, str]
    ) -> list[float]:
        """Publish weights with this metadata; return the seconds of applies that have ended."""
        lags = self._settle()
        options: PublishOptions = {**self._options, "metadata": metadata}
        future = publisher.publish_async(self._model, weights, **options)
        committed = publisher.wait_for_commit(future, self._timeout + ANSWER_SECONDS)
        if committed is None:
            # If workers have not received the weights, this raises an error that names them.
            self.receipt = future.result(ANSWER_SECONDS)
            committed = self.receipt.epoch, self.receipt.version
        self._pending.append(future)
        self._version = committed[1]
        return lags + self._settle()

    def _settle(self) -> list[float]:
        """Remove finished updates from `_pending`; return how many seconds each apply took.

        Raises:
            PublishError: A worker failed to load an update.
        """
        finished = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in finished]
        lags = list[float]()
        for future in finished:
            error = future.exception()
            if error is None:
                self.receipt = future.result()
                log.info("%s", self.receipt)
            elif isinstance(error, PublishError) and not error.receipt.in_state("failed"):
                self.receipt = error.receipt
                log.warning("%s", error)  # a worker that is late or restarts gets the next update
            else:
                raise error
            lags += _lags(self.receipt)
        return lags

    def _drain(self) -> None:
        """Wait up to `linger` seconds until pending updates are applied, then cancel the others."""
        late = wait(self._pending, self._linger).not_done
        if late and self.publisher is not None:
            for future in late:
                self.publisher.give_up(
                    future, f"not applied within {self._linger:g} s of the end of training"
                )
            wait(late, ANSWER_SECONDS)

    def _behind(self, publisher: Publisher) -> list[int]:
        """Return for each worker how far it is behind the last version that all have received."""
        known = [w for w in publisher.workers().values() if w.state != "lost"]
        runs = [w.running.get(self._model, (0, 0)) for w in known if self._model in w.models]
        return [max(0, self._version - (v if e == publisher.epoch else 0)) for e, v in runs]

    def _metadata_of(self, trainer: Any) -> dict[str, str]:
        """Return the metadata of a version: the training step, and the user's own metadata."""
        step = getattr(getattr(trainer, "state", None), "global_step", None)
        of_step = {} if step is None else {"step": str(step)}
        return {**of_step, **(self._options.get("metadata") or {})}


def _lags(receipt: Receipt) -> list[float]:
    return [w.seconds for w in receipt.workers.values() if w.state == "applied" and w.seconds]


def _trainer_of(iterator: object) -> Any:
    """Return the trainer whose generator method made this iterator; None for other iterators.

    TRL does not pass the trainer to its `weight_transfer` object, which needs the trainer's step
    and its queue of metrics.
    """
    if not isinstance(iterator, GeneratorType):
        return None
    return inspect.getgeneratorlocals(cast("GeneratorType[Any]", iterator)).get("self")
