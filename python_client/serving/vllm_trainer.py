# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false
"""The trainer's side of a transfer: vLLM's trainer engine, one in each rank of the trainer."""

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

from vllm.distributed.weight_transfer.base import (  # noqa: E402 - once it is known to be there
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
    """Where and how a trainer publishes: for vLLM's `WeightTransferTrainerFactory.trainer_init`.

    Attributes:
        rank: This trainer process's; 0 sends.
        address: Where it publishes: servers on other hosts need an address that they can reach.
        model: The model's id on the bus.
        deployment: What the servers are called there.
        timeout: Seconds until every rank has the weights, while the servers generate.
        pause_timeout: Seconds that the servers may stand still then.
        pause: What becomes of running requests meanwhile: `keep`, `wait` or `abort`; None: you
            pause, or need not.
        world_size: How many ranks there are, if the client cannot tell.
        publisher: A publisher of yours, in place of one at `address`.
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
    """A client of the trainer's own, of one server, with what vLLM's clients lack: a pause.

    Its calls are its own, with all that they override: headers, versions, a limit of seconds. What
    it lacks goes by its `_post`, as vLLM's own client has it; else by a call of ours.

    Args:
        client: It; `base_url` is its server.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client.base_url)
        self._own = client

    def init_weight_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        """Have every rank join."""
        self._own.init_weight_transfer_engine(dict(init_info))

    def start_weight_update(self) -> None:
        """Begin a session."""
        self._own.start_weight_update()

    def update_weights(self, update_info: Mapping[str, object] | list[dict[str, Any]]) -> None:
        """Tell the ranks which version it is."""
        self._own.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the session; it says `weight_version` from then on, or what the client makes it."""
        self._own.finish_weight_update(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        """Have it say that it runs `new_version`."""
        self._does(
            "update_weight_version",
            new_version,
            path="update_weight_version",
            json={"new_version": new_version},
        )

    def pause(self, mode: PauseMode = "keep") -> None:
        """Have it generate nothing."""
        self._since = time.monotonic()
        self._does("pause", mode, path=f"pause?mode={mode}")

    def resume(self) -> None:
        """Have it generate again."""
        self._does("resume", path="resume")
        self.paused_s, self._since = time.monotonic() - self._since, 0.0

    def _does(self, name: str, *given: Any, path: str, json: dict[str, Any] | None = None) -> None:
        own, post = getattr(self._own, name, None), getattr(self._own, "_post", None)
        if own is not None:
            own(*given)
        elif post is not None:
            post(path, json)
        else:
            getattr(super(), name)(*given)

    @contextmanager
    def within(self, seconds: float) -> Generator[None]:
        """Give each call in this block at most so many `seconds`."""
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
    """Publishes a `WeightSource`, and has vLLM load it.

    Attributes:
        receipt: Of the last `send_weights()`; None on ranks that do not send.
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
        """Have every rank of the servers join."""
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
        """Have every rank of the servers join this trainer's bus."""
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
            PublishError: A rank does not; it says which and why.
        """
        if not self.is_sender:
            for _ in _full(self.source):
                pass  # what gathers the tensors is done by all ranks
            return
        self.receipt = self._transfers.send(named(_full(self.source)))
        self._transfers.resume()

    def shutdown(self) -> None:
        """End what was made here, and have no server stand still; see the log if one does."""
        if hasattr(self, "_transfers"):
            try:
                self._transfers.resume()
            except Exception as error:
                log.warning("%s", error)
        for each in self._close:
            each.close()


def _full(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over full tensors: `iter_full()` since vLLM 0.33, the source itself before."""
    full: Iterable[tuple[str, torch.Tensor]] = (
        source.iter_full() if hasattr(WeightSource, "iter_full") else source
    )
    return iter(full)


def _signatures(source: Any) -> dict[str, Signature]:
    """Return what the source will yield: `metadata` since vLLM 0.33, `metadata()` before."""
    metadata: Any = source.metadata() if callable(source.metadata) else source.metadata
    return {
        checkpoint_name(each.name): (name_of_torch(each.dtype), tuple(each.shape))
        for each in metadata
    }


register()  # vLLM does so in its own processes, of which a trainer is none
