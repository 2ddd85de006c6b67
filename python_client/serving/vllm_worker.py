# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false
"""Implements the server's side of vLLM's weight transfer.

Each rank of a server with `--weight-transfer-config '{"backend": "weightbus"}'` creates an engine.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .rank import Join, Rank, RankVersion
from .vllm_plugin import WORKER, require, unsupported

require(WORKER)

from vllm.distributed.weight_transfer.base import (  # noqa: E402 - after the check above
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
    """The arguments of a trainer's `init_weight_transfer_engine`."""


@dataclass(frozen=True)
class UpdateInfo(RankVersion, WeightTransferUpdateInfo):
    """The arguments of a trainer's `update_weights`."""


class WeightbusEngine(WeightTransferEngine):
    """Loads the versions of a trainer into the model of one vLLM worker; see `rank`."""

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
        loader.prove()  # before the first request
        last = self.parallel_config.rank == self.parallel_config.world_size - 1
        self._rank = Rank(loader, last=last, parts=self.parallel_config.world_size > 1)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a trainer. vLLM calls this again if the trainer changes or was restarted."""
        parallel = self.parallel_config
        self._rank.join(init_info, f"dp{parallel.data_parallel_index}-rank{parallel.rank}")

    def start_weight_update(self) -> None:
        """Begin a session, which needs no action; see `Rank.start`."""
        self._rank.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage the version. (Overridden, since vLLM's method needs an accelerator.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Stage the version; the model is unchanged."""
        self._rank.update(update_info)

    def finish_weight_update(self) -> None:
        """Load and acknowledge the version that the last update marked, if it marked one."""
        self._rank.finish()

    def shutdown(self) -> None:
        """Leave the bus."""
        self._rank.leave()


if asked := getattr(WeightbusEngine, "__abstractmethods__", ()):
    raise unsupported(f"asks an engine for {', '.join(sorted(asked))}")
