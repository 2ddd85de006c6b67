# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false
"""Implements the trainer's side of vLLM's weight transfer; each rank of a trainer has an engine."""

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...bus.receipt import Receipt
from ...codecs.dtypes import name_of_torch
from ...codecs.layout import Signature
from ..publisher import Publisher
from .server import PauseMode, VllmServers
from .transfers import Counting, Transfers, checkpoint_name, named
from .vllm_plugin import TRAINER, register, require

require(TRAINER)

from vllm.distributed.weight_transfer.base import (  # noqa: E402 - after the check above
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.clients import (  # noqa: E402
    HTTPVLLMWeightSyncClient,
)

if TYPE_CHECKING:
    from typing import Self


log = logging.getLogger("weightbus.serving")


@dataclass
class TrainerInit(TrainerInitInfo):
    """The trainer's settings, for vLLM's `WeightTransferTrainerFactory.trainer_init`.

    Attributes:
        rank: The rank of this trainer process; rank 0 sends.
        address: The publisher's address; servers on other hosts must be able to reach it.
        model: The model's id on the bus.
        deployment: The name of the servers on the bus.
        timeout: Seconds within which every rank must receive the weights, while servers generate.
        pause_timeout: The longest pause, in seconds.
        pause: What happens to running requests during the pause: `keep`, `wait` or `abort`; None:
            the caller pauses the servers, or no pause is needed.
        world_size: The number of the servers' ranks, needed if the client does not know it.
        publisher: An existing publisher to use instead of a new one at `address`.
    """

    backend: ClassVar[str] = "weightbus"

    address: str = "tcp://127.0.0.1:0"
    model: str = "policy"
    deployment: str = "vllm"
    timeout: float = 300.0
    pause_timeout: float = 60.0
    pause: PauseMode | None = "keep"
    world_size: int | None = None
    publisher: Publisher | None = field(default=None, repr=False)


class OwnClient(VllmServers):
    """Wraps the trainer's own client of one server, and adds calls that vLLM's clients lack.

    A call uses the client's method of that name if there is one, and with it the client's headers,
    versions and timeouts; otherwise the client's `_post`, which vLLM's own clients have; otherwise
    `VllmServers`.

    Args:
        client: The client; its `base_url` is the server's URL.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client.base_url)
        self._own = client

    def init_weight_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        """Make every rank join."""
        self._own.init_weight_transfer_engine(dict(init_info))

    def start_weight_update(self) -> None:
        """Begin a session."""
        self._own.start_weight_update()

    def update_weights(self, update_info: Mapping[str, object] | list[dict[str, Any]]) -> None:
        """Make every rank get the version."""
        self._own.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load the version and end the session; the client may replace `weight_version`."""
        self._own.finish_weight_update(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        """Set the version label of the server."""
        self._call(
            "update_weight_version",
            new_version,
            path="update_weight_version",
            json={"new_version": new_version},
        )

    def pause(self, mode: PauseMode = "keep") -> None:
        """Pause generation."""
        self._since = time.monotonic()
        self._call("pause", mode, path=f"pause?mode={mode}")

    def resume(self) -> None:
        """Resume generation."""
        self._call("resume", path="resume")
        self.paused_s, self._since = time.monotonic() - self._since, 0.0

    def _call(self, name: str, *given: Any, path: str, json: dict[str, Any] | None = None) -> None:
        own, post = getattr(self._own, name, None), getattr(self._own, "_post", None)
        if own is not None:
            own(*given)
        elif post is not None:
            post(path, json)
        else:
            getattr(super(), name)(*given)

    @contextmanager
    def within(self, seconds: float) -> Generator[None]:
        """Return a context manager during which each call is limited to `seconds`."""
        before = getattr(self._own, "timeout", None)
        with super().within(seconds):
            if isinstance(before, int | float):
                self._own.timeout = min(before, max(0.001, seconds))
            try:
                yield
            finally:
                if before is not None:
                    self._own.timeout = before


class WeightbusTrainerEngine(TrainerWeightTransferEngine):
    """Publishes a `WeightSource`, and loads it on vLLM servers.

    Attributes:
        receipt: The receipt of the last `send_weights()`; None on ranks that do not send.
    """

    init_info_cls = TrainerInit

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        init_info: TrainerInit,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self.receipt: Receipt | None = None
        self._close: list[Any] = []
        if not self.is_sender:
            return
        try:
            self._join(init_info)
        except BaseException:
            self.shutdown()
            raise

    def _join(self, init_info: TrainerInit) -> None:
        """Make every rank of the servers join."""
        publisher, client = init_info.publisher, self.client
        if publisher is None:
            publisher = Publisher(init_info.address)
            self._close.append(publisher)
        servers: Any = client
        if not isinstance(client, Counting) and hasattr(client, "base_url"):
            plain = type(client) is HTTPVLLMWeightSyncClient
            servers = VllmServers(client.base_url) if plain else OwnClient(client)
            self._close.append(servers)
        self._transfers = Transfers(
            publisher,
            servers,
            model=init_info.model,
            deployment=init_info.deployment,
            ranks=init_info.world_size,
            timeout=init_info.timeout,
            pause_timeout=init_info.pause_timeout,
            pause=init_info.pause,
        )
        self._transfers.join(_signatures(self.source))

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInit,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> "Self":
        """Return an engine once every rank of the servers has joined this trainer."""
        if source is None:
            raise ValueError("weightbus publishes whole models: give it a WeightSource as source=")
        if hasattr(source, "implements_iter_full") and not source.implements_iter_full():
            raise TypeError(
                f"weightbus publishes full tensors, and {type(source).__name__} has no iter_full()"
            )
        return cls(client=client, source=source, init_info=init_info)

    def send_weights(self) -> None:
        """Publish the weights, and return when every rank of every server runs them.

        Raises:
            PublishError: Some ranks do not run them; the message names these ranks with the
                reasons.
        """
        if not self.is_sender:
            for _ in _full(self.source):
                pass  # iterate, since each rank must take part in gathering the tensors
            return
        self.receipt = self._transfers.send(named(_full(self.source)))
        self._transfers.resume()

    def shutdown(self) -> None:
        """Resume the servers, and close what this engine created; only log errors."""
        if hasattr(self, "_transfers"):
            try:
                self._transfers.resume()
            except Exception as error:
                log.warning("%s", error)
        for each in self._close:
            each.close()


def _full(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over (name, full tensor) pairs of a source."""
    full: Iterable[tuple[str, torch.Tensor]] = (
        source.iter_full() if hasattr(WeightSource, "iter_full") else source
    )
    return iter(full)


def _signatures(source: Any) -> dict[str, Signature]:
    """Return the dtype and shape of each tensor of a source, by its name in checkpoints.

    The source's `metadata` lists these; before vLLM 0.33, `metadata` is a method.
    """
    metadata: Any = source.metadata() if callable(source.metadata) else source.metadata
    return {
        checkpoint_name(each.name): (name_of_torch(each.dtype), tuple(each.shape))
        for each in metadata
    }


register()  # vLLM calls this function only in its own processes, and not in a trainer's
