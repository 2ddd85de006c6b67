"""Weights out of TRL's asynchronous trainers: what they take as `weight_transfer=`.

TRL calls `pause`, `send_weights` and `resume`, in this order, in the thread that trains; so a
server that `pause` stops stands still while the weights travel, and `resume` is not called where
they did not arrive. Here `pause` does nothing, and `send_weights` has three steps:

    publish    the weights are copied; they travel, and are verified, while everybody generates
    commit     all have them: workers of your own take them before their next batch
    servers    are paused now, load what they have, and are resumed whatever happens (`transfers`)

Workers of your own are not waited for once they have a version. They might be at a long batch; or
wait for the trainer to take what they have generated, which it does only once this returns. One
that fails to load a version ends the training when the next one is sent.
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
from ..options import PublishOptions
from ..publisher import Publisher
from .server import PauseMode, VllmServers
from .transfers import RESUME_SECONDS, Transfers, named

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightbus.trl")

Tensors = dict[str, "torch.Tensor"]
STAGE_SECONDS = 300.0
PAUSE_SECONDS = 60.0
LINGER_SECONDS = 60.0  # for the last update of a training: a batch of most workers takes less


class WeightTransfer:
    """Publishes what TRL's `AsyncGRPOTrainer` or `AsyncDistillationTrainer` trains.

        trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer("tcp://127.0.0.1:5555"))

    Each update is a version that nobody applies before all have it. The trainer's log has what it
    took, and how far workers are behind, as `weightbus/...`.

    Args:
        publisher: A publisher, which stays open; or an address to bind one to, until the training
            is over.
        model: What the model is called on the bus.
        server: URLs of vLLM servers that run weightbus's engine. Each is paused only while it loads
            what it has received. Without any, workers of your own subscribe.
        pause: What becomes of a server's requests meanwhile: `keep`, `wait` or `abort`.
        pause_timeout: Seconds that a server may stand still.
        deployment: What the servers are called on the bus.
        timeout: Seconds until all have a version.
        linger: Seconds that `destroy()` waits for workers of your own to take the last update.
        **options: Further keywords of `Publisher.publish`. Of workers of your own, all that live
            must get each version; `expect=2` ends the training if fewer than two do.

    Attributes:
        publisher: The publisher, once the training has begun.
        receipt: Of the last update that is over: what each worker did with it, and when.
        metrics: What the last update has put into the trainer's log.

    Raises:
        ModuleNotFoundError, ValueError: A `server` cannot be called, or is no URL.
        TypeError: An option makes no sense with servers.
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
        self._open: list[Future[Receipt]] = []  # updates that not all workers have applied yet
        self._version = 0  # the last that all had
        self.publisher = publisher if isinstance(publisher, Publisher) else None
        self.receipt: Receipt | None = None
        self.metrics: dict[str, float] = {}

    # What TRL calls.

    def init_weight_transfer(self) -> None:
        """Bind the publisher, and ask the servers for their ranks.

        Raises:
            AddressError: The publisher cannot be bound.
            ServerError: A server does not answer, or is no vLLM with the routes of a transfer.
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
        """Do nothing: everybody generates until the weights have arrived."""

    def send_weights(self, iterator: "Iterator[tuple[str, torch.Tensor]]") -> None:
        """Publish the weights, and return once all have them; servers run them then.

        Args:
            iterator: Their names and tensors.

        Raises:
            PublishError: Not all have them, or one has failed to load them or those before; it
                says who, and why.
            StateError: Two tensors have one name, or the weights cannot travel.
            ServerError: A server does not answer.
            DeadlineError: The weights were not copied in time.
        """
        if self.publisher is None:
            raise ClosedError("init_weight_transfer() comes before send_weights()")
        trainer = _trainer_of(iterator)  # while it is not over
        weights, began = named(iterator), time.monotonic()
        behind, said = self._behind(self.publisher), self._said(trainer)
        if self._transfers is None:
            lags = self._hand_out(self.publisher, weights, said)
        else:
            lags = self._serve(self._transfers, weights, said)
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
        """Have a server go on that has not done so as soon as it had loaded a version.

        Raises:
            ServerError: It does not.
        """
        if self._servers is not None:
            with self._servers.within(RESUME_SECONDS):
                self._servers.resume_late()

    def destroy(self) -> None:
        """End what was begun, and have no server stand still. It raises nothing: see the log.

        A worker that is at a batch takes the last update after it. So this waits until each that
        lives has taken what was sent, for `linger` seconds at most; the log says who has not.
        """
        for end in (self._await_last, self._settle, self.resume):
            try:
                end()
            except Exception as error:
                log.warning("%s", error)
        if self._servers is not None:
            self._servers.close()
        if self.publisher is not None and self.publisher is not self._given:
            self.publisher.close()
            self.publisher = None

    # How weights go out.

    def _serve(
        self, transfers: Transfers, weights: Tensors, said: Mapping[str, str]
    ) -> list[float]:
        """Have the servers load them; return what that took each of their ranks."""
        if self._version == 0:
            transfers.join({n: (name_of_torch(t.dtype), (*t.shape,)) for n, t in weights.items()})
        self.receipt = transfers.send(weights, said)
        self._version = self.receipt.version
        log.info("%s", self.receipt)
        return _lags(self.receipt)

    def _hand_out(
        self, publisher: Publisher, weights: Tensors, said: Mapping[str, str]
    ) -> list[float]:
        """Have workers stage them; return what it took each to apply those before."""
        lags = self._settle()
        options: PublishOptions = {**self._options, "metadata": said}
        future = publisher.publish_async(self._model, weights, **options)
        committed = publisher.wait_for_commit(future, self._timeout + ANSWER_SECONDS)
        if committed is None:
            self.receipt = future.result(ANSWER_SECONDS)  # it says who has not got them
            committed = self.receipt.epoch, self.receipt.version
        self._open.append(future)
        self._version = committed[1]
        return lags + self._settle()

    def _settle(self) -> list[float]:
        """Take the receipts that are there; return what the updates took each worker.

        Raises:
            PublishError: A worker has failed to load one.
        """
        over = [future for future in self._open if future.done()]
        self._open = [future for future in self._open if future not in over]
        lags = list[float]()
        for future in over:
            error = future.exception()
            if error is None:
                self.receipt = future.result()
                log.info("%s", self.receipt)
            elif isinstance(error, PublishError) and not error.receipt.in_state("failed"):
                self.receipt = error.receipt
                log.warning("%s", error)  # who died, or was held up, gets the next one
            else:
                raise error
            lags += _lags(self.receipt)
        return lags

    def _await_last(self) -> None:
        """Wait until what was sent is taken, or whoever has not taken it is known to be lost."""
        late = wait(self._open, self._linger).not_done
        if late and self.publisher is not None:
            for future in late:
                self.publisher.give_up(future, f"the training is over, for {self._linger:g} s")
            wait(late, ANSWER_SECONDS)

    def _behind(self, publisher: Publisher) -> list[int]:
        """Return of each worker how many versions it is behind the last one that all had."""
        known = [w for w in publisher.workers().values() if w.state != "lost"]
        runs = [w.running.get(self._model, (0, 0)) for w in known if self._model in w.models]
        return [max(0, self._version - (v if e == publisher.epoch else 0)) for e, v in runs]

    def _said(self, trainer: Any) -> dict[str, str]:
        """Return what is said of a version: the step that it is of, beside what was given."""
        step = getattr(getattr(trainer, "state", None), "global_step", None)
        of_step = {} if step is None else {"step": str(step)}
        return {**of_step, **(self._options.get("metadata") or {})}


def _lags(receipt: Receipt) -> list[float]:
    return [w.seconds for w in receipt.workers.values() if w.state == "applied" and w.seconds]


def _trainer_of(iterator: object) -> Any:
    """Return the trainer whose weights these are, if that can be known.

    Nobody tells the object that `weight_transfer=` takes. But what it is to send is a generator
    that is a method of the trainer, which has the step, and the queue for what is to be logged.
    """
    if not isinstance(iterator, GeneratorType):
        return None
    return inspect.getgeneratorlocals(cast("GeneratorType[Any]", iterator)).get("self")
