# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false
"""vLLM's side of a transfer: its weight transfer engine, one in each rank.

`--weight-transfer-config '{"backend": "weightbus"}'` has every worker of vLLM's make one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .rank import Join, Rank, Version
from .vllm_plugin import WORKER, require, unsupported

require(WORKER)

from vllm.distributed.weight_transfer.base import (  # noqa: E402 - once it is known to be there
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .vllm_loading import LayerwiseLoader  # noqa: E402

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig


@dataclass(frozen=True)
class InitInfo(Join, WeightTransferInitInfo):
    """What a trainer's `init_weight_transfer_engine` says."""


@dataclass(frozen=True)
class UpdateInfo(Version, WeightTransferUpdateInfo):
    """What a trainer's `update_weights` says."""


class WeightbusEngine(WeightTransferEngine):
    """Loads what a trainer publishes; see `rank`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update: ClassVar[bool] = False

    def __init__(
        self,
        config: "WeightTransferConfig",
        vllm_config: "VllmConfig",
        device: "torch.device",
        model: "torch.nn.Module",
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        loader = LayerwiseLoader(model, vllm_config.model_config, vllm_config, device)
        loader.prove()  # no request is here yet
        last = self.parallel_config.rank == self.parallel_config.world_size - 1
        self._rank = Rank(loader, last=last)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a trainer's bus; again, to join another one, or one that was started again."""
        parallel = self.parallel_config
        self._rank.join(init_info, f"dp{parallel.data_parallel_index}-rank{parallel.rank}")

    def start_weight_update(self) -> None:
        """Touch nothing."""
        self._rank.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Wait until the version is here. (vLLM's own needs an accelerator, and waits for it.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Wait until the version is here, and touch nothing."""
        self._rank.update(update_info)

    def finish_weight_update(self) -> None:
        """Load it, if the last update is to have it loaded, and acknowledge it."""
        self._rank.finish()

    def shutdown(self) -> None:
        """Leave the bus."""
        self._rank.leave()


if asked := getattr(WeightbusEngine, "__abstractmethods__", ()):
    raise unsupported(f"asks an engine for {', '.join(sorted(asked))}")
